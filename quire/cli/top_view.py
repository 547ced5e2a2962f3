"""One frame of `quire top`: a snapshot of /v1/watch as text. Fits 80 columns and is complete without colours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from quire.cli.server_client import printable
from quire.sizes import reported_size

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
    head.append(
        f"  {printable(engine['backend'])}, {printable(engine['device'])}, {printable(engine['dtype'])}", "bright_black"
    )
    ttft = "-"
    if engine["num_ttft"]:
        ttft = f"{engine['ttft_s_p50']:.3f} / {engine['ttft_s_p95']:.3f}"
    return [
        head,
        _line(
            f"memory    weights {reported_size(engine['weight_bytes'])},"
            f" KV {reported_size(engine['kv_bytes'])}{_pool(engine)}"
        ),
        *_blocks(engine["blocks"], width, kind),
        *_pools(engine),
        _line(
            f"speed     {engine['prefill_tokens_per_s']:,.0f} prompt tok/s, {engine['decode_tokens_per_s']:,.0f} answer"
            f" tok/s; TTFT p50 / p95 {ttft} s"
        ),
        *_drafts(engine),
        _line(
            f"cache     {engine['hit_rate']:.1%} hits, {engine['num_evictions']:,} evicted,"
            f" {engine['num_preemptions']:,} preempted, {engine['num_pins']:,} pins"
        ),
        _line(f"queue     {engine['num_running']:,} running; waiting {', '.join(map(_tier, engine['tiers']))}"),
        *_replicas(engine.get("replicas") or ()),
        *_troubles(engine),
    ]


def _drafts(engine: dict[str, Any]) -> list[Text]:
    """Guessed tokens, if there were any. Older servers do not report them."""
    if not (num_drafted := engine.get("num_draft_tokens", 0)):
        return []
    num_accepted = engine["num_draft_tokens_accepted"]
    return [
        _line(f"drafts    {num_accepted:,} of {num_drafted:,} guessed tokens right ({num_accepted / num_drafted:.0%})")
    ]


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


def _blocks(blocks: dict[str, Any] | None, width: int, kind: int) -> list[Text]:
    """A bar of all blocks by state and their numbers. `kind` selects the mark."""
    if blocks is None:
        return []
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


def _pools(engine: dict[str, Any]) -> list[Text]:
    """Window blocks and recurrent states, if the model has them. Older servers do not report them."""
    lines = []
    for field, words in (("windows", ("held", "cached")), ("states", ("held", "snapshots"))):
        pool = engine.get(field)
        if pool is not None:
            size = f" in {reported_size(pool['num_bytes'])}" if pool["num_bytes"] else ""
            lines.append(
                _line(
                    f"{field:<10}{pool['in_use']:,} {words[0]}, {pool['cached']:,} {words[1]}, {pool['free']:,} free"
                    f"{size}; {pool['num_evictions']:,} evicted"
                )
            )
    return lines


def _pool(engine: dict[str, Any]) -> str:
    blocks = engine["blocks"]
    return "" if blocks is None else f" in {blocks['num_blocks']:,} blocks of {blocks['block_size']} tokens"


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


def _replicas(replicas: Sequence[dict[str, Any]]) -> list[Text]:
    """A line for each replica of a cluster. Older servers do not report them."""
    lines = []
    for number, one in enumerate(replicas):
        title = "replicas" if not number else ""
        hits = one["num_hit_tokens"] / one["num_queried_tokens"] if one["num_queried_tokens"] else 0.0
        held = 1 - one["num_free_blocks"] / one["num_blocks"] if one["num_blocks"] else 0.0
        text = f"{printable(one['name'])}: {one['num_requests']:,} running or waiting, {one['num_routed']:,} so far,"
        text += f" {hits:.1%} hits, {held:.0%} of its blocks held" + ("" if one["is_accepting"] else ", stopping")
        lines.append(_line(f"{title:<10}{text}"))
    return lines


def _troubles(engine: dict[str, Any]) -> list[Text]:
    found: list[str] = []
    if not engine["is_moving"]:
        found.append("its process has work but sends no messages")
    if engine["num_restarts"]:
        found.append(f"its process was restarted {engine['num_restarts']:,} times")
    return [_line(f"trouble   {'; '.join(found)}", "red")] if found else []


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
