"""Runs `quire serve`: bind the port, load the models, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from quire.backends.base import Progress
from quire.backends.kv_memory import CPU_CAP
from quire.backends.machine import has_metal, has_nvidia
from quire.engine.model_manager import default_budget
from quire.engine.process import JsonFormatter, LimitedHandler, LineFormatter, calm_collector
from quire.engine.worker.protocol import Ready
from quire.server.app import Gate, make_app
from quire.server.batches.endpoints import Sender
from quire.server.batches.service import BatchService, StateDir
from quire.server.config import ServeConfig
from quire.server.http import HttpProtocol, HttpServer, bind, make_config, raise_file_limit
from quire.server.limits import make_keyring
from quire.server.metrics import Exposition
from quire.server.models import MakeClient, Models, SharedResources, make_local_client
from quire.server.request_context import Served
from quire.server.watch import Watch

CUT_DRAIN_S = 5.0  # for cut streams to send their error event; a busy machine needs longer
SWITCH_S = 0.0005  # longest wait of a thread for the interpreter while the event loop is busy; 5 ms by default

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Startup:
    """The settings in effect and the duration of each part of the start-up."""

    config: ServeConfig  # with the port that was bound
    model: str
    ready: Ready
    timings_s: dict[str, float]
    memory_bytes: int | None = None  # shared by all models
    has_chosen_memory: bool = False  # memory_bytes was chosen from the free memory, not set


OnReady = Callable[[Startup], None]


def run(config: ServeConfig, *, on_ready: OnReady, on_loading: Progress | None = None) -> None:
    """Serve until a signal, then drain. Raises the error of a failed start."""
    launcher = Launcher(config, on_ready=on_ready, on_loading=on_loading)
    with asyncio.Runner(loop_factory=make_config(None, config).get_loop_factory()) as runner:
        runner.run(launcher.serve())


def setup_logging(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Configure logging, to stderr by default. May be called again; the last call counts."""
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LimitedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # of libraries
    logging.getLogger("quire").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    # uvicorn logs its start at INFO; `quire serve` prints its own.
    logging.getLogger("uvicorn").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(
        logging.CRITICAL + 1
    )  # it logs query strings; quire.request replaces it


def _check_events(config: ServeConfig) -> None:
    """Warn of what an operator may not expect of KV events."""
    for index in range(len(config.models)):
        for endpoint in config.event_endpoints(index).values():
            if not endpoint.is_local:
                log.warning("KV events at %s: every client that reaches this address can read prompts", endpoint)
    if config.kv_events is not None and config.has_keys and not config.share_prefix_cache:
        text = "no KV events are sent for requests with API keys, because keys share no prefixes: set %s to share them"
        log.warning(text, "--share-prefix-cache")


def process_age_s() -> float:
    """Return the age of this process: Python's start, imports, and the model's download if there was one."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0  # only Linux reports it
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


class Launcher:
    """Binds the port at once; `serve` loads the models and serves until `stop`, or until a signal.

    `make_client`: connects the models to their engines. With another one than the default, the engines are elsewhere,
    and their memory is not managed here.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        on_ready: OnReady,
        on_loading: Progress | None = None,
        make_client: MakeClient = make_local_client,
        handles_signals: bool = True,
    ) -> None:
        self._age_s = process_age_s()
        self._started_s = time.monotonic() - self._age_s
        keys = make_keyring(
            config.api_key, config.admin_api_key, config.api_keys_file, is_shared=config.share_prefix_cache
        )
        hosts = tuple(name.lower() for name in config.allowed_hosts)
        self._gate = Gate(keys, config.allowed_origins, hosts, is_local=config.is_local)
        self._sockets = bind(config.host, config.port)
        self._config = replace(config, port=self._sockets[0].getsockname()[1])
        _check_events(self._config)
        sys.setswitchinterval(SWITCH_S)
        self._on_ready = on_ready
        self._on_loading = on_loading
        self._make_client = make_client
        self._handles_signals = handles_signals
        self._server: HttpServer | None = None
        self.is_ready = asyncio.Event()  # the first model is loaded

    def stop(self) -> None:
        """Drain and end. A second call ends at once."""
        if self._server is not None:
            self._server.stop()

    async def serve(self) -> None:
        config = self._config
        self._models = self._make_models()
        served = Served(self._models, Watch(self._models), config)
        self._batches = None
        if config.state_dir is not None:
            store = StateDir(config.state_dir, config.max_file_size, config.max_file_storage)
            self._batches = BatchService(store, Sender(served), self._gate.keys)
        app = make_app(replace(served, batches=self._batches), self._gate)
        HttpProtocol.max_connections = raise_file_limit(config.max_connections)
        HttpProtocol.header_s = config.header_timeout
        HttpProtocol.slow_reader_s = config.slow_client_timeout
        server = HttpServer(
            make_config(app, config), self._drain, self._models.cut, handles_signals=self._handles_signals
        )
        self._server = server
        serving = asyncio.create_task(server.serve(self._sockets))
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            has_failed = starting.done() and starting.exception() is not None and not self._models.is_draining
            if has_failed and not serving.done():
                server.stop()  # the first model could not be loaded
            await serving
            if has_failed:
                starting.result()
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            if self._batches is not None:
                await self._batches.stop()
            await self._models.close()
            log.info("stopped")

    def _make_models(self) -> Models:
        """A single model sizes its own memory unless `memory` is set; several models share one budget."""
        config = self._config
        shared = SharedResources(
            config.max_queue,
            config.max_queued_tokens,
            config.queue_timeout,
            Exposition(config.metrics_compat),
            hang_limit_s=config.hang_limit,
            make_client=self._make_client,
        )
        engine = config.models[0].engine
        has_gpu = {"torch": has_nvidia(), "mlx": has_metal(), "auto": has_nvidia() or has_metal()}
        on_gpu = engine.device != "cpu" and has_gpu.get(engine.backend, False)
        budget_bytes = config.memory
        is_local = self._make_client is make_local_client
        if is_local and budget_bytes is None and len(config.models) > 1:
            budget_bytes = default_budget(on_gpu=on_gpu)
        configs = [replace(model, kv_events=config.kv_events_of(i)) for i, model in enumerate(config.models)]
        models = Models(configs, shared, budget_bytes=budget_bytes, kv_cap_bytes=None if on_gpu else CPU_CAP)
        models.default.on_loading = self._on_loading
        return models

    async def _start(self) -> None:
        models, first = self._models, self._models.default
        calm_collector()  # before models are loaded: objects that exist now are never freed
        await models.start()
        first.on_loading = None
        if (ready := first.facts) is not None:  # None: its worker has just died and is being restarted
            all_s = time.monotonic() - self._started_s
            timings = {"server": self._age_s, "tokenizer": first.open_s, **ready.timings_s}
            timings |= {
                "worker": max(0.0, all_s - sum(timings.values())),
                "all": all_s,
            }  # the rest is the worker's start-up
            budget_bytes, is_chosen = models.manager.budget_bytes, self._config.memory is None
            self._on_ready(Startup(self._config, first.name, ready, timings, budget_bytes, is_chosen))
        self.is_ready.set()
        if self._batches is not None:
            await self._batches.start()
        await models.preload()

    async def _drain(self) -> None:
        models = self._models
        models.is_draining = True  # a load that fails from now on is no failure to start
        if self._batches is not None:
            await self._batches.stop()  # batches continue after the next start
        if models.num_open:
            text = "draining: %d request(s) are running, %g s at most; a second signal ends them at once"
            log.warning(text, models.num_open, self._config.drain)
        if not await models.drain(self._config.drain):
            log.warning("ending %d request(s) with an error", models.num_open)
            models.cut()
            with suppress(TimeoutError):
                await models.drain(CUT_DRAIN_S)
