"""The client of a model that runs as several replicas: what `EngineClient` is for a model in one worker.

Each replica has a connection of its own, which is also used for a worker on this machine. A request goes to the replica
with the least expected work (`quire/scale/routing.py`). If a replica ends, requests that had not started are sent to
another one, and requests that had started fail: their clients have received tokens.

`ReplicaLink` is what `WorkerProcess` is for a worker on the same machine. The replica watches its worker for hangs. A
front only notices that the stream of messages ends. Reports of several replicas are combined: figures are added, and
block maps are put side by side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from quire.core.cache.context import TokenChain, hash_block_tokens, root_key
from quire.core.kv_cache import CacheStats
from quire.core.levels.levels import LevelStats
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.model_text import ModelText
from quire.engine.outputs import Answers
from quire.engine.params import GenerationRequest
from quire.engine.worker.block_map import BlocksView
from quire.engine.worker.client import (
    HANG_LIMIT_S,
    Generation,
    HeldRanges,
    ModelClient,
    SafeCallback,
    WorkerConnection,
    WorkerLink,
)
from quire.engine.worker.kv_events import CacheReport, split_keys
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Blocks,
    Cancel,
    FindHeld,
    Finish,
    FromWorker,
    GetBlocks,
    GetStats,
    Query,
    Ready,
    ReplicaStatus,
    Stats,
    Stepped,
    TierStats,
    ToWorker,
    ViewBlocks,
    encode,
    from_worker,
)
from quire.errors import (
    Draining,
    InvalidRequest,
    LostBeforeStart,
    QueueFull,
    QuireError,
    RequestFailed,
    WorkerDied,
)
from quire.scale.routing import Choice, PrefixRouter, Prompt, ReplicaLoad
from quire.scale.transport import ReplicaGone, Transport

# Figures that describe the present. All others count since the start, so those of replicas that have left stay.
GAUGES = frozenset(
    {
        *("num_blocks", "num_free", "num_cached", "num_in_use", "num_shared", "num_pins", "num_pinned"),
        *("num_slots", "num_snapshots", "num_pieces", "num_bytes", "max_bytes", "num_running", "num_waiting"),
    }
)
Figures = TypeVar("Figures")


def add_stats(found: Sequence[Stats]) -> Stats:
    """The figures of a cluster. `found` is not empty."""
    return Stats(
        add_cache_stats([one.cache for one in found]),
        sum(one.num_running for one in found),
        sum(one.num_waiting for one in found),
        tuple(map(_add_waiting, zip(*(one.tiers for one in found), strict=True))),
        sum(one.num_preemptions for one in found),
        sum(one.num_steps for one in found),
        sum(one.num_violations for one in found),
        sum(one.num_drafted for one in found),
        sum(one.num_accepted for one in found),
    )


def add_cache_stats(found: Sequence[CacheStats]) -> CacheStats:
    levels: dict[str, list[LevelStats]] = {}
    for level in (level for one in found for level in one.levels):
        levels.setdefault(level.level, []).append(level)
    return replace(_add(found), levels=tuple(map(_add, levels.values())))


def counters_of(stats: Stats) -> Stats:
    """The figures of a replica that has left: its counts, and nothing at present."""
    tiers = tuple(TierStats(0, 0, 0.0) for _ in stats.tiers)
    return Stats(
        _without_gauges(stats.cache),
        0,
        0,
        tiers,
        stats.num_preemptions,
        stats.num_steps,
        stats.num_violations,
        stats.num_drafted,
        stats.num_accepted,
    )


def join_blocks(found: Sequence[Blocks]) -> Blocks:
    """The blocks of all replicas as one map, one replica after the other. `found` is not empty.

    All have the same number of blocks per cell.
    """
    first = found[0]
    assert all(one.blocks_per_cell == first.blocks_per_cell for one in found)
    shifts = offsets(one.num_blocks for one in found)
    return Blocks(
        sum(one.num_blocks for one in found),
        first.block_size,
        first.blocks_per_cell,
        tuple(run for one in found for run in one.cells),
        tuple(map(sum, zip(*(one.totals for one in found), strict=True))),
        max(one.max_holders for one in found),
        sum(one.num_pending for one in found),
        tuple(one for blocks in found for one in blocks.running),
        tuple(
            run._replace(first=run.first + by) for blocks, by in zip(found, shifts, strict=True) for run in blocks.held
        ),
    )


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where each of these parts begins when they are put side by side."""
    places, place = [], 0
    for size in sizes:
        places.append(place)
        place += size
    return places


def _add_waiting(tiers: tuple[TierStats, ...]) -> TierStats:
    return TierStats(
        sum(one.num_waiting for one in tiers),
        sum(one.num_tokens for one in tiers),
        max(one.oldest_age_s for one in tiers),
    )


def _add(found: Sequence[Figures]) -> Figures:
    """Add figures field by field. Fields that are not numbers are those of the first."""
    first: Any = found[0]
    values: dict[str, Any] = {}
    for field in fields(first):
        given = [value for one in found if (value := getattr(one, field.name)) is not None]
        if given and is_dataclass(given[0]):
            values[field.name] = _add(given)
        elif given and isinstance(given[0], int) and field.name != "break_even_tokens":
            values[field.name] = sum(given)
        else:
            values[field.name] = given[0] if given else None
    return cast(Figures, replace(first, **values))


def _without_gauges(figures: Figures) -> Figures:
    values: dict[str, Any] = {}
    for field in fields(figures):  # type: ignore[arg-type]
        value = getattr(figures, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            values[field.name] = _without_gauges(value)
        elif isinstance(value, tuple):
            values[field.name] = tuple(_without_gauges(one) if is_dataclass(one) else one for one in value)
        elif field.name in GAUGES and value is not None:
            values[field.name] = 0
    return replace(figures, **values)  # type: ignore[type-var]


KEEPALIVE_S = 5.0  # replicas drop a front that sends nothing for `SILENT_LIMIT_S`

log = logging.getLogger(__name__)


class ReplicaLink(WorkerLink):
    """Exchanges messages with one replica."""

    def __init__(
        self,
        replica: str,
        transport: Transport,
        on_message: Callable[[FromWorker], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(on_message, on_end)
        self.replica = replica
        self._transport = transport
        self._limit_s: float | None = None
        self._unsent: list[bytes] = []
        self._num_unsent = 0  # bytes
        self._has_unsent = asyncio.Event()
        self._is_connected = asyncio.Event()  # a message was received
        self._tasks = (self._loop.create_task(self._read()), self._loop.create_task(self._write()))

    def send(self, message: ToWorker) -> None:
        if self.is_over:
            return
        frame = encode(message)
        if self._num_unsent + len(frame) > MAX_UNSENT and not isinstance(message, Cancel | Finish):
            raise QueueFull(f"{self._num_unsent} bytes are waiting to be read by replica {self.replica}")
        self._unsent.append(frame)
        self._num_unsent += len(frame)
        self._has_unsent.set()

    def expect_message(self, limit_s: float | None) -> None:
        if self._limit_s is None and limit_s is not None:
            self._heard_s, self.announced_s = self._loop.time(), 0.0
        self._limit_s = limit_s

    def end(self, reason: str = "") -> None:
        if not self.is_over:
            self.is_over = True
            self._cancel_tasks()
            self._loop.call_soon(self._on_end, reason or "ended")

    async def close(self) -> None:
        self.is_over = True
        self._cancel_tasks()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _read(self) -> None:
        stream = self._transport.messages(self.replica)
        try:
            async for frames in stream:
                self._is_connected.set()
                for message in map(from_worker.decode, frames):
                    self._hear(message)
                if self.is_over:
                    return
            self.end()
        except ReplicaGone as error:
            log.info("replica %s: %s", self.replica, error)
            self.end()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("messages of replica %s could not be read", self.replica)
            self.end("sent messages that could not be read")
        finally:
            with suppress(Exception):
                await stream.aclose()

    async def _write(self) -> None:
        """Send the messages that have collected, in one call. If there are none for a while, an empty call is sent."""
        await self._is_connected.wait()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_unsent.wait(), KEEPALIVE_S)
            self._has_unsent.clear()
            frames, self._unsent, self._num_unsent = self._unsent, [], 0
            try:
                await self._transport.send(self.replica, frames)
            except ReplicaGone as error:
                log.info("replica %s: %s", self.replica, error)
                self.end()
                return
            except Exception:
                log.exception("messages to replica %s could not be sent", self.replica)
                self.end("could not be sent messages")
                return


RECONNECT_S = 1.0  # pause before the first attempt to connect again; it doubles with each failure
MAX_RECONNECT_S = 30.0


class ReplicaView:
    """One replica. `number`: its place in the router. `fingerprint`: of the model and settings that it must have."""

    def __init__(self, replica: str, number: int, connection: WorkerConnection, fingerprint: str) -> None:
        self.replica = replica
        self._fingerprint = fingerprint
        self.number = number
        self.connection = connection
        self.num_free_blocks = 0
        self.num_routed = 0  # requests
        self.is_accepting = True  # False: it is being stopped, and ends its requests
        self.stats: Stats | None = None  # the last known
        self._num_ends = 0  # of connections in a row that served nothing
        self._scheduling: Scheduling | None = None
        self._sent: dict[Generation, int] = {}  # requests without a token so far -> prompt tokens to compute

    @property
    def is_foreign(self) -> bool:
        """Whether it has another model or other settings than this front."""
        return self.connection.facts is not None and self.connection.facts.fingerprint != self._fingerprint

    @property
    def is_open(self) -> bool:
        return self.connection.facts is not None and not self.is_foreign and not self.connection.process.is_over

    @property
    def figures(self) -> Stats | None:
        """The last known figures. Without a connection only the counts are valid."""
        return self.stats if self.stats is None or self.is_open else counters_of(self.stats)

    def note(self, generation: Generation, num_tokens: int) -> None:
        """Record a request that is sent there, with the tokens of its prompt that are expected not to be cached."""
        self._sent[generation] = num_tokens
        self.num_routed += 1

    def note_end(self, has_served: bool) -> float:
        """Record that the connection has ended. Returns the seconds after which to connect again."""
        self._sent.clear()
        self._num_ends = 1 if has_served else self._num_ends + 1
        return min(RECONNECT_S * 2.0 ** min(self._num_ends - 1, 10), MAX_RECONNECT_S)

    def _limits(self, config: EngineConfig) -> Scheduling:
        """The replica's settings, which never change."""
        if self._scheduling is None:
            assert self.connection.facts is not None
            self._scheduling = config.scheduling(self.connection.facts.capacity)
        return self._scheduling

    def status(self, config: EngineConfig) -> ReplicaStatus:
        cache = CacheStats.none() if self.stats is None else self.stats.cache
        num_blocks = self._limits(config).num_blocks - 1  # without the null block
        return ReplicaStatus(
            self.replica,
            self.is_accepting,
            self.connection.num_requests,
            self.num_routed,
            num_blocks,
            self.num_free_blocks,
            cache.num_queried_tokens,
            cache.num_hit_tokens,
        )

    def load(self, config: EngineConfig) -> ReplicaLoad:
        """Its load: from this front's own requests, which is at once, and from its last report."""
        for generation in [one for one in self._sent if _has_begun(one)]:
            del self._sent[generation]
        queued = [0, 0, 0]
        for generation, num_tokens in self._sent.items():
            queued[generation.answers.request.priority] += num_tokens
        limits = self._limits(config)
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=self.connection.num_requests,
            max_num_seqs=limits.max_num_seqs,
            num_free_blocks=self.num_free_blocks,
            num_blocks=limits.num_blocks,
        )


def _has_begun(generation: Generation) -> bool:
    """Whether its prompt is computed, or it has ended."""
    return generation.first_s is not None or generation.error is not None or generation.answers.is_finished


EXPECTED_ANSWER = 128  # tokens, for the memory that a request without a limit will need
MAX_MOVES = 5  # of one request, from replicas that ended
MOVE_PAUSE_S = 0.2
LEAVE_S = 1.0  # how often it is checked whether a replica that is being stopped has become idle
MAX_SECRETS = 8  # for which the keys of a prompt are computed: replicas with a disk cache have one per machine
THREAD_TOKENS = 8192  # keys of longer prompts are computed in a thread
CLOSED = "the engine was closed"

T = TypeVar("T")


class _Pending:
    """A request that is being routed."""

    def __init__(self, generation: Generation, prompt: Prompt, keys: dict[bytes, list[bytes]]) -> None:
        self.generation = generation
        self.prompt = prompt
        self.keys = keys  # secret of replicas -> chain keys of the prompt
        self.choices: list[Choice] = []  # as ranked last, until it is sent
        self.is_sent = False
        self.error: QuireError | None = None  # why it cannot be sent


class ClusterClient(ModelClient):
    """Submits requests and queries to the replicas of one model."""

    def __init__(
        self,
        text: ModelText,
        config: EngineConfig,
        transport: Transport,
        *,
        ids: Iterator[int],
        fingerprint: str = "",
        hang_limit_s: float = HANG_LIMIT_S,
        on_step: Callable[[Stepped], None] | None = None,
        on_gap: Callable[[float, int], None] | None = None,
    ) -> None:
        """`ids`: of requests and queries, see `ids_of`. `fingerprint`: of the model and settings of this front.

        While a deployment changes the model, replicas of the new one appear before the new front: this front has
        another tokenizer and other settings, so it does not use them.
        """
        super().__init__(text, config, ids)
        self._transport = transport
        self._hang_limit_s = hang_limit_s
        self._on_step = SafeCallback("on_step", on_step)
        self._on_gap = SafeCallback("on_gap", on_gap)
        self._router = PrefixRouter(0, config.block_size)
        self._replicas: dict[str, ReplicaView] = {}
        self._accepting: tuple[str, ...] = ()
        self._fingerprint = fingerprint
        self._routing: dict[int, Generation] = {}  # requests that are being routed, by the number of the attempt
        self._pending: dict[int, _Pending] = {}  # those of them that can be ranked
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ready = asyncio.Event()  # there was a replica
        self._has_open = asyncio.Event()  # a replica accepts requests, or none will
        self._departed: Stats | None = None  # counts of replicas that have left
        self._num_lost = 0
        self._is_closed = False

    # What is known about the replicas

    @property
    def replicas(self) -> list[ReplicaView]:
        """The replicas that the front is connected to, in the order of their numbers."""
        return sorted((one for one in self._replicas.values() if one.is_open), key=lambda one: one.number)

    @property
    def facts(self) -> Ready | None:
        """The report of one replica: all have the same model and settings."""
        return next((one.connection.facts for one in self.replicas), None)

    @property
    def system_fingerprint(self) -> str | None:
        """That of all replicas; None if they differ, in their devices for example: any of them may answer."""
        facts = (one.connection.facts for one in self.replicas)
        found = {one.system_fingerprint for one in facts if one is not None}
        return (found.pop() or None) if len(found) == 1 else None

    @property
    def is_moving(self) -> bool:
        return any(one.connection.is_moving for one in self.replicas)

    @property
    def num_restarts(self) -> int:
        """The number of replicas that ended without being asked to."""
        return self._num_lost

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        return tuple(view.status(self._config) for view in self.replicas)

    @property
    def index_bytes(self) -> int:
        """Memory of the router's index."""
        return self._router.index.num_bytes

    async def start(self) -> None:
        """Wait for the first replica."""
        self._transport.start(self)
        await self._is_ready.wait()

    async def supervise(self) -> None:
        """Leave replicas that are being stopped. The cluster itself replaces those that end."""
        while True:
            await asyncio.sleep(LEAVE_S)
            for view in tuple(self._replicas.values()):
                if not view.is_accepting:
                    self._close_if_idle(view)

    async def close(self) -> None:
        """Leave the cluster. Unfinished requests fail; the replicas stay."""
        self._is_closed = True
        for generation in tuple(self._routing.values()):
            _fail(generation, LostBeforeStart(CLOSED))
        self._is_ready.set()
        self._note_open()  # wakes requests that wait for a replica
        for task in tuple(self._tasks):
            task.cancel()
        for view in tuple(self._replicas.values()):
            view.connection.fail(WorkerDied(CLOSED))
            await view.connection.process.close()
        self._replicas.clear()
        await self._transport.close()

    # Requests

    async def submit(
        self,
        request: GenerationRequest,
        *,
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Send a request to a replica. Waits while there is none."""
        request_ids = tuple(next(self._ids) for _ in range(request.n))
        generation = Generation(Answers(request, self.text.tokenizer), request_ids, self._cancel, updated, on_start)
        await self._route(generation)
        return generation

    async def _route(self, generation: Generation) -> None:
        """Send a request to the replica that `rank` prefers and that accepts it. Waits while there is none.

        From then on the connection is responsible for it: it reports the request to `_move` if the replica ends.
        """
        number = next(self._ids)
        self._routing[number] = generation
        try:
            await self._wait_open()
            pending = self._pending[number] = await self._describe(generation)
            while not generation.answers.is_finished:  # it may be cancelled
                await self._wait_open()
                problem = await self._choose(number)
                if pending.error is not None:
                    raise pending.error
                if pending.is_sent:
                    return
                log.info("a request is sent again: %s", problem)
                self._count_move(generation)
                await asyncio.sleep(MOVE_PAUSE_S)
        except BaseException:  # its caller gives up, also if a replica has got it meanwhile
            self._cancel(generation)
            raise
        finally:
            self._pending.pop(number, None)
            del self._routing[number]

    async def _choose(self, number: int) -> str:
        """Let the cluster choose a replica, which is reported to `note_routed`. Returns why none was chosen."""
        choosing = self._spawn(self._transport.choose(number))
        try:
            await asyncio.wait({choosing})
        finally:
            choosing.cancel()
        if self._is_closed:
            raise LostBeforeStart(CLOSED)
        if choosing.cancelled():
            return "the call was cancelled"
        try:
            choosing.result()
        except ReplicaGone as error:
            return str(error)
        return "its replica has left"

    async def _wait_open(self) -> None:
        """Wait until a replica accepts requests. The cluster's router makes only a few choices at a time."""
        await self._has_open.wait()
        if self._is_closed:
            raise LostBeforeStart(CLOSED)
        if self._is_replaced:
            raise Draining(f"{self.text.name} is being replaced; if this does not end, run `quire deploy` again")

    @property
    def _is_replaced(self) -> bool:
        """Whether all replicas that accept requests have another model or other settings."""
        accepting = [view for view in self._replicas.values() if view.is_accepting]
        return bool(accepting) and all(view.is_foreign for view in accepting)

    def _note_open(self) -> None:
        """Let requests wait, or not, after a change of the replicas."""
        if self._is_closed or self._is_replaced or any(view.is_accepting for view in self.replicas):
            self._has_open.set()
        else:
            self._has_open.clear()

    async def _describe(self, generation: Generation) -> _Pending:
        request = generation.answers.request
        num_tokens = len(request.prompt)
        block_size = self._config.block_size
        num_out = min(request.sampling.max_tokens or EXPECTED_ANSWER, EXPECTED_ANSWER)
        prompt = Prompt(num_tokens, request.priority, -(-(num_tokens + num_out) // block_size))
        found = Counter(view.connection.facts.chain_secret for view in self.replicas if view.connection.facts)
        secrets = [secret for secret, _ in found.most_common(MAX_SECRETS)]
        if num_tokens * len(secrets) > THREAD_TOKENS:
            keys = await asyncio.to_thread(_chain_keys, secrets, request, block_size)
        else:
            keys = _chain_keys(secrets, request, block_size)
        return _Pending(generation, prompt, keys)

    def _cancel(self, generation: Generation) -> None:
        """End a request, wherever it is."""
        for view in self._replicas.values():
            view.connection.cancel(generation)
        if not generation.answers.is_finished:  # it is being routed: it will not be sent
            for index in range(len(generation.request_ids)):
                generation.answers.cancel(index)
            generation.wake()

    def _move(self, generation: Generation) -> None:
        """Send a request again whose replica has ended before it started."""
        if self._is_closed:
            _fail(generation, LostBeforeStart(CLOSED))
        elif not generation.answers.is_finished:
            try:
                self._count_move(generation)
            except LostBeforeStart as error:
                _fail(generation, error)
            else:
                self._spawn(self._resend(generation))

    def _count_move(self, generation: Generation) -> None:
        generation.num_moves += 1
        if generation.num_moves > MAX_MOVES:
            raise LostBeforeStart(f"{generation.num_moves} replicas of {self.text.name} ended before the request began")

    async def _resend(self, generation: Generation) -> None:
        try:
            await self._route(generation)
        except QuireError as error:
            _fail(generation, error)
        except Exception as error:
            log.exception("a request could not be sent again")
            _fail(generation, RequestFailed(f"the request could not be sent again: {type(error).__name__}"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, which `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Routing: called by the cluster's router

    def set_replicas(self, replicas: Sequence[str]) -> None:
        self._accepting = tuple(replicas)
        for replica in replicas:
            if replica not in self._replicas and not self._is_closed:
                number, connection = self._router.add_replica(), self._connect(replica)
                self._replicas[replica] = ReplicaView(replica, number, connection, self._fingerprint)
        for view in tuple(self._replicas.values()):  # some are forgotten
            view.is_accepting = view.replica in self._accepting
            if not view.is_accepting:
                self._close_if_idle(view)
        self._note_open()

    def uses(self, replica: str) -> bool:
        return replica in self._replicas

    def rank(self, number: int, candidates: Sequence[str]) -> list[str]:
        names = frozenset(candidates)
        views = {view.number: view for view in self.replicas if view.replica in names}
        pending = self._pending.get(number)
        if pending is None:
            return [*candidates]  # it was cancelled: the call has no effect, but must not be tried for ever
        if not views:
            return []
        cached: dict[int, int] = {}
        for secret, keys in pending.keys.items():
            for place, num_tokens in self._router.cached_tokens(keys).items():
                facts = views[place].connection.facts if place in views else None
                if facts is not None and facts.chain_secret == secret:
                    cached[place] = num_tokens
        for place in self._router.loads:
            view = views.get(place)
            self._router.loads[place] = ReplicaLoad() if view is None else view.load(self._config)
        self._count_ranked(number)
        session = _session(pending.generation.answers.request)
        choices = self._router.rank(pending.prompt, cached, session, time.monotonic_ns())
        choices = [choice for choice in choices if choice.replica in views]
        pending.choices = choices
        return [views[choice.replica].replica for choice in choices]

    def _count_ranked(self, number: int) -> None:
        """Add requests to the loads that were ranked and not sent yet: many may be routed at the same time."""
        for other, pending in self._pending.items():
            choices, prompt = pending.choices, pending.prompt
            if other == number or not choices or choices[0].replica not in self._router.loads:
                continue
            first = choices[0]
            load = self._router.loads[first.replica]
            num_tokens = prompt.num_tokens - first.num_cached_tokens
            self._router.loads[first.replica] = load.with_request(prompt.priority, num_tokens, prompt.num_blocks)

    def note_routed(self, number: int, replica: str) -> None:
        """Send a request to the replica that was chosen for it.

        It takes the same way as its cancellation, so that they arrive in this order.
        """
        pending, view = self._pending.get(number), self._replicas.get(replica)
        if pending is None or pending.is_sent or pending.generation.answers.is_finished:
            return  # it was cancelled
        if view is None or not view.is_open:
            return  # the replica has left meanwhile: `_route` asks for another
        generation, choices = pending.generation, pending.choices
        pending.choices = []
        try:
            view.connection.submit(generation.answers.request, generation)
        except QuireError as error:
            pending.error = error
            return
        pending.is_sent = True
        chosen = next((one for one in choices if one.replica == view.number), None)
        num_cached = 0 if chosen is None else chosen.num_cached_tokens
        view.note(generation, pending.prompt.num_tokens - num_cached)
        if chosen is not None:
            self._router.note(pending.prompt, chosen, _session(generation.answers.request), time.monotonic_ns())

    def _connect(self, replica: str) -> WorkerConnection:
        connection = WorkerConnection(
            f"{self.text.name} on replica {replica}",
            self._hang_limit_s,
            on_loading=SafeCallback("on_loading", None),
            on_step=SafeCallback("on_step", lambda step: self._take_step(replica, step)),
            on_gap=self._on_gap,
            on_end=lambda has_served: self._take_end(replica, has_served),
            on_report=lambda report: self._take_report(replica, report),
            on_lost=self._move,
            connect=lambda on_message, on_end: ReplicaLink(replica, self._transport, on_message, on_end),
            probe_id=next(self._ids),
        )
        connection.ready.add_done_callback(lambda _: self._note_ready(replica, connection))
        return connection

    async def _reconnect(self, view: ReplicaView, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if view.is_accepting and view.replica in self._replicas and not self._is_closed:
            view.connection = self._connect(view.replica)

    def _note_ready(self, replica: str, connection: WorkerConnection) -> None:
        facts, view = connection.facts, self._replicas.get(replica)
        if facts is None or view is None or view.connection is not connection:
            return
        if view.is_foreign:
            log.warning("replica %s of %s has another model or other settings", replica, self.text.name)
            self._spawn(connection.process.close())
        else:
            self.max_model_len = facts.max_model_len
            self._is_ready.set()
        self._note_open()

    def _take_step(self, replica: str, step: Stepped) -> None:
        self._on_step(step)
        view = self._replicas.get(replica)
        if view is not None and not view.is_accepting:
            self._close_if_idle(view)

    def _take_report(self, replica: str, report: CacheReport) -> None:
        view = self._replicas.get(replica)
        if view is None:
            return
        index, number = self._router.index, view.number
        if report.is_cleared:
            index.clear(number)
        index.remove(number, split_keys(report.removed))
        index.add(number, split_keys(report.added))
        view.num_free_blocks = report.num_free_blocks

    def _take_end(self, replica: str, has_served: bool) -> None:
        """The connection to a replica has ended. Its requests are failed or moved by the connection, after this.

        If the cluster still lists the replica, it may run: only the connection is lost.
        """
        view = self._replicas.get(replica)
        if view is None or self._is_closed:
            return
        if view.is_accepting:
            self._num_lost += view.connection.facts is not None
            pause_s = view.note_end(has_served)
            log.warning("replica %s of %s has ended; connecting again in %g s", replica, self.text.name, pause_s)
            self._spawn(self._reconnect(view, pause_s))
        else:
            self._forget(view)
        self._note_open()

    def _close_if_idle(self, view: ReplicaView) -> None:
        """Leave a replica that is being stopped, when its last request has ended. It waits for that."""
        if view.connection.num_requests or view.replica not in self._replicas:
            return
        self._forget(view)
        view.connection.fail(WorkerDied("the replica was stopped"))  # open queries
        self._spawn(view.connection.process.close())

    def _forget(self, view: ReplicaView) -> None:
        del self._replicas[view.replica]
        self._router.remove_replica(view.number)
        if view.stats is not None:
            left = counters_of(view.stats)
            self._departed = left if self._departed is None else add_stats([self._departed, left])

    # Queries

    async def _ask(self, query: Query, kind: type[T]) -> list[tuple[ReplicaView, T]]:
        """Ask every replica. Those that end meanwhile are left out."""
        views = self.replicas
        asked = [view.connection.ask(next(self._ids), query, kind) for view in views]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: list[tuple[ReplicaView, T]] = []
        for view, answer in zip(views, answers, strict=True):
            if not isinstance(answer, BaseException):
                found.append((view, answer))
            elif not isinstance(answer, WorkerDied | QueueFull):
                raise answer
        return found

    async def ask(self, query: Query, kind: type[T]) -> list[T]:
        return [answer for _, answer in await self._ask(query, kind)]

    async def stats(self) -> Stats | None:
        """The figures of all replicas, added. Counts of replicas that have left are included."""
        for view, answer in await self._ask(GetStats(), Stats):
            view.stats = answer
        found = [figures for view in self._replicas.values() if (figures := view.figures) is not None]
        if not self.replicas or not found:
            return None
        return add_stats(found if self._departed is None else [*found, self._departed])  # as of now: some may have left

    async def blocks(self, max_cells: int) -> Blocks | None:
        """The block maps of all replicas, side by side."""
        places = self._places()
        num_blocks = sum(size for _, (_, size) in places)
        # The last cell of each replica may be smaller than the others.
        per_cell = max(-(-num_blocks // max(max_cells - len(places), 1)), 1)
        maps = await self.ask(GetBlocks(max(num_blocks, 1), per_cell), Blocks)
        return join_blocks(maps) if maps else None

    async def view_blocks(self, first: int, count: int) -> BlocksView | None:
        """Blocks of the joined map, which starts at 1. A range ends with the blocks of its replica."""
        for view, (start, size) in self._places():
            if start < first <= start + size:
                query = ViewBlocks(first - start, min(count, start + size + 1 - first))
                found = await view.connection.ask(next(self._ids), query, BlocksView)
                return replace(found, first=first)
        raise InvalidRequest(f"first = {first} is not a block")

    async def find_held(self, request_ids: tuple[int, ...]) -> HeldRanges:
        starts = {view.replica: start for view, (start, _) in self._places()}
        ranges: list[tuple[int, int]] = []
        for view, answer in await self._ask(FindHeld(request_ids), HeldRanges):
            ranges += [(first + starts.get(view.replica, 0), size) for first, size in answer]
        return tuple(ranges)

    def _places(self) -> list[tuple[ReplicaView, tuple[int, int]]]:
        """The replicas, with the number of blocks before them in the joined map and of their own."""
        views = self.replicas
        sizes = [view.status(self._config).num_blocks for view in views]
        return list(zip(views, zip(offsets(sizes), sizes, strict=True), strict=True))

    def drop_blocks(self) -> None:
        for view in self.replicas:
            view.connection.drop_blocks()


def _fail(generation: Generation, error: QuireError) -> None:
    for index in range(len(generation.request_ids)):
        generation.answers.fail(index, str(error))
    generation.fail(error)


def _chain_keys(secrets: Sequence[bytes], request: GenerationRequest, block_size: int) -> dict[bytes, list[bytes]]:
    """The keys of the whole blocks of a prompt that may be cached, for each secret."""
    keys: dict[bytes, list[bytes]] = {}
    for secret in secrets:
        chain = TokenChain(root_key(secret, request.salt), array("I", request.prompt), block_size, hash_block_tokens)
        keys[secret] = [chain.key(index) for index in range((len(request.prompt) - 1) // block_size)]
    return keys


def _session(request: GenerationRequest) -> str:
    """The name of a session is separate for each salt, so that tenants do not share one."""
    return f"{request.salt}/{request.session}" if request.session else ""
