"""A forward pass in our own kernels, over the device's copy of the step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.experts import Experts
from quire.backends.torch.inputs import StepInputs
from quire.backends.torch.kernels.attention import attend, merge, tilings
from quire.backends.torch.kernels.convolution import short_conv
from quire.backends.torch.kernels.delta_net import DeltaWeights, delta_net
from quire.backends.torch.kernels.elementwise import (
    add_norm,
    add_norm_in_fp8,
    embed,
    gate_output,
    norm,
    norm_columns,
    step_tokens,
)
from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Fp8Inputs, Heads, Inputs, Linear, Outputs, RMSNorm, plain
from quire.backends.torch.recurrence import DeltaNet, ShortConv

# T rows of the batch, H query heads, K kv heads, D head size, E hidden size, F width of the MLP


class DeviceState(NamedTuple):
    """State that stays on the device between steps."""

    store: KVStore
    tables: Tensor  # [batch_indices, most blocks] int32
    window_tables: Tensor  # the same for window blocks, empty without them
    last_samples: Tensor  # [batch_indices] int32
    parts: Tensor  # of split rows: all layers use it in turn


class FusedPass:
    def __init__(
        self,
        inputs: StepInputs,
        state: DeviceState,
        *,
        num_merged: int,
        is_graph: bool,
        num_spare: int = 0,
    ) -> None:
        self._inputs = inputs
        self._works = inputs.work, inputs.window_work
        self._state_work = inputs.states
        self._state = state
        self._num_merged = num_merged  # leading rows, some of which may be split over several items
        self._num_spare = num_spare  # items of attention without a program: those of a graph are mostly empty
        self.is_graph = is_graph  # being captured: products may use kernels for graphs, which are compiled by then

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        return embed(self._inputs.tokens, self._inputs.batch_indices, self._state.last_samples, embedding, scale)

    def token_ids(self) -> Tensor:
        return step_tokens(self._inputs.tokens, self._inputs.batch_indices, self._state.last_samples)

    def positions(self) -> Tensor:
        positions: Tensor = self._inputs.positions
        return positions.long()

    def add_norm(
        self,
        x: Outputs,
        residual: Tensor | None,
        norm: RMSNorm | None,
        scale: float = 1.0,
        total_scale: float = 1.0,
        reader: Linear | None = None,
    ) -> tuple[Inputs, Tensor]:
        if norm is None:
            x = plain(x)
            total = x if residual is None else residual.add_(x, alpha=scale)
            if residual is not None and total_scale != 1:
                total.mul_(total_scale)
            return total, total
        taken = None if reader is None else reader.fp8_inputs(self._inputs.tokens.shape[0])
        factors = norm.eps, scale, total_scale
        if taken is None:
            return add_norm(x, residual, norm.weight, *factors, is_graph=self.is_graph)
        has_groups = taken is Fp8Inputs.PER_GROUP
        return add_norm_in_fp8(x, residual, norm.weight, *factors, has_groups=has_groups, is_graph=self.is_graph)

    def norm(self, x: Outputs, norm_: RMSNorm) -> Tensor:
        return norm(x, norm_.weight, norm_.eps, self._state.store.dtype, is_graph=self.is_graph)

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        if heads.spec.has_gate:
            out = self._rotate_and_attend(qkv[:, : heads.spec.qkv_size], heads)
            return gate_output(out, qkv[:, heads.spec.qkv_size :])
        return self._rotate_and_attend(qkv, heads)

    def _rotate_and_attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        q_norm, k_norm, eps, rounds_first = None, None, 0.0, False
        if heads.norm is not None and heads.norm.is_wide:
            norm_columns(qkv, 0, heads.spec.q_size, heads.norm.q_weight, heads.norm.eps)
            norm_columns(qkv, heads.spec.q_size, heads.spec.kv_size, heads.norm.k_weight, heads.norm.eps)
        elif heads.norm is not None:
            q_norm, k_norm, eps = heads.norm.q_weight, heads.norm.k_weight, heads.norm.eps
            rounds_first = heads.norm.rounds_first
        inputs, rotary = self._inputs, heads.rotary
        q = rope_store(
            qkv,
            inputs.positions,
            inputs.batch_indices,
            self._tables(heads.index),
            None if rotary is None else rotary.cosines,
            None if rotary is None else rotary.sines,
            self._state.store.layers[heads.index],
            heads.spec.num_heads,
            q_norm,
            k_norm,
            eps,
            rounds_first=rounds_first,
            query_factors=heads.query_factors,
            kept=self._kept(heads.index),
            has_value_norm=heads.spec.has_value_norm,
            is_shared=heads.spec.is_shared,
            scales=self._state.store.scales.get(heads.index),
        )  # [T, H, D]
        return self._attend(q, heads)

    def _uses_window_blocks(self, layer: int) -> bool:
        return self._state.store.shapes[layer].window > 0

    def _tables(self, layer: int) -> Tensor:
        return self._state.window_tables if self._uses_window_blocks(layer) else self._state.tables

    def _kept(self, layer: int) -> Tensor | None:
        """Return which rows are stored, or None for all: window blocks are not shared while they are written."""
        kept: Tensor = self._inputs.kept
        return None if self._uses_window_blocks(layer) or not len(kept) else kept

    def _attend(self, q: Tensor, heads: Heads) -> Tensor:
        inputs, state = self._inputs, self._state
        work = self._works[self._uses_window_blocks(heads.index)]
        out = torch.empty_like(q)
        narrow, wide = tilings(heads.spec.head_size, q.itemsize)
        for items, tiling in ((work.wide, wide), (work.narrow, narrow)):  # narrow items read parts of wide ones
            if len(items):
                attend(
                    q,
                    state.store.layers[heads.index],
                    self._tables(heads.index),
                    inputs.positions,
                    items,
                    work.first_parts,
                    state.parts,
                    out,
                    tiling=tiling,
                    scale=heads.spec.scale,
                    window=heads.spec.window,
                    cap=heads.spec.softcap,
                    num_spare=self._num_spare,
                    sinks=heads.sinks,
                    scales=state.store.scales.get(heads.index),
                )
        if self._num_merged:
            merge(state.parts, work.first_parts, out[: self._num_merged], heads.sinks)
        return out.view(len(out), -1)

    def route(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        return experts.fused(x, logits)

    def delta_net(self, mixed: Tensor, net: DeltaNet) -> Tensor:
        store, work = self._state.store, self._state_work
        weights = DeltaWeights(net.taps, net.decay, net.dt_bias, net.norm.weight, net.norm.eps)
        conv, matrices = store.conv[net.index], store.matrices[net.index]
        return delta_net(mixed, weights, net.spec, conv, matrices, work, is_graph=self.is_graph)

    def short_conv(self, bcx: Tensor, conv: ShortConv) -> Tensor:
        return short_conv(bcx, conv.taps, conv.bias, self._state.store.conv[conv.index], self._state_work)
