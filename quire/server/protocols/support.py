"""What all protocols share: unsupported fields, fields that shape an answer, errors of schemas, the cache explanation.

A field that a protocol defines and quire does not support is refused by name if it would change the answer, unless its
value requests nothing: an answer that ignores `modalities` is a wrong answer. A field that is only a hint or a label is
accepted without effect. The tables are in each protocol's `types.py`. A new feature removes its row from the table.

Fields of OpenAI, vLLM, SGLang and llama.cpp bodies that constrain the format of an answer are added to types here.
Anthropic's and Ollama's protocols have their own fields for this and refuse these by name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from quire.core.cache.prefix import CacheExplanation, StopReason
from quire.core.values import Level
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.models import InferenceRequest
from quire.text.messages import ChatRequest, Message, Part, Role, Tool, ToolCall
from quire.text.schemas import SchemaNotHeld, SchemaProblem
from quire.text.tokenizer import Excerpt
from quire.text.tool_grammars import ToolsNotHeld, guilty_tool, held_parameters


class Unsupported(NamedTuple):
    """A row of a table of refused fields."""

    why: str
    harmless: tuple[Any, ...] = ()  # values that request nothing, in addition to null

    def allows(self, value: Any) -> bool:
        """Whether the value requests nothing. A boolean never equals a number here."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)

    def message(self, path: str) -> str:
        return f"{path} is not supported: {self.why}"


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
        raise unsupported(path, row.message(f"{path}{text}"))


def unsupported(path: str, message: str, *, is_value: bool = False) -> ApiError:
    reason = "unsupported_value" if is_value else "unsupported_parameter"
    return ApiError(Kind.INVALID, message, param=path, reason=reason)


SHAPE_FIELDS: dict[str, tuple[Any, ...]] = {  # field -> values that request nothing
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "json_schema": (),
    "regex": ("",),
    "grammar": ("",),
    "ebnf": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
}


def with_fields(
    name: str,
    refused: Mapping[str, Unsupported],
    accepted: Mapping[str, str] = MappingProxyType({}),
    base: type[msgspec.Struct] = msgspec.Struct,
    **config: Any,
) -> type[msgspec.Struct]:
    """Make a base class of bodies with the fields of these tables and their descriptions."""
    about = {field: f"Not supported: {row.why}." for field, row in refused.items()}
    about |= {field: f"Accepted, without effect: {why}." for field, why in accepted.items()}
    fields = [(field, Annotated[Any, Meta(description=text)], None) for field, text in about.items()]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, module=__name__, **config)


T = TypeVar("T")

MAX_FREED_ALONE = 2  # retries that drop one schema; the next drops all that are not strict, since each compiles again
MAX_PATH_CHARS = 300
MAX_SCHEMA_CHARS = 512 * 1024  # of all tools with descriptions: they are processed on the event loop
# The compiler's message, without the position before it and the source excerpt after it.
_COMPILER_MESSAGE = re.compile(
    r"(?:grammar: )?(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?(?P<what>.*?)(?: \d+ \| .*)?$"
)


def with_unenforced(request: InferenceRequest, format_field: str | None) -> InferenceRequest:
    """Add the paths of all schema keywords that are not enforced.

    `format_field`: the field that constrains the answer's text. Raises ApiError for a strict tool whose schema cannot
    be enforced.
    """
    grammar = request.params.grammar
    names = [] if grammar is None else [f"{format_field}.{path}" for path in grammar.unenforced]
    tools = _callable_tools(request)
    num_chars = sum(len(str(tool.parameters)) for tool in tools)
    if num_chars > MAX_SCHEMA_CHARS:
        raise ApiError(Kind.INVALID, f"tools have schemas of {num_chars} characters, more than {MAX_SCHEMA_CHARS}")
    for tool in tools:
        names += _unenforced_of(tool)
    return replace(request, unenforced=(*request.unenforced, *names)) if names else request


def _unenforced_of(tool: Tool) -> list[str]:
    try:
        return [f"{_indexed(tool.schema_path)}.{one.path}" for one in held_parameters(tool).unenforced]
    except SchemaNotHeld as error:
        raise shape_error(tool.schema_path, error) from None


def _indexed(path: str) -> str:
    """Convert Anthropic's `tools.0.input_schema` to `tools[0].input_schema`, the form in headers."""
    return re.sub(r"^tools\.(\d+)", r"tools[\1]", path)


async def answer_in_shape(
    request: InferenceRequest, format_field: str | None, respond: Callable[[InferenceRequest], Awaitable[T]]
) -> T:
    """Call `respond`. If the schema of a tool that is not strict does not compile, retry without that schema."""
    num_tries = 0
    while True:
        try:
            return await respond(request)
        except InvalidRequest as error:
            if not str(error).startswith("grammar"):
                raise
            if isinstance(error, ToolsNotHeld):
                freed = _freed_of(request, [_callable_tools(request)[number] for number in error.loose])
                if freed is None:
                    raise ApiError(Kind.INVALID, str(error).removeprefix("grammar: "), param="tools") from None
                request = freed
                continue
            tool = _guilty_tool(request, str(error))
            is_format = tool is None and guilty_tool(str(error)) is not None
            freed = None if is_format else _freed(request, tool, is_alone=num_tries < MAX_FREED_ALONE)
            if freed is None:
                field = format_field or "tools" if tool is None else tool.schema_path
                raise shape_error(field, error) from None
            request = freed
            num_tries += 1


def shape_error(field: str, error: InvalidRequest) -> ApiError:
    if isinstance(error, SchemaProblem):
        field = error.at(field)[:MAX_PATH_CHARS]
        return ApiError(Kind.INVALID, f"{field} {error.what}", param=field)
    found = _COMPILER_MESSAGE.match(str(error))
    what = str(error) if found is None else found["what"]
    return ApiError(Kind.INVALID, f"{field}: {what}", param=field)


def _guilty_tool(request: InferenceRequest, error: str) -> Tool | None:
    """Return the tool whose schema the compiler's message names."""
    number, tools = guilty_tool(error), _callable_tools(request)
    return None if number is None or number >= len(tools) else tools[number]


def _callable_tools(request: InferenceRequest) -> Sequence[Tool]:
    chat = request.prompts[0]
    return chat.callable_tools if isinstance(chat, ChatRequest) else ()


def _freed(request: InferenceRequest, guilty: Tool | None, *, is_alone: bool) -> InferenceRequest | None:
    """Drop the schema of one tool, or of all tools that are not strict. None: there is no such tool."""
    chat = request.prompts[0]
    if not isinstance(chat, ChatRequest):
        return None
    loose = [tool for tool in chat.tools if not tool.is_strict and not tool.is_free]
    if not loose or (guilty is not None and guilty not in loose):
        return None
    return _freed_of(request, [guilty] if guilty is not None and is_alone else loose)


def _freed_of(request: InferenceRequest, freed: Sequence[Tool]) -> InferenceRequest | None:
    chat = request.prompts[0]
    if not isinstance(chat, ChatRequest) or not freed:
        return None
    tools = tuple(replace(tool, is_free=True) if tool in freed else tool for tool in chat.tools)
    names = (*request.unenforced, *(_indexed(tool.schema_path) for tool in freed))
    return replace(request, prompts=(replace(chat, tools=tools),), unenforced=names)


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

    def message(self) -> Message:
        return Message(
            self.role,
            tuple(self.parts),
            thought="".join(self.thoughts),
            tool_calls=tuple(self.calls),
            tool_call_id=self.call_id,
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


class StoppedText(msgspec.Struct):
    """The caller's own prompt around `stopped_at`, at most 40 characters on each side."""

    before: str
    after: str


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
        StoppedText | None,
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
        message=_sentence(explanation, prompt_tokens) + _quote(explanation.reason, stopped_text) + ".",
        stopped_text=None if stopped_text is None else StoppedText(stopped_text.before, stopped_text.after),
        kv_tokens=explanation.num_kv_tokens or None,
        source=None if explanation.source is None else explanation.source.value,
        loaded_tokens=explanation.num_loaded_tokens,
    )


def _quote(reason: StopReason, text: Excerpt | None) -> str:
    if text is None or reason is not StopReason.DIVERGED:
        return ""
    return f', between "{text.before}" and "{text.after}"'


def _sentence(explanation: CacheExplanation, prompt_tokens: int) -> str:
    """One sentence that fits both a request and a dry run."""
    how_many = f"{explanation.num_tokens:,}" if explanation.num_tokens else "None"
    unit = "token comes" if prompt_tokens == 1 and explanation.num_tokens else "tokens come"
    at, kv = explanation.stopped_at, explanation.num_kv_tokens
    why = _WHY[explanation.reason].format(at=f"{at:,}", kv=f"{kv:,}", again=f"{kv - at:,}")
    loaded = ""
    if explanation.num_loaded_tokens and explanation.source is not None:
        loaded = f", {explanation.num_loaded_tokens:,} of them {_LOADED[explanation.source]}"
    return f"{how_many} of {prompt_tokens:,} prompt {unit} from the cache{loaded}{why}"
