"""Every family has the distributions of `transformers` with the packed weights.

In prefill, decode, chunks, shared and forked blocks, and after preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.native.model import may_attend_in_halves
from quire.backends.native.runner import NativeRunner
from quire.weights.config import spec_from_config
from tests.backends.contract import HEAD, random_prompt
from tests.backends.native.references import RoundedReference
from tests.backends.torch.families import FAMILIES
from tests.backends.torch.rig import Answer, Rig
from tests.weights.makers import config

# Of log-probabilities, over three layers: inputs in 16 bits, and sometimes a key or value that rounds to the other fp16
# neighbour. Measured over all families and shapes: 9e-4 at most, 1.8e-4 on average.
BOUND = 2e-3
MEAN_BOUND = 4e-4
HALF_BOUND = 1.5e-2  # attention in fp16: 8e-3 at most with gemma3, 1.4e-3 with the others
OTHER_EXPERT_BOUND = 0.5  # rows for which a router chose another expert
ROUNDED_BOUND = {"balanced": 0.1, "fast": 0.15}
pytestmark = pytest.mark.sweep("file")

Pair = tuple[RoundedReference, Rig]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    reference = RoundedReference(request.param, folder)
    rig = Rig(folder, backend="native", precision="exact")
    yield reference, rig
    rig.engine.close()


def check(reference: RoundedReference, prompt: list[int], *answers: Answer, bound: float = BOUND) -> None:
    for answer in answers:
        assert answer.error is None
        expected = reference.logprobs([*prompt, *answer.tokens])
        found = torch.stack(answer.rows)
        check_rows(reference, found, expected[len(prompt) - 1 : len(prompt) - 1 + len(found)], bound)


def check_rows(reference: RoundedReference, found: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    """Compare distributions. A router may choose another expert where two have almost the same score, in a few rows."""
    bound *= reference.amplification
    difference = (found - expected).abs()
    is_close = difference.amax(1) < bound
    num_far = int((~is_close).sum())
    assert num_far <= (1 + len(found) // 10 if reference.has_experts else 0)
    assert float(difference.max()) < (OTHER_EXPERT_BOUND if num_far else bound)
    assert float(difference[is_close].mean()) < bound * MEAN_BOUND / BOUND


@pytest.mark.sweep("test")
def test_one_request(pair: Pair) -> None:
    reference, rig = pair
    rig.reset()
    prompt = random_prompt(1, HEAD)
    check(reference, prompt, rig.answer(prompt, 12))


@pytest.fixture
def in_halves(pair: Pair) -> Iterator[Pair]:
    """With attention in fp16, if the kernels support it, and everything else as exact as possible."""
    runner = pair[1].engine.runner
    assert isinstance(runner, NativeRunner)
    layers = runner.model.layers
    was = [layer.is_half_attention for layer in layers]
    for layer in layers:
        layer.is_half_attention = 1
    yield pair
    for layer, value in zip(layers, was, strict=True):
        layer.is_half_attention = value


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_attention_in_halves(in_halves: Pair, chunk: int) -> None:
    reference, rig = in_halves
    rig.reset(max_chunk_tokens=chunk)
    prompt = random_prompt(11, HEAD)
    # If an early token has another expert, all later ones change a little.
    check(reference, prompt, rig.answer(prompt, 12), bound=HALF_BOUND * (2 if reference.has_experts else 1))


@pytest.mark.parametrize("precision", ["fast", "balanced", "exact"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_when_attention_may_be_in_halves(precision: str, has_bias: bool) -> None:
    """A bias can make keys so large that fp16 sums lose their differences."""
    attention = replace(spec_from_config(config(), {}, "m", "F32").attention, has_qkv_bias=has_bias)
    assert may_attend_in_halves(attention, precision) == (precision != "exact" and not has_bias)


@pytest.mark.parametrize("precision", ROUNDED_BOUND)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_other_precisions_are_close(name: str, precision: str, tmp_path: Path) -> None:
    """Rounding affects 64 inputs in two groups most: this test only shows that the error is rounding."""
    reference = RoundedReference(name, tmp_path)
    rig = Rig(tmp_path, backend="native", precision=precision)
    prompt = random_prompt(6, HEAD)
    answer = rig.answer(prompt, 12)
    check(reference, prompt, answer, bound=ROUNDED_BOUND[precision])
    with pytest.raises(AssertionError):  # rounding does have an effect
        check(reference, prompt, answer)
    rig.engine.close()


SHAPES = {
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
    "a kv head each": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "three heads on one": {"hidden_size": 63, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "seven heads on one": {"hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8},
    "nine heads on one": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 32},
    "six heads on two": {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80},
    "heads of 6": {"hidden_size": 75, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6},
    "heads of 100": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 100},
    "odd sizes": {"hidden_size": 76, "intermediate_size": 101, "head_dim": 14, "vocab_size": 163},
    "narrow": {"hidden_size": 8, "intermediate_size": 7, "head_dim": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_other_shapes(name: str, shape: str, tmp_path: Path) -> None:
    """Sizes that are not multiples of each other."""
    reference = RoundedReference(name, tmp_path, **SHAPES[shape])
    rig = Rig(tmp_path, backend="native", precision="exact")
    prompts = [random_prompt(40 + length, length) for length in (3, 40, 77)]
    ids = [rig.start(prompt, 5) for prompt in prompts]
    answers = rig.run(*ids)
    for prompt, request_id in zip(prompts, ids, strict=True):
        check(reference, prompt, answers[request_id])
    rig.engine.close()


def test_rotation_of_a_part_of_a_head(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    reference = RoundedReference("phi3", tmp_path, rope_parameters=rope, head_dim=32)
    rig = Rig(tmp_path, backend="native", precision="exact")
    prompt = random_prompt(10, HEAD)
    check(reference, prompt, rig.answer(prompt, 5))
    rig.engine.close()


def test_every_variant(kernels: str, tmp_path: Path) -> None:
    """All that the hot loops do, with a window, two ropes, norms of heads and gelu."""
    reference = RoundedReference("gemma3", tmp_path)
    rig = Rig(tmp_path, backend="native", precision="exact")
    prompt = random_prompt(11, HEAD)
    check(reference, prompt, rig.answer(prompt, 12))
    assert kernels in rig.engine.runner.facts().backend
    rig.engine.close()


# Handmade weights, for which 8 bits hold every input: the rest of the error is the arithmetic between the products
