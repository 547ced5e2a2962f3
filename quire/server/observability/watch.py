"""Collects the snapshots of `/v1/watch` for the page, `quire top` and scripts.

One task collects for all watchers, and runs only while there are watchers. Snapshots are not queued: a watcher always
gets the newest one, so a slow reader gets fewer snapshots and never old ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import msgspec

from quire.engine.model_manager import ModelManager, ModelState
from quire.engine.worker.protocol import Blocks, Stats
from quire.errors import QuireError
from quire.server.auth import Key
from quire.server.errors import ApiError, Kind
from quire.server.model_service import ActiveRequest, ModelService
from quire.server.models import Model, Models
from quire.server.observability.snapshot import (
    Rates,
    SnapshotBuilder,
    WatchSnapshot,
)

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
        self._builders: list[SnapshotBuilder] = []
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
                models=[builder.view(key) for builder in self._builders],
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
        models = list(self._models)
        for model in models:
            if model.name not in self._reports:
                self._reports[model.name] = ModelReport(model, self._models.manager)
        reports = [self._reports[model.name] for model in models]
        asking = {task for report in reports if (task := report.request()) is not None}
        if asking:
            await asyncio.wait(asking, timeout=WAIT_S)
        now_s = time.monotonic()
        self._took_s = now_s - self._at_s if self.tick else 0.0
        self._at_s = now_s
        self._builders = [report.builder(now_s) for report in reports]
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

    def leave(self) -> None:
        self._watch.leave(self)


class ModelReport:
    """The last report of one model's worker, and the rates since the previous tick."""

    def __init__(self, model: Model, manager: ModelManager) -> None:
        self._model = model
        self._manager = manager
        self._asking: asyncio.Task[None] | None = None
        self._stats: Stats | None = None
        self._blocks: Blocks | None = None
        self._is_whole = False  # a complete block map was received
        self._answered_s = 0.0
        self._service: ModelService | None = None  # the service that all this belongs to
        self._at_s = 0.0
        self._totals = (0, 0)
        self._completions: dict[ActiveRequest, int] = {}

    @property
    def has_report(self) -> bool:
        service = self._model.service
        return service is None or service.client.facts is None or self._is_whole

    def request(self) -> asyncio.Task[None] | None:
        """Ask the worker for a report, unless an answer is pending. None: there is no worker."""
        service = self._model.service
        if service is not self._service:
            self.close()
            self._service, self._at_s = service, 0.0
            self._forget()
        if service is None or service.client.facts is None:
            self._forget()
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
            self._blocks, self._is_whole = blocks, not blocks.num_pending

    def _forget(self) -> None:
        self._stats = self._blocks = None
        self._is_whole = False

    def builder(self, now_s: float) -> SnapshotBuilder:
        """Return the data for the current tick. Rates are those since the previous tick."""
        service = self._service
        active_requests = () if service is None else tuple(service.active_requests)
        totals = (0, 0)
        if service is not None:
            totals = service.activity.num_prefilled_tokens, service.activity.num_generated_tokens
        completions = {active: active.usage.completion_tokens for active in active_requests}
        span_s = now_s - self._at_s if self._at_s else 0.0
        rates, request_rates = Rates(), dict[ActiveRequest, float]()
        if span_s > 0:
            prefill, decode = (max(new - old, 0) / span_s for new, old in zip(totals, self._totals, strict=True))
            rates = Rates(prefill, decode)
            request_rates = {
                active: (count - self._completions.get(active, 0)) / span_s for active, count in completions.items()
            }
        self._at_s, self._totals, self._completions = now_s, totals, completions
        return SnapshotBuilder(
            self._model,
            service,
            self._stats,
            self._blocks,
            now_s - self._answered_s if self._stats is not None else None,
            rates,
            request_rates,
            None if service is None else service.activity.ttft(),
            active_requests,
            () if service is None else tuple(reversed(service.activity.recent)),
            self._eta_s(),
        )

    def _eta_s(self) -> float | None:
        model = self._model
        return self._manager.eta_s(model.managed, model.reading_s) if model.state is ModelState.LOADING else None

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._service is not None:
            self._service.client.drop_blocks()
