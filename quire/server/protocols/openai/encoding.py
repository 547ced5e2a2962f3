"""Answers in OpenAI's shapes: what chat and plain completions have in common."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire import __version__
from quire.core.request import FinishReason, Priority
from quire.engine.outputs import Delta, TokenLogprob, Usage
from quire.server.errors import ApiError, Kind
from quire.server.protocols.cache_explanation import CacheView, view
from quire.server.protocols.openai.types import (
    AnswerHead,
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
)

if TYPE_CHECKING:
    from quire.server.active_request import ActiveRequest

AnswerKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's word for never; JSON has none for minus infinity
TIERS = {Priority.HIGH: "priority", Priority.NORMAL: "default", Priority.LOW: "flex"}
_encode = msgspec.json.Encoder().encode


class Choices(Protocol):
    """How one kind of answer says what happened to choice `index`."""

    def begin(self, index: int) -> Struct | None: ...
    def grow(self, index: int, delta: Delta) -> Sequence[Struct]:
        """What came; with the last delta, also what was held back until then."""

    def end(self, index: int, finish_reason: str, stop: str | None) -> Struct: ...


class StreamEncoder:
    """One stream's chunks as server-sent events. A choice is prompt * n + sample.

    The chunk that ends the last choice waits for last(): it may have to carry what the cache gave.
    """

    def __init__(
        self,
        head: AnswerHead,
        choices: Choices,
        *,
        n: int,
        num_prompts: int,
        include_usage: bool,
        has_running_usage: bool = False,  # in every chunk
        has_ids: bool = False,  # tokens are news, text or not
    ) -> None:
        self._head = head
        self._choices = choices
        self._n = n
        self._num_open = n * num_prompts
        self._include_usage = include_usage
        self._has_running_usage = has_running_usage
        self._num_tokens = 0  # of all choices, so far
        self._has_ids = has_ids
        self._begun: set[int] = set()
        self._held: Struct | None = None
        # All that changes from chunk to chunk is one choice: the rest is encoded once.
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunks(self, batch: Sequence[tuple[int, Delta]], usage: Usage | None = None) -> bytes:
        """Events for all that came, in one piece; empty where there is nothing to say yet.

        `usage`: what is known of the prompts by now, for streams that say it in every chunk.
        """
        events: list[bytes] = []
        for prompt, delta in batch:
            self._num_tokens += len(delta.token_ids)
            if usage is not None and self._has_running_usage:
                self._after = b'],"usage":' + _encode(_running(usage, self._num_tokens)) + b"}\n\n"
            index = prompt * self._n + delta.index
            has_news = bool(delta.text or delta.logprobs or (self._has_ids and delta.token_ids))
            if not has_news and delta.finish_reason is None:
                continue  # part of a character, or what may become a stop string
            if index not in self._begun:
                self._begun.add(index)
                if (first := self._choices.begin(index)) is not None:
                    events.append(self._frame(first))
            events += [self._frame(choice) for choice in self._choices.grow(index, delta)]
            if delta.finish_reason is not None:
                self._num_open -= 1
                end = self._choices.end(index, finish_reason(delta.finish_reason, delta.error), delta.stop)
                if self._num_open:
                    events.append(self._frame(end))
                else:
                    self._held = end
        return b"".join(events)

    def last(self, usage: Usage, cache: CacheView | None, num_thought_tokens: int = 0) -> bytes:
        """The end of the stream."""
        events: list[bytes] = []
        if self._held is not None:
            running = _running(usage, usage.completion_tokens) if self._has_running_usage else None
            events.append(self._event([self._held], running, None if self._include_usage else cache))
        if self._include_usage:
            events.append(self._event([], bill(usage, num_thought_tokens), cache))
        return b"".join((*events, DONE))

    def _frame(self, choice: Struct) -> bytes:
        return self._before + _encode(choice) + self._after

    def _event(self, choices: list[Struct], usage: CompletionUsage | None, cache: CacheView | None) -> bytes:
        chunk = msgspec.structs.asdict(self._head) | {"choices": choices}
        if self._include_usage or usage is not None:
            chunk["usage"] = usage
        if cache is not None:
            chunk["cache"] = cache
        return b"data: " + _encode(chunk) + b"\n\n"


async def events(active: ActiveRequest, encoder: StreamEncoder) -> AsyncIterator[bytes]:
    async for batch in active.batches():
        if data := encoder.chunks(batch, active.usage):
            yield data
    yield encoder.last(active.usage, cache_view(active), active.num_thought_tokens)


def head_of(active: ActiveRequest, prefix: str, kind: AnswerKind) -> AnswerHead:
    return AnswerHead(
        id=f"{prefix}-{active.request_id}",
        object=kind,
        created=active.created,
        model=active.model,
        system_fingerprint=fingerprint(active.model),
        service_tier=TIERS[active.priority],
    )


def cache_view(active: ActiveRequest) -> CacheView | None:
    """Of the first prompt, for those who asked."""
    if not active.request.wants_cache or active.cache is None:
        return None
    return view(active.cache, len(active.requests[0].prompt), active.cache_text)


@lru_cache(maxsize=64)
def fingerprint(model: str) -> str:
    """The same as long as the same seed gives the same answer: a version of quire and a model."""
    return "fp_" + hashlib.sha256(f"quire {__version__} {model}".encode()).hexdigest()[:12]


def bill(usage: Usage, num_thought_tokens: int = 0) -> CompletionUsage:
    return CompletionUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(num_thought_tokens),
    )


def _running(usage: Usage, num_tokens: int) -> CompletionUsage:
    return CompletionUsage(usage.prompt_tokens, num_tokens, usage.prompt_tokens + num_tokens)


def finish_reason(reason: FinishReason, error: str | None = None) -> str:
    if reason is FinishReason.ERROR:
        raise ApiError(Kind.FAILED, error or "the answer failed")
    return "length" if reason is FinishReason.LENGTH else "stop"


def stop_reason(stop: str | None) -> str | UnsetType:
    return UNSET if stop is None else stop


def token_text(entry: TokenLogprob) -> str:
    """A part of a character is shown by its bytes, as OpenAI does: two such tokens must not look alike."""
    if "\ufffd" in entry.text and entry.text.encode() != entry.data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.data)
    return entry.text


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
