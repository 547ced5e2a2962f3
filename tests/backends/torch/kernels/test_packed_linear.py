"""Products of few rows with packed matrices, compared with fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels import packed_linear
from quire.backends.torch.kernels.linear import PARTS
from quire.backends.torch.kernels.packed_linear import (
    can_split,
    packed_row_product,
    packed_tile_product,
)
from quire.backends.torch.packed import PackedFormat, PackedWeight
from quire.weights.packed import CodeType
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE, unit
from tests.backends.torch.kernels.test_linear import exact_product, exact_result, randn

# T rows, I inputs, O outputs

FP32 = torch.float32
BF16 = torch.bfloat16
DOT_DTYPES = [FP32, BF16] if DEVICE == "cuda" else [FP32]  # the interpreter multiplies the bits of bf16
FORMATS = {
    "fp8 per output": PackedFormat(CodeType.FP8, 1, 0),
    "fp8 per matrix": PackedFormat(CodeType.FP8, 1000, 0),
    "fp8 in blocks": PackedFormat(CodeType.FP8, 16, 128),  # files have 128 rows, which are slow to test
    "int8 per output": PackedFormat(CodeType.INT8, 1, 0),
    "int8 in 64": PackedFormat(CodeType.INT8, 1, 64),
    "int4 per output": PackedFormat(CodeType.INT4, 1, 0),
    "int4 per output with zeros": PackedFormat(CodeType.INT4, 1, 0, has_zeros=True),
    "int4 in 128": PackedFormat(CodeType.INT4, 1, 128),
    "int4 in 128 with zeros": PackedFormat(CodeType.INT4, 1, 128, has_zeros=True),
    "int4 in 64": PackedFormat(CodeType.INT4, 1, 64),
    "int4 in 32 with zeros": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True),
    "int4 in 32 with minima": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True),
    "int4 in 128 with minima": PackedFormat(CodeType.INT4, 1, 128, has_zeros=True, has_half_zeros=True),
    "int4 per output with minima": PackedFormat(CodeType.INT4, 1, 0, has_zeros=True, has_half_zeros=True),
    "int8 in 16": PackedFormat(CodeType.INT8, 1, 16),
    "int8 in 32 with minima": PackedFormat(CodeType.INT8, 1, 32, has_zeros=True, has_half_zeros=True),
    "int8 per output with minima": PackedFormat(CodeType.INT8, 1, 0, has_zeros=True, has_half_zeros=True),
    "fp4 in 32": PackedFormat(CodeType.FP4, 1, 32),
    "fp4 in 16": PackedFormat(CodeType.FP4, 1, 16),
}
# Some shapes end within a tile, a strip, a block of rows and a step of columns.
SHAPES = {0: [(7, 96), (35, 1184)], 128: [(7, 128), (35, 1152)]}  # by group columns
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp"), pytest.mark.sweep("file")]


def random_weight(num_outputs: int, num_inputs: int, format: PackedFormat, dtype: torch.dtype = FP32) -> PackedWeight:
    """Make a matrix such that products are about 1, with another scale in every group."""
    weight = PackedWeight.empty(num_outputs, num_inputs, format, dtype, DEVICE)
    weight.invent(torch.Generator(DEVICE).manual_seed(num_outputs + num_inputs), num_inputs**-0.5)
    weight.scales.mul_(0.5 + torch.rand(weight.scales.shape, device=DEVICE).to(weight.scales.dtype))
    return weight


def shapes(format: PackedFormat) -> list[tuple[int, int]]:
    return SHAPES[128 if format.group_columns else 0]


def near(got: Tensor, exact: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """Sums of 4-bit codes of one row are less precise than fp32: the codes are added to 2048 first."""
    assert got.shape == exact.shape
    bound = roundings * unit(dtype)
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * bound + 1e-3, atol=bound + 4e-4)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every output with NaN first, so that an element that is not written is found."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, shape: Any, **options: Any) -> Tensor:
        out = new_empty(self, shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


ACTIVATIONS = (None, Activation.SILU, Activation.GELU_TANH)  # None: not gated


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows(name: str, activation: Activation | None, dtype: torch.dtype) -> None:
    for size, num_inputs in shapes(FORMATS[name]):
        weight = random_weight(2 * size if activation else size, num_inputs, FORMATS[name], dtype)
        x, bias = randn(2, num_inputs, dtype=dtype), randn(len(weight), dtype=dtype)
        whole = packed_row_product(x, weight, bias, activation)
        near(whole, exact_result(x, exact_weight(weight), bias, activation), dtype, roundings=4 if activation else 1)
        assert torch.equal(packed_row_product(x[:1].clone(), weight, bias, activation), whole[:1])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "activation"), [(3, None), (17, None), (40, None), (9, ACTIVATIONS[1]), (9, ACTIVATIONS[2])]
)
@pytest.mark.parametrize("name", FORMATS)
def test_tiles(name: str, num_rows: int, activation: Activation | None, dtype: torch.dtype) -> None:
    for size, num_inputs in shapes(FORMATS[name]):
        weight = random_weight(2 * size if activation else size, num_inputs, FORMATS[name], dtype)
        x, bias = randn(num_rows, num_inputs, dtype=dtype), randn(len(weight), dtype=dtype)
        exact = exact_result(x, exact_weight(weight), bias, activation)
        near(packed_tile_product(x, weight, bias, activation), exact, dtype, roundings=4 if activation else 1)
        if activation is None and can_split(size, num_inputs):
            parts = packed_tile_product(x, weight, bias, num_parts=PARTS)
            assert parts.shape == (PARTS, num_rows, size)
            assert parts.dtype == FP32
            near(parts.sum(0), exact, dtype)


def test_a_tile_of_fp4_in_16() -> None:
    """The only format whose bytes are fp4 codes with two groups in a chunk: the halves have scales of their own."""
    weight, x = random_weight(7, 128, FORMATS["fp4 in 16"]), randn(3, 128)
    near(packed_tile_product(x, weight, None), exact_product(x, exact_weight(weight), None), FP32)


def exact_weight(weight: PackedWeight) -> Tensor:
    """Decode in fp32, without rounding to the model's type."""
    wide = PackedWeight(weight.codes, weight.scales, weight.zeros, weight.order, weight.format, FP32)
    return wide.decode()


@pytest.mark.parametrize("multiply", [packed_row_product, packed_tile_product])
def test_a_row_does_not_depend_on_the_others(multiply: Callable[[Tensor, PackedWeight, None], Tensor]) -> None:
    weight = random_weight(70, 256, FORMATS["int4 in 128"])
    x = randn(2, 256)
    swapped = multiply(x.flip(0), weight, None).flip(0)
    assert torch.equal(swapped, multiply(x, weight, None))


def test_strips_of_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the strips for matrices of these shapes on a small matrix."""
    for shape in ((28672, 4096), (4096, 14336), (4096, 2048), (1024, 4096)):
        strip = packed_linear.row_strip(*shape)
        assert strip.outputs % 2 == 0  # pairs of gate and up
        assert strip.width % (512 * strip.num_warps) == 0  # 16 bytes per thread
        monkeypatch.setattr(packed_linear, "row_strip", lambda _outputs, _bytes, strip=strip: strip)
        weight = random_weight(18, 2 * strip.width + 128, FORMATS["int4 in 128"])
        x = randn(1, weight.shape[1])
        near(packed_row_product(x, weight, None), exact_product(x, exact_weight(weight), None), FP32)
        monkeypatch.undo()
