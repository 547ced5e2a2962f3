"""Products of many rows with packed matrices, compared with fp64."""

from __future__ import annotations

import pytest
import torch

from quire.backends.torch import fused_packed_linear
from quire.backends.torch.fused_packed_linear import FusedPackedLinear
from quire.backends.torch.kernels.packed_products import (
    Fp8Tile,
    expanded,
    fp8_product,
    fp8_tile,
    has_library_product,
    is_fp8,
    product_in_fp8,
    quantize_rows,
)
from quire.backends.torch.packed import PackedWeight
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.kernels.test_linear import exact_gated, exact_product, randn
from tests.backends.torch.kernels.test_packed_linear import FORMATS, exact_weight, random_weight

# T rows, I inputs, O outputs

FP32 = torch.float32
BLOCKS = "fp8 in blocks"
ERROR = 0.12 if DEVICE == "cpu" else 0.05  # of inputs in FP8; the interpreter rounds some to half their value


@pytest.mark.parametrize("num_inputs", [32, 128, 300, 1184])
@pytest.mark.parametrize("has_groups", [False, True])
def test_rows_are_rounded_to_fp8(num_inputs: int, has_groups: bool) -> None:
    torch.manual_seed(num_inputs)
    x = randn(3, num_inputs) * torch.tensor([[1e-3], [1.0], [300.0]], device=DEVICE)
    x[1, :20] = 0
    rows = quantize_rows(x, has_groups=has_groups)
    spans = x.split(128, 1) if has_groups else (x,)  # type: ignore[no-untyped-call]
    scales = torch.stack([span.abs().amax(1) / 448 for span in spans], 1)
    torch.testing.assert_close(rows.scales, scales)
    wide = scales.repeat_interleave(128 if has_groups else num_inputs, 1)[:, :num_inputs]
    restored = rows.codes.float() * wide
    is_near = (restored - x).abs() <= x.abs() / 16 + wide * 2**-10 * 1.01  # half a unit of e4m3
    if DEVICE == "cpu":  # the interpreter loses the carry of numbers that are rounded up to a power of two
        is_near |= torch.frexp(x / wide).mantissa.abs() >= 15.5 / 16
    assert bool(is_near.all())


def test_rows_of_zeros_are_rounded_to_zeros() -> None:
    rows = quantize_rows(torch.zeros(2, 64, device=DEVICE), has_groups=False)
    assert bool((rows.codes.float() == 0).all())


@pytest.mark.parametrize("tile", [Fp8Tile(16, 32, 4, 3), Fp8Tile(16, 16, 4, 3), None])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("name", "num_rows", "num_outputs", "num_inputs"),
    [("fp8 per output", 5, 35, 96), ("fp8 per output", 70, 130, 256), (BLOCKS, 3, 7, 128), (BLOCKS, 20, 135, 384)],
)
def test_products_of_fp8(
    name: str, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, tile: Fp8Tile | None
) -> None:
    """Compared with the product of the rounded inputs, in which there is no other rounding than that of the sums."""
    torch.manual_seed(num_rows)
    weight = random_weight(num_outputs, num_inputs, FORMATS[name])
    x, bias = randn(num_rows, num_inputs), randn(num_outputs) if has_bias else None
    rows = quantize_rows(x, has_groups=weight.format.group_columns > 0)
    scales = rows.scales.repeat_interleave(-(-num_inputs // rows.scales.shape[1]), 1)[:, :num_inputs]
    exact = exact_product(rows.codes.float() * scales, exact_weight(weight), bias)
    got = fp8_product(rows, weight, bias, tile)
    tolerance = 1e-5 if DEVICE == "cpu" else 2e-3  # tensor cores add products of FP8 with fewer bits
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(product_in_fp8(x, weight, bias), got) or tile is not None or has_library_product(weight)
    whole = exact_product(x, exact_weight(weight), bias)
    assert float((got - whole).norm() / whole.norm()) < ERROR


@pytest.mark.parametrize("name", FORMATS)
def test_expanding_equals_decoding(name: str) -> None:
    for num_outputs, num_inputs in ((7, 128), (35, 1152)):
        weight = random_weight(num_outputs, num_inputs, FORMATS[name])
        torch.testing.assert_close(expanded(weight), exact_weight(weight), rtol=1e-6, atol=0)


SOME = ["fp8 per output", BLOCKS, "int4 in 128", "int4 in 32 with minima", "int8 in 16", "fp4 in 32"]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("is_graph", [False, True])
def test_every_number_of_rows_has_a_product(name: str, is_graph: bool) -> None:
    linear = FusedPackedLinear(random_weight(70, 256, FORMATS[name]), randn(70))
    exact = exact_weight(linear.packed)
    for num_rows in (1, 2, 3, 65, 257):
        x = randn(num_rows, 256)
        product = exact_product(x, exact, linear.bias)
        back = linear.project_back(x, is_graph=is_graph)
        found = [
            (linear.project(x, is_graph=is_graph), product),
            (back.sum(0) if back.dim() == 3 else back, product),
            (linear.gated(x, Activation.SILU, is_graph=is_graph), exact_gated(product, Activation.SILU)),
        ]
        out = torch.full((num_rows, 70), 7.0, device=DEVICE)
        assert linear(x, out) is out
        for got, want in [*found, (out, product)]:
            assert float((got - want).norm() / want.norm()) < 1.2 * ERROR


@pytest.mark.parametrize("name", ["int8 in 16", "int4 in 32 with minima"])
def test_a_large_matrix_is_not_expanded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded head would take gigabytes."""
    linear = FusedPackedLinear(random_weight(70, 256, FORMATS[name]))
    exact = exact_weight(linear.packed)
    monkeypatch.setattr(fused_packed_linear, "MAX_EXPANDED", 70 * 256 - 1)
    monkeypatch.setattr(fused_packed_linear, "expanded_product", None)
    for num_rows in (1, 2, 3, 130):
        x = randn(num_rows, 256)
        want = exact_product(x, exact, None)
        out = torch.full((num_rows, 70), 7.0, device=DEVICE)
        assert linear(x, out) is out
        assert float((out - want).norm() / want.norm()) < ERROR / 10


def test_tiles_fill_the_card() -> None:
    assert fp8_tile(256, 4096).rows == 64
    assert fp8_tile(256, 28672).rows == 128
    assert fp8_tile(2048, 4096).rows == 128


def test_which_matrices_are_multiplied_in_fp8() -> None:
    def weight(name: str) -> PackedWeight:
        return PackedWeight.empty(64, 128, FORMATS[name], torch.bfloat16, "meta")

    assert {name for name in FORMATS if is_fp8(weight(name))} == {"fp8 per output", "fp8 per matrix", BLOCKS}
