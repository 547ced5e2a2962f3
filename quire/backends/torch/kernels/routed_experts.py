"""Chooses the kernels of routed experts by their format and by the number of rows of the batch.

The kernels and their shapes are in `experts.py` (matrices of 16 or 32 bits), `mxfp4_experts.py` and
`quantized_experts.py`. `expert_calls` lists all that a model may use, for compilation in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.backends.torch.kernels import mxfp4_experts, quantized_experts
from quire.backends.torch.kernels.experts import (
    LONG,
    SHORT,
    Biases,
    Routing,
    SortedSlots,
    _padded,
    experts_alone,
    experts_in_tiles,
    grouped_product,
    is_alone,
    route,
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

Calls = list[Callable[[], object]]


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


def _meta(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def expert_calls(
    gate_up: Stack,
    down: Stack,
    *,
    num_chosen: int,
    activation: Activation,
    renormalizes: bool,
    scale: float,
    logits_dtype: torch.dtype,
    max_rows: int,
    has_bias: bool = False,
    has_expert_scales: bool = False,
) -> Calls:
    """Return launches of every kernel that `Experts.fused` uses for 1 to `max_rows` rows.

    All tensors are on the device "meta": launches are only compiled.
    """
    meta = partial(_meta, kind=down.dtype)
    num_experts, size, width = down.shape
    biases = Biases(meta(num_experts, 2 * width), meta(num_experts, size)) if has_bias else Biases()
    scales = meta(num_experts, kind=torch.float32) if has_expert_scales else None
    choose = partial(route, num_chosen=num_chosen, renormalizes=renormalizes, scale=scale, expert_scales=scales)
    chosen = Routing(meta(1, num_chosen, kind=torch.int32), meta(1, num_chosen, kind=torch.float32))
    calls: Calls = [
        partial(choose, meta(1, num_experts, kind=logits_dtype)),
        partial(run_experts, meta(1, size), gate_up, down, chosen, activation, biases),
        partial(weighted_sum, meta(num_chosen, size), chosen.weights),
    ]
    for least in (1, SHORT + 1, 2 * SHORT + 1, LONG + 1):
        if least <= max_rows * num_chosen:
            ids = meta(-(-least // num_chosen), num_chosen, kind=torch.int32)
            calls.append(partial(sort_slots, ids, num_experts, 16))
    rows = [one for one in range(2, max_rows + 1) if not is_alone(one, num_experts, num_chosen)]
    many = [one for one in rows if _is_expanded(down, one, num_chosen)]
    fewer = [one for one in rows if one not in set(many)]
    if isinstance(gate_up, Tensor):
        many, fewer = rows, []
    elif many:
        calls += [partial(_expanded, one) for one in (gate_up, down) if not isinstance(one, Tensor)]
    calls += _packed_calls(gate_up, down, fewer, num_chosen, activation, biases)
    return calls + _dense_calls(gate_up.shape, down.shape, down.dtype, many, num_chosen, activation, biases)


def _is_expanded(stack: Stack, num_rows: int, num_chosen: int) -> bool:
    if isinstance(stack, PackedStack):
        return quantized_experts.is_expanded(stack, num_rows, num_chosen)
    return isinstance(stack, Mxfp4Stack) and mxfp4_experts.is_expanded(num_rows, len(stack), num_chosen)


def _one_slot(num_chosen: int) -> SortedSlots:
    ints = _meta(16, kind=torch.int32)
    return SortedSlots(ints[:num_chosen], ints, 1)


def _packed_calls(
    gate_up: Stack, down: Stack, rows: list[int], num_chosen: int, activation: Activation, biases: Biases
) -> Calls:
    """Return the grouped products of packed experts for these numbers of rows."""
    num_experts, size, width = down.shape
    x, hidden = _meta(1, size, kind=down.dtype), _meta(num_chosen, width, kind=down.dtype)
    slots, kind = _one_slot(num_chosen), KINDS[activation]
    calls: Calls = []
    if isinstance(gate_up, Mxfp4Stack) and isinstance(down, Mxfp4Stack):
        for shape in sorted({mxfp4_tiling(one, num_experts, num_chosen, down.itemsize) for one in rows}):
            run = partial(mxfp4_experts.mxfp4_product, num_chosen=num_chosen, rows=shape.rows)
            calls.append(partial(run, x, gate_up, biases.gate_up, *slots, tile=shape.gate_up, kind=kind))
            calls.append(partial(run, hidden, down, biases.down, *slots, tile=shape.down, kind=None))
    if isinstance(gate_up, PackedStack) and isinstance(down, PackedStack):
        for one in sorted({quantized_tiling(one, num_experts, num_chosen, down.itemsize, down.format) for one in rows}):
            multiply = partial(
                quantized_experts.quantized_product, num_chosen=num_chosen, rows=one.rows, is_fp8=one.is_fp8
            )
            calls.append(partial(multiply, x, gate_up, biases.gate_up, *slots, tile=one.gate_up, kind=kind))
            calls.append(partial(multiply, hidden, down, biases.down, *slots, tile=one.down, kind=None))
    return calls


def _dense_calls(
    gate_up: torch.Size,
    down: torch.Size,
    dtype: torch.dtype,
    rows: list[int],
    num_chosen: int,
    activation: Activation,
    biases: Biases,
) -> Calls:
    """Return the grouped products of experts of these shapes in 16 or 32 bits, for these numbers of rows."""
    num_experts, size, width = down
    meta = partial(_meta, kind=dtype)
    first, second, slots = meta(*gate_up), meta(*down), _one_slot(num_chosen)
    calls: Calls = []
    for tile_rows, *tiles in sorted({tiling(one, num_experts, num_chosen, dtype.itemsize) for one in rows}):
        product = partial(grouped_product, slots=slots, num_chosen=num_chosen, rows=tile_rows)
        calls.append(partial(product, meta(1, size), first, tile=tiles[0], activation=activation, bias=biases.gate_up))
        calls.append(
            partial(product, meta(num_chosen, width), second, tile=tiles[1], activation=None, bias=biases.down)
        )
    return calls
