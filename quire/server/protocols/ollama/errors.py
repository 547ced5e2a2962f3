"""Errors in Ollama's words: one string, and a status."""

from __future__ import annotations

import msgspec

from quire.server.errors import ApiError, Dialect, Kind

# 503 for a full queue, which is what Ollama says of its own; 429 is for a key that has used up its share.
_STATUS = {
    Kind.INVALID: 400,
    Kind.TOO_LONG: 400,
    Kind.AUTHENTICATION: 401,
    Kind.PERMISSION: 403,
    Kind.NOT_FOUND: 404,
    Kind.NO_MODEL: 404,
    Kind.METHOD: 405,
    Kind.TIMEOUT: 408,
    Kind.TOO_LARGE: 413,
    Kind.RATE_LIMITED: 429,
    Kind.OVERLOADED: 503,
    Kind.UNAVAILABLE: 503,
    Kind.FAILED: 500,
    Kind.DIED: 500,
    Kind.CANCELLED: 499,
}


class OllamaError(msgspec.Struct, frozen=True):
    error: str


def _status(error: ApiError) -> int:
    if error.kind is Kind.DIED and error.may_retry:
        return 503
    return _STATUS[error.kind]


def _body(error: ApiError, _request_id: str) -> bytes:
    """The body has no place for the field but its message."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    return msgspec.json.encode(OllamaError(text.encode(errors="replace").decode()))  # an error must never fail


def _event(error: ApiError, request_id: str) -> bytes:
    return _body(error, request_id) + b"\n"


# Every reader of JSON lines skips a space; most fail at an empty line.
OLLAMA = Dialect("ollama", _status, _body, _event, stream_type="application/x-ndjson", keep_alive=b" ")
