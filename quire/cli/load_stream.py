"""A streamed completion for load generators: cheap, and any thread can cancel it.

`quire bench` holds hundreds of streams and shares the machine with the server it measures. This
module uses http.client: with 400 streams an event costs 70 us of CPU time, and 140 us with httpcore, whose shared
connection pool also failed under that load ("Bad file descriptor").
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from quire.cli.server_client import STREAM_READ_S, ServerClient, ServerError, printable
from quire.errors import RequestFailed


class LoadStream:
    """One request to /v1/completions. `cancel` may be called from any thread at any time."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Close the connection, so that the server cancels the request. `chunks` then raises."""
        with self._lock:
            self.is_cancelled = True
            if self._sock is not None:
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send the request and yield its chunks as they arrive, without [DONE]."""
        try:
            with self._open(body) as response:
                for data in self._server.read_events(self._read(response)):
                    if data.startswith("[DONE]"):
                        return
                    yield self._checked(self._server.parse(data))
            raise RequestFailed(f"{self._server.url} ended the stream before the answer was finished")
        finally:
            with self._lock:
                self._sock = None

    def _checked(self, chunk: Any) -> dict[str, Any]:
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices", []), list):
            raise self._server.malformed("a malformed chunk", chunk)
        if error := chunk.get("error"):
            raise RequestFailed(
                printable(str(error.get("message") or error) if isinstance(error, dict) else str(error))
            )
        return chunk

    @contextmanager
    def _open(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self._server.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._server.timeouts.connect_s)
        try:
            with self._errors("does not answer"):
                connection.connect()
                self._connected(connection.sock)
                connection.sock.settimeout(STREAM_READ_S)
                data, headers = json.dumps(body).encode(), self._server.headers(has_body=True)
                with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may arrive before all is sent
                    connection.request("POST", f"{parts.path}/v1/completions", data, headers)
                response = connection.getresponse()
            with response:
                if response.status != 200:
                    with self._errors("broke off the answer"):
                        content = response.read()
                    known = {name.lower(): value for name, value in response.getheaders()}
                    raise self._server.refusal(response.status, response.reason, known, content)
                yield response
        finally:
            connection.close()

    def _connected(self, sock: socket.socket) -> None:
        with self._lock:
            if self.is_cancelled:
                raise RequestFailed("the request was cancelled before it was sent")
            self._sock = sock

    def _read(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            with self._errors("broke off the answer"):
                data = response.read1(65536)
            if not data:
                return
            yield data

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ServerError(f"{self._server.url} {what}: it took too long") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerError(f"{self._server.url} {what}: {printable(text)}") from None
