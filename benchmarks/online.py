"""Measures latency over HTTP on a GPU: first token, time per token and gaps between chunks, under four loads.

    PYTHONPATH=. python benchmarks/online.py --tokenizer tokenizer.json      # Qwen3-0.6B and Llama-3-8B shapes
    PYTHONPATH=. python benchmarks/online.py --models qwen3-0.6b --rounds 3 --out results
    PYTHONPATH=. python benchmarks/online.py --quick                         # a smoke run with a tiny model on a CPU

Starts a real `quire serve` with random weights in a real shape and a real tokenizer, and sends completions from
8 client processes: text in, streams of text out, no end tokens. The first burst finds a server that has just become
ready ("fresh"). Then one client, 32 clients, 256 clients, and Poisson arrivals. TTFT is from the connection to the
first chunk; a gap is the time between two chunks of a stream; TPOT is a stream's time after its first chunk per token.
The default tokenizer is the default model's, so that text is real; a machine without it needs --tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpu_workloads import FULL, LLAMA, QUICK, QWEN, write_shape

from tests.server.rig import Server, serving

TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
WORDS = TEXT.split()
NUM_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Load:
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


class Stream(NamedTuple):
    """What a client saw of one request."""

    start_s: float
    first_s: float
    last_s: float
    gaps_s: list[float]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds, except tokens per second."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    gap_p99: float
    gap_max: float


class Job(NamedTuple):
    """The share of one client process."""

    address: tuple[str, int]
    model: str
    load: Load
    numbers: list[int]
    clients: int
    rate: float


async def ask(job: Job, number: int) -> Stream:
    rng = random.Random(f"{job.load.name} {number} {time.time_ns()}")  # no prompt is sent twice
    body = {
        "model": job.model,
        "prompt": " ".join(rng.choices(WORDS, k=job.load.num_words)),
        "max_tokens": job.load.num_tokens,
        "temperature": 0.6,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    host, port = job.address
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + data)
    times_s: list[float] = []
    tail = b""
    while chunk := await reader.read(1 << 16):
        if not tail and not chunk.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(chunk.decode(errors="replace"))
        if b'"choices"' in chunk:
            times_s.append(time.perf_counter())
        tail = (tail + chunk)[-6000:]
    writer.close()
    counted = tail.rpartition(b'"completion_tokens":')[2].strip()
    num_tokens = int(counted.split(b",")[0].split(b"}")[0])
    gaps_s = [after - before for before, after in pairwise(times_s)]
    return Stream(start_s, times_s[0], times_s[-1], gaps_s, num_tokens)


async def send(job: Job) -> list[Stream]:
    if job.rate:
        rng = random.Random(job.numbers[0])
        tasks = []
        for number in job.numbers:
            tasks.append(asyncio.create_task(ask(job, number)))
            await asyncio.sleep(rng.expovariate(job.rate))
        return await asyncio.gather(*tasks)
    found: list[Stream] = []
    numbers = list(reversed(job.numbers))

    async def client() -> None:
        while numbers:
            found.append(await ask(job, numbers.pop()))

    await asyncio.gather(*(client() for _ in range(job.clients)))
    return found


def work(job: Job) -> list[Stream]:
    return asyncio.run(send(job))


def measure(server: Server, model: str, load: Load) -> Result:
    count = min(NUM_PROCESSES, load.clients or NUM_PROCESSES)
    numbers = list(range(load.num_requests))
    jobs = [
        Job(server.address, model, load, numbers[part::count], load.clients // count, load.rate / count)
        for part in range(count)
    ]
    with multiprocessing.get_context("fork").Pool(count) as pool:
        streams = [stream for part in pool.map(work, jobs, chunksize=1) for stream in part]
    wall_s = max(one.last_s for one in streams) - min(one.start_s for one in streams)
    ttft = [one.first_s - one.start_s for one in streams]
    tpot = [(one.last_s - one.first_s) / max(one.num_tokens - 1, 1) for one in streams]
    gaps = [gap for one in streams for gap in one.gaps_s]
    total = sum(one.num_tokens for one in streams)
    return Result(
        tokens_per_s=total / wall_s,
        ttft_p50=1e3 * quantile(ttft, 0.5),
        ttft_p99=1e3 * quantile(ttft, 0.99),
        tpot_p50=1e3 * quantile(tpot, 0.5),
        tpot_p99=1e3 * quantile(tpot, 0.99),
        gap_p99=1e3 * quantile(gaps, 0.99),
        gap_max=1e3 * max(gaps, default=0.0),
    )


def quantile(values: list[float], at: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else 0.0  # one chunk has no gap


def median(results: list[Result]) -> Result:
    columns = zip(*(asdict(one).values() for one in results), strict=True)
    return Result(*map(statistics.median, columns))


def missed(shape: str, load: str, result: Result) -> list[str]:
    if shape != QWEN:
        return []
    bars = BARS.get(load, {})
    values = asdict(result)
    return [
        f"{name} {values[name]:.4g} instead of {bar:g}"
        for name, bar in bars.items()
        if (values[name] < bar if name == "tokens_per_s" else values[name] > bar)
    ]


def line(name: str, one: Result, note: str = "") -> str:
    return (
        f"| {name} | {one.tokens_per_s:,.0f} | {one.ttft_p50:.1f} / {one.ttft_p99:.1f} |"
        f" {one.tpot_p50:.2f} / {one.tpot_p99:.2f} | {one.gap_p99:.1f} | {one.gap_max:.1f} | {note} |"
    )


def write_model(folder: Path, shape: str, tokenizer: Path | None, is_quick: bool) -> None:
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


def run(shape: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model. Returns the medians by load."""
    loads = QUICK_LOADS if options.quick else LOADS
    arguments = ["--load-format", "dummy", "--served-model-name", shape, *options.serve]
    if not options.quick:
        arguments += ["--max-num-seqs", "256", "--max-model-len", "4096"]
    found: dict[str, Any] = {}
    print(f"\n{shape}\n\n| load | tok/s | TTFT ms p50 / p99 | TPOT ms p50 / p99 | gap p99 | gap max | missed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with serving(str(folder), *arguments) as server:
        if not options.quick:
            fresh = measure(server, shape, FRESH)
            found[FRESH.name] = asdict(fresh)
            print(line(FRESH.name, fresh), flush=True)
            time.sleep(options.settle)
        for load in loads:
            results = [measure(server, shape, load) for _ in range(options.rounds)]
            result = median(results)
            found[load.name] = asdict(result)
            print(line(load.name, result, "; ".join(missed(shape, load.name, result))), flush=True)
        if options.log:
            print(server.log[-options.log :], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=f"{QWEN},{LLAMA}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--settle", type=float, default=10.0, help="seconds of idle time after the fresh burst")
    parser.add_argument("--serve", action="append", default=[], help="an argument for `quire serve`; repeatable")
    parser.add_argument("--log", type=int, default=0, help="print this many characters of the server's log")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for shape in options.models.split(","):
            folder = Path(name) / shape
            write_model(folder, shape, options.tokenizer, options.quick)
            found[shape] = run(shape, folder, options)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "online.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
