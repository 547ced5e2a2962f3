"""Measures the tiers below the KV cache on one GPU: prefixes from host memory and from disk, and what they cost others.

    PYTHONPATH=. python benchmarks/gpu_tiers.py --only prefix,others,tree,cost
    PYTHONPATH=. python benchmarks/gpu_tiers.py --quick     # a smoke run with a tiny shape, on any machine

Random weights in real shapes, bf16, token ids in and out; the engine is driven directly, as in gpu.py.

    prefix    time to the first token of a prefix: computed, from host memory, from disk after a restart (in the page
              cache, and not)
    others    time per token of 16 answers, alone and beside a stream of prefixes that are loaded and saved
    tree      cached tokens of workload T in a pool of a third of its blocks, with a host tier, against a large pool
    cost      output tokens per second of workload A, at a hit rate of 0, with and without tiers, in turns
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

from gpu_driving import Machine, Settings
from gpu_workloads import FULL, LLAMA, QUICK, QWEN, Scale, Workload, random_prompt, workload_a

from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.composition import EngineConfig
from quire.engine.engine import Engine

PARTS = ("prefix", "others", "tree", "cost")
ONE = SamplingParams(temperature=0, max_tokens=1)
NUM_STREAMS = 16
NUM_ROUNDS = 3
GB = 1 << 30


class TieredSettings(Settings):
    """Settings with tiers."""

    host_bytes = 0
    disk_bytes = 0
    folder = ""
    num_blocks: int | None = None

    def config(self, scale: Scale, **changes: object) -> EngineConfig:
        changes |= {"num_blocks": self.num_blocks, "host_cache": self.host_bytes, "disk_cache": self.disk_bytes}
        if self.disk_bytes:
            changes["cache_dir"] = self.folder
        return super().config(scale, **changes)


def with_tiers(
    settings: Settings, *, num_blocks: int | None = None, host: int = 0, disk: int = 0, folder: Path | None = None
) -> Settings:
    found = TieredSettings(settings.device, settings.step_tokens, settings.chunk_tokens, None, settings.dtype)
    for name, value in (("num_blocks", num_blocks), ("host_bytes", host), ("disk_bytes", disk), ("folder", folder)):
        object.__setattr__(found, name, str(value) if name == "folder" else value)
    return found


def send(machine: Machine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Return milliseconds to the answer of one token, the cached tokens and the answer."""
    packed = PackedPrompt.of(prompt)
    run = machine.run(Workload("send", [packed], [ONE]), keeps_cache=True)  # type: ignore[list-item]
    return 1000 * run.wall_s, run.answers[0].num_cached, run.answers[0].tokens


def check_answers(answers: list[list[int]], found: list[TimedLoad]) -> None:
    """Compare with hits on the device. Where more than one token was computed, other kernels round differently."""
    for number, (expected, load) in enumerate(zip(answers, found, strict=True)):
        if load.answer != expected:
            print(
                f"  prompt {number}, {load.num_cached} tokens cached: {load.answer} instead of {expected}", flush=True
            )


def settle(engine: Engine) -> None:
    """Wait until the saves in flight have ended."""
    while engine.transfers is not None and engine.transfers.has_work:
        engine.step()
        time.sleep(0.001)


def report_tiers(machine: Machine) -> None:
    tiers = machine.engine.scheduler.cache.levels
    for tier in machine.engine.scheduler.cache.stats().levels:
        print(f"  {tier}", flush=True)
    if tiers is not None:
        speeds = [f"{one.level} {one.speed}" for one in tiers.levels]
        print(f"  {tiers.ns_per_token} ns per prompt token; {'; '.join(speeds)}", flush=True)


def leave_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def prefix(name: str, scale: Scale, settings: Settings, folder: Path, *, has_host: bool, has_cold: bool) -> None:
    length = 90 if scale.is_quick else 8191
    num_blocks = 3 * (-(-length // 32) + 2)
    prompts = [random_prompt(Random(seed), scale, length) for seed in range(5)]
    title = f"{name}, {length:,} tokens: from"
    if has_host:
        hosted = with_tiers(settings, num_blocks=num_blocks, host=12 * GB)
        with Machine(name, scale, hosted, folder / name) as machine:
            computed_ms, answers = compute(machine, prompts)
            loads = timed_loads(machine, 4 * prompts)  # each was evicted to host memory by the others
            check_answers(4 * answers, loads)
            report_loads(f"{title} host memory", computed_ms, loads, num_blocks)
            report_tiers(machine)
    cache = folder / "kv"
    tiered = with_tiers(settings, num_blocks=num_blocks, host=12 * GB * has_host, disk=20 * GB, folder=cache)
    with Machine(name, scale, tiered, folder / name) as machine:
        computed_ms, answers = compute(machine, prompts)
        print(f"  all saved: {machine.engine.save_cache(120)}", flush=True)
        report_tiers(machine)
    for is_cold in (False, True) if has_cold else (False,):
        loads = []
        for _ in range(1 if is_cold else 3):  # restarts
            if is_cold:
                leave_page_cache(cache)
            with Machine(name, scale, tiered, folder / name) as machine:
                machine.prepare()
                loads += timed_loads(machine, prompts)
                check_answers(answers, loads[-len(prompts) :])
                report_tiers(machine)
        where = "not in the page cache" if is_cold else "in the page cache"
        report_loads(f"{title} disk after a restart, {where}", computed_ms, loads, num_blocks)


def compute(machine: Machine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Compute prompts that are not cached. Return the median of their times in milliseconds, and the answers."""
    machine.prepare()
    times, answers = [], []
    for prompt in prompts:
        took_ms, num_cached, _ = send(machine, prompt)
        times.append(took_ms)
        assert num_cached == 0, num_cached
        # The reference is a hit on the device: a whole prompt and its last token are computed by other kernels.
        answers.append(send(machine, prompt)[2])
    settle(machine.engine)
    return statistics.median(times[1:]), answers


class TimedLoad(NamedTuple):
    took_ms: float
    num_cached: int
    answer: list[int]
    num_saved: int  # pieces that were saved in this time, because the load evicted them


def timed_loads(machine: Machine, prompts: list[list[int]]) -> list[TimedLoad]:
    """Send prompts, each after the transfers of the one before it."""
    loads = []
    for prompt in prompts:
        before = num_saves(machine)
        found = send(machine, prompt)
        settle(machine.engine)
        loads.append(TimedLoad(*found, num_saves(machine) - before))
    return loads


def num_saves(machine: Machine) -> int:
    return sum(tier.num_saves for tier in machine.engine.scheduler.cache.stats().levels)


def report_loads(title: str, computed_ms: float, loads: list[TimedLoad], num_blocks: int) -> None:
    """Print the medians of loads, apart for those beside which an evicted prefix was saved.

    The pool of `num_blocks` has three prefixes. A few blocks are saved beside every load: the ends of prompts.
    """
    most = num_blocks // 12
    for label, some in (
        ("", [one for one in loads if one.num_saved <= most]),
        (", while as much is saved", [one for one in loads if one.num_saved > most]),
    ):
        if some:
            took_ms = statistics.median(one.took_ms for one in some)
            ratio = computed_ms / took_ms
            print(f"{title}{label}: {took_ms:.1f} ms, computed in {computed_ms:.1f} ms: {ratio:.1f} times faster")
            print(f"  {[(round(one.took_ms, 1), one.num_cached) for one in some]}", flush=True)


def others(name: str, scale: Scale, settings: Settings, folder: Path, *, has_host: bool) -> None:
    """Measure the time per token of answers, beside prefixes that come from host memory and from disk."""
    length = 60 if scale.is_quick else 8000
    out = 40 if scale.is_quick else 400
    num_prefixes = 6
    num_blocks = 3 * (-(-length // 32) + 4) + NUM_STREAMS * (-(-(out + 64) // 32) + 1)
    tiered = with_tiers(settings, num_blocks=num_blocks, host=12 * GB * has_host, disk=20 * GB, folder=folder / "kv2")
    prefixes = [random_prompt(Random(100 + seed), scale, length) for seed in range(num_prefixes)]
    with Machine(name, scale, tiered, folder / name) as machine:
        machine.prepare()
        for prompt in prefixes:
            send(machine, prompt)
        settle(machine.engine)
        alone = [_stream(machine, scale, out, ()) for _ in range(3)]
        beside = [_stream(machine, scale, out, prefixes) for _ in range(3)]
        ratio = statistics.median(beside) / statistics.median(alone)
        print(
            f"{name}: time per token of {NUM_STREAMS} answers {statistics.median(alone):.2f} ms, beside loads and saves"
            f" {statistics.median(beside):.2f} ms: {ratio:.3f} times {[round(one, 2) for one in (*alone, *beside)]}",
            flush=True,
        )
        report_tiers(machine)


def _stream(machine: Machine, scale: Scale, out: int, prefixes: tuple[()] | list[list[int]]) -> float:
    """Return the mean milliseconds per token of the streams. Prefixes are sent one after the other meanwhile."""
    engine, rng = machine.engine, Random(7)
    sampling = SamplingParams(temperature=0, max_tokens=out)
    machine._num_requests += 10_000
    first = machine._num_requests
    for index in range(NUM_STREAMS):
        engine.add(first + index, random_prompt(rng, scale, 32), sampling)
    started_s = None
    num_left, num_sent, is_loading, num_loaded = NUM_STREAMS, 0, False, 0
    times: list[float] = []
    while num_left:
        if prefixes and not is_loading and started_s is not None:
            is_loading = True
            num_sent += 1
            prompt = prefixes[num_sent % len(prefixes)] + random_prompt(rng, scale, 16)
            engine.add(first + NUM_STREAMS + num_sent, prompt, ONE)
        for output in engine.step():
            if output.request_id >= first + NUM_STREAMS:
                is_loading = False
                num_loaded += output.num_cached_tokens
            elif output.request_id == first:
                times.append(time.perf_counter())
                started_s = started_s or times[0]
            if output.request_id < first + NUM_STREAMS and output.finish_reason is not None:
                num_left -= 1
    while engine.has_work:
        engine.step()
    if prefixes:
        print(
            f"  {num_sent} prefixes beside, {num_loaded:,} tokens cached, in {times[-1] - times[0]:.2f} s", flush=True
        )
    return 1000 * (times[-1] - times[0]) / (len(times) - 1)


def tree(name: str, scale: Scale, settings: Settings, folder: Path) -> None:
    with Machine(name, scale, settings, folder / name) as machine:
        machine.prepare()
        machine.run_tree()
        whole = machine.run_tree()
        num_used = machine.engine.scheduler.cache.stats().num_cached
    num_blocks = num_used // 3
    for host in (0, 40 * GB):
        small = with_tiers(settings, num_blocks=num_blocks, host=host)
        with Machine(name, scale, small, folder / name) as machine:
            machine.prepare()
            machine.run_tree()
            machine.engine.clear_cache()
            found = machine.run_tree()
            print(
                f"{name}, workload T in {num_blocks:,} of {num_used:,} blocks, host tier {host >> 30} GiB:"
                f" {found.num_cached:,} cached tokens of {whole.num_cached:,} in a large pool:"
                f" {found.num_cached / whole.num_cached:.3f}; {found.wall_s:.2f} s (large pool {whole.wall_s:.2f} s)",
                flush=True,
            )
            report_tiers(machine)


def cost(name: str, scale: Scale, settings: Settings, folder: Path, *, has_host: bool) -> None:
    """Run workload A with other tokens each time, so that nothing is reused, in a pool that evicts."""
    num_blocks = 200 if scale.is_quick else 12_000
    plain = with_tiers(settings, num_blocks=num_blocks)
    tiered = with_tiers(settings, num_blocks=num_blocks, host=8 * GB * has_host, disk=20 * GB, folder=folder / "kv3")
    rates: dict[str, list[float]] = {"without tiers": [], "with tiers": []}
    for number in range(NUM_ROUNDS):
        for label, chosen in (("without tiers", plain), ("with tiers", tiered)):
            with Machine(name, scale, chosen, folder / name) as machine:
                machine.prepare()
                machine.run(workload_a(scale, 0))
                workload = workload_a(scale, 1)
                rng = Random(1000 + number)
                for _ in range(NUM_ROUNDS):
                    prompts = [random_prompt(rng, scale, len(prompt)) for prompt in workload.prompts]
                    run = machine.run(workload._replace(prompts=prompts), keeps_cache=True)
                    rates[label].append(run.tokens_per_s)
                    print(f"  {label}: {run.tokens_per_s:,.0f} tok/s, {run.num_cached} cached", flush=True)
                report_tiers(machine)
    medians = {label: round(statistics.median(found)) for label, found in rates.items()}
    ratio = medians["without tiers"] / medians["with tiers"]
    print(f"{name}, workload A at 0 % hits: {medians}, {100 * (ratio - 1):.1f} % slower with tiers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--model", default=LLAMA)
    parser.add_argument("--tree-model", default=LLAMA)
    parser.add_argument("--cost-model", default=QWEN)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-cold", action="store_true", help="do not measure files outside of the page cache")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    scale = replace(QUICK, max_model_len=256) if options.quick else replace(FULL, max_model_len=8192)
    settings = Settings(options.device)
    has_host = not options.quick
    parts = options.only.split(",")
    with TemporaryDirectory() as name:
        folder = Path(name)
        if "prefix" in parts:
            prefix(options.model, scale, settings, folder, has_host=has_host, has_cold=not options.no_cold)
        if "others" in parts:
            others(options.model, scale, settings, folder, has_host=has_host)
        if "tree" in parts and has_host:
            tree(options.tree_model, scale, settings, folder)
        if "cost" in parts:
            cost(options.cost_model, scale, settings, folder, has_host=has_host)


if __name__ == "__main__":
    main()
