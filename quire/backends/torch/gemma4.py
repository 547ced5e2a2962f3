"""Parts of a layer that only Gemma 4 has: experts beside the MLP, and an embedding of the token for every layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.layers import Outputs, RMSNorm
from quire.backends.torch.loading import PleLayerWeights, PleWeights, RoutedWeights
from quire.weights.spec import Activation, LayerSpec, ModelSpec

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
