"""Renders a chat template in a child process that can be killed. Knows JSON lines; knows nothing of chats or tokens."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import TemplateError

RENDER_LIMIT_S = 1.0
START_LIMIT_S = 10.0  # a fresh Python on a busy machine
MAX_SOURCE_CHARS = 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024  # 4 Mi characters, each escaped
_WORKER = Path(__file__).with_name("template_worker.py")
# The child sees no secrets: only what Python needs to start, and the time zone for dates in prompts.
_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL",
    "TZ", "TZDIR", "SYSTEMROOT",
)  # fmt: skip


class Renderer:
    """One template and the child that renders it. Safe to use from several threads: they take turns.

    The child starts at the first use or at `warm_up`, costs nothing while idle and ends with its parent. One that does
    not answer in time is killed; the next render gets a new one.
    """

    def __init__(self, source: str, *, render_limit_s: float = RENDER_LIMIT_S) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self._source = source
        self._render_limit_s = render_limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._variables: frozenset[str] | None = None
        self._closed = False

    @property
    def variables(self) -> frozenset[str]:
        """The names the template mentions and does not set itself."""
        if self._variables is None:
            self.warm_up()
        assert self._variables is not None
        return self._variables

    def warm_up(self) -> None:
        """Starts the child and compiles the template. Raises TemplateError if it does not compile."""
        with self._lock:
            self._started()

    def check(self, variables: Mapping[str, Any]) -> str:
        """A trial render at load. The template may refuse the conversation; it may not fail in another way."""
        try:
            return self.render(variables)
        except TemplateRefusal:
            return ""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateError."""
        order = {"variables": dict(variables)}
        with self._lock:
            return self._ask(self._started(), order, self._render_limit_s).text

    def close(self) -> None:
        """Ends the child. Not to be used afterwards."""
        with self._lock:
            self._closed = True
            self._drop()

    def _started(self) -> _Child:
        if self._closed:
            raise TemplateError("the chat template was closed")
        if self._child is None or not self._child.is_alive():
            self._drop()
            child = _Child()
            try:
                answer = self._ask(child, {"source": self._source}, START_LIMIT_S)
            except BaseException:
                child.close()
                raise
            self._child, self._variables = child, answer.variables
        return self._child

    def _ask(self, child: _Child, order: Mapping[str, Any], limit_s: float) -> _Answer:
        try:
            answer = child.ask(order, limit_s)
        except _NoAnswer as error:
            self._drop()
            raise TemplateError(f"the chat template {error}") from None
        except BaseException:
            self._drop()  # interrupted: its answer must not become the next conversation's
            raise
        if answer.error is None:
            return answer
        if answer.kind == "refused":
            raise TemplateRefusal(answer.error)
        if answer.kind != "failed":
            self._drop()  # after a MemoryError nobody knows what is left of it
        raise TemplateError(f"the chat template failed: {answer.error}")

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class TemplateRefusal(TemplateError):
    """The template called raise_exception: the conversation is not one it accepts. The message is its own."""


class _Answer(NamedTuple):
    text: str
    variables: frozenset[str]
    error: str | None
    kind: str  # of the error: refused, by the template itself; failed; broken, and the process with it


class _NoAnswer(Exception):
    """The child is of no use any more; says why."""


class _Child:
    def __init__(self) -> None:
        if not sys.executable:
            raise TemplateError("no Python to render the chat template with: sys.executable is empty")
        try:
            process = subprocess.Popen(
                # -P: no module lying about in the working directory is imported
                [sys.executable, "-P", "-W", "ignore", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # ^C is for the parent
            )
        except OSError as error:
            raise TemplateError(f"the process that renders chat templates does not start: {error}") from None
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self.close = weakref.finalize(self, _end, process)  # also when it is forgotten, and at exit

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, order: Mapping[str, Any], limit_s: float) -> _Answer:
        """Writes an order and waits for its answer, at most so long. Raises _NoAnswer."""
        deadline = time.monotonic() + limit_s
        unsent = memoryview(json.dumps(order).encode() + b"\n")
        received: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            while not (received and received[-1].endswith(b"\n")):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise _NoAnswer(f"did not finish within {limit_s:g} s")
                for key, _ in ready:
                    if key.fileobj is self._stdin:
                        unsent = self._send(unsent)
                        if not unsent:
                            selector.unregister(self._stdin)
                    elif piece := os.read(self._stdout.fileno(), 1 << 20):
                        received.append(piece)
                        size += len(piece)
                    else:
                        raise _NoAnswer("ended its process: it used too much memory or time")
                if size > MAX_ANSWER_BYTES:
                    raise _NoAnswer(f"wrote {size} bytes and did not finish")
        return _parsed(b"".join(received))

    def _send(self, data: memoryview) -> memoryview:
        try:
            return data[os.write(self._stdin.fileno(), data[: 1 << 16]) :]
        except BlockingIOError:
            return data
        except OSError:
            raise _NoAnswer("ended its process: it used too much memory or time") from None


def _parsed(line: bytes) -> _Answer:
    """A template that broke out of its sandbox could write anything."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _NoAnswer("wrote what is no answer")
    text, names, error = answer.get("text", ""), answer.get("variables", []), answer.get("error")
    if not (isinstance(text, str) and isinstance(names, list) and isinstance(error, str | None)):
        raise _NoAnswer("wrote what is no answer")
    return _Answer(text, frozenset(map(str, names)), error, str(answer.get("kind")))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
