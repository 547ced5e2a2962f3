"""Lists and describes models without loading them, in the protocols of OpenAI, Ollama and llama.cpp.

`POST /api/pull`, admin only, downloads a model to this machine's disk and reports the progress. It is not served until
the server is restarted with it: the models of a server are fixed at its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs
from starlette.responses import Response

from quire.engine.model_manager import ModelState
from quire.errors import QuireError
from quire.server.errors import ApiError, Kind
from quire.server.models import ActiveRequest, Model
from quire.server.protocols import openai
from quire.server.protocols.anthropic import ANTHROPIC_MODELS
from quire.server.protocols.ollama import (
    DEFAULT_TAG,
    OLLAMA,
    ListedModel,
    ListedModels,
    LoadedModel,
    LoadedModels,
    ModelDetails,
    OllamaVersion,
    PullProgress,
    PullRequest,
    ShownModel,
    ShowRequest,
    find_model,
    rfc3339,
)
from quire.server.protocols.openai import ChatCompletionRequest, ModelList, parse_chat
from quire.server.request_context import RequestContext
from quire.server.watch import is_shown
from quire.text.messages import ChatRequest
from quire.text.reasoning import find_reasoning
from quire.version import __version__
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.hub import NO_DEFAULTS, HubName, find_known, is_path, known_generation, pull, size_of
from quire.weights.opening import open_checkpoint
from quire.weights.spec import GenerationDefaults, ModelSpec
from quire.weights.tensors import num_weights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Metadata of a model's files. `spec` is None if they cannot be read; loading the model reports the cause."""

    format: str
    num_bytes: int
    modified_s: float
    digest: str  # of the files' name, size and modification time; hashing the content would be slow
    spec: ModelSpec | None = None
    template: str | None = None
    defaults: GenerationDefaults = NO_DEFAULTS
    num_parameters: int = 0  # 0: not known

    @property
    def can_think(self) -> bool:
        return find_reasoning(self.template) is not None


async def facts_of(model: Model) -> ModelFacts:
    """Return the metadata, cached until the files change."""
    path, load_format = model.config.path, model.config.engine.load_format
    return await asyncio.to_thread(lambda: _read(path, load_format, *_size_and_mtime(path)))


def _size_and_mtime(path: Path) -> tuple[int, float]:
    try:
        return size_of(path), path.stat().st_mtime
    except OSError:
        return 0, 0.0


@lru_cache(maxsize=256)
def _read(path: Path, load_format: str, num_bytes: int, modified_s: float) -> ModelFacts:
    is_gguf = path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").exists())
    digest = hashlib.sha256(f"{path.name} {num_bytes} {modified_s}".encode()).hexdigest()
    form = "gguf" if is_gguf else "safetensors"
    try:
        checkpoint = open_checkpoint(path, load_format)
    except QuireError:
        return ModelFacts(form, num_bytes, modified_s, digest)
    try:
        template = checkpoint.tokenizer_files().chat_template
        defaults = checkpoint.generation
        if defaults == NO_DEFAULTS:  # same fallback as `ModelText.open`
            defaults = known_generation(path)
        num_parameters = _count_parameters(checkpoint)
        return ModelFacts(form, num_bytes, modified_s, digest, checkpoint.spec, template, defaults, num_parameters)
    except QuireError:
        return ModelFacts(form, num_bytes, modified_s, digest, checkpoint.spec)
    finally:
        checkpoint.close()


def _count_parameters(checkpoint: Checkpoint) -> int:
    """Return the number of weights; 0 for weights that MLX has packed, because their shapes do not show it."""
    spec = checkpoint.spec
    if not spec.unsupported:
        return num_weights(spec)
    if spec.quantization not in DTYPES:
        return 0
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


async def list_models(context: RequestContext) -> Response:
    entries = [entry for model in context.models for entry in await model_entries(model)]
    return context.json(ModelList(data=entries, first_id=entries[0].id, last_id=entries[-1].id))


async def get_model(context: RequestContext) -> Response:
    """Describe one model. Its name is the rest of the path, because names may contain slashes."""
    name = context.request.path_params["model"]
    if not name:
        raise ApiError(Kind.NOT_FOUND, "there is nothing at '/v1/models/'; did you mean GET /v1/models?")
    models = context.models
    if name not in models.names and name.startswith(ANTHROPIC_MODELS):
        if context.dialect.name == "anthropic":  # /v1/messages uses the default model for these names
            entry = (await model_entries(models.default))[0]
            return context.json(structs.replace(entry, id=name, display_name=name, alias_of=models.default.name))
        text = f"model = {name!r:.200} is not served here; /v1/messages uses {models.default.name} for it"
        raise ApiError(Kind.NO_MODEL, text, param="model")
    entries = await model_entries(models.find(name))
    return context.json(next(entry for entry in entries if entry.id == name))


async def model_entries(model: Model) -> list[openai.Model]:
    if model.max_model_len is None:
        with suppress(QuireError):  # loading the model reports the cause
            await model.measure()
    return [
        openai.Model(
            id=name,
            created=model.created,
            root=model.root,
            alias_of=None if name == model.name else model.name,
            max_model_len=model.max_model_len or 0,
            state=model.state.value,
            num_bytes=model.size_bytes,
            is_pinned=model.is_pinned,
            display_name=name,
            created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        )
        for name in model.names
    ]


API_VERSION = "0.12.11"  # the first Ollama with logprobs, the newest field that quire implements
NEVER = "9999-12-31T23:59:59Z"
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


async def tags(context: RequestContext) -> Response:
    """List the models, with one entry per name."""
    entries: list[ListedModel] = []
    for model in context.models:
        facts = await facts_of(model)
        entries += [
            ListedModel(
                name=name,
                model=name,
                modified_at=rfc3339(facts.modified_s),
                size=facts.num_bytes,
                digest=facts.digest,
                details=_details(facts),
                capabilities=_capabilities(facts),
            )
            for name in model.names
        ]
    return context.json(ListedModels(models=entries))


async def show(context: RequestContext) -> Response:
    body = await context.body(ShowRequest)
    model = find_model(context.models, given_name(body.model, body.name))
    facts = await facts_of(model)
    return context.json(
        ShownModel(
            parameters=_parameters(facts),
            template=facts.template or "",
            details=_details(facts),
            model_info=_info(model, facts),
            capabilities=_capabilities(facts),
            modified_at=rfc3339(facts.modified_s),
        )
    )


async def ps(context: RequestContext) -> Response:
    """List the loaded models."""
    entries: list[LoadedModel] = []
    for model in context.models:
        if model.state not in (ModelState.READY, ModelState.UNLOADING):
            continue
        facts = await facts_of(model)
        ready = model.facts
        is_on_gpu = ready is not None and not ready.facts.device.startswith("cpu")
        entries.append(
            LoadedModel(
                name=model.name,
                model=model.name,
                size=model.size_bytes,
                size_vram=model.size_bytes if is_on_gpu else 0,
                digest=facts.digest,
                details=_details(facts),
                expires_at=_expires_at(model),
                context_length=model.max_model_len or 0,
            )
        )
    return context.json(LoadedModels(models=entries))


async def version(context: RequestContext) -> Response:
    return context.json(OllamaVersion(version=API_VERSION, quire=__version__))


def given_name(model: str | None, name: str | None) -> str:
    """Return `model`, or its older form `name`."""
    if not (given := model or name):
        raise ApiError(Kind.INVALID, "model is missing", param="model")
    return given


def _expires_at(model: Model) -> str:
    if model.idle_unload_s is None or model.is_pinned:
        return NEVER
    left_s = model.idle_unload_s  # a busy model: its idle time has not started
    if model.idle_timer is not None:
        left_s = model.idle_timer.when() - asyncio.get_running_loop().time()
    return rfc3339(time.time() + max(0.0, left_s))


def _details(facts: ModelFacts) -> ModelDetails:
    if (spec := facts.spec) is None:
        return ModelDetails(format="", family="", families=[], parameter_size="", quantization_level="")
    return ModelDetails(
        format=facts.format,
        family=spec.architecture,
        families=[spec.architecture],
        parameter_size=_human(facts.num_parameters) if facts.num_parameters else "",
        quantization_level=spec.quantization,
    )


def _human(count: int) -> str:
    """Format a count as Ollama does: 134.52M, 8.0B."""
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 10**6 else f"{count / 1e3:.2f}K"


def _capabilities(facts: ModelFacts) -> list[str]:
    """Tools work with every template: a template without tool support gets them as text in the prompt."""
    found = ["completion"]
    if facts.template is not None:
        found.append("tools")
    if facts.can_think:
        found.append("thinking")
    return found


def _parameters(facts: ModelFacts) -> str:
    found = {ollama_name: getattr(facts.defaults, name) for name, ollama_name in _PARAMETERS.items()}
    return "\n".join(f"{name:<30} {value}" for name, value in found.items() if value is not None)


def _info(model: Model, facts: ModelFacts) -> dict[str, Any]:
    if (spec := facts.spec) is None:
        return {}
    arch = spec.architecture
    info = {
        "general.architecture": arch,
        "general.basename": model.root,
        "general.parameter_count": facts.num_parameters or None,
        # The context that this server gives the model, which may be shorter: clients size their prompts by it.
        f"{arch}.context_length": model.max_model_len or spec.max_model_len,
        f"{arch}.embedding_length": spec.hidden_size,
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.feed_forward_length": spec.mlp.size or None,
        f"{arch}.attention.head_count": spec.attention.num_heads,
        f"{arch}.attention.head_count_kv": spec.attention.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": spec.norm_eps or None,
        f"{arch}.rope.dimension_count": spec.attention.rope.rotary_size if spec.attention.rope else None,
        f"{arch}.rope.freq_base": spec.attention.rope.theta if spec.attention.rope else None,
        f"{arch}.vocab_size": spec.vocab_size,
        "tokenizer.ggml.bos_token_id": spec.bos_token_id,
        "tokenizer.ggml.eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
    }
    tokens = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")  # null: the model has none
    return {name: value for name, value in info.items() if value is not None or name in tokens}


_encode = msgspec.json.Encoder().encode
_is_pulling = threading.Lock()  # one at a time: parallel downloads would share bandwidth and disk


async def pull_model(context: RequestContext) -> Response:
    """Download a model. If the client disconnects, the download continues, and a later pull finds the files."""
    body = await context.body(PullRequest)
    given = given_name(body.model, body.name)
    name = given.removesuffix(DEFAULT_TAG)
    progress = _served() if {given, name} & {*context.models.names} else _begin_pull(given, name)
    if body.stream is not False:
        return context.streaming(_lines(progress), OLLAMA.stream_type)
    return context.json([one async for one in progress][-1])


async def _served() -> AsyncIterator[PullProgress]:
    yield PullProgress(status="success")


def _begin_pull(given: str, name: str) -> AsyncIterator[PullProgress]:
    if find_known(name) is None and (is_path(name) or HubName.parse(name) is None):
        text = f"model = {given!r:.200} is neither a known model name nor an org/name of the hub"
        raise ApiError(Kind.NO_MODEL, text, param="model")
    if not _is_pulling.acquire(blocking=False):
        text = "another model is being downloaded: only one download runs at a time"
        raise ApiError(Kind.OVERLOADED, text, retry_after_s=10.0, reason="pulling")
    return start_pull(name)


async def _lines(progress: AsyncIterator[PullProgress]) -> AsyncIterator[bytes]:
    try:
        async for one in progress:
            yield _encode(one) + b"\n"
    except ApiError as error:
        yield OLLAMA.event(error, "")


def start_pull(name: str) -> AsyncIterator[PullProgress]:
    """Download in a daemon thread, which releases the lock that the caller holds. Returns the progress."""
    known, loop = find_known(name), asyncio.get_running_loop()
    updates: asyncio.Queue[PullProgress | QuireError | None] = asyncio.Queue()
    digest: str | UnsetType = UNSET if known is None else f"sha256:{known.sha256}"
    last = ("", -1)

    def put(update: PullProgress | QuireError | None) -> None:
        with suppress(RuntimeError):  # the server has stopped meanwhile
            loop.call_soon_threadsafe(updates.put_nowait, update)

    def take(what: str, num_done: int, num_bytes: int) -> None:
        """Called for every megabyte; puts one update per percent."""
        nonlocal last
        if (step := (what, 100 * num_done // max(num_bytes, 1))) != last:
            last = step
            put(PullProgress(status=f"{what} {name}", digest=digest, total=num_bytes, completed=num_done))

    def run() -> None:
        try:
            # With a progress callback, the hub's library would draw bars on this process's terminal.
            pull(name, take if known is not None else None)
            put(None)
        except QuireError as error:
            put(error)
        except Exception as error:
            put(QuireError(f"{type(error).__name__}: {error}"))
        finally:
            _is_pulling.release()

    async def progress() -> AsyncIterator[PullProgress]:
        yield PullProgress(status="pulling manifest")
        while (update := await updates.get()) is not None:
            if isinstance(update, QuireError):
                raise ApiError(Kind.FAILED, f"pull: {update}", reason="download_failed")
            yield update
        note = f"the model is on this machine's disk; restart the server with it to serve it: quire serve {name}"
        yield PullProgress(status="success", note=note)

    threading.Thread(target=run, name=f"pull {name}", daemon=True).start()
    return progress()


class SlotParams(msgspec.Struct, kw_only=True):
    """Default sampling parameters."""

    n_predict: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0


class SlotDefaults(msgspec.Struct, kw_only=True):
    n_ctx: Annotated[int, Meta(description="Limit of prompt and answer together, in tokens.")]
    params: SlotParams


class Modalities(msgspec.Struct, kw_only=True):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True):
    default_generation_settings: SlotDefaults
    total_slots: Annotated[int, Meta(description="Sequences that can run at once; 0: the model is not loaded.")]
    model_path: Annotated[str, Meta(description="The model's name; its path is not shown.")]
    chat_template: str
    build_info: str
    modalities: Modalities
    is_sleeping: Annotated[bool, Meta(description="The model is not loaded; a request loads it.")]


class NextToken(msgspec.Struct, kw_only=True):
    n_decoded: int
    has_next_token: bool = True


class Slot(msgspec.Struct, kw_only=True):
    """A running request. Requests of other keys have no token counts."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
    n_prompt_tokens: int | UnsetType = UNSET
    next_token: NextToken | UnsetType = UNSET


class RenderedPrompt(msgspec.Struct):
    prompt: str


async def props(context: RequestContext) -> Response:
    """Describe the default model, or the one that ?model= names. Loads nothing."""
    model = context.models.find(context.request.query_params.get("model"))
    facts = await facts_of(model)
    given = {name: getattr(facts.defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given["repeat_penalty"] = facts.defaults.repetition_penalty
    given["n_predict"] = model.config.default_max_tokens
    params = SlotParams(**{name: value for name, value in given.items() if value is not None})
    n_ctx = model.max_model_len or (0 if facts.spec is None else facts.spec.max_model_len)
    return context.json(
        Props(
            default_generation_settings=SlotDefaults(n_ctx=n_ctx, params=params),
            total_slots=_num_slots(model),
            model_path=model.name,
            chat_template=facts.template or "",
            build_info=f"quire-{__version__}",
            modalities=Modalities(),
            is_sleeping=model.service is None,
        )
    )


async def slots(context: RequestContext) -> Response:
    """List the running requests in order of arrival as the first slots. quire has no fixed slots."""
    model = context.models.find(context.request.query_params.get("model"))
    ordered = (
        []
        if model.service is None
        else sorted(model.service.active_requests, key=lambda active: active.caller.arrived_s)
    )
    running = [active for active in ordered if active.is_started]
    count = max(_num_slots(model), len(running))
    n_ctx = model.max_model_len or 0
    return context.json([_slot(i, n_ctx, running[i] if i < len(running) else None, context) for i in range(count)])


async def apply_template(context: RequestContext) -> Response:
    """Return the prompt text that /v1/chat/completions would make from the same body."""
    body = await context.body(ChatCompletionRequest)
    (chat,) = (await context.parse(parse_chat, body)).prompts
    assert isinstance(chat, ChatRequest)
    service = await context.use(body.model)
    text = await service.render(chat, context.key.name)
    return context.json(RenderedPrompt(text))


def _num_slots(model: Model) -> int:
    return 0 if model.facts is None else model.facts.capacity.max_num_seqs


def _slot(slot_id: int, n_ctx: int, active: ActiveRequest | None, context: RequestContext) -> Slot:
    if active is None or not is_shown(active, context.key):
        return Slot(id=slot_id, n_ctx=n_ctx, is_processing=active is not None)
    usage = active.usage
    return Slot(
        id=slot_id,
        n_ctx=n_ctx,
        is_processing=True,
        n_prompt_tokens=usage.prompt_tokens,
        next_token=NextToken(n_decoded=usage.completion_tokens),
    )
