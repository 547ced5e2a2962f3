"""Request and response bodies of Ollama's API. /openapi.json is made from these.

Every optional field may be null. Bounds here are for the schema only. They are checked where the values are used, with
messages that name the field and the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.values import MAX_TOKEN_ID
from quire.engine.params import MAX_LOGPROBS, MAX_TEMPERATURE
from quire.server.protocols.support import (
    SHAPE_FIELDS,
    CacheView,
    Unsupported,
    describe_accepted,
    describe_refused,
    with_shape_fields,
)
from quire.text.messages import MAX_MESSAGES, MAX_TOOLS
from quire.text.stream import MAX_STOPS

_SHAPE = "use format: json, or a JSON schema"
_SAMPLER = "quire does not have this sampler"

# Fields of a body, of a message and of options.
UNSUPPORTED = {
    "images": Unsupported("only text input is supported", ([],)),
    "suffix": Unsupported("the models generate at the end of the prompt only", ("",)),
    "template": Unsupported("a request cannot bring its own template; the model's is used", ("",)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    **{name: Unsupported(_SHAPE, harmless) for name, harmless in SHAPE_FIELDS.items()},
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


def refused(field: str) -> Meta:
    return describe_refused(UNSUPPORTED[field])


def ignored(option: str) -> Meta:
    return describe_accepted(IGNORED_OPTIONS[option])


THINK_LEVELS = ("low", "medium", "high", "max")


def _described(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema)


KeepAlive = Annotated[
    str | float | None,
    _described(
        "0 without a prompt and with an admin key unloads the model. "
        "Other values have no effect: the server decides how long a model stays loaded."
    ),
]


# Requests


class OllamaOptions(Struct, kw_only=True):
    """`options`: sampling parameters, and settings of Ollama's own runner."""

    num_predict: Annotated[
        int | None,
        _described(
            "The longest answer, in tokens; 0, -1, -2: no limit but the context. Unless given: --default-max-tokens.",
            minimum=-2,
        ),
    ] = None
    temperature: Annotated[
        float | None, _described("0: always the most probable token.", minimum=0, maximum=MAX_TEMPERATURE)
    ] = None
    top_k: Annotated[int | None, _described("0 or less: all tokens.", maximum=MAX_TOKEN_ID)] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    repeat_penalty: Annotated[
        float | None, _described("Above 1: divides the logit of tokens that occur in the prompt or the answer.")
    ] = None
    repeat_last_n: Annotated[
        int | None, _described("0: no penalties. Any other value: penalties apply to the whole context.", minimum=-1)
    ] = None
    presence_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    frequency_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    seed: Annotated[int | None, _described("The same seed gives the same answer; -1: random.")] = None
    stop: str | Annotated[list[str], Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None = None
    num_ctx: Annotated[int | None, _described("Accepted, without effect: the server sets the context of a model.")] = (
        None
    )

    mirostat: Annotated[Any, refused("mirostat")] = None
    typical_p: Annotated[Any, refused("typical_p")] = None
    tfs_z: Annotated[Any, refused("tfs_z")] = None

    num_gpu: Annotated[Any, ignored("num_gpu")] = None
    main_gpu: Annotated[Any, ignored("main_gpu")] = None
    num_thread: Annotated[Any, ignored("num_thread")] = None
    num_batch: Annotated[Any, ignored("num_batch")] = None
    num_keep: Annotated[Any, ignored("num_keep")] = None
    numa: Annotated[Any, ignored("numa")] = None
    low_vram: Annotated[Any, ignored("low_vram")] = None
    f16_kv: Annotated[Any, ignored("f16_kv")] = None
    logits_all: Annotated[Any, ignored("logits_all")] = None
    vocab_only: Annotated[Any, ignored("vocab_only")] = None
    embedding_only: Annotated[Any, ignored("embedding_only")] = None
    use_mmap: Annotated[Any, ignored("use_mmap")] = None
    use_mlock: Annotated[Any, ignored("use_mlock")] = None
    draft_num_predict: Annotated[Any, ignored("draft_num_predict")] = None
    mirostat_tau: Annotated[Any, ignored("mirostat_tau")] = None
    mirostat_eta: Annotated[Any, ignored("mirostat_eta")] = None
    penalize_newline: Annotated[Any, ignored("penalize_newline")] = None


class OllamaCalledFunction(Struct, kw_only=True):
    name: str
    arguments: Annotated[dict[str, Any] | None, _described("An object, not a JSON string.")] = None
    index: int | None = None


class OllamaToolCall(Struct, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, kw_only=True):
    role: Annotated[
        str, _described("An assistant's last message is continued.", enum=["system", "user", "assistant", "tool"])
    ]
    content: str | None = None
    thinking: Annotated[str | None, _described("The assistant's reasoning before its answer.")] = None
    tool_calls: Annotated[list[OllamaToolCall] | None, _described("The assistant's tool calls.")] = None
    tool_name: Annotated[str | None, _described("In a tool's message: the function it answers.")] = None
    tool_call_id: Annotated[str | None, _described("In a tool's message: the call it answers.")] = None
    images: Annotated[Any, refused("images")] = None


class OllamaFunction(Struct, kw_only=True):
    name: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9_-]{1,64}$"})]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, _described("A JSON schema of an object.")] = None


class OllamaTool(Struct, kw_only=True):
    function: OllamaFunction
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"


if TYPE_CHECKING:

    class _ShapeFields(Struct, kw_only=True): ...
else:
    _ShapeFields = with_shape_fields("_ShapeFields", refused)


class OllamaBody(_ShapeFields, kw_only=True):
    """Fields that chat and generate share."""

    model: Annotated[str, _described("A name listed by /api/tags; the tag `latest` is optional.")]
    stream: Annotated[bool | None, _described("True or null: one JSON line per part of the answer.")] = None
    format: Annotated[str, Meta(extra_json_schema={"enum": ["", "json"]})] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    think: Annotated[
        bool | str | None, _described(f"Whether to think first, or how much: {', '.join(THINK_LEVELS)}.")
    ] = None
    truncate: Annotated[bool | None, _described("Accepted, without effect: a prompt that is too long is refused.")] = (
        None
    )
    shift: Annotated[bool | None, _described("Accepted, without effect: an answer ends when the context is full.")] = (
        None
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS})] = None
    # quire's own
    cache: bool | None = None
    cache_salt: str | None = None
    priority: str | int | None = None


class OllamaChatRequest(OllamaBody, kw_only=True):
    """A conversation to answer. Without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], Meta(extra_json_schema={"maxItems": MAX_MESSAGES})] | None = None
    tools: Annotated[list[OllamaTool], Meta(extra_json_schema={"maxItems": MAX_TOOLS})] | None = None


class OllamaGenerateRequest(OllamaBody, kw_only=True):
    """A question to answer. Without a prompt the model is only loaded."""

    prompt: Annotated[str | None, _described("A user's message; with raw, the whole prompt.")] = None
    system: str | None = None
    raw: Annotated[bool | None, _described("Continue the prompt without the chat template.")] = None
    context: Annotated[
        list[int] | None, _described("The `context` of an earlier response: the conversation so far, as token ids.")
    ] = None
    suffix: Annotated[Any, refused("suffix")] = None
    template: Annotated[Any, refused("template")] = None
    images: Annotated[Any, refused("images")] = None


class ShowRequest(Struct, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, _described("The older form of model.")] = None
    verbose: Annotated[bool | None, _described("Accepted, without effect.")] = None


class PullRequest(Struct, kw_only=True):
    model: Annotated[str | None, _described("A known model name, or an org/name of the hub.")] = None
    name: Annotated[str | None, _described("The older form of model.")] = None
    stream: bool | None = None
    insecure: Annotated[bool | None, _described("Accepted, without effect.")] = None


# Answers

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaAlternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OllamaAlternative] | UnsetType = UNSET


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
    load_duration: Annotated[int, _described("Time spent waiting for the model to load.")] | UnsetType = UNSET
    prompt_eval_count: Annotated[int, _described("Prompt tokens, including cached ones.")] | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cache: CacheView | UnsetType = UNSET  # quire's own


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[list[int], _described("Prompt and answer as token ids; not with raw.")] | UnsetType = UNSET


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
    size: Annotated[int, _described("Size of the model's files in bytes.")]
    digest: Annotated[str, _described("Digest of the files' name, size and modification time, not of their content.")]
    details: ModelDetails
    capabilities: list[str]


class ListedModels(Struct, kw_only=True):
    models: list[ListedModel]


class LoadedModel(Struct, kw_only=True):
    name: str
    model: str
    size: Annotated[int, _described("Weights and KV cache in memory, in bytes.")]
    size_vram: Annotated[int, _described("The same if the model is on a GPU, else 0.")]
    digest: str
    details: ModelDetails
    expires_at: Annotated[str, _described("When --idle-unload would unload it; the year 9999: never.")]
    context_length: int


class LoadedModels(Struct, kw_only=True):
    models: list[LoadedModel]


class ShownModel(Struct, kw_only=True):
    parameters: Annotated[str, _described("Default sampling parameters of the model, one per line.")]
    template: Annotated[str, _described("The model's own chat template, in Jinja (not Go).")]
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    license: str = ""


class OllamaVersion(Struct, kw_only=True):
    version: Annotated[str, _described("The Ollama version whose API is implemented; clients compare it.")]
    quire: str


class PullProgress(Struct, kw_only=True):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    note: Annotated[str, _described("With success: how to serve the model.")] | UnsetType = UNSET
