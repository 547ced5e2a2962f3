"""Measures the cost of HTTP: the same requests through `quire serve` and through the bare engine, in one run.

    python benchmarks/serve.py                 1, 8 and 32 clients on the default model, three rounds each
    python benchmarks/serve.py --quick         a smoke run
    python benchmarks/serve.py --model PATH    another model

Each client streams one answer after another. The bare engine is `LLM` in this process: no worker, no HTTP, the same
batching. Rounds alternate, so that noise affects both. Prints bare time / HTTP time, as measured, and without the load
client's own CPU time: the client shares these cores here, which a real client would not. The claim
(docs/performance.md): at 8 clients HTTP costs at most 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

PROMPT_TOKENS = 100
ANSWER_TOKENS = 64
KV_MEMORY = "1G"


@dataclass(frozen=True)
class Round:
    wall_s: float
    client_cpu_s: float = 0.0


def prompts(count: int, seed: int, vocab_size: int) -> list[list[int]]:
    random = Random(seed)
    return [random.choices(range(vocab_size // 4, vocab_size // 2), k=PROMPT_TOKENS) for _ in range(count)]


# The load client: a separate process, so that its CPU time can be measured separately


async def one_client(host: str, port: int, model: str, todo: Sequence[list[int]], max_tokens: int) -> None:
    for prompt in todo:
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        data = await reader.read(-1)
        writer.close()
        if not data.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in data:
            raise SystemExit(f"a stream broke: {data[:500]!r}")


async def load(job: dict[str, Any]) -> None:
    todo = prompts(job["clients"] * job["requests"], job["seed"], job["vocab"])
    shares = [todo[number :: job["clients"]] for number in range(job["clients"])]
    begin_s = time.perf_counter()
    cpu_s = time.process_time()
    await asyncio.gather(
        *(one_client(job["host"], job["port"], job["model"], share, job["tokens"]) for share in shares)
    )
    print(json.dumps({"wall_s": time.perf_counter() - begin_s, "client_cpu_s": time.process_time() - cpu_s}))


def over_http(url: str, model: str, vocab: int, clients: int, requests: int, tokens: int, seed: int) -> Round:
    host, _, port = url.removeprefix("http://").partition(":")
    job = {
        "host": host,
        "port": int(port),
        "model": model,
        "clients": clients,
        "requests": requests,
        "tokens": tokens,
        "seed": seed,
        "vocab": vocab,
    }
    command = [sys.executable, __file__, "--client", json.dumps(job)]
    return Round(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


# The two sides


@contextmanager
def server(model: str | None, threads: int) -> Iterator[tuple[str, str]]:
    options = [*([model] if model else []), "--port", "0", "--threads", str(threads), "--log-level", "warning"]
    options += ["--kv-memory", KV_MEMORY]
    process = subprocess.Popen([sys.executable, "-m", "quire", "serve", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"quire serves (\S+) at (http://\S+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        yield found[2], found[1]
    finally:
        process.terminate()
        process.wait(60)


def bare(llm: Any, clients: int, requests: int, tokens: int, seed: int) -> Round:
    """Run at most `clients` requests at a time, as many in total as over HTTP."""
    from quire.engine.outputs import Answers
    from quire.engine.params import GenerationParams

    params = GenerationParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    todo = [
        llm.text.request(prompt, params) for prompt in prompts(clients * requests, seed, llm.engine.capacity.vocab_size)
    ]
    begin_s = time.perf_counter()
    waiting, streams = list(reversed(todo)), 0
    answers: dict[int, Answers] = {}
    while waiting or streams:
        while waiting and streams < clients:
            request, request_id = waiting.pop(), llm.next_id()
            llm.engine.add(request_id, request.prompt, request.sampling)
            answers[request_id] = Answers(request, llm.text.tokenizer)
            streams += 1
        for output in llm.engine.step():
            delta = answers[output.request_id].push(0, output)
            if delta.finish_reason is not None:
                del answers[output.request_id]
                streams -= 1
    return Round(time.perf_counter() - begin_s)


def compare(llm: Any, url: str, model: str, clients: int, requests: int, tokens: int, rounds: int) -> None:
    vocab = llm.engine.capacity.vocab_size
    direct: list[Round] = []
    http: list[Round] = []
    for number in range(rounds):
        seed = 1000 * clients + number
        direct.append(bare(llm, clients, requests, tokens, seed))
        http.append(over_http(url, model, vocab, clients, requests, tokens, seed))
    num_tokens = clients * requests * tokens
    bare_s = statistics.median(one.wall_s for one in direct)
    http_s = statistics.median(one.wall_s for one in http)
    cpu_s = statistics.median(one.client_cpu_s for one in http)
    print(
        f"| {clients:>7} | {num_tokens / bare_s:8.1f} | {num_tokens / http_s:8.1f} | {http_s / bare_s - 1:8.1%} |"
        f" {(http_s - cpu_s) / bare_s - 1:8.1%} | {cpu_s / http_s:6.1%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1, help="of the engine; the other cores run everything else")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.client:
        asyncio.run(load(json.loads(args.client)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    from quire import LLM

    sizes = [(1, 1), (2, 1)] if args.quick else [(1, 4), (8, 2), (32, 1)]
    tokens, rounds = (8, 1) if args.quick else (ANSWER_TOKENS, args.rounds)
    print(f"{PROMPT_TOKENS} tokens in, {tokens} out, streamed; engine on {args.threads} thread(s), median of {rounds}")
    print("| clients | bare tok/s | HTTP tok/s | overhead | without the client's CPU | client's share |")
    print("|---|---|---|---|---|---|")
    with (
        LLM(args.model, threads=args.threads, kv_memory=1 << 30) as llm,
        server(args.model, args.threads) as (url, model),
    ):
        bare(llm, 2, 1, 4, 0)
        over_http(url, model, llm.engine.capacity.vocab_size, 2, 1, 4, 0)
        for clients, requests in sizes:
            compare(llm, url, model, clients, requests, tokens, rounds)


if __name__ == "__main__":
    main()
