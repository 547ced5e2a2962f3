"""Replicas on a real Ray cluster, with the default model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scale.faults import ask, kill_in_mid_stream, restart_under_load
from tests.scale.rig import Cluster, deployed, descendants, write
from tests.server.rig import ONE_THREAD, PATIENCE, Reply
from tests.waiting import HANG_S, eventually, is_running, repeating

QUESTION = "What is the capital of France? Answer in one sentence, and name the river of that city in a second one."
ANSWER = {"temperature": 0, "max_tokens": 16, "ignore_eos": False}
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster(default_model: Path) -> Iterator[Cluster]:
    del default_model  # is here now
    with deployed({"num_blocks": 400}) as cluster:
        yield cluster


def test_a_conversation_stays_with_its_replica(cluster: Cluster) -> None:
    first = cluster.chat(QUESTION, **ANSWER).json
    assert "Paris" in first["choices"][0]["message"]["content"]
    for _ in range(3):
        eventually(
            lambda: cluster.post("/v1/cache/explain", {"messages": _chat(QUESTION)}).json["matched_tokens"], "it"
        )
        again = cluster.chat(QUESTION, **ANSWER).json
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_sessions_are_sticky(cluster: Cluster) -> None:
    """Requests that share nothing but the name of a session go to one replica."""
    before = {one["name"]: one["num_routed"] for one in cluster.replicas()}
    for number in range(4):
        body = {"messages": _chat(f"{number} is a number."), "max_tokens": 1}
        assert cluster.post("/v1/chat/completions", body, headers={"x-session-id": "s1"}).status == 200
    grown = [one["num_routed"] - before[one["name"]] for one in cluster.replicas()]
    assert sorted(grown) == [0, 4]


def test_figures_of_each_replica_and_of_all(cluster: Cluster) -> None:
    text = cluster.get("/metrics").body.decode()
    names = [one["name"] for one in cluster.replicas()]
    assert 'quire:replicas{engine="0",model_name="smollm2-135m-instruct"} 2.0' in text
    for name in names:
        assert f'replica="{name}"' in text
    stats = cluster.stats()
    assert stats["num_blocks"] == 2 * 399  # without the null blocks
    assert stats["num_queried_tokens"] >= sum(one["num_queried_tokens"] for one in cluster.replicas()) > 0


def test_the_cache_of_all_replicas_is_cleared(cluster: Cluster) -> None:
    cluster.chat(QUESTION, **ANSWER)
    assert cluster.post("/v1/cache/clear", {}).status == 200
    assert cluster.stats()["num_cached"] == 0
    assert _matched(cluster) == 0


@pytest.mark.nightly
def test_a_replica_dies_in_mid_stream(cluster: Cluster) -> None:
    for number in range(2):  # Ray's process, and the worker below it
        kill_in_mid_stream(cluster, number, 200)


def test_a_deploy_under_load_loses_no_request(cluster: Cluster) -> None:
    replies = restart_under_load(cluster)
    assert len(replies) > 4
    assert {reply.ending for reply in replies} == {"done"}
    cluster.wait_free()


@pytest.mark.nightly  # another Ray cluster
def test_a_node_is_lost(default_model: Path) -> None:
    """Of two machines, one ends with its replica. The other one serves, and a replica is started there."""
    del default_model
    settings = {"num_blocks": 400, "resources": {"cpus": 9}}  # of 16: one replica on a machine
    with deployed(settings, num_nodes=2) as cluster:
        cluster.wait_replicas(2)
        assert cluster.order("remove_node 1") == {"nodes": 1}
        eventually(lambda: len(cluster.replicas()) == 1, "one replica is left")
        assert "Paris" in cluster.chat(QUESTION, **ANSWER).json["choices"][0]["message"]["content"]


@pytest.mark.nightly  # another Ray cluster
def test_replicas_are_added_and_removed(default_model: Path) -> None:
    """One replica runs one request at a time: the others wait until a second replica takes some."""
    del default_model
    scaling = {"min": 1, "max": 2, "queue_age": 0.2, "up_delay": 0.5, "down_delay": 1.0}
    with deployed({"num_blocks": 400, "max_num_seqs": 1, "autoscale": scaling}, replicas=None) as cluster:
        assert len(cluster.replicas()) == 1
        replies: list[Reply] = []
        with repeating(lambda: replies.append(ask(cluster, f"Tell me about {len(replies)}.", 600)), num_threads=6):
            eventually(lambda: len(cluster.replicas()) == 2, "a second replica")
        assert {reply.ending for reply in replies} == {"done"}
        eventually(lambda: len(cluster.replicas()) == 1, "one replica is enough")


def test_settings_that_cannot_work(cluster: Cluster, tmp_path: Path) -> None:
    """They are refused, and what runs is not changed."""
    file, keys = tmp_path / "wrong.yaml", tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: short}]")
    before = [one["name"] for one in cluster.replicas()]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"replicas": 0}, "replicas = 0 is not a whole number from 1 to 1000"),
            ({"autoscale": {"min": 3, "max": 2}}, "autoscale.max = 2 is less than autoscale.min = 3"),
            ({"replicas": 2, "autoscale": {"max": 3}}, "replicas = 2: autoscale is set too"),
            ({"resources": {"gpu": 1}}, "resources.gpu: there is no such field; there are cpus, gpus, memory, custom"),
            ({"kv_events": "tcp://127.0.0.1:1"}, "kv_events is not supported with replicas"),
            ({"models": [{"model": "smollm2-135m-instruct", "replicas": "x"}]}, "models[0].replicas = 'x' is not"),
            (
                {"models": [{"model": "smollm2-135m-instruct", "idle_unload": 9}]},
                "models[0].idle_unload is not supported with replicas",
            ),
            (
                {"resources": {"custom": {"no-such": 1}}},
                "no machine of the cluster has what one replica needs: no-such 1",
            ),
            ({"resources": {"cpus": 1000, "memory": 5}}, "what one replica needs: CPU 1000, memory 5; --wait waits"),
            ({"api_keys_file": str(keys)}, "API keys"),
            ({"api_keys_file": "missing.yaml"}, "missing.yaml"),
            ({"port": port}, f"the head: cannot listen on 127.0.0.1 port {port}: Address already in use"),
        )
        for settings, text in wrong:
            write(file, {"port": 0, "state_dir": "none", **settings})
            assert text in cluster.order(f"deploy {file}")["error"]
    file.write_text("  \n")
    assert "is empty" in cluster.order(f"deploy {file}")["error"]
    assert "--ray has no effect on `quire deploy status`" in cluster.order("quire deploy status --ray")["err"]
    assert [one["name"] for one in cluster.replicas()] == before


@pytest.mark.nightly  # another Ray cluster
def test_a_model_that_cannot_be_loaded_is_named(default_model: Path, tmp_path: Path) -> None:
    """The reason of the replica reaches the command."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model.read_bytes()[:5_000_000])
    file = tmp_path / "q.yaml"
    write(file, {"model": str(broken), "port": 0, "state_dir": "none", "replicas": 1})
    with _own_ray() as environment:
        done = _quire("deploy", str(file), environment=environment)
        assert done.returncode == 2
        assert "broken" in done.stderr
        assert "tensor" in done.stderr


@pytest.mark.nightly  # another Ray cluster
def test_the_command_starts_ray_and_ends_it(cluster: Cluster, tmp_path: Path) -> None:
    """Its own cluster: the one of the other tests runs on the same machine, and is neither joined nor ended."""
    file = tmp_path / "q.yaml"
    write(file, {"port": 0, "state_dir": "none", "num_blocks": 100, "replicas": 1})
    with _own_ray() as environment:
        done = _quire("deploy", str(file), environment=environment)
        assert "quire serves at http://127.0.0.1:" in done.stdout, done.stdout + done.stderr
        assert cluster.url not in done.stdout
        shown = _quire("deploy", "status", environment=environment).stdout
        assert "quire-smollm2-135m-instruct: running, 1 running" in shown
        # A machine whose CPUs are all used by the first replica.
        write(file, {"port": 0, "state_dir": "none", "num_blocks": 100, "replicas": 2})
        done = _quire("deploy", str(file), environment=environment)
        assert "smollm2-135m-instruct: 2" in done.stdout, done.stdout + done.stderr
        stopped = _quire("deploy", "stop", "--ray", environment=environment)
        assert stopped.stdout.startswith("stopped"), stopped.stderr
        assert "no Ray cluster runs on this machine" in _quire("deploy", "status", environment=environment).stderr
    assert len(cluster.replicas()) == 2


def test_the_commands_for_a_deployment(cluster: Cluster) -> None:
    """The last test with the cluster, which it ends."""
    said = "".join(cluster.stdout)
    assert f"quire serves at {cluster.url}\n  replicas   smollm2-135m-instruct: 2\n" in said
    assert f"export OPENAI_BASE_URL={cluster.url}/v1\n  export OPENAI_API_KEY=none\n" in said

    def quire(*arguments: str) -> str:
        done = cluster.order(f"quire deploy {' '.join(arguments)}")
        assert (done["code"], done["err"]) == (0, ""), done
        return str(done["out"])

    applications = {
        name: {"status": "RUNNING", "replicas": {"RUNNING": count}, "message": ""}
        for name, count in (("quire", 1), ("quire-smollm2-135m-instruct", 2))
    }
    expected = {"url": cluster.url, "applications": applications}
    eventually(lambda: json.loads(quire("status", "--json")) == expected, "replicas of the last deploy run alone")
    lines = quire("status").splitlines()
    assert lines[0] == f"quire serves at {cluster.url}"
    assert sorted(lines[1:]) == ["  quire-smollm2-135m-instruct: running, 2 running", "  quire: running, 1 running"]
    assert quire("stop") == "stopped\n"
    assert quire("status") == "nothing is deployed\n"
    assert json.loads(quire("status", "--json")) is None
    processes = descendants(cluster.process.pid)
    assert len(processes) > 2
    assert quire("stop", "--ray") == "nothing is deployed\n"
    eventually(lambda: not any(is_running(pid) for pid in processes), "Ray has ended")
    assert quire("stop", "--ray") == "no Ray cluster runs on this machine\n"
    done = cluster.order("quire deploy status")
    assert done["err"] == "quire: no Ray cluster runs on this machine; --address names one elsewhere\n"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "--address '127.0.0.1:1': there is no Ray cluster: Connection refused"),
        ("no-such-host.invalid:6379", "--address 'no-such-host.invalid:6379': there is no Ray cluster"),
        ("auto", "--address 'auto' is not HOST:PORT, such as 10.0.0.1:6379"),
        ("127.0.0.1:99999", "--address '127.0.0.1:99999': there is no Ray cluster"),
    ],
)
@pytest.mark.kept("127.0.0.1:1-")
def test_no_cluster_at_an_address(address: str, text: str) -> None:
    done = _quire("deploy", "status", "--address", address)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())


@pytest.mark.nightly
def test_a_cluster_that_was_killed(tmp_path: Path) -> None:
    """The file with its address is still there."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1")
    done = _quire("deploy", "status", environment={"RAY_TMPDIR": str(tmp_path)})
    assert "no Ray cluster runs on this machine" in done.stderr


def test_a_setting_of_deploy_in_a_file_for_serve(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    write(file, {"replicas": 2})
    done = _quire("serve", "--config", str(file))
    assert done.returncode == 2
    assert "replicas is a setting of `quire deploy`" in done.stderr


def _matched(cluster: Cluster) -> int:
    return int(cluster.post("/v1/cache/explain", {"messages": _chat(QUESTION)}).json["matched_tokens"])


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextlib.contextmanager
def _own_ray() -> Iterator[dict[str, str]]:
    """The environment of commands with a Ray of their own, which is ended."""
    with tempfile.TemporaryDirectory(prefix="qr-") as folder:  # pytest's names are too long for the sockets of Ray
        environment = {"RAY_TMPDIR": folder}
        try:
            yield environment
        finally:
            _quire("deploy", "stop", "--ray", environment=environment)


def _quire(
    *arguments: str, environment: dict[str, str] | None = None, until: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or until a text is in a line of its standard error; then Ctrl-C must end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, **PATIENCE, "COLUMNS": "200", **(environment or {})},
    )
    with process:
        if until is not None:
            assert process.stderr is not None
            line = next((line for line in process.stderr if until in line), "")
            process.send_signal(signal.SIGINT)
            return subprocess.CompletedProcess(arguments, process.wait(HANG_S), "", line)
        stdout, stderr = process.communicate(timeout=HANG_S)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
