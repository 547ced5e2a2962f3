"""Audits of an idle worker. It runs in a thread here, so that its state can be corrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import get_args

import pytest

from quire.core.check import audit
from quire.core.scheduler import Scheduler
from quire.engine.worker.protocol import (
    Add,
    Answered,
    Ask,
    Cancel,
    ClearCache,
    Finish,
    GetBlocks,
    GetStats,
    Load,
    Query,
    ToWorker,
)
from quire.engine.worker.worker import READ_ONLY
from quire.errors import InvariantViolation
from tests.engine.serving import CAPACITY, Peer, working
from tests.waiting import HANG_S


class Audits:
    """Records the audits of a worker, and can stop one after its first slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = threading.Semaphore(0)  # released when an audit ends
        self.num_begun = 0
        self.num_slices = 0
        self.is_held = False  # stop the next audit after its first slice
        self.held = threading.Semaphore(0)  # released when it has stopped
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
                    assert self.go_on.acquire(timeout=HANG_S)
                yield
        except InvariantViolation:
            self.done.release()
            raise
        self.done.release()


def test_a_broken_invariant_is_counted_and_the_cache_is_cleared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = Audits(monkeypatch).done
    with working() as (peer, engine):
        peer.answer(1, tuple(range(20)))
        assert done.acquire(timeout=HANG_S)
        assert peer.stats().num_violations == 0
        assert peer.stats().cache.num_cached > 0
        block = next(block for block in engine.scheduler.cache.pool.blocks if block.key is not None)
        block.tokens = bytes(len(block.tokens))  # does not match its key any more
        peer.answer(2, (7,) * 10)
        assert done.acquire(timeout=HANG_S)
        found = peer.stats()
        assert (found.num_violations, found.cache.num_cached) == (1, 0)
        peer.answer(3, tuple(range(20)))  # the worker continues
        assert done.acquire(timeout=HANG_S)
        assert peer.stats().num_violations == 1
    assert "an invariant of the core is broken" in caplog.text


def test_an_idle_worker_is_audited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.05)
    done = Audits(monkeypatch).done
    with working() as (peer, _):
        assert not done.acquire(timeout=0.2)  # no request so far
        for _ in range(3):
            peer.stats()  # queries are not changes
        assert not done.acquire(timeout=0.2)
        peer.answer(1, (1, 2, 3))
        assert done.acquire(timeout=HANG_S)
        peer.stats()
        assert not done.acquire(timeout=0.2)


def held_audit(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> Audits:
    """An audit of many slices, stopped after the first."""
    monkeypatch.setattr("quire.engine.worker.worker.MAX_VISITED_BLOCKS", 4)
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.01)
    audits = Audits(monkeypatch)
    audits.is_held = True
    peer.answer(1, tuple(range(20)))
    assert audits.held.acquire(timeout=HANG_S)
    return audits


def test_a_request_is_served_before_the_audit_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, _):
        audits = held_audit(monkeypatch, peer)
        monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", HANG_S)
        peer.ask(2, (7,) * 10)
        audits.go_on.release()
        peer.until_answered()
        assert (audits.num_begun, audits.num_slices) == (1, 1)  # the current audit is dropped
        assert peer.stats().num_violations == 0


def test_a_change_restarts_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, engine):
        audits = held_audit(monkeypatch, peer)
        peer.send(Ask(5, ClearCache()))
        audits.go_on.release()
        assert audits.done.acquire(timeout=HANG_S)
        assert audits.num_begun == 2
        assert peer.stats().num_violations == 0
        assert engine.scheduler.cache.stats().num_cached == 0


def test_a_query_does_not_restart_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    with working() as (peer, _):
        audits = held_audit(monkeypatch, peer)
        peer.send(Ask(5, GetStats()))
        audits.go_on.release()
        assert audits.done.acquire(timeout=HANG_S)
        assert audits.num_begun == 1
        assert audits.num_slices > 3 * CAPACITY.num_blocks // 4 // 2
        assert isinstance(peer.next(), Answered)


def test_every_message_is_read_only_or_a_change() -> None:
    """A new kind of message counts as a change unless it is listed in READ_ONLY."""
    changes = {Add, Cancel, Finish, ClearCache}
    assert {*READ_ONLY, *changes, Load} == {*get_args(ToWorker), *get_args(Query)} - {Ask}


def test_the_block_map_ends_when_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.MAP_LIFE_S", 0.0)
    with working() as (peer, engine):
        peer.send(Ask(5, GetBlocks(10)))
        assert isinstance(peer.next(), Answered)
        peer.stats()
        assert engine.scheduler.cache.pool.changed is None
