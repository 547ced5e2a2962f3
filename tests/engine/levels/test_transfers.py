"""Saves and loads: every copy ends once, no buffer is lost, and failures stay within their own piece."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.core.step import Load, MemoryKind, MemoryRef, Read, Save, StepPlan
from quire.core.values import Level
from quire.engine.levels.block_file import file_bytes
from quire.engine.levels.transfers import Done, LoadDone, ReadDone, Slots, Transfers
from tests.engine.levels.contents import all_files, make_content, temporary_files
from tests.engine.levels.transfer_rig import (
    BOTH,
    DISK,
    HOST,
    PLENTY,
    TransferRig,
    loaded,
    lost,
    saved,
)
from tests.waiting import HANG_S, eventually

BLOCK_FILE_BYTES = file_bytes(16, 32)
MakeRig = Callable[..., TransferRig]


def block(number: int) -> Any:
    return make_content(number, MemoryKind.BLOCK, 4)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[TransferRig] = []

    def make(folder: Path | None = tmp_path / "kv", **settings: Any) -> TransferRig:
        rigs.append(TransferRig(folder, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


# Saves and loads


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("levels", [HOST, DISK, BOTH], ids=["host", "disk", "both"])
def test_what_is_saved_is_loaded(make_rig: MakeRig, levels: tuple[Level, ...], kind: MemoryKind, is_late: bool) -> None:
    rig = make_rig(is_late=is_late)
    numbers = [1, 2, 3]
    rig.save(numbers, levels, kind)
    done = rig.finish()
    contents = [make_content(number, kind, 4) for number in numbers]
    for level in Level:
        assert saved(done, level) == (contents if level in levels else [])
    assert len(done) == len(numbers) * len(levels)
    assert len(all_files(rig.disk.space.path.parent)) == (3 if Level.DISK in levels else 0)  # type: ignore[union-attr]
    for load_id, level in enumerate(levels, 1):
        targets = [load_id * 10 + number for number in numbers]
        rig.load(load_id, numbers, level, targets, kind)
        (ended,) = rig.finish()
        assert isinstance(ended, LoadDone)
        assert (ended.load_id, ended.failures) == (load_id, frozenset())
        assert all(read_ns > 0 for read_ns in rig.read_ns)
        assert len(rig.read_ns) == (len(numbers) if level is Level.DISK else 0)
        assert all(rig.has(MemoryRef(kind, at), number) for at, number in zip(targets, numbers, strict=True))
    for content in contents:
        rig.start(drops=[content])
    rig.check_buffers()


# Failures


def damage(rig: TransferRig, number: int) -> None:
    assert rig.disk is not None
    path = Path(rig.disk.space.file(MemoryKind.BLOCK, block(number).key))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_damaged_file_fails_its_own_piece_only(
    make_rig: MakeRig, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(has_host=False, is_late=is_late)
    assert rig.disk is not None
    rig.save(range(1, 6), DISK)
    rig.finish()
    damage(rig, 2)
    damaged, missing = (rig.disk.space.file(MemoryKind.BLOCK, block(number).key) for number in (2, 4))
    os.unlink(missing)
    rig.load(1, range(1, 6), Level.DISK, range(11, 16))
    rig.load(2, [1], Level.DISK, [21])
    assert loaded(rig.finish()) == {1: {block(2), block(4)}, 2: frozenset()}
    assert [rig.has(MemoryRef(MemoryKind.BLOCK, 10 + n), n) for n in range(1, 6)] == [True, False, True, False, True]
    assert len(all_files(rig.disk.space.path.parent)) == 3  # the damaged one is deleted
    assert sorted(caplog.messages) == [
        f"1 files of the disk cache are missing, such as {missing}: their content is computed again",
        "a file of the disk cache was damaged (the content does not match its checksum):"
        f" {damaged}. It was deleted, and its content is computed again",
    ]
    rig.check_buffers()


def test_threads_survive_any_exception(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(has_host=False)
    assert rig.disk is not None
    rig.disk.error = RuntimeError("a bug of the store")
    rig.save([1], DISK)
    assert saved(rig.finish(), Level.DISK, is_saved=False) == [block(1)]
    rig.save([1], DISK)
    assert saved(rig.finish(), Level.DISK) == [block(1)]
    rig.disk.error = RuntimeError("another one")
    rig.load(1, [1], Level.DISK, [9])
    assert loaded(rig.finish()) == {1: {block(1)}}
    rig.load(2, [1], Level.DISK, [9])
    assert loaded(rig.finish()) == {2: frozenset()}
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    rig.check_buffers()


@pytest.mark.parametrize("levels", [HOST, DISK, BOTH], ids=["host", "disk", "both"])
def test_an_export_that_raises(make_rig: MakeRig, levels: tuple[Level, ...]) -> None:
    rig = make_rig()
    rig.block_io.error = RuntimeError("the device is lost")
    rig.save([1, 2], levels)
    done = rig.finish()
    for level in levels:
        assert saved(done, level, is_saved=False) == [block(1), block(2)]
    assert len(done) == 2 * len(levels)
    rig.check_buffers()
    rig.save([1], levels)
    assert [saved(rig.finish(), levels[0])] == [[block(1)]]


@pytest.mark.parametrize("level", [Level.HOST, Level.DISK])
def test_an_import_that_raises(make_rig: MakeRig, level: Level) -> None:
    rig = make_rig()
    rig.save([1, 2], (level,))
    rig.finish()
    rig.block_io.error = RuntimeError("the device is lost")
    rig.load(1, [1, 2], level, [11, 12])
    (failures,) = loaded(rig.finish()).values()
    assert failures
    assert set(failures) <= {block(1), block(2)}
    rig.load(2, [1, 2], level, [11, 12])
    assert loaded(rig.finish()) == {2: frozenset()}
    rig.check_buffers(num_stored=2 if level is Level.HOST else 0)


def test_memory_that_cannot_be_allocated(make_rig: MakeRig) -> None:
    writer = make_rig()
    writer.save([1, 2], DISK)
    writer.finish()
    rig = make_rig(has_memory=False)
    rig.load(1, [1, 2], Level.DISK, [11, 12])
    assert loaded(rig.finish()) == {1: {block(1), block(2)}}  # not: waits forever
    rig.save([3], BOTH)
    done = rig.finish()
    assert [saved(done, level, is_saved=False) for level in BOTH] == [[block(3)], [block(3)]]


# Few buffers, many loads


def test_reads_run_at_the_same_time(make_rig: MakeRig) -> None:
    rig = make_rig(has_host=False, num_readers=3)
    assert rig.disk is not None
    rig.save(range(1, 8), DISK)
    rig.finish()
    rig.disk.reads.close()
    rig.load(1, range(1, 8), Level.DISK, range(11, 18))
    rig.disk.reads.wait_for(3)
    assert rig.poll() == []
    rig.disk.reads.open()
    assert loaded(rig.finish()) == {1: frozenset()}
    assert rig.disk.reads.most_inside == 3


def test_copies_beside_steps_are_paced(make_rig: MakeRig) -> None:
    rig = make_rig(None)
    per_step = rig.block_io.pieces_per_step
    assert per_step == 4
    rig.save(range(1, 31), HOST)
    rig.finish()
    loads = [Load(1, block(n), Level.HOST, MemoryRef(MemoryKind.BLOCK, 31 + n)) for n in range(1, 31)]
    rig.start(loads=loads, is_busy=True)
    assert rig.block_io.imports == [4]  # with the plan that starts the load
    for num_polls in range(1, 8):
        assert len(loaded(rig.poll(is_busy=True))) == (num_polls == 7)
    assert rig.block_io.imports == [4, 4, 4, 4, 4, 4, 4, 2]
    rig.block_io.imports.clear()
    rig.start(loads=[load._replace(load_id=2) for load in loads], is_busy=False)
    assert rig.block_io.imports == [4, 26]  # nothing runs: the first few at once, then the rest
    assert loaded(rig.poll()) == {2: frozenset()}


def test_a_load_that_starts_early_ends_with_the_rest_of_its_plan(make_rig: MakeRig) -> None:
    rig = make_rig(None)
    rig.save(range(1, 31), HOST)
    rig.finish()
    loads = [Load(1, block(n), Level.HOST, MemoryRef(MemoryKind.BLOCK, 31 + n)) for n in range(1, 31)]
    rig.transfers.start_early(loads[:10], is_busy=False)
    assert rig.block_io.imports == [4, 6]
    assert loaded(rig.poll()) == {}, "all pieces so far are copied, but there are more"
    rig.transfers.start_early(loads[10:20], is_busy=False)
    rig.start(loads=loads[20:])
    assert loaded(rig.finish()) == {1: frozenset()}
    assert all(rig.has(MemoryRef(MemoryKind.BLOCK, 31 + n), n) for n in range(1, 31))


def test_a_thread_reads_several_small_files_in_one_call(make_rig: MakeRig) -> None:
    rig = make_rig(has_host=False, num_readers=2)
    assert rig.disk is not None
    rig.save(range(1, 21), DISK)
    rig.finish()
    damaged = rig.disk.space.file(MemoryKind.BLOCK, block(7).key)
    os.truncate(damaged, 10)
    rig.load(1, range(1, 21), Level.DISK, range(21, 41))
    assert loaded(rig.finish()) == {1: {block(7)}}
    assert rig.disk.reads.num_arrived == 2, "each thread reads half of them"
    assert all(rig.has(MemoryRef(MemoryKind.BLOCK, 20 + n), n) for n in range(1, 21) if n != 7)


def test_host_memory_is_written_to_disk(make_rig: MakeRig) -> None:
    rig = make_rig(host_counts=(3, 3, 3))
    assert rig.disk is not None
    rig.save([1, 2, 3], HOST)
    rig.finish()
    rig.disk.writes.close()
    rig.start(saves=[Save(block(n), None, DISK) for n in (1, 2, 4)])
    rig.start(drops=[block(2)])  # while it waits to be written
    rig.disk.writes.open()
    done = rig.finish()
    assert saved(done, Level.DISK) == [block(1), block(2)]
    assert saved(done, Level.DISK, is_saved=False) == [block(4)], "host memory does not have it"
    assert rig.block_io.exports == [3], "nothing is copied from the runner"
    rig.load(1, [1, 2], Level.DISK, [21, 22])
    assert loaded(rig.finish()) == {1: frozenset()}
    assert all(rig.has(MemoryRef(MemoryKind.BLOCK, 20 + n), n) for n in (1, 2))
    rig.check_buffers(num_stored=2)


# The cache is cleared


@pytest.mark.parametrize("levels", [DISK, BOTH], ids=["disk", "both"])
@pytest.mark.parametrize("is_late", [False, True])
def test_clear_while_a_file_is_written(make_rig: MakeRig, levels: tuple[Level, ...], is_late: bool) -> None:
    rig = make_rig()
    assert rig.disk is not None
    rig.disk.is_late = is_late
    rig.disk.writes.close()
    rig.save([1, 2], levels)
    rig.poll()
    rig.disk.writes.wait_for(1)
    rig.transfers.clear()
    rig.disk.writes.open()
    assert rig.finish() == []
    assert all_files(rig.disk.space.path.parent) == []
    assert rig.disk.writes.num_arrived == 1  # the second is not written at all
    rig.check_buffers()


@pytest.mark.parametrize("is_late", [False, True])
def test_content_that_is_saved_again_after_a_clear_stays(make_rig: MakeRig, is_late: bool) -> None:
    rig = make_rig(has_host=False)
    assert rig.disk is not None
    rig.disk.is_late = is_late
    rig.disk.writes.close()
    rig.save([1], DISK)
    rig.poll()
    rig.disk.writes.wait_for(1)
    rig.transfers.clear()
    rig.save([1], DISK)
    rig.poll()
    rig.disk.writes.open()
    assert saved(rig.finish(), Level.DISK) == [block(1)]
    rig.load(1, [1], Level.DISK, [9])
    assert loaded(rig.finish()) == {1: frozenset()}


# The end


def is_shut(threads: Any) -> bool:
    return bool(threads.is_closed)


def test_close_waits_for_the_files_in_progress_only(make_rig: MakeRig) -> None:
    rig = make_rig(has_host=False, num_readers=1)
    assert rig.disk is not None
    rig.save([1, 2, 3], DISK)
    rig.finish()
    rig.disk.reads.close()
    rig.disk.writes.close()
    rig.save([4, 5, 6], DISK)
    rig.load(1, [1, 2, 3], Level.DISK, [11, 12, 13])
    rig.poll()
    rig.disk.reads.wait_for(1)
    rig.disk.writes.wait_for(4)
    closing = threading.Thread(target=rig.transfers.close)
    closing.start()
    eventually(lambda: all(map(is_shut, (rig.transfers._readers, rig.transfers._writers))), "nothing more is started")
    assert closing.is_alive()
    rig.disk.reads.open()
    rig.disk.writes.open()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert (rig.disk.reads.num_arrived, rig.disk.writes.num_arrived) == (1, 4)
    assert len(all_files(rig.disk.space.path.parent)) == 4
    assert not temporary_files(rig.disk.space.path)
    rig.transfers.close()  # no effect the second time


# Memory that is allocated in the background


def test_reads_wait_for_memory_that_is_being_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.levels.transfers.MIN_EARLY_BYTES", 1)  # blocks of the fake runner are tiny
    rig = TransferRig(tmp_path / "kv", has_host=False)
    rig.save([1, 2], DISK)
    rig.finish()
    is_allowed = threading.Event()
    has_begun = threading.Event()

    def allocate(num_bytes: int) -> memoryview:
        has_begun.set()
        assert is_allowed.wait(HANG_S)
        return rig.block_io.allocate(num_bytes)

    slots = Slots(allocate, rig.block_io.sizes, (2, 2, 2), is_early=True)
    slots.allocate_all()
    saving = Slots(rig.block_io.allocate, rig.block_io.sizes, PLENTY)
    transfers = Transfers(rig.block_io, None, rig.disk, read_slots=slots, save_slots=saving, num_readers=2)
    reads = tuple(Read(1, block(n), Level.DISK) for n in (1, 2))
    assert has_begun.wait(HANG_S)
    transfers.start(StepPlan((), (), (), reads=reads), is_busy=False)
    assert transfers.poll(is_busy=False) == []
    transfers.wait(0.001)
    is_allowed.set()
    done: list[Done] = []
    while transfers.has_work:
        done += transfers.poll(is_busy=False)
        transfers.wait(0.001)
    (ended,) = done
    assert isinstance(ended, ReadDone)
    assert (ended.read_id, ended.failures) == (1, frozenset())
    transfers.close()
    rig.close()


# Everything at random


class RandomTransfers:
    """Does random things with a rig, and knows what is stored as the scheduler would."""

    def __init__(self, rig: TransferRig, random: Random) -> None:
        self.rig = rig
        self.random = random
        self.stored: dict[Level, set[int]] = {Level.HOST: set(), Level.DISK: set()}
        self.saving: set[tuple[int, Level]] = set()
        self.loading: dict[int, dict[int, int]] = {}  # load id -> number -> block that it is loaded into
        self.num_checked = 0  # pieces that were loaded
        self._free = list(range(32, 64))
        self._numbers = {block(number): number for number in range(30)}
        self._num_loads = 0

    def settle(self, done: list[Done]) -> None:
        for load_id, failures in loaded(done).items():
            targets = self.loading.pop(load_id)
            for number, at in targets.items():
                if block(number) not in failures:
                    assert self.rig.has(MemoryRef(MemoryKind.BLOCK, at), number)
                    self.num_checked += 1
            self._free.extend(targets.values())
        for level, numbers in self.stored.items():
            found = {self._numbers[content] for content in saved(done, level)}
            failed = {self._numbers[content] for content in saved(done, level, is_saved=False)}
            numbers |= found
            assert {(number, level) for number in found | failed} <= self.saving
            self.saving -= {(number, level) for number in found | failed}
        self.stored[Level.DISK] -= {self._numbers[content] for content in lost(done)}

    def save(self) -> None:
        saves = []
        for number in self.random.sample(range(30), 3):
            absent = [
                level for level in BOTH if number not in self.stored[level] and (number, level) not in self.saving
            ]
            levels = tuple(level for level in absent if self.random.random() < 0.7)
            if levels:
                self.saving |= {(number, level) for level in levels}
                ref = MemoryRef(MemoryKind.BLOCK, 1 + number)
                self.rig.fill(ref, number)
                saves.append(Save(block(number), ref, levels))
        self.rig.start(saves=saves)

    def load(self) -> None:
        on_host, on_disk = self.stored[Level.HOST], self.stored[Level.DISK]
        known = [(n, Level.HOST) for n in sorted(on_host)] + [(n, Level.DISK) for n in sorted(on_disk - on_host)]
        chosen = self.random.sample(known, min(len(known), self.random.randint(1, 4)))
        if chosen and len(self._free) > 4:
            self._num_loads += 1
            targets = {number: self._free.pop(self.random.randrange(len(self._free))) for number, _ in chosen}
            self.loading[self._num_loads] = targets
            refs = [(n, level, MemoryRef(MemoryKind.BLOCK, targets[n])) for n, level in chosen]
            loads = [Load(self._num_loads, block(n), level, ref) for n, level, ref in refs]
            self.rig.start(loads=loads, is_busy=self.random.random() < 0.5)

    def drop(self) -> None:
        for number in self.random.sample(sorted(self.stored[Level.HOST]), min(1, len(self.stored[Level.HOST]))):
            self.stored[Level.HOST].remove(number)
            self.rig.start(drops=[block(number)])

    def damage(self) -> None:
        assert self.rig.disk is not None
        files = sorted(file.path for file in all_files(self.rig.disk.space.path.parent))
        if files:
            os.truncate(self.random.choice(files), self.random.randrange(BLOCK_FILE_BYTES))

    def clear(self) -> None:
        self.rig.transfers.clear()
        for numbers in self.stored.values():
            numbers.clear()
        self.saving.clear()

    def finish(self) -> None:
        self.settle(self.rig.finish())

    def poll(self) -> None:
        self.settle(self.rig.poll(is_busy=self.random.random() < 0.5))


@pytest.mark.parametrize("seed", range(30))
def test_random_transfers(make_rig: MakeRig, seed: int) -> None:
    """In any order, with few buffers: loads never bring wrong content, and nothing is left over."""
    random = Random(seed)
    rig = make_rig(
        is_late=random.random() < 0.5,
        seed=seed,
        max_bytes=12 * BLOCK_FILE_BYTES,
        read_counts=(random.randint(1, 6),) * 3,
        save_counts=(random.randint(1, 6),) * 3,
        host_counts=(8, 8, 8),
        num_readers=random.randint(1, 4),
    )
    world = RandomTransfers(rig, random)
    actions = {
        world.save: 8.0, world.load: 8.0, world.drop: 2.0, world.clear: 0.3, world.finish: 2.0, world.poll: 10.0,
    }  # fmt: skip
    for number in range(150):
        if number % 40 == 20:
            world.finish()
            world.save()
            world.finish()
            world.damage()
        (action,) = random.choices(list(actions), list(actions.values()))
        action()
    world.finish()
    assert not world.loading
    assert not world.saving
    assert world.num_checked > 10
    rig.check_buffers(num_stored=len(world.stored[Level.HOST]))
