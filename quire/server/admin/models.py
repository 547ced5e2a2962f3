"""For the keeper: load models, unload and pin them."""

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
    wait: bool = True  # for it to be ready; else it is only begun


class UnloadRequest(msgspec.Struct, frozen=True):
    model: str
    force: bool = False  # cut what is under way
    wait: bool = True


class PinRequest(msgspec.Struct, frozen=True):
    model: str


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: str  # unloaded, loading, ready, unloading, failed
    num_bytes: int  # as held; of one that is not loaded, its weights
    is_pinned: bool
    max_model_len: int | None  # most tokens of prompt and answer; None: nobody has looked yet
    full_model_len: int | None  # what that would be, had its KV cache room enough


async def load(context: RequestContext) -> Response:
    body = await context.body(LoadRequest)
    model = context.models.find(body.model)
    loading = context.models.begin(context.models.load(model))
    await (context.wait_for(loading) if body.wait else asyncio.sleep(0))
    return context.json(status(model))


async def unload(context: RequestContext) -> Response:
    """What comes for it meanwhile waits, and has it loaded again."""
    body = await context.body(UnloadRequest)
    model = context.models.find(body.model)
    if model.is_pinned:
        raise InvalidRequest(f"model = {model.name!r} is pinned: unpin it first")
    unloading = context.models.begin(context.models.unload(model, is_forced=body.force))
    await (context.wait_for(unloading) if body.wait else asyncio.sleep(0))
    return context.json(status(model))


async def pin(context: RequestContext) -> Response:
    """Loads nothing: it is about who goes when there is no room."""
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
