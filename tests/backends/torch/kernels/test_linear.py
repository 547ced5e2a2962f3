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
    few_rows,
    is_library_exact,
    large_product,
    padded_rows,
    product,
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
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * (1.702 * gate).sigmoid() * (up + 1)
    return (F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")) * up


def assert_near(got: Tensor, exact: Tensor, roundings: int = 1) -> None:
    assert got.shape == exact.shape
    bound = roundings * unit(got.dtype)
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * bound + 1e-5, atol=bound + 1e-5)


ACTIVATIONS = (None, *Activation)  # None: not gated


def exact_result(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
    exact = exact_product(x, weight, bias)
    return exact if activation is None else exact_gated(exact, activation)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 2, 1), (3, 14, 40), (8, 33, 576), (9, 64, 1024), (2, 26, 2048), (17, 50, 3072), (32, 51, 3000), *LARGE],
)
def test_few_rows(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    num_outputs += num_outputs % 2 if activation else 0
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    whole = few_rows(x, weight, bias, activation)
    assert_near(whole, exact_result(x, weight, bias, activation), roundings=4 if activation else 1)


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter's sums follow the shape")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(4096, 1024), (6144, 1024), (1024, 2048), (1024, 3072), (128, 2048), (4096, 4096), (4096, 14336), (51, 3000)],
)
def test_bits_do_not_depend_on_the_number_of_rows(
    num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = random_product(2048, num_outputs, num_inputs, has_bias, dtype)
    whole = tile_product(x, weight, bias)
    for count in (1, 2, 7, 8, 9, 16, 17, 32):
        assert torch.equal(few_rows(x[:count], weight, bias), whole[:count]), count
    for count in (1, 16, 31, 33, 64, 100, 128, 200, 256):
        assert torch.equal(tile_product(x[:count], weight, bias), whole[:count]), count
        if linear.num_parts(weight) > 1:
            parts = tile_product(x[:count], weight, bias, is_split=True)
            joined = ((parts[0] + parts[1]) + parts[2]) + parts[3]
            assert torch.equal(joined.to(dtype), whole[:count]), count
    for count in (1, 64, 96, 128, 256, 257, 300, 512, 1000, 1024, 2048):
        assert torch.equal(product(x[:count], weight, bias), whole[:count]), count
        if num_inputs % 8 == 0:
            assert torch.equal(large_product(x[:count], weight, bias), whole[:count]), count


def test_the_library_is_compared_for_few_numbers_of_rows() -> None:
    weight = torch.zeros(16, 16, device=DEVICE)
    assert padded_rows(1000) == 1024
    assert padded_rows(65) == 96
    assert padded_rows(2049) == 2304
    assert all(padded_rows(padded_rows(count)) == padded_rows(count) for count in range(1, 5000))
    assert not is_library_exact(1000, weight, None)  # not compared
    assert not is_library_exact(64, torch.zeros(128, 512, device=DEVICE), None)  # its sums have parts
    inexact = torch.randn(64, 64, device=DEVICE)
    assert is_library_exact(64, weight, None)  # zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_exact", {})
        patch.setattr(F, "linear", lambda x, w, _: (x.double() @ w.double().t()).float().nextafter(x.new_ones(())))
        assert not is_library_exact(64, inexact, None)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(2, 6, 512), (16, 64, 1024), (17, 34, 512), (32, 100, 512), (33, 70, 512), (3, 300, 128), (70, 20, 40)],
)
def test_tile_product(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    assert_near(tile_product(x, weight, bias), exact_product(x, weight, bias))


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(257, 70, 512), (300, 24, 1536), (260, 16, 40), (64, 30, 104)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_large_product(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, DOT_DTYPES[-1])
    assert_near(large_product(x, weight, bias), exact_product(x, weight, bias))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(2, 40, 512), (19, 64, 1024), (130, 70, 1536)])
def test_product_in_parts(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Each part is the product of its range of inputs, the bias is in the first, and the norms add them up."""
    x, weight, bias = random_product(num_rows, num_outputs, num_inputs, has_bias, dtype)
    parts = tile_product(x, weight, bias, is_split=True)
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
