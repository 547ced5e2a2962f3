"""Measures models with windows and recurrent states on one GPU: prompts sent again, siblings, memory of long contexts.

    PYTHONPATH=. python benchmarks/gpu_hybrid.py --models qwen3.5-0.8b,qwen3.5-35b-a3b
    PYTHONPATH=. python benchmarks/gpu_hybrid.py --quick     # a smoke run with tiny shapes, on any machine

Random weights in real shapes, bf16, token ids in and out; the engine is driven directly, as in gpu.py. Figures are
medians. vLLM's figures for the same prompt are in ANCHORS of gpu_workloads.py or in docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from gpu_driving import Machine, Settings
from gpu_workloads import FULL, GEMMA4, GPT_OSS, QUICK, QWEN35, QWEN35_MOE, Scale, Workload, random_prompt

from quire.backends.kv_memory import KVSpec
from quire.core.values import PackedPrompt, SamplingParams

MODELS = (QWEN35, QWEN35_MOE, GPT_OSS, GEMMA4)
ONE = SamplingParams(temperature=0, max_tokens=1)


def send(machine: Machine, prompt: list[int], *, keeps_cache: bool = True) -> tuple[float, float, int, list[int]]:
    """Return the milliseconds of packing and of the answer of one token, the tokens found in the cache, the answer.

    A server packs the prompts of requests in another process than the engine's (`PackedPrompt`).
    """
    started_s = time.perf_counter()
    packed = PackedPrompt.of(prompt)
    packed_ms = 1000 * (time.perf_counter() - started_s)
    run = machine.run(Workload("send", [packed], [ONE]), keeps_cache=keeps_cache)  # type: ignore[list-item]
    return packed_ms, 1000 * run.wall_s, run.answers[0].num_cached, run.answers[0].tokens


def resend(machine: Machine, scale: Scale, repeats: int) -> None:
    """Send one prompt twice, then a next turn that appends tokens."""
    length, added = (100, 16) if scale.is_quick else (6000, 200)
    firsts, seconds, thirds, packings = [], [], [], []
    num_cached = num_left = 0
    for seed in range(repeats + 1):
        rng = Random(seed)
        prompt = random_prompt(rng, scale, length)
        _, first_ms, _, _ = send(machine, prompt, keeps_cache=False)
        packing_ms, second_ms, num_cached, answer = send(machine, prompt)
        turn = prompt + answer + random_prompt(rng, scale, added)
        _, third_ms, num_found, _ = send(machine, turn)
        num_left = len(turn) - num_found
        if seed:  # the first round captures graphs and fills caches of the allocator
            firsts.append(first_ms)
            seconds.append(second_ms)
            thirds.append(third_ms)
            packings.append(packing_ms)
    first, second, third, packing = map(statistics.median, (firsts, seconds, thirds, packings))
    print(
        f"  {length:,} tokens: first {first:.1f} ms; again {second:.2f} ms, {first / second:.1f} times faster,"
        f" {num_cached:,} reused (with packing: {first + packing:.1f} ms; {second + packing:.2f} ms);"
        f" + {added} tokens {third:.2f} ms, {num_left} of {length + 1 + added:,} computed",
        flush=True,
    )


def siblings(machine: Machine, scale: Scale) -> None:
    """Start requests with one prompt in different steps, while the first is being computed."""
    count, length = (4, 60) if scale.is_quick else (64, 2000)
    prompt = random_prompt(Random(99), scale, length)
    engine = machine.engine
    engine.clear_cache()
    num_computed = 0

    def note(plan: object) -> None:
        nonlocal num_computed
        num_computed += sum(min(p.length, max(length - p.start, 0)) for p in plan.slices)  # type: ignore[attr-defined]

    engine.on_plan = note
    started_s, num_added = time.perf_counter(), 0
    while num_added < count or engine.has_work:
        if num_added < count:
            engine.add(10**6 + num_added, prompt, SamplingParams(temperature=0.6, seed=num_added, max_tokens=16))
            num_added += 1
        engine.step()
    took_s = time.perf_counter() - started_s
    print(
        f"  {count} staggered siblings of {length:,} tokens: {num_computed:,} prompt tokens computed"
        f" (once: {length + count - 1:,}), {took_s:.2f} s",
        flush=True,
    )


def long_context(machine: Machine, scale: Scale, length: int) -> None:
    """Compute one long prompt, and report the most memory that its blocks and states took."""
    engine = machine.engine
    engine.clear_cache()
    kv_spec, size = KVSpec.of(machine.spec).within(machine.engine.capacity.max_model_len), engine.capacity.block_size
    costs = kv_spec.full_block_bytes(size, 2), kv_spec.window_block_bytes(size, 2), kv_spec.state_bytes(2)
    most = 0.0
    engine.add(2 * 10**6, random_prompt(Random(5), scale, length), SamplingParams(temperature=0, max_tokens=8))
    while engine.has_work:
        engine.step()
        stats = engine.scheduler.cache.stats()
        counts = (
            stats.num_in_use,
            stats.windows.num_in_use if stats.windows else stats.num_in_use,
            stats.states.num_in_use if stats.states else 0,
        )
        most = max(most, sum(count * cost for count, cost in zip(counts, costs, strict=True)))
    whole = -(-(length + 8) // size) * kv_spec.block_bytes(size, 2)
    print(f"  {length:,} tokens hold at most {most / 1e9:.3f} GB; all layers whole: {whole / 1e9:.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    length = 200 if options.quick else 32_768
    scale = replace(QUICK, max_model_len=256) if options.quick else replace(FULL, max_model_len=40_960)
    settings = Settings(options.device, kv_bytes=8 << 20 if options.quick else None)
    with TemporaryDirectory() as folder:
        for name in options.models.split(","):
            with Machine(name, scale, settings, Path(folder) / name) as machine:
                facts = machine.engine.runner.facts()
                print(f"{name}: loaded in {machine.loaded_s:.1f} s, {facts.kv_bytes / 1e9:.1f} GB of KV", flush=True)
                print(f"  {machine.engine.capacity}", flush=True)
                machine.prepare()
                resend(machine, scale, 1 if options.quick else options.repeats)
                siblings(machine, scale)
                long_context(machine, scale, length)


if __name__ == "__main__":
    main()
