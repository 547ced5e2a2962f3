"""`quire serve`: a server for models with the OpenAI, Anthropic and Ollama protocols. `quire deploy`: its replicas.

An option is set by a flag, by `QUIRE_NAME` in the environment or by its name in a YAML file; the first of them wins.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.main import get_command

from quire.cli import options
from quire.cli.chat import locate
from quire.cli.http_stream import printable
from quire.cli.options import check_memory, option_name, options_named
from quire.cli.server_client import PATIENT, ServerClient, check_installed
from quire.cli.terminal import bytes_bar, echo, short_path
from quire.core.policy import POLICIES
from quire.errors import InvalidRequest, MissingExtra, QuireError
from quire.sizes import parse_size, reported_size
from quire.weights.hub import DEFAULT_MODEL, is_model, is_path

if TYPE_CHECKING:
    from quire.engine.composition import EngineConfig
    from quire.engine.worker.protocol import Ready
    from quire.scale.config import DeployConfig, ModelDeployment
    from quire.server.config import ModelConfig, ServeConfig
    from quire.server.launcher import Startup


SERVE_CONTEXT = {"auto_envvar_prefix": "QUIRE"}
OTHER_VARIABLES = {"QUIRE_CACHE", "QUIRE_SERVER"}
Texts = list[str] | None
# The question of --hello. Chosen for a large margin at every token of the default model's answer: kernels round
# differently, and this must not change the answer (benchmarks/first_answer.py).
QUESTION = "What is the capital city of Japan?"
MAX_TOKENS = 64
DUMMY_WARNING = "random weights (--load-format dummy): answers have no meaning"


def _many(what: str) -> Any:
    return Option(metavar="TEXT", help=f"{what}; repeatable.")


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the YAML file defaults, so that flags and the environment override them."""
    if path is None:
        return None
    known = {parameter.name: parameter for parameter in context.command.params}
    is_deployed = bool((context.obj or {}).get("is_deployed"))
    values = read_file(path, is_deployed=is_deployed)
    values.pop("models", None)  # `list_models` reads them
    for name in values:
        if name not in known or name == "config":
            command = "quire deploy" if is_deployed else "quire serve"
            raise InvalidRequest(f"--config {str(path)!r}: {name!r} is not an option of `{command}`")
    for name, value in values.items():
        if isinstance(value, bool) and not getattr(known[name], "is_flag", False):
            raise InvalidRequest(f"--config {str(path)!r}: {name} = {value} is yes or no, and the option needs a value")
        if isinstance(value, str) and (name == "model" or getattr(known[name], "multiple", False)):
            values[name] = [value]
    context.default_map = {**(context.default_map or {}), **values}
    return path


# Groups of options


def _access(
    host: Annotated[
        str, Option(help="Address to listen on. Beyond this machine, API keys are required.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0: any free port.")] = 8000,
    models_dir: Annotated[Path | None, Option(help="Serve every model in this folder.")] = None,
    memory: Annotated[
        str | None,
        Option(metavar="SIZE", help="Memory for weights and KV cache of all models; by default 80 % of free memory."),
    ] = None,
    idle_unload: Annotated[
        float | None, Option(help="Unload a model after this many seconds without requests; default: never.")
    ] = None,
    served_model_name: Annotated[Texts, _many("Name of the model in requests")] = None,
    api_key: Annotated[Texts, _many("API key of clients")] = None,
    admin_api_key: Annotated[
        Texts, _many("API key that may also load and unload models, cancel requests and clear the cache")
    ] = None,
    api_keys_file: Annotated[Path | None, Option(help="YAML file of API keys with names, tiers and limits.")] = None,
    insecure: Annotated[bool, Option("--insecure", help="Serve other machines without an API key.")] = False,
    share_prefix_cache: Annotated[
        bool, Option("--share-prefix-cache", help="Share cached prefixes among keys.")
    ] = False,
) -> options.Settings:
    return locals()


def _engine(
    max_model_len: Annotated[
        int | None, Option(help="Maximum tokens of prompt and answer; by default the model's own.")
    ] = None,
    default_max_tokens: Annotated[
        int, Option(help="Longest answer to a chat request that sets no limit; -1: the rest of the context.")
    ] = 4096,
    max_num_seqs: Annotated[
        int | None, Option(help="Maximum requests in one step; by default 64, on a GPU 256.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Maximum tokens in one step; the default depends on device and model.")
    ] = None,
    max_chunk_tokens: Annotated[
        int | None, Option(help="Maximum tokens of one prompt in one step; the default depends on the device.")
    ] = None,
    max_mixed_tokens: Annotated[
        int | None,
        Option(help="Maximum prompt tokens in a step beside every 64 answers; the default depends on the device."),
    ] = None,
    block_size: Annotated[int, Option(help="Tokens in a block of the KV cache.")] = 32,
    num_blocks: Annotated[
        int | None,
        Option(help="Number of blocks of the KV cache, instead of --kv-memory. Window blocks and states are added."),
    ] = None,
    kv_memory: options.MemoryOption = None,
    enable_prefix_caching: Annotated[bool, Option(help="Reuse the KV cache of equal prefixes.")] = True,
    enable_drafts: Annotated[
        bool,
        Option(
            help="Guess tokens from repeated text, and verify several in one step where that pays. Changes no answer."
        ),
    ] = True,
    host_cache: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Host memory of each model for prefixes that are evicted from the GPU, such as 8G; off by default and"
            " with 0.",
        ),
    ] = None,
    disk_cache: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Disk space for cached prefixes, which outlive the server, such as 20G; off by default and with 0.",
        ),
    ] = None,
    cache_dir: Annotated[
        str | None, Option(metavar="PATH", help="Folder of the disk cache, by default ~/.cache/quire/kv.")
    ] = None,
) -> options.Settings:
    return locals()


def _limits(
    scheduling_policy: Annotated[str, Option(help=f"Scheduling policy: {', '.join(POLICIES)}.")] = "fair",
    normal_share: options.NormalShareOption = None,
    low_share: options.LowShareOption = None,
    patience: options.PatienceOption = None,
    max_queue: Annotated[int, Option(help="Maximum number of waiting requests of each tier; more are refused.")] = 512,
    max_queued_tokens: Annotated[int, Option(help="Maximum prompt tokens of all waiting requests of a tier.")] = 1
    << 20,
    queue_timeout: Annotated[float, Option(help="Seconds a request may wait before it is refused.")] = 60.0,
    drain: Annotated[float, Option(help="Seconds that running requests may take to finish after SIGTERM.")] = 30.0,
    max_body_size: Annotated[str, Option(metavar="SIZE", help="Maximum size of a request body.")] = "16M",
    state_dir: Annotated[
        str | None,
        Option(
            metavar="PATH",
            help="Folder for uploaded files and batches, by default ~/.local/state/quire; none: disable them.",
        ),
    ] = None,
    max_file_size: Annotated[str, Option(metavar="SIZE", help="Maximum size of an uploaded file.")] = "200M",
    max_file_storage: Annotated[str, Option(metavar="SIZE", help="Maximum size of all files of one key.")] = "2G",
    body_timeout: Annotated[float, Option(help="Seconds for a request body to arrive, plus one for each MiB.")] = 10.0,
    header_timeout: Annotated[float, Option(help="Seconds for request headers to arrive.")] = 10.0,
    slow_client_timeout: Annotated[float, Option(help="Seconds until a stream that is not read is cancelled.")] = 30.0,
    keep_alive_interval: Annotated[float, Option(help="Seconds between comments in a stream without events.")] = 10.0,
    max_connections: Annotated[int, Option(help="Maximum number of open connections.")] = 4096,
    hang_limit: Annotated[float, Option(help="Seconds without a message until a busy worker is replaced.")] = 30.0,
) -> options.Settings:
    return locals()


def _web(
    allowed_origins: Annotated[Texts, _many("Origins of web pages that may send requests (CORS)")] = None,
    allowed_hosts: Annotated[Texts, _many("Host names that a server without API keys accepts")] = None,
    ssl_certfile: Annotated[Path | None, Option(help="File with the TLS certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, Option(help="File with the private key of the TLS certificate.")] = None,
    root_path: Annotated[str, Option(help="Path prefix that a reverse proxy removes.")] = "",
    metrics_compat: Annotated[str | None, Option(help="vllm: also export metrics under vLLM's names.")] = None,
    kv_events: Annotated[
        str | None,
        Option(
            metavar="TCP",
            help="Address for events of the prefix cache, for routers, like tcp://127.0.0.1:5557; off by default.",
        ),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        Option(
            metavar="TCP", help="Address where a router can request events that it missed, like tcp://127.0.0.1:5558."
        ),
    ] = None,
    kv_events_topic: Annotated[
        str | None, Option(help="Topic of the events, by default kv@HOST:PORT@{model} with the server's address.")
    ] = None,
    log_level: Annotated[str, Option(help="Log level: debug, info, warning or error.")] = "info",
    log_format: Annotated[str, Option(help="Log format: text or json.")] = "text",
) -> options.Settings:
    return locals()


# The command


@options.takes(access=_access, engine=_engine, compute=options.compute_by_default, limits=_limits, web=_web)
def serve(
    model: Annotated[Texts, typer.Argument(help="Names, folders or .gguf files; the first is the default.")] = None,
    model_option: Annotated[str | None, Option("--model", "-m", hidden=True)] = None,  # as in vLLM and `quire generate`
    config: Annotated[Path | None, Option(help="YAML file with options.", is_eager=True, callback=read_config)] = None,
    *,
    access: options.Settings,
    engine: options.Settings,
    compute: options.Settings,
    threads: options.ThreadsOption = None,
    limits: options.Settings,
    web: options.Settings,
    hello: Annotated[
        bool, Option("--hello", help="Send a first question after the start and print the answer.")
    ] = False,
) -> None:
    """Serve models to OpenAI, Anthropic and Ollama clients. Options can also be environment variables, QUIRE_NAME."""
    for number in (signal.SIGTERM, signal.SIGINT):  # until the server sets its own handlers; no request is running yet
        signal.signal(number, _leave)
    _warn_of_unknown_variables()
    if model_option is not None and model:
        raise InvalidRequest(f"--model {model_option!r} and {model[0]!r}: name one model, or several without --model")
    models = [model_option] if model_option is not None else model or models_from_environment()
    check_installed("the server")
    from quire.server.launcher import run, setup_logging

    with options_named():
        given = {"model": models, "config": config, "threads": threads}
        settings = make_config(given | access | engine | compute | limits | web)
    setup_logging(settings.log_level, as_json=settings.log_format == "json")

    def on_ready(startup: Startup) -> None:
        bar.close()
        announce(startup)
        if hello:
            keys = (*startup.config.api_key, *startup.config.admin_api_key)
            # In a thread: the caller runs the event loop that answers.
            threading.Thread(
                target=_ask_twice, args=(startup.config.url, startup.model, keys), name="quire-hello", daemon=True
            ).start()

    bar = ExitStack()
    progress = bar.enter_context(bytes_bar(f"loading {settings.models[0].names[0]}"))
    with bar, options_named():
        run(settings, on_ready=on_ready, on_loading=progress)


def _leave(number: int, frame: object) -> None:
    """Exit at once: an exception raised in a signal handler may be lost. A download leaves no partial model."""
    del number, frame
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # show the cursor, which a progress bar hides
    os._exit(0)


def _warn_of_unknown_variables() -> None:
    """Warn of variables that are no options: they may be mistyped."""
    known = {f"QUIRE_{name.upper()}" for name in inspect.signature(serve).parameters} | OTHER_VARIABLES
    for name in sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in known):
        echo(f"quire: {name} in the environment is not an option of `quire serve`, and is ignored", err=True)


# Configuration


def make_config(options: dict[str, Any]) -> ServeConfig:
    """The configuration of the server. Refuses options that cannot work, before a model is downloaded."""
    from quire.engine.composition import EngineConfig, check_cache_folders
    from quire.server.config import ServeConfig

    given = dict(options)
    if os.environ.get("QUIRE_CACHE_DIR") == "":
        raise InvalidRequest("QUIRE_CACHE_DIR in the environment is empty: set it to the path of a folder, or unset it")
    for name in ("memory", "max_body_size", "max_file_size", "max_file_storage"):
        if given[name] is not None:
            given[name] = parse_size(option_name(name), given[name])
    for name in ("api_key", "admin_api_key", "allowed_origins", "allowed_hosts"):
        given[name] = tuple(given[name] or ())
    given["state_dir"] = _state_dir(given["state_dir"])
    given["max_waiting"] = max(4096, 32 * given["max_queue"])
    engine = EngineConfig(**{field.name: given[field.name] for field in fields(EngineConfig)})
    server = {field.name: given[field.name] for field in fields(ServeConfig) if field.name != "models"}
    draft = ServeConfig(models=list_models(options, engine), **server)
    for model in draft.models:
        check_memory(model.engine)
    engines = [model.engine for model in draft.models]
    is_from_environment = given["cache_dir"] == os.environ.get("QUIRE_CACHE_DIR")
    if any(one.disk_cache for one in engines) or not is_from_environment:  # the variable may be set for all servers
        check_cache_folders(engines)
    located = (replace(model, path=locate(str(model.path))) for model in draft.models)
    return replace(draft, models=tuple(located))


def _state_dir(given: str | None) -> Path | None:
    """The state directory; by default in the user's directory for program state."""
    if given is not None:
        return None if given.lower() == "none" else Path(os.path.abspath(os.path.expanduser(given)))
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"
    except RuntimeError:  # a user without a home directory
        return None


# Announcement


def announce(startup: Startup) -> None:
    """Print the address, the chosen settings with their reasons, and variables for clients."""
    config, ready = startup.config, startup.ready
    capacity, facts = ready.capacity, ready.facts
    num_blocks = capacity.num_blocks - 1
    parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in startup.timings_s.items() if name != "all")
    threads = f", {facts.num_threads} thread{'' if facts.num_threads == 1 else 's'}" if facts.device == "cpu" else ""
    key = "YOUR_KEY" if config.has_keys else "none"
    tokens = f"{num_blocks * capacity.block_size:,} tokens in {num_blocks:,} blocks of {capacity.block_size}"
    lines = [
        f"quire serves {startup.model} at {config.url}",
        "",
        *_others(startup),
        f"  computes   {facts.backend}, {facts.device}, {facts.dtype}{threads}",
        *([f"             {DUMMY_WARNING}"] if config.models[0].engine.load_format == "dummy" else []),
        *([f"             {facts.notice}"] if facts.notice else []),
        f"  memory     weights {reported_size(ready.facts.weight_bytes)},"
        f" KV cache {reported_size(ready.facts.kv_bytes)}: {tokens} ({_why(startup)})",
        *_other_pools(ready),
        *_lower_levels(config, ready),
        f"  takes      {capacity.max_num_seqs} requests at once, up to {ready.max_model_len:,} tokens each;"
        f" {config.max_queue} more may wait",
        f"  open to    {_audience(config)}",
        *_events(startup),
        f"  started    in {startup.timings_s['all']:.1f} s: {parts}",
        "",
        f"  export OPENAI_BASE_URL={config.url}/v1",
        f"  export OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={config.url}",
        f"  export ANTHROPIC_API_KEY={key}",
        f"  export OLLAMA_HOST={config.url}",
        f"  export QUIRE_SERVER={config.url}",
        "",
        f"  page: {config.url}/    API: {config.url}/docs    metrics: {config.url}/metrics    Ctrl-C: finish and exit",
        "",
    ]
    echo("\n".join(lines))
    sys.stdout.flush()


def _other_pools(ready: Ready) -> list[str]:
    """A line about the window blocks and recurrent states within the KV cache; none if the model has neither."""
    capacity, facts = ready.capacity, ready.facts
    pools = (
        (capacity.num_window_blocks, "window blocks", facts.window_bytes),
        (capacity.num_states, "recurrent states", facts.state_bytes),
    )
    parts = [
        f"{count - 1:,} {name}{f' ({reported_size(num_bytes)})' if num_bytes else ''}"
        for count, name, num_bytes in pools
        if count
    ]
    return [f"             with {' and '.join(parts)}"] if parts else []


def _lower_levels(config: ServeConfig, ready: Ready) -> list[str]:
    """Lines about host memory and disk below the KV cache, with the number of tokens from which on they pay."""
    from quire.engine.composition import disk_cache_folder

    lines = []
    for level in ready.levels:
        found = f", {reported_size(level.num_bytes)} found" if level.num_pieces else ""
        pays = "not used: loads would take longer than computing"
        if level.break_even_tokens is not None:
            least = f" from {level.break_even_tokens:,} tokens on" if level.break_even_tokens > 1 else ""
            pays = f"faster than computing{least}"
        lines.append(f"             {level.level} cache up to {reported_size(level.max_bytes or 0)}{found}; {pays}")
        folder = disk_cache_folder(config.models[0].engine)
        if level.level == "disk" and folder is not None:
            lines.append(f"             in {short_path(folder.absolute())}")
    return lines


def _events(startup: Startup) -> list[str]:
    """Lines about the KV events of each model; none if they are off. Port 0: chosen when the model is loaded."""
    lines: list[str] = []
    for index, model in enumerate(startup.config.models):
        events = startup.ready.kv_events if index == 0 else startup.config.kv_events_of(index)
        if events is None:
            return []
        replay = "" if events.replay_endpoint is None else f", replay at {events.replay_endpoint}"
        name = f"{model.names[0]}: " if len(startup.config.models) > 1 else ""
        lines.append(f"  {'' if lines else 'KV events':9}  {name}{events.endpoint}{replay}, topic {events.topic}")
    if startup.ready.kv_events is not None and (reason := startup.ready.kv_events.silent_because) is not None:
        lines.append(f"             {startup.model} announces nothing: {reason}")
    return lines


def _others(startup: Startup) -> list[str]:
    """Lines about the other models and their common memory; none if there is one model."""
    lines: list[str] = []
    others = startup.config.models[1:]
    label = "others"
    for is_preloaded, when in ((True, "loaded now, one after the other"), (False, "loaded on first use")):
        if names := [model.names[0] for model in others if model.is_preloaded is is_preloaded]:
            lines.append(f"  {label:9}  {', '.join(names)}: {when}")
            label = ""
    if startup.memory_bytes is not None:
        why = "from free memory; --memory sets it" if startup.has_chosen_memory else "--memory"
        lines.append(f"  budget     {reported_size(startup.memory_bytes)} for the weights and KV of all models ({why})")
    return lines


def _why(startup: Startup) -> str:
    """The reason for the size of the KV cache."""
    from quire.backends.kv_memory import CPU_CAP, CPU_SHARE

    engine = startup.config.models[0].engine
    if engine.num_blocks is not None:
        return "--num-blocks"
    if engine.kv_memory is not None:
        return "--kv-memory"
    facts = startup.ready.facts
    on_cpu = facts.device == "cpu"
    if facts.backend == "fake":
        return "fixed; --num-blocks sets it"
    if startup.memory_bytes is not None:
        limit = f", at most {CPU_CAP >> 30} GiB" if on_cpu else ""
        return f"its share of the budget{limit}; --kv-memory sets it"
    if on_cpu and facts.backend.startswith("mlx"):
        return "from free memory; --kv-memory sets it"
    if on_cpu:
        return f"{CPU_SHARE:.0%} of free memory, at most {CPU_CAP >> 30} GiB; --kv-memory sets it"
    if "(Metal)" in facts.device:
        return "from the GPU memory that weights and steps leave; --kv-memory sets it"
    return "the memory that steps do not need; --kv-memory sets it"


def _audience(config: ServeConfig) -> str:
    name = _lan_address() if config.host in ("", "0.0.0.0", "::") else config.host
    name = f"[{name}]" if ":" in name else name
    address = f"http{'' if config.ssl_certfile is None else 's'}://{name}:{config.port}"
    where = "" if config.is_local else f"; on a phone or another machine: {address}"
    if config.has_keys:
        return f"clients with an API key{where}"
    if config.is_local:
        return "this machine only, without a key"
    return f"ALL CLIENTS that can reach it, without a key{where}"


def _lan_address() -> str:
    """The IPv4 address other machines of the network can use; the host name if there is none.

    Connecting a UDP socket sends no packet: it only asks the system which of its addresses it would send from.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        address: str = probe.getsockname()[0]
        if not address.startswith(("127.", "0.")):
            return address
    return socket.gethostname()


# --hello


def _ask_twice(url: str, model: str, keys: Sequence[str]) -> None:
    """Send one question twice to this server over HTTP, to show an answer and a cache hit."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": MAX_TOKENS, "cache": True}
    try:
        server = ServerClient(url, keys[0] if keys else None, PATIENT, is_own=True)
        for number in (1, 2):
            answer = server.fetch("/v1/chat/completions", body)
            text = printable(answer["choices"][0]["message"]["content"].strip())
            echo(f"  > {QUESTION}\n  {text}" if number == 1 else "  once more:")
            echo(f"  cache: {answer['cache']['message']}")
        echo("")
    except (QuireError, OSError, KeyError, ValueError) as error:
        echo(f"  the first question failed: {error}", err=True)


# Settings that a model in the YAML file may have: those of the engine, and its own with their types. Numbers and sizes
# of the engine are checked by `EngineConfig`.
ENGINE_TEXTS = ("dtype", "precision", "kv_cache_dtype", "backend", "load_format", "device")
ENGINE_NUMBERS = (
    *("max_model_len", "max_num_seqs", "num_blocks", "kv_memory", "host_cache", "disk_cache", "quantize", "threads"),
)
MODEL_FIELDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("model", "name", "priority", "tool_format", *ENGINE_TEXTS), (str | None, "text")),
    **dict.fromkeys(("default_max_tokens", *ENGINE_NUMBERS), (object, "a number or a size")),
    **dict.fromkeys(("pinned", "preload"), (bool, "yes or no")),
    "aliases": (str | list | None, "a list of names"),
    "idle_unload": (int | float | None, "a number of seconds"),
}
DEPLOY_FIELDS = ("replicas", "autoscale", "resources")  # of `quire deploy`
# Options whose values are paths; state_dir may also be `none`.
PATHS = ("models_dir", "api_keys_file", "ssl_certfile", "ssl_keyfile", "state_dir", "cache_dir")


def read_file(path: Path, *, is_deployed: bool = False) -> dict[str, Any]:
    """The options in the YAML file, with underscores in names. Paths relative to its folder are made absolute.

    `is_deployed`: the file is for `quire deploy`, whose own settings are left out.
    """
    values = _read_values(path)
    entries = values.get("models")
    for settings in (values, *(entries if isinstance(entries, list) else ())):
        for name in DEPLOY_FIELDS:
            if isinstance(settings, dict) and name in settings:
                if not is_deployed:
                    raise InvalidRequest(
                        f"--config {str(path)!r}: {name} is a setting of `quire deploy`, not of a server"
                    )
                del settings[name]
    return values


def read_deployments(path: Path, num_models: int) -> tuple[ModelDeployment, ...]:
    """The settings of `quire deploy` in a file, one for each model."""
    from quire.scale.config import parse_deployment

    values = _read_values(path)
    try:
        default = parse_deployment(values)
    except InvalidRequest as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error}") from None
    entries = values.get("models")
    if not isinstance(entries, list):
        return (default,) * num_models
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(parse_deployment(entry, default) if isinstance(entry, dict) else default)
        except InvalidRequest as error:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].{error}") from None
    return tuple(found)


def _read_values(path: Path) -> dict[str, Any]:
    import msgspec

    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any] | None) or {}
    except OSError as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error.strerror}") from None
    except ImportError:
        raise MissingExtra.of("--config", "yaml") from None
    except ValueError as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error}") from None
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    if "model" in values and "models" in values:
        raise InvalidRequest(f"--config {str(path)!r}: model and models exclude each other: list all under models")
    for name in PATHS:
        if isinstance(values.get(name), str) and values[name] != "none":
            values[name] = os.path.join(_folder(path), os.path.expanduser(values[name]))
    for name in ("model", "models"):
        if name in values:
            values[name] = _anchored(values[name], path)
    return values


def _anchored(value: Any, file: Path) -> Any:
    """A model or a list of models, with paths relative to the folder of the file made absolute."""
    if isinstance(value, list):
        return [_anchored(one, file) for one in value]
    if isinstance(value, dict):
        return value | {"model": _anchored(value["model"], file)} if "model" in value else value
    if not isinstance(value, str) or value.startswith("~"):
        return value
    there = os.path.normpath(os.path.join(_folder(file), value))
    return there if is_path(value) or ("/" in value and os.path.exists(there)) else value


def _folder(file: Path) -> str:
    return os.path.dirname(os.path.abspath(file))


def models_from_environment() -> list[str]:
    """Models in QUIRE_MODEL, separated by blanks; a single path may contain blanks."""
    text = os.environ.get("QUIRE_MODEL", "").strip()
    return [text] if text and Path(text).exists() else text.split()


def list_models(options: Mapping[str, Any], engine: EngineConfig) -> tuple[ModelConfig, ...]:
    """The models of the command line, of the file and of the folder, in this order; if there are none, the default one.

    Nothing is opened or downloaded.
    """
    from quire.server.config import ModelConfig

    def plain(name: str) -> ModelConfig:
        served = _served_name(name)
        return ModelConfig(
            _place(name),
            (served,),
            served,
            engine,
            idle_unload=options["idle_unload"],
            default_max_tokens=options["default_max_tokens"],
        )

    found = [plain(name) for name in options["model"] or ()]
    found += _of_file(options, engine)
    if options["models_dir"] is not None:
        found += [plain(str(path)) for path in _of_folder(options["models_dir"])]
    found = found or [plain(DEFAULT_MODEL)]
    names = options["served_model_name"]
    if names and len(found) > 1:
        text = f"--served-model-name {names[0]!r} is for one model, and there are {len(found)}"
        raise InvalidRequest(f"{text}: name them under `models` in the --config file")
    return (replace(found[0], names=tuple(names)), *found[1:]) if names else tuple(found)


def _place(name: str) -> Path:
    """Keep the `./` of a path: without it, `./org/name` would be a name of the hub."""
    return Path(os.path.abspath(os.path.expanduser(name)) if is_path(name) else name)


def _served_name(name: str) -> str:
    """The name for clients: the name of the model, or of its file or folder."""
    if Path(name).exists():
        found = Path(os.path.abspath(name))  # links are not resolved: the name of a link is chosen on purpose
        return found.stem if found.is_file() else found.name
    return name


def _of_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InvalidRequest(f"--models-dir {str(folder)!r} is not a folder")
    found = [path for path in sorted(folder.iterdir()) if is_model(path)]
    if not found:
        raise InvalidRequest(f"--models-dir {str(folder)!r} has no model: no .gguf file, no folder with config.json")
    return found


def _of_file(options: Mapping[str, Any], engine: EngineConfig) -> list[ModelConfig]:
    path = options["config"]
    is_deployed = bool(options.get("is_deployed"))
    entries = None if path is None else read_file(path, is_deployed=is_deployed).get("models")
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise InvalidRequest(f"--config {str(path)!r}: models = {entries!r:.80} is not a list")
    found: list[ModelConfig] = []
    for number, entry in enumerate(entries):
        try:
            found.append(_entry({"model": entry} if isinstance(entry, str) else entry, options, engine))
        except InvalidRequest as error:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].{error}") from None
    return found


def _entry(entry: object, options: Mapping[str, Any], engine: EngineConfig) -> ModelConfig:
    """A model in the list of the file. Errors begin with the field."""
    from quire.server.config import ModelConfig
    from quire.server.models import priority_of

    if not isinstance(entry, dict):
        raise InvalidRequest(f"model = {entry!r:.80} is neither a name nor settings of a model")
    given = {str(name).replace("-", "_"): value for name, value in entry.items()}
    for field, value in given.items():
        if field not in MODEL_FIELDS:
            raise InvalidRequest(f"{field}: there is no such field; there are {', '.join(sorted(MODEL_FIELDS))}")
        kind, what = MODEL_FIELDS[field]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidRequest(f"{field} = {value!r:.80} is not {what}")
    if not (name := given.get("model")):
        raise InvalidRequest("model is missing" if name is None else "model = '' is no name, folder or file")
    aliases = given.get("aliases") or []
    aliases = [aliases] if isinstance(aliases, str) else aliases
    if not all(isinstance(alias, str) for alias in aliases):
        raise InvalidRequest(f"aliases = {aliases!r:.80} is not a list of names")
    try:
        return ModelConfig(
            _place(name),
            (given.get("name") or _served_name(name), *aliases),
            _served_name(name),
            _own_engine(given, engine),
            is_pinned=given.get("pinned", False),
            is_preloaded=given.get("preload", False),
            idle_unload=given.get("idle_unload", options["idle_unload"]),
            priority=priority_of(given.get("priority")),
            tool_format=given.get("tool_format"),
            default_max_tokens=given.get("default_max_tokens", options["default_max_tokens"]),
        )
    except InvalidRequest as error:
        field, _, rest = str(error).partition(" = ")
        field = "name or aliases" if field == "served_model_name" else field  # as in the file
        raise InvalidRequest(f"{field} = {rest}" if rest else str(error)) from None


def _own_engine(given: Mapping[str, Any], engine: EngineConfig) -> EngineConfig:
    """The engine settings of a model: its own, else those of all models."""
    settings = {name: value for name, value in given.items() if name in ENGINE_TEXTS + ENGINE_NUMBERS}
    if "kv_memory" in settings and "num_blocks" not in settings:
        settings["num_blocks"] = None  # the setting for all models would override it
    return replace(engine, **settings)


# quire deploy

AFTER_FAILURE = (
    "The settings before this deploy are not in effect any more. Mend the cause and deploy again; `quire deploy status`"
    " shows what runs, `quire deploy stop` ends it."
)
DEPLOY_PATHS = ("config", "api_keys_file", "ssl_certfile", "ssl_keyfile")


def deploy(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.yaml|status|stop",
            help="YAML file with the options of `quire serve`, and replicas, autoscale and resources. Or: status, to"
            " show what is deployed; stop, to end it.",
        ),
    ],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster to use; by default the one of this machine, which is started if there is none.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print status as JSON.")] = False,
    end_ray: Annotated[
        bool, typer.Option("--ray", help="With stop: also end this Ray cluster on this machine.")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--wait", help="Wait for machines that join the cluster later and have the resources.")
    ] = False,
) -> None:
    """Run replicas of models behind one server, which sends each request to the one with the least expected work."""
    try:
        from quire.scale import application, ray_cluster
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of("`quire deploy`", error.name) from error
    _check_flags(target, as_json, end_ray, waits)
    if target == "status":
        ray_cluster.connect(address)
        _show_deployed(application.status(), as_json)
    elif target == "stop":
        if end_ray and address is None and not ray_cluster.is_here():
            echo("no Ray cluster runs on this machine")
            return
        ray_cluster.connect(address)
        echo("stopped" if application.stop() else "nothing is deployed")
        if end_ray:
            ray_cluster.stop_ray()
    else:
        config = read_deployment(Path(target))
        ray_cluster.connect(address, starts=True)
        try:
            url = application.deploy(
                config, on_change=lambda text: echo(f"  {text}", err=True), waits_for_machines=waits
            )
        except KeyboardInterrupt:
            echo("quire: interrupted; the deployment continues: see `quire deploy status`", err=True)
            raise
        except ray_cluster.DeployFailed as error:
            raise ray_cluster.DeployFailed(f"{error}\n{AFTER_FAILURE}") from None
        _announce_deployed(url, config)


def _check_flags(target: str, as_json: bool, end_ray: bool, waits: bool) -> None:
    """Refuse flags that have no effect."""
    for flag, is_given, is_right in (
        ("--json", as_json, target == "status"),
        ("--ray", end_ray, target == "stop"),
        ("--wait", waits, target not in ("status", "stop")),
    ):
        if is_given and not is_right:
            raise InvalidRequest(f"{flag} has no effect on `quire deploy {target}`")


def read_deployment(path: Path) -> DeployConfig:
    """The settings of a file. Options of `quire serve` may also come from the environment, as there."""
    from quire.scale.config import DeployConfig

    if path.is_file() and not path.read_bytes().strip():
        raise InvalidRequest(f"{str(path)!r} is empty: at least `model: NAME` is needed")
    app = typer.Typer(add_completion=False)
    app.command(context_settings=SERVE_CONTEXT)(serve)
    context = get_command(app).make_context("deploy", ["--config", str(path)], obj={"is_deployed": True})
    options: dict[str, Any] = {**context.params, "is_deployed": True}
    for name in DEPLOY_PATHS:  # typer makes them paths when it calls the command, which does not happen here
        options[name] = None if options[name] is None else Path(options[name])
    for name in ("kv_events", "kv_events_replay", "kv_events_topic", "memory", "idle_unload", "models_dir"):
        if options[name] is not None:
            raise InvalidRequest(f"--config {str(path)!r}: {name} is not supported with replicas")
    with options_named():
        server = make_config(options)
    for number, model in enumerate(server.models):
        if model.idle_unload is not None:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].idle_unload is not supported with replicas")
    return DeployConfig(server, read_deployments(path, len(server.models)))


def _announce_deployed(url: str, config: DeployConfig) -> None:
    server = config.server
    key = "YOUR_KEY" if server.has_keys else "none"
    models = [
        f"{model.names[0]}: {one.replicas if one.autoscale is None else f'{one.autoscale.min} to {one.autoscale.max}'}"
        for model, one in zip(server.models, config.deployments, strict=True)
    ]
    lines = [
        f"quire serves at {url}",
        f"  replicas   {', '.join(models)}",
        f"  export OPENAI_BASE_URL={url}/v1",
        f"  export OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={url}",
        f"  page: {url}/    metrics: {url}/metrics    `quire deploy status`, `quire deploy stop`",
    ]
    echo("\n".join(lines))


def _show_deployed(found: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    if found is None:
        echo("nothing is deployed")
        return
    echo(f"quire serves at {found['url']}" if found["url"] else "quire does not serve yet")
    for name, one in found["applications"].items():
        replicas = ", ".join(f"{count} {state.lower()}" for state, count in one["replicas"].items()) or "no replicas"
        echo(f"  {name}: {one['status'].lower()}, {replicas}{': ' + one['message'] if one['message'] else ''}")
