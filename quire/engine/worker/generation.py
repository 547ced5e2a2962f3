"""The client's view of a submitted request: its text as it is generated, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from quire.core.cache.prefix import CacheExplanation
from quire.engine.outputs import Answers, Delta, GenerationOutput
from quire.engine.worker.protocol import Started
from quire.errors import QuireError


class TokenSink(Protocol):
    """Receives new text as it arrives. Methods return False if the text must be queued."""

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        """Take a token of plain text of sample `index`."""

    def take_delta(self, delta: Delta) -> bool:
        """Take any other delta without a finish reason."""


class Generation:
    """A submitted request. Iterate over `deltas`: a failure raises there, and leaving early cancels the request.

    Alternatively wait for `updated`, which several generations may share, and call `take`. A `sink` receives
    text when it arrives, without waking a task, as long as nothing is queued. The last delta is always queued.
    """

    __slots__ = (
        "_changed",
        "_deltas",
        "_error",
        "_is_raised",
        "_on_cancel",
        "_on_start",
        "_plain_texts",
        "_samples",
        "_updated",
        "answers",
        "cache",
        "first_s",
        "num_cached_tokens",
        "num_moves",
        "queued_s",
        "request_ids",
        "sink",
    )  # fmt: skip

    def __init__(
        self,
        answers: Answers,
        request_ids: tuple[int, ...],
        on_cancel: Callable[[Generation], None],
        updated: asyncio.Event | None = None,
        on_start: Callable[[Generation], None] | None = None,
    ) -> None:
        self.answers = answers
        self._samples = answers.samples
        self._plain_texts = answers.tokenizer.plain_texts
        self.request_ids = request_ids  # one per sample
        self.queued_s: float | None = None  # time in the worker's queue; None until it starts
        self.cache: CacheExplanation | None = None  # set at the start: how much was cached, and why not more
        self.num_cached_tokens = 0
        self.num_moves = 0  # from replicas that ended before it started
        self._on_cancel = on_cancel
        self._deltas: list[Delta] = []
        self._error: QuireError | None = None
        self._is_raised = False  # the error was raised
        self._changed = asyncio.Event()  # not shared: iterating must not clear the event of other generations
        self._updated = updated
        self._on_start = on_start
        self.sink: TokenSink | None = None
        self.first_s: float | None = None  # arrival of the first token, in the time of `time.monotonic`

    @property
    def last_s(self) -> float | None:
        """Arrival of the last token so far."""
        return max((sample.last_s for sample in self._samples if sample.last_s is not None), default=None)

    @property
    def is_started(self) -> bool:
        return self.queued_s is not None

    @property
    def error(self) -> QuireError | None:
        """The error, also before it was raised."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether it ended and everything was taken, including the error, which is taken when it is raised."""
        if self._error is not None:
            return self._is_raised
        return not self._deltas and self.answers.is_finished

    def take(self) -> list[Delta]:
        """The new deltas, possibly none. If the request failed, raises the error once no deltas are left."""
        deltas, self._deltas = self._deltas, []
        if self._error is not None:
            if not deltas:
                self._is_raised = True
                raise self._error
            self.wake()  # the caller must call again to get the error
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
        """The whole answer, or the part that was generated before it was cancelled."""
        async for _ in self.deltas():
            pass
        return self.answers.result()

    def cancel(self) -> None:
        """Free the request's resources in the worker, and end its iteration. Does nothing if it has ended."""
        self._on_cancel(self)

    def detach(self) -> None:
        """Drop references to the request: without cycles its memory is freed when it ends, not by a collection."""
        self.sink = None
        self._on_start = None

    # Called by the WorkerConnection

    def start(self, started: Started) -> None:
        self.queued_s = started.waited_s
        self.cache, self.num_cached_tokens = started.cache, started.num_cached_tokens
        if self._on_start is not None:
            self._on_start(self)
        self.wake()

    def push_token(self, index: int, token_id: int, now_s: float, previous: dict[float | None, int]) -> bool:
        """Take the next token of an unfinished sample, if it is plain text. False: the caller must use `Answers.push`.

        This is the path of nearly every token: it does what `Answers.push`, `push` and `note_tokens` do, in a fraction
        of the time. `previous` counts the tokens by the time of the token before them.
        """
        sample = self._samples[index]
        if not sample.is_plain:
            return False
        text = self._plain_texts[token_id]
        if not text:  # special, or a part of a character
            return False
        sample.text.append(text)
        sample.token_ids.append(token_id)
        last_s = sample.last_s
        sample.last_s = now_s
        if last_s is None:
            self._note_first(now_s)
        previous[last_s] = previous.get(last_s, 0) + 1
        sink = self.sink
        if sink is None or self._deltas or not sink.take_token(index, token_id, text, now_s):
            self._deltas.append(Delta(index, text, (token_id,), (), None, None))
            self.wake()
        return True

    def push(self, delta: Delta) -> None:
        sink = None if delta.finish_reason is not None else self.sink
        if sink is None or self._deltas or not sink.take_delta(delta):
            self._deltas.append(delta)
            self.wake()

    def note_tokens(self, index: int, now_s: float) -> float | None:
        """Record that tokens of a sample arrived. Returns the time of the previous ones; None: these are the first."""
        sample = self._samples[index]
        last_s, sample.last_s = sample.last_s, now_s
        if last_s is None:
            self._note_first(now_s)
        return last_s

    def _note_first(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s

    def fail(self, error: QuireError) -> None:
        """Record an error. Only the first one is kept."""
        if self._error is None:
            self._error = type(error)(str(error))  # a copy: each task that raises it adds to its traceback
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        if self._updated is not None:
            self._updated.set()
