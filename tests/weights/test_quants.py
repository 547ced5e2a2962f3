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
from quire.weights.checkpoint import BLOCKS, RawTensor, TensorInfo, TensorType
from quire.weights.quants import to_float32
from tests.weights.makers import set_scales

QUANTISED = [kind for kind, block in BLOCKS.items() if block.num_elements > 1]


def random_blocks(kind: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Make random codes with small scales: random bits would often be infinite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, BLOCKS[kind].num_bytes), np.uint8)
    set_scales(kind, blocks, rng.uniform(-1, 1, (num_blocks, 2)))
    return blocks


def raw(kind: TensorType, shape: tuple[int, ...], data: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(TensorInfo("x", kind, shape, data.size), data)


@pytest.mark.parametrize("shape", [(256, 256), (4, 64, 256)])  # a matrix; those of four experts
@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_are_those_of_gguf(kind: TensorType, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert np.array_equal(to_float32(raw(kind, shape, coded)), expected.reshape(shape), equal_nan=True)


def test_a_gguf_package_that_is_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    monkeypatch.setattr(gguf, "GGMLQuantizationType", SimpleNamespace(__members__={}))
    with pytest.raises(UnsupportedModel, match="the installed gguf package does not decode TQ2_0: upgrade it"):
        to_float32(raw(TensorType.TQ2_0, (1, 256), random_blocks(TensorType.TQ2_0, 1, seed=3)))


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (TensorType.F32, np.array([1, -2, np.inf], "<f4")),
        (TensorType.F16, np.array([1, -2, np.inf], "<f2")),
        (TensorType.BF16, np.array([0x3F80, 0xC000, 0x7F80], "<u2")),
    ],
)
def test_plain_floats(kind: TensorType, stored: NDArray[Any]) -> None:
    found = to_float32(raw(kind, (3,), stored.view(np.uint8)))
    assert found.dtype == np.float32
    assert found.tolist() == [1.0, -2.0, float("inf")]
    assert found.flags.writeable


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
