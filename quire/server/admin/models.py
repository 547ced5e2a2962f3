"""Admin endpoints: load, unload, pin and unpin models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.responses import Response

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
