"""Steps of layers with recurrent states, for tests of their kernels, and plain recurrences to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.backends.torch.kernels.delta_net import DeltaWeights
from quire.backends.torch.state_work import StateWork, plan_states
from quire.core.step import SeqSlice, StateSnapshot
from quire.core.values import SamplingParams
from quire.weights.spec import DeltaNetSpec
from tests.backends.torch.kernels.device import DEVICE

SAMPLING = SamplingParams()


def piece(length: int, source: int, target: int, *snapshots: tuple[int, int], start: int = 0) -> SeqSlice:
    """Return a slice. Snapshots are (rows from the start of the slice, slot)."""
    stored = tuple(StateSnapshot(start + rows, slot) for rows, slot in snapshots)
    return SeqSlice(
        request_id=0,
        epoch=0,
        batch_index=0,
        tokens=(0,) * length,
        start=start,
        length=length,
        block_table=(),
        history=(),
        wants_token=True,
        sampling=SAMPLING,
        num_prompt_tokens=0,
        state_source=source,
        state_target=target,
        snapshots=stored,
    )


def device_work(slices: Sequence[SeqSlice], num_padding: int = 0) -> StateWork:
    """Return the work of a step on the device, with padding entries of each kind."""
    num_decodes = sum(one.length == 1 for one in slices)
    found = (torch.from_numpy(array) for array in plan_states(slices, num_decodes))
    return StateWork(*(torch.cat((one, one.new_zeros(num_padding, one.shape[1]))).to(DEVICE) for one in found))


def steps_of(slices: Sequence[SeqSlice]) -> Iterator[tuple[SeqSlice, int, int, int, bool]]:
    """Yield the parts of slices that end with a stored state: slice, rows, slot, whether it is the slice's first."""
    row = 0
    for one in slices:
        done = 0
        for position, slot in (*one.snapshots, (one.start + one.length, one.state_target)):
            yield one, row + done, row + position - one.start, slot, done == 0
            done = position - one.start
        row += one.length


def written(slices: Sequence[SeqSlice]) -> set[int]:
    return {slot for _, _, _, slot, _ in steps_of(slices)}


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of a tensor."""
    return float((found.double() - wanted).norm() / wanted.norm())


def convolved(inputs: Tensor, state: Tensor, taps: Tensor) -> Tensor:
    """Return the causal convolution of inputs [T, C] after the rows of a state."""
    rows = torch.cat((state, inputs))
    return sum((taps[t] * rows[t : t + len(inputs)] for t in range(len(taps))), torch.zeros_like(inputs))


def delta_rows(
    projected: Tensor, weights: DeltaWeights, spec: DeltaNetSpec, conv: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of the rows of one sequence, and its state after them. All in fp64, row by row."""
    hk, hv, k_size, v_size = spec.num_key_heads, spec.num_value_heads, spec.key_head_size, spec.value_head_size
    channels = spec.num_channels
    x, z, b, a = torch.split(projected, [channels, hv * v_size, hv, hv], -1)
    mixed = convolved(x, conv, weights.taps.double())
    mixed = (mixed * mixed.sigmoid()).to(weights.taps.dtype).double()  # rounded as a model stores it
    q, k, v = torch.split(mixed, [hk * k_size, hk * k_size, hv * v_size], -1)
    q, k = (one.view(-1, hk, k_size)[:, spec.key_heads] for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q, v = q * k_size**-0.5, v.view(-1, hv, v_size)
    shrink = torch.exp(weights.decay.double() * torch.nn.functional.softplus(a + weights.bias.double()))
    beta, state, outputs = b.sigmoid(), matrices.clone(), []
    for row in range(len(x)):
        state = state * shrink[row, :, None, None]
        d = (v[row] - torch.einsum("hkv,hk->hv", state, k[row])) * beta[row, :, None]
        state = state + k[row, :, :, None] * d[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[row]))
    o = torch.stack(outputs)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
    o = o.reshape(len(x), -1) * z * z.sigmoid()
    return o, torch.cat((conv, x))[len(x) :], state
