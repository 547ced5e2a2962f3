"""Benchmark of a prompt prefix shared by several requests."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from quire.bench.driver import Bench, Track
from quire.bench.report import (
    LIVE_TOKENS,
    TAIL_TOKENS,
    PrefixReport,
    SiblingReport,
)


@dataclass(frozen=True, slots=True)
class _Sharing:
    cold: Track
    live: Track
    hit: Track
    ref_counts: tuple[int, ...]  # of the blocks that both block tables contain, while both requests run
    num_copies: int


def measure_prefix(bench: Bench) -> PrefixReport:
    config, repeats = bench.config, []
    for number in range(config.rounds):
        bench.begin_stage(f"prefix, {number + 1} of {config.rounds}")
        repeats.append(_share_head(bench))
    siblings = _run_siblings(bench)
    cold_s, hit_s = median(one.cold.ttft_s for one in repeats), median(one.hit.ttft_s for one in repeats)
    shared_blocks = min(len(one.ref_counts) for one in repeats)
    counts = [count for one in repeats for count in one.ref_counts]
    copies = max(one.num_copies for one in repeats)
    cached_tokens = min(min(one.hit.num_cached_tokens, one.live.num_cached_tokens) for one in repeats)
    num_full = config.head_tokens // bench.engine.capacity.block_size
    is_held = set(counts) == {2} and copies == 0 and shared_blocks == num_full and cached_tokens == config.head_tokens
    return PrefixReport(
        head_tokens=config.head_tokens,
        repeats=len(repeats),
        ttft_cold_ms=cold_s * 1000,
        ttft_hit_ms=hit_s * 1000,
        ttft_live_ms=median(one.live.ttft_s for one in repeats) * 1000,
        ratio=cold_s / hit_s,
        shared_blocks=shared_blocks,
        ref_count_min=min(counts, default=0),
        ref_count_max=max(counts, default=0),
        copies=copies,
        cached_tokens=cached_tokens,
        siblings=siblings,
        is_held=is_held,
    )


def _share_head(bench: Bench) -> _Sharing:
    """Run one request with an empty cache, one while the first still decodes, and one after both."""
    head = bench.prompts.make(bench.config.head_tokens)
    tails = bench.prompts.tails(3, TAIL_TOKENS)
    scheduler = bench.engine.scheduler
    bench.engine.clear_cache()
    with bench.session() as session:
        cold = session.add([*head, *tails[0]], LIVE_TOKENS)
        session.run(until=lambda: bool(cold.token_times))
        live = session.add([*head, *tails[1]], 4)
        session.run(until=lambda: bool(live.token_times))
        tables = [request.block_table for one in (cold, live) if (request := scheduler.get(one.request_id)) is not None]
        common = [mine for mine, other in zip(*tables, strict=False) if mine == other] if len(tables) == 2 else []
        ref_counts = tuple(scheduler.cache.pool.blocks[block_id].ref_count for block_id in common)
        session.run()
        hit = session.add([*head, *tails[2]], 4)
        session.run()
    return _Sharing(cold, live, hit, ref_counts, session.num_copies)


def _run_siblings(bench: Bench) -> SiblingReport:
    config, block_size = bench.config, bench.engine.capacity.block_size
    bench.begin_stage(f"prefix, {config.num_siblings} siblings")
    bench.engine.clear_cache()
    prompt = bench.prompts.make(config.head_tokens)
    with bench.session() as session:
        tracks = [session.add(prompt, 4) for _ in range(config.num_siblings)]
        session.run()
    num_computed = session.num_prefill_tokens
    return SiblingReport(
        num_requests=config.num_siblings,
        prompt_tokens=len(prompt),
        prefill_tokens=num_computed,
        prefill_tokens_unshared=config.num_siblings * len(prompt),
        copies=session.num_copies,
        ttft_max_ms=max(track.ttft_s for track in tracks) * 1000,
        is_held=num_computed <= len(prompt) + (config.num_siblings - 1) * block_size,
    )
