"""The `quire` command. Imports nothing heavy: subcommands load what they need when they run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire import __version__
from quire.cli.bench import bench
from quire.cli.chat import chat
from quire.cli.doctor import doctor
from quire.cli.generate import generate
from quire.cli.models import models
from quire.cli.pull import pull
from quire.cli.sim import sim
from quire.errors import QuireError

app = typer.Typer(
    help="Run language models, from code one can read. Today: answers on the command line and from Python, and the"
    " scheduler with its simulator; the server is next.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and plain errors, which name the value that was typed
)
for command in (generate, chat, bench, pull, models, doctor, sim):
    app.command(name=command.__name__)(command)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback


def run() -> None:
    """The entry point: an error of ours is one line on stderr, never a traceback."""
    try:
        app(prog_name="quire")
    except QuireError as error:
        typer.echo(f"quire: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"quire: {where}{error.strerror or error}", err=True)
        sys.exit(1)
