"""A request: what it asks for, its context (tokens, and the memory that belongs to them), and its progress."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Self

from quire.core.cache import CacheExplanation, StateSlot, TokenChain
from quire.core.values import (
    FinishReason,
    Level,
    PackedPrompt,
    Priority,
    SamplingParams,
    check_salt,
    check_tenant,
    check_tokens,
)
from quire.errors import InvalidRequest


class RequestState(Enum):
    NEW = "new"
    WAITING = "waiting"  # holds no batch row and no blocks
    RUNNING = "running"  # holds a batch row and a block table
    FINISHED = "finished"


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


class Request(Context):
    """One request and its state. Only the scheduler and its parts change it."""

    __slots__ = (
        "arrived_ns",
        "batch_index",
        "cache_explanation",
        "draft",
        "earlier_waits_ns",
        "enqueued_ns",
        "epoch",
        "finish_reason",
        "has_failed_load",
        "is_covered",
        "is_held",
        "last_step",
        "loaded_from",
        "num_cached_tokens",
        "num_caught_up_at",
        "num_drafts",
        "num_load_waits",
        "num_loaded_tokens",
        "num_missing_copies",
        "num_preempted_at",
        "num_preemptions",
        "num_prepaid",
        "num_prompt_tokens",
        "num_unloaded_tokens",
        "priority",
        "request_id",
        "sampling",
        "sequence",
        "state",
        "stop_ids",
        "tenant",
        "urgency",
        "waited_ns",
    )

    def __init__(
        self,
        request_id: int,
        prompt: PackedPrompt | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: Priority = Priority.NORMAL,
        salt: str = "",
        tenant: str = "",
        parent: Request | None = None,
        boundaries: tuple[int, ...] = (),
    ) -> None:
        check_salt(salt)
        check_tenant(tenant)
        tokens = prompt.tokens if isinstance(prompt, PackedPrompt) else check_tokens("prompt", prompt)
        if not tokens:
            raise InvalidRequest("prompt has no tokens: at least one is needed to compute the next")
        super().__init__(tokens, salt, boundaries, parent)
        self.request_id = request_id
        self.num_prompt_tokens = len(tokens)
        self.sampling = sampling or SamplingParams()
        self.stop_ids = frozenset(self.sampling.stop_token_ids)
        self.priority = Priority(priority)
        self.tenant = tenant  # the account that is charged; tenants share a tier fairly

        self.state = RequestState.NEW
        self.finish_reason: FinishReason | None = None
        self.epoch = 0  # increased when results in flight become invalid for this request
        self.sequence = self.urgency = 0  # order of arrival, which breaks ties; `Policy.urgency`, set at admission
        self.arrived_ns = self.enqueued_ns = 0  # the second is the start of the last wait
        self.earlier_waits_ns = 0  # total time of the waits before it, so that a preemption does not reset the age
        self.waited_ns = 0  # total time of all completed waits
        self.num_load_waits = 0  # waits for loads from lower levels that brought it no further
        self.num_missing_copies = 0  # when it last began to wait for a load: reads and copies; 0: it has not waited
        self.num_unloaded_tokens = self.num_loaded_tokens = 0  # on the device before the first of them; brought by them
        self.loaded_from: Level | None = None  # the slowest level of these loads
        self.has_failed_load = False  # one of these loads failed or was late
        self.num_preemptions, self.num_preempted_at = 0, -1  # the largest number of computed tokens at one of them
        self.num_caught_up_at = 0  # after a preemption it catches up until it has computed this many tokens
        self.is_covered, self.num_prepaid = False, 0  # credit was set aside for that; tokens of it not planned yet
        self.last_step = 0  # number of the last step in which a turn gave it tokens

        self.batch_index: int | None = None
        self.draft: Sequence[int] = ()  # guesses of its next tokens, to be verified in its next slice
        self.num_drafts, self.is_held = 0, False  # guesses in the slice in flight; not planned before a sample arrives
        self.num_cached_tokens = 0  # prompt tokens found in the cache at the first admission
        self.cache_explanation: CacheExplanation | None = None  # explanation of that match

    @property
    def awaits_sample(self) -> bool:
        """Whether its next slice depends on samples in flight: drafts are among them, or are to follow them."""
        return self.num_drafts > 0 or (self.is_held and self.num_in_flight > 0)

    @property
    def is_catching_up(self) -> bool:
        """Whether it was preempted before, and has not yet computed a block of new tokens since."""
        return self.num_computed < self.num_caught_up_at

    @property
    def is_spared(self) -> bool:
        """Whether no waiting request may preempt it: it catches up, and the credit of its tier pays for that."""
        return self.is_covered and self.num_computed < self.num_caught_up_at

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :].tolist()

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.state.value} {self.priority.name} epoch={self.epoch}"
            f" batch_index={self.batch_index} computed={self.num_computed} planned={self.num_planned}"
            f" tokens={len(self.tokens)}+{self.num_in_flight}"
            f" blocks={self.block_table}>"
        )
