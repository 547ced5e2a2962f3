"""Runs modules like `python -m`, each in a fork of a process that has already imported the slow dependencies.

    python fork_server.py LIMIT_S MODULE...

Reads lines of JSON (folder, arguments) and writes one line (exit code, output) for each, until its input ends. It is
run as a file, so that it imports nothing of quire and its tests: each fork imports those from its own folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback


def run(folder: str, arguments: list[str], output: int) -> int:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    # The same file has other contents in the next run, perhaps of the same size and written in the same second.
    sys.dont_write_bytecode = True
    sys.path[0] = folder
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
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


def main() -> None:
    limit_s = float(sys.argv[1])
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if not pid:
                code = run(folder, arguments, output.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = wait(pid, limit_s)
            output.seek(0)
            print(json.dumps((code, output.read().decode(errors="replace"))), flush=True)


if __name__ == "__main__":
    main()
