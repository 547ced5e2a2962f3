"""Waiting in tests: for events, not for time. A limit in seconds only ends a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
HANG_S = 300.0  # only ends a hang; pytest ends a test after 1,200 s


def eventually(condition: Callable[[], T], what: str, limit_s: float = HANG_S) -> T:
    """Wait until a condition is true. Returns its value."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen within {limit_s:g} s: {what}"
        time.sleep(0.02)
    return found


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait in the event loop until a condition is true."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {HANG_S:g} s: {what}"
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def paused(*pids: int) -> Iterator[Callable[[], None]]:
    """Stop processes. They resume when the yielded function is called, or on exit."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def resume() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    try:
        yield resume
    finally:
        resume()


@contextlib.contextmanager
def repeating(work: Callable[[], object], *, num_threads: int = 1, pause_s: float = 0.0) -> Iterator[None]:
    """Call a function again and again, in threads of their own, until the block ends. Raises what it raised."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()
            is_over.wait(pause_s)

    with ThreadPoolExecutor(num_threads) as pool:
        running = [pool.submit(repeat) for _ in range(num_threads)]
        try:
            yield
        finally:
            is_over.set()
    for one in running:
        one.result()


@contextlib.contextmanager
def throttled(pid: int) -> Iterator[None]:
    """Let a process run for one sixteenth of the time, so that its work lasts long enough to be observed."""

    def throttle() -> None:
        with paused(pid):
            time.sleep(0.15)

    with repeating(throttle, pause_s=0.01):
        yield


def is_asleep(*pids: int, window_s: float = 2.0) -> bool:
    """Whether no thread of these processes wakes up within the window. Does not depend on the speed of the machine."""

    def switches() -> list[int]:
        return [num_switches(pid) for pid in pids]

    before = switches()
    time.sleep(window_s)
    return switches() == before


def is_running(pid: int) -> bool:
    import psutil  # type: ignore[import-untyped]

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def num_switches(pid: int) -> int:
    """Number of voluntary context switches of all its threads."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(number) for text in statuses for number in re.findall(r"^voluntary_ctxt\S+\s+(\d+)", text, re.M))


class ManualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time: the clock stops while there is work, then jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._loop.now_s += timeout
        return ready
