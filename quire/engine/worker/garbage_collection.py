"""Python's garbage collector, in a process that serves one model to its end."""

from __future__ import annotations

import gc

YOUNG = 50_000  # objects made before the collector looks at the new ones


def calm_collector() -> None:
    """What lives now lives to the end: the collector need not walk it again.

    A library like torch and a pool of blocks are half a million objects; a full collection of them stops every stream
    for 130 ms, some steps into a busy second. Steps themselves make no cycles worth looking for often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
