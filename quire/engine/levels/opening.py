"""Opens the levels of an engine: host memory and a folder on disk.

The speed of prompts and of loads is measured here, to load only what would take longer to compute.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat
from pathlib import Path

from quire.backends.base import BlockIO
from quire.core.cache.context import KEY_BYTES
from quire.core.levels.levels import Levels
from quire.core.levels.lower_level import LevelSpeed, LowerLevel, PieceCounts, PieceSizes
from quire.core.levels.saves import SaveLimits
from quire.core.step import Content, MemoryKind, MemoryRef
from quire.core.values import Level, SamplingParams
from quire.engine.engine import Engine
from quire.engine.levels.block_file import TEMPORARY_PREFIX, BlockRead, DamagedBlock, read_blocks, write_block
from quire.engine.levels.cache_folder import Space, open_root, root_secret
from quire.engine.levels.disk_store import DiskStore, reads_per_thread
from quire.engine.levels.transfers import HostStore, Slots, Transfers
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes

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


def measure_import(block_io: BlockIO, num_blocks: int) -> LevelSpeed:
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


def measure_disk(space: Space, size: int, num_readers: int) -> LevelSpeed | None:
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


def _speed(single_s: float, single_bytes: int, total_s: float, total_bytes: int) -> LevelSpeed:
    """Return the speed of many pieces, and the latency: what one piece takes beyond that speed."""
    bytes_per_s = total_bytes / max(total_s, 1e-6)
    latency_s = max(single_s - single_bytes / bytes_per_s, 0.0)
    return LevelSpeed(round(latency_s * 1e9), max(round(bytes_per_s), 1))


def in_sequence(one: LevelSpeed, other: LevelSpeed) -> LevelSpeed:
    """Return the speed of a load that takes two copies."""
    bytes_per_s = 1 / (1 / one.bytes_per_s + 1 / other.bytes_per_s)
    return LevelSpeed(one.latency_ns + other.latency_ns, max(round(bytes_per_s), 1))


READ_BYTES = 256 << 20  # of buffers for content that is read from files: all that reads hold, also those that hang
SAVE_BYTES = 128 << 20  # of buffers that wait to be written
MIN_PIECES = 2
NUM_READERS = max(1, min(16, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """Sizes in bytes; 0: the level is off."""

    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None  # of the disk level

    @property
    def is_any(self) -> bool:
        return bool(self.host_bytes or self.disk_bytes)

    def check_fits(self, num_bytes: int) -> None:
        """Refuse levels that have no room for a few pieces."""
        for name, given in (("host_cache", self.host_bytes), ("disk_cache", self.disk_bytes)):
            if 0 < given < num_bytes:
                there, needed = compared_sizes(given, num_bytes)
                raise InvalidRequest(f"{name} = {there} is too small for this model: it needs at least {needed}")


class OpenedLevels:
    """The levels of one engine, before and after its scheduler is made."""

    def __init__(
        self,
        settings: LevelSettings,
        block_io: BlockIO,
        pool_sizes: PieceCounts,
        model: str,
        arithmetic: Callable[[], Mapping[str, str]],
    ) -> None:
        """`pool_sizes`: blocks, window blocks and states of the runner. `arithmetic`: what determines their content."""
        self.block_io = block_io
        sizes = block_io.sizes
        self.secret = b""  # of the folder; empty: there is none
        self._host = self._disk = None
        self.levels: list[LowerLevel] = []
        self._slots: list[Slots] = []
        pieces = (sizes.block, sizes.window, sizes.state)
        settings.check_fits(MIN_PIECES * sum(pieces))
        if settings.host_bytes:
            counts = divide(settings.host_bytes, pieces, pool_sizes)
            self._slots.append(Slots(block_io.allocate, sizes, counts, is_early=True))
            self._host = HostStore(self._slots[-1])
            self.levels.append(LowerLevel(Level.HOST, pieces, counts))
        read_counts, save_counts = (
            at_most(divide(num_bytes, pieces, pool_sizes), pool_sizes) for num_bytes in (READ_BYTES, SAVE_BYTES)
        )
        if settings.disk_bytes and settings.folder is not None:
            self._disk = _open_disk(settings, model, arithmetic)
            self.secret = root_secret(settings.folder)
            self.levels.append(LowerLevel(Level.DISK, pieces, store_bytes=settings.disk_bytes, buffers=read_counts))
        # Of a model whose layers all have windows, window blocks.
        self._block_bytes, self._num_blocks = (
            (sizes.block, pool_sizes[0]) if sizes.block else (sizes.window, pool_sizes[1])
        )
        self.save_limits = SaveLimits(
            max_bytes=block_io.max_exports * self._block_bytes,
            idle_bytes=block_io.pieces_per_step * self._block_bytes,
            max_pending=sum(save_counts) + (4 * block_io.max_exports if self._host is not None else 0),
            max_writes=min(count for count in save_counts if count),
        )
        has_pinned = self._disk is not None and not block_io.is_host_memory  # which takes time to allocate
        self._slots.append(Slots(block_io.allocate, sizes, read_counts, is_early=has_pinned))
        self.transfers = Transfers(
            block_io,
            self._host,
            self._disk,
            read_slots=self._slots[-1],
            save_slots=Slots(block_io.allocate, sizes, save_counts),
            num_readers=NUM_READERS,
        )

    def start(self, levels: Levels) -> None:
        """Tell the cache what is on disk, and measure the speed of loads."""
        copies = measure_import(self.block_io, self._num_blocks)
        for level in self.levels:
            level.speed = copies
        if self._disk is not None:
            reads = measure_disk(self._disk.space, self._block_bytes, NUM_READERS)
            self.levels[-1].speed = copies if reads is None else in_sequence(reads, copies)
            levels.restore(Level.DISK, self._disk.scan())
        for level in self.levels:
            level.is_filled = levels.break_even(level) is not None
            if not level.is_filled:
                log.warning("nothing is saved to the %s cache: loads would take longer than computing", level.level)
        for slots in self._slots:
            slots.allocate_all()


def divide(num_bytes: int, sizes: PieceSizes, pool_sizes: PieceCounts) -> PieceCounts:
    """Divide memory among the kinds of pieces as the runner's own memory is divided; at least a few of each."""
    total = sum(size * count for size, count in zip(sizes, pool_sizes, strict=True))
    blocks, windows, states = (
        max(num_bytes * count // total, MIN_PIECES) if size else 0
        for size, count in zip(sizes, pool_sizes, strict=True)
    )
    return blocks, windows, states


def at_most(counts: PieceCounts, pool_sizes: PieceCounts) -> PieceCounts:
    """Limit buffers to the pieces of the runner: no more can be loaded or saved at the same time."""
    blocks, windows, states = map(min, counts, pool_sizes)
    return blocks, windows, states


def _open_disk(settings: LevelSettings, model: str, arithmetic: Callable[[], Mapping[str, str]]) -> DiskStore:
    assert settings.folder is not None
    open_root(settings.folder)
    secret = sha256(root_secret(settings.folder)).hexdigest()[:16]  # keys depend on it
    return DiskStore(settings.folder, {**arithmetic(), "secret": secret}, settings.disk_bytes, name=model)
