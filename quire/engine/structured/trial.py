"""Compiles grammars in a child process first, which can be killed, before the worker compiles them."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest, RequestFailed
from quire.text.child_process import Child, Died, Interrupted, NoAnswer, TooSlow, died

COMPILE_LIMIT_S = 2.0  # CPU time
FIRST_MASK_LIMIT_S = 0.1  # CPU time: a grammar with a slow first mask stays slow
WAIT_LIMIT_S = 120.0  # wall-clock time: the machine may be busy with steps
EXCHANGE_LIMIT_S = 120.0  # of one exchange with the child, or of its start
LOOK_S = 0.02  # interval of the questions whether a slow trial has ended
MIN_LIFE_S = 10.0  # a child that lives for a shorter time is not started again at once: it may be killed each time
log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("trial_child.py")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as a grammar compiler needs them."""

    tokens: Sequence[bytes]  # one per logit; b"": never sampled
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    slices: tuple[str, ...]  # regexes of tokens that grammars often allow or forbid together


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a trial."""

    normal_s: float  # at normal priority; at most the patience that was given
    is_slow: bool  # it went on at a low priority
    error: str = ""  # of the compiler
    first_mask_s: float = 0.0
    no_answer: NoAnswer | None = None  # the trial was ended by a limit

    def check(self) -> None:
        """Raise InvalidRequest with the compiler's error or the limit that was exceeded."""
        if self.no_answer is not None:
            raise InvalidRequest(f"grammar is too complex: {_why(self.no_answer)}")
        if self.error:
            if self.error.startswith("NoExtensionBias"):
                raise InvalidRequest("grammar: no answer matches it")
            raise InvalidRequest(f"grammar: {one_line(self.error)}")
        if self.first_mask_s > FIRST_MASK_LIMIT_S:
            took = f"choosing its first token takes {self.first_mask_s * 1000:.0f} ms"
            raise InvalidRequest(f"grammar is too complex: {took}, more than {FIRST_MASK_LIMIT_S * 1000:.0f}")


class GrammarTrial:
    """Tries grammars in a child process, which forks for each of them. Thread-safe.

    The child starts at the first use, or when `keep_running` is called, and ends with its parent.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._limits = dict(limits)
        self._lock = threading.Lock()  # held for one exchange with the child, not for a whole trial
        self._child = Child(_CHILD)
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    def run(self, source: str, patience_s: float) -> Tried:
        """Try a grammar, for `patience_s` at normal priority, and then at a low one."""
        try:
            return self._try(source, patience_s)
        except Interrupted as error:
            log.warning("the process that checks grammars %s; checking again in a new process", error)
        try:
            return self._try(source, 0.0)
        except Interrupted as error:
            raise RequestFailed(f"the process that checks grammars {error}") from None

    def _try(self, source: str, patience_s: float) -> Tried:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        answer = self._ask({"source": source, "patience_s": patience_s})
        is_slow = "trial" in answer or patience_s <= 0
        while "trial" in answer:
            if time.monotonic() >= deadline_s:
                self._ask({"drop": answer["trial"]})
                return Tried(patience_s, is_slow, no_answer=TooSlow(f"did not finish within {WAIT_LIMIT_S:g} s"))
            self._closed.wait(LOOK_S)
            answer = self._ask({"trial": answer["trial"]})
        normal_s = patience_s if is_slow else min(float(answer["cpu_s"]), patience_s)
        if "returncode" in answer:
            no_answer = died(int(answer["returncode"]))
            if isinstance(no_answer, Interrupted):
                raise no_answer
            return Tried(normal_s, is_slow, no_answer=no_answer)
        return Tried(normal_s, is_slow, str(answer["error"]), float(answer.get("first_mask_s", 0.0)))

    def _ask(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._start()
            try:
                return self._child.ask(order, EXCHANGE_LIMIT_S)
            except Interrupted:
                raise
            except NoAnswer as error:  # not the fault of the grammar, which is compiled in a fork
                raise Interrupted(str(error)) from None

    def keep_running(self) -> None:
        """Start the child in a thread, and again whenever it has ended, so that no grammar waits for that."""
        with self._lock:
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="grammar trial", daemon=True)
                self._keeper.start()

    def _keep(self) -> None:
        while not self._closed.is_set():
            begin_s = time.monotonic()
            with self._lock, suppress(NoAnswer, RequestFailed):  # a request that needs the child reports the problem
                self._start()
            self._child.wait()
            self._closed.wait(max(begin_s + MIN_LIFE_S - time.monotonic(), 0.0))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._child.kill()

    def _start(self) -> None:
        if self._closed.is_set():
            raise RequestFailed("the engine is closed")
        try:
            if self._child.start():
                self._child.ask(self._first_order(), EXCHANGE_LIMIT_S)
        except Interrupted:
            raise
        except NoAnswer as error:
            raise RequestFailed(f"the process that checks grammars {error}") from None

    def _first_order(self) -> dict[str, Any]:
        return {
            "tokens": [token.decode("latin-1") for token in self._vocabulary.tokens],
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
