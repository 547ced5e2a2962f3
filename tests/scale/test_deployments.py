"""The classes that Ray Serve runs, and the processes of Ray, without a cluster."""

from __future__ import annotations

import asyncio
import os
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.composition import EngineConfig
from quire.errors import InvalidRequest
from quire.scale.config import Autoscale, DeployConfig, ModelDeployment, Resources
from quire.server.config import ModelConfig, ServeConfig
from tests.waiting import until

with warnings.catch_warnings():  # Ray uses old names of pydantic
    warnings.simplefilter("ignore")
    from ray.serve.request_router import RequestRouter
    from ray.serve.schema import ApplicationStatus

    from quire.scale import application, ray_cluster, transport
    from quire.scale.application import ModelReplica
    from quire.scale.ray_cluster import DeployFailed
    from quire.scale.ray_serve import RayTransport, ReplicaWatcher


class Collected(ModelReplica):
    """Python's own call of `__del__`, which is a coroutine for Ray, does nothing."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of `os._exit`, which do not end this process."""
    found: list[int] = []
    monkeypatch.setattr(application, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(os, "_exit", found.append)
    return found


@pytest.mark.anyio
async def test_a_replica_that_cannot_start_reports_why_before_it_ends(tmp_path: Path, exits: list[int]) -> None:
    replica: Any = object.__new__(Collected)
    with pytest.raises(RuntimeError, match=r"m: .*no-such-model"):
        await replica.__init__("m", str(tmp_path / "no-such-model"), EngineConfig(backend="fake"), b"", 1)
    await asyncio.sleep(0.1)
    assert not exits
    await ModelReplica.__del__(replica)


@pytest.mark.anyio
async def test_a_replica_whose_worker_ends_later_ends_its_process(tiny_model: Path, exits: list[int]) -> None:
    replica: Any = object.__new__(Collected)
    await replica.__init__("m", str(tiny_model), EngineConfig(backend="fake", num_blocks=100), b"", 1)
    replica.process.end("was ended by a test")
    await until(lambda: exits, "its process ends")
    await ModelReplica.__del__(replica)


@pytest.mark.parametrize(
    ("word", "is_named"),
    [
        ("127.0.0.1:6379", True),
        ("--gcs-address=127.0.0.1:6379", True),
        ("--gcs-address=127.0.0.1:63790", False),
        ("--gcs-address=1127.0.0.1:6379", False),
        ("/tmp/ray/session_2026-01-01_1_12/logs", True),
        ("python worker.py --session-name=session_2026-01-01_1_12 --other", True),
        ("/tmp/ray/session_2026-01-01_1_123/logs", False),
    ],
)
def test_the_processes_of_a_cluster(word: str, is_named: bool) -> None:
    assert any(ray_cluster._names(word, name) for name in ("127.0.0.1:6379", "session_2026-01-01_1_12")) == is_named


def test_ray_without_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("sys.executable", "/no-such-folder/python")
    with pytest.raises(DeployFailed, match=r"Ray could not be started: .*No such file"):
        ray_cluster._start_ray()


def fake_ray(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Ray's own command, as a script that is beside Python."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    (folder / "ray").mkdir()  # of its files
    command = folder / "bin/ray"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}")
    command.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(command.with_name("python")))


@pytest.mark.parametrize("is_taken", [False, True])
def test_ray_is_started_at_its_port_or_at_a_free_one(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo $@ > {tmp_path}/arguments\nprintf ' 127.0.0.1:5\\n' > {tmp_path}/ray/ray_current_cluster\n"
    fake_ray(tmp_path, monkeypatch, script)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        monkeypatch.setattr(ray_cluster, "PORT", port)
        if not is_taken:
            probe.close()
        assert ray_cluster._start_ray() == "127.0.0.1:5"
    expected = f"start --head --port={0 if is_taken else port} --disable-usage-stats --include-dashboard=false\n"
    assert (tmp_path / "arguments").read_text() == expected


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo out; echo broken >&2; echo more >&2; exit 3", "Ray could not be started: broken"),
        ("echo only out; exit 1", "Ray could not be started: only out"),
        ("", "Ray was started, but has not written its address"),
    ],
)
def test_a_start_of_ray_that_fails(script: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray(tmp_path, monkeypatch, script)
    with pytest.raises(DeployFailed) as failed:
        ray_cluster._start_ray()
    assert str(failed.value) == text


def test_a_cluster_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("wrong token\nat some place")

    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert ray_cluster.is_here()
        with pytest.raises(InvalidRequest) as failed:
            ray_cluster.connect(None)
    text = str(failed.value)
    assert text.startswith(
        f"RAY_ADDRESS '{address}': Ray could not join the cluster: wrong token; if it asks for a token"
    )
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(InvalidRequest, match=r"RAY_ADDRESS 'auto' is not HOST:PORT"):
        ray_cluster.connect(None)


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_replicas_that_are_added_and_removed() -> None:
    """What Ray is told of `autoscale` and `resources`."""
    resources = Resources(cpus=3.5, memory=1 << 30, custom={"label": 1})
    one = ModelDeployment(autoscale=Autoscale(min=2, max=5, up_delay=1.5, down_delay=60.0), resources=resources)
    deployment = application._replicas("quire-m", one, drain_s=7.0)
    given = deployment._deployment_config.autoscaling_config
    assert (given.min_replicas, given.max_replicas, given.initial_replicas) == (2, 5, 2)
    assert (given.upscale_delay_s, given.downscale_delay_s) == (1.5, 60.0)
    assert given.policy.policy_kwargs == {"queue_age_s": 2.0, "waiting_tokens": 16_384}
    options = deployment.ray_actor_options
    assert (options["num_cpus"], options["memory"], options["resources"]) == (3.5, 1 << 30, {"label": 1})
    assert options["runtime_env"] == {"env_vars": {application.REPORT_VARIABLE: "2.0"}}
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 17.0
    fixed = application._replicas("quire-m", ModelDeployment(replicas=4, resources=Resources(gpus=1)), drain_s=7.0)
    assert fixed.num_replicas == 4
    assert (fixed.ray_actor_options["num_cpus"], fixed.ray_actor_options["num_gpus"]) == (1.0, 1)


def test_threads_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPUs, or its share of those of the cluster; none on a GPU."""
    machines = [{"Alive": True, "Resources": {"CPU": 16.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr("ray.nodes", lambda: machines)
    server = ServeConfig((ModelConfig(names=("m",), path=Path("m"), engine=EngineConfig()),))
    for one, expected in (
        (ModelDeployment(replicas=2), 8),
        (ModelDeployment(autoscale=Autoscale(max=4)), 4),
        (ModelDeployment(resources=Resources(cpus=3.5)), 3),
        (ModelDeployment(resources=Resources(cpus=0.5)), 1),
        (ModelDeployment(resources=Resources(gpus=1, cpus=3)), 0),
    ):
        assert application._num_threads(one, DeployConfig(server, (one,))) == expected


def test_the_reason_of_an_application_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's states, one after the other: deploying, then failed with the traceback of a replica."""
    traceback = "A replica failed.\nTraceback (most recent call last):\n  File x\nRuntimeError: m: no tensor 'a'\n\n"
    states = [
        ("DEPLOYING", "", "waits for CPUs"),
        ("DEPLOYING", "", "waits for CPUs"),
        ("DEPLOY_FAILED", "short", traceback),
    ]

    def state() -> Any:
        status, message, of_replicas = states.pop(0) if states else ("", "", "")
        one = SimpleNamespace(
            status=ApplicationStatus(status), message=message, deployments={"d": SimpleNamespace(message=of_replicas)}
        )
        return SimpleNamespace(applications={"quire-m": one, "of somebody else": None})

    monkeypatch.setattr("ray.serve.run_many", lambda *_, **__: None)
    monkeypatch.setattr("ray.serve.status", state)
    monkeypatch.setattr(application, "POLL_S", 0.0)
    said: list[str] = []
    bound: Any = application._replicas("quire-m", ModelDeployment(), 1.0)
    with pytest.raises(DeployFailed, match=r"^quire-m: m: no tensor 'a'$"):
        application._run({"quire-m": bound}, said.append)
    assert said[0] == "quire-m deploying: waits for CPUs"
    assert len(said) == 2
    states = [("RUNNING", "", "")]
    with pytest.raises(DeployFailed, match="quire: deleted while it was deployed"):
        application._run({"quire": bound}, said.append)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["no error here", "two\nlines of it "], "lines of it"),
        (["Traceback:\nquire.errors.InvalidRequest: threads = 9 is more\nand more"], "threads = 9 is more"),
        (["ray::x (pid=1): RayActorError: Traceback\nWorkerDied: killed\nModelFailed(0): by a test"], "by a test"),
        ([], "unknown"),
    ],
)
def test_the_reason_in_messages(messages: list[str], reason: str) -> None:
    assert application._reason(messages) == reason


def test_an_address_that_the_head_cannot_use() -> None:
    assert application.find_problem("127.0.0.1", 0) is None
    assert application.find_problem("no-such-host.invalid", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert application.find_problem("127.0.0.1", taken.getsockname()[1]) is not None


def test_room_for_new_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of what the first replicas need, also of resources that no machine has."""
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 4.0, "memory": 10.0})
    two = ModelDeployment(replicas=2, resources=Resources(cpus=1.5))
    assert application.has_room([two, ModelDeployment(resources=Resources(cpus=1, memory=10))])
    assert not application.has_room([two, two])
    assert application.has_room([ModelDeployment(autoscale=Autoscale(max=9), resources=Resources(cpus=4))])
    assert not application.has_room([ModelDeployment(resources=Resources(custom={"label": 0.5}))])


def test_the_fingerprint_of_a_model(tmp_path: Path) -> None:
    """It changes with the content of the files and with the settings, and not with the names."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    model = ModelConfig(names=("m",), path=file, engine=EngineConfig(backend="fake"))
    first = application.model_fingerprint(model)
    assert application.model_fingerprint(replace(model, names=("n",))) == first
    assert application.model_fingerprint(replace(model, engine=EngineConfig(backend="fake", num_blocks=9))) != first
    folder = application.model_fingerprint(replace(model, path=tmp_path))
    file.write_bytes(b"another")
    assert application.model_fingerprint(model) != first
    assert application.model_fingerprint(replace(model, path=tmp_path)) != folder


def test_replicas_that_are_being_stopped_are_kept_while_the_front_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = {"a"}
    found = RayTransport(None, "app", 1)
    found._set_replicas = lambda replicas: {*replicas} | connected
    monkeypatch.setitem(transport.takers, "app", found.take)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    router: Any = object.__new__(ReplicaWatcher)
    router.initialize_state("app")
    a, b, c = (SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc")
    router.update_replicas([a, b])
    router.update_replicas([c])  # a and b are being stopped; b is idle
    assert found._replicas == {"a": a, "c": c}
    connected.clear()
    router.update_replicas([c])
    assert found._replicas == {"c": c}
