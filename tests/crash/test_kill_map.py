"""A process is killed at each instruction of each call of a map: the key that it was changing has the old value or the new one,
all others what they had, and the whole capacity is free again, in keys and in blocks.
"""

import pytest


@pytest.mark.parametrize(
    "call",
    [
        *("insert", "first_insert", "insert_again", "insert_into_full", "insert_behind_stopped", "overwrite"),
        *("overwrite_in_full", "delete", "pop", "setdefault", "compare_and_swap", "close"),
        *("insert_block", "insert_into_full_arena", "overwrite_block", "overwrite_with_block", "delete_block"),
        *("pop_block", "setdefault_block", "compare_and_swap_block"),
    ],
)
def test_a_writer_killed_at_any_instruction_leaves_the_old_value_or_the_new_one(campaign, call):
    campaign.kill("map", call)


@pytest.mark.parametrize("call", ["rebuild", "repair", "rebuild_block", "repair_block"])
def test_one_killed_in_a_rebuild_leaves_every_key_to_the_next(campaign, call):
    campaign.kill("map", call)


@pytest.mark.parametrize("call", ["rescue", "rescue_block"])
def test_a_rescuer_killed_at_any_instruction_is_rescued_itself(campaign, call):
    campaign.kill("map", call)


@pytest.mark.parametrize("call", ["rebuild", "rescue", "rebuild_block", "rescue_block"])
def test_one_stopped_at_any_instruction_does_no_harm_when_it_goes_on(campaign, call):
    campaign.kill_beside_a_stopped_one("map", call)
