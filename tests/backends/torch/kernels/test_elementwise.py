from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.kernels.elementwise import add_norm, embed, gate_output, gated, norm
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE, unit

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 40, 576, 1024, 1152, 4096]  # of a row: SmolLM2 576, Gemma 3 1152
EPS = 1e-5

# In the interpreter only. The sigmoid of such a number is 0 either way.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """Assert that `got` is `exact` (fp64) up to one rounding to its dtype and a little for fp32 inside."""
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * unit(got.dtype) + 2e-6, atol=1e-7)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, weight = randn(5, size, dtype=dtype) * 3, randn(size, dtype=torch.float32)
    before = x.clone()
    normed = norm(x, weight, EPS, dtype)
    assert normed.dtype == dtype
    assert_rounded(normed, exact_norm(x, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_norm_writes_the_sum_over_the_residual(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual, weight = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype) * 9, randn(size, dtype=torch.float32)
    x_before, total = x.clone(), x.double() + residual.double()
    normed, out = add_norm(x, residual, weight, EPS)
    assert out is residual
    assert normed.dtype == dtype
    assert_rounded(residual, total)
    assert torch.equal(x, x_before)
    assert_rounded(normed, exact_norm(residual, weight))  # of the rounded sum


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_parts_are_in_the_type_of_the_model(dtype: torch.dtype) -> None:
    """Parts and weights are both fp32, so neither determines the model's dtype."""
    torch.manual_seed(0)
    parts, weight = randn(3, 5, 96, dtype=torch.float32), randn(96, dtype=torch.float32)
    total = parts.sum(0).to(dtype)
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter truncates
        total = (parts[0] + parts[1] + parts[2]).view(torch.int32).bitwise_and(-65536).view(torch.float32).to(dtype)
    normed = norm(parts, weight, EPS, dtype)
    assert normed.dtype == dtype
    assert_rounded(normed, exact_norm(total, weight))
    residual = randn(5, 96, dtype=dtype)
    normed, out = add_norm(parts, residual, weight, EPS)
    assert normed.dtype == out.dtype == dtype
    assert_rounded(normed, exact_norm(out, weight))


def test_weights_are_not_rounded_to_the_type_of_the_model() -> None:
    """1.0038 is 1 in bf16. The results are rounded alike with both weights, so their sums show the difference."""
    torch.manual_seed(0)
    x, ones = randn(8, 4096, dtype=torch.bfloat16), torch.ones(4096, device=DEVICE)
    one, more = (norm(x, weight, EPS, torch.bfloat16).double().abs().sum() for weight in (ones, ones * 1.0038))
    assert float(more / one) == pytest.approx(1.0038, abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_without_a_residual_returns_x_itself(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = randn(3, 96, dtype=dtype), randn(96, dtype=torch.float32)
    normed, residual = add_norm(x, None, weight, EPS)
    assert residual is x
    assert normed.dtype == dtype
    assert_rounded(normed, exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("size", [1, 80, 1024, 1536, 3072])
def test_gated(size: int, activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = randn(4, 2 * size, dtype=dtype) * 3
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    exact = (F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")) * up
    out = gated(gate_up, activation)
    assert out.shape == (4, size)
    assert_rounded(out, exact)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 2048])
def test_gate_output(size: int, dtype: torch.dtype) -> None:
    """The gates are columns of a wider tensor, after queries, keys and values."""
    torch.manual_seed(size)
    projected, out = randn(4, size + 48, dtype=dtype) * 3, randn(4, size, dtype=dtype)
    exact = out.double() * projected[:, 48:].double().sigmoid()
    assert gate_output(out, projected[:, 48:]) is out
    assert_rounded(out, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_embed(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    embedding = randn(50, size, dtype=dtype)
    last_samples = torch.tensor([7, 8, 49, 10], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([3, -1, 49, -1, 0, -1, 12], dtype=torch.int32, device=DEVICE)
    batch_indices = torch.tensor([1, 2, 0, 0, 3, -1, -1], dtype=torch.int32, device=DEVICE)
    resolved = [3, 49, 49, 7, 0, 0, 0]  # rows without a batch index are padding: token 0
    assert torch.equal(embed(tokens, batch_indices, last_samples, embedding, 1.0), embedding[resolved])
    assert_rounded(embed(tokens, batch_indices, last_samples, embedding, 33.75), embedding[resolved].double() * 33.75)


def test_embed_of_rows_beyond_32_bits() -> None:
    """A vocabulary of 262,144 times 8,192 is 2**31. Only the pages that are used take memory."""
    size = 8192
    embedding = torch.empty(262_145, size, dtype=torch.bfloat16, device=DEVICE)
    embedding[-1] = torch.arange(size, device=DEVICE)
    one = torch.tensor([262_144], dtype=torch.int32, device=DEVICE)
    assert torch.equal(embed(one, torch.zeros_like(one), one, embedding, 1.0), embedding[-1:])
