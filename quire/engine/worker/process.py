"""Starts, watches and ends one worker process from asyncio, and exchanges messages with it.

Knows messages and time, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quire.engine.worker.log_lines import log_format
from quire.engine.worker.protocol import (
    MAX_UNSENT,
    Cancel,
    Finish,
    FrameReader,
    FrameWriter,
    FromWorker,
    ToWorker,
    Working,
    from_worker,
    pack,
)
from quire.errors import QueueFull

HANG_LIMIT_S = 30.0  # without a message, while there is work
EXIT_LIMIT_S = 5.0  # time for the process to end by itself
STDERR = 2
# Of the server only: a worker needs no keys, and whoever can read its memory must not find them.
SERVER_SECRETS = ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY")

log = logging.getLogger(__name__)


class WorkerProcess:
    """One worker process and the socket to it.

    `on_end` is called once, with the reason, unless the process was closed on purpose. `is_over` may be True before.
    """

    def __init__(self, on_message: Callable[[FromWorker], None], on_end: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self._limit_s = HANG_LIMIT_S
        self._socket, worker_end = socket.socketpair()
        with worker_end:
            try:
                self._process = _spawn(worker_end.fileno())
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._writer = FrameWriter(self._socket)
        self._is_over = False
        self._ending: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._heard_s = self._loop.time()
        self._announced_s = 0.0
        self._loop.add_reader(self._socket, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def silence_s(self) -> float:
        """Time since its last message, or since the first message was expected."""
        return self._loop.time() - self._heard_s

    @property
    def announced_s(self) -> float:
        """The silence that the worker announced with `Working`. 0: none, or it has sent a message since."""
        return self._announced_s

    def send(self, message: ToWorker) -> None:
        """Send a message without blocking. Raises QueueFull if too much is unread, except for Cancel and Finish."""
        frame = pack(message)
        if self._is_over:
            return
        if self._writer.num_unsent + len(frame) > MAX_UNSENT and not isinstance(message, Cancel | Finish):
            raise QueueFull(f"{self._writer.num_unsent} bytes are waiting to be read by the model's process")
        try:
            self._writer.send(frame)
        except ConnectionError:
            return  # it has ended: `_read` handles that after its last messages
        except OSError as error:
            self.end(f"cannot be reached: {error}")
            return
        if self._writer.num_unsent:
            self._loop.add_writer(self._socket, self._flush)

    def expect_message(self, limit_s: float | None) -> None:
        """Treat silence beyond the limit as a hang from now on. None: no message is expected, and no timer runs."""
        if self._watch is not None and limit_s != self._limit_s:
            self._watch.cancel()
            self._watch = None
        if limit_s is not None and self._watch is None and not self._is_over:
            self._limit_s = limit_s
            self._heard_s, self._announced_s = self._loop.time(), 0.0
            self._deadline_s = self._heard_s + limit_s
            self._watch = self._loop.call_at(self._deadline_s, self._check)

    def end(self, reason: str = "", grace_s: float = EXIT_LIMIT_S) -> None:
        """End the process; no further messages are sent or received.

        Calls `on_end` when the process has ended, with `reason` or a description of its exit code.
        """
        if not self._is_over:
            self._detach()
            self._ending = self._loop.create_task(self._report(reason, grace_s))

    async def close(self) -> None:
        """End the process on purpose. It exits when its socket closes; otherwise it is killed."""
        if not self._is_over:
            self._detach()
            await self._wait_or_kill(EXIT_LIMIT_S)
        elif self._ending is not None:
            await self._ending

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""  # ended with unread messages
        except OSError as error:
            self.end(f"cannot be reached: {error}")
            return
        if not data:
            self.end()
            return
        try:
            messages = [from_worker.decode(frame) for frame in self._reader.feed(data)]
        except ValueError as error:
            self.end(f"sent an invalid message: {error}")
            return
        for message in messages:
            self._announced_s = message.limit_s if isinstance(message, Working) else 0.0
            self._heard_s = self._loop.time()
            self._deadline_s = self._heard_s + max(self._limit_s, self._announced_s)
            if not self._is_over:
                self._on_message(message)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except ConnectionError:
            self._loop.remove_writer(self._socket)
            return
        except OSError as error:
            self.end(f"cannot be reached: {error}")
            return
        if not self._writer.num_unsent:
            self._loop.remove_writer(self._socket)

    def _check(self) -> None:
        self._watch = None
        if self._loop.time() < self._deadline_s:
            self._watch = self._loop.call_at(self._deadline_s, self._check)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)  # faulthandler writes its stack to stderr
        limit_s = max(self._limit_s, self._announced_s)
        self.end(f"sent no message for {limit_s:g} s and was killed", grace_s=1.0)

    async def _report(self, reason: str, grace_s: float) -> None:
        code = await self._wait_or_kill(grace_s)
        self._on_end(reason or _describe(code))

    async def _wait_or_kill(self, grace_s: float) -> int:
        try:
            return await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    def _detach(self) -> None:
        self._is_over = True
        self.expect_message(None)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    """Start a worker. -P: import no modules from the working directory. Its stdout goes to stderr."""
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])]
    log_name = log_format()
    env = {name: value for name, value in os.environ.items() if name not in SERVER_SECRETS}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.worker.worker", str(fd), *([log_name] if log_name else [])],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        env={**env, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
