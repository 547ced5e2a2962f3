"""Attention over contexts of several pieces (csrc/forward.c, PIECE), which threads may divide among them.

The same bits on any number of threads, alone, in a batch and in chunks; and the distributions of `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.contract import random_prompt
from tests.backends.native.references import RoundedReference
from tests.backends.native.test_invariance import check_same, native
from tests.backends.native.test_models import HALF_BOUND, check
from tests.backends.torch.rig import Answer, Rig


def heads(count: int, num_kv_heads: int, size: int) -> dict[str, int]:
    sizes = {"num_attention_heads": count, "num_key_value_heads": num_kv_heads, "head_dim": size}
    return {"hidden_size": 16 * count, **sizes}


pytestmark = pytest.mark.sweep("file")

# Models with heads that share one KV head, a window that spans pieces, global and local layers
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "seven heads on one": ("llama", heads(7, 1, 8)),
    "three kv heads": ("qwen3", {**heads(6, 3, 32), "layer_types": ["full_attention"] * 2}),
    "a window": ("mistral with a window", {"sliding_window": 300}),
    "a window and a kv head each": ("mistral with a window", {"sliding_window": 300, **heads(4, 4, 16)}),
    "local layers": ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}),
}
LENGTHS = (1100, 5, 255, 256, 257, 700, 530)
PROMPTS = [random_prompt(length, length) for length in LENGTHS]
NUM_TOKENS = 4
Long = tuple[RoundedReference, Rig]


@pytest.fixture(scope="module", params=[(name, is_half) for name in MODELS for is_half in (0, 1)], ids=str)
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Long, float]]:
    name, is_half = request.param
    family, shape = MODELS[name]
    folder = tmp_path_factory.mktemp("model")
    reference = RoundedReference(family, folder, max_position_embeddings=1200, num_hidden_layers=2, **shape)
    rig = Rig(folder, backend="native", precision="exact", num_blocks=200)
    for layer in native(rig).model.layers:
        layer.is_half_attention = is_half
    yield (reference, rig), HALF_BOUND if is_half else 4e-3
    rig.engine.close()


@pytest.fixture(scope="module")
def alone(long: tuple[Long, float]) -> list[Answer]:
    """Answers on one thread, with the whole prompt at once and nothing cached."""
    rig, answers = long[0][1], []
    native(rig).use_threads(1)
    for prompt in PROMPTS:
        rig.reset(enable_prefix_caching=False, max_num_batched_tokens=2048, max_chunk_tokens=2048)
        answers.append(rig.answer(prompt, NUM_TOKENS, prompt_logprobs=160))
    return answers


@pytest.mark.kept("0)")
def test_distributions(long: tuple[Long, float], alone: list[Answer]) -> None:
    (reference, _), bound = long
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        check(reference, prompt, answer, bound=bound)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.kept("0)")
def test_one_sequence(long: tuple[Long, float], alone: list[Answer], num_threads: int) -> None:
    """Chunks of one token, of a tile and a few, and of more than a piece."""
    rig = long[0][1]
    native(rig).use_threads(num_threads)
    for chunk in (300, 19):
        rig.reset(enable_prefix_caching=False, max_chunk_tokens=chunk)
        check_same(rig.answer(PROMPTS[0], NUM_TOKENS), alone[0])
    rig.reset(enable_prefix_caching=False, max_chunk_tokens=1)
    check_same(rig.answer(PROMPTS[4], NUM_TOKENS, prompt_logprobs=160), alone[4])


@pytest.mark.parametrize("block_size", [4, 64, 256])
def test_block_sizes(block_size: int, kernels: str, tmp_path: Path) -> None:
    """Pieces of many blocks and of one, with every variant of the kernels."""
    reference = RoundedReference("mistral with a window", tmp_path, max_position_embeddings=800, sliding_window=300)
    rig = Rig(tmp_path, backend="native", precision="exact", block_size=block_size, num_blocks=1600 // block_size)
    rig.reset(enable_prefix_caching=False)
    expected = rig.answer(PROMPTS[5], NUM_TOKENS)
    check(reference, PROMPTS[5], expected, bound=4e-3)
    native(rig).use_threads(3)
    rig.reset(enable_prefix_caching=False, max_chunk_tokens=37)
    check_same(rig.answer(PROMPTS[5], NUM_TOKENS), expected)
    assert kernels in rig.engine.runner.facts().backend
    rig.engine.close()
