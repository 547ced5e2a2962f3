"""Resources that a server must release after each attack or fault: blocks, open files, threads and processes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, exactly
from tests.server.rig import Server
from tests.waiting import eventually

# Pools start threads when jobs first overlap. The pools for tokenising, parsing, grammars and files have 2 to 6 each.
SPARE_THREADS = 8


@dataclass(frozen=True)
class Base:
    """Resources of a server and its children while it is idle."""

    num_files: int
    num_threads: int
    num_processes: int
    memory_bytes: int


def family(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def base_of(server: Server) -> Base:
    num_files = num_threads = memory = 0
    processes = family(server)
    for process in processes:
        with process.oneshot():
            num_files += process.num_fds()
            num_threads += process.num_threads()
            memory += process.memory_info().rss
    return Base(num_files, num_threads, len(processes), memory)


def idle_base(server: Server) -> Base:
    """The base of a server that holds no request."""
    server.wait_free()
    return base_of(server)


def wait_for_a_place(server: Server) -> None:
    """Wait until the server closes a connection that waits to accept a new one: it does so after `GRACE_S`."""

    def is_served() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return server.get("/health").status == 200
        return False

    eventually(is_served, "a connection gives way")


def num_violations(server: Server) -> float:
    """Number of broken invariants that the workers of all models have reported."""
    return sum_of(server, "quire:invariant_violations_total")


def sum_of(server: Server, metric: str) -> float:
    text = server.get("/metrics").body.decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def left_over(server: Server, base: Base, *, prefix: str = "", spare_files: int = 2) -> list[Figure]:
    """Wait until the server is idle, and measure the resources that it holds beyond `base`.

    Take the base after some load, which starts most of the threads of pools.
    """
    stats = server.wait_free()

    def is_back() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # one ended while it was examined
            now = base_of(server)
            is_files_back = now.num_files <= base.num_files + spare_files
            is_threads_back = now.num_threads <= base.num_threads + SPARE_THREADS
            return is_files_back and is_threads_back and now.num_processes <= base.num_processes
        return False

    # The trial of a grammar whose client has left goes on for at most 2 s of CPU time, at a low priority: on a busy
    # machine that may take a minute.
    with contextlib.suppress(AssertionError):  # the figures show the rest
        eventually(is_back, "files, threads and processes are back")
    now = base_of(server)
    figures = [
        exactly(f"{prefix}KV blocks held afterwards", stats["num_in_use"]),
        Figure(
            f"{prefix}open files afterwards, more than before",
            max(0, now.num_files - base.num_files),
            at_most=spare_files,
        ),
        Figure(
            f"{prefix}threads afterwards, more than before",
            max(0, now.num_threads - base.num_threads),
            at_most=SPARE_THREADS,
        ),
        exactly(f"{prefix}processes afterwards, more than before", max(0, now.num_processes - base.num_processes)),
        exactly(f"{prefix}broken invariants reported by workers", num_violations(server)),
    ]
    return [replace(figure, is_left_over=True) for figure in figures]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below this percentage of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan
