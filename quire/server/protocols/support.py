"""What all protocols share.

Requests: unsupported fields, values of fields, fields that constrain an answer, errors of schemas, turns. A field that
a protocol defines and quire does not support is refused by name if it would change the answer, unless its value
requests nothing: an answer that ignores `modalities` is a wrong answer. A field that is only a hint or a label is
accepted without effect. The tables are in each protocol's file. A new feature removes its row from the table. Fields of
OpenAI, vLLM, SGLang and llama.cpp bodies that constrain the format of an answer are added to types here. Anthropic's
and Ollama's protocols have their own fields for this and refuse these by name.

Answers: the pieces of an answer make items, and the `AnswerEncoder` of a protocol makes events of the items. A stream
and a whole answer are made by the same encoder from the same items. The cache explanation is the same in all.

`EventStream` is a response with keep-alives during silence. Two ways lead to the client:

- A new token is encoded and written to the transport in the call that received it from the worker. This is
  the path of nearly all tokens: see `TokenWriter`.
- Everything else (the start, the end, errors, text that arrives while the client does not read) is queued as deltas.
  The task of the response takes them and sends them with ASGI. While it is not waiting for deltas, tokens are queued
  too, so the order is kept.

The engine never waits for a reader: while the client does not read fast enough, tokens are queued, so a slow reader
gets fewer and longer writes. The connection of a reader that does not read is aborted by `HttpProtocol`.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import FinishReason, Level
from quire.engine.generation import Completion, Delta, GenerationOutput, TokenLogprob
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Dialect, Kind, api_error
from quire.server.http import BODY_WRITER, CHUNK_SIZES, BodyWriter
from quire.server.models import ActiveRequest, Breakpoint, ClientGone, InferenceRequest
from quire.server.request_context import RequestContext
from quire.text.grammar import Grammar
from quire.text.messages import (
    AnswerParser,
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Piece,
    PlainAnswer,
    Role,
    Thought,
    Tool,
    ToolCall,
    Words,
)
from quire.text.schemas import SchemaNotHeld, SchemaProblem
from quire.text.tokenizer import Excerpt
from quire.text.tool_grammars import ToolsNotHeld, guilty_tool, held_parameters

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


EMPTY: tuple[Any, ...] = (None, "", [], {})  # values that request nothing in nearly all fields


class Unsupported(NamedTuple):
    """A row of a table of refused fields."""

    why: str
    harmless: tuple[Any, ...] = ()  # values that request nothing, in addition to empty ones
    empty: tuple[Any, ...] = EMPTY

    def allows(self, value: Any) -> bool:
        """Whether the value, or every member of an object, requests nothing. A boolean never equals a number here."""
        if isinstance(value, dict) and value and all(member in self.empty for member in value.values()):
            return True
        known = (*self.empty, *self.harmless)
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def refuse_unsupported(
    part: object, table: Mapping[str, Unsupported], prefix: str = "", *, shown: tuple[type, ...] = ()
) -> None:
    """Raise ApiError for the first field of this part of a body that requests an unsupported feature.

    `prefix`: the path of the part. `shown`: types of values that the message repeats; a prompt must not be repeated.
    """
    for name, row in table.items():
        check_supported(f"{prefix}{name}", getattr(part, name, None), row, shown=shown)


def check_supported(path: str, value: Any, row: Unsupported, *, shown: tuple[type, ...] = ()) -> None:
    """Raise ApiError if this value of an unsupported field requests something."""
    if value is not None and not row.allows(value):
        text = f" = {value!r:.80}" if isinstance(value, shown) else ""
        raise unsupported(path, f"{path}{text} is not supported: {row.why}")


def unsupported(path: str, message: str, *, is_value: bool = False) -> ApiError:
    reason = "unsupported_value" if is_value else "unsupported_parameter"
    return ApiError(Kind.INVALID, message, param=path, reason=reason)


def unsupported_value(path: str, value: object, why: str, *, is_value: bool = True) -> ApiError:
    return unsupported(path, f"{path} = {value!r:.80} is not supported: {why}", is_value=is_value)


def given(value: T | None, path: str) -> T:
    """The value of a field that must be set."""
    if value is None:
        raise ApiError(Kind.INVALID, f"{path} is missing", param=path)
    return value


def one_of(path: str, value: str | None, known: Iterable[str], more: str = "") -> str:
    """The value, if it is a known one."""
    names = list(known)
    if value not in names:
        raise ApiError(Kind.INVALID, f"{path} = {value!r:.80} is not one of {', '.join(names)}{more}", param=path)
    return value


def encoded_arguments(arguments: Mapping[str, Any] | None, path: str) -> str:
    """The JSON of a call's arguments, which Anthropic and Ollama send as an object."""
    try:
        return msgspec.json.encode(arguments or {}).decode()
    except RecursionError:
        raise ApiError(Kind.INVALID, f"{path} is nested too deeply", param=path) from None


def decoded_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object. None: the answer was cut off in them."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def message_with_field(error: ApiError) -> str:
    """The message of an error in a protocol that has no other member for the field."""
    text = error.message
    if error.param is not None and error.param not in text:
        text = f"{error.param}: {text}"
    return text.encode(errors="replace").decode()  # an error must never fail


def described(description: str | None = None, **schema: Any) -> Meta:
    """A description and bounds of a field, for the schema only."""
    return Meta(description=description, extra_json_schema=schema or None)


SHAPE_FIELDS: dict[str, tuple[Any, ...]] = {  # field -> values that request nothing, in addition to empty ones
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "grammar": (),
    "ebnf": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


def with_fields(
    refused: Mapping[str, Unsupported], accepted: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[S]], type[S]]:
    """Add the fields of these tables, with their descriptions, to a body."""
    about = {field: f"Not supported: {row.why}." for field, row in refused.items()}
    about |= {field: f"Accepted, without effect: {why}." for field, why in accepted.items()}
    fields = [(field, Annotated[Any, Meta(description=text)], None) for field, text in about.items()]

    def add(body: type[S]) -> type[S]:
        doc = {"__doc__": body.__doc__}
        made = msgspec.defstruct(
            body.__name__, fields, bases=(body,), kw_only=True, module=body.__module__, namespace=doc
        )
        return cast("type[S]", made)

    return add


MAX_FREED_ALONE = 2  # retries that drop one schema; the next drops all that are not strict, since each compiles again
MAX_PATH_CHARS = 300
MAX_SCHEMA_CHARS = 512 * 1024  # of all tools with descriptions: they are processed on the event loop
# The compiler's message, without the position before it and the source excerpt after it.
_COMPILER_MESSAGE = re.compile(
    r"(?:grammar: )?(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?(?P<what>.*?)(?: \d+ \| .*)?$"
)


def with_unenforced(request: InferenceRequest) -> InferenceRequest:
    """Add the paths of all schema keywords that are not enforced.

    Raises ApiError for a strict tool whose schema cannot be enforced.
    """
    grammar = request.params.grammar
    names = [] if grammar is None else [f"{request.format_field}.{path}" for path in grammar.unenforced]
    tools = _callable_tools(request)
    num_chars = sum(len(str(tool.parameters)) for tool in tools)
    if num_chars > MAX_SCHEMA_CHARS:
        raise ApiError(Kind.INVALID, f"tools have schemas of {num_chars} characters, more than {MAX_SCHEMA_CHARS}")
    for tool in tools:
        try:
            names += [f"{_indexed(tool.schema_path)}.{path}" for path in held_parameters(tool).unenforced]
        except SchemaNotHeld as error:
            raise shape_error(tool.schema_path, error) from None
    return replace(request, unenforced=(*request.unenforced, *names)) if names else request


def _indexed(path: str) -> str:
    """Convert Anthropic's `tools.0.input_schema` to `tools[0].input_schema`, the form in headers."""
    return re.sub(r"^tools\.(\d+)", r"tools[\1]", path)


async def answer_in_shape(request: InferenceRequest, respond: Callable[[InferenceRequest], Awaitable[T]]) -> T:
    """Call `respond`. If the schema of a tool that is not strict does not compile, retry without that schema."""
    num_tries = 0
    while True:
        try:
            return await respond(request)
        except InvalidRequest as error:
            if not str(error).startswith("grammar"):
                raise
            request = _without_schemas(request, _guilty_tools(request, error, is_alone=num_tries < MAX_FREED_ALONE))
            num_tries += not isinstance(error, ToolsNotHeld)


def _guilty_tools(request: InferenceRequest, error: InvalidRequest, *, is_alone: bool) -> Sequence[Tool]:
    """The tools without whose schemas the rest may compile: one, or all that are not strict. Raises ApiError."""
    tools, number = _callable_tools(request), guilty_tool(str(error))
    if isinstance(error, ToolsNotHeld):
        if not error.loose:
            raise ApiError(Kind.INVALID, str(error).removeprefix("grammar: "), param="tools")
        return [tools[index] for index in error.loose]
    guilty = None if number is None or number >= len(tools) else tools[number]
    is_format = guilty is None and number is not None
    chat = request.prompts[0]
    all_tools = chat.tools if isinstance(chat, ChatRequest) else ()
    loose = [tool for tool in all_tools if not tool.is_strict and not tool.is_free]
    if is_format or not loose or (guilty is not None and guilty not in loose):
        raise shape_error(request.format_field or "tools" if guilty is None else guilty.schema_path, error)
    return [guilty] if guilty is not None and is_alone else loose


def _without_schemas(request: InferenceRequest, freed: Sequence[Tool]) -> InferenceRequest:
    chat = request.prompts[0]
    assert isinstance(chat, ChatRequest)
    tools = tuple(replace(tool, is_free=True) if tool in freed else tool for tool in chat.tools)
    names = (*request.unenforced, *(_indexed(tool.schema_path) for tool in freed))
    return replace(request, prompts=(replace(chat, tools=tools),), unenforced=names)


def made_grammar(field: str, make: Callable[[], Grammar]) -> Grammar:
    """Make the grammar. Raises ApiError that names the field."""
    try:
        return make()
    except InvalidRequest as error:
        raise shape_error(field, error) from None


def shape_error(field: str, error: InvalidRequest) -> ApiError:
    if isinstance(error, SchemaProblem):
        field = error.at(field)[:MAX_PATH_CHARS]
        return ApiError(Kind.INVALID, f"{field} {error.what}", param=field)
    found = _COMPILER_MESSAGE.match(str(error))
    what = str(error) if found is None else found["what"]
    return ApiError(Kind.INVALID, f"{field}: {what}", param=field)


def _callable_tools(request: InferenceRequest) -> Sequence[Tool]:
    chat = request.prompts[0]
    return chat.callable_tools if isinstance(chat, ChatRequest) else ()


@contextmanager
def protocol_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field at the beginning of an InvalidRequest to the protocol's name."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        found = re.match(r"[a-z_]+", text)
        if found is None or found[0] not in names:
            raise
        raise type(error)(names[found[0]] + text[found.end() :]) from None


@dataclass(slots=True)
class Turn:
    """A message under construction."""

    role: Role
    parts: list[Part] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None


class Turns(list[Turn]):
    """A conversation under construction, and the places after which its cache is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.breakpoints: list[Breakpoint] = []

    def add(self, turn: Turn) -> Turn:
        self.append(turn)
        return turn

    def keep(self, ttl_s: float) -> None:
        """Add a breakpoint after the last part."""
        self.breakpoints.append(Breakpoint(len(self) - 1, len(self[-1].parts) - 1, ttl_s))

    def messages(self) -> tuple[Message, ...]:
        return tuple(
            Message(turn.role, tuple(turn.parts), turn.name, "".join(turn.thoughts), tuple(turn.calls), turn.call_id)
            for turn in self
        )


# Follows "N of M prompt tokens come from the cache"; {at} is the first token that does not.
_WHY = {
    StopReason.COMPLETE: ". The last token is always computed",
    StopReason.DIVERGED: ". At token {at} the prompt differs from the cached ones",
    StopReason.EVICTED: ". The rest, from token {at} on, was cached, but has been evicted",
    StopReason.TOO_SHORT: ". The rest, from token {at} on, does not fill a block, and no cached block begins with it",
    StopReason.IN_FLIGHT: ". The rest, from token {at} on, is being computed by another request",
    StopReason.NOT_FOUND: ". No cached prompt continues like this one from token {at} on",
    StopReason.NO_STATE: ". Keys and values are cached up to token {kv}, but the nearest state of the recurrent layers"
    " is at token {at}: {again} tokens are computed again",
    StopReason.NO_WINDOW: ". Keys and values are cached up to token {kv}, but those of the layers with a window only up"
    " to token {at}: {again} tokens are computed again",
    StopReason.LOAD_FAILED: ". The rest, from token {at} on, was stored in host memory or on disk, but could not be"
    " loaded",
    StopReason.NOT_LOADED: ". The rest, from token {at} on, is stored in host memory or on disk, but is not loaded,"
    " because computing it is faster or too few blocks are free",
    StopReason.OFF: ". Caching is off, or the request needs every prompt token to be computed",
}


_LOADED = {Level.DEVICE: "in memory", Level.HOST: "loaded from host memory", Level.DISK: "loaded from disk"}


class CacheView(msgspec.Struct):
    matched_tokens: Annotated[int, Meta(description="Tokens of the prompt that come from the cache.")]
    matched_blocks: Annotated[int, Meta(description="Full blocks among them.")]
    prompt_tokens: int
    stopped_at: Annotated[int | None, Meta(description="The first token that is not reused; null if all are.")]
    reason: Annotated[
        str,
        Meta(
            description="Why the cache match ended.",
            extra_json_schema={"enum": [reason.value for reason in StopReason]},
        ),
    ]
    message: str
    stopped_text: Annotated[
        Excerpt | None,
        Meta(description="The text of this prompt before and from `stopped_at`; null: complete or off."),
    ] = None
    kv_tokens: Annotated[
        int | None,
        Meta(
            description="Tokens whose keys and values are cached, if a missing state or window is the reason why fewer"
            " are reused; otherwise null."
        ),
    ] = None
    source: Annotated[
        str | None,
        Meta(
            description="The slowest tier that matched tokens came from: device (the KV cache), host (host memory) or"
            " disk; null if none matched.",
            extra_json_schema={"enum": [*(tier.value for tier in Level), None]},
        ),
    ] = None
    loaded_tokens: Annotated[int, Meta(description="Matched tokens that were loaded from host memory or disk.")] = 0


def view(explanation: CacheExplanation, prompt_tokens: int, stopped_text: Excerpt | None = None) -> CacheView:
    is_complete = explanation.reason is StopReason.COMPLETE
    return CacheView(
        matched_tokens=explanation.num_tokens,
        matched_blocks=explanation.num_blocks,
        prompt_tokens=prompt_tokens,
        stopped_at=None if is_complete else explanation.stopped_at,
        reason=explanation.reason.value,
        message=_sentence(explanation, prompt_tokens, stopped_text),
        stopped_text=stopped_text,
        kv_tokens=explanation.num_kv_tokens or None,
        source=None if explanation.source is None else explanation.source.value,
        loaded_tokens=explanation.num_loaded_tokens,
    )


def _sentence(explanation: CacheExplanation, prompt_tokens: int, text: Excerpt | None) -> str:
    """One sentence that fits both a request and a dry run."""
    how_many = f"{explanation.num_tokens:,}" if explanation.num_tokens else "None"
    unit = "token comes" if prompt_tokens == 1 and explanation.num_tokens else "tokens come"
    at, kv = explanation.stopped_at, explanation.num_kv_tokens
    why = _WHY[explanation.reason].format(at=f"{at:,}", kv=f"{kv:,}", again=f"{kv - at:,}")
    loaded = ""
    if explanation.num_loaded_tokens and explanation.source is not None:
        loaded = f", {explanation.num_loaded_tokens:,} of them {_LOADED[explanation.source]}"
    if text is not None and explanation.reason is StopReason.DIVERGED:
        why += f', between "{text.before}" and "{text.after}"'
    return f"{how_many} of {prompt_tokens:,} prompt {unit} from the cache{loaded}{why}."


# Answers


LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


MARK = "<text>"
Event = dict[str, Any]
encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Item:
    """A text, a reasoning or a call of an answer."""

    sample: int  # index of the answer
    number: int  # in the answer
    first: Words | Thought | CallStart  # the piece that began it; its text is in `texts` too
    texts: list[str] = field(default_factory=list)  # without those that were put into a constant frame
    logprobs: list[Any] = field(default_factory=list)
    frame: tuple[bytes, bytes] | None = None  # the bytes around the text in the event of a text

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class Sample:
    """One answer to a prompt. One item is open at a time."""

    index: int  # prompt * n + number of the sample
    parser: AnswerParser
    items: list[Item] = field(default_factory=list)
    open: Item | None = None
    last: Delta | None = None  # the delta that ended it

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.items if isinstance(item.first, CallStart)]

    def text_of(self, kind: type[Words | Thought]) -> str:
        return "".join(item.text for item in self.items if isinstance(item.first, kind))


class AnswerEncoder(ABC):
    """Encodes the answers to one request, as a stream or as a whole.

    A stream: `begin`, then `feed` and `text_event` in any order, then `finish`.

    A subclass has the events of an item (`start`, `grow`, `end`) and the whole answer (`whole`). `grow` must not depend
    on the text: the bytes around the text of a token are made once for each item.
    """

    waits_for_start = False  # the first events need the cache explanation of the prompt, which is known when it starts
    n = 1  # samples for each prompt
    has_frames = True  # the events of texts differ only in the text, and in what `stamp` sets
    is_stamped = False

    def __init__(self, active: ActiveRequest) -> None:
        self.active = active
        self.samples: dict[int, Sample] = {}
        self.outputs: list[GenerationOutput] = []  # since `collect`

    def start(self, _item: Item) -> list[Event]:
        return []

    @abstractmethod
    def grow(self, item: Item, text: str) -> list[Event]:
        """The events of a text that continues an item."""

    def end(self, _item: Item) -> list[Event]:
        return []

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """The answer after `collect`. May be called in a thread."""

    def encode(self, event: Event) -> bytes:
        return event_bytes(event)

    def begin(self) -> bytes:
        """Events before the first delta, possibly none."""
        return b""

    @abstractmethod
    def finish(self) -> bytes:
        """Events after the last delta."""

    def fail(self, _error: ApiError) -> bytes | None:
        """The event of a failure after `begin`. None: that of the dialect."""
        return None

    def stamp(self, data: bytes) -> bytes:
        """Set what differs between events besides their text. It is in the bytes before the text."""
        return data

    def new_parser(self) -> AnswerParser:
        return self.active.new_parser()

    async def prepare(self, context: RequestContext) -> None:  # noqa: B027
        """Do what needs the loaded model, before the first event."""

    async def collect(self) -> None:
        """Wait for the whole answer."""
        async with self.active:
            self.outputs = await self.active.outputs()

    def read(self) -> Iterator[tuple[Sample, Completion]]:
        """Make the items of the whole answers."""
        for number, output in enumerate(self.outputs):
            for one in output.completions:
                sample = self.sample(number * self.n + one.index)
                reason = one.finish_reason
                self.take_delta(sample, Delta(one.index, one.text, one.token_ids, (), reason, one.stop, one.error))
                yield sample, one

    def sample(self, index: int = 0) -> Sample:
        if index not in self.samples:
            self.samples[index] = Sample(index, self.new_parser())
        return self.samples[index]

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        """Events of deltas, each with its prompt's number. Empty: there is nothing to send yet."""
        return self.write(
            [
                event
                for prompt, delta in batch
                for event in self.take_delta(self.sample(prompt * self.n + delta.index), delta)
            ]
        )

    def take_delta(self, sample: Sample, delta: Delta) -> list[Event]:
        pieces = sample.parser.push(delta.text)
        if delta.finish_reason is not None:
            sample.last = delta
            pieces += sample.parser.finish(is_cut=delta.finish_reason is FinishReason.LENGTH)
        return self.take(sample, pieces)

    def take(self, sample: Sample, pieces: Iterable[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                events += self.open(sample, piece)
                continue
            is_open = sample.open is not None and type(sample.open.first) is type(piece)
            if not isinstance(piece, CallArguments) and not is_open:
                events += self.open(sample, piece)
            assert sample.open is not None, "arguments follow the start of their call"
            sample.open.texts.append(piece.text)
            events += self.grow(sample.open, piece.text)
        return events

    def open(self, sample: Sample, piece: Words | Thought | CallStart) -> list[Event]:
        events = self.close(sample)
        sample.open = Item(sample.index, len(sample.items), piece)
        sample.items.append(sample.open)
        return [*events, *self.start(sample.open)]

    def close(self, sample: Sample) -> list[Event]:
        item, sample.open = sample.open, None
        return [] if item is None else self.end(item)

    def write(self, events: Iterable[Event]) -> bytes:
        return b"".join([self.stamp(self.encode(event)) for event in events])

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """The event of a token that is plain text, in sample `index`. None: it must be passed to `feed`.

        Text that continues the open item is put between bytes that were encoded before.
        """
        sample = self.samples.get(prompt * self.n + index)
        if sample is None or not self.has_frames:
            return None
        pieces = sample.parser.push(text)
        item = sample.open
        if item is not None and len(pieces) == 1:
            piece = pieces[0]
            if isinstance(piece, Words | Thought) and type(piece) is type(item.first):
                item.texts.append(piece.text)
                before, after = item.frame or self.frame(item)
                return self.stamp(before) + encode_json(piece.text) + after
        return self.write(self.take(sample, pieces))

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        """The bytes around the text in the events of all further tokens of plain text. The text is a JSON string.

        None: they are not constant, or not yet; `text_event` is used.
        """
        sample = self.samples.get(prompt * self.n + index)
        if sample is None or sample.open is None or not isinstance(sample.parser, PlainAnswer):
            return None
        return self.frame(sample.open) if self.has_frames and not self.is_stamped else None

    def frame(self, item: Item) -> tuple[bytes, bytes]:
        if item.frame is None:
            (event,) = self.grow(item, MARK)
            before, after = self.encode(event).rsplit(encode_json(MARK), 1)
            item.frame = before, after
        return item.frame

    @property
    def cache(self) -> CacheView | UnsetType:
        """The cache explanation of the first prompt, if the request asked for it."""
        active = self.active
        if not active.request.wants_cache or active.cache is None:
            return UNSET
        return view(active.cache, len(active.prompt), active.cache_text)


class TokenWriter:
    """Writes the tokens of one prompt at once, if the task of the response is waiting and the client keeps up.

    `take_token` runs for every token of every stream, in the call that received the step from the worker: no task is
    woken, and nothing is allocated but the bytes that are written.
    """

    __slots__ = (
        "_active", "_after", "_before", "_encoder", "_flow", "_frames", "_index", "_number", "_size", "_write",
        "_writer", "last_s",
    )  # fmt: skip

    def __init__(self, number: int, active: ActiveRequest, encoder: AnswerEncoder, writer: BodyWriter) -> None:
        self._number = number  # of the prompt
        self._active = active
        self._encoder = encoder
        self._writer = writer
        self._write = writer.write_frame
        self._flow = writer.flow
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by sample, once they are constant
        # The frame of the sample that was written last. Kept here because a dictionary is in other cache lines: with
        # hundreds of streams, most of the time of a token is waiting for memory.
        self._index: int | None = None
        self._before = self._after = b""
        self._size = 0  # of an event without its text
        self.last_s = 0.0  # time of the last write

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        if not self._active.is_waiting or self._flow.write_paused:
            return False
        if index != self._index and not self._select(index):
            return self._take_other(index, token_id, text)
        string = encode_json(text)
        try:
            self._write(b"".join((CHUNK_SIZES[self._size + len(string)], self._before, string, self._after)))
        except RuntimeError:
            return True  # the client has disconnected: `RequestContext` is about to end the request
        self.last_s = now_s
        return True

    def _select(self, index: int) -> bool:
        """Use the frame of another sample. False: there is none."""
        if (frame := self._frames.get(index)) is None:
            return False
        self._index, (self._before, after) = index, frame
        self._after = after + b"\r\n"
        self._size = len(self._before) + len(after)
        return True

    def _take_other(self, index: int, token_id: int, text: str) -> bool:
        """Take a token whose event does not have constant bytes around the text."""
        try:
            data = self._encoder.text_event(self._number, index, text)
            if data is None:
                data = self._encoder.feed([(self._number, Delta(index, text, (token_id,), (), None, None))])
            if data:
                self._writer.write(data)
                self.last_s = time.monotonic()
            if (found := self._encoder.text_frame(self._number, index)) is not None:
                self._frames[index] = found
        except Exception as error:  # must not affect the other requests of the step
            self._active.fail(error)
        return True

    def take_delta(self, delta: Delta) -> bool:
        if not self._active.is_waiting or self._flow.write_paused:
            return False
        try:
            if data := self._encoder.feed([(self._number, delta)]):
                self._writer.write(data)
                self.last_s = time.monotonic()
        except Exception as error:
            self._active.fail(error)
        return True


class EventStream(Response):
    """A response whose body is written as tokens arrive."""

    def __init__(
        self,
        active: ActiveRequest,
        encoder: AnswerEncoder,
        headers: Mapping[str, str],
        dialect: Dialect,
        keep_alive_s: float,
    ) -> None:
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, dialect.stream_type)
        del self.headers["content-length"]
        self._dialect = dialect
        self._active = active
        self._encoder = encoder
        self._token_writers: list[TokenWriter] = []
        self._keep_alive_s = keep_alive_s  # longest silence, and longest delay of the response headers
        self._first: bytes | None = b""
        self._has_begun = False  # `encoder.begin` was called
        self._last_s = 0.0  # time of the last write

    async def begin(self) -> None:
        """Wait for the first event, at most `keep_alive_s`: an error before it gets its own HTTP status."""
        self._last_s = time.monotonic()
        try:
            self._first = await self._next_before_silence()
        except Exception as error:
            self._active.close(error)
            raise

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """`RequestContext` receives the disconnect."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            await self._write_all(scope.pop(BODY_WRITER, None), send)
            last = self._encoder.finish()
        except Exception as error:
            self._active.close(error)
            if not isinstance(error, ClientGone):
                last = self._error_event(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        self._active.close()  # after the last bytes: a shutdown cuts connections without open requests

    async def _write_all(self, writer: BodyWriter | None, send: Send) -> None:
        self._last_s = time.monotonic()
        if writer is not None and writer.is_usable:
            for number, generation in enumerate(self._active.generations):
                generation.sink = TokenWriter(number, self._active, self._encoder, writer)
                self._token_writers.append(generation.sink)
        chunk = self._first
        while chunk is not None:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._last_s = time.monotonic()
            chunk = await self._next_before_silence()
            if chunk == b"" and self._silence_s >= self._keep_alive_s:
                chunk = self._dialect.keep_alive

    @property
    def _silence_s(self) -> float:
        """Time since the last write, which may be that of a token."""
        last_s = max(self._last_s, *(one.last_s for one in self._token_writers), 0.0)
        return time.monotonic() - last_s

    async def _next_before_silence(self) -> bytes | None:
        """Wait for the next events, until nothing was written for `keep_alive_s`. b"": there are none yet."""
        limit = asyncio.timeout(max(self._keep_alive_s - self._silence_s, 0.0))
        try:
            async with limit:
                return await self._next()
        except TimeoutError:
            if not limit.expired():
                raise
            return b""

    async def _next(self) -> bytes | None:
        """Wait for the next events, possibly none (b""). None: the answers have ended."""
        if not self._has_begun:
            if self._encoder.waits_for_start:
                await self._active.wait_start()
            self._has_begun = True
            if data := self._encoder.begin():
                return data
        batch = await self._active.next_batch()
        return self._encoder.feed(batch) if batch else None

    def _error_event(self, problem: Exception) -> bytes:
        error = api_error(problem, self._active.request_id)
        data = self._encoder.fail(error) if self._has_begun else None
        return self._dialect.event(error, self._active.request_id) if data is None else data


async def respond(
    context: RequestContext,
    request: InferenceRequest,
    make: Callable[[ActiveRequest], AnswerEncoder],
    names: Mapping[str, str],
) -> Response:
    """Answer a request. `names`: quire's field -> the protocol's field, in errors that begin with a field."""

    async def attempt(request: InferenceRequest) -> Response:
        active = await context.open(request)
        encoder = make(active)
        await encoder.prepare(context)
        if request.is_streaming:
            keep_alive_s = context.served.config.keep_alive_interval
            stream = EventStream(active, encoder, context.headers, context.dialect, keep_alive_s)
            await stream.begin()
            return stream
        await encoder.collect()
        return await context.json_of(encoder.whole, active.num_values)

    with protocol_field_names(names):
        return await answer_in_shape(request, attempt)


def event_bytes(event: Event) -> bytes:
    """A server-sent event with a name."""
    fields = {name: value for name, value in event.items() if value is not UNSET}
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode_json(fields) + b"\n\n"


def merged(batch: Sequence[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    """The batch of one sample as one delta, so that a slow reader gets fewer and longer events."""
    deltas = [delta for _, delta in batch]
    text = "".join(delta.text for delta in deltas)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
    return [(0, replace(deltas[-1], text=text, logprobs=logprobs))]


def finish_reason(last: Delta | None) -> str:
    if last is None:
        return "stop"
    if last.finish_reason is FinishReason.ERROR:
        raise ApiError(Kind.FAILED, last.error or "the answer failed")
    return "length" if last.finish_reason is FinishReason.LENGTH else "stop"


def token_text(entry: TokenLogprob) -> str:
    """The token's text. An incomplete character is shown as bytes, as OpenAI does, so that tokens stay distinct."""
    if "\ufffd" in entry.text and entry.text.encode() != entry.data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.data)
    return entry.text


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def top_logprob(entry: TokenLogprob) -> TopLogprob:
    return TopLogprob(token_text(entry), finite(entry.logprob), list(entry.data))
