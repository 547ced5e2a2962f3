"""Block I/O of the GPU runner: copies beside the steps, through staging buffers on the device.

An export gathers its pieces into staging on the stream of the steps, so it reads what the steps before it left, and
steps after it may overwrite the pieces. A second stream then copies the staging to the host. An import copies buffers
into staging on a third stream and scatters them into the pools on a fourth one, after the steps enqueued so far.

    export   steps     step, gather 0, gather 1, step ...
             exports             copy 0,   copy 1

    import   imports   copy 0, copy 1, copy 2 ...                 until the ring has no free slot
             moves             scatter 0, scatter 1 ...           after the steps enqueued so far

Streams wait for each other through events on the device; the host never waits. The slots of a ring of staging are used
in turn, each after its last use has ended. The stream of the steps waits for a slot only if an export has more pieces
than the ring holds (`max_exports`). Copies are limited to `COPY_BYTES`: the small copies of a step use the same
copy engines, and wait for the copy that an engine is working on.

The caller uses pieces or buffers after `is_done` returned true. At that point an event after the copies has completed.
Everything that was written before a completed event is visible to the host, and to kernels launched afterwards on any
stream, so the stream of the steps does not have to wait for the imports.

A GPU copies from and to host memory at full speed if its pages are pinned (`PinnedMemory`).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.base import Copied, MemorySizes, PendingCopy
from quire.backends.block_io import Counts, check_pieces
from quire.backends.torch.kernels.blocks import PieceTable, move_pieces, piece_table
from quire.backends.torch.kv_store import KVStore
from quire.core.step import MemoryRef
from quire.errors import InvariantViolation

PAGE = 4096


class _Region(NamedTuple):
    first: int  # address
    last: int
    tensor: Tensor  # uint8


class PinnedMemory:
    """Allocates memory and finds it again by address. Any thread may allocate. On a CPU nothing is pinned.

    Memory stays pinned until `close`. It is allocated with `mmap` and registered, not with `torch.empty`, which rounds
    sizes up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._regions: tuple[_Region, ...] = ()  # by address; replaced as a whole, for readers in other threads

    def allocate(self, num_bytes: int) -> memoryview:
        """Allocate zeros. Raises MemoryError if the system refuses to pin as much."""
        if not num_bytes:
            return memoryview(bytearray())
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._device.type == "cuda":
            self._pin(memory)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        region = _Region(tensor.data_ptr(), tensor.data_ptr() + num_bytes, tensor)
        with self._lock:
            self._regions = tuple(sorted((*self._regions, region), key=attrgetter("first")))
        return memoryview(memory)

    def find(self, first: int, last: int) -> Tensor | None:
        """Return the bytes of the addresses [first, last), or None if they are not all of one allocation."""
        regions = self._regions
        place = bisect_right(regions, first, key=attrgetter("first")) - 1
        if place < 0 or last > regions[place].last:
            return None
        start = regions[place].first
        return regions[place].tensor[first - start : last - start]

    def close(self) -> None:
        """Unpin everything. Views of the memory stay valid; no copy may be running."""
        with self._lock:
            regions, self._regions = self._regions, ()
        if self._device.type == "cuda":
            for region in regions:
                torch.cuda.cudart().cudaHostUnregister(region.first)  # type: ignore[no-untyped-call]

    def _pin(self, memory: mmap.mmap) -> None:
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # the pages of a forked process would be copies
            with contextlib.suppress(AttributeError, OSError):  # another system, or one without huge pages
                memory.madvise(getattr(mmap, advice))
        array = np.frombuffer(memory, np.uint8)
        array[::PAGE] = 0  # the pages are made here, while other threads run, and not by the driver
        address = array.__array_interface__["data"][0]
        # In a thread of its own: CUDA reports an error again at the next launch in the same thread.
        with ThreadPoolExecutor(1) as thread:
            code = thread.submit(self._register, address, len(array)).result()
        if code:
            raise MemoryError(f"cudaHostRegister of {len(array)} bytes failed with CUDA error {code}")

    def _register(self, address: int, num_bytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]


EXPORT_BYTES = 1 << 30  # of staging: a prompt of 8,192 tokens of an 8B model may evict as much in one step
IMPORT_BYTES = 128 << 20
STAGING_SHARE = 128  # each of the two takes at most this part of the card's memory
STEP_BYTES = 128 << 20  # copied beside a step: takes 2.5 ms
SLOT_BYTES = 32 << 20  # at most, unless a piece is larger; copied together
COPY_BYTES = 8 << 20  # takes 0.15 ms at 55 GB/s
MAX_COPIES = 512  # of imports in flight: with twice as many, a launch would wait for the device
EXTRA_EXPORTS = 32  # beyond the staging: the steps wait for them, but a step that evicts so much takes much longer
MAX_PIECES = 128  # beside a step: each takes time on the host
ALIGNMENT = 512


class _Slot(NamedTuple):
    """A part of a ring."""

    memory: Tensor  # uint8
    filled: Any  # event
    emptied: Any


_Ring = deque[_Slot]  # staging on the device: slots are used in turn


class _Chunk(NamedTuple):
    """Pieces of one kind that fit a slot."""

    table: PieceTable
    indices: Tensor  # of the pieces
    hosts: list[Tensor]  # host memory, in parts that are copied one by one
    transfer: _Transfer

    def gather(self, slot: _Slot) -> None:
        move_pieces(self.table, self.indices, self._staged(slot), is_gather=True)

    def scatter(self, slot: _Slot) -> None:
        move_pieces(self.table, self.indices, self._staged(slot), is_gather=False)

    def copy_to_host(self, slot: _Slot) -> None:
        for staged, host in zip(self._parts(slot), self.hosts, strict=True):
            _copy(staged, host)

    def copy_from_host(self, slot: _Slot) -> None:
        for staged, host in zip(self._parts(slot), self.hosts, strict=True):
            _copy(host, staged)

    def _staged(self, slot: _Slot) -> Tensor:
        """Return the pieces in a slot, as words."""
        return slot.memory[: len(self.indices) * self.table.num_bytes].view(self.table.word)

    def _parts(self, slot: _Slot) -> Sequence[Tensor]:
        """Return the parts of a slot that are copied one by one."""
        lengths = [host.nbytes for host in self.hosts]
        return slot.memory[: sum(lengths)].split(lengths)  # type: ignore[no-untyped-call, no-any-return]


class _Transfer:
    """An export or import that was started. Imports of many pieces are enqueued part by part."""

    def __init__(self, owner: CudaBlockIO, event: Any) -> None:
        self._owner = owner
        self.num_waiting = 0  # chunks that are not enqueued yet
        self.event = event  # recorded after the last one

    def is_done(self) -> bool:
        self._owner.advance()
        return not self.num_waiting and bool(self.event.query())

    def join_steps(self) -> bool:
        self._owner.advance()
        if self.num_waiting:
            return False
        self._owner.steps.wait_event(self.event)
        return True


_Stage = tuple[Any, Callable[[_Chunk, _Slot], None]]  # a stream, and what is done there


class CudaBlockIO:
    """`stream` is that of the steps."""

    def __init__(self, store: KVStore, counts: Counts, layout: str, stream: Any) -> None:
        device = store.device
        # Kept alive: the tables have addresses only.
        self._pools = (store.layers_of(is_window=False), store.layers_of(is_window=True), store.state_pools())
        self._tables = [piece_table(some, device) for some in self._pools]
        self.sizes = MemorySizes(*(table.num_bytes for table in self._tables))
        self.layout = layout
        self._counts = counts
        self._host = PinnedMemory(device)
        self._device = torch.get_device_module(device)
        export_bytes, import_bytes = (_staging_bytes(most, device) for most in (EXPORT_BYTES, IMPORT_BYTES))
        largest = max(self.sizes.block, self.sizes.window, self.sizes.state)
        slot_bytes = -(-max(min(SLOT_BYTES, import_bytes // 4), largest) // ALIGNMENT) * ALIGNMENT
        self._slot_bytes = slot_bytes
        self._exported, self._imported = (self._make_ring(size, device) for size in (export_bytes, import_bytes))
        self.is_host_memory = False
        common = max(self.sizes.block, self.sizes.window, 1)  # states are larger, and few
        fitting = len(self._exported) * (slot_bytes // common)
        self.max_exports = fitting + EXTRA_EXPORTS
        self.pieces_per_step = min(max(STEP_BYTES // common, 1), fitting, MAX_PIECES)
        self.steps = stream
        self._exports, self._imports, self._moves = (self._device.Stream(device) for _ in range(3))
        self._waiting: deque[_Chunk] = deque()  # of imports, not enqueued yet
        self._in_flight: deque[tuple[Any, int]] = deque()  # of imports: an event, and the copies before it
        self._is_closed = False
        with torch.inference_mode(), self._device.stream(stream):
            self._load_kernels()

    def _make_ring(self, num_bytes: int, device: torch.device) -> _Ring:
        num_slots = max(num_bytes // self._slot_bytes, 2)
        memory = torch.empty(num_slots * self._slot_bytes, dtype=torch.uint8, device=device)
        parts = memory.split(self._slot_bytes)  # type: ignore[no-untyped-call]
        return deque(_Slot(part, self._device.Event(), self._device.Event()) for part in parts)

    def allocate(self, num_bytes: int) -> memoryview:
        return self._host.allocate(num_bytes)

    @torch.inference_mode()
    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self._check(pieces, buffers, is_export=True)
        chunks = self._divide(pieces, buffers, self.steps)
        for group in _groups(chunks, len(self._exported)):
            self._pipe(group, self._exported, (self.steps, _Chunk.gather), (self._exports, _Chunk.copy_to_host))
        return chunks[0].transfer if chunks else Copied()

    @torch.inference_mode()
    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        self._check(pieces, buffers, is_export=False)
        self._moves.wait_stream(self.steps)  # steps that were enqueued may still read the pieces' old content
        chunks = self._divide(pieces, buffers, self._moves)
        self._waiting += chunks
        self.advance()
        return chunks[0].transfer if chunks else Copied()

    @torch.inference_mode()
    def advance(self) -> None:
        """Enqueue chunks that wait, as far as the limit of copies in flight allows."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        num_copies = sum(count for _, count in self._in_flight)
        while self._waiting and num_copies < MAX_COPIES:
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), len(self._imported)))]
            self._pipe(group, self._imported, (self._imports, _Chunk.copy_from_host), (self._moves, _Chunk.scatter))
            event, num_new = self._device.Event(), sum(len(chunk.hosts) for chunk in group)
            event.record(self._moves)
            self._in_flight.append((event, num_new))
            num_copies += num_new

    def _pipe(self, group: Sequence[_Chunk], ring: _Ring, first: _Stage, second: _Stage) -> None:
        """Fill a slot for each chunk on one stream, and empty it on another."""
        slots = [ring[place] for place in range(len(group))]
        ring.rotate(-len(group))
        stream, fill = first
        with self._device.stream(stream):
            for chunk, slot in zip(group, slots, strict=True):
                stream.wait_event(slot.emptied)
                fill(chunk, slot)
                slot.filled.record(stream)
        stream, empty = second
        with self._device.stream(stream):
            for chunk, slot in zip(group, slots, strict=True):
                stream.wait_event(slot.filled)
                empty(chunk, slot)
                slot.emptied.record(stream)
                chunk.transfer.num_waiting -= 1
                if not chunk.transfer.num_waiting:
                    chunk.transfer.event.record(stream)

    def close(self) -> None:
        """Wait for copies in flight, drop those that wait, and unpin the host memory."""
        self._is_closed = True
        self._waiting.clear()
        self._device.synchronize()
        self._host.close()

    def _check(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview], *, is_export: bool) -> None:
        if self._is_closed:
            raise InvariantViolation("the runner is closed")
        check_pieces(pieces, buffers, self.sizes, self._counts, is_export=is_export)

    def _divide(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview], stream: Any) -> list[_Chunk]:
        """Return the chunks that pieces are copied in, kind by kind. Sends the numbers of the pieces on a stream."""
        # Pieces of a kind that no layer stores have no bytes.
        stored = [one for one in zip(pieces, buffers, strict=True) if self.sizes.of(one[0].kind)]
        stored.sort(key=lambda one: one[0].kind)
        device = self._tables[0].rows.device
        numbers = torch.tensor([ref.index for ref, _ in stored], dtype=torch.int32, pin_memory=device.type == "cuda")
        with self._device.stream(stream):
            indices = numbers.to(device, non_blocking=True)
        transfer, chunks, at = _Transfer(self, self._device.Event()), list[_Chunk](), 0
        for kind, table in enumerate(self._tables):
            own = [buffer for ref, buffer in stored if ref.kind == kind]
            for some in _groups(own, self._slot_bytes // max(table.num_bytes, 1)):
                hosts = self._host_parts(some)
                chunks.append(_Chunk(table, indices[at : at + len(some)], hosts, transfer))
                at += len(some)
        transfer.num_waiting = len(chunks)
        return chunks

    def _host_parts(self, buffers: Sequence[memoryview]) -> list[Tensor]:
        """Return the memory of buffers, in parts to copy. Buffers that lie side by side are copied together."""
        runs: list[tuple[int, int, Tensor]] = []  # first and last address
        for buffer in buffers:
            tensor = self._tensor(buffer)
            first = tensor.data_ptr()
            last = first + buffer.nbytes
            if runs and runs[-1][1] == first and (joined := self._host.find(runs[-1][0], last)) is not None:
                runs[-1] = (runs[-1][0], last, joined)
            else:
                runs.append((first, last, tensor))
        parts: list[Tensor] = []
        for first, last, tensor in runs:
            parts += (tensor,) if last - first <= COPY_BYTES else tensor.split(COPY_BYTES)  # type: ignore[no-untyped-call]
        return parts

    def _tensor(self, buffer: memoryview) -> Tensor:
        """Return a buffer as a tensor. Memory that was not allocated here is not pinned: its copies block the host."""
        if not buffer.readonly:
            return torch.frombuffer(buffer, dtype=torch.uint8)
        first = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        found = self._host.find(first, first + buffer.nbytes)
        return torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if found is None else found

    def _load_kernels(self) -> None:
        """Compile both kernels with no work, so that the first copies do not wait for the compiler."""
        device = self._tables[0].rows.device
        none = torch.zeros(1, 3, dtype=torch.int64, device=device)
        index = torch.zeros(1, dtype=torch.int32, device=device)
        for word in dict.fromkeys(table.word for table in self._tables if table.num_words):
            empty = PieceTable(none, 0, 1, word)
            staging = torch.empty(8, dtype=word, device=device)
            move_pieces(empty, index, staging, is_gather=True)
            move_pieces(empty, index, staging, is_gather=False)


def _staging_bytes(most: int, device: torch.device) -> int:
    if device.type != "cuda":
        return most
    return min(most, int(torch.cuda.get_device_properties(device).total_memory) // STAGING_SHARE)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
