"""Every family has the distributions of `transformers` with the packed weights.

In prefill, decode, chunks, shared and forked blocks, and after preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.native.library import Floats
from quire.backends.native.model import Batch, Engine, NativeModel, may_attend_in_halves
from quire.backends.native.packing import pack_model
from quire.backends.native.runner import NativeRunner
from quire.weights.config import spec_from_config
from quire.weights.opening import open_checkpoint
from quire.weights.spec import Activation
from quire.weights.tensors import expected_tensors
from tests.backends.native.matrices import floats
from tests.backends.native.references import RoundedReference, llama_name
from tests.backends.torch.families import FAMILIES
from tests.backends.torch.rig import Answer, Rig
from tests.weights.makers import config, write_folder

# Of log-probabilities, over three layers: inputs in 16 bits, and sometimes a key or value that rounds to the other fp16
# neighbour. Measured over all families and shapes: 9e-4 at most, 1.8e-4 on average.
BOUND = 2e-3
MEAN_BOUND = 4e-4
HALF_BOUND = 1.5e-2  # attention in fp16: 8e-3 at most with gemma3, 1.4e-3 with the others
OTHER_EXPERT_BOUND = 0.5  # rows for which a router chose another expert
ROUNDED_BOUND = {"balanced": 0.1, "fast": 0.15}
pytestmark = pytest.mark.sweep("file")
HEAD = 70  # tokens: two full blocks and a tail

Pair = tuple[RoundedReference, Rig]


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


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
    attention = replace(spec_from_config(HAND_CONFIG, {}, "m", "F32").attention, has_qkv_bias=has_bias)
    assert may_attend_in_halves(attention, precision) == (precision != "exact" and not has_bias)


@pytest.mark.sweep("test")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_of_all_lengths(pair: Pair, overlap: bool) -> None:
    """Prompts in progress and decodes in one pass. With a step in flight, decodes continue from the runner's sample."""
    reference, rig = pair
    rig.reset(max_chunk_tokens=16, max_num_batched_tokens=40, overlap=overlap)
    prompts = [random_prompt(10 + length, length) for length in (1, 2, 31, 32, 33, 64, 100, 5)]
    ids = [rig.start(prompt, 6 + i) for i, prompt in enumerate(prompts)]
    answers = rig.run(*ids)
    for prompt, request_id in zip(prompts, ids, strict=True):
        check(reference, prompt, answers[request_id])


def test_prompt_logprobs(pair: Pair) -> None:
    reference, rig = pair
    rig.reset(max_chunk_tokens=16)
    prompt = random_prompt(5, HEAD)
    answer = rig.answer(prompt, 2, prompt_logprobs=160)
    assert sorted(answer.prompt_rows) == list(range(1, HEAD))
    found = torch.stack([answer.prompt_rows[position] for position in range(1, HEAD)])
    check_rows(reference, found, reference.logprobs(prompt)[:-1])


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

HANDS = 32  # values computed in one pass, each alone in its group of 32
HAND_CONFIG = config(
    hidden_size=2 * HANDS,
    intermediate_size=HANDS * 32,
    num_hidden_layers=1,
    num_attention_heads=HANDS,
    num_key_value_heads=HANDS,
    head_dim=32,
    rope_theta=1e12,  # the last pair of a head is almost not rotated
    rms_norm_eps=1e-6,
)
HAND_SIZE = 127 / 128  # a number that packing preserves
HAND_NORMED = HAND_SIZE / np.sqrt(HAND_SIZE**2 + 1e-6)
HAND_BOUND = 1e-6


def hand_made(folder: Path, activation: Activation, block_size: int, **weights: Floats) -> Floats:
    """Return the last hidden state [E] of token 1 after token 0, with weights of zero except for these.

    The embeddings are HAND_SIZE everywhere, but negative in one place of token 0.
    """
    arrays = {
        llama_name(name): np.full(shape, float(len(shape) == 1), np.float32)
        for name, shape in expected_tensors(spec_from_config(HAND_CONFIG, {}, "m", "F32")).items()
    }
    arrays["model.embed_tokens.weight"][:] = HAND_SIZE
    arrays["model.embed_tokens.weight"][0, 0] = -HAND_SIZE
    for name in arrays:
        arrays[name] = weights.get(name.split(".")[-2], arrays[name])
    checkpoint = open_checkpoint(write_folder(folder, HAND_CONFIG, arrays))
    engine = Engine(1)
    mlp = replace(checkpoint.spec.mlp, activation=activation)
    spec = checkpoint.spec = replace(checkpoint.spec, layers=(replace(checkpoint.spec.layers[0], mlp=mlp),))
    model = NativeModel(
        spec, pack_model(checkpoint, 1), engine, num_blocks=4, block_size=block_size, max_model_len=8, precision="exact"
    )
    tokens, rows = np.array([0, 1], np.int32), np.array([0, 2], np.int32)
    hidden: Floats = np.empty((2, spec.hidden_size), np.float32)
    tables = np.array([[1, 2]], np.int32)
    model.forward(Batch(tokens, tokens, rows, tables, ()), np.array([], np.int32), hidden)
    engine.close()
    checkpoint.close()
    return hidden[1:]


def check_hand(found: Floats, added: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    """Compare after adding `added` to the first places of the residual stream and taking the norm."""
    expected = np.full(2 * HANDS, HAND_SIZE)
    expected[:HANDS] += added
    expected /= np.sqrt((expected**2).mean() + 1e-6)
    assert np.abs(found - expected).max() < HAND_BOUND * np.abs(expected).max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("activation", Activation)
def test_activations_by_hand(activation: Activation, tmp_path: Path) -> None:
    shape = (HANDS * 32, 2 * HANDS)
    gate, up, down = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape[::-1], np.float32)
    gate[::32, 1] = np.linspace(-7, 5, HANDS)
    up[::32, 1] = 1
    down[np.arange(HANDS), np.arange(HANDS) * 32] = 1
    found = hand_made(tmp_path / "m", activation, 32, gate_proj=gate, up_proj=up, down_proj=down)
    x = floats(gate).unpack()[::32, 1].astype(np.float64) * HAND_NORMED
    other = floats(up).unpack()[::32, 1].astype(np.float64) * HAND_NORMED
    sigmoid = x if activation is Activation.SILU else np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
    if activation is Activation.CLAMPED_SWIGLU:
        x, other = np.minimum(x, 7), np.clip(other, -7, 7) + 1
        sigmoid = 1.702 * x
    check_hand(found, x / (1 + np.exp(-sigmoid)) * other * floats(down).unpack()[0, 0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block_size", [1, 32])
def test_attention_by_hand(block_size: int, tmp_path: Path) -> None:
    """Each head weighs a value of 0, of the first token, against one of 1: the weight is a sigmoid of the score."""
    scores = np.linspace(-20, 20, HANDS).astype(np.float16)
    shape = (HANDS * 32, 2 * HANDS)
    q, k, v = (np.zeros(shape, np.float32) for _ in range(3))
    o = np.zeros(shape[::-1], np.float32)
    q[15::32, 1] = 127 / 64  # dimension 15 of a head is half of the last pair
    k[15::32, 0] = k[15::32, 1] = scores / 2
    v[::32, 0] = v[::32, 1] = 127 / 256
    o[np.arange(HANDS), np.arange(HANDS) * 32] = 127 / 64
    found = hand_made(tmp_path / "m", Activation.SILU, block_size, q_proj=q, k_proj=k, v_proj=v, o_proj=o)
    keys = (floats(k).unpack()[15::32, :2].sum(1) * HAND_NORMED).astype(np.float16).astype(np.float64)
    weights = 1 / (1 + np.exp(-keys * 127 / 64 * HAND_NORMED / np.sqrt(32)))
    check_hand(found, weights * 127 / 128 * 127 / 64)
