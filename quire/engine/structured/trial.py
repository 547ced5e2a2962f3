"""Compiles grammars in a child process first, which can be killed, before the worker compiles them."""

from __future__ import annotations

import base64
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest, RequestFailed
from quire.text.child_process import Child, Died, Interrupted, NoAnswer, TooSlow

COMPILE_LIMIT_S = 2.0  # CPU time
FIRST_MASK_LIMIT_S = 0.1  # CPU time: a grammar with a slow first mask stays slow
WAIT_LIMIT_S = 120.0  # wall-clock time: the machine may be busy with steps
log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("trial_child.py")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as a grammar compiler needs them."""

    tokens: Sequence[bytes]  # one per logit; b"": never sampled
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    slices: tuple[str, ...]  # regexes of tokens that grammars often allow or forbid together


class GrammarTrial:
    """Checks grammars in a child process. Thread-safe: checks are serialized.

    The child starts at the first use and ends with its parent.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._child = Child(_CHILD)
        self._is_closed = False

    def check(self, source: str) -> None:
        """Raise InvalidRequest with the compiler's error or the limit that was exceeded."""
        with self._lock:
            answer = self._ask(source)
        if problem := str(answer["error"]):
            if problem.startswith("NoExtensionBias"):
                raise InvalidRequest("grammar: no answer matches it")
            raise InvalidRequest(f"grammar: {one_line(problem)}")
        if (took_s := float(answer["first_mask_s"])) > FIRST_MASK_LIMIT_S:
            took = f"choosing its first token takes {took_s * 1000:.0f} ms"
            raise InvalidRequest(f"grammar is too complex: {took}, more than {FIRST_MASK_LIMIT_S * 1000:.0f}")

    def _ask(self, source: str) -> Mapping[str, Any]:
        try:
            return self._try(source)
        except Interrupted as error:
            log.warning("the process that checks grammars %s; checking again in a new process", error)
        try:
            return self._try(source)
        except Interrupted as error:
            raise RequestFailed(f"the process that checks grammars {error}") from None

    def _try(self, source: str) -> Mapping[str, Any]:
        self._start()
        try:
            return self._child.ask({"source": source}, WAIT_LIMIT_S)
        except Interrupted:
            raise
        except NoAnswer as error:
            raise InvalidRequest(f"grammar is too complex: {_why(error)}") from None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._child.kill()

    def _start(self) -> None:
        if self._is_closed:
            raise RequestFailed("the engine is closed")
        try:
            if self._child.start():
                self._child.ask(self._first_order(), WAIT_LIMIT_S)
        except Interrupted:
            raise
        except NoAnswer as error:
            raise RequestFailed(f"the process that checks grammars {error}") from None

    def _first_order(self) -> dict[str, Any]:
        return {
            "tokens": [base64.b85encode(token).decode() for token in self._vocabulary.tokens],
            "eos_token_ids": self._vocabulary.eos_token_ids,
            "special_token_ids": self._vocabulary.special_token_ids,
            "slices": self._vocabulary.slices,
            "limits": self._limits,
            "max_cpu_s": COMPILE_LIMIT_S,
        }


def one_line(error: str, limit: int = 300) -> str:
    """An error message of llguidance, which has several lines, as one short line."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def _why(error: NoAnswer) -> str:
    if isinstance(error, TooSlow):
        return f"compiling it does not finish within {WAIT_LIMIT_S:g} s"
    if isinstance(error, Died) and error.returncode == -signal.SIGPROF:
        return f"compiling it takes more than {COMPILE_LIMIT_S:g} s"
    return "its rules are nested too deeply, or compiling it takes too much memory"
