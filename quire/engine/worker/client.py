"""The asyncio client of a model in a worker process.

`EngineClient` starts a worker when needed, replaces one that ended, and submits requests. After a failure the next
request starts a new worker, unless `supervise` has done so already. A `WorkerProcess` is one process and the socket to
it; it knows messages and time, not requests. A `WorkerConnection` routes its messages to requests, and fails these when
the worker dies or hangs. Detokenization and stop strings run on this side, in a `Generation` for each request, so that
the worker only executes steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

import msgspec

from quire.backends.base import Capacity, Progress
from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import PackedPrompt, check_salt
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.generation import (
    EngineOutput,
    Generation,
    GenerationRequest,
    NewParser,
)
from quire.engine.model_text import ModelText
from quire.engine.process import log_format
from quire.engine.worker.kv_events import CacheReport, KvEventsConfig
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Add,
    Answered,
    Ask,
    Begun,
    Blocks,
    Cancel,
    ClearCache,
    Explain,
    Failed,
    FindHeld,
    Fingerprinted,
    Finish,
    FrameReader,
    FrameWriter,
    FromWorker,
    GetBlocks,
    GetStats,
    Load,
    Loading,
    Query,
    Ready,
    Refused,
    ReplicaStatus,
    Stats,
    Stepped,
    ToWorker,
    Working,
    from_worker,
    pack,
)
from quire.errors import (
    LostBeforeStart,
    QueueFull,
    QuireError,
    RequestFailed,
    WorkerDied,
    error_of,
)

HANG_LIMIT_S = 30.0  # without a message, while there is work
EXIT_LIMIT_S = 5.0  # time for the process to end by itself
STDERR = 2
# Of the server only: a worker needs no keys, and whoever can read its memory must not find them.
SERVER_SECRETS = ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY")

T = TypeVar("T")
HeldRanges = tuple[tuple[int, int], ...]
# Built at import: msgspec collects what it knows of a type at the first use, which is not safe in several threads.
ANSWERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (CacheExplanation, Stats, Blocks, HeldRanges, NoneType)
}

log = logging.getLogger(__name__)


def ignore(*_: object) -> None:
    """A callback that does nothing."""


class WorkerLink(ABC):
    """Exchanges messages with a worker: a process of this machine, or a replica of a cluster.

    `on_end` is called once, with the reason, unless the link was closed on purpose. `is_over` may be True before.
    """

    def __init__(self, on_message: Callable[[FromWorker], None], on_end: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self.is_over = False
        self.announced_s = 0.0  # the silence that the worker announced with `Working`; 0: it has sent a message since
        self._heard_s = self._loop.time()

    @property
    def silence_s(self) -> float:
        """Time since its last message, or since the first message was expected."""
        return self._loop.time() - self._heard_s

    def _hear(self, message: FromWorker) -> None:
        """Take a message, and the time."""
        self.announced_s = message.limit_s if isinstance(message, Working) else 0.0
        self._heard_s = self._loop.time()
        if not self.is_over:
            try:
                self._on_message(message)
            except Exception:
                log.exception("a message could not be processed")

    @abstractmethod
    def send(self, message: ToWorker) -> None:
        """Send a message without blocking. Raises QueueFull if too much is unread, except for Cancel and Finish."""

    @abstractmethod
    def expect_message(self, limit_s: float | None) -> None:
        """Count silence from now on, unless a message was expected already. None: no message is expected."""

    @abstractmethod
    def end(self, reason: str = "") -> None:
        """End the link; no further messages are sent or received. `on_end` gets `reason`, or what is found."""

    @abstractmethod
    async def close(self) -> None:
        """End the link on purpose."""


class WorkerProcess(WorkerLink):
    """One worker process and the socket to it. Silence beyond the limit is a hang, which ends the process."""

    def __init__(self, on_message: Callable[[FromWorker], None], on_end: Callable[[str], None]) -> None:
        super().__init__(on_message, on_end)
        self._limit_s = HANG_LIMIT_S
        self._socket, worker_end = socket.socketpair()
        with worker_end:
            try:
                self._process = _spawn(worker_end.fileno())
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._writer = FrameWriter(self._socket)
        self._ending: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._socket, self._read)
        self.pid = self._process.pid

    def send(self, message: ToWorker) -> None:
        frame = pack(message)
        if self.is_over:
            return
        if self._writer.num_unsent + len(frame) > MAX_UNSENT and not isinstance(message, Cancel | Finish):
            raise QueueFull(f"{self._writer.num_unsent} bytes are waiting to be read by the model's process")
        self._writer.push(frame)
        self._flush()

    def expect_message(self, limit_s: float | None) -> None:
        if self._watch is not None and limit_s != self._limit_s:
            self._watch.cancel()
            self._watch = None
        if limit_s is not None and self._watch is None and not self.is_over:
            self._limit_s = limit_s
            self._heard_s, self.announced_s = self._loop.time(), 0.0
            self._watch = self._loop.call_at(self._heard_s + limit_s, self._check)

    def end(self, reason: str = "", grace_s: float = EXIT_LIMIT_S) -> None:
        """End the process. `on_end` is called when it has ended, with `reason` or a description of its exit code."""
        if not self.is_over:
            self._detach()
            self._ending = self._loop.create_task(self._report(reason, grace_s))

    async def close(self) -> None:
        """End the process on purpose. It exits when its socket closes; otherwise it is killed."""
        if not self.is_over:
            self._detach()
            await self._wait_or_kill(EXIT_LIMIT_S)
        elif self._ending is not None:
            await self._ending

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""  # ended with unread messages
        except OSError as error:
            self.end(f"cannot be reached: {error}")
            return
        if not data:
            self.end()
            return
        try:
            messages = [from_worker.decode(frame) for frame in self._reader.feed(data)]
        except ValueError as error:
            self.end(f"sent an invalid message: {error}")
            return
        for message in messages:
            self._hear(message)

    def _flush(self) -> None:
        try:
            is_sent = self._writer.flush()
        except ConnectionError:
            is_sent = True  # it has ended: `_read` handles that after its last messages
        except OSError as error:
            self.end(f"cannot be reached: {error}")
            return
        if is_sent:
            self._loop.remove_writer(self._socket)
        else:
            self._loop.add_writer(self._socket, self._flush)

    def _check(self) -> None:
        self._watch = None
        limit_s = max(self._limit_s, self.announced_s)
        if self.silence_s < limit_s:
            self._watch = self._loop.call_at(self._heard_s + limit_s, self._check)
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)  # faulthandler writes its stack to stderr
        self.end(f"sent no message for {limit_s:g} s and was killed", grace_s=1.0)

    async def _report(self, reason: str, grace_s: float) -> None:
        code = await self._wait_or_kill(grace_s)
        self._on_end(reason or _describe(code))

    async def _wait_or_kill(self, grace_s: float) -> int:
        try:
            return await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    def _detach(self) -> None:
        self.is_over = True
        self.expect_message(None)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    """Start a worker. -P: import no modules from the working directory. Its stdout goes to stderr."""
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])]
    log_name = log_format()
    env = {name: value for name, value in os.environ.items() if name not in SERVER_SECRETS}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.worker.worker", str(fd), *([log_name] if log_name else [])],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        env={**env, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


STEADY_S = 60.0  # if a worker was ready for this long, its death is not counted as a failed start
MOVING_LIMIT_S = 8.0  # allowed silence while there is work; then /health reports the worker as stuck, within 10 s
LOAD_LIMIT_S = 180.0  # allowed silence while loading: importing libraries, or reading the largest tensor


Connect = Callable[[Callable[[FromWorker], None], Callable[[str], None]], WorkerLink]  # takes on_message and on_end


class WorkerConnection:
    """The connection to one worker process: its running requests and open queries.

    `on_end` is called when the worker has ended, unless it was closed on purpose. Its argument: whether the worker
    finished a request or was ready for `STEADY_S`. `on_lost`: called with each request that had not started by then.
    `connect`: starts the worker, or finds one on another machine. `probe_id`: the query
    id of probes, which no caller of `ask` uses: the ids of the only client of a worker start at 1.
    """

    def __init__(
        self,
        name: str,
        hang_limit_s: float,
        *,
        on_end: Callable[[bool], None],
        on_loading: Progress = ignore,
        on_step: Callable[[Stepped], None] = ignore,
        on_gap: Callable[[float, int], None] = ignore,
        on_report: Callable[[CacheReport], None] = ignore,
        on_lost: Callable[[Generation, QuireError], None] = Generation.fail,
        connect: Connect = WorkerProcess,
        probe_id: int = 0,
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
        self._queries: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._error: QuireError | None = None  # reported by the worker before it ended
        self._has_served = False
        self._ready_s = 0.0
        self.facts: Ready | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)
        self.ended = asyncio.Event()
        self.process: WorkerLink = connect(self._take_message, self._take_end)

    @property
    def num_requests(self) -> int:
        return len(self._alive)

    @property
    def is_open(self) -> bool:
        """Whether the worker is ready and has not ended."""
        return self.facts is not None and not self.process.is_over

    @property
    def is_moving(self) -> bool:
        """Whether the worker is idle, or sent a message recently."""
        limit_s = max(MOVING_LIMIT_S, self.process.announced_s)
        return not self._is_busy or self.process.silence_s < limit_s

    @property
    def _is_busy(self) -> bool:
        return bool(self._alive or self._queries)

    def submit(self, generation: Generation) -> None:
        if self.process.is_over:  # `on_end` may have run already: this request would wait forever
            raise LostBeforeStart(f"the process that runs {self._name} has just ended and is being replaced")
        self.process.send(Add(generation.request_ids, generation.request))
        self._alive |= {request_id: (generation, index) for index, request_id in enumerate(generation.request_ids)}
        self._watch()

    def cancel(self, generation: Generation) -> None:
        alive = [one for one in generation.request_ids if self._alive.pop(one, None) is not None]
        for request_id in alive:
            self.process.send(Cancel(request_id))
        if alive:
            generation.note_cancelled()
            self._probe_if_idle()

    async def ask(self, query_id: int, query: Query, kind: type[T]) -> T:
        if self.process.is_over:
            raise WorkerDied(f"the process that runs {self._name} has just ended and is being replaced")
        answer: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self.process.send(Ask(query_id, query))
        self._queries[query_id] = answer
        self._watch()
        try:
            return cast(T, ANSWERS[kind].decode(await answer))
        finally:
            self._queries.pop(query_id, None)
            if answer.cancelled():
                self._probe_if_idle()
            else:
                self._watch()

    def fail(self, error: QuireError) -> None:
        """Fail everything that waits for this worker."""
        if not self.ready.done():
            self.ready.set_exception(error)
        alive, self._alive = self._alive, {}
        for generation in dict.fromkeys(generation for generation, _ in alive.values()):
            if generation.is_started:
                generation.fail(error)
            else:
                self._on_lost(generation, LostBeforeStart(str(error)))
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
                self._refuse(request_ids, error_of(message.kind, message.message))
            case Loading(num_done=num_done, num_bytes=num_bytes):
                self._on_loading(num_done, num_bytes)
            case Ready():
                self.facts = message
                self._ready_s = self._loop.time()
                self._watch()
                if not self.ready.done():
                    self.ready.set_result(None)
            case Fingerprinted(system_fingerprint=system_fingerprint):
                assert self.facts is not None  # it follows Ready
                self.facts = msgspec.structs.replace(self.facts, system_fingerprint=system_fingerprint)
            case Answered(query_id=query_id, result=result):
                if (query := self._queries.pop(query_id, None)) is not None and not query.done():
                    query.set_result(result)
                self._watch()
            case Failed(kind=kind, message=text):
                self._error = error_of(kind, text)
                self.process.end()  # at once, so that the next request starts another worker
            case CacheReport():
                self._on_report(message)
            case Working():
                pass  # handled by the watchdog of the process

    def _begin(self, message: Begun) -> None:
        """Mark generations as started. The cache result is that of the first sample: the others share its KV."""
        for started in message.started:
            generation, index = self._alive.get(started.request_id, (None, 0))
            if generation is not None and (index == 0 or not generation.is_started):
                try:
                    generation.start(started.waited_s, started.num_cached_tokens, started.cache)
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
        for output in message.outputs:
            self._take(output, now_s)
        previous.pop(None, None)  # first tokens
        for last_s, num_answers in previous.items():
            assert last_s is not None
            self._on_gap(now_s - last_s, num_answers)
        self._on_step(message)

    def _take(self, output: EngineOutput, now_s: float) -> None:
        place = self._alive.get(output.request_id)
        if place is None:
            return  # cancelled, or ended by a stop string
        generation, index = place
        try:
            delta = generation.push(index, output)
            if output.error is None:
                generation.deliver(delta)
        except Exception as problem:
            self._fail_answer(generation, index, problem)
            return
        if output.error is not None:
            generation.fail(RequestFailed(output.error))
            self.cancel(generation)
            return
        if delta.token_ids and (last_s := generation.note_tokens(index, now_s)) is not None:
            num_tokens = len(delta.token_ids)
            self._on_gap((now_s - last_s) / num_tokens, num_tokens)
        if delta.finish_reason is not None:
            self._has_served = True
            del self._alive[output.request_id]
            if output.finish_reason is None:
                self.process.send(Finish(output.request_id, generation.num_tokens(index)))
            self._watch()

    def _fail_answer(self, generation: Generation, index: int, problem: Exception) -> None:
        """End a request whose answer could not be decoded. Other requests continue."""
        log.error("the answer of request %d could not be decoded", generation.request_ids[index], exc_info=problem)
        # quire/server/errors.py hides the rest of a message that starts like this.
        generation.fail(RequestFailed(f"the answer could not be read: {type(problem).__name__}: {problem}"))
        self.cancel(generation)

    def _refuse(self, ids: tuple[int, ...], error: QuireError) -> None:
        """Fail requests, or a query that a replica could not pass on."""
        for one in ids:
            if (place := self._alive.get(one)) is not None:
                place[0].fail(error)
                self.cancel(place[0])
            elif (query := self._queries.pop(one, None)) is not None and not query.done():
                query.set_exception(error)
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
            probe = self._queries[self._probe_id] = self._loop.create_future()
            probe.add_done_callback(_retrieve)
            with suppress(QueueFull):
                self.process.send(Ask(self._probe_id, GetStats()))
        self._watch()

    def _watch(self) -> None:
        """Set the hang limit. Loading has its own limit."""
        if self.facts is not None:
            self.process.expect_message(self._hang_limit_s if self._is_busy else None)


def _retrieve(ready: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it if there is no waiter."""
    if not ready.cancelled():
        ready.exception()


MAX_BACKOFF_S = 30.0


class ModelClient(ABC):
    """Submits requests and queries to the workers of one model. Must be used from a single event loop."""

    def __init__(self, text: ModelText, config: EngineConfig, ids: Iterator[int]) -> None:
        self.text = text
        self.max_model_len = text.spec.max_model_len  # until a worker reports what fits its pool
        self.is_caching = config.enable_prefix_caching
        self.num_restarts = 0  # workers started after the first, or lost
        self._config = config
        self._ids = ids  # of requests and queries

    @property
    @abstractmethod
    def connections(self) -> list[WorkerConnection]:
        """Those to workers that are ready, the first one first."""

    @property
    def facts(self) -> Ready | None:
        """A running worker's report about itself; None if there is none. All have the same model and settings."""
        return next((one.facts for one in self.connections), None)

    @property
    def system_fingerprint(self) -> str | None:
        """Identifies everything on this side that changes answers.

        None: not known yet, see `Fingerprinting`, or workers differ, in their devices for example: any of them may
        answer.
        """
        found = {one.facts.system_fingerprint for one in self.connections if one.facts is not None}
        return (found.pop() or None) if len(found) == 1 else None

    @property
    def capacity(self) -> Capacity | None:
        return None if self.facts is None else self.facts.capacity

    @property
    def scheduling(self) -> Scheduling | None:
        """The scheduling settings of a running worker."""
        return None if self.capacity is None else self._config.scheduling(self.capacity)

    @property
    def is_moving(self) -> bool:
        """Whether a worker is ready, and is idle or sent a message recently."""
        return any(one.is_moving for one in self.connections)

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        """Empty: the model has a single worker on this machine."""
        return ()

    @abstractmethod
    async def start(self) -> None:
        """Make the model ready now instead of at the first request."""

    @abstractmethod
    async def supervise(self) -> None:
        """Keep workers running until cancelled or closed."""

    async def submit(
        self,
        request: GenerationRequest,
        *,
        new_parser: NewParser | None = None,
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Submit a request. Waits until there is a worker.

        `updated` is set whenever this generation changes. Several generations may share it; see `Generation.take`.
        `on_start` is called when the request is admitted, before its first step; it must not raise.
        """
        request_ids = tuple(next(self._ids) for _ in range(request.n))
        generation = Generation(
            request, self.text.tokenizer, request_ids, new_parser=new_parser, updated=updated, on_start=on_start
        )
        await self.send(generation)
        return generation

    @abstractmethod
    async def send(self, generation: Generation) -> None:
        """Send the request of a generation to a worker, and set its `on_cancel`. Waits until there is a worker."""

    @abstractmethod
    async def close(self) -> None:
        """Unfinished requests fail."""

    # Queries to running workers. They never start one: without a worker there is no cache.

    @abstractmethod
    async def ask(self, query: Query, kind: type[T]) -> list[T]:
        """The answers of all workers, of the type that belongs to the query. Raises their errors."""

    async def explain(self, prompt: tuple[int, ...], salt: str = "") -> CacheExplanation:
        """How much of this prompt is cached now by the worker with the longest prefix, and why not more."""
        check_salt(salt)
        found = await self.ask(Explain(PackedPrompt.of(prompt), salt), CacheExplanation)
        nothing = CacheExplanation(0, 0, 0, StopReason.NOT_FOUND)
        return max(found, key=lambda one: one.num_tokens, default=nothing)

    async def stats(self) -> Stats | None:
        """None if there is no worker."""
        return _first(await self.ask(GetStats(), Stats))

    async def blocks(self, max_cells: int) -> Blocks | None:
        """The block map, in at most `max_cells` cells. The worker maintains it as long as it is asked for."""
        return _first(await self.ask(GetBlocks(max_cells), Blocks))

    async def find_held(self, request_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The blocks that these requests hold, as (first, count)."""
        return _first(await self.ask(FindHeld(request_ids), HeldRanges)) or ()

    async def clear_cache(self) -> None:
        """Drop all cached content and all pins. Running requests keep their blocks.

        Raises CacheFolderError if files of the disk cache cannot be deleted; the rest is cleared.
        """
        await self.ask(ClearCache(), NoneType)


def _first(answers: Sequence[T]) -> T | None:
    return answers[0] if answers else None


class EngineClient(ModelClient):
    """The client of a worker on this machine, which it starts and restarts. Belongs to one event loop."""

    def __init__(
        self,
        path: Path,
        text: ModelText,
        config: EngineConfig,
        *,
        on_loading: Progress = ignore,
        hang_limit_s: float = HANG_LIMIT_S,
        on_step: Callable[[Stepped], None] = ignore,
        on_gap: Callable[[float, int], None] = ignore,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        """`on_gap`: called with the time between a token and the one before it, and the number of tokens with that gap.

        The tokens of one answer that arrive together count as evenly spaced. `kv_events`: where the worker announces
        its cache.
        """
        super().__init__(text, config, count(1))
        self._load = Load(str(path), config, kv_events)
        self._connect = partial(
            WorkerConnection,
            text.name,
            hang_limit_s,
            on_loading=on_loading,
            on_step=on_step,
            on_gap=on_gap,
            on_end=self._count_death,
        )
        self._connection: WorkerConnection | None = None
        self._starting = asyncio.Lock()
        self._starts = count()  # of workers
        self._num_early_deaths = 0  # in a row, without a finished request in between
        self._closed = asyncio.Event()

    @property
    def connections(self) -> list[WorkerConnection]:
        return [one for one in (self._connection,) if one is not None and one.is_open]

    async def start(self) -> None:
        await self._ready_connection()

    async def supervise(self) -> None:
        """Start another worker when one dies.

        A failure of the first start is raised, because a retry would not help. Later failures are logged and retried
        after a pause.
        """
        is_first = True
        while True:
            try:
                connection = await self._ready_connection()
            except QuireError as error:
                if self._closed.is_set():
                    return
                if is_first:
                    raise
                log.error("%s could not be started again: %s", self.text.name, error)
            else:
                if not is_first:
                    log.warning("%s is ready again", self.text.name)
                is_first = False
                await connection.ended.wait()

    async def send(self, generation: Generation) -> None:
        connection = await self._ready_connection()
        generation.on_cancel = connection.cancel
        connection.submit(generation)

    async def close(self) -> None:
        self._closed.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.fail(WorkerDied("the engine was closed"))
            await connection.process.close()

    async def ask(self, query: Query, kind: type[T]) -> list[T]:
        return [await one.ask(next(self._ids), query, kind) for one in self.connections]

    # The worker

    async def _ready_connection(self) -> WorkerConnection:
        """The connection to a ready worker. Waits while it loads; cancelling one waiter does not affect others."""
        async with self._starting:
            connection = self._connection
            if connection is None or connection.process.is_over:
                await self._back_off()
                if self._closed.is_set():
                    raise WorkerDied("the engine was closed")
                connection = self._start_worker()
        await asyncio.shield(connection.ready)
        assert connection.facts is not None
        self.max_model_len = connection.facts.max_model_len
        return connection

    def _start_worker(self) -> WorkerConnection:
        self.num_restarts = next(self._starts)
        try:
            connection = self._connect()
        except OSError as error:  # out of processes, descriptors or memory
            self._count_death(False)
            raise WorkerDied(f"no process could be started for {self.text.name}: {error}") from error
        self._connection = connection
        connection.process.send(self._load)
        connection.process.expect_message(LOAD_LIMIT_S)
        return connection

    def _count_death(self, has_served: bool) -> None:
        self._num_early_deaths = 1 if has_served else self._num_early_deaths + 1

    async def _back_off(self) -> None:
        """Wait before the next start, longer after each early death in a row, or until the client is closed."""
        if self._num_early_deaths < 2 or self._closed.is_set():
            return
        delay_s = min(2.0 ** min(self._num_early_deaths - 2, 10), MAX_BACKOFF_S)
        log.warning("%s died %d times in a row: waiting %g s", self.text.name, self._num_early_deaths, delay_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay_s)
