"""Benchmark of drafts: one answer that repeats its prompt, with and without them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from quire.bench.driver import Bench
from quire.bench.report import DraftsReport
from quire.engine.worker.step_estimate import StepEstimator, work_of


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: tuple[int, ...]
    tokens_per_s: float  # after the first token
    num_steps: int
    num_drafted: int
    num_accepted: int


def measure_drafts(bench: Bench) -> DraftsReport | None:
    """Measure in turn without and with drafts. None: the backend verifies none for this model, or they are off."""
    if not bench.engine.speculation.is_on:
        return None
    config, estimator = bench.config, StepEstimator()
    plain: list[_Run] = []
    drafted: list[_Run] = []
    for number in range(config.rounds):
        text = bench.prompts.make(config.prompt_tokens)
        prompt = text + text + text[: len(text) // 2]
        for runs, has_drafts in ((plain, False), (drafted, True)):
            bench.begin_stage(f"{'with' if has_drafts else 'without'} drafts, {number + 1} of {config.rounds}")
            runs.append(_run(bench, prompt, estimator, has_drafts=has_drafts))
    num_drafted, num_accepted = sum(one.num_drafted for one in drafted), sum(one.num_accepted for one in drafted)
    num_steps, num_plain_steps = sum(one.num_steps for one in drafted), sum(one.num_steps for one in plain)
    num_tokens = sum(len(one.tokens) for one in drafted)
    ratios = [after.tokens_per_s / before.tokens_per_s for before, after in zip(plain, drafted, strict=True)]
    return DraftsReport(
        rounds=config.rounds,
        num_output_tokens=num_tokens,
        tokens_per_s=median(one.tokens_per_s for one in drafted),
        tokens_per_s_without=median(one.tokens_per_s for one in plain),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        steps=num_steps,
        steps_without=num_plain_steps,
        draft_tokens=num_drafted,
        draft_tokens_accepted=num_accepted,
        acceptance=num_accepted / num_drafted if num_drafted else None,
        tokens_per_step=num_tokens / num_steps,
        is_equal=[one.tokens for one in plain] == [one.tokens for one in drafted],
    )


def _run(bench: Bench, prompt: list[int], estimator: StepEstimator, *, has_drafts: bool) -> _Run:
    """Run one request. Where rows cost time, the scheduler learns the cost of a step, as in a worker."""
    engine = bench.engine
    scheduler, ledger = engine.scheduler, engine.scheduler.policy.ledger
    before = scheduler.num_drafted, scheduler.num_accepted, ledger.cost
    engine.clear_cache()
    engine.speculation.is_on = has_drafts
    try:
        with bench.session() as session:
            track = session.add(prompt, bench.config.output_tokens)
            while engine.has_work:
                start_s = time.perf_counter()
                session.step()
                if engine.capacity.has_costly_rows and session.plan is not None:
                    estimator.learn(work_of(session.plan), time.perf_counter() - start_s)
                    ledger.cost = estimator.cost()
    finally:
        engine.speculation.is_on = True
        ledger.cost = before[2]
    num_after = len(track.token_times) - 1
    return _Run(
        tuple(track.tokens),
        num_after / (track.token_times[-1] - track.first_s),
        session.num_steps,
        scheduler.num_drafted - before[0],
        scheduler.num_accepted - before[1],
    )
