"""Marks in the cache folder, by which running servers learn that `quire cache` has deleted files.

    ROOT/cleared     the content of all models was deleted
    SPACE/cleared    the content of one model was deleted
    ROOT/pruned      some files were deleted

A mark is a small file with a random id. A server remembers the ids and looks for new ones. A mark that disappears means
nothing: the folder may have been deleted and created again.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.engine.tiers.cache_folder import CLEARED_NAME, PRUNED_NAME, write_private

LOOK_S = 1.0  # between two looks at the marks
_ID_BYTES = 16


class Deletion(NamedTuple):
    """Files were deleted by another process."""

    cleared_ns: int | None  # when all content was deleted, memory included; None: only some files were


class DeletionWatch:
    """Looks for new marks. A look opens three files."""

    def __init__(self, root: Path, space: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clears = (root / CLEARED_NAME, space / CLEARED_NAME)
        self._prune = root / PRUNED_NAME
        self._clock = clock
        self._seen: dict[Path, bytes] = {}
        self._next_s = 0.0
        self.look(at_once=True)

    def look(self, *, at_once: bool = False) -> Deletion | None:
        """Return what was deleted since the last look. `at_once`: look even if the last one was a moment ago."""
        now_s = self._clock()
        if now_s < self._next_s and not at_once:
            return None
        self._next_s = now_s + LOOK_S
        times_ns = [self._find_new(path) for path in self._clears]
        has_prune = self._find_new(self._prune) is not None
        cleared_ns = max((time_ns for time_ns in times_ns if time_ns is not None), default=None)
        return Deletion(cleared_ns) if has_prune or cleared_ns is not None else None

    def _find_new(self, path: Path) -> int | None:
        """The time of a mark that was not seen before."""
        with suppress(OSError), open(path, "rb") as file:
            found, time_ns = file.read(2 * _ID_BYTES), os.fstat(file.fileno()).st_mtime_ns
            if found != self._seen.get(path):
                self._seen[path] = found
                return time_ns
        return None


def mark_cleared(folder: Path) -> None:
    """Let the servers that use a root or a space clear their caches. Raises OSError."""
    _mark(folder / CLEARED_NAME)


def mark_pruned(root: Path) -> None:
    """Let the servers that use a root list its files again. Raises OSError."""
    _mark(root / PRUNED_NAME)


def _mark(path: Path) -> None:
    write_private(path, secrets.token_hex(_ID_BYTES).encode())
