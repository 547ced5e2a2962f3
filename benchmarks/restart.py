"""Measures the levels below the KV cache: what prefixes from host memory and disk give, and what they cost others.

    python benchmarks/restart.py            # a disk cache, the default model on the CPU: two minutes
    python benchmarks/restart.py --quick    # short prompts, one round: a smoke test
    PYTHONPATH=. python benchmarks/restart.py --model llama-3-8b --host 12G --only host,prefix,others    # on a GPU
    PYTHONPATH=. python benchmarks/restart.py --model qwen3-0.6b --host 8G --only cost

prefix    time to the first token of prompts: computed, from the KV cache, and from disk by a new engine on the same
          folder, with the files in the page cache and without. The bar on a CPU: from disk in the page cache in 1/20
          of the time that computing takes
cost      throughput of prompts of which nothing is cached, with and without the levels, alternating
host      time to the first token of prompts from host memory, in a pool of three prompts
others    time per token of 16 answers, alone and beside a stream of prefixes that are loaded and saved

A model named by a shape of gpu.py has random weights and runs on the GPU. Exits with 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import harness
from gpu_workloads import FULL, SHAPES
from harness import Others, say

from quire.bench.driver import Session, Track
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.levels.disk_store import StoredFile, list_files, space_folders
from quire.weights.hub import resolve

PARTS = ("prefix", "cost", "host", "others")
BAR = 1 / 20
SAVE_LIMIT_S = 300.0
DISK = "20G"
NUM_STREAMS = 16  # answers beside which prefixes are loaded
NUM_POOL_PROMPTS, NUM_PROMPTS = 3, 5  # that fit the pool, and that are sent, when prefixes are evicted
SCALE = replace(FULL, max_model_len=8192)  # of a model with random weights

Prompt = list[int]


class Bench:
    """The engines of one model, with the levels that each part needs."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.is_shape = args.model in SHAPES
        self.num_tokens = 128 if args.quick else 8191 if self.is_shape else 1024
        self.rounds = 1 if args.quick else args.rounds
        self._random = Random(0)
        self._firsts: list[int] = []
        self._ids = count()

    @contextmanager
    def engine(self, disk: str = "", *, has_host: bool = False, **settings: Any) -> Iterator[Engine]:
        """An engine, with a disk cache if it has a folder."""
        if disk:
            settings |= {"disk_cache": DISK, "cache_dir": str(self.folder / disk)}
        if has_host:
            settings |= {"host_cache": self.args.host}
        if self.is_shape:
            from gpu_machine import engine_config, loaded

            config = engine_config(SCALE, **settings)
            with loaded(self.args.model, SCALE, config, self.folder / self.args.model) as machine:
                yield machine.engine
            return
        config = EngineConfig(backend="native", threads=self.args.threads, **settings)
        engine = make_engine(resolve(self.args.model), config)
        if self.args.quick and engine.scheduler.cache.levels is not None:
            engine.scheduler.cache.levels.ns_per_token = None  # loads are made although they may not pay
        try:
            yield engine
        finally:
            engine.close()

    def prompts(self, engine: Engine, number: int, num_tokens: int = 0) -> list[Prompt]:
        """Prompts of random tokens. No two begin with the same token, so that none has a cached prefix."""
        vocabulary, rest = range(engine.capacity.vocab_size), (num_tokens or self.num_tokens) - 1
        self._firsts = self._firsts or self._random.sample(vocabulary, min(len(vocabulary), 10_000))
        return [[self._firsts.pop(), *self._random.choices(vocabulary, k=rest)] for _ in range(number)]

    def session(self, engine: Engine) -> Session:
        return Session(engine, self._ids.__next__)

    def first_token_s(self, engine: Engine, prompt: Prompt, *, is_cached: bool | None = None) -> float:
        """Return the time to the first token. Checks that the prompt was cached or not."""
        session, start_s = self.session(engine), time.perf_counter()
        track = session.add(prompt, 1)
        session.run()
        took_s = time.perf_counter() - start_s
        if is_cached is not None and track.num_cached_tokens != is_cached * (len(prompt) - 1):
            raise SystemExit(f"{track.num_cached_tokens} of {len(prompt)} tokens came from the cache: {is_cached = }")
        return took_s

    # Prefixes after a restart

    def measure_prefix(self) -> bool:
        """Print times to the first token. Return whether the bar is held."""
        with self.engine("prefix") as engine:
            prompts = self.prompts(engine, self.rounds)
            self.first_token_s(engine, *self.prompts(engine, 1, 64))  # warm-up
            times = {
                "computed": [self.first_token_s(engine, prompt, is_cached=False) for prompt in prompts],
                "KV cache": [self.first_token_s(engine, prompt, is_cached=True) for prompt in prompts],
            }
            start_s = time.perf_counter()
            if not engine.save_cache(SAVE_LIMIT_S):
                raise SystemExit(f"the cache could not be saved in {SAVE_LIMIT_S:g} s")
            save_s = time.perf_counter() - start_s
        files = stored_files(self.folder / "prefix")
        for name in ("disk, page cache", "disk, cold") if hasattr(os, "posix_fadvise") else ("disk, page cache",):
            with self.engine("prefix") as engine:
                if name == "disk, cold":
                    drop_from_page_cache(files)  # after the start, which reads the headers
                times[name] = [self.first_token_s(engine, prompt, is_cached=True) for prompt in prompts]
        medians_s = {name: statistics.median(found) for name, found in times.items()}
        computed_s = medians_s["computed"]
        rows = [[name, f"{1e3 * took_s:.1f}", f"1/{computed_s / took_s:.1f}"] for name, took_s in medians_s.items()]
        say(f"\nTime to the first token of {self.num_tokens:,} tokens, medians of {self.rounds}\n")
        say(harness.table(["from", "ms", "of computing"], rows))
        num_mb = sum(file.size for file in files) / 1e6
        say(f"\nSaved {num_mb:.0f} MB in {save_s:.2f} s: {num_mb / save_s:.0f} MB/s.")
        ratio = medians_s["disk, page cache"] / computed_s
        is_held = ratio <= BAR
        verdict = f"bar: 1/{1 / BAR:.0f}, {'held' if is_held else 'MISSED'}"
        say(f"From disk in 1/{1 / ratio:.1f} of the time of computing ({verdict}).")
        return is_held

    # What the levels cost when nothing is found

    def measure_cost(self) -> None:
        """Print the throughput at 0 % hits. Cached content is evicted all the time."""
        num_prompts, num_tokens, num_outputs = (256, 560, 520) if self.is_shape else (16, self.num_tokens // 2, 8)
        pool = {"num_blocks": 12_000} if self.is_shape else {"kv_memory": "256M"}
        levels = self.engine("cost", has_host=bool(self.args.host), **pool)
        with self.engine(**pool) as plain, levels as tiered:

            def tokens_per_s(engine: Engine, _round: int) -> float:
                session = self.session(engine)
                prompts = self.prompts(engine, num_prompts, num_tokens)
                start_s = time.perf_counter()
                for prompt in prompts:
                    session.add(prompt, num_outputs)
                session.run()
                return num_prompts * (num_tokens + num_outputs) / (time.perf_counter() - start_s)

            sides = {"without": partial(tokens_per_s, plain), "with": partial(tokens_per_s, tiered)}
            found = harness.alternate(sides, self.rounds, num_warm_ups=1)
            num_evictions = tiered.scheduler.cache.stats().num_evictions
        what = f"{num_prompts} prompts of {num_tokens:,} tokens, {num_outputs} tokens each"
        say(f"\nThroughput at 0 % hits: {what}\n")
        rows = [[name, f"{statistics.median(values):.1f}"] for name, values in found.items()]
        say(harness.table(["disk cache", "tok/s"], rows))
        costs = [1 - one for one in harness.ratios(found["with"], found["without"])]
        listed = ", ".join(f"{one:+.1%}" for one in costs)
        say(f"\nThe disk cache costs {statistics.median(costs):+.1%} (median of {self.rounds} rounds: {listed}).")
        say(f"{num_evictions:,} blocks were evicted.")

    # Host memory

    def measure_host(self) -> None:
        """Print the medians of loads, apart for those beside which an evicted prefix was saved."""
        num_blocks = NUM_POOL_PROMPTS * (self.num_tokens // 32 + 3)
        loads: list[tuple[float, int]] = []
        with self.engine(has_host=True, num_blocks=num_blocks) as engine:
            prompts = self.prompts(engine, NUM_PROMPTS)
            computed_s = statistics.median(self.first_token_s(engine, one, is_cached=False) for one in prompts)
            settle(engine)
            for prompt in 4 * prompts:  # each was evicted by the others
                num_saves = _num_saves(engine)
                took_s = self.first_token_s(engine, prompt, is_cached=True)
                settle(engine)
                loads.append((took_s, _num_saves(engine) - num_saves))
        few = num_blocks // 12  # the ends of prompts are saved beside every load
        for what, times in (
            ("nothing to save", [took_s for took_s, num_saves in loads if num_saves <= few]),
            ("while as much is saved", [took_s for took_s, num_saves in loads if num_saves > few]),
        ):
            if times:
                ms, ratio = 1e3 * statistics.median(times), computed_s / statistics.median(times)
                say(f"from host memory, {what}: {ms:.1f} ms, computed in {1e3 * computed_s:.1f} ms: {ratio:.1f} times")

    # Other answers

    def measure_others(self) -> None:
        """Print the time per token of answers, beside prefixes that come from host memory and from disk."""
        num_outputs = 40 if self.args.quick else 400
        num_blocks = NUM_POOL_PROMPTS * (self.num_tokens // 32 + 4) + NUM_STREAMS * (num_outputs // 32 + 4)
        with self.engine("others", has_host=bool(self.args.host), num_blocks=num_blocks) as engine:
            prefixes = self.prompts(engine, 2 * NUM_POOL_PROMPTS, self.num_tokens - 64)
            for prompt in prefixes:
                self.first_token_s(engine, prompt)
            settle(engine)
            sides = {
                "alone": lambda _: self._ms_per_token(engine, num_outputs, []),
                "beside": lambda _: self._ms_per_token(engine, num_outputs, prefixes),
            }
            found = harness.alternate(sides, self.rounds)
        alone_ms, beside_ms = (statistics.median(values) for values in found.values())
        times = harness.median_ratio(found["beside"], found["alone"])
        what = f"time per token of {NUM_STREAMS} answers {alone_ms:.2f} ms"
        say(f"{what}, beside loads and saves {beside_ms:.2f} ms: {times:.3f} times")

    def _ms_per_token(self, engine: Engine, num_outputs: int, prefixes: Sequence[Prompt]) -> float:
        """Prefixes are sent one after the other meanwhile."""
        session = self.session(engine)
        streams = [session.add(prompt, num_outputs) for prompt in self.prompts(engine, NUM_STREAMS, 32)]
        loads: list[Track] = []
        while not all(track.is_finished for track in streams):
            if prefixes and streams[0].token_times and (not loads or loads[-1].is_finished):
                (tail,) = self.prompts(engine, 1, 16)
                loads.append(session.add(prefixes[len(loads) % len(prefixes)] + tail, 1))
            session.step()
        session.run()
        say(f"  {len(loads)} prefixes, {sum(track.num_cached_tokens for track in loads):,} tokens cached")
        times_s = streams[0].token_times
        return 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def stored_files(folder: Path) -> list[StoredFile]:
    return [file for space in space_folders(folder) for file in list_files(space).files]


def drop_from_page_cache(files: Sequence[StoredFile]) -> None:
    """Make the next reads of the files go to the disk. Folders and sizes stay in memory. On Linux only."""
    for file in files:
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def settle(engine: Engine) -> None:
    """Wait until the saves in flight have ended."""
    while engine.transfers is not None and engine.transfers.has_work:
        engine.step()
        time.sleep(0.001)


def _num_saves(engine: Engine) -> int:
    return sum(tier.num_saves for tier in engine.scheduler.cache.stats().levels)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--only", type=harness.names(PARTS), default=PARTS[:2], help=f"some of {','.join(PARTS)}")
    parser.add_argument("--model", help="default: quire's default model; or a shape of gpu.py")
    parser.add_argument("--host", help="host memory, such as 12G; on a GPU only")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke test: the bar does not decide")
    args = parser.parse_args()
    others, is_held = Others(), True
    with tempfile.TemporaryDirectory(prefix="quire-restart-") as folder:
        bench = Bench(args, Path(folder))
        for part in args.only:
            is_held = getattr(bench, f"measure_{part}")() is not False and is_held
    say(harness.others_line(others.share()))
    sys.exit(0 if is_held or args.quick or bench.is_shape else 1)


if __name__ == "__main__":
    main()
