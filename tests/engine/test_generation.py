"""Generation: every delta and every error reaches its reader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import FinishReason
from quire.engine.generation import Delta, EngineOutput, Generation, GenerationParams
from quire.engine.model_text import ModelText
from quire.errors import RequestFailed, WorkerDied

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> ModelText:
    model = ModelText.open(tiny_model)
    model.close()  # only the tokenizer is needed
    return model


class Feed:
    """A generation of one sample, and functions that feed it."""

    def __init__(self, text: ModelText, updated: asyncio.Event | None = None) -> None:
        self.cancelled: list[Generation] = []
        request = text.request((5, 6), GenerationParams())
        self.generation = Generation(request, text.tokenizer, (1,), updated=updated)
        self.generation.on_cancel = self.cancelled.append

    def push(self, *tokens: int, reason: FinishReason | None = None) -> Delta:
        output = EngineOutput(1, tokens, reason, self.generation.num_cached_tokens, None, (), None, None)
        delta = self.generation.push(0, output)
        self.generation.deliver(delta)
        return delta


async def test_take_returns_all_new_deltas(text: ModelText) -> None:
    feed = Feed(text)
    assert (feed.generation.take(), feed.generation.is_over) == ([], False)
    first, second = feed.push(70), feed.push(71)
    assert (feed.generation.take(), feed.generation.is_over) == ([first, second], False)
    last = feed.push(72, reason=FinishReason.LENGTH)
    assert not feed.generation.is_over  # there is something to take
    assert (feed.generation.take(), feed.generation.is_over) == ([last], True)
    assert (feed.generation.take(), feed.generation.is_over) == ([], True)


async def test_a_failure_is_raised_after_earlier_deltas(text: ModelText) -> None:
    """Even if the event was cleared after the failure; otherwise the reader would wait forever."""
    updated = asyncio.Event()
    feed = Feed(text, updated)
    delta = feed.push(70)
    feed.generation.fail(RequestFailed("broken"))
    feed.generation.fail(WorkerDied("later"))
    updated.clear()
    assert (feed.generation.take(), feed.generation.is_over) == ([delta], False)
    await updated.wait()
    with pytest.raises(RequestFailed, match="broken"):
        feed.generation.take()
    assert feed.generation.is_over


async def test_every_change_sets_the_event(text: ModelText) -> None:
    updated = asyncio.Event()
    feed = Feed(text, updated)
    explanation = CacheExplanation(1, 0, 1, StopReason.DIVERGED)
    for happen in (
        lambda: feed.generation.start(0.0, 1, explanation),
        lambda: feed.push(70),
        lambda: feed.generation.fail(RequestFailed("x")),
    ):
        updated.clear()
        happen()
        assert updated.is_set()
    assert feed.generation.is_started  # even with a wait of 0 s
    assert (feed.generation.queued_s, feed.generation.num_cached_tokens) == (0.0, 1)
    assert feed.generation.cache == explanation


async def test_iterating_yields_the_deltas_before_the_failure(text: ModelText) -> None:
    feed = Feed(text)
    feed.push(70)
    feed.push(71)
    feed.generation.fail(WorkerDied("gone"))
    deltas = feed.generation.deltas()
    assert [(await anext(deltas)).token_ids for _ in range(2)] == [(70,), (71,)]
    with pytest.raises(WorkerDied, match="gone"):
        await anext(deltas)
