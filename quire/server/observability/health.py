"""What operators and tools ask: health, readiness, metrics, versions, tokens."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from quire import __version__
from quire.engine.composition import Scheduling
from quire.engine.worker.protocol import Stats
from quire.errors import InvalidRequest, QuireError
from quire.server.model_service import ModelService
from quire.server.models import Model, Models
from quire.server.protocols.openai.chat import conversation_of
from quire.server.protocols.openai.parsing import NAMES, in_their_words
from quire.server.protocols.openai.types import ChatCompletionRequest, ChatMessage, ToolDefinition
from quire.server.request_context import IGNORED, RequestContext
from quire.text.messages import ChatRequest

STATS_S = 2.0  # a worker in the middle of a long step answers later; then the last known figures do
MAX_IDS = 1 << 20

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
    scheduling: Scheduling | None = None  # None: no worker serves


class TokenizeRequest(msgspec.Struct):
    """A text, or a conversation with all that makes a prompt of it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None, msgspec.Meta(description="Of a prompt: add what the model wants around it, such as BOS.")
    ] = None
    return_token_strs: Annotated[Any, msgspec.Meta(description="Accepted: they are always told.")] = None


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str]


class DetokenizeRequest(msgspec.Struct):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_IDS)]
    model: str | None = None


class DetokenizedText(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """As a tokenizer_config.json says it. What the model does not have is null."""

    model: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def status(models: Models) -> str:
    """Of the server as a whole: "ok" means that tokens would move, in every model that is loaded. One that is not, or
    is on its way, waits for its first request or serves it soon."""
    if not models.has_started:
        return "loading"
    found = {_status(model.service) for model in models if model.service is not None}
    return next((bad for bad in ("stuck", "restarting") if bad in found), "ok")


def _status(service: ModelService) -> str:
    if service.client.facts is None:
        return "restarting"
    return "ok" if service.client.is_moving else "stuck"


async def health(context: RequestContext) -> Response:
    """Alive: the engine's loop moves. Draining is healthy."""
    found = status(context.models)
    return context.json(Health(found), 200 if found == "ok" else 503)


async def ready(context: RequestContext) -> Response:
    """Whether to send it traffic."""
    found = "draining" if context.models.is_draining else status(context.models)
    return context.json(Health(found), 200 if found == "ok" else 503)


async def version(context: RequestContext) -> Response:
    """Of one model, the default unless ?model= names another."""
    model = context.models.find(context.request.query_params.get("model"))
    if model.service is None or (facts := model.service.client.facts) is None:
        return context.json(Version(__version__, model.name))
    runner, scheduling = facts.facts, model.service.client.scheduling
    return context.json(Version(__version__, model.name, runner.backend, runner.device, runner.dtype, scheduling))


async def metrics(context: RequestContext) -> Response:
    await asyncio.gather(*(_take_metrics(model) for model in context.models))
    body, kind = context.models.exposition.render()
    return Response(body, 200, {**context.headers, "content-type": kind})


async def _take_metrics(model: Model) -> None:
    model.metrics.take_seat(model.seat)
    if (service := model.service) is not None:
        stats = await current_stats(service)
        if model.service is service:  # or it was unloaded meanwhile, and its last figures are taken
            model.metrics.take(stats, service.client)


async def current_stats(service: ModelService) -> Stats | None:
    """None: there is no worker, or it is too busy to say."""
    try:
        return await asyncio.wait_for(service.client.stats(), STATS_S)
    except (TimeoutError, QuireError):
        return None


async def tokenize(context: RequestContext) -> Response:
    body = await context.body(TokenizeRequest)
    service = await context.use(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt and messages: exactly one of them is needed")
    if body.messages is None:
        tokens = await service.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
    else:
        with in_their_words(NAMES):
            chat = _conversation(body, body.messages)
        tokens = await service.encode(chat)
        unknown = service.text.template.unknown_args(chat.template_args)
        context.note(IGNORED, (f"chat_template_kwargs.{name}" for name in unknown))
    names = [service.text.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return context.json(Tokens(list(tokens), len(tokens), service.max_context, names))


def _conversation(body: TokenizeRequest, messages: list[ChatMessage]) -> ChatRequest:
    """Exactly what /v1/chat/completions would make of it."""
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens is only for prompt: the model's template writes them around messages")
    asked = ChatCompletionRequest(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return conversation_of(asked)[0]


async def tokenizer_info(context: RequestContext) -> Response:
    """What clients need that tokenise and render templates themselves, such as lm-evaluation-harness."""
    service = await context.use(context.request.query_params.get("model"))
    text = service.text
    named = text.tokenizer.special_tokens
    ends = [text.tokenizer.id_to_token(token_id) for token_id in text.eos_token_ids]  # GGUF files may name none
    return context.json(
        TokenizerInfo(
            model=context.model.name,
            vocab_size=text.tokenizer.vocab_size,
            model_max_length=service.max_context,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token", next(iter(ends), None)),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=text.template.source,
        )
    )


async def detokenize(context: RequestContext) -> Response:
    body = await context.body(DetokenizeRequest)
    service = await context.use(body.model)
    size = service.text.spec.vocab_size
    for position, token in enumerate(body.tokens):
        if token >= size:
            raise InvalidRequest(f"tokens[{position}] = {token} is outside the vocabulary of {size}")
    text = await asyncio.to_thread(service.text.tokenizer.decode, body.tokens, skip_special=False)
    return context.json(DetokenizedText(text))
