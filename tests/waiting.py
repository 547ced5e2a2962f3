"""How tests wait: for events, however long they take. A limit in seconds only bounds a hang."""

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
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
HANG_S = 60.0  # bounds a hang, and nothing else: pytest ends a test after 600 s


def eventually(is_so: Callable[[], T], what: str, limit_s: float = HANG_S) -> T:
    """Wait until a condition holds. Returns its value."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not in {limit_s:g} s: {what}"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def paused(*pids: int) -> Iterator[Callable[[], None]]:
    """Stop processes. They go on when the function that this yields is called, or at the end."""
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
def throttled(pid: int) -> Iterator[None]:
    """Let a process run for one part of its time in sixteen, so that what it does lasts while it is looked at."""
    is_over = threading.Event()

    def throttle() -> None:
        while not is_over.is_set():
            with paused(pid):
                is_over.wait(0.15)
            is_over.wait(0.01)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_asleep(*pids: int, window_s: float = 2.0) -> bool:
    """Whether no thread of these processes wakes up for so long. How fast anything runs does not matter."""

    def switches() -> list[int]:
        return [num_switches(pid) for pid in pids]

    before = switches()
    time.sleep(window_s)
    return switches() == before


def num_switches(pid: int) -> int:
    """How often its threads went to sleep so far."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(number) for text in statuses for number in re.findall(r"^voluntary_ctxt\S+\s+(\d+)", text, re.M))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while there is something to do, and then jumps to the next timer."""

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
