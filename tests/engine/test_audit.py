"""The worker looks after itself when it has nothing to do. Here it runs in a thread, so that it can be damaged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner
from quire.core.check import audit
from quire.core.request import PackedPrompt, Priority, SamplingParams
from quire.core.scheduler import Scheduler
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.engine.worker.protocol import (
    Add,
    Begun,
    Cancel,
    Channel,
    ClearCache,
    Finish,
    FrameReader,
    FromWorker,
    GetStats,
    Gone,
    Load,
    PinCache,
    Stats,
    Stepped,
    ToWorker,
    UnpinCache,
    from_worker,
    pack,
)
from quire.engine.worker.worker import READ_ONLY, Observer, Worker
from quire.errors import InvariantViolation

CAPACITY = Capacity(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=100, vocab_size=50)
LIMIT_S = 60.0


class Peer:
    """The other side of a worker, by hand."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._reader = FrameReader()
        self._frames: list[bytes] = []

    def send(self, message: ToWorker) -> None:
        self._peer.sendall(pack(message))

    def next(self) -> FromWorker:
        while not self._frames:
            self._frames += self._reader.feed(self._peer.recv(1 << 16))
        message: FromWorker = from_worker.decode(self._frames.pop(0))
        return message

    def stats(self) -> Stats:
        self.send(GetStats(1))
        while not isinstance(message := self.next(), Stats):
            pass
        return message

    def answer(self, request_id: int, prompt: tuple[int, ...]) -> list[FromWorker]:
        """All that is said until it is answered."""
        self.ask(request_id, prompt)
        return self.until_answered()

    def ask(self, request_id: int, prompt: tuple[int, ...]) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=3)
        self.send(Add((request_id,), PackedPrompt.of(prompt), sampling, Priority.NORMAL, ""))

    def until_answered(self) -> list[FromWorker]:
        said: list[FromWorker] = []
        while not any(
            output.finish_reason for message in said if isinstance(message, Stepped) for output in message.outputs
        ):
            said.append(self.next())
        return said


@contextmanager
def working() -> Iterator[tuple[Peer, Engine]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    observer, runner = Observer(), FakeRunner(CAPACITY)
    engine = Engine(runner, make_scheduler(runner, EngineConfig(), observer))
    worker = Worker(Channel(theirs), engine, observer)

    def serve() -> None:
        with pytest.raises(Gone):
            worker.run()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Peer(ours), engine
    finally:
        ours.close()
        thread.join(LIMIT_S)
        theirs.close()


class Audits:
    """Watches a worker's audits, and can hold one up after its first slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = threading.Semaphore(0)  # released by every audit that comes to its end
        self.num_begun = 0
        self.num_slices = 0
        self.is_held = False  # the next one is to stop after its first slice
        self.held = threading.Semaphore(0)  # released when it does
        self.go_on = threading.Semaphore(0)
        monkeypatch.setattr("quire.engine.worker.worker.audit", self._watch)

    def _watch(self, scheduler: Scheduler, *, max_blocks: int) -> Iterator[None]:
        self.num_begun += 1
        try:
            for _ in audit(scheduler, max_blocks=max_blocks):
                self.num_slices += 1
                if self.is_held:
                    self.is_held = False
                    self.held.release()
                    assert self.go_on.acquire(timeout=LIMIT_S)
                yield
        except InvariantViolation:
            self.done.release()
            raise
        self.done.release()


def test_a_broken_law_is_counted_and_the_cache_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = Audits(monkeypatch).done
    with working() as (peer, engine):
        peer.answer(1, tuple(range(20)))
        assert done.acquire(timeout=LIMIT_S)
        assert peer.stats().num_violations == 0
        assert peer.stats().cache.num_cached > 0
        block = next(block for block in engine.scheduler.cache.pool.blocks if block.key is not None)
        block.tokens = bytes(len(block.tokens))  # no longer what its key says
        peer.answer(2, (7,) * 10)
        assert done.acquire(timeout=LIMIT_S)
        found = peer.stats()
        assert (found.num_violations, found.cache.num_cached) == (1, 0)
        peer.answer(3, tuple(range(20)))  # and it goes on
        assert done.acquire(timeout=LIMIT_S)
        assert peer.stats().num_violations == 1
    assert "an invariant of the core is broken" in caplog.text


def test_one_audit_is_enough_for_one_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.05)
    done = Audits(monkeypatch).done
    with working() as (peer, _):
        assert not done.acquire(timeout=0.2)  # nothing has happened
        for _ in range(3):
            peer.stats()  # asking is not work
        assert not done.acquire(timeout=0.2)
        peer.answer(1, (1, 2, 3))
        assert done.acquire(timeout=LIMIT_S)
        peer.stats()
        assert not done.acquire(timeout=0.2)


def held_audit(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> Audits:
    """An audit of many slices that has come to the end of the first."""
    monkeypatch.setattr("quire.engine.worker.worker.MAX_VISITED_BLOCKS", 4)
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.01)
    audits = Audits(monkeypatch)
    audits.is_held = True
    peer.answer(1, tuple(range(20)))
    assert audits.held.acquire(timeout=LIMIT_S)
    return audits


def test_a_request_is_served_before_the_audit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, _):
        audits = held_audit(monkeypatch, peer)
        monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", LIMIT_S)
        peer.ask(2, (7,) * 10)
        audits.go_on.release()
        peer.until_answered()
        assert (audits.num_begun, audits.num_slices) == (1, 1)  # and the one that was under way is dropped
        assert peer.stats().num_violations == 0


def test_after_a_change_an_audit_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, engine):
        audits = held_audit(monkeypatch, peer)
        peer.send(ClearCache(5))
        audits.go_on.release()
        assert audits.done.acquire(timeout=LIMIT_S)
        assert audits.num_begun == 2
        assert peer.stats().num_violations == 0
        assert engine.scheduler.cache.stats().num_cached == 0


def test_a_question_is_answered_and_the_audit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, _):
        audits = held_audit(monkeypatch, peer)
        peer.send(GetStats(5))
        audits.go_on.release()
        assert audits.done.acquire(timeout=LIMIT_S)
        assert audits.num_begun == 1
        assert audits.num_slices > 3 * CAPACITY.num_blocks // 4 // 2
        assert isinstance(peer.next(), Stats)


def test_every_message_is_a_question_or_a_change() -> None:
    """A new kind of message counts as a change, unless somebody says that it is none."""
    changes = {Add, Cancel, Finish, ClearCache, PinCache, UnpinCache}
    assert {*READ_ONLY, *changes, Load} == set(get_args(ToWorker))


def test_a_start_is_told_before_its_step_and_once() -> None:
    with working() as (peer, _):
        first, *rest = peer.answer(1, (1, 2, 3))
        assert isinstance(first, Begun)
        assert [one.request_id for one in first.started] == [1]
        steps = [message for message in rest if isinstance(message, Stepped)]
        assert len(steps) == len(rest)
        assert steps[0].started == first.started
        assert not any(step.started for step in steps[1:])
