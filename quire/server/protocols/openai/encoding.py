"""Encodes answers in OpenAI's format: the parts that chat and completions share.

Clients act on the status of an error. `type` and `code` are OpenAI's own strings where OpenAI defines one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.values import FinishReason, Priority
from quire.engine.outputs import Delta, TokenLogprob, Usage
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.protocols.openai.responses_types import ErrorEvent
from quire.server.protocols.openai.types import (
    AnswerHead,
    CompletionTokensDetails,
    CompletionUsage,
    ErrorAnswer,
    ErrorBody,
    PromptTokensDetails,
)
from quire.server.protocols.support import CacheView, view
from quire.text.stream import AnswerParser, Piece, Thought, Words

if TYPE_CHECKING:
    from quire.server.model_service import ActiveRequest


AnswerKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have
TIERS = {Priority.HIGH: "priority", Priority.NORMAL: "default", Priority.LOW: "flex"}
_MARK = "<text>"
_encode = msgspec.json.Encoder().encode


class Choices(Protocol):
    """Makes the chunks of choice `index` for one kind of answer."""

    def begin(self, index: int) -> Struct | None: ...
    def grow(self, index: int, delta: Delta) -> Sequence[Struct]:
        """Chunks of this delta; with the last delta, also of text that was held back."""

    def grow_pieces(self, index: int, pieces: Sequence[Piece]) -> Sequence[Struct]:
        """Chunks of what the choice's parser returned."""

    def end(self, index: int, finish_reason: str, stop: str | None) -> Struct: ...
    def parser(self, index: int) -> AnswerParser | None:
        """The parser that `grow` uses for this choice. None: text is content as it is."""

    def text(self, index: int, piece: Words | Thought) -> Struct:
        """The chunk of such a piece of text, without log probabilities."""


class TextFrames(NamedTuple):
    """The chunks of one choice that are only text: the bytes around the text, which is a JSON string."""

    parser: AnswerParser | None
    words: tuple[bytes, bytes]
    thoughts: tuple[bytes, bytes]


class StreamEncoder:
    """Encodes the chunks of one stream as server-sent events. The index of a choice is prompt * n + sample.

    The chunk that ends the last choice is held until last(): it may carry the cache explanation.
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
        has_ids: bool = False,  # chunks have token ids, also without text
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
        # Only the choice differs between chunks: the rest is encoded once.
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._frames: dict[int, TextFrames] = {}  # of the choices that have begun, if their chunks have only text

    def chunks(self, batch: Sequence[tuple[int, Delta]], usage: Usage | None = None) -> bytes:
        """Encode a batch of deltas; empty if there is nothing to send yet.

        `usage`: the prompt's token counts so far, for streams with usage in every chunk.
        """
        events: list[bytes] = []
        for prompt, delta in batch:
            self._num_tokens += len(delta.token_ids)
            if usage is not None and self._has_running_usage:
                self._after = b'],"usage":' + _encode(_running(usage, self._num_tokens)) + b"}\n\n"
            index = prompt * self._n + delta.index
            has_content = bool(delta.text or delta.logprobs or (self._has_ids and delta.token_ids))
            if not has_content and delta.finish_reason is None:
                continue  # an incomplete character, or the possible beginning of a stop string
            if index not in self._begun:
                self._begun.add(index)
                if (first := self._choices.begin(index)) is not None:
                    events.append(self._frame(first))
                if not self._has_running_usage and not self._has_ids:
                    self._frames[index] = self._text_frames(index)
            events += [self._frame(choice) for choice in self._choices.grow(index, delta)]
            if delta.finish_reason is not None:
                self._num_open -= 1
                end = self._choices.end(index, finish_reason(delta.finish_reason, delta.error), delta.stop)
                if self._num_open:
                    events.append(self._frame(end))
                else:
                    self._held = end
        return b"".join(events)

    def text_event(self, prompt: int, sample: int, text: str) -> bytes | None:
        """Encode a token that is plain text, as `chunks` does. None: it needs `chunks`."""
        index = prompt * self._n + sample
        frames = self._frames.get(index)
        if frames is None:
            return None
        parser, (before, after), thoughts = frames
        if parser is None:
            return before + _encode(text) + after
        pieces = parser.push(text)
        events: list[bytes] = []
        for piece in pieces:
            if not isinstance(piece, Words | Thought):
                return b"".join(map(self._frame, self._choices.grow_pieces(index, pieces)))
            start, end = (before, after) if isinstance(piece, Words) else thoughts
            events.append(start + _encode(piece.text) + end)
        return b"".join(events)

    def text_frame(self, prompt: int, sample: int) -> tuple[bytes, bytes] | None:
        frames = self._frames.get(prompt * self._n + sample)
        return None if frames is None or frames.parser is not None else frames.words

    def last(self, usage: Usage, cache: CacheView | None, num_thought_tokens: int = 0) -> bytes:
        """Encode the end of the stream."""
        events: list[bytes] = []
        if self._held is not None:
            running = _running(usage, usage.completion_tokens) if self._has_running_usage else None
            events.append(self._event([self._held], running, None if self._include_usage else cache))
        if self._include_usage:
            events.append(self._event([], usage_body(usage, num_thought_tokens), cache))
        return b"".join((*events, DONE))

    def _text_frames(self, index: int) -> TextFrames:
        words, thoughts = (self._split(self._choices.text(index, kind(_MARK))) for kind in (Words, Thought))
        return TextFrames(self._choices.parser(index), words, thoughts)

    def _split(self, choice: Struct) -> tuple[bytes, bytes]:
        """The bytes of a chunk before and after its text, which is `_MARK`."""
        before, after = self._frame(choice).rsplit(_encode(_MARK), 1)
        return before, after

    def _frame(self, choice: Struct) -> bytes:
        return self._before + _encode(choice) + self._after

    def _event(self, choices: list[Struct], usage: CompletionUsage | None, cache: CacheView | None) -> bytes:
        chunk = msgspec.structs.asdict(self._head) | {"choices": choices}
        if self._include_usage or usage is not None:
            chunk["usage"] = usage
        if cache is not None:
            chunk["cache"] = cache
        return b"data: " + _encode(chunk) + b"\n\n"


class AnswerEvents:
    """The `EventEncoder` of chat and completions."""

    waits_for_start = False

    def __init__(self, active: ActiveRequest, encoder: StreamEncoder) -> None:
        self._active = active
        self._encoder = encoder
        self.text_event = encoder.text_event
        self.text_frame = encoder.text_frame

    def begin(self) -> bytes:
        return b""

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return self._encoder.chunks(batch, self._active.usage)

    def finish(self) -> bytes:
        active = self._active
        return self._encoder.last(active.usage, cache_view(active), active.num_thought_tokens)

    def fail(self, error: ApiError) -> bytes | None:
        del error
        return None


def head_of(active: ActiveRequest, prefix: str, kind: AnswerKind) -> AnswerHead:
    return AnswerHead(
        id=f"{prefix}-{active.request_id}",
        object=kind,
        created=active.created,
        model=active.model,
        system_fingerprint=active.system_fingerprint,
        service_tier=TIERS[active.priority],
    )


def cache_view(active: ActiveRequest) -> CacheView | None:
    """The cache explanation of the first prompt, if the request asked for it."""
    if not active.request.wants_cache or active.cache is None:
        return None
    return view(active.cache, len(active.requests[0].prompt), active.cache_text)


def usage_body(usage: Usage, num_thought_tokens: int = 0) -> CompletionUsage:
    return CompletionUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(
            num_thought_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
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
    """The token's text. An incomplete character is shown as bytes, as OpenAI does, so that tokens stay distinct."""
    if "\ufffd" in entry.text and entry.text.encode() != entry.data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.data)
    return entry.text


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class _Row(NamedTuple):
    status: int
    type: str
    code: str | None = None


_ROWS = {
    Kind.INVALID: _Row(400, "invalid_request_error"),
    Kind.TOO_LONG: _Row(400, "invalid_request_error", "context_length_exceeded"),
    Kind.AUTHENTICATION: _Row(401, "invalid_request_error", "invalid_api_key"),
    Kind.PERMISSION: _Row(403, "permission_error", "permission_denied"),
    Kind.NOT_FOUND: _Row(404, "invalid_request_error", "unknown_url"),
    Kind.NO_MODEL: _Row(404, "invalid_request_error", "model_not_found"),
    Kind.METHOD: _Row(405, "invalid_request_error", "method_not_supported"),
    Kind.TOO_LARGE: _Row(413, "invalid_request_error", "request_too_large"),
    Kind.TIMEOUT: _Row(408, "invalid_request_error", "request_timeout"),
    Kind.RATE_LIMITED: _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    # 429 as well: every client backs off. The code distinguishes a full server from a key that reached its limit.
    Kind.OVERLOADED: _Row(429, "rate_limit_error", "server_overloaded"),
    Kind.UNAVAILABLE: _Row(503, "server_error", "service_unavailable"),
    Kind.FAILED: _Row(500, "server_error"),
    Kind.DIED: _Row(500, "server_error", "engine_died"),
    # 499 is what gRPC maps CANCELLED to. Clients do not retry it; they would retry 409 and any 5xx.
    Kind.CANCELLED: _Row(499, "request_cancelled", "request_cancelled"),
}
_CODES = ("unsupported_parameter", "unsupported_value", "request_not_found")  # reasons that are also codes


def _status(error: ApiError) -> int:
    if error.kind is Kind.DIED and error.may_retry:
        return 503
    return _ROWS[error.kind].status


def _error_body(error: ApiError) -> ErrorBody:
    row = _ROWS[error.kind]
    code = error.reason if error.reason in _CODES else row.code
    return ErrorBody(error.message, row.type, error.param, code)


def _body(error: ApiError, _request_id: str) -> bytes:
    return _encode(ErrorAnswer(_error_body(error)))


def _event(error: ApiError, request_id: str) -> bytes:
    return b"data: " + _body(error, request_id) + b"\n\n"


def _typed_event(error: ApiError, _request_id: str) -> bytes:
    """The error event before the response's first event; a later error is sent as response.failed."""
    body = _error_body(error)
    event = ErrorEvent(code=body.code, message=body.message, param=body.param, error=body)
    return b"event: error\ndata: " + _encode(event) + b"\n\n"


OPENAI = Dialect("openai", _status, _body, _event)
RESPONSES = Dialect("openai", _status, _body, _typed_event)
