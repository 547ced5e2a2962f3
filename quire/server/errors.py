"""What can go wrong with an HTTP request, said once; each protocol has its own words for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from quire.errors import (
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

# What an exception says may hold paths and more that is nobody's business: it is in the log. These words are our own.
_OURS = ("the process that runs ", "the engine was closed")
_CUT = ("the step failed", "the answer could not be read")  # and an exception's words follow
SERVER_SENT_EVENTS = "text/event-stream; charset=utf-8"

log = logging.getLogger(__name__)

_FIELD = re.compile(r"[a-z][a-z_]*(?:\[[^\]]{0,64}\]|\.[a-z_]+)*(?=[ :])")


class Kind(Enum):
    INVALID = auto()  # a field has a value that can never work
    TOO_LONG = auto()  # more tokens than the context holds
    AUTHENTICATION = auto()
    PERMISSION = auto()
    NOT_FOUND = auto()  # no such path
    NO_MODEL = auto()  # no such model
    METHOD = auto()
    TOO_LARGE = auto()  # more bytes than a body may have
    TIMEOUT = auto()  # the client was too slow to send
    RATE_LIMITED = auto()  # this key has used up its share
    OVERLOADED = auto()  # everyone has: the queue is full, or the wait was too long
    UNAVAILABLE = auto()  # draining or starting
    FAILED = auto()  # this request failed here; it would again
    DIED = auto()  # the worker died under it
    CANCELLED = auto()  # an admin, or the owner of its key, cancelled it


class ApiError(Exception):
    """An answer that is an error. Headers and body are made of it by the dialect of the route."""

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
        self.reason = reason or kind.name.lower()  # for counting
        self.admin_message = admin_message or message  # with what is not for everyone: who may load models may read it


_MAY_RETRY = {Kind.RATE_LIMITED, Kind.OVERLOADED, Kind.UNAVAILABLE, Kind.TIMEOUT}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one protocol says an error, and how it frames a stream."""

    name: str
    status: Callable[[ApiError], int]
    body: Callable[[ApiError, str], bytes]  # with the request's id
    event: Callable[[ApiError, str], bytes]  # in mid-stream: a whole event of the stream
    stream_type: str = SERVER_SENT_EVENTS
    keep_alive: bytes = b": keep-alive\n\n"  # says nothing, wherever it stands between two events


def from_quire(error: QuireError, fields: frozenset[str] = frozenset()) -> ApiError:
    """`fields`: the names the body may have. Our messages begin with the field they speak of."""
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
            told = text if text.startswith(_OURS) else "the model's process failed"
            return ApiError(Kind.DIED, told, retry_after_s=1.0, may_retry=True)
        case WorkerDied():
            return ApiError(Kind.DIED, text if text.startswith(_OURS) else "the model's process failed")
        case ModelFileError() | MissingExtra():  # it could be loaded before; why not again is for operators
            log.error("the model cannot be loaded again: %s", text)
            message = "the model is being restarted"
            return ApiError(Kind.UNAVAILABLE, message, retry_after_s=10.0, reason="restarting")
        case RequestFailed():
            return ApiError(Kind.FAILED, next((words for words in _CUT if text.startswith(words)), text))
        case _:
            log.error("told a client only that it failed: %s: %s", type(error).__name__, text)
            return ApiError(Kind.FAILED, "the server failed at this request")


def _param(message: str, fields: frozenset[str]) -> str | None:
    found = _FIELD.match(message)
    if found is None:
        return None
    return found[0] if re.split(r"[.\[]", found[0], maxsplit=1)[0] in fields else None
