"""A scheduler with levels below the device, on a fake runner and a store whose copies end when a test says so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from quire.backends.fake import FakeRunner
from quire.core.check import check_scheduler
from quire.core.levels.levels import SaveLimits
from quire.core.levels.lower_level import LowerLevel, PieceCounts, PieceSizes
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.step import Content, Load, MemoryKind, Save, StepPlan
from quire.core.values import Level, SamplingParams
from tests.core.helpers import Rig
from tests.sim.lower_store import Payload, StoredContent

SIZES: PieceSizes = (10, 5, 25)  # bytes of a block, a window block and a state
PLENTY = SaveLimits(max_bytes=100_000, idle_bytes=100_000, max_pending=1_000, max_writes=1_000)
UNLIMITED = 1_000_000  # bytes of a host level that never evicts in a test
BLOCK_SIZE = 4


class Saving(NamedTuple):
    save: Save
    level: Level
    payload: Payload


class Store(StoredContent):
    """A store whose saves, reads and loads wait until `finish_saves`, `finish_read` and `finish_load`."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.saving: list[Saving] = []
        self.loading: dict[int, list[Load]] = {}
        self.reading: dict[int, list[Content]] = {}
        self.dropped: list[Content] = []
        self.dropped_reads: set[int] = set()

    def start(self, plan: StepPlan) -> None:
        """Start the transfers of a plan, before its step runs."""
        for content in plan.drops:
            del self.stored[Level.HOST][content]
            self.dropped.append(content)
        for save in plan.saves:
            self.saving += [Saving(save, level, self.payload(save)) for level in save.levels]
        for load in plan.loads:
            self.loading.setdefault(load.load_id, []).append(load)
        for read in plan.reads:
            self.reading.setdefault(read.read_id, []).append(read.content)
        self.dropped_reads.update(plan.dropped_reads)
        self.drop_reads(plan)

    def finish_read(self, scheduler: Scheduler, read_id: int, failing: Collection[Content] = ()) -> None:
        """Read the pieces of a read into buffers, except those that fail."""
        contents = self.reading.pop(read_id)
        found = {content: self.stored[Level.DISK].get(content) for content in contents if content not in failing}
        if read_id not in self.dropped_reads:
            self.buffers |= {(read_id, content): payload for content, payload in found.items() if payload is not None}
        scheduler.loads.finish_read(read_id, {content for content in contents if found.get(content) is None})

    def finish_saves(self, scheduler: Scheduler, *, is_saved: bool = True) -> None:
        saving, self.saving = self.saving, []
        for one in saving:
            if is_saved:
                self.stored[one.level][one.save.content] = one.payload
            scheduler.cache.levels.saves.finish(one.save.content, one.level, is_saved=is_saved)

    def finish_load(self, scheduler: Scheduler, load_id: int, failing: Collection[Content] = ()) -> None:
        """Make the copies of a load, except those that fail."""
        failures = set(failing)
        for load in self.loading.pop(load_id):
            payload = self.take(load)
            if not payload or load.content in failures:
                failures.add(load.content)
            else:
                self.write(load.target, payload)
        scheduler.loads.finish(load_id, failures)

    def clear(self) -> None:
        super().clear()
        self.saving.clear()


class TieredRig(Rig):
    """A rig with lower levels. By default its pool is large: content leaves the device only with `evict`."""

    def __init__(
        self,
        *,
        host_bytes: int = 0,
        has_disk: bool = False,
        store_bytes: int | None = None,
        buffers: PieceCounts | None = None,
        limits: SaveLimits = PLENTY,
        **options: Any,
    ) -> None:
        levels = []
        if host_bytes:
            levels.append(LowerLevel(Level.HOST, SIZES, (host_bytes // SIZES[0],) * 3))
        if has_disk:
            levels.append(LowerLevel(Level.DISK, SIZES, store_bytes=store_bytes, buffers=buffers))
        super().__init__(
            secret=b"the same in every process",
            levels=levels,
            save_limits=limits,
            **{"num_blocks": 65, "block_size": BLOCK_SIZE, "max_num_seqs": 4, **options},
        )
        self.store = Store(self.runner)
        self.levels = self.cache.levels
        self._next_id = 1000

    def level(self, level: Level) -> LowerLevel:
        return next(one for one in self.levels.levels if one.level is level)

    # Steps

    def launch(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_ns)
        self.store.start(plan)
        if not plan.is_empty:
            self.runner.forward(plan)
            self.runner.sample(None)
        check_scheduler(self.scheduler)
        return plan

    def finish_reads(self, failing: Collection[Content] = ()) -> None:
        for read_id in list(self.store.reading):
            self.store.finish_read(self.scheduler, read_id, failing)
        check_scheduler(self.scheduler)

    def finish_loads(self, failing: Collection[Content] = ()) -> None:
        """End the loads that have started, after reads that have started. Pieces fail where they are read or loaded."""
        for load_id in list(self.store.loading):
            self.store.finish_load(self.scheduler, load_id, failing)
        self.finish_reads(failing)

    def finish_saves(self, *, is_saved: bool = True) -> None:
        self.store.finish_saves(self.scheduler, is_saved=is_saved)
        check_scheduler(self.scheduler)

    def idle(self) -> StepPlan:
        """One plan of an idle worker, whose saves end at once."""
        assert not self.scheduler.has_work
        plan = self.scheduler.schedule_idle()
        self.store.start(plan)
        self.finish_saves()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until all requests have ended. Loads and saves end after the step that started them."""
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return count
            self.step()
            self.finish_saves()
            self.finish_loads()
        raise AssertionError(f"requests have not ended after {max_steps} steps")

    def run_without_loads(self) -> None:
        """Step until all requests have ended, in which no load ends."""
        for _ in range(1000):
            if not len(self.scheduler.requests):
                return
            self.step()
            self.finish_saves()
        raise AssertionError("requests have not ended")

    # Requests

    def request(self, prompt: Sequence[int], *, max_tokens: int = 4, **options: Any) -> Request:
        """A request that is not added yet."""
        self._next_id += 1
        return Request(self._next_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), **options)

    def arrive(self, prompt: Sequence[int], **options: Any) -> Request:
        request = self.request(prompt, **options)
        self.scheduler.add(request, self.now_ns)
        return request

    def compute(self, prompt: Sequence[int], **options: Any) -> Request:
        """Run a request to its end. Its answer must be that of the same request alone."""
        request = self.arrive(prompt, **options)
        self.run()
        self.check_answer(request)
        return request

    def compute_without_saves(self, prompt: Sequence[int]) -> Request:
        """Run a request to its end, in which no save ends."""
        request = self.arrive(prompt)
        while request.state is not RequestState.FINISHED:
            self.step()
        self.check_answer(request)
        return request

    def check_answer(self, request: Request) -> None:
        prompt = [*request.tokens[: request.num_prompt_tokens]]
        assert request.output == self.output_alone(prompt, request.sampling)

    def wait_for_load(self, prompt: Sequence[int]) -> Request:
        """Add a request and plan a step, in which it starts to wait for a load."""
        request = self.arrive(prompt)
        self.step()
        assert request in self.scheduler.waiting.load_waiters
        return request

    # Content

    def evict(self) -> None:
        """Evict everything from the device that nothing holds, and complete the saves."""
        self.cache.evict_unused()
        self.step()
        self.finish_saves()
        assert self.cache.stats().num_cached == 0

    def content(
        self, tokens: Sequence[int], number: int, kind: MemoryKind = MemoryKind.BLOCK, salt: str = ""
    ) -> Content:
        """The content of block `number` of these tokens; the last may be a partial one."""
        chain = self.cache.chain(Request(0, tokens, salt=salt))
        run = chain.run(number * BLOCK_SIZE, min((number + 1) * BLOCK_SIZE, len(tokens)))
        parent_key = chain.parent_key(number)
        return Content(kind, self.cache.tree.digest(parent_key, run), parent_key, run)

    def contents(self, tokens: Sequence[int], numbers: Iterable[int]) -> list[Content]:
        return [self.content(tokens, number) for number in numbers]

    def restarted(self) -> TieredRig:
        """A new process of the same model, with the disk of this one."""
        windows, states = self.cache.memory.windows, self.cache.memory.states
        rig = TieredRig(
            has_disk=True,
            host_bytes=UNLIMITED,
            window=self.window,
            num_window_blocks=len(windows.pool.blocks) if windows.is_used else 0,
            num_states=len(states.pool.blocks) if states.is_used else 0,
        )
        rig.store.stored[Level.DISK] = self.store.stored[Level.DISK]
        found = list(self.store.stored[Level.DISK])
        assert rig.levels.restore(Level.DISK, found) == len(found)
        return rig
