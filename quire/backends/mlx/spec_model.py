"""Models of mlx-lm with the equations of a `ModelSpec`.

mlx-lm reads config.json with its own defaults, which are not always those of transformers: it ignores the rotary
embeddings of transformers 5 in most families, assumes tied embeddings, and ignores the window of Mistral, Qwen and Phi.
For the families that `ModelSpec` describes, the spec decides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import RotatingKVCache

from quire.errors import UnsupportedModel
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.spec import Activation, MlpSpec, ModelSpec, RopeSpec

# Family -> model_type of mlx-lm.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
# Values of model_type in a config.json that mean one of these families.
_KNOWN = (None, "llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3")
_FIXED_HEAD_SIZE = ("qwen2", "phi3")  # mlx-lm computes it from the hidden size
_ONE_MASK = ("qwen2", "qwen3", "phi3")  # mlx-lm uses one mask for all layers


def known_spec(spec: ModelSpec, model_type: object) -> ModelSpec | None:
    """Return the spec if its architecture is one of quire's own, also if the weights are quantised; else None.

    If the weights are quantised, the family of `spec` is OTHER.
    """
    family = BY_ARCHITECTURE.get(spec.architecture)
    if family is None or family.name not in MODEL_TYPES or model_type not in _KNOWN:
        return None
    return replace(spec, family=family.name)


class ScaledRope(Module):
    """Rotary embedding with any frequency per pair."""

    def __init__(self, rope: RopeSpec, max_model_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dims = rope.rotary_size
        self.attention_factor = rope.attention_factor
        # The underscore keeps it out of the parameters, which are converted and counted.
        self._freqs = mx.array([1 / one for one in rope.inverse_frequencies(max_model_len)], mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.attention_factor != 1:
            x = x.at[..., : self.dims].multiply(self.attention_factor)
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


def make_rope(rope: RopeSpec, max_model_len: int) -> Module:
    if rope.factors or rope.long_factors or rope.attention_factor != 1:
        return ScaledRope(rope, max_model_len)
    return RoPE(rope.rotary_size, traditional=False, base=rope.theta)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return config.json as mlx-lm's model classes read it. `apply_spec` completes the model made from it."""
    if spec.family not in MODEL_TYPES:
        raise UnsupportedModel(
            f"the mlx backend does not read GGUF files or dummy weights of {spec.family}, only of "
            f"{', '.join(MODEL_TYPES)}; mlx-lm may run the model from its folder of safetensors"
        )
    _refuse_other_equations(spec)
    config = {
        "model_type": MODEL_TYPES[spec.family],
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.mlp.size,
        "num_attention_heads": spec.attention.num_heads,
        "num_key_value_heads": spec.attention.num_kv_heads,
        "head_dim": spec.attention.head_size,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "rope_theta": _ropes(spec)[0].theta,
        "rope_scaling": None,
        "rope_parameters": None,
        "tie_word_embeddings": spec.is_tied,
        "attention_bias": spec.attention.has_qkv_bias,
        "mlp_bias": isinstance(spec.mlp, MlpSpec) and spec.mlp.has_bias,
        "layer_types": None,
        "sliding_window": None,
    }
    if spec.family == "gemma3":
        config |= {
            "query_pre_attn_scalar": spec.attention.scale**-2,
            "sliding_window": max(spec.windows) or spec.max_model_len,
            "sliding_window_pattern": _gemma_pattern(spec),
        }
    return config


def _refuse_other_equations(spec: ModelSpec) -> None:
    """Raise if mlx-lm's class for the family does not support something that the spec asks for."""
    activation = Activation.GELU_TANH if spec.family == "gemma3" else Activation.SILU
    problems = {
        f"activation {spec.mlp.activation}": spec.mlp.activation is not activation,
        "attention softcapping": spec.attention.softcap != 0,
        "logit softcapping": spec.logit_softcap != 0,
        f"head size {spec.attention.head_size}": spec.family in _FIXED_HEAD_SIZE
        and spec.attention.head_size * spec.attention.num_heads != spec.hidden_size,
        "windows in some layers": spec.family in _ONE_MASK and len(set(spec.windows)) > 1,
        "windows of several sizes": len(set(spec.windows) - {0}) > 1,
    }
    for what, is_wrong in problems.items():
        if is_wrong:
            raise UnsupportedModel(f"mlx-lm does not run {spec.family} with {what}")


def _ropes(spec: ModelSpec) -> tuple[RopeSpec, RopeSpec]:
    """Return the rope of layers with full attention and that of layers with a window; equal if there is only one."""
    ropes = {bool(layer.attention.window): layer.attention.rope for layer in spec.layers}
    full, local = ropes.get(False, ropes.get(True)), ropes.get(True, ropes.get(False))
    if full is None or local is None:
        raise UnsupportedModel(f"mlx-lm does not run {spec.family} without rotary embeddings")
    return full, local


def _gemma_pattern(spec: ModelSpec) -> int:
    """Return p such that every p-th layer sees all tokens: mlx-lm has no other arrangement."""
    has_window = [window > 0 for window in spec.windows]
    pattern = has_window.index(False) + 1 if False in has_window else spec.num_layers + 1
    if pattern > spec.num_layers or has_window != [bool((i + 1) % pattern) for i in range(spec.num_layers)]:
        raise UnsupportedModel("mlx-lm runs gemma3 only if every n-th layer, and no other, has full attention")
    return pattern


def apply_spec(model: Module, spec: ModelSpec, max_model_len: int) -> None:
    """Set what mlx-lm does not read from a config: rotary embeddings, scale and windows."""
    full_rope, local_rope = _ropes(spec)
    full = make_rope(full_rope, max_model_len)
    local = full if local_rope == full_rope else make_rope(local_rope, max_model_len)
    for layer, window in zip(model.layers, spec.windows, strict=True):
        layer.self_attn.rope = local if window else full
        layer.self_attn.scale = spec.attention.scale
    if spec.family != "gemma3" and any(spec.windows):
        _set_windows(model, spec)


def _set_windows(model: Module, spec: ModelSpec) -> None:
    if MODEL_TYPES[spec.family] == "llama":
        inner = model.model
        inner.sliding_window = max(spec.windows)
        inner.layer_types = ["sliding_attention" if window else "full_attention" for window in spec.windows]
        for layer, window in zip(inner.layers, spec.windows, strict=True):
            layer.use_sliding = window > 0
        inner.swa_idx = inner.layer_types.index("sliding_attention")
        # The mask of index 0 is not used if all layers have a window.
        inner.fa_idx = inner.layer_types.index("full_attention") if 0 in spec.windows else 0
        return
    # These classes make one mask, from the cache of the first layer. That cache knows its window.
    windows = spec.windows
    model.make_cache = lambda: [RotatingKVCache(max_size=window) for window in windows]


def file_norm_shift(spec: ModelSpec) -> float:
    """Return what to add to norm weights of the file. mlx-lm's Gemma adds 1 to its weights when it computes."""
    return spec.norm_offset - (1.0 if spec.family == "gemma3" else 0.0)
