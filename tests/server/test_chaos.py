"""Clients that disconnect, stall and flood; workers that die or hang; signals at any time. Nothing is held afterwards.

All tests use real sockets and a real server. Time limits only bound a hang.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.selection import mostly_nightly
from tests.server.corpus import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.server.rig import (
    FAKE,
    Reply,
    Server,
    ask_async,
    children,
    close_sockets,
    request_bytes,
    serving,
)
from tests.waiting import HANG_S, eventually, paused, repeating

SEED = 20_261_115
ENDLESS = 3900  # tokens: at 5 ms per step they take 20 s; no test waits for the last one


def body_for(path: str, text: str, max_tokens: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A request that generates all of its tokens."""
    body: dict[str, Any] = {"model": "tiny", "stream": stream, "ignore_eos": True, **more}
    if path == RESPONSES:
        return body | {"input": text, "max_output_tokens": max_tokens}
    content = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return body | content | {"max_tokens": max_tokens}


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health").status == 200
    except OSError:
        return False


# Disconnects


@pytest.fixture(scope="module")
def busy(tiny_model: Path) -> Iterator[Server]:
    """A server with few running requests, so that a queue forms, and with small prefill chunks."""
    options = ("--device", "5ms", "--max-num-seqs", "6", "--max-chunk-tokens", "64", "--max-num-batched-tokens", "128")
    with serving(str(tiny_model), *FAKE, *options, "--max-queue", "2000") as server:
        yield server


class Leaver:
    """Clients that disconnect at a random time in a random way."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self.num_interrupted = 0  # certainly disconnected in the middle of an answer

    def leave_often(self, count: int) -> None:
        for _ in range(count):
            sock = self._server.raw()
            try:
                self._begin(sock)
                self._end(sock)
            except OSError:
                pass  # the server closed first
            finally:
                sock.close()

    def _begin(self, sock: socket.socket) -> None:
        """Send a request or a part of it, and possibly wait for part of the response."""
        chance = self._random
        path = chance.choice((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
        more: dict[str, Any] = {"n": chance.choice((1, 1, 1, 3))} if path in (CHAT, COMPLETIONS) else {}
        if chance.random() < 0.2:
            more["cache_salt"] = f"s{chance.randrange(3)}"
        text = "word " * chance.choice((1, 5, 40, 150))
        num_tokens, is_streaming = chance.choice((1, 5, ENDLESS)), chance.random() < 0.6
        request = request_bytes(path, body_for(path, text, num_tokens, stream=is_streaming, **more))
        moment = chance.choice(("head", "body", "sent", "waited", "read", "read", "pipelined"))
        if moment in ("head", "body"):
            head = request.index(b"\r\n\r\n")
            sock.sendall(
                request[: chance.randrange(head) if moment == "head" else chance.randrange(head, len(request))]
            )
            return
        sock.sendall(request * (3 if moment == "pipelined" else 1))
        if moment == "waited":
            time.sleep(chance.random() * 0.03)
        elif moment == "read" and (is_streaming or num_tokens < ENDLESS):
            sock.recv(chance.choice((1, 100, 3000)))
            self.num_interrupted += num_tokens == ENDLESS

    def _end(self, sock: socket.socket) -> None:
        how = self._random.choice(("fin", "reset", "half"))
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "half":
            sock.shutdown(socket.SHUT_WR)
            if self._random.random() < 0.2:
                time.sleep(0.01)


def num_aborted(server: Server) -> float:
    text = server.get("/metrics").body.decode()
    found = re.findall(r'^quire:request_success_total\{.*finished_reason="abort".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("num_disconnects", mostly_nightly([400, 2000], 1))
def test_disconnects_hold_nothing(busy: Server, num_disconnects: int) -> None:
    process = psutil.Process(busy.process.pid)
    busy.chat()
    num_files, worker_pid = process.num_fds(), busy.worker_pid
    leavers = [Leaver(busy, SEED + i) for i in range(10)]
    with ThreadPoolExecutor(len(leavers)) as pool:
        for done in [pool.submit(leaver.leave_often, num_disconnects // len(leavers)) for leaver in leavers]:
            done.result()
    stats = busy.wait_free()
    assert stats["num_free"] == stats["num_blocks"] - stats.get("num_pinned", 0)
    assert stats["num_shared"] == 0
    assert busy.worker_pid == worker_pid
    num_interrupted = sum(leaver.num_interrupted for leaver in leavers)
    assert num_aborted(busy) >= num_interrupted > num_disconnects / 50  # those that disconnected while they were served
    eventually(lambda: process.num_fds() <= num_files + 2, f"files closed again, {num_files} as before")
    assert busy.chat().status == 200
    assert "Traceback" not in busy.log
    assert " ERROR " not in busy.log


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_disconnect_frees_blocks_before_the_answer_is_done(busy: Server, path: str, is_streaming: bool) -> None:
    busy.wait_free()
    before = num_aborted(busy)
    sock = busy.send_request(body_for(path, "Hello", ENDLESS, stream=is_streaming), path)
    eventually(lambda: busy.stats()["num_running"], "it runs")
    sock.close()
    busy.wait_free()
    assert num_aborted(busy) == before + 1  # it was not finished


def test_a_client_that_disconnects_in_the_queue_is_not_computed(busy: Server) -> None:
    runners = [busy.send_request(body_for(CHAT, f"Runner {i}", ENDLESS)) for i in range(6)]
    eventually(lambda: busy.stats()["num_running"] == 6, "the machine is full")
    waiters = [busy.send_request(body_for(CHAT, f"Waiter {i}", ENDLESS, stream=i % 2 == 0)) for i in range(20)]
    eventually(lambda: busy.stats()["num_waiting"] == 20, "they wait")
    for waiter in waiters:
        waiter.close()
    eventually(lambda: busy.stats()["num_waiting"] == 0, "no request waits")
    assert busy.stats()["num_running"] == 6
    for runner in runners:
        runner.close()
    busy.wait_free()


def test_it_listens_on_one_loopback_port_only(busy: Server) -> None:
    found = []
    for pid in (busy.process.pid, *children(busy.process.pid)):
        found += [one for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN]
        found += [one for one in psutil.Process(pid).net_connections("inet") if one.type == socket.SOCK_DGRAM]
    assert [tuple(one.laddr) for one in found] == [busy.address]
    assert busy.address[0] == "127.0.0.1"


# A worker that dies or hangs


@pytest.fixture(scope="module")
def fragile(tiny_model: Path) -> Iterator[Server]:
    """A server with room for all requests. A live worker is never silent for as long as the hang limit."""
    options = ("--device", "10ms", "--max-num-seqs", "16", "--hang-limit", "8", "--keep-alive-interval", "300")
    with serving(str(tiny_model), "--backend", "fake", "--num-blocks", "2500", *options) as server:
        yield server


@contextmanager
def health_watched(server: Server) -> Iterator[set[tuple[int, str]]]:
    """Collect the statuses and texts of /health meanwhile."""
    found: set[tuple[int, str]] = set()

    def watch() -> None:
        answer = server.get("/health")
        found.add((answer.status, answer.json["status"]))

    with repeating(watch, pause_s=0.01):
        yield found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.kept("kill")
def test_a_lost_worker_ends_its_streams_with_errors_and_is_replaced(fragile: Server, number: signal.Signals) -> None:
    """16 requests run and 8 wait. Both groups have all protocols, and some requests do not stream."""
    kinds = ((CHAT, True), (MESSAGES, True), (COMPLETIONS, True), (RESPONSES, True), (CHAT, False), (RESPONSES, False))
    requests = [kinds[i % len(kinds)] for i in range(24)]
    worker_pid = fragile.worker_pid
    flowing: set[int] = set()

    async def lose() -> list[Reply]:
        asked = [
            asyncio.create_task(
                ask_async(
                    fragile,
                    path,
                    body_for(path, f"{i}", ENDLESS, stream=stream),
                    on_data=lambda _, i=i: flowing.add(i),  # type: ignore[misc]
                )
            )
            for i, (path, stream) in enumerate(requests)
        ]

        async def are_there() -> bool:
            stats = await asyncio.to_thread(fragile.stats)
            return (stats["num_running"], stats["num_waiting"]) == (16, 8) and len(flowing) >= 8

        while not await are_there():
            await asyncio.sleep(0.02)
        os.kill(worker_pid, number)
        return await asyncio.gather(*asked)

    with health_watched(fragile) as health:
        replies = asyncio.run(asyncio.wait_for(lose(), HANG_S))
        eventually(lambda: is_healthy(fragile), "serving again")
    assert health <= {(200, "ok"), (503, "restarting"), (503, "stuck")}, health
    for (path, _), reply in zip(requests, replies, strict=True):
        check_loss(path, reply)
    assert sum(reply.status == 200 for reply in replies) >= 8  # the streaming ones of the 16 that ran
    assert sum(reply.headers.get("x-should-retry") == "true" for reply in replies) == 8  # those that had not started
    assert fragile.chat().status == 200
    fragile.wait_free()
    assert fragile.worker_pid != worker_pid
    assert not psutil.pid_exists(worker_pid)


def check_loss(path: str, reply: Reply) -> None:
    """Check that the response ends with an error in its protocol's format."""
    assert reply.ending == "error", reply
    name, body = reply.events[-1] if reply.status == 200 else (None, reply.json)
    assert reply.status in (200, 500, 503)
    if path == RESPONSES and reply.status == 200:
        assert (name, body["type"], body["response"]["status"]) == ("response.failed",) * 2 + ("failed",)
        assert body["response"]["error"]["code"] == "server_error"
        assert body["response"]["error"]["message"]
        return
    if path == MESSAGES:
        assert body["type"] == "error"
        assert name == ("error" if reply.status == 200 else None)
    assert body["error"]["type"] == ("api_error" if path == MESSAGES else "server_error")
    assert body["error"]["message"]


def test_requests_wait_for_a_worker_that_cannot_restart_yet(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(tiny_model, model)
    with serving(str(model), *FAKE, "--queue-timeout", "2") as server:
        (model / "config.json").rename(model / "away.json")
        os.kill(server.worker_pid, signal.SIGKILL)
        eventually(lambda: not is_healthy(server), "it is noticed")
        for path in (CHAT, MESSAGES):
            answer = server.post(path, body_for(path, "Hi", 5, stream=False))
            assert answer.status in (429, 503, 529), answer
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
            assert str(tmp_path) not in answer.body.decode()
        assert server.get("/metrics").status == 200
        assert server.get("/health").json["status"] == "restarting"
        (model / "away.json").rename(model / "config.json")
        eventually(lambda: is_healthy(server), "serving again")
        eventually(lambda: server.chat().status == 200, "an answer within the queue timeout")
        server.wait_free()


def test_a_killed_server_leaves_no_worker_behind(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--device", "2ms") as server:
        relatives = family(server.process.pid)
        assert relatives
        server.begin(body_for(CHAT, "Hi", ENDLESS))
        server.process.kill()
        assert not psutil.wait_procs(relatives, timeout=HANG_S)[1]


# Overload


def test_overload_is_refused_while_the_rest_is_served(tiny_model: Path) -> None:
    """The server accepts six requests at a time; sixty clients retry until they are served."""
    options = ("--device", "5ms", "--max-num-seqs", "2", "--max-queue", "4")
    served: list[int] = []
    refused: list[tuple[str, int, Reply]] = []

    async def ask_again(server: Server, number: int) -> None:
        path = (CHAT, MESSAGES, RESPONSES)[number % 3]
        while True:
            reply = await ask_async(server, path, body_for(path, f"{number}", 5, stream=number % 2 == 0))
            if reply.ending == "done":
                served.append(number)
                return
            refused.append((path, number, reply))
            await asyncio.sleep(0.1)

    async def flood(server: Server) -> None:
        clients = [asyncio.create_task(ask_again(server, number)) for number in range(60)]
        while len({number for _, number, _ in refused}) < 56:  # four wait, and all places are taken
            assert not served
            await asyncio.sleep(0.02)
        close_sockets()  # the running requests disconnect
        await asyncio.gather(*clients)

    with serving(str(tiny_model), *FAKE, *options) as server:
        for _ in range(2):
            server.begin(body_for(CHAT, "first", ENDLESS))
        asyncio.run(asyncio.wait_for(flood(server), HANG_S))
        server.wait_free()
        assert server.chat().status == 200
    assert sorted(served) == list(range(60))
    for path, _, reply in refused:
        assert reply.status == (529 if path == MESSAGES else 429)
        assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert reply.headers["x-should-retry"] == "true"
        assert reply.json["error"]["type"] == ("overloaded_error" if path == MESSAGES else "rate_limit_error")
    assert {path for path, _, _ in refused} == {CHAT, MESSAGES, RESPONSES}


def test_the_queue_timeout_is_an_error(tiny_model: Path) -> None:
    options = ("--device", "10ms", "--max-num-seqs", "1", "--queue-timeout", "2", "--keep-alive-interval", "0.1")
    with serving(str(tiny_model), *FAKE, *options) as server:
        eventually(lambda: server.begins(body_for(CHAT, "first", ENDLESS)), "the first one runs")

        async def wait_all() -> list[Reply]:
            asked = [(CHAT, False), (MESSAGES, False), (CHAT, True), (MESSAGES, True), (RESPONSES, True)]
            return await asyncio.gather(
                *(ask_async(server, path, body_for(path, "x", 5, stream=s)) for path, s in asked)
            )

        openai, anthropic, *streams = asyncio.run(wait_all())
        assert (openai.status, anthropic.status) == (429, 529)
        assert int(openai.headers["retry-after"]) >= 1
        assert int(anthropic.headers["retry-after"]) >= 1
        for stream in streams:  # their headers were sent with the first keep-alive
            assert stream.status == 200
            assert stream.body.startswith(b": keep-alive\n\n")
            assert stream.ending == "error"
        (_, said), (_, anthropic_said), (name, event) = (stream.events[-1] for stream in streams)
        assert said["error"]["code"] == event["code"] == "server_overloaded"
        assert anthropic_said["error"]["type"] == "overloaded_error"
        assert (name, event["type"], event["sequence_number"]) == ("error", "error", 0)
        assert event["message"] == event["error"]["message"]
        assert server.stats()["num_waiting"] == 0
        close_sockets()


# Slow clients


@pytest.fixture(scope="module")
def strict(tiny_model: Path) -> Iterator[Server]:
    """A server with short limits, for clients that are to be cut."""
    times = ("--header-timeout", "4", "--body-timeout", "4", "--slow-client-timeout", "2")
    with serving(str(tiny_model), *FAKE, "--device", "1ms", *times) as server:
        yield server


def largest_send_buffer() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except OSError:
        return 16 << 20


@contextmanager
def stalled(server: Server) -> Iterator[socket.socket]:
    """A client that requests twice as much as any buffer holds and reads nothing."""
    num_tokens = min(-(-2 * largest_send_buffer() // (8 * 2000)), ENDLESS)  # of eight answers, at least 2 kB each
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.settimeout(HANG_S)
        sock.connect(server.address)
        body = body_for(CHAT, "Tell me all", num_tokens, n=8, logprobs=True, top_logprobs=20)
        server.send_request(body, sock=sock)
        yield sock


def test_only_clients_that_do_not_read_are_cut(strict: Server) -> None:
    with stalled(strict) as sleeper:
        other = asyncio.run(ask_async(strict, CHAT, body_for(CHAT, "And me?", 500)))
        assert other.ending == "done"
        strict.wait_for("a client read nothing for 2 s")
        strict.wait_free()
        received = b""
        with suppress(ConnectionResetError):
            while data := sleeper.recv(1 << 16):
                received += data
        assert received
        assert b"[DONE]" not in received


def test_a_client_that_does_not_read_cannot_block_the_shutdown(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--drain", "0.5") as server, stalled(server) as sleeper:
        sleeper.recv(1)
        eventually(lambda: not server.stats()["num_running"], "the whole answer waits for its reader")
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_silence_and_half_requests_are_cut(strict: Server) -> None:
    request = request_bytes(CHAT, body_for(CHAT, "Hi", 5))
    head = request.index(b"\r\n\r\n") + 4
    beginnings = (b"", request[:3], request[: head // 2], request[: head - 2], request[:head], request[: head + 10])

    async def dawdle(beginning: bytes, drip: bytes) -> bytes | None:
        """Send some bytes, then single bytes at intervals. Returns what arrived until the connection was cut.

        None: a byte was sent after the cut. The system then resets the connection, and may drop an answer that was not
        read yet.
        """
        reader, writer = await asyncio.open_connection(*strict.address)
        writer.write(beginning)
        reading = asyncio.create_task(reader.read())
        for byte in drip:
            await asyncio.wait({reading}, timeout=0.3)
            if reading.done():
                break
            writer.write(bytes([byte]))
        try:
            return await reading
        except (ConnectionResetError, BrokenPipeError):
            if not drip:
                raise
            return None
        finally:
            writer.transport.abort()

    async def dawdle_all() -> list[bytes | None]:
        silent = [dawdle(beginnings[i % 6], b"") for i in range(180)]
        dripping = [dawdle(start, request[len(start) :][:60]) for start in beginnings * 2]
        good = [ask_async(strict, CHAT, body_for(CHAT, f"{i}", 20)) for i in range(20)]
        slow = asyncio.gather(*silent, *dripping)
        for reply in await asyncio.gather(*good):
            assert reply.ending == "done"
        return await slow

    for answer in asyncio.run(asyncio.wait_for(dawdle_all(), HANG_S)):
        assert answer is None or answer.startswith(b"HTTP/1.1 408 "), answer
    strict.wait_free()


# Signals


def family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def test_sigterm_lets_streams_finish_and_refuses_new_requests(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--device", "5ms") as server:
        relatives = family(server.process.pid)

        async def drain() -> tuple[Reply, Reply, Reply]:
            flowing = asyncio.Event()
            stream = asyncio.create_task(
                ask_async(server, CHAT, body_for(CHAT, "Hi", 100), on_data=lambda _: flowing.set())
            )
            await flowing.wait()
            with paused(server.worker_pid):  # the stream cannot end meanwhile
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for, "draining")
                ready = await ask_async(server, "/ready", None, method="GET")
                late = await ask_async(server, CHAT, body_for(CHAT, "Hi", 5))
            return await stream, ready, late

        stream, ready, late = asyncio.run(asyncio.wait_for(drain(), HANG_S))
        assert stream.ending == "done"
        assert (ready.status, ready.json["status"]) == (503, "draining")
        assert late.status == 503
        assert late.headers["retry-after"]
        assert server.process.wait(HANG_S) == 0
        assert not psutil.wait_procs(relatives, timeout=HANG_S)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.kept("15")
def test_a_second_signal_cuts_at_once(tiny_model: Path, number: signal.Signals) -> None:
    """The drain time is longer than the test waits."""
    with serving(str(tiny_model), *FAKE, "--device", "20ms") as server:

        async def cut() -> list[Reply]:
            flowing = asyncio.Event()
            streams = [
                asyncio.create_task(
                    ask_async(server, path, body_for(path, "Hi", ENDLESS), on_data=lambda _: flowing.set())
                )
                for path in (CHAT, MESSAGES, RESPONSES)
            ]
            await flowing.wait()
            server.process.send_signal(number)
            await asyncio.to_thread(server.wait_for, "draining")
            server.process.send_signal(number)
            return await asyncio.gather(*streams)

        for reply in asyncio.run(asyncio.wait_for(cut(), HANG_S)):
            assert reply.status in (200, 503)
            assert reply.ending == "error"
            text = json.dumps(reply.events[-1][1] if reply.status == 200 else reply.json)
            assert "shutting down" in text
        assert server.process.wait(HANG_S) == 0
