"""Many hostile sockets, and ordinary clients that must be served at the same time."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import psutil  # type: ignore[import-untyped]

from tests.server.rig import Server, request_bytes
from tests.waiting import HANG_S, eventually, repeating

QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "ignore_eos": True}
CHAT = "/v1/chat/completions"
MB = 1_000_000


def raise_file_limit(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def first_token_s(address: tuple[str, int], request: bytes) -> float:
    """Send the request of a stream on a new connection, read all of it, and return the time to its first token."""
    begin_s = time.perf_counter()
    with socket.create_connection(address, timeout=HANG_S) as sock:
        sock.sendall(request)
        data, first_s = b"", 0.0
        while b"data: [DONE]" not in data:
            piece = sock.recv(1 << 16)
            data += piece
            assert piece, data[-300:]
            if not first_s and b"data: " in data:
                first_s = time.perf_counter() - begin_s
        assert data.startswith(b"HTTP/1.1 200"), data[:300]
        return first_s


def ask_for_ever(address: tuple[str, int], request: bytes, found: Connection) -> None:
    """Request streams one after the other. Sends the time to each first token, or the text of an error."""
    while True:
        try:
            outcome: float | str = first_token_s(address, request)
        except (OSError, AssertionError) as error:
            outcome = repr(error)[:300]
        try:
            found.send(outcome)
        except OSError:  # the reader has finished
            return


class Asker:
    """Requests short streams one after the other and measures their first tokens.

    In a process of its own: threads of the process that attacks the server would wait for each other.
    """

    def __init__(self, server: Server) -> None:
        request = request_bytes(CHAT, {**QUESTION, "stream": True}, key=server.key)
        self._found, there = Pipe(duplex=False)
        self._client = get_context("spawn").Process(target=ask_for_ever, args=(server.address, request, there))
        self._client.start()
        there.close()  # the other process has a copy
        self.num_answered = 0
        self.problems: list[str] = []

    def take(self, num_wanted: int = 1) -> list[float]:
        """Wait for `num_wanted` answers since the last call, and return the times of all answers since then."""
        found: list[float] = []
        while (len(found) < num_wanted and not self.problems) or self._found.poll():
            assert self._found.poll(HANG_S), "others are answered"
            outcome = self._found.recv()
            if isinstance(outcome, str):
                self.problems.append(outcome)
            else:
                found.append(outcome)
        self.num_answered += len(found)
        return found

    def finish(self) -> None:
        self._client.terminate()
        self._client.join(HANG_S)
        self._found.close()


@contextlib.contextmanager
def asking(server: Server) -> Iterator[Asker]:
    asker = Asker(server)
    try:
        yield asker
    finally:
        asker.finish()


@dataclass
class Crowd:
    """Sockets that are kept open. Records when the server closes each of them."""

    server: Server
    sockets: dict[socket.socket, float] = field(default_factory=dict)  # open ones, with the time of their opening
    closed_after_s: list[float] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)  # beginnings of what the server sent
    answered: set[socket.socket] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, data: bytes = b"", *, receive_bytes: int | None = None) -> socket.socket:
        """Open a socket and send as much of the data as the server takes at once."""
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(HANG_S)
        sock.connect(self.server.address)
        sock.setblocking(False)
        self.sockets[sock] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ)
        if data:
            self.send(sock, data)
        return sock

    def grow(self, count: int, make: Callable[[int], bytes], *, per_s: float) -> None:
        """Open sockets at an even rate."""
        begin = time.monotonic()
        for number in range(count):
            self.add(make(number))
            if number % 20 == 19:
                self.look(max(0.0, begin + number / per_s - time.monotonic()))

    def send(self, sock: socket.socket, data: bytes) -> int:
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._note_closed(sock)
            return 0

    def push(self, sock: socket.socket, data: bytes, limit_s: float = 5.0) -> int:
        """Send data until all of it is taken, the connection is closed, or nothing is taken for a while."""
        num_sent = 0
        deadline = time.monotonic() + limit_s
        while num_sent < len(data) and sock in self.sockets and time.monotonic() < deadline:
            if count := self.send(sock, data[num_sent : num_sent + (1 << 18)]):
                num_sent += count
                deadline = time.monotonic() + limit_s
            else:
                self.look(0.001)
        return num_sent

    def look(self, for_s: float = 0.0) -> None:
        """Receive what the server has sent, and record the connections that it has closed."""
        deadline = time.monotonic() + for_s
        while True:
            for key, _ in self._selector.select(max(0.0, min(0.05, deadline - time.monotonic()))):
                self._read(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() >= deadline:
                return

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.received.append(data[:100])
            self.answered.add(sock)
        else:
            self._note_closed(sock)

    def _note_closed(self, sock: socket.socket) -> None:
        self.closed_after_s.append(time.monotonic() - self.sockets.pop(sock))
        self._selector.unregister(sock)
        sock.close()

    def look_until(self, condition: Callable[[Crowd], object], what: str) -> None:
        def is_so() -> bool:
            self.look(0.05)
            return bool(condition(self))

        eventually(is_so, what)

    @property
    def num_answered(self) -> int:
        return len(self.answered)

    def wait_closed(self, limit_s: float, each: Callable[[], object] | None = None) -> None:
        """Wait until the server has closed all of them, or until the limit. Calls `each` every 50 ms."""
        deadline = time.monotonic() + limit_s
        while self.sockets and time.monotonic() < deadline:
            self.look(0.05)
            if each is not None:
                each()

    def leave(self) -> None:
        for sock in list(self.sockets):
            sock.close()
        self.sockets.clear()
        self._selector.close()


@contextlib.contextmanager
def crowd_at(server: Server) -> Iterator[Crowd]:
    crowd = Crowd(server)
    try:
        yield crowd
    finally:
        crowd.leave()


class Memory:
    """The peak of the resident memory of processes, relative to the beginning."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._peak_bytes = 0
        self.look()
        self._before_bytes = self._peak_bytes

    def look(self) -> None:
        now_bytes = sum(int(process.memory_info().rss) for process in self._processes)
        self._peak_bytes = max(self._peak_bytes, now_bytes)

    @property
    def growth_mb(self) -> float:
        return (self._peak_bytes - self._before_bytes) / MB


@contextlib.contextmanager
def memory_of(*pids: int) -> Iterator[Memory]:
    memory = Memory(pids)
    with repeating(memory.look, pause_s=0.02):
        yield memory
