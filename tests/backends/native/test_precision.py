"""The native backend's distributions compared with fp32 of the same weights, over a part of `tests.precision`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.engine.model_text import ModelText
from tests.precision import (
    Native,
    Reference,
    chat_passages,
    chat_prompts,
    compare,
    judge,
    judge_all,
    text_passages,
)

WINDOWS = (384, 640)  # of the text
NUM_CHATS = 6


@pytest.mark.nightly
def test_native_is_close_to_fp32(default_model: Path) -> None:
    text, reference, native = ModelText.open(default_model), Reference(default_model), Native(default_model)
    prompts = chat_prompts(text)[:: 50 // NUM_CHATS][:NUM_CHATS]
    chats = chat_passages(prompts, reference.answer(prompts, text.eos_token_ids))
    verdict = judge_all([*text_passages(text, WINDOWS, has_rest=False), *chats], reference, native)[-1]
    assert verdict.misses == []
    assert verdict.num_positions > sum(WINDOWS)
    for one in (text, reference, native):
        one.close()


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
