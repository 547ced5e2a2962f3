"""Snapshots of `/v1/watch` for the page, `quire top` and scripts: their JSON, and how they are collected.

One task collects for all watchers, and runs only while there are watchers. Snapshots are not queued: a watcher always
gets the newest one, so a slow reader gets fewer snapshots and never old ones. Every snapshot is complete, so a client
that misses one loses nothing. Requests of other keys are only counted, except for an admin key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.core.cache import PoolStats, StateStats
from quire.core.kv_cache import CacheStats
from quire.core.values import Priority
from quire.engine.model_manager import ModelManager, ModelState
from quire.engine.worker.block_map import CellRun, HeldRun
from quire.engine.worker.protocol import MAX_RUNNING_LISTED, Blocks, ReplicaStatus, Running, Stats, TierStats
from quire.errors import QuireError
from quire.server.errors import ApiError, Kind
from quire.server.limits import Key
from quire.server.metrics import FinishedRequest, RequestSource
from quire.server.models import ActiveRequest, Model, Models, ModelService
from quire.version import __version__

MAX_REQUESTS_SHOWN = 100  # per model
MAX_FINISHED_SHOWN = 32  # per model
RECENT_S = 300.0  # the requests behind the percentiles of times to first token
_NO_STATS = Stats(CacheStats(), 0, 0, (TierStats(0, 0, 0.0),) * len(Priority), 0, 0, 0)


class BlockCounts(msgspec.Struct, frozen=True):
    """Numbers of blocks by state. Each block has exactly one state."""

    free: Annotated[int, Meta(description="No content that can be reused.")]
    cached: Annotated[int, Meta(description="Not in use; the cached content can be reused.")]
    in_use: Annotated[int, Meta(description="Held by one request.")]
    shared: Annotated[int, Meta(description="Held by two requests or more.")]
    pinned: Annotated[int, Meta(description="Kept by a pin alone.")]


class WatchedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool as a map: block 1 first, each cell a range of adjacent blocks."""

    num_blocks: int
    block_size: Annotated[int, Meta(description="Tokens per block.")]
    blocks_per_cell: int
    cells: Annotated[
        tuple[CellRun, ...],
        Meta(description="Runs of equal cells: how many, and the cached, used, shared and pinned blocks of each."),
    ]
    counts: BlockCounts
    max_holders: Annotated[int, Meta(description="The largest number of requests that hold one block.")]
    num_pending: Annotated[int, Meta(description="Blocks whose state in the map is not current yet.")]
    held: Annotated[
        tuple[HeldRun, ...],
        Meta(
            description="Runs of blocks that requests hold or pins keep: first block, number of blocks, number of "
            "requests that hold each (0: pinned). Shared blocks only if more than 2,000 are held."
        ),
    ] = ()


class WatchedPool(msgspec.Struct, frozen=True):
    """Window blocks or recurrent states, by state. Each has exactly one state."""

    free: Annotated[int, Meta(description="No content that can be reused.")]
    cached: Annotated[int, Meta(description="Not in use; the content can be reused.")]
    in_use: Annotated[int, Meta(description="Held by requests or pins.")]
    num_evictions: int
    num_bytes: Annotated[int, Meta(description="Memory of the whole pool, a part of `kv_bytes`; 0: not known.")]


class WatchedTier(msgspec.Struct, frozen=True):
    tier: str
    num_waiting: int
    num_tokens: int
    oldest_age_s: float


class WatchedRequest(RequestSource, frozen=True, kw_only=True):
    is_running: Annotated[bool, Meta(description="False: it waits, before its start or after a preemption.")]
    num_samples: int
    age_s: Annotated[float, Meta(description="Time since its arrival.")]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: Annotated[int, Meta(description="Computed tokens of its contexts so far, including cached ones.")]
    completion_tokens: int
    tokens_per_s: float
    num_blocks: int


class WatchedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. Counts are totals since its process started; rates are those of the last interval.

    Before the process has reported, counts are 0.
    """

    backend: str
    device: str
    dtype: str
    max_model_len: int
    weight_bytes: int
    kv_bytes: int
    is_moving: Annotated[bool, Meta(description="The process is idle, or it reported recently.")]
    num_restarts: int
    age_s: Annotated[float | None, Meta(description="Age of the process's last report; null: no report yet.")]
    num_running: Annotated[int, Meta(description="Running sequences.")]
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    hit_rate: float
    num_pins: int
    num_draft_tokens: Annotated[int, Meta(description="Guessed tokens that were verified.")] = 0
    num_draft_tokens_accepted: Annotated[int, Meta(description="Guessed tokens that were right.")] = 0
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    num_ttft: Annotated[int, Meta(description="Requests of the last five minutes behind the two percentiles.")]
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    tiers: list[WatchedTier]
    blocks: WatchedBlocks | None
    windows: Annotated[WatchedPool | None, Meta(description="Window blocks; null: the model has none.")] = None
    states: Annotated[WatchedPool | None, Meta(description="Recurrent states; null: the model has none.")] = None
    requests: Annotated[list[WatchedRequest], Meta(description="Running requests first, then waiting ones.")]
    num_other_requests: Annotated[int, Meta(description="Requests of other keys, or beyond the first hundred.")]
    finished: Annotated[
        list[FinishedRequest],
        Meta(description="The last 32 requests since the model was loaded that this key may see, newest first."),
    ] = []
    replicas: Annotated[tuple[ReplicaStatus, ...], Meta(description="Of a cluster; none: the model runs here.")] = ()


class WatchedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    aliases: tuple[str, ...]
    state: str
    is_pinned: bool
    num_bytes: Annotated[int, Meta(description="Weights and KV cache; weights only if not loaded.")]
    progress: Annotated[float | None, Meta(description="Progress of loading, 0 to 1.")]
    eta_s: Annotated[float | None, Meta(description="Seconds until it is loaded; null: not loading, or not known.")] = (
        None
    )
    error: Annotated[str | None, Meta(description="Why the last load failed; for admins only.")] = None
    num_waiting: Annotated[int, Meta(description="Requests that wait for it to load.")]
    engine: WatchedEngine | None


class WatchSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole server at one moment."""

    server: str = "quire"
    version: str = __version__
    at: Annotated[float, Meta(description="Seconds since 1970.")]
    tick: int
    interval_ms: Annotated[int, Meta(description="Time since the previous snapshot.")]
    key: str
    is_admin: bool
    is_draining: bool
    num_watchers: int
    held_bytes: Annotated[int, Meta(description="Weights and KV caches of all loaded models.")]
    budget_bytes: Annotated[int | None, Meta(description="Limit of held_bytes; null: no limit.")]
    models: list[WatchedModel]


class HeldAnswer(msgspec.Struct, frozen=True):
    """The blocks that one request holds."""

    model: str
    id: str
    ranges: Annotated[tuple[tuple[int, int], ...], Meta(description="First block and number of blocks.")]


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of all values do not exceed; None: there are no values."""
    if not values:
        return None
    return round(sorted(values)[max(0, -(-int(share * 100) * len(values) // 100) - 1)], 4)


def is_shown(active: ActiveRequest, key: Key) -> bool:
    return key.is_admin or active.caller.key.name == key.name


def _blocks(blocks: Blocks) -> WatchedBlocks:
    return WatchedBlocks(
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        blocks_per_cell=blocks.blocks_per_cell,
        cells=blocks.cells,
        counts=BlockCounts(*blocks.totals),
        max_holders=blocks.max_holders,
        num_pending=blocks.num_pending,
        held=blocks.held,
    )


def _pool(found: PoolStats | StateStats | None, num_bytes: int) -> WatchedPool | None:
    if found is None:
        return None
    num_free = found.num_free - (found.num_cached if isinstance(found, PoolStats) else 0)
    return WatchedPool(num_free, found.num_cached, found.num_in_use, found.num_evictions, num_bytes)


MAX_WATCHERS = 16
MAX_WATCHERS_A_KEY = 8  # except for admin keys: watchers that do not read must not use up MAX_WATCHERS
MAX_CELLS = 2000  # of a map: more than a screen shows
WAIT_S = 0.1  # for a worker's answer; a worker in a long step answers for a later snapshot
ONCE_WAIT_S = 2.0
MAX_ASKS = 256  # queries for a complete map: a worker visits a bounded number of blocks per answer

log = logging.getLogger(__name__)


class Watch:
    """Collects snapshots at the shortest interval of its watchers. Belongs to one event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._watchers: set[Watcher] = set()
        self._reports: dict[str, ModelReport] = {}
        self._clock: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()  # replaced at each tick
        self._views: dict[str, bytes] = {}  # by key name, made once per tick
        self._at_s = 0.0  # time of the last tick
        self._took_s = 0.0  # time between the last two ticks
        self.tick = 0  # number of ticks since the first watcher entered

    def enter(self, interval_s: float, key: Key) -> Watcher:
        if (num_all := len(self._watchers)) >= MAX_WATCHERS:
            raise _too_many(f"{num_all} watchers")
        num_own = sum(watcher.key_name == key.name for watcher in self._watchers)
        if num_own >= MAX_WATCHERS_A_KEY and not key.is_admin:
            raise _too_many(f"{num_own} watchers of the key {key.name!r}")
        watcher = Watcher(self, interval_s, key.name)
        self._watchers.add(watcher)
        if self._clock is None:
            self.tick = 0
            self._clock = asyncio.create_task(self._run())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._clock is not None:
            self._clock.cancel()
            self._clock = None
            for report in self._reports.values():
                report.close()
            self._reports = {}

    async def after(self, tick: int) -> int:
        """Wait for a later tick and return its number."""
        while self.tick <= tick:
            await self._ticked.wait()
        return self.tick

    def view(self, key: Key) -> bytes:
        """The last snapshot as this key may see it, as JSON."""
        if key.name not in self._views:
            snapshot = WatchSnapshot(
                at=round(time.time(), 3),
                tick=self.tick,
                interval_ms=round(self._took_s * 1000),
                key=key.name,
                is_admin=key.is_admin,
                is_draining=self._models.is_draining,
                num_watchers=len(self._watchers),
                held_bytes=self._models.manager.num_bytes,
                budget_bytes=self._models.manager.budget_bytes,
                models=[report.view(key) for report in self._reports.values()],
            )
            self._views[key.name] = msgspec.json.encode(snapshot)
        return self._views[key.name]

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self._collect()
            except Exception:
                log.exception("collecting a snapshot failed")
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            interval_s = min((watcher.interval_s for watcher in self._watchers), default=1.0)
            await asyncio.sleep(max(began_s + interval_s - time.monotonic(), 0.01))

    async def _collect(self) -> None:
        for model in self._models:
            report = self._reports.get(model.name)
            if report is None or report.service is not model.service:
                if report is not None:
                    report.close()
                self._reports[model.name] = ModelReport(model, self._models.manager)
        asking = {task for report in self._reports.values() if (task := report.request()) is not None}
        if asking:
            await asyncio.wait(asking, timeout=WAIT_S)
        now_s = time.monotonic()
        self._took_s = now_s - self._at_s if self.tick else 0.0
        self._at_s = now_s
        for report in self._reports.values():
            report.tick(now_s)
        self._views = {}
        self.tick += 1

    @property
    def has_reports(self) -> bool:
        """Whether every running worker has reported at least once, with a complete block map."""
        return all(report.has_report for report in self._reports.values())


def _too_many(watchers: str) -> ApiError:
    text = f"{watchers} are already connected, which is the limit"
    return ApiError(Kind.RATE_LIMITED, text, retry_after_s=5.0, reason="watchers")


class Watcher:
    """One client of `/v1/watch`, until `leave`."""

    def __init__(self, watch: Watch, interval_s: float, key_name: str) -> None:
        self._watch = watch
        self.interval_s = interval_s
        self.key_name = key_name
        self._last_tick = 0
        self._due_s = 0.0

    async def next(self, key: Key) -> bytes:
        """Wait until an interval has passed and there is a new snapshot, and return it."""
        await asyncio.sleep(max(self._due_s - time.monotonic(), 0.0))
        self._last_tick = await self._watch.after(self._last_tick)
        now_s = time.monotonic()
        # A tick that is slightly late must not make the watcher skip every second tick.
        self._due_s = max(self._due_s, now_s - self.interval_s / 2) + 0.9 * self.interval_s
        return self._watch.view(key)

    async def once(self, key: Key) -> bytes:
        """Return one snapshot with rates, which needs two ticks."""
        until_s = time.monotonic() + ONCE_WAIT_S + self.interval_s
        await self._watch.after(1)
        while not self._watch.has_reports and time.monotonic() < until_s:
            await self._watch.after(self._watch.tick)
        return self._watch.view(key)


class ModelReport:
    """The last report of one model's worker, the rates since the previous tick, and what a key may see of both."""

    def __init__(self, model: Model, manager: ModelManager) -> None:
        self._model = model
        self._manager = manager
        self._asking: asyncio.Task[None] | None = None
        self._stats: Stats | None = None
        self._blocks: Blocks | None = None
        self._answered_s = 0.0
        self.service = model.service  # that all this belongs to; None: the model is not loaded
        self._at_s = 0.0
        self._active: tuple[ActiveRequest, ...] = ()
        self._counts: dict[object, float] = {}  # tokens of prompts, of answers, and of the answers of each request
        self._rates: dict[object, float] = {}  # the same per second

    @property
    def _is_whole(self) -> bool:
        """Whether a complete block map was received."""
        return self._blocks is not None and not self._blocks.num_pending

    @property
    def has_report(self) -> bool:
        service = self._model.service
        return service is None or service.client.facts is None or self._is_whole

    def request(self) -> asyncio.Task[None] | None:
        """Ask the worker for a report, unless an answer is pending. None: there is no worker."""
        service = self.service
        if service is None or service.client.facts is None:
            self._stats = self._blocks = None
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(service))
        return self._asking

    async def _ask(self, service: ModelService) -> None:
        with suppress(QuireError):  # it has just died: its last report is kept until another worker runs
            for _ in range(MAX_ASKS):
                stats, blocks = await asyncio.gather(service.client.stats(), service.client.blocks(MAX_CELLS))
                self._take(stats, blocks)
                if blocks is None or not blocks.num_pending:
                    return

    def _take(self, stats: Stats | None, blocks: Blocks | None) -> None:
        """Store a report. A busy worker answers once per step, and the first block map takes many answers: it is shown
        while it is incomplete. Later maps are shown only when complete."""
        if stats is None or blocks is None:
            return
        self._stats, self._answered_s = stats, time.monotonic()
        if not (blocks.num_pending and self._is_whole):
            self._blocks = blocks

    def tick(self, now_s: float) -> None:
        """Take what the server knows itself. Rates are those since the previous tick."""
        service = self.service
        self._active = () if service is None else tuple(service.active_requests)
        num_prefilled, num_decoded = self._model.metrics.num_tokens
        counts: dict[object, float] = {active: active.usage.completion_tokens for active in self._active}
        counts |= {"prefill": num_prefilled, "decode": num_decoded}
        span_s = now_s - self._at_s if self._at_s else math.inf
        self._rates = {what: max(count - self._counts.get(what, 0), 0) / span_s for what, count in counts.items()}
        self._at_s, self._counts = now_s, counts

    def view(self, key: Key) -> WatchedModel:
        model = self._model
        eta_s = self._manager.eta_s(model) if model.state is ModelState.LOADING else None
        return WatchedModel(
            name=model.name,
            aliases=model.names[1:],
            state=model.state.value,
            is_pinned=model.is_pinned,
            num_bytes=model.size_bytes,
            progress=model.progress,
            eta_s=None if eta_s is None else round(eta_s, 1),
            error=str(error) if key.is_admin and (error := model.error) is not None else None,
            num_waiting=len(model.waiters),
            engine=self._engine(key),
        )

    def _engine(self, key: Key) -> WatchedEngine | None:
        service, stats = self.service, self._stats
        if service is None or (facts := service.client.facts) is None:
            return None
        since = time.time() - RECENT_S
        ttfts = [one.ttft_s for one in service.recent if one.finished_at >= since and one.ttft_s is not None]
        finished = [one for one in reversed(service.recent) if key.is_admin or one.key == key.name]
        if stats is None:
            stats = _NO_STATS
        requests = self._requests(key)
        return WatchedEngine(
            backend=facts.facts.backend,
            device=facts.facts.device,
            dtype=facts.facts.dtype,
            max_model_len=service.client.max_model_len,
            weight_bytes=facts.facts.weight_bytes,
            kv_bytes=facts.facts.kv_bytes,
            is_moving=service.client.is_moving,
            num_restarts=service.client.num_restarts,
            age_s=None if self._stats is None else round(max(0.0, self._at_s - self._answered_s), 3),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_steps=stats.num_steps,
            num_preemptions=stats.num_preemptions,
            num_evictions=stats.cache.num_evictions,
            num_queried_tokens=stats.cache.num_queried_tokens,
            num_hit_tokens=stats.cache.num_hit_tokens,
            hit_rate=round(stats.cache.hit_rate, 4),
            num_pins=stats.cache.num_pins,
            num_draft_tokens=stats.num_drafted,
            num_draft_tokens_accepted=stats.num_accepted,
            prefill_tokens_per_s=round(self._rates.get("prefill", 0.0), 1),
            decode_tokens_per_s=round(self._rates.get("decode", 0.0), 1),
            num_ttft=len(ttfts),
            ttft_s_p50=_percentile(ttfts, 0.50),
            ttft_s_p95=_percentile(ttfts, 0.95),
            tiers=[
                WatchedTier(tier.name.lower(), one.num_waiting, one.num_tokens, round(one.oldest_age_s, 2))
                for tier, one in zip(Priority, stats.tiers, strict=True)
            ],
            blocks=None if self._blocks is None else _blocks(self._blocks),
            windows=_pool(stats.cache.windows, facts.facts.window_bytes),
            states=_pool(stats.cache.states, facts.facts.state_bytes),
            requests=requests,
            num_other_requests=len(self._active) - len(requests),
            finished=[one.shown() for one in finished[:MAX_FINISHED_SHOWN]],
            replicas=service.client.replica_statuses,
        )

    def _requests(self, key: Key) -> list[WatchedRequest]:
        mine = [active for active in self._active if is_shown(active, key)]
        mine.sort(key=lambda active: (not active.is_started, active.caller.arrived_s))
        running = None if self._blocks is None else {one.request_id: one for one in self._blocks.running}
        shown = [self._request(active, running) for active in mine[:MAX_REQUESTS_SHOWN]]
        return sorted(shown, key=lambda one: not one.is_running)

    def _request(self, active: ActiveRequest, running: dict[int, Running] | None) -> WatchedRequest:
        """Describe a request. `running`: the worker's report by request id; None: no report yet."""
        usage = active.usage
        ids = [request_id for generation in active.generations for request_id in generation.request_ids]
        here = [] if running is None else [running[request_id] for request_id in ids if request_id in running]
        is_complete = running is not None and len(running) < MAX_RUNNING_LISTED
        return WatchedRequest(
            id=active.request_id,
            key=active.caller.key.name,
            endpoint=active.caller.endpoint,
            tier=active.priority.name.lower(),
            is_running=bool(here) or (active.is_started and not is_complete),
            num_samples=active.request.params.n * len(active.requests),
            age_s=round(time.monotonic() - active.caller.arrived_s, 2),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=sum(one.num_computed for one in here),
            completion_tokens=usage.completion_tokens,
            tokens_per_s=round(self._rates.get(active, 0.0), 1),
            num_blocks=sum(one.num_blocks for one in here),
        )

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
