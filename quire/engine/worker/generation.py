"""One request under way, as whoever asked for it sees it: text as it comes, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from quire.core.prefix import CacheExplanation
from quire.engine.outputs import Answers, Delta, GenerationOutput
from quire.engine.worker.protocol import Started
from quire.errors import QuireError


class Generation:
    """Iterate over its deltas; a failure raises there, and leaving early cancels it.

    Or wait for `news`, which several generations may share, and `take` what there is.
    """

    def __init__(
        self,
        answers: Answers,
        request_ids: tuple[int, ...],
        on_cancel: Callable[[Generation], None],
        news: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> None:
        self.answers = answers
        self.request_ids = request_ids  # one a sample
        self.queued_s: float | None = None  # how long it waited in the worker; None until it starts
        self.cache: CacheExplanation | None = None  # from the start on: how far its prompt was cached, why not further
        self.num_cached_tokens = 0
        self._on_cancel = on_cancel
        self._deltas: list[Delta] = []
        self._error: QuireError | None = None
        self._is_told = False  # the error has been raised
        self._changed = asyncio.Event()  # ours alone: iterating must not use up the news of others
        self._news = news
        self._on_start = on_start

    @property
    def is_started(self) -> bool:
        return self.queued_s is not None

    @property
    def error(self) -> QuireError | None:
        """What went wrong, also before it has been raised."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Finished, cancelled or failed, and there is nothing left to take: an error counts as taken once raised."""
        if self._error is not None:
            return self._is_told
        return not self._deltas and self.answers.is_finished

    def take(self) -> list[Delta]:
        """All there is now, maybe nothing. If it failed, the error is raised once nothing else is left."""
        deltas, self._deltas = self._deltas, []
        if self._error is not None:
            if not deltas:
                self._is_told = True
                raise self._error
            self.wake()  # whoever waits for news only after this has an error to come
        return deltas

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                self._changed.clear()
                for delta in self.take():
                    yield delta
                if self.is_over:
                    return
                await self._changed.wait()
        finally:
            self.cancel()

    async def result(self) -> GenerationOutput:
        """The whole answer. If it was cancelled, what there is of it."""
        async for _ in self.deltas():
            pass
        return self.answers.result()

    def cancel(self) -> None:
        """Frees what it holds in the worker; whoever iterates comes to the end. Does nothing if it is over."""
        self._on_cancel(self)

    # For the link that brings its news

    def start(self, started: Started) -> None:
        self.queued_s = started.waited_s
        self.cache, self.num_cached_tokens = started.cache, started.num_cached_tokens
        if self._on_start is not None:
            self._on_start(self)
        self.wake()

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self.wake()

    def fail(self, error: QuireError) -> None:
        """The first error is the one that is told."""
        if self._error is None:
            self._error = type(error)(str(error))  # its own: a traceback grows with every task that raises it
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        if self._news is not None:
            self._news.set()
