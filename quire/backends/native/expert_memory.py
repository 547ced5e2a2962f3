"""Memory for packed experts: one block, or a mapped file if the model is too large for the machine's memory.

Of a file's pages, the operating system keeps those in memory that were used last, and reads the others again when they
are needed: a model that is larger than memory becomes slow, but runs.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.backends.machine import available_bytes
from quire.backends.native.library import Bytes
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes, memory_size
from quire.weights.hub import cache_dir

MEMORY_SHARE = 0.8  # of the available memory: packed weights that need more have their experts in a file
ALIGNMENT = 64

log = logging.getLogger(__name__)


class ExpertMemory:
    """Memory by tensor name, in the order of the names: the matrices of an expert are next to each other."""

    def __init__(self, sizes: Mapping[str, int], *, other_bytes: int) -> None:
        """Reserve memory. `other_bytes` are needed for the other weights."""
        self._places: dict[str, slice] = {}
        num_bytes = 0
        for name, size in sizes.items():
            self._places[name] = slice(num_bytes, num_bytes + size)
            num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        available = available_bytes()
        self.is_file = bool(sizes) and num_bytes + other_bytes > MEMORY_SHARE * available
        if not self.is_file:
            self._whole: Bytes = np.empty(num_bytes, np.uint8)
            return
        needed, free = compared_sizes(num_bytes + other_bytes, available)
        log.warning(
            "the weights take %s and %s of memory are free: the %s of experts are mapped from a file in %s."
            " Steps wait for the disk whenever they need experts that are not in memory",
            needed,
            free,
            memory_size(num_bytes),
            cache_dir(),
        )
        self._whole = map_new_file(cache_dir(), num_bytes)

    def __getitem__(self, name: str) -> Bytes:
        return self._whole[self._places[name]]


def map_new_file(folder: Path, num_bytes: int) -> Bytes:
    """Map a new file without a name: its space on the disk is freed when the array is, or when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        needed, left = compared_sizes(num_bytes, free)
        raise InvalidRequest(
            f"the model is larger than the memory: its experts need a file of {needed}, and the disk of {folder} has"
            f" {left} left. Free some space, or set QUIRE_CACHE to a folder on another disk"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # without reserved space, a full disk would kill the process
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
