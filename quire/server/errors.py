"""Errors of HTTP requests, independent of the protocol. Each protocol's dialect encodes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from quire.errors import (
    CacheFolderError,
    ContextTooLong,
    Draining,
    InvalidRequest,
    LostBeforeStart,
    MissingExtra,
    ModelFileError,
    QueueFull,
    QuireError,
    RequestFailed,
    TemplateError,
    WorkerDied,
)

# The text of an exception may hold paths of this machine, so it goes to the log only. Texts with these beginnings are
# quire's own and are sent to the client.
_SAFE_TEXTS = ("the process that runs ", "the engine was closed")
_SAFE_HEADS = ("the step failed", "the answer could not be read")  # the rest of such a message is not sent
SERVER_SENT_EVENTS = "text/event-stream; charset=utf-8"

log = logging.getLogger(__name__)

_FIELD = re.compile(r"[a-z][a-z_]*(?:\[[^\]]{0,64}\]|\.[a-z_]+)*(?=[ :])")


class Kind(Enum):
    INVALID = auto()  # a field has an invalid value
    TOO_LONG = auto()  # more tokens than the context holds
    AUTHENTICATION = auto()
    PERMISSION = auto()
    NOT_FOUND = auto()  # no such path
    NO_MODEL = auto()  # no such model
    METHOD = auto()
    TOO_LARGE = auto()  # the body has too many bytes
    TIMEOUT = auto()  # the client was too slow to send
    RATE_LIMITED = auto()  # this key has reached one of its limits
    OVERLOADED = auto()  # the queue is full, or the request waited too long
    UNAVAILABLE = auto()  # draining or starting
    FAILED = auto()  # this request failed and would fail again
    DIED = auto()  # the worker process died while it ran
    CANCELLED = auto()  # it was cancelled through the API, by an admin or with its own key


class ApiError(Exception):
    """An error response. The route's dialect makes the status and the body from it."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        may_retry: bool | None = None,
        reason: str = "",
        admin_message: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.may_retry = kind in _MAY_RETRY if may_retry is None else may_retry
        self.reason = reason or kind.name.lower()  # a metrics label
        self.admin_message = admin_message or message  # may name paths: sent to admin keys only


_MAY_RETRY = {Kind.RATE_LIMITED, Kind.OVERLOADED, Kind.UNAVAILABLE, Kind.TIMEOUT}
_STATUSES = {
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
    Kind.UNAVAILABLE: 503,
    Kind.FAILED: 500,
    Kind.DIED: 500,
    # What gRPC maps CANCELLED to. Clients do not retry it; they would retry 409 and any 5xx.
    Kind.CANCELLED: 499,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one protocol encodes errors and frames streams."""

    name: str
    body: Callable[[ApiError, str], bytes]  # encodes the error and the request id
    event: Callable[[ApiError, str], bytes]  # a complete stream event, for an error in mid-stream
    overloaded: int = 429  # the status of a full queue: OpenAI's clients back off, Anthropic has 529, Ollama 503
    lost: int = 503  # of a request whose worker died before it began. Anthropic's SDK retries any 5xx
    stream_type: str = SERVER_SENT_EVENTS
    keep_alive: bytes = b": keep-alive\n\n"  # clients ignore it between two events

    def status(self, error: ApiError) -> int:
        if error.kind is Kind.OVERLOADED:
            return self.overloaded
        return self.lost if error.kind is Kind.DIED and error.may_retry else _STATUSES[error.kind]


def from_quire(error: QuireError, fields: frozenset[str] = frozenset()) -> ApiError:
    """Convert a QuireError. Messages begin with the field at fault; `fields` are the field names of the body."""
    text = str(error)
    match error:
        case ContextTooLong():
            return ApiError(Kind.TOO_LONG, text, param=_param(text, fields))
        case InvalidRequest() | TemplateError():
            return ApiError(Kind.INVALID, text, param=_param(text, fields))
        case QueueFull():
            return ApiError(Kind.OVERLOADED, text, retry_after_s=1.0, reason="queue_full")
        case Draining():
            return ApiError(Kind.UNAVAILABLE, text, retry_after_s=5.0, reason="draining")
        case LostBeforeStart():
            message = text if text.startswith(_SAFE_TEXTS) else "the model's process failed"
            return ApiError(Kind.DIED, message, retry_after_s=1.0, may_retry=True)
        case WorkerDied():
            return ApiError(Kind.DIED, text if text.startswith(_SAFE_TEXTS) else "the model's process failed")
        case ModelFileError() | MissingExtra() | CacheFolderError():  # a restart failed: the cause is logged
            log.error("the model cannot be loaded again: %s", text)
            message = "the model is being restarted"
            return ApiError(Kind.UNAVAILABLE, message, retry_after_s=10.0, reason="restarting")
        case RequestFailed() if text.startswith("grammar"):  # the request's own, at a token after the first
            return ApiError(Kind.INVALID, text)
        case RequestFailed():
            return ApiError(Kind.FAILED, next((head for head in _SAFE_HEADS if text.startswith(head)), text))
        case _:
            log.error("an unexpected error, not shown to the client: %s: %s", type(error).__name__, text)
            return ApiError(Kind.FAILED, "the server could not process this request")


def _param(message: str, fields: frozenset[str]) -> str | None:
    found = _FIELD.match(message)
    if found is None:
        return None
    return found[0] if re.split(r"[.\[]", found[0], maxsplit=1)[0] in fields else None


def api_error(error: Exception, request_id: str, fields: frozenset[str] = frozenset()) -> ApiError:
    """The error that a client receives for any exception. Those of other programs are logged, and not shown."""
    match error:
        case ApiError():
            return error
        case QuireError():
            return from_quire(error, fields)
        case _:
            log.error("%s failed", request_id, exc_info=error)
            text = f"the server could not process this request; see {request_id} in the server log"
            return ApiError(Kind.FAILED, text, reason="internal")
