"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.server.openai.types import Model, ModelList

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.call import Call
    from quire.server.service import Service


async def list_models(call: Call) -> Response:
    return call.json(ModelList(data=[model_entry(call.service, name) for name in call.service.names]))


async def get_model(call: Call) -> Response:
    """The route takes the rest of the path: names of models have slashes."""
    name = call.request.path_params["model"]
    call.service.check_model(name)
    return call.json(model_entry(call.service, name))


def model_entry(service: Service, name: str) -> Model:
    return Model(id=name, created=service.created, root=service.text.name, max_model_len=service.max_context)
