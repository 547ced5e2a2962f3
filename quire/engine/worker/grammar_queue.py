"""Requests that wait for their grammars to be compiled. A slow grammar delays only requests of its own tenant."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from quire.engine.structured.grammars import NUM_THREADS, Compiled, Grammars
from quire.engine.worker.protocol import Add
from quire.errors import QueueFull, QuireError, RequestFailed

MAX_COMPILING = 256  # requests; a common grammar takes milliseconds, a hostile one two seconds
HARD_FACTOR = 4  # requests of all tenants together: at most this many times MAX_COMPILING
MAX_OF_TENANT = NUM_THREADS - 1  # compiled at the same time: one tenant does not use every thread
SIGN_OF_LIFE_S = 5.0  # interval of messages while the worker only waits for grammars


class _Compiling(NamedTuple):
    message: Add
    job: Future[Compiled]


class GrammarQueue:
    """Compiles the grammars of waiting requests; tenants (API keys) take turns.

    Used by the thread of the worker's loop. Other threads call `wake` when there is something to `take`.
    """

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._lines: dict[str, deque[Add]] = {}  # of tenants with waiting requests, in the order of their turns
        self._compiling: list[_Compiling] = []
        self._abandoned: list[_Compiling] = []  # cancelled requests whose grammars still use a thread
        self._last_sign_s = 0.0

    def __len__(self) -> int:
        return len(self._compiling) + sum(map(len, self._lines.values()))

    def add(self, message: Add) -> None:
        """Queue the compilation of a request's grammar. Raises QueueFull.

        A full queue refuses a request with which its tenant would have more than an equal part of the queue.
        """
        num_all = len(self)
        compiling = [one.message.tenant for one in self._compiling]
        num_tenants = len({message.tenant, *self._lines, *compiling})
        num_own = len(self._lines.get(message.tenant, ())) + compiling.count(message.tenant)
        is_greedy = (num_own + 1) * num_tenants > MAX_COMPILING
        if num_all >= MAX_COMPILING and (is_greedy or num_all >= HARD_FACTOR * MAX_COMPILING):
            raise QueueFull(f"{num_all} requests wait for their grammars to be compiled, which is the limit")
        if not num_all:
            self._last_sign_s = time.monotonic()
        self._lines.setdefault(message.tenant, deque()).append(message)
        self._begin()

    def _begin(self) -> None:
        """Start jobs while threads are free. Tenants take turns, one request each."""
        self._abandoned = [one for one in self._abandoned if not one.job.done()]
        while (tenant := self._next_tenant()) is not None:
            line = self._lines.pop(tenant)
            message = line.popleft()
            if line:
                self._lines[tenant] = line
            job = self._job(message)
            self._compiling.append(_Compiling(message, job))
            job.add_done_callback(lambda _: self._wake())

    def _next_tenant(self) -> str | None:
        """The tenant whose turn it is. None: no thread is free for any of them."""
        running = Counter(one.message.tenant for one in (*self._compiling, *self._abandoned) if not one.job.done())
        if running.total() >= NUM_THREADS:
            return None
        return next((tenant for tenant in self._lines if running[tenant] < MAX_OF_TENANT), None)

    def _job(self, message: Add) -> Future[Compiled]:
        assert message.grammar is not None
        compiled = self._grammars.find(message.grammar, message.tenant)  # compiled for an earlier request
        if compiled is None:
            return self._grammars.submit(message.grammar, message.tenant)
        job: Future[Compiled] = Future()
        job.set_result(compiled)
        return job

    def cancel(self, request_id: int) -> None:
        """Remove a request with all its samples: a client that cancels one cancels all of them."""
        self._abandoned += [one for one in self._compiling if request_id in one.message.request_ids]
        self._compiling = [one for one in self._compiling if request_id not in one.message.request_ids]
        for tenant, line in list(self._lines.items()):
            kept = deque(message for message in line if request_id not in message.request_ids)
            if kept:
                self._lines[tenant] = kept
            else:
                del self._lines[tenant]

    def take(self) -> Sequence[tuple[Add, Compiled | QuireError]]:
        """The requests whose grammars are compiled or failed, in the order in which their compilation began."""
        done: list[_Compiling] = []
        compiling: list[_Compiling] = []
        for one in self._compiling:
            (done if one.job.done() else compiling).append(one)
        self._compiling = compiling
        self._begin()
        return [(one.message, _outcome(one.job)) for one in done]

    def is_sign_due(self) -> bool:
        """Whether to tell the client that the worker is alive and waiting. True at most once per interval."""
        now_s = time.monotonic()
        if not len(self) or now_s - self._last_sign_s < SIGN_OF_LIFE_S:
            return False
        self._last_sign_s = now_s
        return True


def _outcome(job: Future[Compiled]) -> Compiled | QuireError:
    try:
        return job.result()
    except QuireError as error:
        return error
    except Exception as error:
        return RequestFailed(f"compiling the grammar failed: {type(error).__name__}: {error}")
