"""Measures how fast the server recovers from disconnects, crashes and overload.

    python benchmarks/chaos.py                 # the default model
    python benchmarks/chaos.py --fake MODEL    # without arithmetic: the server's own share (a step takes 5 ms)

Prints, from one run: the time from a disconnect to free blocks; the time from kill -9 of the worker to the end of its
streams and to the next answer; the throughput at ten times the load, relative to the load it can handle, and how fast
the rest is refused. The limits (docs/performance.md): 2 s, 30 s, 90 %, 100 ms.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
from harness import percentile, say

from quire.bench.http_load import HttpStream, ask
from quire.cli.bench_server import ServerProcess, serving
from quire.errors import QuireError
from quire.weights.hub import resolve
from tests.server.rig import children, command_line

SLOTS = 4
TOKENS = 24
RETRY_S = 0.1


def body(number: int, tokens: int) -> dict[str, Any]:
    prompt = f"Question {number}: what follows {number}? " * 3
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}


def disconnect_s(server: ServerProcess, number: int) -> float:
    """Return seconds from closing an unfinished stream until no block is in use."""
    stream = HttpStream(server.url, "/v1/completions", body(number, 2000))
    events = stream.events()
    next(events)
    begin_s = time.perf_counter()
    stream.cut()
    while json.loads(HttpStream(server.url, "/v1/cache/stats").read())["num_in_use"]:
        pass
    return time.perf_counter() - begin_s


def kill(server: ServerProcess) -> tuple[float, float, int]:
    """Return seconds until all streams ended, seconds until the next answer, and streams that ended with an error."""
    streams = [HttpStream(server.url, "/v1/completions", body(number, 2000)).events() for number in range(SLOTS)]
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(next, streams))
        (worker,) = (pid for pid in children(server.pid) if "engine.worker" in command_line(pid))
        begin_s = time.perf_counter()
        os.kill(worker, signal.SIGKILL)
        num_errors = sum(pool.map(ends_with_error, streams))
    ended_s = time.perf_counter() - begin_s
    status = ask(server.url, body(99, 1)).status
    assert status == 200, status
    return ended_s, time.perf_counter() - begin_s, num_errors


def ends_with_error(events: Iterator[Any]) -> bool:
    try:
        for _ in events:
            pass
    except QuireError:
        return True
    return False


def load(server: ServerProcess, num_clients: int, seconds: float) -> tuple[float, list[float]]:
    """Return answers per second, and the time of each refusal. Refused clients retry after a tenth of a second."""
    begin_s = time.perf_counter()
    refusals: list[float] = []

    def client(number: int) -> int:
        num_served = 0
        while time.perf_counter() < begin_s + seconds:
            seen = ask(server.url, body(number, TOKENS))
            if seen.status == 200:
                num_served += 1
                continue
            assert seen.status == 429, seen
            refusals.append(seen.end_s - seen.start_s)
            time.sleep(RETRY_S)
        return num_served

    with ThreadPoolExecutor(num_clients) as pool:
        num_served = sum(pool.map(client, range(num_clients)))
    return num_served / (time.perf_counter() - begin_s), refusals


def milliseconds(seconds: list[float]) -> str:
    return f"p50 {1e3 * percentile(seconds, 0.5):.0f} ms, p99 {1e3 * percentile(seconds, 0.99):.0f} ms"


def measure(server: ServerProcess, *, is_quick: bool) -> None:
    took_s = [disconnect_s(server, number) for number in range(5 if is_quick else 50)]
    say(f"disconnect to free blocks: {milliseconds(took_s)}")
    seconds = 2.0 if is_quick else 30.0
    fit, _ = load(server, 2 * SLOTS, seconds)
    over, refusals = load(server, 20 * SLOTS, seconds)
    again, _ = load(server, 2 * SLOTS, seconds)
    capacity = statistics.mean((fit, again))
    say(
        f"overload: {2 * SLOTS} clients {capacity:.2f} answers/s, {20 * SLOTS} clients {over:.2f}"
        f" ({over / capacity:.0%}); {len(refusals)} refused, {milliseconds(refusals)}"
    )
    ended_s, back_s, num_errors = kill(server)
    text = f"kill -9: {num_errors} of {SLOTS} streams ended with an error, in {ended_s * 1000:.0f} ms"
    print(f"{text}; served again in {back_s:.1f} s")


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--fake", metavar="MODEL", help="a folder: its tokenizer is used, its weights are not")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    chosen = ("--backend", "fake", "--device", "5ms") if args.fake else ("--threads", "1", "--kv-memory", "1G")
    limits = ("--log-level", "error", "--max-num-seqs", str(SLOTS), "--max-queue", str(SLOTS))
    with serving(str(resolve(args.fake)), (*chosen, *limits)) as server:
        measure(server, is_quick=args.quick)


if __name__ == "__main__":
    main()
