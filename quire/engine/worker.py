"""The process that holds one model: reads orders from its socket, steps the engine, writes what came of it.

Sleeps in `select` while there is nothing to do, never waits for a reader, and ends when the other side goes away.
Started by the client as `python -m quire.engine.worker FD`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire.core.request import Request, SamplingParams
from quire.core.step import StepPlan
from quire.engine.build import make_engine
from quire.engine.engine import Engine, EngineOutput
from quire.engine.wire import (
    MAX_UNSENT,
    Add,
    Cancel,
    Explain,
    Explained,
    Failed,
    Finish,
    FrameReader,
    FrameWriter,
    FromWorker,
    GetStats,
    Load,
    Loading,
    Ready,
    Refused,
    Stats,
    Stepped,
    ToWorker,
    Working,
    pack,
    to_worker,
)
from quire.errors import QuireError

SIGN_OF_LIFE_S = 1.0  # at least this often while steps bring no news
LONG_STEP_S = 3.0  # a step predicted to take longer is announced
PATIENCE_FACTOR = 10.0  # with this multiple of the prediction as its limit
WARM_UP_TOKENS = 8

log = logging.getLogger(__name__)


class Gone(Exception):
    """The other side closed its end."""


class Channel:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        peer.setblocking(False)
        self._reader = FrameReader()
        self._writer = FrameWriter(peer)
        self.last_sent_s = time.monotonic()

    def send(self, message: FromWorker) -> None:
        self.last_sent_s = time.monotonic()
        try:
            self._writer.send(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None
        if self._writer.num_unsent > MAX_UNSENT:
            raise Gone

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """All that has arrived. With `wait`, sleeps until a message has."""
        messages: list[ToWorker] = []
        while True:
            is_done = bool(messages) or not wait
            writing = [self._peer] if self._writer.num_unsent else []
            readable, writable, _ = select.select([self._peer], writing, [], 0 if is_done else None)
            if writable:
                self._flush()
            if readable:
                messages += [message for frame in self._read() if (message := self._decode(frame)) is not None]
            elif is_done:
                return messages

    def _read(self) -> list[bytes]:
        try:
            data = self._peer.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            raise Gone from None
        if not data:
            raise Gone
        return self._reader.feed(data)

    def _decode(self, frame: bytes) -> ToWorker | None:
        """A message that is none of ours ends the request it speaks of, and nobody else's."""
        try:
            message: ToWorker = to_worker.decode(frame)
            return message
        except msgspec.DecodeError as error:
            log.error("a message could not be read: %s", error)
            found = msgspec.msgpack.decode(frame)
            ids = found.get("request_ids") if isinstance(found, dict) else None
            if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
                self.send(Refused(tuple(ids), "InvalidRequest", str(error)))
            return None

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None


class Pace:
    """How long a step will take, from how long steps took: by the tokens they compute."""

    def __init__(self) -> None:
        self._token_s = 0.0

    def predict_s(self, num_tokens: int) -> float:
        return self._token_s * num_tokens

    def learn(self, num_tokens: int, took_s: float) -> None:
        if num_tokens:
            self._token_s = max(took_s / num_tokens, 0.9 * self._token_s)


class Worker:
    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._pace = Pace()
        self._num_step_tokens = 0
        engine.on_plan = self._announce
        self._handlers: dict[type, Callable[..., None]] = {
            Add: self._add,
            Cancel: self._cancel,
            Finish: self._finish,
            Explain: self._explain,
            GetStats: self._stats,
        }

    def warm_up(self) -> None:
        """Two tokens of nothing: the first step of a run is slow, and the pace of steps must be known to judge them."""
        self._engine.add(0, (0,) * WARM_UP_TOKENS, SamplingParams(temperature=0, max_tokens=2))
        while self._engine.has_work:
            self._timed_step()
        self._engine.scheduler.cache.clear()

    def run(self, waiting: Sequence[ToWorker] = ()) -> None:
        """Until the other side goes away."""
        for message in waiting:
            self._handlers[type(message)](message)
        while True:
            for message in self._channel.receive(wait=not self._engine.has_work):
                self._handlers[type(message)](message)
            if self._engine.has_work:
                outputs = self._timed_step()
                if outputs or time.monotonic() - self._channel.last_sent_s > SIGN_OF_LIFE_S:
                    self._channel.send(Stepped(tuple(outputs)))

    def _announce(self, plan: StepPlan) -> None:
        self._num_step_tokens = plan.num_tokens
        predicted_s = self._pace.predict_s(plan.num_tokens)
        if predicted_s > LONG_STEP_S:
            self._channel.send(Working(PATIENCE_FACTOR * predicted_s))

    def _timed_step(self) -> list[EngineOutput]:
        start_s = time.monotonic()
        outputs = self._engine.step()
        self._pace.learn(self._num_step_tokens, time.monotonic() - start_s)
        return outputs

    def _add(self, message: Add) -> None:
        """All samples or none."""
        added: list[int] = []
        try:
            for index, request_id in enumerate(message.request_ids):
                self._engine.add(
                    request_id,
                    message.prompt,
                    message.sampling.sample(index),
                    priority=message.priority,
                    salt=message.salt,
                    parent_id=message.request_ids[0] if index else None,
                )
                added.append(request_id)
        except QuireError as error:
            for request_id in added:
                self._engine.cancel(request_id)
            self._channel.send(Refused(message.request_ids, type(error).__name__, str(error)))

    def _cancel(self, message: Cancel) -> None:
        self._engine.cancel(message.request_id)

    def _finish(self, message: Finish) -> None:
        try:
            self._engine.finish(message.request_id, message.num_output_tokens)
        except QuireError:
            self._engine.cancel(message.request_id)

    def _explain(self, message: Explain) -> None:
        try:
            request = Request(0, message.prompt, salt=message.salt)
            self._channel.send(Explained(message.query_id, self._engine.scheduler.explain(request)))
        except QuireError as error:
            self._channel.send(Explained(message.query_id, None, str(error)))

    def _stats(self, message: GetStats) -> None:
        scheduler = self._engine.scheduler
        self._channel.send(
            Stats(message.query_id, scheduler.cache.stats(), len(scheduler.running), len(scheduler.waiting))
        )


def serve(peer: socket.socket) -> int:
    """Load what the first message names, then serve. Returns the exit code."""
    channel = Channel(peer)
    try:
        return _load_and_run(channel)
    except Gone:
        return 0
    except QuireError as error:
        problem = Failed(type(error).__name__, str(error))
    except Exception as error:
        log.exception("the worker failed")
        problem = Failed("WorkerDied", f"{type(error).__name__}: {error}")
    with contextlib.suppress(Gone):
        channel.send(problem)
    return 1


def _load_and_run(channel: Channel) -> int:
    first, *rest = channel.receive(wait=True)
    if not isinstance(first, Load):
        raise ValueError(f"the first message is {type(first).__name__}, not Load")
    engine = make_engine(Path(first.path), first.config, _Throttled(channel))
    try:
        worker = Worker(channel, engine)
        worker.warm_up()
        channel.send(Ready(engine.capacity, engine.scheduler.max_context))
        worker.run(rest)
    finally:
        engine.close()
    return 0


class _Throttled:
    """Progress of loading, told ten times a second at most."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._last_s = 0.0

    def __call__(self, num_done: int, num_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > 0.1 or num_done == num_bytes:
            self._last_s = now_s
            self._channel.send(Loading(num_done, num_bytes))


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us: it decides what ends
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        code = serve(peer)
    sys.stdout.flush()
    os._exit(code)  # at once, whatever threads a backend has left: there is nothing to save


if __name__ == "__main__":
    main()
