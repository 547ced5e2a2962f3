"""The classes that Ray Serve runs, and the processes of Ray, without a cluster."""

from __future__ import annotations

import asyncio
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.composition import EngineConfig
from quire.server.config import ModelConfig

with warnings.catch_warnings():  # Ray uses old names of pydantic
    warnings.simplefilter("ignore")
    from ray.serve.request_router import RequestRouter

    from quire.scale import application, deployments, ray_cluster, registry
    from quire.scale.deployments import ModelReplica
    from quire.scale.ray_cluster import DeployFailed
    from quire.scale.request_router import PrefixAwareRouter


class Collected(ModelReplica):
    """Python's own call of `__del__`, which is a coroutine for Ray, does nothing."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_a_replica_that_cannot_start_reports_why_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(deployments, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(os, "_exit", exits.append)

    async def main() -> None:
        replica: Any = object.__new__(Collected)
        with pytest.raises(RuntimeError, match=r"m: .*no-such-model"):
            await replica.__init__("m", str(tmp_path / "no-such-model"), EngineConfig(backend="fake"), b"", 1)
        await asyncio.sleep(0.1)
        assert not exits
        await ModelReplica.__del__(replica)

    asyncio.run(main())


def test_a_replica_whose_worker_ends_later_ends_its_process(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(deployments, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(os, "_exit", exits.append)

    async def main() -> None:
        replica: Any = object.__new__(Collected)
        await replica.__init__("m", str(tiny_model), EngineConfig(backend="fake", num_blocks=100), b"", 1)
        replica._replica.process.end("was ended by a test")
        while not exits:
            await asyncio.sleep(0.01)
        await ModelReplica.__del__(replica)

    asyncio.run(main())


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


def test_the_router_keeps_replicas_that_are_being_stopped_while_the_front_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {"a"}
    chooser: Any = SimpleNamespace(set_replicas=lambda _: None, uses=used.__contains__)
    monkeypatch.setitem(registry.choosers, "app", chooser)
    monkeypatch.setitem(registry.routers, "app", None)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    router: Any = object.__new__(PrefixAwareRouter)
    router.initialize_state("app")
    a, b, c = (SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc")
    router.update_replicas([a, b])
    router.update_replicas([c])  # a and b are being stopped; b is idle
    assert [router.find(name) for name in "abc"] == [a, None, c]
    used.clear()
    router.update_replicas([c])
    assert router.find("a") is None
