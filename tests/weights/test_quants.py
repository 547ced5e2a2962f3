"""Each stored type as float32, compared with the decoders of gguf and with numbers that a type can hold."""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import MissingExtra, UnsupportedModel
from quire.weights import quants
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.gguf import BLOCKS
from quire.weights.quants import to_float32
from tests.weights.makers import set_scales

QUANTISED = [kind for kind, block in BLOCKS.items() if block.num_elements > 1]
# Types whose codes are places in tables of vectors.
VECTORS = [kind for kind in QUANTISED if kind.startswith(("IQ1", "IQ2", "IQ3"))]


def random_blocks(kind: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Make random codes with small scales: random bits would often be infinite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, BLOCKS[kind].num_bytes), np.uint8)
    set_scales(kind, blocks, rng.uniform(-1, 1, (num_blocks, 2)))
    return blocks


def raw(kind: TensorType, shape: tuple[int, ...], data: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(TensorInfo("x", kind, shape, data.size), data)


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_are_those_of_gguf(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including infinite and subnormal scales. quire decodes three of the types itself.

    `test_gguf_blocks_keep_their_values` compares the same numbers with quire's own readers of nine types.
    """
    from gguf import GGMLQuantizationType, dequantize

    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 3 * 256)  # several chunks, the last one short
    block = BLOCKS[kind]
    coded = np.random.default_rng(5).integers(0, 256, (256, 256 // block.num_elements * block.num_bytes), np.uint8)
    coded[:, 0] = np.arange(256)
    with np.errstate(all="ignore"):
        expected = dequantize(coded, GGMLQuantizationType[kind])
    assert np.array_equal(to_float32(raw(kind, (256, 256), coded)), expected, equal_nan=True)


@pytest.mark.parametrize("kind", VECTORS)
def test_known_blocks_of_vectors(kind: TensorType) -> None:
    """If all bits but those of the scale are 0, every code is the first vector with the smallest factor.

    That vector is 8 or 4 or 1 times a factor of 1/8, 1/4 or 1; in IQ1 it is -1 with a shift of 1/8.
    """
    block = np.zeros((3, BLOCKS[kind].num_bytes), np.uint8)
    set_scales(kind, block, np.array([[0.5, 0], [-3.0, 0], [0, 0]]))
    found = to_float32(raw(kind, (3, 256), block))
    first = -0.875 if kind.startswith("IQ1") else 1.0
    assert found.tolist() == [[0.5 * first] * 256, [-3.0 * first] * 256, [0.0] * 256]


@pytest.mark.parametrize("kind", QUANTISED)
def test_tensors_of_experts_are_decoded_like_matrices(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor [N, rows, columns] is N matrices. Chunks do not change the numbers."""
    num_experts, rows, columns = 3, 5, 512
    blocks = random_blocks(kind, num_experts * rows * columns // BLOCKS[kind].num_elements, seed=4)
    coded = blocks.reshape(num_experts * rows, -1)
    whole = to_float32(raw(kind, (num_experts, rows, columns), coded))
    assert whole.shape == (num_experts, rows, columns)
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) > 20
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 2 * columns)
    for expert in range(num_experts):
        alone = to_float32(raw(kind, (rows, columns), coded[expert * rows : (expert + 1) * rows]))
        assert np.array_equal(alone, whole[expert])


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "MXFP4"])
def test_types_that_gguf_quantises_keep_numbers_they_can_hold(kind: str) -> None:
    from gguf import GGMLQuantizationType, quantize

    rng = np.random.default_rng(6)
    values = rng.choice((-6, -1, 0, 0.5, 4, 6) if kind == "MXFP4" else (-0.5, 0, 0.5), (8, 512)).astype(np.float32)
    values[:, ::32] = 6 if kind == "MXFP4" else 0.5
    coded = quantize(values, GGMLQuantizationType[kind])
    assert np.array_equal(to_float32(raw(TensorType(kind), values.shape, coded)), values)


def test_a_gguf_package_that_is_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    monkeypatch.setattr(gguf, "GGMLQuantizationType", SimpleNamespace(__members__={}))
    with pytest.raises(UnsupportedModel, match="the installed gguf package does not decode TQ2_0: upgrade it"):
        to_float32(raw(TensorType.TQ2_0, (1, 256), random_blocks(TensorType.TQ2_0, 1, seed=3)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantising_with_gguf_and_decoding_is_nearly_exact(kind: str) -> None:
    from gguf import GGMLQuantizationType, quantize

    values = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    coded = quantize(values, GGMLQuantizationType[kind])
    found = to_float32(raw(TensorType(kind), values.shape, coded))
    step = {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.2, "Q5_0": 0.15, "Q5_1": 0.1}[kind]
    assert np.abs(found - values).max() < step * 1.5


@pytest.mark.parametrize(("kind", "dtype"), [(TensorType.F32, "<f4"), (TensorType.F16, "<f2")])
def test_plain_floats(kind: TensorType, dtype: str) -> None:
    values = np.arange(12, dtype=dtype).reshape(3, 4)
    found = to_float32(raw(kind, (3, 4), values.view(np.uint8)))
    assert found.dtype == np.float32
    assert found.tolist() == values.tolist()
    assert found.flags.writeable


def test_bfloat16() -> None:
    data = np.array([0x3F80, 0xC000, 0x7F80], "<u2").view(np.uint8)
    assert to_float32(raw(TensorType.BF16, (3,), data)).tolist() == [1.0, -2.0, float("inf")]


def test_without_gguf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gguf(name: str, *rest: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(MissingExtra, match=r"needs gguf, which is not installed: \S+ -m pip install gguf"):
        to_float32(raw(TensorType.Q8_0, (1, 32), random_blocks(TensorType.Q8_0, 1, seed=3)))
    assert to_float32(raw(TensorType.F32, (1,), np.zeros(4, np.uint8))).tolist() == [0.0]
