"""Request and response bodies of OpenAI's API, with fields of vLLM, SGLang, llama.cpp and TGI.

/openapi.json is made from these. Every optional field may be null: SDKs send null for unset fields. Bounds here are for
the schema only. They are checked where the values are used, with messages that name the field and the value. A field
that quire does not support needs one row of a table; see `quire/server/protocols/support.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from quire.core.values import MAX_TOKEN_ID, MIN_PENALTY, Priority
from quire.engine.generation import MAX_BIASES, MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP_IDS, MAX_TEMPERATURE
from quire.server.models import MAX_NAME_CHARS, MAX_PROMPTS
from quire.server.protocols.support import CacheView, TopLogprob, Unsupported, described, with_fields
from quire.text.grammar import MAX_LISTED_TOKENS
from quire.text.messages import MAX_MESSAGES, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from quire.text.stream import MAX_STOPS

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
    "web_search_options": Unsupported("this server does not search the web", empty=(None,)),
    "moderation": Unsupported("this server has no moderation model", empty=(None,)),
    "documents": Unsupported("put them into messages"),
    "chat_template": Unsupported("a request cannot bring its own template; the model's is used"),
    "echo": Unsupported("only completions repeat the prompt", (False,)),
    "add_special_tokens": Unsupported("the chat template adds them", (False,)),
    "return_token_ids": Unsupported("only completions return them", (False,)),
}
OLD_MESSAGE_FIELDS = ("function_call", "audio")  # of a message
COMPLETION_UNSUPPORTED = {
    "suffix": Unsupported("the models generate at the end of the prompt only"),
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


class StreamOptions(Struct, kw_only=True):
    include_usage: Annotated[bool | None, described("Add a last chunk with the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None, described("Add the token counts so far to every chunk, as in vLLM.")
    ] = None
    include_obfuscation: Annotated[bool | None, described("Accepted, without effect.")] = None


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
    best_of: Annotated[int | None, described("Only 1 and n are supported.")] = None
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
    # Unset in the counts that `continuous_usage_stats` adds to every chunk.
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


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
