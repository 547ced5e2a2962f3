"""A worker with a disk cache: it saves while idle and at its end, and goes on if files cannot be deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.core.check import check_scheduler
from quire.core.levels.levels import MIN_TIMEOUT_NS
from quire.core.levels.lower_level import LevelSpeed
from quire.core.step import Content
from quire.core.values import SamplingParams
from quire.engine.engine import Engine
from quire.engine.generation import GenerationRequest
from quire.engine.levels.block_file import DamagedBlock
from quire.engine.worker.protocol import Add, Stepped, Working
from quire.engine.worker.worker import SAVE_INTERVAL_S, Worker
from tests.engine.levels.contents import all_files
from tests.engine.levels.test_engine_levels import make
from tests.engine.serving import client, generate, request, run, stats
from tests.waiting import HANG_S, eventually


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
            raise ConnectionError
        return []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def prompt(num_tokens: int = 30) -> Add:
    return Add((1,), GenerationRequest.of(range(num_tokens), SamplingParams(temperature=0, max_tokens=2)))


def serve(engine: Engine, channel: Script) -> None:
    with pytest.raises(ConnectionError):
        Worker(channel, engine, []).run()  # type: ignore[arg-type]
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
            output = await generate(engine, asked)
            return output.usage.cached_tokens

    async def count() -> int:
        async with client(tiny_model, **settings) as engine:
            await engine.start()
            return (await stats(engine)).cache.levels[0].num_pieces

    assert run(work()) == 0
    num_files = len(all_files(tmp_path / "kv"))
    assert num_files > 0  # all of them, unless a disk needs seconds for each
    assert run(count()) == num_files


# A disk that does not answer


class HungDisk:
    """An engine whose disk has the content of `prompt()`, and whose reads wait until `answers` is set.

    Its clock advances by `tick_ns` with every reading.
    """

    def __init__(self, folder: Path) -> None:
        first = make(folder, is_late=False, disk_files=100)
        serve(first, Script([prompt()], lambda: not first.has_work))
        assert first.save_cache(HANG_S)
        first.close()
        self.engine = make(folder, is_late=False, disk_files=100)
        assert self.engine.transfers is not None
        assert self.engine.transfers.disk is not None
        self.transfers, self.levels = self.engine.transfers, self.engine.scheduler.cache.levels
        self.answers = threading.Event()
        self._read_many = self.engine.transfers.disk.read_many
        self.engine.transfers.disk.read_many = self._read  # type: ignore[method-assign]
        self.tick_ns = 0
        self._now_ns = self.engine.clock()
        self.engine.clock = self._clock
        self.num_steps = 0
        self.num_held: set[int] = set()  # blocks that were held while the request waited for the read

    def _read(self, contents: Sequence[Content], outs: Sequence[memoryview]) -> list[DamagedBlock | None]:
        assert self.answers.wait(HANG_S)
        return self._read_many(contents, outs)

    def _clock(self) -> int:
        self._now_ns += self.tick_ns
        return self._now_ns

    def has_ended(self) -> bool:
        """Advance the transfers. Returns whether none is in flight."""
        self.engine.idle()
        return not self.transfers.has_work

    def serve(self, orders: list[Any], is_over: Callable[[], bool]) -> list[Any]:
        """Run a worker. Returns what it sent."""

        def look() -> bool:
            self.num_steps += 1
            if len(self.engine.scheduler.waiting.load_waiters):
                pool = self.engine.scheduler.cache.pool
                self.num_held.add(pool.num_usable - pool.num_free)
            return is_over()

        channel = Script(orders, look)
        serve(self.engine, channel)
        return channel.sent


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    monkeypatch.setattr("quire.engine.levels.transfers.CLOSE_S", HANG_S)
    disk = HungDisk(tmp_path / "kv")
    yield disk
    disk.answers.set()
    disk.engine.close()


def test_a_request_computes_if_its_read_never_ends(hung: HungDisk) -> None:
    hung.tick_ns = MIN_TIMEOUT_NS // 20
    sent = hung.serve([prompt()], lambda: not hung.engine.has_work)
    outputs = [output for message in sent if isinstance(message, Stepped) for output in message.outputs]
    assert [output.finish_reason for output in outputs if output.finish_reason is not None] == ["length"]
    assert hung.num_held == {0}, "the read held no memory of the device"
    assert hung.transfers.has_work, "the read has not ended"
    pool = hung.engine.scheduler.cache.pool
    assert pool.num_free == pool.num_usable
    assert 0 < hung.levels.num_buffers[0] <= hung.levels.max_buffers[0]
    # The worker is idle: it saves, audits and sleeps, and does not wait for the read.
    assert hung.engine.save_cache(HANG_S)
    assert not hung.engine.has_idle_work
    num_reads = len(hung.levels.reads)
    hung.engine.scheduler.cache.evict_unused()
    hung.serve([prompt(20)], lambda: not hung.engine.has_work)
    assert len(hung.levels.reads) == num_reads, "nothing more is read from this disk"
    hung.answers.set()
    eventually(hung.has_ended, "the read ends")
    assert hung.levels.num_buffers == [0, 0, 0]
    assert len(hung.levels.reads) == 0


def test_a_worker_that_only_waits_for_a_read_sends_nothing(hung: HungDisk) -> None:
    """So the client's watchdog finds it, if the request is not sent back to compute."""
    sent = hung.serve([prompt()], lambda: hung.num_steps > 200)
    assert hung.engine.has_work
    assert not hung.engine.has_progressed
    assert len(sent) == 1, "the step in which the read began"
    assert hung.num_held == {0}
    hung.answers.set()
    sent = hung.serve([], lambda: not hung.engine.has_work)
    outputs = [output for message in sent if isinstance(message, Stepped) for output in message.outputs]
    assert [output.cache.source for output in outputs if output.cache is not None] == ["disk"]


def test_a_read_that_may_take_long_is_announced_once(hung: HungDisk) -> None:
    hung.levels.levels[0].speed = LevelSpeed(latency_ns=MIN_TIMEOUT_NS, bytes_per_s=10**9)
    sent = hung.serve([prompt()], lambda: hung.num_steps > 50)
    (announced,) = [message for message in sent if isinstance(message, Working)]
    assert announced.limit_s >= 10 * MIN_TIMEOUT_NS / 1e9


def test_an_engine_is_closed_although_a_read_hangs(hung: HungDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    hung.serve([prompt()], lambda: hung.num_steps > 3)
    monkeypatch.setattr("quire.engine.levels.transfers.CLOSE_S", 0.0)
    hung.engine.close()
    assert hung.transfers.has_work
