"""A process that writes to a disk store and is killed: `python -m tests.engine.levels.crash_child ROOT MAX_BYTES`.

Reads one line for each child: a seed, and the number of system calls after which the child kills itself. Forks the
child, waits until it is dead and prints "dead".
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.levels.disk_store import DiskStore
from tests.engine.levels.contents import FACTS, make_content, make_payload

PAYLOAD_BYTES = 20_000
NUM_CONTENTS = 60


class Bomb:
    """Kills this process in the middle of a system call of a write."""

    def __init__(self, rng: random.Random, num_calls: int) -> None:
        self._rng = rng
        self._left = num_calls

    def arm(self) -> None:
        writev = os.writev

        def write_some(descriptor: int, buffers: list[memoryview]) -> int:
            whole = b"".join(buffers)
            if self._is_last():
                os.write(descriptor, whole[: self._rng.randrange(len(whole) + 1)])
                self._die()
            return writev(descriptor, buffers)

        os.writev = write_some  # type: ignore[assignment]
        for name in ("open", "fchmod", "utime", "fsync", "replace", "unlink"):
            setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **settings: Any) -> Any:
            is_last = self._is_last()
            if is_last and self._rng.random() < 0.5:
                self._die()
            try:
                return call(*arguments, **settings)
            finally:
                if is_last:
                    self._die()

        return wrapped

    def _is_last(self) -> bool:
        self._left -= 1
        return self._left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def write_forever(root: Path, max_bytes: int, seed: int, num_calls: int) -> None:
    rng = random.Random(seed)
    Bomb(rng, num_calls).arm()
    store = DiskStore(root, FACTS, max_bytes)
    while True:
        content = make_content(rng.randrange(NUM_CONTENTS))
        if rng.random() < 0.2:
            store.remove(content)
        else:
            assert store.write(content, make_payload(content, PAYLOAD_BYTES)).is_stored


def main() -> None:
    root, max_bytes = Path(sys.argv[1]), int(sys.argv[2])
    for line in iter(sys.stdin.readline, ""):
        seed, num_calls = map(int, line.split())
        child = os.fork()
        if child == 0:
            try:
                write_forever(root, max_bytes, seed, num_calls)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        os.write(1, b"dead\n" if os.WIFSIGNALED(status) else f"exited {status}\n".encode())


if __name__ == "__main__":
    main()
