"""Measures the cost of HTTP: against the bare engine, and the CPU time of the server process without a model.

    python benchmarks/serve.py                      1, 8 and 32 clients on the default model, three rounds each
    python benchmarks/serve.py --only cpu           256 streams on the fake backend
    python benchmarks/serve.py --only cpu --endpoints completions,messages,ollama
    python benchmarks/serve.py --quick              a smoke run

`overhead`: each client streams one answer after another. The bare engine is `LLM` in this process: no worker, no HTTP,
the same batching. Rounds alternate, so that noise affects both. Prints bare time / HTTP time, as measured, and without
the load client's own CPU time: the client shares these cores here, which a real client would not. The claim
(docs/performance.md): at 8 clients HTTP costs at most 10 %.

`cpu`: `quire serve` runs on the fake backend with a real tokenizer: each step gives every stream one random token. Only
the server process is counted (/proc/PID/stat), not the worker and not the clients. The time of a step is chosen such
that the server is mostly idle: otherwise several tokens share a write, which lowers the time per token; "reads/token"
shows whether that happened.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import harness
from harness import run_load, say

from quire.cli.http_stream import HttpStream
from quire.cli.server_client import ServerProcess, serving
from quire.engine.generation import Generation, GenerationParams
from quire.engine.llm import LLM
from quire.errors import QuireError
from quire.weights.hub import resolve

PROMPT_TOKENS, ANSWER_TOKENS = 100, 64
KV_BYTES = 1 << 30
WARM_UP_S = 1.0
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]
PARTS = ("overhead", "cpu")


# Against the bare engine


class Round(NamedTuple):
    wall_s: float
    client_cpu_s: float = 0.0


class Work(NamedTuple):
    clients: int
    requests: int  # of each client
    tokens: int

    def prompts(self, llm: LLM, seed: int) -> list[list[int]]:
        random, vocab_size = Random(seed), llm.engine.capacity.vocab_size
        middle = range(vocab_size // 4, vocab_size // 2)
        return [random.choices(middle, k=PROMPT_TOKENS) for _ in range(self.clients * self.requests)]


def over_http(url: str, work: Work, prompts: list[list[int]]) -> Round:
    settings = {"max_tokens": work.tokens, "temperature": 0, "ignore_eos": True}
    found = run_load(url, [{"prompt": prompt, **settings} for prompt in prompts], clients=work.clients)
    return Round(found.wall_s, found.client_cpu_s)


def bare(llm: LLM, work: Work, prompts: list[list[int]]) -> Round:
    """Run at most so many requests at a time as over HTTP."""
    params = GenerationParams(temperature=0, max_tokens=work.tokens, ignore_eos=True)
    waiting = [llm.text.request(prompt, params) for prompt in prompts]
    answers: dict[int, Generation] = {}
    begin_s = time.perf_counter()
    while waiting or answers:
        while waiting and len(answers) < work.clients:
            request, request_id = waiting.pop(), llm.next_id()
            llm.engine.add(request_id, request)
            answers[request_id] = Generation(request, llm.text.tokenizer)
        for output in llm.engine.step():
            if answers[output.request_id].push(0, output).finish_reason is not None:
                del answers[output.request_id]
    return Round(time.perf_counter() - begin_s)


def measure_overhead(args: argparse.Namespace) -> None:
    sizes = (
        [Work(1, 1, 8), Work(2, 1, 8)]
        if args.quick
        else [Work(*one, ANSWER_TOKENS) for one in ((1, 4), (8, 2), (32, 1))]
    )
    rounds = 1 if args.quick else args.rounds
    print(f"{PROMPT_TOKENS} tokens in, {sizes[0].tokens} out, streamed; {args.threads} thread(s), median of {rounds}")
    print("| clients | bare tok/s | HTTP tok/s | overhead | without the client's CPU | client's share |")
    say("|---|---|---|---|---|---|")
    options = ("--threads", str(args.threads), "--kv-memory", "1G", "--log-level", "warning")
    with (
        LLM(args.model, threads=args.threads, kv_memory=KV_BYTES) as llm,
        serving(args.model, options, {"OMP_NUM_THREADS": str(args.threads)}) as server,
    ):
        for work in sizes:
            sides: dict[str, Callable[[int], Round]] = {
                "bare": lambda seed, work=work: bare(llm, work, work.prompts(llm, seed)),  # type: ignore[misc]
                "http": lambda seed, work=work: over_http(server.url, work, work.prompts(llm, seed)),  # type: ignore[misc]
            }
            found = harness.alternate(sides, rounds, num_warm_ups=1)
            bare_s, http_s = (statistics.median(one.wall_s for one in found[side]) for side in sides)
            cpu_s = statistics.median(one.client_cpu_s for one in found["http"])
            num_tokens = work.clients * work.requests * work.tokens
            say(
                f"| {work.clients:>7} | {num_tokens / bare_s:8.1f} | {num_tokens / http_s:8.1f} |"
                f" {http_s / bare_s - 1:8.1%} | {(http_s - cpu_s) / bare_s - 1:8.1%} | {cpu_s / http_s:6.1%} |"
            )


# CPU time of the server process


MODEL = "bench"
STREAM = {"model": MODEL, "ignore_eos": True, "stream": True, "temperature": 0}


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ENDPOINTS: dict[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "completions": ("/v1/completions", lambda text, count: {"prompt": text, "max_tokens": count}),
    "chat": ("/v1/chat/completions", lambda text, count: {"messages": message(text), "max_tokens": count}),
    "responses": ("/v1/responses", lambda text, count: {"input": text, "max_output_tokens": count}),
    "messages": ("/v1/messages", lambda text, count: {"messages": message(text), "max_tokens": count}),
    "ollama": ("/api/chat", lambda text, count: {"messages": message(text), "options": {"num_predict": count}}),
}


def cpu_s(process: ServerProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_generated(process: ServerProcess) -> float:
    """Tokens generated since the start, from the server's metrics."""
    data = HttpStream(process.url, "/metrics").read().decode()
    return sum(map(float, re.findall(r"^quire:generation_tokens_total\{[^}]*\} ([0-9.e+]+)", data, re.MULTILINE)))


class Client(threading.Thread):
    """Reads one stream. Counts its reads."""

    def __init__(self, stream: HttpStream) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.num_reads = 0

    def run(self) -> None:
        with suppress(QuireError):
            for _ in self.stream.reads():
                self.num_reads += 1


def counters(process: ServerProcess, clients: list[Client]) -> tuple[float, ...]:
    """Return the server's tokens and CPU time, the reads of the clients, and the time."""
    tokens, used_s = num_generated(process), cpu_s(process)
    return tokens, used_s, sum(client.num_reads for client in clients), time.perf_counter()


def measure_streams(process: ServerProcess, endpoint: str, count: int, window_s: float) -> None:
    """Print the server's CPU time per token over a window in which all streams run."""
    path, body = ENDPOINTS[endpoint]
    texts = [" ".join(Random(seed).choices(WORDS, k=12)) for seed in range(count)]
    clients = [Client(HttpStream(process.url, path, {**STREAM, **body(text, 4000)})) for text in texts]
    for client in clients:
        client.start()
    while any(client.is_alive() and not client.num_reads for client in clients):
        time.sleep(0.05)
    if not all(client.num_reads for client in clients):
        raise SystemExit(f"{path}: a stream failed")
    time.sleep(WARM_UP_S)
    before = counters(process, clients)
    time.sleep(window_s)
    after = counters(process, clients)
    for client in clients:
        client.stream.cut()
        client.join()
    tokens, used_s, reads, took_s = (now - then for now, then in zip(after, before, strict=True))
    tokens = max(tokens, 1)
    say(
        f"| {endpoint:<11} | {tokens / took_s:8.0f} | {used_s / took_s:5.0%} | {1e6 * used_s / tokens:8.1f} |"
        f" {reads / tokens:6.2f} |"
    )
    time.sleep(WARM_UP_S)  # the server ends the streams


def measure_cpu(args: argparse.Namespace) -> None:
    count, window_s, rounds, step = (8, 0.5, 1, "5ms") if args.quick else (args.streams, 10.0, args.rounds, "75ms")
    options = ["--backend", "fake", "--num-blocks", "16384", "--max-num-seqs", str(count), "--max-queue", "4096"]
    options += ["--served-model-name", MODEL, "--log-level", "warning", "--device", step]
    print(f"\n{count} streams, a step of {step}, CPU of the server process only")
    say("| endpoint | tokens/s | busy | us/token | reads/token |\n|---|---|---|---|---|")
    with serving(args.model, options) as process:
        for _ in range(rounds):
            for endpoint in args.endpoints:
                measure_streams(process, endpoint, count, window_s)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--only", type=harness.names(PARTS), default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1, help="of the engine; the other cores run everything else")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--endpoints", type=harness.names(ENDPOINTS), default=("completions", "chat"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.model = str(resolve(args.model))
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    if "overhead" in args.only:
        measure_overhead(args)
    if "cpu" in args.only:
        measure_cpu(args)


if __name__ == "__main__":
    main()
