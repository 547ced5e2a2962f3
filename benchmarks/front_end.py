"""Measures the CPU time that the server process uses per streamed token and per request, without a model.

    python benchmarks/front_end.py                      256 streams of completions and of chat
    python benchmarks/front_end.py --saturate           steps without a pause: the server or the fake worker is full
    python benchmarks/front_end.py --endpoints messages responses ollama
    python benchmarks/front_end.py --quick              a smoke run
    python benchmarks/front_end.py --profile FILE       also sample the server's stacks (Python only) into FILE

`quire serve` runs on the fake backend with a real tokenizer: each step gives every stream one random token. The clients
are raw sockets in separate processes. Only the server process is counted (/proc/PID/stat), not the worker and not the
clients. The time of a step is chosen such that the server is mostly idle: otherwise several tokens share a write, which
lowers the time per token. `events/token` and `us/event` show whether that happened.

The floor is measured in the same run: a process that sends 200 bytes with `socket.send` to the same clients at the same
times. It is a part of the server's time that Python cannot change.

The last table has the CPU time per request: bursts of requests with prompts of 256 words and one token of answer, and
how long the requests of a burst wait for their first byte.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_longlong
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_CLIENT_PROCESSES = 2
FLOOR_BYTES = 200
WORK_BETWEEN = 250  # turns of an empty loop
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
)


def completion(text: str, tokens: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


def chat(text: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


def responses(text: str, tokens: int) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}


def messages(text: str, tokens: int) -> dict[str, Any]:
    return chat(text, tokens) | {"model": "claude-x"}


def ollama(text: str, tokens: int) -> dict[str, Any]:
    sent = [{"role": "user", "content": text}]
    return {"model": "MODEL", "messages": sent, "options": {"num_predict": tokens, "temperature": 0}}


@dataclass(frozen=True)
class Endpoint:
    path: str
    body: Callable[[str, int], dict[str, Any]]
    mark: bytes = b"\ndata: {"  # occurs once in each event


ENDPOINTS = {
    "completions": Endpoint("/v1/completions", completion),
    "chat": Endpoint("/v1/chat/completions", chat),
    "responses": Endpoint("/v1/responses", responses),
    "messages": Endpoint("/v1/messages", messages),
    "ollama": Endpoint("/api/chat", ollama, b'{"model"'),
}


def sentence(seed: int, num_words: int) -> str:
    choose = random.Random(seed).choice
    return " ".join(choose(WORDS) for _ in range(num_words))


def request(endpoint: Endpoint, model: str, text: str, tokens: int) -> bytes:
    body = endpoint.body(text, tokens)
    data = json.dumps(body | ({"model": model} if body.get("model") == "MODEL" else {})).encode()
    head = f"POST {endpoint.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


# The load clients: separate processes, which only count and note times


@dataclass(frozen=True)
class Job:
    port: int
    requests: tuple[bytes, ...]  # one connection each; empty: the floor, where the peer only writes
    mark: bytes
    is_burst: bool = False  # report when each connection got its first byte, and end when all ended


def client(job: Job, counts: Any, report: Any) -> None:
    """Read all connections until the peer closes them or `report` has a message. counts: events, reads, streaming."""
    selector = selectors.EpollSelector()
    opened = []
    for _ in job.requests:
        opened.append(socket.create_connection(("127.0.0.1", job.port)))
        opened[-1].setblocking(False)
        selector.register(opened[-1], selectors.EVENT_READ)
    selector.register(report, selectors.EVENT_READ)
    report.send("connected")
    report.recv()
    sent_s = time.perf_counter()
    for sock, data in zip(opened, job.requests, strict=True):
        sock.sendall(data)
    last_s: dict[Any, float] = {}
    gaps: list[float] = []
    firsts: list[float] = []
    num_open = len(opened)
    while num_open:
        for key, _ in selector.select():
            if key.fileobj is report:
                num_open = 0
                break
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            now_s = time.perf_counter()
            if key.fd in last_s:
                gaps.append(now_s - last_s[key.fd])
            else:
                counts[2] += 1
                firsts.append(now_s - sent_s)
                if not data.startswith(b"HTTP/1.1 200") and job.requests[0]:
                    raise SystemExit(f"a stream failed: {data[:500]!r}")
            last_s[key.fd] = now_s
            counts[0] += data.count(job.mark)
            counts[1] += 1
            if not data or (job.is_burst and data.endswith(b"0\r\n\r\n")):
                selector.unregister(key.fileobj)
                num_open -= 1
    report.send(firsts if job.is_burst else gaps)
    for sock in opened:
        sock.close()


class Clients:
    """The client processes of one measurement. Use as a context manager."""

    def __init__(self, port: int, requests: Sequence[bytes], mark: bytes = b"data: {", *, is_burst: bool = False):
        context = multiprocessing.get_context("fork")
        self._counts, self._pipes, self._processes = [], [], []
        for number in range(NUM_CLIENT_PROCESSES):
            ours, theirs = context.Pipe()
            counts = context.Array(c_longlong, 3, lock=False)
            job = Job(port, tuple(requests[number::NUM_CLIENT_PROCESSES]), mark, is_burst)
            process = context.Process(target=client, args=(job, counts, theirs), daemon=True)
            process.start()
            self._counts.append(counts)
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # connected

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def count(self, index: int) -> int:
        return sum(counts[index] for counts in self._counts)

    def start(self) -> None:
        for pipe in self._pipes:
            pipe.send("start")

    def stop(self) -> list[float]:
        """Return the gaps between reads in seconds; of a burst, the times to the first byte."""
        for pipe in self._pipes:
            pipe.send("stop")
        return self.results()

    def results(self) -> list[float]:
        return [value for pipe in self._pipes for value in pipe.recv()]


# Measurements


@dataclass(frozen=True)
class Cpu:
    user_s: float
    system_s: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.user_s - other.user_s, self.system_s - other.system_s)

    @property
    def all_s(self) -> float:
        return self.user_s + self.system_s


def cpu(pid: int) -> Cpu:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Cpu(int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S)


@dataclass(frozen=True)
class Server:
    pid: int
    port: int
    model: str

    def generated(self) -> int:
        """Tokens generated since the start, from the server's metrics."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        found = re.search(rb"^quire:generation_tokens_total\{[^}]*\} ([0-9.e+]+)", data, re.MULTILINE)
        assert found is not None, data[:500]
        return int(float(found[1]))


@contextmanager
def server(args: argparse.Namespace, step: str, num_streams: int) -> Iterator[Server]:
    command = [sys.executable, "-m", "quire", "serve", *([args.model] if args.model else [])]
    command += ["--backend", "fake", "--device", step, "--num-blocks", "16384", "--max-num-seqs", str(num_streams)]
    command += ["--port", "0", "--log-level", "warning", "--max-queue", "4096"]
    environment = os.environ | ({"QUIRE_SAMPLE_STACKS": args.profile} if args.profile else {})
    if args.profile:
        command[1:3] = ["-c", SAMPLER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"quire serves (\S+) at http://127.0.0.1:(\d+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        yield Server(process.pid, int(found[2]), found[1])
    finally:
        process.terminate()
        process.wait(60)


SAMPLER = """
import collections, os, runpy, signal, sys
stacks = collections.Counter()
def sample(number, frame):
    lines = []
    while frame is not None and len(lines) < 30:
        code = frame.f_code
        lines.append(f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    stacks[" < ".join(lines)] += 1
signal.signal(signal.SIGPROF, sample)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
path = os.environ.pop("QUIRE_SAMPLE_STACKS")
sys.argv = ["quire", *sys.argv[1:]]
try:
    runpy.run_module("quire", run_name="__main__", alter_sys=True)
finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(path, "w") as file:
        file.writelines(f"{count} {stack}\\n" for stack, count in stacks.most_common())
"""


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_streams(served: Server, name: str, num_streams: int, window_s: float, *, is_shown: bool = True) -> None:
    """Print the server's CPU time per token over a window in which all streams run."""
    endpoint = ENDPOINTS[name]
    requests = [request(endpoint, served.model, sentence(seed, 12), 4000) for seed in range(num_streams)]
    with Clients(served.port, requests, endpoint.mark) as clients:
        clients.start()
        while clients.count(2) < num_streams:
            time.sleep(0.1)
        time.sleep(1.0)
        tokens, events, reads = served.generated(), clients.count(0), clients.count(1)
        before, begin_s = cpu(served.pid), time.perf_counter()
        time.sleep(window_s)
        used, took_s = cpu(served.pid) - before, time.perf_counter() - begin_s
        events, reads = clients.count(0) - events, clients.count(1) - reads
        tokens = served.generated() - tokens
        gaps = clients.stop()
    time.sleep(1.0)  # the server ends the streams
    if not is_shown:
        return
    per_token = 1e6 / max(tokens, 1)
    print(
        f"| {name:<11} | {tokens / took_s:8.0f} | {used.all_s / took_s:5.0%} | {used.user_s * per_token:6.1f} |"
        f" {used.system_s * per_token:6.1f} | {used.all_s * per_token:8.1f} |"
        f" {used.all_s * 1e6 / max(events, 1):8.1f} |"
        f" {events / max(tokens, 1):6.2f} | {events / max(reads, 1):6.2f} |"
        f" {percentile(gaps, 0.5) * 1e3:6.1f} | {percentile(gaps, 0.99) * 1e3:6.1f} |",
        flush=True,
    )


def measure_floor(num_streams: int, step_s: float, window_s: float) -> None:
    """Print the CPU time of a bare `socket.send` to the same clients, one to each stream per step.

    First without a pause between two sends, then with a few microseconds of other work, which is not counted: between
    two sends the client may fall asleep, and the next send has to wake it.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    accepted: list[socket.socket] = []
    with Clients(listener.getsockname()[1], [b""] * num_streams) as clients:
        for _ in range(num_streams):
            accepted.append(listener.accept()[0])
            accepted[-1].setblocking(False)
            accepted[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        clients.start()
        for name, work in (("floor: send", 0), ("floor: apart", WORK_BETWEEN)):
            send = _send_all(accepted, step_s, window_s / 2, work, is_sending=True)
            rest = _send_all(accepted, step_s, window_s / 4, work, is_sending=False)
            user_us, system_us = send.user_s * 1e6 - rest.user_s * 1e6, send.system_s * 1e6 - rest.system_s * 1e6
            total = user_us + system_us
            print(
                f"| {name:<11} | {num_streams / step_s:8.0f} |       | {user_us:6.1f} | {system_us:6.1f} |"
                f" {total:8.1f} | {total:8.1f} |   1.00 |        |        |        |",
                flush=True,
            )
        clients.stop()
    for sock in (listener, *accepted):
        sock.close()


def _send_all(peers: list[socket.socket], step_s: float, window_s: float, work: int, *, is_sending: bool) -> Cpu:
    """Return the CPU time per peer and step."""
    data = b"x" * FLOOR_BYTES
    count = 0
    before, until_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() + window_s
    while time.perf_counter() < until_s:
        for peer in peers:
            if is_sending:
                peer.send(data)
            for _ in range(work):
                pass
        count += len(peers)
        time.sleep(step_s)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Cpu((after.ru_utime - before.ru_utime) / count, (after.ru_stime - before.ru_stime) / count)


def measure_requests(served: Server, name: str, burst: int, rounds: int) -> None:
    """Print the server's CPU time per request, and the times to the first byte in a burst."""
    endpoint = ENDPOINTS[name]
    used: list[Cpu] = []
    firsts: list[float] = []
    for number in range(rounds + 1):  # the first round warms up
        texts = [sentence(burst * number + seed, 256) for seed in range(burst)]
        requests = [request(endpoint, served.model, text, 1) for text in texts]
        with Clients(served.port, requests, endpoint.mark, is_burst=True) as clients:
            before = cpu(served.pid)
            clients.start()
            found = clients.results()
            time.sleep(0.2)
            if number:
                used.append(cpu(served.pid) - before)
                firsts += found
    user_us = statistics.median(one.user_s for one in used) / burst * 1e6
    system_us = statistics.median(one.system_s for one in used) / burst * 1e6
    print(
        f"| {name:<11} | {user_us:6.0f} | {system_us:6.0f} | {user_us + system_us:6.0f} |"
        f" {percentile(firsts, 0.5) * 1e3:6.0f} | {percentile(firsts, 0.99) * 1e3:6.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; only its tokenizer and limits are used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--endpoints", nargs="+", choices=ENDPOINTS, default=["completions", "chat"])
    parser.add_argument("--step-ms", type=float, default=75.0, help="the time of a step of the fake worker")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saturate", action="store_true")
    parser.add_argument("--no-requests", action="store_true", help="skip the table of requests")
    parser.add_argument("--no-streams", action="store_true", help="skip the table of streams")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.streams, args.window, args.rounds, args.step_ms = 8, 0.5, 1, 5.0
    step = "auto" if args.saturate else f"{args.step_ms:g}ms"
    if not args.no_streams:
        print(f"{args.streams} streams, a step of {step}, CPU of the server process only, us")
        names = "endpoint tokens/s busy user system us/token us/event events/token events/read gap_p50_ms gap_p99_ms"
        print("|", " | ".join(names.split()), "|")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        with server(args, step, args.streams) as served:
            measure_streams(served, args.endpoints[0], args.streams, args.window, is_shown=False)  # warm up
            for _ in range(args.rounds):
                if not args.saturate:
                    measure_floor(args.streams, args.step_ms / 1e3, args.window)
                for name in args.endpoints:
                    measure_streams(served, name, args.streams, args.window)
    if not args.no_requests:
        print(f"\nbursts of {args.streams} requests, prompts of 256 words, one token; us of server CPU per request")
        print("| endpoint    | user   | system | all    | first byte p50 ms | p99 ms |")
        print("|---|---|---|---|---|---|")
        with server(args, "auto", args.streams) as served:
            for name in args.endpoints:
                measure_requests(served, name, args.streams, args.rounds)


if __name__ == "__main__":
    main()
