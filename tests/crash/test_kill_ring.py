"""A process is killed at each instruction of each call of a ring: what its calls had returned is there once, the rest
whole or not at all, and the whole capacity is free again.
"""

import pytest


@pytest.mark.parametrize(
    "call",
    ["try_push", "first_push", "push_many", "try_pop", "pop_many", "claim_and_ack", "claim_and_release", "close"],
)
def test_a_kill_at_any_instruction_loses_doubles_and_blocks_nothing(campaign, call):
    campaign.kill("ring", call)


@pytest.mark.parametrize("call", ["rescue", "rescue_of_batches", "repair"])
def test_a_rescuer_killed_at_any_instruction_is_rescued_itself(campaign, call):
    campaign.kill("ring", call)


@pytest.mark.parametrize("call", ["rescue", "rescue_of_batches", "repair"])
def test_a_rescuer_stopped_at_any_instruction_does_no_harm_when_it_goes_on(campaign, call):
    campaign.kill_beside_a_stopped_one("ring", call)
