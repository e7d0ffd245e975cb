"""``subetha demo``: the main job on real files."""

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from subetha.cli.output import print_line, print_table

if TYPE_CHECKING:
    from subetha.demo import DemoReport

__all__ = ["command"]


@click.command()
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=bytes))
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 512),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="one for each processor",
    help="How many worker processes, 1 to 512.",
)
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill one worker by SIGKILL when half is done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(folder: bytes | None, workers: int, kill: bool, as_json: bool) -> None:
    """Hash every regular file below FOLDER in worker processes and check every digest.

    FOLDER is Python's standard library when it is not given. Symbolic links are not followed. Files that cannot be
    read count as failed and are listed with their errors.

    Half-way one worker is killed by SIGKILL, to show that its jobs are run again: lost and duplicates stay 0.

    The exit code is 0 exactly if no digest differs from the one computed in this process and every job came back.
    """
    from subetha.demo import default_folder, run_demo
    from subetha.errors import SubethaError

    signal.signal(signal.SIGTERM, _exit_by_signal)
    try:
        start = default_folder() if folder is None else _absolute(folder)
        with _progress_bar() as progress:
            report = run_demo(start, workers, kill=kill, progress=progress)
    except KeyboardInterrupt:
        click.echo("subetha demo: interrupted", err=True)
        sys.exit(128 + signal.SIGINT)
    except SubethaError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _print_table(report)
    _list_troubles(report, to_stderr=as_json)
    sys.exit(report.exit_code)


def _exit_by_signal(signum: int, _frame: FrameType | None) -> NoReturn:
    """End by an exception, so that the workers are ended and the queue directory is removed."""
    sys.exit(128 + signum)


def _absolute(folder: bytes) -> bytes:
    """Give `folder` as an absolute path, or the click error that says why it is none of a folder."""
    from subetha.demo import check_folder, printable

    try:
        if not folder:
            raise FileNotFoundError(errno.ENOENT, "the name is empty")
        path = os.path.realpath(folder)
        check_folder(path)
    except OSError as error:
        raise click.BadParameter(
            f"'{printable(folder)}' cannot be read: {error.strerror}; give an existing folder", param_hint="FOLDER"
        ) from error
    return path


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("hashing files"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("hashing files", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(report: "DemoReport") -> None:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in report.as_dict().items():
        trouble = name in ("failed", "mismatched", "duplicates", "lost") and value > 0
        text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name, text, style="bold red" if trouble else None)
    print_table(table)


def _list_troubles(report: "DemoReport", *, to_stderr: bool) -> None:
    from subetha.demo import printable

    stream = sys.stderr if to_stderr else sys.stdout
    lines = [f"failed: {printable(path)}: {printable(error.encode())}" for path, error in report.failures]
    lines += [f"MISMATCHED: {printable(path)}" for path in report.mismatches]
    for line in lines:
        print_line(line, stream)
    if report.lost:
        message = f"subetha demo: {report.lost} of {report.files} jobs did not come back: {report.problem}"
        print_line(message, sys.stderr)
