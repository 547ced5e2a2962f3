"""Errors in the format of Anthropic's API, as its SDK maps them to exceptions."""

from __future__ import annotations

import msgspec

from quire.server.errors import ApiError, Dialect, Kind

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
