"""`quire serve`: a server for models with the OpenAI, Anthropic and Ollama protocols.

An option is set by a flag, by `QUIRE_NAME` in the environment or by its name in a YAML file; the first of them wins.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import model_loading, options
from quire.cli.first_answer import ask_first_question
from quire.cli.options import check_memory, option_name
from quire.cli.serve_models import list_models, locate_all, models_from_environment, read_file
from quire.cli.terminal import echo
from quire.core.policy import POLICIES
from quire.errors import InvalidRequest, MissingExtra
from quire.sizes import parse_size, reported_size

if TYPE_CHECKING:
    from quire.engine.worker.protocol import Ready
    from quire.server.config import ServeConfig
    from quire.server.launcher import Startup

CONTEXT = {"auto_envvar_prefix": "QUIRE"}
OTHER_VARIABLES = {"QUIRE_CACHE", "QUIRE_SERVER"}
_OTHER_FIELDS = re.compile(r"(?<![\w/.'-])(?:kv_memory|host_cache|disk_cache)(?![\w/.'-])")  # not in a path
Opt = typer.Option
Texts = list[str] | None


def _many(what: str) -> Any:
    return typer.Option(metavar="TEXT", help=f"{what}; repeatable.")


AdminKeys = Annotated[Texts, _many("API key that may also load and unload models, cancel requests and clear the cache")]
Memory = Annotated[
    str | None,
    Opt(metavar="SIZE", help="Memory for weights and KV cache of all models; by default 80 % of free memory."),
]
IdleUnload = Annotated[
    float | None, Opt(help="Unload a model after this many seconds without requests; default: never.")
]
MaxModelLen = Annotated[int | None, Opt(help="Maximum tokens of prompt and answer; by default the model's own.")]
MaxNumBatchedTokens = Annotated[
    int | None, Opt(help="Maximum tokens in one step; the default depends on device and model.")
]
MaxChunkTokens = Annotated[
    int | None, Opt(help="Maximum tokens of one prompt in one step; the default depends on the device.")
]
MaxMixedTokens = Annotated[
    int | None,
    Opt(help="Maximum prompt tokens in a step beside every 64 answers; the default depends on the device."),
]
NumBlocks = Annotated[
    int | None,
    Opt(help="Number of blocks of the KV cache, instead of --kv-memory. Window blocks and states are added."),
]
StateDir = Annotated[
    str | None,
    Opt(
        metavar="PATH",
        help="Folder for uploaded files and batches, by default ~/.local/state/quire; none: disable them.",
    ),
]
KvEvents = Annotated[
    str | None,
    Opt(
        metavar="TCP",
        help="Address for events of the prefix cache, for routers, like tcp://127.0.0.1:5557; off by default.",
    ),
]
KvEventsReplay = Annotated[
    str | None,
    Opt(metavar="TCP", help="Address where a router can request events that it missed, like tcp://127.0.0.1:5558."),
]
KvEventsTopic = Annotated[
    str | None, Opt(help="Topic of the events, by default kv@HOST:PORT@{model} with the server's address.")
]
EnableDrafts = Annotated[
    bool,
    Opt(help="Guess tokens from repeated text, and verify several in one step where that pays. Changes no answer."),
]
DefaultMaxTokens = Annotated[
    int, Opt(help="Longest answer to a chat request that sets no limit; -1: the rest of the context.")
]


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the YAML file defaults, so that flags and the environment override them."""
    if path is None:
        return None
    known = {parameter.name for parameter in context.command.params}
    values = read_file(path, is_deployed=bool((context.obj or {}).get("is_deployed")))
    values.pop("models", None)  # `list_models` reads them
    for name in values:
        if name not in known or name == "config":
            command = "quire deploy" if (context.obj or {}).get("is_deployed") else "quire serve"
            raise InvalidRequest(f"--config {str(path)!r}: {name!r} is not an option of `{command}`")
    flags = {parameter.name for parameter in context.command.params if getattr(parameter, "is_flag", False)}
    for name, value in values.items():
        if isinstance(value, bool) and name not in flags:
            raise InvalidRequest(f"--config {str(path)!r}: {name} = {value} is yes or no, and the option needs a value")
    repeatable = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    for name, value in values.items():
        if name in repeatable and isinstance(value, str):
            values[name] = [value]
    if isinstance(values.get("model"), str):
        values["model"] = [values["model"]]
    context.default_map = {**(context.default_map or {}), **values}
    return path


def serve(
    model: Annotated[Texts, typer.Argument(help="Names, folders or .gguf files; the first is the default.")] = None,
    model_option: Annotated[str | None, Opt("--model", "-m", hidden=True)] = None,  # as in vLLM and `quire generate`
    config: Annotated[Path | None, Opt(help="YAML file with options.", is_eager=True, callback=read_config)] = None,
    host: Annotated[str, Opt(help="Address to listen on. Beyond this machine, API keys are required.")] = "127.0.0.1",
    port: Annotated[int, Opt(help="Port to listen on; 0: any free port.")] = 8000,
    models_dir: Annotated[Path | None, Opt(help="Serve every model in this folder.")] = None,
    memory: Memory = None,
    idle_unload: IdleUnload = None,
    served_model_name: Annotated[Texts, _many("Name of the model in requests")] = None,
    api_key: Annotated[Texts, _many("API key of clients")] = None,
    admin_api_key: AdminKeys = None,
    api_keys_file: Annotated[Path | None, Opt(help="YAML file of API keys with names, tiers and limits.")] = None,
    insecure: Annotated[bool, Opt("--insecure", help="Serve other machines without an API key.")] = False,
    share_prefix_cache: Annotated[bool, Opt("--share-prefix-cache", help="Share cached prefixes among keys.")] = False,
    max_model_len: MaxModelLen = None,
    default_max_tokens: DefaultMaxTokens = 4096,
    max_num_seqs: Annotated[int | None, Opt(help="Maximum requests in one step; by default 64, on a GPU 256.")] = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_chunk_tokens: MaxChunkTokens = None,
    max_mixed_tokens: MaxMixedTokens = None,
    block_size: Annotated[int, Opt(help="Tokens in a block of the KV cache.")] = 32,
    num_blocks: NumBlocks = None,
    kv_memory: options.MemoryOption = None,
    enable_prefix_caching: Annotated[bool, Opt(help="Reuse the KV cache of equal prefixes.")] = True,
    enable_drafts: EnableDrafts = True,
    host_cache: options.HostCacheOption = None,
    disk_cache: options.DiskCacheOption = None,
    cache_dir: options.CacheDirOption = None,
    backend: options.BackendOption = "auto",
    precision: options.PrecisionOption = "balanced",
    quantize: options.QuantizeOption = None,
    kv_cache_dtype: options.KvCacheDtypeOption = "auto",
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    load_format: options.LoadFormatOption = "auto",
    threads: options.ThreadsOption = None,
    scheduling_policy: Annotated[str, Opt(help=f"Scheduling policy: {', '.join(POLICIES)}.")] = "fair",
    normal_share: options.NormalShareOption = None,
    low_share: options.LowShareOption = None,
    patience: options.PatienceOption = None,
    max_queue: Annotated[int, Opt(help="Maximum number of waiting requests of each tier; more are refused.")] = 512,
    max_queued_tokens: Annotated[int, Opt(help="Maximum prompt tokens of all waiting requests of a tier.")] = 1 << 20,
    queue_timeout: Annotated[float, Opt(help="Seconds a request may wait before it is refused.")] = 60.0,
    drain: Annotated[float, Opt(help="Seconds that running requests may take to finish after SIGTERM.")] = 30.0,
    max_body_size: Annotated[str, Opt(metavar="SIZE", help="Maximum size of a request body.")] = "16M",
    state_dir: StateDir = None,
    max_file_size: Annotated[str, Opt(metavar="SIZE", help="Maximum size of an uploaded file.")] = "200M",
    max_file_storage: Annotated[str, Opt(metavar="SIZE", help="Maximum size of all files of one key.")] = "2G",
    body_timeout: Annotated[float, Opt(help="Seconds for a request body to arrive, plus one for each MiB.")] = 10.0,
    header_timeout: Annotated[float, Opt(help="Seconds for request headers to arrive.")] = 10.0,
    slow_client_timeout: Annotated[float, Opt(help="Seconds until a stream that is not read is cancelled.")] = 30.0,
    keep_alive_interval: Annotated[float, Opt(help="Seconds between comments in a stream without events.")] = 10.0,
    max_connections: Annotated[int, Opt(help="Maximum number of open connections.")] = 4096,
    hang_limit: Annotated[float, Opt(help="Seconds without a message until a busy worker is replaced.")] = 30.0,
    allowed_origins: Annotated[Texts, _many("Origins of web pages that may send requests (CORS)")] = None,
    allowed_hosts: Annotated[Texts, _many("Host names that a server without API keys accepts")] = None,
    ssl_certfile: Annotated[Path | None, Opt(help="File with the TLS certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, Opt(help="File with the private key of the TLS certificate.")] = None,
    root_path: Annotated[str, Opt(help="Path prefix that a reverse proxy removes.")] = "",
    metrics_compat: Annotated[str | None, Opt(help="vllm: also export metrics under vLLM's names.")] = None,
    kv_events: KvEvents = None, kv_events_replay: KvEventsReplay = None, kv_events_topic: KvEventsTopic = None,
    log_level: Annotated[str, Opt(help="Log level: debug, info, warning or error.")] = "info",
    log_format: Annotated[str, Opt(help="Log format: text or json.")] = "text",
    hello: Annotated[bool, Opt("--hello", help="Send a first question after the start and print the answer.")] = False,
) -> None:  # fmt: skip
    """Serve models to OpenAI, Anthropic and Ollama clients. Options can also be environment variables, QUIRE_NAME."""
    _serve(dict(locals()))


def _leave(number: int, frame: object) -> None:
    """Exit at once: an exception raised in a signal handler may be lost. A download leaves no partial model."""
    del number, frame
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # show the cursor, which a progress bar hides
    os._exit(0)


@contextmanager
def options_named() -> Iterator[None]:
    """Replace field names in errors by option names."""
    try:
        yield
    except InvalidRequest as error:
        name, _, rest = str(error).partition(" = ")
        if rest and re.fullmatch(r"[a-z_]+", name):
            rest = _OTHER_FIELDS.sub(lambda found: option_name(found[0]), rest)
            raise InvalidRequest(f"{option_name(name)} = {rest}") from None
        raise


def _warn_of_unknown_variables() -> None:
    """Warn of variables that are no options: they may be mistyped."""
    known = {f"QUIRE_{name.upper()}" for name in inspect.signature(serve).parameters} | OTHER_VARIABLES
    for name in sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in known):
        echo(f"quire: {name} in the environment is not an option of `quire serve`, and is ignored", err=True)


def _serve(options: dict[str, Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # until the server sets its own handlers; no request is running yet
        signal.signal(number, _leave)
    _warn_of_unknown_variables()
    named = options.pop("model_option")
    if named is not None and options["model"]:
        raise InvalidRequest(
            f"--model {named!r} and {options['model'][0]!r}: name one model, or several without --model"
        )
    options["model"] = [named] if named is not None else options["model"] or models_from_environment()
    try:
        from quire.server.launcher import run
        from quire.server.observability.logs import setup_logging
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of("the server", error.name) from error
    with options_named():
        config = make_config(options)
    setup_logging(config.log_level, as_json=config.log_format == "json")

    def on_ready(startup: Startup) -> None:
        bar.close()
        announce(startup)
        if options["hello"]:
            ask_first_question(startup.config.url, startup.model, (*config.api_key, *config.admin_api_key))

    bar = ExitStack()
    progress = bar.enter_context(model_loading.loading_bar(config.models[0].names[0]))
    with bar, options_named():
        run(config, on_ready=on_ready, on_loading=progress)


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
    return replace(draft, models=locate_all(draft.models))


def _state_dir(given: str | None) -> Path | None:
    """The state directory; by default in the user's directory for program state."""
    if given is not None:
        return None if given.lower() == "none" else Path(os.path.abspath(os.path.expanduser(given)))
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"
    except RuntimeError:  # a user without a home directory
        return None


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
        *_dummy_warning(startup),
        *([f"             {facts.notice}"] if facts.notice else []),
        f"  memory     weights {reported_size(ready.weight_bytes)},"
        f" KV cache {reported_size(ready.kv_bytes)}: {tokens} ({_why(startup)})",
        *_other_pools(ready),
        *_lower_tiers(config, ready),
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


def _dummy_warning(startup: Startup) -> list[str]:
    if startup.config.models[0].engine.load_format != "dummy":
        return []
    return ["             random weights (--load-format dummy): answers have no meaning"]


def _other_pools(ready: Ready) -> list[str]:
    """A line about the window blocks and recurrent states within the KV cache; none if the model has neither."""
    capacity, facts = ready.capacity, ready.facts
    parts = []
    if capacity.num_window_blocks:
        part = f"{capacity.num_window_blocks - 1:,} window blocks"
        parts.append(part + (f" ({reported_size(facts.window_bytes)})" if facts.window_bytes else ""))
    if capacity.num_states:
        part = f"{capacity.num_states - 1:,} recurrent states"
        parts.append(part + (f" ({reported_size(facts.state_bytes)})" if facts.state_bytes else ""))
    return [f"             with {' and '.join(parts)}"] if parts else []


def _lower_tiers(config: ServeConfig, ready: Ready) -> list[str]:
    """Lines about host memory and disk below the KV cache, with the number of tokens from which on they pay."""
    lines = []
    for level in ready.levels:
        names = {"host": "host cache", "disk": "disk cache"}
        limit = level.max_bytes or 0
        found = f", {reported_size(level.num_bytes)} found" if level.num_pieces else ""
        pays = "not used: loads would take longer than computing"
        if level.break_even_tokens is not None:
            pays = "faster than computing"
            if level.break_even_tokens > 1:
                pays += f" from {level.break_even_tokens:,} tokens on"
        lines.append(f"             {names[level.level]} up to {reported_size(limit)}{found}; {pays}")
        if level.level == "disk":
            lines += _disk_folder(config)
    return lines


def _disk_folder(config: ServeConfig) -> list[str]:
    """A line about the folder of the disk cache."""
    from quire.cli.models import short_path
    from quire.engine.composition import disk_cache_folder
    from quire.engine.levels.cache_folder import write_problem

    folder = disk_cache_folder(config.models[0].engine)
    if folder is None:
        return []
    problem = write_problem(folder)
    warning = "" if problem is None else f"; NOTHING CAN BE SAVED there: {problem}"
    return [f"             in {short_path(folder.absolute())}{warning}"]


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
    where = "" if config.is_local else f"; on a phone or another machine: {_elsewhere(config)}"
    if config.has_keys:
        return f"clients with an API key{where}"
    return (
        "this machine only, without a key"
        if config.is_local
        else f"ALL CLIENTS that can reach it, without a key{where}"
    )


def _elsewhere(config: ServeConfig) -> str:
    name = _lan_address() if config.host in ("", "0.0.0.0", "::") else config.host
    name = f"[{name}]" if ":" in name else name
    return f"http{'' if config.ssl_certfile is None else 's'}://{name}:{config.port}"


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
