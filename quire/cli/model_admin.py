"""Commands for a running server: `quire ps`, `load`, `unload`, `pin`, `unpin` and `cancel`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from quire.cli import options
from quire.cli.options import takes
from quire.cli.server_client import ServerClient, printable, reach_server
from quire.cli.terminal import echo, show, table
from quire.errors import InvalidRequest
from quire.sizes import reported_size

Name = Annotated[str, typer.Argument(metavar="MODEL", help="A name or an alias that `quire ps` lists.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The id of a request that `quire ps` lists.")]


def _remote(server: options.ServerOption = None, api_key: options.KeyOption = None) -> ServerClient:
    return reach_server(server, api_key)


@takes(remote=_remote)
def ps(
    *,
    remote: ServerClient,
    requests: Annotated[bool, typer.Option("--requests", help="List only the requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models of a server with their state and memory, and its current requests."""
    if as_json:
        found = _list_requests(remote) if requests else remote.entries("/v1/models", "models")
        echo(json.dumps(found, indent=2))
        return
    if not requests:
        _print_models(remote.entries("/v1/models", "models"))
    running = _list_requests(remote)
    if running and not requests:
        echo("")
    if running:
        _print_requests(running)
    elif requests:
        echo("no request is running")


@takes(remote=_remote)
def cancel(name: RequestId, *, remote: ServerClient) -> None:
    """Cancel a waiting or running request. An admin key cancels any request, another key its own."""
    found = remote.post(f"/v1/requests/{quote(name, safe='')}/cancel", {})
    if not isinstance(found, dict) or type(found.get("cancelled")) is not int:
        raise remote.malformed("no number of cancelled requests", found)
    count = found["cancelled"]
    echo(f"{printable(name)} is cancelled{f' ({count} requests)' if count > 1 else ''}")


@takes(remote=_remote)
def load(name: Name, *, remote: ServerClient) -> None:
    """Load a model into a server and wait until it is ready. Other models are unloaded if memory is short."""
    _order(remote, "load", model=name)


@takes(remote=_remote)
def unload(
    name: Name,
    *,
    remote: ServerClient,
    force: Annotated[bool, typer.Option("--force", help="Cancel the requests of the model.")] = False,
) -> None:
    """Unload a model when its requests have finished. The next request loads it again."""
    _order(remote, "unload", model=name, force=force)


@takes(remote=_remote)
def pin(name: Name, *, remote: ServerClient) -> None:
    """Keep a model in memory once it is loaded, even if other models need the memory."""
    _order(remote, "pin", model=name)


@takes(remote=_remote)
def unpin(name: Name, *, remote: ServerClient) -> None:
    """Allow the server to unload a model when memory is short."""
    _order(remote, "unpin", model=name)


def _order(remote: ServerClient, verb: str, **body: Any) -> None:
    """Give the server an order about a model and print the state that the model has then."""
    found = remote.post(f"/v1/models/{verb}", body)
    if not isinstance(found, dict) or not isinstance(found.get("state"), str):
        raise remote.malformed("no model state", found)
    pinned = ", pinned" if found.get("is_pinned") is True else ""
    echo(f"{printable(str(found.get('model')))} is {printable(found['state'])}{pinned}{_context_note(found)}")


def _context_note(found: dict[str, Any]) -> str:
    """A note if the KV cache limits the context; else empty."""
    length, full = found.get("max_model_len"), found.get("full_model_len")
    if found["state"] != "ready" or type(length) is not int or type(full) is not int or length >= full:
        return ""
    return f", with {length:,} tokens of context instead of {full:,}: its KV cache is too small for more"


def _list_requests(remote: ServerClient) -> list[dict[str, Any]]:
    try:
        return remote.entries("/v1/requests", "requests")
    except InvalidRequest as error:
        if "HTTP 404" in str(error):
            return []  # an older server does not list them
        raise


def _print_models(entries: list[dict[str, Any]]) -> None:
    """One row for each model, with its aliases."""
    rows = []
    for name, aliases, entry in _by_model(entries):
        state = f"{entry.get('state')}{', pinned' if entry.get('is_pinned') is True else ''}"
        num_bytes, context = entry.get("num_bytes"), entry.get("max_model_len")
        shown = reported_size(num_bytes) if type(num_bytes) is int else "?"
        held = {"ready": shown, "loading": f"({shown})"}.get(str(entry.get("state")), f"weights {shown}")
        rows.append((name, ", ".join(aliases), state, held, str(context)))
    _print_table(("name", "aliases", "state"), ("memory", "context"), rows)


def _print_requests(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        texts = [str(entry.get(field)) for field in ("id", "model", "key", "state", "priority")]
        age_s, prompt, limit = entry.get("age_s"), entry.get("prompt_tokens"), entry.get("max_tokens")
        age = f"{age_s:.0f} s" if isinstance(age_s, int | float) else "?"
        cached = f", {entry.get('cached_tokens')} cached" if entry.get("cached_tokens") else ""
        answer = f"{entry.get('completion_tokens')}{'' if limit is None else f' of {limit}'}"
        rows.append((*texts, age, "" if prompt is None else f"{prompt}{cached}", answer))
    _print_table(("request", "model", "key", "state", "priority"), ("age", "prompt", "answer"), rows)


def _print_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    show(table((*texts, *numbers), (list(map(printable, row)) for row in rows), texts=texts))


def _by_model(entries: list[dict[str, Any]]) -> list[tuple[str, list[str], dict[str, Any]]]:
    found: list[tuple[str, list[str], dict[str, Any]]] = []
    for entry in entries:
        name, alias_of = str(entry.get("id")), entry.get("alias_of")
        if alias_of is None or not found:
            found.append((name, [], entry))
        else:
            found[-1][1].append(name)
    return found
