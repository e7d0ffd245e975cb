"""A process is stopped at instructions of each call, ten times the capacity goes past it, and then it goes on: nothing is
torn, lost or doubled, and nobody takes a stopped process for a dead one.
"""

import pytest


@pytest.mark.parametrize(
    "call",
    [
        *("try_push", "first_push", "push_many", "try_pop", "pop_many", "claim_and_ack", "claim_and_release", "close"),
        "repair",
    ],
)
def test_messages_go_past_a_process_stopped_in_a_call_of_a_ring(campaign, call):
    campaign.stop("ring", call)


@pytest.mark.parametrize(
    "call",
    [
        *("push", "first_push", "push_batch", "pop", "pop_last", "pop_back", "close"),
        *("steal", "steal_last", "steal_many", "claim_and_ack", "claim_and_release"),
    ],
)
def test_messages_go_past_a_process_stopped_in_a_call_of_a_deque(campaign, call):
    campaign.stop("deque", call)


def test_a_steal_that_was_stopped_says_empty_only_where_nothing_waited(campaign):
    # what matters lies between two loads, which change nothing
    campaign.stop("deque", "steal_moved", others=80)


@pytest.mark.parametrize(
    "call",
    [
        *("insert", "first_insert", "insert_again", "insert_into_full", "overwrite", "delete", "pop", "setdefault"),
        *("compare_and_swap", "get", "items", "rebuild", "close"),
        *("insert_block", "overwrite_block", "overwrite_with_block", "delete_block", "pop_block", "setdefault_block"),
        *("compare_and_swap_block", "get_block", "items_block", "rebuild_block"),
    ],
)
def test_values_and_generations_go_past_a_process_stopped_in_a_call_of_a_map(campaign, call):
    campaign.stop("map", call)


def test_a_writer_that_was_stopped_frees_what_a_dead_one_had_replaced(campaign):
    campaign.stop("map", "insert_replaced")


@pytest.mark.parametrize(
    "call",
    [
        *("submit", "submit_block", "submit_to_full_arena", "submit_to_full_ring", "first_call", "recv", "recv_block"),
        *("recv_letter", "cancel", "close", "repair", "release_to_full_ring"),
        *("claim", "claim_and_start", "serve", "reply", "reply_block", "ack", "release", "retry_dead", "drop_dead"),
        *("drop_dead_beside_another", "submit_due", "submit_due_block", "cancel_parked", "park", "park_charged"),
        *("park_unknown", "answer_unknown", "take_parked"),
        *("recv_kept_block", "close_kept", "reply_kept", "reply_kept_to_gone", "read_kept", "forget"),
        *("read_forgotten", "read_forgotten_block"),
        *("retry", "rest", "leave_to_others", "submit_pieces", "reply_in_pieces"),
    ],
)
def test_jobs_go_past_a_process_stopped_in_a_call_of_a_queue(campaign, call):
    campaign.stop("queue", call)


def test_a_reply_that_was_stopped_while_its_client_died_reaches_nobody_else(campaign):
    campaign.stop("queue", "reply_to_gone")
