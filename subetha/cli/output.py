"""What the commands print: tables without control codes in a pipe, and lines without any that came from outside."""

import sys
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["local_time", "print_line", "print_table"]


def local_time(ns: int) -> str:
    """Local time in ISO form, to the second, of ns since 1970 (u64)."""
    return datetime.fromtimestamp(ns // 1_000_000_000).astimezone().isoformat()


def print_table(table: "Table") -> None:
    """Print a rich table on standard output, with colours exactly if that is a terminal."""
    from rich.console import Console

    # Said outright, since rich takes a pipe for a terminal when FORCE_COLOR is in the environment.
    Console(force_terminal=sys.stdout.isatty(), highlight=False, markup=False, emoji=False).print(table)


def print_line(line: str, stream: TextIO) -> None:
    """Print a line, with escapes for control characters and for what the stream's encoding does not have."""
    encoding = stream.encoding or "utf-8"
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    print(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
