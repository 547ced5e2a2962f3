"""Runs modules as `python -m` would, each in a fork of a process that has what takes long to import.

Reads a line of JSON (folder, arguments) and answers with one (exit code, output), until its input ends. Run as a file,
so that it has imported nothing of quire and its tests: a fork takes those from its folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback

import hypothesis  # noqa: F401  the forks want them
import numpy  # noqa: F401
import pytest  # noqa: F401


def run(folder: str, arguments: list[str], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
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
