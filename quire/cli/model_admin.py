"""Commands for a running server: `quire ps`, `top`, `load`, `unload`, `pin`, `unpin` and `cancel`.

`quire top` shows the activity of a server, from /v1/watch as on its web page. A frame is a snapshot as text. It fits 80
columns and is complete without colours.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.text import Text

from quire.cli import options
from quire.cli.http_stream import ServerNotFound, malformed, printable
from quire.cli.server_client import PATIENT, ServerClient, choose_address, chosen_key
from quire.cli.terminal import echo, show, table
from quire.errors import InvalidRequest, QuireError
from quire.sizes import reported_size

if TYPE_CHECKING:
    from rich.console import Console


Name = Annotated[str, typer.Argument(metavar="MODEL", help="A name or an alias that `quire ps` lists.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The id of a request that `quire ps` lists.")]


def _named(server: options.ServerOption = None, api_key: options.KeyOption = None) -> ServerClient:
    """The server in --server or QUIRE_SERVER, or that at the default address."""
    address = choose_address(server, is_local=False, engine_options=())
    if address is None:
        raise InvalidRequest("this command needs a server, and QUIRE_SERVER is none: name one with --server URL")
    return ServerClient(address.url, chosen_key(api_key), PATIENT)


def _remote(server: options.ServerOption = None, api_key: options.KeyOption = None) -> ServerClient:
    """The same server, once it is ready."""
    found = _named(server, api_key)
    try:
        found.wait_until_ready()
    except ServerNotFound as error:
        raise ServerNotFound(f"{error}; `quire serve` starts a server, --server URL names another") from None
    return found


@options.takes(remote=_remote)
def ps(
    *,
    remote: ServerClient,
    requests: Annotated[bool, typer.Option("--requests", help="List only the requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models of a server with their state and memory, and its current requests."""
    if as_json:
        found = remote.entries("/v1/requests", "requests") if requests else remote.entries("/v1/models", "models")
        echo(json.dumps(found, indent=2))
        return
    if not requests:
        _print_models(remote.entries("/v1/models", "models"))
    running = remote.entries("/v1/requests", "requests")
    if running and not requests:
        echo("")
    if running:
        _print_requests(running)
    elif requests:
        echo("no request is running")


@options.takes(remote=_remote)
def cancel(name: RequestId, *, remote: ServerClient) -> None:
    """Cancel a waiting or running request. An admin key cancels any request, another key its own."""
    found = remote.fetch(f"/v1/requests/{quote(name, safe='')}/cancel", {})
    if not isinstance(found, dict) or type(found.get("cancelled")) is not int:
        raise malformed(remote.url, "no number of cancelled requests", found)
    count = found["cancelled"]
    echo(f"{printable(name)} is cancelled{f' ({count} requests)' if count > 1 else ''}")


@options.takes(remote=_remote)
def load(name: Name, *, remote: ServerClient) -> None:
    """Load a model into a server and wait until it is ready. Other models are unloaded if memory is short."""
    _order(remote, "load", model=name)


@options.takes(remote=_remote)
def unload(
    name: Name,
    *,
    remote: ServerClient,
    force: Annotated[bool, typer.Option("--force", help="Cancel the requests of the model.")] = False,
) -> None:
    """Unload a model when its requests have finished. The next request loads it again."""
    _order(remote, "unload", model=name, force=force)


@options.takes(remote=_remote)
def pin(name: Name, *, remote: ServerClient) -> None:
    """Keep a model in memory once it is loaded, even if other models need the memory."""
    _order(remote, "pin", model=name)


@options.takes(remote=_remote)
def unpin(name: Name, *, remote: ServerClient) -> None:
    """Allow the server to unload a model when memory is short."""
    _order(remote, "unpin", model=name)


def _order(remote: ServerClient, verb: str, **body: Any) -> None:
    """Give the server an order about a model and print the state that the model has then."""
    found = remote.fetch(f"/v1/models/{verb}", body)
    if not isinstance(found, dict) or not isinstance(found.get("state"), str):
        raise malformed(remote.url, "no model state", found)
    pinned = ", pinned" if found.get("is_pinned") is True else ""
    echo(f"{printable(str(found.get('model')))} is {printable(found['state'])}{pinned}{_context_note(found)}")


def _context_note(found: dict[str, Any]) -> str:
    """A note if the KV cache limits the context; else empty."""
    length, full = found.get("max_model_len"), found.get("full_model_len")
    if found["state"] != "ready" or type(length) is not int or type(full) is not int or length >= full:
        return ""
    return f", with {length:,} tokens of context instead of {full:,}: its KV cache is too small for more"


def _print_models(entries: list[dict[str, Any]]) -> None:
    """One row for each model, with its aliases."""
    rows = []
    for entry in entries:
        if entry.get("alias_of") is not None:
            continue
        name = str(entry.get("id"))
        aliases = [str(other.get("id")) for other in entries if other.get("alias_of") == entry.get("id")]
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


RETRY_S = 1.0

# State of blocks -> mark in the bar, mark on ASCII terminals, colour.
MARKS = {
    "pinned": ("■", "P", "magenta"),
    "shared": ("█", "#", "yellow"),
    "in_use": ("▓", "=", "green"),
    "cached": ("░", "-", "blue"),
    "free": ("·", ".", "bright_black"),
}
NAMES = {"in_use": "held by one"}  # in statistics and metrics, `in_use` includes shared and pinned blocks
MIN_WIDTH = 60
MAX_BAR = 100
INDENT = "  "
COLUMNS = (  # of requests: title, field, width
    ("tier", "tier", 7),
    ("age s", "age_s", 6),
    ("prompt", "prompt_tokens", 7),
    ("cached", "cached_tokens", 7),
    ("out", "completion_tokens", 6),
    ("tok/s", "tokens_per_s", 6),
    ("blocks", "num_blocks", 7),
)

Snapshot = dict[str, Any]  # `WatchSnapshot` of quire/server/watch.py, not validated


@options.takes(remote=_named)
def top(
    *,
    remote: ServerClient,
    interval: Annotated[
        float, typer.Option(min=0.1, max=60, metavar="SECONDS", help="Seconds between two updates.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print snapshots as JSON, one per line.")] = False,
) -> None:
    """Show the activity of a server: models, memory, blocks, queue, requests, speed. Ctrl-C ends it."""
    if not (once or as_json or sys.stdout.isatty()):
        raise InvalidRequest("stdout is not a terminal: --once prints one frame, --json prints snapshots")
    interval_s = None if once else interval
    with suppress(KeyboardInterrupt, BrokenPipeError):
        if as_json:
            for snapshot in snapshots(remote, interval_s):
                echo(json.dumps(snapshot))
        else:
            _draw(remote, interval_s)


# Snapshots


def snapshots(server: ServerClient, interval_s: float | None) -> Iterator[Snapshot]:
    """Snapshots as they arrive; one if there is no interval. Raises when the stream ends."""
    if interval_s is None:
        yield _checked(server, server.fetch("/v1/watch?once=true"))
        return
    with server.sent(f"/v1/watch?interval_ms={round(interval_s * 1000)}") as stream:
        for found in stream.events():
            yield _checked(server, found)


def _checked(server: ServerClient, found: Any) -> Snapshot:
    if not isinstance(found, dict) or not isinstance(found.get("models"), list):
        raise malformed(server.url, "a malformed snapshot", found)
    return found


def _draw(server: ServerClient, interval_s: float | None) -> None:
    """Draw frames on the whole screen, or print one if there is no interval."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if interval_s is None:
        for snapshot in snapshots(server, None):
            console.print(_frame(server, snapshot, console, None))
        return
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
    screen = Screen(console.width, height, is_ascii=console.options.ascii_only)
    try:
        return draw(snapshot, server.url, screen, away)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise malformed(server.url, "a malformed snapshot", snapshot) from None


# Frames


@dataclass(frozen=True, slots=True)
class Screen:
    width: int
    height: int | None = None  # None: unlimited
    is_ascii: bool = False


def draw(snapshot: dict[str, Any], url: str, screen: Screen, away: str = "") -> Text:
    """Draw a frame. `away`: the reason why the server is disconnected; the snapshot is its last one."""
    width, height = max(screen.width, MIN_WIDTH), screen.height
    models = snapshot["models"]
    lines = [_head(snapshot, url, width)]
    if away:
        lines.append(Text(printable(away), "bold red"))
    bodies = [_model(model, width, 1 if screen.is_ascii else 0) for model in models]
    busy = [model for model in models if _num_requests(model)]
    room: int | None = None  # lines for the requests of each model
    if height is not None:
        room = (height - 1 - len(lines) - sum(len(body) + 1 for body in bodies)) // max(1, len(busy))
    for model, body in zip(models, bodies, strict=True):
        lines += [Text(), *body, *_requests(model, width, room)]
    for line in lines:
        line.truncate(width, overflow="crop")
    return Text("\n").join(lines[: height - 1] if height is not None else lines)


def _head(snapshot: dict[str, Any], url: str, width: int) -> Text:
    left = f"quire {printable(str(snapshot['version']))} at {url}"
    right = time.strftime("%H:%M:%S", time.localtime(float(snapshot["at"])))
    if snapshot["is_draining"]:
        right = f"draining  {right}"
    return Text(f"{left}{right:>{max(1, width - len(left))}}", "bold")


def _model(model: dict[str, Any], width: int, kind: int) -> list[Text]:
    head = Text.assemble((printable(model["name"]), "bold"), f"  {_state(model)}")
    engine = model["engine"]
    if engine is None:
        return [head]
    facts = ", ".join(printable(engine[field]) for field in ("backend", "device", "dtype"))
    head.append(f"  {facts}", "bright_black")
    blocks = engine["blocks"]
    pool = "" if blocks is None else f" in {blocks['num_blocks']:,} blocks of {blocks['block_size']} tokens"
    weights, kv = reported_size(engine["weight_bytes"]), reported_size(engine["kv_bytes"])
    lines = [head, _line(f"memory    weights {weights}, KV {kv}{pool}")]
    if blocks is not None:
        lines += _blocks(blocks, width, kind)
    # Pools of some models; drafts and replicas: older servers do not report them.
    for field, words in (("windows", ("held", "cached")), ("states", ("held", "snapshots"))):
        if (found := engine.get(field)) is not None:
            size = f" in {reported_size(found['num_bytes'])}" if found["num_bytes"] else ""
            lines.append(
                _line(
                    f"{field:<10}{found['in_use']:,} {words[0]}, {found['cached']:,} {words[1]},"
                    f" {found['free']:,} free{size}; {found['num_evictions']:,} evicted"
                )
            )
    ttft = f"{engine['ttft_s_p50']:.3f} / {engine['ttft_s_p95']:.3f}" if engine["num_ttft"] else "-"
    prefill, decode = engine["prefill_tokens_per_s"], engine["decode_tokens_per_s"]
    lines.append(_line(f"speed     {prefill:,.0f} prompt tok/s, {decode:,.0f} answer tok/s; TTFT p50 / p95 {ttft} s"))
    if num_drafted := engine.get("num_draft_tokens", 0):
        right = engine["num_draft_tokens_accepted"]
        lines.append(_line(f"drafts    {right:,} of {num_drafted:,} guessed tokens right ({right / num_drafted:.0%})"))
    lines.append(
        _line(
            f"cache     {engine['hit_rate']:.1%} hits, {engine['num_evictions']:,} evicted,"
            f" {engine['num_preemptions']:,} preempted, {engine['num_pins']:,} pins"
        )
    )
    waiting = ", ".join(map(_tier, engine["tiers"]))
    lines.append(_line(f"queue     {engine['num_running']:,} running; waiting {waiting}"))
    lines += map(_replica, itertools.chain(["replicas"], itertools.repeat("")), engine.get("replicas") or ())
    troubles = [] if engine["is_moving"] else ["its process has work but sends no messages"]
    if engine["num_restarts"]:
        troubles.append(f"its process was restarted {engine['num_restarts']:,} times")
    return [*lines, *([_line(f"trouble   {'; '.join(troubles)}", "red")] if troubles else [])]


def _state(model: dict[str, Any]) -> str:
    state = printable(model["state"])
    if model["progress"] is not None:
        state += f" {model['progress']:.0%}"
    if model["is_pinned"]:
        state += ", pinned"
    if model["engine"] is None and model["num_bytes"]:
        state += f", {reported_size(model['num_bytes'])}"
    if model["num_waiting"]:
        state += f", {model['num_waiting']:,} wait for it"
    return state


def _blocks(blocks: dict[str, Any], width: int, kind: int) -> list[Text]:
    """A bar of all blocks by state and their numbers. `kind` selects the mark."""
    counts = {state: int(blocks["counts"][state]) for state in MARKS}
    bar = _line("blocks    ")
    for state, size in _shares(counts, min(width - len(bar), MAX_BAR)).items():
        bar.append(MARKS[state][kind] * size, MARKS[state][2])
    lines = [bar, _line(" " * 8)]
    for state, marks in MARKS.items():
        words = f" {counts[state]:,} {NAMES.get(state, state)}"
        if len(lines[-1]) + len(words) + 3 > width:
            lines.append(_line(" " * 8))
        lines[-1].append("  ")
        lines[-1].append(marks[kind], marks[2])
        lines[-1].append(words)
    return lines


def _shares(counts: dict[str, int], width: int) -> dict[str, int]:
    """Number of cells for each state. A state with any block gets at least one."""
    total = sum(counts.values())
    sizes = {state: max(1, count * width // total) if count else 0 for state, count in counts.items()}
    largest = max(sizes, key=lambda state: sizes[state])
    sizes[largest] = max(0, sizes[largest] + width - sum(sizes.values()))
    return sizes if total else dict.fromkeys(counts, 0)


def _tier(tier: dict[str, Any]) -> str:
    name = f"{tier['num_waiting']:,} {printable(tier['tier'])}"
    return f"{name} ({tier['oldest_age_s']:.1f} s)" if tier["num_waiting"] else name


def _replica(title: str, one: dict[str, Any]) -> Text:
    hits = one["num_hit_tokens"] / one["num_queried_tokens"] if one["num_queried_tokens"] else 0.0
    held = 1 - one["num_free_blocks"] / one["num_blocks"] if one["num_blocks"] else 0.0
    return _line(
        f"{title:<10}{printable(one['name'])}: {one['num_requests']:,} running or waiting,"
        f" {one['num_routed']:,} so far, {hits:.1%} hits, {held:.0%} of its blocks held"
        f"{'' if one['is_accepting'] else ', stopping'}"
    )


def _num_requests(model: dict[str, Any]) -> int:
    engine = model["engine"]
    return 0 if engine is None else len(engine["requests"]) + engine["num_other_requests"]


def _requests(model: dict[str, Any], width: int, room: int | None) -> list[Text]:
    """A line for each request, in at most `room` lines with the title; the number of the others is printed."""
    total = _num_requests(model)
    if not total or (room is not None and room < 3):
        return []
    shown = model["engine"]["requests"]
    if room is not None and 1 + len(shown) + (len(shown) < total) > room:
        shown = shown[: room - 2]
    name_width = width - len(INDENT) - sum(size for _, _, size in COLUMNS)
    rows = [_line(f"{'request':<{name_width}}" + "".join(f"{title:>{size}}" for title, _, size in COLUMNS), "bold")]
    for one in shown:
        name = printable(one["id"]) + (f" x{one['num_samples']}" if one["num_samples"] > 1 else "")
        cells = {field: _cell(one[field]) for _, field, _ in COLUMNS}
        if not one["is_running"]:
            cells["tokens_per_s"] = "waits"
        row = "".join(f"{cells[field]:>{size}}" for _, field, size in COLUMNS)
        rows.append(_line(f"{name[: name_width - 1]:<{name_width}}{row}", "" if one["is_running"] else "bright_black"))
    if len(shown) < total:
        rows.append(_line(f"and {total - len(shown):,} not shown here"))
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return printable(value) if isinstance(value, str) else f"{value:,}"


def _line(text: str, style: str = "") -> Text:
    return Text(INDENT + text, style)
