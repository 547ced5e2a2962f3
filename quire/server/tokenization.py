"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.protocols.openai import (
    NAMES,
    ChatCompletionRequest,
    ChatMessage,
    ChatTurns,
    ToolDefinition,
    conversation_of,
)
from quire.server.protocols.support import protocol_field_names
from quire.server.request_context import IGNORED, RequestContext
from quire.text.messages import ChatRequest
from quire.text.tokenizer import Tokenizer

MAX_IDS = 1 << 20


class TokenizeRequest(msgspec.Struct):
    """A text, or a conversation with the fields that make its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None, msgspec.Meta(description="For `prompt`: add the model's special tokens, such as BOS.")
    ] = None
    return_token_strs: Annotated[Any, msgspec.Meta(description="Accepted: token strings are always returned.")] = None


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
    """Fields as in tokenizer_config.json. A token that the model does not have is null."""

    model: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


async def tokenize(context: RequestContext) -> Response:
    body = await context.body(TokenizeRequest)
    service = await context.use(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt and messages: exactly one of them is needed")
    if body.messages is None:
        tokens = await service.encode(
            body.prompt or "", context.key.name, add_special=body.add_special_tokens is not False
        )
    else:
        chat = await context.parse(_conversation, body)
        tokens = await service.encode(chat, context.key.name)
        unknown = service.text.template.unknown_args(chat.template_args)
        context.note(IGNORED, (f"chat_template_kwargs.{name}" for name in unknown))
    make = partial(_answer, service.text.tokenizer, tokens, service.client.max_model_len)
    return await context.json_of(make, len(tokens))


def _answer(tokenizer: Tokenizer, tokens: Sequence[int], max_model_len: int) -> Tokens:
    names = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return Tokens(list(tokens), len(tokens), max_model_len, names)


def _conversation(body: TokenizeRequest) -> ChatRequest:
    """Return the conversation that /v1/chat/completions would make of this body."""
    assert body.messages is not None
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens is only for prompt: the chat template adds special tokens to messages")
    asked = ChatCompletionRequest(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    with protocol_field_names(NAMES):
        return conversation_of(asked, ChatTurns())[0]


async def tokenizer_info(context: RequestContext) -> Response:
    """Return the special tokens and the chat template, for clients that tokenise, such as lm-evaluation-harness."""
    service = await context.use(context.request.query_params.get("model"))
    text = service.text
    named = text.tokenizer.special_tokens
    ends = [text.tokenizer.id_to_token(token_id) for token_id in text.eos_token_ids]  # GGUF files may name no EOS token
    return context.json(
        TokenizerInfo(
            model=context.model.name,
            vocab_size=text.tokenizer.vocab_size,
            model_max_length=service.client.max_model_len,
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
    make = partial(_text, service.text.tokenizer, body.tokens, service.text.spec.vocab_size)
    return await context.json_of(make, len(body.tokens))


def _text(tokenizer: Tokenizer, tokens: Sequence[int], vocab_size: int) -> DetokenizedText:
    for position, token in enumerate(tokens):
        if token >= vocab_size:
            raise InvalidRequest(f"tokens[{position}] = {token} is outside the vocabulary of {vocab_size}")
    return DetokenizedText(tokenizer.decode(tokens, skip_special=False))
