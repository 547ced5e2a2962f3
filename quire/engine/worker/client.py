"""The asyncio client of a model in a worker process.

`EngineClient` starts a worker when needed, replaces one that ended, and submits requests. After a failure the next
request starts a new worker, unless `supervise` has done so already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from quire.backends.base import Capacity, Progress
from quire.core.cache.prefix import CacheExplanation, StopReason
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.model_text import ModelText
from quire.engine.outputs import Answers, GenerationOutput
from quire.engine.params import GenerationRequest, PinPrefix, check_pin_id
from quire.engine.worker.block_map import BlocksView
from quire.engine.worker.connection import SafeCallback, WorkerConnection
from quire.engine.worker.generation import Generation
from quire.engine.worker.kv_events import KvEventsConfig
from quire.engine.worker.process import HANG_LIMIT_S
from quire.engine.worker.protocol import (
    Blocks,
    BlocksViewed,
    CacheAnswer,
    ClearCache,
    DropBlocks,
    Explain,
    Explained,
    FindHeld,
    GetBlocks,
    GetStats,
    HeldFound,
    PinCache,
    Ready,
    ReplicaStatus,
    Stats,
    Stepped,
    UnpinCache,
    ViewBlocks,
)
from quire.errors import CacheFolderError, InvalidRequest, QueueFull, QuireError, WorkerDied

MAX_BACKOFF_S = 30.0

log = logging.getLogger(__name__)


class EngineClient:
    """Submits requests and queries to a worker, which it starts and restarts.

    Must be used from a single event loop. `async with` closes it and ends its worker.
    """

    def __init__(
        self,
        path: Path,
        text: ModelText,
        config: EngineConfig,
        *,
        on_loading: Progress | None = None,
        hang_limit_s: float = HANG_LIMIT_S,
        on_step: Callable[[Stepped], None] | None = None,
        on_gap: Callable[[float, int], None] | None = None,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        """`on_gap`: called with the time between a token and the one before it, and the number of tokens with that gap.

        The tokens of one answer that arrive together count as evenly spaced. `kv_events`: where the worker announces
        its cache.
        """
        self.text = text
        self.max_model_len = text.spec.max_model_len  # until the worker reports what fits its pool
        self._path = path
        self._config = config
        self._kv_events = kv_events
        self._on_loading = SafeCallback("on_loading", on_loading)
        self._on_step = SafeCallback("on_step", on_step)
        self._on_gap = SafeCallback("on_gap", on_gap)
        self._hang_limit_s = hang_limit_s
        self._connection: WorkerConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._pause: asyncio.Task[None] | None = None  # backoff before the next start
        self._ids = count(1)
        self._num_starts = 0
        self._num_early_deaths = 0  # in a row, without a finished request in between
        self._is_closed = False

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def facts(self) -> Ready | None:
        """The running worker's report about itself; None if there is no worker."""
        connection = self._serving_connection()
        return None if connection is None else connection.facts

    @property
    def system_fingerprint(self) -> str | None:
        """Identifies everything on this side that changes answers. None: not known yet, see `Fingerprinting`."""
        return (self.facts.system_fingerprint or None) if self.facts is not None else None

    @property
    def is_caching(self) -> bool:
        return self._config.enable_prefix_caching

    @property
    def capacity(self) -> Capacity | None:
        return None if self.facts is None else self.facts.capacity

    @property
    def scheduling(self) -> Scheduling | None:
        """The scheduling settings of the running worker."""
        return None if self.capacity is None else self._config.scheduling(self.capacity)

    @property
    def worker_pid(self) -> int | None:
        return None if self._connection is None or self._connection.process.is_over else self._connection.process.pid

    @property
    def is_moving(self) -> bool:
        """Whether a worker is ready, and is idle or sent a message recently."""
        connection = self._serving_connection()
        return connection is not None and connection.is_moving

    @property
    def num_restarts(self) -> int:
        """The number of workers started after the first."""
        return max(self._num_starts - 1, 0)

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        """Empty: the model has a single worker on this machine."""
        return ()

    async def start(self) -> None:
        """Load the model now instead of at the first request."""
        await self._ready_connection()

    async def supervise(self) -> None:
        """Keep a worker running until cancelled or closed: start another when one dies.

        A failure of the first start is raised, because a retry would not help. Later failures are logged and retried
        after a pause.
        """
        is_first = True
        while True:
            try:
                connection = await self._ready_connection()
            except QuireError as error:
                if self._is_closed:
                    return
                if is_first:
                    raise
                log.error("%s could not be started again: %s", self.text.name, error)
            else:
                if not is_first:
                    log.warning("%s is ready again", self.text.name)
                is_first = False
                await connection.ended.wait()

    async def submit(
        self,
        request: GenerationRequest,
        *,
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Submit a request. Starts a worker if there is none.

        `updated` is set whenever this generation changes. Several generations may share it; see `Generation.take`.
        `on_start` is called when the request is admitted, before its first step; it must not raise.
        """
        connection = await self._ready_connection()
        request_ids = tuple(next(self._ids) for _ in range(request.n))
        generation = Generation(
            Answers(request, self.text.tokenizer), request_ids, connection.cancel, updated, on_start
        )
        connection.submit(request, generation)
        return generation

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await (await self.submit(request)).result()

    async def close(self) -> None:
        """End the worker. Unfinished requests fail."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.fail(WorkerDied("the engine was closed"))
            await connection.process.close()

    # Queries to the running worker. They never start one: without a worker there is no cache.

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation:
        """How much of this prompt is cached now, and why not more. Changes nothing."""
        request = GenerationRequest(prompt, SamplingParams(), salt=salt)  # refuses an invalid prompt
        if (connection := self._serving_connection()) is None:
            return CacheExplanation(0, 0, 0, StopReason.NOT_FOUND)
        answer = await connection.ask(Explain(next(self._ids), request.packed, request.salt))
        assert isinstance(answer, Explained)
        if answer.explanation is None:
            raise InvalidRequest(answer.error or "no explanation")
        return answer.explanation

    async def stats(self) -> Stats | None:
        """None if there is no worker."""
        if (connection := self._serving_connection()) is None:
            return None
        answer = await connection.ask(GetStats(next(self._ids)))
        assert isinstance(answer, Stats)
        return answer

    async def blocks(self, max_cells: int) -> Blocks | None:
        """The block map, in at most `max_cells` cells. The worker maintains it until `drop_blocks`."""
        if (connection := self._serving_connection()) is None:
            return None
        answer = await connection.ask(GetBlocks(next(self._ids), max_cells))
        assert isinstance(answer, Blocks)
        return answer

    async def view_blocks(self, first: int, count: int) -> BlocksView | None:
        """The holders and fill levels of these blocks."""
        if (connection := self._serving_connection()) is None:
            return None
        answer = await connection.ask(ViewBlocks(next(self._ids), first, count))
        assert isinstance(answer, BlocksViewed)
        if answer.view is None:
            raise InvalidRequest(answer.error or "no such blocks")
        return answer.view

    async def find_held(self, request_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The blocks that these requests hold, as (first, count)."""
        if (connection := self._serving_connection()) is None:
            return ()
        answer = await connection.ask(FindHeld(next(self._ids), request_ids))
        assert isinstance(answer, HeldFound)
        return answer.ranges

    def drop_blocks(self) -> None:
        """Stop maintaining the block map."""
        if (connection := self._serving_connection()) is not None:
            with suppress(QueueFull):  # it is sent again next time
                connection.process.send(DropBlocks())

    async def clear_cache(self) -> None:
        """Drop all cached content and all pins. Running requests keep their blocks.

        Raises CacheFolderError if files of the disk cache cannot be deleted; the rest is cleared.
        """
        await self._change_cache(ClearCache(next(self._ids)), CacheFolderError)

    async def pin(self, pin_id: str, prompt: tuple[int, ...], salt: str, ttl_s: float) -> int:
        """Pin the cached full blocks of this prefix for `ttl_s`. Returns their number of tokens."""
        pin = PinPrefix(pin_id, len(prompt), ttl_s)
        request = GenerationRequest(prompt, SamplingParams(), salt=salt, pins=(pin,))  # refuses an invalid pin
        answer = await self._change_cache(PinCache(next(self._ids), pin_id, request.packed, salt, ttl_s))
        return 0 if answer is None else answer.num_tokens

    async def unpin(self, pin_id: str) -> bool:
        """Returns False if there is no pin of that name."""
        check_pin_id(pin_id)
        answer = await self._change_cache(UnpinCache(next(self._ids), pin_id))
        return answer is not None and answer.is_found

    async def _change_cache(
        self, order: ClearCache | PinCache | UnpinCache, error_type: type[QuireError] = InvalidRequest
    ) -> CacheAnswer | None:
        if (connection := self._serving_connection()) is None:
            return None
        answer = await connection.ask(order)
        assert isinstance(answer, CacheAnswer)
        if answer.error is not None:
            raise error_type(answer.error)
        return answer

    # The worker

    async def _ready_connection(self) -> WorkerConnection:
        """The connection to a ready worker. Waits while it loads; cancelling one waiter does not affect others."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequest("this EngineClient belongs to another event loop: create a new one")
        self._loop = loop
        async with self._starting:
            connection = self._connection
            if connection is None or connection.process.is_over:
                await self._back_off()
                if self._is_closed:
                    raise WorkerDied("the engine was closed")
                connection = self._start_worker()
        await asyncio.shield(connection.ready)
        assert connection.facts is not None
        self.max_model_len = connection.facts.max_model_len
        return connection

    def _start_worker(self) -> WorkerConnection:
        self._num_starts += 1
        try:
            connection = WorkerConnection(
                self.text.name,
                self._hang_limit_s,
                on_loading=self._on_loading,
                on_step=self._on_step,
                on_gap=self._on_gap,
                on_end=self._count_death,
            )
        except OSError as error:  # out of processes, descriptors or memory
            self._count_death(False)
            raise WorkerDied(f"no process could be started for {self.text.name}: {error}") from error
        self._connection = connection
        connection.load(self._path, self._config, self._kv_events)
        return connection

    def _serving_connection(self) -> WorkerConnection | None:
        connection = self._connection
        is_serving = connection is not None and connection.facts is not None and not connection.process.is_over
        return connection if is_serving else None

    def _count_death(self, has_served: bool) -> None:
        self._num_early_deaths = 1 if has_served else self._num_early_deaths + 1

    async def _back_off(self) -> None:
        """Wait before the next start, longer after each early death in a row, or until the client is closed."""
        if self._num_early_deaths < 2 or self._is_closed:
            return
        delay_s = min(2.0 ** min(self._num_early_deaths - 2, 10), MAX_BACKOFF_S)
        log.warning("%s died %d times in a row: waiting %g s", self.text.name, self._num_early_deaths, delay_s)
        self._pause = asyncio.create_task(asyncio.sleep(delay_s))
        try:
            await asyncio.wait([self._pause])
        finally:
            self._pause.cancel()
            self._pause = None
