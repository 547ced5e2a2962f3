"""Products of many rows with packed matrices, compared with fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.backends.torch import fused_linear
from quire.backends.torch.fused_linear import FusedPackedLinear
from quire.backends.torch.kernels import packed_products
from quire.backends.torch.kernels.elementwise import add_norm, add_norm_in_fp8, gated, norm
from quire.backends.torch.kernels.fp8_rows import apply_scales, gated_in_fp8, quantize_rows
from quire.backends.torch.kernels.packed_products import (
    Fp8Tile,
    expanded,
    fp8_product,
    has_library_product,
    is_unscaled,
    product_in_fp8,
    unscaled_product,
)
from quire.backends.torch.layers import Fp8Inputs, Fp8Product, Fp8Rows, Inputs, Outputs
from quire.backends.torch.packed import PackedWeight
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.kernels.test_linear import exact_gated, exact_product, randn
from tests.backends.torch.kernels.test_packed_linear import FORMATS, exact_weight, random_weight

# T rows, I inputs, O outputs

FP32 = torch.float32
BLOCKS = "fp8 in blocks"
ERROR = 0.12 if DEVICE == "cpu" else 0.05  # of inputs in FP8; the interpreter rounds some to half their value


def value_of(y: Inputs | Outputs) -> Tensor:
    """Add up parts and apply scales."""
    if isinstance(y, Fp8Rows):
        size = y.codes.shape[1]
        wide = y.scales.double().repeat_interleave(-(-size // y.scales.shape[1]), 1)
        return (y.codes.double() * wide[:, :size])[: len(y)]
    if isinstance(y, Fp8Product):
        return y.values.double() * y.row_scales * y.output_scales
    return y.double().sum(0) if y.dim() == 3 else y.double()


@pytest.mark.parametrize("num_inputs", [32, 128, 300, 1184])
@pytest.mark.parametrize("has_groups", [False, True])
def test_rows_are_rounded_to_fp8(num_inputs: int, has_groups: bool) -> None:
    torch.manual_seed(num_inputs)
    x = randn(3, num_inputs) * torch.tensor([[1e-3], [1.0], [300.0]], device=DEVICE)
    x[1, :20] = 0
    rows = quantize_rows(x, has_groups=has_groups)
    spans = x.split(128, 1) if has_groups else (x,)  # type: ignore[no-untyped-call]
    scales = torch.stack([span.abs().amax(1) / 448 for span in spans], 1)
    torch.testing.assert_close(rows.scales[:3], scales)
    wide = scales.repeat_interleave(128 if has_groups else num_inputs, 1)[:, :num_inputs]
    restored = rows.codes[:3].float() * wide
    is_near = (restored - x).abs() <= x.abs() / 16 + wide * 2**-10 * 1.01  # half a unit of e4m3
    if DEVICE == "cpu":  # the interpreter loses the carry of numbers that are rounded up to a power of two
        is_near |= torch.frexp(x / wide).mantissa.abs() >= 15.5 / 16
    assert bool(is_near.all())


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
    exact = exact_product(value_of(rows), exact_weight(weight), bias)
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
@pytest.mark.kept("True-fp8 in blocks", "True-int4")
def test_every_number_of_rows_has_a_product(name: str, is_graph: bool) -> None:
    linear = FusedPackedLinear(random_weight(70, 256, FORMATS[name]), randn(70))
    exact = exact_weight(linear.packed)
    for num_rows in (1, 2, 3, 65, 257):
        x = randn(num_rows, 256)
        product = exact_product(x, exact, linear.bias)
        found = [
            (linear.project(x, is_graph=is_graph), product),
            (linear.project_back(x, is_graph=is_graph), product),
            (linear.gated(x, Activation.SILU, is_graph=is_graph), exact_gated(product, Activation.SILU)),
        ]
        out = torch.full((num_rows, 70), 7.0, device=DEVICE)
        assert linear(x, out) is out
        for got, want in [*found, (out, product)]:
            assert float((value_of(got) - want).norm() / want.norm()) < 1.2 * ERROR


@pytest.mark.parametrize("name", ["int8 in 16", "int4 in 32 with minima"])
def test_a_large_matrix_is_expanded_for_many_rows_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded head would take gigabytes, so it is decoded in strips, and not at all for few rows."""
    linear = FusedPackedLinear(random_weight(300, 256, FORMATS[name]))
    exact = exact_weight(linear.packed)
    monkeypatch.setattr(fused_linear, "MAX_EXPANDED", 300 * 256 - 1)
    monkeypatch.setattr(packed_products, "MAX_EXPANDED", 300 * 256 - 1)
    expand = packed_products.expanded
    sizes: list[int] = []

    def counted(weight: PackedWeight) -> Tensor:
        sizes.append(len(weight))
        return expand(weight)

    monkeypatch.setattr(packed_products, "expanded", counted)
    for num_rows in (1, 2, 3, 130):
        assert not sizes
        x = randn(num_rows, 256)
        want = exact_product(x, exact, None)
        out = torch.full((num_rows, 300), 7.0, device=DEVICE)
        assert linear(x, out) is out
        assert float((out - want).norm() / want.norm()) < ERROR / 10
    assert sizes == [256, 44]


BF16 = torch.bfloat16


def bf16_linear(name: str, num_outputs: int, num_inputs: int) -> FusedPackedLinear:
    packed = random_weight(num_outputs, num_inputs, FORMATS[name])
    return FusedPackedLinear(PackedWeight(packed.codes, packed.scales, None, None, packed.format, BF16))


@pytest.mark.parametrize(("num_rows", "is_later"), [(3, True), (65, True), (200, False)])
def test_the_library_product_of_fp8(num_rows: int, is_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are applied by the library, by a kernel of their own, or later: the result is the same."""
    torch.manual_seed(5)
    monkeypatch.setattr(packed_products, "UNSCALED_TILES", 1)
    linear = bf16_linear("fp8 per output", 48, 160)
    assert has_library_product(linear.packed)
    x = randn(num_rows, 160).to(BF16)
    exact = exact_product(x, exact_weight(linear.packed), None)
    whole = linear(x)
    assert float((whole.double() - exact).norm() / exact.norm()) < ERROR
    assert is_unscaled(num_rows, linear.packed, None) is is_later
    rows = quantize_rows(x, has_groups=False)
    assert torch.equal(product_in_fp8(rows, linear.packed, None), whole)
    later = unscaled_product(rows, linear.packed)
    torch.testing.assert_close(value_of(later), whole.double(), rtol=0.02, atol=1e-3)
    torch.testing.assert_close(apply_scales(later), whole, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("size", [96, 256])
def test_norms_in_fp8_are_rounded_norms(has_groups: bool, has_residual: bool, size: int) -> None:
    torch.manual_seed(5)
    x, weight = randn(5, size).to(BF16), randn(size)
    residual = randn(5, size).to(BF16) if has_residual else None
    factors = (0.5, 2.0) if has_residual else ()
    want, want_total = add_norm(x, None if residual is None else residual.clone(), weight, 1e-5, *factors)
    rounded = quantize_rows(want, has_groups=has_groups)
    got, total = add_norm_in_fp8(x, residual, weight, 1e-5, *factors, has_groups=has_groups)
    assert torch.equal(total, want_total)
    assert torch.equal(got.codes[:5].view(torch.uint8), rounded.codes[:5].view(torch.uint8))  # without padding
    assert torch.equal(got.scales[:5], rounded.scales[:5])


def test_norms_apply_the_scales_of_products() -> None:
    torch.manual_seed(5)
    linear = bf16_linear("fp8 per output", 64, 128)
    x, weight = randn(7, 128).to(BF16), randn(64)
    product = linear.project_back(x, is_graph=True)
    assert isinstance(product, Fp8Product)
    whole = value_of(product).to(BF16)
    residual = randn(7, 64).to(BF16)
    got, total = add_norm(product, residual.clone(), weight, 1e-5)
    want, want_total = add_norm(whole, residual, weight, 1e-5)
    torch.testing.assert_close(total, want_total, rtol=0.02, atol=0.02)  # one unit of bf16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.06)
    plain_norm = norm(product, weight, 1e-5, BF16)
    torch.testing.assert_close(plain_norm, norm(whole, weight, 1e-5, BF16), rtol=0.02, atol=0.06)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("has_groups", [False, True])
def test_gates_in_fp8(activation: Activation, has_groups: bool) -> None:
    torch.manual_seed(5)
    linear = bf16_linear("fp8 per output", 2 * 160, 96)
    product = unscaled_product(quantize_rows(randn(4, 96).to(BF16), has_groups=False), linear.packed)
    whole = value_of(product).to(BF16)
    want = quantize_rows(gated(whole, activation), has_groups=has_groups)
    for given in (whole, product):
        got = gated_in_fp8(given, activation, has_groups=has_groups)
        assert float((value_of(got) - value_of(want)).norm() / value_of(want).norm()) < ERROR


@pytest.mark.parametrize(
    ("name", "num_rows"),
    # The interpreter has no tiles in bf16, which few rows of blocks need.
    [*(("fp8 per output", count) for count in (2, 3, 64, 65)), (BLOCKS, 2), (BLOCKS, 65)],
)
def test_an_mlp_passes_rows_in_fp8(name: str, num_rows: int) -> None:
    torch.manual_seed(5)
    gate_up, down = bf16_linear(name, 256, 256), bf16_linear(name, 256, 128)
    x, weight = randn(num_rows, 256).to(BF16), torch.ones(256, device=DEVICE)
    taken = gate_up.fp8_inputs(num_rows)
    is_per_output = name != BLOCKS
    assert (taken is not None) == (num_rows > (2 if is_per_output else 64))
    rows: Inputs = x
    if taken is not None:
        rows = add_norm_in_fp8(x, None, weight, 1e-5, has_groups=taken is Fp8Inputs.PER_GROUP)[0]
    else:
        rows = add_norm(x, None, weight, 1e-5)[0]
    inner = gate_up.gated(rows, Activation.SILU, is_graph=True, reader=down)
    assert isinstance(inner, Fp8Rows) == (taken is not None)
    got = value_of(down.project_back(inner, is_graph=True))
    normed = add_norm(x, None, weight, 1e-5)[0]
    hidden = exact_gated(exact_product(normed, exact_weight(gate_up.packed), None), Activation.SILU)
    exact = exact_product(hidden, exact_weight(down.packed), None)
    assert float((got - exact).norm() / exact.norm()) < 2 * ERROR
