"""The interface of a model, whoever has its equations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.backends.kv_spec import KVSpec
from quire.backends.torch.forward_pass import Pass
from quire.weights.spec import ModelSpec


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
