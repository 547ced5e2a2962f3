"""`quire serve`: a server for models with the OpenAI, Anthropic and Ollama protocols.

An option is set by a flag, by `QUIRE_NAME` in the environment or by its name in a YAML file; the first of them wins.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from quire.cli import options
from quire.cli.bench_server import check_installed
from quire.cli.chat_model import locate
from quire.cli.options import check_memory, option_name, options_named
from quire.cli.serve_models import list_models, models_from_environment, read_file
from quire.cli.server_client import PATIENT, ServerClient, printable
from quire.cli.terminal import bytes_bar, echo, short_path
from quire.core.policy import POLICIES
from quire.errors import InvalidRequest, QuireError
from quire.sizes import parse_size, reported_size

if TYPE_CHECKING:
    from quire.engine.worker.protocol import Ready
    from quire.server.config import ServeConfig
    from quire.server.launcher import Startup

CONTEXT = {"auto_envvar_prefix": "QUIRE"}
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
        if isinstance(value, str) and getattr(known[name], "multiple", False):
            values[name] = [value]
    if isinstance(values.get("model"), str):
        values["model"] = [values["model"]]
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
    from quire.server.launcher import run
    from quire.server.logs import setup_logging

    with options_named():
        own = {"model": models, "config": config, "threads": threads}
        settings = make_config({**own, **access, **engine, **compute, **limits, **web})
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
        f"  memory     weights {reported_size(ready.weight_bytes)},"
        f" KV cache {reported_size(ready.kv_bytes)}: {tokens} ({_why(startup)})",
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
    from quire.engine.levels.cache_folder import write_problem

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
            problem = write_problem(folder)
            warning = "" if problem is None else f"; NOTHING CAN BE SAVED there: {problem}"
            lines.append(f"             in {short_path(folder.absolute())}{warning}")
    return lines


def _events(startup: Startup) -> list[str]:
    """Lines about the KV events of each model; none if they are off. Port 0: chosen when the model is loaded."""
    lines: list[str] = []
    for index, model in enumerate(startup.config.models):
        settings = startup.config.kv_events_of(index)
        events = startup.ready.kv_events if index == 0 else settings
        if events is None or settings is None:
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
            answer = server.post("/v1/chat/completions", body)
            text = printable(answer["choices"][0]["message"]["content"].strip())
            echo(f"  > {QUESTION}\n  {text}" if number == 1 else "  once more:")
            echo(f"  cache: {answer['cache']['message']}")
        echo("")
    except (QuireError, OSError, KeyError, ValueError) as error:
        echo(f"  the first question failed: {error}", err=True)
