"""Frames of `quire top`, from snapshots made with the server's types."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from rich.console import Console

from quire.cli.model_admin import MARKS, Screen, draw
from quire.server.watch import (
    BlockCounts,
    WatchedBlocks,
    WatchedEngine,
    WatchedModel,
    WatchedPool,
    WatchedRequest,
    WatchedTier,
    WatchSnapshot,
)
from tests.cli.runs import quire

URL = "http://127.0.0.1:8000"


def request(number: int, *, is_running: bool = True) -> WatchedRequest:
    return WatchedRequest(
        id=f"req_{number:024x}",
        key="alice",
        endpoint="/v1/chat/completions",
        tier="normal",
        is_running=is_running,
        num_samples=1,
        age_s=12.34,
        prompt_tokens=1200,
        cached_tokens=1100,
        computed_tokens=1250,
        completion_tokens=50,
        tokens_per_s=34.5,
        num_blocks=40,
    )


def engine(num_requests: int, counts: BlockCounts, **more: Any) -> WatchedEngine:
    blocks = WatchedBlocks(
        num_blocks=sum(msgspec.structs.astuple(counts)),
        block_size=32,
        blocks_per_cell=1,
        cells=(),
        counts=counts,
        max_holders=8,
        num_pending=0,
    )
    fields: dict[str, Any] = {
        "backend": "native 0.1",
        "device": "cpu",
        "dtype": "int8",
        "max_model_len": 8192,
        "weight_bytes": 138_000_000,
        "kv_bytes": 3 << 30,
        "is_moving": True,
        "num_restarts": 0,
        "age_s": 0.1,
        "num_running": 3,
        "num_waiting": 2,
        "num_steps": 1445,
        "num_preemptions": 7,
        "num_evictions": 1234,
        "num_queried_tokens": 100,
        "num_hit_tokens": 47,
        "hit_rate": 0.47,
        "num_pins": 1,
        "prefill_tokens_per_s": 1234.6,
        "decode_tokens_per_s": 345.0,
        "num_ttft": 23,
        "ttft_s_p50": 0.04,
        "ttft_s_p95": 0.11,
        "tiers": [WatchedTier("high", 0, 0, 0.0), WatchedTier("normal", 2, 99, 1.26), WatchedTier("low", 0, 0, 0.0)],
        "blocks": blocks,
        "requests": [request(number, is_running=number < 3) for number in range(num_requests)],
        "num_other_requests": 4,
    }
    return WatchedEngine(**{**fields, **more})


def model(name: str, running: WatchedEngine | None, **more: Any) -> WatchedModel:
    fields: dict[str, Any] = {
        "aliases": (),
        "state": "ready",
        "is_pinned": False,
        "num_bytes": 3 << 30,
        "progress": None,
        "num_waiting": 0,
    }
    return WatchedModel(name=name, engine=running, **{**fields, **more})


def snapshot(*models: WatchedModel, is_draining: bool = False) -> dict[str, Any]:
    """The snapshot as JSON."""
    whole = WatchSnapshot(
        at=1.7e9,
        tick=3,
        interval_ms=500,
        key="alice",
        is_admin=True,
        is_draining=is_draining,
        num_watchers=1,
        held_bytes=3 << 30,
        budget_bytes=None,
        models=list(models),
    )
    found = json.loads(msgspec.json.encode(whole))
    assert isinstance(found, dict)
    return found


COUNTS = BlockCounts(free=200, cached=120, in_use=60, shared=18, pinned=1)
USUAL = snapshot(model("smollm2", engine(5, COUNTS), is_pinned=True))


@dataclass
class Frame:
    lines: list[str]

    def line(self, start: str) -> str:
        (found,) = [line for line in self.lines if line.strip().startswith(start)]
        return found.strip()


def frame(found: dict[str, Any], screen: Screen, away: str = "", **console: Any) -> Frame:
    out = io.StringIO()
    Console(file=out, width=max(screen.width, 60), highlight=False, **console).print(draw(found, URL, screen, away))
    return Frame(out.getvalue().splitlines())


def test_all_the_facts_are_there_without_colour() -> None:
    found = frame(USUAL, Screen(80))
    assert found.line("quire ").startswith(f"quire {USUAL['version']} at {URL}")
    assert found.line("smollm2") == "smollm2  ready, pinned  native 0.1, cpu, int8"
    assert found.line("memory") == "memory    weights 132 MiB, KV 3.0 GiB in 399 blocks of 32 tokens"
    assert found.line("■ 1") == "■ 1 pinned  █ 18 shared  ▓ 60 held by one  ░ 120 cached  · 200 free"
    assert found.line("speed") == "speed     1,235 prompt tok/s, 345 answer tok/s; TTFT p50 / p95 0.040 / 0.110 s"
    assert found.line("cache") == "cache     47.0% hits, 1,234 evicted, 7 preempted, 1 pins"
    assert found.line("queue") == "queue     3 running; waiting 0 high, 2 normal (1.3 s), 0 low"
    assert found.line(f"req_{0:024x}").endswith("normal  12.3  1,200  1,100    50  34.5     40")
    assert found.line(f"req_{4:024x}").endswith("normal  12.3  1,200  1,100    50 waits     40")
    assert found.line("and 4 not shown here")
    assert "\x1b" not in "".join(found.lines)


def test_window_blocks_states_and_drafts_are_shown_if_there_are_any() -> None:
    lines = "".join(frame(USUAL, Screen(80)).lines)
    assert "windows" not in lines
    assert "states" not in lines
    assert "drafts" not in lines
    pools = {"windows": WatchedPool(6, 9, 5, 4, 0), "states": WatchedPool(2, 1700, 30, 61_234, 20 << 30)}
    drafts = {"num_draft_tokens": 2000, "num_draft_tokens_accepted": 1500}
    found = frame(snapshot(model("m", engine(0, COUNTS, **pools, **drafts))), Screen(80))
    assert found.line("drafts") == "drafts    1,500 of 2,000 guessed tokens right (75%)"
    assert found.line("windows") == "windows   5 held, 9 cached, 6 free; 4 evicted"
    assert found.line("states") == "states    30 held, 1,700 snapshots, 2 free in 20.0 GiB; 61,234 evicted"


def test_the_bar_is_in_proportion_and_shows_every_state() -> None:
    bar = frame(USUAL, Screen(80)).line("blocks").removeprefix("blocks").strip()
    assert len(bar) == 80 - len("  blocks    ")
    assert "".join(dict.fromkeys(bar)) == "■█▓░·"  # each once, in this order
    counts = {state: bar.count(mark) for state, (mark, _, _) in MARKS.items()}
    assert counts["pinned"] == 1  # of 399 blocks, and still visible
    assert counts["cached"] == 120 * 68 // 399


@pytest.mark.parametrize("counts", [BlockCounts(5, 0, 0, 0, 0), BlockCounts(0, 0, 0, 3, 0), BlockCounts(0, 0, 0, 0, 0)])
def test_a_bar_of_one_state_and_of_none(counts: BlockCounts) -> None:
    bar = frame(snapshot(model("m", engine(0, counts))), Screen(80)).line("blocks").removeprefix("blocks").strip()
    assert len(set(bar)) == (1 if any(msgspec.structs.astuple(counts)) else 0)


@pytest.mark.parametrize("width", [40, 60, 80, 81, 133, 250])
@pytest.mark.parametrize("height", [None, 4, 10, 24, 60])
@pytest.mark.parametrize("size", [1, 100_000])
def test_frames_fit_the_screen(width: int, height: int | None, size: int) -> None:
    counts = BlockCounts(*(size for _ in range(5)))
    models = [model("a" * 70, engine(100, counts)), model("other", None, state="loading", progress=0.4, num_waiting=2)]
    found = frame(snapshot(*models, is_draining=True), Screen(width, height, is_ascii=True), "away: it is gone")
    assert max(map(len, found.lines)) <= max(width, 60)
    assert height is None or len(found.lines) <= height
    assert all(line.isascii() for line in found.lines)
    assert "away: it is gone" in found.lines


def test_what_does_not_fit_is_counted() -> None:
    found = frame(snapshot(model("m", engine(100, COUNTS))), Screen(80, 24))
    shown = [line for line in found.lines if line.startswith("  req_")]
    assert len(shown) > 5
    assert found.line("and ") == f"and {100 + 4 - len(shown)} not shown here"


def test_models_that_are_not_loaded() -> None:
    models = [
        model("one", None, state="loading", progress=0.4, num_waiting=2),
        model("two", None, state="unloaded", num_bytes=0),
    ]
    found = frame(snapshot(*models), Screen(80))
    assert found.line("one") == "one  loading 40%, 3.0 GiB, 2 wait for it"
    assert found.line("two") == "two  unloaded"


def test_problems_are_reported() -> None:
    found = frame(snapshot(model("m", engine(0, COUNTS, is_moving=False, num_restarts=2))), Screen(80))
    assert (
        found.line("trouble")
        == ("trouble   its process has work but sends no messages; its process was restarted 2 times"[:78])
    )


def test_a_name_cannot_move_the_cursor_or_set_colours() -> None:
    found = frame(snapshot(model("a\x1b[2Jb[red]c\nd", engine(0, COUNTS))), Screen(80), force_terminal=False)
    assert found.line("a [2Jb[red]c d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "http://127.0.0.1:9", "--once"], "http://127.0.0.1:9 does not answer"),
        (["--once"], "QUIRE_SERVER is none: name one with --server URL"),
        (["--server", "http://127.0.0.1:9"], "stdout is not a terminal: --once prints one frame"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    outcome = quire("top", *arguments)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1
