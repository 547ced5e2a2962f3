"""A decoder made from a `ModelSpec`: the equations of all of quire's own families.

What only Gemma 4 has is here too: experts beside the MLP, and an embedding of the token for every layer.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.kv_memory import KVSpec
from quire.backends.support import rope_notice
from quire.backends.torch.experts import Experts, SharedExpert
from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.layers import (
    HeadNorm,
    Heads,
    Inputs,
    Linear,
    Outputs,
    RMSNorm,
    Rotary,
    plain,
    query_factors,
    softcap,
)
from quire.backends.torch.loading import WeightLoader, has_expert_kernels
from quire.backends.torch.recurrence import DeltaNet, ShortConv
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
)
from quire.weights.tensors import is_norm, layer_tensors, num_active_weights

# T tokens in the batch, H query heads, K kv heads, D head size, E hidden size, V vocabulary, P width of the per-layer
# embeddings

Norms = dict[str, Tensor]  # of a layer, fp32, by name: input_norm, q_norm


class Mixer:
    """Projects the rows, mixes them by attention or by a recurrence, and projects them back."""

    def __init__(self, in_proj: Linear, inner: Heads | DeltaNet | ShortConv, out_proj: Linear) -> None:
        self.in_proj, self.inner, self.out_proj = in_proj, inner, out_proj

    def __call__(self, x: Inputs, step: Pass) -> Outputs:
        rows = self.in_proj.project(x, is_graph=step.is_graph)
        if isinstance(self.inner, Heads):
            rows = step.attend(rows, self.inner)
        elif isinstance(self.inner, DeltaNet):
            rows = step.delta_net(rows, self.inner)
        else:
            rows = step.short_conv(rows, self.inner)
        return self.out_proj.project_back(rows, is_graph=step.is_graph)


class DenseMlp:
    def __init__(self, loader: WeightLoader, spec: MlpSpec, prefix: str) -> None:
        self.gate_up_proj = loader.linear(prefix, "gate_proj", "up_proj", has_bias=spec.has_bias)
        self.down_proj = loader.linear(prefix, "down_proj", has_bias=spec.has_bias)
        self.reader: Linear | None = self.gate_up_proj  # what the norm before it is multiplied by, if one matrix
        self._activation = spec.activation

    def __call__(self, x: Inputs, step: Pass) -> Outputs:
        hidden = self.gate_up_proj.gated(x, self._activation, is_graph=step.is_graph, reader=self.down_proj)
        return self.down_proj.project_back(hidden, is_graph=step.is_graph)


class RoutedMlp:
    def __init__(self, loader: WeightLoader, spec: ExpertsSpec, prefix: str) -> None:
        self.reader: Linear | None = None
        self.router = loader.linear(prefix, "router", has_bias=spec.has_bias)
        experts = [f"{prefix}experts.{i}." for i in range(spec.num_experts)]
        gate_up = [[f"{one}gate_proj", f"{one}up_proj"] for one in experts]
        down = [[f"{one}down_proj"] for one in experts]
        self.experts = Experts(
            *loader.experts(gate_up, down, may_pack=has_expert_kernels(spec)),
            num_chosen=spec.num_chosen,
            activation=spec.activation,
            renormalizes=spec.renormalizes,
            scale=spec.scale,
            gate_up_bias=loader.biases(gate_up) if spec.has_bias else None,
            down_bias=loader.biases(down) if spec.has_bias else None,
            expert_scales=loader.vector(f"{prefix}expert_scales.weight") if spec.has_router_norm else None,
            has_sigmoid=spec.has_sigmoid,
            bias=loader.vector(f"{prefix}expert_bias") if spec.has_expert_bias else None,
        )
        self.shared = None
        if spec.shared_size:
            self.shared = SharedExpert(
                gate_up_proj=loader.linear(f"{prefix}shared.", "gate_proj", "up_proj"),
                down_proj=loader.linear(f"{prefix}shared.", "down_proj"),
                gate=loader.linear(prefix, "shared_gate"),
                activation=spec.activation,
            )

    def __call__(self, x: Inputs, step: Pass, router_input: Tensor | None = None) -> Tensor:
        """Return [T, E]. The router reads x, or `router_input` [T, E] if it is given."""
        x = plain(x)
        logits = self.router.project(x if router_input is None else router_input, is_graph=step.is_graph)
        routed = step.route(x, logits, self.experts)
        return routed if self.shared is None else self.shared.add_to(routed, x, is_graph=step.is_graph)


class ParallelExperts:
    """norm(dense MLP) + norm(experts(norm(residual))). The router reads another norm of the residual."""

    def __init__(self, mlp: RoutedMlp, norms: Norms, eps: float) -> None:
        self._mlp = mlp
        self._post_dense_norm = RMSNorm(norms["post_dense_norm"], eps)
        self._post_experts_norm = RMSNorm(norms["post_experts_norm"], eps)
        self._experts_norm = RMSNorm(norms["experts_norm"], eps)
        router_norm = norms["router_norm"]
        self._router_norm = RMSNorm(router_norm * len(router_norm) ** -0.5, eps)

    def __call__(self, dense: Outputs, residual: Tensor, step: Pass) -> Tensor:
        """Return [T, E], given the output of the MLP and the residual, [T, E] each."""
        router_input = step.norm(residual, self._router_norm)
        routed = self._mlp(step.norm(residual, self._experts_norm), step, router_input)
        return step.norm(dense, self._post_dense_norm).add_(step.norm(routed, self._post_experts_norm))


class PerLayerEmbeddings:
    """Computes the inputs that layers get beside the hidden state, from the tokens and their embeddings."""

    def __init__(self, loader: WeightLoader) -> None:
        spec = loader.spec
        self._embedding = loader.matrix("ple_embedding.weight")  # [V, layers * P]
        self._proj = loader.linear("", "ple_model_proj")  # [layers * P, E]
        self._norm = RMSNorm(loader.norm("ple_model_norm.weight"), spec.norm_eps)
        self._size = spec.ple_size
        self._scale = spec.hidden_size**-0.5

    def inputs(self, x: Tensor, step: Pass) -> tuple[Tensor, ...]:
        """Return [T, P] for each layer. x [T, E]: the scaled embeddings."""
        embedded = step.embed(self._embedding, self._size**0.5)  # [T, layers * P]
        projected = self._proj.project(x, is_graph=step.is_graph) * self._scale
        normed = self._norm(projected.view(-1, self._size)).view(embedded.shape)
        return ((normed + embedded) * 2**-0.5).split(self._size, 1)  # type: ignore[no-untyped-call, no-any-return]


class PleLayer:
    """x + norm(proj(activation(gate(x)) * input)), after the MLP."""

    def __init__(self, loader: WeightLoader, spec: LayerSpec, prefix: str, norm: RMSNorm) -> None:
        assert spec.mlp.activation is Activation.GELU_TANH, "the gate has the activation of the MLP"
        self._gate, self._proj = loader.linear(prefix, "ple_gate"), loader.linear(prefix, "ple_proj")
        self._norm = norm
        self._scale = spec.residual_scale

    def __call__(self, x: Outputs, residual: Tensor, ple_input: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Return the output and the residual, as `DecoderLayer`, given those of the MLP."""
        total, residual = step.add_norm(x, residual, None, self._scale)
        gate = F.gelu(self._gate.project(total, is_graph=step.is_graph), approximate="tanh") * ple_input
        return step.norm(self._proj.project_back(gate, is_graph=step.is_graph), self._norm), residual


class DecoderLayer:
    """`earlier`: the scales of the output of the layer before, and of its sum with the residual."""

    def __init__(
        self,
        loader: WeightLoader,
        spec: LayerSpec,
        prefix: str,
        mixer: Mixer,
        norms: Norms,
        earlier: tuple[float, float],
    ) -> None:
        eps = loader.spec.norm_eps

        def norm(name: str) -> RMSNorm | None:
            return RMSNorm(norms[name], eps) if name in norms else None

        self.norms = norms
        self.input_norm, self.mlp_norm = norm("input_norm"), norm("mlp_norm")
        self.post_attention_norm, self.post_mlp_norm = norm("post_attention_norm"), norm("post_mlp_norm")
        self.mixer = mixer
        mlp = spec.mlp
        self.mlp = RoutedMlp(loader, mlp, prefix) if isinstance(mlp, ExpertsSpec) else DenseMlp(loader, mlp, prefix)
        self.parallel = None
        if spec.parallel_experts is not None:
            self.parallel = ParallelExperts(RoutedMlp(loader, spec.parallel_experts, prefix), norms, eps)
        self.ple = PleLayer(loader, spec, prefix, RMSNorm(norms["ple_norm"], eps)) if spec.ple_size else None
        output_scale = float(loader.vector(f"{prefix}output_scale.weight")) if spec.has_output_scale else 1.0
        self.scales = (spec.residual_scale, output_scale)  # as `earlier`, for the next layer
        self._earlier = earlier

    def __call__(
        self, x: Outputs, residual: Tensor | None, step: Pass, ple_input: Tensor | None = None
    ) -> tuple[Outputs, Tensor]:
        """Return the output, which the next norm adds to the residual, and the residual. x and residual: [T, E]."""
        normed, residual = step.add_norm(x, residual, self.input_norm, *self._earlier, reader=self.mixer.in_proj)
        x = self.mixer(normed, step)
        if self.post_attention_norm is not None:
            x = step.norm(x, self.post_attention_norm)
        normed, residual = step.add_norm(x, residual, self.mlp_norm, self.scales[0], reader=self.mlp.reader)
        x = self.mlp(normed, step)
        if self.parallel is not None:
            x = self.parallel(x, residual, step)
        x = x if self.post_mlp_norm is None else step.norm(x, self.post_mlp_norm)
        if self.ple is None or ple_input is None:
            return x, residual
        return self.ple(x, residual, ple_input, step)


def layer_weights(spec: ModelSpec) -> int:
    """Return the number of weights that take part in the products of one token, without embedding and head."""
    return num_active_weights(spec) - spec.vocab_size * spec.hidden_size


class DecoderModel:
    def __init__(self, loader: WeightLoader, max_model_len: int) -> None:
        self.spec = spec = loader.spec
        self.kv_spec = KVSpec.of(spec)
        self.device = device = loader.device
        self.notice = rope_notice(spec, max_model_len)
        self.num_layer_weights = layer_weights(spec)
        self.is_capturable = not any(
            isinstance(layer.mlp, ExpertsSpec) and layer.mlp.has_sigmoid for layer in spec.layers
        )
        # Tables of angles and of factors, which layers share.
        self._rotary = cache(lambda rope, head_size: Rotary(rope, max_model_len, head_size, device))
        self._query_factors = cache(lambda scaling: query_factors(scaling, max_model_len, device))
        self.embedding = loader.matrix("embedding.weight")  # [V, E]
        self.layers: list[DecoderLayer] = []
        self._last_scales = (1.0, 1.0)
        for index, layer in enumerate(spec.layers):
            prefix = f"layers.{index}."
            names = [name for name in layer_tensors(layer, spec.hidden_size) if is_norm(name)]
            norms = {name.removesuffix(".weight"): loader.norm(f"{prefix}{name}") for name in names}
            mixer = self._mixer(loader, index, prefix, norms)
            self.layers.append(DecoderLayer(loader, layer, prefix, mixer, norms, self._last_scales))
            self._last_scales = self.layers[-1].scales
        self.norm = RMSNorm(loader.norm("norm.weight"), spec.norm_eps)
        self.head = loader.linear_class(self.embedding) if spec.is_tied else loader.linear("", "head")  # [V, E]
        self.ple = PerLayerEmbeddings(loader) if spec.ple_size else None
        self.num_bytes = loader.num_bytes
        self.packed_types = tuple(sorted(loader.packed_types))

    def forward(self, step: Pass) -> Tensor:
        embedded = step.embed(self.embedding, self.spec.embedding_scale)
        x: Outputs = embedded
        residual: Tensor | None = None
        ple_inputs = None if self.ple is None else self.ple.inputs(embedded, step)
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step, None if ple_inputs is None else ple_inputs[index])
        return plain(step.add_norm(x, residual, self.norm, *self._last_scales)[0])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.spec.logit_scale != 1:
            hidden = hidden * self.spec.logit_scale  # smaller than the logits
        logits = self.head(hidden, out)
        if not self.spec.logit_softcap:
            return logits
        capped = softcap(logits, self.spec.logit_softcap)
        return capped if out is None else out.copy_(capped)

    def _mixer(self, loader: WeightLoader, index: int, prefix: str, norms: Norms) -> Mixer:
        spec = self.spec.layers[index].mixer
        if isinstance(spec, AttentionSpec):
            names = ["q_proj"]
            if spec.shared_with is None:
                names += ["k_proj", "k_proj" if spec.is_key_value else "v_proj"]
            if spec.has_gate:
                names.append("q_gate")
            sinks = loader.vector(f"{prefix}sinks.weight") if spec.has_sinks else None
            qkv_proj = loader.linear(prefix, *names, has_bias=spec.has_qkv_bias)  # [(H + 2K) * D, E], and H * D gates
            o_proj = loader.linear(prefix, "o_proj", has_bias=spec.has_output_bias)  # [E, H * D]
            return Mixer(qkv_proj, self._heads(index, spec, norms, sinks), o_proj)
        if isinstance(spec, DeltaNetSpec):
            in_proj = loader.linear(prefix, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")))
            conv = loader.matrix(f"{prefix}conv.weight")
            net = DeltaNet(
                index=index,
                spec=spec,
                conv=conv,
                taps=conv.t().contiguous(),
                decay=-loader.vector(f"{prefix}a_log").exp(),
                dt_bias=loader.vector(f"{prefix}dt_bias"),
                norm=RMSNorm(norms["gated_norm"], self.spec.norm_eps),
                key_heads=torch.tensor(spec.key_heads, device=self.device),
            )
            return Mixer(in_proj, net, loader.linear(prefix, "out_proj"))
        in_proj = loader.linear(prefix, "in_proj", has_bias=spec.has_bias)  # [3 * E, E]: b, c and x
        conv = loader.matrix(f"{prefix}conv.weight")
        bias = loader.matrix(f"{prefix}conv.bias") if spec.has_bias else None
        out_proj = loader.linear(prefix, "out_proj", has_bias=spec.has_bias)
        return Mixer(in_proj, ShortConv(index, conv, conv.t().contiguous(), bias), out_proj)

    def _heads(self, index: int, attention: AttentionSpec, norms: Norms, sinks: Tensor | None) -> Heads:
        norm = None
        if "q_norm" in norms:
            q_norm, k_norm = norms["q_norm"], norms.get("k_norm")
            norm = HeadNorm(q_norm, k_norm, attention, self.spec.norm_eps, rounds_first=self.spec.rounds_norms_first)
        scaling = attention.query_scaling
        return Heads(
            index=index if attention.shared_with is None else attention.shared_with,
            spec=attention,
            rotary=None if attention.rope is None else self._rotary(attention.rope, attention.head_size),
            norm=norm,
            query_factors=None if scaling is None else self._query_factors(scaling),
            sinks=sinks,
        )
