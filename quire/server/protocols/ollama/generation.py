"""`POST /api/chat` and `/api/generate`: Ollama's protocol around one `InferenceRequest` and one `ActiveRequest`.

Answers are streamed as lines of JSON unless `stream` is false. The last line has the counts and durations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from quire.core.values import FinishReason
from quire.engine.outputs import Completion, Delta, TokenLogprob
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.protocols.ollama.parsing import (
    NAMES,
    find_model,
    keep_alive_s,
    parse_chat,
    parse_generate,
    shape_field,
    unmet,
)
from quire.server.protocols.ollama.types import (
    AnswerFunction,
    OllamaAlternative,
    OllamaAnswer,
    OllamaAnswerCall,
    OllamaAnswerMessage,
    OllamaBody,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaLogprob,
)
from quire.server.protocols.openai.encoding import cache_view, finish_reason, finite, token_text
from quire.server.protocols.openai.parsing import protocol_field_names
from quire.server.protocols.support import answer_in_shape
from quire.server.request_context import IGNORED
from quire.text.stream import CallArguments, CallStart, Piece, PlainAnswer, Thought, Words

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.model_service import ActiveRequest, InferenceRequest
    from quire.server.models import Model
    from quire.server.request_context import RequestContext

_MARK = "<value>"
_encode = msgspec.json.Encoder().encode


async def chat(context: RequestContext) -> Response:
    body = await context.body(OllamaChatRequest)
    model = find_model(context.models, body.model)
    if not body.messages:
        return await _load_or_unload(context, body, model, chat_answer)
    return await _generate(context, body, replace(await context.parse(parse_chat, body), model=model.name), chat_answer)


async def generate(context: RequestContext) -> Response:
    body = await context.body(OllamaGenerateRequest)
    model = find_model(context.models, body.model)
    if not body.prompt:
        return await _load_or_unload(context, body, model, generate_answer)
    request = replace(await context.parse(parse_generate, body), model=model.name)
    if body.context:
        service = await context.use(model.name)
        with protocol_field_names(NAMES):
            prompt = (*body.context, *await service.encode(request.prompts[0], context.key.name))
        request = replace(request, prompts=(prompt,))
    return await _generate(context, body, request, generate_answer, is_raw=bool(body.raw), has_context=not body.raw)


async def _generate(
    context: RequestContext,
    body: OllamaBody,
    request: InferenceRequest,
    make: MakeAnswer,
    *,
    is_raw: bool = False,
    has_context: bool = False,
) -> Response:
    async def respond(request: InferenceRequest) -> Response:
        active = await context.open(request)
        context.note(IGNORED, unmet(body, context.service, is_raw=is_raw))
        reply = Reply(active, body.model, make, has_context=has_context)
        if request.is_streaming:
            return await context.stream(active, reply)
        one = (await context.result(active))[0].completions[0]
        return await context.json_of(partial(reply.whole, one), active.num_values)

    with protocol_field_names(NAMES):
        return await answer_in_shape(request, shape_field(body), respond)


async def _load_or_unload(context: RequestContext, body: OllamaBody, model: Model, make: MakeAnswer) -> Response:
    """Load or unload the model, as a request without a prompt does."""
    if keep_alive_s(body.keep_alive) == 0:
        if not context.key.is_admin:
            text = "keep_alive = 0 without a prompt unloads the model"
            raise ApiError(
                Kind.PERMISSION, f"{text}: the key {context.key.name!r} is not an admin key", param="keep_alive"
            )
        if model.is_pinned:
            raise InvalidRequest(f"model = {model.name!r} is pinned: unpin it first")
        await context.wait_for(context.models.begin(context.models.unload(model)))
        return context.json(make(AnswerPart(), _head(body.model, done=True, done_reason="unload")))
    if body.keep_alive is not None:
        context.note(IGNORED, ["keep_alive"])
    await context.use(model.name)
    return context.json(make(AnswerPart(), _head(body.model, done=True, done_reason="load")))


# Responses


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, or the whole answer."""

    words: str = ""
    thought: str = ""
    calls: list[OllamaAnswerCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.words or self.thought or self.calls)


MakeAnswer = Callable[[AnswerPart, dict[str, Any]], OllamaAnswer]


def chat_answer(part: AnswerPart, head: dict[str, Any]) -> OllamaChatAnswer:
    message = OllamaAnswerMessage(part.words, thinking=part.thought or UNSET, tool_calls=part.calls or UNSET)
    return OllamaChatAnswer(message=message, **head)


def generate_answer(part: AnswerPart, head: dict[str, Any]) -> OllamaGenerateAnswer:
    return OllamaGenerateAnswer(response=part.words, thinking=part.thought or UNSET, **head)


class AnswerCollector:
    """Collects the pieces of an answer. A tool call is held until it is complete: its arguments are sent as an object.

    A call that was cut off is left out: its arguments are not valid JSON, and a client would run it without them. The
    answer's `done_reason` reports the cut.
    """

    def __init__(self) -> None:
        self._call: CallStart | None = None
        self._arguments = ""

    def take(self, pieces: Iterable[Piece], *, is_last: bool) -> AnswerPart:
        part = AnswerPart()
        for piece in pieces:
            match piece:
                case CallArguments(_, text):
                    self._arguments += text
                    continue
                case CallStart():
                    self._end_call(part)
                    self._call = piece
                case Words(text):
                    self._end_call(part)
                    part.words += text
                case Thought(text):
                    part.thought += text
        if is_last:
            self._end_call(part)
        return part

    def _end_call(self, part: AnswerPart) -> None:
        call, self._call = self._call, None
        text, self._arguments = self._arguments, ""
        if call is None:
            return
        try:
            arguments = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return
        part.calls.append(OllamaAnswerCall(call.call_id, AnswerFunction(call.number, call.name, arguments)))


class Reply:
    """Encodes the response to one request, as a whole or, as an `EventEncoder`, as a stream."""

    waits_for_start = False

    def __init__(self, active: ActiveRequest, model: str, make: MakeAnswer, *, has_context: bool = False) -> None:
        self._active = active
        self._model = model  # the name that the client used
        self._make = make
        self._has_context = has_context
        self._parser, self._collector = active.new_parser(), AnswerCollector()
        self._reason = "stop"
        self._frame = _split(make, model) if isinstance(self._parser, PlainAnswer) else None

    def begin(self) -> bytes:
        return b""

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        pieces = self._parser.push("".join(delta.text for _, delta in batch))
        last = batch[-1][1]
        if last.finish_reason is not None:
            self._reason = finish_reason(last.finish_reason, last.error)
            pieces += self._parser.finish(is_cut=last.finish_reason is FinishReason.LENGTH)
        part = self._collector.take(pieces, is_last=last.finish_reason is not None)
        return self._line(part, [entry for _, delta in batch for entry in delta.logprobs])

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        del prompt, index  # there is one
        if self._frame is None:
            return self._line(self._collector.take(self._parser.push(text), is_last=False))
        before, middle, after = self._frame
        return b"".join((before, _encode(rfc3339(time.time())), middle, _encode(text), after))

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        """None: each line has its time."""

    def finish(self) -> bytes:
        return _encode(self._make(AnswerPart(), self._end(self._reason))) + b"\n"

    def fail(self, error: ApiError) -> bytes | None:
        del error
        return None

    def _line(self, part: AnswerPart, entries: Sequence[TokenLogprob] = ()) -> bytes:
        if not part and not entries:
            return b""
        return _encode(self._make(part, _head(self._model, logprobs=_logprobs(entries)))) + b"\n"

    def whole(self, one: Completion) -> OllamaAnswer:
        parser = self._active.new_parser()
        pieces = [*parser.push(one.text), *parser.finish(is_cut=one.finish_reason is FinishReason.LENGTH)]
        part = AnswerCollector().take(pieces, is_last=True)
        end = self._end(finish_reason(one.finish_reason, one.error))
        return self._make(part, end | {"logprobs": _logprobs(one.logprobs or ())})

    def _end(self, reason: str) -> dict[str, Any]:
        active = self._active
        usage, cache = active.usage, cache_view(active)
        end = _head(
            self._model,
            done=True,
            done_reason=reason,
            total_duration=_ns(time.monotonic() - active.caller.arrived_s),
            load_duration=_ns(active.load_s),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_ns(active.prefill_s),
            eval_count=usage.completion_tokens,
            eval_duration=_ns(active.decode_s),
            cache=UNSET if cache is None else cache,
        )
        if self._has_context:
            answer = active.generations[0].answers.output().completions[0]
            end["context"] = [*active.requests[0].prompt, *answer.token_ids]
        return end


def _split(make: MakeAnswer, model: str) -> tuple[bytes, bytes, bytes]:
    """The bytes of a line of plain text before its time, between time and text, and after the text."""
    line = _encode(make(AnswerPart(_MARK), {"model": model, "created_at": _MARK})) + b"\n"
    before, middle, after = line.rsplit(_encode(_MARK), 2)
    return before, middle, after


def _head(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "created_at": rfc3339(time.time()), **more}


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ns(seconds: float | None) -> int:
    """Nanoseconds, at least 1: clients divide by it, and an answer of one token has a decode time of 0."""
    return max(1, int((seconds or 0.0) * 1e9))


def _logprobs(entries: Iterable[TokenLogprob]) -> Any:
    found = [
        OllamaLogprob(
            token_text(entry),
            finite(entry.logprob),
            list(entry.data),
            [OllamaAlternative(token_text(top), finite(top.logprob), list(top.data)) for top in entry.top] or UNSET,
        )
        for entry in entries
    ]
    return found or UNSET
