"""A process is killed or stopped at each instruction in which it takes or gives back a slot of a heartbeat table."""

import pytest


@pytest.mark.parametrize("call", ["register", "register_among_the_dead", "unregister"])
def test_a_kill_at_any_instruction_leaves_the_slot_to_others(campaign, call):
    campaign.kill("table", call)


@pytest.mark.parametrize("call", ["register", "register_among_the_dead", "unregister"])
def test_no_slot_has_two_holders_where_one_was_stopped_at_any_instruction(campaign, call):
    campaign.stop("table", call)
