"""The operations of one forward pass, which models call and each kind of device implements; and a model's interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.backends.kv_memory import KVSpec
from quire.backends.torch.experts import Experts
from quire.backends.torch.layers import Heads, Inputs, Linear, Outputs, RMSNorm
from quire.backends.torch.recurrence import DeltaNet, ShortConv
from quire.weights.spec import ModelSpec


class Pass(Protocol):
    """The operations of one forward pass over its batch, implemented for one kind of device."""

    is_graph: bool  # being captured: products may use kernels for graphs, which are compiled by then

    def token_ids(self) -> Tensor:
        """Return the step's tokens [T]."""

    def positions(self) -> Tensor:
        """Return their positions [T]."""

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        """Return the embeddings [T, E] of the step's tokens."""

    def add_norm(
        self,
        x: Outputs,
        residual: Tensor | None,
        norm: RMSNorm | None,
        scale: float = 1.0,
        total_scale: float = 1.0,
        reader: Linear | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Return the norm of total_scale * (scale * x + residual), and that sum for the next call.

        `residual` may be overwritten. `reader`: the only matrix that the norm is multiplied by, if there is one, which
        may take its inputs in FP8.

        Without a residual the sum is x. Without a norm the sum is returned twice.
        """

    def norm(self, x: Outputs, norm: RMSNorm) -> Tensor: ...

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        """Norm and rotate qkv [T, (H + 2K) * D], store keys and values, attend to the whole context: [T, H * D].

        If the heads have a gate, qkv has H * D more columns. Heads may have neither norm nor rotation.
        """

    def route(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        """Return the weighted sum [T, E] of the outputs of the experts that have the best logits of each row."""

    def delta_net(self, mixed: Tensor, net: DeltaNet) -> Tensor:
        """Return the output [T, value size] of a delta net and update the states of the step's requests.

        mixed [T, channels + value size + 2 * heads]: queries, keys and values, then z, b and a.
        """

    def short_conv(self, bcx: Tensor, conv: ShortConv) -> Tensor:
        """Return c * conv(b * x) [T, E] for bcx [T, 3 * E], and update the states of the step's requests."""


class Model(Protocol):
    spec: ModelSpec
    kv_spec: KVSpec
    device: torch.device
    num_bytes: int  # of the weights
    packed_types: tuple[str, ...]  # of the packed matrices: fp8, int4
    num_layer_weights: int  # that take part in the products of one token, without embedding and head
    notice: str  # what users must know about the answers; empty: nothing
    is_capturable: bool  # a pass never waits for the device, so CUDA graphs of it can be captured

    def forward(self, step: Pass) -> Tensor:
        """Return the hidden states [T, E] after the last norm."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [rows, E] to logits [rows, V] in the model's dtype, into `out` if given."""
