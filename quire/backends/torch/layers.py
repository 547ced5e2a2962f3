"""The parts all model families are made of, as plain callables over tensors.

Not `nn.Module`: there is nothing to train, and a module's call costs more than a small matrix product on a CPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.weights.spec import Activation, RopeSpec

# T tokens in the batch, I inputs, O outputs, H heads, D head size


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] transposed.

    On a CPU a general matrix product of few rows costs as much as one of eight, so two and three rows go one by one
    (and give the very bits a single stream gets); from nine to 64 rows the product with the weights on the left is
    faster by a quarter. Measured in docs/performance.md.
    """
    num_rows = x.shape[0]
    if x.device.type != "cpu" or num_rows == 1 or 4 <= num_rows <= 8 or num_rows > 64:
        return F.linear(x, weight, bias)
    if num_rows <= 3:
        return torch.cat([F.linear(x[row : row + 1], weight, bias) for row in range(num_rows)])
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


class Linear:
    """One matrix, or several that share their input, fused along their outputs."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [O, I]
        self.bias = bias  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class RMSNorm:
    __slots__ = ("_floor", "_scaled", "eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.shape = tuple(weight.shape)
        self.eps = eps
        size = weight.shape[-1]
        self._scaled = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        # On a CPU rms_norm is eight small operations. Four do: sqrt(mean + eps) is hypot(norm, floor) / sqrt(size).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self._scaled).div_(torch.hypot(norm, self._floor))


class Rotary:
    """Rotates the leading `rotary_size` dimensions of every head by its position.

    The two halves of those dimensions are the pairs, as in Hugging Face's checkpoints.
    """

    def __init__(self, spec: RopeSpec, max_context: int, head_size: int, device: torch.device) -> None:
        frequencies = torch.tensor(spec.inverse_frequencies(max_context), dtype=torch.float32, device=device)
        angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] * frequencies
        cosines, sines = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
        self.half = spec.rotary_size // 2
        self.size = spec.rotary_size
        self.is_partial = spec.rotary_size < head_size
        self._cosines = torch.cat((cosines, cosines), -1)  # [max context, rotary size]
        self._sines = torch.cat((-sines, sines), -1)  # signed, so that a rolled half needs no negation

    def angles(self, positions: Tensor, dtype: torch.dtype, num_rotated: int, num_heads: int) -> Angles:
        """Looked up once a step, used by every layer. Heads after `num_rotated`, the values, are left as they are."""
        shape = (len(positions), num_heads, self.size)
        cosines = torch.ones(shape, dtype=dtype, device=positions.device)
        cosines[:, :num_rotated] = self._cosines[positions, None]
        sines = torch.zeros(shape, dtype=dtype, device=positions.device)
        sines[:, :num_rotated] = self._sines[positions, None]
        return Angles(self, cosines, sines)


class Angles:
    """The cosines and sines of the positions in one batch, for queries, keys and values side by side."""

    __slots__ = ("_cosines", "_rotary", "_sines")

    def __init__(self, rotary: Rotary, cosines: Tensor, sines: Tensor) -> None:
        self._rotary = rotary
        self._cosines = cosines  # [T, H + 2K, rotary size]
        self._sines = sines

    def rotate(self, qkv: Tensor) -> Tensor:
        """qkv [T, H + 2K, D]: one tensor in and out, so that keys and values are stored in one piece."""
        if self._rotary.is_partial:
            head, rest = qkv[..., : self._rotary.size], qkv[..., self._rotary.size :]
            return torch.cat((self._rotate(head), rest), -1)
        return self._rotate(qkv)

    def _rotate(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self._cosines, torch.roll(x, self._rotary.half, -1), self._sines)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, of both side by side in one tensor [T, 2 * F]."""
    gate, up = gate_up.chunk(2, -1)
    if activation is Activation.SILU:
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
