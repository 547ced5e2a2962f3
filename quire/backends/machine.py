"""The share of the machine that this process may use, read from the operating system."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.errors import InvalidRequest

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
NVIDIA_CAPABILITY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
MIN_FP8_CAPABILITY = (8, 9)  # Ada; then Hopper and Blackwell
VM_STAT = ("vm_stat",)
SYSCTL = ("sysctl", "-n")
# Pages that macOS can give to a program. `free` of vm_stat leaves out speculative pages; purgeable ones are in others.
_RECLAIMABLE = ("Pages free", "Pages speculative", "Pages inactive")


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


def has_metal() -> bool:
    """Return whether models run on the GPU of an Apple chip: mlx and mlx-lm are installed. Imports neither."""
    return is_apple_silicon() and all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def gpu_memory() -> list[tuple[int, int]]:
    """Return total and free bytes of each GPU, without loading its libraries: only worker processes do.

    On Apple silicon, the total is what the GPU may use of the machine's memory. The list is empty if there is no GPU or
    nvidia-smi does not answer.
    """
    if has_metal():
        limit = metal_limit_bytes(total_bytes())
        return [(limit, min(limit, available_bytes()))]
    try:
        rows = [
            [int(cell) << 20 for cell in line.split(",")] for line in _output(NVIDIA_SMI).splitlines() if line.strip()
        ]
        return [(total, free) for total, free in rows]
    except ValueError:
        return []


def has_fp8() -> bool:
    """Return whether all NVIDIA GPUs have instructions for FP8; also if nvidia-smi does not answer."""
    found = re.findall(r"^ *(\d+)\.(\d+) *$", _output(NVIDIA_CAPABILITY), re.MULTILINE)
    return all((int(major), int(minor)) >= MIN_FP8_CAPABILITY for major, minor in found)


def metal_limit_bytes(total: int) -> int:
    """Return the bytes that the GPU of an Apple chip may use, of `total` bytes that it shares with the CPU.

    macOS reports two thirds on machines up to 32 GiB and three quarters on larger ones, unless the owner has set
    `iogpu.wired_limit_mb`. The worker process uses the number that Metal reports.
    """
    chosen_mb = read_sysctl("iogpu.wired_limit_mb")
    if chosen_mb.isdecimal() and int(chosen_mb):
        return min(int(chosen_mb) << 20, total)
    return total * 2 // 3 if total <= 32 << 30 else total * 3 // 4


def read_sysctl(name: str) -> str:
    """Return a value of `sysctl`; an empty string if there is none."""
    return _output((*SYSCTL, name)).strip()


def _output(command: Sequence[str]) -> str:
    """Return the output of a short command; an empty string if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def total_bytes() -> int:
    """Return the bytes of memory that the machine has."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return int(read_sysctl("hw.memsize") or 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the bytes that can be used without swapping, within the container's limit if there is one."""
    kilobytes = _counts(_MEMINFO).get("MemAvailable")
    available = _from_vm_stat() if kilobytes is None else kilobytes * 1024
    if available is None:
        available = total_bytes() // 2  # a cautious guess
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        files = _counts(_CGROUP / "memory.stat")  # cached, such as weights just read: used, but they can be reclaimed
        cached = files.get("inactive_file", 0) + files.get("active_file", 0)
        available = min(available, max(limit - used + cached, 0))
    return available


def _counts(path: Path) -> dict[str, int]:
    """Return the numbers in a file of the kernel by name; none if it cannot be read."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {name.rstrip(":"): int(number) for name, number, *_ in rows}
    except (OSError, ValueError):
        return {}


def _from_vm_stat() -> int | None:
    """Return the available bytes on macOS."""
    text = _output(VM_STAT)
    page = re.search(r"page size of (\d+) bytes", text)
    counts = dict(re.findall(r"^([^:\n]+):\s+(\d+)\.", text, re.MULTILINE))
    if page is None or "Pages free" not in counts:
        return None
    return min(int(page[1]) * sum(int(counts.get(name, 0)) for name in _RECLAIMABLE), total_bytes())


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"
