"""One worker process and all that was asked of it. What happens to it happens to nobody else's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quire import errors
from quire.engine.composition import EngineConfig
from quire.engine.engine import EngineOutput
from quire.engine.params import GenerationRequest
from quire.engine.worker.generation import Generation
from quire.engine.worker.process import WorkerProcess
from quire.engine.worker.protocol import (
    Add,
    Answer,
    Begun,
    Blocks,
    BlocksViewed,
    CacheAnswer,
    Cancel,
    Explained,
    Failed,
    Finish,
    FromWorker,
    GetStats,
    HeldFound,
    Load,
    Loading,
    Query,
    Ready,
    Refused,
    Stats,
    Stepped,
    Working,
)
from quire.errors import LostBeforeStart, QueueFull, QuireError, RequestFailed, WorkerDied

LOAD_LIMIT_S = 180.0  # of silence while loading: libraries from a cold disk, then the largest tensor
MOVING_LIMIT_S = 10.0  # of silence while there is work: it may come back, but nobody should rely on it
PROBE_ID = 0  # of a question of our own; those of callers count from 1
STEADY_S = 60.0  # a worker that has been ready for so long did not die of its start

log = logging.getLogger(__name__)


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
