"""``subetha status``: what a queue directory holds, who takes part in it, and which jobs run now."""

import json
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from subetha.cli.output import local_time, print_line, print_table
from subetha.cli.queues import opened_queue

if TYPE_CHECKING:
    from rich.table import Table

    from subetha.jobqueue import JobQueue
    from subetha.layout import CellState

__all__ = ["command"]

SHOWN_STATES = ("FREE", "READY", "RETRY", "TAKEN", "PARKED", "DONE", "KEPT")
"""Those that have a row of their own; the others are `other`."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def command(directory: str, as_json: bool) -> None:
    """Show what the queue directory DIR holds, who takes part in it, and which jobs run now.

    It only looks: nothing changes, and nobody waits for it. Others may work with the queue meanwhile, so parts of what
    it shows may be a moment apart. To see it again and again: watch subetha status DIR

    The exit code is 0, or 1 where there is no queue that can be read.
    """
    with opened_queue(directory, readonly=True) as queue:
        status = _status(queue)
    if as_json:
        click.echo(json.dumps(status))
    else:
        _print_status(status)


# --- what there is ----------------------------------------------------------------------------------------------------


def _status(queue: "JobQueue") -> dict[str, Any]:
    stats = queue.stats()
    parked_unknown, next_due = _parked(queue)
    jobs = _running_jobs(queue)
    in_hand = defaultdict(list)
    for job in jobs:
        in_hand[job["participant"]].append(job["job_id"])
    participants = _participants(queue, in_hand)
    pids = {participant["number"]: participant["pid"] for participant in participants}
    for job in jobs:
        job["pid"] = pids.get(job["participant"])
    return {
        "queue": queue.path,
        "durability": queue.durability,
        "cells": stats.cells,
        "free": stats.free,
        "waiting": stats.waiting,
        "waiting_by_priority": stats.waiting_by_priority,
        "running": stats.running,
        "parked": stats.parked,
        "parked_unknown": parked_unknown,
        "next_due": None if next_due is None else local_time(next_due),
        "next_due_s": None if next_due is None else _seconds(next_due - time.time_ns()),
        "done": stats.done,
        "kept": stats.kept,
        "other": stats.other,
        "states": stats.states,
        "arena_bytes": stats.arena_bytes,
        "arena_backed_bytes": stats.arena_backed_bytes,
        "max_participants": queue.participants,
        "participants": participants,
        "jobs": jobs,
    }


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 3)


def _columns(queue: "JobQueue", state: "CellState", *names: str) -> list[list[int]]:
    """The words of the cells in a state, and these fields, read in this order; without the cells that went on meanwhile."""
    import numpy as np

    from subetha.layout import STATE_SHIFT

    cells = queue.cells()
    words = cells["word"].copy()
    found = np.flatnonzero((words >> STATE_SHIFT) & 0xF == state)
    columns = [words[found], *(cells[name][found] for name in names)]
    is_same = cells["word"][found] == columns[0]
    return [column[is_same].tolist() for column in columns]


def _parked(queue: "JobQueue") -> tuple[int, int | None]:
    """How many jobs are parked since who met them did not know them, and when the first of the others is due (ns since 1970)."""
    from subetha.layout import CellState

    _, dues = _columns(queue, CellState.PARKED, "due_ns")
    return dues.count(0), min(filter(None, dues), default=None)


def _running_jobs(queue: "JobQueue") -> list[dict[str, Any]]:
    """Every job that a worker has in hand, the one that has run longest first; what was not started yet comes last."""
    from subetha.layout import VERSION_SHIFT, CellState

    # `charged` first: a start writes it last, so where it tells of this claim's the other fields are this claim's, too
    rows = zip(
        *_columns(
            queue,
            CellState.TAKEN,
            *("charged", "job_id", "closure_id", "job_block", "attempts", "max_attempts"),
            *("started_ns", "timeout_ms", "progress"),
        ),
        strict=True,
    )
    now = time.time_ns()
    jobs = []
    for word, charged, job_id, closure_id, block, attempts, max_attempts, started, timeout_ms, said in rows:
        is_started = charged == (word >> VERSION_SHIFT << 1 | 1) & 0xFFFF_FFFF
        jobs.append(
            {
                "job_id": job_id,
                "closure_id": None if block else closure_id,
                "attempt": attempts,
                "max_attempts": max_attempts,
                "participant": word & 0xFFFF,
                "pid": None,
                # a time to come is none of a start: the clock was set back, or the cell is damaged
                "running_s": _seconds(now - started) if is_started and started <= now else None,
                "timeout_s": timeout_ms / 1000 if timeout_ms else None,
                "progress": {"done": said >> 32, "total": said & 0xFFFF_FFFF} if is_started and said else None,
            }
        )
    return sorted(jobs, key=lambda job: -1 if job["running_s"] is None else job["running_s"], reverse=True)


def _participants(queue: "JobQueue", in_hand: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Who lives; one that leaves meanwhile is left out."""
    from subetha.errors import HeartbeatError
    from subetha.layout import Role

    roles = {role.value: role.name.lower() for role in Role}
    table = queue.heartbeat
    found = []
    for slot in table:
        snapshot = table.snapshot(slot)
        try:
            completed = table.completed(slot)
        except HeartbeatError:
            continue
        if snapshot is None:
            continue
        # of about a second each; read after the beat, so never less than it
        behind = table.global_epoch - snapshot.last_seen_epoch
        role = int(snapshot.role)
        found.append(
            {
                "number": slot + 1,
                "pid": snapshot.pid,
                "role": roles.get(role, str(role)),
                "completed": completed,
                "in_hand": in_hand.get(slot + 1, []),
                "silent_s": behind if behind >= 0 else None,
            }
        )
    return found


# --- as tables --------------------------------------------------------------------------------------------------------


def _print_status(status: dict[str, Any]) -> None:
    print_line(status["queue"], sys.stdout)
    counts = _table(None)
    counts.show_header = False
    counts.add_column(no_wrap=True)
    counts.add_column(overflow="fold")
    for name, text in _counts(status).items():
        counts.add_row(name, text)
    print_table(counts)
    if status["participants"]:
        print_table(_participants_table(status["participants"]))
    if status["jobs"]:
        print_table(_jobs_table(status["jobs"]))


def _counts(status: dict[str, Any]) -> dict[str, str]:
    levels = ", ".join(f"{n:,} at {level}" for level, n in enumerate(status["waiting_by_priority"]))
    parked = []
    if status["parked_unknown"]:
        parked.append(f"{status['parked_unknown']:,} for a worker that knows them")
    if status["next_due"] is not None:
        seconds = status["next_due_s"]
        parked.append(f"next due {status['next_due']}, " + (f"in {seconds:,.1f} s" if seconds > 0 else "now"))
    others = [f"{n:,} {state}" for state, n in status["states"].items() if state not in SHOWN_STATES]
    return {
        "waiting": _with(status["waiting"], [f"by priority: {levels}"]),
        "running": f"{status['running']:,}",
        "parked": _with(status["parked"], parked),
        "done": f"{status['done']:,}",
        "kept": f"{status['kept']:,}",
        "other": _with(status["other"], others),
        "free": f"{status['free']:,} of {status['cells']:,} cells",
        "participants": f"{len(status['participants']):,} of {status['max_participants']:,}",
        "arena": f"{status['arena_backed_bytes']:,} of {status['arena_bytes']:,} bytes backed",
        "durability": status["durability"],
    }


def _with(count: int, more: list[str]) -> str:
    return f"{count:,} ({'; '.join(more)})" if more else f"{count:,}"


def _table(title: str | None) -> "Table":
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _participants_table(participants: list[dict[str, Any]]) -> "Table":
    table = _table("participants")
    for name in ("number", "pid", "role", "completed", "in hand", "silent s"):
        table.add_column(name, justify="left" if name == "role" else "right", overflow="fold")
    for one in participants:
        table.add_row(
            str(one["number"]),
            str(one["pid"]),
            one["role"],
            f"{one['completed']:,}",
            f"{len(one['in_hand']):,}",
            _or_dash(one["silent_s"]),
        )
    return table


def _jobs_table(jobs: list[dict[str, Any]]) -> "Table":
    table = _table("running jobs")
    table.add_column("job id", justify="right", no_wrap=True)
    for name in ("closure id", "attempt", "pid", "running s", "timeout s", "progress"):
        # where there is no room for everything, no digit is left out
        table.add_column(name, justify="right", overflow="fold")
    for job in jobs:
        progress = job["progress"]
        table.add_row(
            str(job["job_id"]),
            _or_dash(job["closure_id"]),
            f"{job['attempt']} of {job['max_attempts']}",
            _or_dash(job["pid"]),
            _or_dash(job["running_s"], ",.1f"),
            _or_dash(job["timeout_s"], ",.1f"),
            "-" if progress is None else f"{progress['done']}/{progress['total']}",
        )
    return table


def _or_dash(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
