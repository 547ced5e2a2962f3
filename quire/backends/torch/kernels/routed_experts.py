"""Chooses the kernels of routed experts by their format and by the number of rows of the batch.

The kernels and their shapes are in `experts.py` (matrices of 16 or 32 bits), `mxfp4_experts.py` and
`quantized_experts.py`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quire.backends.torch.kernels import mxfp4_experts, quantized_experts
from quire.backends.torch.kernels.experts import (
    LONG,
    SHORT,
    Biases,
    Routing,
    _padded,
    experts_alone,
    experts_in_tiles,
    grouped_product,
    is_alone,
    sort_slots,
    tiling,
    weighted_sum,
)
from quire.backends.torch.kernels.linear import KINDS
from quire.backends.torch.kernels.mxfp4_experts import Mxfp4Tiling, mxfp4_tiling
from quire.backends.torch.kernels.quantized_experts import QuantizedTiling, quantized_tiling
from quire.backends.torch.packed import Mxfp4Stack, PackedStack, Stack
from quire.weights.spec import Activation

# T rows of the batch, N experts, K experts chosen per row, S = T * K slots, E hidden size, F width of an expert


def run_experts(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    routing: Routing,
    activation: Activation,
    biases: Biases = Biases(),  # noqa: B008
) -> Tensor:
    """Return the experts' output [T, E] of rows x [T, E], with the kernels for this number of rows."""
    num_rows, num_experts, num_chosen = len(x), len(down), routing.ids.shape[1]
    is_few = is_alone(num_rows, num_experts, num_chosen)
    if isinstance(gate_up, Mxfp4Stack) and isinstance(down, Mxfp4Stack):
        if is_few:
            return _mxfp4_alone(x, gate_up, down, routing, activation, biases)
        if mxfp4_experts.is_expanded(num_rows, num_experts, num_chosen):
            return _expanded_in_tiles(x, gate_up, down, routing, activation, biases)
        mxfp4_shape = mxfp4_tiling(num_rows, num_experts, num_chosen, x.element_size())
        return mxfp4_in_tiles(x, gate_up, down, routing, activation, mxfp4_shape, biases)
    if isinstance(gate_up, PackedStack) and isinstance(down, PackedStack):
        if is_few:
            return _quantized_alone(x, gate_up, down, routing, activation, biases)
        if quantized_experts.is_expanded(down, num_rows, num_chosen):
            return _expanded_in_tiles(x, gate_up, down, routing, activation, biases)
        packed_shape = quantized_tiling(num_rows, num_experts, num_chosen, x.element_size(), down.format)
        return quantized_in_tiles(x, gate_up, down, routing, activation, packed_shape, biases)
    assert isinstance(gate_up, Tensor), "both matrices are packed in the same way or none is"
    assert isinstance(down, Tensor), "both matrices are packed in the same way or none is"
    if is_few:
        return experts_alone(x, gate_up, down, routing, activation, biases)
    shape = tiling(num_rows, num_experts, num_chosen, x.element_size())
    return experts_in_tiles(x, gate_up, down, routing, activation, shape, biases)


def _mxfp4_alone(
    x: Tensor, gate_up: Mxfp4Stack, down: Mxfp4Stack, routing: Routing, activation: Activation, biases: Biases
) -> Tensor:
    gated = mxfp4_experts.gated_alone(x, gate_up, biases.gate_up, routing.ids, KINDS[activation])
    num_slots = _padded(routing.ids.shape[1])
    return mxfp4_experts.down_alone(gated, down, biases.down, routing.ids, routing.weights, num_slots)


def _quantized_alone(
    x: Tensor, gate_up: PackedStack, down: PackedStack, routing: Routing, activation: Activation, biases: Biases
) -> Tensor:
    gated = quantized_experts.gated_alone(x, gate_up, biases.gate_up, routing.ids, KINDS[activation])
    num_slots = _padded(routing.ids.shape[1])
    return quantized_experts.down_alone(gated, down, biases.down, routing.ids, routing.weights, num_slots)


def _expanded(stack: Mxfp4Stack | PackedStack) -> Tensor:
    """Return the decoded matrices [N, O, I] of all experts."""
    if isinstance(stack, PackedStack):
        return quantized_experts.expanded_stack(stack)
    return mxfp4_experts.expanded(stack)


def _expanded_in_tiles(
    x: Tensor,
    gate_up: Mxfp4Stack | PackedStack,
    down: Mxfp4Stack | PackedStack,
    routing: Routing,
    activation: Activation,
    biases: Biases,
) -> Tensor:
    """Like `experts_in_tiles`. One matrix of all experts at a time is in memory."""
    num_chosen = routing.ids.shape[1]
    shape = tiling(len(x), len(down), num_chosen, x.element_size())
    slots = sort_slots(routing.ids, len(down), shape.rows)
    dense = _expanded(gate_up)
    gated = grouped_product(x, dense, slots, num_chosen, shape.rows, shape.gate_up, activation, biases.gate_up)
    del dense
    dense = _expanded(down)
    y = grouped_product(gated, dense, slots, num_chosen, shape.rows, shape.down, None, biases.down)
    return weighted_sum(y, routing.weights)


def mxfp4_in_tiles(
    x: Tensor,
    gate_up: Mxfp4Stack,
    down: Mxfp4Stack,
    routing: Routing,
    activation: Activation,
    shape: Mxfp4Tiling,
    biases: Biases = Biases(),  # noqa: B008
) -> Tensor:
    """Like `experts_in_tiles`, of matrices in MXFP4."""
    slots = sort_slots(routing.ids, len(gate_up), shape.rows)
    multiply = partial(mxfp4_experts.mxfp4_product, num_chosen=routing.ids.shape[1], rows=shape.rows)
    gated = multiply(x, gate_up, biases.gate_up, *slots, tile=shape.gate_up, kind=KINDS[activation])
    y = multiply(gated, down, biases.down, *slots, tile=shape.down, kind=None)
    return weighted_sum(y, routing.weights)


def quantized_in_tiles(
    x: Tensor,
    gate_up: PackedStack,
    down: PackedStack,
    routing: Routing,
    activation: Activation,
    shape: QuantizedTiling,
    biases: Biases = Biases(),  # noqa: B008
) -> Tensor:
    """Like `experts_in_tiles`, of packed matrices."""
    slots = sort_slots(routing.ids, len(gate_up), shape.rows)
    multiply = partial(
        quantized_experts.quantized_product, num_chosen=routing.ids.shape[1], rows=shape.rows, is_fp8=shape.is_fp8
    )
    gated = multiply(x, gate_up, biases.gate_up, *slots, tile=shape.gate_up, kind=KINDS[activation])
    y = multiply(gated, down, biases.down, *slots, tile=shape.down, kind=None)
    return weighted_sum(y, routing.weights)


# Compilation in advance


def row_counts(gate_up: Stack, down: Stack, num_chosen: int, max_rows: int) -> list[int]:
    """Return numbers of rows that together use all kernels of `run_experts` for 1 to `max_rows` rows."""
    found: dict[object, int] = {}
    for num_rows in range(1, max_rows + 1):
        found.setdefault(_kernels(gate_up, down, num_rows, num_chosen), num_rows)
    slots = [least for least in (SHORT + 1, 2 * SHORT + 1, LONG + 1) if least <= max_rows * num_chosen]
    return [*found.values(), *(-(-least // num_chosen) for least in slots)]


def _kernels(gate_up: Stack, down: Stack, num_rows: int, num_chosen: int) -> object:
    """Return what selects the kernels, for comparison."""
    num_experts, itemsize = len(down), down.itemsize
    if is_alone(num_rows, num_experts, num_chosen):
        return None
    if isinstance(gate_up, Mxfp4Stack) and not mxfp4_experts.is_expanded(num_rows, num_experts, num_chosen):
        return mxfp4_tiling(num_rows, num_experts, num_chosen, itemsize)
    if isinstance(down, PackedStack) and not quantized_experts.is_expanded(down, num_rows, num_chosen):
        return quantized_tiling(num_rows, num_experts, num_chosen, itemsize, down.format)
    return "dense", tiling(num_rows, num_experts, num_chosen, itemsize)
