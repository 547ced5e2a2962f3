"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from quire.core.values import FinishReason
from quire.engine.outputs import Delta, GenerationOutput, TokenLogprob, Usage
from quire.engine.params import MAX_LOGPROBS
from quire.errors import InvalidRequest
from quire.server.model_service import Breakpoint, InferenceRequest
from quire.server.protocols.openai.encoding import (
    AnswerEvents,
    StreamEncoder,
    cache_view,
    finish_reason,
    finite,
    head_of,
    stop_reason,
    token_text,
    usage_body,
)
from quire.server.protocols.openai.parsing import (
    NAMES,
    cache_ttl_s,
    has_continuous_usage,
    has_no_budget,
    includes_usage,
    make_request,
    params_of,
    parse_calls,
    parse_tools,
    protocol_field_names,
    shape_field,
    thinking_fields,
    ttl_s,
)
from quire.server.protocols.openai.types import (
    CHAT_UNSUPPORTED,
    UNSUPPORTED,
    AnswerHead,
    AnswerToolCall,
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
    FunctionCall,
    FunctionDelta,
    ToolCallDelta,
    TopLogprob,
)
from quire.server.protocols.support import CacheView, answer_in_shape, refuse_unsupported, unsupported, with_unenforced
from quire.text.messages import ChatRequest, Message, Part, Role, check_messages, check_parts
from quire.text.stream import AnswerParser, CallArguments, CallStart, Piece, PlainAnswer, Thought, Words

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.request_context import RequestContext

_NAMES = NAMES | {"logprobs": "top_logprobs", "prompt": "messages"}
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_OTHER_PARTS = {"image_url": "images", "input_audio": "audio", "file": "files"}


async def chat_completions(context: RequestContext) -> Response:
    body = await context.body(ChatCompletionRequest)
    request = await context.parse(parse_chat, body)
    with protocol_field_names(_names(body)):
        return await answer_in_shape(request, shape_field(body), partial(_respond, context, body))


async def _respond(context: RequestContext, body: ChatCompletionRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    if request.is_streaming:
        head = head_of(active, "chatcmpl", "chat.completion.chunk")
        encoder = chat_stream(
            head,
            request,
            include_usage=includes_usage(body),
            has_running_usage=has_continuous_usage(body),
            new_parser=active.new_parser,
        )
        return await context.stream(active, AnswerEvents(active, encoder))
    outputs = await context.result(active)
    head = head_of(active, "chatcmpl", "chat.completion")

    def make() -> ChatCompletion:
        thought = active.num_thought_tokens
        return whole_chat(head, outputs, active.usage, cache_view(active), active.new_parser, thought)

    return await context.json_of(make, active.num_values)


# Parsing


def parse_chat(body: ChatCompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, UNSUPPORTED)
    refuse_unsupported(body, CHAT_UNSUPPORTED)
    with protocol_field_names(_names(body)):
        chat, ignored = conversation_of(body)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = params_of(body, max_tokens=max_tokens, logprobs=_logprobs(body))
        params = replace(params, prediction=_prediction(body))
        request = make_request(body, (chat,), params, _breakpoints(body))
        request = replace(
            request,
            ignored=(*request.ignored, *ignored),
            thinking_fields=thinking_fields(body, "reasoning_effort", body.reasoning_effort),
        )
        return with_unenforced(request, shape_field(body))


def conversation_of(body: ChatCompletionRequest) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the conversation, and the names of the tools that are left out of it."""
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    tools, choice, ignored = parse_tools(body)
    chat = ChatRequest(
        parse_messages(body.messages),
        opens,
        continues,
        body.chat_template_kwargs or {},
        tools,
        choice,
        wants_thought=False if body.reasoning_effort == "none" or has_no_budget(body) else body.enable_thinking,
        reasoning_effort=body.reasoning_effort,
    )
    return chat, ignored


def _names(body: ChatCompletionRequest) -> dict[str, str]:
    return _NAMES if body.max_completion_tokens is None else _NAMES | {"max_tokens": "max_completion_tokens"}


def _logprobs(body: ChatCompletionRequest) -> int | None:
    count = body.top_logprobs
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs = {count} is not a whole number from 0 to {MAX_LOGPROBS}")
    if count and not body.logprobs:
        raise InvalidRequest(f"top_logprobs = {count} needs logprobs = true")
    return count or 0 if body.logprobs else None


def _prediction(body: ChatCompletionRequest) -> str:
    given = body.prediction
    if given is None:
        return ""
    if given.type != "content":
        raise InvalidRequest(f"prediction.type = {given.type!r:.80} is not content")
    if isinstance(given.content, str):
        return given.content
    for number, part in enumerate(given.content):
        if part.type != "text" or part.text is None:
            problem = f"only parts with type 'text' and a text are supported, and the type is {part.type!r:.80}"
            raise InvalidRequest(f"prediction.content[{number}]: {problem}")
    return "".join(part.text or "" for part in given.content)


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
    for field in ("function_call", "audio"):
        if getattr(given, field) is not None:
            raise unsupported(f"{path}.{field}", UNSUPPORTED[field].message(f"{path}.{field}"))
    if given.role == "function":
        text = f"{path}.role = 'function' is not supported: it is the older form of tool"
        raise unsupported(f"{path}.role", text, is_value=True)
    if given.role not in _ROLES:
        raise InvalidRequest(f"{path}.role = {given.role!r:.80} is not one of {', '.join(_ROLES)}")
    role = _ROLES[given.role]
    if role is not Role.ASSISTANT and given.tool_calls:
        raise InvalidRequest(f"{path}.tool_calls is only for an assistant's message")
    if (role is Role.TOOL) != (given.tool_call_id is not None):
        raise InvalidRequest(f"{path}.tool_call_id {'is missing' if role is Role.TOOL else 'is only for a tool'}")
    return Message(
        role,
        _parts(given, path),
        given.name,
        given.reasoning_content or "" if role is Role.ASSISTANT else "",
        parse_calls(given.tool_calls or (), f"{path}.tool_calls"),
        given.tool_call_id,
    )


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
        raise unsupported(f"{path}.type", f"{shown} is not supported: {what} cannot be read", is_value=True)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"{path}.{part.type} is missing")
    return Part(text)


# Encoding

NewParser = Callable[[], AnswerParser]


class ChatChoices:
    """Chunks of chat choices: first the role, then the content, then the finish reason."""

    def __init__(self, new_parser: NewParser) -> None:
        self._new_parser = new_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._arguments: dict[int, str] = {}  # of the last tool call of each choice

    def begin(self, index: int) -> ChatChunkChoice:
        self._parsers[index] = self._new_parser()
        return ChatChunkChoice(index, ChatDelta("", "assistant"))

    def grow(self, index: int, delta: Delta) -> list[ChatChunkChoice]:
        parser = self._parsers[index]
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish(is_cut=delta.finish_reason is FinishReason.LENGTH)
        chunks = self.grow_pieces(index, pieces)
        if delta.logprobs:  # the tokens may have become text, reasoning or a call
            chunks = chunks or [ChatChunkChoice(index, ChatDelta(""))]
            chunks[0].logprobs = _chat_logprobs(delta.logprobs)
        return chunks

    def grow_pieces(self, index: int, pieces: Sequence[Piece]) -> list[ChatChunkChoice]:
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._arguments[index] = ""
            elif isinstance(piece, CallArguments):
                self._arguments[index] += piece.text
        return [ChatChunkChoice(index, _delta_of(piece)) for piece in pieces]

    def parser(self, index: int) -> AnswerParser | None:
        parser = self._parsers[index]
        return None if isinstance(parser, PlainAnswer) else parser

    def text(self, index: int, piece: Words | Thought) -> ChatChunkChoice:
        return ChatChunkChoice(index, _delta_of(piece))

    def end(self, index: int, finish_reason: str, stop: str | None) -> ChatChunkChoice:
        reason = _reason(finish_reason, self._arguments.get(index))
        return ChatChunkChoice(index, ChatDelta(), finish_reason=reason, stop_reason=stop_reason(stop))


def chat_stream(
    head: AnswerHead,
    request: InferenceRequest,
    *,
    include_usage: bool,
    has_running_usage: bool = False,
    new_parser: NewParser = PlainAnswer,
) -> StreamEncoder:
    return StreamEncoder(
        head,
        ChatChoices(new_parser),
        n=request.params.n,
        num_prompts=len(request.prompts),
        include_usage=include_usage,
        has_running_usage=has_running_usage,
    )


def whole_chat(
    head: AnswerHead,
    outputs: Sequence[GenerationOutput],
    usage: Usage,
    cache: CacheView | None,
    new_parser: NewParser = PlainAnswer,
    num_thought_tokens: int = 0,
) -> ChatCompletion:
    choices: list[ChatChoice] = []
    for one in (one for output in outputs for one in output.completions):
        parser = new_parser()
        is_cut = one.finish_reason is FinishReason.LENGTH
        message = _answer_message([*parser.push(one.text), *parser.finish(is_cut=is_cut)])
        logprobs = None if one.logprobs is None else _chat_logprobs(one.logprobs)
        arguments = message.tool_calls[-1].function.arguments if message.tool_calls else None
        reason = _reason(finish_reason(one.finish_reason, one.error), arguments)
        choices.append(ChatChoice(len(choices), message, logprobs, reason, stop_reason(one.stop)))
    return ChatCompletion(
        **msgspec.structs.asdict(head),
        choices=choices,
        usage=usage_body(usage, num_thought_tokens),
        cache=UNSET if cache is None else cache,
    )


def _delta_of(piece: Piece) -> ChatDelta:
    match piece:
        case Thought(text):
            return ChatDelta(reasoning_content=text)
        case Words(text):
            return ChatDelta(text)
        case CallStart(number, call_id, name):
            return ChatDelta(tool_calls=[ToolCallDelta(number, FunctionDelta("", name), call_id, "function")])
        case CallArguments(number, text):
            return ChatDelta(tool_calls=[ToolCallDelta(number, FunctionDelta(text))])


def _answer_message(pieces: Sequence[Piece]) -> ChatAnswerMessage:
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    words = "".join(piece.text for piece in pieces if isinstance(piece, Words))
    calls: list[AnswerToolCall] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append(AnswerToolCall(piece.call_id, FunctionCall(piece.name, "")))
        elif isinstance(piece, CallArguments):
            calls[piece.number].function.arguments += piece.text
    return ChatAnswerMessage(
        words or (None if calls else ""), reasoning_content=thought or UNSET, tool_calls=calls or UNSET
    )


def _reason(finish_reason: str, last_arguments: str | None) -> str:
    """tool_calls if the last call is complete; an answer that was cut off, also by a stop string, keeps its reason."""
    is_called = finish_reason == "stop" and last_arguments is not None and _is_json(last_arguments)
    return "tool_calls" if is_called else finish_reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return text.endswith("}")
    except ValueError:
        return False
    return True


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
