"""Limits of the queues and of keys, with a fake clock; keys from flags and files."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from quire.core.values import Priority
from quire.errors import Draining, InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.limits import (
    LOCAL,
    MAX_RETRY_AFTER_S,
    SMALL_BODY_BYTES,
    BodyBytes,
    FairSlots,
    Key,
    KeyRing,
    Limits,
    QueueTicket,
    Quota,
    TierQueue,
    check_room,
    make_keyring,
    presented,
)
from tests.waiting import HANG_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def enter(queue: TierQueue, num_requests: int, tenant: str = "a") -> QueueTicket:
    return QueueTicket(queue, Priority.NORMAL, tenant, num_requests)


def waiting(queue: TierQueue) -> tuple[int, int]:
    return queue.num_requests, queue.num_tokens


def test_the_queues_limit_requests_and_tokens() -> None:
    queue = TierQueue(4, 100, Clock())
    first = enter(queue, 3)
    first.grow(50)
    with pytest.raises(ApiError, match="3 requests are already waiting, and 2 more exceed the limit of 4") as refused:
        enter(queue, 2)
    assert (refused.value.kind, refused.value.reason, refused.value.may_retry) == (Kind.OVERLOADED, "queue_full", True)
    second = enter(queue, 1)
    with pytest.raises(ApiError, match="50 tokens are already waiting; 51 more exceed the limit of 100") as refused:
        second.grow(51)
    assert refused.value.reason == "queue_tokens"
    second.leave()
    assert waiting(queue) == (3, 50)  # a refusal counts nothing
    first.start()
    first.start()
    first.leave()
    assert waiting(queue) == (0, 0)


def test_an_empty_queue_accepts_a_request_larger_than_its_limit() -> None:
    queue = TierQueue(4, 100, Clock())
    big = enter(queue, 32)
    big.grow(5000)
    with pytest.raises(ApiError):
        queue.check("a")
    big.leave()
    queue.check("a")


def test_a_full_queue_of_one_tier_does_not_refuse_other_tiers() -> None:
    assert Key("a", Priority.NORMAL, Priority.NORMAL).tiers == [Priority.NORMAL, Priority.LOW]
    assert Key("a", Priority.LOW, Priority.HIGH).tiers == list(Priority)
    low, normal = TierQueue(4, 100, Clock()), TierQueue(4, 100, Clock())
    enter(low, 4).grow(100)
    with pytest.raises(ApiError, match="4 requests are already waiting, which is the limit"):
        enter(low, 1)
    check_room((low, normal), "a")
    enter(normal, 3)
    check_room((low, normal), "a")
    enter(normal, 1)
    with pytest.raises(ApiError, match="4 requests are already waiting"):
        check_room((low, normal), "a")


def test_a_tenant_that_fills_the_queue_does_not_shut_out_the_others() -> None:
    queue = TierQueue(4, 100, Clock())
    enter(queue, 4, tenant="batch").grow(100)
    with pytest.raises(ApiError):
        enter(queue, 1, tenant="batch")
    person = [enter(queue, 1, tenant="person") for _ in range(2)]  # an equal part of four for each of two tenants
    with pytest.raises(ApiError):
        enter(queue, 1, tenant="person")
    person[0].grow(50)
    with pytest.raises(ApiError, match="tokens are already waiting"):
        person[1].grow(1)
    enter(queue, 1, tenant="third")
    for number in range(4 * 4 - 7):
        enter(queue, 1, tenant=f"tenant {number}")  # each holds nothing yet
    with pytest.raises(ApiError, match="16 requests are already waiting"):
        enter(queue, 1, tenant="one too many")  # four times the limit is the hard limit


def test_retry_after_follows_the_start_rate() -> None:
    clock = Clock()
    queue = TierQueue(1000, 10**9, clock)
    waiting = [enter(queue, 1)]
    clock.now_s += 12.0
    assert queue.retry_after_s() == 12  # none has started in that time
    waiting.pop().leave()
    assert queue.retry_after_s() == 1.0
    for _ in range(10):  # two per second
        clock.now_s += 0.5
        enter(queue, 1).start()
    waiting = [enter(queue, 1) for _ in range(40)]
    assert queue.retry_after_s() == 9  # half of 40 at 10 in 4.5 s
    for ticket in waiting:
        ticket.leave()
    assert queue.retry_after_s() == 1.0
    for _ in range(900):
        enter(queue, 1)
    assert queue.retry_after_s() == MAX_RETRY_AFTER_S


def test_bodies_share_a_budget_and_return_it() -> None:
    body_bytes = BodyBytes(100_000)
    with body_bytes.reading("") as one, body_bytes.reading("") as other, body_bytes.reading("") as small:
        one(60_000)
        with pytest.raises(ApiError, match="60000 bytes of request bodies are already being read") as refused:
            other(40_001)
        assert (refused.value.kind, refused.value.reason) == (Kind.OVERLOADED, "body_bytes")
        other(40_000)
        small(SMALL_BODY_BYTES - 1)
        small(1)
        with pytest.raises(ApiError):
            small(1)  # no longer small
    assert body_bytes.num_bytes == 0


def test_a_tenant_that_fills_the_bodies_does_not_shut_out_the_others() -> None:
    limit, size = 100 * SMALL_BODY_BYTES, SMALL_BODY_BYTES
    body_bytes = BodyBytes(limit)
    with (
        body_bytes.reading("greedy") as one,
        body_bytes.reading("person") as other,
        body_bytes.reading("third") as third,
    ):
        one(limit)
        other(50 * size)  # an equal part for each of two
        for take, num_bytes in ((one, 1), (other, 1), (third, 34 * size)):
            with pytest.raises(ApiError):
                take(num_bytes)
        third(33 * size)
    assert body_bytes.num_bytes == 0


@pytest.mark.anyio
async def test_tenants_take_turns() -> None:
    order: list[str] = []

    slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(4), threading.Event()
    first = asyncio.create_task(slots.run("a", pool, partial(is_open.wait, HANG_S)))
    await asyncio.sleep(0)
    names = ("a", "a", "a", "b", "c", "b")
    jobs = [asyncio.create_task(slots.run(name, pool, partial(order.append, name))) for name in names]
    await asyncio.sleep(0)
    jobs[1].cancel()
    is_open.set()
    await asyncio.gather(first, *jobs, return_exceptions=True)
    await asyncio.wait_for(slots.run("last", pool, partial(order.append, "last")), HANG_S)  # no slot is lost
    pool.shutdown()
    with pytest.raises(Draining):
        await slots.run("late", pool, partial(order.append, "late"))
    assert order == ["a", "b", "c", "a", "b", "last"]


@pytest.mark.anyio
async def test_a_turn_without_a_thread_is_given_to_the_next_tenant() -> None:
    order: list[str] = []

    slots = FairSlots(1)

    async def take(name: str) -> None:
        async with slots.turn(name):
            order.append(name)
            await asyncio.sleep(0)
            if name == "b":
                raise ValueError

    jobs = [asyncio.create_task(take(name)) for name in ("a", "a", "a", "a", "b", "c")]
    await asyncio.sleep(0)
    jobs[1].cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    await asyncio.wait_for(take("last"), HANG_S)  # no slot is lost
    assert order == ["a", "a", "b", "c", "a", "last"]


@pytest.mark.anyio
async def test_a_job_that_is_cancelled_when_its_turn_has_come_gives_it_up() -> None:
    slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(2), threading.Event()
    first = asyncio.create_task(slots.run("a", pool, partial(is_open.wait, HANG_S)))
    second = asyncio.create_task(slots.run("b", pool, int))
    await asyncio.sleep(0)
    is_open.set()
    await first
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert await asyncio.wait_for(slots.run("c", pool, int), HANG_S) == 0


@pytest.mark.anyio
async def test_a_slot_is_used_until_its_thread_ends() -> None:
    """A client that disconnects does not stop the thread that works for it."""
    order: list[str] = []

    slots, pool, is_open = FairSlots(1), ThreadPoolExecutor(2), threading.Event()

    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def long() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        is_open.wait(HANG_S)
        order.append("long")

    first = asyncio.create_task(slots.run("a", pool, long))
    await asyncio.wait_for(has_begun.wait(), HANG_S)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(slots.run("b", pool, partial(order.append, "next")))
    await asyncio.sleep(0.05)
    is_open.set()
    await asyncio.wait_for(second, HANG_S)
    assert order == ["long", "next"]


def test_requests_per_minute() -> None:
    clock = Clock()
    quota = Quota(Limits(requests_per_minute=2), clock)
    quota.enter(5)
    quota.enter(5)
    with pytest.raises(ApiError, match="requests_per_minute = 2") as refused:
        quota.enter(5)
    assert (refused.value.kind, refused.value.retry_after_s) == (Kind.RATE_LIMITED, 30)
    clock.now_s += 30
    quota.enter(5)


def test_tokens_per_minute_include_answers_and_may_be_overdrawn_once() -> None:
    clock = Clock()
    quota = Quota(Limits(tokens_per_minute=600), clock)
    quota.enter(100)
    quota.use(1100)  # the answer was long
    with pytest.raises(ApiError, match="tokens_per_minute = 600") as refused:
        quota.enter(1)
    assert refused.value.retry_after_s == 61  # 600 overdrawn, and one more, at ten per second
    clock.now_s += 61
    quota.enter(1)
    clock.now_s += 1000
    quota.enter(6000)  # above the capacity: passes when the bucket is full


def test_open_requests_at_once() -> None:
    quota = Quota(Limits(max_requests=1), Clock())
    quota.enter(1)
    with pytest.raises(ApiError, match="max_requests = 1"):
        quota.enter(1)
    quota.leave()
    quota.enter(1)


@pytest.mark.parametrize(
    ("tier", "wish", "expected"),
    [
        (Priority.NORMAL, None, Priority.NORMAL),
        (Priority.NORMAL, Priority.HIGH, Priority.NORMAL),  # may only be lowered
        (Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.HIGH, Priority.HIGH, Priority.HIGH),
        (Priority.LOW, Priority.HIGH, Priority.LOW),
    ],
)
def test_a_request_may_only_lower_the_tier_of_its_key(
    tier: Priority, wish: Priority | None, expected: Priority
) -> None:
    assert Key("k", tier, tier).priority(wish) is expected


FILE = """
keys:
  - {key: sk-alice-0001, name: alice, tier: high, max_requests: 8}
  - {key: sk-batch-0001, name: batch, tier: low, requests_per_minute: 60, tokens_per_minute: 10000}
  - {key: sk-admin-0001, name: root, admin: true}
"""


def test_without_keys_every_request_has_the_local_key() -> None:
    assert KeyRing().find(None) is LOCAL
    assert not KeyRing()


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    ring = make_keyring(["sk-plain-0001"], ["sk-admin-0002"], path)
    alice, batch = ring.find("sk-alice-0001"), ring.find("sk-batch-0001")
    assert alice is not None
    assert batch is not None
    assert (alice.name, alice.tier, alice.limits.max_requests, alice.is_admin) == ("alice", Priority.HIGH, 8, False)
    assert (batch.tier, batch.limits.tokens_per_minute) == (Priority.LOW, 10000)
    assert alice.namespace != batch.namespace
    plain, admin = ring.find("sk-plain-0001"), ring.find("sk-admin-0002")
    assert plain is not None
    assert admin is not None
    assert (plain.tier, plain.is_admin, admin.is_admin) == (Priority.NORMAL, False, True)
    for wrong in (None, "", "sk-alice-000", "sk-alice-00011", "SK-ALICE-0001", "sk-\xe9"):
        assert ring.find(wrong) is None


def test_a_shared_cache_has_one_namespace(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    ring = make_keyring([], [], path, is_shared=True)
    found = [ring.find(key) for key in ("sk-alice-0001", "sk-batch-0001")]
    assert [key.namespace for key in found if key is not None] == ["", ""]


def test_a_key_without_a_name_keeps_its_namespace_when_others_change() -> None:
    """Content on disk outlives the server: another key must not find it because it has the same number now."""
    before = make_keyring(["sk-alice-0001", "sk-bob-000002"], ["sk-admin-0003"], None)
    after = make_keyring(["sk-bob-000002"], ["sk-new-000004", "sk-admin-0003"], None)
    keys = [ring.find(secret) for ring in (before, after) for secret in ("sk-bob-000002", "sk-admin-0003")]
    namespaces = [key.namespace for key in keys if key is not None]
    assert namespaces[:2] == namespaces[2:]
    assert len({*namespaces}) == 2
    first, new = before.find("sk-alice-0001"), after.find("sk-new-000004")
    assert first is not None
    assert new is not None
    assert len({first.namespace, new.namespace, *namespaces}) == 4
    shared = make_keyring(["sk-alice-0001"], [], None, is_shared=True).find("sk-alice-0001")
    assert shared is not None
    assert shared.namespace == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: [{key: sk-secret-1, name: a, tier: urgent}]", "tier = 'urgent' is not one of high, normal, low"),
        ("keys: [{key: sk-secret-1}]", "missing required field `name`"),
        ("keys: [{key: sk-secret-1, name: a, teir: low}]", "unknown field `teir`"),
        ("keys: [{key: sk-secret-1, name: a}, {key: sk-secret-2, name: a}]", "'a' is used twice"),
        ("keys: [{key: sk-secret-1, name: a}, {key: sk-secret-1, name: b}]", "same key"),
        ("keys: [{key: secret, name: a}]", "the key 'a' has 6 characters; a key has 8 to 512"),
        ("keys: [{key: sk-secret-1, name: a, max_requests: 0}]", "max_requests = 0 is less than 1"),
        ("keys: [{key: sk-secret-1", "is not YAML"),
        ("[1]", "Expected `object`"),
        ("keys: []", "the file has no keys"),
    ],
)
def test_a_bad_file_is_refused_and_no_key_is_shown(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        make_keyring([], [], path)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        make_keyring([], [], tmp_path / "nowhere.yaml")


def test_the_key_of_a_request() -> None:
    assert presented([(b"authorization", b"Bearer abc")]) == ["abc"]
    assert presented([(b"authorization", b"bearer  abc ")]) == ["abc"]
    assert presented([(b"x-api-key", b"abc")]) == ["abc"]
    assert presented([(b"authorization", b"Bearer stale"), (b"x-api-key", b"abc")]) == ["stale", "abc"]
    assert presented([(b"authorization", b"Basic abc")]) == []
    assert presented([]) == []
