"""The share of the machine that this process may use, read from the operating system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from quire.errors import InvalidRequest

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")


def default_threads() -> int:
    """Return OMP_NUM_THREADS, capped at the usable cores, or all usable cores if it is not set."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(int(asked), usable_cores()) if asked.isdecimal() and int(asked) else usable_cores()


def choose_threads(asked: int | None) -> int:
    num_cores = usable_cores()
    if asked is not None and asked > num_cores:
        raise InvalidRequest(f"threads = {asked} is more than the {num_cores} cores this process may use")
    return asked or default_threads()


def usable_cores() -> int:
    """Return the number of cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_nvidia() -> bool:
    """Return whether the driver of an NVIDIA GPU is installed, without loading any library."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def gpu_memory() -> list[tuple[int, int]]:
    """Return total and free bytes of each GPU, from nvidia-smi: only worker processes load CUDA libraries.

    The list is empty if there is no GPU or nvidia-smi does not answer.
    """
    try:
        text = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [[int(cell) << 20 for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        return [(total, free) for total, free in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def available_bytes() -> int:
    """Return the bytes that can be used without swapping, within the container's limit if there is one."""
    available = _from_meminfo()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used + _cached_bytes(), 0))
    return available


def _cached_bytes() -> int:
    """Return the container's bytes of cached files, such as weights just read: used, but they can be reclaimed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts["inactive_file"]) + int(counts["active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _from_meminfo() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    # Not Linux: half of the installed memory is a cautious guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"
