"""GET /v1/models and /v1/models/{model}: one entry per model name."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.server.protocols.openai.types import Model, ModelList

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server import models
    from quire.server.request_context import RequestContext


async def list_models(context: RequestContext) -> Response:
    entries = [entry for model in context.models for entry in await model_entries(model)]
    return context.json(ModelList(data=entries, first_id=entries[0].id, last_id=entries[-1].id))


async def get_model(context: RequestContext) -> Response:
    """The name is the rest of the path: model names may have slashes."""
    name = context.request.path_params["model"]
    entries = await model_entries(context.models.find(name))
    return context.json(next(entry for entry in entries if entry.id == name))


async def model_entries(model: models.Model) -> list[Model]:
    if model.max_model_len is None:
        with suppress(QuireError):  # loading the model reports the cause
            await model.measure()
    return [
        Model(
            id=name,
            created=model.created,
            root=model.root,
            alias_of=None if name == model.name else model.name,
            max_model_len=model.max_model_len or 0,
            state=model.state.value,
            num_bytes=model.num_bytes,
            is_pinned=model.is_pinned,
            display_name=name,
            created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        )
        for name in model.names
    ]
