"""What the benchmarks share: options, tables, rounds that alternate, failures, and other users of the machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeVar

from quire.cli.http_stream import EVENT, HttpStream, RefusedRequest
from quire.errors import RequestFailed

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.05  # share of the machine for other processes, above which the figures are not reliable

sys.path.insert(0, str(ROOT))  # `tests` is not installed


# Options


def options(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def names(allowed: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option: some of these names, separated by commas."""
    known = tuple(allowed)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return found

    return read


def numbers(text: str) -> tuple[int, ...]:
    """The type of an option: numbers, separated by commas."""
    return tuple(map(int, text.split(",")))


# Text


def say(text: str) -> None:
    print(text, flush=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 100 else f"{value:.3g} {unit}".rstrip()


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Rounds


def alternate(sides: Mapping[str, Callable[[int], T]], num_rounds: int, *, num_warm_ups: int = 0) -> dict[str, list[T]]:
    """Call every side once in each round, and return the results of each.

    Each round starts with another side: the first of two runs may find another machine than the second.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    order = list(sides)
    for round_number in range(-num_warm_ups, num_rounds):
        order.append(order.pop(0))
        for name in order:
            result = sides[name](round_number)
            if round_number >= 0:
                found[name].append(result)
    return found


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Quotients of measurements of the same round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(ratios(ones, others))


def child_messages(
    command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Run a process. Yield the JSON objects that it prints, each with the seconds since before the process existed."""
    with TemporaryFile("w+") as problems:
        started_s = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, text=True, env=env)
        limit = threading.Timer(limit_s, child.kill)
        limit.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    yield time.perf_counter() - started_s, json.loads(line)
            child.wait()
        finally:
            limit.cancel()
            child.kill()
        if child.returncode:
            problems.seek(0)
            raise RuntimeError(f"the process ended with {child.returncode}\n{problems.read()[-2000:]}")


class Stages:
    """Runs the stages of a benchmark. A stage that fails is reported, and the others run."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def attempt(self, what: str, action: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result; None if it failed."""
        try:
            return action(*arguments)
        except Exception:
            self.failures.append(what)
            say(f"{what}: FAILED\n{traceback.format_exc()}")
            return None

    def check(self) -> None:
        if self.failures:
            sys.exit("failed: " + "; ".join(self.failures))


# Other users of the machine


class Others:
    """CPU use of other processes during a measurement. It affects threads that wait for each other most."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def share(self) -> float:
        """Return the share of all cores, without this process and its ended children; 0 if it is not known."""
        others_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s) / (time.perf_counter() - self._started_s) / (os.cpu_count() or 1)


def _busy_s() -> float:
    try:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + time.process_time()


def others_line(share: float) -> str:
    hint = ": measure again when it is idle" if share > QUIET else ""
    return f"Other processes used {share:.0%} of the machine{hint}."


@contextmanager
def cpu_bound_processes(count: int) -> Iterator[None]:
    """Run processes that compute without a pause. They are reaped at the end, so `Others` does not count them."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


# Load over HTTP


class Seen(NamedTuple):
    """What a client saw of one request. Times are those of `time.perf_counter`."""

    status: int
    start_s: float
    times_s: tuple[float, ...]  # of the reads that brought events
    end_s: float
    body: bytes

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[6:]) for line in self.body.split(b"\n") if line.startswith(EVENT)]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    @property
    def usage(self) -> dict[str, Any]:
        *_, last = (line for line in self.body.split(b"\n") if line.startswith(EVENT))
        return dict(json.loads(last[6:])["usage"])

    @property
    def num_tokens(self) -> int:
        return int(self.usage["completion_tokens"])


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Seen:
    """Send a streamed request and read all of the answer. A refusal is a result as well."""
    stream = HttpStream(url, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    times_s: list[float] = []
    parts: list[bytes] = []
    status, start_s = 200, time.perf_counter()
    try:
        for data in stream.reads():
            if EVENT in data:
                times_s.append(time.perf_counter())
            parts.append(data)
    except RefusedRequest as error:
        status, parts = error.status, [error.body]
    end_s, answer = time.perf_counter(), b"".join(parts)
    if status == 200 and not answer.endswith(b"data: [DONE]\n\n"):
        raise RequestFailed(f"{url}: a stream broke: {answer[-500:].decode(errors='replace')}")
    return Seen(status, start_s, tuple(times_s), end_s, answer)


class LoadResult(NamedTuple):
    seen: list[Seen]
    client_cpu_s: float

    @property
    def wall_s(self) -> float:
        return max(one.times_s[-1] for one in self.seen) - min(one.start_s for one in self.seen)

    @property
    def tokens_per_s(self) -> float:
        return sum(one.num_tokens for one in self.seen) / self.wall_s


def run_load(
    url: str, bodies: Sequence[dict[str, Any]], *, clients: int = 0, rate: float = 0.0, num_processes: int = 1
) -> LoadResult:
    """Send completions from processes of their own, which are forked.

    At most `clients` are open at a time; with `rate` instead, they are sent at random times, so many per second.
    """
    count = min(num_processes, clients or num_processes)
    shares = [(url, bodies[part::count], clients // count, rate / count) for part in range(count)]
    pool = multiprocessing.get_context("fork").Pool(count)
    try:
        results = pool.starmap(_run_share, shares)
    finally:  # leaving `with` would end the processes with SIGTERM, which the handler of a caller may make a deadlock
        pool.close()
        pool.join()
    return LoadResult([one for result in results for one in result.seen], sum(one.client_cpu_s for one in results))


def _run_share(url: str, bodies: Sequence[dict[str, Any]], clients: int, rate: float) -> LoadResult:
    cpu_s, random = time.process_time(), Random(str(bodies[0]))
    with ThreadPoolExecutor(clients or len(bodies)) as pool:
        answers = []
        for body in bodies:
            answers.append(pool.submit(ask, url, body))
            if rate:
                time.sleep(random.expovariate(rate))
    return LoadResult([answer.result() for answer in answers], time.process_time() - cpu_s)
