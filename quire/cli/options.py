"""Options that several commands share, alone or in groups, and the engine settings made from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from quire.cli.server_client import DEFAULT_URL
from quire.core.policy import LOW_SHARE, NORMAL_SHARE, PATIENCE_S
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes

if TYPE_CHECKING:
    from quire.engine.composition import EngineConfig
    from quire.engine.generation import GenerationParams

Settings = dict[str, Any]  # of a group: name -> value
# Fields that errors name, in commands that make a GenerationParams or load a model.
FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "max_tokens"),
    *("backend", "precision", "quantize", "kv_cache_dtype", "dtype", "device", "load_format", "threads"),
    *("max_model_len", "kv_memory"),
}
_OTHER_FIELDS = re.compile(r"(?<![\w/.'-])(?:kv_memory|host_cache|disk_cache)(?![\w/.'-])")  # not in a path

# None selects the default of the model.

ModelOption = Annotated[
    str | None,
    Option("--model", "-m", help="A name from `quire models`, a folder of safetensors or a .gguf file."),
]
SystemOption = Annotated[str | None, Option("--system", help="System prompt.")]
TemperatureOption = Annotated[
    float | None, Option(help="Sampling temperature, 0 to 2; 0 always selects the most probable token.")
]
MaxTokensOption = Annotated[int, Option(help="Longest answer, in tokens.")]
SeedOption = Annotated[int | None, Option(help="Seed of random sampling; the same seed gives the same answer.")]
ThreadsOption = Annotated[int | None, Option(help="Number of CPU threads; by default the number of cores.")]
MemoryOption = Annotated[
    str | None,
    Option(
        metavar="SIZE",
        # `quire.backends.kv_memory` has the numbers; a test compares them
        help="Memory for the KV cache, like 2G or 512M. By default 40 % of free memory and at most 4G on a CPU;"
        " on a GPU, the memory that steps do not need.",
    ),
]
ServerOption = Annotated[
    str | None,
    Option(
        "--server",
        metavar="URL",
        help=f"Server to use; by default $QUIRE_SERVER, or {DEFAULT_URL} if a server runs there.",
    ),
]
KeyOption = Annotated[
    str | None, Option("--api-key", metavar="KEY", help="API key for the server; by default $QUIRE_API_KEY.")
]
PatienceOption = Annotated[
    float | None,
    Option(help=f"Policy aging: seconds of waiting that raise a request by one tier ({PATIENCE_S:g})."),
]
NormalShareOption = Annotated[
    float | None, Option(help=f"Policy fair: share of tokens guaranteed to the tier normal ({NORMAL_SHARE:g}).")
]
LowShareOption = Annotated[
    float | None, Option(help=f"Policy fair: share of tokens guaranteed to the tier low ({LOW_SHARE:g}).")
]
LocalOption = Annotated[bool, Option("--local", help="Load the model in this process, even if a server runs.")]


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command groups of options.

    A group is a function. Its parameters become options of the command, in the place of the parameter that has the name
    of the group, and the command gets what the function returns.
    """

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        shared = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in own.parameters.items()
            for parameter in shared.get(name, {name: one}).values()
        ]

        @wraps(command)
        def run(*arguments: Any, **given: Any) -> Any:
            for name, group in groups.items():
                given[name] = group(**{option: given.pop(option) for option in shared[name] if option in given})
            return command(*arguments, **given)

        vars(run)["__signature__"] = own.replace(parameters=parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


def sampling(
    temperature: TemperatureOption = None,
    top_k: Annotated[int | None, Option(help="Sample from this many most probable tokens; 0: from all.")] = None,
    top_p: Annotated[
        float | None, Option(help="Sample from the most probable tokens that have this total probability.")
    ] = None,
    min_p: Annotated[
        float | None, Option(help="Exclude tokens less probable than this share of the most probable one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, Option(help="Above 1: avoid tokens of the prompt and the answer.")
    ] = None,
    presence_penalty: Annotated[float, Option(help="Above 0: avoid tokens that the answer contains.")] = 0.0,
    frequency_penalty: Annotated[
        float, Option(help="Above 0: avoid tokens in proportion to their number in the answer.")
    ] = 0.0,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, Option(metavar="TEXT", help="End the answer at this text; repeatable.")] = None,
) -> Settings:
    """Options of `GenerationParams`."""
    return {**locals(), "stop": stop or ()}


def compute(
    backend: Annotated[
        str | None,
        Option(help="Backend: auto, native, torch, mlx, or fake (generates meaningless text, to test clients)."),
    ] = None,
    precision: Annotated[str | None, Option(help="Precision of the native backend: fast, balanced or exact.")] = None,
    quantize: Annotated[
        str | None,
        Option(
            "--quantize",
            "--quantization",
            help="With mlx and torch: quantise weights that the file stores in 16 or 32 bits to 4 or 8 bits."
            " With torch also by name: int4, fp8.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        Option(
            help="Number format of the KV cache: auto, or fp8 with the torch backend: twice the tokens in the same"
            " memory."
        ),
    ] = None,
    dtype: Annotated[
        str | None, Option(help="Number format of the torch and mlx backends: auto, float32, float16 or bfloat16.")
    ] = None,
    device: Annotated[str | None, Option(help="Device: auto, cpu, cuda or metal.")] = None,
    load_format: Annotated[
        str | None, Option(help="Weights: auto (from files), or dummy (random, with the shapes in config.json).")
    ] = None,
) -> Settings:
    """Options of `EngineConfig` that say how and where a model computes."""
    return locals()


# With the defaults of `EngineConfig`.
compute_by_default = partial(
    compute,
    backend="auto",
    precision="balanced",
    kv_cache_dtype="auto",
    dtype="auto",
    device="auto",
    load_format="auto",
)


@takes(compute=compute)
def engine(
    *,
    compute: Settings,
    threads: ThreadsOption = None,
    max_model_len: Annotated[
        int | None,
        Option("--max-model-len", help="Maximum number of tokens of prompt and answer; by default the model's own."),
    ] = None,
    kv_memory: MemoryOption = None,
) -> Settings:
    """The settings of the engine that were given. Refuses those that cannot work, before a model is downloaded."""
    given = {**compute, "threads": threads, "max_model_len": max_model_len, "kv_memory": kv_memory}
    settings = {name: value for name, value in given.items() if value is not None}
    if settings:
        from quire.engine.composition import EngineConfig

        with options_named(FIELDS):
            check_memory(EngineConfig(**settings))
    return settings


@contextmanager
def options_named(known: Collection[str] = (), names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Replace the field at the start of an error by the name of its option.

    `known`: the fields; by default all that are followed by " = ". `names`: fields whose options have another name.
    """
    try:
        yield
    except InvalidRequest as error:
        message = str(error)
        name = re.split(r"[^a-z_]", message, maxsplit=1)[0]
        rest = message[len(name) :]
        if name in known or (not known and name and rest.startswith(" = ")):
            rest = _OTHER_FIELDS.sub(lambda found: option_name(found[0]), rest)
            message = option_name((names or {}).get(name, name)) + rest
        raise type(error)(message) from None


def option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_answer(params: GenerationParams) -> None:
    """Refuse answers of 0 tokens. Over HTTP they score prompts; a command has nothing to print for them."""
    if params.is_empty:
        raise InvalidRequest("max_tokens = 0 leaves no room for an answer")


def check_memory(engine: EngineConfig) -> None:
    """Refuse a KV cache larger than the free memory before the model is loaded."""
    if engine.kv_memory is None or engine.backend == "fake":
        return
    from quire.cli.doctor import read_memory

    memory = read_memory()
    limit = max(0 if engine.device == "cuda" else memory.cpu_free, 0 if engine.device == "cpu" else memory.gpu_free)
    where = "of free memory"
    if memory.has_metal and engine.device != "cpu" and engine.backend in ("auto", "mlx"):
        # macOS compresses or swaps out memory of other programs, so more than the free memory can be used
        limit, where = memory.gpu_total, "that the GPU may use"
    if engine.kv_memory > limit:
        wanted, there = compared_sizes(engine.kv_memory, limit)
        raise InvalidRequest(f"kv_memory = {wanted} is more than the {there} {where}")
