"""Routed experts of one layer: an MLP of many parts, of which every row uses a few."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.backends.torch.layers import Inputs, Linear, gated, product
from quire.backends.torch.packed import Stack
from quire.weights.spec import Activation

SIGMOID_FLOOR = 1e-6  # added to a sum of sigmoids before it divides

# T rows of the batch, N experts, K experts chosen per row, E hidden size, F width of an expert


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row uses beside the routed experts. Its output is multiplied by the sigmoid of a gate."""

    gate_up_proj: Linear  # [2F, E]
    down_proj: Linear  # [E, F]
    gate: Linear  # [1, E]
    activation: Activation

    def add_to(self, routed: Tensor, x: Inputs, *, is_graph: bool) -> Tensor:
        """Add the output for x, which was routed, to that of the routed experts [T, E]."""
        hidden = self.gate_up_proj.gated(x, self.activation, is_graph=is_graph, reader=self.down_proj)
        gate = self.gate.project(x, is_graph=is_graph).sigmoid()
        return routed.addcmul_(gate, self.down_proj.project(hidden, is_graph=is_graph))


@dataclass(slots=True)
class Experts:
    """The matrices of a layer's experts. The router's matrix belongs to the caller, which passes its logits.

    The weights of a row are the softmax of its logits over all experts, in fp32, at the `num_chosen` greatest logits.
    Of equal logits, the first expert's counts as greater. `renormalizes`: divide by the sum of the chosen weights.
    `expert_scales` are factors of the weights, one per expert. Matrices may be packed.
    `has_sigmoid`: the weights are the sigmoids of the logits, and `bias` is added to them for the choice.
    """

    gate_up: Stack  # [N, 2F, E], gates first
    down: Stack  # [N, E, F]
    num_chosen: int
    activation: Activation
    renormalizes: bool
    scale: float  # factor of the output
    gate_up_bias: Tensor | None = None  # [N, 2F]
    down_bias: Tensor | None = None  # [N, E]; both biases or none
    expert_scales: Tensor | None = None  # [N] fp32
    has_sigmoid: bool = False
    bias: Tensor | None = None  # [N] fp32

    def reference(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """Return the output [T, E] for x [T, E] and logits [T, N], in plain PyTorch. On a GPU, waits for the device."""
        ids, weights = self._route(router_logits)
        y = x.new_zeros((*ids.shape, x.shape[1]))  # [T, K, E]
        for expert in sorted(set(ids.flatten().tolist())):
            row, place = (ids == expert).nonzero(as_tuple=True)
            biases = [None if one is None else one[expert] for one in (self.gate_up_bias, self.down_bias)]
            hidden = gated(product(x[row], self.gate_up[expert], biases[0]), self.activation)
            y[row, place] = product(hidden, self.down[expert], biases[1])
        return (y.float() * weights[..., None]).sum(1).to(x.dtype)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts and their weights, both [T, K], the best expert first."""
        logits = logits.float()
        scores = logits.sigmoid() if self.has_sigmoid else logits.softmax(-1)
        order = logits if self.bias is None else scores + self.bias
        ids = order.sort(descending=True, stable=True).indices[:, : self.num_chosen]
        weights = scores.gather(1, ids)
        if self.renormalizes:
            floor = SIGMOID_FLOOR if self.has_sigmoid else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + floor)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[ids]
        return ids, weights * self.scale

    def fused(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """Return the output [T, E] for x [T, E] and logits [T, N], in our kernels. A graph can contain this call."""
        if self.has_sigmoid:  # the kernels have no sigmoids
            return self.reference(x, router_logits)
        from quire.backends.torch.kernels.experts import Biases, route  # Triton is not installed everywhere
        from quire.backends.torch.kernels.routed_experts import run_experts

        routing = route(
            router_logits,
            self.num_chosen,
            renormalizes=self.renormalizes,
            scale=self.scale,
            expert_scales=self.expert_scales,
        )
        biases = Biases(self.gate_up_bias, self.down_bias)
        return run_experts(x, self.gate_up, self.down, routing, self.activation, biases)
