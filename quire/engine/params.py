"""Generation parameters as a caller sets them, and the immutable request they become.

All requests pass through here: those of the server's protocols, the command line and `LLM`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from quire.core.values import PackedPrompt, Priority, SamplingParams, check_salt, check_tenant, check_tokens
from quire.errors import InvalidRequest
from quire.text.grammar import Grammar, GrammarKind
from quire.text.stream import AnswerParser, StopStrings
from quire.weights.spec import GenerationDefaults

T = TypeVar("T", int, float)

MAX_TEMPERATURE = 2.0  # as in OpenAI's API; higher values sample noise
MAX_SAMPLES = 32
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_IDS = 128
MAX_PINS = 8  # of one request
MAX_PIN_ID = 256
MAX_PIN_TTL_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Parameters of a generation. None: the model's recommended value, or else the neutral one."""

    temperature: float | None = None  # 0 to 2; 0: always the most probable token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # the same seed gives the same random numbers, regardless of batching
    n: int = 1  # answers per prompt
    max_tokens: int | None = None  # None: up to the end of the context; 0: only the prompt is computed
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    skip_special: bool = True  # omit control tokens from the text
    logprobs: int | None = None  # alternatives to report per token of the answer
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # constrains the answer
    prediction: str = ""  # text that the answer is expected to contain, which is then verified several tokens at a time

    def __post_init__(self) -> None:
        for name, empty in (("logit_bias", {}), ("stop", ()), ("stop_token_ids", ())):
            if getattr(self, name) is None:  # clients send null for unset fields
                object.__setattr__(self, name, empty)
        _check_samples(self.n)
        check_temperature(self.temperature)
        for name in ("ignore_eos", "include_stop", "skip_special"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} = {getattr(self, name)!r} is not true or false")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias = {self.logit_bias!r:.80} is not a mapping of token ids to numbers")
        if not isinstance(self.stop, str | list | tuple):
            raise InvalidRequest(f"stop = {self.stop!r:.80} is not a string or a list of strings")
        check_tokens("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.prediction, str):
            raise InvalidRequest(f"prediction = {self.prediction!r:.80} is not text")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not 0 <= count <= MAX_LOGPROBS):
                raise InvalidRequest(f"{name} = {count!r} is not a whole number from 0 to {MAX_LOGPROBS}")
        if self.is_empty and self.min_tokens:
            raise InvalidRequest(f"min_tokens = {self.min_tokens!r} is more than max_tokens = 0")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias has {len(self.logit_bias)} entries, more than {MAX_BIASES}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"stop_token_ids has {len(self.stop_token_ids)} entries, more than {MAX_STOP_IDS}")
        if self.grammar is not None and self.ignore_eos and self.grammar.kind is not GrammarKind.TOKENS:
            raise InvalidRequest("ignore_eos = True cannot be used with a grammar: the grammar ends the answer")
        StopStrings(self.stops)  # refuses invalid stop strings
        self.sampling(GenerationDefaults(), ())  # refuses invalid sampling parameters

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        return type(self.max_tokens) is int and self.max_tokens == 0

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, defaults: GenerationDefaults, eos_token_ids: Sequence[int]) -> SamplingParams:
        """The sampling parameters, with the model's defaults filled in. Without a seed, a random one is used."""
        stop_ids = tuple(dict.fromkeys((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids))))
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=_first(self.top_k, defaults.top_k, 0),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            seed=_seeds.getrandbits(63) if self.seed is None else self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            min_tokens=self.min_tokens,
            max_tokens=1 if self.is_empty else self.max_tokens,  # the minimum of the core
            stop_token_ids=stop_ids,
        )


_seeds = random.Random()  # itself seeded by the system; asking the system for each request costs a system call


def check_temperature(value: float | None, high: float = MAX_TEMPERATURE) -> None:
    """Raise InvalidRequest for a number outside 0 to `high`. Other types are refused with the other parameters."""
    if type(value) in (int, float) and value is not None and math.isfinite(value) and not 0 <= value <= high:
        raise InvalidRequest(f"temperature = {value!r} is not from 0 to {high:g}")


def _first(given: T | None, recommended: T | None, neutral: T) -> T:
    return given if given is not None else recommended if recommended is not None else neutral


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """Keep the full blocks of a prompt's first tokens in the cache for a limited time."""

    pin_id: str
    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        check_pin_id(self.pin_id)
        if type(self.num_tokens) is not int or self.num_tokens < 1:
            raise InvalidRequest(f"num_tokens = {self.num_tokens!r} is not a whole number of at least 1")
        if type(self.ttl_s) not in (int, float) or not math.isfinite(self.ttl_s):
            raise InvalidRequest(f"ttl_s = {self.ttl_s!r} is not a finite number")
        if not 0 < self.ttl_s <= MAX_PIN_TTL_S:
            raise InvalidRequest(f"ttl_s = {self.ttl_s!r} is not above 0 and at most {MAX_PIN_TTL_S:.0f}")


def check_pin_id(pin_id: str) -> None:
    if type(pin_id) is not str or not pin_id.isprintable() or not 1 <= len(pin_id) <= MAX_PIN_ID:
        raise InvalidRequest(f"pin_id = {pin_id!r:.80} is not 1 to {MAX_PIN_ID} printable characters")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its parameters, as token ids and plain numbers, for any engine."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    hides_answer: bool = False  # max_tokens was 0: the one token that is sampled is not returned
    shown_special: frozenset[int] = frozenset()  # control tokens to keep in the text for the parser
    priority: Priority = Priority.NORMAL
    salt: str = ""
    tenant: str = ""  # for fair sharing between the tenants of a tier
    session: str = ""  # requests of a session are sent to the same replica of a cluster if that is not much more work
    pins: tuple[PinPrefix, ...] = ()
    grammar: Grammar | None = None
    boundaries: tuple[int, ...] = ()  # where messages start in the prompt: later requests may continue from there
    prediction: PackedPrompt | None = None  # tokens that the answer is expected to contain
    # Creates a parser that may end the turn.
    new_parser: Callable[[], AnswerParser] | None = field(default=None, repr=False, compare=False)
    packed: PackedPrompt = field(init=False, repr=False, compare=False)  # the prompt in the engine's format

    def __post_init__(self) -> None:
        """Validate everything, so that an invalid request cannot disturb a step of other requests."""
        object.__setattr__(self, "packed", PackedPrompt.of(self.prompt))
        check_salt(self.salt)
        check_tenant(self.tenant)
        _check_samples(self.n)
        if not isinstance(self.priority, Priority):
            raise InvalidRequest(f"priority = {self.priority!r} is not one of {', '.join(Priority.__members__)}")
        if len(self.pins) > MAX_PINS:
            raise InvalidRequest(f"pins has {len(self.pins)} entries, more than {MAX_PINS}")
        for index, pin in enumerate(self.pins):
            if pin.num_tokens > len(self.prompt):
                raise InvalidRequest(
                    f"pins[{index}].num_tokens = {pin.num_tokens} is more than the prompt's {len(self.prompt)} tokens"
                )


def _check_samples(n: int) -> None:
    if type(n) is not int or not 1 <= n <= MAX_SAMPLES:
        raise InvalidRequest(f"n = {n!r} is not a whole number from 1 to {MAX_SAMPLES}")
