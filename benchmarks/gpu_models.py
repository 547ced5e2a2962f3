"""Measures several models on one GPU: time to load, memory freed by unloading, and isolation of crashes.

    PYTHONPATH=. python benchmarks/gpu_models.py           # qwen3-0.6b and llama-3-8b by shape, random weights
    PYTHONPATH=. python benchmarks/gpu_models.py --quick   # a smoke run with tiny shapes on a CPU

Starts a real `quire serve` with both, each in its own worker process. Memory is that of the whole card as nvidia-smi
reports it, or without a GPU the resident memory of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpu_workloads as workloads

from tests.server.rig import Server, children, command_line, serving
from tests.tiny import write_tiny_model

SMALL, LARGE = workloads.QWEN, workloads.LLAMA
NUM_CYCLES = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    scale = workloads.QUICK if options.quick else workloads.FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in (SMALL, LARGE):
            write_model(folder / shape, shape, scale)
        plenty, tight = ("400M", "32M") if options.quick else ("100G", "24G")
        with serve(folder, plenty, is_quick=options.quick) as server:
            measure_cycles(server)
            kill_one(server)
        with serve(folder, tight, is_quick=options.quick) as server:
            alternate(server)


def write_model(folder: Path, shape: str, scale: workloads.Scale) -> None:
    """Write a model with a byte tokenizer, and a vocabulary that holds its tokens."""
    write_tiny_model(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    workloads.write_shape(shape, scale, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = max(vocab_size, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def serve(folder: Path, budget: str, *, is_quick: bool) -> Iterator[Server]:
    """Start a server with neither model loaded: its first model is a third one, so small that it does not count."""
    first = write_tiny_model(folder / "first")
    kv = "16M" if is_quick else "4G"
    device = "backend: torch\ndevice: cpu\n" if is_quick else "backend: torch\n"
    models = [f"  - {{model: {folder / shape}, load_format: dummy, kv_memory: {kv}}}\n" for shape in (SMALL, LARGE)]
    own = f"  - {{model: {first}, name: first, kv_memory: 16M}}\n"
    config = folder / "config.yaml"
    config.write_text(f"{device}memory: {budget}\nmax_model_len: 512\nmodels:\n{own}{''.join(models)}")
    with serving("--config", str(config)) as server:
        print(f"budget {budget}: {server.stdout[-1].strip() if server.stdout else ''}")
        yield server


def used_bytes(server: Server) -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout) << 20
    except (OSError, subprocess.CalledProcessError):
        pids = [server.process.pid]
        for pid in pids:
            pids += children(pid)
        text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
        return sum(int(size) << 10 for size in re.findall(r"^VmRSS:\s+(\d+) kB$", text, re.MULTILINE))


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def ask(server: Server, model: str, prompt: object = "Hello") -> float:
    """Return how long an answer takes."""
    start_s = time.perf_counter()
    answer = server.post(
        "/v1/completions",
        {"model": model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0},
        timeout_s=300,
    )
    if answer.status != 200:
        raise SystemExit(f"{model}: {answer.status} {answer.body[:500]!r}\n{server.log[-3000:]}")
    return time.perf_counter() - start_s


def states(server: Server) -> str:
    entries = server.get("/v1/models").json["data"]
    return ", ".join(f"{one['id']} {one['state']} ({size(one['num_bytes'])})" for one in entries)


def measure_cycles(server: Server) -> None:
    ask(server, "first")
    base = used_bytes(server)
    print(f"\nwith `first` alone: {size(base)}\n\n| cycle | model | load and answer | held | answer | after unload |")
    print("|---|---|---|---|---|---|")
    for cycle in range(NUM_CYCLES):
        for model in (SMALL, LARGE):
            loaded_s = ask(server, model)
            held, answer_s = used_bytes(server) - base, ask(server, model)
            server.post("/v1/models/unload", {"model": model}, timeout_s=120)
            left = used_bytes(server) - base
            row = f"{loaded_s:.1f} s | {size(held)} | {answer_s * 1000:.0f} ms | {left / 1e6:+.0f} MB"
            print(f"| {cycle + 1} | {model} | {row} |", flush=True)


def workers(server: Server) -> set[int]:
    return {pid for pid in children(server.process.pid) if "quire.engine.worker.worker" in command_line(pid)}


def kill_one(server: Server) -> None:
    """kill -9 the small model's worker while the large one streams, and check that the stream is unaffected."""
    ask(server, LARGE)
    before = workers(server)
    ask(server, SMALL)
    (victim,) = workers(server) - before
    body = {"model": LARGE, "prompt": "Count.", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}
    ask(server, LARGE, prompt=body["prompt"])  # cached from the second time on
    alone = texts(server.post("/v1/completions", body, timeout_s=120).body)
    stream = server.send_request(body, "/v1/completions")
    data = stream.recv(4096)
    os.kill(victim, signal.SIGKILL)
    while not data.endswith(b"0\r\n\r\n"):
        data += (piece := stream.recv(65536))
        if not piece:
            raise SystemExit(f"the stream broke: {data[-300:]!r}")
    back_s = ask(server, SMALL)
    verdict = "identical" if texts(data) == alone else "DIFFERENT"
    print(f"\nkill -9 of {SMALL} while {LARGE} streams: its stream is {verdict}; {SMALL} answers after {back_s:.1f} s")


def texts(data: bytes) -> str:
    events = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})\r?$", data, re.MULTILINE)]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def alternate(server: Server) -> None:
    """Alternate between models with a budget for one: each request unloads the other model."""
    print("\n| model | answer | then in memory |\n|---|---|---|")
    for model in (SMALL, LARGE, SMALL, LARGE):
        took_s = ask(server, model)
        print(f"| {model} | {took_s:.1f} s | {states(server)}; {size(used_bytes(server))} |", flush=True)


if __name__ == "__main__":
    main()
