"""Errors in the format of OpenAI's API.

Clients act on the status. `type` and `code` are OpenAI's own strings where OpenAI defines one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.server.errors import ApiError, Dialect, Kind
from quire.server.protocols.openai.responses_types import ErrorEvent
from quire.server.protocols.openai.types import ErrorAnswer, ErrorBody


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
_encode = msgspec.json.Encoder().encode


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
