"""`ChatModel`: the interface of `generate` and `chat` to a model, in this process or on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import RequestFailed

if TYPE_CHECKING:
    from quire.core.kv_cache import CacheStats
    from quire.engine.llm import LLM
    from quire.engine.outputs import Delta, GenerationOutput, TokenLogprob
    from quire.engine.params import GenerationParams
    from quire.text.answers import AnswerParser

ChatInput = str | Sequence[Mapping[str, str]]  # a raw prompt to continue, or a conversation to answer


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one sample."""

    index: int  # of the sample
    text: str
    num_tokens: int | None  # None: not reported
    thought: str = ""  # reasoning, which precedes the text
    calls: tuple[str, ...] = ()  # names of tools whose calls start in this piece
    refusal: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()  # as --json prints them
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended it
    is_stop_known: bool = True


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt_tokens: int
    completion_tokens: int  # of all samples
    cached_tokens: int
    cache: dict[str, Any] | None  # how much of the prompt was cached and where the match ended, as --json prints it


Take = Callable[[Piece], None]


class ChatModel(Protocol):
    """A model that answers. Uses a callback: an `LLM` reports exact usage only if it runs the whole answer itself."""

    name: str  # of the model
    max_model_len: int
    has_template: bool

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage | None:
        """Pass the answer to `take` until all samples have ended.

        An exception in `take`, also Ctrl-C, cancels the request and is raised.

        Raises RequestFailed if the answer is incomplete. Returns None if no usage was reported.
        """

    def cache_stats(self) -> CacheStats: ...

    def close(self) -> None: ...


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm = llm
        self.name = name
        self.max_model_len = llm.max_model_len
        self.has_template = llm.text.template.exists

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage:
        problem: Exception | None = None
        parsers = self._new_parsers(ask, params.n)

        def pass_on(_number: int, delta: Delta) -> None:
            nonlocal problem
            try:
                take(_piece(delta, parsers[delta.index]))
            except Exception as error:
                problem = error  # an LLM would make it an error of the request
                raise

        if isinstance(ask, str):
            (output,) = self.llm.generate(ask, params, on_output=pass_on)
        else:
            (output,) = self.llm.chat([dict(message) for message in ask], params, on_output=pass_on)
        if problem is not None:
            raise problem
        for completion in output.completions:
            if completion.error is not None:
                raise RequestFailed(completion.error)
        usage = output.usage
        return AnswerUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cache=self._cache_of(output)
        )

    def _cache_of(self, output: GenerationOutput) -> dict[str, Any] | None:
        """The explanation, with the text of the prompt where the match ended."""
        from quire.text.excerpt import stopped_text

        if (cache := output.cache) is None:
            return None
        text = stopped_text(self.llm.text.tokenizer, output.prompt_token_ids, cache)
        return {**asdict(cache), "stopped_text": None if text is None else asdict(text)}

    def _new_parsers(self, ask: ChatInput, num_samples: int) -> list[AnswerParser]:
        """A parser for each sample. The prompt is rendered again only for models that reason."""
        from quire.engine.llm import as_chat
        from quire.text.answers import PlainAnswer

        text = self.llm.text
        if isinstance(ask, str) or text.template.reasoning is None:
            return [PlainAnswer() for _ in range(num_samples)]
        chat = as_chat([dict(message) for message in ask])
        prompt = text.encode_chat(chat, self.llm.max_model_len)
        return [text.new_parser(chat, prompt) for _ in range(num_samples)]

    def cache_stats(self) -> CacheStats:
        return self.llm.cache_stats()

    def close(self) -> None:
        self.llm.close()


def _piece(delta: Delta, parser: AnswerParser) -> Piece:
    from quire.text.answers import Thought, Words

    parts = parser.push(delta.text)
    if delta.finish_reason is not None:
        parts += parser.finish(is_cut=delta.finish_reason == "length")
    return Piece(
        index=delta.index,
        text="".join(part.text for part in parts if isinstance(part, Words)),
        num_tokens=len(delta.token_ids),
        thought="".join(part.text for part in parts if isinstance(part, Thought)),
        logprobs=_documents(delta.logprobs),
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        stop=delta.stop,
    )


def _documents(entries: Sequence[TokenLogprob]) -> tuple[dict[str, Any], ...]:
    """Log probabilities as --json prints them, with `bytes`: a token may be part of a character."""
    return tuple(
        {
            "token_id": entry.token_id,
            "text": entry.text,
            "bytes": list(entry.data),
            "logprob": entry.logprob,
            "rank": entry.rank,
            **({"top": list(_documents(entry.top))} if entry.top else {}),
        }
        for entry in entries
    )
