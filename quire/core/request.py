"""A request: what it asks for, its context, and its progress."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from quire.core.cache.context import Context
from quire.core.cache.prefix import CacheExplanation
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
