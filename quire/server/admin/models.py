"""Admin endpoints: load, unload, pin and unpin models; list the requests in progress, and cancel one.

An admin sees all requests, other keys their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.model_manager import ModelState
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.model_service import ActiveRequest
from quire.server.models import OpeningRequest

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.auth import Key
    from quire.server.models import Model
    from quire.server.request_context import RequestContext


class LoadRequest(msgspec.Struct, frozen=True):
    model: str
    wait: bool = True  # until it is loaded; false: only start loading


class UnloadRequest(msgspec.Struct, frozen=True):
    model: str
    force: bool = False  # end its running requests with an error
    wait: bool = True


class PinRequest(msgspec.Struct, frozen=True):
    model: str


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
    return context.json(status(model))


async def unload(context: RequestContext) -> Response:
    """Unload a model. Requests for it that arrive meanwhile wait, and load it again."""
    body = await context.body(UnloadRequest)
    model = context.models.find(body.model)
    if model.is_pinned:
        raise InvalidRequest(f"model = {model.name!r} is pinned: unpin it first")
    unloading = context.models.begin(context.models.unload(model, is_forced=body.force))
    await (context.wait_for(unloading) if body.wait else asyncio.sleep(0))
    return context.json(status(model))


async def pin(context: RequestContext) -> Response:
    """Pin a model: it is not unloaded when another needs memory. Loads nothing."""
    model = context.models.find((await context.body(PinRequest)).model)
    context.models.manager.pin(model.managed)
    return context.json(status(model))


async def unpin(context: RequestContext) -> Response:
    model = context.models.find((await context.body(PinRequest)).model)
    context.models.manager.unpin(model.managed)
    return context.json(status(model))


def status(model: Model) -> ModelStatus:
    return ModelStatus(
        model=model.name,
        state=model.state.value,
        num_bytes=model.num_bytes,
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
    for one in found:
        log.warning("%s of key %s was cancelled with the key %s", request_id, one.caller.key.name, context.key.name)
        one.fail(_cancelled(context.key))
    return context.json(CancelledRequest(id=request_id, cancelled=len(found)))


def _cancelled(key: Key) -> ApiError:
    text = "by an admin" if key.is_admin else f"with the key {key.name!r}"
    return ApiError(Kind.CANCELLED, f"the request was cancelled {text}")


def _visible(context: RequestContext) -> list[ActiveRequest | OpeningRequest]:
    key = context.key
    return [one for one in context.models.in_progress() if key.is_admin or one.caller.key.name == key.name]


def _view(one: ActiveRequest | OpeningRequest) -> RequestView:
    state: Literal["loading", "waiting", "running"] = "waiting"
    prompt_tokens, cached_tokens, completion_tokens = None, 0, 0
    max_tokens = one.request.params.max_tokens
    if isinstance(one, ActiveRequest):
        state = "running" if one.is_started else "waiting"
        usage = one.usage
        prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
        completion_tokens = usage.completion_tokens
        max_tokens = one.requests[0].sampling.max_tokens
    elif one.served_by.state is not ModelState.READY:
        state = "loading"
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
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
    )
