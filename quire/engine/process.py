"""Set-up of a process of quire, server or worker: lines of the log, garbage collector, priority of threads.

Lines of the log are text or JSON. Control characters are escaped, so that no value can forge a line. In a server, each
logger is rate limited, so that a flood of bad requests cannot fill a disk.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

MAX_MESSAGE_CHARS = 4_000
MAX_TRACE_LINES = 200
MAX_LINES_PER_S = 20  # of one logger
FIELDS = "fields"  # attribute of a record: the fields of its JSON line
UNCOUNTED = "is_uncounted"  # attribute of a record that the rate limit does not count

# Control characters, line and paragraph separators, bidirectional controls, and lone surrogates.
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class LineFormatter(logging.Formatter):
    """`2026-11-15T07:22:31.123Z INFO quire.request: ...`. A traceback is indented, so that it cannot forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {escaped(_message(record))}"
        trace = _trace(self, record)
        return "\n".join([line, *(f"  | {escaped(one)}" for one in trace)])


class JsonFormatter(logging.Formatter):
    """One ASCII JSON object per line. A request's fields are members of the object, not part of the message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, Mapping):
            entry |= {"message": "request", **fields}
        else:
            entry["message"] = _message(record)
        if trace := _trace(self, record):
            entry["trace"] = trace
        return json.dumps(entry, allow_nan=False, default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # wrong format arguments must not lose the line
        text = str(record.msg)
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + " ..."


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[0] is None:
        return []
    lines = formatter.formatException(record.exc_info).splitlines()
    return [line[:MAX_MESSAGE_CHARS] for line in lines[-MAX_TRACE_LINES:]]


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def escaped(text: str, kept: str = "") -> str:
    """The text with harmful characters as JSON writes them, except those in `kept`."""
    return _HARMFUL.sub(lambda found: found[0] if found[0] in kept else _escape(found), text)


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] < "\x7f" else f"\\u{ord(found[0]):04x}"


class ShortFormatter(logging.Formatter):
    """Lines without a time, for a command or a program that uses quire as a library. Escaped like those of a server."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), kept="\n\t")


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": LineFormatter, "json": JsonFormatter}


def log_format() -> str | None:
    """The format of this process's log. None: it has another one, because it is not a server."""
    used = {type(handler.formatter) for handler in logging.getLogger().handlers}
    return next((name for name, formatter in FORMATTERS.items() if formatter in used), None)


def setup_worker_log(name: str | None) -> None:
    """Log warnings to stderr in this format. None: short lines, for a program that uses quire as a library."""
    handler = logging.StreamHandler()
    plain = ShortFormatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(plain if name is None else FORMATTERS[name]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most MAX_LINES_PER_S lines per second and logger, and reports how many it left out."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._windows: dict[str, _Window] = {}  # one per logger; clients cannot choose logger names

    def emit(self, record: logging.LogRecord) -> None:  # under the handler's lock
        if getattr(record, UNCOUNTED, False):
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


NICENESS = 10  # about a tenth of a core beside one busy thread


def lower_thread_priority() -> None:
    """Let other threads run first. Only on Linux a thread has its own priority; it cannot be raised again."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


YOUNG = 50_000  # allocations before a collection of new objects


def calm_collector() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    In a worker, a library such as torch and the block pool are half a million objects that live until the process
    ends. A full collection of them stops every stream for 130 ms. Steps and requests create few reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
