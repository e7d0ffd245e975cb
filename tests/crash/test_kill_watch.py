"""The leader that moves on the work of the lapsed and the overdue, and a client that cancels jobs which run, is killed or stopped
at each instruction: the next one goes on, every job is answered once, and every cell, place, block and slot is free again.
"""

import pytest


@pytest.mark.parametrize("call", ["lapse", "overdue", "cancel_running"])
def test_a_leader_killed_at_any_instruction_is_followed_by_the_next_one(campaign, call):
    campaign.kill("watch", call)


@pytest.mark.parametrize("call", ["lapse", "overdue", "cancel_running"])
def test_a_leader_stopped_at_any_instruction_does_no_harm_when_it_goes_on_beside_the_next_one(campaign, call):
    campaign.stop("watch", call)


@pytest.mark.parametrize(
    "call",
    [
        *(
            "submit",
            "submit_block",
            "submit_to_full_ring",
            "recv",
            "recv_block",
            "recv_letter",
            "cancel",
            "close",
            "claim",
        ),
        *(
            "claim_and_start",
            "serve",
            "reply",
            "reply_block",
            "ack",
            "release",
            "release_to_full_ring",
            "retry_dead",
            "drop_dead",
        ),
        *("rescue", "rescue_of_clients", "repair"),
        *("submit_due", "submit_due_block", "cancel_parked", "park", "park_charged", "park_unknown", "take_parked"),
        "answer_unknown",
    ],
)
def test_the_work_of_one_who_was_stopped_for_long_at_any_instruction_is_moved_on(campaign, call):
    campaign.stop("watch", f"lapsing_{call}")
