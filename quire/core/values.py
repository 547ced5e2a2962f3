"""Values that all layers share: priorities, levels of the cache, reasons to finish, sampling parameters, prompts.

Checks of fields raise `InvalidRequest`, which names the field and the value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from operator import countOf

from quire.errors import InvalidRequest

NS_PER_S = 1_000_000_000
TOKEN_BYTES = 4  # of a packed token
MAX_TOKEN_ID = 2**32 - 1  # tokens are packed into 32 bits to be hashed and compared
MAX_SALT = 256
MAX_TENANT = 256
MIN_TEMPERATURE = 1e-4
MIN_PENALTY = 1e-2


class Priority(IntEnum):
    """Level of a request.

    Smaller is more urgent, so that `Aging` can multiply it by the patience.
    """

    HIGH = 0
    NORMAL = 1
    LOW = 2


TIERS = tuple(Priority)  # most urgent first; iterating over the class itself is slow


class Level(StrEnum):
    """Where content is cached."""

    DEVICE = "device"  # the runner's own memory, which steps read and write
    HOST = "host"
    DISK = "disk"

    __hash__ = str.__hash__  # that of Enum is Python code, and tables of contents use it very often


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

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

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
