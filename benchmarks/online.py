"""Measures latency over HTTP on a GPU: first token, time per token and gaps between chunks, under four loads.

    PYTHONPATH=. python benchmarks/online.py --tokenizer tokenizer.json      # Qwen3-0.6B and Llama-3-8B shapes
    PYTHONPATH=. python benchmarks/online.py --models qwen3-0.6b --rounds 3
    PYTHONPATH=. python benchmarks/online.py --quick                         # a smoke run with a tiny model on a CPU

Starts a real `quire serve` with random weights in a real shape and a real tokenizer, and sends completions from
8 client processes: text in, streams of text out, no end tokens. The first burst finds a server that has just become
ready ("fresh"). Then one client, 32 clients, 256 clients, and Poisson arrivals. TTFT is from the connection to the
first chunk; a gap is the time between two chunks of a stream; TPOT is a stream's time after its first chunk per token.
The default tokenizer is the default model's, so that text is real; a machine without it needs --tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import harness
from gpu_workloads import FULL, LLAMA, QUICK, QWEN, write_shape
from harness import percentile, run_load, say

from tests.server.rig import Server, serving

TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
WORDS = TEXT.split()
NUM_PROCESSES = 8


class Load(NamedTuple):
    name: str
    num_requests: int
    num_words: int
    num_tokens: int
    clients: int = 0  # requests at a time; 0: `rate` is used
    rate: float = 0.0  # requests per second, Poisson


LOADS = (
    Load("1 client", 6, 100, 256, clients=1),
    Load("32 clients", 128, 256, 256, clients=32),
    Load("256 clients", 1024, 256, 256, clients=256),
    Load("20 requests/s", 400, 512, 128, rate=20.0),
)
FRESH = Load("fresh", 64, 200, 64, clients=64)
QUICK_LOADS = (Load("1 client", 2, 8, 8, clients=1), Load("4 clients", 8, 8, 8, clients=4))
# By load, for the Qwen3-0.6B shape: at least tokens/s; at most TTFT p50, p99; TPOT p50, p99; gap p99, in ms
BARS: dict[str, dict[str, float]] = {
    "1 client": {"tokens_per_s": 900, "ttft_p50": 12},
    "32 clients": {"tokens_per_s": 14_000, "ttft_p50": 70, "ttft_p99": 110, "gap_p99": 5},
    "256 clients": {"tokens_per_s": 25_000, "ttft_p50": 250, "ttft_p99": 700, "gap_p99": 25},
    "20 requests/s": {"ttft_p50": 15, "ttft_p99": 40, "tpot_p50": 1.3, "tpot_p99": 2.6, "gap_p99": 7},
}

Result = dict[str, float]  # tokens_per_s, and milliseconds


def measure(server: Server, model: str, load: Load) -> Result:
    rng = random.Random(time.time_ns())  # no prompt is sent twice
    bodies = [
        {
            "model": model,
            "prompt": " ".join(rng.choices(WORDS, k=load.num_words)),
            "max_tokens": load.num_tokens,
            "temperature": 0.6,
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(load.num_requests)
    ]
    found = run_load(server.url, bodies, clients=load.clients, rate=load.rate, num_processes=NUM_PROCESSES)
    spreads = {
        "ttft": [one.ttft_s for one in found.seen],
        "tpot": [(one.times_s[-1] - one.times_s[0]) / max(one.num_tokens - 1, 1) for one in found.seen],
        "gap": [gap for one in found.seen for gap in one.gaps_s] or [0.0],  # one chunk has no gap
    }
    result = {"tokens_per_s": found.tokens_per_s, "gap_max": 1e3 * max(spreads["gap"])}
    for name, values in spreads.items():
        result |= {f"{name}_p50": 1e3 * percentile(values, 0.5), f"{name}_p99": 1e3 * percentile(values, 0.99)}
    return result


def missed(shape: str, load: str, result: Result) -> list[str]:
    bars = BARS.get(load, {}) if shape == QWEN else {}
    return [
        f"{name} {result[name]:.4g} instead of {bar:g}"
        for name, bar in bars.items()
        if (result[name] < bar if name == "tokens_per_s" else result[name] > bar)
    ]


def line(name: str, one: Result, note: str = "") -> str:
    return (
        f"| {name} | {one['tokens_per_s']:,.0f} | {one['ttft_p50']:.1f} / {one['ttft_p99']:.1f} |"
        f" {one['tpot_p50']:.2f} / {one['tpot_p99']:.2f} | {one['gap_p99']:.1f} | {one['gap_max']:.1f} | {note} |"
    )


def write_model(folder: Path, shape: str, tokenizer: Path | None, *, is_quick: bool) -> None:
    """Write a folder with the shape's config.json and a real tokenizer, whose vocabulary the model gets."""
    folder.mkdir(parents=True)
    target = folder / "tokenizer.json"
    if tokenizer is None:
        from tests.clients.models import default_tokenizer

        target.write_text(default_tokenizer())
    else:
        shutil.copy(tokenizer, target)
    write_shape(shape, QUICK if is_quick else FULL, folder)
    config = json.loads((folder / "config.json").read_text())
    vocab = json.loads(target.read_text())
    config["vocab_size"] = max([*vocab["model"]["vocab"].values(), *(one["id"] for one in vocab["added_tokens"])]) + 1
    config["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))


def run(shape: str, folder: Path, args: argparse.Namespace) -> None:
    """Measure one model, and print the medians by load."""
    settings = ["--load-format", "dummy", "--served-model-name", shape, *args.serve]
    settings += [] if args.quick else ["--max-num-seqs", "256", "--max-model-len", "4096"]
    print(f"\n{shape}\n\n| load | tok/s | TTFT ms p50 / p99 | TPOT ms p50 / p99 | gap p99 | gap max | missed |")
    say("|---|---|---|---|---|---|---|")
    with serving(str(folder), *settings) as server:
        for load in QUICK_LOADS if args.quick else (FRESH, *LOADS):
            num_rounds = 1 if load is FRESH else args.rounds
            rounds = [measure(server, shape, load) for _ in range(num_rounds)]
            result = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            say(line(load.name, result, "; ".join(missed(shape, load.name, result))))
            if load is FRESH:
                time.sleep(args.settle)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--models", default=f"{QWEN},{LLAMA}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--settle", type=float, default=10.0, help="seconds of idle time after the fresh burst")
    parser.add_argument("--serve", action="append", default=[], help="an argument for `quire serve`; repeatable")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for shape in args.models.split(","):
            folder = Path(name) / shape
            write_model(folder, shape, args.tokenizer, is_quick=args.quick)
            run(shape, folder, args)


if __name__ == "__main__":
    main()
