"""The default model on MLX answers a question."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.generation import GenerationParams
from quire.engine.llm import LLM


@pytest.mark.nightly
def test_the_default_model_answers(default_model: Path) -> None:
    with LLM(default_model, backend="mlx", kv_memory="64M") as llm:
        assert "4 bits" in llm.engine.runner.facts().dtype
        (answer,) = llm.chat("What is the capital of Japan?", GenerationParams(temperature=0.0, max_tokens=12))
    assert answer.text == "The capital of Japan is Tokyo."
