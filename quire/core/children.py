"""Children of one node of the prefix tree, sorted by tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

_tokens = attrgetter("tokens")
_MAX_BUCKET = 256


class HasTokens(Protocol):
    @property
    def tokens(self) -> bytes:
        """Packed tokens."""


B = TypeVar("B", bound=HasTokens)


class SortedBlocks(Generic[B]):
    """Blocks sorted by their packed tokens, without duplicates.

    Stored in buckets: the root of a busy server has a child per conversation, and inserting into one long list would
    move many entries each time.
    """

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: list[list[B]] = []

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[B]:
        for bucket in self._buckets:
            yield from bucket

    def neighbours(self, tokens: bytes) -> tuple[B | None, B | None]:
        """The last block before `tokens` and the first at or after it.

        One of them has the longest common prefix.
        """
        if not self._buckets:
            return None, None
        b, i = self._locate(tokens)
        bucket = self._buckets[b]
        before = bucket[i - 1] if i else self._buckets[b - 1][-1] if b else None
        after = bucket[i] if i < len(bucket) else None
        return before, after

    def get(self, tokens: bytes) -> B | None:
        """The block with exactly these tokens."""
        if self._buckets and (first := self._buckets[0][0]).tokens == tokens:
            return first  # most nodes have one child
        after = self.neighbours(tokens)[1]
        return after if after is not None and after.tokens == tokens else None

    def add(self, block: B) -> None:
        if not self._buckets:
            self._buckets.append([block])
            return
        b, i = self._locate(block.tokens)
        bucket = self._buckets[b]
        bucket.insert(i, block)
        if len(bucket) > _MAX_BUCKET:
            half = len(bucket) // 2
            self._buckets.insert(b + 1, bucket[half:])
            del bucket[half:]

    def replace(self, old: B, new: B) -> None:
        """Replace `old` by `new`, which has the same tokens."""
        b, i = self._find(old)
        self._buckets[b][i] = new

    def remove(self, block: B) -> None:
        b, i = self._find(block)
        bucket = self._buckets[b]
        del bucket[i]
        if not bucket:
            del self._buckets[b]

    def _find(self, block: B) -> tuple[int, int]:
        if self._buckets and self._buckets[0][0] is block:
            return 0, 0  # most nodes have one child
        if self._buckets:
            b, i = self._locate(block.tokens)
            bucket = self._buckets[b]
            if i < len(bucket) and bucket[i] is block:
                return b, i
        raise KeyError(f"{block!r} is not among these children")

    def _locate(self, tokens: bytes) -> tuple[int, int]:
        """Bucket and index at which these tokens are stored or would be inserted."""
        buckets = self._buckets
        b = 0 if len(buckets) == 1 else min(bisect_left(buckets, tokens, key=_last_tokens), len(buckets) - 1)
        return b, bisect_left(buckets[b], tokens, key=_tokens)


def _last_tokens(bucket: Sequence[HasTokens]) -> bytes:
    return bucket[-1].tokens
