"""The replica of a request: cached prefixes against queues, memory and priorities."""

from __future__ import annotations

import pytest

from quire.core.values import Priority
from quire.scale.routing import (
    RECENT_NS,
    STICKY_TOKENS,
    PrefixRouter,
    Prompt,
    RecentWork,
    ReplicaLoad,
    expected_work,
)

IDLE = ReplicaLoad(max_num_seqs=8, num_free_blocks=100, num_blocks=100)
PROMPT = Prompt(1000, num_blocks=40)


def best(cached: dict[int, int], loads: dict[int, ReplicaLoad], prompt: Prompt = PROMPT) -> int:
    return PrefixRouter[int](32).choose(prompt, cached, loads, "", 0)


def test_a_cached_prefix_decides_among_idle_replicas() -> None:
    assert best({1: 500}, {0: IDLE, 1: IDLE, 2: IDLE}) == 1
    assert best({}, {0: IDLE, 1: IDLE._replace(num_requests=1), 2: IDLE._replace(num_requests=2)}) == 0


def test_a_queue_longer_than_the_saving_decides_against_the_prefix() -> None:
    def queued(count: int) -> ReplicaLoad:
        return IDLE._replace(queued_tokens=(0, count, 0))

    assert best({1: 500}, {0: IDLE, 1: queued(499)}) == 1
    assert best({1: 500}, {0: IDLE, 1: queued(501)}) == 0


def test_requests_of_lower_priority_do_not_delay() -> None:
    loads = {0: IDLE._replace(queued_tokens=(0, 0, 10_000)), 1: IDLE._replace(queued_tokens=(900, 0, 0))}
    for priority, expected in ((Priority.HIGH, 0), (Priority.NORMAL, 0), (Priority.LOW, 1)):
        assert best({}, loads, PROMPT._replace(priority=priority)) == expected


def test_a_replica_without_free_rows_or_memory_is_the_last_choice() -> None:
    full = IDLE._replace(num_requests=8)
    busy = IDLE._replace(num_requests=7)
    assert best({1: 640}, {0: busy, 1: full}) == 0
    assert best({1: 640}, {0: IDLE, 1: IDLE._replace(num_free_blocks=5)}) == 0
    assert best({1: 640}, {0: IDLE, 1: IDLE._replace(num_free_blocks=40)}) == 1


def test_more_of_anything_is_more_work() -> None:
    base = expected_work(PROMPT, 0, IDLE)
    for load in (
        IDLE._replace(queued_tokens=(1, 0, 0)),
        IDLE._replace(num_requests=1),
        IDLE._replace(num_free_blocks=39),
        IDLE.with_request(Priority.NORMAL, 10, 1),
    ):
        assert expected_work(PROMPT, 0, load) > base
    assert expected_work(PROMPT, 0, IDLE, 100) > base
    assert expected_work(PROMPT, 999, IDLE) == expected_work(PROMPT, 5000, IDLE) == 1


def test_a_request_counts_where_it_was_sent() -> None:
    load = IDLE.with_request(Priority.HIGH, 300, 12).with_request(Priority.LOW, 50, 200)
    assert load == IDLE._replace(queued_tokens=(300, 0, 50), num_requests=2, num_free_blocks=0)


def test_a_session_stays_where_it_is_unless_that_is_much_more_work() -> None:
    def chosen(own: int, session: str = "ann") -> int:
        """The choice after the session was at `own`, among replicas with 0, 511 and 512 tokens more work."""
        router = PrefixRouter[int](32)
        router.choose(PROMPT._replace(num_tokens=1), {}, {own: IDLE}, session, -(10**15))
        loads = {at: IDLE._replace(queued_tokens=(work, 0, 0)) for at, work in enumerate((0, STICKY_TOKENS - 1, 512))}
        return router.choose(PROMPT, {}, loads, session, 10**15)

    assert STICKY_TOKENS == 512
    assert chosen(0) == 0
    assert chosen(1) == 1
    assert chosen(1, "") == 0, "a request without a session"
    assert chosen(2) == 0, "another replica saves too much"
    assert chosen(7) == 0, "its replica is gone"


def test_sessions_are_bounded_and_forgotten_with_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scale.routing.MAX_SESSIONS", 3)
    router = PrefixRouter[int](32)
    for number in range(5):
        router.choose(PROMPT, {}, {number % 2: IDLE}, f"user {number}", 0)
    assert len(router._sessions) == 3
    router.forget(0)
    assert len(router._sessions) == 1


def test_work_is_forgotten_over_time() -> None:
    recent = RecentWork[int]()
    recent.add(3, 1000, 0)
    assert (recent.at(3, 0), recent.at(4, 0)) == (1000, 0)
    assert recent.at(3, RECENT_NS) == pytest.approx(1000 / 2.71828, rel=1e-3)
    recent.add(3, 100, RECENT_NS)
    recent.add(5, 7, RECENT_NS)
    assert recent.at(3, RECENT_NS) == pytest.approx(468, rel=1e-2)
    assert recent.at(5, RECENT_NS) == 7


def test_recent_work_stays_exact_for_years() -> None:
    recent = RecentWork[int]()
    for minute in range(0, 1_000_000, 997):
        recent.add(0, 1000, minute * RECENT_NS)
        assert recent.at(0, minute * RECENT_NS) == pytest.approx(1000)
    assert recent.at(0, 10**9 * RECENT_NS) < 1e-6


def test_a_light_load_is_shared() -> None:
    router = PrefixRouter[int](32)
    router.choose(PROMPT._replace(num_tokens=10_000), {}, {1: IDLE}, "", 0)
    assert router.choose(PROMPT, {1: 640}, {0: IDLE, 1: IDLE}, "", 0) == 0
