"""The process of a `LimitedChild`: runs the `Worker` of a script within limits of memory and CPU time.

Reads and writes one JSON object per line, and ends with its input. Neither this file nor the script imports quire
modules, so that the process starts fast, and untrusted code in it cannot reach them.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from contextlib import suppress


def limit_memory(max_bytes: int) -> None:
    """Limit the address space."""
    with suppress(ImportError, ValueError, OSError):  # not available on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(max_cpu_s: float) -> None:
    """Limit the CPU time from now on; 0: no limit. On expiry a signal ends the process."""
    if hasattr(signal, "setitimer"):  # not available on every platform
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)


def main() -> None:
    worker = runpy.run_path(sys.argv[1])["Worker"]()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if "max_bytes" in order:  # the first one
            limit_memory(order["max_bytes"])
        limit_cpu(order["max_cpu_s"])
        try:
            answer = worker.answer(order)
        except BaseException as error:  # a panic of a library is not an Exception
            answer = {"error": str(error)[:2000], "kind": type(error).__name__}
        limit_cpu(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
