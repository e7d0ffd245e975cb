"""Worker loops that run only so many jobs of a handler at one time, and what may happen between a claim and its place."""

import pytest

from subetha.errors import ExecutionError
from subetha.layout import STATE_SHIFT, CellState
from subetha.pass_registry import Pass, PassRegistry
from subetha.scheduler import WorkerLoop

WAIT_S = 60


@pytest.fixture
def limited():
    registry = PassRegistry()
    return registry, registry.register_named("limited", bytes.upper, max_concurrency=1)


def test_a_malformed_job_is_answered_as_ever(make, files_of, limited):
    registry, closure_id = limited
    queue, handle = make(), make.open()
    loop = WorkerLoop(handle.submit_side, registry=registry, routes=True)
    job_id = queue.submit(Pass(closure_id, b"abc"))
    cells = files_of(queue.path).cells
    cells["job_length"][cells["job_id"] == job_id] -= 1
    assert loop.serve_one()
    answer = queue.recv(WAIT_S).result
    assert isinstance(answer, ExecutionError)
    assert "malformed" in str(answer)
    assert loop.malformed == 1
    assert handle.take_place(closure_id, 1) == 0, "its place is free"


def test_a_claim_that_is_taken_away_before_it_is_left_to_others_harms_nobody(make, files_of, limited):
    registry, closure_id = limited
    queue, handle = make(), make.open()
    cells = files_of(queue.path).cells
    side = handle.submit_side

    def stopped_for_long(*_):
        taken = cells["word"] >> STATE_SHIFT & 0xF == CellState.TAKEN
        cells["word"][taken] += (int(CellState.FENCED) - int(CellState.TAKEN)) << STATE_SHIFT

    side.take_place = stopped_for_long
    loop = WorkerLoop(side, registry=registry, routes=True)
    queue.submit(Pass(closure_id))
    assert not loop.serve_one()
    assert queue.stats().states == {"FREE": 16}
    side.take_place = handle.take_place
    queue.submit(Pass(closure_id, b"next"))
    loop = WorkerLoop(side, registry=registry, routes=True)
    assert loop.serve_one()
    assert queue.recv(WAIT_S).result == b"NEXT"
