"""Runs a real `quire serve` in its own process and talks to it over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S, eventually

FAKE = ("--backend", "fake", "--num-blocks", "400")
# Long limits: on a busy machine, the server must not refuse, cut or kill what is only slow. A test of a limit sets it.
PATIENCE = {
    f"QUIRE_{name}": "600"
    for name in ("QUEUE_TIMEOUT", "HANG_LIMIT", "HEADER_TIMEOUT", "BODY_TIMEOUT", "SLOW_CLIENT_TIMEOUT", "DRAIN")
}
# Test files run in parallel, one per core: threads that share a core spin while they wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "QUIRE_THREADS": "1"}
_opened: list[socket.socket] = []


def close_sockets() -> None:
    """Close the sockets that a test left open, so that a failing test does not make the next one fail."""
    while _opened:
        _opened.pop().close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    stdout: list[str]
    stderr: list[str]
    key: str | None = None
    state_dir: str = ""
    _readers: list[threading.Thread] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
        timeout_s: float = HANG_S,
    ) -> Answer:
        connection = HTTPConnection(*self.address, timeout=timeout_s)
        try:
            sent = {"content-type": "application/json", **(headers or {})}
            if self.key is not None and "authorization" not in sent and "x-api-key" not in sent:
                sent["authorization"] = f"Bearer {self.key}"
            payload = data if data is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, sent)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Answer:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: object = None, **more: Any) -> Answer:
        return self.ask("POST", path, body, **more)

    def chat(self, text: str = "Hi", **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True, **fields}
        return self.post("/v1/chat/completions", body)

    def stats(self) -> Any:
        return self.get("/v1/cache/stats").json

    def stats_of(self, model: str) -> Any:
        return self.get(f"/v1/cache/stats?model={model}").json

    def raw(self, timeout_s: float = HANG_S) -> socket.socket:
        """Open a connection. It is closed at the end of the test if the test does not close it."""
        sock = socket.create_connection(self.address, timeout=timeout_s)
        _opened.append(sock)
        return sock

    def send_request(
        self, body: object, path: str = "/v1/chat/completions", *, sock: socket.socket | None = None
    ) -> socket.socket:
        """Write a request and return the socket without reading."""
        data = json.dumps(body).encode()
        sock = sock or self.raw()
        key = "" if self.key is None else f"authorization: Bearer {self.key}\r\n"
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{key}content-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def begin(self, body: object, path: str = "/v1/chat/completions") -> socket.socket:
        """Write the request of a stream and wait for the first bytes of the response."""
        sock = self.send_request(body, path)
        head = sock.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL)
        assert head == b"HTTP/1.1 200", head + sock.recv(65536)
        return sock

    def begins(self, body: object, path: str = "/v1/chat/completions") -> bool:
        """Like `begin`, for a server that may refuse the request because the machine is busy."""
        return self.send_request(body, path).recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL) == b"HTTP/1.1 200"

    def wait_free(self) -> Any:
        """Wait until no block is held and nothing waits. Returns the last stats."""

        def free_stats() -> Any:
            stats = self.stats()
            return None if stats["num_in_use"] or stats["num_running"] or stats["num_waiting"] else stats

        return eventually(free_stats, "no block is held and nothing waits")

    def wait_for(self, pattern: str) -> str:
        """Wait for a line of stdout or stderr that matches, and return it."""

        def line() -> str | None:
            return next((line for line in [*self.stdout, *self.stderr] if re.search(pattern, line)), None)

        try:
            return eventually(line, pattern) or ""
        except AssertionError:
            raise AssertionError(f"no line matches {pattern!r}:\n{self.log}") from None

    @property
    def log(self) -> str:
        return "".join([*self.stdout, *self.stderr])

    @property
    def worker_pid(self) -> int:
        (pid,) = [child for child in children(self.process.pid) if "quire.engine.worker.worker" in command_line(child)]
        return pid

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        found = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for text in found for child in text.split()]
    return []


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def spawn(*options: str, env: dict[str, str] | None = None) -> Server:
    """Start a server without waiting for it."""
    command = [sys.executable, "-m", "quire", "serve", *options]
    if "--port" not in options and "QUIRE_PORT" not in (env or {}):
        command += ["--port", "0"]
    state = tempfile.mkdtemp(prefix="quire-state-")  # not that of whoever runs the tests
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, **PATIENCE, "QUIRE_STATE_DIR": state, "PYTHONUNBUFFERED": "1", **(env or {})},
    )
    server = Server(process, "", [], [], state_dir=state)
    for stream, lines in ((process.stdout, server.stdout), (process.stderr, server.stderr)):
        thread = threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(stream), daemon=True)
        thread.start()
        server._readers.append(thread)
    return server


def hooked(folder: Path, code: str, **variables: str) -> dict[str, str]:
    """The environment of a server whose Python processes run this code at their start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def wait_ready(server: Server) -> None:
    def url() -> str | None:
        for line in server.stdout:
            if found := re.search(r" at (http://\S+)", line):
                return found[1]
        assert server.process.poll() is None, f"it ended with {server.process.returncode}:\n{server.log}"
        return None

    server.url = eventually(url, "the server is ready") or ""


def put_away(server: Server) -> None:
    """Kill a server that is still running, and close its pipes."""
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait(HANG_S)
    shutil.rmtree(server.state_dir, ignore_errors=True)
    for thread in server._readers:
        thread.join(60)
    for stream in (server.process.stdout, server.process.stderr):
        if stream is not None:
            stream.close()


@contextlib.contextmanager
def serving(*options: str, key: str | None = None, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server. With QUIRE_TEST_REPLICAS in the environment, a cluster with so many replicas instead."""
    if num_replicas := os.environ.get("QUIRE_TEST_REPLICAS"):
        from tests.scale.rig import deployed, settings_of

        with deployed(settings_of(options), replicas=int(num_replicas), key=key) as cluster:
            yield cluster
        return
    server = spawn(*options, env=env)
    try:
        wait_ready(server)
        server.key = key
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(5)
        if server.process.poll() is None:
            server.process.terminate()  # a request is still open: the second signal ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(60)
        put_away(server)


def events(data: bytes) -> list[tuple[str | None, str]]:
    """Return (event, data) of a complete SSE body, without comments."""
    found: list[tuple[str | None, str]] = []
    for block in data.decode().split("\n\n"):
        name, lines = None, []
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
        if lines:
            found.append((name, "\n".join(lines)))
    return found


def status_of(answer: bytes) -> int:
    """Return the status in the first line of a response; 0 if there is none."""
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Reply:
    """A complete response, or the part of it that arrived."""

    status: int  # 0: none
    headers: dict[str, str]
    body: bytes
    is_whole: bool  # the body ended as its framing says

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """Return (event, data as JSON) of server-sent events. Fails on an incomplete frame."""
        *frames, rest = self.body.split(b"\n\n")
        assert not rest, f"half a frame: {rest[-200:]!r}"
        found: list[tuple[str | None, Any]] = []
        for frame in frames:
            if frame.startswith(b":"):
                continue
            shape = re.fullmatch(rb"(?:event: ([\w.]+)\n)?data: (.+)", frame)
            assert shape is not None, frame
            name = shape[1].decode() if shape[1] else None
            found.append((name, "[DONE]" if shape[2] == b"[DONE]" else json.loads(shape[2])))
        return found

    @property
    def ending(self) -> str:
        """How the response ended: done, error or broken."""
        if not self.is_whole:
            return "broken"
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return "done" if self.status == 200 else "error"
        *_, (name, last) = self.events or [(None, None)]
        if last == "[DONE]" or name in ("message_stop", "response.completed", "response.incomplete"):
            return "done"
        return "error" if last is not None and ("error" in last or name == "response.failed") else "broken"


def request_bytes(path: str, body: object, *, key: str | None = None, method: str = "POST") -> bytes:
    data = json.dumps(body).encode()
    who = "" if key is None else f"authorization: Bearer {key}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{who}content-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def read_reply(reader: asyncio.StreamReader, on_data: Callable[[bytes], object] = len) -> Reply:
    """Read one response. `on_data` gets each piece of the body as it arrives."""
    status, headers, body = 0, {}, b""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status = status_of(head)
        lines = [line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        if headers.get("transfer-encoding") != "chunked":
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            return Reply(status, headers, body, True)
        while size := int(await reader.readuntil(b"\r\n"), 16):
            piece = await reader.readexactly(size + 2)
            body += piece[:-2]
            on_data(piece[:-2])
        await reader.readexactly(2)
        return Reply(status, headers, body, True)
    except (asyncio.IncompleteReadError, ConnectionError):
        return Reply(status, headers, body, False)


async def ask_async(
    server: Server, path: str, body: object, *, on_data: Callable[[bytes], object] = len, method: str = "POST"
) -> Reply:
    """Send a request on a new connection and read the response."""
    try:
        reader, writer = await asyncio.open_connection(*server.address, limit=1 << 24)
    except ConnectionError:
        return Reply(0, {}, b"", False)
    try:
        writer.write(request_bytes(path, body, key=server.key, method=method))
        return await read_reply(reader, on_data)
    finally:
        writer.transport.abort()
