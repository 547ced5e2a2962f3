"""Experts in MXFP4: decoding, and products of packed matrices compared with those of the decoded ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.backends.torch.experts import Experts
from quire.backends.torch.kernels import experts as kernels
from quire.backends.torch.kernels import routed_experts
from quire.backends.torch.kernels.experts import Tiling
from quire.backends.torch.kernels.quantized_experts import quantized_tiling
from quire.backends.torch.kernels.routed_experts import expert_calls, experts_in_tiles
from quire.backends.torch.packed import MAX_EXPONENT, MXFP4, Mxfp4Stack
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.quants import to_float32
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.test_compiling import Launches
from tests.backends.torch.test_experts import BF16, DOT_DTYPES, FP32, assert_near, dense, exact, make_rows
from tests.selection import mostly_nightly

# N experts, E hidden size, F width of an expert


def random_stack(shape: tuple[int, int, int], dtype: torch.dtype, exponents: tuple[int, int]) -> Mxfp4Stack:
    stack = Mxfp4Stack.empty(*shape, dtype, DEVICE)
    stack.whole.codes.copy_(torch.randint(0, 256, stack.whole.codes.shape, dtype=torch.uint8))
    stack.whole.scales.copy_(torch.randint(*exponents, stack.whole.scales.shape, dtype=torch.uint8))
    return stack


def make_packed(
    num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype = FP32, *, has_bias: bool = True
) -> Experts:
    """Make experts such that results are about 1."""
    torch.manual_seed(num_experts * size + width)
    return Experts(
        random_stack((num_experts, 2 * width, size), dtype, (120, 124)),
        random_stack((num_experts, size, width), dtype, (120, 124)),
        num_chosen=num_chosen,
        activation=Activation.CLAMPED_SWIGLU if has_bias else Activation.SILU,
        renormalizes=True,
        scale=1.0,
        gate_up_bias=torch.randn(num_experts, 2 * width).to(DEVICE, dtype) if has_bias else None,
        down_bias=torch.randn(num_experts, size).to(DEVICE, dtype) if has_bias else None,
    )


def decoded(experts: Experts) -> Experts:
    return Experts(
        dense(experts.gate_up),
        dense(experts.down),
        num_chosen=experts.num_chosen,
        activation=experts.activation,
        renormalizes=experts.renormalizes,
        scale=experts.scale,
        gate_up_bias=experts.gate_up_bias,
        down_bias=experts.down_bias,
    )


def test_decoding_equals_that_of_files() -> None:
    """With every code and every exponent that is computed with."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (64, 4, 17), dtype=np.uint8)
    blocks[..., 0] = np.arange(256).reshape(64, 4) % (MAX_EXPONENT + 1)
    blocks[0, 0, 1:] = range(0, 256, 16)
    info = TensorInfo("w", TensorType.MXFP4, (64, 128), blocks.size)
    raw = RawTensor(info, blocks.reshape(64, -1))
    stack = Mxfp4Stack.empty(2, 70, 128, FP32, "cpu")
    stack.set_rows(1, 5, raw)
    assert torch.equal(stack[1][5:69], torch.from_numpy(to_float32(raw)))
    assert stack.nbytes == 2 * 70 * 4 * 17


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "size", "width"),
    mostly_nightly([(1, 4, 1, 64, 32), (1, 16, 4, 96, 160), (2, 24, 3, 32, 64), (1, 4, 3, 1152, 1088)], 3),
)
def test_few_rows(num_rows: int, num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype) -> None:
    experts = make_packed(num_experts, num_chosen, size, width, dtype)
    x, logits = make_rows(experts, num_rows)
    want = exact(experts, x, logits)
    scale = max(float(want.abs().max()), 1.0)
    for got in (experts.fused(x, logits), experts.reference(x, logits)):
        assert_near(got / scale, want / scale, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "size", "width"),
    [(5, 8, 2, 64, 32), (33, 4, 3, 96, 160), (70, 5, 4, 32, 64)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows(
    num_rows: int, num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype, has_bias: bool
) -> None:
    experts = make_packed(num_experts, num_chosen, size, width, dtype, has_bias=has_bias)
    x, logits = make_rows(experts, num_rows)
    want = exact(experts, x, logits)
    scale = max(float(want.abs().max()), 1.0)
    assert_near(experts.fused(x, logits) / scale, want / scale, dtype)
    assert_near(experts.reference(x, logits) / scale, want / scale, dtype)


@pytest.mark.parametrize("exponent", [90, 110, MAX_EXPONENT])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_extreme_exponents(exponent: int, num_rows: int) -> None:
    """Weights near the ends of the range, and inputs that bring the products back to 1."""
    experts = make_packed(4, 2, 64, 32, has_bias=False)
    assert isinstance(experts.gate_up, Mxfp4Stack)
    experts.gate_up.whole.scales.fill_(exponent)
    x, logits = make_rows(experts, num_rows)
    x *= 2.0 ** min(122 - exponent, 20)
    want = exact(experts, x, logits)
    torch.testing.assert_close(experts.fused(x, logits).double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


SHAPES = [
    (shape, dtype)
    for dtype in (FP32, BF16)
    for shape in sorted({quantized_tiling(num_rows, 4, 2, dtype.itemsize, MXFP4) for num_rows in range(5, 300)})
]


@pytest.mark.parametrize("padding", [0, 32])
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_every_tiling(shape: Tiling, dtype: torch.dtype, padding: int) -> None:
    """Test tiles for large batches on small matrices, with inputs that are whole tiles and that are not."""
    dtype = dtype if DEVICE == "cuda" else FP32
    size, width = shape.gate_up.inputs + padding, shape.down.inputs + padding
    packed = make_packed(2, 1, size, width, dtype)
    x, logits = make_rows(packed, 6 if padding else 150)
    routing = kernels.route(logits, 1, renormalizes=True, scale=1.0)
    biases = kernels.Biases(packed.gate_up_bias, packed.down_bias)
    got = experts_in_tiles(x, packed.gate_up, packed.down, routing, packed.activation, shape, biases)
    want = decoded(packed).reference(x, logits)
    scale = max(float(want.abs().max()), 1.0)
    assert_near(got / scale, want / scale, dtype)


@pytest.mark.parametrize("size", [64, 96])
def test_experts_of_many_rows_are_decoded_first(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_packed(3, 2, size, 32)
    x, logits = make_rows(experts, 40)
    packed = experts.fused(x, logits)
    monkeypatch.setattr(routed_experts, "EXPANDED_ROWS", 1)
    for stack in (experts.gate_up, experts.down):
        assert routed_experts.is_expanded(stack, 40, 2)
        assert torch.equal(routed_experts._expanded(stack), dense(stack))
    torch.testing.assert_close(experts.fused(x, logits), packed, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the arguments of the interpreter")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kernels_are_compiled_in_advance(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = (Mxfp4Stack.empty(*shape, dtype, "meta") for shape in ((32, 128, 128), (32, 128, 64)))
    biases = torch.empty(32, 128, dtype=dtype, device="meta"), torch.empty(32, 128, dtype=dtype, device="meta")
    settings = {"num_chosen": 4, "activation": Activation.CLAMPED_SWIGLU, "renormalizes": True, "scale": 1.0}
    launches = Launches(monkeypatch)
    for call in expert_calls(gate_up, down, **settings, logits_dtype=dtype, max_rows=1400, has_bias=True):  # type: ignore[arg-type]
        call()
    ahead, launches.forms = launches.forms, set()
    experts = Experts(gate_up, down, **settings, gate_up_bias=biases[0], down_bias=biases[1])  # type: ignore[arg-type]
    for num_rows in (1, 2, 3, 17, 96, 97, 192, 193, 300, 600, 1279, 1280, 1400):
        experts.fused(
            torch.empty(num_rows, 128, dtype=dtype, device="meta"),
            torch.empty(num_rows, 32, dtype=dtype, device="meta"),
        )
    assert launches.forms == ahead
