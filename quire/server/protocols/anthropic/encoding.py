"""Converts the pieces of an answer to content blocks, or to the events of a stream.

Errors have the format of Anthropic's API, as its SDK maps them to exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import msgspec

from quire.server.errors import ApiError, Dialect, Kind
from quire.server.protocols.anthropic.types import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputJsonDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from quire.text.stream import CallArguments, CallStart, Piece, Thought, Words


class BlockWriter:
    """Makes the events of a stream. One block is open at a time, and a piece of another kind ends it.

    An answer without pieces has one empty text block.
    """

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self.num_blocks = 0
        self._kind: type[Thought] | type[Words] | type[CallStart] | None = None  # of the open block
        self.has_calls = False

    def take(self, pieces: Iterable[Piece]) -> list[Event]:
        return [event for piece in pieces for event in self._take(piece)]

    def continues(self, piece: Piece) -> TypeGuard[Words | Thought]:
        """Whether the piece is text of the open block: its only event is then a delta."""
        return isinstance(piece, Words | Thought) and type(piece) is self._kind

    def end(self) -> list[Event]:
        if not self.num_blocks:
            self.num_blocks = 1
            return [BlockStart(0, TextBlock("")), BlockStop(0)]
        return self._close()

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Thought(text):
                if not self._shows_thoughts:
                    return []
                opened = self._open(Thought, ThinkingBlock(""))
                return [*opened, self._grow(ThinkingDelta(text))]
            case Words(text):
                opened = self._open(Words, TextBlock(""))
                return [*opened, self._grow(TextDelta(text))]
            case CallStart(_, call_id, name):
                self.has_calls = True
                self._kind, before = CallStart, self._close()
                return [*before, self._start(ToolUseBlock(use_id(call_id), name, {}))]
            case CallArguments(_, text):
                return [self._grow(InputJsonDelta(text))]

    def _open(self, kind: type[Thought] | type[Words], block: AnswerBlock) -> list[Event]:
        if self._kind is kind:
            return []
        before = self._close()
        self._kind = kind
        return [*before, self._start(block)]

    def _start(self, block: AnswerBlock) -> BlockStart:
        self.num_blocks += 1
        return BlockStart(self.num_blocks - 1, block)

    def _grow(self, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> BlockDelta:
        return BlockDelta(self.num_blocks - 1, delta)

    def _close(self) -> list[Event]:
        return [BlockStop(self.num_blocks - 1)] if self.num_blocks else []


def blocks_of(pieces: Sequence[Piece], *, shows_thoughts: bool) -> list[AnswerBlock]:
    blocks: list[AnswerBlock] = []
    arguments: list[str] = []
    for piece in pieces:
        last = blocks[-1] if blocks else None
        match piece:
            case Thought(text) if shows_thoughts and isinstance(last, ThinkingBlock):
                blocks[-1] = ThinkingBlock(last.thinking + text)
            case Thought(text) if shows_thoughts:
                blocks.append(ThinkingBlock(text))
            case Words(text) if isinstance(last, TextBlock):
                blocks[-1] = TextBlock(last.text + text)
            case Words(text):
                blocks.append(TextBlock(text))
            case CallStart(_, call_id, name):
                blocks.append(ToolUseBlock(use_id(call_id), name, {}))
                arguments.append("")
            case CallArguments(number, text):
                arguments[number] += text
            case _:
                pass
    inputs = iter(arguments)
    filled = [
        msgspec.structs.replace(block, input=_input(next(inputs))) if isinstance(block, ToolUseBlock) else block
        for block in blocks
    ]
    return filled or [TextBlock("")]


def use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def _input(arguments: str) -> dict[str, object]:
    """Parse a call's arguments. A call that was cut off has none; a stream has sent the incomplete JSON."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}


# 503 for a server that starts or stops: the SDK retries 503 and 529, and proxies know only 503.
_TYPES: dict[Kind, tuple[int, str]] = {
    Kind.INVALID: (400, "invalid_request_error"),
    Kind.TOO_LONG: (400, "invalid_request_error"),
    Kind.AUTHENTICATION: (401, "authentication_error"),
    Kind.PERMISSION: (403, "permission_error"),
    Kind.NOT_FOUND: (404, "not_found_error"),
    Kind.NO_MODEL: (404, "not_found_error"),
    Kind.METHOD: (405, "invalid_request_error"),
    Kind.TIMEOUT: (408, "timeout_error"),
    Kind.TOO_LARGE: (413, "request_too_large"),
    Kind.RATE_LIMITED: (429, "rate_limit_error"),
    Kind.OVERLOADED: (529, "overloaded_error"),
    Kind.UNAVAILABLE: (503, "overloaded_error"),
    Kind.FAILED: (500, "api_error"),
    Kind.DIED: (500, "api_error"),
    Kind.CANCELLED: (499, "api_error"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail
    request_id: str


def _status(error: ApiError) -> int:
    return _TYPES[error.kind][0]


def _body(error: ApiError, request_id: str) -> bytes:
    detail = ErrorDetail(_TYPES[error.kind][1], _message(error))
    return msgspec.json.encode(ErrorAnswer(detail, request_id))


def _event(error: ApiError, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(error, request_id) + b"\n\n"


def _message(error: ApiError) -> str:
    """The message, with the field: Anthropic's errors have no other member for it."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    if error.kind is Kind.TOO_LONG:
        text = f"prompt is too long: {text}"  # clients look for this text and shorten the conversation
    return text.encode(errors="replace").decode()  # an error must never fail


ANTHROPIC = Dialect("anthropic", _status, _body, _event)
