"""Announces the content of lower tiers to routers."""

from __future__ import annotations

from quire.core.levels.tiers import Tiers
from quire.core.step import Content, MemoryKind
from quire.core.values import Tier
from quire.engine.worker.kv_events import KvEventQueue


class TierEvents:
    """Passes changes of lower tiers to the queue of events.

    Routers learn each block after its parent. Tiers are not filled in this order: the end of a prefix is evicted, and
    saved, before its beginning. So blocks that are already stored are announced together with their parent.
    """

    def __init__(self, tiers: Tiers, events: KvEventQueue) -> None:
        self._tiers = tiers
        self._events = events
        for tier in tiers.tiers:
            tier.on_change = self._take

    def start(self, root: bytes) -> None:
        """Announce what is stored already, from the root of the empty salt on."""
        self._announce_after(root)

    def _take(self, tier: Tier, content: Content, is_stored: bool) -> None:
        if content.kind is not MemoryKind.BLOCK:
            return
        if is_stored:
            self._events.stored(tier, content.key, content.parent_key, content.tokens)
            if self._events.is_announced(content.key):
                self._announce_after(content.key)
        else:
            self._events.removed(tier, (content.key,))

    def _announce_after(self, key: bytes) -> None:
        keys = [key]
        while keys:
            parent_key = keys.pop()
            for tier in self._tiers.tiers:
                for stored in tier.blocks_after(parent_key) or ():
                    content = stored.content
                    is_new = not self._events.is_announced(content.key)
                    self._events.stored(tier.tier, content.key, content.parent_key, content.tokens)
                    if is_new:
                        keys.append(content.key)
