"""Endpoints of the prefix cache: explain and stats for all keys, clear for admin keys.

A key sees only cached blocks under its own namespace and salt, so it cannot learn what other keys have cached.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta
from starlette.responses import Response

from quire.backends.base import Capacity
from quire.core.cache import PoolStats, StateStats
from quire.core.kv_cache import CacheStats
from quire.core.levels.levels import LevelStats
from quire.core.values import check_tokens
from quire.engine.generation import GenerationParams
from quire.errors import CacheFolderError, ContextTooLong, InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.models import InferenceRequest, ModelService, Prompt, not_loaded
from quire.server.protocols.openai import ChatMessage, ChatTurns, parse_messages
from quire.server.protocols.support import CacheView, view
from quire.server.request_context import RequestContext
from quire.text.messages import ChatRequest
from quire.text.tokenizer import stopped_text

log = logging.getLogger(__name__)

Explanation = CacheView


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, as messages or as text or token ids."""

    messages: list[ChatMessage] | None = None  # as in /v1/chat/completions
    prompt: str | list[int] | None = None  # as in /v1/completions
    cache_salt: str | None = None
    model: str | None = None


class ModelQuery(msgspec.Struct, frozen=True):
    """Selects a model; without it, the default model."""

    model: str | None = None


def _json_type(name: str, source: type, doc: str, **described: Any) -> type[msgspec.Struct]:
    """A JSON type with the fields of a dataclass. `described`: descriptions of fields, and types of other fields."""
    hints = get_type_hints(source)
    fields = []
    for field in dataclasses.fields(source):
        given = described.pop(field.name, None)
        is_text = given is None or isinstance(given, str)
        fields.append((field.name, Annotated[hints[field.name], Meta(description=given)] if is_text else given))
    rename = {"level": "tier", "levels": "tiers"}
    return msgspec.defstruct(
        name, [*described.items(), *fields], frozen=True, kw_only=True, rename=rename, namespace={"__doc__": doc}
    )


WindowStatsView = _json_type(
    "WindowStatsView",
    PoolStats,
    "Blocks of the layers with a window. `PoolStats` in `quire/core/cache.py` documents each count.",
    num_free="Blocks not in use, with or without cached content.",
    num_cached="Free blocks whose cached content can be reused.",
    num_in_use="Blocks held by requests or kept by pins.",
)
StateStatsView = _json_type(
    "StateStatsView",
    StateStats,
    "Slots of recurrent states. `StateStats` in `quire/core/cache.py` documents each count.",
    num_free="Slots without content.",
    num_cached="Snapshots that can be reused and that nothing holds.",
    num_in_use="States of running requests, and snapshots that are held.",
    num_snapshots="All snapshots, held or not.",
)
LowerTierView = _json_type(
    "LowerTierView",
    LevelStats,
    "A level of the cache below the device. `LevelStats` in `quire/core/levels/levels.py` documents each count.",
    level=Annotated[str, Meta(extra_json_schema={"enum": ["host", "disk"]})],
    num_pieces="Stored blocks, window blocks and states.",
    max_bytes="The size limit; that of a disk is for all models that share the folder.",
    num_loads="Prefixes that were loaded.",
    num_failed_loads="Damaged or missing pieces, and loads that took too long.",
    num_saves="Pieces that were stored.",
    break_even_tokens="Loads of fewer tokens are slower than computing them; null: all loads are.",
)
CacheStatsView = _json_type(
    "CacheStatsView",
    CacheStats,
    "Cache statistics. `CacheStats` in `quire/core/kv_cache.py` documents each count.",
    model=str,
    block_size=int,
    hit_rate=float,
    num_running=int,  # requests
    num_waiting=int,
    num_free="Blocks not in use, with or without cached content.",
    num_cached="Free blocks whose cached content can be reused.",
    num_in_use="Blocks held by requests or kept by pins.",
    num_shared="Blocks held by more than one request.",
    num_pinned="Blocks kept by pins. They count as in use.",
    num_recomputed_tokens="Tokens computed again although their keys and values were found: no state or window.",
    windows=Annotated[WindowStatsView | None, Meta(description="null: the model has no window blocks.")],
    states=Annotated[StateStatsView | None, Meta(description="null: the model has no recurrent states.")],
    levels=Annotated[
        tuple[LowerTierView, ...],  # type: ignore[valid-type]
        Meta(description="Tiers below the device: host memory, disk."),
    ],
)


class Cleared(msgspec.Struct, frozen=True):
    cleared: bool


async def explain(context: RequestContext) -> Response:
    """Report how much of this prompt is cached now, and why not more. Computes nothing."""
    body = await context.body(ExplainRequest)
    service = context.models.find(body.model).loaded
    tokens, salt = await _prompt(context, service, body)
    async with service.questions.turn(context.key.name):
        explanation = await service.client.explain(tokens, salt)
    text = stopped_text(service.text.tokenizer, tokens, explanation)
    return context.json(view(explanation, len(tokens), text))


async def stats(context: RequestContext) -> Response:
    service = context.models.find(context.request.query_params.get("model")).loaded
    async with service.questions.turn(context.key.name):
        found = await service.client.stats()
    if found is None:
        raise not_loaded(service.served.name)
    figures = dataclasses.asdict(found.cache)
    figures["levels"] = tuple(LowerTierView(**level) for level in figures["levels"])
    return context.json(
        CacheStatsView(
            model=service.served.name,
            block_size=_capacity(service).block_size,
            hit_rate=found.cache.hit_rate,
            num_running=found.num_running,
            num_waiting=found.num_waiting,
            **figures,
        )
    )


async def clear(context: RequestContext) -> Response:
    """Admin only: clear the prefix cache, in all tiers, and remove all pins. Running requests keep their blocks."""
    service = context.models.find(context.request.query_params.get("model")).loaded
    _capacity(service)
    try:
        await service.client.clear_cache()
    except CacheFolderError as error:
        log.error("%s: %s", service.served.name, error)  # with a path, which is not sent
        text = "the cache was cleared, but files of the disk cache could not be deleted: the log says why"
        raise ApiError(Kind.FAILED, text) from error
    return context.json(Cleared(cleared=True))


def _capacity(service: ModelService) -> Capacity:
    """Return the capacity of the running worker. Raises without one: there is no cache."""
    if (capacity := service.client.capacity) is None:
        raise not_loaded(service.served.name)
    return capacity


async def _prompt(context: RequestContext, service: ModelService, body: ExplainRequest) -> tuple[tuple[int, ...], str]:
    """Return the token ids and the cache salt, checked as for a request to generate."""
    request = await context.parse(to_inference_request, body)
    tokens = await service.encode(request.prompts[0], context.key.name)
    if len(tokens) > service.client.max_model_len:
        raise ContextTooLong(
            f"prompt has {len(tokens)} tokens, more than the context of {service.client.max_model_len}"
        )
    if not tokens:
        raise InvalidRequest("prompt has no tokens: at least one is needed")
    check_tokens("prompt", tokens)
    if (largest := max(tokens)) >= (size := service.text.spec.vocab_size):
        raise InvalidRequest(f"prompt: token id {largest} is outside the vocabulary of {size}")
    return tokens, service.salt_for(context.key, request.cache_salt)


def to_inference_request(body: ExplainRequest) -> InferenceRequest:
    prompt: Prompt
    if body.messages is not None and body.prompt is not None:
        raise InvalidRequest("messages and prompt exclude each other")
    if body.messages is not None:
        prompt = ChatRequest(parse_messages(body.messages, ChatTurns()))
    elif body.prompt is not None:
        prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    else:
        raise InvalidRequest("prompt is missing: send prompt or messages")
    return InferenceRequest(body.model, (prompt,), GenerationParams(max_tokens=1), cache_salt=body.cache_salt or "")
