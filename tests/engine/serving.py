"""A client and its worker process, or a worker in a thread, for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner
from quire.core.events import Event
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.engine.generation import Delta, Generation, GenerationOutput, GenerationParams, GenerationRequest
from quire.engine.model_text import ModelText
from quire.engine.worker.client import EngineClient, ModelClient, WorkerProcess
from quire.engine.worker.protocol import (
    Add,
    Answered,
    Ask,
    Channel,
    FrameReader,
    FromWorker,
    GetStats,
    Stats,
    Stepped,
    ToWorker,
    from_worker,
    pack,
)
from quire.engine.worker.worker import Worker
from tests.waiting import HANG_S

T = TypeVar("T")
SLOW = {"backend": "fake", "device": "20ms"}  # per step: thousands of tokens outlast the rest of the test
OPTIONS = ("hang_limit_s", "on_loading", "on_step", "kv_events")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, HANG_S))


@asynccontextmanager
async def client(path: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    options = {name: settings.pop(name) for name in OPTIONS if name in settings}
    text = ModelText.open(path)
    config = EngineConfig(**{"num_blocks": 200, "max_num_seqs": 8, "threads": 1, **settings})
    engine = EngineClient(path, text, config, **options)
    try:
        yield engine
    finally:
        await engine.close()
        text.close()


def request(engine: EngineClient, prompt: str = "The quick brown fox", **params: Any) -> GenerationRequest:
    others = {name: params.pop(name) for name in ("priority", "salt", "pins") if name in params}
    settings = GenerationParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    return engine.text.request(engine.text.encode(prompt, engine.max_model_len), settings, **others)


async def result(generation: Generation) -> GenerationOutput:
    async for _ in generation.deltas():
        pass
    return generation.whole()


async def generate(engine: ModelClient, asked: GenerationRequest) -> GenerationOutput:
    return await result(await engine.submit(asked))


def worker_pid(engine: EngineClient) -> int | None:
    process = None if engine._connection is None else engine._connection.process
    return process.pid if isinstance(process, WorkerProcess) and not process.is_over else None


async def stats(engine: EngineClient) -> Stats:
    found = await engine.stats()
    assert found is not None
    return found


async def usage(engine: EngineClient) -> tuple[int, int, int]:
    """Running, waiting, blocks in use."""
    found = await stats(engine)
    return found.num_running, found.num_waiting, found.cache.num_in_use


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def until(is_true: Callable[[], bool]) -> None:
    """Poll a condition. The time limit of the test ends the wait."""
    while not is_true():
        await asyncio.sleep(0.01)


# A worker in a thread, so that its state can be seen and corrupted

CAPACITY = Capacity(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=100, vocab_size=50)


class Peer:
    """A minimal client of a worker."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._reader = FrameReader()
        self._frames: list[bytes] = []

    def send(self, message: ToWorker) -> None:
        self._peer.sendall(pack(message))

    def next(self) -> FromWorker:
        while not self._frames:
            self._frames += self._reader.feed(self._peer.recv(1 << 16))
        message: FromWorker = from_worker.decode(self._frames.pop(0))
        return message

    def stats(self) -> Stats:
        self.send(Ask(1, GetStats()))
        while not isinstance(message := self.next(), Answered) or message.query_id != 1:
            pass
        return msgspec.msgpack.decode(message.result, type=Stats)

    def answer(self, request_id: int, prompt: tuple[int, ...]) -> list[FromWorker]:
        """All messages until the request has finished."""
        self.ask(request_id, prompt)
        return self.until_answered()

    def ask(self, request_id: int, prompt: tuple[int, ...]) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=3)
        self.send(Add((request_id,), GenerationRequest.of(prompt, sampling)))

    def until_answered(self) -> list[FromWorker]:
        received: list[FromWorker] = []
        while not any(
            output.finish_reason for message in received if isinstance(message, Stepped) for output in message.outputs
        ):
            received.append(self.next())
        return received


@contextmanager
def working() -> Iterator[tuple[Peer, Engine]]:
    """A worker's loop in a thread. It ends with the context."""
    client_end, worker_end = socket.socketpair()
    client_end.settimeout(HANG_S)
    events: list[Event] = []
    runner = FakeRunner(CAPACITY)
    engine = Engine(runner, make_scheduler(runner, EngineConfig(), events.append))
    channel = Channel(worker_end)
    worker = Worker(channel, engine, events)

    def serve() -> None:
        with pytest.raises(ConnectionError):
            worker.run()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Peer(client_end), engine
    finally:
        client_end.close()
        thread.join(HANG_S)
        for end in (worker_end, channel._woken, channel._waker):
            end.close()
