"""Measures what a disk cache gives after a restart, and what it costs when nothing is found.

    python benchmarks/restart.py            # the default model, two minutes
    python benchmarks/restart.py --quick    # short prompts, one round: a smoke test

Time to the first token of prompts of 1,024 tokens, in one run: computed, from the KV cache, and from disk by a new
engine on the same folder, with the files in the page cache and without. The bar: from disk in the page cache in 1/20 of
the time that computing takes. Then throughput of prompts of which nothing is cached, with and without a disk cache,
alternating. Exits with 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cpu import QUIET, Others, say

from quire.core.values import Level, SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.levels.cache_folder import StoredFile, list_files, space_folders
from quire.weights.hub import resolve

BAR = 1 / 20
SAVE_LIMIT_S = 300.0
NUM_OUTPUTS = 8  # of each prompt, when throughput is measured

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path
    threads: int | None
    num_tokens: int  # of a prompt
    rounds: int
    num_clients: int  # when throughput is measured
    is_quick: bool


class Machine:
    """An engine, with a disk cache if it has a folder."""

    def __init__(self, settings: Settings, folder: Path | None, kv_memory: str | None = None) -> None:
        disk = {} if folder is None else {"disk_cache": "20G", "cache_dir": str(folder)}
        start_s = time.perf_counter()
        config = EngineConfig(backend="native", threads=settings.threads, kv_memory=kv_memory, **disk)  # type: ignore[arg-type]
        self.engine: Engine = make_engine(settings.model, config)
        self.start_s = time.perf_counter() - start_s
        if settings.is_quick and self.engine.scheduler.cache.levels is not None:
            self.engine.scheduler.cache.levels.ns_per_token = None  # loads are made although they may not pay
        self._num_requests = 0

    @property
    def vocab_size(self) -> int:
        return self.engine.capacity.vocab_size

    def first_token_s(self, prompt: Prompt, source: Level | None) -> float:
        """Time to the first token. Checks that the prompt comes from where it should."""
        start_s = time.perf_counter()
        self._add(prompt, 1)
        found = []
        while self.engine.has_work:
            found += [output.cache for output in self.engine.step() if output.cache is not None]
        took_s = time.perf_counter() - start_s
        (cache,) = found
        if cache.source is not source or (source is not None and cache.num_tokens < len(prompt) - 1):
            raise SystemExit(f"expected {len(prompt) - 1} tokens from {source}: {cache}")
        return took_s

    def tokens_per_s(self, prompts: Sequence[Prompt]) -> float:
        """Throughput of prompts that arrive together: tokens of prompts and answers."""
        start_s = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, NUM_OUTPUTS)
        while self.engine.has_work:
            self.engine.step()
        return sum(len(prompt) + NUM_OUTPUTS for prompt in prompts) / (time.perf_counter() - start_s)

    def _add(self, prompt: Prompt, max_tokens: int) -> None:
        self._num_requests += 1
        self.engine.add(self._num_requests, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))

    def close(self) -> None:
        self.engine.close()


class Prompts:
    """Prompts of random tokens. No two begin with the same token, so that none has a cached prefix."""

    def __init__(self, vocab_size: int) -> None:
        self._random = Random(0)
        self._vocab_size = vocab_size
        self._firsts = self._random.sample(range(vocab_size), min(vocab_size, 10_000))

    def make(self, count: int, num_tokens: int) -> list[Prompt]:
        rest = num_tokens - 1
        return [
            [self._firsts.pop(), *(self._random.randrange(self._vocab_size) for _ in range(rest))] for _ in range(count)
        ]


def stored_files(folder: Path) -> list[StoredFile]:
    return [file for space in space_folders(folder) for file in list_files(space).files]


def drop_from_page_cache(folder: Path) -> None:
    """Make the next reads of the files go to the disk. Folders and sizes stay in memory. On Linux only."""
    for file in stored_files(folder):
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_restart(settings: Settings, folder: Path) -> bool:
    """Print times to the first token. Returns whether the bar is held."""
    machine = Machine(settings, folder)
    source = Prompts(machine.vocab_size)
    prompts = source.make(settings.rounds, settings.num_tokens)
    machine.first_token_s(source.make(1, 64)[0], None)  # warm-up
    times: dict[str, list[float]] = {
        "computed": [machine.first_token_s(prompt, None) for prompt in prompts],
        "KV cache": [machine.first_token_s(prompt, Level.DEVICE) for prompt in prompts],
    }
    start_s = time.perf_counter()
    if not machine.engine.save_cache(SAVE_LIMIT_S):
        raise SystemExit(f"the cache could not be saved in {SAVE_LIMIT_S:g} s")
    save_s = time.perf_counter() - start_s
    machine.close()
    num_bytes = sum(file.size for file in stored_files(folder))
    starts_s = {}
    for name in ("disk, page cache", "disk, cold") if hasattr(os, "posix_fadvise") else ("disk, page cache",):
        machine = Machine(settings, folder)
        starts_s[name] = machine.start_s
        if name == "disk, cold":
            drop_from_page_cache(folder)  # after the start, which reads the headers
        times[name] = [machine.first_token_s(prompt, Level.DISK) for prompt in prompts]
        machine.close()
    computed_s = statistics.median(times["computed"])
    say(f"\nTime to the first token of {settings.num_tokens:,} tokens, medians of {settings.rounds}\n")
    say("| from | ms | of computing |\n|---|---|---|")
    for name, found in times.items():
        median_s = statistics.median(found)
        say(f"| {name} | {median_s * 1000:.1f} | 1/{computed_s / median_s:.1f} |")
    say(f"\nSaved {num_bytes / 1e6:.0f} MB in {save_s:.2f} s: {num_bytes / 1e6 / save_s:.0f} MB/s.")
    say(f"Starts on the folder: {', '.join(f'{took_s:.2f}' for took_s in starts_s.values())} s.")
    ratio = statistics.median(times["disk, page cache"]) / computed_s
    is_held = ratio <= BAR
    bar = f"bar: 1/{1 / BAR:.0f}, {'held' if is_held else 'MISSED'}"
    say(f"From disk in 1/{1 / ratio:.1f} of the time of computing ({bar}).")
    return is_held


def measure_cost(settings: Settings, folder: Path) -> None:
    """Print the throughput at 0 % hits, with and without a disk cache. Cached content is evicted all the time."""
    num_tokens = settings.num_tokens // 2
    machines = {"without": Machine(settings, None, "256M"), "with": Machine(settings, folder, "256M")}
    source = Prompts(machines["with"].vocab_size)
    found: dict[str, list[float]] = {name: [] for name in machines}
    for number in range(settings.rounds + 1):  # the first is a warm-up
        order = list(machines) if number % 2 else list(machines)[::-1]
        for name in order:
            value = machines[name].tokens_per_s(source.make(settings.num_clients, num_tokens))
            if number:
                found[name].append(value)
    stats = machines["with"].engine.scheduler.cache.stats()
    for machine in machines.values():
        machine.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    cost = statistics.median(1 - a / b for a, b in zip(found["with"], found["without"], strict=True))
    what = f"{settings.num_clients} prompts of {num_tokens:,} tokens, {NUM_OUTPUTS} tokens each"
    say(f"\nThroughput at 0 % hits: {what}\n")
    say("| disk cache | tok/s |\n|---|---|")
    for name, value in medians.items():
        say(f"| {name} | {value:.1f} |")
    rounds = ", ".join(f"{1 - a / b:+.1%}" for a, b in zip(found["with"], found["without"], strict=True))
    say(f"\nThe disk cache costs {cost:+.1%} (median of {settings.rounds} rounds: {rounds}).")
    say(
        f"{stats.num_evictions:,} blocks were evicted, {stats.levels[0].num_saves:,} saved,"
        f" {stats.num_hit_tokens} hits."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: quire's default model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke test: the bar does not decide")
    given = parser.parse_args()
    tokens, rounds, clients = (128, 1, 2) if given.quick else (1024, given.rounds, 16)
    settings = Settings(resolve(given.model), given.threads, tokens, rounds, clients, given.quick)
    others, start_s = Others(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="quire-restart-") as folder:
        is_held = measure_restart(settings, Path(folder) / "restart")
        measure_cost(settings, Path(folder) / "cost")
    own = time.process_time() / (time.perf_counter() - start_s) / (os.cpu_count() or 1)  # `Others` counts it as well
    share = max(others.share() - own, 0.0)
    hint = ": measure again when it is idle" if share > QUIET else ""
    say(f"Unrelated processes used {share:.0%} of the machine{hint}.")
    sys.exit(0 if is_held or given.quick else 1)


if __name__ == "__main__":
    main()
