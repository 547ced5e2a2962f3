"""The child process that compiles a grammar first: compiling may take a minute or overflow the stack.

A thread cannot be killed, and a segmentation fault ends the whole process. Therefore the worker compiles only grammars
that this process compiled within its limits. Reads and writes one JSON object per line, and ends with its input.
Imports no quire modules, so that it starts fast.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import llguidance

MAX_MEMORY_BYTES = 1 << 30  # of address space
STACK_BYTES = 1 << 20  # a fraction of the worker's, so that the worker has enough
NICENESS = 10  # about a tenth of a core beside one busy thread


class VocabularyAdapter:
    """A vocabulary in the interface of llguidance. How text is tokenized does not matter for a trial."""

    def __init__(self, tokens: list[bytes], eos_token_ids: list[int], special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = special_token_ids
        self._letters = {token: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._letters[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._letters]


class Trial:
    def __init__(self, order: dict[str, Any]) -> None:
        tokens = [base64.b85decode(token) for token in order["tokens"]]
        vocabulary = VocabularyAdapter(tokens, order["eos_token_ids"], order["special_token_ids"])
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(tokens),
            eos_token=order["eos_token_ids"],
            slices=order["slices"],
        )
        self._limits = llguidance.LLParserLimits(**order["limits"])
        self._max_cpu_s: float = order["max_cpu_s"]

    def run(self, source: str) -> dict[str, Any]:
        """The compiler's error, if any, and the CPU time of the first mask."""
        answer: dict[str, Any] = {}
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=guarded, args=(lambda: answer.update(self._try(source)), answer))
        signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s)  # its signal ends the process
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        return answer

    def _try(self, source: str) -> dict[str, Any]:
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            return {"error": matcher.get_error()}
        start_s = time.thread_time()
        matcher.compute_bitmask()
        took_s = time.thread_time() - start_s
        return {"error": matcher.get_error(), "first_mask_s": took_s}


def guarded(function: Callable[[], None], answer: dict[str, Any]) -> None:
    try:
        function()
    except BaseException as error:  # a panic of the library is not an Exception
        answer["error"] = f"{type(error).__name__}: {error}"


def limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # not available on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def lower_priority() -> None:
    """Let the steps of the model run first, on machines whose cores they all use."""
    with suppress(AttributeError, OSError):  # not available on every platform
        # Not nice(), which adds: the thread that started this process has a low priority already.
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), NICENESS))


def main() -> None:
    limit_memory()
    lower_priority()
    trial: Trial | None = None
    for line in sys.stdin.buffer:
        order = json.loads(line)
        answer: dict[str, Any] = {"error": ""}
        if trial is None:
            trial = Trial(order)
        else:
            answer = trial.run(order["source"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
