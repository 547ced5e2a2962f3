"""Which models are in memory: one budget for the weights and KV of all of them, one load at a time.

Knows bytes, leases and the order of use; nothing of text, HTTP or processes. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Protocol

from quire.backends.machine import available_bytes
from quire.errors import LoadFailed, ModelTooLarge, QuireError
from quire.sizes import compared_sizes, memory_size

FREE_SHARE = 0.8  # of the memory free at the start: steps, page cache and the rest of the machine need some
MAX_BACKOFF_S = 30.0
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")

log = logging.getLogger(__name__)


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"  # or waiting for its turn, or for room
    READY = "ready"
    UNLOADING = "unloading"  # finishes what it has; what comes waits for its return
    FAILED = "failed"  # the last load failed; the next request tries again


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes. Weights are an estimate until it was loaded once."""

    weight_bytes: int
    context_bytes: int  # of KV: one context of full length
    kv_bytes: int | None = None  # as it was set; None: its share


class Loadable(Protocol):
    """A model as the manager moves it in and out of memory."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs:
        """As far as it is known without opening anything."""

    async def measure(self) -> Needs:
        """Exactly, from the headers of its files. Raises QuireError."""

    async def load(self, kv_bytes: int | None) -> int:
        """Returns the bytes it holds; 0: it cannot say. Raises QuireError, and then holds nothing.
        `kv_bytes` of None: as it thinks best."""

    async def unload(self) -> None:
        """Gives everything back. Nobody has a lease then, unless they were cut."""

    def cut(self) -> None:
        """End what is under way, with an error to each."""


class ManagedModel:
    """One model's place, taken or not."""

    def __init__(self, model: Loadable, *, is_pinned: bool = False, idle_unload_s: float | None = None) -> None:
        self.model = model
        self.is_pinned = is_pinned
        self.idle_unload_s = idle_unload_s
        self.state = ModelState.UNLOADED
        self.num_bytes = 0  # held, or set aside while it loads and leaves
        self.num_leases = 0
        self.last_use = 0  # of all uses of all models, in order
        self.waiters: list[asyncio.Future[None]] = []
        self.error: QuireError | None = None  # of the last load
        self.num_loads = 0
        self.num_failures = 0
        self.num_unloads = 0
        self.num_failed_in_a_row = 0
        self.load_s: float | None = None  # how long the last one took
        self.began_s: float | None = None  # while it loads
        self.is_asked = False  # to load, though no request waits
        self.is_leaving_for_room = False  # not because someone said so: it may stay if another goes first
        self.is_closing = False  # there is no way back
        self.is_loaded = False
        self.idle = asyncio.Event()  # nobody has a lease
        self.leaving: asyncio.Task[None] | None = None
        self.loading: asyncio.Task[None] | None = None
        self.idle_timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def is_busy(self) -> bool:
        return self.num_leases > 0

    @property
    def is_wanted(self) -> bool:
        return self.is_asked or bool(self.waiters)


class _NobodyWaits(Exception):
    """A load was given up before it began."""


class ModelManager:
    """Loads, and makes room for what is to be loaded.

    Room is made of models that are not pinned: idle ones first, then busy ones, each in the order of their last use. A
    busy one that is chosen takes no new work, so that it can starve nobody, and goes when what it has is done. If
    another becomes idle before that, that one goes and the chosen one stays.
    """

    def __init__(
        self, seats: Sequence[ManagedModel], budget_bytes: int | None, kv_cap_bytes: int | None = None
    ) -> None:
        self.seats = tuple(seats)
        self.budget_bytes = budget_bytes  # None: no bound, and each takes what it thinks best
        self._kv_cap_bytes = kv_cap_bytes  # of a share
        self._turn = asyncio.Lock()
        self._uses = count(1)
        self._change = asyncio.Event()  # of anything that may make room; who has the turn waits for it
        self._is_closed = False

    def __iter__(self) -> Iterator[ManagedModel]:
        return iter(self.seats)

    @property
    def num_bytes(self) -> int:
        return sum(seat.num_bytes for seat in self.seats)

    # Using

    async def hold(self, seat: ManagedModel) -> None:
        """A lease on a loaded model: it stays until `release`. Waits for it to be loaded; raises what kept it from it.

        Leases are given at the moment it is ready, so nobody can make room of it before those who waited have begun.
        """
        if seat.state is ModelState.READY:
            self._lease(seat)
            return
        self._check_open()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        seat.waiters.append(turn)
        self._want(seat)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(seat)  # it came at the same moment
            raise
        finally:
            if turn in seat.waiters:
                seat.waiters.remove(turn)
                self._change.set()  # a load that nobody waits for any more makes no room

    def release(self, seat: ManagedModel) -> None:
        seat.num_leases -= 1
        assert seat.num_leases >= 0, seat.name
        if not seat.num_leases:
            seat.idle.set()
            self._change.set()
            self._watch_idle(seat)

    async def load(self, seat: ManagedModel) -> None:
        """Without a request."""
        seat.is_asked = True
        try:
            await self.hold(seat)
        finally:
            seat.is_asked = False
        self.release(seat)

    async def unload(self, seat: ManagedModel, *, is_forced: bool = False) -> None:
        """When what is under way has ended; forced, it is cut. What comes meanwhile waits, and has it loaded again."""
        if seat.state is ModelState.LOADING and seat.loading is not None:
            if is_forced:
                # Its first step comes before this: cancelled earlier, it would tell nobody that it is over.
                asyncio.get_running_loop().call_soon(_cancel_once, seat.loading)
            await asyncio.wait({seat.loading})
        if seat.state is ModelState.READY:
            self._leave(seat, for_room=False)
        seat.is_leaving_for_room = False
        if seat.leaving is not None:
            if is_forced and not seat.is_closing:
                seat.model.cut()
            await asyncio.shield(seat.leaving)

    def pin(self, seat: ManagedModel) -> None:
        seat.is_pinned = True
        if seat.is_leaving_for_room:
            self._stay(seat)
        self._change.set()

    def unpin(self, seat: ManagedModel) -> None:
        seat.is_pinned = False
        self._change.set()
        self._watch_idle(seat)

    def refuse(self) -> None:
        """Whoever waits, and whoever comes: the end is near."""
        self._is_closed = True
        for seat in self.seats:
            self._fail_waiters(seat, LoadFailed("the server is shutting down"))

    async def close(self) -> None:
        """Everything, at once."""
        self.refuse()
        for seat in self.seats:
            if seat.idle_timer is not None:
                seat.idle_timer.cancel()
            for task in (seat.loading, seat.leaving):
                if task is not None and not seat.is_closing:
                    _cancel_once(task)
        tasks = [task for seat in self.seats for task in (seat.loading, seat.leaving) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        self.refuse()
        await asyncio.gather(*(self._close(seat) for seat in self.seats if seat.is_loaded))

    def eta_s(self, seat: ManagedModel, reading_s: float | None) -> float | None:
        """Seconds until it is ready: by how long the last load took, else `reading_s`, what its weights still take."""
        if seat.began_s is None:
            return seat.load_s
        if seat.load_s is not None:
            return max(seat.load_s - (time.monotonic() - seat.began_s), 0.0)
        return reading_s

    # Loading

    def _check_open(self) -> None:
        if self._is_closed:
            raise LoadFailed("the server is shutting down")

    def _want(self, seat: ManagedModel) -> None:
        if seat.state in (ModelState.UNLOADED, ModelState.FAILED):
            seat.state = ModelState.LOADING
            seat.loading = asyncio.create_task(self._load(seat), name=f"load {seat.name}")

    async def _load(self, seat: ManagedModel) -> None:
        try:
            await self._back_off(seat)
            async with self._turn:
                if not seat.is_wanted:
                    raise _NobodyWaits
                seat.began_s = time.monotonic()
                await self._load_within(seat)
        except asyncio.CancelledError:
            log.info("%s was unloaded before it was ready", seat.name)
            self._fail(seat, LoadFailed(f"{seat.name} was unloaded before it was ready"), is_counted=False)
            seat.state = ModelState.UNLOADED
            raise
        except _NobodyWaits:
            seat.state = ModelState.UNLOADED
        except ModelTooLarge as error:
            log.error("%s could not be loaded: %s", seat.name, error)  # whoever asked may not wait to be told
            self._fail(seat, error, is_counted=False)  # its bytes are known: nothing was tried, nothing to wait for
        except QuireError as error:
            self._fail(seat, error)
        except Exception as error:
            log.exception("loading %s failed", seat.name)
            self._fail(seat, LoadFailed(f"{type(error).__name__}: {error}"))
        else:
            self._ready(seat)
        finally:
            seat.began_s = None
            seat.loading = None
            self._change.set()
            if seat.state is ModelState.UNLOADED and seat.waiters and not self._is_closed:
                self._want(seat)  # they came while a load that nobody wanted any more was given up

    async def _load_within(self, seat: ManagedModel) -> None:
        """What it holds may be more than was estimated. Then others go; where none can, it is loaded once more with
        less KV, now that its weights are known."""
        for is_last in (False, True):
            needs = await seat.model.measure()
            kv_bytes = self.kv_bytes(seat, needs)
            need = needs.weight_bytes + (kv_bytes or 0)
            await self._make_room(seat, need)
            seat.num_bytes = need
            seat.num_bytes = await seat.model.load(kv_bytes) or need
            try:
                await self._make_room(seat, seat.num_bytes)
            except BaseException as error:
                await seat.model.unload()
                seat.num_bytes = 0
                if is_last or not isinstance(error, ModelTooLarge):
                    raise
            else:
                seat.is_loaded = True
                return

    def _ready(self, seat: ManagedModel) -> None:
        seat.load_s = None if seat.began_s is None else time.monotonic() - seat.began_s
        seat.state, seat.error = ModelState.READY, None
        seat.num_loads += 1
        seat.num_failed_in_a_row = 0
        seat.last_use = next(self._uses)
        self._admit(seat)
        self._watch_idle(seat)

    def _fail(self, seat: ManagedModel, error: QuireError, *, is_counted: bool = True) -> None:
        seat.state, seat.error = ModelState.FAILED, error
        seat.num_bytes = 0
        if is_counted:
            seat.num_failures += 1
            seat.num_failed_in_a_row += 1
            log.error("%s could not be loaded: %s", seat.name, error)
        self._fail_waiters(seat, error)

    def _fail_waiters(self, seat: ManagedModel, error: QuireError) -> None:
        waiters, seat.waiters = seat.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _back_off(self, seat: ManagedModel) -> None:
        """Before another try, the longer the more failed in a row; before the turn, so that others may load."""
        if seat.num_failed_in_a_row >= 2:
            delay_s = min(2.0 ** min(seat.num_failed_in_a_row - 2, 10), MAX_BACKOFF_S)
            log.warning("%s failed %d times in a row: waiting %g s", seat.name, seat.num_failed_in_a_row, delay_s)
            await asyncio.sleep(delay_s)

    # Room

    def kv_bytes(self, seat: ManagedModel, needs: Needs) -> int | None:
        """As it was set; else an equal part of what the weights of all models leave, at least one full context, at most
        what the pinned ones leave."""
        if needs.kv_bytes is not None or self.budget_bytes is None:
            return needs.kv_bytes
        others = [other.model.needs for other in self.seats if other is not seat]
        taken = needs.weight_bytes + sum(other.weight_bytes + (other.kv_bytes or 0) for other in others)
        num_sharing = 1 + sum(other.kv_bytes is None for other in others)
        share = max(self.budget_bytes - taken, 0) // num_sharing
        if self._kv_cap_bytes is not None:
            share = min(share, self._kv_cap_bytes)
        room = self.budget_bytes - self._fixed_bytes(seat) - needs.weight_bytes
        wish = max(share, needs.context_bytes)
        return max(min(wish, room), 1)

    def _fixed_bytes(self, seat: ManagedModel) -> int:
        """What can not be made room of."""
        return sum(other.num_bytes for other in self.seats if other is not seat and other.is_pinned)

    async def _make_room(self, seat: ManagedModel, need: int) -> None:
        """Wait until this many bytes, what it holds itself included, fit beside the others."""
        if self.budget_bytes is None:
            return
        try:
            while (missing := self._held_by_others(seat) + need - self.budget_bytes) > 0:
                self._check_fits(seat, need)
                if not seat.is_wanted:
                    raise _NobodyWaits
                self._change.clear()
                self._keep(self._choose(seat, missing))
                await self._change.wait()
        finally:
            self._keep(())

    def _held_by_others(self, seat: ManagedModel) -> int:
        return sum(other.num_bytes for other in self.seats if other is not seat)

    def _check_fits(self, seat: ManagedModel, need: int) -> None:
        budget, fixed = self.budget_bytes or 0, self._fixed_bytes(seat)
        if need > budget - fixed:
            pinned = f", of which pinned models hold {memory_size(fixed)}" if fixed else ""
            needed, total = compared_sizes(need, budget)
            raise ModelTooLarge(f"{seat.name} needs {needed}; the models of this server have {total}{pinned}")

    def _choose(self, seat: ManagedModel, missing: int) -> list[ManagedModel]:
        """Who goes. What is on its way out already counts first."""
        going = [other for other in self.seats if other is not seat and other.state is ModelState.UNLOADING]
        missing -= sum(other.num_bytes for other in going if not other.is_leaving_for_room or other.is_closing)
        may_go = [
            other
            for other in self.seats
            if other is not seat
            and not other.is_pinned
            and (other.state is ModelState.READY or (other.is_leaving_for_room and not other.is_closing))
        ]
        chosen: list[ManagedModel] = []
        for other in sorted(may_go, key=lambda other: (other.is_busy, other.last_use)):
            if missing <= 0:
                break
            chosen.append(other)
            missing -= other.num_bytes
        return chosen

    def _keep(self, chosen: Sequence[ManagedModel]) -> None:
        """The chosen leave, others that were chosen before stay."""
        for seat in self.seats:
            if seat in chosen and seat.state is ModelState.READY:
                self._leave(seat, for_room=True)
            elif seat not in chosen and seat.is_leaving_for_room and not seat.is_closing:
                self._stay(seat)

    # Leaving

    def _leave(self, seat: ManagedModel, *, for_room: bool) -> None:
        if seat.is_busy:
            log.info("%s is to be unloaded when its %d request(s) have ended", seat.name, seat.num_leases)
        seat.state, seat.is_leaving_for_room = ModelState.UNLOADING, for_room
        seat.leaving = asyncio.create_task(self._go(seat), name=f"unload {seat.name}")

    def _stay(self, seat: ManagedModel) -> None:
        assert seat.leaving is not None
        seat.leaving.cancel()
        seat.leaving, seat.is_leaving_for_room = None, False
        seat.state = ModelState.READY
        self._admit(seat)

    async def _go(self, seat: ManagedModel) -> None:
        while seat.is_busy:
            seat.idle.clear()
            await seat.idle.wait()
        await self._close(seat)
        if seat.is_wanted and not self._is_closed:
            self._want(seat)

    async def _close(self, seat: ManagedModel) -> None:
        seat.state, seat.is_closing = ModelState.UNLOADING, True
        if seat.idle_timer is not None:
            seat.idle_timer.cancel()
        try:
            await seat.model.unload()
            log.info("%s is unloaded: %s are free again", seat.name, memory_size(seat.num_bytes))
        except Exception:
            log.exception("unloading %s failed", seat.name)  # its process is gone all the same, or ends with this one
        finally:
            seat.num_unloads += 1
            seat.num_bytes, seat.is_loaded = 0, False
            seat.leaving, seat.is_closing, seat.is_leaving_for_room = None, False, False
            seat.state = ModelState.UNLOADED
            self._change.set()

    def _watch_idle(self, seat: ManagedModel) -> None:
        """No polling: an idle server costs nothing."""
        if seat.idle_timer is not None:
            seat.idle_timer.cancel()
            seat.idle_timer = None
        if seat.idle_unload_s is not None and not seat.is_busy and seat.state is ModelState.READY:
            seat.idle_timer = asyncio.get_running_loop().call_later(seat.idle_unload_s, self._leave_idle, seat)

    def _leave_idle(self, seat: ManagedModel) -> None:
        if seat.state is ModelState.READY and not seat.is_busy and not seat.is_pinned:
            self._leave(seat, for_room=False)

    def _admit(self, seat: ManagedModel) -> None:
        waiters, seat.waiters = seat.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
                self._lease(seat)

    def _lease(self, seat: ManagedModel) -> None:
        seat.num_leases += 1
        seat.last_use = next(self._uses)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second time would disturb it while it gives back what it has, and a process would stay for good."""
    if not task.cancelling():
        task.cancel()


def default_budget(*, on_gpu: bool) -> int:
    """Most of what is free now."""
    free = _free_on_gpu() if on_gpu else None
    return int((available_bytes() if free is None else free) * FREE_SHARE)


def _free_on_gpu() -> int | None:
    """Asked of the driver's own tool: no process but a worker loads the libraries that could say."""
    try:
        found = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=True)
        return int(found.stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
