"""Events of the core, as plain values for observers (metrics, logs, the web page).

The core itself logs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.values import FinishReason, Level, Priority


@dataclass(frozen=True, slots=True)
class Arrived:
    request_id: int
    priority: Priority
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: int
    priority: Priority
    batch_index: int
    waited_ns: int  # total of all its waits
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class PrefixHitFound:
    """An admission found part of its context in the cache."""

    request_id: int
    num_tokens: int  # not computed again
    num_kv_tokens: int  # whose keys and values were found; more than `num_tokens` if a state or window is missing
    num_blocks: int  # full blocks, shared without a copy
    num_tail_tokens: int  # after the last full block
    is_adopted: bool  # the tail block is continued in place; otherwise it is copied
    is_fork: bool  # taken from a running parent's table, not found in the tree


@dataclass(frozen=True, slots=True)
class PrefixWaited:
    """A request waits because a running request is computing their common prefix."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PrefixLoaded:
    """A load from a lower level has ended."""

    source: Level  # the slowest level that it read
    num_tokens: int
    is_whole: bool  # everything was loaded and published


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: int
    priority: Priority
    by_request_id: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cached block was taken for new content."""

    block_id: int
    num_tokens: int
    num_descendants: int  # blocks after it that became unreachable


@dataclass(frozen=True, slots=True)
class PinYielded:
    """A pin was dropped because a request or a newer pin needed its blocks."""

    pin_id: str
    block_ids: tuple[int, ...]
    by_request_id: int | None = None  # None: a newer pin


@dataclass(frozen=True, slots=True)
class StaleResultDropped:
    request_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: int
    priority: Priority
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


Event = (
    Arrived
    | Refused
    | Admitted
    | PrefixHitFound
    | PrefixWaited
    | PrefixLoaded
    | Preempted
    | Evicted
    | PinYielded
    | StaleResultDropped
    | Finished
)
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
