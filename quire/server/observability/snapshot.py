"""The JSON of `/v1/watch`, and how it is made from the state of the server.

Every snapshot is complete, so a client that misses one loses nothing. Requests of other keys are only counted, except
for an admin key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.core.cache.pool import PoolStats, StateStats
from quire.core.kv_cache import CacheStats
from quire.core.values import Priority
from quire.engine.worker.block_map import BlocksView, CellRun, HeldRun
from quire.engine.worker.client import Generation
from quire.engine.worker.protocol import MAX_RUNNING_LISTED, Blocks, Running, Stats, TierStats
from quire.server.auth import Key
from quire.server.model_service import ActiveRequest, ModelService
from quire.server.models import Model
from quire.server.observability.metrics import Finished, Ttft
from quire.version import __version__

MAX_REQUESTS_SHOWN = 100  # per model
MAX_FINISHED_SHOWN = 32  # per model
_NO_CACHE_STATS = CacheStats.none()


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


class WatchedRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: Annotated[str, Meta(description="The x-request-id of its response.")]
    key: Annotated[str, Meta(description="The name of its API key.")]
    endpoint: str
    tier: str
    is_running: Annotated[bool, Meta(description="False: it waits, before its start or after a preemption.")]
    num_samples: int
    age_s: Annotated[float, Meta(description="Time since its arrival.")]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: Annotated[int, Meta(description="Computed tokens of its contexts so far, including cached ones.")]
    completion_tokens: int
    tokens_per_s: float
    num_blocks: int


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended. Contains no text."""

    id: Annotated[str, Meta(description="The x-request-id of its response.")]
    key: Annotated[str, Meta(description="The name of its API key.")]
    endpoint: str
    tier: str
    num_samples: int
    finished_at: Annotated[float, Meta(description="Seconds since 1970.")]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cache_reason: Annotated[str | None, Meta(description="Why the first prompt's match ended; null: it never ran.")]
    ttft_s: Annotated[float | None, Meta(description="Arrival to first token; null: there was none.")]
    duration_s: Annotated[float, Meta(description="Arrival to end.")]
    tokens_per_s: Annotated[float | None, Meta(description="Decode speed of all samples together.")]
    finish: Annotated[str, Meta(description="stop, length, cancelled or error.")]
    error: Annotated[str | None, Meta(description="The kind of error.")]


class WatchedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a model in a cluster."""

    name: str
    is_accepting: Annotated[bool, Meta(description="False: it is being stopped, and finishes its requests.")]
    num_requests: Annotated[int, Meta(description="Sequences that run or wait there.")]
    num_routed: Annotated[int, Meta(description="Requests sent there so far.")]
    num_blocks: int
    num_free_blocks: Annotated[int, Meta(description="Blocks that no request or pin holds.")]
    num_queried_tokens: int
    num_hit_tokens: Annotated[int, Meta(description="Of the queried tokens, those found in its prefix cache.")]


class WatchedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. Counts are totals since its process started; rates are those of the last interval.

    Before the process has reported, counts are those of the requests that the server has submitted.
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
    replicas: Annotated[list[WatchedReplica], Meta(description="Of a cluster; none: the model runs here.")] = []


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


class BlockHolder(msgspec.Struct, frozen=True):
    id: str
    num_blocks: int


class BlocksAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a range of blocks."""

    model: str
    first: int
    num_blocks: int
    counts: BlockCounts
    num_tokens: int
    max_holders: int
    num_pins: int
    holders: list[BlockHolder]
    num_other_holders: Annotated[int, Meta(description="Requests of other keys.")]


class HeldAnswer(msgspec.Struct, frozen=True):
    """The blocks that one request holds."""

    model: str
    id: str
    ranges: Annotated[tuple[tuple[int, int], ...], Meta(description="First block and number of blocks.")]


@dataclass(frozen=True, slots=True)
class Rates:
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotBuilder:
    """The data of one model at one tick; `view` makes what a key may see of it."""

    model: Model
    service: ModelService | None
    stats: Stats | None
    blocks: Blocks | None
    age_s: float | None
    rates: Rates
    request_rates: dict[ActiveRequest, float]
    ttft: Ttft | None
    active_requests: tuple[ActiveRequest, ...]
    finished: tuple[Finished, ...] = ()  # newest first
    eta_s: float | None = None

    def view(self, key: Key) -> WatchedModel:
        model = self.model
        return WatchedModel(
            name=model.name,
            aliases=model.aliases,
            state=model.state.value,
            is_pinned=model.is_pinned,
            num_bytes=model.num_bytes,
            progress=model.progress,
            eta_s=None if self.eta_s is None else round(self.eta_s, 1),
            error=str(error) if key.is_admin and (error := model.managed.error) is not None else None,
            num_waiting=model.num_waiting,
            engine=self._engine(key),
        )

    def _engine(self, key: Key) -> WatchedEngine | None:
        service, stats, ttft = self.service, self.stats, self.ttft
        if service is None or (facts := service.client.facts) is None:
            return None
        if stats is None:
            stats = _stats_of(self.active_requests)
        requests = self._requests(key)
        return WatchedEngine(
            backend=facts.facts.backend,
            device=facts.facts.device,
            dtype=facts.facts.dtype,
            max_model_len=service.max_model_len,
            weight_bytes=facts.weight_bytes,
            kv_bytes=facts.kv_bytes,
            is_moving=service.client.is_moving,
            num_restarts=service.client.num_restarts,
            age_s=None if self.age_s is None else round(self.age_s, 3),
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
            prefill_tokens_per_s=round(self.rates.prefill_tokens_per_s, 1),
            decode_tokens_per_s=round(self.rates.decode_tokens_per_s, 1),
            num_ttft=0 if ttft is None else ttft.num_requests,
            ttft_s_p50=None if ttft is None else round(ttft.p50_s, 4),
            ttft_s_p95=None if ttft is None else round(ttft.p95_s, 4),
            tiers=[
                WatchedTier(tier.name.lower(), one.num_waiting, one.num_tokens, round(one.oldest_age_s, 2))
                for tier, one in zip(Priority, stats.tiers, strict=True)
            ],
            blocks=None if self.blocks is None else _blocks(self.blocks),
            windows=_windows(stats.cache.windows, facts.facts.window_bytes),
            states=_states(stats.cache.states, facts.facts.state_bytes),
            requests=requests,
            num_other_requests=len(self.active_requests) - len(requests),
            finished=self._finished(key),
            replicas=[WatchedReplica(**one._asdict()) for one in service.client.replica_statuses],
        )

    def _finished(self, key: Key) -> list[FinishedRequest]:
        shown = (one for one in self.finished if key.is_admin or one.record.key_name == key.name)
        return [_finished(one) for one in islice(shown, MAX_FINISHED_SHOWN)]

    def _requests(self, key: Key) -> list[WatchedRequest]:
        mine = [active for active in self.active_requests if is_shown(active, key)]
        mine.sort(key=lambda active: (not active.is_started, active.caller.arrived_s))
        running = None if self.blocks is None else {one.request_id: one for one in self.blocks.running}
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
            tokens_per_s=round(self.request_rates.get(active, 0.0), 1),
            num_blocks=sum(one.num_blocks for one in here),
        )


def _finished(finished: Finished) -> FinishedRequest:
    record = finished.record
    return FinishedRequest(
        id=record.request_id,
        key=record.key_name,
        endpoint=record.endpoint,
        tier=record.priority.name.lower(),
        num_samples=record.n * record.num_prompts,
        finished_at=round(finished.at, 2),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        cache_reason=record.cache_reason,
        ttft_s=None if record.ttft_s is None else round(record.ttft_s, 4),
        duration_s=round(record.e2e_s, 3),
        tokens_per_s=None if record.tokens_per_s is None else round(record.tokens_per_s, 1),
        finish=record.finish,
        error=record.error,
    )


def _stats_of(active_requests: Sequence[ActiveRequest]) -> Stats:
    """Make stats from the submitted requests: a worker in its first step has not reported yet."""
    submitted = [(active, generation) for active in active_requests for generation in active.generations]
    waiting = [(active, generation) for active, generation in submitted if not generation.is_started]
    num_running = sum(len(one.request_ids) for _, one in submitted if one.is_started)
    return Stats(
        0,
        cache=_NO_CACHE_STATS,
        num_running=num_running,
        num_waiting=sum(len(one.request_ids) for _, one in waiting),
        tiers=tuple(_tier([(active, one) for active, one in waiting if active.priority is tier]) for tier in Priority),
        num_preemptions=0,
        num_steps=0,
        num_violations=0,
    )


def _tier(waiting: Sequence[tuple[ActiveRequest, Generation]]) -> TierStats:
    now_s = time.monotonic()
    return TierStats(
        sum(len(one.request_ids) for _, one in waiting),
        sum(len(one.request_ids) * one.answers.usage.prompt_tokens for _, one in waiting),
        max((now_s - active.caller.arrived_s for active, _ in waiting), default=0.0),
    )


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


def _windows(found: PoolStats | None, num_bytes: int) -> WatchedPool | None:
    if found is None:
        return None
    num_free = found.num_free - found.num_cached
    return WatchedPool(num_free, found.num_cached, found.num_in_use, found.num_evictions, num_bytes)


def _states(found: StateStats | None, num_bytes: int) -> WatchedPool | None:
    if found is None:
        return None
    return WatchedPool(found.num_free, found.num_cached, found.num_in_use, found.num_evictions, num_bytes)


def blocks_answer(model: str, found: BlocksView, active_requests: Sequence[ActiveRequest], key: Key) -> BlocksAnswer:
    owners = {
        request_id: active
        for active in active_requests
        for generation in active.generations
        for request_id in generation.request_ids
    }
    held: dict[str, int] = {}
    num_others = 0
    for request_id, num_blocks in found.requests:
        active = owners.get(request_id)
        if active is not None and is_shown(active, key):
            held[active.request_id] = held.get(active.request_id, 0) + num_blocks
        else:
            num_others += 1
    return BlocksAnswer(
        model=model,
        first=found.first,
        num_blocks=found.num_blocks,
        counts=BlockCounts(*found.states),
        num_tokens=found.num_tokens,
        max_holders=found.max_holders,
        num_pins=found.num_pins,
        holders=[BlockHolder(request_id, num_blocks) for request_id, num_blocks in held.items()],
        num_other_holders=num_others,
    )
