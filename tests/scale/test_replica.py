"""A replica and the client of a cluster in one process: real workers with the fake backend, and no Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire.engine.composition import EngineConfig
from quire.engine.generation import Generation, GenerationParams, GenerationRequest
from quire.engine.model_text import ModelText
from quire.engine.worker.client import HANG_LIMIT_S
from quire.engine.worker.protocol import (
    Add,
    Ask,
    Cancel,
    Fingerprinted,
    GetStats,
    ToWorker,
    encode,
    to_worker,
)
from quire.errors import Draining, InvalidRequest, LostBeforeStart, QueueFull, RequestFailed, WorkerDied
from quire.scale.cluster_client import ClusterClient
from quire.scale.replica import FRONT_BITS, Replica, ids_of
from quire.scale.transport import Batches, ReplicaGone, SetReplicas, joined
from tests.engine.serving import generate, result
from tests.waiting import until

pytestmark = pytest.mark.anyio

FRONT = 9
CONFIG = EngineConfig(backend="fake", num_blocks=200, max_num_seqs=8)


class Direct:
    """Replicas of this process. As with Ray, calls take turns of the event loop. `sent`: messages to replicas."""

    def __init__(self, front: int = FRONT) -> None:
        self.replicas: dict[str, Replica] = {}
        self.front = front
        self.sent: list[ToWorker] = []
        self.places: dict[int, str] = {}  # request id -> replica that it was sent to
        self.num_streams = 0

    def start(self, set_replicas: SetReplicas) -> None:
        set_replicas(self.replicas)

    async def send(self, replica: str, frames: Sequence[bytes]) -> None:
        await asyncio.sleep(0)
        found = self.replicas.get(replica)
        if found is None or found.error is not None:
            raise ReplicaGone(f"replica {replica} is gone")
        messages = [to_worker.decode(frame) for frame in frames]
        self.sent += messages
        self.places |= {number: replica for one in messages if isinstance(one, Add) for number in one.request_ids}
        await found.send(self.front, frames)

    def messages(self, replica: str) -> Batches:
        return joined(lambda is_continued: self._stream(replica, is_continued))

    async def _stream(self, replica: str, is_continued: bool) -> Batches:
        self.num_streams += 1
        try:
            async for frames in self.replicas[replica].messages(self.front, is_continued):
                yield frames
        except (WorkerDied, KeyError) as error:
            raise ReplicaGone(str(error)) from error

    async def close(self) -> None: ...


async def make_replica(
    name: str,
    path: Path,
    ended: list[str] | None = None,
    hang_limit_s: float = HANG_LIMIT_S,
    config: EngineConfig = CONFIG,
) -> Replica:
    replica = Replica(name, (ended if ended is not None else []).append, hang_limit_s)
    await replica.start(path, config, b"0123456789abcdef")
    return replica


@asynccontextmanager
async def running(
    path: Path, num_replicas: int, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[Direct, ClusterClient]]:
    """Replicas, and a client that is connected to all of them."""
    direct = Direct()
    for number in range(num_replicas):
        direct.replicas[f"r{number}"] = await make_replica(f"r{number}", path, config=config)
    text = ModelText.open(path, "m", "auto", None)
    client = ClusterClient(text, config, direct, ids=ids_of(FRONT))
    try:
        await client.start()
        await until(lambda: len(client.replicas) == num_replicas, "all are connected")
        yield direct, client
    finally:
        await client.close()
        for replica in direct.replicas.values():
            await replica.close()
        text.close()


@pytest.fixture
def num_replicas() -> int:
    return 1


@pytest.fixture
async def client(tiny_model: Path, num_replicas: int) -> AsyncIterator[ClusterClient]:
    async with running(tiny_model, num_replicas) as (_, client):
        yield client


@pytest.fixture
def direct(client: ClusterClient) -> Direct:
    assert isinstance(client._transport, Direct)
    return client._transport


def request(
    client: ClusterClient,
    first: int = 5,
    length: int = 100,
    max_tokens: int = 4,
    salt: str = "",
    stop: tuple[str, ...] = (),
) -> GenerationRequest:
    tokens = tuple(first + at % 7 for at in range(length))
    params = GenerationParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, stop=stop)
    return client.text.request(tokens, params, salt=salt)


def routed(client: ClusterClient) -> list[int]:
    return [one.num_routed for one in client.replica_statuses]


@pytest.mark.parametrize("num_replicas", [2])
async def test_a_prefix_is_found_again_and_others_spread(client: ClusterClient) -> None:
    await generate(client, request(client))
    await until(lambda: client._router.index.num_bytes, "the report of the cache has arrived")
    output = await generate(client, request(client))
    assert output.usage.cached_tokens >= 96
    assert sorted(routed(client)) == [0, 2]
    await asyncio.gather(*(generate(client, request(client, first, 60)) for first in range(20, 28)))
    assert min(routed(client)) >= 3


@pytest.mark.parametrize("num_replicas", [2])
async def test_a_salt_finds_nothing_of_another(client: ClusterClient) -> None:
    await generate(client, request(client, salt="a"))
    await until(lambda: client._router.index.num_bytes, "the report of the cache has arrived")
    for salt, expected in (("a", 96), ("b", 0), ("", 0)):
        cached = await client._cached_tokens(request(client, salt=salt))
        found = max(cached.values(), default=0)
        assert found == expected, salt


@pytest.mark.parametrize("num_replicas", [3])
async def test_waiting_requests_move_and_started_ones_fail(direct: Direct, client: ClusterClient) -> None:
    """A replica runs at most 8 requests at once: of 30 at three replicas, some wait at the one that dies.

    Those that were running at other replicas, and those that moved, have the same tokens as without the kill.
    """
    firsts = range(10, 40)
    whole = await asyncio.gather(*(generate(client, request(client, first, 40, 900)) for first in firsts))
    running = [await client.submit(request(client, first, 40, 900, salt="again")) for first in firsts]

    def at_victim(is_started: bool) -> list[Generation]:
        there = [one for one in running if direct.places.get(one.request_ids[0]) == "r0"]
        return [one for one in there if one.is_started is is_started]

    await until(lambda: at_victim(True) and at_victim(False), "some run there, and some wait")
    started = at_victim(True)
    os.kill(direct.replicas["r0"].process.pid, signal.SIGKILL)
    for one, expected in zip(running, whole, strict=True):
        if one in started:
            with pytest.raises(WorkerDied):
                await result(one)
        else:
            assert (await result(one)).completions == expected.completions
    assert client.num_restarts == 1


@pytest.mark.parametrize("num_replicas", [2])
async def test_a_replica_that_is_stopped_finishes_its_requests(direct: Direct, client: ClusterClient) -> None:
    running = [await client.submit(request(client, first, 40, 300)) for first in (30, 40)]
    client.set_replicas(["r0"])  # r1 is being stopped
    await generate(client, request(client, 50))
    assert [(await result(one)).usage.completion_tokens for one in running] == [300, 300]
    await until(lambda: direct.replicas["r1"]._front is None, "the front leaves it when it is idle")
    assert direct.replicas["r0"]._front is not None
    assert client.num_restarts == 0


@pytest.mark.parametrize("num_replicas", [2])
async def test_cancelled_requests_and_lost_fronts_hold_nothing(direct: Direct, client: ClusterClient) -> None:
    running = [await client.submit(request(client, first, 40, 4000)) for first in range(4)]
    running[0].cancel()
    stats = await client.stats()
    assert stats is not None
    await client.close()  # cancels nothing
    for replica in direct.replicas.values():
        while (replica._front and replica._front.request_ids) or (await replica.stats()).cache.num_in_use:
            await asyncio.sleep(0.01)


async def test_a_front_that_is_silent_is_dropped(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await client.submit(request(client, max_tokens=4000))
    await until(lambda: running.is_started, "it has started")
    monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", 3600.0)
    direct.replicas["r0"].drop_silent_front()
    assert len(direct.replicas["r0"]._find(FRONT).request_ids) == 1
    monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", -1.0)
    direct.replicas["r0"].drop_silent_front()
    assert direct.replicas["r0"]._front is None
    with pytest.raises(WorkerDied):
        await result(running)
    await generate(client, request(client))  # the replica lives: the front connects again
    assert (client.num_restarts, routed(client)) == (1, [2])


async def test_a_front_takes_the_place_of_the_one_before_it(direct: Direct, client: ClusterClient) -> None:
    """The requests of the one before it are cancelled. The new one ignores what the worker still sends for them."""
    running = await client.submit(request(client, max_tokens=4000))
    await until(lambda: running.is_started, "it has started")
    other = Direct(FRONT + 1)
    other.replicas = direct.replicas
    second = ClusterClient(client.text, CONFIG, other, ids=ids_of(FRONT + 1))
    await client.close()
    await second.start()
    output = await generate(second, request(second, 30, 40, 50))
    assert output.usage.completion_tokens == 50
    assert next(client._ids) >> FRONT_BITS == FRONT
    with pytest.raises(InvalidRequest, match=f"front {FRONT} is not connected"):
        await direct.replicas["r0"].send(FRONT, [])
    await second.close()


@pytest.mark.parametrize("num_replicas", [3])
async def test_a_replica_that_is_stopped_while_it_is_idle(direct: Direct, client: ClusterClient) -> None:
    """The front leaves it at once, and goes on with the others."""
    client.set_replicas(["r2"])
    assert [one.name for one in client.replica_statuses] == ["r2"]
    await generate(client, request(client))
    await until(lambda: direct.replicas["r0"]._front is direct.replicas["r1"]._front is None, "the front has left them")


@pytest.mark.parametrize("num_replicas", [2])
async def test_blocks_of_the_joined_map(client: ClusterClient) -> None:
    """Block 200 of the map is the first one of the second replica, whose pool has 199 beside the null block."""
    found = await client.blocks(1000)
    assert found is not None
    assert found.num_blocks == 398
    running = await client.submit(request(client, max_tokens=4000))
    await until(lambda: running.is_started, "it has started")
    other = await client.submit(request(client, max_tokens=4000))
    await until(lambda: other.is_started, "the other has started")
    places = [(await client.find_held(one.request_ids))[0][0] for one in (running, other)]
    assert 1 <= min(places) < 200 <= max(places) <= 398  # one on each replica
    running.cancel()
    other.cancel()


@pytest.mark.nightly
async def test_a_request_that_ends_at_a_stop_string_is_forgotten(
    direct: Direct, client: ClusterClient, tiny_model: Path
) -> None:
    """The worker sends nothing after it, which must not look like a hang."""
    replica = direct.replicas["short"] = await make_replica("short", tiny_model, hang_limit_s=0.5)
    client.set_replicas(["short"])
    text = (await generate(client, request(client, max_tokens=40))).completions[0].text
    stopped = await generate(client, request(client, max_tokens=4000, stop=(text[10:14],)))
    assert stopped.completions[0].finish_reason == "stop"
    await until(lambda: not replica._find(FRONT).request_ids, "it is forgotten")
    await asyncio.sleep(1.0)
    assert replica.error is None
    assert (await replica.stats()).cache.num_in_use == 0


async def test_a_probe_after_a_cancellation_is_answered(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MOVING_LIMIT_S", 0.0)  # any silence with open work is reported
    running = await client.submit(request(client, max_tokens=4000))
    await until(lambda: running.is_started, "it has started")
    running.cancel()
    connection = client.replicas[0].connection
    assert (connection.num_requests, connection._is_busy) == (0, True)
    await until(lambda: not connection._is_busy, "the probe is answered")
    assert client.is_moving
    assert not direct.replicas["r0"]._find(FRONT).is_waiting


async def test_silence_counts_from_the_first_open_request(client: ClusterClient) -> None:
    link = client.replicas[0].connection.process
    await asyncio.sleep(0.3)
    link.expect_message(30.0)
    assert link.silence_s < 0.1
    await asyncio.sleep(0.2)
    link.expect_message(30.0)
    assert link.silence_s >= 0.2


async def test_a_worker_that_does_not_answer_a_query_is_ended(
    direct: Direct, client: ClusterClient, tiny_model: Path
) -> None:
    ended: list[str] = []
    replica = direct.replicas["short"] = await make_replica("short", tiny_model, ended, hang_limit_s=0.5)
    client.set_replicas(["short"])
    await until(lambda: [one.replica for one in client.replicas] == ["short"], "it is used")
    os.kill(replica.process.pid, signal.SIGSTOP)
    assert await client.stats() is None
    assert "sent no message for 0.5 s" in ended[0]


async def test_messages_that_the_worker_cannot_take_are_refused(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the batch is passed on."""
    replica = direct.replicas["r0"]
    running = await client.submit(request(client, 30, max_tokens=4000))
    send = replica.process.send

    def refuse(message: object) -> None:
        if isinstance(message, Add | Ask):
            raise QueueFull("full")
        send(message)  # type: ignore[arg-type]

    monkeypatch.setattr(replica.process, "send", refuse)
    with pytest.raises(QueueFull):
        await generate(client, request(client))
    assert await client.stats() is None
    frames = [encode(Cancel(running.request_ids[0]))]
    await replica.send(FRONT, frames)
    assert not replica._find(FRONT).is_waiting


async def test_a_front_that_does_not_read_is_disconnected(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.close()
    replica = direct.replicas["r0"]
    stream = replica.messages(FRONT + 1)
    await anext(stream)
    monkeypatch.setattr("quire.scale.replica.MAX_UNSENT", 100)
    for query in range(20):
        await replica.send(FRONT + 1, [encode(Ask((FRONT + 1 << FRONT_BITS) + query, GetStats()))])
    await until(lambda: replica._front is None, "it is disconnected")
    assert [frames async for frames in stream] == []


async def test_a_link_that_cannot_send_is_replaced(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause grows while nothing is served."""
    monkeypatch.setattr("quire.scale.cluster_client.RECONNECT_S", 0.01)
    send, left = direct.send, [3]

    async def fail(replica: str, frames: Sequence[bytes]) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("cannot send")
        await send(replica, frames)

    monkeypatch.setattr(direct, "send", fail)
    output = await generate(client, request(client))
    assert output.usage.completion_tokens == 4
    view = client.replicas[0]
    assert (client.num_restarts, view._num_ends) == (3, 3)
    assert [view.note_end(has_served) for has_served in (False, False, True)] == [0.08, 0.16, 0.01]


async def test_a_request_is_moved_a_bounded_number_of_times(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.scale.cluster_client.RECONNECT_S", 0.001)
    num_tried = 0

    async def lose(_: str, __: Sequence[bytes]) -> None:
        nonlocal num_tried
        num_tried += 1
        raise ReplicaGone("lost")

    monkeypatch.setattr(direct, "send", lose)
    running = await client.submit(request(client))
    with pytest.raises(LostBeforeStart, match="6 replicas of m ended before the request began"):
        await result(running)
    assert num_tried == 6


@pytest.mark.parametrize("num_replicas", [2])
async def test_a_replica_that_ends_before_the_front_knows_it(direct: Direct, client: ClusterClient) -> None:
    """The requests that were sent there move to the other one."""
    replica = direct.replicas.pop("r0")
    outputs = await asyncio.gather(*(generate(client, request(client, first)) for first in (10, 20, 30)))
    assert [output.usage.completion_tokens for output in outputs] == [4, 4, 4]
    assert [one.name for one in client.replica_statuses] == ["r1"]
    await replica.close()


async def test_a_request_that_is_cancelled_at_once_is_sent_before_its_cancellation(
    direct: Direct, client: ClusterClient
) -> None:
    for _ in range(3):
        running = await client.submit(request(client, max_tokens=4000))
        running.cancel()
        await result(running)
    await client.stats()
    added = {one.request_ids[0]: at for at, one in enumerate(direct.sent) if isinstance(one, Add)}
    cancelled = {one.request_id: at for at, one in enumerate(direct.sent) if isinstance(one, Cancel)}
    assert len(added) == 3
    assert added.keys() == cancelled.keys()
    assert all(added[number] < cancelled[number] for number in added)
    assert not direct.replicas["r0"]._find(FRONT).request_ids


async def test_a_request_whose_caller_gives_up_is_not_sent(direct: Direct, client: ClusterClient) -> None:
    client.set_replicas([])
    waiting = asyncio.ensure_future(client.submit(request(client)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    client.set_replicas(["r0"])
    await generate(client, request(client))
    assert sum(isinstance(one, Add) for one in direct.sent) == 1
    assert not client._routing


@pytest.mark.nightly
@pytest.mark.parametrize("num_replicas", [2])
async def test_counts_of_a_replica_that_dies_during_a_query(direct: Direct, client: ClusterClient) -> None:
    """They are neither lost nor added twice, also not after its successor has begun to count."""
    await asyncio.gather(*(generate(client, request(client, first)) for first in (10, 20, 30, 40)))
    before = await client.stats()
    assert before is not None
    process = direct.replicas["r0"].process
    os.kill(process.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(client.stats())
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    during = await asked
    client.set_replicas(["r1"])
    after = await client.stats()
    assert during is not None
    assert after is not None
    assert before.cache.num_queried_tokens == during.cache.num_queried_tokens == after.cache.num_queried_tokens
    assert (before.cache.num_blocks, during.cache.num_blocks, after.cache.num_blocks) == (398, 199, 199)


async def lose_the_replica(direct: Direct, client: ClusterClient) -> list[Generation]:
    """Kill the only replica. Returns requests that had not started, and wait for another one."""
    running = [await client.submit(request(client, first, 40, 900)) for first in range(10, 20)]
    await until(lambda: sum(one.is_started for one in running) >= 8, "eight have started")
    client.set_replicas([])
    os.kill(direct.replicas.pop("r0").process.pid, signal.SIGKILL)
    waiting = [one for one in running if not one.is_started]
    await until(lambda: client._routing == set(waiting), "they wait for a replica")
    assert waiting
    return waiting


async def test_requests_without_a_replica_fail_when_the_client_is_closed(direct: Direct, client: ClusterClient) -> None:
    waiting = await lose_the_replica(direct, client)
    submitting = asyncio.ensure_future(client.submit(request(client)))
    await asyncio.sleep(0.05)
    await client.close()
    for one in waiting:
        with pytest.raises(LostBeforeStart, match="the engine was closed"):
            await result(one)
    with pytest.raises(LostBeforeStart, match="the engine was closed"):
        await result(await submitting)


@pytest.mark.nightly
async def test_requests_without_a_replica_can_be_cancelled(direct: Direct, client: ClusterClient) -> None:
    first, *_ = await lose_the_replica(direct, client)
    asyncio.get_running_loop().call_later(0.05, first.cancel)
    assert (await result(first)).completions[0].finish_reason == "cancelled"


async def test_an_unexpected_error_of_the_cluster_fails_a_moved_request(
    direct: Direct, client: ClusterClient, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    waiting = await lose_the_replica(direct, client)
    monkeypatch.setattr(client._router, "choose", fail)
    direct.replicas["r1"] = await make_replica("r1", tiny_model)
    client.set_replicas(["r1"])
    for one in waiting:
        with pytest.raises(RequestFailed, match="could not be sent again: RuntimeError"):
            await result(one)


async def test_streams_that_continue(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has a bounded number of batches. Nothing is lost between two."""
    monkeypatch.setattr("quire.scale.replica.MAX_BATCHES", 2)
    async with running(tiny_model, 1) as (direct, client):
        whole = await generate(client, request(client, max_tokens=300))
        assert direct.num_streams > 3  # batches of a busy machine contain several steps
        again = await generate(client, request(client, max_tokens=300))
        assert again.completions == whole.completions
        assert (client.num_restarts, direct.replicas["r0"]._front is not None) == (0, True)
        await client.close()
        await until(lambda: direct.replicas["r0"]._front is None, "the front has left")


async def test_a_front_that_does_not_continue(
    direct: Direct, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped like any other that sends nothing."""
    await client.close()
    monkeypatch.setattr("quire.scale.replica.MAX_BATCHES", 1)
    monkeypatch.setattr("quire.scale.replica.HANDOVER_S", 0.01)
    replica = direct.replicas["r0"]
    stream = replica.messages(FRONT + 1)
    assert [len(frames) > 0 async for frames in stream] == [True, False]
    assert replica._front is not None
    monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", -1.0)
    replica.drop_silent_front()
    with pytest.raises(InvalidRequest, match="is not connected"):
        await anext(replica.messages(FRONT + 1, is_continued=True))


@pytest.mark.parametrize("num_replicas", [2])
async def test_the_system_fingerprint_is_that_of_all_replicas(direct: Direct, client: ClusterClient) -> None:
    """Also one that a worker reports late. Where replicas differ there is none: any of them may answer."""
    first = client.system_fingerprint
    assert first is not None
    for number, replica in enumerate(direct.replicas.values()):
        replica._take(Fingerprinted("fp_late"))
        expected = (None, "fp_late")[number]
        while client.system_fingerprint != expected:
            await asyncio.sleep(0.01)
    client.set_replicas(["r0"])
    client.set_replicas(["r0", "r1"])  # a front that connects later learns it too
    await until(lambda: len(client.replicas) == 2, "both are connected")
    assert client.system_fingerprint == "fp_late"


async def test_a_replica_with_another_model_is_not_used(
    direct: Direct, client: ClusterClient, tiny_model: Path
) -> None:
    """Requests are refused when no other replica is left: the front is about to be replaced."""
    other = direct.replicas["other"] = Replica("other", print)
    await other.start(tiny_model, CONFIG, b"0123456789abcdef", "other model")
    client.set_replicas(["r0", "other"])
    await until(lambda: client._replicas["other"].is_foreign and other._front is None, "it is left")
    await asyncio.gather(*(generate(client, request(client, first)) for first in (10, 20, 30)))
    assert [(one.name, one.num_routed) for one in client.replica_statuses] == [("r0", 3)]
    client.set_replicas([])
    waiting = asyncio.ensure_future(generate(client, request(client)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    client.set_replicas(["other"])
    with pytest.raises(Draining, match="m is being replaced"):
        await waiting
    client.set_replicas(["r0"])  # the earlier settings were deployed again
    await generate(client, request(client))
