"""Products of few rows, compared with fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.kernels import linear
from quire.backends.torch.kernels.elementwise import add_norm, norm
from quire.backends.torch.kernels.linear import (
    PARTS,
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


ACTIVATIONS = (None, *Activation)  # None: not gated


def exact_result(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
    exact = exact_product(x, weight, bias)
    return exact if activation is None else exact_gated(exact, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(2, 1), (14, 40), (33, 576), (64, 1024), (26, 2048), (51, 3000), *LARGE],
)
def test_row_product(
    num_outputs: int, num_inputs: int, has_bias: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    num_outputs += num_outputs % 2 if activation else 0
    x, weight, bias = random_product(4, num_outputs, num_inputs, has_bias, dtype)
    whole = row_product(x, weight, bias, activation)
    assert_near(whole, exact_result(x, weight, bias, activation), roundings=4 if activation else 1)
    for count in (1, 2):  # a row is computed in the same way, whatever the others
        assert torch.equal(row_product(x[:count].clone(), weight, bias, activation), whole[:count])


@pytest.mark.parametrize("shape", [(2049, 1152), (4100, 4096), (64, 1024), (1024, 3072)])
def test_strips_of_large_matrices(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the strips for a matrix of this shape on a small matrix."""
    strip = linear._strip(*shape)
    assert strip.outputs % 2 == 0  # pairs of gate and up
    monkeypatch.setattr(linear, "_strip", lambda _outputs, _inputs: strip)
    for num_inputs in (strip.width, strip.width * 2 + 40):
        x, weight, bias = random_product(1, 18, num_inputs, True, FP32)
        exact = exact_product(x, weight, bias)
        assert_near(row_product(x, weight, bias), exact)
        gated = row_product(x, weight, bias, Activation.SILU)
        assert_near(gated, exact_gated(exact, Activation.SILU), roundings=4)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(2, 6, 512), (16, 64, 1024), (17, 34, 512), (32, 100, 512), (33, 70, 512), (64, 30, 1536), (3, 300, 128)],
)
def test_tile_product(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    exact = exact_result(x, weight, bias, activation)
    assert_near(tile_product(x, weight, bias, activation), exact, roundings=4 if activation else 1)


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
