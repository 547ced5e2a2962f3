"""A worker with a disk cache: it saves while idle and at its end, and goes on if files cannot be deleted."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.core.check import check_scheduler
from quire.core.request import PackedPrompt, Priority, SamplingParams
from quire.engine.composition import EngineConfig
from quire.engine.engine import Engine
from quire.engine.model_text import ModelText
from quire.engine.worker.client import EngineClient
from quire.engine.worker.protocol import Add, CacheAnswer, ClearCache, Gone
from quire.engine.worker.worker import SAVE_INTERVAL_S, Observer, Worker
from quire.errors import CacheFolderError
from tests.engine.serving import client, request, run, stats
from tests.engine.tiers.contents import all_files
from tests.engine.tiers.test_engine_tiers import CAPACITY, Client, make


class Script:
    """A channel that gives the worker messages, and ends when a condition is true."""

    def __init__(self, orders: list[Any], is_over: Any) -> None:
        self._orders = orders
        self._is_over = is_over
        self.sent: list[Any] = []
        self.sleeps: list[float | None] = []

    def receive(self, timeout_s: float | None) -> list[Any]:
        self.sleeps.append(timeout_s)
        if self._orders:
            return [self._orders.pop(0)]
        if self._is_over():
            raise Gone
        return []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def prompt(num_tokens: int = 30) -> Add:
    tokens = PackedPrompt.of(tuple(range(num_tokens)))
    return Add((1,), tokens, SamplingParams(temperature=0, max_tokens=2), Priority.NORMAL, "")


def serve(engine: Engine, channel: Script) -> None:
    with pytest.raises(Gone):
        Worker(channel, engine, Observer()).run()  # type: ignore[arg-type]
    check_scheduler(engine.scheduler)


def test_an_idle_worker_saves_and_then_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.SAVE_AFTER_S", 0.0)  # this channel does not sleep
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.0)
    engine = make(tmp_path / "kv", is_late=False, disk_files=100)
    channel: Script = Script([prompt()], lambda: None in channel.sleeps)
    serve(engine, channel)
    assert not engine.has_idle_work
    saving = [sleep_s for sleep_s in channel.sleeps if sleep_s == SAVE_INTERVAL_S]
    assert saving
    first = channel.sleeps.index(SAVE_INTERVAL_S)
    assert channel.sleeps[first : first + len(saving)] == saving  # it does not spin while files are written
    num_cached = engine.scheduler.cache.stats().num_cached
    engine.close()
    assert len(all_files(tmp_path / "kv")) == num_cached > 5


def test_a_busy_worker_does_not_save_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.SAVE_AFTER_S", 1e9)
    engine = make(tmp_path / "kv", is_late=False, disk_files=100)
    serve(engine, Script([prompt()], lambda: not engine.has_work))
    assert engine.has_idle_work
    engine.close()
    assert all_files(tmp_path / "kv") == []


def test_files_that_cannot_be_deleted(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tmp_path / "kv", is_late=False, disk_files=100)

    def fail() -> None:
        raise OSError(30, "Read-only file system")

    assert engine.transfers is not None
    assert engine.transfers.disk is not None
    with monkeypatch.context() as patched:
        patched.setattr(engine.transfers.disk, "clear", fail)
        channel = Script([ClearCache(5), prompt()], lambda: not engine.has_work)
        serve(engine, channel)
    (answer,) = [message for message in channel.sent if isinstance(message, CacheAnswer)]
    assert answer.query_id == 5
    assert answer.error is not None
    assert answer.error.endswith("could be deleted: Read-only file system")
    with pytest.raises(CacheFolderError, match="Read-only"):
        run(clear_with(tiny_model, answer))
    client_ = Client(Random(0), CAPACITY)
    client_.send(engine)
    client_.finish(engine)
    engine.close()


async def clear_with(model: Path, answer: CacheAnswer) -> None:
    """Clear the cache through a client whose worker gives this answer."""

    class Connection:
        async def ask(self, _: object) -> CacheAnswer:
            return answer

    text = ModelText.open(model)
    engine = EngineClient(model, text, EngineConfig())
    engine._serving_connection = Connection  # type: ignore[assignment,method-assign]
    try:
        await engine.clear_cache()
    finally:
        text.close()


def test_a_worker_saves_at_its_end(tiny_model: Path, tmp_path: Path) -> None:
    """And a new one finds it. The end comes before the worker would save by itself, or soon after."""
    settings: dict[str, Any] = {
        "backend": "fake",
        "device": "300ms",
        "disk_cache": "1M",
        "cache_dir": str(tmp_path / "kv"),
    }

    async def work() -> int:
        async with client(tiny_model, **settings) as engine:
            asked = request(engine, "The quick brown fox jumps over the lazy dog. " * 8, max_tokens=1)
            output = await engine.generate(asked)
            return output.usage.cached_tokens

    async def count() -> int:
        async with client(tiny_model, **settings) as engine:
            await engine.start()
            return (await stats(engine)).cache.tiers[0].num_pieces

    assert run(work()) == 0
    num_files = len(all_files(tmp_path / "kv"))
    assert num_files > 0  # all of them, unless a disk needs seconds for each
    assert run(count()) == num_files
