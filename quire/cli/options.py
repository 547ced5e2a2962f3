"""Options that several commands share, and the engine settings they become."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.server_client import DEFAULT_URL
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes

if TYPE_CHECKING:
    from quire.engine.composition import EngineConfig
    from quire.engine.params import GenerationParams

# The options, once. None: what the model's makers recommend.

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A name `quire models` lists, a folder of safetensors or a .gguf file."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="Instructions to the model, ahead of the talk.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 to 2; 0: always the most probable token.")]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
TopKOption = Annotated[int | None, typer.Option(help="Draw among this many tokens; 0: all.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw among the tokens that make up this probability.")]
MinPOption = Annotated[float | None, typer.Option(help="Leave out what is less probable than this share of the best.")]
RepetitionOption = Annotated[float | None, typer.Option(help="Above 1: avoid tokens already there, the prompt's too.")]
PresenceOption = Annotated[float, typer.Option(help="Above 0: avoid tokens the answer has used.")]
FrequencyOption = Annotated[float, typer.Option(help="Above 0: avoid them the more, the oftener they were used.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
StopOption = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer at this text; repeatable.")]
BackendOption = Annotated[
    str | None, typer.Option(help="What computes: auto, native, torch, or fake: nothing, for tests of clients.")
]
PrecisionOption = Annotated[str | None, typer.Option(help="Precision of the native backend: fast, balanced or exact.")]
DtypeOption = Annotated[str | None, typer.Option(help="auto; of the torch backend: float32, float16, bfloat16.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
LoadFormatOption = Annotated[str | None, typer.Option(help="auto, or dummy: random weights for a config.json.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; as many as there are cores.")]
ContextOption = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Most tokens of prompt and answer; as the model was made for."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, like 2G or 512M. By default 40 % of free memory and at most 4G on a CPU;"
        " on a GPU, all that steps leave.",  # `quire.backends.kv_memory` has the numbers; a test compares them
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help=f"Ask this server; else $QUIRE_SERVER, else {DEFAULT_URL} if it is up."
    ),
]
KeyOption = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="For the server; else $QUIRE_API_KEY.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Load the model here, whatever server is up.")]

_FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "n", "max_tokens", "logprobs"),
    *("backend", "precision", "dtype", "device", "load_format", "threads", "max_model_len", "kv_memory"),
}


@contextmanager
def options_named() -> Iterator[None]:
    """Let an error name the option as it is typed, not the field it became."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error).removeprefix("prompts[0]: ")
        name = re.split(r"[^a-z_]", message, maxsplit=1)[0]
        if name in _FIELDS:
            message = option_name(name) + message[len(name) :]
        raise type(error)(message) from None


def check_answer(params: GenerationParams) -> None:
    """Refuse an answer of no tokens, which scores prompts over HTTP: here there would be nothing to print."""
    if params.is_empty:
        raise InvalidRequest("max_tokens = 0 leaves no room for an answer")


def option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def engine_settings(
    *,
    backend: str | None,
    precision: str | None,
    dtype: str | None,
    device: str | None,
    load_format: str | None,
    threads: int | None,
    max_model_len: int | None,
    kv_memory: str | None,
) -> dict[str, Any]:
    """Those that were given, refused here if they can never work: before anything is fetched or loaded."""
    given: dict[str, Any] = {
        "backend": backend,
        "precision": precision,
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
    free = max(0 if engine.device == "cuda" else memory.cpu_free, 0 if engine.device == "cpu" else memory.gpu_free)
    if engine.kv_memory > free:
        wanted, there = compared_sizes(engine.kv_memory, free)
        raise InvalidRequest(f"kv_memory = {wanted} is more than the {there} of free memory")
