"""`POST /api/chat` and `/api/generate`: Ollama's protocol around one `InferenceRequest` and one `ActiveRequest`.

Answers are streamed as lines of JSON unless `stream` is false. The last line has the counts and durations. Every
optional field may be null. Bounds of types are for the schema only. They are checked where the values are used, with
messages that name the field and the value. An error is one string and a status.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.core.values import MAX_TOKEN_ID, check_tokens
from quire.engine.generation import MAX_LOGPROBS, MAX_TEMPERATURE, Delta, GenerationParams, TokenLogprob
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.models import ActiveRequest, InferenceRequest, Model, Models, ModelService, Prompt, priority_of
from quire.server.protocols.openai import FunctionDefinition
from quire.server.protocols.support import (
    SHAPE_FIELDS,
    AnswerEncoder,
    CacheView,
    Event,
    Item,
    Sample,
    TopLogprob,
    Unsupported,
    decoded_arguments,
    described,
    encode_json,
    encoded_arguments,
    finish_reason,
    finite,
    made_grammar,
    merged,
    message_with_field,
    protocol_field_names,
    refuse_unsupported,
    respond,
    token_text,
    top_logprob,
    unsupported_value,
    with_fields,
    with_unenforced,
)
from quire.server.request_context import IGNORED, RequestContext
from quire.text.grammar import Grammar, json_object_grammar, json_schema_grammar
from quire.text.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Role,
    Thought,
    Tool,
    ToolCall,
    Words,
    check_call,
    check_messages,
)
from quire.text.tokenizer import MAX_STOPS

_SHAPE = "use format: json, or a JSON schema"
_SAMPLER = "quire does not have this sampler"

IMAGES = {"images": Unsupported("only text input is supported")}
UNSUPPORTED = {name: Unsupported(_SHAPE, harmless) for name, harmless in SHAPE_FIELDS.items()}
GENERATE_UNSUPPORTED = {
    **IMAGES,
    "suffix": Unsupported("the models generate at the end of the prompt only"),
    "template": Unsupported("a request cannot bring its own template; the model's is used"),
}
UNSUPPORTED_OPTIONS = {
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
}

_LOADING = "the server sets this when it loads a model"
_OLD = "current versions of Ollama do not read it"

IGNORED_OPTIONS = {
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "num_batch": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "draft_num_predict": _LOADING,
    "num_keep": "contexts are never shifted",
    "mirostat_tau": "quire does not have mirostat",
    "mirostat_eta": "quire does not have mirostat",
    "f16_kv": _OLD,
    "logits_all": _OLD,
    "vocab_only": _OLD,
    "embedding_only": _OLD,
    "penalize_newline": _OLD,
}


ACCEPTED = {
    "truncate": "a prompt that is too long is refused",
    "shift": "an answer ends when the context is full",
}


THINK_LEVELS = ("low", "medium", "high", "max")


KeepAlive = Annotated[
    str | float | None,
    described(
        "0 without a prompt and with an admin key unloads the model. "
        "Other values have no effect: the server decides how long a model stays loaded."
    ),
]


# Requests


@with_fields(UNSUPPORTED_OPTIONS, IGNORED_OPTIONS)
class OllamaOptions(Struct, kw_only=True):
    """`options`: sampling parameters, and settings of Ollama's own runner."""

    num_predict: Annotated[
        int | None,
        described(
            "The longest answer, in tokens; 0, -1, -2: no limit but the context. Unless given: --default-max-tokens.",
            minimum=-2,
        ),
    ] = None
    temperature: Annotated[
        float | None, described("0: always the most probable token.", minimum=0, maximum=MAX_TEMPERATURE)
    ] = None
    top_k: Annotated[int | None, described("0 or less: all tokens.", maximum=MAX_TOKEN_ID)] = None
    top_p: Annotated[float | None, described(exclusiveMinimum=0, maximum=1)] = None
    min_p: Annotated[float | None, described(minimum=0, maximum=1)] = None
    repeat_penalty: Annotated[
        float | None, described("Above 1: divides the logit of tokens that occur in the prompt or the answer.")
    ] = None
    repeat_last_n: Annotated[
        int | None, described("0: no penalties. Any other value: penalties apply to the whole context.", minimum=-1)
    ] = None
    presence_penalty: Annotated[float | None, described(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, described(minimum=-2, maximum=2)] = None
    seed: Annotated[int | None, described("The same seed gives the same answer; -1: random.")] = None
    stop: str | Annotated[list[str], described(maxItems=MAX_STOPS)] | None = None
    num_ctx: Annotated[int | None, described("Accepted, without effect: the server sets the context of a model.")] = (
        None
    )


@with_fields({}, {"index": "calls are in order"})
class OllamaCalledFunction(Struct, kw_only=True):
    name: str
    arguments: Annotated[dict[str, Any] | None, described("An object, not a JSON string.")] = None


@with_fields({}, {"type": "all calls are of functions"})
class OllamaToolCall(Struct, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None


@with_fields(IMAGES)
class OllamaMessage(Struct, kw_only=True):
    role: Annotated[
        str, described("An assistant's last message is continued.", enum=["system", "user", "assistant", "tool"])
    ]
    content: str | None = None
    thinking: Annotated[str | None, described("The assistant's reasoning before its answer.")] = None
    tool_calls: Annotated[list[OllamaToolCall] | None, described("The assistant's tool calls.")] = None
    tool_name: Annotated[str | None, described("In a tool's message: the function it answers.")] = None
    tool_call_id: Annotated[str | None, described("In a tool's message: the call it answers.")] = None


class OllamaTool(Struct, kw_only=True):
    function: FunctionDefinition
    type: Annotated[str, described(enum=["function"])] = "function"


@with_fields(UNSUPPORTED, ACCEPTED)
class OllamaBody(Struct, kw_only=True):
    """Fields that chat and generate share."""

    model: Annotated[str, described("A name listed by /api/tags; the tag `latest` is optional.")]
    stream: Annotated[bool | None, described("True or null: one JSON line per part of the answer.")] = None
    format: Annotated[str, described(enum=["", "json"])] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    think: Annotated[
        bool | str | None, described(f"Whether to think first, or how much: {', '.join(THINK_LEVELS)}.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, described(minimum=0, maximum=MAX_LOGPROBS)] = None
    # quire's own
    cache: bool | None = None
    cache_salt: str | None = None
    priority: str | int | None = None


class OllamaChatRequest(OllamaBody, kw_only=True):
    """A conversation to answer. Without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], described(maxItems=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], described(maxItems=MAX_TOOLS)] | None = None


@with_fields(GENERATE_UNSUPPORTED)
class OllamaGenerateRequest(OllamaBody, kw_only=True):
    """A question to answer. Without a prompt the model is only loaded."""

    prompt: Annotated[str | None, described("A user's message; with raw, the whole prompt.")] = None
    system: str | None = None
    raw: Annotated[bool | None, described("Continue the prompt without the chat template.")] = None
    context: Annotated[
        list[int] | None, described("The `context` of an earlier response: the conversation so far, as token ids.")
    ] = None


@with_fields({}, {"verbose": "an answer is always the same"})
class ShowRequest(Struct, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, described("The older form of model.")] = None


@with_fields({}, {"insecure": "the connection to the hub is always checked"})
class PullRequest(ShowRequest, kw_only=True):
    """A known model name, or an org/name of the hub."""

    stream: bool | None = None


# Answers

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] | UnsetType = UNSET


class AnswerFunction(Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(Struct):
    id: str
    function: AnswerFunction


class OllamaAnswerMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """The whole answer, or one part of a stream. Durations, in the last part, are in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: Annotated[int, described("Time spent waiting for the model to load.")] | UnsetType = UNSET
    prompt_eval_count: Annotated[int, described("Prompt tokens, including cached ones.")] | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cache: CacheView | UnsetType = UNSET  # quire's own


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[list[int], described("Prompt and answer as token ids; not with raw.")] | UnsetType = UNSET


class ModelDetails(Struct, kw_only=True):
    format: str  # gguf or safetensors; "": the files cannot be read
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ListedModel(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: Annotated[int, described("Size of the model's files in bytes.")]
    digest: Annotated[str, described("Digest of the files' name, size and modification time, not of their content.")]
    details: ModelDetails
    capabilities: list[str]


class ListedModels(Struct, kw_only=True):
    models: list[ListedModel]


class LoadedModel(Struct, kw_only=True):
    name: str
    model: str
    size: Annotated[int, described("Weights and KV cache in memory, in bytes.")]
    size_vram: Annotated[int, described("The same if the model is on a GPU, else 0.")]
    digest: str
    details: ModelDetails
    expires_at: Annotated[str, described("When --idle-unload would unload it; the year 9999: never.")]
    context_length: int


class LoadedModels(Struct, kw_only=True):
    models: list[LoadedModel]


class ShownModel(Struct, kw_only=True):
    parameters: Annotated[str, described("Default sampling parameters of the model, one per line.")]
    template: Annotated[str, described("The model's own chat template, in Jinja (not Go).")]
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    license: str = ""


class OllamaVersion(Struct, kw_only=True):
    version: Annotated[str, described("The Ollama version whose API is implemented; clients compare it.")]
    quire: str


class PullProgress(Struct, kw_only=True):
    status: str
    digest: str | UnsetType = UNSET  # clients show a bar for each
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    note: Annotated[str, described("With success: how to serve the model.")] | UnsetType = UNSET


DEFAULT_TAG = ":latest"
NO_BOUND = (0, -1, -2)  # values of num_predict without a limit, as in Ollama's runner
# quire's field -> Ollama's field, in errors that begin with a field.
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "logprobs": "top_logprobs",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    },
}
_EFFORTS = {level: level for level in THINK_LEVELS} | {"max": "high"}  # templates have three levels
_DURATION = re.compile(r"-?(?:\d+|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|ms|s|m|h))+)", re.ASCII)
_MAX_DURATION_CHARS = 32


def find_model(models: Models, name: str) -> Model:
    """Find a model by its name, with or without Ollama's default tag. Ollama's clients look for "not found"."""
    if not name:
        return models.default
    for known in (name, name.removesuffix(DEFAULT_TAG)):
        if known in models.names:
            return models.find(known)
    text = f"model {name!r:.200} not found; this server has {', '.join(models.names)}"
    raise ApiError(Kind.NO_MODEL, text, param="model")


def parse_chat(body: OllamaChatRequest) -> InferenceRequest:
    """Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    _refuse_unsupported(body)
    messages = parse_messages(body.messages or ())
    is_prefill = messages[-1].role is Role.ASSISTANT
    if is_prefill and messages[-1].tool_calls:
        last = len(messages) - 1
        raise InvalidRequest(f"messages[{last}].tool_calls has no result: a tool's message must follow")
    chat = ChatRequest(
        messages,
        add_generation_prompt=not is_prefill,
        continue_last=is_prefill,
        tools=_tools(body.tools or ()),
        **_thinking(body),
    )
    return _inference_request(body, chat)


def parse_generate(body: OllamaGenerateRequest) -> InferenceRequest:
    """Parse the body without `context`: the handler adds it after it has tokenised the prompt."""
    _refuse_unsupported(body)
    prompt = body.prompt or ""
    if body.raw:
        if body.system or body.context:
            other = "system" if body.system else "context"
            raise InvalidRequest(f"raw and {other} exclude each other: a raw prompt is used unchanged")
        return _inference_request(body, prompt)
    check_tokens("context", body.context or ())
    messages = [Message(Role.USER, (Part(prompt),))]
    if body.system:
        messages.insert(0, Message(Role.SYSTEM, (Part(body.system),)))
    return _inference_request(body, ChatRequest(messages, **_thinking(body)))


def unmet(body: OllamaBody, service: ModelService, *, is_raw: bool = False) -> list[str]:
    """Fields that this model cannot satisfy, for the header. Clients send them to every model."""
    found: list[str] = []
    if body.think and (is_raw or service.text.template.reasoning is None):
        found.append("think")
    if body.options is not None and (body.options.num_ctx or 0) > service.client.max_model_len:
        found.append("options.num_ctx")
    return found


def unloads(keep_alive: str | float | None) -> bool:
    """Whether `keep_alive`, seconds or a Go duration such as "5m" or "1h30m", is 0. Refuses other texts."""
    if not isinstance(keep_alive, str):
        return keep_alive == 0
    if len(keep_alive) > _MAX_DURATION_CHARS or not _DURATION.fullmatch(keep_alive):
        raise InvalidRequest(f"keep_alive = {keep_alive!r:.80} is neither seconds nor a duration like 5m or 1h30m")
    return re.search("[1-9]", keep_alive) is None


def _inference_request(body: OllamaBody, prompt: Prompt) -> InferenceRequest:
    options = body.options or OllamaOptions()
    _refuse_unsupported(options, "options.")
    unloads(body.keep_alive)  # checked, though only an empty prompt uses it
    with protocol_field_names(NAMES):
        return with_unenforced(
            InferenceRequest(
                model=body.model,
                prompts=(prompt,),
                params=_params(body, options),
                is_unbounded=options.num_predict in NO_BOUND,
                is_streaming=body.stream is not False,
                priority=priority_of(body.priority),
                cache_salt=body.cache_salt or "",
                wants_cache=bool(body.cache),
                ignored=tuple(_ignored(body, options)),
                format_field="format" if body.format else None,
            )
        )


def _refuse_unsupported(part: object, prefix: str = "") -> None:
    table = {**GENERATE_UNSUPPORTED, **UNSUPPORTED_OPTIONS, **UNSUPPORTED}
    refuse_unsupported(part, table, prefix, shown=(int, float))


def _ignored(body: OllamaBody, options: OllamaOptions) -> list[str]:
    found = [f"options.{name}" for name in IGNORED_OPTIONS if getattr(options, name) is not None]
    has_penalties = options.repeat_penalty not in (None, 1) or options.presence_penalty or options.frequency_penalty
    if has_penalties and (options.repeat_last_n or 0) > 0:
        found.append("options.repeat_last_n")
    if body.keep_alive is not None:
        found.append("keep_alive")
    found += [name for name in ACCEPTED if getattr(body, name)]
    if body.top_logprobs and not body.logprobs:
        found.append("top_logprobs")
    return found


def _params(body: OllamaBody, options: OllamaOptions) -> GenerationParams:
    if (options.num_predict or 0) < min(NO_BOUND):
        raise InvalidRequest(f"max_tokens = {options.num_predict} is neither at least 1 nor one of {NO_BOUND}")
    if options.repeat_last_n is not None and options.repeat_last_n < -1:
        raise InvalidRequest(f"options.repeat_last_n = {options.repeat_last_n} is less than -1")
    is_penalised = options.repeat_last_n != 0
    return GenerationParams(
        temperature=options.temperature,
        top_k=None if options.top_k is None else max(options.top_k, 0),
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty if is_penalised else 1.0,
        presence_penalty=(options.presence_penalty or 0.0) if is_penalised else 0.0,
        frequency_penalty=(options.frequency_penalty or 0.0) if is_penalised else 0.0,
        seed=None if options.seed == -1 else options.seed,
        max_tokens=None if options.num_predict in NO_BOUND else options.num_predict,
        stop=options.stop or (),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body),
    )


def _grammar(body: OllamaBody) -> Grammar | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return json_object_grammar()
        case str():
            raise InvalidRequest(f"format = {body.format!r:.80} is neither json nor a JSON schema")
        case schema:
            return made_grammar("format", lambda: json_schema_grammar(schema, strict=False))


def _thinking(body: OllamaBody) -> dict[str, Any]:
    """Whether to think, and how much."""
    if isinstance(body.think, str) and body.think not in _EFFORTS:
        raise InvalidRequest(f"think = {body.think!r:.80} is not true, false or one of {', '.join(THINK_LEVELS)}")
    effort = _EFFORTS[body.think] if isinstance(body.think, str) else None
    return {"wants_thought": None if body.think is None else bool(body.think), "reasoning_effort": effort}


def _tools(tools: Sequence[OllamaTool]) -> tuple[Tool, ...]:
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported_value(f"tools[{i}].type", tool.type, "tools are functions that the client calls")
    return tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            is_strict=bool(tool.function.strict),
            path=f"tools[{i}]",
            schema_path=f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(tools)
    )


# Messages


class _OpenCalls:
    """Finds the call that a tool's message answers: by id, else by name, else in order. Many clients send no ids.

    A call without an id gets one from its position in the conversation. It is the same at every turn, or the prefix
    cache would not match.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[ToolCall] = []

    def add(self, calls: Sequence[OllamaToolCall], path: str) -> tuple[ToolCall, ...]:
        found: list[ToolCall] = []
        for i, one in enumerate(calls):
            arguments = encoded_arguments(one.function.arguments, f"{path}[{i}].function.arguments")
            call = ToolCall(one.id or f"call_{self._num_calls}", one.function.name, arguments)
            check_call(call, f"{path}[{i}].function")
            self._num_calls += 1
            found.append(call)
        self._open += found
        return tuple(found)

    def answer(self, message: OllamaMessage) -> str | None:
        if message.tool_call_id:
            found = [call for call in self._open if call.call_id == message.tool_call_id]
        else:
            found = [call for call in self._open if not message.tool_name or call.name == message.tool_name]
        if not found:
            return message.tool_call_id or None
        self._open.remove(found[0])
        return found[0].call_id


def parse_messages(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    check_messages(messages)
    calls = _OpenCalls()
    return tuple(_message(one, f"messages[{i}]", calls) for i, one in enumerate(messages))


def _message(message: OllamaMessage, path: str, calls: _OpenCalls) -> Message:
    _refuse_unsupported(message, f"{path}.")
    name = message.role.lower()
    if name not in list(Role):
        raise InvalidRequest(f"{path}.role = {message.role!r:.80} is not one of {', '.join(Role)}")
    role = Role(name)
    if role is Role.ASSISTANT:
        parts = (Part(message.content),) if message.content else ()
        made = calls.add(message.tool_calls or (), f"{path}.tool_calls")
        return Message(role, parts, thought=message.thinking or "", tool_calls=made)
    if message.tool_calls:
        raise InvalidRequest(f"{path}.tool_calls is only for an assistant's message")
    parts = (Part(message.content or ""),)
    if role is Role.TOOL:
        return Message(role, parts, message.tool_name or None, tool_call_id=calls.answer(message))
    return Message(role, parts)


def _body(error: ApiError, _request_id: str) -> bytes:
    return encode_json({"error": message_with_field(error)})


def _event(error: ApiError, request_id: str) -> bytes:
    return _body(error, request_id) + b"\n"


# Readers of JSON lines skip a space; most fail on an empty line.
OLLAMA = Dialect("ollama", _body, _event, overloaded=503, stream_type="application/x-ndjson", keep_alive=b" ")


_TIME = "<time>"
_TIME_BYTES = encode_json(_TIME)


async def chat(context: RequestContext) -> Response:
    body = await context.body(OllamaChatRequest)
    model = find_model(context.models, body.model)
    if not body.messages:
        return await _load_or_unload(context, body, model, ChatReply)
    request = replace(await context.parse(parse_chat, body), model=model.name)
    return await respond(context, request, partial(ChatReply, body=body), NAMES)


async def generate(context: RequestContext) -> Response:
    body = await context.body(OllamaGenerateRequest)
    model = find_model(context.models, body.model)
    if not body.prompt:
        return await _load_or_unload(context, body, model, GenerateReply)
    request = replace(await context.parse(parse_generate, body), model=model.name)
    if body.context:
        service = await context.use(model.name)
        with protocol_field_names(NAMES):
            prompt = (*body.context, *await service.encode(request.prompts[0], context.key.name))
        request = replace(request, prompts=(prompt,))
    return await respond(context, request, partial(GenerateReply, body=body), NAMES)


async def _load_or_unload(context: RequestContext, body: OllamaBody, model: Model, reply: type[Reply]) -> Response:
    """Load or unload the model, as a request without a prompt does."""
    done = reply.answer({}, model=body.model, created_at=rfc3339(time.time()), done=True, done_reason="load")
    if unloads(body.keep_alive):
        if not context.key.is_admin:
            why = f"the key {context.key.name!r} is not an admin key"
            text = f"keep_alive = 0 without a prompt unloads the model: {why}"
            raise ApiError(Kind.PERMISSION, text, param="keep_alive")
        if model.is_pinned:
            raise InvalidRequest(f"model = {model.name!r} is pinned: unpin it first")
        await context.wait_for(context.models.begin(context.models.manager.unload(model)))
        done.done_reason = "unload"
        return context.json(done)
    if body.keep_alive is not None:
        context.note(IGNORED, ["keep_alive"])
    await context.use(model.name)
    return context.json(done)


# Responses


class Reply(AnswerEncoder):
    """The response to one request. The events of a batch are one line.

    A tool call is held until it is complete: its arguments are sent as an object. A call that was cut off is left out:
    its arguments are not valid JSON, and a client would run it without them. `done_reason` reports the cut.
    """

    is_stamped = True

    def __init__(self, active: ActiveRequest, body: OllamaBody) -> None:
        super().__init__(active)
        self._body = body
        self._is_raw = isinstance(body, OllamaGenerateRequest) and bool(body.raw)

    @staticmethod
    @abstractmethod
    def answer(part: Event, **head: Any) -> OllamaAnswer:
        """The answer, or a part of it."""

    async def prepare(self, context: RequestContext) -> None:
        context.note(IGNORED, unmet(self._body, context.service, is_raw=self._is_raw))

    def whole(self) -> OllamaAnswer:
        ((sample, one),) = self.read()
        calls = [call for item in sample.calls for call in _calls(item)]
        part = {"content": sample.text_of(Words), "thinking": sample.text_of(Thought), "tool_calls": calls}
        return self.answer(part | {"logprobs": _logprobs(one.logprobs or ())}, **self._end())

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        return super().feed(merged(batch))

    def take_delta(self, sample: Sample, delta: Delta) -> list[Event]:
        finish_reason(delta)  # raises the error of an answer that failed
        events = super().take_delta(sample, delta)
        if delta.finish_reason is not None:
            events += self.close(sample)
        return [*events, {"logprobs": _logprobs(delta.logprobs)}]

    def grow(self, item: Item, text: str) -> list[Event]:
        match item.first:
            case Words():
                return [{"content": text}]
            case Thought():
                return [{"thinking": text}]
            case CallStart():
                return []

    def end(self, item: Item) -> list[Event]:
        return [{"tool_calls": _calls(item)}]

    def write(self, events: Iterable[Event]) -> bytes:
        part: Event = {}
        for event in events:
            part |= {name: part[name] + value if name in part else value for name, value in event.items()}
        return self.stamp(self.encode(part)) if any(part.values()) else b""

    def encode(self, event: Event) -> bytes:
        return encode_json(self.answer(event, model=self._body.model, created_at=_TIME)) + b"\n"

    def stamp(self, data: bytes) -> bytes:
        return data.replace(_TIME_BYTES, encode_json(rfc3339(time.time())), 1)

    def finish(self) -> bytes:
        return encode_json(self.answer({}, **self._end())) + b"\n"

    def _end(self) -> dict[str, Any]:
        active, usage = self.active, self.active.usage
        end = {
            "model": self._body.model,
            "created_at": rfc3339(time.time()),
            "done": True,
            "done_reason": finish_reason(self.sample().last),
            "total_duration": _ns(time.monotonic() - active.caller.arrived_s),
            "load_duration": _ns(active.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(active.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(active.decode_s),
            "cache": self.cache,
        }
        if isinstance(self._body, OllamaGenerateRequest) and not self._is_raw:
            end["context"] = [*active.prompt, *active.generations[0].samples[0].token_ids]
        return end


class ChatReply(Reply):
    @staticmethod
    def answer(part: Event, **head: Any) -> OllamaChatAnswer:
        thinking, calls = part.get("thinking") or UNSET, part.get("tool_calls") or UNSET
        message = OllamaAnswerMessage(part.get("content", ""), thinking=thinking, tool_calls=calls)
        return OllamaChatAnswer(message=message, logprobs=part.get("logprobs") or UNSET, **head)


class GenerateReply(Reply):
    @staticmethod
    def answer(part: Event, **head: Any) -> OllamaGenerateAnswer:
        thinking, logprobs = part.get("thinking") or UNSET, part.get("logprobs") or UNSET
        return OllamaGenerateAnswer(response=part.get("content", ""), thinking=thinking, logprobs=logprobs, **head)


def _calls(item: Item) -> list[OllamaAnswerCall]:
    """The call of an item, if it is one and complete."""
    if not isinstance(item.first, CallStart):
        return []
    number, call_id, name = item.first
    arguments = decoded_arguments(item.text)
    return [] if arguments is None else [OllamaAnswerCall(call_id, AnswerFunction(number, name, arguments))]


def rfc3339(at_s: float, precision: str = "microseconds") -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def _ns(seconds: float | None) -> int:
    """Nanoseconds, at least 1: clients divide by it, and an answer of one token has a decode time of 0."""
    return max(1, int((seconds or 0.0) * 1e9))


def _logprobs(entries: Iterable[TokenLogprob]) -> list[OllamaLogprob]:
    return [
        OllamaLogprob(
            token_text(entry),
            finite(entry.logprob),
            list(entry.data),
            [top_logprob(top) for top in entry.top] or UNSET,
        )
        for entry in entries
    ]
