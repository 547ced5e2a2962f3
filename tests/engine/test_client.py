"""EngineClient with a real worker process and the fake backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.core.values import Priority
from quire.engine.generation import Generation, PinPrefix
from quire.errors import InvalidRequest, QueueFull, RequestFailed
from tests.engine.serving import SLOW, client, generate, request, result, stats, until, usage, worker_pid

pytestmark = pytest.mark.anyio

LONG = "The quick brown fox jumps over the lazy dog. " * 8


# The start of a worker


async def test_a_worker_reports_its_facts_and_start_times(tiny_model: Path) -> None:
    async with client(tiny_model, backend="torch", num_blocks=50) as engine:
        await engine.start()
        facts = engine.facts
        assert facts is not None
        assert facts.facts.backend.startswith("torch ")
        assert facts.facts.weight_bytes == (tiny_model / "model.safetensors").stat().st_size - header_bytes(tiny_model)
        assert (
            facts.facts.kv_bytes == 50 * 32 * 2 * 2 * 2 * 16 * 4
        )  # blocks, tokens, k and v, layers, heads, size, fp32
        assert set(facts.timings_s) == {"import", "weights", "warm_up"}
        assert all(took_s > 0 for took_s in facts.timings_s.values())
        # the warm-up is not counted
        found = await stats(engine)
        assert found.cache.num_queried_tokens == found.cache.num_cached == found.num_steps == 0


def header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


# Failures


@pytest.mark.parametrize("place", ["start", "push_token", "push"])
async def test_a_callback_that_raises_ends_its_request_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """All outputs of a step arrive in one message: an exception must not skip those of other requests."""
    original = getattr(Generation, place)

    def fail(generation: Generation, *values: Any) -> Any:
        if generation is bad[0]:
            raise RuntimeError("a broken callback")
        return original(generation, *values)

    bad: list[Generation | None] = [None]

    async with client(tiny_model, **SLOW) as engine:
        expected = [(await generate(engine, request(engine, f"prompt {i}"))).text for i in range(4)]
        monkeypatch.setattr(Generation, place, fail)
        generations = [await engine.submit(request(engine, f"prompt {i}")) for i in range(4)]
        bad[0] = generations[0]
        results = await asyncio.gather(*(result(one) for one in generations), return_exceptions=True)
        assert isinstance(results[0], RequestFailed)
        assert [one.text for one in results[1:] if not isinstance(one, BaseException)] == expected[1:]
        assert await usage(engine) == (0, 0, 0)


async def test_cancel_is_sent_even_if_the_buffer_is_full(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client(tiny_model, backend="fake") as engine:
        generation = await engine.submit(request(engine, max_tokens=2000))
        with monkeypatch.context() as patch:
            patch.setattr("quire.engine.worker.client.MAX_UNSENT", 1)
            with pytest.raises(QueueFull):
                await engine.submit(request(engine))
            generation.cancel()
        assert await usage(engine) == (0, 0, 0)


# Statistics


async def test_waiting_requests_are_counted_by_tier(tiny_model: Path) -> None:
    async with client(tiny_model, **SLOW, max_num_seqs=1) as engine:
        running = await engine.submit(request(engine, max_tokens=3000, priority=Priority.HIGH))
        await until(lambda: running.is_started)
        others = [
            await engine.submit(request(engine, f"{priority.name} {i}", priority=priority))
            for i in range(2)
            for priority in (Priority.NORMAL, Priority.LOW)
        ]
        found = await stats(engine)
        assert [tier.num_waiting for tier in found.tiers] == [0, 2, 2]
        sizes = [len(other.request.prompt) for other in others]
        assert [tier.num_tokens for tier in found.tiers] == [0, sizes[0] + sizes[2], sizes[1] + sizes[3]]
        later = await stats(engine)
        assert later.tiers[0].oldest_age_s == 0
        assert later.tiers[1].oldest_age_s > found.tiers[1].oldest_age_s > 0
        assert later.num_steps >= found.num_steps > 0
        assert (later.num_running, later.num_waiting, later.num_violations) == (1, 4, 0)
        running.cancel()
        for other in others:
            await result(other)
            assert other.queued_s is not None
            assert other.queued_s > 0


# The cache


async def test_pinning_and_clearing_the_cache(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        prompt = tuple(request(engine, LONG).prompt.tokens)
        await engine.clear_cache()
        assert (worker_pid(engine), engine.facts, engine.capacity) == (None, None, None)  # no worker, no cache
        await generate(engine, request(engine, LONG, salt="mine", pins=(PinPrefix("p", 40, 60.0),)))
        assert (await stats(engine)).cache.num_pinned == 1
        await engine.clear_cache()
        found = await stats(engine)
        assert (found.cache.num_pins, found.cache.num_cached, found.cache.num_in_use) == (0, 0, 0)
        assert (await engine.explain(prompt, "mine")).num_tokens == 0
        with pytest.raises(InvalidRequest, match="salt"):
            await engine.explain(prompt, "\n")


async def test_pins_beyond_the_prompt_and_too_many_pins_are_refused(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        with pytest.raises(InvalidRequest, match=r"pins\[1\]\.num_tokens = 999 .* tokens"):
            request(engine, pins=(PinPrefix("a", 1, 1.0), PinPrefix("a", 999, 1.0)))
        with pytest.raises(InvalidRequest, match="pins has 9 entries, more than 8"):
            request(engine, pins=(PinPrefix("a", 1, 1.0),) * 9)
