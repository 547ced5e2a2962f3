"""Events of the core, as plain values for observers: the worker, the simulator, readers of the prefix tree.

The core itself logs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: int
    waited_ns: int  # total of all its waits
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class PrefixHitFound:
    """An admission found part of its context in the cache."""

    request_id: int
    num_tokens: int  # not computed again
    num_kv_tokens: int  # whose keys and values were found; more than `num_tokens` if a state or window is missing


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: int
    by_request_id: int


Event = Admitted | PrefixHitFound | Preempted
Observer = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observer that does nothing."""


# Changes of the prefix tree, for readers that keep a copy of it. They name content, not blocks: a second block with the
# same content is no change. Partial tails and prefixes with a salt are left out. Named tuples, because there is one for
# each block that is filled.


class Published(NamedTuple):
    """Content is in the tree. Its parent was published before it."""

    key: bytes  # chain key
    parent_key: bytes  # chain key of the block before it; the root key of the empty salt for the first block
    tokens: bytes  # packed; a whole block


class Removed(NamedTuple):
    """Content left the tree with its last block, and all content after it."""

    keys: tuple[bytes, ...]  # children before their parents


class Cleared(NamedTuple):
    """The tree is empty."""


TreeChange = Published | Removed | Cleared
