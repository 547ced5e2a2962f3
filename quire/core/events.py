"""What happened, as plain values for observers (metrics, logs, the page). The core itself logs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.request import FinishReason, Priority


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
    waited_ns: int  # all its waits together
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class PrefixHitFound:
    """An admission found part of its context in the cache."""

    request_id: int
    num_tokens: int
    num_blocks: int  # shared in place
    num_tail_tokens: int  # beyond the last full block
    is_adopted: bool  # the tail continues in place; otherwise it is copied
    is_fork: bool  # taken from a running parent's table, not found in the tree


@dataclass(frozen=True, slots=True)
class PrefixWaited:
    """A request stepped aside because a running one is computing their common prefix."""

    request_id: int


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
    num_descendants: int  # positions behind it that became unreachable


@dataclass(frozen=True, slots=True)
class PinYielded:
    """Pinned blocks became evictable because work needed room, or newer pins did."""

    pin_id: str
    block_ids: tuple[int, ...]


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
    | Preempted
    | Evicted
    | PinYielded
    | StaleResultDropped
    | Finished
)
Observer = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The observer of those who do not observe."""
