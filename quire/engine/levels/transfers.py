"""Makes the saves and loads of plans: copies between the runner's memory, host memory and files.

    save    the runner's memory -> a buffer, before the step of the plan overwrites it -> a file, in a thread
    read    a file -> a buffer, in threads
    load    a buffer -> the runner's memory, beside steps that do not use the blocks

The host level needs no file: a save ends in its buffer, and a load starts from it. A read may take any time, or never
end: it holds its buffer and its thread until then.

Copies to and from the runner's memory are started by the engine's own thread, between steps. While requests run, only
a few are started per step, so that tokens are not delayed much. Threads only read and write files.

A `Buffer` is memory for one piece, taken from `Slots`. It is free again when its last user has released it: the host
level, a copy, or a thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire.backends.base import BlockIO, MemorySizes, PendingCopy
from quire.core.levels.lower_level import PieceCounts
from quire.core.step import Content, Load, MemoryKind, Read, Save, StepPlan
from quire.core.values import Level
from quire.engine.levels.block_file import FAULT_WORDS, DamagedBlock, Fault
from quire.engine.levels.disk_store import KEPT_FAULTS, DiskStore, Written, reads_per_thread
from quire.errors import CacheFolderError

MIN_EARLY_BYTES = 4096  # of a block; smaller ones, of models for tests, are never allocated early
MAX_CHUNK_SLOTS = 8192  # buffers of tiny models would take more memory as objects than as bytes
CHUNK_BYTES = 128 << 20  # allocated at once: pinning takes about a third of a second per gigabyte

log = logging.getLogger(__name__)
Allocate = Callable[[int], memoryview]


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one piece."""

    slots: Slots
    kind: MemoryKind
    memory: memoryview
    num_users: int = 0

    def release(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.slots.free[self.kind].append(self)


class Slots:
    """Buffers of one size per kind of memory.

    Each kind has its own memory, allocated in chunks: in a background thread after `allocate_all` if `is_early`,
    otherwise when they are first needed. `counts`: buffers of each kind.
    """

    def __init__(self, allocate: Allocate, sizes: MemorySizes, counts: PieceCounts, *, is_early: bool = False) -> None:
        self._allocate = allocate
        self._sizes = sizes
        self._num_left = list(counts)  # buffers that may still be allocated
        self.free: tuple[deque[Buffer], ...] = (deque(), deque(), deque())
        self.has_failed = False  # no more memory could be allocated: it makes no sense to wait for a buffer
        self._is_closed = False
        self._is_early = is_early and sizes.block + sizes.window >= MIN_EARLY_BYTES
        self._thread: threading.Thread | None = None

    def take(self, kind: MemoryKind) -> Buffer | None:
        """Return a buffer with one user, or None if all are in use or not allocated yet."""
        free = self.free[kind]
        if not free and not self._is_early:
            self._add_chunk(kind)
        if not free:
            return None
        buffer = free.popleft()
        buffer.num_users = 1
        return buffer

    def allocate_all(self) -> None:
        """Start to allocate everything, if it is to be allocated early."""
        if self._is_early:
            self._thread = threading.Thread(target=self._allocate_all, name="host-cache", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Allocate nothing more. Returns when no allocation is running."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()

    def _add_chunk(self, kind: MemoryKind) -> bool:
        size = self._sizes.of(kind)
        count = min(self._num_left[kind], max(min(CHUNK_BYTES // size, MAX_CHUNK_SLOTS), 1)) if size else 0
        if not count:
            return False
        try:
            chunk = self._allocate(count * size)
        except Exception:
            log.exception("%d bytes of host memory could not be allocated", count * size)
            self._num_left[kind] = 0
            self.has_failed = True
            return False
        self._num_left[kind] -= count
        self.free[kind].extend(Buffer(self, kind, chunk[at : at + size]) for at in range(0, count * size, size))
        return True

    def _allocate_all(self) -> None:
        for kind in MemoryKind:
            while not self._is_closed and self._add_chunk(kind):
                pass


CLOSE_S = 2.0  # that `close` waits for files in progress


class SaveDone(NamedTuple):
    content: Content
    level: Level
    is_saved: bool


class ReadDone(NamedTuple):
    read_id: int
    failures: frozenset[Content]
    read_ns: int  # from the start of the first read of a file to the end of the last


class LoadDone(NamedTuple):
    load_id: int
    failures: frozenset[Content]


class Lost(NamedTuple):
    """Content that is no longer on disk."""

    contents: tuple[Content, ...]


Done = SaveDone | ReadDone | LoadDone | Lost


@dataclass(slots=True)
class _Loading:
    """A load in flight."""

    num_left: int = 0  # pieces
    has_more: bool = False  # some pieces are not known yet
    failures: set[Content] = field(default_factory=set)


@dataclass(slots=True)
class _Reading:
    """A read in flight, or one whose content was not all loaded yet."""

    num_left: int = 0  # pieces that are not read yet
    buffers: dict[Content, Buffer] = field(default_factory=dict)  # that were read
    failures: set[Content] = field(default_factory=set)
    is_dropped: bool = False  # its content is not needed any more
    first_ns: int = 0
    last_ns: int = 0


_Import = tuple[Load, Buffer]


@dataclass(slots=True)
class _Importing:
    """Copies to the runner's memory in flight."""

    copy: PendingCopy
    pieces: Sequence[_Import]
    is_joined: bool = False  # steps wait for them on the device: for the scheduler, they have ended


class _Saving(NamedTuple):
    """A save, and the buffer of its content. It is a user of the buffer."""

    save: Save
    buffer: Buffer
    generation: int


_End = Callable[[], None]
_Ended = queue.SimpleQueue[tuple["_FileThreads", _End]]


class _FileThreads:
    """Threads that read or write files. They do not keep the process alive: a file system may never answer.

    A job returns what the engine's thread does at its end, which is put into `ended`.
    """

    def __init__(self, num_threads: int, name: str, ended: _Ended) -> None:
        self._ended = ended
        self._jobs: queue.SimpleQueue[Callable[[], _End] | None] = queue.SimpleQueue()
        self._names = [f"{name}-{number}" for number in range(num_threads)]
        self._threads: list[threading.Thread] = []
        self.num_jobs = 0  # whose ends were not done yet
        self.is_closed = False

    def submit(self, job: Callable[[], _End]) -> None:
        self.num_jobs += 1
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in self._names]
            for thread in self._threads:
                thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self.is_closed:
                self._ended.put((self, job()))

    def stop(self) -> None:
        """Start no further job."""
        self.is_closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, deadline_s: float) -> bool:
        """Wait for the jobs in progress. Returns False if they take longer."""
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


class Transfers:
    """Transfers of one engine. All methods are called from its thread.

    `host_slots`: buffers of the host level; None if there is none. `disk`: None if there is no disk level.
    `read_slots`: buffers that are filled from files. `save_slots`: buffers of saves that do not stay in host memory.
    """

    def __init__(
        self,
        block_io: BlockIO,
        host_slots: Slots | None,
        disk: DiskStore | None,
        *,
        read_slots: Slots,
        save_slots: Slots,
        num_readers: int,
    ) -> None:
        self._block_io = block_io
        self._host_slots = host_slots
        self._host: dict[Content, Buffer] = {}  # which content it has is decided by the scheduler's core
        self.disk = disk
        self._read_slots = read_slots
        self._save_slots = save_slots
        self._num_readers = num_readers
        self._ended: _Ended = queue.SimpleQueue()
        self._readers = _FileThreads(num_readers, "kv-read", self._ended)
        self._writers = _FileThreads(1, "kv-write", self._ended)
        self._loading: dict[int, _Loading] = {}
        self._reading: dict[int, _Reading] = {}
        self._reads: deque[Read] = deque()  # not submitted yet: all buffers are in use
        self._imports: deque[_Import] = deque()  # not copied yet
        self._importing: deque[_Importing] = deque()
        self._exporting: deque[tuple[PendingCopy, Sequence[_Saving]]] = deque()
        self._generation = 0  # of the cache: increases when it is cleared; threads read it
        self._done: list[Done] = []

    @property
    def has_work(self) -> bool:
        """Whether something is in flight."""
        return bool(self._readers.num_jobs or self._reads) or self.has_copies

    @property
    def has_copies(self) -> bool:
        """Whether something is in flight besides reads, which may never end."""
        return bool(self._writers.num_jobs or self._imports or self._importing or self._exporting or self._done)

    # Start

    def start(self, plan: StepPlan, *, is_busy: bool = True) -> None:
        """Start the transfers of a plan, before its step is enqueued."""
        for content in plan.drops:
            self._drop(content)
        if plan.saves:
            self._export(plan.saves)
        for read_id in plan.dropped_reads:
            self._drop_read(read_id)
        for read in plan.reads:
            self._reading.setdefault(read.read_id, _Reading()).num_left += 1
        self._reads += plan.reads
        self._submit_reads()
        if plan.loads:
            self._start_loads(plan.loads)
            self._start_imports(is_busy=is_busy)

    def start_early(self, loads: Sequence[Load], *, is_busy: bool) -> None:
        """Start some loads of a plan that is being made, before its saves. The plan will have the rest of each load.

        What these loads copy was read before: the reads of the plan are not awaited.
        """
        self._start_loads(loads, has_more=True)
        if not is_busy:  # otherwise the plan starts the copies of this step
            self._start_imports(is_busy=False)

    def _export(self, saves: Sequence[Save]) -> None:
        exported: list[_Saving] = []
        for save in saves:
            if save.source is None:
                self._write_from_host(save)
                continue
            slots = self._host_slots if Level.HOST in save.levels else self._save_slots
            buffer = None if slots is None else slots.take(save.content.kind)
            if buffer is None:
                self._fail_save(save)
            else:
                exported.append(_Saving(save, buffer, self._generation))
        if not exported:
            return
        try:
            sources = [one.save.source for one in exported if one.save.source is not None]
            buffers = [one.buffer.memory for one in exported]
            self._exporting.append((self._block_io.export(sources, buffers), exported))
        except Exception:
            log.exception("%d pieces of the cache could not be copied to host memory", len(exported))
            for one in exported:
                one.buffer.release()
                self._fail_save(one.save)

    def _fail_save(self, save: Save) -> None:
        self._done += [SaveDone(save.content, level, False) for level in save.levels]

    def _write_from_host(self, save: Save) -> None:
        """Write content of host memory to disk."""
        buffer = self._host.get(save.content)
        if buffer is None:  # it was dropped
            self._fail_save(save)
        else:
            buffer.num_users += 1
            self._writers.submit(partial(self._write, _Saving(save, buffer, self._generation)))

    def _drop(self, content: Content) -> None:
        """Drop content of host memory."""
        if (buffer := self._host.pop(content, None)) is not None:
            buffer.release()

    def _start_loads(self, loads: Sequence[Load], *, has_more: bool = False) -> None:
        for load in loads:  # all are counted first, because a load ends with its last piece
            loading = self._loading.setdefault(load.load_id, _Loading())
            loading.num_left += 1
            loading.has_more = has_more
        for load in loads:
            buffer = self._take_read(load) if load.read_id else self._host.get(load.content)
            if buffer is None:  # the cache was cleared
                self._end_piece(load, is_loaded=False)
                continue
            buffer.num_users += not load.read_id  # one that was read has no other user
            self._imports.append((load, buffer))

    def _take_read(self, load: Load) -> Buffer | None:
        """The buffer of content that was read."""
        reading = self._reading.get(load.read_id)
        buffer = None if reading is None else reading.buffers.pop(load.content, None)
        if reading is not None and not reading.num_left and not reading.buffers:
            del self._reading[load.read_id]
        return buffer

    def _drop_read(self, read_id: int) -> None:
        """Give back the buffers of a read, those in use by threads when these end."""
        reading = self._reading.get(read_id)
        if reading is None:
            return
        reading.is_dropped = True
        queued = [read for read in self._reads if read.read_id == read_id]
        self._reads = deque(read for read in self._reads if read.read_id != read_id)
        for buffer in reading.buffers.values():
            buffer.release()
        reading.buffers.clear()
        if not reading.num_left:
            del self._reading[read_id]  # its end was reported
        for read in queued:
            self._end_file(read, None)

    # Progress

    def poll(self, *, is_busy: bool) -> list[Done]:
        """Advance all transfers, and return what has ended. `is_busy`: requests run, and should not be delayed."""
        with suppress(queue.Empty):
            while True:
                self._end_job(*self._ended.get_nowait())
        self._end_exports()
        self._start_imports(is_busy=is_busy)
        self._submit_reads()
        done, self._done = self._done, []
        return done

    def wait(self, limit_s: float) -> None:
        """Wait until a transfer has probably advanced."""
        if self._importing or self._exporting:
            time.sleep(min(limit_s, 0.0001))  # a device reports nothing by itself
        elif self._readers.num_jobs or self._writers.num_jobs:
            with suppress(queue.Empty):
                self._end_job(*self._ended.get(timeout=limit_s))
        elif self._reads:
            time.sleep(limit_s)  # their buffers are being allocated

    def _end_job(self, threads: _FileThreads, end: _End) -> None:
        threads.num_jobs -= 1
        end()

    def _submit_reads(self) -> None:
        """Give reads to the threads, several at once, while there are buffers."""
        num_reads = len(self._reads)
        while self._reads:
            size = self._block_io.sizes.of(self._reads[0].content.kind)
            reads = self._take_buffers(reads_per_thread(num_reads, size, self._num_readers))
            if not reads:
                return
            self._readers.submit(partial(self._read_files, reads, self._generation))

    def _take_buffers(self, most: int) -> list[tuple[Read, Buffer]]:
        """The next reads, with their buffers. Reads for which no memory could be allocated fail."""
        reads: list[tuple[Read, Buffer]] = []
        while self._reads and len(reads) < most:
            kind = self._reads[0].content.kind
            buffer = self._read_slots.take(kind)
            if buffer is None and not self._read_slots.has_failed:
                break
            read = self._reads.popleft()
            if buffer is None:
                self._end_file(read, None)
                continue
            reading = self._reading[read.read_id]
            reading.first_ns = reading.first_ns or time.monotonic_ns()
            reads.append((read, buffer))
        return reads

    def _read_files(self, reads: Sequence[tuple[Read, Buffer]], generation: int) -> _End:
        """Read files. Runs in a thread."""
        are_read = [False] * len(reads)
        try:
            assert self.disk is not None
            if generation == self._generation:  # otherwise the files were deleted
                contents, memories = [read.content for read, _ in reads], [buffer.memory for _, buffer in reads]
                found = self.disk.read_many(contents, memories)
                are_read = [damage is None for damage in found]
                _warn_of([damage for damage in found if damage is not None])
        except Exception:
            log.exception("cached content on disk could not be read")
        return partial(self._end_files, reads, are_read, time.monotonic_ns())

    def _end_files(self, reads: Sequence[tuple[Read, Buffer]], are_read: Sequence[bool], now_ns: int) -> None:
        for (read, buffer), is_read in zip(reads, are_read, strict=True):
            reading = self._reading[read.read_id]
            reading.last_ns = max(reading.last_ns, now_ns)
            is_kept = is_read and not reading.is_dropped
            if not is_kept:
                buffer.release()
            self._end_file(read, buffer if is_kept else None)

    def _end_file(self, read: Read, buffer: Buffer | None) -> None:
        """End a piece of a read. None: it has no buffer, because it could not be read or is not needed."""
        reading = self._reading[read.read_id]
        if buffer is not None:
            reading.buffers[read.content] = buffer
        else:
            reading.failures.add(read.content)
        reading.num_left -= 1
        if not reading.num_left:
            failures = frozenset() if reading.is_dropped else frozenset(reading.failures)
            self._done.append(ReadDone(read.read_id, failures, reading.last_ns - reading.first_ns))
            if not reading.buffers:
                del self._reading[read.read_id]

    def _start_imports(self, *, is_busy: bool) -> None:
        """Start copies of loaded pieces: some beside a step, otherwise all, the first few at once."""
        if self._imports:
            self._import(min(self._block_io.pieces_per_step, len(self._imports)))
        if self._imports and not is_busy:
            self._import(len(self._imports))
        self._end_imports(is_busy=is_busy)

    def _import(self, count: int) -> None:
        pieces = [self._imports.popleft() for _ in range(count)]
        try:
            copy = self._block_io.import_([load.target for load, _ in pieces], [buffer.memory for _, buffer in pieces])
        except Exception:
            log.exception("%d pieces of the cache could not be copied from host memory", count)
            for load, buffer in pieces:
                buffer.release()
                self._end_piece(load, is_loaded=False)
            return
        self._importing.append(_Importing(copy, pieces))

    def _end_imports(self, *, is_busy: bool) -> None:
        for one in () if is_busy else self._importing:
            if not one.is_joined and one.copy.join_steps():  # nothing runs: the next step may wait on the device
                one.is_joined = True
                for load, _ in one.pieces:
                    self._end_piece(load)
        while self._importing and self._importing[0].copy.is_done():
            ended = self._importing.popleft()
            for load, buffer in ended.pieces:
                buffer.release()
                if not ended.is_joined:
                    self._end_piece(load)

    def _end_piece(self, load: Load, *, is_loaded: bool = True) -> None:
        loading = self._loading[load.load_id]
        if not is_loaded:
            loading.failures.add(load.content)
        loading.num_left -= 1
        if not loading.num_left and not loading.has_more:
            del self._loading[load.load_id]
            self._done.append(LoadDone(load.load_id, frozenset(loading.failures)))

    def _end_exports(self) -> None:
        while self._exporting and self._exporting[0][0].is_done():
            for saving in self._exporting.popleft()[1]:
                self._end_export(saving)

    def _end_export(self, saving: _Saving) -> None:
        save, buffer, generation = saving
        if generation != self._generation:
            buffer.release()
            return
        if Level.HOST in save.levels:
            self._drop(save.content)
            self._host[save.content] = buffer
            buffer.num_users += Level.DISK in save.levels
            self._done.append(SaveDone(save.content, Level.HOST, True))
        if Level.DISK in save.levels:
            self._writers.submit(partial(self._write, saving))

    def _write(self, saving: _Saving) -> _End:
        """Write a file. Runs in a thread.

        If the cache is cleared meanwhile, the file is deleted here, because there is only one such thread: elsewhere,
        the same content may have been written again before it is deleted.
        """
        written = Written(False, ())
        (content, *_), buffer, generation = saving
        try:
            assert self.disk is not None
            if generation == self._generation:
                written = self.disk.write(content, buffer.memory)
                if generation != self._generation:
                    self.disk.remove(content)
        except Exception:
            log.exception("cached content could not be written to disk")
        return partial(self._end_write, saving, written)

    def _end_write(self, saving: _Saving, written: Written) -> None:
        saving.buffer.release()
        if written.gone:
            self._done.append(Lost(written.gone))
        if saving.generation == self._generation:
            self._done.append(SaveDone(saving.save.content, Level.DISK, written.is_stored))

    # End

    def clear(self, cleared_ns: int | None = None) -> None:
        """Delete all stored content. Saves in flight are dropped; reads and loads in flight end, and may fail.

        `cleared_ns`: see `DiskStore.clear`. Raises CacheFolderError if files cannot be deleted.
        """
        self._generation += 1
        self._done = [one for one in self._done if isinstance(one, LoadDone | ReadDone)]
        while self._reads:
            self._end_file(self._reads.popleft(), None)
        for content in list(self._host):
            self._drop(content)
        if self.disk is not None:
            try:
                self.disk.clear(cleared_ns)
            except OSError as error:
                text = f"not all files of {self.disk.space.path} could be deleted: {error.strerror or error}"
                raise CacheFolderError(text) from error

    def close(self) -> None:
        """Wait for the threads, which end after the files that they read or write now.

        Files that take longer than `CLOSE_S` are left behind, with the buffers that they use.
        """
        self._reads.clear()
        pools = self._readers, self._writers
        for pool in pools:
            pool.stop()
        deadline_s = time.monotonic() + CLOSE_S
        if False in [pool.join(deadline_s) for pool in pools]:
            log.warning("files of the disk cache were not read or written within %g s", CLOSE_S)
        self._read_slots.close()
        if self._host_slots is not None:
            self._host_slots.close()


def _warn_of(damages: Sequence[DamagedBlock]) -> None:
    """Log what happened to files that are not used. Missing ones are counted: another process may have cleared all."""
    missing = [damage for damage in damages if damage.fault is Fault.MISSING]
    if missing:
        text = "%d files of the disk cache are missing, such as %s: their content is computed again"
        log.warning(text, len(missing), missing[0].path)
    for damage in damages:
        if damage.fault is not Fault.MISSING:
            text = "a file of the disk cache was damaged (%s): %s. It was deleted, and its content is computed again"
            if damage.fault in KEPT_FAULTS:
                text = "a file of the disk cache cannot be used (%s): %s. It is kept, and its content is computed again"
            log.warning(text, FAULT_WORDS[damage.fault], damage.path)
