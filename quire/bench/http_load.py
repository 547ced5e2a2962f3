"""HTTP load: requests to a server on this machine, one thread each, in one process or several.

The clients share the machine with the server that they measure, so they must be cheap. Each request has a plain socket:
with 400 streams an event costs half as much CPU time as with httpcore. What arrives is noted as it is read, and parsed
by those who need it.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.errors import RequestFailed

LIMIT_S = 600.0  # between two reads
READ_BYTES = 1 << 16
EVENT = b"data: {"


class RefusedRequest(RequestFailed):
    """A response whose status is not 200."""

    def __init__(self, url: str, status: int, reason: str, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"{url}: HTTP {status} {reason}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.reason = reason
        self.headers = headers
        self.body = body


class HttpStream:
    """One request, whose response is read as it arrives. `cut` may be called from any thread at any time."""

    def __init__(self, url: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self._address = parts.hostname or "", parts.port or 80
        data = b"" if body is None else json.dumps(body).encode()
        known = {"host": parts.netloc, "connection": "close", "content-length": str(len(data)), **(headers or {})}
        if data:
            known["content-type"] = "application/json"
        lines = [f"{'POST' if data else 'GET'} {parts.path}{path} HTTP/1.1", *map(": ".join, known.items())]
        self._request = "\r\n".join([*lines, "", ""]).encode() + data
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def cut(self) -> None:
        """Close the connection, so that the server cancels the request. Reading then ends."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def reads(self) -> Iterator[bytes]:
        """Send the request and yield the body as the reads of the socket return it."""
        try:
            with socket.create_connection(self._address, LIMIT_S) as connection:
                self._begin(connection)
                with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may arrive before all is sent
                    connection.sendall(self._request)
                yield from self._body(iter(partial(connection.recv, READ_BYTES), b""))
        except OSError as error:
            raise RequestFailed(f"{self.url}: {error.strerror or error}") from None
        finally:
            with self._lock:
                self._socket = None

    def events(self) -> Iterator[dict[str, Any]]:
        """Send the request and yield the data of its server-sent events, up to [DONE], as JSON."""
        rest = b""
        for data in self.reads():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(EVENT):
                    event = json.loads(line[6:])
                    if error := event.get("error"):
                        message = error.get("message") if isinstance(error, dict) else None
                        raise RequestFailed(str(message or error))
                    yield event
        raise RequestFailed(f"{self.url} ended the stream before the answer was finished")

    def read(self) -> bytes:
        return b"".join(self.reads())

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self.is_cut:
                raise RequestFailed("the request was cancelled before it was sent")
            self._socket = connection

    def _body(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (part := next(parts, b"")):
                raise RequestFailed(f"{self.url} broke off the answer")
            data += part
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        _, status, reason = f"{first} ".split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body: Iterator[bytes] = chain(filter(None, (data,)), parts)
        if headers.get("transfer-encoding") == "chunked":
            body = _dechunked(body)
        if status != "200":
            raise RefusedRequest(self.url, int(status), reason.strip(), headers, b"".join(body))
        yield from body


def _dechunked(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Remove the frames of a chunked body. Yields once for each part that ends a chunk."""
    rest = b""
    for part in parts:
        rest += part
        chunks = []
        while (end := rest.find(b"\r\n")) >= 0:
            begin, size = end + 2, int(rest[:end], 16)
            if len(rest) < begin + size + 2:
                break
            chunks.append(rest[begin : begin + size])
            rest = rest[begin + size + 2 :]
        if data := b"".join(chunks):
            yield data


class Seen(NamedTuple):
    """What a client saw of one request. Times are those of `time.perf_counter`."""

    status: int
    start_s: float
    times_s: tuple[float, ...]  # of the reads that brought events
    end_s: float
    body: bytes

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[6:]) for line in self.body.split(b"\n") if line.startswith(EVENT)]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    @property
    def usage(self) -> dict[str, Any]:
        *_, last = (line for line in self.body.split(b"\n") if line.startswith(EVENT))
        return dict(json.loads(last[6:])["usage"])

    @property
    def num_tokens(self) -> int:
        return int(self.usage["completion_tokens"])


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Seen:
    """Send a streamed request and read all of the answer. A refusal is a result as well."""
    stream = HttpStream(url, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    times_s: list[float] = []
    parts: list[bytes] = []
    status, start_s = 200, time.perf_counter()
    try:
        for data in stream.reads():
            if EVENT in data:
                times_s.append(time.perf_counter())
            parts.append(data)
    except RefusedRequest as error:
        status, parts = error.status, [error.body]
    end_s, answer = time.perf_counter(), b"".join(parts)
    if status == 200 and not answer.endswith(b"data: [DONE]\n\n"):
        raise RequestFailed(f"{url}: a stream broke: {answer[-500:].decode(errors='replace')}")
    return Seen(status, start_s, tuple(times_s), end_s, answer)


class LoadResult(NamedTuple):
    seen: list[Seen]
    client_cpu_s: float

    @property
    def wall_s(self) -> float:
        return max(one.times_s[-1] for one in self.seen) - min(one.start_s for one in self.seen)

    @property
    def tokens_per_s(self) -> float:
        return sum(one.num_tokens for one in self.seen) / self.wall_s


def run_load(
    url: str, bodies: Sequence[dict[str, Any]], *, clients: int = 0, rate: float = 0.0, num_processes: int = 1
) -> LoadResult:
    """Send completions from processes of their own, which are forked.

    At most `clients` are open at a time; with `rate` instead, they are sent at random times, so many per second.
    """
    count = min(num_processes, clients or num_processes)
    shares = [(url, bodies[part::count], clients // count, rate / count) for part in range(count)]
    pool = multiprocessing.get_context("fork").Pool(count)
    try:
        results = pool.starmap(_run_share, shares)
    finally:  # leaving `with` would end the processes with SIGTERM, which the handler of a caller may make a deadlock
        pool.close()
        pool.join()
    return LoadResult([one for result in results for one in result.seen], sum(one.client_cpu_s for one in results))


def _run_share(url: str, bodies: Sequence[dict[str, Any]], clients: int, rate: float) -> LoadResult:
    cpu_s, random = time.process_time(), Random(str(bodies[0]))
    with ThreadPoolExecutor(clients or len(bodies)) as pool:
        answers = []
        for body in bodies:
            answers.append(pool.submit(ask, url, body))
            if rate:
                time.sleep(random.expovariate(rate))
    return LoadResult([answer.result() for answer in answers], time.process_time() - cpu_s)
