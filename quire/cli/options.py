"""Options that several commands share, and the engine settings made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.server_client import DEFAULT_URL
from quire.core.fairness import LOW_SHARE, NORMAL_SHARE
from quire.core.policy import PATIENCE_S
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes

if TYPE_CHECKING:
    from quire.engine.composition import EngineConfig
    from quire.engine.params import GenerationParams

# None selects the default of the model.

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A name from `quire models`, a folder of safetensors or a .gguf file."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="System prompt.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sampling temperature, 0 to 2; 0 always selects the most probable token.")
]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
TopKOption = Annotated[int | None, typer.Option(help="Sample from this many most probable tokens; 0: from all.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Sample from the most probable tokens that have this total probability.")
]
MinPOption = Annotated[
    float | None, typer.Option(help="Exclude tokens less probable than this share of the most probable one.")
]
RepetitionOption = Annotated[float | None, typer.Option(help="Above 1: avoid tokens of the prompt and the answer.")]
PresenceOption = Annotated[float, typer.Option(help="Above 0: avoid tokens that the answer contains.")]
FrequencyOption = Annotated[
    float, typer.Option(help="Above 0: avoid tokens in proportion to their number in the answer.")
]
SeedOption = Annotated[int | None, typer.Option(help="Seed of random sampling; the same seed gives the same answer.")]
StopOption = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer at this text; repeatable.")]
BackendOption = Annotated[
    str | None,
    typer.Option(help="Backend: auto, native, torch, mlx, or fake (generates meaningless text, to test clients)."),
]
PrecisionOption = Annotated[str | None, typer.Option(help="Precision of the native backend: fast, balanced or exact.")]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        "--quantization",
        help="With mlx and torch: quantise weights that the file stores in 16 or 32 bits to 4 or 8 bits."
        " With torch also by name: int4, fp8.",
    ),
]
KvCacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Number format of the KV cache: auto, or fp8 with the torch backend: twice the tokens in the same memory."
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option(help="Number format of the torch and mlx backends: auto, float32, float16 or bfloat16.")
]
DeviceOption = Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda or metal.")]
LoadFormatOption = Annotated[
    str | None, typer.Option(help="Weights: auto (from files), or dummy (random, with the shapes in config.json).")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Number of CPU threads; by default the number of cores.")]
ContextOption = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Maximum number of tokens of prompt and answer; by default the model's own."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        # `quire.backends.kv_memory` has the numbers; a test compares them
        help="Memory for the KV cache, like 2G or 512M. By default 40 % of free memory and at most 4G on a CPU;"
        " on a GPU, the memory that steps do not need.",
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help=f"Server to use; by default $QUIRE_SERVER, or {DEFAULT_URL} if a server runs there.",
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="API key for the server; by default $QUIRE_API_KEY.")
]
PatienceOption = Annotated[
    float | None,
    typer.Option(help=f"Policy aging: seconds of waiting that raise a request by one tier ({PATIENCE_S:g})."),
]
NormalShareOption = Annotated[
    float | None, typer.Option(help=f"Policy fair: share of tokens guaranteed to the tier normal ({NORMAL_SHARE:g}).")
]
LowShareOption = Annotated[
    float | None, typer.Option(help=f"Policy fair: share of tokens guaranteed to the tier low ({LOW_SHARE:g}).")
]
HostCacheOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory of each model for prefixes that are evicted from the GPU, such as 8G; off by default and with"
        " 0.",
    ),
]
DiskCacheOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Disk space for cached prefixes, which outlive the server, such as 20G; off by default and with 0.",
    ),
]
CacheDirOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Folder of the disk cache, by default ~/.cache/quire/kv.")
]
LocalOption = Annotated[bool, typer.Option("--local", help="Load the model in this process, even if a server runs.")]

_FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "n", "max_tokens", "logprobs"),
    *("backend", "precision", "quantize", "kv_cache_dtype", "dtype", "device", "load_format", "threads"),
    *("max_model_len", "kv_memory"),
}


@contextmanager
def options_named() -> Iterator[None]:
    """Replace field names in errors by option names."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error).removeprefix("prompts[0]: ")
        name = re.split(r"[^a-z_]", message, maxsplit=1)[0]
        if name in _FIELDS:
            message = option_name(name) + message[len(name) :]
        raise type(error)(message) from None


def check_answer(params: GenerationParams) -> None:
    """Refuse answers of 0 tokens. Over HTTP they score prompts; a command has nothing to print for them."""
    if params.is_empty:
        raise InvalidRequest("max_tokens = 0 leaves no room for an answer")


def option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def engine_settings(
    *,
    backend: str | None,
    precision: str | None,
    quantize: str | None,
    kv_cache_dtype: str | None,
    dtype: str | None,
    device: str | None,
    load_format: str | None,
    threads: int | None,
    max_model_len: int | None,
    kv_memory: str | None,
) -> dict[str, Any]:
    """The settings that were given. Refuses settings that cannot work, before a model is downloaded or loaded."""
    given: dict[str, Any] = {
        "backend": backend,
        "precision": precision,
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype,
        "device": device,
        "load_format": load_format,
        "threads": threads,
        "max_model_len": max_model_len,
        "kv_memory": kv_memory,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if settings:
        from quire.engine.composition import EngineConfig

        with options_named():
            check_memory(EngineConfig(**settings))
    return settings


def check_memory(engine: EngineConfig) -> None:
    """Refuse a KV cache larger than the free memory before the model is loaded."""
    if engine.kv_memory is None or engine.backend == "fake":
        return
    from quire.cli.machine_fit import read_memory

    memory = read_memory()
    if memory.has_metal and engine.device != "cpu" and engine.backend in ("auto", "mlx"):
        # macOS compresses or swaps out memory of other programs, so more than the free memory can be used
        if engine.kv_memory > memory.gpu_total:
            wanted, there = compared_sizes(engine.kv_memory, memory.gpu_total)
            raise InvalidRequest(f"kv_memory = {wanted} is more than the {there} that the GPU may use")
        return
    free = max(0 if engine.device == "cuda" else memory.cpu_free, 0 if engine.device == "cpu" else memory.gpu_free)
    if engine.kv_memory > free:
        wanted, there = compared_sizes(engine.kv_memory, free)
        raise InvalidRequest(f"kv_memory = {wanted} is more than the {there} of free memory")
