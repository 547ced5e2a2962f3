"""The default model on MLX, as a 4-bit folder of mlx-lm: a question, and greedy answers with and without batching."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.generation import GenerationParams
from quire.engine.llm import LLM
from tests.backends.contract import random_prompt
from tests.backends.mlx.architectures import write_model
from tests.backends.mlx.converting import write_mlx_folder
from tests.backends.torch.rig import Rig
from tests.equality import CONDITIONS, answer_alone, compare, compare_on_hits
from tests.selection import mostly_nightly

NUM_TOKENS = 12


@pytest.mark.nightly
def test_a_4_bit_folder_answers(default_model: Path, tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "SmolLM2-135M-Instruct-4bit", default_model)
    with LLM(folder, backend="mlx", kv_memory="64M") as llm:
        assert "4 bits" in llm.engine.runner.facts().dtype
        (answer,) = llm.chat("What is the capital of Japan?", GenerationParams(temperature=0.0, max_tokens=12))
    assert answer.text == "The capital of Japan is Tokyo."


@pytest.mark.parametrize("num_prompts", mostly_nightly([10, 100], 1))
def test_greedy_answers_alone_and_in_company(num_prompts: int, tmp_path: Path) -> None:
    """`make equality BACKEND=mlx` does the same with the default model, which takes long on a CPU."""
    rig = Rig(write_model(tmp_path / "m", "llama"), backend="mlx", dtype="float32", num_blocks=1500, max_num_seqs=16)
    prompts = [tuple(random_prompt(number, 3 + number % 45)) for number in range(num_prompts)]
    alone = answer_alone(rig, prompts, NUM_TOKENS)
    outcomes = [compare(rig, alone, condition) for condition in CONDITIONS]
    outcomes.append(compare_on_hits(rig, alone))
    for outcome in outcomes:
        assert not outcome.differences, outcome
        assert outcome.num_prompts == num_prompts
        assert outcome.num_tokens > 0.95 * num_prompts * NUM_TOKENS
    assert sum(outcome.num_preemptions for outcome in outcomes)
    assert outcomes[-1].num_cached_tokens
    rig.engine.close()
