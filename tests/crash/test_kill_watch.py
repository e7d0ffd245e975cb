"""The leader that moves on the work of the lapsed and the overdue is killed or stopped at each instruction: the next one goes
on, every job is answered once, and every cell, place, block and slot is free again.
"""

import pytest


@pytest.mark.parametrize("call", ["lapse", "overdue"])
def test_a_leader_killed_at_any_instruction_is_followed_by_the_next_one(campaign, call):
    campaign.kill("watch", call)


@pytest.mark.parametrize("call", ["lapse", "overdue"])
def test_a_leader_stopped_at_any_instruction_does_no_harm_when_it_goes_on_beside_the_next_one(campaign, call):
    campaign.stop("watch", call)
