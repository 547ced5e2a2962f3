"""LFM2's short convolution against a plain convolution in fp64."""

from __future__ import annotations

import pytest
import torch

from quire.backends.torch.kernels.convolution import short_conv
from quire.core.step import SeqSlice
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.kernels.states import convolved, device_work, error, piece, steps_of, written

SIZE, SLOTS = 160, 12  # channels: not a multiple of a program's
STEPS: dict[str, tuple[SeqSlice, ...]] = {
    "decodes": (piece(1, 1, 2), piece(1, 3, 3), piece(1, 0, 4)),
    "in place": (piece(130, 3, 3), piece(2, 4, 4)),
    "mixed": (piece(1, 1, 1), piece(5, 0, 4), piece(80, 5, 5, (1, 6), (2, 7), (64, 8)), piece(9, 9, 10, (8, 11))),
}


@pytest.mark.sweep("none")  # decodes and chunks branch by the number of taps in functions of their own
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("num_taps", "has_bias"), [(3, False), (2, True), (4, True)])
def test_a_step_equals_the_convolution(step: tuple[SeqSlice, ...], num_taps: int, *, has_bias: bool) -> None:
    torch.manual_seed(num_taps)
    taps = torch.randn(num_taps, SIZE).to(DEVICE)
    bias = torch.randn(SIZE).to(DEVICE) if has_bias else None
    pool = torch.randn(SLOTS, num_taps - 1, SIZE).to(DEVICE)
    pool[0] = torch.nan  # never read
    projected = torch.randn(sum(one.length for one in step) + 2, 3 * SIZE).to(DEVICE)
    c = projected[:, SIZE : 2 * SIZE].double()
    inputs = (projected[:, :SIZE] * projected[:, 2 * SIZE :]).double()  # rounded as a state stores it
    wanted, outputs = pool.double(), []
    old = wanted.clone()
    old[0] = 0
    rows = old[0]
    for one, first, last, slot, is_first in steps_of(step):
        if is_first:
            rows = old[one.state_source]
        y = convolved(inputs[first:last], rows, taps.double()) + (0 if bias is None else bias.double())
        rows = torch.cat((rows, inputs[first:last]))[last - first :]
        wanted[slot] = rows
        outputs.append(y * c[first:last])
    out = short_conv(projected, taps, bias, pool, device_work(step, num_padding=2))
    assert error(out[:-2], torch.cat(outputs)) < 1e-6
    assert torch.equal(pool[1:].double(), wanted[1:])
    assert pool[0].isnan().all()
    assert written(step) <= set(range(1, SLOTS))
