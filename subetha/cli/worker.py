"""``subetha worker``: worker processes on a queue directory."""

import logging
import os
import sys
from typing import Literal

import click

__all__ = ["command"]


def _check_modules(_ctx: click.Context, _param: click.Parameter, modules: tuple[str, ...]) -> tuple[str, ...]:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise click.BadParameter(
                f"{module!r} is no module name; give it as in an import statement, such as 'handlers' or 'shop.jobs'"
            )
        if module.endswith(".py") and os.path.exists(module):
            raise click.BadParameter(f"{module!r} is a file; give the module's name, {module.removesuffix('.py')!r}")
    return modules


@click.command()
@click.argument("modules", metavar="MODULE...", nargs=-1, required=True, callback=_check_modules)
@click.option(
    "--queue",
    metavar="DIR",
    required=True,
    type=click.Path(),
    help="The queue directory; created with its defaults when it does not exist.",
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="one for each processor",
    help="How many worker processes, 1 to 1024.",
)
@click.option(
    "--durability",
    type=click.Choice(("process", "disk")),
    help="What accepted jobs survive: the death of any process, or also the power. A queue that is there must have it.  "
    "[default: process, or what is there]",
)
@click.option(
    "--max-jobs", metavar="N", type=click.IntRange(1), help="Replace a worker by a fresh one when it has run N jobs."
)
@click.option(
    "--max-memory",
    metavar="MIB",
    type=click.IntRange(1),
    help="Replace a worker that has more MiB resident after a job.",
)
@click.option(
    "--queue-name",
    "queue_names",
    metavar="NAME",
    multiple=True,
    help="Run the tasks of this queue of names alone; may be given several times.  [default: all tasks of the modules]",
)
@click.option(
    "--unknown-after",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="A job that no live worker knows fails after so long.  [default: 10]",
)
@click.option(
    "--log-file", metavar="FILE", type=click.Path(dir_okay=False), help="Append what the workers log to FILE."
)
@click.option(
    "--log-level",
    type=click.Choice(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), case_sensitive=False),
    default="WARNING",
    show_default=True,
    help="Least level of what goes to the file.",
)
def command(
    modules: tuple[str, ...],
    queue: str,
    processes: int,
    durability: Literal["process", "disk"] | None,
    max_jobs: int | None,
    max_memory: int | None,
    queue_names: tuple[str, ...],
    unknown_after: float | None,
    log_file: str | None,
    log_level: str,
) -> None:
    """Import each MODULE in N worker processes and run the jobs of a queue.

    Modules are looked for in the current directory first, as `python -m` does, then where Python finds them otherwise.
    They register the handlers of the jobs.

    Workers that die are started again, with growing pauses. Five deaths in a row of one of them, each within 10 seconds
    of its start and before it completed a job, end the command with exit code 1.

    SIGTERM or one Ctrl-C lets every worker finish the job in hand and ends with exit code 0; a second one ends all at
    once with 130.
    """
    from subetha.errors import SubethaError
    from subetha.pool import WorkerPool

    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        pool = WorkerPool(
            modules,
            queue,
            processes,
            durability=durability,
            max_jobs=max_jobs,
            max_bytes=max_memory and max_memory * 2**20,
            queue_names=queue_names,
            unknown_after=unknown_after,
            log_file=log_file,
            log_level=getattr(logging, log_level.upper()),
        )
        code = pool.run()
    except SubethaError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"cannot use the queue directory {queue!r}: {error}") from error
    sys.exit(code)
