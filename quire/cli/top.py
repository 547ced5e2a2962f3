"""`quire top`: the activity of a server in the terminal, from /v1/watch as on its web page."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.server_client import PATIENT, ServerClient, ServerError, chosen_key, require_address
from quire.cli.terminal import echo
from quire.errors import InvalidRequest, QuireError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

RETRY_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 60.0

Snapshot = dict[str, Any]  # `WatchSnapshot` of quire/server/observability/snapshot.py, not validated


def top(
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between two updates.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print snapshots as JSON, one per line.")] = False,
) -> None:
    """Show the activity of a server: models, memory, blocks, queue, requests, speed. Ctrl-C ends it."""
    if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
        raise InvalidRequest(f"--interval {interval:g} is not from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
    address = require_address(server)
    if not (once or as_json or sys.stdout.isatty()):
        raise InvalidRequest("stdout is not a terminal: --once prints one frame, --json prints snapshots")
    source = ServerClient(address.url, chosen_key(api_key), PATIENT)
    if once:
        _print_once(source, as_json=as_json)
        return
    with suppress(KeyboardInterrupt, BrokenPipeError):
        if as_json:
            for snapshot in snapshots(source, interval):
                echo(json.dumps(snapshot))
        else:
            _draw_live(source, interval)


# Snapshots


def look(server: ServerClient) -> Snapshot:
    """Get one snapshot."""
    return _checked(server, server.get("/v1/watch?once=true"))


def snapshots(server: ServerClient, interval_s: float) -> Iterator[Snapshot]:
    """Snapshots as they arrive. Raises when the stream ends."""
    with server.events("GET", f"/v1/watch?interval_ms={round(interval_s * 1000)}") as events:
        for data in events:
            yield _checked(server, server.parse(data))
    raise ServerError(f"{server.url} ended the stream")


def _checked(server: ServerClient, found: Any) -> Snapshot:
    if not isinstance(found, dict) or not isinstance(found.get("models"), list):
        raise server.malformed("a malformed snapshot", found)
    return found


# Output


def _print_once(server: ServerClient, *, as_json: bool) -> None:
    snapshot = look(server)
    if as_json:
        echo(json.dumps(snapshot))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_frame(server, snapshot, console, None))


def _draw_live(server: ServerClient, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    last: Snapshot | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for snapshot in snapshots(server, interval_s):
                    last = snapshot
                    live.update(_frame(server, snapshot, console, console.height), refresh=True)
            except QuireError as error:
                if last is None or isinstance(error, InvalidRequest):
                    raise  # not reachable from the start, or a refusal
                away = f"disconnected: {error}. Trying again"
                live.update(_frame(server, last, console, console.height, away), refresh=True)
            time.sleep(RETRY_S)


def _frame(server: ServerClient, snapshot: Snapshot, console: Console, height: int | None, away: str = "") -> Text:
    """One frame. A snapshot that cannot be drawn is an error of the server."""
    from quire.cli.top_view import Screen, draw

    screen = Screen(console.width, height, is_ascii=console.options.ascii_only)
    try:
        return draw(snapshot, server.url, screen, away)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise server.malformed("a malformed snapshot", snapshot) from None
