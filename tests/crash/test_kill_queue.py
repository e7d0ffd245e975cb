"""A process is killed at each instruction of each call of a queue: every job handed in runs, every result reaches a living
client once, and every cell, place, block and slot is free again.
"""

import pytest


@pytest.mark.parametrize(
    "call",
    [
        *("submit", "submit_block", "submit_to_full_arena", "submit_to_full_ring", "recv", "recv_block", "recv_letter"),
        *("cancel", "first_call", "first_call_among_the_dead", "submit_due", "submit_due_block", "cancel_parked"),
        *("submit_among_expired", "submit_pieces"),
    ],
)
def test_a_client_killed_at_any_instruction_loses_no_job(campaign, call):
    campaign.kill("queue", call)


@pytest.mark.parametrize(
    "call",
    [
        *(
            "claim",
            "claim_and_start",
            "start_last",
            "serve",
            "reply",
            "reply_block",
            "ack",
            "release",
            "release_to_full_ring",
        ),
        *("park", "park_charged", "park_unknown", "answer_unknown", "take_parked"),
        *("retry", "rest", "leave_to_others", "reply_in_pieces"),
    ],
)
def test_a_worker_killed_at_any_instruction_loses_no_job_and_doubles_no_result(campaign, call):
    campaign.kill("queue", call)


def test_a_handle_killed_while_it_closes_leaves_its_claims_to_others(campaign):
    campaign.kill("queue", "close")


@pytest.mark.parametrize("call", ["rescue", "rescue_of_clients", "rescue_of_parked", "rescue_of_kept", "repair"])
def test_a_rescuer_killed_at_any_instruction_is_rescued_itself(campaign, call):
    campaign.kill("queue", call)


@pytest.mark.parametrize("call", ["rescue", "rescue_of_clients", "rescue_of_parked", "rescue_of_kept", "repair"])
def test_a_rescuer_stopped_at_any_instruction_does_no_harm_when_it_goes_on(campaign, call):
    campaign.kill_beside_a_stopped_one("queue", call)


@pytest.mark.parametrize("call", ["retry_dead", "drop_dead"])
def test_a_dead_letter_is_a_letter_or_waits_again_after_any_kill(campaign, call):
    campaign.kill("queue", call)


@pytest.mark.parametrize(
    "call", ["recv_kept", "recv_kept_block", "close_kept", "reply_kept", "reply_kept_to_gone", "read_kept", "forget"]
)
def test_a_result_is_kept_until_it_is_forgotten_after_any_kill(campaign, call):
    campaign.kill("queue", call)
