"""The disk store: content, budget, eviction order, other processes, and everything that can fail."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.core.step import Content, MemoryKind
from quire.engine.levels import block_file
from quire.engine.levels.block_file import DamagedBlock, Fault, file_bytes
from quire.engine.levels.disk_store import PAUSE_S, RESCAN_S, STALE_S, DiskStore, Written, root_secret
from quire.errors import CacheFolderError
from tests.engine.levels.contents import (
    FACTS,
    PAYLOAD_BYTES,
    all_files,
    make_content,
    make_payload,
    new_buffer,
    read,
    read_back,
    temporary_files,
)
from tests.waiting import ManualClock

FILE_BYTES = file_bytes(128, PAYLOAD_BYTES)
PLENTY = 1 << 30


def new_store(root: Path, num_files: int = 1000, **settings: object) -> DiskStore:
    """A store with room for so many files."""
    given: dict[str, object] = {"facts": FACTS, "max_bytes": num_files * FILE_BYTES, "clock": ManualClock(), **settings}
    return DiskStore(root, **given)  # type: ignore[arg-type]


def write(store: DiskStore, number: int) -> Written:
    content = make_content(number)
    return store.write(content, make_payload(content))


def write_all(store: DiskStore, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert write(store, number) == Written(True, ())


def numbers_of(contents: Sequence[Content]) -> list[int]:
    return [int.from_bytes(content.parent_key, "big") for content in contents]


def stored_numbers(root: Path, facts: dict[str, str] = FACTS) -> list[int]:
    """The numbers of the content of a space, least recently used first."""
    return numbers_of(list(DiskStore(root, facts, PLENTY).scan()))


def is_missing(store: DiskStore, number: int) -> bool:
    try:
        read(store, make_content(number), new_buffer())
    except DamagedBlock as damage:
        return damage.fault is Fault.MISSING
    return False


# Content


def test_content_survives_a_restart(tmp_path: Path) -> None:
    contents = [
        make_content(1),
        make_content(2, MemoryKind.WINDOW),
        make_content(3, MemoryKind.STATE, 5),
        make_content(4, num_tokens=1),
    ]
    store = new_store(tmp_path)
    for content in contents:
        assert store.write(content, make_payload(content)).is_stored
    again = new_store(tmp_path)
    assert list(again.scan()) == contents
    assert all(read_back(again, content) for content in contents)
    assert (len(again.index.entries), again.index.num_bytes) == (4, sum(file.size for file in all_files(tmp_path)))
    assert not again.is_paused


def test_content_that_is_stored_is_not_written_again(tmp_path: Path) -> None:
    store, other = new_store(tmp_path), new_store(tmp_path)
    write_all(store, [1, 2])
    before = all_files(tmp_path)
    inodes = {os.stat(file.path).st_ino for file in before}
    write_all(other, [1])
    assert {os.stat(file.path).st_ino for file in all_files(tmp_path)} == inodes
    assert [file.path for file in all_files(tmp_path)] == [before[1].path, before[0].path]  # 1 was used
    os.truncate(before[0].path, 10)
    write_all(other, [1])
    assert read_back(other, make_content(1))


def test_remove_and_clear(tmp_path: Path) -> None:
    store, other = new_store(tmp_path), new_store(tmp_path, facts={**FACTS, "dtype": "float32"})
    write_all(store, range(5))
    write_all(other, [9])
    store.remove(make_content(3))
    store.remove(make_content(3))  # it is gone already
    assert len(store.index.entries) == 4
    store.clear()
    store.clear()
    assert (len(store.index.entries), stored_numbers(tmp_path)) == (0, [])
    assert read_back(other, make_content(9))


# The budget


def test_the_least_recently_used_files_are_evicted(tmp_path: Path) -> None:
    store = new_store(tmp_path, 4)
    write_all(store, [1, 2, 3, 4])
    assert read_back(store, make_content(1))
    write_all(store, [2])  # stored already: counts as a use
    assert write(store, 5) == Written(True, (make_content(3),))
    assert write(store, 6) == Written(True, (make_content(4),))
    assert stored_numbers(tmp_path) == [1, 2, 5, 6]
    assert is_missing(store, 3)


def test_the_order_survives_a_restart(tmp_path: Path) -> None:
    store = new_store(tmp_path, 8)
    write_all(store, range(8))
    for number in (5, 0, 3):
        assert read_back(store, make_content(number))
    again = new_store(tmp_path, 8)
    assert numbers_of(list(again.scan())) == [1, 2, 4, 6, 7, 5, 0, 3]
    gone = [numbers_of(write(again, number).gone) for number in range(100, 107)]
    assert gone == [[1], [2], [4], [6], [7], [5], [0]]


def test_the_budget_is_for_all_spaces(tmp_path: Path) -> None:
    facts = {**FACTS, "weights": "another"}
    first, second = new_store(tmp_path, 6), new_store(tmp_path, 6, facts=facts)
    write_all(first, [1, 2, 3])
    write_all(second, [11, 12, 13, 14])
    assert (stored_numbers(tmp_path), stored_numbers(tmp_path, facts)) == ([2, 3], [11, 12, 13, 14])
    assert len(second.index.entries) == 6


@pytest.mark.parametrize("num_bytes", [0, 1, 500, PAYLOAD_BYTES, 3000, 100_000])
def test_the_folder_never_exceeds_its_budget(tmp_path: Path, num_bytes: int) -> None:
    store = DiskStore(tmp_path, FACTS, 20_000)
    for number in range(40):
        content = make_content(number)
        payload = make_payload(content, num_bytes if number % 2 else 2000)
        assert store.write(content, payload).is_stored == (payload.nbytes < 20_000)
        sizes = [file.size for file in all_files(tmp_path)]
        assert sum(sizes) <= 20_000
        assert (store.index.num_bytes, len(store.index.entries)) == (sum(sizes), len(sizes))


def test_files_with_other_names_are_never_deleted(tmp_path: Path) -> None:
    store = new_store(tmp_path, 2)
    write_all(store, [1, 2])
    folder = store.space.path
    foreign = [tmp_path / "photo.jpg", folder / "notes.txt", Path(all_files(tmp_path)[0].path).parent / "precious"]
    for path in foreign:
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    again = new_store(tmp_path, 2)
    assert len(list(again.scan())) == 2
    for number in range(20):
        assert write(again, number).is_stored
    again.clear()
    assert all(path.stat().st_size == 100_000 for path in foreign)


# Other processes: a second store in this process knows as little about the first as one in another process


def test_writes_of_others_are_noticed_by_the_next_listing(tmp_path: Path) -> None:
    clock = ManualClock()
    store, other = new_store(tmp_path, 10, clock=clock), new_store(tmp_path, 10)
    write_all(store, [1])
    write_all(other, range(100, 109))
    clock.now_s = RESCAN_S - 1
    write_all(store, [2, 3])
    assert len(all_files(tmp_path)) == 12  # over the budget by what the other wrote since
    clock.now_s = RESCAN_S
    assert write(store, 4) == Written(True, (make_content(1),))
    assert len(all_files(tmp_path)) == 10


def test_a_use_by_another_process_saves_a_file(tmp_path: Path) -> None:
    store, other = new_store(tmp_path, 3), new_store(tmp_path, 3)
    write_all(store, [1, 2, 3])
    assert read_back(other, make_content(1))
    assert write(store, 4) == Written(True, (make_content(2),))
    assert stored_numbers(tmp_path) == [3, 1, 4]


def test_a_file_that_another_process_evicted(tmp_path: Path) -> None:
    clock = ManualClock()
    store, other = new_store(tmp_path, 4, clock=clock), new_store(tmp_path, 4)
    write_all(store, [1, 2, 3])
    for number in (1, 3):
        other.remove(make_content(number))
    assert is_missing(store, 1)
    clock.now_s = RESCAN_S
    assert write(store, 4) == Written(True, (make_content(3),))  # 1 was reported by the read
    # the same when the victim of an eviction is gone: no listing is due
    write_all(store, [5, 6])
    other.remove(make_content(2))
    assert write(store, 7) == Written(True, (make_content(2),))


WRITER = """
import random, sys
from pathlib import Path
from quire.engine.levels import disk_store
from quire.engine.levels.block_file import DamagedBlock, Fault
from tests.engine.levels.contents import FACTS, make_content, make_payload, read_back

disk_store.RESCAN_S = disk_store.RESCAN_COST = 0
store = disk_store.DiskStore(Path(sys.argv[1]), FACTS, int(sys.argv[2]))
rng = random.Random(sys.argv[3])
num_gone = 0
for _ in range(400):
    content = make_content(rng.randrange(60))
    if rng.random() < 0.6:
        result = store.write(content, make_payload(content))
        assert result.is_stored, result
        num_gone += len(result.gone)
    else:
        try:
            assert read_back(store, content)
        except DamagedBlock as damage:
            assert damage.fault is Fault.MISSING, damage
print(num_gone)
"""


def test_processes_that_write_and_evict_in_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(20 * FILE_BYTES)]
    processes = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert int(out) > 0
    files = all_files(tmp_path)
    assert 0 < len(files) <= 20 + len(processes)  # a write of each may have been in progress
    store = new_store(tmp_path, 20)
    assert all(read_back(store, content) for content in list(store.scan()))
    assert len(all_files(tmp_path)) == len(files)
    assert not temporary_files(tmp_path)


# What the scan finds


def test_the_scan_removes_temporary_files_of_dead_processes(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    write_all(store, [1])
    folder = Path(all_files(tmp_path)[0].path).parent
    places = [folder / ".tmp-1-a", folder / ".tmp-1-b", tmp_path / ".tmp-1-c", store.space.path / ".tmp-1-d"]
    for path in places:
        path.write_bytes(bytes(100))
        if not path.name.endswith("a"):
            os.utime(path, (path.stat().st_mtime - STALE_S - 60,) * 2)
    assert numbers_of(list(store.scan())) == [1]
    assert temporary_files(tmp_path) == [folder / ".tmp-1-a"]


def test_a_file_that_cannot_be_read_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(tmp_path)
    write_all(store, [1])

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(block_file, "load_library", lambda: None)
        patched.setattr(os, "pread", fail)
        with pytest.raises(DamagedBlock):
            read(store, make_content(1), new_buffer())
    assert read_back(store, make_content(1))


# Writes that fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_pauses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    clock = ManualClock()
    store = new_store(tmp_path, clock=clock)
    write_all(store, [1])
    tries: list[int] = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", fail)
        for _ in range(100):
            assert write(store, 3) == Written(False, ())
        assert len(tries) == 1
        reason = f"cached content cannot be saved to {tmp_path}: {os.strerror(number)}; it is tried again after 30 s"
        assert store.is_paused
        assert read_back(store, make_content(1))  # reads go on
        clock.now_s += PAUSE_S
        assert write(store, 3) == Written(False, ())
        assert len(tries) == 2
        assert caplog.messages == [reason]
    assert len(all_files(tmp_path)) == 1
    assert not temporary_files(tmp_path)
    clock.now_s += PAUSE_S
    write_all(store, [2])
    assert caplog.messages[1:] == [f"cached content is saved to {tmp_path} again"]
    assert not store.is_paused


def test_evictions_before_a_failed_write_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(tmp_path, 2)
    write_all(store, [1, 2])
    monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    result = write(store, 3)
    assert result == Written(False, (make_content(1),))
    monkeypatch.undo()
    assert stored_numbers(tmp_path) == [2]
    assert (len(store.index.entries), store.index.num_bytes) == (1, FILE_BYTES)  # nothing stays reserved


def test_a_directory_with_the_name_of_a_file_does_not_pause_writes(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    write_all(store, [1])
    path = store.space.file(MemoryKind.BLOCK, make_content(2).key)
    os.makedirs(f"{path}/inside")
    assert not write(store, 2).is_stored
    write_all(store, [3])
    assert not temporary_files(tmp_path)
    assert os.path.isdir(f"{path}/inside")


def test_folders_that_were_deleted_are_created_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = new_store(root)
    write_all(store, [1, 2])
    shutil.rmtree(store.space.path)
    assert is_missing(store, 1)
    write_all(store, [1])
    assert stored_numbers(root) == [1]
    assert (store.space.path / "facts.json").exists()


def test_a_root_that_was_deleted_is_created_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "kv"
    secret = root_secret(root)
    store = new_store(root)
    write_all(store, [1, 2])
    shutil.rmtree(root)
    assert write(store, 3).is_stored
    assert caplog.messages == [f"the cache folder {root} was deleted: creating it again"]
    assert root.stat().st_mode & 0o777 == 0o700
    assert root_secret(root) == secret  # otherwise the next server would not find the files
    assert is_missing(store, 1)
    assert write(store, 4).gone == (make_content(2),)
    assert stored_numbers(root) == [3, 4]
    assert len(store.index.entries) == 2


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(tmp_path)

    def fail(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(CacheFolderError, match="cannot be read: Permission denied"):
        list(store.scan())
    assert not write(store, 1).is_stored


REAL_DISK = """
import subprocess, sys
from pathlib import Path
from quire.engine.levels.block_file import DamagedBlock
from quire.engine.levels.disk_store import root_secret
from quire.engine.levels.disk_store import PAUSE_S, DiskStore
from quire.errors import CacheFolderError
from tests.engine.levels.contents import FACTS, all_files, make_content, make_payload, read_back, temporary_files
from tests.waiting import ManualClock

mount = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", mount], check=True)
root, clock = Path(mount) / "kv", ManualClock()
store = DiskStore(root, FACTS, 1 << 30, clock=clock)
secret = root_secret(root)
stored = []
for number in range(100):
    content = make_content(number)
    result = store.write(content, make_payload(content, 40_000))
    if not result.is_stored:
        break
    stored.append(content)
assert 10 < len(stored) < 30 and not temporary_files(root)
assert store.write(content, make_payload(content, 40_000)) == (False, ()) and store.is_paused
assert list(store.scan()) == stored and all(read_back(store, one, 40_000) for one in stored)
for gone in (stored.pop(0), stored.pop(0)):
    store.remove(gone)
clock.now_s += PAUSE_S
assert store.write(content, make_payload(content, 40_000)).is_stored
stored.append(content)

subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
clock.now_s += PAUSE_S
again = DiskStore(root, FACTS, 1 << 30, clock=clock)
assert list(again.scan()) == stored and root_secret(root) == secret
assert all(read_back(again, one, 40_000) for one in stored)
result = again.write(make_content(500), make_payload(make_content(500)))
assert not result.is_stored and again.is_paused, result
try:
    DiskStore(root, {"other": "facts"}, 1 << 30)
except CacheFolderError as error:
    assert "Read-only file system" in str(error), error
else:
    raise AssertionError("a space was created")
print("done")
"""


def test_a_disk_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system does not let a test mount a file system")
    command = ["unshare", "-rm", sys.executable, "-c", textwrap.dedent(REAL_DISK), str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount: " in outcome.stderr:
        pytest.skip(f"this system does not let a test mount a file system: {outcome.stderr[-200:]}")
    assert (outcome.stdout, outcome.returncode) == ("done\n", 0), outcome.stderr
