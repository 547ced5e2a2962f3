"""Endpoints for operators: models, requests in progress, health, metrics and the live view.

An admin sees all requests, other keys their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from prometheus_client import generate_latest
from starlette.responses import Response

from quire.engine.composition import Scheduling
from quire.engine.model_manager import ModelState
from quire.engine.worker.kv_events import KvEventsStatus
from quire.errors import InvalidRequest, QuireError
from quire.server.errors import SERVER_SENT_EVENTS, ApiError, Kind
from quire.server.limits import Key
from quire.server.metrics import CONTENT_TYPE
from quire.server.models import ActiveRequest, Model, Models, ModelService
from quire.server.request_context import RequestContext
from quire.server.watch import HeldAnswer, Watcher, is_shown
from quire.version import __version__


class PinRequest(msgspec.Struct, frozen=True):
    model: str


class LoadRequest(PinRequest, frozen=True):
    wait: bool = True  # until it is loaded or unloaded; false: only start


class UnloadRequest(LoadRequest, frozen=True):
    force: bool = False  # end its running requests with an error


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: str  # unloaded, loading, ready, unloading, failed
    num_bytes: int  # weights and KV cache; weights only if not loaded
    is_pinned: bool
    max_model_len: int | None  # limit of prompt and answer together, in tokens; None: not read yet
    full_model_len: int | None  # max_model_len if the KV cache had enough memory


async def load(context: RequestContext) -> Response:
    body = await context.body(LoadRequest)
    model = context.models.find(body.model)
    loading = context.models.begin(context.models.load(model))
    await (context.wait_for(loading) if body.wait else asyncio.sleep(0))
    return context.json(model_status(model))


async def unload(context: RequestContext) -> Response:
    """Unload a model. Requests for it that arrive meanwhile wait, and load it again."""
    body = await context.body(UnloadRequest)
    model = context.models.find(body.model)
    if model.is_pinned:
        raise InvalidRequest(f"model = {model.name!r} is pinned: unpin it first")
    unloading = context.models.begin(context.models.manager.unload(model, is_forced=body.force))
    await (context.wait_for(unloading) if body.wait else asyncio.sleep(0))
    return context.json(model_status(model))


async def pin(context: RequestContext, *, is_pinned: bool = True) -> Response:
    """Pin a model: it is not unloaded when another needs memory. Loads nothing. Or unpin it."""
    model = context.models.find((await context.body(PinRequest)).model)
    change = context.models.manager.pin if is_pinned else context.models.manager.unpin
    change(model)
    return context.json(model_status(model))


def model_status(model: Model) -> ModelStatus:
    return ModelStatus(
        model=model.name,
        state=model.state.value,
        num_bytes=model.size_bytes,
        is_pinned=model.is_pinned,
        max_model_len=model.max_model_len,
        full_model_len=model.full_context,
    )


log = logging.getLogger(__name__)


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request in progress."""

    id: Annotated[str, Meta(description="The x-request-id header of its response.")]
    model: str
    key: Annotated[str, Meta(description="The name of its API key.")]
    endpoint: str
    state: Annotated[
        Literal["loading", "waiting", "running"],
        Meta(description="loading: its model is not in memory yet. A preempted request counts as running."),
    ]
    priority: Annotated[str, Meta(description="high, normal or low.")]
    is_streaming: bool
    age_s: Annotated[float, Meta(description="Seconds since it arrived.")]
    num_samples: Annotated[int, Meta(description="Number of answers: n times the number of prompts.")]
    max_tokens: Annotated[int | None, Meta(description="The limit of each answer; null: the end of the context.")]
    prompt_tokens: Annotated[int | None, Meta(description="Tokens of all prompts; null: not tokenized yet.")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens found in the cache.")]
    completion_tokens: Annotated[int, Meta(description="Tokens generated so far, of all answers together.")]


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in progress, oldest first."""

    object: Literal["list"] = "list"
    data: list[RequestView]


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    cancelled: Annotated[
        int, Meta(description="Number of cancelled requests. Several may have the same id: clients choose ids.")
    ]


async def list_requests(context: RequestContext) -> Response:
    found = sorted(_visible(context), key=lambda one: one.caller.arrived_s)
    return context.json(RequestList(data=[_view(one) for one in found]))


async def cancel_request(context: RequestContext) -> Response:
    """End a request. Its client gets an error, and its memory is freed before the next step."""
    request_id = str(context.request.path_params["request_id"])
    found = [one for one in _visible(context) if one.caller.request_id == request_id]
    if not found:
        whose = "" if context.key.is_admin else f" of the key {context.key.name!r}"
        text = f"id = {request_id!r:.80} is not a request in progress{whose}; GET /v1/requests lists them"
        raise ApiError(Kind.NOT_FOUND, text, param="id", reason="request_not_found")
    by = "by an admin" if context.key.is_admin else f"with the key {context.key.name!r}"
    for one in found:
        log.warning("%s of key %s was cancelled with the key %s", request_id, one.caller.key.name, context.key.name)
        one.fail(ApiError(Kind.CANCELLED, f"the request was cancelled {by}"))
    return context.json(CancelledRequest(id=request_id, cancelled=len(found)))


def _visible(context: RequestContext) -> list[ActiveRequest]:
    return [one for one in context.models.requests if is_shown(one, context.key)]


def _view(one: ActiveRequest) -> RequestView:
    state: Literal["loading", "waiting", "running"] = "running" if one.is_started else "waiting"
    if not one.requests and one.served_by.state is not ModelState.READY:
        state = "loading"
    usage = one.usage
    return RequestView(
        id=one.caller.request_id,
        model=one.model,
        key=one.caller.key.name,
        endpoint=one.caller.endpoint,
        state=state,
        priority=one.priority.name.lower(),
        is_streaming=one.request.is_streaming,
        age_s=round(time.monotonic() - one.caller.arrived_s, 2),
        num_samples=one.request.params.n * len(one.request.prompts),
        max_tokens=one.requests[0].sampling.max_tokens if one.requests else one.request.params.max_tokens,
        prompt_tokens=usage.prompt_tokens if one.requests else None,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


RENDERING_REST = 4.0  # time between two texts of metrics, per time to make one: they get a fifth of the event loop
STATS_S = 2.0  # a worker in a long step answers later; the last known figures are used then


class Health(msgspec.Struct):
    status: str  # ok, loading, restarting, stuck, draining
    server: str = "quire"
    version: str = __version__


class Version(msgspec.Struct):
    version: str
    model: str
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    scheduling: Scheduling | None = None  # None: no worker is running
    kv_events: KvEventsStatus | None = None  # None: the model does not announce its cache


def status(models: Models) -> str:
    """Return the status of the whole server.

    "ok": every loaded model makes progress. A model that is unloaded or loading does not change the status.
    """
    if not models.has_started:
        return "loading"
    found = {_status(model.service) for model in models if model.service is not None}
    return next((bad for bad in ("stuck", "restarting") if bad in found), "ok")


def _status(service: ModelService) -> str:
    if service.client.facts is None:
        return "restarting"
    return "ok" if service.client.is_moving else "stuck"


async def health(context: RequestContext) -> Response:
    """Liveness: the engine loop makes progress. A draining server is healthy."""
    found = status(context.models)
    return context.json(Health(found), 200 if found == "ok" else 503)


async def ready(context: RequestContext) -> Response:
    """Readiness: the server accepts requests."""
    found = "draining" if context.models.is_draining else status(context.models)
    return context.json(Health(found), 200 if found == "ok" else 503)


async def version(context: RequestContext) -> Response:
    """Return the version and one model's backend: the default model, or the one that ?model= names."""
    model = context.models.find(context.request.query_params.get("model"))
    if model.service is None or (facts := model.service.client.facts) is None:
        return context.json(Version(__version__, model.name))
    runner, scheduling = facts.facts, model.service.client.scheduling
    return context.json(
        Version(
            __version__, model.name, runner.backend, runner.device, runner.dtype, scheduling, kv_events=facts.kv_events
        )
    )


async def metrics(context: RequestContext) -> Response:
    await asyncio.gather(*(_take_metrics(model) for model in context.models))
    async with context.models.rendering.turn(context.key.name):
        began_s = time.monotonic()
        body = generate_latest(context.models.shared.exposition)
        await asyncio.sleep(RENDERING_REST * (time.monotonic() - began_s))
    return Response(body, 200, {**context.headers, "content-type": CONTENT_TYPE})


async def _take_metrics(model: Model) -> None:
    model.metrics.take_model_state(model)
    if (service := model.service) is not None:
        stats = None  # there is no worker, or it does not answer in time
        with suppress(TimeoutError, QuireError):
            stats = await asyncio.wait_for(service.client.stats(), STATS_S)
        if model.service is service:  # otherwise it was unloaded meanwhile, and its final figures are taken
            model.metrics.take(stats, service.client)


class WatchQuery(msgspec.Struct, frozen=True):
    interval_ms: Annotated[int, Meta(ge=100, le=60_000, description="Time between snapshots.")] = 500
    once: Annotated[bool, Meta(description="Return one snapshot as JSON instead of a stream.")] = False


class HeldQuery(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(max_length=64, description="The x-request-id of the request's response.")]
    model: Annotated[str | None, Meta(description="By default the first model.")] = None


async def watch(context: RequestContext) -> Response:
    query = context.query(WatchQuery)
    if context.request.method == "HEAD":
        return Response(None, 200, context.headers, SERVER_SENT_EVENTS)
    watcher = context.served.watch.enter(query.interval_ms / 1000, context.key)
    context.on_finish.callback(context.served.watch.leave, watcher)
    if query.once:
        return Response(await watcher.once(context.key), 200, context.headers, "application/json")
    return context.streaming(snapshots(watcher, context.key), SERVER_SENT_EVENTS)


async def snapshots(watcher: Watcher, key: Key) -> AsyncIterator[bytes]:
    """Snapshots as server-sent events. Nothing is queued for a slow reader."""
    while True:
        yield b"data: " + await watcher.next(key) + b"\n\n"


async def watch_held(context: RequestContext) -> Response:
    """List the blocks that a request holds. The page calls it on hover."""
    query = context.query(HeldQuery)
    model = context.models.find(query.model)
    active_requests = () if model.service is None else model.service.active_requests
    active = next((one for one in active_requests if one.request_id == query.id and is_shown(one, context.key)), None)
    if active is None or model.service is None:
        raise ApiError(Kind.NOT_FOUND, f"id = {query.id!r:.80} is not an open request of this key", param="id")
    ids = tuple(request_id for generation in active.generations for request_id in generation.request_ids)
    async with model.service.questions.turn(context.key.name):
        held = await model.service.client.find_held(ids)
    return context.json(HeldAnswer(model.name, active.request_id, held))
