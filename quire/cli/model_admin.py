"""`quire ps`, `load`, `unload`, `pin`, `unpin`: the models of a running server."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.cli.server_client import ServerClient, printable, reach_server
from quire.cli.sizes import memory_size

Name = Annotated[str, typer.Argument(help="A name or an alias that `quire ps` lists.")]


def ps(
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models of a server: which are loaded, and what they hold."""
    remote = reach_server(server, api_key)
    entries = remote.list_models()
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
    else:
        _print_table(entries)


def load(name: Name, server: options.ServerOption = None, api_key: options.KeyOption = None) -> None:
    """Load a model into a server, and wait for it. Others may have to go for it."""
    _tell(_order(reach_server(server, api_key), "load", {"model": name}))


def unload(
    name: Name,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    force: Annotated[bool, typer.Option("--force", help="Cut requests under way.")] = False,
) -> None:
    """Unload a model of a server, when its requests have ended. The next request loads it again."""
    _tell(_order(reach_server(server, api_key), "unload", {"model": name, "force": force}))


def pin(name: Name, server: options.ServerOption = None, api_key: options.KeyOption = None) -> None:
    """Keep a model in memory, once it is there, whoever needs room."""
    _tell(_order(reach_server(server, api_key), "pin", {"model": name}))


def unpin(name: Name, server: options.ServerOption = None, api_key: options.KeyOption = None) -> None:
    """Let a model go when room is needed."""
    _tell(_order(reach_server(server, api_key), "unpin", {"model": name}))


def _order(remote: ServerClient, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    found = remote.post(f"/v1/models/{verb}", body)
    if not isinstance(found, dict) or not isinstance(found.get("state"), str):
        raise remote.malformed("no model state", found)
    return found


def _tell(found: dict[str, Any]) -> None:
    pinned = ", pinned" if found.get("is_pinned") is True else ""
    typer.echo(f"{printable(str(found.get('model')))} is {printable(found['state'])}{pinned}{_shortened(found)}")


def _shortened(found: dict[str, Any]) -> str:
    """Nothing, if its context is as long as it can be."""
    length, full = found.get("max_model_len"), found.get("full_model_len")
    if found["state"] != "ready" or type(length) is not int or type(full) is not int or length >= full:
        return ""
    return f", with {length:,} tokens of context instead of {full:,}: its KV cache has no room"


def _print_table(entries: list[dict[str, Any]]) -> None:
    """One row a model: its other names stand beside it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a file has room for long names
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "aliases", "state"):
        table.add_column(column, overflow="fold")
    for column in ("memory", "context"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, aliases, entry in _by_model(entries):
        state = f"{entry.get('state')}{', pinned' if entry.get('is_pinned') is True else ''}"
        num_bytes, context = entry.get("num_bytes"), entry.get("max_model_len")
        shown = memory_size(num_bytes) if type(num_bytes) is int else "?"
        held = {"ready": shown, "loading": f"({shown})"}.get(str(entry.get("state")), f"weights {shown}")
        row = [name, ", ".join(aliases), state, held, str(context)]
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def _by_model(entries: list[dict[str, Any]]) -> list[tuple[str, list[str], dict[str, Any]]]:
    found: list[tuple[str, list[str], dict[str, Any]]] = []
    for entry in entries:
        name, alias_of = str(entry.get("id")), entry.get("alias_of")
        if alias_of is None or not found:
            found.append((name, [], entry))
        else:
            found[-1][1].append(name)
    return found
