"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol.

Anthropic's API leaves two cases open. Here, an answer without text has one empty text block, and max_tokens = 0 fills
the cache and returns no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.values import FinishReason
from quire.engine.outputs import Delta
from quire.errors import RequestFailed
from quire.server.errors import ApiError
from quire.server.model_service import InferenceRequest, Prompt
from quire.server.protocols.anthropic.encoding import BlockWriter, blocks_of
from quire.server.protocols.anthropic.parsing import (
    TTL_S,
    Edited,
    apply,
    conversation,
    grammar_of,
    shape_field,
    shows_thoughts,
    to_inference_request,
)
from quire.server.protocols.anthropic.types import (
    ANTHROPIC_MODELS,
    AnswerBlock,
    AppliedEdits,
    CacheCreation,
    CountTokensRequest,
    DeltaUsage,
    Event,
    MessageDelta,
    MessageResponse,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    OriginalTokens,
    StopDelta,
    TokenCount,
    ToolUseBlock,
    refuse_unsupported,
)
from quire.server.protocols.support import CacheView, answer_in_shape, view
from quire.server.request_context import IGNORED
from quire.text.messages import ChatRequest
from quire.text.stream import Piece, PlainAnswer, Thought, Words

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.model_service import ActiveRequest, ModelService
    from quire.server.request_context import RequestContext

_MARK = "<text>"
_encoder = msgspec.json.Encoder()


async def messages(context: RequestContext) -> Response:
    body = await context.body(MessagesRequest)
    request = await context.parse(to_inference_request, body)
    edited = await _edited(context, body, request.prompts[0])
    request = replace(request, model=_served_name(context, body.model), prompts=(edited.chat,))
    return await answer_in_shape(request, shape_field(body), partial(_respond, context, body, edited))


async def _respond(
    context: RequestContext, body: MessagesRequest, edited: Edited, request: InferenceRequest
) -> Response:
    active = await context.open(request)
    num_hour_tokens = hour_tokens(context.service, active)
    edits = UNSET if body.context_management is None else AppliedEdits(edited.applied)
    reply = Reply(active, body.max_tokens, num_hour_tokens, shows_thoughts=shows_thoughts(body), edits=edits)
    if request.is_streaming:
        return await context.stream(active, MessageEvents(reply, active))
    one = (await context.result(active))[0].completions[0]
    return await context.json_of(partial(reply.answer, one.text, one.finish_reason, one.stop), active.num_values)


async def count_tokens(context: RequestContext) -> Response:
    """Count the input tokens that `messages` would report for the same conversation: the sum of the three kinds."""
    body = await context.body(CountTokensRequest)
    refuse_unsupported(body)
    await context.parse(grammar_of, body)  # raises for a body that `messages` would refuse
    found = await context.parse(conversation, body)
    context.note_ignored(found.ignored)
    edited = await _edited(context, body, found.chat)
    service = await context.use(_served_name(context, body.model))
    num_tokens = len(await service.encode(edited.chat, context.key.name))
    if body.context_management is None:
        return context.json(TokenCount(num_tokens))
    original = num_tokens if edited.num_original_tokens is None else edited.num_original_tokens
    return context.json(TokenCount(num_tokens, OriginalTokens(original)))


def _served_name(context: RequestContext, name: str) -> str | None:
    """Use the default model for the names of Anthropic's models, which agents send. The header names the field."""
    if name in context.models.names or not name.startswith(ANTHROPIC_MODELS):
        return name
    context.note(IGNORED, ("model",))
    return None


async def _edited(context: RequestContext, body: CountTokensRequest, chat: Prompt) -> Edited:
    """Apply `context_management`. Counts tokens only if an edit could clear something."""
    assert isinstance(chat, ChatRequest)

    async def count(chat: ChatRequest) -> int:
        return len(await (await context.use(_served_name(context, body.model))).encode(chat, context.key.name))

    return await apply(body.context_management, chat, count)


def hour_tokens(service: ModelService, active: ActiveRequest) -> int:
    """Number of prompt tokens pinned for an hour; the others of `pinned_tokens` are pinned for five minutes."""
    request = active.requests[0]
    pins = tuple(pin for pin in request.pins if pin.ttl_s > TTL_S["5m"])
    return service.pinned_tokens(replace(request, pins=pins)) if pins else 0


class Reply:
    """Encodes the response to one request, as a stream or as a whole."""

    def __init__(
        self,
        active: ActiveRequest,
        max_tokens: int,
        num_hour_tokens: int = 0,
        *,
        shows_thoughts: bool = False,
        edits: AppliedEdits | UnsetType = UNSET,
    ) -> None:
        self._active = active
        self._edits = edits
        self._max_tokens = max_tokens
        self._num_hour_tokens = num_hour_tokens
        self._shows_thoughts = shows_thoughts

    def answer(self, text: str, finish: FinishReason, stop: str | None) -> MessageResponse:
        parser = self._active.new_parser()
        pieces = [*parser.push(text), *parser.finish(is_cut=finish is FinishReason.LENGTH)]
        content = blocks_of(pieces, shows_thoughts=self._shows_thoughts)
        end = self._stop(finish, stop, has_calls=any(isinstance(block, ToolUseBlock) for block in content))
        return self._message(content if self._max_tokens else [], end, self._cache())

    def start(self) -> MessageStart:
        return MessageStart(self._message([]))

    def end(self, finish: FinishReason | None, stop: str | None, *, has_calls: bool) -> MessageDelta:
        return MessageDelta(
            self._stop(finish, stop, has_calls=has_calls), self._delta_usage(), self._edits, self._cache()
        )

    @property
    def shows_thoughts(self) -> bool:
        return self._shows_thoughts

    @property
    def is_empty(self) -> bool:
        """Whether the client asked for no tokens: the answer has no blocks."""
        return not self._max_tokens

    def usage(self) -> MessageUsage:
        usage = self._active.usage
        read = usage.cached_tokens
        created = max(0, self._active.pinned_tokens - read)
        created_1h = min(created, max(0, self._num_hour_tokens - read))
        return MessageUsage(
            input_tokens=usage.prompt_tokens - read - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(created - created_1h, created_1h),
            output_tokens=usage.completion_tokens if self._max_tokens else 0,
        )

    def _delta_usage(self) -> DeltaUsage:
        usage = self.usage()
        return DeltaUsage(
            input_tokens=usage.input_tokens,
            cache_creation_input_tokens=usage.cache_creation_input_tokens,
            cache_read_input_tokens=usage.cache_read_input_tokens,
            output_tokens=usage.output_tokens,
        )

    def _message(
        self, content: list[AnswerBlock], end: StopDelta | None = None, cache: CacheView | UnsetType = UNSET
    ) -> MessageResponse:
        return MessageResponse(
            id=f"msg_{self._active.request_id}",
            model=self._active.model,
            content=content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=self.usage(),
            context_management=UNSET if end is None else self._edits,
            cache=cache,
        )

    def _stop(self, finish: FinishReason | None, stop: str | None, *, has_calls: bool) -> StopDelta:
        if not self._max_tokens:
            return StopDelta("max_tokens", None)
        if finish is FinishReason.LENGTH:
            is_all = self._active.usage.completion_tokens >= self._max_tokens
            return StopDelta("max_tokens" if is_all else "model_context_window_exceeded", None)
        if finish is not FinishReason.STOP:
            raise RequestFailed("the answer was cut off before its end")
        if stop is not None:
            return StopDelta("stop_sequence", stop)
        return StopDelta("tool_use" if has_calls else "end_turn", None)

    def _cache(self) -> CacheView | UnsetType:
        explanation = self._active.cache
        if not self._active.request.wants_cache or explanation is None:
            return UNSET
        return view(explanation, self._active.usage.prompt_tokens, self._active.cache_text)


class MessageEvents:
    """The `EventEncoder` of /v1/messages. Events come in the SDK's order; the first has the prompt's cache hit."""

    waits_for_start = True

    def __init__(self, reply: Reply, active: ActiveRequest) -> None:
        self._reply = reply
        self._parser = active.new_parser()
        self._blocks = BlockWriter(shows_thoughts=reply.shows_thoughts)
        self._finish: FinishReason | None = None
        self._stop: str | None = None
        self._frames: dict[tuple[type[Piece], int], tuple[bytes, bytes]] = {}  # by kind and number of the block

    def begin(self) -> bytes:
        return event(self._reply.start())

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        pieces = self._parser.push("".join(delta.text for _, delta in batch))
        last = batch[-1][1]
        if last.finish_reason is not None:
            self._finish, self._stop = last.finish_reason, last.stop
            pieces += self._parser.finish(is_cut=self._finish is FinishReason.LENGTH)
        return self._events(pieces)

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """Text that continues the open block is put between bytes that were encoded before."""
        del prompt, index  # there is one
        pieces = self._parser.push(text)
        if len(pieces) != 1 or not self._blocks.continues(piece := pieces[0]):
            return self._events(pieces)
        before, after = self._frame(type(piece))
        return before + _encoder.encode(piece.text) + after

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        del prompt, index
        is_constant = isinstance(self._parser, PlainAnswer) and self._blocks.continues(Words(""))
        return self._frame(Words) if is_constant else None

    def _frame(self, kind: type[Words] | type[Thought]) -> tuple[bytes, bytes]:
        """The bytes around the text of the open block, which is of this kind."""
        place = kind, self._blocks.num_blocks
        if (frame := self._frames.get(place)) is None:
            (delta,) = self._blocks.take([kind(_MARK)])
            before, after = event(delta).rsplit(_encoder.encode(_MARK), 1)
            frame = self._frames[place] = before, after
        return frame

    def finish(self) -> bytes:
        end = self._reply.end(self._finish, self._stop, has_calls=self._blocks.has_calls)
        return b"".join(map(event, [*(() if self._reply.is_empty else self._blocks.end()), end, MessageStop()]))

    def fail(self, error: ApiError) -> bytes | None:
        del error
        return None

    def _events(self, pieces: Sequence[Piece]) -> bytes:
        return b"" if self._reply.is_empty else b"".join(map(event, self._blocks.take(pieces)))


def event(value: Event) -> bytes:
    name = value.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"
