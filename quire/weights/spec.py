"""The parameters of a model that its equations need, independent of the file format.

Backends read only these. Scaled rotary embeddings are plain divisors of the frequencies here, so no backend implements
"llama3" or "yarn" scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OTHER = "other"  # family of the models that only mlx-lm can run


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the angle of pair i at position p is p * theta ** (-2i / rotary_size) / factors[i].

    Pair i consists of dimensions i and i + rotary_size / 2, not of two neighbours.
    """

    theta: float
    rotary_size: int  # leading dimensions of a head that are rotated
    factors: tuple[float, ...] = ()  # one per pair; empty: all 1
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    long_factors: tuple[float, ...] = ()  # replace `factors` if the context may exceed `original_context`
    original_context: int = 0

    def inverse_frequencies(self, max_model_len: int) -> tuple[float, ...]:
        """Return the frequencies for contexts up to `max_model_len`, the same for all requests of an engine."""
        num_pairs = self.rotary_size // 2
        is_long = self.long_factors and max_model_len > self.original_context
        factors = (self.long_factors if is_long else self.factors) or (1.0,) * num_pairs
        return tuple(self.theta ** (-2 * i / self.rotary_size) / factors[i] for i in range(num_pairs))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # family of equations: a key of the backends' MODELS tables, or OTHER
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
    local_rope: RopeSpec | None  # of layers with a window, if it differs
    windows: tuple[int, ...]  # per layer: number of tokens it sees, including the current one; 0: all
    activation: Activation
    attention_scale: float  # factor of the products of queries and keys
    embedding_scale: float  # 1 except for Gemma
    norm_offset: float  # added to norm weights from the file: 1 for Gemma's safetensors
    attention_softcap: float  # 0: none
    logit_softcap: float  # 0: none
    is_tied: bool  # logits come from the embedding matrix
    has_qkv_bias: bool
    has_output_bias: bool  # of attention
    has_mlp_bias: bool
    has_qk_norm: bool
    has_post_norms: bool  # norms after attention and after the MLP as well (Gemma)
    is_fused: bool  # the file holds qkv_proj and gate_up_proj as single tensors (phi3)
    dtype: str  # float32, float16 or bfloat16: the type the file was saved for
    quantization: str  # type of most of the weights, for display: Q4_1, BF16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unsupported: str = ""  # why the native and torch backends do not run the model; empty: they do

    @property
    def rounds_norms_first(self) -> bool:
        """Whether a norm is rounded before its weight as well as after it. Gemma rounds only the product."""
        return self.family != "gemma3"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the model's authors recommend; None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
