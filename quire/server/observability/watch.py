"""`/v1/watch`: everything at a glance, some times a second, for the page, `quire top` and scripts.

One clock looks for all who watch, and only while somebody does. Nothing is kept for a slow watcher: whoever is ready
for the next snapshot gets the newest there is, so that a reader who falls behind sees fewer, and never old ones.
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
from quire.server.active_request import ActiveRequest
from quire.server.auth import Key
from quire.server.errors import ApiError, Kind
from quire.server.model_service import ModelService
from quire.server.models import Model, Models
from quire.server.observability.snapshot import (
    Rates,
    SnapshotBuilder,
    WatchSnapshot,
)

MAX_WATCHERS = 16
MAX_WATCHERS_A_KEY = 8  # that is no admin's: whoever does not read keeps a place, and must not keep them all
MAX_CELLS = 2000  # of a map: more than a screen shows
PATIENCE_S = 0.1  # for a worker's answer; one in the middle of a long step answers later, for a later snapshot
ONCE_PATIENCE_S = 2.0
MAX_ASKS = 256  # for a map that is not whole yet: a worker looks at a bounded number of blocks each time

log = logging.getLogger(__name__)


class Watch:
    """Belongs to one event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._watchers: set[Watcher] = set()
        self._reporters: dict[str, Reporter] = {}
        self._clock: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()  # a new one for each tick
        self._glances: list[SnapshotBuilder] = []
        self._views: dict[str, bytes] = {}  # by the name of the key: made once a tick, whoever asks
        self._at_s = 0.0  # when the last tick was
        self._took_s = 0.0  # from the one before to it
        self.tick = 0  # their number; 0: none since somebody began to watch

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
            for reporter in self._reporters.values():
                reporter.close()
            self._reporters = {}

    async def after(self, tick: int) -> int:
        """Wait for a tick later than that one, and say which it is."""
        while self.tick <= tick:
            await self._ticked.wait()
        return self.tick

    def view(self, key: Key) -> bytes:
        """The last tick, as this key may see it."""
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
                models=[glance.view(key) for glance in self._glances],
            )
            self._views[key.name] = msgspec.json.encode(snapshot)
        return self._views[key.name]

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self._look()
            except Exception:
                log.exception("a snapshot failed")
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            interval_s = min((watcher.interval_s for watcher in self._watchers), default=1.0)
            await asyncio.sleep(max(began_s + interval_s - time.monotonic(), 0.01))

    async def _look(self) -> None:
        models = list(self._models)
        for model in models:
            if model.name not in self._reporters:
                self._reporters[model.name] = Reporter(model, self._models.manager)
        reporters = [self._reporters[model.name] for model in models]
        asking = {task for reporter in reporters if (task := reporter.request()) is not None}
        if asking:
            await asyncio.wait(asking, timeout=PATIENCE_S)
        now_s = time.monotonic()
        self._took_s = now_s - self._at_s if self.tick else 0.0
        self._at_s = now_s
        self._glances = [reporter.glance(now_s) for reporter in reporters]
        self._views = {}
        self.tick += 1

    @property
    def has_reports(self) -> bool:
        """Every worker that serves has answered at least once, with a map of all its blocks."""
        return all(reporter.has_report for reporter in self._reporters.values())


def _too_many(who: str) -> ApiError:
    text = f"{who} are here already, which is the limit"
    return ApiError(Kind.RATE_LIMITED, text, retry_after_s=5.0, reason="watchers")


class Watcher:
    """Someone who watches, until they leave."""

    def __init__(self, watch: Watch, interval_s: float, key_name: str) -> None:
        self._watch = watch
        self.interval_s = interval_s
        self.key_name = key_name
        self._last_tick = 0
        self._due_s = 0.0

    async def next(self, key: Key) -> bytes:
        """The newest snapshot, once an interval has passed since the last and there is one they have not seen."""
        await asyncio.sleep(max(self._due_s - time.monotonic(), 0.0))
        self._last_tick = await self._watch.after(self._last_tick)
        now_s = time.monotonic()
        # A tick that comes a little late must not cost every second one.
        self._due_s = max(self._due_s, now_s - self.interval_s / 2) + 0.9 * self.interval_s
        return self._watch.view(key)

    async def once(self, key: Key) -> bytes:
        """A snapshot with rates in it, which takes two ticks."""
        until_s = time.monotonic() + ONCE_PATIENCE_S + self.interval_s
        await self._watch.after(1)
        while not self._watch.has_reports and time.monotonic() < until_s:
            await self._watch.after(self._watch.tick)
        return self._watch.view(key)

    def leave(self) -> None:
        self._watch.leave(self)


class Reporter:
    """What one model last said of itself, and how fast it moved since the time before."""

    def __init__(self, model: Model, manager: ModelManager) -> None:
        self._model = model
        self._manager = manager
        self._asking: asyncio.Task[None] | None = None
        self._stats: Stats | None = None
        self._blocks: Blocks | None = None
        self._is_whole = False  # there has been a map of all blocks
        self._said_s = 0.0
        self._service: ModelService | None = None  # that all this is of
        self._at_s = 0.0
        self._totals = (0, 0)
        self._completions: dict[ActiveRequest, int] = {}

    @property
    def has_report(self) -> bool:
        service = self._model.service
        return service is None or service.client.facts is None or self._is_whole

    def request(self) -> asyncio.Task[None] | None:
        """Ask the worker, unless it still owes an answer. None: there is none to ask."""
        service = self._model.service
        if service is not self._service:
            self.close()
            self._service, self._at_s = service, 0.0
            self._forget()
        if service is None or service.client.facts is None:
            self._forget()
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._hear(service))
        return self._asking

    async def _hear(self, service: ModelService) -> None:
        with suppress(QuireError):  # it has just died: what it said last stands until another is there
            for _ in range(MAX_ASKS):
                stats, blocks = await asyncio.gather(service.client.stats(), service.client.blocks(MAX_CELLS))
                self._take(stats, blocks)
                if blocks is None or not blocks.num_pending:
                    return

    def _take(self, stats: Stats | None, blocks: Blocks | None) -> None:
        """A worker that computes answers once a step, and a first map takes many answers: until it is whole, what there
        is of it is shown. Later ones are shown whole."""
        if stats is None or blocks is None:
            return
        self._stats, self._said_s = stats, time.monotonic()
        if not (blocks.num_pending and self._is_whole):
            self._blocks, self._is_whole = blocks, not blocks.num_pending

    def _forget(self) -> None:
        self._stats = self._blocks = None
        self._is_whole = False

    def glance(self, now_s: float) -> SnapshotBuilder:
        """For the tick of now. Rates are those since the one before."""
        service = self._service
        works = () if service is None else tuple(service.works)
        totals = (0, 0)
        if service is not None:
            totals = service.pulse.num_prefilled_tokens, service.pulse.num_generated_tokens
        completions = {active: active.usage.completion_tokens for active in works}
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
            now_s - self._said_s if self._stats is not None else None,
            rates,
            request_rates,
            None if service is None else service.pulse.ttft(),
            works,
            () if service is None else tuple(reversed(service.pulse.recent)),
            self._eta_s(),
        )

    def _eta_s(self) -> float | None:
        model = self._model
        return self._manager.eta_s(model.seat, model.reading_s) if model.state is ModelState.LOADING else None

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._service is not None:
            self._service.client.drop_blocks()
