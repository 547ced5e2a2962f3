"""The client of a model that runs as several replicas: what `EngineClient` is for a model in one worker.

Each replica has a connection of its own, which is also used for a worker on this machine. A request goes to the replica
with the least expected work (`quire/scale/routing.py`). If a replica ends, requests that had not started are sent to
another one, and requests that had started fail: their clients have received tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from quire.backends.base import Capacity
from quire.core.cache import TokenChain, hash_block_tokens, root_key
from quire.core.kv_cache import CacheStats
from quire.engine.composition import EngineConfig
from quire.engine.generation import Generation, GenerationRequest
from quire.engine.model_text import ModelText
from quire.engine.worker.client import HANG_LIMIT_S, HeldRanges, ModelClient, WorkerConnection, ignore
from quire.engine.worker.kv_events import CacheReport
from quire.engine.worker.protocol import (
    Blocks,
    FindHeld,
    GetBlocks,
    GetStats,
    Query,
    ReplicaStatus,
    Stats,
    Stepped,
)
from quire.errors import (
    Draining,
    LostBeforeStart,
    QueueFull,
    QuireError,
    RequestFailed,
    WorkerDied,
)
from quire.scale.routing import PrefixRouter, Prompt, ReplicaLoad
from quire.scale.transport import ReplicaLink, Transport

EXPECTED_ANSWER = 128  # tokens, for the memory that a request without a limit will need
MAX_MOVES = 5  # of one request, from replicas that ended
LEAVE_S = 1.0  # how often it is checked whether a replica that is being stopped has become idle
MAX_SECRETS = 8  # for which the keys of a prompt are computed: replicas with a disk cache have one per machine
THREAD_TOKENS = 8192  # keys of longer prompts are computed in a thread
CLOSED = "the engine was closed"

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        on_step: Callable[[Stepped], None] = ignore,
        on_gap: Callable[[float, int], None] = ignore,
    ) -> None:
        """`ids`: of requests and queries, see `ids_of`. `fingerprint`: of the model and settings of this front.

        While a deployment changes the model, replicas of the new one appear before the new front: this front has
        another tokenizer and other settings, so it does not use them.
        """
        super().__init__(text, config, ids)
        self._transport = transport
        self._new_connection = partial(WorkerConnection, hang_limit_s=hang_limit_s, on_gap=on_gap, on_lost=self._move)
        self._on_step = on_step
        self._router = PrefixRouter[ReplicaView](config.block_size)
        self._replicas: dict[str, ReplicaView] = {}
        self._fingerprint = fingerprint
        self._routing: set[Generation] = set()  # requests that wait for a replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ready = asyncio.Event()  # there was a replica
        self._has_open = asyncio.Event()  # a replica accepts requests, or none will
        self._departed: Stats | None = None  # counts of replicas that have left
        self._is_closed = False

    # What is known about the replicas

    @property
    def replicas(self) -> list[ReplicaView]:
        """The replicas that the front is connected to, the first one first."""
        return [one for one in self._replicas.values() if one.is_open]

    @property
    def _open(self) -> list[ReplicaView]:
        """Those of them that accept requests."""
        return [one for one in self.replicas if one.is_accepting]

    @property
    def connections(self) -> list[WorkerConnection]:
        return [one.connection for one in self.replicas]

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        return tuple(view.status() for view in self.replicas)

    async def start(self) -> None:
        """Wait for the first replica."""
        self._transport.start(self.set_replicas)
        await self._is_ready.wait()

    async def supervise(self) -> None:
        """Leave replicas that are being stopped. The cluster itself replaces those that end."""
        while True:
            await asyncio.sleep(LEAVE_S)
            for view in tuple(self._replicas.values()):
                self._close_if_idle(view)

    async def close(self) -> None:
        """Leave the cluster. Unfinished requests fail; the replicas stay."""
        self._is_closed = True
        for generation in tuple(self._routing):
            generation.fail(LostBeforeStart(CLOSED))
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

    async def send(self, generation: Generation) -> None:
        """Send a request to the best replica. Waits while there is none.

        From then on the connection is responsible for it: it reports the request to `_move` if the replica ends.
        """
        generation.on_cancel = self._cancel
        self._routing.add(generation)
        try:
            while not generation.is_finished:  # it may be cancelled
                await self._has_open.wait()
                if self._is_closed:
                    raise LostBeforeStart(CLOSED)
                if self._is_replaced:
                    raise Draining(
                        f"{self.text.name} is being replaced; if this does not end, run `quire deploy` again"
                    )
                cached = await self._cached_tokens(generation.request)
                if self._open and not generation.is_finished:
                    self._pass_on(generation, cached)
                    return
                await asyncio.sleep(0)  # the end of a replica is about to be reported
        finally:
            self._routing.discard(generation)

    async def _cached_tokens(self, request: GenerationRequest) -> dict[ReplicaView, int]:
        """How many tokens of a prompt each replica has."""
        found = Counter(view.connection.facts.chain_secret for view in self.replicas if view.connection.facts)
        secrets = [secret for secret, _ in found.most_common(MAX_SECRETS)]
        if len(request.prompt) * len(secrets) > THREAD_TOKENS:
            keys = await asyncio.to_thread(_chain_keys, secrets, request, self._config.block_size)
        else:
            keys = _chain_keys(secrets, request, self._config.block_size)
        cached: dict[ReplicaView, int] = {}
        for keys_of_secret in keys:
            cached |= self._router.cached_tokens(keys_of_secret)
        return cached

    def _pass_on(self, generation: Generation, cached: Mapping[ReplicaView, int]) -> None:
        request = generation.request
        num_tokens = len(request.prompt)
        num_out = min(request.sampling.max_tokens or EXPECTED_ANSWER, EXPECTED_ANSWER)
        prompt = Prompt(num_tokens, request.priority, -(-(num_tokens + num_out) // self._config.block_size))
        # The name of a session is separate for each salt, so that tenants do not share one.
        session = f"{request.salt}/{request.session}" if request.session else ""
        loads = {view: view.load() for view in self._open}
        view = self._router.choose(prompt, cached, loads, session, time.monotonic_ns())
        view.connection.submit(generation)
        view.note(generation, num_tokens - cached.get(view, 0))

    @property
    def _is_replaced(self) -> bool:
        """Whether all replicas that accept requests have another model or other settings."""
        accepting = [view for view in self._replicas.values() if view.is_accepting]
        return bool(accepting) and all(view.is_foreign for view in accepting)

    def _note_open(self) -> None:
        """Let requests wait, or not, after a change of the replicas."""
        if self._is_closed or self._is_replaced or self._open:
            self._has_open.set()
        else:
            self._has_open.clear()

    def _cancel(self, generation: Generation) -> None:
        """End a request, wherever it is."""
        for view in self._replicas.values():
            view.connection.cancel(generation)
        if not generation.is_finished:  # it is being routed: it will not be sent
            generation.note_cancelled()

    def _move(self, generation: Generation, _: QuireError) -> None:
        """Send a request again whose replica has ended before it started."""
        generation.num_moves += 1
        if self._is_closed:
            generation.fail(LostBeforeStart(CLOSED))
        elif generation.num_moves > MAX_MOVES:
            text = f"{generation.num_moves} replicas of {self.text.name} ended before the request began"
            generation.fail(LostBeforeStart(text))
        elif not generation.is_finished:
            self._spawn(self._resend(generation))

    async def _resend(self, generation: Generation) -> None:
        try:
            await self.send(generation)
        except QuireError as error:
            generation.fail(error)
        except Exception as error:
            log.exception("a request could not be sent again")
            generation.fail(RequestFailed(f"the request could not be sent again: {type(error).__name__}"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, which `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Replicas

    def set_replicas(self, replicas: Collection[str]) -> Collection[str]:
        """Use the replicas that accept requests now. Returns these, and those that finish their requests."""
        for replica in replicas:
            if replica not in self._replicas and not self._is_closed:
                view = self._replicas[replica] = ReplicaView(replica, self._fingerprint)
                self._connect(view)
        for view in tuple(self._replicas.values()):  # some are forgotten
            view.is_accepting = view.replica in replicas
            self._close_if_idle(view)
        self._note_open()
        return self._replicas.keys()

    def _connect(self, view: ReplicaView) -> None:
        view.connection = connection = self._new_connection(
            f"{self.text.name} on replica {view.replica}",
            on_step=partial(self._take_step, view),
            on_end=partial(self._take_end, view),
            on_report=partial(self._take_report, view),
            connect=partial(ReplicaLink, view.replica, self._transport),
            probe_id=next(self._ids),
        )
        connection.ready.add_done_callback(lambda _: self._note_ready(view))

    async def _reconnect(self, view: ReplicaView, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if view.is_accepting and self._uses(view):
            self._connect(view)

    def _uses(self, view: ReplicaView) -> bool:
        """Whether a replica was not left."""
        return not self._is_closed and self._replicas.get(view.replica) is view

    def _note_ready(self, view: ReplicaView) -> None:
        facts = view.connection.facts
        if facts is None:
            return
        if view.is_foreign:
            log.warning("replica %s of %s has another model or other settings", view.replica, self.text.name)
            self._spawn(view.connection.process.close())
        else:
            self.max_model_len = facts.max_model_len
            self._is_ready.set()
        self._note_open()

    def _take_step(self, view: ReplicaView, step: Stepped) -> None:
        self._on_step(step)
        self._close_if_idle(view)

    def _take_report(self, view: ReplicaView, report: CacheReport) -> None:
        if self._uses(view):
            self._router.take(view, report)
            view.num_free_blocks = report.num_free_blocks

    def _take_end(self, view: ReplicaView, has_served: bool) -> None:
        """The connection to a replica has ended. Its requests are failed or moved by the connection, after this.

        If the cluster still lists the replica, it may run: only the connection is lost.
        """
        if not self._uses(view):
            return
        if view.is_accepting:
            self.num_restarts += view.connection.facts is not None
            pause_s = view.note_end(has_served)
            log.warning("replica %s of %s has ended; connecting again in %g s", view.replica, self.text.name, pause_s)
            self._spawn(self._reconnect(view, pause_s))
        else:
            self._forget(view)
        self._note_open()

    def _close_if_idle(self, view: ReplicaView) -> None:
        """Leave a replica that is being stopped, when its last request has ended. It waits for that."""
        if view.is_accepting or view.connection.num_requests or not self._uses(view):
            return
        self._forget(view)
        view.connection.fail(WorkerDied("the replica was stopped"))  # open queries
        self._spawn(view.connection.process.close())

    def _forget(self, view: ReplicaView) -> None:
        del self._replicas[view.replica]
        self._router.forget(view)
        if view.stats is not None:
            left = counters_of(view.stats)
            self._departed = left if self._departed is None else add_stats([self._departed, left])

    # Queries

    async def _ask(self, query: Query, kind: type[T]) -> dict[ReplicaView, T]:
        """The answers of all replicas. Those that end meanwhile are left out."""
        views = self.replicas
        asked = [view.connection.ask(next(self._ids), query, kind) for view in views]
        found: dict[ReplicaView, T] = {}
        for view, answer in zip(views, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if not isinstance(answer, BaseException):
                found[view] = answer
            elif not isinstance(answer, WorkerDied | QueueFull):
                raise answer
        return found

    async def ask(self, query: Query, kind: type[T]) -> list[T]:
        return [*(await self._ask(query, kind)).values()]

    async def stats(self) -> Stats | None:
        """The figures of all replicas, added. Counts of replicas that have left are included."""
        for view, stats in (await self._ask(GetStats(), Stats)).items():
            view.stats = stats
        found = [figures for view in self._replicas.values() if (figures := view.figures) is not None]
        if not self.replicas or not found:
            return None
        return add_stats(found if self._departed is None else [*found, self._departed])  # as of now: some may have left

    async def blocks(self, max_cells: int) -> Blocks | None:
        """The block maps of all replicas, side by side."""
        starts = self._starts()
        num_blocks = sum(view.num_blocks for view in starts)
        # The last cell of each replica may be smaller than the others.
        per_cell = max(-(-num_blocks // max(max_cells - len(starts), 1)), 1)
        maps = await self.ask(GetBlocks(max(num_blocks, 1), per_cell), Blocks)
        return join_blocks(maps) if maps else None

    async def find_held(self, request_ids: tuple[int, ...]) -> HeldRanges:
        starts = self._starts()
        ranges: list[tuple[int, int]] = []
        for view, held in (await self._ask(FindHeld(request_ids), HeldRanges)).items():
            ranges += [(first + starts.get(view, 0), size) for first, size in held]
        return tuple(ranges)

    def _starts(self) -> dict[ReplicaView, int]:
        """The replicas, with the number of blocks before them in the joined map."""
        views = self.replicas
        return dict(zip(views, accumulate((view.num_blocks for view in views), initial=0), strict=False))


def _chain_keys(secrets: Sequence[bytes], request: GenerationRequest, block_size: int) -> list[list[bytes]]:
    """The keys of the whole blocks of a prompt that may be cached, for each secret."""
    keys = []
    for secret in secrets:
        chain = TokenChain(root_key(secret, request.salt), request.prompt.tokens, block_size, hash_block_tokens)
        keys.append([chain.key(index) for index in range((len(request.prompt) - 1) // block_size)])
    return keys


# Figures that describe the present. All others count since the start, so those of replicas that have left stay.
GAUGES = frozenset(
    {
        *("num_blocks", "num_free", "num_cached", "num_in_use", "num_shared", "num_pins", "num_pinned", "num_slots"),
        *("num_snapshots", "num_pieces", "num_bytes", "max_bytes", "num_running", "num_waiting", "num_tokens"),
        "oldest_age_s",
    }
)
NOT_ADDED = "break_even_tokens"


def add_stats(found: Sequence[Stats]) -> Stats:
    """The figures of a cluster. `found` is not empty."""
    return msgspec.convert(_add("", [msgspec.to_builtins(one) for one in found]), Stats)


def counters_of(stats: Stats) -> Stats:
    """The figures of a replica that has left: its counts, and nothing at present."""
    return msgspec.convert(_without_gauges("", msgspec.to_builtins(stats)), Stats)


def _add(name: str, found: Sequence[Any]) -> Any:
    """Add values of one name. Levels are added by their name; of texts and floats, the first is taken."""
    given = [one for one in found if one is not None]
    first = given[0] if given else None
    if isinstance(first, dict):
        return {key: _add(key, [one[key] for one in given]) for key in first}
    if name == "levels":
        by_level: dict[str, list[Any]] = {}
        for level in (level for levels in given for level in levels):
            by_level.setdefault(level["level"], []).append(level)
        return [_add("", levels) for levels in by_level.values()]
    if isinstance(first, tuple):
        return [_add("", row) for row in zip(*given, strict=True)]
    if name == "oldest_age_s":
        return max(given)
    return sum(given) if isinstance(first, int) and name != NOT_ADDED else first


def _without_gauges(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_gauges(key, one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_without_gauges("", one) for one in value]
    return 0 if name in GAUGES and value is not None else value


def join_blocks(found: Sequence[Blocks]) -> Blocks:
    """The blocks of all replicas as one map, one replica after the other. `found` is not empty.

    All have the same number of blocks per cell.
    """
    first = found[0]
    assert all(one.blocks_per_cell == first.blocks_per_cell for one in found)
    shifts = accumulate((one.num_blocks for one in found), initial=0)
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
            run._replace(first=run.first + by) for blocks, by in zip(found, shifts, strict=False) for run in blocks.held
        ),
    )


RECONNECT_S = 1.0  # pause before the first attempt to connect again; it doubles with each failure
MAX_RECONNECT_S = 30.0


class ReplicaView:
    """One replica. `fingerprint`: of the model and settings that it must have."""

    connection: WorkerConnection  # set when it is connected, again after its end

    def __init__(self, replica: str, fingerprint: str) -> None:
        self.replica = replica
        self._fingerprint = fingerprint
        self.num_free_blocks = 0
        self.num_routed = 0  # requests
        self.is_accepting = True  # False: it is being stopped, and ends its requests
        self.stats: Stats | None = None  # the last known
        self._num_ends = 0  # of connections in a row that served nothing
        self._sent: dict[Generation, int] = {}  # requests without a token so far -> prompt tokens to compute

    @property
    def is_foreign(self) -> bool:
        """Whether it has another model or other settings than this front."""
        return self.connection.facts is not None and self.connection.facts.fingerprint != self._fingerprint

    @property
    def is_open(self) -> bool:
        return self.connection.is_open and not self.is_foreign

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

    @property
    def capacity(self) -> Capacity:
        assert self.connection.facts is not None
        return self.connection.facts.capacity

    @property
    def num_blocks(self) -> int:
        """Without the null block."""
        return self.capacity.num_blocks - 1

    def status(self) -> ReplicaStatus:
        cache = CacheStats() if self.stats is None else self.stats.cache
        return ReplicaStatus(
            self.replica,
            self.is_accepting,
            self.connection.num_requests,
            self.num_routed,
            self.num_blocks,
            self.num_free_blocks,
            cache.num_queried_tokens,
            cache.num_hit_tokens,
        )

    def load(self) -> ReplicaLoad:
        """Its load: from this front's own requests, which is at once, and from its last report."""
        # Its prompt is computed, or it has ended.
        for generation in [one for one in self._sent if one.first_s is not None or one.is_finished]:
            del self._sent[generation]
        queued = [0, 0, 0]
        for generation, num_tokens in self._sent.items():
            queued[generation.request.priority] += num_tokens
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=self.connection.num_requests,
            max_num_seqs=self.capacity.max_num_seqs,
            num_free_blocks=self.num_free_blocks,
            num_blocks=self.capacity.num_blocks,
        )
