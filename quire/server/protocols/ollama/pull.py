"""`POST /api/pull`, admin only: downloads a model to this machine's disk and reports the progress.

A downloaded model is not served until the server is restarted with it: the models of a server are fixed at its start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.errors import ApiError, Kind
from quire.server.protocols.ollama.catalog import given_name
from quire.server.protocols.ollama.parsing import DEFAULT_TAG, OLLAMA
from quire.server.protocols.ollama.types import PullProgress, PullRequest
from quire.weights.hub import find_known, is_path, pull
from quire.weights.huggingface import HubName

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from quire.server.request_context import RequestContext

_encode = msgspec.json.Encoder().encode
_is_pulling = threading.Lock()  # one at a time: parallel downloads would share bandwidth and disk


async def pull_model(context: RequestContext) -> Response:
    """Download a model. If the client disconnects, the download continues, and a later pull finds the files."""
    body = await context.body(PullRequest)
    given = given_name(body.model, body.name)
    name = given.removesuffix(DEFAULT_TAG)
    is_streaming = body.stream is not False
    if {given, name} & {*context.models.names}:
        last = PullProgress(status="success")
        return Lines(context.headers, _one(last)) if is_streaming else context.json(last)
    if find_known(name) is None and (is_path(name) or HubName.parse(name) is None):
        text = f"model = {given!r:.200} is neither a known model name nor an org/name of the hub"
        raise ApiError(Kind.NO_MODEL, text, param="model")
    if not _is_pulling.acquire(blocking=False):
        text = "another model is being downloaded: only one download runs at a time"
        raise ApiError(Kind.OVERLOADED, text, retry_after_s=10.0, reason="pulling")
    pulling = Pulling(name)
    if is_streaming:
        return Lines(context.headers, pulling.lines())
    progress = [one async for one in pulling.progress()]
    return context.json(progress[-1])


class Pulling:
    """One download in a daemon thread."""

    def __init__(self, name: str) -> None:
        """The caller holds the lock; the thread releases it."""
        self._name = name
        self._known = find_known(name)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[PullProgress | QuireError | None] = asyncio.Queue()
        self._last = ("", -1)
        threading.Thread(target=self._run, name=f"pull {name}", daemon=True).start()

    async def progress(self) -> AsyncIterator[PullProgress]:
        yield PullProgress(status="pulling manifest")
        while (update := await self._queue.get()) is not None:
            if isinstance(update, QuireError):
                raise ApiError(Kind.FAILED, f"pull: {update}", reason="download_failed")
            yield update
        note = f"the model is on this machine's disk; restart the server with it to serve it: quire serve {self._name}"
        yield PullProgress(status="success", note=note)

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            async for one in self.progress():
                yield _encode(one) + b"\n"
        except ApiError as error:
            yield OLLAMA.event(error, "")

    def _run(self) -> None:
        try:
            # With a progress callback, the hub's library would draw bars on this process's terminal.
            pull(self._name, self._take if self._known is not None else None)
            self._put(None)
        except QuireError as error:
            self._put(error)
        except Exception as error:
            self._put(QuireError(f"{type(error).__name__}: {error}"))
        finally:
            _is_pulling.release()

    def _take(self, what: str, num_done: int, num_bytes: int) -> None:
        """Called for every megabyte; puts one update per percent."""
        step = what, 100 * num_done // max(num_bytes, 1)
        if step == self._last:
            return
        self._last = step
        digest: str | UnsetType = UNSET if self._known is None else f"sha256:{self._known.sha256}"
        self._put(PullProgress(status=f"{what} {self._name}", digest=digest, total=num_bytes, completed=num_done))

    def _put(self, update: PullProgress | QuireError | None) -> None:
        with suppress(RuntimeError):  # the server has stopped meanwhile
            self._loop.call_soon_threadsafe(self._queue.put_nowait, update)


class Lines(Response):
    """A stream of JSON lines that is not a generation."""

    def __init__(self, headers: Mapping[str, str], lines: AsyncIterator[bytes]) -> None:
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, OLLAMA.stream_type)
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # writing to a disconnected client does nothing
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _one(last: PullProgress) -> AsyncIterator[bytes]:
    yield _encode(last) + b"\n"
