"""`/props`, `/slots` and `/apply-template`, as in llama.cpp's server, for its tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.model_metadata import facts_of
from quire.server.observability.snapshot import is_shown
from quire.server.protocols.openai.chat import parse_chat
from quire.server.protocols.openai.types import ChatCompletionRequest
from quire.text.messages import ChatRequest
from quire.version import __version__

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.model_service import ActiveRequest
    from quire.server.models import Model
    from quire.server.request_context import RequestContext


class SlotParams(msgspec.Struct, kw_only=True):
    """Default sampling parameters."""

    n_predict: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0


class SlotDefaults(msgspec.Struct, kw_only=True):
    n_ctx: Annotated[int, Meta(description="Limit of prompt and answer together, in tokens.")]
    params: SlotParams


class Modalities(msgspec.Struct, kw_only=True):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True):
    default_generation_settings: SlotDefaults
    total_slots: Annotated[int, Meta(description="Sequences that can run at once; 0: the model is not loaded.")]
    model_path: Annotated[str, Meta(description="The model's name; its path is not shown.")]
    chat_template: str
    build_info: str
    modalities: Modalities
    is_sleeping: Annotated[bool, Meta(description="The model is not loaded; a request loads it.")]


class NextToken(msgspec.Struct, kw_only=True):
    n_decoded: int
    has_next_token: bool = True


class Slot(msgspec.Struct, kw_only=True):
    """A running request. Requests of other keys have no token counts."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
    n_prompt_tokens: int | UnsetType = UNSET
    next_token: NextToken | UnsetType = UNSET


class RenderedPrompt(msgspec.Struct):
    prompt: str


async def props(context: RequestContext) -> Response:
    """Describe the default model, or the one that ?model= names. Loads nothing."""
    model = context.models.find(context.request.query_params.get("model"))
    facts = await facts_of(model)
    given = {name: getattr(facts.defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given["repeat_penalty"] = facts.defaults.repetition_penalty
    given["n_predict"] = model.config.default_max_tokens
    params = SlotParams(**{name: value for name, value in given.items() if value is not None})
    n_ctx = model.max_model_len or (0 if facts.spec is None else facts.spec.max_model_len)
    return context.json(
        Props(
            default_generation_settings=SlotDefaults(n_ctx=n_ctx, params=params),
            total_slots=_num_slots(model),
            model_path=model.name,
            chat_template=facts.template or "",
            build_info=f"quire-{__version__}",
            modalities=Modalities(),
            is_sleeping=model.service is None,
        )
    )


async def slots(context: RequestContext) -> Response:
    """List the running requests in order of arrival as the first slots. quire has no fixed slots."""
    model = context.models.find(context.request.query_params.get("model"))
    ordered = (
        []
        if model.service is None
        else sorted(model.service.active_requests, key=lambda active: active.caller.arrived_s)
    )
    running = [active for active in ordered if active.is_started]
    count = max(_num_slots(model), len(running))
    n_ctx = model.max_model_len or 0
    return context.json([_slot(i, n_ctx, running[i] if i < len(running) else None, context) for i in range(count)])


async def apply_template(context: RequestContext) -> Response:
    """Return the prompt text that /v1/chat/completions would make from the same body."""
    body = await context.body(ChatCompletionRequest)
    (chat,) = (await context.parse(parse_chat, body)).prompts
    assert isinstance(chat, ChatRequest)
    service = await context.use(body.model)
    text = await service.render(chat, context.key.name)
    return context.json(RenderedPrompt(text))


def _num_slots(model: Model) -> int:
    return 0 if model.facts is None else model.facts.capacity.max_num_seqs


def _slot(slot_id: int, n_ctx: int, active: ActiveRequest | None, context: RequestContext) -> Slot:
    if active is None or not is_shown(active, context.key):
        return Slot(id=slot_id, n_ctx=n_ctx, is_processing=active is not None)
    usage = active.usage
    return Slot(
        id=slot_id,
        n_ctx=n_ctx,
        is_processing=True,
        n_prompt_tokens=usage.prompt_tokens,
        next_token=NextToken(n_decoded=usage.completion_tokens),
    )
