"""A client and its worker process, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from quire.engine.composition import EngineConfig
from quire.engine.generation import Delta, GenerationParams, GenerationRequest
from quire.engine.model_text import ModelText
from quire.engine.worker.client import EngineClient
from quire.engine.worker.protocol import Stats
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
