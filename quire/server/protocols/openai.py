"""OpenAI's chat and plain completions: parsing, encoding and errors.

Clients act on the status of an error. `type` and `code` are OpenAI's own strings where OpenAI defines one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.core.values import FinishReason, Priority, check_tokens
from quire.engine.generation import MAX_LOGPROBS, Delta, GenerationOutput, GenerationParams, TokenLogprob, Usage
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.http import EventEncoder
from quire.server.models import (
    MAX_BREAKPOINTS,
    MAX_PROMPTS,
    ActiveRequest,
    Breakpoint,
    InferenceRequest,
    Prompt,
    ThinkingField,
    priority_of,
)
from quire.server.protocols.openai_types import (
    ACCEPTED_OF_OTHERS,
    BUDGETS,
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    DEFAULT_COMPLETION_TOKENS,
    OLD_MESSAGE_FIELDS,
    REFUSED,
    RETENTIONS_S,
    SERVICE_TIERS,
    TTLS_S,
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
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionTokensDetails,
    CompletionUsage,
    ContentPart,
    ErrorAnswer,
    ErrorBody,
    FunctionCall,
    FunctionDelta,
    GenerationBody,
    MessageToolCall,
    NamedToolChoice,
    PromptTokensDetails,
    ResponseFormat,
    StructuredOutputs,
    ToolCallDelta,
    ToolDefinition,
    TopLogprob,
)
from quire.server.protocols.support import (
    CacheView,
    Unsupported,
    answer_in_shape,
    check_supported,
    protocol_field_names,
    refuse_unsupported,
    shape_error,
    unsupported,
    view,
    with_unenforced,
)
from quire.server.request_context import RequestContext
from quire.text.gbnf import gbnf_to_lark, written_grammar
from quire.text.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    token_grammar,
)
from quire.text.messages import (
    MAX_CALL_ID_CHARS,
    MAX_TOOLS,
    ChatRequest,
    Message,
    Part,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    check_call,
    check_messages,
    check_parts,
)
from quire.text.stream import AnswerParser, CallArguments, CallStart, Piece, PlainAnswer, Thought, Words
from quire.text.tokenizer import Detokenizer, Tokenizer

_FORMATS = ("text", "json_object", "json_schema")


def parse_tools(body: ChatCompletionRequest) -> tuple[tuple[Tool, ...], ToolChoice, tuple[str, ...]]:
    """Return the functions, the tool choice, and the names of left-out tools, which OpenAI's server would run."""
    given = body.tools or ()
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(given)} entries, more than {MAX_TOOLS}")
    for i, tool in enumerate(given):
        if tool.type == "custom":
            text = f"tools[{i}].type = 'custom' is not supported in chat completions: /v1/responses takes custom tools"
            raise unsupported(f"tools[{i}].type", text, is_value=True)
    functions = [(tool, f"tools[{i}]") for i, tool in enumerate(given) if tool.type == "function"]
    ignored = tuple(f"tools[{i}].{tool.type}" for i, tool in enumerate(given) if tool.type != "function")
    return tuple(_tool(tool, path) for tool, path in functions), _choice(body), ignored


def parse_calls(given: Iterable[MessageToolCall], path: str) -> tuple[ToolCall, ...]:
    return tuple(_call(call, f"{path}[{i}]") for i, call in enumerate(given))


def _tool(tool: ToolDefinition, path: str) -> Tool:
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is missing")
    function = tool.function
    return Tool(
        function.name,
        function.description or "",
        function.parameters or {},
        bool(function.strict),
        path,
        f"{path}.function.parameters",
    )


def forced_tool(kind: str) -> str:
    return f"tool_choice.type = {kind!r:.80} is not supported: this server runs no tools. Use function or allowed_tools"


def _choice(body: ChatCompletionRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            if mode not in list(ToolMode):
                raise InvalidRequest(f"tool_choice = {mode!r:.80} is not one of {', '.join(ToolMode)}, or an object")
            return ToolChoice(ToolMode(mode), is_parallel=is_parallel)
        case NamedToolChoice(type="function", function=function):
            if function is None:
                raise InvalidRequest("tool_choice.function is missing")
            return ToolChoice(ToolMode.REQUIRED, function.name, is_parallel=is_parallel)
        case NamedToolChoice(type="allowed_tools", allowed_tools=allowed):
            if allowed is None or not allowed.tools:
                raise InvalidRequest("tool_choice.allowed_tools is missing or names none")
            if allowed.mode not in ("auto", "required"):
                text = f"tool_choice.allowed_tools.mode = {allowed.mode!r:.80} is not one of auto, required"
                raise InvalidRequest(text)
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(ToolMode(allowed.mode), allowed=names, is_parallel=is_parallel)
        case NamedToolChoice(type=kind):
            raise unsupported("tool_choice.type", forced_tool(kind), is_value=True)


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type != "function":
        text = f"{path}.type = {call.type!r:.80} is not supported: tools are functions that the client runs"
        raise unsupported(f"{path}.type", text, is_value=True)
    if call.function is None:
        raise InvalidRequest(f"{path}.function is missing")
    if not 1 <= len(call.id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(f"{path}.id has {len(call.id)} characters, not 1 to {MAX_CALL_ID_CHARS}")
    made = ToolCall(call.id, call.function.name, call.function.arguments or "{}")
    check_call(made, f"{path}.function")
    return made


# Answer formats

_Make = tuple[str, Callable[[], Grammar]]  # the field that constrains the answer, and its grammar


def parse_shape(body: GenerationBody) -> Grammar | None:
    """Return the grammar of the one field that constrains the answer. None: no such field."""
    found = _asked(body)
    return None if found is None else make_grammar(*found)


def shape_field(body: GenerationBody) -> str | None:
    found = _asked(body)
    return None if found is None else found[0]


def make_grammar(field: str, make: Callable[[], Grammar]) -> Grammar:
    """Make the grammar. Raises ApiError that names the field."""
    try:
        return make()
    except InvalidRequest as error:
        raise shape_error(field, error) from None


def _asked(body: GenerationBody) -> _Make | None:
    found = list(_shapes(body))
    if len(found) > 1:
        raise InvalidRequest(f"{found[1][0]} and {found[0][0]} exclude each other")
    return found[0] if found else None


def _shapes(body: GenerationBody) -> Iterable[_Make]:
    if isinstance(body.response_format, ResponseFormat):
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured("structured_outputs.", body.structured_outputs)
    yield from _structured("guided_", _guided(body))
    yield from _other_fields(body)


def _guided(body: GenerationBody) -> StructuredOutputs:
    """vLLM's older fields, without those that repeat `structured_outputs`: some clients send both."""
    newer = body.structured_outputs or StructuredOutputs()
    return StructuredOutputs(
        json=None if body.guided_json == newer.json else body.guided_json,
        regex=None if body.guided_regex == newer.regex else body.guided_regex,
        choice=None if body.guided_choice == newer.choice else body.guided_choice,
        grammar=None if body.guided_grammar == newer.grammar else body.guided_grammar,
    )


def _other_fields(body: GenerationBody) -> Iterable[_Make]:
    """Top-level fields of SGLang, llama.cpp and vLLM."""
    if (schema := body.json_schema) is not None:
        yield "json_schema", lambda: json_schema_grammar(_schema(schema), strict=False)
    if (pattern := body.regex) is not None:
        yield "regex", lambda: regex_grammar(pattern)
    if source := body.grammar:  # clients of llama.cpp send an empty string for no grammar
        yield "grammar", lambda: written_grammar(source)
    if (rules := body.ebnf) is not None:
        yield "ebnf", lambda: lark_grammar(gbnf_to_lark(rules))
    if (token_ids := body.allowed_token_ids) is not None:
        yield "allowed_token_ids", lambda: token_grammar(token_ids)


def _response_format(given: ResponseFormat) -> Iterable[_Make]:
    match given.type:
        case "text":
            return
        case "json_object" if given.schema is None:
            yield "response_format", json_object_grammar
        case "json_object":
            yield "response_format.schema", lambda: json_schema_grammar(given.schema or {}, strict=False)
        case "json_schema":
            form = given.json_schema
            if form is None and given.schema is not None:
                yield "response_format.schema", lambda: json_schema_grammar(given.schema or {}, strict=False)
                return
            if form is None or form.schema is None:
                missing = "json_schema" if form is None else "json_schema.schema"
                raise InvalidRequest(f"response_format.{missing} is missing")
            schema, strict = form.schema, bool(form.strict)
            yield "response_format.json_schema.schema", lambda: json_schema_grammar(schema, strict=strict)
        case other:
            raise unknown_format("response_format.type", other)


def unknown_format(field: str, given: str) -> InvalidRequest:
    """The error names vLLM's field for formats that have one."""
    where = f"; structured_outputs.{given} takes one" if given in ("regex", "choice", "grammar", "json") else ""
    return InvalidRequest(f"{field} = {given!r:.80} is not one of {', '.join(_FORMATS)}{where}")


def _structured(prefix: str, given: StructuredOutputs) -> Iterable[_Make]:
    if (schema := given.json) is not None:
        yield f"{prefix}json", lambda: json_schema_grammar(_schema(schema), strict=bool(given.strict))
    if (pattern := given.regex) is not None:
        yield f"{prefix}regex", lambda: regex_grammar(pattern)
    if (choices := given.choice) is not None:
        yield f"{prefix}choice", lambda: choice_grammar(choices)
    if (source := given.grammar) is not None:
        yield f"{prefix}grammar", lambda: written_grammar(source)
    if given.json_object:
        yield f"{prefix}json_object", json_object_grammar


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar: this is neither a schema nor the JSON text of one")
    return schema


T = TypeVar("T")

DEFAULT_TTL_S = 300.0
_SYNONYMS = (
    ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
)
NO_LIMIT = -1  # max_tokens of llama.cpp
_MAX_KEY_DIGITS = 10  # of a token id

# quire's field -> OpenAI's field, in errors that begin with a field.
NAMES = {
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
    "template_args": "chat_template_kwargs",
    "continue_last": "continue_final_message",
}


def params_of(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    may_be_empty: bool = False,
) -> GenerationParams:
    """Parse the generation parameters.

    `max_tokens`: the value of the newest field that sets it, except n_predict. `may_be_empty`: it may be 0.
    """
    refuse_unsupported(body, REFUSED)
    _refuse_contradictions(body)
    names: dict[str, str] = {}
    if body.repeat_last_n is not None and body.repeat_last_n < -1:
        raise InvalidRequest(f"repeat_last_n = {body.repeat_last_n} is less than -1")
    is_penalized = body.repeat_last_n != 0
    penalty = body.repetition_penalty
    if max_tokens is None and body.n_predict is not None:
        max_tokens, names["max_tokens"] = body.n_predict, "n_predict"
    if penalty is None and body.repeat_penalty is not None:
        penalty, names["repetition_penalty"] = body.repeat_penalty, "repeat_penalty"
    with protocol_field_names(names):
        if max_tokens is not None and max_tokens < 1 and max_tokens != NO_LIMIT and (max_tokens or not may_be_empty):
            more = "; only completions accept 0" if max_tokens == 0 else ""
            raise InvalidRequest(f"max_tokens = {max_tokens} is not at least 1 or -1 (no limit){more}")
        return GenerationParams(
            temperature=body.temperature,
            top_k=0 if body.top_k == -1 else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=penalty if is_penalized else 1.0,
            presence_penalty=_or(body.presence_penalty, 0.0) if is_penalized else 0.0,
            frequency_penalty=_or(body.frequency_penalty, 0.0) if is_penalized else 0.0,
            logit_bias=_biases(body.logit_bias or {}),
            seed=None if body.seed == -1 else body.seed,  # -1: no seed, as in vLLM and llama.cpp
            n=_or(body.n, 1),
            max_tokens=None if max_tokens == NO_LIMIT else max_tokens,
            min_tokens=_or(body.min_tokens, 0),
            stop=_or(body.stop, ()),
            stop_token_ids=_or(body.stop_token_ids, ()),
            include_stop=_or(body.include_stop_str_in_output, False) or _or(body.no_stop_trim, False),
            ignore_eos=_or(body.ignore_eos, False),
            skip_special=_or(body.skip_special_tokens, True),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=parse_shape(body),
        )


def make_request(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    params: GenerationParams,
    breakpoints: tuple[Breakpoint, ...] = (),
) -> InferenceRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream = true")
    options = body.prompt_cache_options
    mode = None if options is None else options.mode
    _choose("prompt_cache_options.mode", mode, {"implicit": None, "explicit": None}, None)
    return InferenceRequest(
        model=body.model,
        prompts=prompts,
        params=params,
        is_unbounded=params.max_tokens is None and NO_LIMIT in _limits(body).values(),
        is_streaming=_or(body.stream, False),
        priority=_priority(body),
        cache_salt=body.cache_salt or "",
        cache_key=None if mode == "explicit" else body.prompt_cache_key,
        cache_ttl_s=cache_ttl_s(body),
        breakpoints=breakpoints[-MAX_BREAKPOINTS:],  # a conversation keeps its old breakpoints; the last ones count
        wants_cache=_or(body.cache, False),
        ignored=tuple(_ignored(body)),
    )


def _ignored(body: GenerationBody) -> Iterator[str]:
    if body.repeat_last_n is not None and body.repeat_last_n > 0:
        yield "repeat_last_n"  # penalties always apply to the whole prompt and answer, as with -1
    for name in BUDGETS:
        if getattr(body, name) not in (None, 0, -1):
            yield name
    for name in ACCEPTED_OF_OTHERS:
        if getattr(body, name) is not None:
            yield name


def thinking_fields(
    body: GenerationBody, wants: bool | None, effort_field: str, effort: str | None
) -> tuple[ThinkingField, ...]:
    """The fields of the body that set whether, or how much, to think."""
    found = [] if effort is None else [ThinkingField(effort_field, False if effort == "none" else None)]
    if wants is not None:
        found.append(ThinkingField("enable_thinking", wants))
    found += [ThinkingField(name, False) for name in BUDGETS if getattr(body, name) == 0]
    return tuple(found)


def has_no_budget(body: GenerationBody) -> bool:
    """Whether thinking is switched off by a budget of 0 tokens."""
    return any(getattr(body, name) == 0 for name in BUDGETS)


def _refuse_contradictions(body: GenerationBody) -> None:
    """Refuse different values for fields that mean the same on different servers."""
    for names in _SYNONYMS:
        given = [(name, value) for name in names if (value := getattr(body, name, None)) is not None]
        for name, value in given[1:]:
            first, other = given[0]
            if value != other:
                raise InvalidRequest(f"{first} = {other} and {name} = {value} contradict each other: send one of them")


def _limits(body: GenerationBody) -> dict[str, int]:
    """The fields of the body that limit the answer, most recent protocol first."""
    found = {name: getattr(body, name, None) for name in _SYNONYMS[0]}
    return {name: value for name, value in found.items() if value is not None}


def cache_ttl_s(body: GenerationBody) -> float:
    """The lifetime of a pin. prompt_cache_options.ttl, the newer field, overrides prompt_cache_retention."""
    retention_s = _choose("prompt_cache_retention", body.prompt_cache_retention, RETENTIONS_S, DEFAULT_TTL_S)
    if body.prompt_cache_options is None:
        return retention_s
    return ttl_s("prompt_cache_options.ttl", body.prompt_cache_options.ttl, retention_s)


def ttl_s(field: str, value: str | None, default_s: float) -> float:
    return _choose(field, value, TTLS_S, default_s)


def has_continuous_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and _or(body.stream_options.continuous_usage_stats, False)


def includes_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and _or(body.stream_options.include_usage, False)


def _priority(body: GenerationBody) -> Priority | None:
    by_tier = _choose("service_tier", body.service_tier, SERVICE_TIERS, None)
    return by_tier if body.priority is None else priority_of(body.priority)


def _choose(field: str, value: str | None, table: Mapping[str, T], default: T) -> T:
    if value is None:
        return default
    if value not in table:
        raise InvalidRequest(f"{field} = {value!r:.80} is not one of {', '.join(table)}")
    return table[value]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Convert the keys to token ids: JSON has no number keys."""
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_KEY_DIGITS):
            raise InvalidRequest(f"logit_bias[{key[:40]!r}] is not a token id")
    return {int(key): value for key, value in given.items()}


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


AnswerKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have
TIERS = {Priority.HIGH: "priority", Priority.NORMAL: "default", Priority.LOW: "flex"}
_MARK = "<text>"
_encode = msgspec.json.Encoder().encode


class TextFrames(NamedTuple):
    """The chunks of one choice that are only text: the bytes around the text, which is a JSON string."""

    parser: AnswerParser | None
    words: tuple[bytes, bytes]
    thoughts: tuple[bytes, bytes]


class StreamEncoder(EventEncoder):
    """Encodes the chunks of one stream as server-sent events. The index of a choice is prompt * n + sample.

    The chunk that ends the last choice is held until last(): it may carry the cache explanation.
    """

    def __init__(
        self,
        head: AnswerHead,
        choices: ChatChoices | CompletionChoices,
        *,
        n: int,
        num_prompts: int,
        include_usage: bool,
        has_running_usage: bool = False,  # in every chunk
        has_ids: bool = False,  # chunks have token ids, also without text
        active: ActiveRequest | None = None,  # of `feed` and `finish`
    ) -> None:
        self._active = active
        self._head = head
        self._choices = choices
        self._n = n
        self._num_open = n * num_prompts
        self._include_usage = include_usage
        self._has_running_usage = has_running_usage
        self._num_tokens = 0  # of all choices, so far
        self._has_ids = has_ids
        self._begun: set[int] = set()
        self._held: Struct | None = None
        # Only the choice differs between chunks: the rest is encoded once.
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._frames: dict[int, TextFrames] = {}  # of the choices that have begun, if their chunks have only text

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        assert self._active is not None
        return self.chunks(batch, self._active.usage)

    def finish(self) -> bytes:
        assert self._active is not None
        return self.last(self._active.usage, cache_view(self._active), self._active.num_thought_tokens)

    def chunks(self, batch: Sequence[tuple[int, Delta]], usage: Usage | None = None) -> bytes:
        """Encode a batch of deltas; empty if there is nothing to send yet.

        `usage`: the prompt's token counts so far, for streams with usage in every chunk.
        """
        events: list[bytes] = []
        for prompt, delta in batch:
            self._num_tokens += len(delta.token_ids)
            if usage is not None and self._has_running_usage:
                self._after = b'],"usage":' + _encode(_running(usage, self._num_tokens)) + b"}\n\n"
            index = prompt * self._n + delta.index
            has_content = bool(delta.text or delta.logprobs or (self._has_ids and delta.token_ids))
            if not has_content and delta.finish_reason is None:
                continue  # an incomplete character, or the possible beginning of a stop string
            if index not in self._begun:
                self._begun.add(index)
                if (first := self._choices.begin(index)) is not None:
                    events.append(self._frame(first))
                if not self._has_running_usage and not self._has_ids:
                    self._frames[index] = self._text_frames(index)
            events += [self._frame(choice) for choice in self._choices.grow(index, delta)]
            if delta.finish_reason is not None:
                self._num_open -= 1
                end = self._choices.end(index, finish_reason(delta.finish_reason, delta.error), delta.stop)
                if self._num_open:
                    events.append(self._frame(end))
                else:
                    self._held = end
        return b"".join(events)

    def text_event(self, prompt: int, index: int, text: str) -> bytes | None:
        """Encode a token that is plain text, as `chunks` does. None: it needs `chunks`."""
        index += prompt * self._n
        frames = self._frames.get(index)
        if frames is None:
            return None
        parser, (before, after), thoughts = frames
        if parser is None:
            return before + _encode(text) + after
        pieces = parser.push(text)
        events: list[bytes] = []
        for piece in pieces:
            if not isinstance(piece, Words | Thought):
                return b"".join(map(self._frame, self._choices.grow_pieces(index, pieces)))
            start, end = (before, after) if isinstance(piece, Words) else thoughts
            events.append(start + _encode(piece.text) + end)
        return b"".join(events)

    def text_frame(self, prompt: int, index: int) -> tuple[bytes, bytes] | None:
        frames = self._frames.get(prompt * self._n + index)
        return None if frames is None or frames.parser is not None else frames.words

    def last(self, usage: Usage, cache: CacheView | None, num_thought_tokens: int = 0) -> bytes:
        """Encode the end of the stream."""
        events: list[bytes] = []
        if self._held is not None:
            running = _running(usage, usage.completion_tokens) if self._has_running_usage else None
            events.append(self._event([self._held], running, None if self._include_usage else cache))
        if self._include_usage:
            events.append(self._event([], usage_body(usage, num_thought_tokens), cache))
        return b"".join((*events, DONE))

    def _text_frames(self, index: int) -> TextFrames:
        words, thoughts = (self._split(self._choices.text(index, kind(_MARK))) for kind in (Words, Thought))
        return TextFrames(self._choices.parser(index), words, thoughts)

    def _split(self, choice: Struct) -> tuple[bytes, bytes]:
        """The bytes of a chunk before and after its text, which is `_MARK`."""
        before, after = self._frame(choice).rsplit(_encode(_MARK), 1)
        return before, after

    def _frame(self, choice: Struct) -> bytes:
        return self._before + _encode(choice) + self._after

    def _event(self, choices: list[Struct], usage: CompletionUsage | None, cache: CacheView | None) -> bytes:
        chunk = msgspec.structs.asdict(self._head) | {"choices": choices}
        if self._include_usage or usage is not None:
            chunk["usage"] = usage
        if cache is not None:
            chunk["cache"] = cache
        return b"data: " + _encode(chunk) + b"\n\n"


def head_of(active: ActiveRequest, prefix: str, kind: AnswerKind) -> AnswerHead:
    return AnswerHead(
        id=f"{prefix}-{active.request_id}",
        object=kind,
        created=active.created,
        model=active.model,
        system_fingerprint=active.system_fingerprint,
        service_tier=TIERS[active.priority],
    )


def cache_view(active: ActiveRequest) -> CacheView | None:
    """The cache explanation of the first prompt, if the request asked for it."""
    if not active.request.wants_cache or active.cache is None:
        return None
    return view(active.cache, len(active.requests[0].prompt), active.cache_text)


def usage_body(usage: Usage, num_thought_tokens: int = 0) -> CompletionUsage:
    return CompletionUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(
            num_thought_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
    )


def _running(usage: Usage, num_tokens: int) -> CompletionUsage:
    return CompletionUsage(usage.prompt_tokens, num_tokens, usage.prompt_tokens + num_tokens)


def finish_reason(reason: FinishReason, error: str | None = None) -> str:
    if reason is FinishReason.ERROR:
        raise ApiError(Kind.FAILED, error or "the answer failed")
    return "length" if reason is FinishReason.LENGTH else "stop"


def stop_reason(stop: str | None) -> str | UnsetType:
    return UNSET if stop is None else stop


def token_text(entry: TokenLogprob) -> str:
    """The token's text. An incomplete character is shown as bytes, as OpenAI does, so that tokens stay distinct."""
    if "\ufffd" in entry.text and entry.text.encode() != entry.data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.data)
    return entry.text


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class _Row(NamedTuple):
    status: int
    type: str
    code: str | None = None


_ROWS = {
    Kind.INVALID: _Row(400, "invalid_request_error"),
    Kind.TOO_LONG: _Row(400, "invalid_request_error", "context_length_exceeded"),
    Kind.AUTHENTICATION: _Row(401, "invalid_request_error", "invalid_api_key"),
    Kind.PERMISSION: _Row(403, "permission_error", "permission_denied"),
    Kind.NOT_FOUND: _Row(404, "invalid_request_error", "unknown_url"),
    Kind.NO_MODEL: _Row(404, "invalid_request_error", "model_not_found"),
    Kind.METHOD: _Row(405, "invalid_request_error", "method_not_supported"),
    Kind.TOO_LARGE: _Row(413, "invalid_request_error", "request_too_large"),
    Kind.TIMEOUT: _Row(408, "invalid_request_error", "request_timeout"),
    Kind.RATE_LIMITED: _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    # 429 as well: every client backs off. The code distinguishes a full server from a key that reached its limit.
    Kind.OVERLOADED: _Row(429, "rate_limit_error", "server_overloaded"),
    Kind.UNAVAILABLE: _Row(503, "server_error", "service_unavailable"),
    Kind.FAILED: _Row(500, "server_error"),
    Kind.DIED: _Row(500, "server_error", "engine_died"),
    # 499 is what gRPC maps CANCELLED to. Clients do not retry it; they would retry 409 and any 5xx.
    Kind.CANCELLED: _Row(499, "request_cancelled", "request_cancelled"),
}
_CODES = ("unsupported_parameter", "unsupported_value", "request_not_found")  # reasons that are also codes


def _status(error: ApiError) -> int:
    if error.kind is Kind.DIED and error.may_retry:
        return 503
    return _ROWS[error.kind].status


def error_body(error: ApiError) -> ErrorBody:
    row = _ROWS[error.kind]
    code = error.reason if error.reason in _CODES else row.code
    return ErrorBody(error.message, row.type, error.param, code)


def _body(error: ApiError, _request_id: str) -> bytes:
    return _encode(ErrorAnswer(error_body(error)))


def _event(error: ApiError, request_id: str) -> bytes:
    return b"data: " + _body(error, request_id) + b"\n\n"


OPENAI = Dialect("openai", _status, _body, _event)


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
        return await answer_in_shape(request, shape_field(body), partial(_respond_chat, context, body))


async def _respond_chat(context: RequestContext, body: ChatCompletionRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    if request.is_streaming:
        head = head_of(active, "chatcmpl", "chat.completion.chunk")
        encoder = chat_stream(
            head,
            request,
            include_usage=includes_usage(body),
            has_running_usage=has_continuous_usage(body),
            new_parser=active.new_parser,
            active=active,
        )
        return await context.stream(active, encoder)
    outputs = await context.result(active)
    head = head_of(active, "chatcmpl", "chat.completion")

    def make() -> ChatCompletion:
        thought = active.num_thought_tokens
        return whole_chat(head, outputs, active.usage, cache_view(active), active.new_parser, thought)

    return await context.json_of(make, active.num_values)


# Parsing


def parse_chat(body: ChatCompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
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
            thinking_fields=thinking_fields(body, body.enable_thinking, "reasoning_effort", body.reasoning_effort),
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
    for field in OLD_MESSAGE_FIELDS:
        check_supported(f"{path}.{field}", getattr(given, field), Unsupported(CHAT_UNSUPPORTED[field].why))
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
    head: AnswerHead, request: InferenceRequest, *, new_parser: NewParser = PlainAnswer, **options: Any
) -> StreamEncoder:
    return StreamEncoder(head, ChatChoices(new_parser), n=request.params.n, num_prompts=len(request.prompts), **options)


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
    return ChatLogprobs([chat_logprob(entry) for entry in entries])


def chat_logprob(entry: TokenLogprob) -> ChatTokenLogprob:
    tops = [TopLogprob(token_text(top), finite(top.logprob), list(top.data)) for top in entry.top]
    return ChatTokenLogprob(token_text(entry), finite(entry.logprob), list(entry.data), tops)


async def completions(context: RequestContext) -> Response:
    body = await context.body(CompletionRequest)
    request = await context.parse(parse_completion, body)
    with protocol_field_names(NAMES):
        return await answer_in_shape(request, shape_field(body), partial(_respond_completion, context, body))


async def _respond_completion(context: RequestContext, body: CompletionRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    tokenizer = context.service.text.tokenizer
    echoes = await _echoes(context, request) if body.echo else None
    head = head_of(active, "cmpl", "text_completion")
    if request.is_streaming:
        encoder = completion_stream(
            head,
            request,
            echoes,
            include_usage=includes_usage(body),
            has_running_usage=has_continuous_usage(body),
            has_ids=bool(body.return_token_ids),
            active=active,
        )
        return await context.stream(active, encoder)
    outputs = await context.result(active)

    def make() -> Completion:
        answer = whole_completion(head, outputs, active.usage, cache_view(active), echoes, tokenizer)
        if body.return_token_ids:
            for choice, one in zip(answer.choices, (one for part in outputs for one in part.completions), strict=True):
                choice.token_ids = list(one.token_ids)
        return answer

    return await context.json_of(make, active.num_values)


async def _echoes(context: RequestContext, request: InferenceRequest) -> list[Echo]:
    """The prompts as text. Many token ids are decoded in a thread."""
    tokenizer = context.service.text.tokenizer

    def make() -> list[Echo]:
        return [echo_of(prompt, tokenizer, request) for prompt in request.prompts]

    num_ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
    return await context.on_values(make, num_ids)


# Parsing


def parse_completion(body: CompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, COMPLETION_UNSUPPORTED)
    if body.best_of not in (None, 1, body.n or 1):
        raise unsupported(
            "best_of", f"best_of = {body.best_of} is not supported: only 1 and n are, because answers are not ranked"
        )
    scores_prompt = bool(body.echo) and body.logprobs is not None
    if scores_prompt and body.stream:
        raise unsupported("echo", "echo with logprobs is not supported in a stream")
    max_tokens = body.max_tokens
    if max_tokens is None and body.n_predict is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    with protocol_field_names(NAMES):
        prompts = _prompts(body.prompt)
        params = params_of(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scores_prompt else None,
            may_be_empty=True,
        )
        return with_unenforced(make_request(body, prompts, params), shape_field(body))


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if given and isinstance(given[0], int):
        kinds = {type(entry) for entry in given}
        if kinds != {int}:  # the message does not repeat the entry: it may be text
            at = next(i for i, entry in enumerate(given) if type(entry) is not int)
            raise InvalidRequest(f"prompt[{at}] is a {type(given[at]).__name__}, not a token id")
        check_tokens("prompt", given)  # type: ignore[arg-type]  # raises with the position
        return (tuple(given),)  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given)} entries, not 1 to {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for i, entry in enumerate(given):
        if isinstance(entry, int):
            raise InvalidRequest(f"prompt[{i}] is a token id among prompts: put the token ids into a list of their own")
        if isinstance(entry, list):
            check_tokens(f"prompt[{i}]", entry)
        prompts.append(entry if isinstance(entry, str) else tuple(entry))
    return tuple(prompts)


# Encoding


class Echo(NamedTuple):
    """A prompt as `echo` repeats it."""

    text: str
    hidden: frozenset[int] = frozenset()  # special tokens that the text does not contain


def echo_of(prompt: Prompt, tokenizer: Tokenizer, request: InferenceRequest) -> Echo:
    """Text is repeated unchanged; token ids are decoded."""
    if isinstance(prompt, str):
        return Echo(prompt)
    assert isinstance(prompt, tuple)
    is_skipping = request.params.skip_special
    text = tokenizer.decode(prompt, skip_special=is_skipping)
    return Echo(text, tokenizer.special_ids if is_skipping else frozenset())


def token_offsets(echo: Echo, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the position in the text of each prompt token. Tokens that are not in the text have no width: hidden
    ones, and a BOS that the tokenizer adds."""
    detokenizer = Detokenizer(tokenizer, skip_special=False, keep_prefix_space=True)
    offsets: list[int] = []
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        if token_id in echo.hidden:
            continue
        piece = detokenizer.push((token_id,))
        if not echo.text.startswith(piece, at):
            piece = piece.removeprefix(" ")  # some tokenizers add one before the first word
        if echo.text.startswith(piece, at) or token_id not in tokenizer.special_ids:
            at = min(at + len(piece), len(echo.text))  # a normaliser may have changed the text
    return offsets


class CompletionChoices:
    """Chunks of completion choices: with echo the prompt first, then the text, then the finish reason."""

    def __init__(self, n: int, echoes: Sequence[Echo] | None, *, has_ids: bool = False) -> None:
        self._n = n
        self._has_ids = has_ids
        self._echoes = echoes

    def begin(self, index: int) -> CompletionChoice | None:
        echo = self._echo(index)
        return CompletionChoice(index, echo) if echo else None

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._n].text

    def grow(self, index: int, delta: Delta) -> list[CompletionChoice]:
        ids = list(delta.token_ids) if self._has_ids else UNSET
        if not delta.logprobs:
            return [CompletionChoice(index, delta.text, token_ids=ids)] if delta.text or ids else []
        logprobs = _old_logprobs(delta.logprobs, len(self._echo(index)))
        return [CompletionChoice(index, delta.text, logprobs, token_ids=ids)]

    def grow_pieces(self, index: int, pieces: Sequence[Piece]) -> list[CompletionChoice]:
        raise AssertionError(f"{index = } {pieces = }: completions have no parser")

    def parser(self, index: int) -> None:
        """None: the text of a completion is not parsed."""

    def text(self, index: int, piece: Words | Thought) -> CompletionChoice:
        return CompletionChoice(index, piece.text)

    def end(self, index: int, finish_reason: str, stop: str | None) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason=finish_reason, stop_reason=stop_reason(stop))


def completion_stream(
    head: AnswerHead, request: InferenceRequest, echoes: Sequence[Echo] | None, *, has_ids: bool = False, **options: Any
) -> StreamEncoder:
    n = request.params.n
    choices = CompletionChoices(n, echoes, has_ids=has_ids)
    return StreamEncoder(head, choices, n=n, num_prompts=len(request.prompts), has_ids=has_ids, **options)


def whole_completion(
    head: AnswerHead,
    outputs: Sequence[GenerationOutput],
    usage: Usage,
    cache: CacheView | None,
    echoes: Sequence[Echo] | None,
    tokenizer: Tokenizer,
) -> Completion:
    choices: list[CompletionChoice] = []
    for number, output in enumerate(outputs):
        echo = Echo("") if echoes is None else echoes[number]
        scored = None if output.prompt_logprobs is None else _prompt_logprobs(output, echo, tokenizer)
        for one in output.completions:
            logprobs = None
            if one.logprobs is not None:
                logprobs = _joined(scored, _old_logprobs(one.logprobs, len(echo.text)))
            reason = finish_reason(one.finish_reason, one.error)
            text = echo.text + one.text
            choices.append(CompletionChoice(len(choices), text, logprobs, reason, stop_reason(one.stop)))
    return Completion(
        **msgspec.structs.asdict(head),
        choices=choices,
        usage=usage_body(usage),
        cache=UNSET if cache is None else cache,
    )


def _prompt_logprobs(output: GenerationOutput, echo: Echo, tokenizer: Tokenizer) -> CompletionLogprobs:
    ids = output.prompt_token_ids
    entries: list[TokenLogprob] = []
    offsets = token_offsets(echo, ids, tokenizer)
    for token_id, entry, offset in zip(ids, output.prompt_logprobs or (), offsets, strict=True):
        if entry is None:
            data = tokenizer.token_bytes(token_id)
            entry = TokenLogprob(token_id, data.decode("utf-8", "replace"), data, 0.0, 0)
        entries.append(replace(entry, offset=offset))
    found = _old_logprobs(entries, 0)
    found.token_logprobs[0] = found.top_logprobs[0] = None  # the first token has no context to be predicted from
    return found


def _old_logprobs(entries: Sequence[TokenLogprob], start: int) -> CompletionLogprobs:
    """Make the four lists of the completions API. The chosen token is always among its alternatives.

    `start`: number of characters before the first offset.
    """
    return CompletionLogprobs(
        tokens=[token_text(entry) for entry in entries],
        token_logprobs=[finite(entry.logprob) for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries],
        text_offset=[start + entry.offset for entry in entries],
    )


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    found = {token_text(top): finite(top.logprob) for top in entry.top}
    found.setdefault(token_text(entry), finite(entry.logprob))
    return found
