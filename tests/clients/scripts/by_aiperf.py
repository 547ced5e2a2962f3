"""NVIDIA's aiperf: a streaming load on each endpoint. It counts tokens with the default model's tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import checks

ENDPOINTS = ("chat", "completions", "responses", "messages")  # aiperf's names
NUM_REQUESTS = 32
PROMPT_TOKENS, ANSWER_TOKENS = 128, 32


def load(endpoint: str) -> str:
    report = checks.FOLDER / endpoint
    options = {
        "model": checks.MODEL,
        "url": checks.URL,
        "endpoint-type": endpoint,
        "tokenizer": os.environ["QUIRE_TOKENIZER"],
        "concurrency": 4,
        "request-count": NUM_REQUESTS,
        "random-seed": ENDPOINTS.index(endpoint) + 1,  # other prompts, which are not in the cache
        "isl": PROMPT_TOKENS,
        "osl": ANSWER_TOKENS,
        "extra-inputs": "ignore_eos:true",
        "warmup-request-count": 2,
        "workers-max": 1,
        "ui": "none",
        "artifact-dir": report,
    }
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--streaming"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    checks.expect(done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-600:]))
    found = json.loads((report / "profile_export_aiperf.json").read_text())
    checks.expect(found["request_count"]["avg"] == NUM_REQUESTS and not found["request_error_rate"]["avg"], found)
    ttft, itl = found["time_to_first_token"], found["inter_token_latency"]
    rates = f"{found['request_throughput']['avg']:.2f} req/s, {found['output_token_throughput']['avg']:.1f} tok/s"
    return f"{rates}, TTFT {ttft['p50']:.0f} / {ttft['p99']:.0f} ms, ITL {itl['p50']:.1f} / {itl['p99']:.1f} ms"


def chat() -> object:
    return load("chat")


def completions() -> object:
    return load("completions")


def responses() -> object:
    return load("responses")


def messages() -> object:
    return load("messages")
