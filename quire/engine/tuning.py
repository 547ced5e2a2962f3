"""Tuning of a process: the garbage collector, and the priority of threads that must not slow the steps of the model."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import suppress

NICENESS = 10  # about a tenth of a core beside one busy thread


def lower_thread_priority() -> None:
    """Let other threads run first. Only on Linux a thread has its own priority; it cannot be raised again."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


YOUNG = 50_000  # allocations before a collection of new objects


def calm_collector() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    In a worker, a library such as torch and the block pool are half a million objects that live until the process
    ends. A full collection of them stops every stream for 130 ms. Steps and requests create few reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
