"""The `quire` command. Imports nothing but what it is asked to run: `quire --help` answers in a blink."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from quire import __version__
from quire.errors import QuireError

# name -> what it does, in the words of its help. Each is a function of that name in quire/cli/NAME.py, or in the file
# that FILES names.
COMMANDS: dict[str, str] = {
    "serve": "Serve models to OpenAI, Anthropic and Ollama clients.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model.",
    "bench": "Measure a model here.",
    "pull": "Fetch a model; with no name, the default one.",
    "models": "List the models on this machine and the ones that can be fetched.",
    "doctor": "Say what this machine has, what runs on it and how to get the rest.",
    "sim": "Run the real scheduler on a trace.",
    "ps": "List the models of a server, loaded or not.",
    "load": "Load a model of a server.",
    "unload": "Unload a model of a server.",
    "pin": "Keep a model of a server in memory.",
    "unpin": "Let it go when room is needed.",
    "top": "Show what a server does, live.",
    "replay": "Play a trace to a server, beside what the simulator says.",
}
FILES = dict.fromkeys(("ps", "load", "unload", "pin", "unpin"), "model_admin")
HELP = {"help_option_names": ["--help", "-h"]}
_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # plain help and plain errors, which name the value that was typed
}


class _Commands(TyperGroup):
    """Finds a command's module when the command is asked for, not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"quire.cli.{FILES.get(cmd_name, cmd_name)}")
        command = typer.Typer(**_SETTINGS)
        settings = {**HELP, **getattr(module, "CONTEXT", {})}
        command.command(name=cmd_name, context_settings=settings)(getattr(module, cmd_name))
        return get_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_Commands,
    help="Run open language models for many people at once, from code one can read.",
    no_args_is_help=True,
    context_settings=HELP,
    **_SETTINGS,
)


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
