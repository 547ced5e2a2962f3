"""Replaces RMS norms of `transformers`, which are six operations, by the norm of quire's passes.

A class of norms is replaced only if its result on random numbers is that of the standard equation, with weight w or
1 + w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.layers import RMSNorm

MAX_ERROR = 1e-5
TRIAL_SHAPE = (3, 5)  # leading dimensions of the random input

current_step: ContextVar[Pass | None] = ContextVar("current_step", default=None)


def replace_norms(model: nn.Module) -> int:
    """Replace the forward functions of standard RMS norms; return their number."""
    offsets: dict[tuple[type[nn.Module], float], float | None] = {}
    num_replaced = 0
    for module in model.modules():
        eps = _find_eps(module)
        if eps is None or "forward" in vars(module):
            continue
        kind = (type(module), eps)
        if kind not in offsets:
            offsets[kind] = _find_offset(module, eps)
        offset = offsets[kind]
        if offset is not None:
            weight: Any = module.weight
            norm = RMSNorm(weight.data.float() + offset, eps)
            module.forward = _make_forward(norm, weight.dtype, module.forward)
            num_replaced += 1
    return num_replaced


def _find_eps(module: nn.Module) -> float | None:
    """Return the epsilon of what may be a standard RMS norm: a module with one vector of weights."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or dict(module.named_buffers()):
        return None
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def _find_offset(module: nn.Module, eps: float) -> float | None:
    """Return what the norm adds to its weights, 0 or 1; None: it is another equation."""
    trial: Any = copy.deepcopy(module).float().cpu()
    generator = torch.Generator().manual_seed(0)
    trial.weight.data = torch.randn(trial.weight.shape, generator=generator)
    x = torch.randn((*TRIAL_SHAPE, trial.weight.shape[0]), generator=generator) * 0.1
    with torch.no_grad():
        try:
            found = trial(x)
        except Exception:  # it needs other arguments
            return None
        for offset in (0.0, 1.0):
            expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (trial.weight + offset)
            if found.shape == expected.shape and float((found - expected).abs().max()) < MAX_ERROR:
                return offset
    return None


def _make_forward(norm: RMSNorm, dtype: torch.dtype, original: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    size = norm.shape[-1]

    def forward(x: Tensor) -> Tensor:
        step = current_step.get()
        if step is None or x.dtype is not dtype:
            return original(x)
        return step.norm(x.reshape(-1, size).contiguous(), norm).view(x.shape)

    return forward
