"""Measures how fast the server recovers from disconnects, crashes and overload.

    python benchmarks/chaos.py                 the default model python benchmarks/chaos.py --fake MODEL    without
    arithmetic: the server's own share (a step of the fake takes 5 ms)

Prints, from one run: the time from a disconnect to free blocks; the time from kill -9 of the worker to the end of its
streams and to the next answer; the throughput at ten times the load, relative to the load it can handle, and how fast
the rest is refused. The limits (docs/performance.md): 2 s, 30 s, 90 %, 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SLOTS = 4
TOKENS = 24


@contextmanager
def server(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "quire", "serve", *options, "--port", "0", "--log-level", "error"]
    command += ["--max-num-seqs", str(SLOTS), "--max-queue", str(SLOTS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"at http://127.0.0.1:(\d+)", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def body(number: int, tokens: int) -> dict[str, Any]:
    content = f"Question {number}: what follows {number}? " * 3
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


async def send(port: int, path: str, value: object | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if value is None else json.dumps(value).encode()
    head = f"{'GET' if value is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


async def ask(port: int, path: str, value: object | None = None) -> tuple[int, bytes]:
    """Send a request and return its status and body."""
    reader, writer = await send(port, path, value)
    data = await reader.read(-1)
    writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), rest


async def stats(port: int) -> Any:
    return json.loads((await ask(port, "/v1/cache/stats"))[1])


async def disconnects(port: int, count: int) -> list[float]:
    """Return seconds from closing an unfinished stream until no block is in use."""
    took: list[float] = []
    for number in range(count):
        reader, writer = await send(port, "/v1/chat/completions", body(number, 2000))
        await reader.readuntil(b"data: ")
        begin_s = time.perf_counter()
        writer.close()
        while (await stats(port))["num_in_use"]:
            pass
        took.append(time.perf_counter() - begin_s)
    return took


async def kill(process: subprocess.Popen[str], port: int) -> tuple[float, float, int]:
    """Return seconds until all streams ended, seconds until the next answer, and streams that ended with an error."""
    streams = [await send(port, "/v1/chat/completions", body(number, 2000)) for number in range(SLOTS)]
    for reader, _ in streams:
        await reader.readuntil(b"data: ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (worker,) = [int(pid) for pid in children if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    begin_s = time.perf_counter()
    os.kill(worker, signal.SIGKILL)
    ends = await asyncio.gather(*(reader.read(-1) for reader, _ in streams))
    ended_s = time.perf_counter() - begin_s
    status, _ = await ask(port, "/v1/chat/completions", body(99, 1))
    assert status == 200, status
    return ended_s, time.perf_counter() - begin_s, sum(b'"error"' in end for end in ends)


async def load(port: int, clients: int, seconds: float) -> tuple[float, list[float]]:
    """Return answers per second, and the time of each refusal. Refused clients retry after a tenth of a second."""
    served = 0
    refusals: list[float] = []
    started_s = time.perf_counter()
    deadline_s = started_s + seconds

    async def client(number: int) -> None:
        nonlocal served
        while time.perf_counter() < deadline_s:
            begin_s = time.perf_counter()
            status, rest = await ask(port, "/v1/chat/completions", body(number, TOKENS))
            if status == 200 and b"[DONE]" in rest:
                served += 1
            else:
                assert status == 429, (status, rest)
                refusals.append(time.perf_counter() - begin_s)
                await asyncio.sleep(0.1)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return served / (time.perf_counter() - started_s), refusals


def p(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else math.nan


async def measure(process: subprocess.Popen[str], port: int, is_quick: bool) -> None:
    took = await disconnects(port, 5 if is_quick else 50)
    print(f"disconnect to free blocks: p50 {p(took, 50) * 1000:.0f} ms, p99 {p(took, 99) * 1000:.0f} ms", flush=True)
    seconds = 2.0 if is_quick else 30.0
    fit, _ = await load(port, 2 * SLOTS, seconds)
    over, refusals = await load(port, 20 * SLOTS, seconds)
    again, _ = await load(port, 2 * SLOTS, seconds)
    print(
        f"overload: {2 * SLOTS} clients {statistics.mean((fit, again)):.2f} answers/s, {20 * SLOTS} clients {over:.2f}"
        f" ({over / statistics.mean((fit, again)):.0%}); {len(refusals)} refused, p50 {p(refusals, 50) * 1000:.0f} ms,"
        f" p99 {p(refusals, 99) * 1000:.0f} ms",
        flush=True,
    )
    ended_s, back_s, errors = await kill(process, port)
    text = f"kill -9: {errors} of {SLOTS} streams ended with an error, in {ended_s * 1000:.0f} ms"
    print(f"{text}; served again in {back_s:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", metavar="MODEL", help="a folder: its tokenizer is used, its weights are not")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    options = (
        [args.fake, "--backend", "fake", "--device", "5ms"] if args.fake else ["--threads", "1", "--kv-memory", "1G"]
    )
    with server(options) as (process, port):
        asyncio.run(measure(process, port, args.quick))


if __name__ == "__main__":
    main()
