"""Runs a script in a child process, which can be killed. Requests and answers are JSON lines.

Untrusted input (a chat template, a grammar) may loop forever, exhaust memory or overflow the stack of the process that
compiles it. A thread cannot be killed and a crash ends the whole process, so the work is done in a child process.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.errors import RequestFailed

# The child inherits no secrets: only the variables Python needs to start, and the time zone for dates in prompts.
ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL",
    "TZ", "TZDIR", "SYSTEMROOT",
)  # fmt: skip
WAIT_LIMIT_S = 60.0  # wall-clock time of a LimitedChild: on a busy machine its CPU time takes longer
MAX_ANSWER_BYTES = 64 * 1024 * 1024
END_LIMIT_S = 5.0
IDLE_LIMIT_S = 5.0  # a child that is idle for this long before it answers was stopped, or hangs
LOOK_S = 0.5  # interval of the checks whether it is idle
log = logging.getLogger(__name__)
_LIMITED = Path(__file__).with_name("limited_child.py")


class NoAnswer(Exception):
    """The child gave no usable answer and was killed.

    The message is a predicate ("did not finish within 1 s"): callers prepend the subject.
    """


class Died(NoAnswer):
    def __init__(self, returncode: int | None) -> None:
        super().__init__("ended its process: it used too much memory or time")
        self.returncode = returncode


class Interrupted(NoAnswer):
    """The child was stopped or killed, or hangs. Its input may not be the cause: the caller may try once more."""


class Child:
    """A child process that runs a script. Not safe for concurrent use.

    It uses no CPU time while it is idle, and ends with its parent. A child that gives no answer is killed and can be
    started again.
    """

    def __init__(self, *script: Path) -> None:
        """`script`: its file and its arguments."""
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Child] | None = None

    def start(self) -> bool:
        """Start the child unless it is running. Returns True for a new child, which has no state. Raises NoAnswer."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.kill()
        if not sys.executable:
            raise NoAnswer("does not start: sys.executable is empty")
        try:
            process = subprocess.Popen(
                # -P: import no modules from the working directory
                [sys.executable, "-P", "-W", "ignore", *map(str, self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C goes to the parent only
            )
        except OSError as error:
            raise NoAnswer(f"does not start: {error}") from None
        self._process = process
        self._end = weakref.finalize(self, _end, process)  # also on garbage collection and at exit
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return True

    def ask(self, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and wait up to `limit_s` for its answer. Raises NoAnswer."""
        assert self._process is not None, "start it first"
        try:
            return _parsed(_exchange(self._process, json.dumps(order).encode() + b"\n", limit_s))
        except BaseException:
            self.kill()  # also on interrupts: a late answer must not be read as the next answer
            raise

    def kill(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


class LimitedChild(Child):
    """Runs the `Worker` of a script. It gets a first order and then others, with limits of CPU time. Thread-safe.

    A child that exceeds its limit is killed, and the next order starts a new one. If another process ends the child,
    the order is sent once more. The limit is CPU time, so that a busy machine refuses nothing that an idle one accepts.
    """

    def __init__(
        self,
        script: Path,
        first: Mapping[str, Any],
        first_limit_s: float,
        *,
        names: tuple[str, str],
        failure: Callable[[str], Exception],
        check: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
    ) -> None:
        """`first`: with `max_bytes`, the limit of memory. `names`: of the process and of what it runs, for errors.

        `check`: raises for a bad answer to an order.
        """
        super().__init__(_LIMITED, script)
        self._first, self._first_limit_s = first, first_limit_s
        self._names = names
        self._failure = failure
        self._check = check
        self._lock = threading.Lock()
        self._is_closed = False
        self.first_answer: Mapping[str, Any] = {}

    def request(self, order: Mapping[str, Any], max_cpu_s: float) -> dict[str, Any]:
        """The answer to an order. Raises the given failure, or RequestFailed if other processes end the child twice."""
        is_last_try = False
        with self._lock:
            while True:
                try:
                    self._prepare()
                    return self._exchange(order, max_cpu_s)
                except Interrupted as error:
                    if is_last_try:
                        raise RequestFailed(f"{self._names[0]} {error}") from None
                    log.warning("%s %s; trying again in a new process", self._names[0], error)
                is_last_try = True

    def warm_up(self) -> None:
        """Start the child and send the first order."""
        with self._lock:
            try:
                self._prepare()
            except Interrupted as error:
                raise self._failure(f"{self._names[0]} {error}") from None

    def close(self) -> None:
        """End the child. Later calls raise the failure."""
        with self._lock:
            self._is_closed = True
            self.kill()

    def _prepare(self) -> None:
        if self._is_closed:
            raise self._failure(f"{self._names[1]} was closed")
        try:
            is_new = self.start()
        except NoAnswer as error:
            raise self._failure(f"{self._names[0]} {error}") from None
        if is_new:
            try:
                self.first_answer = self._exchange(self._first, self._first_limit_s)
            except BaseException:
                self.kill()  # a running child must have carried out its first order
                raise

    def _exchange(self, order: Mapping[str, Any], max_cpu_s: float) -> dict[str, Any]:
        try:
            answer = self.ask({**order, "max_cpu_s": max_cpu_s}, WAIT_LIMIT_S)
            self._check(order, answer)
            return answer
        except Interrupted:
            raise
        except NoAnswer as error:
            self.kill()
            is_too_slow = isinstance(error, Died) and error.returncode == -signal.SIGPROF
            why = f"did not finish within {max_cpu_s:.3g} s of CPU time" if is_too_slow else error
            raise self._failure(f"{self._names[1]} {why}") from None


def _exchange(process: subprocess.Popen[bytes], order: bytes, limit_s: float) -> bytes:
    """Send one line and receive one line."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + limit_s
    work: object = None
    working_s = time.monotonic()  # when `work` last changed
    unsent, received = memoryview(order), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            ready = selector.select(max(0.0, min(deadline_s - time.monotonic(), LOOK_S)))
            if not ready:
                if time.monotonic() >= deadline_s:
                    raise NoAnswer(f"did not finish within {limit_s:g} s")
                if (found := _work_done(process.pid)) != work:
                    work, working_s = found, time.monotonic()
                elif time.monotonic() - working_s > IDLE_LIMIT_S:
                    raise Interrupted(f"did nothing for {IDLE_LIMIT_S:g} s")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    unsent = _send(process, unsent)
                    if not unsent:
                        selector.unregister(process.stdin)
                elif piece := os.read(process.stdout.fileno(), 1 << 20):
                    received += piece
                else:
                    raise _died(process)
            if len(received) > MAX_ANSWER_BYTES:
                raise NoAnswer(f"wrote {len(received)} bytes and did not finish")
    return bytes(received)


def _send(process: subprocess.Popen[bytes], data: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return data[os.write(process.stdin.fileno(), data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except OSError:
        raise _died(process) from None


def _work_done(pid: int) -> object:
    """A value that changes while a process works, or waits for a core or a disk.

    Only Linux reports this. On other systems, the value always changes.
    """
    folder = Path(f"/proc/{pid}/task")
    try:
        stats = [(task / "stat").read_text().rpartition(")")[2].split() for task in folder.iterdir()]
        if stats and not any(stat[0] in "RD" for stat in stats):
            return sum(int(stat[11]) + int(stat[12]) for stat in stats)  # CPU time
    except (OSError, ValueError, IndexError):
        pass  # a thread has just ended
    return object()


def _died(process: subprocess.Popen[bytes]) -> NoAnswer:
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    return died(process.returncode)


def died(returncode: int | None) -> NoAnswer:
    """Say why a process has ended that should have answered."""
    if returncode in (-signal.SIGKILL, -signal.SIGTERM):  # the limits that it sets itself end it in other ways
        return Interrupted("was killed")
    return Died(returncode)


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse an answer, which is not trusted: code that escaped its sandbox could write anything."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise NoAnswer("wrote an invalid answer")
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # the group is its own: with the processes that it has forked
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
