"""The `quire` command. A command's module is imported only when the command runs: `quire --help` is quick."""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from quire.cli.terminal import echo
from quire.engine.process import ShortFormatter
from quire.errors import InvalidRequest, QuireError
from quire.version import __version__

# Commands by group: name -> one-line help. Each is a function of that name in quire/cli/NAME.py, or in the file that
# FILES names. If that module has SUBCOMMANDS, they are the functions to run.
GROUPS: dict[str, dict[str, str]] = {
    "Run a model": {
        "run": "Chat with a model, or answer one prompt.",
        "chat": "Chat with a model in the terminal.",
        "generate": "Answer one prompt.",
        "batch": "Answer a file of prompts or requests.",
    },
    "Serve models": {
        "serve": "Start a server for OpenAI, Anthropic and Ollama clients.",
        "deploy": "Run replicas of models on several machines, with Ray.",
        "ps": "List the models and running requests of a server.",
        "top": "Show the activity of a server, live.",
        "load": "Load a model into a server.",
        "unload": "Unload a model from a server.",
        "pin": "Keep a model in a server's memory.",
        "unpin": "Allow a server to unload a model.",
        "cancel": "Cancel a request of a server.",
    },
    "Models on this machine": {
        "models": "List models, and suggest models that run here (also: list).",
        "pull": "Download a model; without a name, the default one.",
        "show": "Show the facts of a model.",
        "rm": "Delete a downloaded model.",
        "quantize": "Write a copy of a model with weights of fewer bits.",
        "cache": "Show, check and clear the prefix cache on disk.",
        "doctor": "Check this machine: what runs, and what is missing.",
    },
    "Measure": {
        "bench": "Measure a model on this machine.",
        "sim": "Run the scheduler on a trace, without a model.",
    },
}
COMMANDS: dict[str, str] = {name: text for group in GROUPS.values() for name, text in group.items()}
FILES = {
    **dict.fromkeys(("ps", "top", "load", "unload", "pin", "unpin", "cancel"), "model_admin"),
    **dict.fromkeys(("pull", "show", "rm", "quantize"), "models"),
    **dict.fromkeys(("generate", "run"), "chat"),
    "deploy": "serve",
}
ALIASES = {"list": "models", "ls": "models"}
# Commands of Ollama that quire has no equivalent for, and what to do instead.
ADVICE: dict[str, str] = {
    "stop": "`quire unload MODEL` unloads a model from a server; Ctrl-C or SIGTERM stops the server",
    "cp": "`quire serve MODEL --served-model-name NAME` serves a model under another name, without a copy",
    "create": "quire has no Modelfile: `quire serve PATH` serves a folder or a .gguf file, and --config FILE.yaml"
    " sets names and options",
    "push": "quire does not upload models: use `hf upload` of the package huggingface_hub",
    "signin": "quire has no accounts: for gated models of the hub, set HF_TOKEN or run `hf auth login`",
    "signout": "quire has no accounts: `hf auth logout` removes the token of the hub",
    "launch": "start the agent itself with the addresses that `quire serve` prints; docs/clients.md lists agents",
    "help": "`quire --help` lists the commands, `quire COMMAND --help` the options of one",
}
SECRET_OPTIONS = ("--api-key", "--admin-api-key")
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat, counted after the program's name: addresses of the arguments
HELP = {"help_option_names": ["--help", "-h"]}
_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # plain help and plain errors, which name the value that was typed
}


class _Commands(TyperGroup):
    """Imports the module of a command when the command is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in ADVICE:
            raise InvalidRequest(f"there is no command {name!r}: {ADVICE[name]}")
        if name not in COMMANDS and name not in ALIASES:
            near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "`quire --help` lists the commands"
            raise InvalidRequest(f"there is no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        name = ALIASES.get(cmd_name, cmd_name)
        module = importlib.import_module(f"quire.cli.{FILES.get(name, name)}")
        command = typer.Typer(name=cmd_name, **_SETTINGS)
        settings = {**HELP, **getattr(module, f"{name.upper()}_CONTEXT", {})}
        if subcommands := getattr(module, "SUBCOMMANDS", None):
            command.callback(context_settings=settings, no_args_is_help=True)(getattr(module, name))
            for subname, function in subcommands.items():
                command.command(name=subname, context_settings=settings)(function)
        else:
            command.command(name=cmd_name, context_settings=settings)(getattr(module, name))
        return get_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in commands.items()])


app = typer.Typer(
    cls=_Commands,
    help="Run open language models on this machine and serve them to many clients at once.",
    no_args_is_help=True,
    context_settings=HELP,
    **_SETTINGS,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback


def hide_keys(arguments: Sequence[str] = sys.argv) -> None:
    """Overwrite keys in the memory that the kernel shows as the command line. `sys.argv` keeps them.

    Until this runs, the keys are visible. It works only on Linux, which has `/proc`; on other systems, pass keys in
    the environment or in a file.
    """
    secrets = {secret.encode(errors="surrogateescape") for secret in _secrets(arguments)} - {b""}
    if not secrets:
        return
    try:
        line = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not start or end - start != len(line):  # the kernel hides the addresses, or the command line was changed
        return
    import ctypes  # only with a key: `quire --help` does not need it

    at = 0
    for argument in line.split(b"\0"):
        value = argument.partition(b"=")[2] if argument.startswith(b"--") else argument
        if value in secrets:
            ctypes.memset(start + at + len(argument) - len(value), ord("*"), len(value))
        at += len(argument) + 1


def _secrets(arguments: Sequence[str]) -> Iterator[str]:
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name in SECRET_OPTIONS:
            yield value if equals else following


def run() -> None:
    """The entry point. An error of quire is one line on stderr, without a traceback."""
    hide_keys()
    if logging.lastResort is not None:  # prints warnings of commands that do not set up a log
        logging.lastResort.setFormatter(ShortFormatter("%(message)s"))
    try:
        app(prog_name="quire")
    except QuireError as error:
        echo(f"quire: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        echo(f"quire: {where}{error.strerror or error}", err=True)
        sys.exit(1)
