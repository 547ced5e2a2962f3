"""Lists and describes models without loading them, in the protocols of OpenAI and Ollama.

`POST /api/pull`, admin only, downloads a model to this machine's disk. It is not served until the server is restarted
with it: the models of a server are fixed at its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, structs
from starlette.responses import Response

from quire.engine.model_manager import ModelState
from quire.errors import QuireError
from quire.server.errors import ApiError, Kind
from quire.server.models import Model
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
from quire.server.protocols.openai import ModelList
from quire.server.request_context import RequestContext
from quire.text.reasoning import find_reasoning
from quire.version import __version__
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.hub import NO_DEFAULTS, HubName, find_known, known_generation, pull, size_of
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
    facts = ModelFacts("gguf" if is_gguf else "safetensors", num_bytes, modified_s, digest)
    with suppress(QuireError), closing(open_checkpoint(path, load_format)) as checkpoint:
        facts = replace(facts, spec=checkpoint.spec)
        template = checkpoint.tokenizer_files().chat_template
        defaults = checkpoint.generation
        if defaults == NO_DEFAULTS:  # same fallback as `ModelText.open`
            defaults = known_generation(path)
        facts = replace(facts, template=template, defaults=defaults, num_parameters=_count_parameters(checkpoint))
    return facts


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
            created_at=rfc3339(model.created, "seconds"),
        )
        for name in model.names
    ]


API_VERSION = "0.12.11"  # the first Ollama with logprobs, the newest field that quire implements
PULL_POLL_S = 0.2  # between two lines of progress
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
    model = find_model(context.models, _given_name(body))
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


def _given_name(body: ShowRequest) -> str:
    if not (name := body.model or body.name):
        raise ApiError(Kind.INVALID, "model is missing", param="model")
    return name


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
    if find_reasoning(facts.template) is not None:
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
    given = _given_name(body)
    name = given.removesuffix(DEFAULT_TAG)
    is_served = bool({given, name} & {*context.models.names})
    if not is_served and find_known(name) is None and HubName.parse(name) is None:
        text = f"model = {name!r:.200} is neither a known model name nor an org/name of the hub"
        raise ApiError(Kind.NO_MODEL, text, param="model")
    progress = _served() if is_served else _download(name)
    if body.stream is not False:
        return context.streaming(_lines(progress), OLLAMA.stream_type)
    return context.json([one async for one in progress][-1])


async def _served() -> AsyncIterator[PullProgress]:
    yield PullProgress(status="success")


async def _download(name: str) -> AsyncIterator[PullProgress]:
    """Download in a daemon thread, which does not delay the end of the server, and yield its progress."""
    if not _is_pulling.acquire(blocking=False):
        text = "another model is being downloaded: only one download runs at a time"
        raise ApiError(Kind.OVERLOADED, text, retry_after_s=10.0, reason="pulling")
    done: Future[Path] = Future()
    latest = PullProgress(status="pulling manifest")
    known = find_known(name)
    digest = UNSET if known is None else f"sha256:{known.sha256}"

    def take(what: str, num_done: int, num_bytes: int) -> None:
        nonlocal latest
        latest = PullProgress(status=f"{what} {name}", digest=digest, total=num_bytes, completed=num_done)

    def run() -> None:
        try:
            # With a progress callback, the hub's library would draw bars on this process's terminal.
            done.set_result(pull(name, take if known is not None else None))
        except Exception as error:
            done.set_exception(error)
        finally:
            _is_pulling.release()

    thread = threading.Thread(target=run, name=f"pull {name}", daemon=True)
    thread.start()
    shown = None
    while thread.is_alive():
        if latest is not shown:
            shown = latest
            yield shown
        await asyncio.sleep(PULL_POLL_S)
    if (error := done.exception()) is not None:
        raise ApiError(Kind.FAILED, f"pull: {type(error).__name__}: {error}", reason="download_failed")
    yield PullProgress(status="success", note=f"restart the server with it to serve it: quire serve {name}")


async def _lines(progress: AsyncIterator[PullProgress]) -> AsyncIterator[bytes]:
    try:
        async for one in progress:
            yield _encode(one) + b"\n"
    except ApiError as error:
        yield OLLAMA.event(error, "")
