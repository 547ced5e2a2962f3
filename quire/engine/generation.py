"""One generation: the parameters that a caller sets, the request that an engine runs, and the stream of its answers.

All requests pass through here: those of the server's protocols, the command line and `LLM`. A `GenerationRequest` is
also what is sent to a worker. Nothing here needs msgspec: a machine that only measures an engine may not have it.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from quire.core.cache import CacheExplanation
from quire.core.step import PromptLogprobs, TokenLogprobs
from quire.core.values import (
    FinishReason,
    PackedPrompt,
    Priority,
    SamplingParams,
    check_salt,
    check_tenant,
    check_tokens,
)
from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.text.grammar import Grammar, GrammarKind
from quire.text.messages import AnswerParser
from quire.text.tokenizer import Detokenizer, StopStrings, Tokenizer
from quire.weights.spec import GenerationDefaults

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T", int, float)

MAX_TEMPERATURE = 2.0  # as in OpenAI's API; higher values sample noise
MAX_SAMPLES = 32
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_IDS = 128
MAX_PINS = 8  # of one request

NewParser = Callable[[], AnswerParser]


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
        check_temperature(self.temperature)
        for name, kinds, what in (
            ("ignore_eos", bool, "true or false"),
            ("include_stop", bool, "true or false"),
            ("skip_special", bool, "true or false"),
            ("logit_bias", Mapping, "a mapping of token ids to numbers"),
            ("stop", str | list | tuple, "a string or a list of strings"),
            ("prediction", str, "text"),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise InvalidRequest(f"{name} = {getattr(self, name)!r:.80} is not {what}")
        check_tokens("stop_token_ids", self.stop_token_ids)
        for name, low, high in (
            ("n", 1, MAX_SAMPLES),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            count = getattr(self, name)
            if (count is not None or name == "n") and (type(count) is not int or not low <= count <= high):
                raise InvalidRequest(f"{name} = {count!r} is not a whole number from {low} to {high}")
        if self.is_empty and self.min_tokens:
            raise InvalidRequest(f"min_tokens = {self.min_tokens!r} is more than max_tokens = 0")
        for name, entries, most in (
            ("logit_bias", self.logit_bias, MAX_BIASES),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS),
        ):
            if len(entries) > most:
                raise InvalidRequest(f"{name} has {len(entries)} entries, more than {most}")
        if self.grammar is not None and self.ignore_eos and self.grammar.kind is not GrammarKind.TOKENS:
            raise InvalidRequest("ignore_eos = True cannot be used with a grammar: the grammar ends the answer")
        if self.stops:
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
    """Keep the full blocks of a prompt's first tokens in the cache for a limited time.

    The server makes the id from a digest and counts the tokens; the time is one that a protocol names.
    """

    pin_id: str
    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its parameters, as token ids and numbers, for any engine. It is sent to a worker unchanged."""

    prompt: PackedPrompt
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
    pins: tuple[PinPrefix, ...] = ()  # set when the prompt has been computed; dropped if the request ends before that
    grammar: Grammar | None = None
    boundaries: tuple[int, ...] = ()  # where messages start in the prompt: later requests may continue from there
    prediction: PackedPrompt | None = None  # tokens that the answer is expected to contain

    @classmethod
    def of(cls, prompt: PackedPrompt | Sequence[int], sampling: SamplingParams, **fields: Any) -> GenerationRequest:
        """A request for token ids."""
        return cls(PackedPrompt.of(prompt), sampling, **fields)

    def __post_init__(self) -> None:
        """Validate what comes from clients and is not checked in `GenerationParams`."""
        check_salt(self.salt)
        check_tenant(self.tenant)
        if len(self.pins) > MAX_PINS:
            raise InvalidRequest(f"pins has {len(self.pins)} entries, more than {MAX_PINS}")
        for index, pin in enumerate(self.pins):
            if pin.num_tokens > len(self.prompt):
                raise InvalidRequest(
                    f"pins[{index}].num_tokens = {pin.num_tokens} is more than the prompt's {len(self.prompt)} tokens"
                )


class Predicted(NamedTuple):
    """Tokens of a prediction that were verified so far."""

    num_right: int = 0
    num_wrong: int = 0


class EngineOutput(NamedTuple):
    """New tokens of one sample. `cache` is set in its first output only."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    cache: CacheExplanation | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: PromptLogprobs | None
    error: str | None
    predicted: Predicted | None = None  # set if the request has a prediction that was used


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    text: str
    data: bytes  # the exact bytes of the token, which may be part of a character
    logprob: float
    rank: int  # 0: the most probable
    top: tuple[TokenLogprob, ...] = ()
    offset: int = 0  # position in the answer's text, in characters; only for tokens of the answer


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in the cache by the first sample; other samples share its KV
    accepted_prediction_tokens: int = 0  # tokens of the prediction that were verified, and right
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one sample."""

    index: int  # of the sample
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop: str | None  # the stop string that ended it
    error: str | None = None  # if the finish reason is ERROR


@dataclass(frozen=True, slots=True)
class Completion:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    prompt: PackedPrompt
    completions: tuple[Completion, ...]
    usage: Usage
    cache: CacheExplanation | None  # how much of the prompt was cached for the first sample, and why not more
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per prompt token; the first is None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt.tokens)

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.completions[0].text


@dataclass(slots=True)
class Sample:
    """One sample of a request. `Generation.push_token` adds tokens of plain text, `Generation.push` all others."""

    detokenizer: Detokenizer
    stops: StopStrings | None
    min_tokens: int = 0  # the text of the first tokens is not searched for stop strings
    parser: AnswerParser | None = None
    is_plain: bool = False  # the text of the next token does not depend on earlier ones, and is passed on as it is
    last_s: float | None = None  # arrival of the last token
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    held: list[TokenLogprob] = field(default_factory=list)  # log probabilities of tokens whose text is held back
    num_read: int = 0  # length of the text of all tokens, released or held back
    num_chars: int = 0  # length of the returned text
    finish_reason: FinishReason | None = None
    stop: str | None = None
    error: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether a stop string or the end of the turn was read, after which nothing belongs to the answer."""
        return self.stop is not None or (self.parser is not None and self.parser.is_over)

    def read(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text that these tokens release, and the position of each token in the answer.

        The token after which the answer is cut is the last: the others are dropped.
        """
        shown: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            text = self.detokenizer.push((token,))
            offsets.append(self.num_read)
            self.num_read += len(text)
            if self.stops is not None and len(self.token_ids) + len(offsets) > self.min_tokens:
                text, self.stop = self.stops.push(text)
            shown.append(text)
            if self.parser is not None:
                self.parser.push(text)
            if self.is_cut:
                break
        return "".join(shown), offsets

    def read_rest(self) -> str:
        """Flush an incomplete character and held text at the end. This may still complete a stop string."""
        rest = self.detokenizer.finish()
        self.num_read += len(rest)
        if self.stops is not None:
            rest, self.stop = self.stops.push(rest)
            rest += self.stops.finish()
        if self.parser is not None:
            self.parser.push(rest)
        return rest

    def released(self, *, is_whole: bool) -> tuple[TokenLogprob, ...]:
        """The held log probabilities whose text was returned. Text removed by a stop string has none."""
        held = self.held
        if not held:
            return ()
        count = len(held) if is_whole else sum(entry.offset < self.num_chars for entry in held)  # offsets are sorted
        self.held = held[count:]
        return tuple(held[:count])


class TokenSink(Protocol):
    """Receives new text as it arrives. Methods return False if the text must be queued."""

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        """Take a token of plain text of sample `index`."""

    def take_delta(self, delta: Delta) -> bool:
        """Take any other delta without a finish reason."""


class Generation:
    """The stream of one request: the engine's outputs go in, the text of its samples comes out.

    Whoever drives the engine passes its outputs to `push`, and the deltas that it returns to `deliver` if a task reads
    them. The task iterates over `deltas`: a failure raises there, and leaving early cancels the request. Or it waits
    for `updated`, which several generations may share, and calls `take`. A `sink` receives text when it arrives,
    without waking a task, as long as nothing is queued. The last delta is always queued.
    """

    __slots__ = (
        "_deltas",
        "_is_raised",
        "_is_simple",
        "_on_start",
        "_plain_texts",
        "_predicted",
        "_prompt_logprobs",
        "_updated",
        "cache",
        "error",
        "first_s",
        "num_cached_tokens",
        "num_moves",
        "on_cancel",
        "queued_s",
        "request",
        "request_ids",
        "samples",
        "sink",
        "tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        request_ids: tuple[int, ...] = (),
        *,
        new_parser: NewParser | None = None,
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> None:
        """`new_parser`: makes parsers that may end the turn. `on_start`: called before the first step."""
        self.request = request
        self.tokenizer = tokenizer
        self.request_ids = request_ids  # one per sample
        self.samples = [
            Sample(
                Detokenizer(tokenizer, skip_special=request.skip_special, shown_special=request.shown_special),
                StopStrings(request.stop, include_stop=request.include_stop) if request.stop else None,
                request.sampling.min_tokens,
                None if new_parser is None else new_parser(),
            )
            for _ in range(request.n)
        ]
        # Text is passed on as it comes.
        has_work = request.stop or request.hides_answer or new_parser is not None
        self._is_simple = not has_work and request.sampling.logprobs is None
        self._plain_texts = tokenizer.plain_texts
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._predicted: dict[int, Predicted] = {}  # by sample
        self.queued_s: float | None = None  # time in the worker's queue; None until it starts
        self.num_cached_tokens = 0  # of the first sample: the others share its KV
        self.cache: CacheExplanation | None = None  # how many are cached, and why not more; known at the start
        self.num_moves = 0  # from replicas that ended before it started
        self.first_s: float | None = None  # arrival of the first token, in the time of `time.monotonic`
        self.error: QuireError | None = None  # also before it was raised
        self._is_raised = False
        self._deltas: list[Delta] = []  # not taken yet
        if updated is None:
            import asyncio  # the command line reads the parameters here, and does not need it

            updated = asyncio.Event()
        self._updated = updated
        self._on_start = on_start
        self.on_cancel: Callable[[Generation], None] | None = None
        self.sink: TokenSink | None = None

    @property
    def last_s(self) -> float | None:
        """Arrival of the last token so far."""
        return max((sample.last_s for sample in self.samples if sample.last_s is not None), default=None)

    @property
    def is_started(self) -> bool:
        return self.queued_s is not None

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def is_over(self) -> bool:
        """Whether it ended and everything was taken, including the error, which is taken when it is raised."""
        if self.error is not None:
            return self._is_raised
        return not self._deltas and self.is_finished

    @property
    def usage(self) -> Usage:
        """Usage so far. The prompt and its cached tokens are counted once, for the first sample."""
        num_tokens = sum(len(sample.token_ids) for sample in self.samples)
        right = sum(one.num_right for one in self._predicted.values())
        wrong = sum(one.num_wrong for one in self._predicted.values())
        return Usage(len(self.request.prompt), num_tokens, self.num_cached_tokens, right, wrong)

    def num_tokens(self, index: int) -> int:
        return len(self.samples[index].token_ids)

    # For the reader

    def take(self) -> list[Delta]:
        """The new deltas, possibly none. If the request failed, raises the error once no deltas are left."""
        deltas, self._deltas = self._deltas, []
        if self.error is not None:
            if not deltas:
                self._is_raised = True
                raise self.error
            self._updated.set()  # the caller must call again to get the error
        return deltas

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Not for generations that share `updated`."""
        try:
            while True:
                self._updated.clear()
                for delta in self.take():
                    yield delta
                if self.is_over:
                    return
                await self._updated.wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free the request's resources in the worker, and end its iteration. Does nothing if it has ended."""
        if self.on_cancel is not None:
            self.on_cancel(self)

    def detach(self) -> None:
        """Drop references to the request: without cycles its memory is freed when it ends, not by a collection."""
        self.sink = None
        self._on_start = None

    def whole(self) -> GenerationOutput:
        """The whole answer. Raises RequestFailed if any sample failed."""
        for sample in self.samples:
            if sample.error is not None:
                raise RequestFailed(sample.error)
        return self.output()

    def output(self) -> GenerationOutput:
        """The whole answer. Failed samples have their error."""
        prompt_logprobs = None
        if self.request.sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(map(self._prompt_logprobs.get, range(len(self.request.prompt))))
        return GenerationOutput(
            prompt=self.request.prompt,
            completions=tuple(self._completion(index) for index in range(self.request.n)),
            usage=self.usage,
            cache=self.cache,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, index: int) -> Completion:
        sample = self.samples[index]
        return Completion(
            index=index,
            text="".join(sample.text),
            token_ids=tuple(sample.token_ids),
            finish_reason=sample.finish_reason or FinishReason.CANCELLED,
            stop=sample.stop,
            logprobs=None if self.request.sampling.logprobs is None else tuple(sample.logprobs),
            error=sample.error,
        )

    # For the driver of the engine

    def start(self, queued_s: float, num_cached_tokens: int, cache: CacheExplanation | None) -> None:
        self.queued_s, self.num_cached_tokens, self.cache = queued_s, num_cached_tokens, cache
        if self._on_start is not None:
            self._on_start(self)
        self._updated.set()

    def push_token(self, index: int, token_id: int, now_s: float, previous: dict[float | None, int]) -> bool:
        """Take the next token of an unfinished sample, if it is plain text. False: the caller must use `push`.

        This is the path of nearly every token: it does what `push`, `deliver` and `note_tokens` do, in a fraction of
        the time. `previous` counts the tokens by the time of the token before them.
        """
        sample = self.samples[index]
        if not sample.is_plain:
            return False
        text = self._plain_texts[token_id]
        if not text:  # special, or a part of a character
            return False
        sample.text.append(text)
        sample.token_ids.append(token_id)
        last_s = sample.last_s
        sample.last_s = now_s
        if last_s is None and self.first_s is None:
            self.first_s = now_s
        previous[last_s] = previous.get(last_s, 0) + 1
        sink = self.sink
        if sink is None or self._deltas or not sink.take_token(index, token_id, text, now_s):
            self._deltas.append(Delta(index, text, (token_id,), (), None, None))
            self._updated.set()
        return True

    def deliver(self, delta: Delta) -> None:
        sink = None if delta.finish_reason is not None else self.sink
        if sink is None or self._deltas or not sink.take_delta(delta):
            self._deltas.append(delta)
            self._updated.set()

    def note_tokens(self, index: int, now_s: float) -> float | None:
        """Record that tokens of a sample arrived. Returns the time of the previous ones; None: these are the first."""
        sample = self.samples[index]
        last_s, sample.last_s = sample.last_s, now_s
        if last_s is None and self.first_s is None:
            self.first_s = now_s
        return last_s

    def push(self, index: int, output: EngineOutput) -> Delta:
        """Take one output of sample `index`.

        If the delta has a finish reason and the output has none, the caller must end the sample in the engine.
        """
        sample = self.samples[index]
        if index == 0:
            self.num_cached_tokens, self.cache = output.num_cached_tokens, output.cache or self.cache
        if output.prompt_logprobs is not None:
            for position, entry in enumerate(output.prompt_logprobs.entries, output.prompt_logprobs.start):
                self._prompt_logprobs[position] = self._readable(entry, 0)
        if output.predicted is not None:
            self._predicted[index] = output.predicted
        if sample.finish_reason is not None:  # a stop string ended it; these tokens were in flight
            return Delta(index, "", (), (), sample.finish_reason, None)
        if self.request.hides_answer:
            output = _without_answer(output)
        is_stop = output.finish_reason is FinishReason.STOP and not self.request.include_stop
        last = output.tokens[-1:]  # a stop token, or the last token of a complete grammar
        hidden = last if is_stop and set(last) & set(self.request.sampling.stop_token_ids) else ()
        shown = output.tokens[: len(output.tokens) - len(hidden)]
        text, offsets = sample.read(shown)
        token_ids, reason = output.tokens, output.finish_reason
        if sample.is_cut:
            token_ids = output.tokens[: len(offsets)]
        elif reason is not None:
            text += sample.read_rest()
        if sample.is_cut and output.error is None:
            reason = FinishReason.STOP
        sample.text.append(text)
        sample.num_chars += len(text)
        sample.token_ids += token_ids
        if output.logprobs:
            offsets += [sample.num_read for _ in hidden]
            sample.held += map(self._readable, output.logprobs[: len(token_ids)], offsets)
        logprobs = sample.released(is_whole=reason is not None and sample.stop is None)
        sample.logprobs += logprobs
        sample.finish_reason, sample.error = reason, output.error
        sample.is_plain = self._is_simple and reason is None and sample.detokenizer.is_clean
        return Delta(index, text, tuple(token_ids), logprobs, reason, sample.stop, output.error)

    def note_cancelled(self) -> None:
        """End all unfinished samples. Their text so far is the answer."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or FinishReason.CANCELLED
        self._updated.set()

    def fail_sample(self, index: int, error: str) -> Delta:
        """End a sample with an error: its engine died, or its tokens could not be decoded."""
        sample = self.samples[index]
        if sample.finish_reason is None:
            sample.finish_reason, sample.error = FinishReason.ERROR, error
        return Delta(index, "", (), (), sample.finish_reason, None, sample.error)

    def fail(self, error: QuireError) -> None:
        """End all unfinished samples with an error, which the reader raises. Only the first error is kept."""
        for index in range(len(self.samples)):
            self.fail_sample(index, str(error))
        if self.error is None:
            self.error = type(error)(str(error))  # a copy: each task that raises it adds to its traceback
        self._updated.set()

    # Log probabilities

    def _readable(self, entry: TokenLogprobs, offset: int) -> TokenLogprob:
        top = tuple(self._named(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top))
        return self._named(entry.token, entry.logprob, entry.rank, top, offset)

    def _named(
        self, token: int, logprob: float, rank: int, top: tuple[TokenLogprob, ...] = (), offset: int = 0
    ) -> TokenLogprob:
        data = self.tokenizer.token_bytes(token)
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob, rank, top, offset)


def _without_answer(output: EngineOutput) -> EngineOutput:
    """Remove the answer: the core always samples one token, even if max_tokens is 0."""
    reason = output.finish_reason
    hidden = FinishReason.LENGTH if reason in (FinishReason.STOP, FinishReason.LENGTH) else reason
    return output._replace(tokens=(), logprobs=(), finish_reason=hidden)
