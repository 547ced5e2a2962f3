"""The deployments of Ray Serve: replicas of a model, and the front with quire's own HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from ray.serve.handle import DeploymentHandle

from quire.backends.machine import has_nvidia
from quire.engine.composition import EngineConfig
from quire.engine.worker.client import HANG_LIMIT_S
from quire.errors import InvalidRequest, QuireError
from quire.scale.cluster_client import ClusterClient
from quire.scale.ray_transport import RayTransport
from quire.scale.replica import Replica, ids_of, make_front_number
from quire.server.config import ServeConfig
from quire.server.launcher import Launcher, Startup
from quire.server.model_service import ClientSettings, ModelClient
from quire.server.observability.logs import setup_logging

FRONT, REPLICAS = "front", "replicas"  # names of the deployments, in applications of their own
JANITOR_S = 5.0
BIND_S = 15.0  # for the port of the front to become free
RETRY_S = 0.5
EXIT_DELAY_S = 0.2  # for streams to send why the worker ended

log = logging.getLogger(__name__)


class ModelReplica(Replica):
    """One replica: a worker process with the model."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        name: str,
        path: str,
        engine: EngineConfig,
        chain_secret: bytes,
        num_threads: int,
        hang_limit_s: float = HANG_LIMIT_S,
        fingerprint: str = "",
    ) -> None:
        """`num_threads`: of a model on the CPU, unless its settings have a number; 0: it has a GPU.

        `fingerprint`: of the model and its settings; fronts with another one do not use this replica.
        """
        self._janitor: asyncio.Task[None] | None = None  # None: it has not started
        super().__init__(name, self._exit, hang_limit_s)
        is_on_cpu = engine.backend in ("auto", "native") and not has_nvidia()
        if num_threads and is_on_cpu and engine.threads is None:
            engine = replace(engine, threads=num_threads)
        try:
            facts = await self.start(Path(path), engine, chain_secret, fingerprint)
        except QuireError as error:
            raise RuntimeError(f"{name}: {error}") from None  # not every process that reads it can import quire
        self._max_num_seqs = engine.scheduling(facts.capacity).max_num_seqs
        self._janitor = asyncio.get_running_loop().create_task(self._drop_silent_fronts())

    async def hello(self) -> None:
        """The first call of a front."""

    async def check_health(self) -> None:
        """Ray replaces a replica whose worker has ended."""
        if self.error is not None:
            raise RuntimeError(str(self.error))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `QueuePolicy` decides by."""
        stats = await self.stats()
        return {
            "queue_age_s": max(tier.oldest_age_s for tier in stats.tiers),
            "waiting_tokens": float(sum(tier.num_tokens for tier in stats.tiers)),
            "use": stats.num_running / self._max_num_seqs,
        }

    async def __del__(self) -> None:  # Ray Serve awaits it when the replica is stopped
        if self._janitor is not None:
            self._janitor.cancel()
        if hasattr(self, "process"):
            await self.close()

    def _exit(self, reason: str) -> None:
        """The worker has ended: so does this process, so that Ray starts another replica at once.

        If the start fails, `__init__` raises the reason, and Ray reports it and ends the process.
        """
        if self._janitor is not None:
            log.error("the replica ends: %s", reason)
            asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)

    async def _drop_silent_fronts(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            self.drop_silent_fronts()


class Front:
    """quire's HTTP server: the same routes, keys, limits, metrics and page as `quire serve`."""

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, fingerprint: str, applications: tuple[tuple[str, str], ...]
    ) -> None:
        """`applications`: those of the models of `config`, in this order, with the fingerprints of the models.

        `fingerprint`: of all settings.
        """
        setup_logging(config.log_level, as_json=config.log_format == "json")
        self._number = make_front_number()
        self._ids = ids_of(self._number)
        self._fingerprint = fingerprint
        self._applications = {model.names[0]: one for model, one in zip(config.models, applications, strict=True)}
        self._launcher = await self._launch(config)
        self._serving = asyncio.get_running_loop().create_task(self._launcher.serve())
        self._url = ""
        ready = asyncio.get_running_loop().create_task(self._launcher.is_ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ready.cancel()
            try:
                self._serving.result()
            except QuireError as error:
                raise RuntimeError(str(error)) from None
            raise RuntimeError("the server has ended")

    async def _launch(self, config: ServeConfig) -> Launcher:
        """Bind the port. The front before this one may still have it for a moment."""
        deadline_s = time.monotonic() + BIND_S
        while True:
            try:
                return Launcher(config, on_ready=self._note, make_client=self._connect, handles_signals=False)
            except InvalidRequest as error:
                if "cannot listen on" not in str(error) or time.monotonic() > deadline_s:
                    raise RuntimeError(str(error)) from None
            await asyncio.sleep(RETRY_S)

    def _connect(self, settings: ClientSettings) -> ModelClient:
        application, fingerprint = self._applications[settings.model.names[0]]
        handle = DeploymentHandle(REPLICAS, application)  # not initialised: the transport chooses its event loop
        return ClusterClient(
            settings.text,
            settings.engine,
            RayTransport(handle, application, self._number),
            ids=self._ids,
            fingerprint=fingerprint,
            hang_limit_s=settings.hang_limit_s,
            on_step=settings.on_step,
            on_gap=settings.on_gap,
        )

    def _note(self, startup: Startup) -> None:
        self._url = startup.config.url

    async def url(self) -> str:
        return self._url

    async def fingerprint(self) -> str:
        """The settings that this front has."""
        return self._fingerprint

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("the server has ended")

    async def __del__(self) -> None:
        if (launcher := getattr(self, "_launcher", None)) is not None and not self._serving.done():
            launcher.stop()
            await asyncio.wait({self._serving})
