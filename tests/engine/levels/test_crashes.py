"""kill -9 of a process that writes: the next scan finds whole files only."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from quire.engine.levels.block_file import file_bytes
from quire.engine.levels.disk_store import STALE_S, DiskStore
from tests.engine.levels.contents import FACTS, all_files, read_back, temporary_files
from tests.engine.levels.crash_child import NUM_CONTENTS, PAYLOAD_BYTES

NUM_KILLS = 100
FILE_BYTES = file_bytes(128, PAYLOAD_BYTES)
MAX_BYTES = 20 * FILE_BYTES  # children evict, too


class Children:
    """Starts children that write until they are killed."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "tests.engine.levels.crash_child", str(root), str(MAX_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def run(self, seed: int, num_calls: int) -> None:
        """Run one child until it kills itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed} {num_calls}\n".encode())
        output = b""
        while b"dead\n" not in output:
            data = self._process.stdout.read(4096)
            output += data
            assert data, output  # else the process that starts children is dead
            assert b"exited" not in output, output

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    children = Children(tmp_path / "kv")
    yield children
    children.close()


def check(root: Path) -> None:
    """Every file under a final name is whole, and the folder is within its budget, except for one temporary file."""
    store = DiskStore(root, FACTS, MAX_BYTES)
    found = list(store.scan())
    assert len(found) == len(all_files(root)) <= NUM_CONTENTS
    assert all(read_back(store, content, PAYLOAD_BYTES) for content in found)
    assert store.index.num_bytes <= MAX_BYTES


def test_killed_inside_a_system_call(children: Children, tmp_path: Path) -> None:
    rng = random.Random(1)
    num_temporary = []
    for seed in range(NUM_KILLS):
        children.run(seed, rng.randrange(1, 200))
        check(tmp_path / "kv")
        num_temporary.append(len(temporary_files(tmp_path)))
    assert num_temporary[-1] > 10  # children died in the middle of writes
    assert max(later - earlier for earlier, later in pairwise(num_temporary)) <= 1
    for path in temporary_files(tmp_path):
        os.utime(path, (path.stat().st_mtime - STALE_S - 60,) * 2)
    check(tmp_path / "kv")
    assert not temporary_files(tmp_path)
