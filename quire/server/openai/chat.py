"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from quire.engine.outputs import Delta, GenerationOutput, TokenLogprob, Usage
from quire.engine.params import MAX_LOGPROBS
from quire.errors import InvalidRequest
from quire.server.ask import Ask, Breakpoint
from quire.server.cache_view import CacheView
from quire.server.openai.encoding import (
    StreamEncoder,
    bill,
    cache_view,
    events,
    finish_reason,
    finite,
    head_of,
    stop_reason,
    token_text,
)
from quire.server.openai.parsing import (
    NAMES,
    ask_of,
    cache_ttl_s,
    in_their_words,
    includes_usage,
    params_of,
    ttl_s,
)
from quire.server.openai.support import refuse_unsupported, unsupported
from quire.server.openai.types import (
    AnswerHead,
    ChatAnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ContentPart,
    TopLogprob,
)
from quire.text.chat import ChatRequest, Message, Part, Role, check_messages, check_parts

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.call import Call

_NAMES = NAMES | {"logprobs": "top_logprobs", "prompt": "messages"}
_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_TOOL_ROLES = ("tool", "function")
_OTHER_PARTS = {"image_url": "images", "input_audio": "audio", "file": "files"}


async def chat_completions(call: Call) -> Response:
    body = await call.body(ChatCompletionRequest)
    ask = parse_chat(body)
    with in_their_words(_names(body)):
        work = await call.open(ask)
    if ask.is_streaming:
        head = head_of(work, "chatcmpl", "chat.completion.chunk")
        return await call.stream(work, events(work, chat_stream(head, ask, include_usage=includes_usage(body))))
    head = head_of(work, "chatcmpl", "chat.completion")
    outputs = await call.result(work)
    return call.json(whole_chat(head, outputs, work.usage, cache_view(work)))


# In


def parse_chat(body: ChatCompletionRequest) -> Ask:
    """Pure. Raises ApiError for what is known and not built, InvalidRequest for what can never work."""
    refuse_unsupported(body)
    with in_their_words(_names(body)):
        continues = bool(body.continue_final_message)
        opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        chat = ChatRequest(parse_messages(body.messages), opens, continues, body.chat_template_kwargs or {})
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = params_of(body, max_tokens=max_tokens, logprobs=_logprobs(body))
        return ask_of(body, (chat,), params, _breakpoints(body))


def _names(body: ChatCompletionRequest) -> dict[str, str]:
    return _NAMES if body.max_completion_tokens is None else _NAMES | {"max_tokens": "max_completion_tokens"}


def _logprobs(body: ChatCompletionRequest) -> int | None:
    count = body.top_logprobs
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs = {count} is not a whole number from 0 to {MAX_LOGPROBS}")
    if count and not body.logprobs:
        raise InvalidRequest(f"top_logprobs = {count} needs logprobs = true")
    return count or 0 if body.logprobs else None


def parse_messages(given: Sequence[ChatMessage]) -> tuple[Message, ...]:
    check_messages(given)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))


def _breakpoints(body: ChatCompletionRequest) -> tuple[Breakpoint, ...]:
    found: list[Breakpoint] = []
    for i, message in enumerate(body.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (mark := part.prompt_cache_breakpoint) is not None:
                if mark.mode not in (None, "explicit"):
                    path = f"messages[{i}].content[{j}].prompt_cache_breakpoint.mode"
                    raise InvalidRequest(f"{path} = {mark.mode!r:.80} is not explicit")
                field = f"messages[{i}].content[{j}].prompt_cache_breakpoint.ttl"
                found.append(Breakpoint(i, j, ttl_s(field, mark.ttl, cache_ttl_s(body))))
    return tuple(found)


def _message(given: ChatMessage, path: str) -> Message:
    if given.role in _TOOL_ROLES or given.tool_call_id is not None:
        field = "role" if given.role in _TOOL_ROLES else "tool_call_id"
        message = f"{path}.{field} = {getattr(given, field)!r:.80} is not supported yet"
        raise unsupported(f"{path}.{field}", f"{message}: tool calling comes with a later version", is_value=True)
    for field in ("tool_calls", "function_call", "audio"):
        if getattr(given, field) not in (None, []):
            raise unsupported(f"{path}.{field}", f"{path}.{field} is not supported yet: messages are text")
    if given.role not in _ROLES:
        raise InvalidRequest(f"{path}.role = {given.role!r:.80} is not one of {', '.join(_ROLES)}")
    return Message(_ROLES[given.role], _parts(given, path), given.name)


def _parts(given: ChatMessage, path: str) -> tuple[Part, ...]:
    if isinstance(given.content, str):
        return (Part(given.content),)
    if given.content:
        check_parts(given.content, f"{path}.content")
        return tuple(_part(part, f"{path}.content[{i}]") for i, part in enumerate(given.content))
    if given.role != "assistant":
        raise InvalidRequest(f"{path}.content is null or has no parts; only an assistant's may")
    return () if given.refusal is None else (Part(given.refusal),)


def _part(part: ContentPart, path: str) -> Part:
    if part.type not in ("text", "refusal"):
        shown = f"{path}.type = {part.type!r:.80}"
        if part.type not in _OTHER_PARTS:
            raise InvalidRequest(f"{shown} is not one of text, refusal")
        what = _OTHER_PARTS[part.type]
        raise unsupported(f"{path}.type", f"{shown} is not supported: {what} cannot be read here", is_value=True)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"{path}.{part.type} is missing")
    return Part(text)


# Out


class ChatChoices:
    """First who speaks, then what, then why it ended: a chunk each."""

    def begin(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta("", "assistant"))

    def grow(self, index: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(delta.text), _chat_logprobs(delta.logprobs) if delta.logprobs else None)

    def end(self, index: int, finish_reason: str, stop: str | None) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish_reason=finish_reason, stop_reason=stop_reason(stop))


def chat_stream(head: AnswerHead, ask: Ask, *, include_usage: bool) -> StreamEncoder:
    return StreamEncoder(head, ChatChoices(), n=ask.params.n, num_prompts=len(ask.prompts), include_usage=include_usage)


def whole_chat(
    head: AnswerHead, outputs: Sequence[GenerationOutput], usage: Usage, cache: CacheView | None
) -> ChatCompletion:
    choices = [
        ChatChoice(
            index,
            ChatAnswerMessage(one.text),
            None if one.logprobs is None else _chat_logprobs(one.logprobs),
            finish_reason(one.finish_reason, one.error),
            stop_reason(one.stop),
        )
        for index, one in enumerate(one for output in outputs for one in output.completions)
    ]
    return ChatCompletion(
        **msgspec.structs.asdict(head), choices=choices, usage=bill(usage), cache=UNSET if cache is None else cache
    )


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token_text(entry),
                finite(entry.logprob),
                list(entry.data),
                [TopLogprob(token_text(top), finite(top.logprob), list(top.data)) for top in entry.top],
            )
            for entry in entries
        ]
    )
