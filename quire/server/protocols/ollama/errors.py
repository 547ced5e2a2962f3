"""Errors in Ollama's format: one string and a status."""

from __future__ import annotations

import msgspec

from quire.server.errors import ApiError, Dialect, Kind

# 503 for a full queue, as in Ollama; 429 for a key that has reached its limit.
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
    """Encode the error. Only the message can name the field."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    return msgspec.json.encode(OllamaError(text.encode(errors="replace").decode()))  # an error must never fail


def _event(error: ApiError, request_id: str) -> bytes:
    return _body(error, request_id) + b"\n"


# Readers of JSON lines skip a space; most fail on an empty line.
OLLAMA = Dialect("ollama", _status, _body, _event, stream_type="application/x-ndjson", keep_alive=b" ")
