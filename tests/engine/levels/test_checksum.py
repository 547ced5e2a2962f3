"""The checksum of cached content: by C and by numpy it is what its definition says."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from quire.engine.levels import block_file as module
from quire.engine.levels.block_file import ROW_BYTES, checksum, load_library

Compute = Callable[[bytes], bytes]


def by_definition(content: bytes) -> bytes:
    words = struct.unpack(f"<{-(-len(content) // ROW_BYTES) * 8}I", content + bytes(-len(content) % ROW_BYTES))
    sums, totals = [0] * 8, [0] * 8
    for index, word in enumerate(words):
        sums[index % 8] = (sums[index % 8] + word) % 2**64
        totals[index % 8] = (totals[index % 8] + sums[index % 8]) % 2**64
    return struct.pack("<16Q", *sums, *totals)


@pytest.fixture(params=["C", "numpy"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compute:
    if request.param == "C":
        assert load_library() is not None, "the C library is not built"
    else:
        monkeypatch.setattr(module, "load_library", lambda: None)
    return lambda content: checksum(memoryview(bytearray(content)))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 31, 32, 33, 63, 64, 100, 4096, 4097, 70_001])
def test_it_is_what_its_definition_says(compute: Compute, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert compute(content) == by_definition(content)


def test_large_words_and_long_content(compute: Compute) -> None:
    content = b"\xff" * (1 << 20)  # several parts, if numpy adds them
    rows = len(content) // ROW_BYTES
    one, total = rows * (2**32 - 1), (rows * (rows + 1) // 2) * (2**32 - 1)
    assert compute(content) == struct.pack("<16Q", *[one % 2**64] * 8, *[total % 2**64] * 8)
