"""GET /v1/models and /v1/models/{model}: one entry per model name."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import structs

from quire.errors import QuireError
from quire.server.errors import ApiError, Kind
from quire.server.protocols.anthropic.types import ANTHROPIC_MODELS
from quire.server.protocols.openai.types import Model, ModelList

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server import models
    from quire.server.request_context import RequestContext


async def list_models(context: RequestContext) -> Response:
    entries = [entry for model in context.models for entry in await model_entries(model)]
    return context.json(ModelList(data=entries, first_id=entries[0].id, last_id=entries[-1].id))


async def get_model(context: RequestContext) -> Response:
    """Describe one model. Its name is the rest of the path, because names may contain slashes."""
    name = context.request.path_params["model"]
    if not name:
        raise ApiError(Kind.NOT_FOUND, "there is nothing at '/v1/models/'; did you mean GET /v1/models?")
    models = context.models
    if name not in models.names and name.startswith(ANTHROPIC_MODELS):
        if context.dialect.name == "anthropic":  # /v1/messages uses the default model for these names
            entry = (await model_entries(models.default))[0]
            return context.json(structs.replace(entry, id=name, display_name=name, alias_of=models.default.name))
        text = f"model = {name!r:.200} is not served here; /v1/messages uses {models.default.name} for it"
        raise ApiError(Kind.NO_MODEL, text, param="model")
    entries = await model_entries(models.find(name))
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
