"""`quire serve` from a config to the last answer: bind, load, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from quire.backends.base import Progress
from quire.engine.client import EngineClient
from quire.engine.model import ModelText
from quire.engine.wire import Ready, Stepped
from quire.errors import TemplateError
from quire.server.app import Gate, make_app
from quire.server.auth import make_keyring
from quire.server.call import CallLimits
from quire.server.config import ServeConfig
from quire.server.http import HttpProtocol, HttpServer, bind, make_config, raise_file_limit
from quire.server.metrics import Metrics
from quire.server.models import Model, Models
from quire.server.service import Service, ServiceLimits

LAST_WORDS_S = 2.0  # for streams that are cut to say so

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Startup:
    """What was chosen, and how long each part of the start took."""

    config: ServeConfig  # with the port that is really bound
    model: str
    ready: Ready
    timings_s: dict[str, float]


OnReady = Callable[[Startup], None]


def run(config: ServeConfig, *, on_ready: OnReady, on_loading: Progress | None = None) -> None:
    """Serve until a signal, then drain. Raises what kept it from starting."""
    age_s = process_age_s()
    started_s = time.monotonic() - age_s
    gate = Gate(
        make_keyring(config.api_keys, config.admin_api_keys, config.api_keys_file, is_shared=config.is_cache_shared),
        config.allowed_origins,
        config.allowed_hosts if config.is_local else ("*",),
    )
    sockets = bind(config.host, config.port)
    config = replace(config, port=sockets[0].getsockname()[1])
    opened_s = time.monotonic()
    text = ModelText.open(config.path, config.root or config.names[0], config.engine.load_format)
    timings = {"server": age_s, "tokenizer": time.monotonic() - opened_s}
    main = _Main(config, gate, text, timings, on_ready, on_loading, started_s)
    uvicorn_config = make_config(
        None, certfile=_name(config.ssl_certfile), keyfile=_name(config.ssl_keyfile), root_path=config.root_path
    )
    with asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner:
        runner.run(main.serve(sockets))


def process_age_s() -> float:
    """How long this process has been starting by now: Python, imports, and the model's download if there was one."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0  # only Linux says so
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


def _name(path: object) -> str | None:
    return None if path is None else str(path)


class _Main:
    def __init__(
        self,
        config: ServeConfig,
        gate: Gate,
        text: ModelText,
        timings: dict[str, float],
        on_ready: OnReady,
        on_loading: Progress | None,
        started_s: float,
    ) -> None:
        self._config = config
        self._gate = gate
        self._text = text
        self._timings = timings
        self._on_ready = on_ready
        self._on_loading = on_loading
        self._started_s = started_s

    async def serve(self, sockets: list[socket.socket]) -> None:
        config = self._config
        limits = ServiceLimits(config.max_queue, config.max_queued_tokens, config.queue_timeout_s)
        metrics = Metrics(config.names[0], compat=config.metrics_compat)
        self._service = Service(self._text, self._connect, config.names, limits, metrics)
        client = self._service.client
        call_limits = CallLimits(config.max_body_bytes, config.body_timeout_s, config.keep_alive_s)
        app = make_app(Models([Model(config.names, self._service)]), self._gate, call_limits)
        HttpProtocol.max_connections = raise_file_limit(config.max_connections)
        HttpProtocol.header_s = config.header_timeout_s
        HttpProtocol.slow_reader_s = config.slow_reader_s
        settings = make_config(
            app, certfile=_name(config.ssl_certfile), keyfile=_name(config.ssl_keyfile), root_path=config.root_path
        )
        server = HttpServer(settings, self._drain, self._service.cut)
        serving = asyncio.create_task(server.serve(sockets))
        watching = asyncio.create_task(client.supervise())
        telling = asyncio.create_task(self._tell(client))
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not serving.done():
                server.stop()  # it could not be loaded
            await serving
            if watching.done():
                watching.result()
        finally:
            for task in (telling, watching):
                task.cancel()
            await asyncio.wait({telling, watching})
            await self._service.close()
            log.info("stopped")

    def _connect(self, on_step: Callable[[Stepped], None]) -> EngineClient:
        config = self._config
        return EngineClient(
            config.path,
            self._text,
            config.engine,
            on_loading=self._on_loading,
            hang_limit_s=config.hang_limit_s,
            on_step=on_step,
        )

    async def _tell(self, client: EngineClient) -> None:
        warming = asyncio.to_thread(self._warm_up)
        await asyncio.gather(client.start(), warming)
        assert client.facts is not None
        all_s = time.monotonic() - self._started_s
        timings = {**self._timings, **client.facts.timings_s}
        timings |= {"worker": max(0.0, all_s - sum(timings.values())), "all": all_s}  # the worker's own start-up
        self._on_ready(Startup(self._config, self._config.names[0], client.facts, timings))

    def _warm_up(self) -> None:
        """Start the process that renders templates, and find a bad template now; raw prompts work without one."""
        if self._text.template.exists:
            try:
                self._text.template.check()
            except TemplateError as error:
                log.warning("chat will not work, only raw prompts: %s", error)

    async def _drain(self) -> None:
        service = self._service
        if service.num_open:
            text = "finishing %d request(s), %g s at most; a second signal ends them at once"
            log.warning(text, service.num_open, self._config.drain_s)
        if not await service.drain(self._config.drain_s):
            log.warning("ending %d request(s) with an error", service.num_open)
            service.cut()
            with suppress(TimeoutError):
                await service.drain(LAST_WORDS_S)
