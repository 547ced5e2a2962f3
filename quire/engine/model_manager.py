"""Loads and unloads models within one memory budget for weights and KV, one load at a time.

Knows bytes, leases and the order of use, not text, HTTP or processes. Must be used from a single event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from quire.backends.machine import available_bytes, gpu_memory
from quire.errors import LoadFailed, ModelTooLarge, QuireError
from quire.sizes import compared_sizes, memory_size

FREE_SHARE = 0.8  # share of the memory that is free at start; the rest is for steps, page cache and other programs
MAX_BACKOFF_S = 30.0

log = logging.getLogger(__name__)


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"  # or waiting for another load or for free memory
    READY = "ready"
    UNLOADING = "unloading"  # finishes its requests; new ones wait until it is loaded again
    FAILED = "failed"  # the last load failed; the next request retries


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a model needs. The weights are an estimate until it was loaded once."""

    weight_bytes: int
    context_bytes: int  # KV of one context of full length
    kv_bytes: int | None = None  # as configured; None: its share


class ManagedModel(ABC):
    """One model, loaded or not: the manager's state of it, and what the manager calls."""

    def __init__(self, name: str, *, is_pinned: bool = False, idle_unload_s: float | None = None) -> None:
        self.name = name
        self.is_pinned = is_pinned
        self.idle_unload_s = idle_unload_s
        self.state = ModelState.UNLOADED
        self.num_bytes = 0  # held, or reserved while it loads or unloads
        self.num_leases = 0
        self.last_use = 0  # sequence number over the uses of all models
        self.waiters: list[asyncio.Future[None]] = []
        self.error: QuireError | None = None  # error of the last load
        self.num_loads = 0
        self.num_failures = 0
        self.num_unloads = 0
        self.num_failed_in_a_row = 0
        self.load_s: float | None = None  # duration of the last load
        self.began_s: float | None = None  # start of the current load
        self.is_load_requested = False  # by a call of `load`, without a waiting request
        self.is_evicted = False  # unloading to free memory; cancelled if another model can be unloaded instead
        self.is_closing = False  # the unload can no longer be cancelled
        self.idle = asyncio.Event()  # there are no leases
        self.unloading: asyncio.Task[None] | None = None
        self.loading: asyncio.Task[None] | None = None
        self.idle_timer: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """An estimate that needs no file access."""

    @abstractmethod
    async def measure(self) -> Needs:
        """The exact needs, read from the headers of its files. Raises QuireError."""

    @abstractmethod
    async def load(self, kv_bytes: int | None) -> int:
        """Load the model. Returns the bytes it holds, or 0 if unknown. Raises QuireError, and then holds nothing.

        `kv_bytes`: for the KV cache; None: the backend's choice.
        """

    @abstractmethod
    async def unload(self) -> None:
        """Free all memory. There are no leases at that time, unless `cut` was called."""

    @abstractmethod
    def cut(self) -> None:
        """Fail all running requests."""

    @property
    def is_busy(self) -> bool:
        return self.num_leases > 0

    @property
    def is_wanted(self) -> bool:
        return self.is_load_requested or bool(self.waiters)


class _LoadAbandoned(Exception):
    """No request waits for the load any more."""


class ModelManager:
    """Loads models, and unloads others to free memory for them.

    Models that are not pinned can be unloaded: idle ones first, then busy ones, each least recently used first. A busy
    model that is chosen accepts no new requests, so that it cannot starve the waiting load, and is unloaded when its
    requests have ended. If another model becomes idle before that, it is unloaded instead and the chosen one stays.
    """

    def __init__(
        self, models: Sequence[ManagedModel], budget_bytes: int | None, kv_cap_bytes: int | None = None
    ) -> None:
        self.models = tuple(models)
        self.budget_bytes = budget_bytes  # None: unlimited, and backends choose the size of their KV cache
        self._kv_cap_bytes = kv_cap_bytes  # maximum of a share
        self._load_lock = asyncio.Lock()
        self._uses = count(1)
        self._change = asyncio.Event()  # set when memory may have become free; the current load waits for it
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return sum(managed.num_bytes for managed in self.models)

    # Leases

    async def hold(self, managed: ManagedModel) -> None:
        """Take a lease on a model, which keeps it loaded until `release`. Loads it first; raises if that fails.

        Waiters get their leases at the moment the model is ready, so it cannot be unloaded before they have begun.
        """
        if managed.state is ModelState.READY:
            self._lease(managed)
            return
        if self._is_closed:
            raise LoadFailed("the server is shutting down")
        lease: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        managed.waiters.append(lease)
        self._start_load(managed)
        try:
            await lease
        except asyncio.CancelledError:
            if lease.done() and not lease.cancelled() and lease.exception() is None:
                self.release(managed)  # the lease was granted at the same moment
            raise
        finally:
            if lease in managed.waiters:
                managed.waiters.remove(lease)
                self._change.set()  # an abandoned load stops waiting for memory

    def release(self, managed: ManagedModel) -> None:
        managed.num_leases -= 1
        assert managed.num_leases >= 0, managed.name
        if not managed.num_leases:
            managed.idle.set()
            self._change.set()
            self._reset_idle_timer(managed)

    async def load(self, managed: ManagedModel) -> None:
        """Load a model without a request."""
        managed.is_load_requested = True
        try:
            await self.hold(managed)
        finally:
            managed.is_load_requested = False
        self.release(managed)

    async def unload(self, managed: ManagedModel, *, is_forced: bool = False) -> None:
        """Unload a model when its requests have ended; if forced, they fail at once.

        Requests that arrive meanwhile wait and cause a new load.
        """
        if managed.state is ModelState.LOADING and managed.loading is not None:
            if is_forced:
                # Deferred to after the task's first step: a task that is cancelled earlier would not notify waiters.
                asyncio.get_running_loop().call_soon(_cancel_once, managed.loading)
            await asyncio.wait({managed.loading})
        if managed.state is ModelState.READY:
            self._start_unload(managed, is_evicted=False)
        managed.is_evicted = False
        if managed.unloading is not None:
            if is_forced and not managed.is_closing:
                managed.cut()
            await asyncio.shield(managed.unloading)

    def pin(self, managed: ManagedModel) -> None:
        managed.is_pinned = True
        if managed.is_evicted:
            self._cancel_unload(managed)
        self._change.set()

    def unpin(self, managed: ManagedModel) -> None:
        managed.is_pinned = False
        self._change.set()
        self._reset_idle_timer(managed)

    def refuse(self) -> None:
        """Fail current and future waiters: the manager is shutting down."""
        self._is_closed = True
        for managed in self.models:
            self._fail_waiters(managed, LoadFailed("the server is shutting down"))

    async def close(self) -> None:
        """Unload all models at once."""
        self.refuse()
        for managed in self.models:
            if managed.idle_timer is not None:
                managed.idle_timer.cancel()
            for task in (managed.loading, managed.unloading):
                if task is not None and not managed.is_closing:
                    _cancel_once(task)
        tasks = [task for managed in self.models for task in (managed.loading, managed.unloading) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        self.refuse()
        loaded = [one for one in self.models if one.state in (ModelState.READY, ModelState.UNLOADING)]
        await asyncio.gather(*map(self._close, loaded))

    def eta_s(self, managed: ManagedModel) -> float | None:
        """Estimated seconds until the model is ready, from the last load's duration; None: there was none."""
        if managed.began_s is None or managed.load_s is None:
            return managed.load_s
        return max(managed.load_s - (time.monotonic() - managed.began_s), 0.0)

    # Loading

    def _start_load(self, managed: ManagedModel) -> None:
        if managed.state in (ModelState.UNLOADED, ModelState.FAILED):
            managed.state = ModelState.LOADING
            managed.loading = asyncio.create_task(self._load(managed), name=f"load {managed.name}")

    async def _load(self, managed: ManagedModel) -> None:
        try:
            await self._back_off(managed)
            async with self._load_lock:
                if not managed.is_wanted:
                    raise _LoadAbandoned
                managed.began_s = time.monotonic()
                await self._load_within(managed)
        except asyncio.CancelledError:
            log.info("%s was unloaded before it was ready", managed.name)
            self._fail(managed, LoadFailed(f"{managed.name} was unloaded before it was ready"), is_counted=False)
            managed.state = ModelState.UNLOADED
            raise
        except _LoadAbandoned:
            managed.state = ModelState.UNLOADED
        except QuireError as error:
            log.error("%s could not be loaded: %s", managed.name, error)  # there may be no waiter to report it to
            # If it is too large, nothing was loaded, so no backoff is needed.
            self._fail(managed, error, is_counted=not isinstance(error, ModelTooLarge))
        except Exception as error:
            log.exception("loading %s failed", managed.name)
            self._fail(managed, LoadFailed(f"{type(error).__name__}: {error}"))
        else:
            self._ready(managed)
        finally:
            managed.began_s = None
            managed.loading = None
            self._change.set()
            if managed.state is ModelState.UNLOADED and managed.waiters and not self._is_closed:
                self._start_load(managed)  # requests that arrived while the load was abandoned

    async def _load_within(self, managed: ManagedModel) -> None:
        """Load within the budget. If the model holds more than estimated, unload others.

        If that is not enough, load it once more with less KV, now that the size of its weights is known.
        """
        for is_last in (False, True):
            needs = await managed.measure()
            kv_bytes = self.kv_bytes(managed, needs)
            need = needs.weight_bytes + (kv_bytes or 0)
            await self._make_room(managed, need)
            managed.num_bytes = need
            managed.num_bytes = await managed.load(kv_bytes) or need
            try:
                await self._make_room(managed, managed.num_bytes)
            except BaseException as error:
                await managed.unload()
                managed.num_bytes = 0
                if is_last or not isinstance(error, ModelTooLarge):
                    raise
            else:
                return

    def _ready(self, managed: ManagedModel) -> None:
        managed.load_s = None if managed.began_s is None else time.monotonic() - managed.began_s
        managed.state, managed.error = ModelState.READY, None
        managed.num_loads += 1
        managed.num_failed_in_a_row = 0
        managed.last_use = next(self._uses)
        self._admit(managed)
        self._reset_idle_timer(managed)

    def _fail(self, managed: ManagedModel, error: QuireError, *, is_counted: bool = True) -> None:
        managed.state, managed.error = ModelState.FAILED, error
        managed.num_bytes = 0
        if is_counted:
            managed.num_failures += 1
            managed.num_failed_in_a_row += 1
        self._fail_waiters(managed, error)

    def _fail_waiters(self, managed: ManagedModel, error: QuireError) -> None:
        waiters, managed.waiters = managed.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _back_off(self, managed: ManagedModel) -> None:
        """Wait before a retry, longer after each failure in a row. Other models can load meanwhile.

        A load that was asked for (`POST /v1/models/load`) begins at once: an administrator may have mended the model.
        """
        if managed.num_failed_in_a_row >= 2 and not managed.is_load_requested:
            delay_s = min(2.0 ** min(managed.num_failed_in_a_row - 2, 10), MAX_BACKOFF_S)
            log.warning("%s failed %d times in a row: waiting %g s", managed.name, managed.num_failed_in_a_row, delay_s)
            await asyncio.sleep(delay_s)

    # Memory

    def kv_bytes(self, managed: ManagedModel, needs: Needs) -> int | None:
        """The size of a model's KV cache: as configured, else an equal share of the budget without all weights.

        A share is at least one full context, and at most the memory that pinned models do not hold.
        """
        if needs.kv_bytes is not None or self.budget_bytes is None:
            return needs.kv_bytes
        others = [other.needs for other in self.models if other is not managed]
        taken = needs.weight_bytes + sum(other.weight_bytes + (other.kv_bytes or 0) for other in others)
        num_sharing = 1 + sum(other.kv_bytes is None for other in others)
        share = max(self.budget_bytes - taken, 0) // num_sharing
        if self._kv_cap_bytes is not None:
            share = min(share, self._kv_cap_bytes)
        room = self.budget_bytes - self._fixed_bytes(managed) - needs.weight_bytes
        wish = max(share, needs.context_bytes)
        return max(min(wish, room), 1)

    def _fixed_bytes(self, managed: ManagedModel) -> int:
        """Bytes of other models that cannot be unloaded."""
        return sum(other.num_bytes for other in self.models if other is not managed and other.is_pinned)

    async def _make_room(self, managed: ManagedModel, need: int) -> None:
        """Wait until `need` bytes fit the budget, unloading others. `need` includes the bytes it holds already."""
        if self.budget_bytes is None:
            return
        try:
            while (missing := self.num_bytes - managed.num_bytes + need - self.budget_bytes) > 0:
                self._check_fits(managed, need)
                if not managed.is_wanted:
                    raise _LoadAbandoned
                self._change.clear()
                self._evict_only(self._choose_evictions(managed, missing))
                await self._change.wait()
        finally:
            self._evict_only(())

    def _check_fits(self, managed: ManagedModel, need: int) -> None:
        budget, fixed = self.budget_bytes or 0, self._fixed_bytes(managed)
        if need > budget - fixed:
            pinned = f", of which pinned models hold {memory_size(fixed)}" if fixed else ""
            needed, total = compared_sizes(need, budget)
            raise ModelTooLarge(f"{managed.name} needs {needed}; the memory of all models is {total}{pinned}")

    def _choose_evictions(self, managed: ManagedModel, missing: int) -> list[ManagedModel]:
        """The models to unload. Those that are unloading already are counted first."""
        going = [other for other in self.models if other is not managed and other.state is ModelState.UNLOADING]
        missing -= sum(other.num_bytes for other in going if not other.is_evicted or other.is_closing)
        may_go = [
            other
            for other in self.models
            if other is not managed
            and not other.is_pinned
            and (other.state is ModelState.READY or (other.is_evicted and not other.is_closing))
        ]
        chosen: list[ManagedModel] = []
        for other in sorted(may_go, key=lambda other: (other.is_busy, other.last_use)):
            if missing <= 0:
                break
            chosen.append(other)
            missing -= other.num_bytes
        return chosen

    def _evict_only(self, chosen: Sequence[ManagedModel]) -> None:
        """Unload the chosen models, and cancel evictions chosen earlier."""
        for managed in self.models:
            if managed in chosen and managed.state is ModelState.READY:
                self._start_unload(managed, is_evicted=True)
            elif managed not in chosen and managed.is_evicted and not managed.is_closing:
                self._cancel_unload(managed)

    # Unloading

    def _start_unload(self, managed: ManagedModel, *, is_evicted: bool) -> None:
        if managed.is_busy:
            log.info("%s will be unloaded when its %d request(s) have ended", managed.name, managed.num_leases)
        managed.state, managed.is_evicted = ModelState.UNLOADING, is_evicted
        managed.unloading = asyncio.create_task(self._unload_when_idle(managed), name=f"unload {managed.name}")

    def _cancel_unload(self, managed: ManagedModel) -> None:
        assert managed.unloading is not None
        managed.unloading.cancel()
        managed.unloading, managed.is_evicted = None, False
        managed.state = ModelState.READY
        self._admit(managed)

    async def _unload_when_idle(self, managed: ManagedModel) -> None:
        while managed.is_busy:
            managed.idle.clear()
            await managed.idle.wait()
        await self._close(managed)
        if managed.is_wanted and not self._is_closed:
            self._start_load(managed)

    async def _close(self, managed: ManagedModel) -> None:
        managed.state, managed.is_closing = ModelState.UNLOADING, True
        if managed.idle_timer is not None:
            managed.idle_timer.cancel()
        try:
            await managed.unload()
            log.info("%s was unloaded: %s freed", managed.name, memory_size(managed.num_bytes))
        except Exception:
            log.exception("unloading %s failed", managed.name)  # its process has ended anyway, or ends with this one
        finally:
            managed.num_unloads += 1
            managed.num_bytes = 0
            managed.unloading, managed.is_closing, managed.is_evicted = None, False, False
            managed.state = ModelState.UNLOADED
            self._change.set()

    def _reset_idle_timer(self, managed: ManagedModel) -> None:
        """Restart the idle timer. There is no polling, so an idle server uses no CPU."""
        if managed.idle_timer is not None:
            managed.idle_timer.cancel()
            managed.idle_timer = None
        if managed.idle_unload_s is not None and not managed.is_busy and managed.state is ModelState.READY:
            managed.idle_timer = asyncio.get_running_loop().call_later(
                managed.idle_unload_s, self._unload_idle, managed
            )

    def _unload_idle(self, managed: ManagedModel) -> None:
        if managed.state is ModelState.READY and not managed.is_busy and not managed.is_pinned:
            self._start_unload(managed, is_evicted=False)

    def _admit(self, managed: ManagedModel) -> None:
        waiters, managed.waiters = managed.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
                self._lease(managed)

    def _lease(self, managed: ManagedModel) -> None:
        managed.num_leases += 1
        managed.last_use = next(self._uses)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel a task unless it is being cancelled: a second time would interrupt its cleanup and leak a process."""
    if not task.cancelling():
        task.cancel()


def default_budget(*, on_gpu: bool) -> int:
    """Most of the memory that is free now."""
    gpus = gpu_memory() if on_gpu else []
    return int((gpus[0][1] if gpus else available_bytes()) * FREE_SHARE)
