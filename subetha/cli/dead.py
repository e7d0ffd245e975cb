"""``subetha dead``: the jobs whose worker died in every attempt."""

import json
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from subetha.cli.output import local_time, print_line, print_table
from subetha.cli.queues import opened_queue

if TYPE_CHECKING:
    from subetha.jobqueue import DeadLetter, JobQueue, QuarantinedJob, WorkerDeath

__all__ = ["command"]


def _check_ids(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(_job_id(text) for text in texts)


def _job_id(text: str) -> int:
    """A job id: decimal, or hexadecimal after 0x."""
    try:
        found = int(text, 16 if text[:2] in ("0x", "0X") else 10)
    except ValueError:
        found = 0
    if not 0 < found < 1 << 64:
        raise click.BadParameter(f"{text!r} is no job id; give it as 'subetha dead list' shows it, or in hex after 0x")
    return found


_queue_option = click.option("--queue", metavar="DIR", required=True, type=click.Path(), help="The queue directory.")
_all_option = click.option("--all", "every", is_flag=True, help="Every dead letter there is.")
_ids_argument = click.argument("job_ids", metavar="JOB_ID...", nargs=-1, callback=_check_ids)


@click.group()
def command() -> None:
    """List, retry or drop dead letters: jobs whose worker died in every attempt, or that the disk has damaged.

    A job id is decimal, or hexadecimal after 0x.
    """


@command.command("list")
@_queue_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of the table.")
def _list(queue: str, as_json: bool) -> None:
    """Show every dead letter: its job, how often it was started, and how its last workers ended.

    Quarantined jobs (of a durable queue, damaged on the disk) stand behind them.
    """
    with opened_queue(queue, readonly=True) as opened:
        letters, quarantined = opened.dead_letters(), opened.quarantined()
    if as_json:
        click.echo(json.dumps([*map(_as_dict, letters), *map(_quarantined_as_dict, quarantined)]))
    else:
        _print_letters(letters, quarantined)


def _for_letters(name: str, text: str, act: Callable[["JobQueue", int], bool]) -> None:
    """A command that does `act` to the letters it is told of."""

    @command.command(name, help=f"{text}\n\nThe exit code is 0 if each JOB_ID was there, else 1.")
    @_ids_argument
    @_all_option
    @_queue_option
    def _run(job_ids: tuple[int, ...], every: bool, queue: str) -> None:
        with opened_queue(queue) as opened:
            _for_each(opened, job_ids, every, act)


_for_letters(
    "retry",
    "Let dead letters run again, with all their attempts, before the jobs that wait at their priority.",
    lambda queue, job_id: queue.retry_dead(job_id),
)
_for_letters("drop", "Drop dead letters: their jobs will not run again.", lambda queue, job_id: queue.drop_dead(job_id))


def _for_each(queue: "JobQueue", job_ids: tuple[int, ...], every: bool, act: Callable[["JobQueue", int], bool]) -> None:
    """Do it to each; exit with 1 if one was not there. One that goes away by itself is no error where all are meant."""
    if every == bool(job_ids):
        raise click.UsageError("give either job ids or --all")
    missing = False
    for job_id in _every_id(queue) if every else dict.fromkeys(job_ids):
        if not act(queue, job_id) and not every:
            missing = True
            print_line(f"{queue.path}: no dead letter {job_id} (0x{job_id:x})", sys.stderr)
    if missing:
        sys.exit(1)


def _every_id(queue: "JobQueue") -> list[int]:
    return [letter.job_id for letter in queue.dead_letters()] + [job.job_id for job in queue.quarantined()]


def _cause(death: "WorkerDeath") -> str:
    code = death.exit_code
    if code is None:
        return "unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _as_dict(letter: "DeadLetter") -> dict[str, Any]:
    return {
        "job_id": letter.job_id,
        "quarantined": False,
        "attempts": letter.attempts,
        "submitted": local_time(letter.submitted_ns),
        "deaths": [
            {
                "when": local_time(death.when_ns),
                "pid": death.pid,
                "exit_code": death.exit_code,
                "cause": _cause(death),
            }
            for death in letter.deaths
        ],
    }


def _quarantined_as_dict(job: "QuarantinedJob") -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "quarantined": True,
        "attempts": None,
        "submitted": local_time(job.submitted_ns),
        "deaths": [],
    }


def _print_letters(letters: list["DeadLetter"], quarantined: list["QuarantinedJob"]) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("job id", justify="right", no_wrap=True)
    table.add_column("attempts", justify="right")
    table.add_column("submitted", no_wrap=True)
    table.add_column("last deaths")
    for letter in letters:
        causes = ", ".join(_cause(death) for death in letter.deaths)
        table.add_row(str(letter.job_id), str(letter.attempts), local_time(letter.submitted_ns), causes)
    for job in quarantined:
        table.add_row(str(job.job_id), "", local_time(job.submitted_ns), "quarantined")
    print_table(table)
