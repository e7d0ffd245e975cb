"""What the timer of a queue's leader does, under the stepper: it moves on the work of those who live and do not get on.

`JobQueue._watch` is one look of that timer. The workers that have lapsed stay stopped until all their jobs are answered; then
they go on, and have to find that their claims were taken away.
"""

import time

import queue_calls
from census import QueueCensus, nothing_left, states_of
from queue_calls import (
    FALLEN,
    LONG,
    NEVER,
    ONCE,
    PATIENCE_S,
    PERHAPS,
    Held,
    QueueStage,
    answer,
    make_template,
    named,
)
from queue_files import QueueFiles

from subetha._core import decode_submit, encode_result
from subetha.errors import TransportError
from subetha.layout import LINES_OFFSET, POOL_LINES, TABLE_LINES, CellState

__all__ = ["CALLS", "DYING", "FALLEN", "make_template"]

ONCE_OR_TWICE = {1, 2}
LATE_EPOCHS = 10


class Leading(QueueStage):
    """Whoever leads, and the time that goes by for those who are stopped."""

    stopped_pid = None

    def table_lines(self):
        return (
            QueueFiles(self.directory)
            .bytes("table")[LINES_OFFSET : LINES_OFFSET + TABLE_LINES.itemsize]
            .view(TABLE_LINES)
        )

    def take_the_lead(self):
        """As whoever finds the leader silent does, a new term."""
        lines = self.table_lines()
        lines["leader"] = ((int(lines["leader"][0]) >> 16) + 1) << 16 | (self.queue.slot + 1)

    def silence(self):
        """Time goes by, and those who are stopped do not beat."""
        self.let_time_go_by({self.stopped_pid, *(tracee.pid for tracee in self.silent)})

    def let_time_go_by(self, silent):
        records, lines = QueueFiles(self.directory).records, self.table_lines()
        epoch = int(lines["epoch"][0]) + LATE_EPOCHS
        for record in records:
            if int(record["pid"]) not in silent:
                record["last_seen_epoch"] = epoch
        lines["epoch"] = epoch


class Lead(Leading):
    """The victim leads. Others have lapsed: with jobs in hand, with an answer not handed over, in the middle of a release."""

    jobs = {  # noqa: RUF012
        "S0": (40, {"priority": 0}),
        "S1": (LONG, {}),
        "S2": (LONG, {}),
        "S3": (40, {}),
        "S4": (LONG, {}),
    }
    lapses = (
        ("HoldAndAnswer", None),
        ("ReplyFirst", CellState.DONE),
        ("ReleaseFirst", CellState.RETRY),
        ("HoldAndAnswer", None),
        ("HoldAndAnswer", None),
    )
    taken_away = CellState.FENCED

    # ---- the victim ----

    def setup(self):
        super().setup()
        self.queue._watch()
        self.take_the_lead()
        self.queue._watch()

    def call(self):
        self.queue._watch()

    def finish(self, value):
        words = QueueCensus(self.directory).words
        mine = [
            state
            for word, state in zip(words, states_of(words), strict=True)
            if int(word) & 0xFFFF == self.queue.slot + 1
        ]
        assert CellState.FENCED not in mine, "a cell that was taken away from this one is never free again"
        return super().finish(value)

    # ---- the survivor, afterwards ----

    def look_at_trace(self):
        assert self.count(self.taken_away) == len([name for name, _ in self.lapses if name == "HoldAndAnswer"])

    def expect(self, returned, value):
        # a copy that was not published when its leader died runs, and so does the next leader's copy
        self.claims.update(dict.fromkeys(("S0", "S3", "S4"), ONCE if returned else ONCE_OR_TWICE))
        self.claims["S1"] = NEVER

    def after_kill(self, returned, value):
        self.expect(returned, value)
        self.queue.rescue()
        nothing_left(QueueCensus(self.directory).leftover(self.alive | self.slots_of_the_silent()))
        self.go_on_as_leader()
        self.settle()

    def slots_of_the_silent(self):
        records = QueueFiles(self.directory).records
        return {
            slot
            for slot, record in enumerate(records)
            if int(record["status"]) & 0xFF and int(record["pid"]) in {tracee.pid for tracee in self.silent}
        }

    def go_on_as_leader(self):
        """The survivor leads, until every job is answered; then the others wake."""
        deadline = time.monotonic() + PATIENCE_S
        while any(self.got[name] == 0 for name in self.jobs):
            assert time.monotonic() < deadline, f"answered: {dict(self.got)}"
            self.queue._watch()
            self.take_the_lead()
            self.silence()
            self.queue._watch()
            while self.step():
                pass
        for tracee in self.silent:
            tracee.go_on(self.meanwhile)

    def duplicates(self):
        return {sum(max(0, times - 1) for times in self.seen.values())}

    def traffic(self):
        self.stopped_pid = self.victim_pid
        self.go_on_as_leader()
        self.queue.rescue()
        super().traffic()

    def after_stop(self, value):
        self.expect(False, value)
        self.settle()


class EndOverdue(Lead):
    """The victim leads. The jobs of two workers have run out of time."""

    jobs = {"S0": (40, {"timeout": 1000}), "S1": (LONG, {"timeout": 1000})}  # noqa: RUF012
    lapses = (("HoldAndAnswer", None), ("HoldAndAnswer", None))
    taken_away = CellState.OVERDUE

    def silence(self):
        """The time of every running job is over. Their workers beat, a leader that is stopped does not."""
        self.let_time_go_by({self.stopped_pid})
        files = QueueFiles(self.directory)
        for cell in files.cells:
            if int(cell["deadline_ns"]):
                cell["deadline_ns"] = 1
        files.bytes("pool")[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["deadline"] = 1

    def expect(self, returned, value):
        # a copy that was not answered when its leader died runs
        self.claims.update(dict.fromkeys(self.jobs, NEVER if returned else PERHAPS))

    def look_at_answers(self):
        for name, who in self.who.items():
            is_late = name in self.jobs and who.startswith("JobTimeout")
            assert is_late or (who == "S" and self.seen[name]), f"job {name}: {who}"

    def duplicates(self):
        return set(range(len(self.jobs) + 1))


class CancelRunning(EndOverdue):
    """A client cancels the jobs of two workers while they run; what it leaves running is out of time afterwards."""

    goes_on = False

    def setup(self):
        QueueStage.setup(self)

    def call(self):
        cells = self.queue.cells()
        running = [
            int(job_id)
            for job_id, state in zip(cells["job_id"], states_of(cells["word"]), strict=True)
            if state is CellState.TAKEN
        ]
        return [self.queue.cancel_running(job_id) for job_id in running]

    def silence(self):
        if self.goes_on:
            super().silence()
        else:
            self.let_time_go_by(set())

    def go_on_as_leader(self):
        self.goes_on = True
        super().go_on_as_leader()

    def expect(self, returned, value):
        assert not returned or value == [True, True]
        super().expect(returned, value)

    def look_at_answers(self):
        self.who = {name: who.replace("JobCancelled", "JobTimeout") for name, who in self.who.items()}
        super().look_at_answers()


class HoldAndAnswer(Held):
    """A worker that answers when its job runs elsewhere, or was answered."""

    def call(self):
        self.frame = encode_result(0, answer(named(decode_submit(self.claim.payload)[1].args), "V"))

    def finish(self, value):
        try:
            self.claim.reply(self.frame)
        except TransportError:
            assert self.queue.refused == 1
        else:
            raise AssertionError("a late answer was taken")
        self.queue.close()


# ---- stopped for long in any other call ----


class Lapsing(Leading):
    """The victim is stopped for so long that its work is moved on, and those who die have died before."""

    dies_first = True

    def call(self):
        try:
            return super().call()
        except TransportError as error:
            return repr(error)

    def finish(self, value):
        if isinstance(value, str) and TransportError.__name__ in value:
            self.queue.close()
            return None
        try:
            return super().finish(value)
        except TransportError:
            self.queue.close()
            return None

    def traffic(self):
        self.stopped_pid = self.victim_pid
        for _ in range(2):
            self.queue._watch()
            self.take_the_lead()
            self.silence()
            self.queue._watch()
            self.queue.rescue()
            while self.step():
                pass
        # what the one who is stopped has parked, and not said so, the leader finds at a look that it takes once a second
        deadline = time.monotonic() + PATIENCE_S
        while self.waits_for_a_look() and time.monotonic() < deadline:
            self.queue._watch()
            if not self.step():
                time.sleep(0.01)
        for name in self.jobs:
            assert self.got[name] == 1 or self.is_acknowledged, f"job {name} waits for the one who is stopped"
        super().traffic()

    def waits_for_a_look(self):
        return self.count(CellState.PARKED) and not all(self.got[name] for name in self.jobs)

    def expect(self, returned, value):
        """What was moved on may run there and here, and is answered once; what was acknowledged there may have no answer."""
        super().expect(returned, value)
        for name in (*self.jobs, *(self.name(n) for n in range(2)), "L0"):
            self.claims[name] = {0, 1, 2}
            if self.is_acknowledged and name in self.results:
                self.results[name] = PERHAPS

    def after_stop(self, value):
        self.expect(False, None)
        self.settle()

    def look_at_answers(self):
        for name, who in self.who.items():
            assert who in "SV" or self.dies, f"job {name}: {who}"

    def duplicates(self):
        return {0, 1, 2}


def lapsing(name):
    kind = queue_calls.CALLS[name]
    return type(f"Lapsing{kind.__name__}", (Lapsing, kind), {"is_acknowledged": name == "ack"})


LAPSING = (
    *("submit", "submit_block", "submit_to_full_ring", "recv", "recv_block", "recv_letter", "cancel", "close", "claim"),
    *("claim_and_start", "serve", "reply", "reply_block", "ack", "release", "release_to_full_ring", "retry_dead"),
    "drop_dead",
    *("rescue", "rescue_of_clients", "repair"),
    *("submit_due", "submit_due_block", "cancel_parked", "park", "park_charged", "park_unknown", "take_parked"),
    "answer_unknown",
)
CALLS = {"lapse": Lead, "overdue": EndOverdue, "cancel_running": CancelRunning} | {
    f"lapsing_{name}": lapsing(name) for name in LAPSING
}
DYING = queue_calls.DYING | {HoldAndAnswer.__name__: HoldAndAnswer}
