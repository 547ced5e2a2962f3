"""Logging: one line per request, as text or as JSON. It has no prompts, answers, keys or paths of this machine.

Values that a client sent are escaped, so that none can forge a log line. Each logger is rate limited, so that a flood
of bad requests cannot fill a disk.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from quire.engine.process import FIELDS, JsonFormatter, LineFormatter
from quire.server.metrics import RequestRecord

MAX_LINES_PER_S = 20  # of one logger
MAX_VALUE_CHARS = 200
MAX_WARNINGS = 1_000  # of one LogOnce
_OUR_FAULT = frozenset({"failed", "died", "internal"})
_UNCOUNTED = "is_uncounted"  # attribute of a record that the rate limit does not count
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+{}-]+")

_request_log = logging.getLogger("quire.request")
_log = logging.getLogger("quire.server")


def setup_logging(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Configure logging, to stderr by default. May be called again; the last call counts."""
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LimitedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # of libraries
    logging.getLogger("quire").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    # uvicorn logs its start at INFO; `quire serve` prints its own.
    logging.getLogger("uvicorn").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(
        logging.CRITICAL + 1
    )  # it logs query strings; quire.request replaces it


def log_request(record: RequestRecord) -> None:
    level = logging.WARNING if record.error in _OUR_FAULT else logging.INFO
    if not _request_log.isEnabledFor(level):
        return
    fields = request_fields(record)
    # The model's speed bounds the number of served requests. Only the rate limit bounds the others.
    extra = {FIELDS: fields, _UNCOUNTED: record.finish in ("stop", "length")}
    _request_log.log(level, "%s", " ".join(f"{name}={_word(value)}" for name, value in fields.items()), extra=extra)


def log_refusal(
    request_id: str, endpoint: str, key_name: str | None, status: int, reason: str, param: str | None
) -> None:
    """Log one line for a refused request. It names the field at fault, not the field's value."""
    if not _request_log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "request_id": request_id,
        "endpoint": endpoint,
        "key": key_name or "none",
        "status": status,
        "finish": "refused",
        "error": reason,
        **({"param": param} if param else {}),
    }
    text = " ".join(f"{name}={_word(_cut(value))}" for name, value in fields.items())
    _request_log.info("%s", text, extra={FIELDS: fields})


def request_fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of a request's log line, in order. Unknown ones are left out."""
    fields: dict[str, object] = {
        "request_id": record.id,
        "endpoint": record.endpoint,
        "model": record.model,
        "key": record.key,
        "tier": record.tier,
        "stream": record.is_streaming,
        "prompts": record.num_prompts,
        "n": record.n,
        "max_tokens": record.max_tokens,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "cache": record.cache_reason,
        "cache_source": record.cache_source,
        "queued_s": _rounded(record.queued_s),
        "ttft_s": _rounded(record.ttft_s),
        "e2e_s": _rounded(record.duration_s),
        "tokens_per_s": _rounded(record.tokens_per_s),
        "finish": record.finish,
        "error": record.error,
    }
    return {name: _cut(value) for name, value in fields.items() if value is not None}


class LogOnce:
    """Logs each warning once, and at most MAX_WARNINGS different ones: clients choose what they are about."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, message: str) -> None:
        message = message[: 2 * MAX_VALUE_CHARS]  # a client's field name may be megabytes
        if message not in self._logged and len(self._logged) < MAX_WARNINGS:
            self._logged.add(message)
            _log.warning("%s", message)
            if len(self._logged) == MAX_WARNINGS:
                _log.warning("%d different warnings of this kind were logged: no more follow", MAX_WARNINGS)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most MAX_LINES_PER_S lines per second and logger, and reports how many it left out."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._windows: dict[str, _Window] = {}  # one per logger; clients cannot choose logger names

    def emit(self, record: logging.LogRecord) -> None:  # under the handler's lock
        if getattr(record, _UNCOUNTED, False):
            super().emit(record)
            return
        now_s = self._clock()
        window = self._windows.get(record.name)
        if window is None or now_s - window.since_s >= 1.0:
            if window is not None:
                self._report(record.name, window)
            window = self._windows[record.name] = _Window(now_s)
        if window.num_written < MAX_LINES_PER_S:
            window.num_written += 1
            super().emit(record)
        else:
            window.num_left_out += 1

    def close(self) -> None:
        self.acquire()
        try:
            for name, window in self._windows.items():
                self._report(name, window)
            self._windows.clear()
        finally:
            self.release()
        super().close()

    def _report(self, name: str, window: _Window) -> None:
        if window.num_left_out:
            text = f"{window.num_left_out} lines left out: more than {MAX_LINES_PER_S} in a second"
            super().emit(logging.LogRecord(name, logging.WARNING, "", 0, text, None, None))


@dataclass(slots=True)
class _Window:
    since_s: float
    num_written: int = 0
    num_left_out: int = 0


def _word(value: object) -> str:
    """Format the value of `name=value`: quoted unless it consists of plain characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _cut(value: object) -> object:
    return value[:MAX_VALUE_CHARS] if isinstance(value, str) else value


def _rounded(value: float | None) -> float | None:
    """Round to 0.1 ms."""
    return round(value, 4) if value is not None and math.isfinite(value) else None
