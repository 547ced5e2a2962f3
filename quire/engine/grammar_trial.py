"""Tries grammars in a child process that may be killed, before the process that serves compiles them."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest, RequestFailed

COMPILE_LIMIT_S = 2.0  # of a core
FIRST_MASK_LIMIT_S = 0.1  # of a core: what is slow before the first token does not get faster
WAIT_LIMIT_S = 20.0  # for an answer: the machine may be busy with steps
START_LIMIT_S = 30.0
_CHILD = Path(__file__).with_name("grammar_child.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar compiler must know of a model's tokens."""

    tokens: Sequence[bytes]  # as many as the model has logits; b"": not to be sampled
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]


class GrammarTrial:
    """Safe to use from several threads: they take turns. The child starts at the first use and ends with its parent."""

    def __init__(self, vocabulary: Vocabulary, limits: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_closed = False

    def check(self, source: str) -> None:
        """Raises InvalidRequest, with what the compiler says of it, or which limit it broke."""
        with self._lock:
            child = self._started()
            try:
                answer = child.ask({"source": source}, WAIT_LIMIT_S)
            except _NoAnswer as error:
                self._drop()
                raise InvalidRequest(f"grammar is too complex: {error}") from None
            except BaseException:
                self._drop()  # interrupted: its answer must not become the next one's
                raise
        if problem := str(answer["error"]):
            if problem.startswith("NoExtensionBias"):
                raise InvalidRequest("grammar: no answer matches it")
            raise InvalidRequest(f"grammar: {tell(problem)}")
        if (took_s := float(answer["first_mask_s"])) > FIRST_MASK_LIMIT_S:
            took = f"the choice of its first token takes {took_s * 1000:.0f} ms"
            raise InvalidRequest(f"grammar is too complex: {took}, more than {FIRST_MASK_LIMIT_S * 1000:.0f}")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _started(self) -> _Child:
        if self._is_closed:
            raise RequestFailed("grammar: the engine is closed")
        if self._child is None or not self._child.is_alive():
            self._drop()
            child = _Child()
            order = {
                "tokens": [base64.b85encode(token).decode() for token in self._vocabulary.tokens],
                "eos_token_ids": self._vocabulary.eos_token_ids,
                "special_token_ids": self._vocabulary.special_token_ids,
                "limits": self._limits,
                "max_cpu_s": COMPILE_LIMIT_S,
            }
            try:
                child.ask(order, START_LIMIT_S)
            except _NoAnswer as error:
                child.close()
                raise RequestFailed(f"grammar: the process that tries grammars does not start: {error}") from None
            except BaseException:
                child.close()
                raise
            self._child = child
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def tell(error: str, limit: int = 300) -> str:
    """What llguidance says, in one line: it draws pictures of where it stopped."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


class _NoAnswer(Exception):
    """The child is of no use any more; says why."""


class _Child:
    def __init__(self) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # ^C is for the parent
            )
        except OSError as error:
            raise RequestFailed(f"grammar: the process that tries grammars does not start: {error}") from None
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.close = weakref.finalize(self, _end, process)  # also when it is forgotten, and at exit

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """It reads whole lines before it does anything, so writing one cannot wait for it. Raises _NoAnswer."""
        deadline_s = time.monotonic() + limit_s
        received = b""
        try:
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._stdin.flush()
            while not received.endswith(b"\n"):
                if not select.select([self._stdout], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
                    raise _NoAnswer(f"compiling it does not end within {limit_s:g} s")
                piece = os.read(self._stdout.fileno(), 1 << 16)
                if not piece:
                    raise _NoAnswer(self._why())
                received += piece
            answer: dict[str, Any] = json.loads(received)
            return answer
        except (OSError, ValueError):
            raise _NoAnswer(self._why()) from None

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        if self._process.returncode == -signal.SIGPROF:
            return f"compiling it takes more than {COMPILE_LIMIT_S:g} s"
        return "its rules are nested too deeply, or compiling it takes too much memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
