"""The context of a request: its tokens, and the memory that holds their keys, values and states."""

from __future__ import annotations

from array import array
from typing import Self

from quire.core.cache.block import StateSlot
from quire.core.cache.chain import TokenChain


class Context:
    """Tokens, and the memory of three kinds that belongs to them.

    Token positions:

        [0, num_computed)               KV exists and is committed: shared blocks first, then its own
        [num_computed, num_planned)     in a step that is in flight
        [num_planned, num_tokens)       to be planned; the last one may be a sample that is still in flight
    """

    __slots__ = (
        "block_table",
        "boundaries",
        "chain",
        "kv_start",
        "live_states",
        "next_point",
        "num_computed",
        "num_in_flight",
        "num_planned",
        "num_published",
        "num_windows_passed",
        "num_windows_published",
        "parent",
        "points",
        "salt",
        "snapshots",
        "state_base",
        "state_slot",
        "state_start",
        "token_limit",
        "tokens",
        "window_table",
    )

    def __init__(self, tokens: array[int], salt: str, boundaries: tuple[int, ...], parent: Self | None) -> None:
        # All known tokens: the prompt, then the samples. Append-only. An array, so that no object per token is created.
        self.tokens = tokens
        self.salt = salt  # contexts with different salts share nothing
        self.boundaries = boundaries  # positions in the prompt where messages start, ascending
        self.parent = parent  # a request whose blocks to share while it runs (n > 1, branches)
        self.token_limit = 0  # prompt and output together
        self.chain: TokenChain | None = None  # chain keys of its blocks

        self.block_table: list[int] = []  # append-only while held, replaced (never cleared) on release
        self.kv_start = 0  # the KV of tokens before it was cached: it is not written again if they are computed again
        self.num_computed = self.num_planned = 0
        self.num_in_flight = 0  # samples of steps that are not committed yet
        self.num_published = 0  # leading full blocks passed to the tree

        # In a model with windows or recurrent states
        self.points: list[int] = []  # positions where others are expected to continue, ascending
        self.next_point = 0  # index of the first that is not planned yet
        self.window_table: list[int] = []  # window blocks by block number; 0 behind the window
        self.num_windows_passed = 0  # leading entries that are 0
        self.num_windows_published = 0  # leading entries passed to the tree
        self.live_states: tuple[StateSlot, ...] = ()  # its own slots, written in turn
        self.state_slot: StateSlot | None = None  # has the state after `num_planned` tokens; None: the empty state
        self.snapshots: list[StateSlot] = []  # held besides: snapshots it reads, and those it writes
        self.state_start = self.state_base = 0  # positions of the state it continued from; of the last snapshot

    @property
    def num_tokens(self) -> int:
        """Known tokens plus samples in flight."""
        return len(self.tokens) + self.num_in_flight
