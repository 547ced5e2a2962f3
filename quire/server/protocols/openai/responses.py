"""POST /v1/responses: OpenAI's Responses API, without stored responses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from quire.engine.outputs import Delta, TokenLogprob
from quire.server.errors import ApiError, Kind
from quire.server.model_service import InferenceRequest
from quire.server.protocols.openai.encoding import TIERS, cache_view, finish_reason, finite, token_text
from quire.server.protocols.openai.parsing import protocol_field_names
from quire.server.protocols.openai.responses_parsing import (
    AnswerItems,
    client_tools,
    names_of,
    parse_responses,
    shape_field,
)
from quire.server.protocols.openai.responses_types import (
    ErrorCode,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTextDelta,
    OutputTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)
from quire.server.protocols.openai.types import ChatTokenLogprob, TopLogprob
from quire.server.protocols.support import answer_in_shape
from quire.text.stream import PlainAnswer

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.model_service import ActiveRequest
    from quire.server.request_context import RequestContext

_MARK = "<text>"
_NUMBER = 1 << 62  # placeholder for the event number; no real event reaches it
_encode = msgspec.json.Encoder().encode
_CODES: dict[Kind, ErrorCode] = {Kind.RATE_LIMITED: "rate_limit_exceeded", Kind.OVERLOADED: "rate_limit_exceeded"}


async def responses(context: RequestContext) -> Response:
    body = await context.body(ResponsesRequest)
    request = await context.parse(parse_responses, body)
    with protocol_field_names(names_of(body)):
        return await answer_in_shape(request, shape_field(body), partial(_respond, context, body))


async def _respond(context: RequestContext, body: ResponsesRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    reply = Reply(active, body)
    if request.is_streaming:
        return await context.stream(active, reply)
    await reply.collect()
    return await context.json_of(reply.finished, active.num_values)


class Reply:
    """Encodes the response to one request, as a whole or, as an `EventEncoder`, as a stream."""

    waits_for_start = True

    def __init__(self, active: ActiveRequest, body: ResponsesRequest) -> None:
        self._active = active
        self._echoed = _echoed_fields(active, body)
        self._items = AnswerItems(active.request_id, client_tools(body))
        self._parser = active.new_parser()
        self._is_whole = True
        self._num_events = 0
        # The bytes around number and text in the events of plain text, once the only message of the answer is open.
        self._frame: tuple[bytes, bytes, bytes] | None = None
        self._is_plain = isinstance(self._parser, PlainAnswer)

    async def collect(self) -> None:
        """Wait for the whole answer, which `finished` then returns."""
        async with self._active:
            async for batch in self._active.batches():
                self._take(batch)

    def begin(self) -> bytes:
        begun = self._object("in_progress")
        return self._frames([ResponseCreated(response=begun), ResponseInProgress(response=begun)])

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return self._frames(self._take(batch))

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        del prompt, index  # there is one
        if self._frame is not None and self._items.extend_message(text):
            before, middle, after = self._frame
            self._num_events += 1
            return b"".join((before, b"%d" % (self._num_events - 1), middle, _encode(text), after))
        events = self._items.take(self._parser.push(text))
        if self._is_plain and isinstance(events[-1], OutputTextDelta):
            self._frame = _split(events[-1])
        return self._frames(events)

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        """None: each event has a number."""

    def finish(self) -> bytes:
        final = self.finished()
        return self._frames([(ResponseCompleted if self._is_whole else ResponseIncomplete)(response=final)])

    def fail(self, error: ApiError) -> bytes | None:
        return self._frames([ResponseFailed(response=self._failed(error))])

    def _take(self, batch: Iterable[tuple[int, Delta]]) -> list[Event]:
        events: list[Event] = []
        for _, delta in batch:
            events += self._items.take(self._parser.push(delta.text), tuple(map(_logprob, delta.logprobs)))
            if delta.finish_reason is not None:
                self._is_whole = finish_reason(delta.finish_reason, delta.error) != "length"
                events += self._items.take(self._parser.finish(is_cut=not self._is_whole))
                events += self._items.finish(is_whole=self._is_whole)
        return events

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            frames.append(_event(event))
        return b"".join(frames)

    def finished(self) -> ResponseObject:
        cache = cache_view(self._active)
        return self._object(
            "completed" if self._is_whole else "incomplete",
            incomplete_details=None if self._is_whole else IncompleteDetails(),
            completed_at=int(time.time()) if self._is_whole else None,
            usage=self._usage(),
            cache=UNSET if cache is None else cache,
        )

    def _failed(self, error: ApiError) -> ResponseObject:
        code = _CODES.get(error.kind, "server_error")
        return self._object("failed", error=ResponseError(code, error.message), usage=self._usage())

    def _object(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        return ResponseObject(**self._echoed, status=status, output=tuple(self._items.done), **more)

    def _usage(self) -> ResponseUsage:
        usage = self._active.usage
        written = max(0, self._active.pinned_tokens - usage.cached_tokens)
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, written),
            usage.completion_tokens,
            OutputTokensDetails(self._active.num_thought_tokens),
            usage.total_tokens,
        )


def _split(event: OutputTextDelta) -> tuple[bytes, bytes, bytes]:
    """The bytes of an event of text before its number, between number and text, and after the text."""
    marked = msgspec.structs.replace(event, sequence_number=_NUMBER, delta=_MARK)
    head, after = _event(marked).rsplit(_encode(_MARK), 1)
    before, middle = head.split(b"%d" % _NUMBER, 1)
    return before, middle, after


def _event(event: Event) -> bytes:
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _echoed_fields(active: ActiveRequest, body: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request that the response repeats, with defaults filled in."""
    sampling = active.requests[0].sampling
    choice, text = body.tool_choice, body.text
    form = {"type": "text"} if text is None or text.format is None else _plain(text.format)
    verbosity = None if text is None else text.verbosity
    return {
        "id": f"resp_{active.request_id}",
        "created_at": active.created,
        "instructions": body.instructions,
        "max_output_tokens": active.request.params.max_tokens,
        "metadata": body.metadata or {},
        "model": active.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {} if body.reasoning is None else _plain(body.reasoning),
        "service_tier": TIERS[active.priority],
        "temperature": sampling.temperature,
        "text": {"format": form} | ({} if verbosity is None else {"verbosity": verbosity}),
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else _plain(choice),
        "tools": [_plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "user": body.user if isinstance(body.user, str) else None,
    }


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    """Convert to a dict without null fields."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return {name: entry for name, entry in found.items() if entry is not None}


def _logprob(entry: TokenLogprob) -> ChatTokenLogprob:
    tops = [TopLogprob(token_text(top), finite(top.logprob), list(top.data)) for top in entry.top]
    return ChatTokenLogprob(token_text(entry), finite(entry.logprob), list(entry.data), tops)
