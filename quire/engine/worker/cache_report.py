"""Reports changes of the prefix cache to the client, for a router (`quire/scale/routing.py`).

Unlike KV events, reports have no tokens and include prefixes of all salts: without the secret, a chain key tells
nothing. The router computes the keys of a prompt with the salt of the API key that sent it.
"""

from __future__ import annotations

import time

from quire.core.events import Published, Removed, TreeChange
from quire.core.kv_cache import KVCacheManager
from quire.core.step import Content, MemoryKind
from quire.core.values import Level
from quire.engine.worker.protocol import ENTRY_KEY_BYTES, CacheReport

INTERVAL_S = 0.05  # between reports while steps run
DEVICE_BIT = 1


class CacheReporter:
    """Collects changes until the next report. Content of lower levels counts as cached."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._pool = cache.pool
        self._changes: dict[bytes, bool] = {}  # first bytes of a chain key -> whether it was added
        self._is_cleared = False
        self._bits: dict[bytes, int] = {}  # the same -> the levels that have it, if there are several
        self._level_bits: dict[Level, int] = {}
        self._last_s = 0.0
        self._num_free = -1
        if not cache.is_caching:
            return
        cache.tree.reports_salts = True
        cache.tree.on_change = self._take
        for number, level in enumerate(() if cache.levels is None else cache.levels.levels):
            bit = self._level_bits[level.level] = 2 << number
            for key in level.pieces(MemoryKind.BLOCK):
                self._store(key, bit)
            level.on_change = self._take_level

    def pop(self, *, is_idle: bool) -> CacheReport | None:
        """The report that is due. While steps run, one is due after an interval."""
        num_free = self._pool.num_free
        if not self._changes and not self._is_cleared and num_free == self._num_free:
            return None
        now_s = time.monotonic()
        if not is_idle and now_s - self._last_s < INTERVAL_S:
            return None
        added = b"".join(key for key, is_added in self._changes.items() if is_added)
        removed = b"".join(key for key, is_added in self._changes.items() if not is_added)
        report = CacheReport(added, removed, self._is_cleared, num_free)
        self._changes, self._is_cleared = {}, False
        self._last_s, self._num_free = now_s, num_free
        return report

    def _take(self, change: TreeChange) -> None:
        if isinstance(change, Published):
            self._store(change.key, DEVICE_BIT)
        elif isinstance(change, Removed):
            for key in change.keys:
                self._remove(key, DEVICE_BIT)
        elif self._level_bits:
            for key in [key for key, bits in self._bits.items() if bits & DEVICE_BIT]:
                self._remove(key, DEVICE_BIT)
        else:
            self._changes, self._is_cleared = {}, True

    def _take_level(self, level: Level, content: Content, is_stored: bool) -> None:
        if content.kind is MemoryKind.BLOCK:
            (self._store if is_stored else self._remove)(content.key, self._level_bits[level])

    def _store(self, key: bytes, bit: int) -> None:
        entry = key[:ENTRY_KEY_BYTES]
        if self._level_bits:
            bits = self._bits.get(entry, 0)
            self._bits[entry] = bits | bit
            if bits:
                return
        self._changes[entry] = True

    def _remove(self, key: bytes, bit: int) -> None:
        entry = key[:ENTRY_KEY_BYTES]
        if self._level_bits:
            bits = self._bits.get(entry, 0) & ~bit
            if bits:
                self._bits[entry] = bits
                return
            self._bits.pop(entry, None)
        self._changes[entry] = False
