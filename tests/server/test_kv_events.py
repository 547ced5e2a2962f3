"""KV events of `quire serve`: a router that reads them knows what each model has cached, and no salted prompt."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.server.config import ModelConfig, ServeConfig
from quire.server.launcher import _check_events
from tests.engine.subscriber import Subscriber, free_ports, routed
from tests.engine.vllm_events import Router
from tests.server.rig import FAKE, Server, put_away, serving, spawn
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S, eventually, is_asleep

CACHING_PAGE = Path(__file__).parents[2] / "docs" / "caching.md"
ANY = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0")
LONG = "The quick brown fox jumps over the lazy dog. " * 12
Prompt = str | tuple[int, ...]


def status(server: Server, model: str = "") -> Any:
    return server.get(f"/version?model={model}").json["kv_events"]


def subscribed(server: Server, model: str = "") -> Subscriber:
    found = status(server, model)
    return Subscriber(found["endpoint"], found["replay_endpoint"])


def view(server: Server, model: str = "") -> Router:
    """A router that read all events of a model so far."""
    server.stats_of(model)  # a worker sends the events of a step before it handles later messages
    with subscribed(server, model) as subscriber:
        return routed(subscriber.replay(), 32)


def tokens_of(server: Server, text: str, model: str | None = None) -> tuple[int, ...]:
    return tuple(server.post("/tokenize", {"prompt": text, "model": model}).json["tokens"])


def complete(server: Server, prompt: Prompt, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def num_cached(server: Server, prompt: Prompt, **fields: Any) -> int:
    """Tokens of a prompt in whole cached blocks, as the server explains it."""
    blocks: int = server.post("/v1/cache/explain", {"prompt": prompt, **fields}).json["matched_blocks"]
    return blocks * 32


def test_requests_with_keys_are_announced_only_if_they_share_the_cache(tiny_model: Path) -> None:
    keys = ("--api-key", "sk-12345678", "--admin-api-key", "sk-admin-1234")
    for options, is_announced in ((("--share-prefix-cache",), True), ((), False)):
        with serving(str(tiny_model), *FAKE, *ANY, *keys, *options, key="sk-admin-1234") as server:
            complete(server, LONG)
            assert num_cached(server, LONG) > 64
            assert (view(server).num_matched(tokens_of(server, LONG)) > 64) is is_announced
            warning = "no KV events are sent for requests with API keys, because keys share no prefixes"
            assert (warning in server.log) is not is_announced


def test_a_restarted_worker_is_followed(tiny_model: Path) -> None:
    host, port = "tcp://127.0.0.1", free_ports(2)[0]
    options = ("--kv-events", f"{host}:{port}", "--kv-events-replay", f"{host}:{port + 1}")
    with serving(str(tiny_model), *FAKE, *options) as server, subscribed(server) as live:
        live.join(lambda: server.post("/v1/cache/clear"))
        complete(server, LONG)
        before = view(server)
        live.receive_upto(last_number(server))
        last = live.batches[-1][0]
        os.kill(server.worker_pid, signal.SIGKILL)
        server.wait_for("is ready again")
        texts = iter(f"{number}. {LONG}" for number in range(100_000))
        while live.batches[-1][0] == last:  # the subscription is renewed at some moment
            complete(server, next(texts))
            if live.poll(50):
                live.receive()
        assert live.batches[-1][0] > last
        router = view(server)
        assert router.num_matched(tokens_of(server, LONG)) == 0 < before.num_matched(tokens_of(server, LONG))
        assert router.num_cleared >= 1


def last_number(server: Server) -> int:
    with subscribed(server) as subscriber:
        return subscriber.replay()[-1][0]


def test_models_with_windows_or_states_say_that_they_announce_nothing(tmp_path: Path, tiny_model: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    with serving(str(write_model(tmp_path / "windows", tiny_model, **changes)), *FAKE, *ANY) as server:
        server.wait_for("no KV events are sent, because the model has layers with a window or a recurrent state")
        server.wait_for("windows announces nothing: the model has layers with a window or a recurrent state")
        complete(server, LONG)
        assert status(server)["silent_because"] is not None
        router = view(server)
        assert (router.num_stored, router.num_cleared) == (0, 1)


def test_an_idle_worker_with_events_sleeps(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, *ANY) as server, subscribed(server) as live:
        live.join(lambda: server.post("/v1/cache/clear"))
        assert len(live.replay()) >= 2
        eventually(lambda: is_asleep(server.worker_pid, window_s=1.0), "no thread of the worker wakes up")


def test_a_taken_port_is_an_error_at_start(tiny_model: Path) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        for option, others in (("--kv-events", ()), ("--kv-events-replay", ("--kv-events", "tcp://127.0.0.1:0"))):
            server = spawn(str(tiny_model), *FAKE, option, f"tcp://127.0.0.1:{port}", *others)
            assert server.process.wait(HANG_S) != 0
            put_away(server)  # reads all of its output
            message = rf"quire: {option} = 'tcp://127.0.0.1:{port}': cannot listen there: Address already in use"
            assert re.search(message, server.log), server.log
            assert "Traceback" not in server.log


def test_the_subscriber_of_the_documentation(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", CACHING_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    write_tiny_model(tmp_path / "m")
    with serving(str(tmp_path / "m"), *FAKE, *ANY) as server:
        complete(server, LONG)
        found = status(server)
        code = code.replace("tcp://127.0.0.1:5557", found["endpoint"])
        code = code.replace("tcp://127.0.0.1:5558", found["replay_endpoint"])
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]  # by the replay
            assert [line.split()[1:3] for line in lines] == [["AllBlocksCleared", "None"]] * 2 + [
                ["BlockStored", "GPU"]
            ]
            for number in range(1000):  # until it has subscribed
                complete(server, f"{number} {LONG}")
                if select.select([process.stdout], [], [], 0.05)[0]:
                    break
            numbers = [int(process.stdout.readline().split()[0]) for _ in range(2)]
            assert int(lines[-1].split()[0]) < numbers[0] <= numbers[1]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_events_that_others_can_read_or_that_nobody_gets_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = (ModelConfig(tmp_path, ("m",)),)
    _check_events(ServeConfig(models, kv_events="tcp://127.0.0.1:0"))
    assert caplog.messages == []
    _check_events(ServeConfig(models, kv_events="tcp://0.0.0.0:0", api_key=("sk-alice-0000001",)))
    reach, keys = caplog.messages
    assert reach == "KV events at tcp://0.0.0.0:0: every client that reaches this address can read prompts"
    assert keys.endswith("because keys share no prefixes: set --share-prefix-cache to share them")


TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def write_model(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A tiny model whose layers the fake backend only reads the description of."""
    shutil.copytree(tiny, folder)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def engine(server: Server) -> Any:
    return server.get("/v1/watch?once=true").json["models"][0]["engine"]


def test_a_model_with_states(tmp_path: Path, tiny_model: Path) -> None:
    changes = {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    }
    with serving(str(write_model(tmp_path / "states", tiny_model, **changes)), *FAKE) as server:
        server.chat(TEXT, max_tokens=4)
        other = server.post("/v1/cache/explain", {"messages": [{"role": "user", "content": TEXT[:90]}]}).json
        assert other["reason"] == "no_state"
        assert "but the nearest state of the recurrent layers is at token" in other["message"]
        again = server.chat(TEXT, max_tokens=4, cache=True).json
        # The state is at the start of the answer's header if that is closer than half a block to the end.
        assert again["cache"]["matched_tokens"] > again["usage"]["prompt_tokens"] - 18
        stats = server.wait_free()
        assert stats["windows"] is None
        assert stats["states"]["num_cached"] == stats["states"]["num_snapshots"] >= 2  # the prompt and the answer
        watched = engine(server)
        assert watched["windows"] is None
        assert watched["states"]["cached"] == stats["states"]["num_cached"]
        metrics = server.get("/metrics").body.decode()
        assert "quire:recurrent_states{" in metrics
