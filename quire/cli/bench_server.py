"""A private `quire serve` process on a free port, for `quire bench` and `quire batch`, which stop it when they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from types import FrameType
from typing import IO

from quire.cli.server_client import ServerError, printable
from quire.errors import MissingExtra, QuireError

STOP_S = 10.0  # after SIGTERM; then it is killed
NUM_TAIL_LINES = 10
KEPT_VARIABLES = ("QUIRE_CACHE",)  # the folder of models; other variables would set options of the server
# The comment names the process in a list of processes.
_SERVE = "from quire.cli.bench_server import run_while_parent_lives as run; run()  # quire serve"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    pid: int
    url: str
    num_threads: int


def check_installed(what: str = "the server of the fairness part") -> None:
    """Refuse a missing library of the server before anything is measured."""
    try:
        import quire.server.launcher  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of(what, error.name) from error


@contextmanager
def serving(model: str, options: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Start a server and wait until it is ready. The last lines of its log are added to errors.

    `variables`: added to its environment, which other users of the machine cannot read, unlike options. The server has
    no state directory, so that it does not continue the batches of another server.
    """
    command = [sys.executable, "-c", _SERVE, "serve", model, "--host", "127.0.0.1", "--port", "0", *options]
    command += ["--state-dir", "none"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("QUIRE_") or name in KEPT_VARIABLES
    } | dict(variables or {})
    with TemporaryFile("a+", encoding="utf-8", errors="replace") as log, _terminable():
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, even if it is killed
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
        try:
            yield _wait_ready(process)
        except QuireError as error:
            if not (tail := _tail(log)):
                raise
            raise type(error)(f"{error}. The last lines of its log:\n{tail}") from error
        finally:
            _stop(process)


def run_while_parent_lives() -> None:
    """The `quire` command in a child process: its standard input is a pipe that ends with the parent."""
    from quire.cli.main import run

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for _ in range(2):  # the second signal ends requests that are still open
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
    run()


def _wait_ready(process: subprocess.Popen[str]) -> ServerProcess:
    """Wait for the line with the address. There is no time limit: a large model may load for minutes."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        url, computes = re.search(r" at (http://\S+)", text), re.search(r"^  computes .*$", text, re.MULTILINE)
        if url is not None and computes is not None:
            threads = re.search(r"(\d+) threads?$", computes[0])  # on a CPU only
            return ServerProcess(process.pid, url[1], int(threads[1]) if threads else 1)
    raise ServerError(f"`quire serve` did not start: it ended with exit code {process.wait()}")


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n".join(f"  {printable(line.rstrip())}" for line in log.readlines()[-NUM_TAIL_LINES:])


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop the server, which stops its worker process."""
    try:
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after a second Ctrl-C
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that the server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
