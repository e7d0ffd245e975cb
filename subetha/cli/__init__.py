"""The command line: a click group whose commands are imported when they are called.

Neither ``subetha --help`` nor the help of a command imports numpy or the compiled core.
"""

import importlib

import click

__all__ = ["cli", "main"]


class _LazyGroup(click.Group):
    """Finds the command NAME as the attribute `command` of the module `subetha.cli.NAME`."""

    _names = ("check", "dead", "demo", "status", "worker")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._names:
            return None
        command = importlib.import_module(f"subetha.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        # late, since it takes some time to find
        from subetha import __version__

        click.echo(f"subetha {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Runs Python functions in other processes of this machine, through memory-mapped files."""


def main() -> None:
    """Run the command line; the entry point of the program `subetha`."""
    cli(prog_name="subetha")
