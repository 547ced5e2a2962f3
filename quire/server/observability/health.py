"""Endpoints for operators: `/health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from starlette.responses import Response

from quire.engine.composition import Scheduling
from quire.engine.worker.kv_events import KvEventsStatus
from quire.engine.worker.protocol import Stats
from quire.errors import QuireError
from quire.server.model_service import ModelService
from quire.server.models import Model, Models
from quire.server.request_context import RequestContext
from quire.version import __version__

RENDERING_REST = 4.0  # time between two texts of metrics, per time to make one: they get a fifth of the event loop
STATS_S = 2.0  # a worker in a long step answers later; the last known figures are used then

log = logging.getLogger(__name__)


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
        body, kind = context.models.exposition.render()
        await asyncio.sleep(RENDERING_REST * (time.monotonic() - began_s))
    return Response(body, 200, {**context.headers, "content-type": kind})


async def _take_metrics(model: Model) -> None:
    model.metrics.take_model_state(model.managed)
    if (service := model.service) is not None:
        stats = await current_stats(service)
        if model.service is service:  # otherwise it was unloaded meanwhile, and its final figures are taken
            model.metrics.take(stats, service.client)


async def current_stats(service: ModelService) -> Stats | None:
    """Ask the worker for its stats. None: there is no worker, or it does not answer in time."""
    try:
        return await asyncio.wait_for(service.client.stats(), STATS_S)
    except (TimeoutError, QuireError):
        return None
