"""Chooses the kernels of routed experts by their format and by the number of rows of the batch.

The kernels and their shapes are in `experts.py` (matrices of 16 or 32 bits) and `quantized_experts.py` (the others).
`expert_calls` lists all that a model may use, for compilation in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.backends.torch.kernels import experts, mxfp4_experts, packed_products, quantized_experts
from quire.backends.torch.kernels.experts import (
    LONG,
    SHORT,
    Biases,
    Routing,
    SortedSlots,
    Tiling,
    _padded,
    is_alone,
    route,
    sort_slots,
    weighted_sum,
)
from quire.backends.torch.kernels.linear import KINDS
from quire.backends.torch.packed import Stack, multiplies_in_fp8
from quire.weights.spec import Activation

# T rows of the batch, N experts, K experts chosen per row, S = T * K slots, E hidden size, F width of an expert

EXPANDED_ROWS = 160  # rows per expert from which on packed experts are decoded before the products

Calls = list[Callable[[], object]]  # each launches a kernel in the form a step uses, with no work


def run_experts(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    routing: Routing,
    activation: Activation,
    biases: Biases = Biases(),  # noqa: B008
) -> Tensor:
    """Return the experts' output [T, E] of rows x [T, E], with the kernels for this number of rows."""
    num_rows, num_chosen = len(x), routing.ids.shape[1]
    if is_alone(num_rows, len(down), num_chosen):
        kernels = _kernels(gate_up)
        gated = kernels.gated_alone(x, gate_up, biases.gate_up, routing.ids, KINDS[activation])
        out: Tensor = kernels.down_alone(gated, down, biases.down, routing.ids, routing.weights, _padded(num_chosen))
        return out
    return experts_in_tiles(x, gate_up, down, routing, activation, choose_tiling(down, num_rows, num_chosen), biases)


def experts_in_tiles(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    routing: Routing,
    activation: Activation,
    shape: Tiling,
    biases: Biases = Biases(),  # noqa: B008
) -> Tensor:
    """Return the experts' output [T, E] of rows x [T, E], sorted by expert."""
    num_chosen = routing.ids.shape[1]
    slots = sort_slots(routing.ids, len(down), shape.rows)
    has_many = is_expanded(down, len(x), num_chosen)

    def multiply(rows: Tensor, weight: Stack, bias: Tensor | None, tile: experts.Tile, kind: int | None) -> Tensor:
        if has_many:  # one matrix of all experts at a time is in memory
            weight = _expanded(weight)
        out: Tensor = _kernels(weight).grouped_product(rows, weight, bias, slots, num_chosen, shape, tile, kind)
        return out

    gated = multiply(x, gate_up, biases.gate_up, shape.gate_up, KINDS[activation])
    y = multiply(gated, down, biases.down, shape.down, None)
    return weighted_sum(y, routing.weights)


def _kernels(stack: Stack) -> Any:
    """Return the module with the kernels of a format: all have `gated_alone`, `down_alone` and `grouped_product`."""
    return experts if isinstance(stack, Tensor) else quantized_experts


def choose_tiling(down: Stack, num_rows: int, num_chosen: int) -> Tiling:
    """Return the tiles for this number of rows."""
    sizes = num_rows, len(down), num_chosen, down.dtype.itemsize
    if isinstance(down, Tensor) or is_expanded(down, num_rows, num_chosen):
        return experts.tiling(*sizes)
    return quantized_experts.quantized_tiling(*sizes, down.format)


def is_expanded(stack: Stack, num_rows: int, num_chosen: int) -> bool:
    """Return whether to decode all experts before the products: with many rows, that costs less than in every tile."""
    if isinstance(stack, Tensor) or num_rows * num_chosen < EXPANDED_ROWS * len(stack):
        return False
    return not multiplies_in_fp8(stack.format)


def _expanded(stack: Stack) -> Tensor:
    """Return the decoded matrices [N, O, I] of all experts."""
    if isinstance(stack, Tensor):
        return stack
    expand = mxfp4_experts.expanded if stack.format.has_exponents else packed_products.expanded
    return expand(stack.whole).view(stack.shape)


# Compilation in advance


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

    def meta(*shape: int, kind: torch.dtype = down.dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

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
    shapes = {(is_expanded(down, one, num_chosen), choose_tiling(down, one, num_chosen)) for one in rows}
    if any(has_many for has_many, _ in shapes):
        calls += [partial(_expanded, one) for one in (gate_up, down)]
    ints = meta(16, kind=torch.int32)
    slots = SortedSlots(ints[:num_chosen], ints, 1)
    for has_many, shape in sorted(shapes):
        first, second = (meta(*gate_up.shape), meta(*down.shape)) if has_many else (gate_up, down)
        product = partial(_kernels(first).grouped_product, slots=slots, num_chosen=num_chosen, shape=shape)
        kind = KINDS[activation]
        calls.append(partial(product, meta(1, size), first, biases.gate_up, tile=shape.gate_up, kind=kind))
        calls.append(partial(product, meta(num_chosen, width), second, biases.down, tile=shape.down, kind=None))
    return calls
