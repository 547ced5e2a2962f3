"""Several models in one server, over HTTP with the fake backend: loading, waiting and unloading."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.cli.options import options_named
from quire.cli.serve import list_models
from quire.engine.composition import EngineConfig, make_runner
from quire.errors import InvalidRequest
from quire.server.config import ModelConfig, ServeConfig
from quire.server.errors import ApiError
from quire.server.limits import Key, QueueTicket
from quire.server.models import Model, Models, SharedResources
from quire.weights.hub import size_of
from quire.weights.opening import open_checkpoint
from tests.cli.runs import quire
from tests.server.rig import FAKE, Server, children, close_sockets, command_line, serving
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S, eventually, paused
from tests.weights.mlx_folder import write_mlx_model

SLOW = ("--device", "20ms")  # per step: LONG takes at least a minute
LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
OPTIONS: dict[str, Any] = {
    "model": [],
    "models_dir": None,
    "idle_unload": None,
    "served_model_name": None,
    "default_max_tokens": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small models, a, b and c; each takes 7.0 MB with 400 blocks."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        write_tiny_model(folder / name, seed=seed)
    return folder


def configure(path: Path) -> ServeConfig:
    """Return the settings of `quire serve --config`. No model is looked up."""
    options = {**OPTIONS, "config": path}
    with options_named():
        return ServeConfig(list_models(options, EngineConfig()))


def model(server: Server, name: str) -> Any:
    return server.get(f"/v1/models/{name}").json


def states(server: Server) -> str:
    return " ".join(entry["state"] for entry in server.get("/v1/models").json["data"] if not entry["alias_of"])


def wait_state(server: Server, wanted: str) -> None:
    eventually(lambda: states(server) == wanted, wanted)


def workers(server: Server) -> list[int]:
    return [pid for pid in children(server.process.pid) if "quire.engine.worker.worker" in command_line(pid)]


def load_anew(server: Server, name: str) -> int:
    """Unload and load a model. Returns the process of its new worker."""
    assert server.post("/v1/models/unload", {"model": name, "force": True}).status == 200
    before = {*workers(server)}
    assert server.post("/v1/models/load", {"model": name}).status == 200
    (pid,) = {*workers(server)} - before
    return pid


def rest_of(stream: socket.socket) -> bytes:
    """Read the rest of a stream."""
    data = b""
    while b"[DONE]" not in data:
        data += (piece := stream.recv(65536))
        assert piece, data[-200:]
    return data


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[Server]:
    """A server whose memory fits all three models."""
    with serving("--models-dir", str(folder), *FAKE) as server:
        yield server


@pytest.fixture(scope="module")
def tight(folder: Path) -> Iterator[Server]:
    """A server whose memory fits two of three models."""
    with serving(*(str(folder / name) for name in "abc"), *FAKE, "--memory", "15M", "--device", "10ms") as server:
        yield server


def test_the_first_is_loaded_at_the_start_and_others_on_first_use(roomy: Server) -> None:
    assert states(roomy) == "ready unloaded unloaded"
    assert "others     b, c: loaded on first use" in roomy.log
    assert re.search(r"budget     [\d.,]+ GiB for the weights and KV of all models \(from free memory", roomy.log)
    assert len(workers(roomy)) == 1
    answers = [roomy.chat(**({"model": name} if name else {})).json for name in ("", "b", "a")]
    assert [answer["model"] for answer in answers] == ["a", "b", "a"]
    assert answers[0]["system_fingerprint"] == answers[2]["system_fingerprint"] != answers[1]["system_fingerprint"]
    assert states(roomy) == "ready ready unloaded"
    assert len(workers(roomy)) == 2
    roomy.wait_for(r"1 request\(s\) are waiting for b, which is unloaded")
    roomy.wait_for(r"quire.request: .* model=b ")


def test_every_protocol_selects_by_model_name(roomy: Server) -> None:
    for name in "ab":
        body = {"model": name, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
        assert roomy.post("/v1/messages", body).json["model"] == name
        assert roomy.post("/v1/completions", {"model": name, "prompt": "Hi", "echo": True}).json["model"] == name
        assert roomy.post("/v1/messages/count_tokens", body).status == 200
        assert roomy.post("/tokenize", {"model": name, "prompt": "Hi"}).json["count"] > 0
        assert roomy.post("/detokenize", {"model": name, "tokens": [5]}).status == 200
        assert roomy.get(f"/v1/cache/stats?model={name}").json["model"] == name
        assert roomy.post("/v1/cache/explain", {"model": name, "prompt": "Hi"}).status == 200


def test_an_unknown_name_is_refused_with_the_known_ones(roomy: Server) -> None:
    for answer in (roomy.chat(model="z"), roomy.get("/v1/models/z"), roomy.post("/v1/models/load", {"model": "z"})):
        assert answer.status == 404
        assert "'z' is not served; this server has a, b, c" in answer.json["error"]["message"]


def test_cache_endpoints_load_no_model(roomy: Server) -> None:
    roomy.post("/v1/models/unload", {"model": "c"})
    answer = roomy.post("/v1/cache/explain", {"prompt": "Hi", "model": "c"})
    assert (answer.status, answer.json["error"]["message"][:15]) == (503, "c is not loaded")
    assert roomy.get("/v1/cache/stats?model=c").status == 503
    assert model(roomy, "c")["state"] == "unloaded"


def test_load_unload_and_pin_by_an_admin(roomy: Server) -> None:
    assert roomy.post("/v1/models/load", {"model": "c"}).json == {
        "model": "c",
        "state": "ready",
        "num_bytes": model(roomy, "c")["num_bytes"],
        "is_pinned": False,
        "max_model_len": 4096,
        "full_model_len": 4096,
    }
    assert roomy.post("/v1/models/pin", {"model": "c"}).json["is_pinned"] is True
    answer = roomy.post("/v1/models/unload", {"model": "c"})
    assert (answer.status, answer.json["error"]["message"]) == (400, "model = 'c' is pinned: unpin it first")
    assert roomy.post("/v1/models/unpin", {"model": "c"}).json["is_pinned"] is False
    num_before = len(workers(roomy))
    assert roomy.post("/v1/models/unload", {"model": "c"}).json["state"] == "unloaded"
    assert len(workers(roomy)) == num_before - 1
    assert roomy.post("/v1/models/load", {"model": "c", "wait": False}).json["state"] == "loading"
    wait_state(roomy, "ready ready ready")


def test_the_default_may_be_unloaded_and_is_loaded_again(roomy: Server) -> None:
    assert roomy.post("/v1/models/unload", {"model": "a"}).json["state"] == "unloaded"
    assert roomy.get("/health").json["status"] == "ok"
    assert roomy.get("/ready").status == 200
    assert roomy.get("/version").json["model"] == "a"
    assert roomy.chat().json["model"] == "a"


def test_metrics_have_a_series_for_each_model(roomy: Server) -> None:
    text = roomy.get("/metrics").body.decode()
    for name in "abc":
        assert f'quire:engine_moving{{engine="0",model_name="{name}"}}' in text
        assert f'quire:model_state{{engine="0",model_name="{name}",state="ready"}}' in text
    assert len(re.findall("^# TYPE quire:engine_moving ", text, re.MULTILINE)) == 1
    loads = re.findall(r'quire:model_loads_total{engine="0",model_name="(\w)"} (\d+)', text)
    assert all(int(count) >= 1 for _, count in loads)
    assert [name for name, _ in loads] == ["a", "b", "c"]


def test_a_crash_disturbs_only_its_own_model(roomy: Server) -> None:
    of_a, of_b = load_anew(roomy, "a"), load_anew(roomy, "b")
    stream = roomy.begin({**LONG, "model": "a", "max_tokens": 2000})
    with paused(of_a):  # its answer is being generated when b dies
        os.kill(of_b, signal.SIGKILL)
        eventually(lambda: of_b not in workers(roomy), "the death of b's worker is noticed")
    assert b'"finish_reason":"length"' in rest_of(stream)
    eventually(lambda: roomy.chat(model="b").status == 200, "b is back")


def test_pinned_models_stay_and_a_model_that_cannot_fit_is_refused(tight: Server) -> None:
    for name in "ab":
        tight.chat(model=name)
        tight.post("/v1/models/pin", {"model": name})
    answer = tight.chat(model="c")
    assert answer.status == 503
    assert re.fullmatch(
        r"c needs 6\.\d MiB; the memory of all models is 15\.0 MiB, of which pinned models hold 13\.\d MiB",
        answer.json["error"]["message"],
    )
    assert answer.headers["x-should-retry"] == "false"
    for name in "ab":
        tight.post("/v1/models/unpin", {"model": name})
    assert tight.chat(model="c").status == 200


def test_waiting_for_memory_times_out(folder: Path) -> None:
    """The queue timeout is short, and a busy machine may exceed it: requests that must succeed are retried."""
    options = ("--memory", "15M", *SLOW, "--queue-timeout", "3")
    with serving(*(str(folder / name) for name in "abc"), *FAKE, *options) as server:
        assert server.post("/v1/models/load", {"model": "b"}).status == 200
        for name in "ab":
            eventually(partial(server.begins, {**LONG, "model": name}), f"{name} is busy")
        answer = server.chat(model="c")
        assert (answer.status, answer.json["error"]["code"]) == (429, "server_overloaded")
        assert "c is loading: the request waited 3 s, which is the limit" in answer.json["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        wait_state(server, "ready ready unloaded")  # no model is unloaded: the request no longer waits
        eventually(lambda: server.chat(model="a").status == 200, "a serves")
        assert [server.stats_of(name)["num_running"] for name in "ab"] == [
            1,
            1,
        ]  # those requests continue
        close_sockets()


def test_a_forced_unload_cuts_running_requests(tight: Server) -> None:
    load_anew(tight, "a")
    stream = tight.begin({**LONG, "model": "a"})
    assert tight.post("/v1/models/unload", {"model": "a", "force": True}).json["state"] == "unloaded"
    data = b""
    while piece := stream.recv(65536):
        data += piece
        if data.endswith(b"0\r\n\r\n"):
            break
    assert b"a is being unloaded" in data


def test_settings_per_model_in_a_file(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"""
backend: fake
num-blocks: 400
models:
  - {{model: {folder / "a"}, name: first, aliases: [one, uno], max_model_len: 512}}
  - {{model: {folder / "b"}, num-blocks: 20, priority: low, pinned: true, preload: true}}
  - {{model: {folder / "c"}, idle_unload: 0.3, kv_memory: 1M}}
""")
    with serving("--config", str(config)) as server:
        wait_state(server, "ready ready unloaded")
        names = {entry["id"]: entry for entry in server.get("/v1/models").json["data"]}
        assert list(names) == ["first", "one", "uno", "b", "c"]
        server.wait_for(f"  page: {server.url}/    API: ")  # the last line
        said = "  others     b: loaded now, one after the other\n             c: loaded on first use\n"
        assert said in "".join(server.stdout)
        assert (names["uno"]["root"], names["uno"]["alias_of"], names["uno"]["max_model_len"]) == ("a", "first", 512)
        assert names["b"]["is_pinned"] is True
        assert names["c"]["num_bytes"] == size_of(folder / "c")  # its weights only
        server.wait_for("b has a context of 608 tokens instead of 4,096: its KV cache is too small for more")
        loaded = quire("load", "b", "--server", server.url).stdout
        context = "608 tokens of context instead of 4,096: its KV cache is too small for more"
        assert loaded == f"b is ready, pinned, with {context}\n"
        assert re.search(r"c +unloaded +weights [\d.]+ [KM]i?B ", quire("ps", "--server", server.url).stdout)
        answer = server.chat(model="uno").json
        assert (answer["model"], answer["service_tier"]) == ("first", "default")
        assert server.chat(model="b").json["service_tier"] == "flex"
        assert server.chat(model="b", priority="high").json["service_tier"] == "priority"
        assert server.get("/v1/cache/stats?model=b").json["num_blocks"] == 19
        assert server.chat(model="c").status == 200
        wait_state(server, "ready ready unloaded")  # idle for 0.3 s


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[{name: x}]", "models[0].model is missing"),
        ("[{model: ''}]", "models[0].model = '' is no name"),
        ("[{model: A, aliases: ['']}]", "models[0].name or aliases = ('A', '') has an entry that is not a name"),
        ("[{model: A, num_block: 3}]", "models[0].num_block: there is no such field"),
        ("[{model: A}, {model: B, num_blocks: many}]", "models[1].num_blocks = 'many' is not a whole number"),
        ("[{model: A, kv_memory: lots}]", "models[0].kv_memory = 'lots' is not a size"),
        ("[{model: A, pinned: 3}]", "models[0].pinned = 3 is not yes or no"),
        ("[{model: A, priority: soon}]", "models[0].priority = 'soon' is not one of high, normal, low"),
        ("[{model: A, idle_unload: -1}]", "models[0].idle_unload = -1 is not a number of seconds"),
        ("[{model: A, tool_format: xml}]", "models[0].tool_format = 'xml' is not one of "),
        ("[{model: A, max_model_len: 1}]", "models[0].max_model_len = 1 is not a whole number of at least 2"),
        ("[{model: A, aliases: {x: y}}]", "models[0].aliases = {'x': 'y'} is not a list of names"),
        ("[{model: A, dtype: 16}]", "models[0].dtype = 16 is not text"),
        ("[{model: A, quantize: 3}]", "models[0].quantize = 3 is not one of 4, 8, int4, fp8"),
        ("[{model: A, kv_cache_dtype: fp4}]", "models[0].kv_cache_dtype = 'fp4' is not one of auto, fp8"),
        ("[{model: A, kv_cache_dtype: fp8, backend: mlx}]", "models[0].kv_cache_dtype = 'fp8': only the torch backend"),
        ("[{model: A}, {model: B, name: A}]", "the name 'A' is used by A and B"),
        ("5", "models = 5 is not a list"),
        ("[7]", "models[0].model = 7 is neither a name nor settings of a model"),
    ],
)
def test_a_bad_entry_is_named_by_its_field(entries: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"models: {entries}")
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        configure(config)


def test_a_model_that_cannot_be_loaded_does_not_disturb_others(folder: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "secretfolder")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"nothing")
    keys = ("--api-key", "sk-plain-key", "--admin-api-key", "sk-admin-key")
    with serving(str(folder / "a"), str(broken), *FAKE, *keys, key="sk-plain-key") as server:
        answer = server.chat(model="secretfolder")
        assert answer.status == 503
        assert answer.json["error"]["message"] == (
            "secretfolder could not be loaded (ModelFileError); see the server log"
        )
        assert "retry-after" not in answer.headers  # a retry does not repair a file
        assert answer.headers["x-should-retry"] == "false"
        admin = {"authorization": "Bearer sk-admin-key"}
        told = server.post("/v1/models/load", {"model": "secretfolder"}, headers=admin)
        why = told.json["error"]["message"].removeprefix("secretfolder could not be loaded: ")
        assert why.startswith("secretfolder/model.safetensors: ")
        assert str(tmp_path) not in why
        assert (states(server), server.get("/health").status) == ("ready failed", 200)
        assert server.chat().status == 200
        weights.write_bytes(whole)
        assert server.chat(model="secretfolder").status == 200


def test_a_signal_drains_all_models(folder: Path) -> None:
    with serving(*(str(folder / name) for name in "ab"), *FAKE, "--device", "2ms") as server:
        assert server.chat(model="b").status == 200
        streams = [server.begin({**LONG, "model": name, "max_tokens": 100}) for name in "ab"]
        with paused(*workers(server)):  # both requests are running when the signal arrives
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(r"draining: 2 request\(s\)")
        for stream in streams:
            rest_of(stream)
        assert server.process.wait(HANG_S) == 0


# Without a server


def test_a_request_is_refused_before_it_is_read_only_if_every_queue_is_full(folder: Path) -> None:
    shared = SharedResources()
    models = Models([ModelConfig(folder / name, (name,)) for name in "ab"], shared)
    key = Key("plain")
    for model in models:
        models.check_open(key)
        for tier, queue in model.queues.items():
            QueueTicket(queue, tier, key.name, shared.max_queue)
    with pytest.raises(ApiError, match="requests are already waiting") as refused:
        models.check_open(key)
    assert refused.value.reason == "queue_full"
    models.is_draining = True
    with pytest.raises(ApiError, match="shutting down"):
        models.check_open(key)
    nothing: Any = None  # is read neither
    with pytest.raises(ApiError, match="shutting down"):
        models.enter(nothing, nothing)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_load_holds_a_drain_only_for_a_request_that_is_not_answered(
    is_asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        models = Models([ModelConfig(folder / "a", ("a",))], SharedResources())

        async def load(_kv_bytes: int | None) -> int:
            await asyncio.sleep(HANG_S)
            raise AssertionError("the load is cancelled before")

        monkeypatch.setattr(models.default, "load", load)
        loading = models.begin(models.load(models.default))
        waiting = asyncio.ensure_future(models.hold(models.default)) if is_asked else None
        await asyncio.sleep(0.01)
        assert models.num_open == is_asked  # a server without requests ends at once, whatever it loads
        assert await models.drain(0.01) is not is_asked
        models.cut()
        assert models.num_open == is_asked  # until the refusal can be sent
        if waiting is not None:
            with pytest.raises(ApiError, match="shutting down"):
                await waiting
        assert models.num_open == 0
        await models.close()
        await asyncio.wait({loading})

    asyncio.run(run())


# Models that only the mlx backend runs


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.kept("native")
def test_a_server_on_another_backend_fails_at_start_with_the_reason(backend: str, tmp_path: Path) -> None:
    path = write_mlx_model(tmp_path / "tiny-4bit")
    outcome = quire("serve", "--backend", backend, "--model", str(path), "--port", "0")
    assert outcome.returncode == 2
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith(f"quire: {path}/config.json: quantization (bits 4): quantised safetensors are not supported")
    assert last.endswith("The mlx backend may run it: --backend mlx")


def test_a_packed_model_is_described_and_served(tmp_path: Path) -> None:
    """The fake backend stands for mlx: it reads the spec and no weights."""
    path = write_mlx_model(tmp_path / "tiny-4bit")
    with serving("--model", str(path), *FAKE) as server:
        shown = server.post("/api/show", {"model": "tiny-4bit"}).json
        assert shown["details"]["quantization_level"] == "4 bits, groups of 32"
        assert shown["details"]["parameter_size"] == ""
        assert "general.parameter_count" not in shown["model_info"]
        assert server.chat().json["usage"]["completion_tokens"] == 8


def test_the_kv_cache_of_a_packed_model_is_estimated_from_its_config(tmp_path: Path) -> None:
    path = write_mlx_model(tmp_path / "tiny-4bit")
    config = ModelConfig(path, ("tiny",), engine=EngineConfig(backend="mlx", max_model_len=64))
    needs = asyncio.run(Model(config, SharedResources()).measure())
    token_bytes = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, head size, 16 bits
    assert needs.context_bytes == 3 * 32 * token_bytes  # 2 blocks and the null block


def test_the_kv_cache_in_fp8_is_estimated(tiny_model: Path) -> None:
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        engine = EngineConfig(backend="torch", device="cpu", max_model_len=64, kv_cache_dtype=kv_cache_dtype)
        config = ModelConfig(tiny_model, ("tiny",), engine=engine)
        found.append(asyncio.run(Model(config, SharedResources()).measure()).context_bytes)
    head_size = open_checkpoint(tiny_model).spec.attention.head_size
    assert found[0] * (head_size + 2) == found[1] * 4 * head_size  # fp32 on a CPU; a byte per number, two per scale


def test_quantisation_at_load_is_named_by_bits_or_by_format(tiny_model: Path) -> None:
    found = {}
    for name in (4, "4", "int4", 8, "fp8"):
        engine = EngineConfig(backend="torch", device="cpu", quantize=name)
        assert engine.backend_options().quantize == engine.quantize_bits
        config = ModelConfig(tiny_model, ("tiny",), engine=engine)
        found[name] = asyncio.run(Model(config, SharedResources()).measure()).weight_bytes
    assert found[4] == found["4"] == found["int4"] < found[8] == found["fp8"]


@pytest.mark.parametrize(
    ("backend", "name", "message"),
    [
        ("native", "fp8", "quantize = fp8: the native backend cannot quantise weights at load; mlx and torch can"),
        ("mlx", "fp8", "quantize = fp8: the mlx backend quantises to integers of 4 or 8 bits"),
    ],
)
def test_backends_refuse_quantisation_that_they_do_not_have(
    tiny_model: Path, backend: str, name: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_runner(open_checkpoint(tiny_model), EngineConfig(backend=backend, quantize=name))
