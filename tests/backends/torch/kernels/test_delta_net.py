"""The kernels of the gated delta net against a recurrence in fp64, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels.delta_net import (
    MAX_FEW,
    DeltaWeights,
    delta_net,
    delta_net_calls,
    is_supported,
    projected_size,
)
from quire.core.step import SeqSlice
from quire.weights.spec import DeltaNetSpec
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.kernels.states import delta_rows, device_work, error, piece, steps_of, written
from tests.backends.torch.test_compiling import Launches

SLOTS = 12
EQUAL = DeltaNetSpec(2, 2, 16, 16, num_taps=4)
GROUPED = DeltaNetSpec(2, 4, 32, 16, num_taps=4)
LARGE = DeltaNetSpec(2, 4, 32, 64, num_taps=4)
TILED = DeltaNetSpec(2, 4, 16, 32, num_taps=3, is_tiled=True)
MIXED = (piece(1, 1, 1), piece(1, 2, 3), piece(5, 0, 4), piece(80, 5, 6, (30, 7), (64, 8)), piece(9, 9, 9, (8, 10)))
STEPS: dict[str, tuple[SeqSlice, ...]] = {
    "decodes": (piece(1, 1, 2), piece(1, 3, 3), piece(1, 0, 4)),
    "prompt": (piece(70, 0, 1),),
    "short prompts": (piece(2, 5, 5), piece(3, 6, 7), piece(2, 0, 8)),
    "in place": (piece(130, 3, 3),),
    "snapshots": (piece(70, 1, 1, (1, 2), (2, 3), (66, 4)), piece(64, 5, 6, (63, 7))),
    "mixed": MIXED,
}
CASES = [(GROUPED, name) for name in STEPS] + [(spec, name) for spec in (EQUAL, TILED) for name in ("decodes", "mixed")]
# Sums of g within a chunk are up to some hundreds, so decays are this exact.
BOUND = 3e-5


class Layer:
    """Random weights and states of one layer."""

    def __init__(self, spec: DeltaNetSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.spec, self.dtype = spec, dtype
        self.weights = DeltaWeights(
            taps=(self.normal(spec.num_taps, spec.num_channels) / 2).to(dtype),
            decay=-torch.exp(self.normal(spec.num_value_heads)),
            bias=self.normal(spec.num_value_heads),
            norm=1 + self.normal(spec.value_head_size) / 4,
            eps=1e-6,
        )
        self.conv = self.normal(SLOTS, spec.num_taps - 1, spec.num_channels).to(dtype)
        self.matrices = self.normal(SLOTS, spec.num_value_heads, spec.key_head_size, spec.value_head_size) / 4
        self.conv[0] = self.matrices[0] = torch.nan  # never read

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self._random).to(DEVICE)

    def inputs(self, num_rows: int) -> Tensor:
        return self.normal(num_rows, projected_size(self.spec)).to(self.dtype)

    def run(self, projected: Tensor, slices: Sequence[SeqSlice], num_padding: int = 0) -> Tensor:
        work = device_work(slices, num_padding)
        return delta_net(projected, self.weights, self.spec, self.conv, self.matrices, work)

    def expected(self, projected: Tensor, slices: Sequence[SeqSlice]) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs and all states after a step, row by row."""
        conv, matrices = self.conv.double(), self.matrices.double()
        old_conv, old_matrices = conv.clone(), matrices.clone()
        old_conv[0], old_matrices[0] = 0, 0
        outputs: list[Tensor] = []
        rows, matrix = old_conv[0], old_matrices[0]
        for one, first, last, slot, is_first in steps_of(slices):
            if is_first:
                rows, matrix = old_conv[one.state_source], old_matrices[one.state_source]
            out, rows, matrix = delta_rows(projected[first:last].double(), self.weights, self.spec, rows, matrix)
            conv[slot], matrices[slot] = rows, matrix
            outputs.append(out)
        return torch.cat(outputs), conv, matrices


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_a_step_equals_the_recurrence(spec: DeltaNetSpec, name: str) -> None:
    layer, step = Layer(spec), STEPS[name]
    projected = layer.inputs(sum(one.length for one in step) + 2)
    outputs, conv, matrices = layer.expected(projected, step)
    old = layer.conv.clone(), layer.matrices.clone()
    out = layer.run(projected, step, num_padding=1)[:-2]
    assert error(out, outputs) < BOUND
    for slot in range(1, SLOTS):
        if slot in written(step):
            assert torch.equal(layer.conv[slot].double(), conv[slot])
            assert error(layer.matrices[slot], matrices[slot]) < BOUND
        else:
            assert torch.equal(layer.conv[slot], old[0][slot])
            assert torch.equal(layer.matrices[slot], old[1][slot])
    assert layer.conv[0].isnan().all()
    assert layer.matrices[0].isnan().all()


def test_a_request_does_not_depend_on_others() -> None:
    layer = Layer(GROUPED)
    projected = layer.inputs(2 + 5 + 80 + 9)
    together = layer.run(projected, MIXED)
    for place, rows in ((1, slice(1, 2)), (3, slice(7, 87))):
        alone = Layer(GROUPED)
        assert torch.equal(alone.run(projected[rows], [MIXED[place]], num_padding=2), together[rows])
        for slot in written([MIXED[place]]):
            assert torch.equal(alone.matrices[slot], layer.matrices[slot])
            assert torch.equal(alone.conv[slot], layer.conv[slot])


def test_equal_keys_are_inverted_exactly() -> None:
    """The worst case for the inverse: all keys are the same, nothing decays and every beta is 1."""
    layer = Layer(EQUAL)
    projected = layer.inputs(64)
    projected[:, : EQUAL.num_channels - EQUAL.value_size] = projected[0, : EQUAL.num_channels - EQUAL.value_size]
    projected[:, -2 * EQUAL.num_value_heads : -EQUAL.num_value_heads] = 30.0
    projected[:, -EQUAL.num_value_heads :] = -30.0
    outputs, _, _ = layer.expected(projected, [piece(64, 0, 1)])
    assert error(layer.run(projected, [piece(64, 0, 1)]), outputs) < BOUND


def test_sizes_that_the_kernels_support() -> None:
    assert is_supported(DeltaNetSpec(16, 48, 128, 128, 4))
    assert not is_supported(DeltaNetSpec(16, 48, 96, 128, 4))
    assert not is_supported(DeltaNetSpec(16, 48, 128, 8, 4))
    assert not is_supported(DeltaNetSpec(16, 48, 128, 128, 5))


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the arguments of the interpreter")
def test_kernels_are_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    for call in delta_net_calls(LARGE, torch.float32):
        call()
    ahead, launches.forms = launches.forms, set()
    layer = Layer(LARGE)
    many = tuple(piece(2, 0, 1 + number) for number in range(MAX_FEW))  # launches are not run
    for step in (*STEPS.values(), many):
        layer.run(layer.inputs(sum(one.length for one in step)), step)
    assert launches.forms == ahead


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies the bits of bf16")
@pytest.mark.parametrize("spec", [DeltaNetSpec(16, 16, 128, 128, 4), DeltaNetSpec(16, 32, 128, 128, 4)])
def test_bf16(spec: DeltaNetSpec) -> None:
    layer = Layer(spec, torch.bfloat16)
    projected = layer.inputs(sum(one.length for one in MIXED))
    outputs, conv, matrices = layer.expected(projected, MIXED)
    assert error(layer.run(projected, MIXED), outputs) < 1e-2
    for slot in written(MIXED):
        assert torch.equal(layer.conv[slot].double(), conv[slot])
        assert error(layer.matrices[slot], matrices[slot]) < 1e-2
