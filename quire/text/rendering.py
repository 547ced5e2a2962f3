"""Renders a chat template in a child process that can be killed. Knows templates, not conversations or tokens."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import RequestFailed, TemplateError
from quire.text.child_process import Child, Died, Interrupted, NoAnswer

RENDER_LIMIT_S = 1.0  # CPU time
COMPILE_LIMIT_S = 1.0  # CPU time; with a trial render, a hostile template takes 2 s at most
WAIT_LIMIT_S = 60.0  # wall-clock time: on a busy machine the CPU time above takes longer
MAX_SOURCE_CHARS = 1024 * 1024
log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("template_worker.py")


class Renderer:
    """One template and the child process that renders it. Thread-safe: renders are serialized.

    The child starts at the first use or at `warm_up`. A child that exceeds its time limit is killed and the next render
    starts a new one. The limit is CPU time, so that a busy machine refuses no template that an idle one renders.
    """

    def __init__(self, source: str, *, render_limit_s: float = RENDER_LIMIT_S) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self._source = source
        self._render_limit_s = render_limit_s
        self._lock = threading.Lock()
        self._child = Child(_WORKER)
        self._variables: frozenset[str] | None = None
        self._closed = False

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        if self._variables is None:
            self.warm_up()
        assert self._variables is not None
        return self._variables

    def warm_up(self) -> None:
        """Start the child and compile the template. Raises TemplateError if it does not compile."""
        with self._lock:
            self._start()

    def check(self, variables: Mapping[str, Any]) -> str:
        """Render a trial at load. The template may refuse the conversation; any other failure raises TemplateError."""
        try:
            return self.render(variables)
        except TemplateRefusal:
            return ""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateError, or RequestFailed if other processes end the child twice."""
        with self._lock:
            try:
                return self._render(variables)
            except _Interrupted as error:
                log.warning("%s; rendering again in a new process", error)
            try:
                return self._render(variables)
            except _Interrupted as error:
                raise RequestFailed(str(error)) from None

    def _render(self, variables: Mapping[str, Any]) -> str:
        self._start()
        return self._ask({"variables": dict(variables)}, self._render_limit_s).text

    def close(self) -> None:
        """End the child. Later calls raise TemplateError."""
        with self._lock:
            self._closed = True
            self._child.kill()

    def _start(self) -> None:
        if self._closed:
            raise TemplateError("the chat template was closed")
        try:
            is_new = self._child.start()
        except NoAnswer as error:
            raise TemplateError(f"the process that renders chat templates {error}") from None
        if is_new:
            try:
                self._variables = self._ask({"source": self._source}, COMPILE_LIMIT_S).variables
            except BaseException:
                self._child.kill()  # a running child must have a compiled template
                raise

    def _ask(self, order: Mapping[str, Any], max_cpu_s: float) -> _Answer:
        try:
            answer = _read(self._child.ask({**order, "max_cpu_s": max_cpu_s}, WAIT_LIMIT_S))
        except Interrupted as error:
            raise _Interrupted(f"the process that renders chat templates {error}") from None
        except NoAnswer as error:
            self._child.kill()
            is_too_slow = isinstance(error, Died) and error.returncode == -signal.SIGPROF
            why = f"did not finish within {max_cpu_s:g} s of CPU time" if is_too_slow else error
            raise TemplateError(f"the chat template {why}") from None
        if answer.error is None:
            return answer
        if answer.kind == "refused":
            raise TemplateRefusal(answer.error)
        if answer.kind == "failed":
            raise TemplateFailure(f"the chat template failed: {answer.error}")
        self._child.kill()  # after a MemoryError its state is undefined
        raise TemplateError(f"the chat template failed: {answer.error}")


class _Interrupted(TemplateError):
    """Another process stopped or killed the child."""


class TemplateFailure(TemplateError):
    """The template cannot render this conversation, now or later."""


class TemplateRefusal(TemplateFailure):
    """The template called raise_exception: it does not accept the conversation. The message is the template's."""


class _Answer(NamedTuple):
    text: str
    variables: frozenset[str]
    error: str | None
    kind: str  # of the error: "refused" by the template, "failed", or "broken" if the process is unusable


def _read(answer: Mapping[str, Any]) -> _Answer:
    """Check an answer without trusting it: a template that escaped its sandbox could write anything."""
    text, names, error = answer.get("text", ""), answer.get("variables", []), answer.get("error")
    if not (isinstance(text, str) and isinstance(names, list) and isinstance(error, str | None)):
        raise NoAnswer("wrote an invalid answer")
    return _Answer(text, frozenset(map(str, names)), error, str(answer.get("kind")))
