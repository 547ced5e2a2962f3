"""A script in a process that can be killed, spoken to in JSON lines. Knows nothing of what it is asked.

What other people write (a template, a grammar) may loop for ever, fill the memory or overflow the stack of whoever
compiles it. A thread cannot be killed, and a crash takes its process along; so that is done in another one.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# The child sees no secrets: only what Python needs to start, and the time zone for dates in prompts.
ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL",
    "TZ", "TZDIR", "SYSTEMROOT",
)  # fmt: skip
MAX_ANSWER_BYTES = 64 * 1024 * 1024
END_LIMIT_S = 5.0


class NoAnswer(Exception):
    """The child was of no use any more and is gone; says why, as of whatever it was asked about."""


class TooSlow(NoAnswer):
    pass


class Died(NoAnswer):
    def __init__(self, returncode: int | None) -> None:
        super().__init__("ended its process: it used too much memory or time")
        self.returncode = returncode


class Child:
    """Costs nothing while idle, and ends with its parent. One that gave no answer is killed, and can be started again.

    For one thread at a time.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Child] | None = None

    def start(self) -> bool:
        """True: it is a new one, which has been told nothing yet. Raises NoAnswer."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.kill()
        if not sys.executable:
            raise NoAnswer("does not start: sys.executable is empty")
        try:
            process = subprocess.Popen(
                # -P: no module lying about in the working directory is imported
                [sys.executable, "-P", "-W", "ignore", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # ^C is for the parent
            )
        except OSError as error:
            raise NoAnswer(f"does not start: {error}") from None
        self._process = process
        self._end = weakref.finalize(self, _end, process)  # also when it is forgotten, and at exit
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return True

    def ask(self, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Writes an order and waits for its answer, at most so long. Raises NoAnswer."""
        assert self._process is not None, "start it first"
        try:
            return _parsed(_exchange(self._process, json.dumps(order).encode() + b"\n", limit_s))
        except BaseException:
            self.kill()  # interrupted, too: its answer must not become the next one's
            raise

    def kill(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _exchange(process: subprocess.Popen[bytes], order: bytes, limit_s: float) -> bytes:
    """One line for another."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + limit_s
    unsent, received = memoryview(order), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise TooSlow(f"did not finish within {limit_s:g} s")
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


def _died(process: subprocess.Popen[bytes]) -> Died:
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    return Died(process.returncode)


def _parsed(line: bytes) -> dict[str, Any]:
    """What broke out of its sandbox could write anything."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise NoAnswer("wrote what is no answer")
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
