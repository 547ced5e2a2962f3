"""The connection to one worker: routes its messages to requests, and fails them when the worker dies or hangs.

Detokenization and stop strings run on this side, so that the worker only executes steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from quire import errors
from quire.engine.composition import EngineConfig
from quire.engine.engine import EngineOutput
from quire.engine.params import GenerationRequest
from quire.engine.worker.generation import Generation
from quire.engine.worker.kv_events import KvEventsConfig
from quire.engine.worker.process import WorkerProcess
from quire.engine.worker.protocol import (
    Add,
    Answer,
    Begun,
    Blocks,
    BlocksViewed,
    CacheAnswer,
    CacheReport,
    Cancel,
    Explained,
    Failed,
    Fingerprinted,
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
    ToWorker,
    Working,
)
from quire.errors import LostBeforeStart, QueueFull, QuireError, RequestFailed, WorkerDied

STEADY_S = 60.0  # if a worker was ready for this long, its death is not counted as a failed start
PROBE_ID = 0  # query id of probes of the only client of a worker, whose own ids start at 1
MOVING_LIMIT_S = 8.0  # allowed silence while there is work; then /health reports the worker as stuck, within 10 s
LOAD_LIMIT_S = 180.0  # allowed silence while loading: importing libraries, or reading the largest tensor

log = logging.getLogger(__name__)


class Worker(Protocol):
    """A worker as its connection sees it: `WorkerProcess`, or a replica of a cluster."""

    @property
    def pid(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def silence_s(self) -> float: ...

    @property
    def announced_s(self) -> float: ...

    def send(self, message: ToWorker) -> None: ...

    def expect_message(self, limit_s: float | None) -> None: ...

    def end(self, reason: str = "") -> None: ...

    async def close(self) -> None: ...


Connect = Callable[[Callable[[FromWorker], None], Callable[[str], None]], Worker]  # takes on_message and on_end


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
    finished a request or was ready for `STEADY_S`. `on_lost`: called with each request that had not started by then;
    without it, such requests fail. `connect`: starts the worker, or finds one on another machine. `probe_id`: the query
    id of probes, which no caller of `ask` uses; a worker with several clients answers by the id.
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
        on_report: Callable[[CacheReport], None] | None = None,
        on_lost: Callable[[Generation], None] | None = None,
        connect: Connect = WorkerProcess,
        probe_id: int = PROBE_ID,
    ) -> None:
        self._name = name
        self._hang_limit_s = hang_limit_s
        self._on_loading = on_loading
        self._on_step = on_step
        self._on_gap = on_gap
        self._on_end = on_end
        self._on_report = on_report
        self._on_lost = on_lost
        self._probe_id = probe_id
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
        self.process: Worker = connect(self._take_message, self._take_end)

    @property
    def num_requests(self) -> int:
        return len(self._alive)

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
        if self.process.is_over:  # `on_end` may have run already: this request would wait forever
            raise LostBeforeStart(f"the process that runs {self._name} has just ended and is being replaced")
        self.process.send(_add_message(request, generation.request_ids))
        self._alive |= {request_id: (generation, index) for index, request_id in enumerate(generation.request_ids)}
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
        lost: dict[Generation, None] = {}
        for generation, index in alive.values():
            if self._on_lost is not None and not generation.is_started:
                lost[generation] = None
                continue
            generation.answers.fail(index, str(error))
            generation.fail(error if generation.is_started else LostBeforeStart(str(error)))
        for generation in lost:
            assert self._on_lost is not None
            self._on_lost(generation)
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
                self._refuse(request_ids, errors.error_of(message.kind, message.message))
            case Loading(num_done=num_done, num_bytes=num_bytes):
                self._on_loading(num_done, num_bytes)
            case Ready() | Fingerprinted():
                self._take_facts(message)
            case Stats(query_id=query_id) if query_id == self._probe_id:
                self._is_probing = False
                self._watch()
            case Explained() | Stats() | Blocks() | BlocksViewed() | HeldFound() | CacheAnswer():
                if (query := self._queries.get(message.query_id)) is not None and not query.done():
                    query.set_result(message)
            case Failed(kind=kind, message=text):
                self._error = errors.error_of(kind, text)
                self.process.end()  # at once, so that the next request starts another worker
            case CacheReport():
                if self._on_report is not None:
                    self._on_report(message)
            case Working():
                pass  # handled by the watchdog of the process

    def _take_facts(self, message: Ready | Fingerprinted) -> None:
        if isinstance(message, Fingerprinted):
            assert self.facts is not None  # it follows Ready
            self.facts = msgspec.structs.replace(self.facts, system_fingerprint=message.system_fingerprint)
            return
        self.facts = message
        self._ready_s = self._loop.time()
        self._watch()
        if not self.ready.done():
            self.ready.set_result(None)

    def _begin(self, message: Begun) -> None:
        """Mark generations as started. The cache result is that of the first sample: the others share its KV."""
        for started in message.started:
            generation, index = self._alive.get(started.request_id, (None, 0))
            if generation is not None and (index == 0 or not generation.is_started):
                try:
                    generation.start(started)
                except Exception as problem:
                    self._fail_answer(generation, index, problem)

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
            if error is None:
                generation.push(delta)
        except Exception as problem:
            self._fail_answer(generation, index, problem)
            return
        if error is not None:
            generation.fail(error)
            self.cancel(generation)
            return
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

    def _refuse(self, ids: tuple[int, ...], error: QuireError) -> None:
        """Fail requests, or a query that a replica could not pass on."""
        for one in ids:
            if (place := self._alive.get(one)) is not None:
                place[0].fail(error)
                self.cancel(place[0])
            elif (query := self._queries.get(one)) is not None and not query.done():
                query.set_exception(error)
            elif one == self._probe_id:
                self._is_probing = False
                self._watch()

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
                self.process.send(GetStats(self._probe_id))
        self._watch()

    def _watch(self) -> None:
        """Set the hang limit. Loading has its own limit."""
        if self.facts is not None:
            self.process.expect_message(self._hang_limit_s if self._is_busy else None)


def _add_message(request: GenerationRequest, request_ids: tuple[int, ...]) -> Add:
    return Add(
        request_ids,
        request.packed,
        request.sampling,
        request.priority,
        request.salt,
        request.pins,
        request.grammar,
        request.tenant,
        request.boundaries,
        request.prediction,
    )


def _retrieve(ready: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if there is no waiter."""
    if not ready.cancelled():
        ready.exception()
