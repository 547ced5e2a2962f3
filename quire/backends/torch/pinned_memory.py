"""Host memory that a GPU copies from and to at full speed: its pages are pinned."""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
            self._regions = tuple(sorted((*self._regions, region), key=_address))
        return memoryview(memory)

    def find(self, first: int, last: int) -> Tensor | None:
        """Return the bytes of the addresses [first, last), or None if they are not all of one allocation."""
        regions = self._regions
        place = bisect_right(regions, first, key=_address) - 1
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
                _cudart().cudaHostUnregister(region.first)

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
            return int(_cudart().cudaHostRegister(address, num_bytes, 0))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(region: _Region) -> int:
    return region.first
