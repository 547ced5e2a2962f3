"""Gives the slices of a plan their state slots, for schedulers that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.backends.base import Runner
from quire.core.step import StepPlan
from tests.backends.torch.rig import Rig


class SlotRunner:
    """A runner whose requests have two slots each, by batch index, and use them in turn. There are no shared states."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: dict[int, int] = {}  # slot by batch index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: StepPlan) -> None:
        slices = []
        for piece in plan.slices:
            if piece.state_target:  # the scheduler has given it one
                slices.append(piece)
                continue
            first = 1 + 2 * piece.batch_index
            source = self._last[piece.batch_index] if piece.start else 0
            target = first + 1 if source == first else first
            slices.append(piece._replace(state_source=source, state_target=target))
            self._last[piece.batch_index] = target
        self._runner.forward(plan._replace(slices=tuple(slices)))


class StateRig(Rig):
    """A rig for models with states. Contexts are not shared."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(path, **{"enable_prefix_caching": False, **settings})
        self.engine.runner = SlotRunner(self.engine.runner)
