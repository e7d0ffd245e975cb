"""``subetha check``: is a queue directory whole?"""

import json
import sys
from typing import TYPE_CHECKING

import click

from subetha.cli.output import print_line

if TYPE_CHECKING:
    from subetha.check import CheckReport

__all__ = ["command"]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=bytes))
@click.option("--repair", is_flag=True, help="Repair what can be repaired. Nothing is deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def command(directory: bytes, repair: bool, as_json: bool) -> None:
    """Verify every file of the queue directory DIR, every ring, cell, block and participant.

    Others may work with the queue meanwhile: what only moves is no fault. Prints one line for each fault.

    With --repair, missing files are made anew, what dead processes have left is moved on, and every job and result is
    found again, whatever the rings say.

    The exit code is 0 if the queue is sound, 1 if it was repaired and is sound now, and 2 if faults are left.
    """
    from subetha.check import check_queue

    report = check_queue(directory, repair=repair)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _print_lines(report)
    sys.exit(report.exit_code)


def _print_lines(report: "CheckReport") -> None:
    for fault in report.repaired:
        print_line(f"repaired: {fault.where}: {fault.kind}: {fault.text}", sys.stdout)
    for fault in report.faults:
        print_line(f"BROKEN: {fault.where}: {fault.kind}: {fault.text}", sys.stdout)
    found, mended = len(report.faults), len(report.repaired)
    verdict = f"broken, {found} {'fault' if found == 1 else 'faults'}" if found else "sound"
    print_line(f"{report.queue}: {verdict}" + (f", {mended} repaired" if mended else ""), sys.stdout)
