"""OpenAI's words for what goes wrong.

Clients choose by status; people and a few programs read `type` and `code`, so they are OpenAI's own strings where it
has one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.server.errors import ApiError, Dialect, Kind
from quire.server.protocols.openai.responses_types import ErrorEvent
from quire.server.protocols.openai.types import ErrorAnswer, ErrorBody


class _Words(NamedTuple):
    status: int
    type: str
    code: str | None = None


_WORDS = {
    Kind.INVALID: _Words(400, "invalid_request_error"),
    Kind.TOO_LONG: _Words(400, "invalid_request_error", "context_length_exceeded"),
    Kind.AUTHENTICATION: _Words(401, "invalid_request_error", "invalid_api_key"),
    Kind.PERMISSION: _Words(403, "permission_error", "permission_denied"),
    Kind.NOT_FOUND: _Words(404, "invalid_request_error", "unknown_url"),
    Kind.NO_MODEL: _Words(404, "invalid_request_error", "model_not_found"),
    Kind.METHOD: _Words(405, "invalid_request_error", "method_not_supported"),
    Kind.TOO_LARGE: _Words(413, "invalid_request_error", "request_too_large"),
    Kind.TIMEOUT: _Words(408, "invalid_request_error", "request_timeout"),
    Kind.RATE_LIMITED: _Words(429, "rate_limit_error", "rate_limit_exceeded"),
    # 429 as well: every client backs off on it. The code says that the server is full, not the key's share used up.
    Kind.OVERLOADED: _Words(429, "rate_limit_error", "server_overloaded"),
    Kind.UNAVAILABLE: _Words(503, "server_error", "service_unavailable"),
    Kind.FAILED: _Words(500, "server_error"),
    Kind.DIED: _Words(500, "server_error", "engine_died"),
    # As gRPC maps CANCELLED. No client retries it, which they would do with 409 or any 5xx.
    Kind.CANCELLED: _Words(499, "request_cancelled", "request_cancelled"),
}
_CODES = ("unsupported_parameter", "unsupported_value", "request_not_found")  # reasons that are codes too
_encode = msgspec.json.Encoder().encode


def _status(error: ApiError) -> int:
    if error.kind is Kind.DIED and error.may_retry:
        return 503
    return _WORDS[error.kind].status


def _told(error: ApiError) -> ErrorBody:
    words = _WORDS[error.kind]
    code = error.reason if error.reason in _CODES else words.code
    return ErrorBody(error.message, words.type, error.param, code)


def _body(error: ApiError, _request_id: str) -> bytes:
    return _encode(ErrorAnswer(_told(error)))


def _event(error: ApiError, request_id: str) -> bytes:
    return b"data: " + _body(error, request_id) + b"\n\n"


def _typed_event(error: ApiError, _request_id: str) -> bytes:
    """Before a response began; afterwards it ends with response.failed."""
    told = _told(error)
    event = ErrorEvent(code=told.code, message=told.message, param=told.param, error=told)
    return b"event: error\ndata: " + _encode(event) + b"\n\n"


OPENAI = Dialect("openai", _status, _body, _event)
RESPONSES = Dialect("openai", _status, _body, _typed_event)
