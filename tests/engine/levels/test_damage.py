"""Thousands of damaged files: none is used, all are counted, and nothing crashes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.step import Content, MemoryKind
from quire.engine.levels import block_file
from quire.engine.levels.block_file import DIGEST_BYTES, DamagedBlock, Fault, check_block, file_bytes, write_block
from quire.engine.levels.disk_store import DiskStore
from tests.engine.levels.contents import FACTS, PAYLOAD_BYTES, make_content, make_payload, new_buffer, read, read_back
from tests.selection import mostly_nightly

PAYLOAD_AT = file_bytes(128, 0) - DIGEST_BYTES
VERSION_AT = 8


class Damager:
    """Damages files of a store, in a way that a seed chooses."""

    def __init__(self, store: DiskStore, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = store
        self.swapped: list[str] = []
        self.faults: set[Fault] = set()  # of damaged bytes

    def flip_bits(self, data: bytearray) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2, 20])):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def flip_payload(self, data: bytearray) -> None:
        data[self.rng.randrange(PAYLOAD_AT, len(data))] ^= 1 << self.rng.randrange(8)

    def truncate(self, data: bytearray) -> None:
        del data[self.rng.randrange(len(data)) :]

    def extend(self, data: bytearray) -> None:
        data += self.rng.randbytes(self.rng.randrange(1, 300))

    def cut_out(self, data: bytearray) -> None:
        start = self.rng.randrange(len(data) - 1)
        del data[start : start + self.rng.randrange(1, 200)]

    def zero(self, data: bytearray) -> None:
        data[:] = bytes(self.rng.choice([0, 1, 88, len(data)]))

    def zero_page(self, data: bytearray) -> None:
        start = self.rng.randrange(len(data) - 64)
        data[start:] = bytes(len(data) - start)

    def randomize(self, data: bytearray) -> None:
        data[:] = self.rng.randbytes(len(data))

    def change_version(self, data: bytearray) -> None:
        data[VERSION_AT : VERSION_AT + 2] = self.rng.choice([0, 2, 3, 65535]).to_bytes(2, "little")

    def swap(self, path: str) -> None:
        if self.swapped:
            other = self.swapped.pop()
            os.rename(path, f"{path}.x")
            os.rename(other, path)
            os.rename(f"{path}.x", other)
        else:
            self.swapped.append(path)

    def write_other(self, path: str, content: Content) -> None:
        """Write a valid file with one thing that is not as its reader expects."""
        space, num_bytes = self.store.space.digest, PAYLOAD_BYTES
        match self.rng.randrange(6):
            case 0:
                space = self.rng.randbytes(32)
            case 1:
                content = content._replace(key=self.rng.randbytes(16))
            case 2:
                content = content._replace(parent_key=self.rng.randbytes(16))
            case 3:
                content = content._replace(tokens=self.rng.randbytes(4 * self.rng.choice([1, 31, 32, 33])))
            case 4:
                content = content._replace(kind=self.rng.choice([MemoryKind.WINDOW, MemoryKind.STATE]))
            case _:
                num_bytes += self.rng.choice([-1, 1, 1000])
        write_block(path, space, content, make_payload(content, num_bytes))

    def replace(self, path: str, good: str) -> None:
        """Put something that is not a file in place of one."""
        os.unlink(path)
        match self.rng.randrange(4):
            case 0:
                os.mkdir(path)
            case 1:
                os.mkfifo(path)
            case 2:
                os.symlink(good, path)
            case _:
                os.symlink(f"{path}.nothing", path)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the files are written in seconds


def damage_one(damager: Damager, number: int, content: Content, good: str) -> None:
    path = damager.store.space.file(content.kind, content.key)
    edits: list[Callable[[bytearray], None]] = [
        *(damager.flip_bits, damager.flip_bits, damager.flip_payload, damager.truncate, damager.extend),
        *(damager.cut_out, damager.zero, damager.zero_page, damager.randomize, damager.change_version),
    ]
    way = number % (len(edits) + 4)
    if way < len(edits):
        data = bytearray(Path(path).read_bytes())
        before = bytes(data)
        while data == before:
            edits[way](data)
        Path(path).write_bytes(data)
        with pytest.raises(DamagedBlock) as error:
            check_block(path)
        damager.faults.add(error.value.fault)
    elif way == len(edits):
        damager.swap(path)
    elif way == len(edits) + 1:
        damager.replace(path, good)
    else:
        damager.write_other(path, content)


@pytest.mark.usefixtures("unsynced")
# Files are swapped in pairs: every 14th.
@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("num_files", mostly_nightly([1008, 10_000], 1))
def test_no_damaged_file_is_used(
    num_files: int, has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(block_file, "load_library", lambda: None)
    store = DiskStore(tmp_path, FACTS, 1 << 40)
    contents = [make_content(number) for number in range(num_files)]
    for content in contents:
        assert store.write(content, make_payload(content)).is_stored
    good = make_content(num_files)
    store.write(good, make_payload(good))
    damager = Damager(store, seed=1)
    for number, content in enumerate(contents):
        damage_one(damager, number, content, store.space.file(good.kind, good.key))
    assert not damager.swapped
    assert damager.faults == {*Fault} - {Fault.UNREADABLE, Fault.MISSING, Fault.NOT_A_FILE, Fault.OTHER}

    # A restart: the scan finds damaged headers and removes the files.
    again = DiskStore(tmp_path, FACTS, 1 << 40)
    found = list(again.scan())
    assert set(found) - {good}  # of these, only the payload is damaged

    # Every read fails. The scan removed all but those that it may not remove.
    caught: set[Fault] = set()
    for content in contents:
        with pytest.raises(DamagedBlock) as error:
            read(again, content, new_buffer())
        caught.add(error.value.fault)
    assert read_back(again, good)
    assert caught == {Fault.MISSING, Fault.DIGEST, Fault.OTHER, Fault.NEWER_VERSION, Fault.NOT_A_FILE}
