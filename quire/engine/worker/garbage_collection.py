"""Tuning of Python's garbage collector for a worker process and for the server."""

from __future__ import annotations

import gc

YOUNG = 50_000  # allocations before a collection of new objects


def calm_collector() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    In a worker, a library such as torch and the block pool are half a million objects that live until the process
    ends. A full collection of them stops every stream for 130 ms. Steps and requests create few reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
