"""Requests that wait for their grammar to be compiled. A slow grammar delays only its own request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from quire.engine.structured.grammars import Compiled, Grammars
from quire.engine.worker.protocol import Add
from quire.errors import QueueFull, QuireError, RequestFailed

MAX_COMPILING = 256  # requests; a new grammar takes milliseconds, a hostile one two seconds
SIGN_OF_LIFE_S = 5.0  # interval of messages while the worker only waits for grammars


class _Waiting(NamedTuple):
    message: Add
    job: Future[Compiled]


class GrammarQueue:
    """Used by the thread of the worker's loop. Other threads call `wake` when there is something to `take`."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._waiting: list[_Waiting] = []
        self._last_sign_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Add) -> None:
        """Compile the grammar of a request. Raises QueueFull."""
        assert message.grammar is not None
        if len(self._waiting) >= MAX_COMPILING:
            raise QueueFull(f"{len(self._waiting)} requests wait for their grammars to be compiled, which is the limit")
        if not self._waiting:
            self._last_sign_s = time.monotonic()
        job = self._grammars.submit(message.grammar)
        self._waiting.append(_Waiting(message, job))
        job.add_done_callback(lambda _: self._wake())

    def cancel(self, request_id: int) -> None:
        """Remove a request with all its samples: a client that cancels one cancels all of them."""
        self._waiting = [one for one in self._waiting if request_id not in one.message.request_ids]

    def take(self) -> Sequence[tuple[Add, Compiled | QuireError]]:
        """The requests whose grammars are compiled or failed, in order of arrival."""
        done: list[_Waiting] = []
        waiting: list[_Waiting] = []
        for one in self._waiting:
            (done if one.job.done() else waiting).append(one)
        self._waiting = waiting
        return [(one.message, _outcome(one.job)) for one in done]

    def is_sign_due(self) -> bool:
        """Whether to report to the client that the worker is waiting. True at most once per interval."""
        now_s = time.monotonic()
        if not self._waiting or now_s - self._last_sign_s < SIGN_OF_LIFE_S:
            return False
        self._last_sign_s = now_s
        return True


def _outcome(job: Future[Compiled]) -> Compiled | QuireError:
    try:
        return job.result()
    except QuireError as error:
        return error
    except Exception as error:
        return RequestFailed(f"grammar: {type(error).__name__}: {error}")
