"""The checksum of cached content: the same by C and numpy, and different after damage."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from quire.engine.levels import block_file as module
from quire.engine.levels.block_file import CHECKSUM_BYTES, ROW_BYTES, Sums, checksum, load_library

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
    return lambda content: checksum(memoryview(content))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 31, 32, 33, 63, 64, 100, 4096, 4097, 70_001])
def test_it_is_what_its_definition_says(compute: Compute, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert compute(content) == by_definition(content)
    assert len(compute(content)) == CHECKSUM_BYTES


def test_large_words_and_long_content(compute: Compute) -> None:
    content = b"\xff" * (1 << 20)  # several parts, if numpy adds them
    rows = len(content) // ROW_BYTES
    one, total = rows * (2**32 - 1), (rows * (rows + 1) // 2) * (2**32 - 1)
    assert compute(content) == struct.pack("<16Q", *[one % 2**64] * 8, *[total % 2**64] * 8)


def test_parts_give_the_same_as_the_whole(compute: Compute) -> None:
    rng = random.Random(1)
    content = rng.randbytes(10_007)
    for _ in range(20):
        total, at = Sums(), 0
        while at < len(content):
            size = rng.randrange(0, 80) * ROW_BYTES
            total.add(memoryview(content)[at : at + size])
            at += size
        assert total.packed() == compute(content)


def test_every_single_bit_matters(compute: Compute) -> None:
    content = bytearray(random.Random(2).randbytes(200))
    intact = compute(bytes(content))
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        assert compute(bytes(content)) != intact
        content[bit // 8] ^= 1 << bit % 8


def test_every_pair_of_highest_bits_matters() -> None:
    """Sums modulo a power of two are weak there."""
    content = bytearray(256)
    intact = checksum(memoryview(content))
    tops = range(3, len(content), 4)
    for first in tops:
        for second in tops:
            if first < second:
                content[first] ^= 0x80
                content[second] ^= 0x80
                assert checksum(memoryview(content)) != intact
                content[first] ^= 0x80
                content[second] ^= 0x80


@pytest.mark.parametrize("size", [4, 32, 64, 512])
def test_moved_content_is_found(size: int) -> None:
    content = random.Random(3).randbytes(4096)
    intact = checksum(memoryview(content))
    for at in range(0, len(content) - 2 * size, size):
        swapped = content[:at] + content[at + size : at + 2 * size] + content[at : at + size] + content[at + 2 * size :]
        assert checksum(memoryview(swapped)) != intact
        zeroed = content[:at] + bytes(size) + content[at + size :]
        assert checksum(memoryview(zeroed)) != intact
    assert checksum(memoryview(content[size:] + content[:size])) != intact
