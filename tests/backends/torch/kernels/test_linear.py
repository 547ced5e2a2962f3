"""Products of few rows, compared with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.kernels import linear
from quire.backends.torch.kernels.elementwise import add_norm, norm
from quire.backends.torch.kernels.linear import (
    MAX_ROWS,
    MAX_WEIGHTS,
    PARTS,
    THIN,
    is_single,
    is_small,
    row_product,
    tile_product,
)
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE, unit

# T rows, I inputs, O outputs

FP32 = torch.float32
DTYPES = [FP32, torch.bfloat16]  # for kernels without `tl.dot`
DOT_DTYPES = DTYPES if DEVICE == "cuda" else [FP32]  # the interpreter multiplies the bits of bf16
EPS = 1e-5
LARGE = [(2049, 1152), (4100, 64)] if DEVICE == "cuda" else []  # outputs and inputs; in the interpreter, seconds each
# A gate far from zero, in the interpreter only: its sigmoid is 0 either way.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def random_product(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make x [T, I], weight [O, I] and bias [O] such that the results are about 1."""
    torch.manual_seed(num_rows + num_outputs + num_inputs)
    x, weight = randn(num_rows, num_inputs, dtype=dtype), randn(num_outputs, num_inputs)
    return x, (weight / num_inputs**0.5).to(dtype), randn(num_outputs, dtype=dtype) if has_bias else None


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def exact_gated(product: Tensor, activation: Activation) -> Tensor:
    gate, up = product.chunk(2, -1)
    return (F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")) * up


def assert_near(got: Tensor, exact: Tensor, roundings: int = 1) -> None:
    assert got.shape == exact.shape
    bound = roundings * unit(got.dtype)
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * bound + 1e-5, atol=bound + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(1, 1), (7, 40), (33, 576), (64, 1024), (26, 2048), (51, 3000), *LARGE],
)
def test_row_product(num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = random_product(4, num_outputs, num_inputs, has_bias, dtype)
    whole = row_product(x, weight, bias)
    assert_near(whole, exact_product(x, weight, bias))
    for count in (1, 2):  # a row is computed in the same way, whatever the others
        assert torch.equal(row_product(x[:count].clone(), weight, bias), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(
    ("size", "num_inputs", "has_bias"),
    [(1, 3, True), (7, 96, False), (20, 1024, True), (15, 1500, False)],
)
def test_gated_row_product(
    size: int, num_inputs: int, has_bias: bool, activation: Activation, dtype: torch.dtype
) -> None:
    x, weight, bias = random_product(4, 2 * size, num_inputs, has_bias, dtype)
    exact = exact_gated(exact_product(x, weight, bias), activation)
    whole = row_product(x, weight, bias, activation)
    assert_near(whole, exact, roundings=4)
    for count in (1, 2):
        assert torch.equal(row_product(x[:count].clone(), weight, bias, activation), whole[:count])


@pytest.mark.parametrize("shape", [(2049, 1152), (4100, 4096), (64, 1024), (1024, 3072)])
def test_strips_of_large_matrices(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the strips for a matrix of this shape on a small matrix."""
    strip = linear._strip(*shape)
    assert strip.outputs % 2 == 0  # pairs of gate and up
    monkeypatch.setattr(linear, "_strip", lambda _outputs, _inputs: strip)
    for num_inputs in (strip.inputs, strip.inputs * 2 + 40):
        x, weight, bias = random_product(1, 18, num_inputs, True, FP32)
        exact = exact_product(x, weight, bias)
        assert_near(row_product(x, weight, bias), exact)
        gated = row_product(x, weight, bias, Activation.SILU)
        assert_near(gated, exact_gated(exact, Activation.SILU), roundings=4)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(2, 5, 512), (16, 64, 1024), (17, 33, 512), (32, 100, 512), (33, 70, 512), (64, 31, 1536), (3, 300, 128)],
)
def test_tile_product(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    assert_near(tile_product(x, weight, bias), exact_product(x, weight, bias))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(
    ("num_rows", "size", "num_inputs", "has_bias"),
    [(2, 3, 512, True), (16, 64, 512, False), (21, 45, 1024, True), (40, 70, 512, False), (64, 33, 512, True)],
)
def test_gated_tile_product(
    num_rows: int, size: int, num_inputs: int, has_bias: bool, activation: Activation, dtype: torch.dtype
) -> None:
    x, weight, bias = random_product(num_rows, 2 * size, num_inputs, has_bias, dtype)
    exact = exact_gated(exact_product(x, weight, bias), activation)
    assert_near(tile_product(x, weight, bias, activation), exact, roundings=4)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(2, 40, 512), (19, 64, 1024), (64, 70, 1536)])
def test_product_in_parts(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Each part is the product of its range of inputs, the bias is in the first, and the norms add them up."""
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    parts = tile_product(x, weight, bias, num_parts=PARTS)
    assert parts.dtype == FP32
    assert parts.shape == (PARTS, num_rows, num_outputs)
    spans = zip(x.chunk(PARTS, 1), weight.chunk(PARTS, 1), strict=True)
    for number, (span, columns) in enumerate(spans):
        assert_near(parts[number], exact_product(span, columns, bias if number == 0 else None))

    exact = exact_product(x, weight, bias)
    scale, residual = randn(num_outputs, dtype=FP32), randn(num_rows, num_outputs, dtype=dtype) * 3
    total = exact + residual.double()
    before = parts.clone()
    normed = norm(parts, scale, EPS, dtype)
    assert normed.dtype == dtype
    assert_near(normed, exact_norm(exact, scale), roundings=4)
    normed, out = add_norm(parts, residual, scale, EPS)
    assert normed.dtype == dtype
    assert out is residual
    assert torch.equal(parts, before)
    assert_near(residual, total, roundings=3)
    assert_near(normed, exact_norm(residual, scale), roundings=2)  # of the rounded sum


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def test_rows_do_not_depend_on_their_number() -> None:
    """Rows alone in a tile, in a full one and in a larger one: only the order of sums may differ."""
    x, weight, bias = random_product(64, 96, 512, True, FP32)
    whole = tile_product(x, weight, bias)
    for count in (2, 16, 31):
        torch.testing.assert_close(tile_product(x[:count].clone(), weight, bias), whole[:count], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_product(x[:1].clone(), weight, bias), whole[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 5), (2, 5), (3, 37), (4, 37)])
def test_nothing_beyond_the_output_is_written(num_rows: int, num_outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = random_product(num_rows, num_outputs, 512, False, FP32)
    space = torch.full((num_rows * num_outputs + 200,), 7.0, device=DEVICE)
    new_empty = Tensor.new_empty

    def at_its_start(self: Tensor, shape: Any, **options: Any) -> Tensor:
        if shape == (num_rows, num_outputs):
            return space[: num_rows * num_outputs].view(shape)
        return new_empty(self, shape, **options)

    monkeypatch.setattr(Tensor, "new_empty", at_its_start)
    out = (row_product if is_single(num_rows, weight) else tile_product)(x, weight, None)
    assert out.data_ptr() == space.data_ptr()
    assert_near(out, exact_product(x, weight, None))
    assert bool((space[num_rows * num_outputs :] == 7).all())


def test_which_kernel_computes_which_product() -> None:
    def weight(num_outputs: int, num_inputs: int) -> Tensor:
        return torch.empty(num_outputs, num_inputs, device="meta")

    for num_rows in (1, 2, 4):
        assert is_single(num_rows, weight(1024, 1024))
        assert not is_small(num_rows, weight(1024, 1024))
    for num_rows in (3, 5, 8):
        assert is_small(num_rows, weight(1024, 1024))
        assert not is_single(num_rows, weight(1024, 1024))
    assert is_single(1, weight(MAX_WEIGHTS, 2))
    assert not is_single(2, weight(MAX_WEIGHTS, 2))  # the library fills the card
    assert is_small(MAX_ROWS, weight(1024, 1024))
    assert not is_small(MAX_ROWS + 1, weight(1024, 1024))
    assert is_small(8, weight(MAX_WEIGHTS // 512, 512))
    assert not is_small(8, weight(MAX_WEIGHTS // 512 + 1, 512))
    assert not is_small(8, weight(576, 576))  # the inputs are not whole tiles of every part
    assert is_small(8, weight(577, 512 * 3))
    assert not is_small(8, weight(1024, 512 + 128))
    assert THIN * 512 <= MAX_WEIGHTS
