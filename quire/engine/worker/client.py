"""A model in a process of its own, for asyncio: submit requests, iterate over text.

Detokenising and stop strings happen here, so that the worker does nothing but step. A crash or a hang over there fails
the requests it had, clearly. The next request gets a fresh worker, or `supervise` has started one by then.
"""

from __future__ import annotations

import asyncio
import logging
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
from quire.errors import InvalidRequest, LostBeforeStart, QueueFull, QuireError, RequestFailed, WorkerDied

MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # a worker that has been ready for so long did not die of its start
PROBE_ID = 0  # of a question of our own; those of callers count from 1
MOVING_LIMIT_S = 10.0  # of silence while there is work: it may come back, but nobody should rely on it
LOAD_LIMIT_S = 180.0  # of silence while loading: libraries from a cold disk, then the largest tensor

log = logging.getLogger(__name__)


class EngineClient:
    """Belongs to the event loop that first uses it. `async with` closes it, and with it its worker."""

    def __init__(
        self,
        path: Path,
        text: ModelText,
        config: EngineConfig,
        *,
        on_loading: Progress | None = None,
        hang_limit_s: float = HANG_LIMIT_S,
        on_step: Callable[[Stepped], None] | None = None,
    ) -> None:
        self.text = text
        self.max_model_len = text.spec.max_model_len  # until the worker says what fits its pool
        self._path = path
        self._config = config
        self._on_loading = Hook("on_loading", on_loading)
        self._on_step = Hook("on_step", on_step)
        self._hang_limit_s = hang_limit_s
        self._link: WorkerConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._pause: asyncio.Task[None] | None = None  # before the next start
        self._ids = count(1)
        self._num_starts = 0
        self._num_early_deaths = 0  # in a row, with nothing served in between
        self._is_closed = False

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def facts(self) -> Ready | None:
        """What the worker that serves said of itself; None where none does."""
        link = self._serving_link()
        return None if link is None else link.facts

    @property
    def is_caching(self) -> bool:
        return self._config.enable_prefix_caching

    @property
    def capacity(self) -> Capacity | None:
        return None if self.facts is None else self.facts.capacity

    @property
    def scheduling(self) -> Scheduling | None:
        """What the worker that serves schedules by."""
        return None if self.capacity is None else self._config.scheduling(self.capacity)

    @property
    def worker_pid(self) -> int | None:
        return None if self._link is None or self._link.process.is_over else self._link.process.pid

    @property
    def is_moving(self) -> bool:
        """A worker serves, and nothing is asked of it or it was heard of lately: its steps are a sign of life."""
        link = self._serving_link()
        return link is not None and link.is_moving

    @property
    def num_restarts(self) -> int:
        """Workers started beyond the first."""
        return max(self._num_starts - 1, 0)

    async def start(self) -> None:
        """Load the model now. Without this, the first request does."""
        await self._ready_link()

    async def supervise(self) -> None:
        """See to it that a worker serves, until cancelled or closed: when one dies, start another without being asked.

        What goes wrong the first time is raised: a model that cannot be loaded will not be by trying again. Later
        failures are logged, and tried again after a pause.
        """
        is_first = True
        while True:
            try:
                link = await self._ready_link()
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
                await link.ended.wait()

    async def submit(
        self,
        request: GenerationRequest,
        *,
        news: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Hand a request to the worker, starting one if there is none.

        `news` is set whenever anything about this generation changes. Several may share it; see `Generation.take`.
        `on_start` is called when it begins, before its first step; it must not raise.
        """
        link = await self._ready_link()
        request_ids = tuple(next(self._ids) for _ in range(request.n))
        generation = Generation(Answers(request, self.text.tokenizer), request_ids, link.cancel, news, on_start)
        link.submit(request, generation)
        return generation

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await (await self.submit(request)).result()

    async def close(self) -> None:
        """End the worker. Requests that are still under way fail."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.fail(WorkerDied("the engine was closed"))
            await link.process.close()

    # Questions to the worker that serves. Asking loads nothing: where none does, there is no cache.

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation:
        """What the cache would give this prompt now. Changes nothing."""
        request = GenerationRequest(prompt, SamplingParams(), salt=salt)  # refuses what is no prompt
        if (link := self._serving_link()) is None:
            return CacheExplanation(0, 0, 0, StopReason.NOT_FOUND)
        answer = await link.ask(Explain(next(self._ids), request.packed, request.salt))
        assert isinstance(answer, Explained)
        if answer.explanation is None:
            raise InvalidRequest(answer.error or "no explanation")
        return answer.explanation

    async def stats(self) -> Stats | None:
        """None where no worker serves."""
        if (link := self._serving_link()) is None:
            return None
        answer = await link.ask(GetStats(next(self._ids)))
        assert isinstance(answer, Stats)
        return answer

    async def blocks(self, max_cells: int) -> Blocks | None:
        """The map of the pool in at most so many cells. The worker keeps one from now on: see `drop_blocks`."""
        if (link := self._serving_link()) is None:
            return None
        answer = await link.ask(GetBlocks(next(self._ids), max_cells))
        assert isinstance(answer, Blocks)
        return answer

    async def view_blocks(self, first: int, count: int) -> BlocksView | None:
        """Who holds these blocks, and how full they are."""
        if (link := self._serving_link()) is None:
            return None
        answer = await link.ask(ViewBlocks(next(self._ids), first, count))
        assert isinstance(answer, BlocksViewed)
        if answer.view is None:
            raise InvalidRequest(answer.error or "no such blocks")
        return answer.view

    async def find_held(self, request_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The blocks that these requests hold, as (first, how many)."""
        if (link := self._serving_link()) is None:
            return ()
        answer = await link.ask(FindHeld(next(self._ids), request_ids))
        assert isinstance(answer, HeldFound)
        return answer.ranges

    def drop_blocks(self) -> None:
        """Nobody looks at the map any more."""
        if (link := self._serving_link()) is not None:
            with suppress(QueueFull):  # then it is told the next time
                link.process.send(DropBlocks())

    async def clear_cache(self) -> None:
        """Forget all cached content and all pins. Requests under way keep their blocks."""
        await self._change_cache(ClearCache(next(self._ids)))

    async def pin(self, pin_id: str, prompt: tuple[int, ...], salt: str, ttl_s: float) -> int:
        """Keep what the cache has of this prefix for so long. Returns how many tokens that is: full blocks."""
        pin = PinPrefix(pin_id, len(prompt), ttl_s)
        request = GenerationRequest(prompt, SamplingParams(), salt=salt, pins=(pin,))  # refuses what cannot be pinned
        answer = await self._change_cache(PinCache(next(self._ids), pin_id, request.packed, salt, ttl_s))
        return 0 if answer is None else answer.num_tokens

    async def unpin(self, pin_id: str) -> bool:
        """False if there is no pin of that name."""
        check_pin_id(pin_id)
        answer = await self._change_cache(UnpinCache(next(self._ids), pin_id))
        return answer is not None and answer.is_found

    async def _change_cache(self, order: ClearCache | PinCache | UnpinCache) -> CacheAnswer | None:
        if (link := self._serving_link()) is None:
            return None
        answer = await link.ask(order)
        assert isinstance(answer, CacheAnswer)
        if answer.error is not None:
            raise InvalidRequest(answer.error)
        return answer

    # The worker

    async def _ready_link(self) -> WorkerConnection:
        """The worker that serves: waits while it loads. Whoever stops waiting does not disturb the others."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequest("this EngineClient belongs to another event loop: make a new one")
        self._loop = loop
        async with self._starting:
            link = self._link
            if link is None or link.process.is_over:
                await self._back_off()
                if self._is_closed:
                    raise WorkerDied("the engine was closed")
                link = self._start_worker()
        await asyncio.shield(link.ready)
        assert link.facts is not None
        self.max_model_len = link.facts.max_model_len
        return link

    def _start_worker(self) -> WorkerConnection:
        self._num_starts += 1
        try:
            link = WorkerConnection(
                self.text.name,
                self._hang_limit_s,
                on_loading=self._on_loading,
                on_step=self._on_step,
                on_end=self._count_death,
            )
        except OSError as error:  # no process, no descriptor, no memory for one
            self._count_death(False)
            raise WorkerDied(f"no process could be started for {self.text.name}: {error}") from error
        self._link = link
        link.load(self._path, self._config)
        return link

    def _serving_link(self) -> WorkerConnection | None:
        link = self._link
        return link if link is not None and link.facts is not None and not link.process.is_over else None

    def _count_death(self, has_served: bool) -> None:
        self._num_early_deaths = 1 if has_served else self._num_early_deaths + 1

    async def _back_off(self) -> None:
        """Wait the longer the more workers died in a row, or until everything is closed."""
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


class Hook:
    """A function of the caller's, if there is one. When it raises, that is logged, and it is not called again."""

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
    """`on_end` is called when the worker is gone, unless it was closed on purpose: with whether it had been of use."""

    def __init__(
        self, name: str, hang_limit_s: float, *, on_loading: Hook, on_step: Hook, on_end: Callable[[bool], None]
    ) -> None:
        self._name = name
        self._hang_limit_s = hang_limit_s
        self._on_loading = on_loading
        self._on_step = on_step
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._alive: dict[int, tuple[Generation, int]] = {}  # request id -> its generation, index of the sample
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._error: QuireError | None = None  # what the worker itself said before it ended
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
        """Silence is only suspicious while something is asked for."""
        limit_s = max(MOVING_LIMIT_S, self.process.announced_s)
        return not self._is_asked or self.process.silence_s < limit_s

    @property
    def _is_asked(self) -> bool:
        return bool(self._alive or self._queries or self._is_probing)

    def load(self, path: Path, config: EngineConfig) -> None:
        self.process.send(Load(str(path), config))
        self.process.expect_news(LOAD_LIMIT_S)

    def submit(self, request: GenerationRequest, generation: Generation) -> None:
        ids = generation.request_ids
        if self.process.is_over:  # its end may have been told already: nobody would tell this one
            raise LostBeforeStart(f"the process that runs {self._name} has just ended; another takes its place")
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
            self._leave_alone()

    async def ask(self, query: Query) -> Answer:
        if self.process.is_over:
            raise WorkerDied(f"the process that runs {self._name} has just ended; another takes its place")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.process.send(query)
        self._queries[query.query_id] = answer
        self._watch()
        try:
            return await answer
        finally:
            self._queries.pop(query.query_id, None)
            if answer.cancelled():
                self._leave_alone()
            else:
                self._watch()

    def fail(self, error: QuireError) -> None:
        """Everything that waits for this worker."""
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
                for output in message.outputs:
                    self._take(output)
                self._on_step(message)
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
                self.process.end()  # now: whoever comes next gets another one
            case Working():
                pass  # the process's watchdog has taken note

    def _begin(self, message: Begun) -> None:
        """What the cache gave a prompt is what it gave the first sample: the others share with that one."""
        for started in message.started:
            generation, index = self._alive.get(started.request_id, (None, 0))
            if generation is not None and (index == 0 or not generation.is_started):
                generation.start(started)

    def _take(self, output: EngineOutput) -> None:
        place = self._alive.get(output.request_id)
        if place is None:
            return  # cancelled, or ended by a stop string
        generation, index = place
        try:
            delta = generation.answers.push(index, output)
            error = None if output.error is None else RequestFailed(output.error)
        except Exception as problem:  # its text could not be made: it ends, the others do not
            log.exception("request %d could not be read", output.request_id)
            message = f"the answer could not be read: {type(problem).__name__}: {problem}"
            delta, error = generation.answers.fail(index, message), RequestFailed(message)
        if error is not None:
            generation.fail(error)
            self.cancel(generation)
            return
        generation.push(delta)
        if delta.finish_reason is not None:
            self._has_served = True
            del self._alive[output.request_id]
            if output.finish_reason is None:
                self.process.send(Finish(output.request_id, generation.answers.num_tokens(index)))
            self._watch()

    def _refuse(self, request_ids: tuple[int, ...], error: QuireError) -> None:
        for request_id in request_ids:
            if (place := self._alive.get(request_id)) is not None:
                place[0].fail(error)
                self.cancel(place[0])

    def _take_end(self, reason: str) -> None:
        log.error("the process that runs %s %s", self._name, f"failed: {self._error}" if self._error else reason)
        is_steady = self.facts is not None and self._loop.time() - self._ready_s > STEADY_S
        self._on_end(self._has_served or is_steady)
        self.fail(self._error or WorkerDied(f"the process that runs {self._name} {reason}; another takes its place"))

    def _leave_alone(self) -> None:
        """Someone stopped waiting. If nobody else waits, ask once more, or a worker whose clients lose patience before
        we do would never be found to hang."""
        if not self._is_asked:
            self._is_probing = True
            with suppress(QueueFull):
                self.process.send(GetStats(PROBE_ID))
        self._watch()

    def _watch(self) -> None:
        """Loading has its own limit."""
        if self.facts is not None:
            self.process.expect_news(self._hang_limit_s if self._is_asked else None)


def _retrieve(ready: asyncio.Future[None]) -> None:
    """Nobody may be waiting any more: that is no reason for asyncio to complain."""
    if not ready.cancelled():
        ready.exception()


def _error(kind: str, message: str) -> QuireError:
    """An error of the worker's as the same error here."""
    found = getattr(errors, kind, WorkerDied)
    is_ours = isinstance(found, type) and issubclass(found, QuireError)
    return found(message) if is_ours else WorkerDied(f"{kind}: {message}")
