"""Measures the speed of prompts and loads at the start, to load only what would take longer to compute."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat

from quire.backends.base import BlockIO
from quire.core.cache.chain import KEY_BYTES
from quire.core.levels.lower_tier import TierSpeed
from quire.core.step import Content, MemoryKind, MemoryRef
from quire.core.values import SamplingParams
from quire.engine.engine import Engine
from quire.engine.tiers.block_file import TEMPORARY_PREFIX, BlockRead, DamagedBlock, read_blocks, write_block
from quire.engine.tiers.cache_folder import Space
from quire.engine.tiers.disk_store import reads_per_thread

MIN_PROMPT, MAX_PROMPT, GROWTH = 32, 2048, 4  # tokens of the measured prompts, each so many times the one before
MAX_PREFILL_S = 0.25  # no longer prompt is measured after one took this long
MAX_PIECES = 16
NUM_ROUNDS = 8  # reads of each file
MAX_BYTES = 64 << 20

log = logging.getLogger(__name__)


def measure_prefill(make_engine: Callable[[int], Engine], max_tokens: int) -> int | None:
    """Return nanoseconds per prompt token, of the longest prompt that takes little time. None: too short to tell.

    `make_engine` makes an engine without cache for a prompt of this many tokens.
    """
    found = None
    num_tokens = MIN_PROMPT
    while num_tokens <= min(MAX_PROMPT, max_tokens):
        took_s = min(_time_prompt(make_engine, num_tokens) for _ in range(2))  # the first of a size may compile
        found = round(took_s * 1e9 / num_tokens)
        if took_s > MAX_PREFILL_S:
            break
        num_tokens *= GROWTH
    return found


def _time_prompt(make_engine: Callable[[int], Engine], num_tokens: int) -> float:
    engine = make_engine(num_tokens)
    engine.add(0, (0,) * num_tokens, SamplingParams(temperature=0, max_tokens=1))
    start_s = time.monotonic()
    while engine.has_work:
        engine.step()
    return time.monotonic() - start_s


def measure_import(block_io: BlockIO, num_blocks: int) -> TierSpeed:
    """Return the speed of copies from host memory into the runner's memory. Overwrites the first blocks.

    `num_blocks`: of the runner; window blocks, if no layer has others.
    """
    kind = MemoryKind.BLOCK if block_io.sizes.block else MemoryKind.WINDOW
    size = block_io.sizes.of(kind)
    count = max(1, min(MAX_PIECES, MAX_BYTES // size, num_blocks - 1))
    memory = block_io.allocate(count * size)
    buffers = [memory[at : at + size] for at in range(0, count * size, size)]
    targets = [MemoryRef(kind, number) for number in range(1, count + 1)]

    def copy(number: int) -> float:
        start_s = time.monotonic()
        pending = block_io.import_(targets[:number], buffers[:number])
        while not pending.is_done():
            time.sleep(0)
        return time.monotonic() - start_s

    copy(count)  # kernels are compiled, pages are touched
    return _speed(min(copy(1) for _ in range(3)), size, min(copy(count) for _ in range(3)), count * size)


def measure_disk(space: Space, size: int, num_readers: int) -> TierSpeed | None:
    """Return the speed of verified reads of new files. None if the folder cannot be written.

    New files are in the page cache, like all files if only the process was restarted. Loads correct the speed later.
    The files are temporary and outside of the budget: a measurement must not evict cached content.
    """
    count = max(2, min(MAX_PIECES, MAX_BYTES // size))
    content = Content(MemoryKind.BLOCK, os.urandom(KEY_BYTES), bytes(KEY_BYTES), b"")
    payload = memoryview(os.urandom(size))
    names = [f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}" for _ in range(count)]
    paths = [os.path.join(space.path, name) for name in names]

    def read(first: int, number: int) -> None:
        reads = [BlockRead(paths[at], content, buffers[at]) for at in range(first, min(first + number, count))]
        for damage in filter(None, read_blocks(reads, space.digest, time.time_ns())):
            raise damage

    try:
        for path in paths:
            write_block(path, space.digest, content, payload)
        buffers = [memoryview(bytearray(size)) for _ in paths]
        start_s = time.monotonic()
        read(0, 1)
        single_s = time.monotonic() - start_s
        number = reads_per_thread(count, size, num_readers)
        firsts = list(range(0, count, number))
        with ThreadPoolExecutor(num_readers) as readers:
            list(readers.map(read, firsts, repeat(number)))  # starts the threads
            start_s = time.monotonic()
            list(readers.map(read, firsts * NUM_ROUNDS, repeat(number)))
            total_s = time.monotonic() - start_s
        return _speed(single_s, size, total_s, size * count * NUM_ROUNDS)
    except (OSError, DamagedBlock) as error:
        log.warning("the speed of the cache folder could not be measured: %s", error)
        return None
    finally:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)


def _speed(single_s: float, single_bytes: int, total_s: float, total_bytes: int) -> TierSpeed:
    """Return the speed of many pieces, and the latency: what one piece takes beyond that speed."""
    bytes_per_s = total_bytes / max(total_s, 1e-6)
    latency_s = max(single_s - single_bytes / bytes_per_s, 0.0)
    return TierSpeed(round(latency_s * 1e9), max(round(bytes_per_s), 1))


def in_sequence(one: TierSpeed, other: TierSpeed) -> TierSpeed:
    """Return the speed of a load that takes two copies."""
    bytes_per_s = 1 / (1 / one.bytes_per_s + 1 / other.bytes_per_s)
    return TierSpeed(one.latency_ns + other.latency_ns, max(round(bytes_per_s), 1))
