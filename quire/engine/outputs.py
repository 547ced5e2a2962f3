"""Results of a generation: text deltas, then the whole answer with its token usage.

`Answers` converts the engine outputs (token ids) of one request with its n samples into deltas (text). The code that
drives an engine owns one per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.cache.prefix import CacheExplanation
from quire.core.step import PromptLogprobs, TokenLogprobs
from quire.core.values import FinishReason
from quire.engine.engine import EngineOutput
from quire.engine.guesses import Predicted
from quire.engine.params import GenerationRequest
from quire.errors import RequestFailed
from quire.text.stream import AnswerParser, TextStream
from quire.text.tokenizer import Tokenizer


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
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    cache: CacheExplanation | None  # how much of the prompt was cached for the first sample, and why not more
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per prompt token; the first is None

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.completions[0].text


@dataclass(slots=True)
class Sample:
    """One sample of a request. `Generation.push_token` adds tokens of plain text, `Answers.push` all others."""

    stream: TextStream
    parser: AnswerParser | None = None
    is_simple: bool = False  # text is passed on as it comes: no stop strings, log probabilities or tools
    is_plain: bool = False  # simple, and the text of the next token does not depend on earlier ones
    last_s: float | None = None  # arrival of the last token
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    held: list[TokenLogprob] = field(default_factory=list)  # log probabilities of tokens whose text is held back
    num_chars: int = 0  # length of the returned text
    finish_reason: FinishReason | None = None
    stop: str | None = None
    error: str | None = None


class Answers:
    """The samples of one generation request, as text."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.samples = [
            Sample(
                TextStream(
                    tokenizer,
                    stops=request.stop,
                    include_stop=request.include_stop,
                    skip_special=request.skip_special,
                    shown_special=request.shown_special,
                    min_tokens=request.sampling.min_tokens,
                ),
                None if request.new_parser is None else request.new_parser(),
                _is_simple(request),
            )
            for _ in range(request.n)
        ]
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._cached_tokens = 0
        self._predicted: dict[int, Predicted] = {}  # by sample
        self._cache: CacheExplanation | None = None

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def usage(self) -> Usage:
        """Usage so far. The prompt and its cached tokens are counted once, for the first sample."""
        num_tokens = sum(len(sample.token_ids) for sample in self.samples)
        right = sum(one.num_right for one in self._predicted.values())
        wrong = sum(one.num_wrong for one in self._predicted.values())
        return Usage(len(self.request.prompt), num_tokens, self._cached_tokens, right, wrong)

    @property
    def cache(self) -> CacheExplanation | None:
        return self._cache

    def num_tokens(self, index: int) -> int:
        return len(self.samples[index].token_ids)

    def push(self, index: int, output: EngineOutput) -> Delta:
        """Take one output of sample `index`.

        If the delta has a finish reason and the output has none, the caller must end the sample in the engine.
        """
        sample = self.samples[index]
        if index == 0:
            self._cached_tokens, self._cache = output.num_cached_tokens, output.cache or self._cache
        if output.prompt_logprobs is not None:
            self._take_prompt_logprobs(output.prompt_logprobs)
        if output.predicted is not None:
            self._predicted[index] = output.predicted
        if sample.finish_reason is not None:  # a stop string ended it; these tokens were in flight
            return Delta(index, "", (), (), sample.finish_reason, None)
        if sample.parser is not None and len(output.tokens) > 1:
            return self._push_each(index, output)
        if self.request.hides_answer:
            output = _without_answer(output)
        is_stop = output.finish_reason is FinishReason.STOP and not self.request.include_stop
        last = output.tokens[-1:]  # a stop token, or the last token of a complete grammar
        hidden = last if is_stop and set(last) & set(self.request.sampling.stop_token_ids) else ()
        shown = output.tokens[: len(output.tokens) - len(hidden)]
        delta = sample.stream.push(shown)
        text, stop = delta.text, delta.stop
        token_ids = output.tokens[: delta.num_tokens] if stop is not None else output.tokens
        reason = FinishReason.STOP if stop is not None else output.finish_reason
        if reason is not None and stop is None:
            rest = sample.stream.finish()
            text, stop = text + rest.text, rest.stop
            reason = FinishReason.STOP if stop is not None else reason
        if sample.parser is not None and reason in (None, FinishReason.LENGTH):
            sample.parser.push(text)
            reason = FinishReason.STOP if sample.parser.is_over else reason
        sample.text.append(text)
        sample.num_chars += len(text)
        sample.token_ids += token_ids
        if output.logprobs:
            offsets = [*(token.offset for token in delta.tokens), *(sample.stream.num_chars for _ in hidden)]
            sample.held += map(self._readable, output.logprobs[: len(token_ids)], offsets)
        logprobs = _released(sample, is_whole=reason is not None and stop is None)
        sample.logprobs += logprobs
        sample.finish_reason, sample.stop, sample.error = reason, stop, output.error
        sample.is_plain = sample.is_simple and reason is None and sample.stream.detokenizer.is_clean
        return Delta(index, text, tuple(token_ids), logprobs, reason, stop, output.error)

    def _push_each(self, index: int, output: EngineOutput) -> Delta:
        """Take the tokens of an output one by one, because a parser may end the answer after any of them."""
        deltas: list[Delta] = []
        for place, token in enumerate(output.tokens):
            is_last = place == len(output.tokens) - 1
            part = output._replace(
                tokens=(token,),
                logprobs=output.logprobs[place : place + 1],
                prompt_logprobs=None,
                finish_reason=output.finish_reason if is_last else None,
                error=output.error if is_last else None,
            )
            deltas.append(self.push(index, part))
            if deltas[-1].finish_reason is not None:
                break
        end = deltas[-1]
        return Delta(
            index,
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            tuple(one for delta in deltas for one in delta.logprobs),
            end.finish_reason,
            end.stop,
            end.error,
        )

    def cancel(self, index: int) -> None:
        """End a sample early. Its text so far is the answer."""
        sample = self.samples[index]
        if sample.finish_reason is None:
            sample.finish_reason = FinishReason.CANCELLED

    def fail(self, index: int, error: str) -> Delta:
        """End a sample with an error: its engine died, or its tokens could not be decoded."""
        sample = self.samples[index]
        if sample.finish_reason is None:
            sample.finish_reason, sample.error = FinishReason.ERROR, error
        return Delta(index, "", (), (), sample.finish_reason, None, sample.error)

    def fail_all(self, error: str) -> None:
        """Fail all samples, finished ones included: the caller's callback raised."""
        for sample in self.samples:
            sample.finish_reason, sample.error = FinishReason.ERROR, error

    def result(self) -> GenerationOutput:
        """The whole answer. Raises RequestFailed if any sample failed."""
        for sample in self.samples:
            if sample.error is not None:
                raise RequestFailed(sample.error)
        return self.output()

    def output(self) -> GenerationOutput:
        """The whole answer. Failed samples have their error."""
        return GenerationOutput(
            prompt_token_ids=self.request.prompt,
            completions=tuple(self._completion(index) for index in range(self.request.n)),
            usage=self.usage,
            cache=self._cache,
            prompt_logprobs=self._all_prompt_logprobs(),
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

    def _take_prompt_logprobs(self, found: PromptLogprobs) -> None:
        for position, entry in enumerate(found.entries, found.start):
            self._prompt_logprobs[position] = self._readable(entry, 0)

    def _all_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return tuple(self._prompt_logprobs.get(position) for position in range(len(self.request.prompt)))

    def _readable(self, entry: TokenLogprobs, offset: int) -> TokenLogprob:
        top = tuple(self._named(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top))
        return self._named(entry.token, entry.logprob, entry.rank, top, offset)

    def _named(
        self, token: int, logprob: float, rank: int, top: Sequence[TokenLogprob] = (), offset: int = 0
    ) -> TokenLogprob:
        data = self.tokenizer.token_bytes(token)
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob, rank, tuple(top), offset)


def _is_simple(request: GenerationRequest) -> bool:
    has_work = request.stop or request.new_parser is not None or request.hides_answer
    return not has_work and request.sampling.logprobs is None


def _released(sample: Sample, *, is_whole: bool) -> tuple[TokenLogprob, ...]:
    """The held log probabilities whose text was returned. Text removed by a stop string has none."""
    held = sample.held
    if not held:
        return ()
    count = len(held) if is_whole else sum(entry.offset < sample.num_chars for entry in held)  # offsets are sorted
    sample.held = held[count:]
    return tuple(held[:count])


def _without_answer(output: EngineOutput) -> EngineOutput:
    """Remove the answer: the core always samples one token, even if max_tokens is 0."""
    reason = output.finish_reason
    hidden = FinishReason.LENGTH if reason in (FinishReason.STOP, FinishReason.LENGTH) else reason
    return output._replace(tokens=(), logprobs=(), finish_reason=hidden)
