"""How the commands open a queue directory."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from subetha.jobqueue import JobQueue

__all__ = ["opened_queue"]


@contextlib.contextmanager
def opened_queue(path: str, readonly: bool = False) -> Iterator["JobQueue"]:
    """Open a queue, or end with the click error that says why it cannot be used."""
    from subetha.errors import SubethaError
    from subetha.jobqueue import JobQueue

    try:
        with JobQueue.open(path, readonly) as queue:
            yield queue
    except SubethaError as error:
        raise click.ClickException(str(error)) from error
    except FileNotFoundError as error:
        raise click.ClickException(
            f"cannot use the queue directory {path!r}: {error}; expected a directory that 'subetha worker --queue' or "
            "JobQueue.create has made ('subetha check' tells what is missing in one)"
        ) from error
    except OSError as error:
        raise click.ClickException(f"cannot use the queue directory {path!r}: {error}") from error
