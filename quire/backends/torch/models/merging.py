"""Merges matrices with the same input, such as q, k and v or gate and up, into one product.

Which ones have the same input is found in a trial pass, so no names are needed. The weights are concatenated once; each
`nn.Linear` keeps a view of its rows. The first of them to be called computes the product for all, the others return
their part of it. A call with another input computes its own product, so results never depend on the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Siblings:
    """Records the inputs of all plain `nn.Linear`s while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inputs: dict[nn.Linear, list[Tensor]] = {}  # kept alive: compared by identity

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(self._record)
            for module in self._model.modules()
            if type(module) is nn.Linear
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, module: Any, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self._inputs.setdefault(module, []).append(args[0])

    def groups(self) -> list[list[nn.Linear]]:
        """Return the linears of the same module that were called once, with the same tensor, in the order of calls."""
        found: dict[tuple[int, int, bool, torch.dtype, torch.device], list[nn.Linear]] = {}
        parents = {child: parent for parent in self._model.modules() for child in parent.children()}
        for linear, inputs in self._inputs.items():
            if len(inputs) == 1 and linear in parents:
                weight, has_bias = linear.weight, linear.bias is not None
                kind = (id(parents[linear]), id(inputs[0]), has_bias, weight.dtype, weight.device)
                found.setdefault(kind, []).append(linear)
        return [group for group in found.values() if len(group) > 1 and _can_merge(group)]

    def clear(self) -> None:
        self._inputs.clear()


def _can_merge(group: list[nn.Linear]) -> bool:
    is_plain = all(not linear._forward_hooks and "forward" not in vars(linear) for linear in group)
    return is_plain and len({linear.weight.data_ptr() for linear in group}) == len(group)


class MergedLinear:
    """One product for several `nn.Linear`s, which return their parts of it."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._weight = _merge([linear.weight for linear in linears])
        biases: list[Any] = [linear.bias for linear in linears]
        self._bias = None if biases[0] is None else _merge(biases)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        for place, linear in enumerate(linears):
            linear.forward = self._make_forward(place, linear)  # type: ignore[method-assign, assignment]

    def _make_forward(self, place: int, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            part = self._parts[place] if x is self._input else None
            if part is None:
                if place != 0:  # called before the first one, or with another input
                    return F.linear(x, linear.weight, linear.bias)
                self._input = x
                self._parts = list(F.linear(x, self._weight, self._bias).split(self._sizes, -1))  # type: ignore[no-untyped-call]
                part = self._parts[0]
                assert part is not None
            self._parts[place] = None
            if not any(part is not None for part in self._parts):  # all are taken: free the memory
                self._input, self._parts = None, []
            return part

        return forward


def _merge(parts: list[Any]) -> Tensor:
    """Concatenate parameters. Each becomes a view of its rows, so the memory of the parts is freed."""
    merged = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, merged.split([len(part) for part in parts]), strict=True):  # type: ignore[no-untyped-call]
        part.data = rows
    return merged


def merge_siblings(siblings: Siblings) -> int:
    """Merge what was recorded; return the number of merged products."""
    groups = siblings.groups()
    siblings.clear()
    for group in groups:
        MergedLinear(group)
    return len(groups)
