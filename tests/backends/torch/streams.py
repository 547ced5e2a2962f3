"""A simulation of CUDA streams: what was enqueued runs later, in any order that streams and events allow.

It shows whether `CudaBlockIO` waits for everything that it must wait for. On a CPU the real code runs in order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.backends.torch import cuda_block_io
from quire.backends.torch.cuda_block_io import CudaBlockIO


class Mark:
    """One recording of an event."""

    def __init__(self) -> None:
        self.has_passed = False


class Event:
    def __init__(self) -> None:
        self._last: Mark | None = None

    def record(self, stream: Stream) -> None:
        self._last = stream.mark()

    def query(self) -> bool:
        return self._last is None or self._last.has_passed

    @property
    def last(self) -> Mark | None:
        return self._last


class Stream:
    def __init__(self) -> None:
        self.queue: deque[Mark | Callable[[], None]] = deque()  # a mark to pass, or work
        self._waits: deque[tuple[int, Mark]] = deque()  # a mark to wait for after this much of the queue
        self._num_done = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def mark(self) -> Mark:
        made = Mark()
        self.queue.append(made)
        return made

    def wait_event(self, event: Event) -> None:
        if event.last is not None:
            self._waits.append((self._num_done + len(self.queue), event.last))

    def wait_stream(self, stream: Stream) -> None:
        self._waits.append((self._num_done + len(self.queue), stream.mark()))

    @property
    def can_run(self) -> bool:
        while self._waits and self._waits[0][0] == self._num_done and self._waits[0][1].has_passed:
            self._waits.popleft()
        return bool(self.queue) and not (self._waits and self._waits[0][0] == self._num_done)

    def run_one(self) -> None:
        work = self.queue.popleft()
        self._num_done += 1
        if isinstance(work, Mark):
            work.has_passed = True
        else:
            work()


class Device:
    """The streams of a `CudaBlockIO`. Work is what the patched functions would compute."""

    def __init__(self, make: Callable[[], CudaBlockIO], patch: pytest.MonkeyPatch, rng: Random) -> None:
        self._rng = rng
        self.streams: list[Stream] = []
        self._current: Stream | None = None
        lib = SimpleNamespace(Event=Event, Stream=self._make_stream, stream=self._on)
        patch.setattr(torch, "get_device_module", lambda _device: lib)
        for name in ("move_pieces", "_copy"):
            patch.setattr(cuda_block_io, name, self._late(getattr(cuda_block_io, name)))
        patch.setattr(CudaBlockIO, "_load_kernels", lambda _io: None)
        self.io = make()
        self.steps = self.io.steps

    def _make_stream(self, _device: object = None) -> Stream:
        made = Stream()
        self.streams.append(made)
        return made

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _late(self, function: Callable[..., None]) -> Callable[..., None]:
        def enqueue(*args: Any, **options: Any) -> None:
            assert self._current is not None
            self._current.enqueue(lambda: function(*args, **options))

        return enqueue

    def run(self, most: int) -> int:
        """Run up to this much of what the streams have enqueued, in a random order. Returns how much was run."""
        for number in range(most):
            ready = [stream for stream in self.streams if stream.can_run]
            if not ready:
                return number
            self._rng.choice(ready).run_one()
        return most

    def drain(self) -> None:
        while self.run(1000):
            pass
        assert not any(stream.queue for stream in self.streams)  # nothing waits for ever
