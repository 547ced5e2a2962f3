"""A model in a process of its own, for asyncio: submit requests, iterate over text.

Detokenising and stop strings happen here, so that the worker does nothing but step. A crash or a hang over there fails
the requests it had, clearly; the next request gets a fresh worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path

from quire import errors
from quire.backends.base import Capacity, Progress
from quire.core.prefix import CacheExplanation, StopReason
from quire.core.request import SamplingParams
from quire.engine.build import EngineConfig
from quire.engine.engine import EngineOutput
from quire.engine.model import ModelText
from quire.engine.outputs import Answers, Delta, GenerationOutput
from quire.engine.params import GenerationRequest
from quire.engine.process import HANG_LIMIT_S, WorkerProcess
from quire.engine.wire import (
    Add,
    Cancel,
    Explain,
    Explained,
    Failed,
    Finish,
    FromWorker,
    GetStats,
    Load,
    Loading,
    Ready,
    Refused,
    Stats,
    Stepped,
    Working,
)
from quire.errors import InvalidRequest, QuireError, RequestFailed, WorkerDied

LOAD_LIMIT_S = 180.0  # of silence while loading: libraries from a cold disk, then the largest tensor
MAX_BACKOFF_S = 30.0
QueryMaker = Callable[[int], Explain | GetStats]

log = logging.getLogger(__name__)


class Generation:
    """One request under way. Iterate over its deltas; a failure raises there. Leaving early cancels it."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.request_ids: tuple[int, ...] = ()
        self._link: _Link | None = None
        self._deltas: deque[Delta] = deque()
        self._error: QuireError | None = None
        self._news = asyncio.Event()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                while self._deltas:
                    yield self._deltas.popleft()
                if self._error is not None:
                    raise self._error
                if self.answers.is_finished:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            self.cancel()

    async def result(self) -> GenerationOutput:
        """The whole answer. If it was cancelled, what there is of it."""
        async for _ in self.deltas():
            pass
        return self.answers.result()

    def cancel(self) -> None:
        """Frees what it holds in the worker; whoever iterates comes to the end. Does nothing if it is over."""
        if self._link is not None:
            self._link.cancel(self)

    def belongs_to(self, link: _Link, request_ids: tuple[int, ...]) -> None:
        self._link, self.request_ids = link, request_ids

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: QuireError) -> None:
        """The first error is the one that is told."""
        if self._error is None:
            self._error = type(error)(str(error))  # its own: a traceback grows with every task that raises it
        self._news.set()

    def wake(self) -> None:
        self._news.set()


class _Link:
    """One worker process and all that was asked of it. What happens to it happens to nobody else's requests."""

    def __init__(
        self, name: str, hang_limit_s: float, on_loading: Progress | None, on_end: Callable[[bool], None]
    ) -> None:
        self._name = name
        self._hang_limit_s = hang_limit_s
        self._on_loading = on_loading
        self._on_end = on_end
        self._alive: dict[int, tuple[Generation, int]] = {}  # request id -> its generation, index of the sample
        self._queries: dict[int, asyncio.Future[FromWorker]] = {}
        self._error: QuireError | None = None  # what the worker itself said before it ended
        self.has_served = False
        self.facts: Ready | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(_retrieve)
        self.process = WorkerProcess(self._take_message, self._take_end)

    def load(self, path: Path, config: EngineConfig) -> None:
        self.process.send(Load(str(path), config))
        self.process.expect_news(LOAD_LIMIT_S)

    def submit(self, request: GenerationRequest, generation: Generation, request_ids: tuple[int, ...]) -> None:
        self.process.send(Add(request_ids, request.prompt, request.sampling, request.priority, request.salt))
        generation.belongs_to(self, request_ids)
        self._alive |= {request_id: (generation, index) for index, request_id in enumerate(request_ids)}
        self._watch()

    def cancel(self, generation: Generation) -> None:
        for request_id in generation.request_ids:
            if (place := self._alive.pop(request_id, None)) is not None:
                generation.answers.cancel(place[1])
                self.process.send(Cancel(request_id))
        generation.wake()
        self._watch()

    async def ask(self, query_id: int, make: QueryMaker) -> FromWorker:
        answer: asyncio.Future[FromWorker] = asyncio.get_running_loop().create_future()
        self.process.send(make(query_id))
        self._queries[query_id] = answer
        self._watch()
        try:
            return await answer
        finally:
            self._queries.pop(query_id, None)
            self._watch()

    def fail(self, error: QuireError) -> None:
        """Everything that waits for this worker."""
        if not self.ready.done():
            self.ready.set_exception(error)
        alive, self._alive = self._alive, {}
        for generation, index in alive.values():
            generation.answers.fail(index, str(error))
            generation.fail(error)
        for query in self._queries.values():
            if not query.done():
                query.set_exception(type(error)(str(error)))

    def _take_message(self, message: FromWorker) -> None:
        match message:
            case Stepped(outputs=outputs):
                for output in outputs:
                    self._take(output)
            case Refused(request_ids=request_ids):
                self._refuse(request_ids, _error(message.kind, message.message))
            case Loading(num_done=num_done, num_bytes=num_bytes):
                self._tell_loading(num_done, num_bytes)
            case Ready():
                self.facts = message
                self._watch()
                if not self.ready.done():
                    self.ready.set_result(None)
            case Explained(query_id=query_id) | Stats(query_id=query_id):
                if (query := self._queries.get(query_id)) is not None and not query.done():
                    query.set_result(message)
            case Failed(kind=kind, message=text):
                self._error = _error(kind, text)
                self.process.end()  # now: whoever comes next gets another one
            case Working():
                pass  # the process's watchdog has taken note

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
            self.has_served = True
            del self._alive[output.request_id]
            if output.finish_reason is None:
                self.process.send(Finish(output.request_id, generation.answers.num_tokens(index)))
            self._watch()

    def _refuse(self, request_ids: tuple[int, ...], error: QuireError) -> None:
        for request_id in request_ids:
            if (place := self._alive.get(request_id)) is not None:
                place[0].fail(error)
                self.cancel(place[0])

    def _tell_loading(self, num_done: int, num_bytes: int) -> None:
        if self._on_loading is None:
            return
        try:
            self._on_loading(num_done, num_bytes)
        except Exception:
            log.exception("on_loading raised; it is not called again")
            self._on_loading = None

    def _take_end(self, reason: str) -> None:
        log.error("the process that runs %s %s", self._name, self._error or reason)
        self._on_end(self.has_served)
        message = f"the process that runs {self._name} {reason}; the next request starts a new one"
        self.fail(self._error or WorkerDied(message))

    def _watch(self) -> None:
        """Silence is only suspicious while something is asked for. Loading has its own limit."""
        if self.facts is not None:
            self.process.expect_news(self._hang_limit_s if self._alive or self._queries else None)


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
    ) -> None:
        self.text = text
        self.max_context = text.spec.max_context  # until the worker says what fits its pool
        self._path = path
        self._config = config
        self._on_loading = on_loading
        self._hang_limit_s = hang_limit_s
        self._link: _Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._ids = count(1)
        self._num_early_deaths = 0  # in a row, with nothing served in between
        self._is_closed = False

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def capacity(self) -> Capacity | None:
        """Of the worker that is ready."""
        return None if self._link is None or self._link.facts is None else self._link.facts.capacity

    @property
    def worker_pid(self) -> int | None:
        return None if self._link is None or self._link.process.is_over else self._link.process.pid

    async def start(self) -> None:
        """Load the model now. Without this, the first request does."""
        await self._ready_link()

    async def submit(self, request: GenerationRequest) -> Generation:
        """Hand a request to the worker, starting one if there is none."""
        link = await self._ready_link()
        generation = Generation(Answers(request, self.text.tokenizer))
        link.submit(request, generation, tuple(next(self._ids) for _ in range(request.n)))
        return generation

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await (await self.submit(request)).result()

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation:
        """What the cache would give this prompt now. Changes nothing, and loads nothing."""
        request = GenerationRequest(prompt, SamplingParams(), salt=salt)  # refuses what is no prompt
        if (link := self._serving_link()) is None:
            return CacheExplanation(0, 0, 0, StopReason.NOT_FOUND)
        answer = await link.ask(next(self._ids), lambda query_id: Explain(query_id, request.prompt, request.salt))
        assert isinstance(answer, Explained)
        if answer.explanation is None:
            raise InvalidRequest(answer.error or "no explanation")
        return answer.explanation

    async def stats(self) -> Stats | None:
        """Of the worker that serves; None where none does."""
        if (link := self._serving_link()) is None:
            return None
        answer = await link.ask(next(self._ids), GetStats)
        assert isinstance(answer, Stats)
        return answer

    async def close(self) -> None:
        """End the worker. Requests that are still under way fail."""
        self._is_closed = True
        link, self._link = self._link, None
        if link is not None:
            link.fail(WorkerDied("the engine was closed"))
            await link.process.close()

    async def _ready_link(self) -> _Link:
        """The worker that serves: waits while it loads. Whoever stops waiting does not disturb the others."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequest("this EngineClient belongs to another event loop: make a new one")
        self._loop = loop
        async with self._starting:
            if self._link is None or self._link.process.is_over:
                await self._back_off()
                if self._is_closed:
                    raise WorkerDied("the engine was closed")
                link = _Link(self.text.name, self._hang_limit_s, self._on_loading, self._count_death)
                self._link = link
                link.load(self._path, self._config)
            link = self._link
        await asyncio.shield(link.ready)
        assert link.facts is not None
        self.max_context = link.facts.max_context
        return link

    def _serving_link(self) -> _Link | None:
        link = self._link
        return link if link is not None and link.facts is not None and not link.process.is_over else None

    def _count_death(self, has_served: bool) -> None:
        self._num_early_deaths = 1 if has_served else self._num_early_deaths + 1

    async def _back_off(self) -> None:
        if self._num_early_deaths > 1:
            delay_s = min(2.0 ** (self._num_early_deaths - 2), MAX_BACKOFF_S)
            log.warning("%s died %d times in a row: waiting %g s", self.text.name, self._num_early_deaths, delay_s)
            await asyncio.sleep(delay_s)


def _retrieve(ready: asyncio.Future[None]) -> None:
    """Nobody may be waiting any more: that is no reason for asyncio to complain."""
    if not ready.cancelled():
        ready.exception()


def _error(kind: str, message: str) -> QuireError:
    """An error of the worker's as the same error here."""
    found = getattr(errors, kind, WorkerDied)
    is_ours = isinstance(found, type) and issubclass(found, QuireError)
    return found(message) if is_ours else WorkerDied(f"{kind}: {message}")
