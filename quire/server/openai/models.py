"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quire.server.openai.types import Model, ModelList

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.call import Call
    from quire.server.service import Service


async def list_models(call: Call) -> Response:
    names = call.service.names
    entries = [model_entry(call.service, name) for name in names]
    return call.json(ModelList(data=entries, first_id=names[0], last_id=names[-1]))


async def get_model(call: Call) -> Response:
    """The route takes the rest of the path: names of models have slashes."""
    name = call.request.path_params["model"]
    call.service.check_model(name)
    return call.json(model_entry(call.service, name))


def model_entry(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.created,
        root=service.text.name,
        max_model_len=service.max_context,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
    )
