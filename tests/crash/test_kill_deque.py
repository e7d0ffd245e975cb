"""A process is killed at each instruction of each call of a deque: what its calls had returned is there once, the rest whole
or not at all, batches too, and the whole capacity is free again for the next owner.
"""

import pytest


@pytest.mark.parametrize(
    "call", ["push", "first_push", "push_batch", "push_over_stale", "pop", "pop_last", "pop_back", "close"]
)
def test_an_owner_killed_at_any_instruction_leaves_the_deque_to_the_next(campaign, call):
    campaign.kill("deque", call)


@pytest.mark.parametrize("call", ["steal", "steal_last", "steal_many", "claim_and_ack", "claim_and_release"])
def test_a_thief_killed_at_any_instruction_loses_doubles_and_blocks_nothing(campaign, call):
    campaign.kill("deque", call)


@pytest.mark.parametrize("call", ["take_over", "take_over_pop", "push_after_pop"])
def test_one_killed_while_it_takes_a_dead_owners_place_leaves_it_to_the_next(campaign, call):
    campaign.kill("deque", call)


def test_a_rescuer_killed_at_any_instruction_is_rescued_itself(campaign):
    campaign.kill("deque", "rescue")


def test_a_rescuer_stopped_at_any_instruction_does_no_harm_when_it_goes_on(campaign):
    campaign.kill_beside_a_stopped_one("deque", "rescue")
