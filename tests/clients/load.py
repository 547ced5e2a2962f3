"""Runs NVIDIA's load generator aiperf against a real server: `python -m tests.clients.load`.

aiperf counts tokens with a tokenizer from a local folder, where the default model's is written. Run it on an otherwise
idle machine: other load affects its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.weights.hub import DEFAULT_MODEL
from tests.clients.models import write_tokenizer
from tests.clients.run import ENVIRONMENTS, TOKENIZER, install, served_name
from tests.clients.table import Client
from tests.server.rig import serving

AIPERF = Client("aiperf", "aiperf", ("aiperf==0.13.0",), "load.py")
REPORTS = ENVIRONMENTS / "reports"
PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Load:
    endpoint: str  # aiperf's name of it
    path: str
    concurrency: int
    num_requests: int


LOADS = (
    Load("chat", "/v1/chat/completions", 1, 8),
    Load("chat", "/v1/chat/completions", 4, 32),
    Load("chat", "/v1/chat/completions", 16, 96),
    Load("completions", "/v1/completions", 4, 32),
    Load("responses", "/v1/responses", 4, 32),
    Load("messages", "/v1/messages", 4, 32),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.load", description=__doc__)
    parser.add_argument("endpoints", nargs="*", help=f"some of {', '.join(sorted({load.endpoint for load in LOADS}))}")
    parser.add_argument("--requests", type=int, help="of each load, instead of its own number")
    options = parser.parse_args(arguments)
    if not install(AIPERF):
        return 1
    write_tokenizer(TOKENIZER)
    rows: list[str] = []
    num_failed = 0
    with serving(DEFAULT_MODEL) as server:
        for load in LOADS:
            if options.endpoints and load.endpoint not in options.endpoints:
                continue
            num_requests = max(load.concurrency, options.requests or load.num_requests)
            found = run(load, num_requests, server.url, served_name(server))
            num_failed += found is None or found["request_count"]["avg"] != num_requests
            rows.append(f"| `{load.path}` | {load.concurrency} | {'FAILED |' * 6 if found is None else line(found)}")
            print(rows[-1], flush=True)
    print(f"\n{PROMPT_TOKENS} prompt tokens and {ANSWER_TOKENS} answer tokens each, {os.cpu_count()} cores\n")
    print("| endpoint | at once | requests | errors | req/s | tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms |")
    print("|---" * 8 + "|")
    print("\n".join(rows))
    return 1 if num_failed else 0


def run(load: Load, num_requests: int, url: str, model: str) -> dict[str, Any] | None:
    """The report of aiperf, or None if it failed. Prints its errors."""
    seed = LOADS.index(load) + 1  # different prompts, so that the cache of an earlier load is not used
    report = REPORTS / f"{load.endpoint}-{load.concurrency}"
    command = [str(ENVIRONMENTS / "aiperf" / "bin" / "aiperf"), "profile", "--model", model, "--url", url]
    command += ["--endpoint-type", load.endpoint, "--streaming", "--tokenizer", str(TOKENIZER)]
    command += ["--concurrency", str(load.concurrency), "--request-count", str(num_requests)]
    command += ["--random-seed", str(seed)]
    command += ["--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--warmup-request-count", "2", "--workers-max", "1", "--ui", "none", "--artifact-dir", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode != 0:
        print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads((report / "profile_export_aiperf.json").read_text())
    return found


def line(found: dict[str, Any]) -> str:
    ttft, itl = found["time_to_first_token"], found["inter_token_latency"]
    cells = (
        f"{found['request_count']['avg']:.0f}",
        f"{found['request_error_rate']['avg']:.0f} %",
        f"{found['request_throughput']['avg']:.2f}",
        f"{found['output_token_throughput']['avg']:.1f}",
        f"{ttft['p50']:.0f} / {ttft['p99']:.0f}",
        f"{itl['p50']:.1f} / {itl['p99']:.1f}",
    )
    return " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
