"""The trace of coding agents, and how many tokens of it are reused by a model with recurrent states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.errors import InvalidRequest
from quire.sim.simulator import SimConfig, SimReport, StepTime, simulate
from quire.sim.traces import HEADER, TraceRequest, agents

STEP_TIME = StepTime(base_ms=15, token_us=20, context_us=0)  # long steps, so that there are fewer of them
CONFIG = SimConfig(num_blocks=32_768, max_num_seqs=16)


def test_the_trace_depends_on_the_seed_only() -> None:
    assert agents(80, 4.0, 3) == agents(80, 4.0, 3) != agents(80, 4.0, 4)
    with pytest.raises(InvalidRequest, match="rate"):
        agents(10, 0, 0)


def test_prompts_are_whole_histories_that_continue_earlier_answers() -> None:
    trace = agents(400, 4.0, 0)
    assert [one.arrival_s for one in trace] == sorted(one.arrival_s for one in trace)
    systems = {one.shared[0] for one in trace}
    assert 2 <= len(systems) <= 4
    assert all(3000 <= count <= 8000 for _, count in systems)
    answers: set[str] = set()
    num_continued = 0
    for one in trace:
        assert one.prompt_tokens == sum(count for _, count in one.shared)
        assert one.shared[-1] == HEADER
        names = [name for name, _ in one.shared if name.startswith("answer ")]
        assert {name.removesuffix(" without reasoning") for name in names} <= answers
        num_continued += bool(names)
        answers.add(one.output)
    assert num_continued > 200


def test_sessions_retry_start_sub_agents_and_omit_old_reasoning() -> None:
    trace = agents(600, 4.0, 0)
    prompts = [one.shared for one in trace]
    assert len(set(prompts)) < len(prompts)  # the same prompt again
    assert any(name.endswith("without reasoning") for prompt in prompts for name, _ in prompt)
    first = [prompt[1][0] for prompt in prompts if len(prompt) == 3]
    assert any(name.count(".") > 1 for name in first)  # the name of a sub-agent contains that of its parent


def run(trace: list[TraceRequest], num_states: int) -> SimReport:
    return simulate(trace, replace(CONFIG, num_states=num_states), STEP_TIME)


def test_95_percent_of_reusable_tokens_are_reused() -> None:
    """Half of the load and half of the states of docs/simulator.md."""
    trace = agents(120, 2.0, 0)
    reference = run(trace, 0).cache
    report = run(trace, 155)
    found = report.cache
    assert reference.num_recomputed_tokens == 0
    assert reference.num_hit_tokens > 0.8 * reference.num_queried_tokens
    assert found.num_hit_tokens > 0.95 * reference.num_hit_tokens
    assert found.states is not None
    assert found.states.num_evictions > 0
    assert sum(one.num_hit_tokens for one in report.records) == found.num_hit_tokens
    lost = sum(one.num_kv_tokens - one.num_hit_tokens for one in report.records)
    assert lost == found.num_recomputed_tokens


def test_boundaries_are_ends_of_messages_or_a_regular_interval() -> None:
    one = TraceRequest(0, 100, 5, shared=(("system", 40), ("question", 30)))
    assert CONFIG.boundaries(one) == (40, 70)
    history = TraceRequest(0, 244, 5, shared=(("system", 40), ("a", 50), HEADER, ("b", 60), ("c", 90), HEADER))
    assert CONFIG.boundaries(history) == (40, 154, 244)  # of 40, 90, 154 and 244: the system text and the last two
    assert replace(CONFIG, places=()).boundaries(one) == ()
    assert replace(CONFIG, places=(), interval=25).boundaries(one) == (25, 50, 75)
    assert replace(CONFIG, interval=40).boundaries(one) == (40, 70, 80)
