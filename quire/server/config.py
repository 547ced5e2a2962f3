"""Settings of `quire serve`, checked before any port is bound and any model is downloaded or loaded."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.values import MAX_TOKEN_ID, Priority
from quire.engine.composition import EngineConfig
from quire.engine.worker.client import HANG_LIMIT_S
from quire.engine.worker.kv_events import (
    PORTS_PER_MODEL,
    Endpoint,
    KvEventsConfig,
    check_installed,
    check_topic,
    parse_endpoint,
)
from quire.errors import InvalidRequest
from quire.server.limits import is_loopback
from quire.text.tool_formats import named_tool_format

COMPAT = ("vllm",)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
DEFAULT_MAX_TOKENS = 4096


def _check_seconds(name: str, value: float, low_s: float = 0.01) -> None:
    if not math.isfinite(value) or not low_s <= value <= 86_400:
        raise InvalidRequest(f"{name} = {value!r} is not a number of seconds above 0 and at most 86400 (one day)")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of a server."""

    path: Path
    names: tuple[str, ...]  # names that requests may use; responses report the first
    root: str = ""  # the model's own name
    engine: EngineConfig = field(default_factory=EngineConfig)
    is_pinned: bool = False  # never unloaded for memory or because it is idle
    is_preloaded: bool = False  # loaded at start-up, like the first model
    idle_unload: float | None = None
    priority: Priority | None = None  # of requests without a priority; None: the key's tier
    tool_format: str | None = None  # the syntax of its tool calls; None: detected from the template
    default_max_tokens: int = DEFAULT_MAX_TOKENS  # of requests without a limit; -1: up to the end of the context
    kv_events: KvEventsConfig | None = None  # set by the launcher (`ServeConfig.kv_events_of`)

    def __post_init__(self) -> None:
        if type(self.default_max_tokens) is not int or not (
            self.default_max_tokens == -1 or 1 <= self.default_max_tokens <= MAX_TOKEN_ID
        ):
            text = f"default_max_tokens = {self.default_max_tokens!r:.80} is not a whole number of at least 1"
            raise InvalidRequest(f"{text}, or -1 for the rest of the context")
        if self.tool_format is not None:
            named_tool_format(self.tool_format)  # raises for an unknown format
        if not self.names or not all(name and name.isprintable() and len(name) <= 256 for name in self.names):
            raise InvalidRequest(f"served_model_name = {self.names!r:.80} has an entry that is not a name")
        if self.idle_unload is not None:
            _check_seconds("idle_unload", self.idle_unload)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    models: tuple[ModelConfig, ...]  # the first one is the default
    # For the weights and KV of all models. None: a single model sizes itself, several share most of the free memory.
    memory: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    admin_api_key: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    insecure: bool = False  # accept requests of other machines without a key
    share_prefix_cache: bool = False  # between keys
    max_queue: int = 512
    max_queued_tokens: int = 1 << 20
    queue_timeout: float = 60.0
    drain: float = 30.0
    max_body_size: int = 16 << 20
    state_dir: Path | None = None  # of uploaded files and batches; None: they are not served
    max_file_size: int = 200 << 20
    max_file_storage: int = 2 << 30  # of all files of one key
    body_timeout: float = 10.0
    header_timeout: float = 10.0
    slow_client_timeout: float = 30.0
    keep_alive_interval: float = 10.0
    max_connections: int = 4096
    hang_limit: float = HANG_LIMIT_S
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    metrics_compat: str | None = None
    kv_events: str | None = None  # where the first model announces its cache; None: no model does
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None  # `{model}` stands for the model's name
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65_535),
            ("max_queue", 1, 1 << 20),
            ("max_queued_tokens", 1, 1 << 40),
            ("max_body_size", 1024, 1 << 30),
            ("max_file_size", 1024, 1 << 40),
            ("max_file_storage", 1024, 1 << 50),
            ("max_connections", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise InvalidRequest(f"{name} = {value!r} is not a whole number from {low} to {high}")
        for name in (
            *("queue_timeout", "drain", "body_timeout", "header_timeout"),
            *("slow_client_timeout", "keep_alive_interval", "hang_limit"),
        ):
            _check_seconds(name, getattr(self, name), low_s=0 if name == "drain" else 0.01)
        for name, allowed in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS), ("metrics_compat", COMPAT)):
            if (value := getattr(self, name)) not in allowed and (name, value) != ("metrics_compat", None):
                raise InvalidRequest(f"{name} = {value!r} is not one of {', '.join(allowed)}")
        self._check_models()
        self._check_tls()
        if not self.is_local and not self.has_keys and not self.insecure:
            raise InvalidRequest(
                f"host = {self.host!r} accepts requests of other machines, and no API key is set: set --api-key (or"
                " QUIRE_API_KEY, or --api-keys-file), or --insecure to serve without a key"
            )
        self._check_events()

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key or self.admin_api_key or self.api_keys_file)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def event_endpoints(self, index: int) -> dict[str, Endpoint]:
        """Where model number `index` announces its cache, by setting: with ports above those of the model before it."""
        given = {"kv_events": self.kv_events, "kv_events_replay": self.kv_events_replay}
        by = index * PORTS_PER_MODEL
        return {name: parse_endpoint(name, text).offset(by) for name, text in given.items() if text is not None}

    def kv_events_of(self, index: int) -> KvEventsConfig | None:
        """The settings of model number `index` for KV events."""
        if self.kv_events is None:
            return None
        texts = {name: str(endpoint) for name, endpoint in self.event_endpoints(index).items()}
        topic = self.kv_events_topic
        if topic is None:  # the form that llm-d needs; Dynamo reads every topic
            topic = f"kv@{self.url.partition('://')[2]}@{{model}}"
        topic = topic.replace("{model}", self.models[index].names[0])
        return KvEventsConfig(texts["kv_events"], texts.get("kv_events_replay"), topic)

    def _check_events(self) -> None:
        if self.kv_events is None:
            for name in ("kv_events_replay", "kv_events_topic"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidRequest(f"{name} = {value!r:.80} needs --kv-events, which is not set")
            return
        check_installed()
        check_topic("kv_events_topic", self.kv_events_topic or "")
        used: dict[int, str] = {}
        for index, model in enumerate(self.models):
            for name, endpoint in self.event_endpoints(index).items():
                port, what = endpoint.port, f"{name} of {model.names[0]}"
                if port > 65_535:
                    raise InvalidRequest(f"{name} = {getattr(self, name)!r}: {what} needs port {port}, above 65535")
                if port in used:
                    text = (
                        f"port {port} is needed for {used[port]} and for {what}; model number i adds 2 i to both ports"
                    )
                    raise InvalidRequest(f"{name} = {getattr(self, name)!r}: {text}")
                if port:
                    used[port] = what

    def _check_models(self) -> None:
        if not self.models:
            raise InvalidRequest("models: no model is given")
        if self.memory is not None and self.memory < 1:
            raise InvalidRequest(f"memory = {self.memory!r} is not a number of bytes above 0")
        owners: dict[str, ModelConfig] = {}
        for model in self.models:
            for name in model.names:
                if name in owners:
                    whose = (
                        "twice by one model" if owners[name] is model else f"by {owners[name].path} and {model.path}"
                    )
                    raise InvalidRequest(f"models: the name {name!r} is used {whose}; give one of them another name")
                owners[name] = model

    def _check_tls(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidRequest("ssl_certfile and ssl_keyfile: TLS needs both")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InvalidRequest(f"{name} = {str(path)!r} is not a file")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except ssl.SSLError as error:
                text = f"is not a PEM certificate that matches ssl_keyfile ({error.reason or 'PEM'})"
                raise InvalidRequest(f"ssl_certfile = {str(self.ssl_certfile)!r} {text}") from None
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidRequest(f"root_path = {self.root_path!r} does not begin with / or ends with /")
