"""Measures models with windows and recurrent states on one GPU: prompts sent again, siblings, memory of long contexts.

    PYTHONPATH=. python benchmarks/gpu_hybrid.py --models qwen3.5-0.8b,qwen3.5-35b-a3b
    PYTHONPATH=. python benchmarks/gpu_hybrid.py --quick     # a smoke run with tiny shapes, on any machine

Random weights in real shapes, bf16, token ids in and out; the engine is driven directly, as in gpu.py. Figures are
medians. vLLM's figures for the same prompt are in docs/performance.md.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import harness
from gpu_machine import Machine, engine_config, loaded
from gpu_workloads import FULL, GEMMA4, GPT_OSS, QUICK, QWEN35, QWEN35_MOE, Scale, random_prompt
from harness import say

from quire.backends.kv_memory import KVSpec
from quire.bench.driver import driven

MODELS = (QWEN35, QWEN35_MOE, GPT_OSS, GEMMA4)


def resend(machine: Machine, scale: Scale, repeats: int) -> None:
    """Send one prompt twice, then a next turn that appends tokens."""
    length, added = (100, 16) if scale.is_quick else (6000, 200)
    times: list[tuple[float, ...]] = []
    for seed in range(repeats + 1):  # the first round captures graphs and fills caches of the allocator
        rng = Random(seed)
        prompt = random_prompt(rng, scale, length)
        first_ms, _ = machine.send(prompt, keeps_cache=False)
        second_ms, again = machine.send(prompt)
        turn = prompt + again.tokens + random_prompt(rng, scale, added)
        third_ms, last = machine.send(turn)
        times.append((first_ms, second_ms, third_ms, again.num_cached_tokens, len(turn) - last.num_cached_tokens))
    first, second, third, reused, computed = map(statistics.median, zip(*times[1:], strict=True))
    say(
        f"  {length:,} tokens: first {first:.1f} ms; again {second:.2f} ms, {first / second:.1f} times faster,"
        f" {reused:,.0f} reused;"
        f" + {added} tokens {third:.2f} ms, {computed:.0f} of {length + 1 + added:,} computed"
    )


def siblings(machine: Machine, scale: Scale) -> None:
    """Start requests with one prompt in different steps, while the first is being computed."""
    count, length = (4, 60) if scale.is_quick else (64, 2000)
    prompt = random_prompt(Random(99), scale, length)
    machine.engine.clear_cache()
    started_s = time.perf_counter()
    with driven(machine.engine, machine.next_id) as session:
        for _ in range(count):
            session.add(prompt, 16)
            session.step()
        session.run()
    say(
        f"  {count} staggered siblings of {length:,} tokens: {session.num_prefill_tokens:,} prompt tokens computed"
        f" (once: {length + count - 1:,}), {time.perf_counter() - started_s:.2f} s"
    )


def long_context(machine: Machine, scale: Scale, length: int) -> None:
    """Compute one long prompt, and report the most memory that its blocks and states took."""
    engine, size = machine.engine, machine.engine.capacity.block_size
    engine.clear_cache()
    kv_spec = KVSpec.of(machine.spec).within(engine.capacity.max_model_len)
    block_bytes, window_bytes = kv_spec.full_block_bytes(size, 2), kv_spec.window_block_bytes(size, 2)
    most = 0.0
    with driven(engine, machine.next_id) as session:
        session.add(random_prompt(Random(5), scale, length), 8)
        while engine.has_work:
            session.step()
            stats = engine.scheduler.cache.stats()
            num_window_blocks = stats.windows.num_in_use if stats.windows else stats.num_in_use
            num_states = stats.states.num_in_use if stats.states else 0
            held = stats.num_in_use * block_bytes + num_window_blocks * window_bytes
            most = max(most, held + num_states * kv_spec.state_bytes(2))
    whole = -(-(length + 8) // size) * kv_spec.block_bytes(size, 2)
    say(f"  {length:,} tokens hold at most {most / 1e9:.3f} GB; all layers whole: {whole / 1e9:.2f} GB")


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--models", type=harness.names(MODELS), default=MODELS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    scale = replace(QUICK, max_model_len=256) if args.quick else replace(FULL, max_model_len=40_960)
    config = engine_config(scale, args.device, kv_memory=8 << 20 if args.quick else None)
    with TemporaryDirectory() as folder:
        for name in args.models:
            with loaded(name, scale, config, Path(folder) / name) as machine:
                resend(machine, scale, 1 if args.quick else args.repeats)
                siblings(machine, scale)
                long_context(machine, scale, 200 if args.quick else 32_768)


if __name__ == "__main__":
    main()
