"""`/v1/watch` and `/v1/requests` over a real socket: correct data, at little cost, which clients cannot raise."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.responses import StreamingResponse

from quire.core.cache import PoolStats
from quire.engine.model_manager import ModelManager
from quire.server.admin import snapshots
from quire.server.limits import LOCAL
from quire.server.models import Model, Models
from quire.server.watch import (
    MAX_FINISHED_SHOWN,
    MAX_WATCHERS,
    MAX_WATCHERS_A_KEY,
    Watch,
    WatchedEngine,
    WatchedPool,
    WatchSnapshot,
    _percentile,
    _pool,
)
from tests.server.rig import FAKE, Answer, Server, close_sockets, serving
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S, eventually, is_asleep, num_switches, paused

ALICE, BOB, ROOT = "sk-alice-0000001", "sk-bob-000000001", "sk-root-00000001"
LONG = "The quick brown fox jumps over the lazy dog. " * 8
SLOW = ("--device", "20ms")  # per step of the fake backend


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(str(tiny_model), *FAKE, *SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tiny_model: Path) -> Iterator[Server]:
    keys = ("--api-key", ALICE, "--api-key", BOB, "--admin-api-key", ROOT)
    with serving(str(tiny_model), *FAKE, *SLOW, *keys, key=ROOT) as server:
        yield server


def snapshot(server: Server, key: str | None = None) -> WatchSnapshot:
    """Return a snapshot in which every worker has reported completely; on a busy machine, earlier ones may not be."""
    headers = None if key is None else {"authorization": f"Bearer {key}"}

    def whole() -> WatchSnapshot | None:
        answer = server.get("/v1/watch?once=true&interval_ms=100", headers=headers)
        assert answer.status == 200, answer
        assert answer.headers["content-type"] == "application/json"
        found = msgspec.json.decode(answer.body, type=WatchSnapshot)  # it matches the schema
        engines = [model.engine for model in found.models]
        is_whole = all(one is not None and one.blocks is not None and not one.blocks.num_pending for one in engines)
        return found if is_whole else None

    found = eventually(whole, "a whole snapshot")
    assert found is not None
    return found


def body(text: str = LONG, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 3000, "ignore_eos": True, "stream": True, **more}


def running(server: Server, text: str = LONG, **more: Any) -> socket.socket:
    """A request that streams until the socket is closed."""
    return server.begin(body(text, **more))


class Stream:
    """A stream of snapshots."""

    def __init__(self, server: Server, query: str = "", key: str | None = None, buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.sock.settimeout(HANG_S)
        self.sock.connect(server.address)
        key = server.key if key is None else key
        who = "" if key is None else f"authorization: Bearer {key}\r\n"
        self.sock.sendall(f"GET /v1/watch?{query} HTTP/1.1\r\nhost: localhost\r\n{who}\r\n".encode())
        self._data = b""

    def close(self) -> None:
        self.sock.close()

    @property
    def status(self) -> int:
        while b"\r\n\r\n" not in self._data:
            self._data += self.sock.recv(65536)
        return int(self._data.split(b" ", 2)[1])

    def next(self) -> WatchSnapshot:
        while (end := self._data.find(b"\n\n")) < 0:
            got = self.sock.recv(65536)
            assert got, "the stream has ended"
            self._data += got
        frame, self._data = self._data[:end], self._data[end + 2 :]
        return msgspec.json.decode(frame[frame.index(b"data: ") + 6 :], type=WatchSnapshot)

    def until(self, is_so: Callable[[WatchedEngine], object]) -> WatchedEngine:
        """Return the engine of the first model in the first snapshot for which the condition holds."""
        while (engine := self.next().models[0].engine) is None or not is_so(engine):
            pass
        return engine


def test_an_idle_server(server: Server) -> None:
    server.wait_free()
    found = snapshot(server)
    assert (found.key, found.is_admin, found.is_draining) == ("local", True, False)
    assert found.held_bytes > 0
    assert found.budget_bytes is None  # a single model has no budget
    (model,) = found.models
    assert (model.state, model.num_waiting) == ("ready", 0)
    engine = model.engine
    assert engine is not None
    assert engine.blocks is not None
    assert engine.is_moving
    assert (engine.num_running, engine.requests, engine.num_other_requests) == (0, [], 0)
    assert engine.blocks.num_blocks == 399
    assert sum(run.num_cells for run in engine.blocks.cells) == 399
    assert engine.blocks.counts.in_use == engine.blocks.counts.shared == engine.blocks.counts.pinned == 0
    assert [tier.tier for tier in engine.tiers] == ["high", "normal", "low"]


def test_running_requests_are_shown_with_blocks_and_rates(server: Server) -> None:
    with closing(Stream(server, "interval_ms=200")) as stream, running(server), running(server):
        early = stream.until(lambda one: one.num_running == 2 and one.blocks and one.blocks.counts.shared)
        num_before = early.requests[0].completion_tokens
        engine = stream.until(
            lambda one: one.decode_tokens_per_s and one.requests[0].tokens_per_s
            and one.requests[0].completion_tokens > num_before
        )  # fmt: skip
        assert engine.blocks is not None
        assert engine.num_running == 2
        assert engine.num_steps > 0
        first, second = engine.requests
        assert first.is_running
        assert first.endpoint == "/v1/chat/completions"
        assert (first.tier, first.key, first.num_samples) == ("normal", "local", 1)
        assert second.cached_tokens == second.prompt_tokens - 1  # the second came after the first
        assert first.num_blocks * 32 >= first.computed_tokens > first.prompt_tokens
        # Both hold the same prompt: its full blocks are shared.
        assert engine.blocks.counts.shared >= first.prompt_tokens // 32 - 1
        assert engine.blocks.max_holders == 2
        position = 1
        for run in engine.blocks.cells:
            if run.num_shared:
                break
            position += run.num_cells
        for one in (first, second):
            held = server.get(f"/v1/watch/held?id={one.id}").json
            assert any(start <= position < start + size for start, size in held["ranges"])
            assert sum(size for _, size in held["ranges"]) >= one.num_blocks
    server.wait_free()
    assert snapshot(server).models[0].engine.requests == []  # type: ignore[union-attr]


def test_a_worker_that_has_not_reported_completely_is_shown(tiny_model: Path) -> None:
    """A worker answers between steps, and this block map takes 40 answers."""
    options = ("--backend", "fake", "--num-blocks", "20001", "--device", "200ms", "--max-num-seqs", "1")
    with serving(str(tiny_model), *options) as server, ExitStack() as stack:
        resume = stack.enter_context(paused(server.worker_pid))  # as in a long first step
        for _ in range(2):
            stack.enter_context(server.send_request(body()))
        stream = stack.enter_context(closing(Stream(server, "interval_ms=100")))
        silent = stream.until(lambda engine: len(engine.requests) == 2)
        assert (silent.age_s, silent.blocks) == (None, None)
        assert [one.is_running for one in silent.requests] == [False, False]
        resume()
        known = stream.until(lambda engine: engine.blocks is not None and engine.blocks.counts.in_use > 0)
        assert known.blocks is not None
        assert known.blocks.num_pending > 0
        assert [one.is_running for one in known.requests] == [True, False]


def test_finished_requests_are_listed_with_their_cache_result(server: Server) -> None:
    text = "A prompt for the list of finished requests. " + LONG
    ids = [server.chat(text, max_tokens=4).headers["x-request-id"] for _ in range(2)]
    engine = snapshot(server).models[0].engine
    assert engine is not None
    second, first = engine.finished[:2]  # newest first
    assert [second.id, first.id] == ids[::-1]
    assert (first.endpoint, first.finish, first.error, first.completion_tokens) == (
        "/v1/chat/completions",
        "length",
        None,
        4,
    )
    assert first.cached_tokens < second.cached_tokens == second.prompt_tokens - 1
    assert second.cache_reason == "complete"
    assert first.cache_reason != "complete"
    assert 0 < (first.ttft_s or 0) <= first.duration_s
    assert first.finished_at <= second.finished_at
    assert b"finished requests" not in msgspec.json.encode(engine)  # no text of a prompt
    for _ in range(MAX_FINISHED_SHOWN):
        assert server.chat(max_tokens=1).status == 200
    engine = snapshot(server).models[0].engine
    assert engine is not None
    assert len(engine.finished) == MAX_FINISHED_SHOWN
    assert not {one.id for one in engine.finished} & {*ids}


def test_a_failed_load_is_explained_to_admins_only(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    keys = ("--api-key", ALICE, "--admin-api-key", ROOT)
    with serving(str(tiny_model), str(broken), *FAKE, *keys, key=ROOT) as server:
        assert server.post("/v1/models/load", {"model": "broken"}).status >= 400

        def broken_as(key: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            return server.get("/v1/watch?once=true&interval_ms=100", headers=headers).json["models"][1]

        assert (broken_as(ROOT)["state"], broken_as(ALICE)["state"]) == ("failed", "failed")
        assert broken_as(ROOT)["error"]
        assert broken_as(ALICE)["error"] is None


def test_the_queue_is_shown_by_tier(tiny_model: Path) -> None:
    with (
        serving(str(tiny_model), *FAKE, *SLOW, "--max-num-seqs", "1") as server,
        ExitStack() as stack,
    ):
        stack.enter_context(running(server, priority="high"))
        for tier in ("low", "low", "normal"):
            stack.enter_context(server.send_request(body(priority=tier)))
        watching = stack.enter_context(closing(Stream(server, "interval_ms=100")))
        engine = watching.until(
            lambda one: one.num_waiting == 3 and one.age_s is not None
            and all(tier.oldest_age_s for tier in one.tiers if tier.num_waiting)
        )  # fmt: skip  # ages are given in hundredths of a second: the first snapshot may say 0
        waiting = {tier.tier: tier for tier in engine.tiers}
        assert [waiting[name].num_waiting for name in ("high", "normal", "low")] == [0, 1, 2]
        assert waiting["high"].oldest_age_s == 0
        assert waiting["low"].num_tokens > 0
        assert [one.is_running for one in engine.requests] == [True, False, False, False]
        assert all(one.num_blocks == 0 for one in engine.requests[1:])
        before = engine.num_preemptions
        stack.pop_all().close()  # all disconnect
        server.wait_free()
        stack.enter_context(running(server, priority="low"))
        stack.enter_context(running(server, priority="high"))  # takes the only place
        found = snapshot(server).models[0].engine
        assert found is not None
        assert found.num_preemptions == before + 1
        assert [(one.tier, one.is_running) for one in found.requests] == [("high", True), ("low", False)]


def test_all_watchers_share_the_ticks_and_their_number_is_limited(server: Server) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(Stream(server, "interval_ms=300"))) for _ in range(MAX_WATCHERS)]
        made: dict[int, float] = {}
        seen: list[set[int]] = [set() for _ in streams]
        while not set.intersection(*seen):  # all see the same ticks: each is collected once
            for stream, ticks in zip(streams, seen, strict=True):
                found = stream.next()
                ticks.add(found.tick)
                assert made.setdefault(found.tick, found.at) == found.at
        assert streams[-1].next().num_watchers == MAX_WATCHERS
        refused = server.get("/v1/watch")
        assert refused.status == 429
        assert str(MAX_WATCHERS) in refused.json["error"]["message"]
        assert refused.headers["retry-after"]
        assert server.get("/v1/watch?once=true").status == 429
        assert server.chat().status == 200
    eventually(lambda: server.get("/v1/watch?once=true").status == 200, "who leaves makes room")


def test_one_key_cannot_take_all_watcher_places(locked: Server) -> None:
    """Even if its watchers read nothing."""
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(Stream(locked, key=ALICE))) for _ in range(MAX_WATCHERS)]
        assert [stream.status for stream in streams].count(200) == MAX_WATCHERS_A_KEY
        refused = locked.get("/v1/watch", headers={"authorization": f"Bearer {ALICE}"})
        assert (refused.status, refused.json["error"]["message"]) == (
            429,
            f"{MAX_WATCHERS_A_KEY} watchers of the key 'key-1' are already connected, which is the limit",
        )
        assert snapshot(locked, BOB).key == "key-2"
        assert snapshot(locked, ROOT).is_admin


def test_a_worker_is_not_polled_without_watchers(server: Server) -> None:
    snapshot(server)
    server.wait_free()
    worker = server.worker_pid
    eventually(lambda: is_asleep(worker, window_s=1.0), "the worker sleeps")  # after the audit that follows a request
    before = num_switches(worker)
    with closing(Stream(server, "interval_ms=100")) as stream:
        while num_switches(worker) < before + 8:  # with a watcher it is polled
            stream.next()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/watch?interval_ms=99", "interval_ms = '99'"),
        ("/v1/watch?interval_ms=60001", "interval_ms = '60001'"),
        ("/v1/watch?interval_ms=soon", "interval_ms = 'soon'"),
        ("/v1/watch?once=perhaps", "once = 'perhaps'"),
        ("/v1/watch/held", "id"),
        ("/v1/watch/held?id=" + "x" * 65, "id = 'xxx"),
    ],
)
def test_invalid_queries_are_refused_by_name(server: Server, path: str, says: str) -> None:
    answer = server.get(path)
    assert answer.status == 400
    assert says in answer.json["error"]["message"]


def test_unknown_models_and_other_methods(server: Server) -> None:
    assert server.get("/v1/watch/held?id=x&model=nobody").status == 404
    assert server.post("/v1/watch").status == 405
    head = server.ask("HEAD", "/v1/watch")
    assert (head.status, head.body) == (200, b"")


def test_a_key_sees_its_own_requests_and_counts_the_others(locked: Server) -> None:
    def start(key: str, text: str) -> socket.socket:
        locked.key = key
        try:
            return running(locked, text)
        finally:
            locked.key = ROOT

    with start(ALICE, "mine " + LONG), start(BOB, "his " + LONG):
        alice, root = snapshot(locked, ALICE), snapshot(locked, ROOT)
        assert (alice.key, alice.is_admin, root.is_admin) == ("key-1", False, True)
        mine, everything = alice.models[0].engine, root.models[0].engine
        assert mine is not None
        assert everything is not None
        assert everything.blocks is not None
        assert [one.key for one in mine.requests] == ["key-1"]
        assert mine.num_other_requests == 1
        assert {one.key for one in everything.requests} == {"key-1", "key-2"}
        other = next(one for one in everything.requests if one.key == "key-2")
        assert other.id.encode() not in msgspec.json.encode(alice)
        for key, status in ((ALICE, 404), (BOB, 200), (ROOT, 200)):
            held = locked.get(f"/v1/watch/held?id={other.id}", headers={"authorization": f"Bearer {key}"})
            assert held.status == status


def test_a_dead_worker_and_its_successor_are_shown_and_a_watcher_does_not_block_the_shutdown(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(tiny_model, model)
    with serving(str(model), *FAKE) as server, closing(Stream(server, "interval_ms=100")) as stream:
        assert stream.next().models[0].state == "ready"
        (model / "config.json").rename(model / "away.json")  # no new worker can start until the death is shown
        os.kill(server.worker_pid, signal.SIGKILL)
        while stream.next().models[0].engine is not None:
            pass
        (model / "away.json").rename(model / "config.json")
        engine = stream.until(lambda one: one.num_restarts and one.blocks is not None and not one.blocks.num_pending)
        assert engine.blocks is not None
        assert engine.blocks.counts.free == engine.blocks.num_blocks
        assert server.stop() == 0


# Without a server


class NoModels(list[Model]):
    manager = ModelManager([], None)
    is_draining = False


def test_a_slow_watcher_gets_fewer_snapshots_and_nothing_is_kept_for_it() -> None:
    async def work() -> None:
        watch = Watch(cast(Models, NoModels()))
        sent: list[WatchSnapshot] = []
        is_read = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(msgspec.json.decode(message["body"].removeprefix(b"data: "), type=WatchSnapshot))
                await is_read.wait()

        async def receive() -> Any:
            return await asyncio.get_running_loop().create_future()

        watcher = watch.enter(0.02, LOCAL)
        stream = StreamingResponse(snapshots(watcher, LOCAL))
        other = watch.enter(0.02, LOCAL)
        streaming = asyncio.create_task(stream({"type": "http"}, receive, send))
        for _ in range(10):
            await watch.after(watch.tick)
        assert [one.tick for one in sent] == [1]  # the first is still being sent
        is_read.set()
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        assert sent[1].tick >= 10  # the newest, without those in between
        watch.leave(other)
        streaming.cancel()
        with suppress(asyncio.CancelledError):
            await streaming
        watch.leave(watcher)
        assert watch.enter(0.02, LOCAL) is not None  # all have left: collecting starts again
        assert watch.tick == 0

    asyncio.run(work())


def test_the_percentiles_of_a_hundred_times() -> None:
    times_s = [number / 100 for number in range(100, 0, -1)]
    assert (_percentile(times_s, 0.50), _percentile(times_s, 0.95)) == (0.5, 0.95)
    assert (_percentile([9.0], 0.50), _percentile([], 0.50)) == (9.0, None)


def test_blocks_of_windows_are_shown_by_state() -> None:
    found = PoolStats(num_blocks=20, num_free=15, num_cached=9, num_in_use=5, num_evictions=4)
    assert _pool(found, 640) == WatchedPool(free=6, cached=9, in_use=5, num_evictions=4, num_bytes=640)
    assert _pool(None, 640) is None


CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3000, "ignore_eos": True, "stream": True},
    MESSAGES: {"model": "tiny", "messages": HI, "max_tokens": 3000, "stream": True},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3000, "stream": True},
    OLLAMA: {"model": "tiny", "messages": HI, "options": {"num_predict": 3000}},
}


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def listed(server: Server, key: str | None = None) -> list[Any]:
    answer = server.get("/v1/requests", headers=None if key is None else as_key(key))
    assert answer.status == 200
    assert answer.json["object"] == "list"
    found: list[Any] = answer.json["data"]
    return found


def wait_listed(server: Server, state: str, count: int = 1) -> list[Any]:
    def found() -> list[Any] | None:
        entries = [one for one in listed(server) if one["state"] == state]
        return entries if len(entries) == count else None

    return eventually(found, f"{count} requests are {state}") or []


def cancel(server: Server, request_id: str, key: str | None = None) -> Answer:
    return server.post(f"/v1/requests/{request_id}/cancel", headers=None if key is None else as_key(key))


def rest_of(stream: Any) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += (piece := stream.recv(65536))
        assert piece, data[-300:]
    return data


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        (CHAT, b'data: {"error":{"message":"the request was cancelled by an admin","type":"request_cancelled",'),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the request was can'),
        (RESPONSES, b"event: response.failed\n"),
        (OLLAMA, b'{"error":"the request was cancelled by an admin"}\n'),
    ],
)
def test_a_cancelled_stream_ends_with_an_error_of_its_protocol(server: Server, path: str, ending: bytes) -> None:
    stream = server.begin(BODIES[path], path)
    (found,) = wait_listed(server, "running")
    assert (found["endpoint"], found["key"], found["priority"], found["model"]) == (path, "local", "normal", "tiny")
    assert (found["is_streaming"], found["num_samples"], found["max_tokens"]) == (True, 1, 3000)
    assert found["prompt_tokens"] > 0
    answer = cancel(server, found["id"])
    assert (answer.status, answer.json) == (200, {"id": found["id"], "cancelled": 1})
    data = rest_of(stream)
    assert ending in data
    assert b"the request was cancelled by an admin" in data
    server.wait_free()
    server.wait_for(f"request_id={found['id']} .*finish=cancelled error=cancelled")
    assert listed(server) == []


def test_a_whole_answer_that_is_cancelled_has_a_status_of_its_own(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, CHAT, {**BODIES[CHAT], "stream": False, "n": 2})
        (found,) = wait_listed(server, "running")
        assert found["num_samples"] == 2
        assert cancel(server, found["id"]).json["cancelled"] == 1
        answer = asking.result()
    assert (answer.status, answer.headers["x-should-retry"]) == (499, "false")
    error = answer.json["error"]
    assert (error["code"], error["message"]) == ("request_cancelled", "the request was cancelled by an admin")
    server.wait_free()


def test_a_request_that_waits_is_cancelled_too(server: Server) -> None:
    with paused(server.worker_pid), ThreadPoolExecutor() as pool:
        asking = pool.submit(server.chat)
        (found,) = wait_listed(server, "waiting")
        assert (found["completion_tokens"], found["cached_tokens"]) == (0, 0)
        assert cancel(server, found["id"]).json["cancelled"] == 1
        assert asking.result().status == 499  # before the worker goes on
    server.wait_free()


def test_a_request_that_waits_for_its_model_is_cancelled_too(tmp_path: Path) -> None:
    paths = [str(write_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
    with serving(*paths, *FAKE, *SLOW, "--memory", "9M") as server, ThreadPoolExecutor() as pool:
        server.begin(BODIES[CHAT])  # keeps the memory of a
        asking = pool.submit(server.chat, model="b")
        (found,) = wait_listed(server, "loading")
        assert (found["model"], found["prompt_tokens"]) == ("b", None)
        assert cancel(server, found["id"]).json["cancelled"] == 1
        assert asking.result().json["error"]["code"] == "request_cancelled"
        assert [one["model"] for one in listed(server)] == ["a"]
        close_sockets()
        server.wait_free()


def test_an_admin_sees_and_cancels_all_and_other_keys_their_own(locked: Server) -> None:
    locked.key = ALICE
    stream = locked.begin(BODIES[CHAT])
    locked.key = ROOT
    (found,) = wait_listed(locked, "running")
    assert found["key"] == "key-1"
    assert [one["id"] for one in listed(locked, ALICE)] == [found["id"]]
    assert listed(locked, BOB) == []
    refused = cancel(locked, found["id"], BOB)
    message = f"id = {found['id']!r} is not a request in progress of the key 'key-2'; GET /v1/requests lists them"
    assert (refused.status, refused.json["error"]["message"]) == (404, message)
    assert cancel(locked, found["id"], ALICE).status == 200
    assert b"the request was cancelled with the key 'key-1'" in rest_of(stream)
    locked.wait_free()


def test_requests_of_one_id_are_cancelled_together(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        headers = {"x-request-id": "mine"}
        asking = [pool.submit(server.post, CHAT, {**BODIES[CHAT], "stream": False}, headers=headers) for _ in "12"]
        wait_listed(server, "running", 2)
        assert cancel(server, "mine").json == {"id": "mine", "cancelled": 2}
        assert [one.result().status for one in asking] == [499, 499]
    server.wait_free()
