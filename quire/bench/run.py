"""Runs the parts of the benchmark that use a model in this process: all except fairness."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.bench.drafts import measure_drafts
from quire.bench.driver import Bench
from quire.bench.report import (
    LIVE_TOKENS,
    TAIL_TOKENS,
    BenchConfig,
    BenchReport,
    Progress,
    Setup,
)
from quire.bench.shared_prefix import measure_prefix
from quire.bench.speedup import measure_speedup
from quire.engine.engine import Engine
from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.engine.llm import LLM


def run_bench(llm: LLM, config: BenchConfig, progress: Progress = lambda _stage: None) -> BenchReport:
    """Benchmark a loaded, idle model. Empties its prefix cache.

    The report has no fairness part: `quire/cli/bench_fairness.py` measures it on a server.
    """
    _check_fits(llm.engine, config)
    begun_s = time.perf_counter()
    bench = Bench(llm, config, progress)
    bench.warm_up()
    speedup = measure_speedup(bench) if "speedup" in config.parts else None
    prefix = measure_prefix(bench) if "prefix" in config.parts else None
    drafts = measure_drafts(bench) if "drafts" in config.parts else None
    llm.engine.clear_cache()
    return BenchReport(_setup(llm), config, time.perf_counter() - begun_s, speedup, prefix, None, drafts)


def _check_fits(engine: Engine, config: BenchConfig) -> None:
    """Raise if requests would exceed the context, or would have to wait or be preempted."""
    capacity, max_model_len = engine.capacity, engine.scheduler.max_model_len
    if engine.has_work:
        raise InvalidRequest("engine: it has requests; a benchmark needs an idle engine")
    longest = {
        "speedup": config.prompt_tokens + config.output_tokens,
        "prefix": config.head_tokens + TAIL_TOKENS + LIVE_TOKENS,
        "drafts": 5 * config.prompt_tokens // 2 + config.output_tokens,
    }
    for part, num_tokens in longest.items():
        if part in config.parts and num_tokens > max_model_len:
            raise InvalidRequest(f"{part} needs {num_tokens} tokens of context, and the model has {max_model_len}")
    if config.head_tokens % capacity.block_size:
        raise InvalidRequest(f"head_tokens = {config.head_tokens} is not a multiple of {capacity.block_size = }")
    most = max(config.batches, default=1) if "speedup" in config.parts else 1
    if most > capacity.max_num_seqs:
        raise InvalidRequest(f"clients = {most} is more than max_num_seqs = {capacity.max_num_seqs}")
    num_needed = most * (-(-longest["speedup"] // capacity.block_size) + 1)
    if "prefix" in config.parts:
        num_own = -(-(TAIL_TOKENS + LIVE_TOKENS) // capacity.block_size) + 2
        num_needed = max(num_needed, config.head_tokens // capacity.block_size + config.num_siblings * num_own)
    if "drafts" in config.parts:
        num_needed = max(num_needed, -(-longest["drafts"] // capacity.block_size) + 1)
    if num_needed > capacity.num_blocks - 1:
        raise InvalidRequest(f"num_blocks = {capacity.num_blocks} is too few: the run needs {num_needed + 1}")


def _setup(llm: LLM) -> Setup:
    capacity, facts = llm.engine.capacity, llm.engine.runner.facts()
    return Setup(
        model=llm.text.name,
        backend=facts.backend,
        device=facts.device,
        dtype=facts.dtype,
        num_threads=facts.num_threads,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=max(
            llm.config.max_num_batched_tokens or capacity.max_num_batched_tokens, capacity.max_num_seqs
        ),
    )
