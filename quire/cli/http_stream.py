"""HTTP requests whose response is read as it arrives, for `ServerClient` and for the load generators in `benchmarks/`.

Load generators share the machine with the server that they measure. `http.client` takes half the CPU time of httpcore
and httpx for an event, and 18 ms to import instead of 28 and 130. It is imported with the first request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from quire.errors import QuireError, RequestFailed

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection, HTTPResponse
    from socket import socket

MAX_DOCUMENT_BYTES = 4 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE_CHARS = 1000
STREAM_READ_S = 600.0  # between two reads of a response to a POST; the server's queue may be long
READ_BYTES = 1 << 16
EVENT = b"data: {"


class ServerError(QuireError):
    """The server cannot be used, or its response does not follow the API. The message names its URL."""


class ServerNotFound(ServerError):
    """No server at this address, or a server that is not quire."""


class TooLarge(ServerError):
    """A response has more bytes than the caller takes."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    connect_s: float
    read_s: float


LOAD = Timeouts(STREAM_READ_S, STREAM_READ_S)


class RefusedRequest(RequestFailed):
    """A response whose status is not 200."""

    def __init__(self, url: str, status: int, reason: str, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"{url}: HTTP {status} {reason}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.reason = reason
        self.headers = headers
        self.body = body


class HttpStream:
    """One request on a connection of its own, whose response is read as it arrives.

    `cut` may be called from any thread at any time. Proxies of the environment are not used: a server on this machine
    or in the local network is not reachable through them.
    """

    def __init__(
        self,
        url: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeouts: Timeouts = LOAD,
        is_own: bool = False,
    ) -> None:
        """`body`: JSON as bytes, or the value. `is_own`: a server whose certificate may name another host."""
        parts = urlsplit(url)
        self.url = url
        self.is_cut = False
        self._target = parts.path + path
        self._data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json"}
        self._headers = {"connection": "close", **(headers or {}), **kind}
        self._read_s = timeouts.read_s
        self._connection = _connection(parts, timeouts.connect_s, is_own=is_own)
        self._lock = threading.Lock()
        self._socket: socket | None = None

    def cut(self) -> None:
        """Close the connection, so that the server cancels the request. Reading then ends."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                from socket import SHUT_RDWR

                with suppress(OSError):
                    self._socket.shutdown(SHUT_RDWR)

    def reads(self) -> Iterator[bytes]:
        """Send the request and yield the body as it arrives: one chunk at a time, if it has chunks."""
        from http.client import HTTPException, IncompleteRead

        response: HTTPResponse | None = None
        try:
            response = self._send()
            while data := response.read1(READ_BYTES):
                yield data
            if response.length:
                raise IncompleteRead(b"", response.length)
        except (OSError, HTTPException, UnicodeError) as error:
            if self.is_cut:
                return
            if response is None:
                raise ServerNotFound(f"{self.url} does not answer: {_reason(error)}") from None
            raise ServerError(f"{self.url} broke off the answer: {_reason(error)}") from None
        finally:
            with self._lock:
                self._socket = None
            self._connection.close()
            if response is not None:
                response.close()  # it has the socket of a connection that is not kept

    def read(self, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        found = bytearray()
        for data in self.reads():
            found += data
            if len(found) > max_bytes:
                raise TooLarge(f"{self.url} sent more than {max_bytes} bytes")
        return bytes(found)

    def events(self) -> Iterator[dict[str, Any]]:
        """Send the request and yield the data of its server-sent events, up to [DONE]: a JSON object on one line."""
        rest = b""
        for data in self.reads():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_EVENT_BYTES:
                raise ServerError(f"{self.url} sent an event of more than {MAX_EVENT_BYTES} bytes")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(EVENT):
                    event = parse(self.url, line[6:])
                    if error := event.get("error"):
                        message = error.get("message") if isinstance(error, dict) else error
                        raise RequestFailed(printable(str(message or error)))
                    yield event
        raise RequestFailed(f"{self.url} ended the stream before the answer was finished")

    def _send(self) -> HTTPResponse:
        self._connection.connect()
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError
            self._socket = self._connection.sock
        self._connection.sock.settimeout(self._read_s)
        with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may arrive before all is sent
            method = "GET" if self._data is None else "POST"
            self._connection.request(method, self._target, self._data, self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            headers = {name.lower(): value for name, value in response.getheaders()}
            body = response.read(MAX_DOCUMENT_BYTES)
            raise RefusedRequest(self.url, response.status, response.reason, headers, body)
        return response


def _connection(parts: SplitResult, limit_s: float, *, is_own: bool) -> HTTPConnection:
    from http.client import HTTPConnection, HTTPSConnection

    host = parts.hostname or ""
    if parts.scheme != "https":
        return HTTPConnection(host, parts.port or 80, timeout=limit_s)
    return HTTPSConnection(host, parts.port or 443, timeout=limit_s, context=_ssl_context(is_own=is_own))


@cache
def _ssl_context(*, is_own: bool) -> ssl.SSLContext:
    import ssl

    found = ssl.create_default_context()
    if is_own:
        found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
    return found


def _reason(error: Exception) -> str:
    """The message of an error, without error numbers and class names."""
    from http.client import IncompleteRead

    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, IncompleteRead):
        return "the connection ended"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error)) or type(error).__name__


def value_of(data: bytes) -> Any:
    """The value of a JSON document; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def parse(url: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise malformed(url, "text that is not JSON", data.decode(errors="replace")) from None


def malformed(url: str, what: str, found: object) -> ServerError:
    """The error for a response that does not follow the API."""
    try:
        shown = repr(found)[:200]
    except RecursionError:
        shown = "something nested very deeply"
    return ServerError(f"{url} sent {what}: {printable(shown)}")


def printable(text: str) -> str:
    """A server's text, safe to print: cut to MAX_MESSAGE_CHARS, control characters replaced by blanks."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_MESSAGE_CHARS])
