"""Building blocks of all model families, as plain callables over tensors.

They are not `nn.Module`s: nothing is trained, and a module's call costs more than a small matrix product on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.weights.spec import Activation, RopeSpec

# T tokens in the batch, I inputs, O outputs, H heads, D head size


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, I] by weight [O, I] transposed.

    On a CPU a general matrix product of few rows costs as much as one of eight rows. Two and three rows are therefore
    computed one by one, which gives the same bits as a single stream. From 9 to 64 rows the product with the weights on
    the left is faster by a quarter. Measured in docs/performance.md.
    """
    num_rows = x.shape[0]
    if x.device.type != "cpu" or num_rows == 1 or 4 <= num_rows <= 8 or num_rows > 64:
        return F.linear(x, weight, bias)
    if num_rows <= 3:
        return torch.cat([F.linear(x[row : row + 1], weight, bias) for row in range(num_rows)])
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


class Linear:
    """One matrix, or several with the same input, concatenated along their outputs."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [O, I]
        self.bias = bias  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class RMSNorm:
    """RMS norm computed in fp32, including the weight, and rounded once.

    This is Gemma's order. The other families also round before the weight, which only adds an error.
    """

    __slots__ = ("_floor", "_scaled", "eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # fp32
        self.shape = tuple(weight.shape)
        self.eps = eps
        size = weight.shape[-1]
        self._scaled = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)
        # On a CPU rms_norm is eight small operations. Four do it: sqrt(mean + eps) is hypot(norm, floor) / sqrt(size).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self._scaled).div_(torch.hypot(norm, self._floor))


class Rotary:
    """Rotates the leading `rotary_size` dimensions of every head by its position.

    The pairs are the two halves of those dimensions, as in Hugging Face's checkpoints.
    """

    def __init__(self, spec: RopeSpec, max_model_len: int, head_size: int, device: torch.device) -> None:
        frequencies = torch.tensor(spec.inverse_frequencies(max_model_len), dtype=torch.float32, device=device)
        angles = torch.arange(max_model_len, dtype=torch.float32, device=device)[:, None] * frequencies
        cosines, sines = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
        self.half = spec.rotary_size // 2
        self.size = spec.rotary_size
        self.is_partial = spec.rotary_size < head_size
        self.cosines, self.sines = cosines, sines  # [max context, rotary size / 2]

    def angles(self, positions: Tensor, dtype: torch.dtype, num_rotated: int, num_heads: int) -> Angles:
        """Look up the angles once per step for all layers. Heads after `num_rotated`, the values, are not rotated."""
        shape = (len(positions), num_heads, self.size)
        half_cosines, half_sines = self.cosines[positions], self.sines[positions]
        cosines = torch.ones(shape, dtype=dtype, device=positions.device)
        cosines[:, :num_rotated] = torch.cat((half_cosines, half_cosines), -1)[:, None]
        sines = torch.zeros(shape, dtype=dtype, device=positions.device)  # signed, so a rolled half needs no negation
        sines[:, :num_rotated] = torch.cat((-half_sines, half_sines), -1)[:, None]
        return Angles(self, cosines, sines)


class Angles:
    """Cosines and sines for the positions of one batch, for queries, keys and values side by side."""

    __slots__ = ("_cosines", "_rotary", "_sines")

    def __init__(self, rotary: Rotary, cosines: Tensor, sines: Tensor) -> None:
        self._rotary = rotary
        self._cosines = cosines  # [T, H + 2K, rotary size]
        self._sines = sines

    def rotate(self, qkv: Tensor) -> Tensor:
        """Rotate qkv [T, H + 2K, D]: one tensor in and out, so that keys and values can be stored in one operation."""
        if self._rotary.is_partial:
            head, rest = qkv[..., : self._rotary.size], qkv[..., self._rotary.size :]
            return torch.cat((self._rotate(head), rest), -1)
        return self._rotate(qkv)

    def _rotate(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self._cosines, torch.roll(x, self._rotary.half, -1), self._sines)


class HeadNorm:
    """An RMS norm on every query and key head.

    `rounds_first`: round to the model's type before the weight as well as after it, which is Qwen's order.
    """

    __slots__ = ("_norm", "_num_normed", "_weights", "eps", "k_weight", "q_weight", "rounds_first")

    def __init__(
        self, q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float, *, rounds_first: bool
    ) -> None:
        self.q_weight, self.k_weight, self.eps = q_weight, k_weight, eps  # [D] fp32 each
        self.rounds_first = rounds_first
        self._num_normed = num_heads + num_kv_heads
        # One norm with unit weights, then the weights of each head, so that queries and keys stay one tensor.
        self._weights = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))  # [H + K, D]
        self._norm = RMSNorm(torch.ones_like(q_weight), eps)

    def __call__(self, qkv: Tensor) -> Tensor:
        """Norm qkv [T, H + 2K, D] before rotation. The values are not changed."""
        qk = qkv[:, : self._num_normed]
        normed = self._norm(qk if self.rounds_first else qk.float()) * self._weights
        return torch.cat((normed.to(qkv.dtype), qkv[:, self._num_normed :]), 1)


@dataclass(frozen=True, slots=True)
class Heads:
    """Parameters of attention in one layer."""

    index: int  # of the layer
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    cap: float  # 0: none
    window: int  # 0: none
    rotary: Rotary
    norm: HeadNorm | None = None


class Pass(Protocol):
    """The operations of one forward pass over its batch, implemented for one kind of device."""

    def embed(self, embedding: Tensor, scale: float) -> Tensor:
        """Return the embeddings [T, E] of the step's tokens."""

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum for the next call. `residual` may be overwritten."""

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor: ...

    def attend(self, qkv: Tensor, heads: Heads) -> Tensor:
        """Norm and rotate qkv [T, (H + 2K) * D], store keys and values, attend to the whole context: [T, H * D]."""

    def project(self, x: Tensor, linear: Linear) -> Tensor: ...

    def project_back(self, x: Tensor, linear: Linear) -> Tensor:
        """Project to the hidden size before a norm. May return partial sums [parts, T, E] for the norm to add up."""

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        """Return activation(gate) * up [T, F], from the two halves of the product."""


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, given both side by side in one tensor [T, 2 * F]."""
    gate, up = gate_up.chunk(2, -1)
    if activation is Activation.SILU:
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
