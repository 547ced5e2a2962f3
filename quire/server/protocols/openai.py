"""OpenAI's chat and plain completions, with fields of vLLM, SGLang, llama.cpp and TGI.

/openapi.json is made from the types. Every optional field may be null: SDKs send null for unset fields. Bounds in types
are for the schema only. They are checked where the values are used, with messages that name the field and the value. A
field that quire does not support needs one row of a table; see `quire/server/protocols/support.py`.

Clients act on the status of an error. `type` and `code` are OpenAI's own strings where OpenAI defines one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from quire.core.values import MAX_TOKEN_ID, MIN_PENALTY, Priority, check_tokens
from quire.engine.generation import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_IDS,
    MAX_TEMPERATURE,
    Delta,
    GenerationOutput,
    GenerationParams,
    TokenLogprob,
    Usage,
)
from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.models import (
    MAX_BREAKPOINTS,
    MAX_NAME_CHARS,
    MAX_PROMPTS,
    ActiveRequest,
    Breakpoint,
    InferenceRequest,
    Prompt,
    ThinkingField,
    priority_of,
)
from quire.server.protocols.support import (
    AnswerEncoder,
    CacheView,
    Event,
    Item,
    Sample,
    TopLogprob,
    Turn,
    Turns,
    Unsupported,
    check_supported,
    decoded_arguments,
    described,
    encode_json,
    finish_reason,
    finite,
    given,
    made_grammar,
    one_of,
    protocol_field_names,
    refuse_unsupported,
    respond,
    token_text,
    top_logprob,
    unsupported,
    unsupported_value,
    with_fields,
    with_unenforced,
)
from quire.server.request_context import MAX_PLAIN_VALUES, RequestContext
from quire.text.grammar import (
    MAX_LISTED_TOKENS,
    Grammar,
    choice_grammar,
    gbnf_to_lark,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    token_grammar,
    written_grammar,
)
from quire.text.messages import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    CallStart,
    ChatRequest,
    Message,
    Part,
    PlainAnswer,
    Role,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Words,
    check_call,
    check_messages,
    check_parts,
)
from quire.text.tokenizer import MAX_STOPS, Detokenizer, Tokenizer

_SAMPLERS = "the samplers are temperature, top_k, top_p, min_p, penalties and logit_bias"
_THOUGHTS = "reasoning is streamed separately, in reasoning_content"
_LOGPROBS = "use logprobs and top_logprobs"
_NO_CODE = "a request cannot contain code"
_NO_LORA = "adapters are not supported: use the name of a served model"

# Fields of all bodies.
REFUSED = {
    "prompt_logprobs": Unsupported("in completions, echo with logprobs returns them"),
    "bad_words": Unsupported("logit_bias can exclude tokens"),
    "use_beam_search": Unsupported("every answer is sampled", (False,)),
    "truncate_prompt_tokens": Unsupported("a prompt that is too long is refused"),
    # Samplers of llama.cpp and related servers, with the value that disables each.
    "typical_p": Unsupported(_SAMPLERS, (1,)),
    "tfs_z": Unsupported(_SAMPLERS, (1,)),
    "top_a": Unsupported(_SAMPLERS, (0,)),
    "top_n_sigma": Unsupported(_SAMPLERS, (0, -1)),
    "mirostat": Unsupported(_SAMPLERS, (0,)),
    "mirostat_mode": Unsupported(_SAMPLERS, (0,)),
    "dynatemp_range": Unsupported(_SAMPLERS, (0,)),
    "dry_multiplier": Unsupported(_SAMPLERS, (0,)),
    "xtc_probability": Unsupported(_SAMPLERS, (0,)),
    "min_keep": Unsupported(_SAMPLERS, (0, 1)),
    "samplers": Unsupported("the order of the samplers is fixed"),
    "do_sample": Unsupported("temperature = 0 selects the most probable token", (True,)),
    "watermarking": Unsupported("answers have no watermark", (False,)),
    # Other ways to select or end answers.
    "length_penalty": Unsupported("every answer is sampled", (1,)),
    "early_stopping": Unsupported("every answer is sampled", (False,)),
    "stop_regex": Unsupported("stop supports strings only"),
    "repetition_detection": Unsupported("use max_tokens"),
    "t_max_predict_ms": Unsupported("use max_tokens", (0,)),
    "n_indent": Unsupported("use structured_outputs.regex", (0,)),
    "n_cmpl": Unsupported("use n", (1,)),
    "guided_whitespace_pattern": Unsupported("JSON is written with one space after comma and colon"),
    # Reasoning.
    "separate_reasoning": Unsupported(_THOUGHTS, (True,)),
    "stream_reasoning": Unsupported(_THOUGHTS, (True,)),
    "include_reasoning": Unsupported(_THOUGHTS, (True,)),
    "reasoning_format": Unsupported(_THOUGHTS, ("auto", "deepseek")),
    "parse_tool_calls": Unsupported("tool calls are always parsed", (True,)),
    # Further contents of a response.
    "n_probs": Unsupported(_LOGPROBS, (0,)),
    "post_sampling_probs": Unsupported(_LOGPROBS, (False,)),
    "logprob_token_ids": Unsupported(_LOGPROBS),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids, in completions", (False,)),
    "return_tokens": Unsupported("use return_token_ids, in completions", (False,)),
    "return_prompt_text": Unsupported("use echo, in completions", (False,)),
    "return_hidden_states": Unsupported("only text and log probabilities are returned", (False,)),
    "return_routed_experts": Unsupported("only text and log probabilities are returned", (False,)),
    "response_fields": Unsupported("a response has all its fields"),
    # The computation itself.
    "custom_logit_processor": Unsupported(_NO_CODE),
    "custom_params": Unsupported(_NO_CODE),
    "logits_processors": Unsupported(_NO_CODE),
    "vllm_xargs": Unsupported("these are arguments of vLLM extensions"),
    "lora": Unsupported(_NO_LORA),
    "lora_path": Unsupported(_NO_LORA),
    "input_ids": Unsupported("send token ids as prompt, in completions"),
    "session_params": Unsupported("requests are not stored: send the whole conversation"),
    "kv_transfer_params": Unsupported("prefill and decode run in one process"),
}

# How many tokens to think.
BUDGETS = ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget")

Budget = Annotated[int, described("0: do not think. Others: no effect, max_tokens bounds thought and answer together.")]

ACCEPTED_OF_OTHERS = {
    "mirostat_tau": "it is a setting of mirostat",
    "mirostat_eta": "it is a setting of mirostat",
    "dynatemp_exponent": "it is a setting of dynatemp_range",
    "dry_base": "it is a setting of dry_multiplier",
    "dry_allowed_length": "it is a setting of dry_multiplier",
    "dry_penalty_last_n": "it is a setting of dry_multiplier",
    "dry_sequence_breakers": "it is a setting of dry_multiplier",
    "xtc_threshold": "it is a setting of xtc_probability",
    "truncation_side": "it is a setting of truncate_prompt_tokens",
    "n_keep": "no token of a prompt is discarded",
    "n_discard": "no token of a prompt is discarded",
    "cache_prompt": "the cache changes no answer",
    "n_cache_reuse": "the cache changes no answer",
    "id_slot": "quire has no fixed slots",
    "spaces_between_special_tokens": "text is decoded without extra spaces",
    "guided_decoding_backend": "there is only one backend",
    "mm_processor_kwargs": "images are not supported",
    "media_io_kwargs": "images are not supported",
    "timings_per_token": "see /metrics",
    "return_progress": "a silent stream gets keep-alive comments",
    "sse_ping_interval": "--keep-alive-interval sets it",
    "stream_interval": "each chunk is sent as soon as it has text",
    "rid": "use the header x-request-id",
    "request_id": "use the header x-request-id",
    "session_id": "requests are not stored",
}


# Fields that only one of chat and completions supports.
CHAT_UNSUPPORTED = {
    "functions": Unsupported("it is the older form of tools"),
    "function_call": Unsupported("it is the older form of tool_choice and tool_calls", ("none", "auto")),
    "modalities": Unsupported("this server answers in text only", (["text"],)),
    "audio": Unsupported("this server answers in text only"),
    "web_search_options": Unsupported("this server does not search the web", empty=()),
    "moderation": Unsupported("this server has no moderation model", empty=()),
    "documents": Unsupported("put them into messages"),
    "chat_template": Unsupported("a request cannot bring its own template; the model's is used"),
    "echo": Unsupported("only completions repeat the prompt", (False,)),
    "add_special_tokens": Unsupported("the chat template adds them", (False,)),
    "return_token_ids": Unsupported("only completions return them", (False,)),
}
OLD_MESSAGE_FIELDS = ("function_call", "audio")  # of a message
COMPLETION_UNSUPPORTED = {
    "suffix": Unsupported("the models generate at the end of the prompt only"),
    "best_of": Unsupported("answers are not ranked: use n", (1,)),
    "add_special_tokens": Unsupported("a prompt of token ids is used unchanged", (True,)),
}

ACCEPTED = {
    "safety_identifier": "requests are not stored",
    "store": "requests are not stored",
    "metadata": "requests are not stored",
}


DEFAULT_COMPLETION_TOKENS = 16  # default of OpenAI's /v1/completions; chat has no such default
SERVICE_TIERS = {
    "auto": None,
    "default": None,
    "scale": None,  # OpenAI's purchased capacity
    "flex": Priority.LOW,
    "priority": Priority.HIGH,
    "fast": Priority.HIGH,
}
TTLS_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
RETENTIONS_S = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}


Ttl = Annotated[str, described(enum=list(TTLS_S))]
Penalty = Annotated[float, described(minimum=-2, maximum=2)]
TokenCount = Annotated[int, described(minimum=-1, maximum=MAX_TOKEN_ID)]  # -1: no limit, as in llama.cpp
Alternatives = Annotated[int, described(minimum=0, maximum=MAX_LOGPROBS)]


# Requests


@with_fields({}, {"include_obfuscation": "chunks are not padded"})
class StreamOptions(Struct, kw_only=True):
    include_usage: Annotated[bool | None, described("Add a last chunk with the usage.")] = None


class PromptCacheOptions(Struct, kw_only=True):
    mode: Annotated[str, described(enum=["implicit", "explicit"])] | None = (
        None  # explicit: keep only what breakpoints mark
    )
    ttl: Ttl | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class ResponseFormat(Struct, kw_only=True):
    type: Annotated[str, described(enum=["text", "json_object", "json_schema"])]
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[
        dict[str, Any] | None,
        described("The schema, with either type, as in llama.cpp and Together."),
    ] = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's constraint on the answer. Exactly one field is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str | None, described("In llguidance's dialect of Lark, or in GBNF.")] = None
    json_object: bool | None = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


@with_fields(REFUSED, ACCEPTED_OF_OTHERS | ACCEPTED)
class GenerationBody(Struct, kw_only=True):
    """Fields of all OpenAI bodies. `FIELDS` in `quire/server/routes.py` describes them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, described(minimum=1, maximum=MAX_SAMPLES)] | None = None
    max_tokens: TokenCount | None = None
    n_predict: TokenCount | None = None  # llama.cpp's max_tokens
    min_tokens: Annotated[int, described(minimum=0, maximum=MAX_TOKEN_ID)] | None = None
    temperature: Annotated[float, described(minimum=0, maximum=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, described(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, described(minimum=-1, maximum=MAX_TOKEN_ID)] | None = None  # 0 or -1: all tokens
    min_p: Annotated[float, described(minimum=0, maximum=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, described(minimum=MIN_PENALTY, maximum=100)] | None = None
    repeat_penalty: Annotated[float, described(minimum=MIN_PENALTY, maximum=100)] | None = None  # llama.cpp's
    repeat_last_n: Annotated[int, described(minimum=-1)] | None = None  # llama.cpp's
    logit_bias: Annotated[dict[str, float], described(maxProperties=MAX_BIASES)] | None = None
    seed: Annotated[int, described(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: str | Annotated[list[str], described(maxItems=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], described(maxItems=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    thinking_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget: Budget | None = None
    user: Annotated[Any, described("Accepted, without effect: requests are not stored.")] = None
    service_tier: Annotated[str, described(enum=list(SERVICE_TIERS))] | None = None
    priority: str | int | None = None  # overrides service_tier
    prompt_cache_key: Annotated[str, described(minLength=1, maxLength=MAX_NAME_CHARS)] | None = None
    prompt_cache_retention: Annotated[str, described(enum=list(RETENTIONS_S))] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    cache_salt: str | None = None
    cache: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    allowed_token_ids: Annotated[list[int], described(minItems=1, maxItems=MAX_LISTED_TOKENS)] | None = None


class PromptCacheBreakpoint(Struct, kw_only=True):
    mode: str | None = None
    ttl: Ttl | None = None


class ContentPart(Struct, kw_only=True):
    type: Annotated[str, described(enum=["text", "refusal"])]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class Prediction(Struct, kw_only=True):
    type: Annotated[str, described(enum=["content"])]
    content: str | list[ContentPart]


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: Annotated[str, described("A JSON object, as text.")] = ""


class MessageToolCall(Struct, kw_only=True):
    id: str
    type: Annotated[str, described(enum=["function"])] = "function"
    function: CalledFunction | None = None


@with_fields({name: CHAT_UNSUPPORTED[name] for name in OLD_MESSAGE_FIELDS})
class ChatMessage(Struct, kw_only=True):
    role: Annotated[str, described(enum=["system", "developer", "user", "assistant", "tool"])]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: Annotated[str | None, described("The assistant's reasoning before its answer.")] = None
    tool_calls: Annotated[list[MessageToolCall] | None, described("The assistant's tool calls.")] = None
    tool_call_id: Annotated[str | None, described("In a tool's message: the call it answers.")] = None


class FunctionDefinition(Struct, kw_only=True):
    name: Annotated[str, described(pattern=f"^[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("A JSON schema of an object.")] = None
    strict: Annotated[
        bool | None,
        described("Refuse keywords that cannot be enforced, instead of listing them in x-quire-unenforced."),
    ] = None


class ToolDefinition(Struct, kw_only=True):
    type: Annotated[str, described(enum=["function"])]
    function: FunctionDefinition | None = None


class FunctionName(Struct, kw_only=True):
    name: str


class ToolName(Struct, kw_only=True):
    type: Annotated[str, described(enum=["function"])] = "function"
    function: FunctionName


class AllowedTools(Struct, kw_only=True):
    mode: Annotated[str, described(enum=["auto", "required"])]
    tools: list[ToolName]


class NamedToolChoice(Struct, kw_only=True):
    type: Annotated[str, described(enum=["function", "allowed_tools"])]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ConversationBody(GenerationBody, kw_only=True):
    """Fields of chat completions and responses."""

    top_logprobs: Alternatives | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, described("Arguments of the chat template: strings, numbers, true, false.")
    ] = None
    parallel_tool_calls: bool | None = None
    enable_thinking: Annotated[
        bool | None, described("Whether to reason before the answer, if the template supports the choice.")
    ] = None


@with_fields(CHAT_UNSUPPORTED, {"verbosity": "a hint"})
class ChatCompletionRequest(ConversationBody, kw_only=True):
    messages: Annotated[list[ChatMessage], described(minItems=1, maxItems=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None  # overrides max_tokens
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, described("Continue the last message, an assistant's, instead of answering it.")
    ] = None

    tools: Annotated[list[ToolDefinition], described(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, described(enum=["none", "auto", "required"])] | NamedToolChoice | None = None
    reasoning_effort: Annotated[
        str | None,
        described("none: no reasoning, if the template supports it. Others: a hint to the template."),
    ] = None
    prediction: Annotated[
        Prediction | None,
        described("Text that the answer is expected to contain. It only speeds up the answer."),
    ] = None


@with_fields(COMPLETION_UNSUPPORTED)
class CompletionRequest(GenerationBody, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        described(f"A text, token ids, or up to {MAX_PROMPTS} of both kinds. max_tokens is 16 unless given."),
    ]
    logprobs: Alternatives | None = None
    echo: Annotated[bool | None, described("Begin the answer with the prompt.")] = None
    return_token_ids: Annotated[bool | None, described("Also return the token ids of the answer, as in vLLM.")] = None


# Answers


class PromptTokensDetails(Struct):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerHead(Struct, kw_only=True):
    """The fields that every chunk of an answer repeats."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: Annotated[int, described("Unix time in seconds.")]
    model: str
    system_fingerprint: str | None  # null until the digest of large files is known
    service_tier: str


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    name: str
    arguments: str  # JSON, unless the answer was cut off


class AnswerToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatAnswerMessage(Struct):
    content: str | None  # null: only tool calls
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | UnsetType = UNSET  # the stop string that ended it, as in vLLM


class ChatCompletion(AnswerHead, kw_only=True):
    choices: list[ChatChoice]
    usage: CompletionUsage
    cache: CacheView | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Four lists of equal length. With echo, the log probability of the prompt's first token is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]  # the chosen token is always among them
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # for return_token_ids


class Completion(AnswerHead, kw_only=True):
    """The whole answer, or one chunk of a stream."""

    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    cache: CacheView | UnsetType = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: Annotated[str, described("The model this name stands for.")]
    max_model_len: Annotated[int, described("Tokens of prompt and answer together, at most. 0: unknown.")]
    state: Annotated[str, described("unloaded, loading, ready, unloading or failed.")] = "ready"
    num_bytes: Annotated[int, described("Bytes of weights and KV cache; of the weights only if not loaded.")] = 0
    is_pinned: bool = False
    alias_of: Annotated[str | None, described("The first name of the same model.")] = None
    type: Literal["model"] = "model"  # this and the next two for Anthropic's client
    display_name: str
    created_at: str


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False  # this and the next two for Anthropic's client
    first_id: str
    last_id: str


# Tools

RUNS_NO_TOOLS = "this server runs no tools. Use function or allowed_tools"
_FORMATS = ("text", "json_object", "json_schema")


def parse_tools(body: ChatCompletionRequest) -> tuple[tuple[Tool, ...], ToolChoice, tuple[str, ...]]:
    """Return the functions, the tool choice, and the names of left-out tools, which OpenAI's server would run."""
    found = body.tools or ()
    for i, tool in enumerate(found):
        if tool.type == "custom":
            text = f"tools[{i}].type = 'custom' is not supported in chat completions: /v1/responses takes custom tools"
            raise unsupported(f"tools[{i}].type", text, is_value=True)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(found) if tool.type == "function")
    ignored = tuple(f"tools[{i}].{tool.type}" for i, tool in enumerate(found) if tool.type != "function")
    return tools, _choice(body), ignored


def _tool(tool: ToolDefinition, path: str) -> Tool:
    function = given(tool.function, f"{path}.function")
    parameters, is_strict = function.parameters or {}, bool(function.strict)
    return Tool(function.name, function.description or "", parameters, is_strict, path, f"{path}.function.parameters")


def _choice(body: ChatCompletionRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            mode = one_of("tool_choice", mode, ToolMode, ", or an object")
            return ToolChoice(ToolMode(mode), is_parallel=is_parallel)
        case NamedToolChoice(type="function", function=function):
            name = given(function, "tool_choice.function").name
            return ToolChoice(ToolMode.REQUIRED, name, is_parallel=is_parallel)
        case NamedToolChoice(type="allowed_tools", allowed_tools=allowed):
            if allowed is None or not allowed.tools:
                raise InvalidRequest("tool_choice.allowed_tools is missing or names none")
            mode = one_of("tool_choice.allowed_tools.mode", allowed.mode, ("auto", "required"))
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(ToolMode(mode), allowed=names, is_parallel=is_parallel)
        case NamedToolChoice(type=kind):
            raise unsupported_value("tool_choice.type", kind, RUNS_NO_TOOLS)


def call_id_of(call_id: str, path: str) -> str:
    if not 1 <= len(call_id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(f"{path} has {len(call_id)} characters, not 1 to {MAX_CALL_ID_CHARS}")
    return call_id


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type != "function":
        raise unsupported_value(f"{path}.type", call.type, "tools are functions that the client runs")
    function = given(call.function, f"{path}.function")
    made = ToolCall(call_id_of(call.id, f"{path}.id"), function.name, function.arguments or "{}")
    check_call(made, f"{path}.function")
    return made


# Answer formats

Shape = tuple[str, Callable[[], Grammar]]  # the field that constrains the answer, and its grammar


def shape_of(body: GenerationBody) -> Shape | None:
    """The one field that constrains the answer. None: no such field."""
    found = list(_shapes(body))
    if len(found) > 1:
        raise InvalidRequest(f"{found[1][0]} and {found[0][0]} exclude each other")
    return found[0] if found else None


def _json_grammar(text: str | dict[str, Any], *, strict: bool = False) -> Grammar:
    schema: Any = text
    if isinstance(text, str):
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar: this is neither a schema nor the JSON text of one")
    return json_schema_grammar(schema, strict=strict)


# Fields of vLLM's `structured_outputs`, and of its older names with `guided_`: field -> what makes a grammar of it.
_STRUCTURED: Mapping[str, Callable[..., Grammar]] = {
    "json": _json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": written_grammar,
}
# Fields of SGLang, llama.cpp and vLLM.
_FIELDS: Mapping[str, Callable[..., Grammar]] = {
    "json_schema": _json_grammar,
    "regex": regex_grammar,
    "grammar": written_grammar,
    "ebnf": lambda rules: lark_grammar(gbnf_to_lark(rules)),
    "allowed_token_ids": token_grammar,
}


def _shapes(body: GenerationBody) -> Iterator[Shape]:
    if isinstance(body.response_format, ResponseFormat):
        yield from _response_format(body.response_format)
    newer = body.structured_outputs or StructuredOutputs()
    strict_json = partial(_json_grammar, strict=bool(newer.strict))
    makers: dict[str, Callable[..., Grammar]] = {**_STRUCTURED, "json": strict_json}
    for name, make in makers.items():
        if (value := getattr(newer, name)) is not None:
            yield f"structured_outputs.{name}", partial(make, value)
    if newer.json_object:
        yield "structured_outputs.json_object", json_object_grammar
    for name, make in _STRUCTURED.items():
        value = getattr(body, f"guided_{name}")
        if value is not None and value != getattr(newer, name):  # some clients send both
            yield f"guided_{name}", partial(make, value)
    for name, make in _FIELDS.items():
        value = getattr(body, name)
        if value is not None and (name, value) != ("grammar", ""):  # clients of llama.cpp send it for no grammar
            yield name, partial(make, value)


def _response_format(form: ResponseFormat) -> Iterator[Shape]:
    inner = form.json_schema
    match form.type:
        case "text":
            return
        case "json_object" if form.schema is None:
            yield "response_format", json_object_grammar
        case "json_schema" if inner is not None or form.schema is None:
            path = "response_format.json_schema"
            schema = given(given(inner, path).schema, f"{path}.schema")
            yield f"{path}.schema", partial(json_schema_grammar, schema, strict=bool(inner and inner.strict))
        case "json_object" | "json_schema":
            yield "response_format.schema", partial(json_schema_grammar, form.schema or {}, strict=False)
        case other:
            raise unknown_format("response_format.type", other)


def unknown_format(field: str, given: str) -> InvalidRequest:
    """The error names vLLM's field for formats that have one."""
    where = f"; structured_outputs.{given} takes one" if given in ("regex", "choice", "grammar", "json") else ""
    return InvalidRequest(f"{field} = {given!r:.80} is not one of {', '.join(_FORMATS)}{where}")


T = TypeVar("T")

DEFAULT_TTL_S = 300.0
_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict")  # most recent protocol first
_PENALTIES = ("repetition_penalty", "repeat_penalty")
NO_LIMIT = -1  # max_tokens of llama.cpp
_MAX_KEY_DIGITS = 10  # of a token id

# quire's field -> OpenAI's field, in errors that begin with a field.
NAMES = {
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
    "template_args": "chat_template_kwargs",
    "continue_last": "continue_final_message",
}


def names_of(body: GenerationBody, names: Mapping[str, str]) -> dict[str, str]:
    return {**names, "max_tokens": _first_of(body, _LIMITS[:-1])[0]}


def _first_of(body: GenerationBody, names: Sequence[str]) -> tuple[str, Any]:
    """The first of these fields that is set, and its value. Refuses different values: they mean the same."""
    found = [(name, value) for name in names if (value := getattr(body, name, None)) is not None]
    for name, value in found[1:]:
        first, other = found[0]
        if value != other:
            raise InvalidRequest(f"{first} = {other} and {name} = {value} contradict each other: send one of them")
    return found[0] if found else (names[-1], None)


def _params(
    body: GenerationBody, shape: Shape | None, *, default_max_tokens: int | None, may_be_empty: bool, **more: Any
) -> GenerationParams:
    refuse_unsupported(body, REFUSED)
    limit, max_tokens = _first_of(body, _LIMITS)
    penalty, repetition_penalty = _first_of(body, _PENALTIES)
    if body.repeat_last_n is not None and body.repeat_last_n < -1:
        raise InvalidRequest(f"repeat_last_n = {body.repeat_last_n} is less than -1")
    is_penalized = body.repeat_last_n != 0
    max_tokens = _or(max_tokens, default_max_tokens)
    with protocol_field_names({"max_tokens": limit, "repetition_penalty": penalty}):
        if max_tokens is not None and max_tokens < 1 and max_tokens != NO_LIMIT and (max_tokens or not may_be_empty):
            why = "; only completions accept 0" if max_tokens == 0 else ""
            raise InvalidRequest(f"max_tokens = {max_tokens} is not at least 1 or -1 (no limit){why}")
        return GenerationParams(
            temperature=body.temperature,
            top_k=0 if body.top_k == -1 else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=repetition_penalty if is_penalized else 1.0,
            presence_penalty=_or(body.presence_penalty, 0.0) if is_penalized else 0.0,
            frequency_penalty=_or(body.frequency_penalty, 0.0) if is_penalized else 0.0,
            logit_bias=_biases(body.logit_bias or {}),
            seed=None if body.seed == -1 else body.seed,  # -1: no seed, as in vLLM and llama.cpp
            max_tokens=None if max_tokens == NO_LIMIT else max_tokens,
            min_tokens=_or(body.min_tokens, 0),
            stop=_or(body.stop, ()),
            stop_token_ids=_or(body.stop_token_ids, ()),
            include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
            ignore_eos=bool(body.ignore_eos),
            skip_special=_or(body.skip_special_tokens, True),
            grammar=None if shape is None else made_grammar(*shape),
            **more,
        )


def make_request(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    shape: Shape | None,
    *,
    breakpoints: Sequence[Breakpoint] = (),
    ignored: Iterable[str] = (),
    unenforced: tuple[str, ...] = (),
    thinking: tuple[ThinkingField, ...] = (),
    default_max_tokens: int | None = None,
    may_be_empty: bool = False,
    **params: Any,
) -> InferenceRequest:
    """`may_be_empty`: max_tokens may be 0. `params`: parameters of the generation that have fields of their own."""
    found = _params(body, shape, default_max_tokens=default_max_tokens, may_be_empty=may_be_empty, **params)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream = true")
    options = body.prompt_cache_options or PromptCacheOptions()
    _choose("prompt_cache_options.mode", options.mode, {"implicit": None, "explicit": None}, None)
    by_tier = _choose("service_tier", body.service_tier, SERVICE_TIERS, None)
    return with_unenforced(
        InferenceRequest(
            model=body.model,
            prompts=prompts,
            params=found,
            is_unbounded=_first_of(body, _LIMITS)[1] == NO_LIMIT,
            is_streaming=bool(body.stream),
            priority=by_tier if body.priority is None else priority_of(body.priority),
            cache_salt=body.cache_salt or "",
            cache_key=None if options.mode == "explicit" else body.prompt_cache_key,
            cache_ttl_s=cache_ttl_s(body),
            breakpoints=tuple(breakpoints[-MAX_BREAKPOINTS:]),  # a conversation keeps its old ones; the last ones count
            wants_cache=bool(body.cache),
            ignored=(*_ignored(body), *ignored),
            thinking_fields=thinking,
            unenforced=unenforced,
            format_field=None if shape is None else shape[0],
        )
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


def thinking_fields(body: ConversationBody, effort_field: str, effort: str | None) -> tuple[ThinkingField, ...]:
    """The fields of the body that set whether, or how much, to think."""
    found = [] if effort is None else [ThinkingField(effort_field, False if effort == "none" else None)]
    if body.enable_thinking is not None:
        found.append(ThinkingField("enable_thinking", body.enable_thinking))
    found += [ThinkingField(name, False) for name in BUDGETS if getattr(body, name) == 0]
    return tuple(found)


def wants_thought(body: ConversationBody, effort: str | None) -> bool | None:
    """Whether to think. A budget of 0 tokens switches it off."""
    has_no_budget = any(getattr(body, name) == 0 for name in BUDGETS)
    return False if effort == "none" or has_no_budget else body.enable_thinking


def cache_ttl_s(body: GenerationBody) -> float:
    """The lifetime of a pin. prompt_cache_options.ttl, the newer field, overrides prompt_cache_retention."""
    retention_s = _choose("prompt_cache_retention", body.prompt_cache_retention, RETENTIONS_S, DEFAULT_TTL_S)
    options = body.prompt_cache_options or PromptCacheOptions()
    return _choose("prompt_cache_options.ttl", options.ttl, TTLS_S, retention_s)


def _choose(field: str, value: str | None, table: Mapping[str, T], default: T) -> T:
    return default if value is None else table[one_of(field, value, table)]


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Convert the keys to token ids: JSON has no number keys."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_KEY_DIGITS):
            raise InvalidRequest(f"logit_bias[{key[:40]!r}] is not a token id")
    return {int(key): value for key, value in biases.items()}


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


DONE = b"data: [DONE]\n\n"
TIERS = {Priority.HIGH: "priority", Priority.NORMAL: "default", Priority.LOW: "flex"}


class ChunkEncoder(AnswerEncoder):
    """Encodes the choices of chat and plain completions, as chunks or as a whole.

    The chunk that ends the last choice is held until `finish`: it may carry the cache explanation.
    """

    prefix, kind, chunk_kind = "", "", ""  # of ids; of the whole answer and of a chunk
    content = ""  # the field of a chunk with its content
    no_text: object = ""  # content of a chunk with log probabilities only
    no_content: object = ""  # content of the last chunk

    def __init__(self, active: ActiveRequest, body: GenerationBody) -> None:
        super().__init__(active)
        options = body.stream_options or StreamOptions()
        request = active.request
        self.n = request.params.n
        self._num_open = self.n * len(request.prompts)
        self._include_usage = bool(options.include_usage)
        self._has_ids = isinstance(body, CompletionRequest) and bool(body.return_token_ids)  # also without text
        self.has_frames = not self._has_ids
        self._held: Event | None = None
        # Only the choice differs between chunks: the rest is encoded once.
        self._head = self.head(self.chunk_kind)
        self._before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    @abstractmethod
    def begin_choice(self, index: int) -> list[Event]:
        """The chunk before the content, if there is one."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob], index: int) -> Struct:
        """Log probabilities of tokens of a choice."""

    def reason(self, sample: Sample) -> str:
        return finish_reason(sample.last)

    def head(self, kind: str) -> Event:
        """The fields that every chunk repeats."""
        active = self.active
        return {
            "id": f"{self.prefix}-{active.request_id}",
            "object": kind,
            "created": active.created,
            "model": active.model,
            "system_fingerprint": active.system_fingerprint,
            "service_tier": TIERS[active.priority],
        }

    def chunk(self, index: int, content: object, reason: str | None = None, stop: str | None = None) -> Event:
        chunk = {"index": index, self.content: content, "logprobs": None, "finish_reason": reason}
        return chunk if stop is None else chunk | {"stop_reason": stop}

    def encode(self, event: Event) -> bytes:
        return self._before + encode_json(event) + self._after

    def feed(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        events: list[bytes] = []
        for prompt, delta in batch:
            index = prompt * self.n + delta.index
            has_content = bool(delta.text or delta.logprobs or (self._has_ids and delta.token_ids))
            if not has_content and delta.finish_reason is None:
                continue  # an incomplete character, or the possible beginning of a stop string
            chunks = [] if index in self.samples else self.begin_choice(index)
            sample = self.sample(index)
            chunks += self.take_delta(sample, delta)
            events += map(self.encode, chunks)
            if delta.finish_reason is not None:
                self._num_open -= 1
                end = self.chunk(index, self.no_content, self.reason(sample), delta.stop)
                if self._num_open:
                    events.append(self.encode(end))
                else:
                    self._held = end
        return b"".join(events)

    def take_delta(self, sample: Sample, delta: Delta) -> list[Event]:
        chunks = super().take_delta(sample, delta)
        if not chunks and (delta.logprobs or (self._has_ids and delta.token_ids)):
            chunks = [self.chunk(sample.index, self.no_text)]
        if delta.logprobs:  # the tokens may have become text, reasoning or a call
            chunks[0]["logprobs"] = self.logprobs(delta.logprobs, sample.index)
        if self._has_ids and chunks:
            chunks[0]["token_ids"] = list(delta.token_ids)
        return chunks

    def finish(self) -> bytes:
        events = [DONE]
        more: Event = {} if self.cache is UNSET else {"cache": self.cache}
        if self._include_usage:
            usage = usage_body(self.active.usage, self.active.num_thought_tokens)
            events.insert(0, self._event([], {"usage": usage} | more))
            more = {"usage": None}
        if self._held is not None:
            events.insert(0, self._event([self._held], more))
        return b"".join(events)

    def _event(self, choices: list[Event], more: Event) -> bytes:
        return b"data: " + encode_json(self._head | {"choices": choices} | more) + b"\n\n"


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


_TYPES: dict[Kind, tuple[str, str | None]] = {  # type and code
    Kind.INVALID: ("invalid_request_error", None),
    Kind.TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    Kind.AUTHENTICATION: ("invalid_request_error", "invalid_api_key"),
    Kind.PERMISSION: ("permission_error", "permission_denied"),
    Kind.NOT_FOUND: ("invalid_request_error", "unknown_url"),
    Kind.NO_MODEL: ("invalid_request_error", "model_not_found"),
    Kind.METHOD: ("invalid_request_error", "method_not_supported"),
    Kind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Kind.TIMEOUT: ("invalid_request_error", "request_timeout"),
    Kind.RATE_LIMITED: ("rate_limit_error", "rate_limit_exceeded"),
    # The code distinguishes a full server from a key that reached its limit: both are 429, and every client backs off.
    Kind.OVERLOADED: ("rate_limit_error", "server_overloaded"),
    Kind.UNAVAILABLE: ("server_error", "service_unavailable"),
    Kind.FAILED: ("server_error", None),
    Kind.DIED: ("server_error", "engine_died"),
    Kind.CANCELLED: ("request_cancelled", "request_cancelled"),
}
_CODES = ("unsupported_parameter", "unsupported_value", "request_not_found")  # reasons that are also codes


def error_body(error: ApiError) -> dict[str, Any]:
    kind, code = _TYPES[error.kind]
    code = error.reason if error.reason in _CODES else code
    return {"message": error.message, "type": kind, "param": error.param, "code": code}


def _body(error: ApiError, _request_id: str) -> bytes:
    return encode_json({"error": error_body(error)})


def _event(error: ApiError, request_id: str) -> bytes:
    return b"data: " + _body(error, request_id) + b"\n\n"


OPENAI = Dialect("openai", _body, _event)


_NAMES = NAMES | {"logprobs": "top_logprobs", "prompt": "messages"}
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


async def chat_completions(context: RequestContext) -> Response:
    body = await context.body(ChatCompletionRequest)
    request = await context.parse(parse_chat, body)
    return await respond(context, request, partial(ChatEncoder, body=body), names_of(body, _NAMES))


# Parsing


def parse_chat(body: ChatCompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, CHAT_UNSUPPORTED)
    with protocol_field_names(names_of(body, _NAMES)):
        turns = ChatTurns(cache_ttl_s(body))
        chat, ignored = conversation_of(body, turns)
        return make_request(
            body,
            (chat,),
            shape_of(body),
            breakpoints=turns.breakpoints,
            ignored=ignored,
            thinking=thinking_fields(body, "reasoning_effort", body.reasoning_effort),
            n=_or(body.n, 1),
            logprobs=_logprobs(body),
            prediction=_prediction(body),
        )


def conversation_of(body: ChatCompletionRequest, turns: ChatTurns) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the conversation, and the names of the tools that are left out of it."""
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    tools, choice, ignored = parse_tools(body)
    chat = ChatRequest(
        parse_messages(body.messages, turns),
        opens,
        continues,
        body.chat_template_kwargs or {},
        tools,
        choice,
        wants_thought=wants_thought(body, body.reasoning_effort),
        reasoning_effort=body.reasoning_effort,
    )
    return chat, ignored


def checked_alternatives(count: int | None) -> int | None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs = {count} is not a whole number from 0 to {MAX_LOGPROBS}")
    return count


def _logprobs(body: ChatCompletionRequest) -> int | None:
    count = checked_alternatives(body.top_logprobs)
    if count and not body.logprobs:
        raise InvalidRequest(f"top_logprobs = {count} needs logprobs = true")
    return count or 0 if body.logprobs else None


def _prediction(body: ChatCompletionRequest) -> str:
    if body.prediction is None:
        return ""
    one_of("prediction.type", body.prediction.type, ("content",))
    turns = ChatTurns()
    turn = turns.add(Turn(Role.ASSISTANT))
    turns.fill(body.prediction.content, "prediction.content")
    return "".join(part.text for part in turn.parts)


class PartTurns(Turns):
    """Turns whose content is a text or parts of OpenAI's kinds."""

    text_types: Sequence[str] = ()  # types of parts with a text
    known_types = ""  # named in errors
    other_types: Mapping[str, str] = MappingProxyType({})  # what cannot be read

    def __init__(self, ttl_s: float | None = None) -> None:
        """`ttl_s`: the default of a breakpoint. None: breakpoints have no effect."""
        super().__init__()
        self._ttl_s = ttl_s

    def part(self, text: str, _path: str) -> Part:
        return Part(text)

    def fill(self, content: str | Sequence[ContentPart] | None, path: str) -> None:
        """Add content to the last turn."""
        turn = self[-1]
        if isinstance(content, str):
            turn.parts.append(self.part(content, path))
            return
        if not content and turn.role is not Role.ASSISTANT:
            raise InvalidRequest(f"{path} is null or has no parts; only an assistant's may")
        check_parts(content or (), path)
        for i, part in enumerate(content or ()):
            turn.parts.append(self._part(part, f"{path}[{i}]"))
            if (mark := part.prompt_cache_breakpoint) is not None and self._ttl_s is not None:
                at = f"{path}[{i}].prompt_cache_breakpoint"
                if mark.mode not in (None, "explicit"):
                    raise InvalidRequest(f"{at}.mode = {mark.mode!r:.80} is not explicit")
                self.keep(_choose(f"{at}.ttl", mark.ttl, TTLS_S, self._ttl_s))

    def _part(self, part: ContentPart, path: str) -> Part:
        if part.type == "refusal":
            return self.part(given(part.refusal, f"{path}.refusal"), f"{path}.refusal")
        if part.type in self.text_types:
            return self.part(given(part.text, f"{path}.text"), f"{path}.text")
        if part.type in self.other_types:
            raise unsupported_value(f"{path}.type", part.type, f"{self.other_types[part.type]} cannot be read")
        raise InvalidRequest(f"{path}.type = {part.type!r:.80} is not one of {self.known_types}")


class ChatTurns(PartTurns):
    text_types = ("text",)
    known_types = "text, refusal"
    other_types = MappingProxyType({"image_url": "images", "input_audio": "audio", "file": "files"})

    def add_message(self, message: ChatMessage, path: str) -> None:
        for field in OLD_MESSAGE_FIELDS:
            check_supported(f"{path}.{field}", getattr(message, field), Unsupported(CHAT_UNSUPPORTED[field].why))
        if message.role == "function":
            raise unsupported_value(f"{path}.role", message.role, "it is the older form of tool")
        role = _ROLES[one_of(f"{path}.role", message.role, _ROLES)]
        if role is not Role.ASSISTANT and message.tool_calls:
            raise InvalidRequest(f"{path}.tool_calls is only for an assistant's message")
        if (role is Role.TOOL) != (message.tool_call_id is not None):
            raise InvalidRequest(f"{path}.tool_call_id {'is missing' if role is Role.TOOL else 'is only for a tool'}")
        turn = self.add(Turn(role, name=message.name, call_id=message.tool_call_id))
        self.fill(message.content, f"{path}.content")
        if message.content in (None, []) and message.refusal is not None:
            turn.parts.append(Part(message.refusal))
        if role is Role.ASSISTANT:
            turn.thoughts.append(message.reasoning_content or "")
        turn.calls += [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]


def parse_messages(messages: Sequence[ChatMessage], turns: ChatTurns) -> tuple[Message, ...]:
    check_messages(messages)
    for i, message in enumerate(messages):
        turns.add_message(message, f"messages[{i}]")
    return turns.messages()


# Encoding


class ChatEncoder(ChunkEncoder):
    """Chunks of a choice: first the role, then the content, then the finish reason."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    content = "delta"
    no_text: object = {"content": ""}
    no_content: object = {}

    def begin_choice(self, index: int) -> list[Event]:
        return [self.chunk(index, {"content": "", "role": "assistant"})]

    def start(self, item: Item) -> list[Event]:
        if not isinstance(item.first, CallStart):
            return []
        number, call_id, name = item.first
        call = {"index": number, "function": {"arguments": "", "name": name}, "id": call_id, "type": "function"}
        return [self.chunk(item.sample, {"tool_calls": [call]})]

    def grow(self, item: Item, text: str) -> list[Event]:
        match item.first:
            case Words():
                return [self.chunk(item.sample, {"content": text})]
            case Thought():
                return [self.chunk(item.sample, {"reasoning_content": text})]
            case CallStart(number):
                call = {"index": number, "function": {"arguments": text}}
                return [self.chunk(item.sample, {"tool_calls": [call]})]

    def logprobs(self, entries: Sequence[TokenLogprob], _index: int) -> ChatLogprobs:
        return ChatLogprobs([chat_logprob(entry) for entry in entries])

    def reason(self, sample: Sample) -> str:
        """tool_calls if the last call is complete. An answer that a stop string cut off in a call keeps its reason."""
        reason, calls = finish_reason(sample.last), sample.calls
        return "tool_calls" if reason == "stop" and calls and decoded_arguments(calls[-1].text) is not None else reason

    def whole(self) -> ChatCompletion:
        choices: list[ChatChoice] = []
        for sample, one in self.read():
            logprobs = None if one.logprobs is None else self.logprobs(one.logprobs, sample.index)
            message, reason = _answer_message(sample), self.reason(sample)
            choices.append(ChatChoice(sample.index, message, logprobs, reason, one.stop or UNSET))
        usage = usage_body(self.active.usage, self.active.num_thought_tokens)
        return ChatCompletion(**self.head(self.kind), choices=choices, usage=usage, cache=self.cache)


def _answer_message(sample: Sample) -> ChatAnswerMessage:
    calls = [
        AnswerToolCall(item.first.call_id, FunctionCall(item.first.name, item.text))
        for item in sample.items
        if isinstance(item.first, CallStart)
    ]
    thought = sample.text_of(Thought)
    content = sample.text_of(Words) or (None if calls else "")
    return ChatAnswerMessage(content, reasoning_content=thought or UNSET, tool_calls=calls or UNSET)


def chat_logprob(entry: TokenLogprob) -> ChatTokenLogprob:
    alternatives = [top_logprob(top) for top in entry.top]
    return ChatTokenLogprob(token_text(entry), finite(entry.logprob), list(entry.data), alternatives)


async def completions(context: RequestContext) -> Response:
    body = await context.body(CompletionRequest)
    request = await context.parse(parse_completion, body)
    return await respond(context, request, partial(CompletionEncoder, body=body), NAMES)


# Parsing


def parse_completion(body: CompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, COMPLETION_UNSUPPORTED)
    scores_prompt = bool(body.echo) and body.logprobs is not None
    if scores_prompt and body.stream:
        raise unsupported("echo", "echo with logprobs is not supported in a stream")
    with protocol_field_names(NAMES):
        return make_request(
            body,
            _prompts(body.prompt),
            shape_of(body),
            default_max_tokens=max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0),
            may_be_empty=True,
            n=_or(body.n, 1),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scores_prompt else None,
        )


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], int):
        kinds = {type(entry) for entry in prompt}
        if kinds != {int}:  # the message does not repeat the entry: it may be text
            at = next(i for i, entry in enumerate(prompt) if type(entry) is not int)
            raise InvalidRequest(f"prompt[{at}] is a {type(prompt[at]).__name__}, not a token id")
        check_tokens("prompt", prompt)  # type: ignore[arg-type]  # raises with the position
        return (tuple(prompt),)  # type: ignore[arg-type]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries, not 1 to {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for i, entry in enumerate(prompt):
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


class CompletionEncoder(ChunkEncoder):
    """Chunks of a choice: with echo the prompt first, then the text, then the finish reason."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    content = "text"

    def __init__(self, active: ActiveRequest, body: CompletionRequest) -> None:
        super().__init__(active, body)
        self._has_echo = bool(body.echo)
        self._echoes = [Echo("")] * len(active.request.prompts)

    async def prepare(self, context: RequestContext) -> None:
        """Decode the prompts that are repeated, many token ids in a thread."""
        request, self._tokenizer = self.active.request, context.service.text.tokenizer
        if not self._has_echo:
            return

        def make() -> list[Echo]:
            return [echo_of(prompt, self._tokenizer, request) for prompt in request.prompts]

        num_ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
        self._echoes = await context.run(make, is_slow=num_ids > MAX_PLAIN_VALUES)

    def new_parser(self) -> PlainAnswer:
        return PlainAnswer()

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self.n]

    def begin_choice(self, index: int) -> list[Event]:
        text = self._echo(index).text
        return [self.chunk(index, text)] if text else []

    def grow(self, item: Item, text: str) -> list[Event]:
        return [self.chunk(item.sample, text)]

    def logprobs(self, entries: Sequence[TokenLogprob], index: int) -> CompletionLogprobs:
        """Four lists. Offsets count from the first character of the echo."""
        start = len(self._echo(index).text)
        return CompletionLogprobs(
            tokens=[token_text(entry) for entry in entries],
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[_alternatives(entry) for entry in entries],
            text_offset=[start + entry.offset for entry in entries],
        )

    def whole(self) -> Completion:
        choices: list[CompletionChoice] = []
        for sample, one in self.read():
            echo, output = self._echo(sample.index), self.outputs[sample.index // self.n]
            logprobs: CompletionLogprobs | None = None
            if one.logprobs is not None and output.prompt_logprobs is not None:
                entries = (*_prompt_entries(output, echo, self._tokenizer), *one.logprobs)
                logprobs = self.logprobs(entries, sample.index)
                # The first token has no context to be predicted from.
                logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None
            elif one.logprobs is not None:
                logprobs = self.logprobs(one.logprobs, sample.index)
            text, reason = echo.text + one.text, self.reason(sample)
            ids = list(one.token_ids) if self._has_ids else UNSET
            choices.append(CompletionChoice(sample.index, text, logprobs, reason, one.stop or UNSET, ids))
        usage = usage_body(self.active.usage)
        return Completion(**self.head(self.kind), choices=choices, usage=usage, cache=self.cache)


def _prompt_entries(output: GenerationOutput, echo: Echo, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """The tokens of the prompt. As for those of the answer, offsets are relative to the answer's first character."""
    ids = output.prompt_token_ids
    entries: list[TokenLogprob] = []
    offsets = token_offsets(echo, ids, tokenizer)
    for token_id, entry, offset in zip(ids, output.prompt_logprobs or (), offsets, strict=True):
        if entry is None:
            data = tokenizer.token_bytes(token_id)
            entry = TokenLogprob(token_id, data.decode("utf-8", "replace"), data, 0.0, 0)
        entries.append(replace(entry, offset=offset - len(echo.text)))
    return entries


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    """The alternatives of a token, always with the token itself."""
    found = {token_text(top): finite(top.logprob) for top in entry.top}
    found.setdefault(token_text(entry), finite(entry.logprob))
    return found
