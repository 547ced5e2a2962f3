"""A decoder made from a `ModelSpec`: the equations of all of quire's own families.

What only Gemma 4 has is here too: experts beside the MLP, and an embedding of the token for every layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.kv_memory import KVSpec
from quire.backends.support import rope_notice
from quire.backends.torch.delta_net import DeltaNet
from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.layers import (
    HeadNorm,
    Heads,
    Inputs,
    Linear,
    Outputs,
    RMSNorm,
    Rotary,
    query_factors,
    softcap,
)
from quire.backends.torch.loading import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    PleLayerWeights,
    PleWeights,
    RoutedWeights,
    ShortConvWeights,
)
from quire.backends.torch.short_conv import ShortConv
from quire.weights.spec import Activation, AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec
from quire.weights.tensors import num_active_weights

# T tokens in the batch, E hidden size, P width of the per-layer embeddings


class ParallelExperts:
    """norm(dense MLP) + norm(experts(norm(residual))). The router reads another norm of the residual."""

    def __init__(self, weights: RoutedWeights, norms: dict[str, Tensor], eps: float) -> None:
        self.weights = weights
        self.post_dense_norm = RMSNorm(norms["post_dense_norm"], eps)
        self.post_experts_norm = RMSNorm(norms["post_experts_norm"], eps)
        self.experts_norm = RMSNorm(norms["experts_norm"], eps)
        router_norm = norms["router_norm"]
        self.router_norm = RMSNorm(router_norm * len(router_norm) ** -0.5, eps)

    def __call__(self, dense: Outputs, residual: Tensor, step: Pass) -> Tensor:
        """Return [T, E], given the output of the MLP and the residual, [T, E] each."""
        weights = self.weights
        router_input = step.norm(residual, self.router_norm)
        routed = step.route(step.norm(residual, self.experts_norm), weights.router, weights.experts, router_input)
        return step.norm(dense, self.post_dense_norm).add_(step.norm(routed, self.post_experts_norm))


class PerLayerEmbeddings:
    """Computes the inputs that layers get beside the hidden state, from the tokens and their embeddings."""

    def __init__(self, weights: PleWeights, spec: ModelSpec) -> None:
        self._weights = weights
        self._norm = RMSNorm(weights.norm, spec.norm_eps)
        self._size = spec.ple_size
        self._scale = spec.hidden_size**-0.5

    def inputs(self, x: Tensor, step: Pass) -> tuple[Tensor, ...]:
        """Return [T, P] for each layer. x [T, E]: the scaled embeddings."""
        weights = self._weights
        embedded = step.embed(weights.embedding, self._size**0.5)  # [T, layers * P]
        projected = step.project(x, weights.proj) * self._scale
        normed = self._norm(projected.view(-1, self._size)).view(embedded.shape)
        return ((normed + embedded) * 2**-0.5).split(self._size, 1)  # type: ignore[no-untyped-call, no-any-return]


class PleLayer:
    """x + norm(proj(activation(gate(x)) * input)), after the MLP."""

    def __init__(self, spec: LayerSpec, weights: PleLayerWeights, norms: dict[str, Tensor], eps: float) -> None:
        assert spec.mlp.activation is Activation.GELU_TANH, "the gate has the activation of the MLP"
        self._weights = weights
        self._norm = RMSNorm(norms["ple_norm"], eps)
        self._scale = spec.residual_scale

    def __call__(self, x: Outputs, residual: Tensor, ple_input: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Return the output and the residual, as `DecoderLayer`, given those of the MLP."""
        total, residual = step.add_norm(x, residual, None, self._scale)
        gate = F.gelu(step.project(total, self._weights.gate), approximate="tanh") * ple_input
        return step.norm(step.project_back(gate, self._weights.proj), self._norm), residual


# T tokens in the batch, H query heads, K kv heads, D head size, E hidden size, V vocabulary


class Attention:
    def __init__(self, weights: AttentionWeights, heads: Heads) -> None:
        self.qkv_proj, self.o_proj, self.heads = weights.qkv_proj, weights.o_proj, heads

    @property
    def reader(self) -> Linear:
        """The matrix that the norm before the mixer is multiplied by."""
        return self.qkv_proj

    def __call__(self, x: Inputs, step: Pass) -> Outputs:
        out = step.attend(step.project(x, self.qkv_proj), self.heads)  # [T, (H + 2K) * D] to [T, H * D]
        return step.project_back(out, self.o_proj)


class DeltaNetMixer:
    def __init__(self, in_proj: Linear, net: DeltaNet, out_proj: Linear) -> None:
        self.in_proj, self.net, self.out_proj = in_proj, net, out_proj

    @property
    def reader(self) -> Linear:
        return self.in_proj

    def __call__(self, x: Inputs, step: Pass) -> Outputs:
        return step.project_back(step.delta_net(step.project(x, self.in_proj), self.net), self.out_proj)


class ShortConvMixer:
    def __init__(self, in_proj: Linear, conv: ShortConv, out_proj: Linear) -> None:
        self.in_proj, self.conv, self.out_proj = in_proj, conv, out_proj

    @property
    def reader(self) -> Linear:
        return self.in_proj

    def __call__(self, x: Inputs, step: Pass) -> Outputs:
        return step.project_back(step.short_conv(step.project(x, self.in_proj), self.conv), self.out_proj)


Mixer = Attention | DeltaNetMixer | ShortConvMixer


class DecoderLayer:
    def __init__(
        self, spec: LayerSpec, weights: LayerWeights, mixer: Mixer, norm_eps: float, *, earlier: tuple[float, float]
    ) -> None:
        def norm(name: str) -> RMSNorm | None:
            return RMSNorm(weights.norms[name], norm_eps) if name in weights.norms else None

        self.spec = spec
        self.mixer = mixer
        self.input_norm, self.mlp_norm = norm("input_norm"), norm("mlp_norm")
        self.post_attention_norm, self.post_mlp_norm = norm("post_attention_norm"), norm("post_mlp_norm")
        self.mlp_weights = weights.mlp
        self.parallel = None
        if weights.parallel is not None:
            self.parallel = ParallelExperts(weights.parallel, weights.norms, norm_eps)
        self.ple = None if weights.ple is None else PleLayer(spec, weights.ple, weights.norms, norm_eps)
        self._mlp_reader = weights.mlp.gate_up_proj if isinstance(weights.mlp, MlpWeights) else None
        self._earlier = earlier  # scales of the output of the layer before, and of its sum with the residual

    def __call__(
        self, x: Outputs, residual: Tensor | None, step: Pass, ple_input: Tensor | None = None
    ) -> tuple[Outputs, Tensor]:
        """Return the output, which the next norm adds to the residual, and the residual. x and residual: [T, E]."""
        normed, residual = step.add_norm_for(self.mixer.reader, x, residual, self.input_norm, *self._earlier)
        x = self.mixer(normed, step)
        if self.post_attention_norm is not None:
            x = step.norm(x, self.post_attention_norm)
        normed, residual = step.add_norm_for(self._mlp_reader, x, residual, self.mlp_norm, self.spec.residual_scale)
        x = self.mlp(normed, step)
        if self.parallel is not None:
            x = self.parallel(x, residual, step)
        x = x if self.post_mlp_norm is None else step.norm(x, self.post_mlp_norm)
        if self.ple is None or ple_input is None:
            return x, residual
        return self.ple(x, residual, ple_input, step)

    def mlp(self, x: Inputs, step: Pass) -> Outputs:
        weights = self.mlp_weights
        if isinstance(weights, MlpWeights):
            down = weights.down_proj
            return step.project_back(step.gated(x, weights.gate_up_proj, self.spec.mlp.activation, down), down)
        routed = step.route(x, weights.router, weights.experts)
        return routed if weights.shared is None else step.add_shared(routed, x, weights.shared)


def layer_weights(spec: ModelSpec) -> int:
    """Return the number of weights that take part in the products of one token, without embedding and head."""
    return num_active_weights(spec) - spec.vocab_size * spec.hidden_size


class DecoderModel:
    def __init__(self, spec: ModelSpec, weights: ModelWeights, max_model_len: int) -> None:
        self.spec = spec
        self.kv_spec = KVSpec.of(spec)
        self.embedding = weights.embedding  # [V, E]
        self.head = weights.head
        self.norm = RMSNorm(weights.norm, spec.norm_eps)
        self.device = weights.embedding.device
        self.num_bytes = weights.num_bytes
        self.packed_types = weights.packed_types
        self.notice = rope_notice(spec, max_model_len)
        self.num_layer_weights = layer_weights(spec)
        self.is_capturable = not any(
            isinstance(layer.mlp, ExpertsSpec) and layer.mlp.has_sigmoid for layer in spec.layers
        )
        self._rotaries: dict[tuple[RopeSpec, int], Rotary] = {}
        self._factors: dict[AttentionSpec, Tensor] = {}
        self._max_model_len = max_model_len
        self.ple = None
        if weights.ple is not None:
            self.ple = PerLayerEmbeddings(weights.ple, spec)
        scales = [(spec.layers[index].residual_scale, layer.output_scale) for index, layer in enumerate(weights.layers)]
        self._last_scales = scales[-1]
        self.layers = [
            DecoderLayer(
                layer,
                weights.layers[index],
                self._mixer(index, weights.layers[index]),
                spec.norm_eps,
                earlier=scales[index - 1] if index else (1.0, 1.0),
            )
            for index, layer in enumerate(spec.layers)
        ]

    def forward(self, step: Pass) -> Tensor:
        embedded = step.embed(self.embedding, self.spec.embedding_scale)
        x: Outputs = embedded
        residual: Tensor | None = None
        ple_inputs = None if self.ple is None else self.ple.inputs(embedded, step)
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step, None if ple_inputs is None else ple_inputs[index])
        return step.add_norm(x, residual, self.norm, *self._last_scales)[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.spec.logit_scale != 1:
            hidden = hidden * self.spec.logit_scale  # smaller than the logits
        logits = self.head(hidden, out)
        if not self.spec.logit_softcap:
            return logits
        capped = softcap(logits, self.spec.logit_softcap)
        return capped if out is None else out.copy_(capped)

    def _mixer(self, index: int, weights: LayerWeights) -> Mixer:
        spec, mixer = self.spec.layers[index].mixer, weights.mixer
        if isinstance(mixer, AttentionWeights):
            assert isinstance(spec, AttentionSpec)
            return Attention(mixer, self._heads(index, spec, weights, mixer))
        if isinstance(mixer, ShortConvWeights):
            conv = ShortConv(index, mixer.conv, mixer.conv.t().contiguous(), mixer.conv_bias)
            return ShortConvMixer(mixer.in_proj, conv, mixer.out_proj)
        assert isinstance(mixer, DeltaNetWeights)
        assert isinstance(spec, DeltaNetSpec)
        net = DeltaNet(
            index=index,
            spec=spec,
            conv=mixer.conv,
            taps=mixer.conv.t().contiguous(),
            decay=-mixer.a_log.exp(),
            dt_bias=mixer.dt_bias,
            norm=RMSNorm(weights.norms["gated_norm"], self.spec.norm_eps),
            key_heads=torch.tensor(spec.key_heads, device=self.device),
        )
        return DeltaNetMixer(mixer.in_proj, net, mixer.out_proj)

    def _heads(self, index: int, attention: AttentionSpec, weights: LayerWeights, mixer: AttentionWeights) -> Heads:
        norm = None
        if "q_norm" in weights.norms:
            q_norm, k_norm = weights.norms["q_norm"], weights.norms.get("k_norm")
            norm = HeadNorm(q_norm, k_norm, attention, self.spec.norm_eps, rounds_first=self.spec.rounds_norms_first)
        return Heads(
            index=index if attention.shared_with is None else attention.shared_with,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            scale=attention.scale,
            cap=attention.softcap,
            window=attention.window,
            rotary=self._rotary(attention),
            norm=norm,
            query_factors=self._query_factors(attention),
            sinks=mixer.sinks,
            has_value_norm=attention.has_value_norm,
            is_shared=attention.shared_with is not None,
            has_gate=attention.has_gate,
        )

    def _rotary(self, attention: AttentionSpec) -> Rotary | None:
        """Return the table of angles. Layers with the same rope share it."""
        if attention.rope is None:
            return None
        key = (attention.rope, attention.head_size)
        if key not in self._rotaries:
            self._rotaries[key] = Rotary(attention.rope, self._max_model_len, attention.head_size, self.device)
        return self._rotaries[key]

    def _query_factors(self, attention: AttentionSpec) -> Tensor | None:
        if attention.query_scaling is None:
            return None
        if attention not in self._factors:
            self._factors[attention] = query_factors(attention.query_scaling, self._max_model_len, self.device)
        return self._factors[attention]
