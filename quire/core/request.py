"""A request: sampling parameters, tokens, progress and block table."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, StrEnum
from operator import countOf
from typing import TYPE_CHECKING

from quire.core.block import TOKEN_BYTES
from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.core.chain import TokenChain
    from quire.core.prefix import CacheExplanation
    from quire.core.state_pool import StateSlot
    from quire.core.step import Tier

MAX_TOKEN_ID = 2**32 - 1  # tokens are packed into 32 bits to be hashed and compared
MAX_SALT = 256
MAX_TENANT = 256
MIN_TEMPERATURE = 1e-4
MIN_PENALTY = 1e-2


class Priority(IntEnum):
    """Tier of a request.

    Smaller is more urgent, so that `Aging` can multiply it by the patience.
    """

    HIGH = 0
    NORMAL = 1
    LOW = 2


TIERS = tuple(Priority)  # most urgent first; iterating over the class itself is slow


class RequestState(Enum):
    NEW = "new"
    WAITING = "waiting"  # holds no batch row and no blocks
    RUNNING = "running"  # holds a batch row and a block table
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, or a stop string found above the core
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # only this request failed; its output cannot be used


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions.

    The constructor raises `InvalidRequest` for invalid values.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # random numbers depend on (seed, sample_index, position); callers draw one if the client sent none
    sample_index: int = 0  # index among the n samples of one prompt
    logprobs: int | None = None  # number of alternatives to report in addition to the chosen token
    prompt_logprobs: int | None = None  # needs every prompt position computed, so it skips the prefix cache
    min_tokens: int = 0
    max_tokens: int | None = None  # None: up to the end of the context
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end-of-text ids, unless they are ignored

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _in_range("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, MIN_PENALTY, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("seed", self.seed, -(2**63), 2**64 - 1)
        _whole("sample_index", self.sample_index, 0, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _whole(name, count, 0, MAX_TOKEN_ID)
        check_tokens("logit_bias", tuple(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        check_tokens("stop_token_ids", self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        """Always choose the most probable token.

        Dividing by a temperature this close to 0 would overflow.
        """
        return self.temperature < MIN_TEMPERATURE

    def sample(self, index: int) -> SamplingParams:
        """Parameters for one of the n samples of a prompt.

        Only the first sample computes prompt logprobs.
        """
        return self if index == 0 else replace(self, sample_index=index, prompt_logprobs=None)


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} = {value!r} is not a finite number")
    if not low <= value <= high or (above_low and value == low):
        bound = "above" if above_low else "at least"
        raise InvalidRequest(f"{name} = {value!r} is not {bound} {low} and at most {high}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} = {value!r} is not a whole number from {low} to {high}")


def check_salt(salt: str) -> None:
    if type(salt) is not str or not salt.isprintable() or len(salt) > MAX_SALT:
        raise InvalidRequest(f"salt = {salt!r} is not a printable string of at most {MAX_SALT} characters")


def check_tenant(tenant: str) -> None:
    if type(tenant) is not str or len(tenant) > MAX_TENANT:
        raise InvalidRequest(f"tenant = {tenant!r:.80} is not a string of at most {MAX_TENANT} characters")


def check_tokens(name: str, tokens: Sequence[int]) -> array[int]:
    """Check token ids and return them as a new array of 32-bit words."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens[:]
    try:
        if countOf(map(type, tokens), int) != len(tokens):  # fast for long prompts; a bool is not a token id
            raise TypeError
        return array("I", tokens)
    except (TypeError, OverflowError):
        if not isinstance(tokens, list | tuple | range | Mapping):
            raise InvalidRequest(f"{name} = {tokens!r:.80} is not a list of token ids") from None
        position, token = next((i, t) for i, t in enumerate(tokens) if type(t) is not int or not 0 <= t <= MAX_TOKEN_ID)
        raise InvalidRequest(f"{name}[{position}] = {token!r} is not a token id (0 to {MAX_TOKEN_ID})") from None


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """Token ids that were checked and packed once, so that they are not checked again.

    `PackedPrompt.of` creates one in the process that receives a request. It is sent to the worker unchanged.
    """

    words: bytes  # the ids as 32-bit words in native byte order
    largest: int  # the largest id

    def __post_init__(self) -> None:
        if not self.words or len(self.words) % TOKEN_BYTES:
            raise InvalidRequest(f"prompt of {len(self.words)} bytes is not a positive number of token ids")

    @classmethod
    def of(cls, tokens: PackedPrompt | Sequence[int]) -> PackedPrompt:
        if isinstance(tokens, PackedPrompt):
            return tokens
        words = check_tokens("prompt", tokens)
        if not words:
            raise InvalidRequest("prompt has no tokens: at least one is needed to compute the next")
        return cls(words.tobytes(), max(tokens))

    def __len__(self) -> int:
        return len(self.words) // TOKEN_BYTES

    @property
    def tokens(self) -> array[int]:
        """The token ids, as a new array."""
        return array("I", self.words)


class Request:
    """One request and its state. Only the scheduler and its parts change it.

    Token positions:

        [0, num_computed)               KV exists and is committed: shared blocks first, then its own
        [num_computed, num_planned)     in a step that is in flight
        [num_planned, num_tokens)       to be planned; the last one may be a sample that is still in flight
    """

    __slots__ = (
        "arrived_ns",
        "batch_index",
        "block_table",
        "boundaries",
        "cache_explanation",
        "chain",
        "draft",
        "earlier_waits_ns",
        "enqueued_ns",
        "epoch",
        "finish_reason",
        "has_failed_load",
        "is_covered",
        "is_held",
        "is_prefix_waiting",
        "kv_start",
        "last_step",
        "live_states",
        "loaded_from",
        "next_point",
        "num_cached_tokens",
        "num_caught_up_at",
        "num_computed",
        "num_drafts",
        "num_in_flight",
        "num_load_waits",
        "num_loaded_tokens",
        "num_missing_copies",
        "num_planned",
        "num_preempted_at",
        "num_preemptions",
        "num_prepaid",
        "num_prompt_tokens",
        "num_published",
        "num_unloaded_tokens",
        "num_windows_passed",
        "num_windows_published",
        "parent",
        "points",
        "priority",
        "request_id",
        "salt",
        "sampling",
        "sequence",
        "snapshots",
        "state",
        "state_base",
        "state_slot",
        "state_start",
        "stop_ids",
        "tenant",
        "token_limit",
        "tokens",
        "urgency",
        "waited_ns",
        "window_table",
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
        self.request_id = request_id
        # All known tokens: the prompt, then the samples. Append-only. An array, so that no object per token is created.
        self.tokens = prompt.tokens if isinstance(prompt, PackedPrompt) else check_tokens("prompt", prompt)
        if not self.tokens:
            raise InvalidRequest("prompt has no tokens: at least one is needed to compute the next")
        self.num_prompt_tokens = len(self.tokens)
        self.sampling = sampling or SamplingParams()
        self.stop_ids = frozenset(self.sampling.stop_token_ids)
        self.priority = Priority(priority)
        self.salt = salt  # requests with different salts share nothing
        self.tenant = tenant  # the account that is charged; tenants share a tier fairly
        self.parent = parent  # a request whose blocks to share while it runs (n > 1, branches)
        self.boundaries = boundaries  # positions in the prompt where messages start, ascending

        self.state = RequestState.NEW
        self.finish_reason: FinishReason | None = None
        self.epoch = 0  # increased when results in flight become invalid for this request
        self.sequence = self.urgency = 0  # order of arrival, which breaks ties; `Policy.urgency`, set at admission
        self.arrived_ns = self.enqueued_ns = 0  # the second is the start of the last wait
        self.earlier_waits_ns = 0  # total time of the waits before it, so that a preemption does not reset the age
        self.waited_ns = 0  # total time of all completed waits
        self.is_prefix_waiting = False
        self.num_load_waits = 0  # waits for loads from lower tiers that brought it no further
        self.num_missing_copies = 0  # when it last began to wait for a load: reads and copies; 0: it has not waited
        self.num_unloaded_tokens = self.num_loaded_tokens = 0  # on the device before the first of them; brought by them
        self.loaded_from: Tier | None = None  # the slowest tier of these loads
        self.has_failed_load = False  # one of these loads failed or was late
        self.num_preemptions, self.num_preempted_at = 0, -1  # the largest number of computed tokens at one of them
        self.num_caught_up_at = 0  # after a preemption it catches up until it has computed this many tokens
        self.is_covered, self.num_prepaid = False, 0  # credit was set aside for that; tokens of it not planned yet
        self.last_step = 0  # number of the last step in which a turn gave it tokens

        self.chain: TokenChain | None = None  # chain keys of its blocks
        self.token_limit = 0  # prompt and output together
        self.batch_index: int | None = None
        self.block_table: list[int] = []  # append-only while held, replaced (never cleared) on release
        self.kv_start = 0  # the KV of tokens before it was cached: it is not written again if they are computed again
        self.num_computed = self.num_planned = 0
        self.num_in_flight = 0  # samples of steps that are not committed yet
        self.draft: Sequence[int] = ()  # guesses of its next tokens, to be verified in its next slice
        self.num_drafts, self.is_held = 0, False  # guesses in the slice in flight; not planned before a sample arrives
        self.num_published = 0  # leading full blocks passed to the tree
        self.num_cached_tokens = 0  # prompt tokens found in the cache at the first admission
        self.cache_explanation: CacheExplanation | None = None  # explanation of that match

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

    def sibling(self, request_id: int, sample_index: int) -> Request:
        """Another sample of the same prompt (n > 1).

        It shares the prompt's blocks and has its own random numbers.
        """
        sampling = replace(self.sampling, sample_index=sample_index)
        prompt = self.tokens[: self.num_prompt_tokens]
        return Request(
            request_id, prompt, sampling, priority=self.priority, salt=self.salt, tenant=self.tenant, parent=self
        )

    def branch(self, request_id: int, sampling: SamplingParams) -> Request:
        """A new request that continues from all tokens of this one, prompt and output."""
        return Request(
            request_id, self.tokens, sampling, priority=self.priority, salt=self.salt, tenant=self.tenant, parent=self
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.state.value} {self.priority.name} epoch={self.epoch}"
            f" batch_index={self.batch_index} computed={self.num_computed} planned={self.num_planned}"
            f" tokens={len(self.tokens)}+{self.num_in_flight}"
            f" blocks={self.block_table}>"
        )
