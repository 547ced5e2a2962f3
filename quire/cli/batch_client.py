"""Sends the requests of a batch to a server, each in a thread that keeps its connection."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

from quire.batch.lines import BatchRequest
from quire.batch.results import Reply
from quire.batch.runner import ConnectionLost
from quire.cli.server_client import printable
from quire.version import __version__

CONNECT_S = 10.0
READ_LIMIT_S = 3600.0  # a request of low priority may wait long; a server sends nothing until it answers
MAX_REPLY_BYTES = 256 << 20
RETRIED = (429, 502, 503, 504, 529)


class BatchClient:
    """Sends requests in threads, because `http.client` blocks. `abort` ends requests that still wait."""

    def __init__(self, url: str, api_key: str | None, max_in_flight: int) -> None:
        self._url = url
        self._parts = urlsplit(url)
        self._headers = {"content-type": "application/json", "user-agent": f"quire/{__version__}"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(max_in_flight, "quire-batch")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    async def send(self, request: BatchRequest) -> Reply:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._send, request)

    def abort(self) -> None:
        """End requests that still wait for an answer."""
        self._is_closed = True
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._threads.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()

    def _send(self, request: BatchRequest) -> Reply:
        is_kept = getattr(self._own, "connection", None) is not None
        try:
            return self._exchange(request.url, request.body)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if is_kept and isinstance(error, ConnectionError | http.client.RemoteDisconnected) and not self._is_closed:
                return self._again(request.url, request.body)  # the server closed an idle connection
            raise self._lost(error) from None

    def _again(self, path: str, data: bytes) -> Reply:
        try:
            return self._exchange(path, data)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise self._lost(error) from None

    def _exchange(self, path: str, data: bytes) -> Reply:
        connection = self._connection()
        with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse before it has read the body
            connection.request("POST", self._parts.path + path, data, self._headers)
        response = connection.getresponse()
        body = response.read(MAX_REPLY_BYTES + 1)
        if len(body) > MAX_REPLY_BYTES:
            self._drop()
            return _reply(response, b"more than %d bytes" % MAX_REPLY_BYTES)
        if response.length:  # `read` returns what came before a connection ended
            raise http.client.IncompleteRead(body, response.length)
        if response.will_close:
            self._drop()
        return _reply(response, body)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is not None:
            return found
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)
        connection.connect()
        connection.sock.settimeout(READ_LIMIT_S)
        with self._lock:
            if self._is_closed:
                connection.close()
                raise ConnectionAbortedError("the client was closed")
            self._open.add(connection)
        self._own.connection = connection
        return connection

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is not None:
            self._own.connection = None
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _lost(self, error: Exception) -> ConnectionLost:
        reason = "timeout" if isinstance(error, TimeoutError) else printable(str(error)) or type(error).__name__
        return ConnectionLost(f"{self._url} did not answer: {reason}")


def _reply(response: http.client.HTTPResponse, body: bytes) -> Reply:
    """A body that is not JSON, such as a proxy's error page, is wrapped in an error in OpenAI's format."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        text = printable(body[:200].decode("utf-8", "replace")) or response.reason
        error = {"message": f"not JSON: {text}", "type": "server_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        status = response.status if response.status >= 400 else 502
    else:
        status = response.status
    after = response.headers.get("retry-after", "")
    may_retry = response.status in RETRIED and response.headers.get("x-should-retry") != "false"
    return Reply(
        status=status,
        request_id=printable(response.headers.get("x-request-id", "")),
        body=body,
        retry_after_s=min(float(after), READ_LIMIT_S) if after.isdecimal() else None,
        may_retry=may_retry,
    )
