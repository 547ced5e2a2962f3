"""Events of the core, as plain values for observers (metrics, logs, the web page).

The core itself logs nothing.
"""

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
    """Observer that does nothing."""
