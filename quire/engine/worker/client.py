"""The asyncio client of a model in a worker process.

`WorkerConnection` is the connection to one worker: it routes messages to requests, and fails them when the worker dies
or hangs. `EngineClient` is what callers use: it starts a worker when needed, replaces one that ended, and submits
requests. After a failure the next request starts a new worker, unless `supervise` has done so already.

Detokenization and stop strings run on this side, so that the worker only executes steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from quire import errors
from quire.backends.base import Capacity, Progress
from quire.core.block_map import BlocksView
from quire.core.prefix import CacheExplanation, StopReason
from quire.core.request import SamplingParams
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.engine import EngineOutput
from quire.engine.model_text import ModelText
from quire.engine.outputs import Answers, GenerationOutput
from quire.engine.params import GenerationRequest, PinPrefix, check_pin_id
from quire.engine.worker.generation import Generation
from quire.engine.worker.kv_events import KvEventsConfig
from quire.engine.worker.process import HANG_LIMIT_S, WorkerProcess
from quire.engine.worker.protocol import (
    Add,
    Answer,
    Begun,
    Blocks,
    BlocksViewed,
    CacheAnswer,
    Cancel,
    ClearCache,
    DropBlocks,
    Explain,
    Explained,
    Failed,
    FindHeld,
    Finish,
    FromWorker,
    GetBlocks,
    GetStats,
    HeldFound,
    Load,
    Loading,
    PinCache,
    Query,
    Ready,
    Refused,
    Stats,
    Stepped,
    UnpinCache,
    ViewBlocks,
    Working,
)
from quire.errors import (
    CacheFolderError,
    InvalidRequest,
    LostBeforeStart,
    QueueFull,
    QuireError,
    RequestFailed,
    WorkerDied,
)

MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # if a worker was ready for this long, its death is not counted as a failed start
PROBE_ID = 0  # query id of probes; ids of callers start at 1
MOVING_LIMIT_S = 10.0  # allowed silence while there is work; after that, the worker is reported as stuck
LOAD_LIMIT_S = 180.0  # allowed silence while loading: importing libraries, or reading the largest tensor

log = logging.getLogger(__name__)


class SafeCallback:
    """An optional callback. If it raises, the exception is logged and it is not called again."""

    def __init__(self, name: str, function: Callable[..., None] | None) -> None:
        self._name = name
        self._function = function

    def __call__(self, *values: object) -> None:
        if self._function is None:
            return
        try:
            self._function(*values)
        except Exception:
            log.exception("%s raised; it is not called again", self._name)
            self._function = None


class WorkerConnection:
    """The connection to one worker process: its running requests and open queries.

    `on_end` is called when the worker has ended, unless it was closed on purpose. Its argument: whether the worker
    finished a request or was ready for `STEADY_S`.
    """

    def __init__(
        self,
        name: str,
        hang_limit_s: float,
        *,
        on_loading: SafeCallback,
        on_step: SafeCallback,
        on_gap: SafeCallback,
        on_end: Callable[[bool], None],
    ) -> None:
        self._name = name
        self._hang_limit_s = hang_limit_s
        self._on_loading = on_loading
        self._on_step = on_step
        self._on_gap = on_gap
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._alive: dict[int, tuple[Generation, int]] = {}  # request id -> its generation, index of the sample
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._error: QuireError | None = None  # reported by the worker before it ended
        self._is_probing = False
        self._has_served = False
        self._ready_s = 0.0
        self.facts: Ready | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)
        self.ended = asyncio.Event()
        self.process = WorkerProcess(self._take_message, self._take_end)

    @property
    def is_moving(self) -> bool:
        """Whether the worker is idle, or sent a message recently."""
        limit_s = max(MOVING_LIMIT_S, self.process.announced_s)
        return not self._is_busy or self.process.silence_s < limit_s

    @property
    def _is_busy(self) -> bool:
        return bool(self._alive or self._queries or self._is_probing)

    def load(self, path: Path, config: EngineConfig, kv_events: KvEventsConfig | None) -> None:
        self.process.send(Load(str(path), config, kv_events))
        self.process.expect_message(LOAD_LIMIT_S)

    def submit(self, request: GenerationRequest, generation: Generation) -> None:
        ids = generation.request_ids
        if self.process.is_over:  # `on_end` may have run already: this request would wait forever
            raise LostBeforeStart(f"the process that runs {self._name} has just ended and is being replaced")
        self.process.send(
            Add(
                ids,
                request.packed,
                request.sampling,
                request.priority,
                request.salt,
                request.pins,
                request.grammar,
                request.tenant,
                request.boundaries,
            )
        )
        self._alive |= {request_id: (generation, index) for index, request_id in enumerate(ids)}
        self._watch()

    def cancel(self, generation: Generation) -> None:
        is_alive = False
        for request_id in generation.request_ids:
            if (place := self._alive.pop(request_id, None)) is not None:
                is_alive = True
                generation.answers.cancel(place[1])
                self.process.send(Cancel(request_id))
        if is_alive:
            generation.wake()
            self._probe_if_idle()

    async def ask(self, query: Query) -> Answer:
        if self.process.is_over:
            raise WorkerDied(f"the process that runs {self._name} has just ended and is being replaced")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.process.send(query)
        self._queries[query.query_id] = answer
        self._watch()
        try:
            return await answer
        finally:
            self._queries.pop(query.query_id, None)
            if answer.cancelled():
                self._probe_if_idle()
            else:
                self._watch()

    def fail(self, error: QuireError) -> None:
        """Fail everything that waits for this worker."""
        if not self.ready.done():
            self.ready.set_exception(error)
        alive, self._alive = self._alive, {}
        for generation, index in alive.values():
            generation.answers.fail(index, str(error))
            generation.fail(error if generation.is_started else LostBeforeStart(str(error)))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(type(error)(str(error)))
        self.ended.set()

    def _take_message(self, message: FromWorker) -> None:
        match message:
            case Stepped():
                self._take_step(message)
            case Begun():
                self._begin(message)
            case Refused(request_ids=request_ids):
                self._refuse(request_ids, _error(message.kind, message.message))
            case Loading(num_done=num_done, num_bytes=num_bytes):
                self._on_loading(num_done, num_bytes)
            case Ready():
                self.facts = message
                self._ready_s = self._loop.time()
                self._watch()
                if not self.ready.done():
                    self.ready.set_result(None)
            case Stats(query_id=query_id) if query_id == PROBE_ID:
                self._is_probing = False
                self._watch()
            case Explained() | Stats() | Blocks() | BlocksViewed() | HeldFound() | CacheAnswer():
                if (query := self._queries.get(message.query_id)) is not None and not query.done():
                    query.set_result(message)
            case Failed(kind=kind, message=text):
                self._error = _error(kind, text)
                self.process.end()  # at once, so that the next request starts another worker
            case Working():
                pass  # handled by the watchdog of the process

    def _begin(self, message: Begun) -> None:
        """Mark generations as started. The cache result is that of the first sample: the others share its KV."""
        for started in message.started:
            generation, index = self._alive.get(started.request_id, (None, 0))
            if generation is not None and (index == 0 or not generation.is_started):
                generation.start(started)

    def _take_step(self, message: Stepped) -> None:
        """Pass the outputs of a step on. This is the path of every generated token.

        `Generation.push_token` takes tokens of plain text. With a `sink` they are on their way to the client when it
        returns: no task is woken. Everything else goes through `_take`. Times are taken once for the whole step, and
        equal gaps are counted together.
        """
        now_s = time.monotonic()
        previous: dict[float | None, int] = {}  # time of an answer's previous token -> number of such answers
        find = self._alive.get
        for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
            if (place := find(request_id)) is None:
                continue  # cancelled
            generation, index = place
            try:
                is_taken = generation.push_token(index, token_id, now_s, previous)
            except Exception as problem:
                self._fail_answer(generation, index, problem)
                continue
            if not is_taken:
                num_cached = generation.num_cached_tokens
                self._take(EngineOutput(request_id, (token_id,), None, num_cached, None, (), None, None), now_s)
        previous.pop(None, None)  # first tokens
        for last_s, num_answers in previous.items():
            assert last_s is not None
            self._on_gap(now_s - last_s, num_answers)
        for output in message.outputs:
            self._take(output, now_s)
        self._on_step(message)

    def _take(self, output: EngineOutput, now_s: float) -> None:
        place = self._alive.get(output.request_id)
        if place is None:
            return  # cancelled, or ended by a stop string
        generation, index = place
        try:
            delta = generation.answers.push(index, output)
            error = None if output.error is None else RequestFailed(output.error)
        except Exception as problem:
            self._fail_answer(generation, index, problem)
            return
        if error is not None:
            generation.fail(error)
            self.cancel(generation)
            return
        generation.push(delta)
        if delta.token_ids and (last_s := generation.note_tokens(index, now_s)) is not None:
            num_tokens = len(delta.token_ids)
            self._on_gap((now_s - last_s) / num_tokens, num_tokens)
        if delta.finish_reason is not None:
            self._has_served = True
            del self._alive[output.request_id]
            if output.finish_reason is None:
                self.process.send(Finish(output.request_id, generation.answers.num_tokens(index)))
            self._watch()

    def _fail_answer(self, generation: Generation, index: int, problem: Exception) -> None:
        """End a request whose answer could not be decoded. Other requests continue."""
        log.error("the answer of request %d could not be decoded", generation.request_ids[index], exc_info=problem)
        # quire/server/errors.py hides the rest of a message that starts like this.
        message = f"the answer could not be read: {type(problem).__name__}: {problem}"
        generation.answers.fail(index, message)
        generation.fail(RequestFailed(message))
        self.cancel(generation)

    def _refuse(self, request_ids: tuple[int, ...], error: QuireError) -> None:
        for request_id in request_ids:
            if (place := self._alive.get(request_id)) is not None:
                place[0].fail(error)
                self.cancel(place[0])

    def _take_end(self, reason: str) -> None:
        if self._error is None or self.facts is not None:  # else the start failed, and its caller reports why
            log.error("the process that runs %s %s", self._name, f"failed: {self._error}" if self._error else reason)
        is_steady = self.facts is not None and self._loop.time() - self._ready_s > STEADY_S
        self._on_end(self._has_served or is_steady)
        self.fail(self._error or WorkerDied(f"the process that runs {self._name} {reason} and is being replaced"))

    def _probe_if_idle(self) -> None:
        """Probe the worker after a cancellation, if nothing else waits for it.

        Without the probe a hang would go unnoticed if clients always cancel before the hang limit.
        """
        if not self._is_busy:
            self._is_probing = True
            with suppress(QueueFull):
                self.process.send(GetStats(PROBE_ID))
        self._watch()

    def _watch(self) -> None:
        """Set the hang limit. Loading has its own limit."""
        if self.facts is not None:
            self.process.expect_message(self._hang_limit_s if self._is_busy else None)


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


def _retrieve(ready: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if there is no waiter."""
    if not ready.cancelled():
        ready.exception()


def _error(kind: str, message: str) -> QuireError:
    """The exception for an error that the worker reported by name."""
    found = getattr(errors, kind, WorkerDied)
    is_known = isinstance(found, type) and issubclass(found, QuireError)
    return found(message) if is_known else WorkerDied(f"{kind}: {message}")
