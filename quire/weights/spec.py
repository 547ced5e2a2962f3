"""The facts of a model that its equations need, whatever file they came from.

All backends read these and nothing else: scaled rotary embeddings arrive here as plain divisors of the frequencies, so
no backend knows how "llama3" or "yarn" compute them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Angle of pair i at position p: p * theta ** (-2i / rotary_size) / factors[i]. Halves are rotated, not pairs."""

    theta: float
    rotary_size: int  # leading dimensions of a head that are rotated
    factors: tuple[float, ...] = ()  # one a pair; empty: all 1
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    long_factors: tuple[float, ...] = ()  # in place of `factors` where the context may pass `original_context`
    original_context: int = 0

    def inverse_frequencies(self, max_model_len: int) -> tuple[float, ...]:
        """For an engine whose contexts never pass `max_model_len`: all its requests must rotate alike."""
        num_pairs = self.rotary_size // 2
        is_long = self.long_factors and max_model_len > self.original_context
        factors = (self.long_factors if is_long else self.factors) or (1.0,) * num_pairs
        return tuple(self.theta ** (-2 * i / self.rotary_size) / factors[i] for i in range(num_pairs))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # whose equations: a key of the backends' MODELS tables
    architecture: str  # as the file names it
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # rows of the embedding, padding included
    max_model_len: int
    norm_eps: float
    rope: RopeSpec
    local_rope: RopeSpec | None  # of layers with a window, where it differs
    windows: tuple[int, ...]  # one a layer: how many tokens it sees, the current one included; 0: all
    activation: Activation
    attention_scale: float  # queries times keys times this
    embedding_scale: float  # 1 but for gemma
    norm_offset: float  # added to norm weights as the file holds them: 1 for gemma's safetensors
    attention_softcap: float  # 0: none
    logit_softcap: float  # 0: none
    is_tied: bool  # logits come from the embedding matrix
    has_qkv_bias: bool
    has_output_bias: bool  # of attention
    has_mlp_bias: bool
    has_qk_norm: bool
    has_post_norms: bool  # norms after attention and after the MLP as well (gemma)
    is_fused: bool  # the file holds qkv_proj and gate_up_proj as one (phi3)
    dtype: str  # float32, float16 or bfloat16: what the file was saved for
    quantization: str  # what most of the weights are stored as, for people: Q4_1, BF16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def rounds_norms_first(self) -> bool:
        """Whether a norm is rounded before its weight as well as after it. Gemma rounds the product alone."""
        return self.family != "gemma3"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend; None where they say nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
