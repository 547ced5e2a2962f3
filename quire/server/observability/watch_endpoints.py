"""Endpoints of the live view: `/v1/watch`, `/v1/watch/blocks`, `/v1/watch/held`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequest
from quire.server.auth import Key
from quire.server.decoding import convert
from quire.server.errors import ApiError, Kind
from quire.server.observability.snapshot import (
    HeldAnswer,
    blocks_answer,
    is_shown,
)
from quire.server.observability.watch import Watcher
from quire.server.request_context import RequestContext

MAX_VIEWED = 4096  # blocks per request of /v1/watch/blocks


Q = TypeVar("Q", bound=msgspec.Struct)


class WatchQuery(msgspec.Struct, frozen=True):
    interval_ms: Annotated[int, Meta(ge=100, le=60_000, description="Time between snapshots.")] = 500
    once: Annotated[bool, Meta(description="Return one snapshot as JSON instead of a stream.")] = False


class BlocksQuery(msgspec.Struct, frozen=True):
    first: Annotated[int, Meta(ge=1, le=2**31, description="The first block, counted from 1.")]
    count: Annotated[int, Meta(ge=1, le=MAX_VIEWED)] = 1
    model: Annotated[str | None, Meta(description="By default the first model.")] = None


class HeldQuery(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(max_length=64, description="The x-request-id of the request's response.")]
    model: Annotated[str | None, Meta(description="By default the first model.")] = None


async def watch(context: RequestContext) -> Response:
    query = parse_query(context, WatchQuery)
    if context.request.method == "HEAD":
        return Response(None, 200, context.headers, "text/event-stream; charset=utf-8")
    watcher = context.watch.enter(query.interval_ms / 1000, context.key)
    if not query.once:
        return WatchStream(watcher, context.key, context.headers)
    try:
        return Response(await watcher.once(context.key), 200, context.headers, "application/json")
    finally:
        watcher.leave()


async def watch_blocks(context: RequestContext) -> Response:
    """List the requests that hold these blocks. The page calls it on hover."""
    query = parse_query(context, BlocksQuery)
    model = context.models.find(query.model)
    found = None
    if (service := model.service) is not None:
        async with service.question(context.key.name):
            found = await service.client.view_blocks(query.first, query.count)
    if found is None or service is None:
        raise ApiError(Kind.UNAVAILABLE, f"{model.name} is not loaded", retry_after_s=5.0, reason="loading")
    return context.json(blocks_answer(model.name, found, tuple(service.active_requests), context.key))


async def watch_held(context: RequestContext) -> Response:
    """List the blocks that a request holds. The page calls it on hover."""
    query = parse_query(context, HeldQuery)
    model = context.models.find(query.model)
    active_requests = () if model.service is None else model.service.active_requests
    active = next((one for one in active_requests if one.request_id == query.id and is_shown(one, context.key)), None)
    if active is None or model.service is None:
        raise ApiError(Kind.NOT_FOUND, f"id = {query.id!r:.80} is not an open request of this key", param="id")
    ids = tuple(request_id for generation in active.generations for request_id in generation.request_ids)
    async with model.service.question(context.key.name):
        held = await model.service.client.find_held(ids)
    return context.json(HeldAnswer(model.name, active.request_id, held))


def parse_query(context: RequestContext, kind: type[Q]) -> Q:
    """Parse the URL's query parameters. Unknown ones are ignored."""
    given = dict(context.request.query_params)
    try:
        return convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        if not name:
            raise InvalidRequest(what.replace("Object missing required field", "the query lacks")) from None
        raise ApiError(Kind.INVALID, f"{name} = {given.get(name)!r:.80}: {what}", param=name) from None


class WatchStream(Response):
    """Snapshots as server-sent events until the client disconnects. Nothing is queued for a slow reader."""

    def __init__(self, watcher: Watcher, key: Key, headers: Mapping[str, str]) -> None:
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._watcher = watcher
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        writing = asyncio.create_task(self._write_all(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watcher.leave()
            for task in (writing, leaving):
                task.cancel()
            await asyncio.wait({writing, leaving})

    async def _write_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while True:
            frame = b"data: " + await self._watcher.next(self._key) + b"\n\n"
            await send({"type": "http.response.body", "body": frame, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
