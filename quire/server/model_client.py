"""What the server needs from a model's client: an `EngineClient`, or the client of a cluster (`quire/scale`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from quire.backends.base import Capacity, Progress
from quire.core.cache.prefix import CacheExplanation
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.model_text import ModelText
from quire.engine.params import GenerationRequest
from quire.engine.worker.block_map import BlocksView
from quire.engine.worker.client import EngineClient, Generation
from quire.engine.worker.protocol import Blocks, Ready, ReplicaStatus, Stats, Stepped
from quire.server.config import ModelConfig


class ModelClient(Protocol):
    """See `EngineClient`, which has the documentation of these methods."""

    max_model_len: int

    @property
    def facts(self) -> Ready | None: ...

    @property
    def system_fingerprint(self) -> str | None: ...

    @property
    def is_caching(self) -> bool: ...

    @property
    def capacity(self) -> Capacity | None: ...

    @property
    def scheduling(self) -> Scheduling | None: ...

    @property
    def is_moving(self) -> bool: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]: ...

    async def start(self) -> None: ...

    async def supervise(self) -> None: ...

    async def submit(
        self,
        request: GenerationRequest,
        *,
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> Generation: ...

    async def close(self) -> None: ...

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation: ...

    async def stats(self) -> Stats | None: ...

    async def blocks(self, max_cells: int) -> Blocks | None: ...

    async def view_blocks(self, first: int, count: int) -> BlocksView | None: ...

    async def find_held(self, request_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]: ...

    def drop_blocks(self) -> None: ...

    async def clear_cache(self) -> None: ...

    async def pin(self, pin_id: str, prompt: tuple[int, ...], salt: str, ttl_s: float) -> int: ...

    async def unpin(self, pin_id: str) -> bool: ...


class ClientSettings(NamedTuple):
    """What a client is made from."""

    model: ModelConfig
    text: ModelText
    engine: EngineConfig
    hang_limit_s: float
    on_loading: Progress
    on_step: Callable[[Stepped], None]
    on_gap: Callable[[float, int], None]


MakeClient = Callable[[ClientSettings], ModelClient]


def make_local_client(settings: ClientSettings) -> ModelClient:
    """A client whose worker runs on this machine."""
    return EngineClient(
        settings.model.path,
        settings.text,
        settings.engine,
        on_loading=settings.on_loading,
        hang_limit_s=settings.hang_limit_s,
        on_step=settings.on_step,
        on_gap=settings.on_gap,
        kv_events=settings.model.kv_events,
    )
