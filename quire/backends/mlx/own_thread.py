"""A thread that does all of a runner's work, one call after the other.

MLX's streams belong to threads: an array that one thread has not evaluated yet cannot be evaluated by another. An
engine, however, may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class OwnThread:
    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # A daemon, so that a program that is interrupted while a model is loaded can end.
        threading.Thread(target=self._work, name="mlx", daemon=True).start()

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in the thread and wait for its result."""
        future: Future[Result] = Future()
        self._calls.put((future, function, args))
        return future.result()

    def stop(self) -> None:
        """End the thread after the calls before. `run` must not be called afterwards."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:  # it belongs to the caller
                future.set_exception(error)
            del call, future, function, args  # they may hold large arrays until the next call
