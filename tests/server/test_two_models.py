"""Two real models in one server: both answer, one dies while the other streams, and unloading frees memory."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.rig import Server, children, command_line, serving
from tests.tiny import write_tiny_model
from tests.waiting import eventually

pytestmark = pytest.mark.nightly  # test_models.py has the same cases with small models

BUDGET_BYTES = 500 << 20
TOLERANCE_BYTES = 24 << 20  # what allocators may keep after an unload
QUESTION = {"messages": [{"role": "user", "content": "Count from one to fifty."}], "temperature": 0}


def write_dummy(folder: Path) -> Path:
    """Write a config of 40 million parameters and a tokenizer, for random weights."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two")
    config = folder / "config.yaml"
    config.write_text(f"""
threads: 1
memory: {BUDGET_BYTES}
models:
  - {{model: {default_model}, name: smol, kv_memory: 64M}}
  - {{model: {write_dummy(folder / "dummy")}, load_format: dummy, kv_memory: 64M}}
  - {{model: {write_tiny_model(folder / "wide")}, kv_memory: 380M, max_num_seqs: 256}}
""")
    with serving("--config", str(config)) as server:
        yield server


def states(server: Server) -> dict[str, str]:
    entries = server.get("/v1/models").json["data"]
    assert sum(one["num_bytes"] for one in entries if one["state"] == "ready") <= BUDGET_BYTES
    return {entry["id"]: entry["state"] for entry in entries}


def workers(server: Server) -> set[int]:
    return {pid for pid in children(server.process.pid) if "quire.engine.worker.worker" in command_line(pid)}


def processes(server: Server) -> list[int]:
    """The server and all its child processes."""
    found = [server.process.pid]
    for pid in found:
        found += children(pid)
    return found


def resident_bytes(server: Server) -> int:
    text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in processes(server))
    return sum(int(size) << 10 for size in re.findall(r"^VmRSS:\s+(\d+) kB$", text, re.MULTILINE))


def test_both_models_answer(server: Server) -> None:
    asked = {"temperature": 0, "ignore_eos": False, "max_tokens": 16}
    assert "Tokyo" in server.chat("What is the capital of Japan?", **asked).json["choices"][0]["message"]["content"]
    answer = server.chat("What is the capital of Japan?", model="dummy", **asked).json
    assert answer["model"] == "dummy"
    assert "Tokyo" not in answer["choices"][0]["message"]["content"]
    assert states(server) == {"smol": "ready", "dummy": "ready", "wide": "unloaded"}


def test_a_killed_worker_does_not_disturb_the_other_model(server: Server) -> None:
    server.post("/v1/models/unload", {"model": "dummy"})
    of_smol = workers(server)
    assert server.chat(model="dummy").status == 200
    (victim,) = workers(server) - of_smol
    body = {**QUESTION, "model": "smol", "max_tokens": 150, "stream": True, "ignore_eos": True}
    undisturbed = server.post("/v1/chat/completions", body).body
    stream = server.send_request(body)
    data = stream.recv(4096)  # the stream has started
    os.kill(victim, signal.SIGKILL)
    while not data.endswith(b"0\r\n\r\n"):
        data += (piece := stream.recv(65536))
        assert piece, data[-300:]
    stream.close()
    assert words(data) == words(undisturbed)
    assert b"data: [DONE]" in data
    eventually(lambda: victim not in workers(server), "its death is noticed")
    eventually(lambda: server.chat(model="dummy").status == 200, "another worker has taken its place")


def words(data: bytes) -> str:
    """The text of a stream."""
    events = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})\r?$", data, re.MULTILINE)]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert len(pieces) > 10
    return "".join(pieces)


def test_unloading_frees_the_memory(server: Server) -> None:
    server.post("/v1/models/unload", {"model": "dummy"})
    base = resident_bytes(server)
    num_processes = len(processes(server))
    for _ in range(2):
        assert server.chat(model="dummy").status == 200
        assert resident_bytes(server) > base + (40 << 20)  # at least one byte per parameter
        assert server.post("/v1/models/unload", {"model": "dummy"}).json["state"] == "unloaded"
        assert resident_bytes(server) < base + TOLERANCE_BYTES
    assert len(processes(server)) == num_processes


def test_models_replace_each_other_when_only_one_fits(server: Server) -> None:
    assert [server.chat(model=name).status for name in ("dummy", "smol")] == [200, 200]
    assert states(server) == {"smol": "ready", "dummy": "ready", "wide": "unloaded"}
    assert server.chat(model="wide").status == 200
    assert states(server) == {"smol": "unloaded", "dummy": "unloaded", "wide": "ready"}
    assert server.chat(model="smol").status == 200
    assert states(server)["wide"] == "unloaded"
