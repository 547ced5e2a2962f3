"""The parameters of a model that its equations need, independent of the file format.

A model is a list of layers, and a layer is data: `LayerSpec` says how it attends and what its MLP is. Backends read
nothing else. Scaled rotary embeddings are plain divisors of the frequencies here, so no backend implements "llama3" or
"yarn" scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

OTHER = "other"  # family of the models that quire has no equations for: mlx-lm or transformers may run them


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"  # (up + 1) * gate * sigmoid(1.702 gate), both clamped at 7 (gpt-oss)


class QKNorm(StrEnum):
    """RMS norm of queries and keys before they are rotated."""

    NONE = "none"
    HEAD = "head"  # each head by itself, with one weight for all heads
    WIDTH = "width"  # all heads of a token together (OLMo)


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
class QueryScaling:
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / original_context)) (Ministral 3)."""

    beta: float
    original_context: int

    def factor(self, position: int) -> float:
        return 1 + self.beta * math.log(1 + position // self.original_context)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # factor of the products of queries and keys
    rope: RopeSpec | None  # None: positions are not encoded in this layer
    window: int = 0  # number of tokens a token sees, including itself; 0: all before it
    softcap: float = 0.0  # 0: none
    qk_norm: QKNorm = QKNorm.NONE
    query_scaling: QueryScaling | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_gate: bool = False  # the output of attention is multiplied by sigmoid(q_gate(x)), element by element
    has_sinks: bool = False  # one more logit per head in the softmax, whose value is 0
    has_value_norm: bool = False  # values are RMS-normed without a weight
    is_key_value: bool = False  # values are the raw keys, before norm and rotation: there is no v_proj
    shared_with: int | None = None  # index of an earlier layer whose keys and values this layer reads; it has none

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def is_shared(self) -> bool:
        """Whether there are only queries."""
        return self.shared_with is not None

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values, without gates."""
        return self.q_size + (0 if self.is_shared else 2 * self.kv_size)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated delta net: a causal convolution over queries, keys and values, then a recurrent state S per value head.

    S = S * exp(g); d = (v - S^T k) * beta; S = S + k d^T; output S^T q. There may be fewer key heads than value heads.
    Safetensors files group the value heads of a key head. GGUF files tile them: heads 0, 1, .. of the keys, then again
    from 0. The order of a file is kept, because the columns of a quantised out_proj cannot be moved.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_size: int
    value_head_size: int
    num_taps: int  # of the convolution
    is_tiled: bool = (
        False  # the key head of value head h is h % num_key_heads; otherwise h // (value heads per key head)
    )

    @property
    def key_heads(self) -> tuple[int, ...]:
        """The key head of each value head."""
        ratio = self.num_value_heads // self.num_key_heads
        return tuple(h % self.num_key_heads if self.is_tiled else h // ratio for h in range(self.num_value_heads))

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_size

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """out(c * conv(b * x)) with b, c and x from one projection: the mixer of LFM2. Its state is the last rows."""

    num_taps: int
    has_bias: bool = False


Mixer = AttentionSpec | DeltaNetSpec | ShortConvSpec


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x))."""

    size: int
    activation: Activation
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A router chooses a few of many MLPs for every token and adds up their weighted outputs.

    The scores are the softmax of its logits over all experts, or the sigmoids of its logits.
    """

    num_experts: int
    num_chosen: int  # per token
    size: int  # of one expert
    activation: Activation
    renormalizes: bool  # the weights of the chosen experts are divided by their sum: a softmax over the chosen
    scale: float = 1.0  # of the sum
    has_sigmoid: bool = False
    has_expert_bias: bool = False  # a bias is added to the scores for the choice, but not to the weights
    shared_size: int = 0  # of an MLP beside them whose output is multiplied by sigmoid(shared_gate(x)); 0: none
    has_bias: bool = False  # router, and gate, up and down of every expert
    # The router reads norm(residual) * hidden_size ** -0.5, with a norm of its own, and the weight of a chosen expert
    # is multiplied by a factor of the expert.
    has_router_norm: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x + residual_scale * mixer(norm(x)), then the same with the MLP.

    With `parallel_experts` the MLP is post_dense_norm(mlp(mlp_norm(x))) + post_experts_norm(experts(experts_norm(x))),
    before its post norm (Gemma 4). With a `ple_size` a third part follows: x + ple_norm(ple_proj(a(ple_gate(x)) * e)),
    where a is the activation, and e [ple_size] this layer's own embedding of the token (`ModelSpec.ple_size`).
    """

    mixer: Mixer
    mlp: MlpSpec | ExpertsSpec
    has_pre_norms: bool = True  # of the inputs of attention and MLP
    has_post_norms: bool = False  # of their outputs, before they are added
    residual_scale: float = 1.0
    parallel_experts: ExpertsSpec | None = None  # beside the MLP
    has_output_scale: bool = False  # the output of the layer, residual included, is multiplied by a number
    ple_size: int = 0  # 0: no per-layer embedding

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, where it is known to be attention."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def experts(self) -> ExpertsSpec | None:
        """The routed experts, in place of the MLP or beside it."""
        return self.mlp if isinstance(self.mlp, ExpertsSpec) else self.parallel_experts


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # name of a row in `quire.weights.families.FAMILIES`, or OTHER
    architecture: str  # as the file names it
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int  # rows of the embedding, padding included
    max_model_len: int
    norm_eps: float
    embedding_scale: float  # factor of the embeddings
    logit_scale: float  # factor of the logits
    logit_softcap: float  # 0: none
    norm_offset: float  # added to norm weights from the file: 1 for Gemma's safetensors
    rounds_norms_first: bool  # a norm is rounded before its weight as well as after it
    is_tied: bool  # logits come from the embedding matrix
    dtype: str  # float32, float16 or bfloat16: the type the file was saved for
    quantization: str  # type of most of the weights, for display: Q4_1, BF16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unsupported: str = ""  # why quire's own equations do not run the model; empty: they do
    has_other_layers: bool = False  # of a kind that no backend runs; `unsupported` names them
    skipped: tuple[str, ...] = ()  # parts of the file that are not loaded: "vision tower", "MTP head"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else 0 for layer in self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer that attends, for display and where layers differ only in window and rope."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def mlp(self) -> MlpSpec | ExpertsSpec:
        """MLP of the last layer: the first layers of some models with experts are dense."""
        return self.layers[-1].mlp

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def has_sigmoids(self) -> bool:
        """Whether experts are chosen by sigmoids."""
        return any(layer.experts is not None and layer.experts.has_sigmoid for layer in self.layers)

    @property
    def ple_size(self) -> int:
        """Width of the per-layer embeddings; 0: there are none.

        Layer i of L gets row i of (norm(ple_model_proj(x) * hidden_size ** -0.5) + ple_embedding(token) * ple_size **
        0.5) * 2 ** -0.5 as [L, ple_size], where x is the scaled embedding of the token.
        """
        return self.layers[0].ple_size


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the model's authors recommend; None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
