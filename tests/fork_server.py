"""Runs modules like `python -m`, each in a fork of a process that has already imported the slow dependencies.

    python fork_server.py LIMIT_S MODULE...

Reads lines of JSON (folder, arguments, stdin, environment) and writes a line (exit code, stdout, stderr, CPU seconds)
for each, until its input ends. It is run as a file, so that it imports nothing of quire and its tests but the modules
that are named: a fork imports the others from its own folder. `ForkServer` starts one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LIMIT_S = 1200.0  # only a hang takes longer


class Ended(NamedTuple):
    code: int  # negative if it was killed
    stdout: str
    stderr: str
    cpu_s: float


class ForkServer:
    """Starts the process, and asks it to run modules. Threads take turns."""

    cpu_s = 0.0  # of the runs of all servers that have not ended: they are no children of this process

    def __init__(self, *modules: str, environment: dict[str, str], limit_s: float = LIMIT_S) -> None:
        """`modules`: imported before the forks. `limit_s`: a run that takes longer is killed, with its children."""
        self._turn = threading.Lock()
        self._cpu_s = 0.0
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(limit_s), *modules],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate("")
        ForkServer.cpu_s -= self._cpu_s

    def run(self, folder: Path, *arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> Ended:
        """Run a module in a folder. `environment`: the whole of it; that of the server by default."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._turn:
            print(json.dumps((str(folder), arguments, stdin, environment)), file=self.process.stdin, flush=True)
            ended = Ended(*json.loads(self.process.stdout.readline()))
            self._cpu_s += ended.cpu_s
            ForkServer.cpu_s += ended.cpu_s
            return ended


def run(folder: str, arguments: list[str], environment: dict[str, str] | None, files: list[BinaryIO]) -> int:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    # The same file has other contents in the next run, perhaps of the same size and written in the same second.
    sys.dont_write_bytecode = True
    sys.path[0] = folder
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def wait(pid: int, limit_s: float) -> int:
    """Wait for the exit code of a fork. After the limit it is killed. Processes that it left are killed too."""
    deadline = time.monotonic() + limit_s
    pause_s = 0.001
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])


def children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    limit_s = float(sys.argv[1])
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for line in sys.stdin:
        folder, arguments, stdin, environment = json.loads(line)
        with contextlib.ExitStack() as opened:
            files: list[BinaryIO] = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            before = children_cpu_s()
            pid = os.fork()
            if not pid:
                code = run(folder, arguments, environment, files)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = wait(pid, limit_s)
            written = []
            for file in files[1:]:
                file.seek(0)
                written.append(file.read().decode(errors="replace"))
            print(json.dumps((code, *written, children_cpu_s() - before)), flush=True)


if __name__ == "__main__":
    main()
