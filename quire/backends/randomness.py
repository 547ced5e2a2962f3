"""Random numbers for sampling, computed from a counter instead of drawn from a stream.

A number depends only on (seed, sample index, position). A seeded answer therefore uses the same numbers in any batch,
before and after a preemption, and on every backend.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

_PACK = Struct("<QQQ").pack
_MASK = 2**64 - 1
_SCALE = 2.0**-53
_BASE = blake2b(digest_size=8, person=b"quire.draw")


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` (counted from the start of the prompt)."""
    hashed = _BASE.copy()  # a third faster than a new one
    hashed.update(_PACK(seed & _MASK, sample_index, position))
    return (int.from_bytes(hashed.digest(), "little") >> 11) * _SCALE
