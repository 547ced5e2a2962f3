"""The kernels of the gated delta net against a recurrence in fp64, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels.delta_net import DeltaShape, DeltaWeights, delta_net, is_supported
from quire.core.step import SeqSlice
from tests.backends.torch.kernels.device import DEVICE, unit
from tests.backends.torch.kernels.states import delta_rows, device_work, piece

SLOTS = 12
EQUAL = DeltaShape(2, 2, 16, 16)
GROUPED = DeltaShape(2, 4, 32, 16)
TILED = DeltaShape(2, 6, 16, 32, is_tiled=True)
SHAPES = {"equal": EQUAL, "grouped": GROUPED, "tiled": TILED}
STEPS: dict[str, tuple[SeqSlice, ...]] = {
    "decodes": (piece(1, 1, 2), piece(1, 3, 3), piece(1, 0, 4)),
    "prompt": (piece(70, 0, 1),),
    "short prompts": (piece(2, 5, 5), piece(3, 6, 7), piece(2, 0, 8)),
    "in place": (piece(150, 3, 3),),
    "snapshots": (piece(100, 1, 1, (1, 2), (2, 3), (66, 4)), piece(64, 5, 6, (63, 7))),
    "mixed": (piece(1, 1, 1), piece(1, 2, 3), piece(5, 0, 4), piece(130, 5, 6, (64, 7), (100, 8)), piece(9, 9, 9, (8, 10))),
}  # fmt: skip


class Layer:
    """Random weights, states and inputs of one layer."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, num_taps: int = 4, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.shape, self.dtype = shape, dtype
        hv, channels = shape.num_value_heads, shape.num_channels
        self.weights = DeltaWeights(
            taps=(self.normal(num_taps, channels) / 2).to(dtype),
            decay=-torch.exp(self.normal(hv)),
            bias=self.normal(hv),
            norm=1 + self.normal(shape.value_size) / 4,
            eps=1e-6,
        )
        self.conv = self.normal(SLOTS, num_taps - 1, channels).to(dtype)
        self.matrices = self.normal(SLOTS, hv, shape.key_size, shape.value_size) / 4
        self.conv[0] = self.matrices[0] = torch.nan  # never read

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self._random).to(DEVICE)

    def inputs(self, num_rows: int) -> Tensor:
        return self.normal(num_rows, self.shape.width).to(self.dtype)

    def run(self, projected: Tensor, slices: Sequence[SeqSlice], num_padding: int = 0) -> Tensor:
        work = device_work(slices, num_padding)
        return delta_net(projected, self.weights, self.shape, self.conv, self.matrices, work)

    def expected(self, projected: Tensor, slices: Sequence[SeqSlice]) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs and all states after a step, row by row."""
        conv, matrices = self.conv.double(), self.matrices.double()
        empty = conv[0].zero_(), matrices[0].zero_()
        outputs, row, old = [], 0, (conv.clone(), matrices.clone())
        for one in slices:
            rows, matrix = (empty[0], empty[1]) if one.state_source == 0 else (pool[one.state_source] for pool in old)
            done = 0
            for position, slot in (*one.snapshots, (one.start + one.length, one.state_target)):
                end = position - one.start
                x = projected[row + done : row + end].double()
                out, rows, matrix = delta_rows(x, self.weights, self.shape, rows, matrix)
                conv[slot], matrices[slot] = rows, matrix
                outputs.append(out)
                done = end
            row += one.length
        return torch.cat(outputs), conv, matrices


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_equals_the_recurrence(step: Sequence[SeqSlice], shape: DeltaShape) -> None:
    layer = Layer(shape, torch.float32)
    projected = layer.inputs(sum(one.length for one in step))
    outputs, conv, matrices = layer.expected(projected, step)
    before = layer.conv.clone(), layer.matrices.clone()
    out = layer.run(projected, step, num_padding=2)
    assert error(out, outputs) < 1e-5
    written = {one.state_target for one in step} | {slot for one in step for _, slot in one.snapshots}
    for slot in range(SLOTS):
        if slot in written:
            assert torch.equal(layer.conv[slot].double(), conv[slot])
            assert error(layer.matrices[slot], matrices[slot]) < 2e-5  # sums of g within a chunk are up to some hundreds
        else:
            assert torch.equal(layer.conv[slot], before[0][slot]) or slot == 0
            assert torch.equal(layer.matrices[slot], before[1][slot]) or slot == 0
    assert layer.conv[0].isnan().all() and layer.matrices[0].isnan().all()
