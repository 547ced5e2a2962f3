"""Experts in FP8 and integers: products of packed matrices compared with those of the decoded ones, in every format."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.torch.experts import Experts
from quire.backends.torch.kernels import experts as kernels
from quire.backends.torch.kernels import routed_experts
from quire.backends.torch.kernels.experts import Tiling
from quire.backends.torch.kernels.fp8_rows import quantize_rows
from quire.backends.torch.kernels.quantized_experts import (
    DECODING_TILINGS,
    FP8_BLOCK_TILINGS,
    FP8_ROWS,
    FP8_TILINGS,
)
from quire.backends.torch.kernels.routed_experts import experts_in_tiles
from quire.backends.torch.packed import (
    PackedFormat,
    PackedStack,
    decoded,
    has_kernels,
    multiplies_in_fp8,
    stack_format,
)
from quire.weights.packed import CodeType
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.test_experts import BF16, DOT_DTYPES, FP32, assert_near, dense, exact, gate, make_rows
from tests.backends.torch.test_packed_linear import random_matrix

# N experts, E hidden size, F width of an expert, O outputs, I inputs

FP8, FP8_BLOCKS = PackedFormat(CodeType.FP8, 1, 0), PackedFormat(CodeType.FP8, 128, 128)
INT4, INT4_ZEROS = PackedFormat(CodeType.INT4, 1, 128), PackedFormat(CodeType.INT4, 1, 128, has_zeros=True)
FORMATS = {
    "fp8": FP8,
    "fp8 in blocks": FP8_BLOCKS,
    "fp8 in blocks of single rows": PackedFormat(CodeType.FP8, 1, 128),
    "fp8 in small blocks": PackedFormat(CodeType.FP8, 32, 32),
    "int4 in 128": INT4,
    "int4 in 128 with zeros": INT4_ZEROS,
    "int4 in 64": PackedFormat(CodeType.INT4, 1, 64),
    "int4 in 32 with zeros": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True),
    "int4 in 32 with minima": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True),
    "int4 in 128 with minima": PackedFormat(CodeType.INT4, 1, 128, has_zeros=True, has_half_zeros=True),
    "int4 per output": PackedFormat(CodeType.INT4, 1, 0),
    "int4 per output with minima": PackedFormat(CodeType.INT4, 1, 0, has_zeros=True, has_half_zeros=True),
    "int8": PackedFormat(CodeType.INT8, 1, 0),
    "int8 in 32": PackedFormat(CodeType.INT8, 1, 32),
    "int8 in 32 with minima": PackedFormat(CodeType.INT8, 1, 32, has_zeros=True, has_half_zeros=True),
    "int8 per output with minima": PackedFormat(CodeType.INT8, 1, 0, has_zeros=True, has_half_zeros=True),
    "int8 in 16": PackedFormat(CodeType.INT8, 1, 16),
}
# Some kernels move halves of bytes into the mantissa of 2048, and subtract that: a part of fp32 is lost.
WIDE_BOUND = 3e-4
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
    pytest.mark.sweep("file"),
]


def random_stack(shape: tuple[int, int, int], format: PackedFormat, dtype: torch.dtype, seed: int = 0) -> PackedStack:
    """Make a stack whose scales and zeros all differ."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    stack = PackedStack.empty(*shape, format, dtype, DEVICE)
    stack.whole.invent(random, shape[2] ** -0.5)
    scales = stack.whole.scales
    scales.mul_((0.5 + torch.rand(scales.shape, generator=random, device=DEVICE)).to(scales.dtype))
    return stack


def make_quantized(
    format: PackedFormat, num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype = FP32, *,
    has_bias: bool = False, down_format: PackedFormat | None = None,
) -> Experts:  # fmt: skip
    """Make experts such that results are about 1."""
    torch.manual_seed(num_experts * size + width)
    return Experts(
        random_stack((num_experts, 2 * width, size), format, dtype),
        random_stack((num_experts, size, width), down_format or format, dtype, seed=1),
        num_chosen=num_chosen,
        activation=Activation.CLAMPED_SWIGLU if has_bias else Activation.SILU,
        renormalizes=True,
        scale=1.0,
        gate_up_bias=torch.randn(num_experts, 2 * width).to(DEVICE, dtype) if has_bias else None,
        down_bias=torch.randn(num_experts, size).to(DEVICE, dtype) if has_bias else None,
    )


def rounded(x: Tensor, format: PackedFormat) -> Tensor:
    """Round rows to FP8 as the products do, in fp64."""
    rows = quantize_rows(x, has_groups=format.group_columns > 0)
    columns = 128 if format.group_columns else x.shape[1]
    scales = rows.scales.double().repeat_interleave(columns, 1)[:, : x.shape[1]]
    return (rows.codes.double() * scales)[: len(x)]


def exact_in_fp8(experts: Experts, x: Tensor, logits: Tensor) -> Tensor:
    """Evaluate the equation in fp64, with inputs of both products rounded to FP8."""
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, PackedStack)
    assert isinstance(down, PackedStack)
    ids, weights = experts._route(logits)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    values = rounded(x, gate_up.format)
    for n in range(len(experts.down)):
        rows, places = (ids == n).nonzero(as_tuple=True)
        if not len(rows):
            continue
        biases = [0.0 if one is None else one[n].double() for one in (experts.gate_up_bias, experts.down_bias)]
        sums = values[rows] @ gate_up[n].double().T + biases[0]
        hidden = gate(sums.to(x.dtype), experts.activation).to(x.dtype)
        results = rounded(hidden, down.format) @ down[n].double().T + biases[1]
        out.index_add_(0, rows, weights[rows, places, None].double() * results)
    return out


def loses_bits(format: PackedFormat) -> bool:
    """Return whether tiles lose a part of fp32: see WIDE_BOUND."""
    return format.type is CodeType.INT4 and format.has_half_zeros


def least_size(format: PackedFormat) -> int:
    return max(format.group_columns, format.group_rows, 64)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_alone(name: str) -> None:
    size = least_size(FORMATS[name])
    experts = make_quantized(FORMATS[name], 4, 3, size, size, has_bias=True)
    x, logits = make_rows(experts, 1)
    want = exact(experts, x, logits)
    assert_near(experts.reference(x, logits), want, FP32)
    bound = WIDE_BOUND if FORMATS[name].type is CodeType.INT4 else 2e-5
    torch.testing.assert_close(experts.fused(x, logits).double(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["fp8", "int4 in 32 with zeros", "int4 in 32 with minima", "int8 in 32 with minima"])
def test_rows_alone_in_bf16(name: str) -> None:
    """Of outputs that are not whole steps."""
    experts = make_quantized(FORMATS[name], 16, 2, 64, 160, BF16)
    x, logits = make_rows(experts, 2)
    assert_near(experts.fused(x, logits), exact(experts, x, logits), BF16)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_tiles(name: str, dtype: torch.dtype) -> None:
    size = least_size(FORMATS[name])
    for num_rows, num_experts, num_chosen in ((5, 8, 2), (40, 3, 2)):
        experts = make_quantized(FORMATS[name], num_experts, num_chosen, 2 * size, size, dtype, has_bias=num_rows == 5)
        x, logits = make_rows(experts, num_rows)
        want = exact(experts, x, logits)
        assert_near(experts.reference(x, logits), want, dtype)
        if dtype == FP32 and loses_bits(FORMATS[name]):
            torch.testing.assert_close(experts.fused(x, logits).double(), want, rtol=WIDE_BOUND, atol=WIDE_BOUND)
        else:
            assert_near(experts.fused(x, logits), want, dtype)


@pytest.mark.parametrize("size", [(96, 160), (32, 64)])
@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        ("fp8", 9),
        ("int4 in 32 with zeros", 9),
        ("int4 in 32 with minima", 9),
        ("int8 in 32 with minima", 1),
        ("int8 in 32 with minima", 9),
        ("int4 per output", 1),
    ],
)
def test_sizes_that_are_not_whole_steps(name: str, size: tuple[int, int], num_rows: int) -> None:
    experts = make_quantized(FORMATS[name], 5, 2, *size)
    x, logits = make_rows(experts, num_rows)
    want = exact(experts, x, logits)
    torch.testing.assert_close(experts.fused(x, logits).double(), want, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if multiplies_in_fp8(format)])
def test_many_rows_are_multiplied_in_fp8(name: str, has_bias: bool) -> None:
    experts = make_quantized(FORMATS[name], 6, 2, 128, 256, has_bias=has_bias)
    x, logits = make_rows(experts, FP8_ROWS)
    got, want = experts.fused(x, logits), exact_in_fp8(experts, x, logits)
    # A sum that is near the middle of two FP8 numbers may be rounded to the other one for the second product.
    assert float((got - want).norm() / want.norm()) < 2e-3
    far = experts.reference(x, logits)
    assert 1e-3 < float((got - far).norm() / far.norm()) < 0.12  # the interpreter truncates to FP8


def test_fp8_without_blocks_needs_no_whole_steps() -> None:
    experts = make_quantized(FP8, 6, 2, 96, 160)
    x, logits = make_rows(experts, FP8_ROWS)
    got, want = experts.fused(x, logits), exact_in_fp8(experts, x, logits)
    assert float((got - want).norm() / want.norm()) < 2e-3


TILINGS = [
    *((FP8, shape) for _, shape in FP8_TILINGS),
    *((FP8_BLOCKS, shape) for _, shape in FP8_BLOCK_TILINGS),
    *((INT4_ZEROS, shape) for _, shape in DECODING_TILINGS),
    *((FORMATS["int4 in 32 with minima"], shape) for _, shape in DECODING_TILINGS),
    *((FORMATS["int8 in 32 with minima"], shape) for _, shape in DECODING_TILINGS),
]


@pytest.mark.parametrize(("format", "shape"), TILINGS)
@pytest.mark.kept("format0-", "format3-", "format7-", "format10-", "format13-")
def test_every_tiling(format: PackedFormat, shape: Tiling) -> None:
    """Tiles for large batches on small matrices: an expert has several tiles, the last is not full."""
    packed = make_quantized(format, 2, 1, 128, 256)
    x, logits = make_rows(packed, 150 if shape.rows > 64 else 70)
    logits[:, 0] += 3  # most choose the first expert
    routing = kernels.route(logits, 1, renormalizes=True, scale=1.0)
    got = experts_in_tiles(x, packed.gate_up, packed.down, routing, packed.activation, shape)
    want = (exact_in_fp8 if shape.is_fp8 else exact)(packed, x, logits)
    assert float((got - want).norm() / want.norm()) < (2e-3 if shape.is_fp8 else 2e-4 if loses_bits(format) else 1e-5)


@pytest.mark.parametrize(
    "name",
    ["int4 in 128 with zeros", "int4 in 32 with minima", "int8 in 32", "int8 in 32 with minima", "fp8 in small blocks"],
)
def test_experts_of_many_rows_are_decoded_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_quantized(FORMATS[name], 3, 2, 128, 128)
    x, logits = make_rows(experts, 40)
    packed = experts.fused(x, logits)
    monkeypatch.setattr(routed_experts, "EXPANDED_ROWS", 1)
    for stack in (experts.gate_up, experts.down):
        assert routed_experts.is_expanded(stack, 40, 2)
        assert torch.equal(routed_experts._expanded(stack), dense(stack))
    torch.testing.assert_close(experts.fused(x, logits), packed, rtol=1e-5, atol=1e-4)


def test_fp8_is_never_decoded_first() -> None:
    assert not routed_experts.is_expanded(random_stack((2, 128, 128), FP8_BLOCKS, FP32), 10**6, 2)


def test_both_matrices_may_have_other_groups() -> None:
    experts = make_quantized(INT4, 5, 2, 128, 96, down_format=PackedFormat(CodeType.INT4, 1, 32))
    x, logits = make_rows(experts, 8)
    assert_near(experts.fused(x, logits), exact(experts, x, logits), FP32)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_both_matrices_may_have_other_types(num_rows: int) -> None:
    """As in Q4_K_M files, which store some down projections in Q6_K."""
    down = FORMATS["int8 in 16"]
    experts = make_quantized(FORMATS["int4 in 32 with minima"], 5, 2, 128, 96, down_format=down)
    x, logits = make_rows(experts, num_rows)
    torch.testing.assert_close(experts.fused(x, logits).double(), exact(experts, x, logits), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("num_rows", [24, FP8_ROWS + 9])
@pytest.mark.parametrize("format", [FP8, FP8_BLOCKS, INT4])
def test_a_row_has_the_same_bits_in_any_batch_of_the_same_tiling(format: PackedFormat, num_rows: int) -> None:
    experts = make_quantized(format, 8, 2, 128, 128)
    x, logits = make_rows(experts, num_rows)
    whole = experts.fused(x, logits)
    assert torch.equal(experts.fused(x[3:].clone(), logits[3:].clone()), whole[3:])
    assert torch.equal(experts.fused(x.flip(0), logits.flip(0)), whole.flip(0))


# The stack itself


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [
        (CodeType.FP8, (128, 128), False),
        (CodeType.FP8, (96, 128), False),  # a matrix of 128 rows ends within a block
        (CodeType.FP8, (1, 256), False),
        (CodeType.FP8, (128, 256), False),
        (CodeType.INT4, (1, 64), True),
        (CodeType.INT8, (1, 32), False),
    ],
)
def test_matrices_of_files_keep_every_weight(kind: CodeType, group: tuple[int, int], has_zeros: bool) -> None:
    matrices = [random_matrix(kind, (128, 256), group, has_zeros=has_zeros, seed=seed) for seed in range(6)]
    format = stack_format(matrices[0])
    assert format is not None
    stack = PackedStack.empty(3, 256, 256, format, FP32, "cpu")
    for number, matrix in enumerate(matrices):
        stack.set_rows(number // 2, number % 2 * 128, matrix)
    want = torch.cat([decoded(matrix) for matrix in matrices]).view(3, 256, 256)
    assert torch.equal(dense(stack), want)
    assert torch.equal(stack[1], want[1])
    assert stack.nbytes == stack.whole.nbytes < stack.shape.numel() * 1.3
    assert (len(stack), stack.format.has_zeros) == (3, has_zeros)


@pytest.mark.parametrize("order", list(permutations(("plain", "whole", "half"))))
def test_zeros_of_a_stack_are_as_wide_as_the_widest(order: tuple[str, ...]) -> None:
    """The zeros of an expert may all be whole by chance."""
    matrices = []
    for seed, name in enumerate(order):
        matrix = random_matrix(CodeType.INT4, (4, 64), (1, 32), has_zeros=name != "plain", seed=seed)
        if name == "half":
            assert matrix.zeros is not None
            matrix = replace(matrix, zeros=matrix.zeros + np.float32(0.25))
        matrices.append(matrix)
    format = stack_format(matrices[0])
    assert format is not None
    stack = PackedStack.empty(3, 4, 64, format, FP32, "cpu")
    for expert, matrix in enumerate(matrices):
        stack.set_rows(expert, 0, matrix)
    assert stack.format == PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True)
    assert stack.whole.zeros is not None
    assert stack.whole.zeros.dtype == torch.float16
    assert torch.equal(dense(stack), torch.stack([decoded(matrix) for matrix in matrices]))


def test_matrices_without_kernels() -> None:
    order = np.random.default_rng(1).permutation(128).astype(np.int32)
    assert stack_format(random_matrix(CodeType.INT4, (6, 128), (1, 32), order=order)) is None
    assert stack_format(random_matrix(CodeType.FP4, (6, 128), (1, 16))) is None
    assert stack_format(random_matrix(CodeType.INT4, (6, 96), (1, 24))) is None
    assert not has_kernels(PackedFormat(CodeType.INT4, 1, 32, has_order=True))
