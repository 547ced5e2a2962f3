"""The native backend's distributions compared with fp32 of the same weights, over a part of `tests.precision`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.engine.model_text import ModelText
from tests.precision import (
    WHOLE,
    Model,
    Native,
    Passage,
    Reference,
    Rounded,
    Verdict,
    chat_passages,
    chat_prompts,
    compare,
    judge,
    judge_all,
    text_passages,
)

WINDOWS = (384, 640)  # of the text
NUM_CHATS = 6


@pytest.fixture(scope="module")
def text(default_model: Path) -> Iterator[ModelText]:
    text = ModelText.open(default_model)
    yield text
    text.close()


class Remembered:
    """The reference, computed once for each passage."""

    def __init__(self, path: Path) -> None:
        self.reference = Reference(path)
        self._known: dict[tuple[int, ...], np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}

    def logits(self, tokens: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self.reference.logits(tokens)
        return self._known[key]


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Iterator[Remembered]:
    remembered = Remembered(default_model)
    yield remembered
    remembered.reference.close()


@pytest.fixture(scope="module")
def passages(text: ModelText, reference: Remembered) -> list[Passage]:
    prompts = chat_prompts(text)[:: 50 // NUM_CHATS][:NUM_CHATS]
    answers = reference.reference.answer(prompts, text.eos_token_ids)
    return [*text_passages(text, WINDOWS, has_rest=False), *chat_passages(prompts, answers)]


def verdict_of(model: Model, reference: Model, passages: list[Passage]) -> Verdict:
    verdict = judge_all(passages, reference, model)[-1]
    print(verdict)
    assert verdict.name == WHOLE
    return verdict


@pytest.mark.nightly
def test_native_is_close_to_fp32(default_model: Path, reference: Remembered, passages: list[Passage]) -> None:
    native = Native(default_model)
    try:
        verdict = verdict_of(native, reference, passages)
    finally:
        native.close()
    assert verdict.misses == []
    assert verdict.num_positions > sum(WINDOWS)


@pytest.mark.nightly
def test_8_bits_everywhere_fail_the_comparison(
    default_model: Path, reference: Remembered, passages: list[Passage]
) -> None:
    """On prose the KL is near the limit, but one first token in thirty differs."""
    rounded = Rounded(default_model)
    try:
        misses = verdict_of(rounded, reference, passages[:1]).misses
    finally:
        rounded.close()
    assert any("top-1" in miss for miss in misses)


# The comparison itself


def test_distances_match_a_hand_calculation() -> None:
    """Two positions over two tokens: 3/4 and 1/4 against halves; the same; and the text is token 0, then 1."""
    reference = np.log(np.array([[3, 1], [1, 3]], np.float32))
    logits = np.log(np.array([[1, 1], [1, 3]], np.float32))
    found = compare(reference, logits, [0, 1])
    distance = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert found.kl == pytest.approx([distance, 0], abs=1e-7)
    assert found.is_same.tolist() == [True, True]
    assert found.surprise[0] == pytest.approx(np.log(2))
    assert found.reference_surprise[0] == pytest.approx(np.log(4))
    assert np.isnan(found.surprise[1])  # no token follows it
    whole = judge("", found)
    assert whole.num_positions == 2
    assert whole.max_kl == pytest.approx(distance)
    assert whole.perplexity_ratio == pytest.approx(0.5)
    assert len(whole.misses) == 2
