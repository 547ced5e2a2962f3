"""Runs modules like `python -m`, each in a fork of a process that has already imported the slow dependencies.

Reads lines of JSON (folder, arguments) and writes one line (exit code, output) for each, until its input ends. It is
run as a file, so that it imports nothing of quire and its tests: each fork imports those from its own folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback

import hypothesis  # noqa: F401  imported for the forks
import numpy  # noqa: F401
import pytest  # noqa: F401


def run(folder: str, arguments: list[str], output: int) -> int:
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


def main() -> None:
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if not pid:
                code = run(folder, arguments, output.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            print(json.dumps((code, output.read().decode(errors="replace"))), flush=True)


if __name__ == "__main__":
    main()
