"""HTTP requests to a server on this machine, one thread each.

The clients share the machine with the server that they measure, so they must be cheap: an event costs a third of the
CPU time with `http.client` that it costs with httpcore. What arrives is noted as it is read, and parsed by those who
need it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected
from typing import Any
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
        self._target = parts.path + path
        self._data = None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json"}
        self._headers = {"connection": "close", **(headers or {}), **kind}
        self._connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=LIMIT_S)
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
        """Send the request and yield the body as it arrives: one chunk at a time, if it has chunks."""
        try:
            self._connection.connect()
            with self._lock:
                if self.is_cut:
                    raise RequestFailed("the request was cancelled before it was sent")
                self._socket = self._connection.sock
            with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may arrive before all is sent
                method = "GET" if self._data is None else "POST"
                self._connection.request(method, self._target, self._data, self._headers)
            response = self._connection.getresponse()
            if response.status != HTTPStatus.OK:
                headers = {name.lower(): value for name, value in response.getheaders()}
                raise RefusedRequest(self.url, response.status, response.reason, headers, response.read())
            with suppress(IncompleteRead):  # it was cut, or broken off: then the answer has no end
                while data := response.read1(READ_BYTES):
                    yield data
        except RemoteDisconnected:
            raise RequestFailed(f"{self.url} broke off the answer") from None
        except OSError as error:
            raise RequestFailed(f"{self.url}: {error.strerror or error}") from None
        finally:
            with self._lock:
                self._socket = None
            self._connection.close()

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
