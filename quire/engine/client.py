"""A model in a process of its own, for asyncio: submit requests, iterate over text.

Detokenising and stop strings happen here, so that the worker does nothing but step. A crash or a hang over there fails
the requests it had, clearly; the next request gets a fresh worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from quire import errors
from quire.backends.base import Capacity, Progress
from quire.core.prefix import CacheExplanation
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

    def __init__(self, client: EngineClient, answers: Answers) -> None:
        self._client = client
        self.answers = answers
        self.request_ids: list[int] = []
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
        async for _ in self.deltas():
            pass
        return self.answers.result()

    def cancel(self) -> None:
        """Frees what it holds in the worker. Does nothing if it is over."""
        self._client.cancel(self)

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: QuireError) -> None:
        if self._error is None:
            self._error = error
        self._news.set()


class EngineClient:
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
        self.capacity: Capacity | None = None
        self.max_context = text.spec.max_context
        self._path = path
        self._config = config
        self._on_loading = on_loading
        self._hang_limit_s = hang_limit_s
        self._worker: WorkerProcess | None = None
        self._ready: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._ids = count(1)
        self._alive: dict[int, tuple[Generation, int]] = {}  # request id -> its generation, index of the sample
        self._queries: dict[int, asyncio.Future[FromWorker]] = {}
        self._num_early_deaths = 0  # in a row, with nothing served in between
        self._is_closed = False

    async def start(self) -> None:
        """Load the model now. Without this, the first request does."""
        async with self._starting:
            if self._is_closed:
                raise WorkerDied("the engine was closed")
            if self._worker is not None and not self._worker.is_over:
                return
            await self._back_off()
            self._ready = asyncio.get_running_loop().create_future()
            worker = WorkerProcess(self._on_message, self._on_end)
            self._worker = worker
            worker.send(Load(str(self._path), self._config))
            worker.expect_news(LOAD_LIMIT_S)
            await self._ready
            worker.expect_news(None)

    async def submit(self, request: GenerationRequest) -> Generation:
        """Hand a request to the worker, starting one if there is none."""
        await self.start()
        assert self._worker is not None
        generation = Generation(self, Answers(request, self.text.tokenizer))
        for index in range(request.n):
            request_id = next(self._ids)
            generation.request_ids.append(request_id)
            self._alive[request_id] = (generation, index)
            sampling = replace(request.sampling, sample_index=index)
            parent_id = None if index == 0 else generation.request_ids[0]
            self._worker.send(Add(request_id, request.prompt, sampling, request.priority, request.salt, parent_id))
        self._watch()
        return generation

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await (await self.submit(request)).result()

    def cancel(self, generation: Generation) -> None:
        for request_id in generation.request_ids:
            if self._forget(request_id) and self._worker is not None:
                self._worker.send(Cancel(request_id))

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation:
        """What the cache would give this prompt now. Changes nothing."""
        answer = await self._ask(lambda query_id: Explain(query_id, prompt, salt))
        assert isinstance(answer, Explained)
        if answer.explanation is None:
            raise InvalidRequest(answer.error or "no explanation")
        return answer.explanation

    async def stats(self) -> Stats:
        answer = await self._ask(GetStats)
        assert isinstance(answer, Stats)
        return answer

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None or self._worker.is_over else self._worker.pid

    async def close(self) -> None:
        """End the worker. Requests that are still under way fail."""
        self._is_closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
        self._fail_all(WorkerDied("the engine was closed"))

    # What the worker says

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Stepped(outputs=outputs):
                for output in outputs:
                    self._take(output)
            case Refused(request_id=request_id):
                self._refuse(request_id, _error(message.kind, message.message))
            case Loading(num_done=num_done, num_bytes=num_bytes):
                if self._on_loading is not None:
                    self._on_loading(num_done, num_bytes)
            case Ready(capacity=capacity, max_context=max_context):
                self.capacity, self.max_context = capacity, max_context
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case Explained(query_id=query_id) | Stats(query_id=query_id):
                if (query := self._queries.pop(query_id, None)) is not None and not query.done():
                    query.set_result(message)
                self._watch()
            case Failed(kind=kind, message=text):
                self._fail_all(_error(kind, text))
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
            self._num_early_deaths = 0
            if output.finish_reason is None and self._worker is not None:
                self._worker.send(Finish(output.request_id, generation.answers.num_tokens(index)))
            self._forget(output.request_id)

    def _refuse(self, request_id: int, error: QuireError) -> None:
        if request_id in self._alive:
            generation, _ = self._alive[request_id]
            generation.fail(error)
            self.cancel(generation)

    def _on_end(self, reason: str) -> None:
        log.error("the worker of %s %s", self.text.name, reason)
        self._num_early_deaths += 1
        self._fail_all(
            WorkerDied(f"the process that runs {self.text.name} {reason}; the next request starts a new one")
        )

    def _fail_all(self, error: QuireError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for generation, index in list(self._alive.values()):
            generation.answers.fail(index, str(error))
            generation.fail(error)
        self._alive.clear()
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)
        self._queries.clear()

    # Helpers

    def _forget(self, request_id: int) -> bool:
        was_alive = self._alive.pop(request_id, None) is not None
        if was_alive:
            self._watch()
        return was_alive

    def _watch(self) -> None:
        """Silence is only suspicious while something is asked for."""
        if self._worker is not None:
            self._worker.expect_news(self._hang_limit_s if self._alive or self._queries else None)

    async def _ask(self, make: QueryMaker) -> FromWorker:
        await self.start()
        assert self._worker is not None
        query_id = next(self._ids)
        answer: asyncio.Future[FromWorker] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        self._worker.send(make(query_id))
        self._watch()
        return await answer

    async def _back_off(self) -> None:
        if self._num_early_deaths > 1:
            delay_s = min(2.0 ** (self._num_early_deaths - 2), MAX_BACKOFF_S)
            log.warning("%s died %d times in a row: waiting %g s", self.text.name, self._num_early_deaths, delay_s)
            await asyncio.sleep(delay_s)


def _error(kind: str, message: str) -> QuireError:
    """An error of the worker's as the same error here."""
    found = getattr(errors, kind, WorkerDied)
    is_ours = isinstance(found, type) and issubclass(found, QuireError)
    return found(message) if is_ours else WorkerDied(f"{kind}: {message}")
