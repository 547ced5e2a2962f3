"""Transfers on the memory of a fake runner, with a real disk store whose reads and writes a test can hold."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.backends.base import Capacity, MemorySizes, PendingCopy
from quire.backends.fake import FakeRunner
from quire.core.levels.lower_level import PieceCounts
from quire.core.step import Content, Load, MemoryKind, MemoryRef, Read, Save, StepPlan
from quire.core.values import Level
from quire.engine.levels.block_file import DamagedBlock
from quire.engine.levels.disk_store import DiskStore, Written
from quire.engine.levels.transfers import Done, LoadDone, Lost, ReadDone, SaveDone, Slots, Transfers
from tests.engine.levels.contents import FACTS, make_content
from tests.waiting import HANG_S

CAPACITY = Capacity(
    num_blocks=64,
    block_size=4,
    max_num_seqs=4,
    max_model_len=64,
    vocab_size=1000,
    window=8,
    num_window_blocks=64,
    num_states=64,
)
PLENTY: PieceCounts = (64, 64, 64)
HOST, DISK, BOTH = (Level.HOST,), (Level.DISK,), (Level.HOST, Level.DISK)


class Gate:
    """Holds threads until it is open. Counts those that arrived, and the most that were inside at once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.is_open = True
        self.num_arrived = 0
        self.num_inside = 0
        self.most_inside = 0

    def enter(self) -> None:
        with self._condition:
            self.num_arrived += 1
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self.is_open, HANG_S)

    def leave(self) -> None:
        with self._condition:
            self.num_inside -= 1

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        with self._condition:
            self.is_open = True
            self._condition.notify_all()

    def wait_for(self, num_arrived: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.num_arrived >= num_arrived, HANG_S)


class HeldStore(DiskStore):
    """A disk store whose reads and writes pass gates. `error` is raised instead of the next read or write."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30) -> None:
        super().__init__(root, FACTS, max_bytes)
        self.reads, self.writes = Gate(), Gate()
        self.is_late = False  # a write passes its gate after it was made, not before
        self.error: Exception | None = None

    def read_many(self, contents: Sequence[Content], outs: Sequence[memoryview]) -> list[DamagedBlock | None]:
        self.reads.enter()
        try:
            self._raise()
            return super().read_many(contents, outs)
        finally:
            self.reads.leave()

    def write(self, content: Content, payload: memoryview) -> Written:
        written = super().write(content, payload) if self.is_late else None
        self.writes.enter()
        try:
            self._raise()
            return super().write(content, payload) if written is None else written
        finally:
            self.writes.leave()

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class WatchedBlockIO:
    """The block I/O of a runner. Records how many pieces each call copies; a test can make a call or memory fail."""

    def __init__(self, runner: FakeRunner) -> None:
        self._real = runner.block_io()
        self.sizes: MemorySizes = self._real.sizes
        self.layout = self._real.layout
        self.pieces_per_step = self._real.pieces_per_step
        self.max_exports = self._real.max_exports
        self.is_host_memory = False
        self.exports: list[int] = []
        self.imports: list[int] = []
        self.error: Exception | None = None
        self.has_memory = True

    def allocate(self, num_bytes: int) -> memoryview:
        if not self.has_memory:
            raise MemoryError("no memory")
        return self._real.allocate(num_bytes)

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self.exports.append(len(pieces))
        self._raise()
        return self._real.export(pieces, buffers)

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self.imports.append(len(pieces))
        self._raise()
        return self._real.import_(pieces, buffers)

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class TransferRig:
    """`counts`: buffers of each kind, for reads, for writes and in host memory."""

    def __init__(
        self,
        folder: Path | None,
        *,
        has_host: bool = True,
        is_late: bool = False,
        seed: int = 0,
        max_bytes: int = 1 << 30,
        read_counts: PieceCounts = PLENTY,
        save_counts: PieceCounts = PLENTY,
        host_counts: PieceCounts = PLENTY,
        num_readers: int = 4,
        has_memory: bool = True,
    ) -> None:
        self.runner = FakeRunner(CAPACITY, is_late=is_late, seed=seed)
        self.block_io = WatchedBlockIO(self.runner)
        self.block_io.has_memory = has_memory
        sizes, allocate = self.block_io.sizes, self.block_io.allocate
        self._slots = {
            "read": (Slots(allocate, sizes, read_counts), read_counts),
            "save": (Slots(allocate, sizes, save_counts), save_counts),
            "host": (Slots(allocate, sizes, host_counts), host_counts),
        }
        # Loads of content on disk: each piece is read, and then loaded, as the scheduler would.
        self._next_id = 10_000
        self._awaited: dict[int, Load] = {}  # read id -> the load that follows
        self._parts: dict[int, int] = {}  # load id of a part -> load id of the test
        self._num_parts: Counter[int] = Counter()  # load id of the test -> parts in flight
        self._failures: dict[int, set[Content]] = {}
        self.read_ns: list[int] = []
        self.has_host = has_host
        self.disk = None if folder is None else HeldStore(folder, max_bytes)
        self.transfers = Transfers(
            self.block_io,
            self._slots["host"][0] if has_host else None,
            self.disk,
            read_slots=self._slots["read"][0],
            save_slots=self._slots["save"][0],
            num_readers=num_readers,
        )

    # Memory: every piece has words that follow from its number

    def fill(self, ref: MemoryRef, number: int) -> None:
        if ref.kind is MemoryKind.STATE:
            self.runner.states[ref.index] = number
        else:
            self._pool(ref.kind)[ref.index][:] = _words(number)

    def has(self, ref: MemoryRef, number: int) -> bool:
        if ref.kind is MemoryKind.STATE:
            return self.runner.states[ref.index] == number
        return self._pool(ref.kind)[ref.index] == _words(number)

    def _pool(self, kind: MemoryKind) -> list[list[int]]:
        return self.runner.window_memory if kind is MemoryKind.WINDOW else self.runner.memory

    # Plans

    def save(self, numbers: Iterable[int], levels: tuple[Level, ...], kind: MemoryKind = MemoryKind.BLOCK) -> None:
        """Start saves of pieces whose memory is filled first, and overwritten after the plan by the next step."""
        saves = []
        for number in numbers:
            ref = MemoryRef(kind, 1 + number % 63)
            self.fill(ref, number)
            saves.append(Save(make_content(number, kind, 4), ref, levels))
        self.start(saves=saves)

    def load(
        self,
        load_id: int,
        numbers: Iterable[int],
        level: Level,
        targets: Iterable[int],
        kind: MemoryKind = MemoryKind.BLOCK,
    ) -> None:
        pairs = zip(numbers, targets, strict=True)
        loads = [
            Load(load_id, make_content(number, kind, 4), level, MemoryRef(kind, target)) for number, target in pairs
        ]
        self.start(loads=loads)

    def start(
        self,
        *,
        saves: Sequence[Save] = (),
        loads: Sequence[Load] = (),
        drops: Sequence[Content] = (),
        is_busy: bool = False,
    ) -> None:
        reads: list[Read] = []
        if any(load.level is Level.DISK for load in loads):
            reads = [self._read_first(load) for load in loads if load.level is Level.DISK]
            loads = [self._part(load) for load in loads if load.level is not Level.DISK]
        transfers = tuple(saves), tuple(loads), tuple(drops), tuple(reads)
        self.transfers.start(StepPlan((), (), (), (), *transfers), is_busy=is_busy)

    def _part(self, load: Load, read_id: int = 0) -> Load:
        self._next_id += 1
        self._parts[self._next_id] = load.load_id
        self._num_parts[load.load_id] += not read_id
        return load._replace(load_id=self._next_id, read_id=read_id)

    def _read_first(self, load: Load) -> Read:
        self._next_id += 1
        self._awaited[self._next_id] = load
        self._num_parts[load.load_id] += 1
        return Read(self._next_id, load.content, load.level)

    # Progress

    def poll(self, *, is_busy: bool = False) -> list[Done]:
        """Advance everything, and load what was read."""
        done: list[Done] = []
        for one in self.transfers.poll(is_busy=is_busy):
            if isinstance(one, ReadDone):
                load = self._awaited.pop(one.read_id)
                self.read_ns.append(one.read_ns)
                if one.failures:
                    done += self._end_part(load.load_id, one.failures)
                else:
                    self.transfers.start(StepPlan((), (), (), loads=(self._part(load, one.read_id),)), is_busy=is_busy)
            elif isinstance(one, LoadDone) and one.load_id in self._parts:
                done += self._end_part(self._parts.pop(one.load_id), one.failures)
            else:
                done.append(one)
        return done

    def _end_part(self, load_id: int, failures: Collection[Content]) -> list[Done]:
        found = self._failures.setdefault(load_id, set())
        found.update(failures)
        self._num_parts[load_id] -= 1
        return [] if self._num_parts[load_id] else [LoadDone(load_id, frozenset(self._failures.pop(load_id)))]

    def finish(self, *, is_busy: bool = False) -> list[Done]:
        """Advance until nothing is in flight. Returns what has ended."""
        return self.advance(lambda: not self.transfers.has_work, is_busy=is_busy)

    def advance(self, condition: Callable[[], bool], *, is_busy: bool = False) -> list[Done]:
        done: list[Done] = []
        deadline_s = time.monotonic() + HANG_S
        while not condition():
            done += self.poll(is_busy=is_busy)
            self.transfers.wait(0.001)
            assert time.monotonic() < deadline_s, "transfers do not end"
        return done

    def check_buffers(self, num_stored: int = 0) -> None:
        """Check that every buffer is free, except those of content that host memory stores."""
        for name, (slots, counts) in self._slots.items():
            if name == "host" and not self.has_host:
                continue
            for kind in MemoryKind:
                taken = [buffer for _ in range(counts[kind] + 1) if (buffer := slots.take(kind)) is not None]
                is_host_block = name == "host" and kind is MemoryKind.BLOCK
                assert len(taken) == counts[kind] - (num_stored if is_host_block else 0), (name, kind)
                for buffer in taken:
                    buffer.release()

    def close(self) -> None:
        if self.disk is not None:
            self.disk.reads.open()
            self.disk.writes.open()
        self.transfers.close()


def _words(number: int) -> list[int]:
    return [number * 100 + at for at in range(CAPACITY.block_size)]


def saved(done: Iterable[Done], level: Level, *, is_saved: bool = True) -> list[Content]:
    found = [one for one in done if isinstance(one, SaveDone)]
    return [one.content for one in found if one.level is level and one.is_saved is is_saved]


def loaded(done: Iterable[Done]) -> dict[int, Collection[Content]]:
    """Load ids that have ended -> pieces that failed. Every load ends once."""
    found = [one for one in done if isinstance(one, LoadDone)]
    assert len({one.load_id for one in found}) == len(found)
    return {one.load_id: one.failures for one in found}


def lost(done: Iterable[Any]) -> list[Content]:
    return [content for one in done if isinstance(one, Lost) for content in one.contents]
