"""The child process that compiles a grammar first: compiling may take a minute or overflow the stack.

A thread cannot be killed, and a segmentation fault ends the whole process. Therefore the worker compiles only grammars
that this process compiled within its limits. It forks for each grammar: a fork has the vocabulary at once, and may end
without this process. Reads and writes one JSON object per line, and ends with its input. Imports no quire modules, so
that it starts fast.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import llguidance

MAX_MEMORY_BYTES = 1 << 30  # of address space
STACK_BYTES = 1 << 20  # a fraction of the worker's, so that the worker has enough
NICENESS = 10  # about a tenth of a core beside one busy thread
MAX_ERROR = 4000  # characters: an answer fits into a pipe, so that a fork never waits for its reader
ORDINARY = '{"type": "object", "properties": {"a": {"type": "string"}}}'

Answer = dict[str, Any]


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


class Trials:
    """Grammars that are tried, each in a fork of this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        tokens = [token.encode("latin-1") for token in order["tokens"]]
        vocabulary = VocabularyAdapter(tokens, order["eos_token_ids"], order["special_token_ids"])
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(tokens),
            eos_token=order["eos_token_ids"],
            slices=order["slices"],
        )
        vocabulary.tokens = []  # the library has copied them
        self._limits = llguidance.LLParserLimits(**order["limits"])
        self._max_cpu_s: float = order["max_cpu_s"]
        self._max_wait_s: float = order["max_wait_s"]
        self._running: dict[int, int] = {}  # process id -> pipe with its answer
        self._try(llguidance.LLMatcher.grammar_from_json_schema(ORDINARY))  # forks find the library warmed up

    def begin(self, source: str, patience_s: float) -> Answer:
        """Try a grammar, for `patience_s` at this process's priority, and then at a low one.

        Returns {"trial": its number} if it has not ended by then.
        """
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            self._run(source, writer, is_low=patience_s <= 0)
        os.close(writer)
        self._running[pid] = reader
        answer = self.look(pid, patience_s)
        if "trial" in answer:
            lower_priority(pid)
        return answer

    def look(self, pid: int, patience_s: float = 0.0) -> Answer:
        """The answer of a trial that has ended. The answer of one that was killed is its return code."""
        reader = self._running.get(pid)
        if reader is None:  # of an earlier process
            return {"returncode": -signal.SIGKILL}
        is_over = bool(select.select([reader], [], [], patience_s)[0])
        found, status, usage = os.wait4(pid, 0 if is_over else os.WNOHANG | os.WUNTRACED)
        if not found:
            return {"trial": pid}
        if os.WIFSTOPPED(status):  # by someone else: it would never end
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        data = os.read(reader, 1 << 16)
        os.close(self._running.pop(pid))
        returncode = os.waitstatus_to_exitcode(status)
        answer: Answer = json.loads(data) if data and not returncode else {"returncode": returncode}
        return {**answer, "cpu_s": usage.ru_utime + usage.ru_stime}

    def close(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)

    # In a fork

    def _run(self, source: str, writer: int, *, is_low: bool) -> NoReturn:
        try:
            for inherited in (0, 1):  # their readers wait for the end of this process's parent, not of this one
                os.close(inherited)
            if is_low:
                lower_priority(os.getpid())
            os.write(writer, json.dumps(self._limited(source)).encode())
        finally:
            os._exit(0)

    def _limited(self, source: str) -> Answer:
        """The compiler's error, if any, and the CPU time of the first mask."""
        answer: Answer = {}
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=guarded, args=(lambda: answer.update(self._try(source)), answer))
        signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s)  # the signals of both end the process
        signal.setitimer(signal.ITIMER_REAL, self._max_wait_s)
        thread.start()
        thread.join()
        return {**answer, "error": answer["error"][:MAX_ERROR]}

    def _try(self, source: str) -> Answer:
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            return {"error": matcher.get_error()}
        start_s = time.thread_time()
        matcher.compute_bitmask()
        took_s = time.thread_time() - start_s
        return {"error": matcher.get_error(), "first_mask_s": took_s}


def guarded(function: Callable[[], None], answer: Answer) -> None:
    try:
        function()
    except BaseException as error:  # a panic of the library is not an Exception
        answer["error"] = f"{type(error).__name__}: {error}"


def limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # not available on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def lower_priority(pid: int) -> None:
    """Let the steps of the model run first, on machines whose cores they all use.

    On Linux a thread has its own priority, and a new one inherits that of the thread that starts it: the first thread
    comes first.
    """
    with suppress(AttributeError, OSError):  # not available on every platform
        _lower_priority(pid)
        for thread in os.listdir(f"/proc/{pid}/task"):
            _lower_priority(int(thread))


def _lower_priority(thread: int) -> None:
    # Not nice(), which adds: this process may have a low priority already.
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


def main() -> None:
    limit_memory()
    trials: Trials | None = None
    try:
        for line in sys.stdin.buffer:
            order = json.loads(line)
            answer: Answer = {}
            if trials is None:
                trials = Trials(order)
                del order, line
                gc.freeze()  # a collection in a fork would copy every page
            elif "trial" in order:
                answer = trials.look(order["trial"])
            else:
                answer = trials.begin(order["source"], order["patience_s"])
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
    finally:
        if trials is not None:
            trials.close()


if __name__ == "__main__":
    main()
