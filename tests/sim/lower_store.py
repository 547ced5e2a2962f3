"""The levels of a simulated world: what the engine's transfers do with real memory and files.

Copies take a random time. Some fail: the disk is full, a file is torn or missing. The disk has a limit of its own.
Reads of the disk may hang: they end late, or never. Copies between host memory and the device end within `COPY_STEPS`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

from quire.backends.fake import FakeRunner
from quire.core.scheduler import Scheduler
from quire.core.step import Content, Load, MemoryKind, MemoryRef, Save, StepPlan
from quire.core.values import Level

Payload = list[int]
COPY_STEPS = 3  # a copy to the device ends at most so many steps after the steps before it


@dataclass(slots=True)
class _Saving:
    content: Content
    level: Level
    payload: Payload


@dataclass(slots=True)
class _Loading:
    load_id: int
    pieces: list[Load]
    num_launched: int  # plans that were launched before; the copies must not overtake them
    num_written: int = 0  # of the pieces: the first ones, that were copied before the plan was complete
    num_steps: int = 0  # since it began
    failures: set[Content] = field(default_factory=set)


@dataclass(slots=True)
class _Reading:
    read_id: int
    contents: list[Content]
    is_hung: bool
    is_dropped: bool = False


class StoredContent:
    """Content of the levels below a fake runner, and of the buffers into which the disk is read."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.stored: dict[Level, OrderedDict[Content, Payload]] = {Level.HOST: OrderedDict(), Level.DISK: OrderedDict()}
        self.buffers: dict[tuple[int, Content], Payload] = {}  # what was read

    def payload(self, save: Save) -> Payload:
        """What a save copies."""
        if save.source is None:
            return self.stored[Level.HOST][save.content]
        kind, index = save.source
        return [self.runner.states[index]] if kind is MemoryKind.STATE else [*self._memory(kind)[index]]

    def take(self, load: Load) -> Payload | None:
        """What a load copies: from a buffer, which is then free, or from host memory. None or empty: it is lost."""
        if load.read_id:
            return self.buffers.pop((load.read_id, load.content), None)
        return self.stored[load.level].get(load.content)

    def write(self, target: MemoryRef, payload: Payload) -> None:
        kind, index = target
        if kind is MemoryKind.STATE:
            (self.runner.states[index],) = payload
        else:
            self._memory(kind)[index][:] = payload

    def drop_reads(self, plan: StepPlan) -> None:
        for key in [key for key in self.buffers if key[0] in plan.dropped_reads]:
            del self.buffers[key]

    def clear(self) -> None:
        for stored in self.stored.values():
            stored.clear()

    def _memory(self, kind: MemoryKind) -> list[Payload]:
        return self.runner.window_memory if kind is MemoryKind.WINDOW else self.runner.memory


class LowerStore(StoredContent):
    def __init__(
        self,
        random: Random,
        runner: FakeRunner,
        *,
        host_pieces: tuple[int, int, int],
        disk_pieces: int,
        num_buffers: tuple[int, int, int],
        hung_share: float,
    ) -> None:
        """`num_buffers`: of each kind, that reads may use. `hung_share`: of reads."""
        super().__init__(runner)
        self._random = random
        self._num_buffers = num_buffers
        self._hung_share = hung_share
        self._reading: list[_Reading] = []
        self.num_hung = self.num_late_answers = 0
        self.num_advances = 0  # reads and copies that began or ended
        self._host_pieces = host_pieces
        self._disk_pieces = disk_pieces
        self._saving: list[_Saving] = []
        self._loading: list[_Loading] = []
        self._early: dict[int, _Loading] = {}  # loads whose plan is being made
        self.num_early = self.num_from_host = 0
        self.num_failures = 0
        self.num_evictions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._saving or self._loading or any(not one.is_hung for one in self._reading))

    @property
    def has_hung(self) -> bool:
        return any(one.is_hung for one in self._reading)

    @property
    def is_copying(self) -> bool:
        """Whether copies to the device are being made, which hold memory there."""
        return bool(self._loading)

    @property
    def has_buffers(self) -> bool:
        """Whether reads use buffers."""
        return bool(self._reading or self.buffers)

    @property
    def is_saving(self) -> bool:
        return bool(self._saving)

    def start(self, plan: StepPlan, num_launched: int) -> None:
        """Start the transfers of a plan, before its step is launched."""
        for content in plan.drops:
            del self.stored[Level.HOST][content]
        for save in plan.saves:
            self.num_from_host += save.source is None
            self._saving += [_Saving(save.content, level, self.payload(save)) for level in save.levels]
        to_host = [one.content for one in self._saving if one.level is Level.HOST]
        for kind in MemoryKind:
            count = sum(content.kind is kind for content in (*self.stored[Level.HOST], *to_host))
            assert count <= self._host_pieces[kind], f"{count} {kind.name} in host memory, of {self._host_pieces}"
        self._start_reads(plan)
        loads: dict[int, list[Load]] = {}
        for load in plan.loads:
            loads.setdefault(load.load_id, []).append(load)
        for load_id, pieces in loads.items():
            loading = self._early.pop(load_id, None) or _Loading(load_id, [], num_launched)
            loading.pieces += pieces
            self._loading.append(loading)
        assert not self._early, "a plan has no piece of a load that was started early"
        self.num_advances += len(loads)
        self._check_buffers()

    def _start_reads(self, plan: StepPlan) -> None:
        for read_id in plan.dropped_reads:
            for one in self._reading:
                one.is_dropped = one.is_dropped or one.read_id == read_id
        self.drop_reads(plan)
        reads: dict[int, list[Content]] = {}
        for read in plan.reads:
            reads.setdefault(read.read_id, []).append(read.content)
        for read_id, contents in reads.items():
            is_hung = self._random.random() < self._hung_share
            self.num_hung += is_hung
            self._reading.append(_Reading(read_id, contents, is_hung))
        self.num_advances += len(reads)

    def _check_buffers(self) -> None:
        """Check that reads use no more buffers than there are."""
        copied = [piece.content for one in self._loading for piece in one.pieces if piece.read_id]
        used = [content for one in self._reading for content in one.contents]
        used += [content for read_id, content in self.buffers if content not in copied]
        for kind in MemoryKind:
            count = sum(content.kind is kind for content in (*used, *copied))
            assert count <= self._num_buffers[kind], f"{count} buffers of {kind.name}, of {self._num_buffers}"

    def answer(self, scheduler: Scheduler, *, is_all: bool = False) -> None:
        """Let a read that hangs end after all."""
        hung = [one for one in self._reading if one.is_hung]
        for one in hung if is_all else hung[:1]:
            self.num_late_answers += 1
            self._read_files(scheduler, one)

    def end_old_copies(self, scheduler: Scheduler, num_committed: int) -> None:
        """End the copies that have taken long. Called before a step."""
        for one in list(self._loading):
            one.num_steps += one.num_launched <= num_committed
            if one.num_steps > COPY_STEPS:
                self._load(scheduler, one)

    def start_early(self, loads: tuple[Load, ...], num_launched: int, num_committed: int) -> None:
        """Start the first loads of a plan that is being made. If no step is in flight, they are copied at once."""
        for load in loads:
            loading = self._early.setdefault(load.load_id, _Loading(load.load_id, [], num_launched))
            loading.pieces.append(load)
            if num_launched == num_committed:
                self._copy(loading, load)
                loading.num_written += 1
                self.num_early += 1

    def advance(self, scheduler: Scheduler, num_committed: int) -> None:
        """Complete one transfer, if there is one that may complete."""
        ready = [one for one in self._loading if one.num_launched <= num_committed]
        reading = [one for one in self._reading if not one.is_hung]
        if reading and (not (ready or self._saving) or self._random.random() < 0.5):
            self._read_files(scheduler, self._random.choice(reading))
        elif ready and (not self._saving or self._random.random() < 0.5):
            self._load(scheduler, self._random.choice(ready))
        elif self._saving:
            self._save(scheduler, self._saving.pop(self._random.randrange(len(self._saving))))

    def damage(self) -> None:
        """Lose a stored piece without telling anyone, as if a file was torn."""
        level = self._random.choice((Level.HOST, Level.DISK, Level.DISK))
        if self.stored[level] and level is Level.DISK:
            self.stored[level][self._random.choice(list(self.stored[level]))] = []

    def clear(self) -> None:
        """Drop everything; saves in flight are forgotten. Loads in flight still end."""
        super().clear()
        self._saving.clear()

    def restart(self, runner: FakeRunner) -> list[Content]:
        """A new process: only files that were complete are left."""
        self.runner = runner
        self._saving.clear()
        self._loading.clear()
        self._reading.clear()
        self.buffers.clear()
        self.stored[Level.HOST].clear()
        return list(self.stored[Level.DISK])

    def _save(self, scheduler: Scheduler, saving: _Saving) -> None:
        is_saved = self._random.random() < 0.95
        self.num_failures += not is_saved
        if is_saved:
            self.stored[saving.level][saving.content] = saving.payload
        scheduler.cache.levels.saves.finish(saving.content, saving.level, is_saved=is_saved)
        disk = self.stored[Level.DISK]
        while len(disk) > self._disk_pieces:
            content, _ = disk.popitem(last=False)
            self.num_evictions += 1
            scheduler.cache.levels.lose(Level.DISK, [content])

    def _read_files(self, scheduler: Scheduler, reading: _Reading) -> None:
        """End a read. Buffers of one that was dropped are given back."""
        self._reading.remove(reading)
        self.num_advances += 1
        failures = set()
        for content in reading.contents:
            payload = self.stored[Level.DISK].get(content)
            if not payload or self._random.random() < 0.02:
                failures.add(content)
                self.stored[Level.DISK].pop(content, None)
            elif not reading.is_dropped:
                self.buffers[reading.read_id, content] = payload
        self.num_failures += bool(failures)
        scheduler.loads.finish_read(reading.read_id, failures, self._random.choice((0, 1_000, 10**9)))

    def _load(self, scheduler: Scheduler, loading: _Loading) -> None:
        self._loading.remove(loading)
        self.num_advances += 1
        for piece in loading.pieces[loading.num_written :]:
            self._copy(loading, piece)
        self.num_failures += bool(loading.failures)
        scheduler.loads.finish(loading.load_id, loading.failures)

    def _copy(self, loading: _Loading, piece: Load) -> None:
        payload = self.take(piece)
        if not payload or self._random.random() < 0.02:
            loading.failures.add(piece.content)
        else:
            self.write(piece.target, payload)
