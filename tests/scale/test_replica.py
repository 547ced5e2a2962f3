"""A replica and the client of a cluster in one process: real workers with the fake backend, and no Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.composition import EngineConfig
from quire.engine.model_text import ModelText
from quire.engine.params import GenerationParams, GenerationRequest
from quire.engine.worker.client import HANG_LIMIT_S, Generation
from quire.engine.worker.protocol import Add, Cancel, DropBlocks, Fingerprinted, GetStats, ToWorker, encode, to_worker
from quire.errors import Draining, InvalidRequest, LostBeforeStart, QueueFull, RequestFailed, WorkerDied
from quire.scale.cluster_client import ClusterClient
from quire.scale.replica import FRONT_BITS, Replica, ids_of
from quire.scale.transport import Batches, ReplicaGone, SetReplicas, joined
from tests.waiting import HANG_S

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


def run(
    path: Path,
    work: Callable[[Direct, ClusterClient], Awaitable[None]],
    num_replicas: int = 2,
    config: EngineConfig = CONFIG,
) -> None:
    async def main() -> None:
        direct = Direct()
        for number in range(num_replicas):
            direct.replicas[f"r{number}"] = await make_replica(f"r{number}", path, config=config)
        text = ModelText.open(path, "m", "auto", None)
        client = ClusterClient(text, config, direct, ids=ids_of(FRONT))
        try:
            await client.start()
            while len(client.replicas) < num_replicas:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(work(direct, client), HANG_S)
        finally:
            await client.close()
            for replica in direct.replicas.values():
                await replica.close()
            text.close()

    asyncio.run(main())


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


def test_a_prefix_is_found_again_and_others_spread(tiny_model: Path) -> None:
    async def work(_: Direct, client: ClusterClient) -> None:
        await client.generate(request(client))
        while not client.index_bytes:  # the report of the cache is on its way
            await asyncio.sleep(0.01)
        output = await client.generate(request(client))
        assert output.usage.cached_tokens >= 96
        assert sorted(routed(client)) == [0, 2]
        await asyncio.gather(*(client.generate(request(client, first, 60)) for first in range(20, 28)))
        assert min(routed(client)) >= 3

    run(tiny_model, work)


def test_a_salt_finds_nothing_of_another(tiny_model: Path) -> None:
    async def work(_: Direct, client: ClusterClient) -> None:
        await client.generate(request(client, salt="a"))
        while not client.index_bytes:
            await asyncio.sleep(0.01)
        for salt, expected in (("a", 96), ("b", 0), ("", 0)):
            cached = await client._cached_tokens(request(client, salt=salt))
            found = max(cached.values(), default=0)
            assert found == expected, salt

    run(tiny_model, work)


def test_waiting_requests_move_and_started_ones_fail(tiny_model: Path) -> None:
    """One replica runs at most 8 requests at once: of 14, the rest waits there when it dies."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        direct.replicas["r1"] = await make_replica("r1", tiny_model)  # takes longer than some answers
        running = [await client.submit(request(client, first, 40, 900)) for first in range(10, 24)]
        while sum(one.is_started for one in running) < 8:
            await asyncio.sleep(0.01)
        waiting = [one for one in running if not one.is_started]
        assert waiting
        client.set_replicas(["r0", "r1"])
        started = [one for one in running if one.is_started]
        os.kill(direct.replicas["r0"].process.pid, signal.SIGKILL)
        for one in started:
            with pytest.raises(WorkerDied):
                await one.result()
        for one in running:
            if one not in started:
                assert (await one.result()).usage.completion_tokens == 900
        assert client.num_restarts == 1
        assert [one.name for one in client.replica_statuses] == ["r1"]

    run(tiny_model, work, num_replicas=1)


def test_a_replica_that_is_stopped_finishes_its_requests(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        running = [await client.submit(request(client, first, 40, 300)) for first in (30, 40)]
        client.set_replicas(["r0"])  # r1 is being stopped
        await client.generate(request(client, 50))
        assert [(await one.result()).usage.completion_tokens for one in running] == [300, 300]
        while direct.replicas["r1"].num_fronts:  # the front leaves it when it is idle
            await asyncio.sleep(0.01)
        assert direct.replicas["r0"].num_fronts == 1
        assert client.num_restarts == 0

    run(tiny_model, work)


def test_cancelled_requests_and_lost_fronts_hold_nothing(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        running = [await client.submit(request(client, first, 40, 4000)) for first in range(4)]
        running[0].cancel()
        stats = await client.stats()
        assert stats is not None
        await client.close()  # cancels nothing
        for replica in direct.replicas.values():
            while replica.num_requests or (await replica.stats()).cache.num_in_use:
                await asyncio.sleep(0.01)

    run(tiny_model, work)


def test_a_front_that_is_silent_is_dropped(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        running = await client.submit(request(client, max_tokens=4000))
        while not running.is_started:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", 3600.0)
        direct.replicas["r0"].drop_silent_fronts()
        assert direct.replicas["r0"].num_requests == 1
        monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", -1.0)
        direct.replicas["r0"].drop_silent_fronts()
        assert direct.replicas["r0"].num_requests == 0
        with pytest.raises(WorkerDied):
            await running.result()
        await client.generate(request(client))  # the replica lives: the front connects again
        assert (client.num_restarts, routed(client)) == (1, [2])

    run(tiny_model, work, num_replicas=1)


def test_two_fronts_of_one_replica(tiny_model: Path) -> None:
    """Each front gets its own answers only."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        other = Direct(FRONT + 1)
        other.replicas = direct.replicas
        second = ClusterClient(client.text, CONFIG, other, ids=ids_of(FRONT + 1))
        await second.start()
        both = [(client, 30), (second, 30), (client, 60), (second, 60)]
        outputs = await asyncio.gather(*(one.generate(request(one, first, 40, 50)) for one, first in both))
        assert outputs[0].completions == outputs[1].completions
        assert [output.usage.completion_tokens for output in outputs] == [50] * 4
        assert next(client._ids) >> FRONT_BITS == FRONT
        await second.close()

    run(tiny_model, work, num_replicas=1)


def test_a_replica_that_is_stopped_while_it_is_idle(tiny_model: Path) -> None:
    """The front leaves it at once, and goes on with the others."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        client.set_replicas(["r2"])
        assert [one.name for one in client.replica_statuses] == ["r2"]
        await client.generate(request(client))
        while direct.replicas["r0"].num_fronts or direct.replicas["r1"].num_fronts:
            await asyncio.sleep(0.01)

    run(tiny_model, work, num_replicas=3)


def test_blocks_of_the_joined_map(tiny_model: Path) -> None:
    """Block 200 of the map is the first one of the second replica, whose pool has 199 beside the null block."""

    async def work(_: Direct, client: ClusterClient) -> None:
        found = await client.blocks(1000)
        assert found is not None
        assert found.num_blocks == 398
        running = await client.submit(request(client, max_tokens=4000))
        while not running.is_started:
            await asyncio.sleep(0.01)
        ((first, _count), *_rest) = await client.find_held(running.request_ids)
        view = await client.view_blocks(first, 1)
        assert view is not None
        assert [number for number, _ in view.requests] == list(running.request_ids)
        for last in (199, 398):
            view = await client.view_blocks(last, 5)
            assert view is not None
            assert (view.first, view.num_blocks) == (last, 1)
        with pytest.raises(InvalidRequest, match="first = 399 is not a block"):
            await client.view_blocks(399, 1)
        running.cancel()

    run(tiny_model, work)


@pytest.mark.nightly
def test_a_request_that_ends_at_a_stop_string_is_forgotten(tiny_model: Path) -> None:
    """The worker sends nothing after it, which must not look like a hang."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        replica = direct.replicas["short"] = await make_replica("short", tiny_model, hang_limit_s=0.5)
        client.set_replicas(["short"])
        text = (await client.generate(request(client, max_tokens=40))).completions[0].text
        stopped = await client.generate(request(client, max_tokens=4000, stop=(text[10:14],)))
        assert stopped.completions[0].finish_reason == "stop"
        while replica.num_requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert replica.error is None
        assert (await replica.stats()).cache.num_in_use == 0

    run(tiny_model, work, num_replicas=1)


def test_a_probe_after_a_cancellation_is_answered(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MOVING_LIMIT_S", 0.0)  # any silence with open work is reported

    async def work(direct: Direct, client: ClusterClient) -> None:
        running = await client.submit(request(client, max_tokens=4000))
        while not running.is_started:
            await asyncio.sleep(0.01)
        running.cancel()
        connection = client.replicas[0].connection
        assert (connection.num_requests, connection._is_probing) == (0, True)
        while connection._is_busy:
            await asyncio.sleep(0.01)
        assert client.is_moving
        assert not direct.replicas["r0"]._fronts[FRONT].is_waiting

    run(tiny_model, work, num_replicas=1)


def test_silence_counts_from_the_first_open_request(tiny_model: Path) -> None:
    async def work(_: Direct, client: ClusterClient) -> None:
        link = client.replicas[0].connection.process
        await asyncio.sleep(0.3)
        link.expect_message(30.0)
        assert link.silence_s < 0.1
        await asyncio.sleep(0.2)
        link.expect_message(30.0)
        assert link.silence_s >= 0.2

    run(tiny_model, work, num_replicas=1)


def test_a_worker_that_does_not_answer_a_query_is_ended(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        ended: list[str] = []
        replica = direct.replicas["short"] = await make_replica("short", tiny_model, ended, hang_limit_s=0.5)
        client.set_replicas(["short"])
        while [one.replica for one in client.replicas] != ["short"]:
            await asyncio.sleep(0.01)
        os.kill(replica.process.pid, signal.SIGSTOP)
        assert await client.stats() is None
        assert "sent no message for 0.5 s" in ended[0]

    run(tiny_model, work, num_replicas=1)


def test_messages_that_the_worker_cannot_take_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the batch is passed on."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        replica = direct.replicas["r0"]
        running = await client.submit(request(client, 30, max_tokens=4000))
        send = replica.process.send

        def refuse(message: object) -> None:
            if isinstance(message, Add | GetStats | DropBlocks):
                raise QueueFull("full")
            send(message)  # type: ignore[arg-type]

        monkeypatch.setattr(replica.process, "send", refuse)
        with pytest.raises(QueueFull):
            await client.generate(request(client))
        assert await client.stats() is None
        frames = [encode(DropBlocks()), encode(Cancel(running.request_ids[0]))]
        await replica.send(FRONT, frames)
        assert not replica.num_requests
        assert not replica._fronts[FRONT].is_waiting

    run(tiny_model, work, num_replicas=1)


def test_a_front_that_does_not_read_is_disconnected(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(direct: Direct, _: ClusterClient) -> None:
        replica = direct.replicas["r0"]
        stream = replica.messages(FRONT + 1)
        await anext(stream)
        monkeypatch.setattr("quire.scale.replica.MAX_UNSENT", 100)
        for query in range(20):
            await replica.send(FRONT + 1, [encode(GetStats((FRONT + 1 << FRONT_BITS) + query))])
        while FRONT + 1 in replica._fronts:
            await asyncio.sleep(0.01)
        assert [frames async for frames in stream] == []

    run(tiny_model, work, num_replicas=1)


def test_a_link_that_cannot_send_is_replaced(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause grows while nothing is served."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        monkeypatch.setattr("quire.scale.cluster_client.RECONNECT_S", 0.01)
        send, left = direct.send, [3]

        async def fail(replica: str, frames: Sequence[bytes]) -> None:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("cannot send")
            await send(replica, frames)

        monkeypatch.setattr(direct, "send", fail)
        output = await client.generate(request(client))
        assert output.usage.completion_tokens == 4
        view = client.replicas[0]
        assert (client.num_restarts, view._num_ends) == (3, 3)
        assert [view.note_end(has_served) for has_served in (False, False, True)] == [0.08, 0.16, 0.01]

    run(tiny_model, work, num_replicas=1)


def test_a_request_is_moved_a_bounded_number_of_times(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scale.cluster_client.RECONNECT_S", 0.001)

    async def work(direct: Direct, client: ClusterClient) -> None:
        num_tried = 0

        async def lose(_: str, __: Sequence[bytes]) -> None:
            nonlocal num_tried
            num_tried += 1
            raise ReplicaGone("lost")

        monkeypatch.setattr(direct, "send", lose)
        running = await client.submit(request(client))
        with pytest.raises(LostBeforeStart, match="6 replicas of m ended before the request began"):
            await running.result()
        assert num_tried == 6

    run(tiny_model, work, num_replicas=1)


def test_a_replica_that_ends_before_the_front_knows_it(tiny_model: Path) -> None:
    """The requests that were sent there move to the other one."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        replica = direct.replicas.pop("r0")
        outputs = await asyncio.gather(*(client.generate(request(client, first)) for first in (10, 20, 30)))
        assert [output.usage.completion_tokens for output in outputs] == [4, 4, 4]
        assert [one.name for one in client.replica_statuses] == ["r1"]
        await replica.close()

    run(tiny_model, work)


def test_a_request_that_is_cancelled_at_once_is_sent_before_its_cancellation(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        for _ in range(3):
            running = await client.submit(request(client, max_tokens=4000))
            running.cancel()
            await running.result()
        await client.stats()
        added = {one.request_ids[0]: at for at, one in enumerate(direct.sent) if isinstance(one, Add)}
        cancelled = {one.request_id: at for at, one in enumerate(direct.sent) if isinstance(one, Cancel)}
        assert len(added) == 3
        assert added.keys() == cancelled.keys()
        assert all(added[number] < cancelled[number] for number in added)
        assert direct.replicas["r0"].num_requests == 0

    run(tiny_model, work, num_replicas=1)


def test_a_request_whose_caller_gives_up_is_not_sent(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        client.set_replicas([])
        waiting = asyncio.ensure_future(client.submit(request(client)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        client.set_replicas(["r0"])
        await client.generate(request(client))
        assert sum(isinstance(one, Add) for one in direct.sent) == 1
        assert not client._routing

    run(tiny_model, work, num_replicas=1)


@pytest.mark.nightly
def test_queries_to_a_replica_that_is_left_end(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        os.kill(direct.replicas["r0"].process.pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(client.stats())
        await asyncio.sleep(0.1)
        client.set_replicas(["r1"])
        stats = await asked
        assert stats is not None
        assert stats.cache.num_blocks == 199  # of r1
        os.kill(direct.replicas["r0"].process.pid, signal.SIGCONT)

    run(tiny_model, work)


@pytest.mark.nightly
def test_counts_of_a_replica_that_dies_during_a_query(tiny_model: Path) -> None:
    """They are neither lost nor added twice, also not after its successor has begun to count."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        await asyncio.gather(*(client.generate(request(client, first)) for first in (10, 20, 30, 40)))
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

    run(tiny_model, work)


async def lose_the_replica(direct: Direct, client: ClusterClient) -> list[Generation]:
    """Kill the only replica. Returns requests that had not started, and wait for another one."""
    running = [await client.submit(request(client, first, 40, 900)) for first in range(10, 20)]
    while sum(one.is_started for one in running) < 8:
        await asyncio.sleep(0.01)
    client.set_replicas([])
    os.kill(direct.replicas.pop("r0").process.pid, signal.SIGKILL)
    waiting = [one for one in running if not one.is_started]
    while client._routing != set(waiting):
        await asyncio.sleep(0.01)
    assert waiting
    return waiting


def test_requests_without_a_replica_fail_when_the_client_is_closed(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        waiting = await lose_the_replica(direct, client)
        submitting = asyncio.ensure_future(client.submit(request(client)))
        await asyncio.sleep(0.05)
        await client.close()
        for one in waiting:
            with pytest.raises(LostBeforeStart, match="the engine was closed"):
                await one.result()
        with pytest.raises(LostBeforeStart, match="the engine was closed"):
            await (await submitting).result()

    run(tiny_model, work, num_replicas=1)


@pytest.mark.nightly
def test_requests_without_a_replica_can_be_cancelled(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        first, *_ = await lose_the_replica(direct, client)
        asyncio.get_running_loop().call_later(0.05, first.cancel)
        assert (await first.result()).completions[0].finish_reason == "cancelled"

    run(tiny_model, work, num_replicas=1)


def test_an_unexpected_error_of_the_cluster_fails_a_moved_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("broken")

        waiting = await lose_the_replica(direct, client)
        monkeypatch.setattr(client._router, "choose", fail)
        direct.replicas["r1"] = await make_replica("r1", tiny_model)
        client.set_replicas(["r1"])
        for one in waiting:
            with pytest.raises(RequestFailed, match="could not be sent again: RuntimeError"):
                await one.result()

    run(tiny_model, work, num_replicas=1)


def test_streams_that_continue(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has a bounded number of batches. Nothing is lost between two."""
    monkeypatch.setattr("quire.scale.replica.MAX_BATCHES", 2)

    async def work(direct: Direct, client: ClusterClient) -> None:
        whole = await client.generate(request(client, max_tokens=300))
        assert direct.num_streams > 3  # batches of a busy machine contain several steps
        again = await client.generate(request(client, max_tokens=300))
        assert again.completions == whole.completions
        assert (client.num_restarts, direct.replicas["r0"].num_fronts) == (0, 1)
        await client.close()
        while direct.replicas["r0"].num_fronts:
            await asyncio.sleep(0.01)

    run(tiny_model, work, num_replicas=1)


def test_a_front_that_does_not_continue(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped like any other that sends nothing."""
    monkeypatch.setattr("quire.scale.replica.MAX_BATCHES", 1)
    monkeypatch.setattr("quire.scale.replica.HANDOVER_S", 0.01)

    async def work(direct: Direct, _: ClusterClient) -> None:
        replica = direct.replicas["r0"]
        stream = replica.messages(FRONT + 1)
        assert [len(frames) > 0 async for frames in stream] == [True, False]
        assert replica.num_fronts == 2
        monkeypatch.setattr("quire.scale.replica.SILENT_LIMIT_S", -1.0)
        replica.drop_silent_fronts()
        with pytest.raises(InvalidRequest, match="is not connected"):
            await anext(replica.messages(FRONT + 1, is_continued=True))

    run(tiny_model, work, num_replicas=1)


@pytest.mark.nightly
def test_the_joined_map_of_replicas_of_different_sizes(tiny_model: Path) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        small = direct.replicas["small"] = Replica("small", print)
        await small.start(tiny_model, replace(CONFIG, num_blocks=50), b"0123456789abcdef")
        client.set_replicas(["r0", "small"])
        while len(client.replicas) < 2:
            await asyncio.sleep(0.01)
        for max_cells in (1000, 40, 2, 1):
            found = await client.blocks(max_cells)
            assert found is not None
            assert found.num_blocks == sum(found.totals) == 199 + 49
            assert sum(one.num_cells for one in found.cells) <= max(max_cells, 2)

    run(tiny_model, work, num_replicas=1)


def test_the_system_fingerprint_is_that_of_all_replicas(tiny_model: Path) -> None:
    """Also one that a worker reports late. Where replicas differ there is none: any of them may answer."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        first = client.system_fingerprint
        assert first is not None
        for number, replica in enumerate(direct.replicas.values()):
            replica._take(Fingerprinted("fp_late"))
            expected = (None, "fp_late")[number]
            while client.system_fingerprint != expected:
                await asyncio.sleep(0.01)
        client.set_replicas(["r0"])
        client.set_replicas(["r0", "r1"])  # a front that connects later learns it too
        while len(client.replicas) < 2:
            await asyncio.sleep(0.01)
        assert client.system_fingerprint == "fp_late"

    run(tiny_model, work)


def test_a_replica_with_another_model_is_not_used(tiny_model: Path) -> None:
    """Requests are refused when no other replica is left: the front is about to be replaced."""

    async def work(direct: Direct, client: ClusterClient) -> None:
        other = direct.replicas["other"] = Replica("other", print)
        await other.start(tiny_model, CONFIG, b"0123456789abcdef", "other model")
        client.set_replicas(["r0", "other"])
        while not client._replicas["other"].is_foreign or other.num_fronts:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.generate(request(client, first)) for first in (10, 20, 30)))
        assert [(one.name, one.num_routed) for one in client.replica_statuses] == [("r0", 3)]
        client.set_replicas([])
        waiting = asyncio.ensure_future(client.generate(request(client)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        client.set_replicas(["other"])
        with pytest.raises(Draining, match="m is being replaced"):
            await waiting
        client.set_replicas(["r0"])  # the earlier settings were deployed again
        await client.generate(request(client))

    run(tiny_model, work, num_replicas=1)


def test_a_full_replica_does_not_keep_others_from_dropping_their_maps(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(direct: Direct, client: ClusterClient) -> None:
        def refuse(_: ToWorker) -> None:
            raise QueueFull("full")

        monkeypatch.setattr(client.replicas[0].connection.process, "send", refuse)
        client.drop_blocks()
        while not direct.sent:
            await asyncio.sleep(0.01)
        assert direct.sent == [DropBlocks()]

    run(tiny_model, work)
