"""Deploys quire on Ray Serve: runs, shows and stops the applications of a cluster (`ray_cluster.py` joins it).

Ray replaces replicas and the front one after the other, and does not return to the old settings if a new one cannot
start. So everything that can be known before is checked before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

from quire.backends.machine import has_nvidia
from quire.engine.composition import EngineConfig
from quire.engine.model_text import ModelText
from quire.engine.worker.client import HANG_LIMIT_S, ModelClient
from quire.errors import InvalidRequest, QuireError
from quire.scale.cluster_client import ClusterClient
from quire.scale.config import DeployConfig, ModelDeployment, QueuePolicy, equal_share
from quire.scale.ray_cluster import DeployFailed
from quire.scale.ray_serve import RayTransport, ReplicaWatcher
from quire.scale.replica import Replica, ids_of
from quire.server.config import ModelConfig, ServeConfig
from quire.server.http import bind
from quire.server.launcher import Launcher, Startup, setup_logging
from quire.server.limits import make_keyring
from quire.version import __version__

HEAD = "node:__internal_head__"  # Ray's resource of the machine that leads the cluster
BIND_S = 20.0  # a new process of Ray may take some seconds


def check_server(server: ServeConfig, url: str | None) -> None:
    """Check the settings of the front: the keys file, and the address, unless the running front at `url` has it."""
    make_keyring(server.api_key, server.admin_api_key, server.api_keys_file, is_shared=server.share_prefix_cache)
    if server.port == 0 or (url is not None and urlsplit(url).port == server.port):
        return
    check = ray.remote(num_cpus=0, resources={HEAD: 0.001})(find_problem)
    try:
        problem = ray.get(check.remote(server.host, server.port), timeout=BIND_S)
    except ray.exceptions.GetTimeoutError:
        return  # Ray is busy; the front itself reports what is wrong
    if problem is not None:
        raise InvalidRequest(f"the head: {problem}")


def find_problem(host: str, port: int) -> str | None:
    """Why this machine cannot listen at an address; None: it can."""
    try:
        (listener,) = bind(host, port)
    except InvalidRequest as error:
        return str(error)
    listener.close()
    return None


def needs(one: ModelDeployment) -> dict[str, float]:
    """What one replica needs of its machine, by Ray's names of resources."""
    wanted = {"CPU": one.resources.cpus or 0.0, "GPU": one.resources.gpus, **one.resources.custom}
    if one.resources.memory is not None:
        wanted["memory"] = float(one.resources.memory)
    return {kind: amount for kind, amount in wanted.items() if amount}


def check_resources(deployments: Mapping[str, ModelDeployment]) -> None:
    """Refuse replicas that no machine of the cluster could run, even without anything else on it."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, one in deployments.items():
        wanted = needs(one)
        if not any(all(machine.get(kind, 0) >= amount for kind, amount in wanted.items()) for machine in machines):
            listed = ", ".join(f"{kind} {amount:g}" for kind, amount in wanted.items())
            text = f"{name}: no machine of the cluster has what one replica needs: {listed}"
            raise InvalidRequest(f"{text}; --wait waits until such a machine joins")


def has_room(deployments: Sequence[ModelDeployment]) -> bool:
    """Whether the first replicas of new deployments fit beside what runs, as far as the sums of resources show."""
    free = ray.available_resources()
    total: dict[str, float] = {}
    for one in deployments:
        for kind, amount in needs(one).items():
            total[kind] = total.get(kind, 0.0) + amount * one.min_replicas
    return all(free.get(kind, 0.0) >= amount for kind, amount in total.items())


_ERROR = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Request|Model|Extra|Failed|Died)(?:\([^)]*\))?: (.+)")
FRONT_APPLICATION = "quire"
PREFIX = "quire-"  # of the applications of models
ANSWER_S = 30.0
MAX_ONGOING = 1_000_000  # calls of one replica: the engine has its own limits and queues
HEALTH_PERIOD_S = 1.0
POLL_S = 0.25
MAX_STARTS = 2  # of a replica that fails; Ray tries 20 times by default, for minutes
LOOK_BACK_S = 5.0  # Ray asks a replica for its figures five times in this period
REPORT_S = 2.0  # a replica sends them to the controller this often; 10 s by default
REPORT_VARIABLE = "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
MIN_CPUS = 0.001  # that Ray reserves for a replica without `cpus`


def deploy(
    config: DeployConfig, *, on_change: Callable[[str], None] = lambda _: None, waits_for_machines: bool = False
) -> str:
    """Run the applications, or change the running ones to these settings. Returns the server's address.

    Replicas that run are replaced, a few at a time. The front stays if its own settings have not changed, so that no
    request is lost. `waits_for_machines`: a machine with the resources of a replica may join later.
    """
    serve.start(proxy_location="Disabled")
    applications = {application_of(model): model for model in config.server.models}
    if len(applications) < len(config.server.models):
        names = ", ".join(model.names[0] for model in config.server.models)
        raise InvalidRequest(f"models: the names {names} are not different as names of applications")
    old = [name for name in _applications() if name not in (FRONT_APPLICATION, *applications)]
    check_server(config.server, _call_front("url"))
    deployments = dict(zip(applications, config.deployments, strict=True))
    if not waits_for_machines:
        check_resources(deployments)
    new = [one for name, one in deployments.items() if name not in _applications()]
    if old and new and not has_room(new):
        on_change(f"{', '.join(old)}: removed before the others start, which need its resources")
        _delete(old)
        old = []
    models = {name: model_fingerprint(model) for name, model in applications.items()}
    secret = secrets.token_bytes(16)
    started = {}
    for (name, model), one in zip(applications.items(), config.deployments, strict=True):
        num_threads = _num_threads(one, config)
        arguments = (model.names[0], str(model.path), model.engine, secret, num_threads, config.server.hang_limit)
        started[name] = _replicas(name, one, config.server.drain).bind(*arguments, models[name])
    _run(started, on_change)
    front = _front_config(config)
    fingerprint = _fingerprint(front, models.values())
    if _call_front("fingerprint") != fingerprint:
        bound = _front(config.server.drain).bind(front, fingerprint, tuple(models.items()))
        _run({FRONT_APPLICATION: bound}, on_change)
    _delete(old)  # models that are not in the settings any more
    url = _call_front("url")
    if url is None:
        raise DeployFailed("the front does not answer")
    return url


def _delete(applications: Sequence[str]) -> None:
    for name in applications:
        serve.delete(name)


def status() -> dict[str, Any] | None:
    """The state of the applications; None: nothing is deployed."""
    found = _applications()
    if not found:
        return None
    states = {}
    for name, one in found.items():
        replicas: Counter[str] = Counter()
        for deployment in one.deployments.values():
            replicas.update(deployment.replica_states)
        messages = [one.message, *(deployment.message for deployment in one.deployments.values())]
        states[name] = {
            "status": one.status.value,
            "replicas": {state: count for state, count in replicas.items() if count},
            "message": next(filter(None, messages), ""),
        }
    return {"url": _call_front("url") or "", "applications": states}


def stop() -> bool:
    """End the applications. Running requests may finish. Returns False if nothing was deployed."""
    found = list(_applications())
    for name in sorted(found, key=lambda name: name != FRONT_APPLICATION):  # the front first: it drains
        serve.delete(name)
    return bool(found)


def _front_config(config: DeployConfig) -> ServeConfig:
    """The settings of the server. Models are always loaded there: their memory is the replicas'."""
    server = config.server
    models = tuple(replace(model, is_preloaded=True, is_pinned=True, idle_unload=None) for model in server.models)
    return replace(server, models=models)


def _fingerprint(server: ServeConfig, models: Iterable[str]) -> str:
    """A digest of everything that the front depends on: its settings and models, the keys' file, and its code."""
    keys = b"" if server.api_keys_file is None else server.api_keys_file.read_bytes()
    return hashlib.sha256(f"{__version__} {server!r} {list(models)} ".encode() + keys).hexdigest()


def model_fingerprint(model: ModelConfig) -> str:
    """A digest of a model and its settings. The model is known by its path and by the size and time of its files here.

    A front must not send requests to a replica with another one: it may have another tokenizer or block size.
    """
    files = sorted(model.path.rglob("*")) if model.path.is_dir() else [model.path]
    found = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(f"{__version__} {found} {model.engine!r}".encode()).hexdigest()[:16]


def _front(drain_s: float) -> Any:
    return serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=drain_s + 10,
        max_constructor_retry_count=MAX_STARTS,
        logging_config=LoggingConfig(enable_access_log=False),
    )(Front)


def _replicas(application: str, one: ModelDeployment, drain_s: float) -> Any:
    resources = one.resources
    scaling: dict[str, Any] = {"num_replicas": one.replicas}
    if one.autoscale is not None:
        given = one.autoscale
        kwargs = {"queue_age_s": given.queue_age, "waiting_tokens": given.waiting_tokens}
        policy = AutoscalingPolicy(policy_function=QueuePolicy, policy_kwargs=kwargs)
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=given.min,
                max_replicas=given.max,
                initial_replicas=given.min,
                upscale_delay_s=given.up_delay,
                downscale_delay_s=given.down_delay,
                look_back_period_s=LOOK_BACK_S,
                metrics_interval_s=REPORT_S,
                policy=policy,
            )
        }
    # Without `cpus`, almost none are reserved: old replicas would otherwise hold the CPUs that new ones wait for.
    num_cpus = resources.cpus if resources.cpus is not None else 1.0 if resources.gpus else MIN_CPUS
    options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": resources.gpus, "resources": resources.custom}
    if resources.memory is not None:
        options["memory"] = resources.memory
    if one.autoscale is not None:
        options["runtime_env"] = {"env_vars": {REPORT_VARIABLE: str(REPORT_S)}}
    return serve.deployment(
        name=REPLICAS,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=options,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=drain_s + 10,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=MAX_STARTS,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaWatcher, request_router_kwargs={"application": application}
        ),
        **scaling,
    )(ModelReplica)


def _num_threads(one: ModelDeployment, config: DeployConfig) -> int:
    """Threads of a replica: its CPUs, or an equal share of the cluster's. 0: it computes on a GPU."""
    if one.resources.gpus:
        return 0
    if one.resources.cpus is not None:
        return max(int(one.resources.cpus), 1)
    machines = [float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return max(int(equal_share(machines, sum(each.max_replicas for each in config.deployments))), 1)


def application_of(model: ModelConfig) -> str:
    """The name of a model's application: letters, digits and dashes."""
    name = model.names[0]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60]
    return PREFIX + (plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}")


def _applications() -> dict[str, Any]:
    """The applications of quire in this cluster, which may also run others."""
    found = serve.status().applications
    return {name: one for name, one in found.items() if name == FRONT_APPLICATION or name.startswith(PREFIX)}


def _run(applications: Mapping[str, Any], on_change: Callable[[str], None]) -> None:
    """Run applications, and wait until all of them do. Raises DeployFailed with Ray's reason.

    Waits in this thread, so that Ctrl-C ends the command. What it has begun goes on.
    """
    targets = [serve.RunTarget(bound, name=name, route_prefix=None) for name, bound in applications.items()]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    shown = ""
    while True:
        every = _applications()
        if missing := [name for name in applications if name not in every]:
            raise DeployFailed(f"{', '.join(missing)}: deleted while it was deployed")
        found = {name: every[name] for name in applications}
        text = ", ".join(_progress(name, one) for name, one in found.items())
        if text != shown:
            shown = text
            on_change(text)
        for name, one in found.items():
            if one.status == ApplicationStatus.DEPLOY_FAILED:
                messages = [one.message, *(each.message for each in one.deployments.values())]
                raise DeployFailed(f"{name}: {_reason([message for message in messages if message])}")
        if all(one.status == ApplicationStatus.RUNNING for one in found.values()):
            return
        time.sleep(POLL_S)


def _progress(name: str, one: Any) -> str:
    """The state of an application, and Ray's reason if its replicas wait for resources or fail."""
    messages = " ".join(each.message for each in one.deployments.values() if each.message)
    return f"{name} {one.status.value.lower()}" + (f": {messages}" if messages else "")


def _call_front(method: str) -> str | None:
    """Ask the front, if there is one."""
    one = _applications().get(FRONT_APPLICATION)
    if one is None or one.status != ApplicationStatus.RUNNING:
        return None
    handle = serve.get_deployment_handle(FRONT, FRONT_APPLICATION)
    try:
        answer: str = getattr(handle, method).remote().result(timeout_s=ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError, RayServeException):
        return None
    return answer


def _reason(messages: list[str]) -> str:
    """The error of a replica in Ray's messages: the last line of a traceback in the longest one."""
    lines = [line.strip() for line in max(messages, key=len, default="").splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line)) and "Traceback" not in found[1]]
    return (errors or lines or ["unknown"])[-1]


# What Ray runs: replicas of a model, and the front with quire's own HTTP server

FRONT, REPLICAS = "front", "replicas"  # names of the deployments, in applications of their own
JANITOR_S = 5.0
PORT_S = 15.0  # for the port of the front to become free
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
        self._max_num_seqs = facts.capacity.max_num_seqs
        self._janitor = asyncio.get_running_loop().create_task(self._drop_silent_front())

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

    async def _drop_silent_front(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            self.drop_silent_front()


class Front:
    """quire's HTTP server: the same routes, keys, limits, metrics and page as `quire serve`."""

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, fingerprint: str, applications: tuple[tuple[str, str], ...]
    ) -> None:
        """`applications`: those of the models of `config`, in this order, with the fingerprints of the models.

        `fingerprint`: of all settings.
        """
        setup_logging(config.log_level, as_json=config.log_format == "json")
        self._number = 1 + secrets.randbelow(1 << 20)  # no other front of the cluster has it
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
        deadline_s = time.monotonic() + PORT_S
        while True:
            try:
                return Launcher(config, on_ready=self._note, make_client=self._connect, handles_signals=False)
            except InvalidRequest as error:
                if "cannot listen on" not in str(error) or time.monotonic() > deadline_s:
                    raise RuntimeError(str(error)) from None
            await asyncio.sleep(RETRY_S)

    def _connect(
        self, model: ModelConfig, text: ModelText, engine: EngineConfig, *, on_loading: object, **settings: Any
    ) -> ModelClient:
        del on_loading  # replicas report no progress
        application, fingerprint = self._applications[model.names[0]]
        handle = DeploymentHandle(REPLICAS, application)  # not initialised: the transport chooses its event loop
        return ClusterClient(
            text,
            engine,
            RayTransport(handle, application, self._number),
            ids=self._ids,
            fingerprint=fingerprint,
            **settings,
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
