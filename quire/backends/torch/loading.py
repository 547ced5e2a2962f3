"""Loads a checkpoint into the tensors of a model, one at a time, fused as the layers use them.

Each tensor is read, converted and copied before the next one, so the peak memory is the model and one tensor. The
checkpoint's contents are checked before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.backends.base import Progress
from quire.backends.torch.layers import Linear
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorType
from quire.weights.dummy import DummyCheckpoint
from quire.weights.names import check_tensors, expected_tensors
from quire.weights.quants import to_float32
from quire.weights.spec import ModelSpec

NORM_DTYPE = torch.float32
DUMMY_SEED = 0
DUMMY_STD = 0.02  # as most models are initialised: answers are nonsense, but every number is finite

_NATIVE = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv_proj: Linear  # [(H + 2K) * D, E]
    o_proj: Linear  # [E, H * D]
    gate_up_proj: Linear  # [2 * F, E]
    down_proj: Linear  # [E, F]
    norms: dict[str, Tensor]  # fp32, by name in the file


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [V, E]
    head: Tensor  # [V, E]; the embedding itself if they are tied
    norm: Tensor  # [E] fp32
    layers: list[LayerWeights]


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> ModelWeights:
    check_tensors(checkpoint)
    loader = _Loader(checkpoint, dtype, device, progress)
    spec = checkpoint.spec
    embedding = loader.matrix("model.embed_tokens.weight")
    layers = [_load_layer(loader, spec, f"model.layers.{index}.") for index in range(spec.num_layers)]
    norm = loader.norm("model.norm.weight")
    head = embedding if spec.is_tied else loader.matrix("lm_head.weight")
    return ModelWeights(embedding, head, norm, layers)


def _load_layer(loader: _Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = ["qkv_proj"] if spec.is_fused else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if spec.is_fused else ["gate_proj", "up_proj"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.has_post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if spec.has_qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    return LayerWeights(
        qkv_proj=loader.linear([attention + name for name in qkv], has_bias=spec.has_qkv_bias),
        o_proj=loader.linear([f"{attention}o_proj"], has_bias=spec.has_output_bias),
        gate_up_proj=loader.linear([mlp + name for name in gate_up], has_bias=spec.has_mlp_bias),
        down_proj=loader.linear([f"{mlp}down_proj"], has_bias=spec.has_mlp_bias),
        norms={name: loader.norm(f"{prefix}{name}.weight") for name in norms},
    )


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._random = torch.Generator(device).manual_seed(DUMMY_SEED)
        self._progress = progress
        self._num_done = 0
        self._num_bytes = sum(checkpoint.tensors[name].num_bytes for name in expected_tensors(checkpoint.spec))

    def linear(self, names: list[str], *, has_bias: bool) -> Linear:
        """Load matrices with the same input, stacked along their outputs."""
        weight = self._stack([f"{name}.weight" for name in names])
        return Linear(weight, self._stack([f"{name}.bias" for name in names]) if has_bias else None)

    def matrix(self, name: str) -> Tensor:
        return self._stack([name])

    def norm(self, name: str) -> Tensor:
        """Load in fp32 whatever the model's dtype: Gemma's norms are 1 + w, and in bf16 the 1 would absorb w."""
        return self._stack([name], NORM_DTYPE).add_(self._checkpoint.spec.norm_offset)

    def _stack(self, names: list[str], dtype: torch.dtype | None = None) -> Tensor:
        shapes = [self._checkpoint.tensors[name].shape for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        out = torch.empty((num_rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(out[first : first + shape[0]], name)
            first += shape[0]
            self._report(self._checkpoint.tensors[name].num_bytes)
        return out

    def _fill(self, out: Tensor, name: str) -> None:
        if not isinstance(self._checkpoint, DummyCheckpoint):
            out.copy_(_to_tensor(self._checkpoint.read(name)))
        elif _is_norm(name):
            out.fill_(1 - self._checkpoint.spec.norm_offset)
        else:
            out.normal_(0, DUMMY_STD, generator=self._random)  # on the device, which makes 8 billion numbers per second

    def _report(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        if self._progress is not None:
            self._progress(self._num_done, self._num_bytes)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory that a model's weights take in `dtype`."""
    return sum(
        math.prod(shape) * (NORM_DTYPE if _is_norm(name) else dtype).itemsize
        for name, shape in expected_tensors(spec).items()
    )


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _to_tensor(raw: RawTensor) -> Tensor:
    dtype = _NATIVE.get(raw.info.type)
    if dtype is None:
        return torch.from_numpy(to_float32(raw))
    # Copied out of the mapped file first: torch accepts no read-only memory. This copy is the extra tensor of the peak.
    return torch.from_numpy(raw.data.copy()).view(-1).view(dtype).view(raw.info.shape)
