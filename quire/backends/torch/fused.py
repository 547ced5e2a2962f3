"""A forward pass in our own kernels, over the device's copy of the step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.experts import Experts, SharedExpert
from quire.backends.torch.inputs import StepInputs
from quire.backends.torch.kernels.attention import Parts, attend, merge, tilings
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
from quire.backends.torch.state_store import StateStore
from quire.weights.spec import Activation

# T rows of the batch, H query heads, K kv heads, D head size, E hidden size, F width of the MLP


class DeviceState(NamedTuple):
    """State that stays on the device between steps."""

    store: KVStore
    tables: Tensor  # [batch_indices, most blocks] int32
    window_tables: Tensor  # the same for window blocks, empty without them
    last_samples: Tensor  # [batch_indices] int32
    parts: Parts
    states: StateStore | None  # None: the model has none


class FusedPass:
    def __init__(
        self,
        inputs: StepInputs,
        state: DeviceState,
        *,
        num_merged: int,
        is_graph: bool,
    ) -> None:
        self._inputs = inputs
        self._state = state
        self._num_merged = num_merged  # leading rows, some of which may be split over several items
        self._is_graph = is_graph  # being captured: products may use kernels for graphs, which are compiled by then

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        return embed(self._inputs.tokens, self._inputs.batch_indices, self._state.last_samples, embedding, scale)

    def token_ids(self) -> Tensor:
        return step_tokens(self._inputs.tokens, self._inputs.batch_indices, self._state.last_samples)

    def positions(self) -> Tensor:
        positions: Tensor = self._inputs.positions
        return positions.long()

    def add_norm(
        self, x: Outputs, residual: Tensor | None, norm: RMSNorm | None, scale: float = 1.0, total_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if norm is not None:
            return add_norm(x, residual, norm.weight, norm.eps, scale, total_scale, is_graph=self._is_graph)
        x = plain(x)
        total = x if residual is None else residual.add_(x, alpha=scale)
        if residual is not None and total_scale != 1:
            total.mul_(total_scale)
        return total, total

    def add_norm_for(
        self,
        reader: Linear | None,
        x: Outputs,
        residual: Tensor | None,
        norm: RMSNorm | None,
        scale: float = 1.0,
        total_scale: float = 1.0,
    ) -> tuple[Inputs, Tensor]:
        taken = None if reader is None else reader.fp8_inputs(self._inputs.tokens.shape[0])
        if norm is None or taken is None:
            return self.add_norm(x, residual, norm, scale, total_scale)
        has_groups = taken is Fp8Inputs.PER_GROUP
        return add_norm_in_fp8(
            x, residual, norm.weight, norm.eps, scale, total_scale, has_groups=has_groups, is_graph=self._is_graph
        )

    def norm(self, x: Outputs, norm_: RMSNorm) -> Tensor:
        return norm(x, norm_.weight, norm_.eps, self._state.store.dtype, is_graph=self._is_graph)

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        if heads.has_gate:
            out = self._rotate_and_attend(qkv[:, : heads.qkv_size], heads)
            return gate_output(out, qkv[:, heads.qkv_size :])
        return self._rotate_and_attend(qkv, heads)

    def _rotate_and_attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        q_norm, k_norm, eps, rounds_first = None, None, 0.0, False
        if heads.norm is not None and heads.norm.is_wide:
            q_size, kv_size = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
            norm_columns(qkv, 0, q_size, heads.norm.q_weight, heads.norm.eps)
            norm_columns(qkv, q_size, kv_size, heads.norm.k_weight, heads.norm.eps)
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
            heads.num_heads,
            q_norm,
            k_norm,
            eps,
            rounds_first=rounds_first,
            query_factors=heads.query_factors,
            kept=self._kept(heads.index),
            has_value_norm=heads.has_value_norm,
            is_shared=heads.is_shared,
            scales=self._state.store.scales.get(heads.index),
        )  # [T, H, D]
        return self._attend(q, heads)

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
        inputs, state = self._inputs, self._state
        qkv = torch.cat((q, k, v), 1).view(len(q), -1)
        layer, tables = state.store.layers[heads.index], self._tables(heads.index)
        rows = inputs.positions, inputs.batch_indices
        kept = self._kept(heads.index)
        scales = state.store.scales.get(heads.index)
        q = rope_store(
            qkv, *rows, tables, None, None, layer, heads.num_heads, None, None, 0.0, kept=kept, scales=scales
        )
        return self._attend(q, heads)

    def _uses_window_blocks(self, layer: int) -> bool:
        return self._state.store.shapes[layer].window > 0

    def _tables(self, layer: int) -> Tensor:
        return self._state.window_tables if self._uses_window_blocks(layer) else self._state.tables

    def _kept(self, layer: int) -> Tensor | None:
        """Return which rows are stored, or None for all: window blocks are not shared while they are written."""
        kept: Tensor | None = self._inputs.kept
        return None if self._uses_window_blocks(layer) else kept

    def _attend(self, q: Tensor, heads: Heads) -> Tensor:
        inputs, state = self._inputs, self._state
        work = inputs.items
        if self._uses_window_blocks(heads.index):
            assert inputs.window is not None
            work = inputs.window
        out = torch.empty_like(q)
        kinds = tilings(heads.head_size, q.itemsize, is_fp8=state.store.is_fp8)
        for items, tiling in zip((work.narrow, work.wide), kinds, strict=True):
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
                    scale=heads.scale,
                    window=heads.window,
                    cap=heads.cap,
                    sinks=heads.sinks,
                    scales=state.store.scales.get(heads.index),
                )
        if self._num_merged:
            merge(state.parts, work.first_parts, out[: self._num_merged], heads.sinks)
        return out.view(len(out), -1)

    def project(self, x: Inputs, linear: Linear) -> Tensor:
        return linear.project(x, is_graph=self._is_graph)

    def project_back(self, x: Inputs, linear: Linear) -> Outputs:
        return linear.project_back(x, is_graph=self._is_graph)

    def gated(self, x: Inputs, gate_up: Linear, activation: Activation, reader: Linear) -> Inputs:
        return gate_up.gated(x, activation, is_graph=self._is_graph, reader=reader)

    def route(self, x: Inputs, router: Linear, experts: Experts, router_input: Tensor | None = None) -> Tensor:
        x = plain(x)
        logits = router.project(x if router_input is None else router_input, is_graph=self._is_graph)
        return experts.fused(x, logits)

    def add_shared(self, routed: Tensor, x: Inputs, shared: SharedExpert) -> Tensor:
        down = shared.down_proj
        hidden = shared.gate_up_proj.gated(x, shared.activation, is_graph=self._is_graph, reader=down)
        gate = shared.gate.project(x, is_graph=self._is_graph).sigmoid()
        return routed.addcmul_(gate, down.project(hidden, is_graph=self._is_graph))

    def delta_net(self, mixed: Tensor, net: DeltaNet) -> Tensor:
        states, work = self._state.states, self._inputs.states
        assert states is not None
        assert work is not None
        weights = DeltaWeights(net.taps, net.decay, net.dt_bias, net.norm.weight, net.norm.eps)
        conv, matrices = states.conv[net.index], states.matrices[net.index]
        return delta_net(mixed, weights, net.spec, conv, matrices, work, is_graph=self._is_graph)

    def short_conv(self, bcx: Tensor, conv: ShortConv) -> Tensor:
        states, work = self._state.states, self._inputs.states
        assert states is not None
        assert work is not None
        return short_conv(bcx, conv.taps, conv.bias, states.conv[conv.index], work)
