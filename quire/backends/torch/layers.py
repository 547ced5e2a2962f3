"""Building blocks of all model families, as plain callables over tensors.

They are not `nn.Module`s: nothing is trained, and a module's call costs more than a small matrix product on a CPU.

Between two kernels, products in FP8 have inputs that are rounded already, and results that are not scaled yet. The
library's fastest product of FP8 knows one scale for all inputs and one for all weights. A scale for each row and one
for each output are therefore applied by the kernel that reads the product, and the kernel that writes the inputs of a
product rounds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.weights.spec import Activation, AttentionSpec, QKNorm, QueryScaling, RopeSpec

# T rows, I inputs, O outputs


class Fp8Inputs(Enum):
    """What a scale of inputs in FP8 belongs to."""

    PER_ROW = auto()
    PER_GROUP = auto()  # of 128 columns


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Inputs rounded to FP8: value = code * scale. There may be rows of padding."""

    codes: Tensor  # [T or more, I] e4m3
    scales: Tensor  # [T or more, 1] fp32, or [T or more, ceil(I / 128)], column by column
    num_rows: int  # T

    def __len__(self) -> int:
        return self.num_rows


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """A product of codes: the whole product is value * row scale * output scale."""

    values: Tensor  # [T, O] in the model's type
    row_scales: Tensor  # [T, 1] fp32
    output_scales: Tensor  # [O] fp32

    def __len__(self) -> int:
        return len(self.values)


Inputs = Tensor | Fp8Rows
Outputs = Tensor | Fp8Product


# T tokens in the batch, I inputs, O outputs, H heads, D head size

SWIGLU_LIMIT = 7.0  # of gpt-oss
SWIGLU_ALPHA = 1.702


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


def plain(x: Inputs | Outputs) -> Tensor:
    """Return x, which is a tensor because no matrix asked for FP8."""
    assert not isinstance(x, Fp8Rows | Fp8Product), "this product has no FP8"
    return x


class Linear:
    """One matrix, or several with the same input, concatenated along their outputs. Owns its bytes and its product.

    `is_graph`: the product is part of a CUDA graph, for which there are faster kernels on a GPU (`FusedLinear`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [O, I]
        self.bias = bias  # [O]

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [T, I] to [T, O], into `out` if given, which only a matrix without a bias can do."""
        if out is None:
            return product(x, self.weight, self.bias)
        return torch.mm(x, self.weight.t(), out=out)

    def has_kernel(self, num_rows: int) -> bool:  # noqa: ARG002
        """Return whether there is a kernel for so many rows of a graph, beside the library's product."""
        return False

    def fp8_inputs(self, num_rows: int) -> Fp8Inputs | None:  # noqa: ARG002
        """Return how inputs of so many rows are rounded to FP8. None: they are not."""
        return None

    def project(self, x: Inputs, *, is_graph: bool) -> Tensor:  # noqa: ARG002
        return self(plain(x))

    def project_back(self, x: Inputs, *, is_graph: bool) -> Outputs:  # noqa: ARG002
        """Project to the hidden size before a norm. May return partial sums [parts, T, E] for the norm to add up."""
        return self(plain(x))

    def gated(self, x: Inputs, activation: Activation, *, is_graph: bool, reader: Linear | None = None) -> Inputs:  # noqa: ARG002
        """Return activation(gate) * up [T, F], from the two halves of the product, for `reader` to multiply."""
        return gated(self(plain(x)), activation)


class RMSNorm:
    """RMS norm computed in fp32, including the weight, and rounded once.

    This is Gemma's order. The other families also round before the weight, which only adds an error.
    """

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


Angles = tuple[Tensor, Tensor]  # cosines and sines of a batch, of queries, keys and values [T, H + 2K, rotary size]


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
        return cosines, sines

    def rotate(self, qkv: Tensor, angles: Angles) -> Tensor:
        """Rotate qkv [T, H + 2K, D]: one tensor in and out, so that keys and values can be stored in one operation."""
        head, rest = qkv[..., : self.size], qkv[..., self.size :]
        rotated = torch.addcmul(head * angles[0], torch.roll(head, self.half, -1), angles[1])
        return torch.cat((rotated, rest), -1) if self.is_partial else rotated


class HeadNorm:
    """An RMS norm of queries and keys: of every head, or of all heads of a token together. Values may have one as well.

    `rounds_first`: round to the model's type before the weight as well as after it, which is Qwen's order.
    """

    def __init__(
        self, q_weight: Tensor, k_weight: Tensor | None, attention: AttentionSpec, eps: float, *, rounds_first: bool
    ) -> None:
        """`k_weight` is None in a layer that has no keys of its own."""
        num_heads, num_kv_heads = attention.num_heads, 0 if k_weight is None else attention.num_kv_heads
        k_weight = q_weight if k_weight is None else k_weight
        self.q_weight, self.k_weight, self.eps = q_weight, k_weight, eps  # fp32, [D] each, or [H * D] and [K * D]
        self._has_value_norm = attention.has_value_norm
        self.is_wide = attention.qk_norm is QKNorm.WIDTH
        self.rounds_first = rounds_first
        self._num_heads, self._num_normed = num_heads, num_heads + num_kv_heads
        # One norm with unit weights, then the weights of each head, so that queries and keys stay one tensor.
        q, k = q_weight.view(-1, attention.head_size), k_weight.view(-1, attention.head_size)
        self._weights = torch.cat((q.expand(num_heads, -1), k.expand(num_kv_heads, -1)))  # [H + K, D]
        self._norm = RMSNorm(torch.ones_like(q[0]), eps)

    def __call__(self, qkv: Tensor) -> Tensor:
        """Norm qkv [T, H + 2K, D] before rotation."""
        qk = qkv[:, : self._num_normed]
        if self.is_wide:
            normed = torch.cat(
                (self._norm_wide(qk[:, : self._num_heads]), self._norm_wide(qk[:, self._num_heads :])), 1
            )
        else:
            normed = self._norm(qk if self.rounds_first else qk.float())
        normed = normed * self._weights
        values = qkv[:, self._num_normed :]
        return torch.cat((normed.to(qkv.dtype), self._norm(values) if self._has_value_norm else values), 1)

    def _norm_wide(self, heads: Tensor) -> Tensor:
        whole = heads.float()
        normed = whole * torch.rsqrt(whole.square().mean((1, 2), keepdim=True) + self.eps)
        return normed.to(heads.dtype) if self.rounds_first else normed


def query_factors(scaling: QueryScaling, max_model_len: int, device: torch.device) -> Tensor:
    """Return the factor of the queries at each position [max_model_len], fp32."""
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    return 1 + scaling.beta * torch.log1p(torch.floor(positions / scaling.original_context))


@dataclass(frozen=True, slots=True)
class Heads:
    """Parameters of attention in one layer."""

    index: int  # of the layer of the cache: of a shared one, an earlier layer of the model
    spec: AttentionSpec
    rotary: Rotary | None = None  # None: no rotation
    norm: HeadNorm | None = None
    query_factors: Tensor | None = None  # [positions]: queries are multiplied by it after rotation
    sinks: Tensor | None = None  # [H]: a score per head that takes part in the softmax and has no value


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, given both side by side in one tensor [T, 2 * F]."""
    gate, up = gate_up.chunk(2, -1)
    if activation is Activation.SILU:
        return F.silu(gate).mul_(up)
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up + 1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
