"""A forward pass in our own kernels, over the device's copy of the step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.inputs import StepInputs
from quire.backends.torch.kernels.attention import Parts, Tiling, attend, merge
from quire.backends.torch.kernels.elementwise import add_norm, embed, gated, norm
from quire.backends.torch.kernels.linear import (
    THIN,
    gated_row_product,
    gated_tile_product,
    is_small,
    product_in_parts,
    row_product,
    tile_product,
)
from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Heads, Linear, RMSNorm
from quire.weights.spec import Activation

# T rows of the batch, H query heads, K kv heads, D head size, E hidden size, F width of the MLP


class DeviceState(NamedTuple):
    """State that stays on the device between steps."""

    store: KVStore
    tables: Tensor  # [batch_indices, most blocks] int32
    last_samples: Tensor  # [batch_indices] int32
    parts: Parts
    tilings: tuple[Tiling, Tiling]  # for items of one row, and of many


class FusedPass:
    def __init__(self, inputs: StepInputs, state: DeviceState, *, num_merged: int, is_graph: bool) -> None:
        self._inputs = inputs
        self._state = state
        self._num_merged = num_merged  # leading rows, some of which may be split over several items
        self._is_graph = is_graph  # being captured: products may use kernels for graphs, which are compiled by then

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        return embed(self._inputs.tokens, self._inputs.batch_indices, self._state.last_samples, embedding, scale)

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, norm.weight, norm.eps)

    def norm(self, x: Tensor, norm_: RMSNorm) -> Tensor:
        return norm(x, norm_.weight, norm_.eps, self._state.store.dtype)

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        inputs, state, layer = self._inputs, self._state, self._state.store.layers[heads.index]
        q_norm, k_norm, eps, rounds_first = None, None, 0.0, False
        if heads.norm is not None:
            q_norm, k_norm, eps = heads.norm.q_weight, heads.norm.k_weight, heads.norm.eps
            rounds_first = heads.norm.rounds_first
        q = rope_store(
            qkv,
            inputs.positions,
            inputs.batch_indices,
            state.tables,
            heads.rotary.cosines,
            heads.rotary.sines,
            layer,
            heads.num_heads,
            q_norm,
            k_norm,
            eps,
            rounds_first=rounds_first,
        )  # [T, H, D]
        out = torch.empty_like(q)
        for items, tiling in zip((inputs.narrow, inputs.wide), self._state.tilings, strict=True):
            if len(items):
                attend(
                    q,
                    layer,
                    state.tables,
                    inputs.positions,
                    items,
                    inputs.first_parts,
                    state.parts,
                    out,
                    tiling=tiling,
                    scale=heads.scale,
                    window=heads.window,
                    cap=heads.cap,
                )
        if self._num_merged:
            merge(state.parts, inputs.first_parts, out[: self._num_merged], heads.num_kv_heads)
        return out.view(len(out), -1)

    def project(self, x: Tensor, linear: Linear) -> Tensor:
        if self._is_graph and len(x) == 1:
            return row_product(x, linear.weight, linear.bias)
        if self._is_graph and is_small(len(x), linear.weight):
            return tile_product(x, linear.weight, linear.bias)
        return linear(x)

    def project_back(self, x: Tensor, linear: Linear) -> Tensor:
        if self._is_graph and len(linear.weight) <= THIN and is_small(len(x), linear.weight):
            return product_in_parts(x, linear.weight, linear.bias)
        return self.project(x, linear)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        if self._is_graph and len(x) == 1:
            return gated_row_product(x, gate_up.weight, gate_up.bias, activation)
        if self._is_graph and is_small(len(x), gate_up.weight):
            return gated_tile_product(x, gate_up.weight, gate_up.bias, activation)
        return gated(gate_up(x), activation)
