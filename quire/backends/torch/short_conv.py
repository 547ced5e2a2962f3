"""Causal depthwise convolutions with states, in plain PyTorch, and the mixer of LFM2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.torch.state_store import Segment, StateStore

# T rows of the batch, B segments of one row, C channels, P taps of the convolution, E hidden size


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Parameters of a short convolution in one layer."""

    index: int  # of the layer
    weight: Tensor  # [E, P], the last tap for the token itself
    taps: Tensor  # [P, E]: the same for the kernels
    bias: Tensor | None = None  # [E]


class Singles(NamedTuple):
    """Segments of one row, in consecutive rows of the batch, that are computed together."""

    first: int
    last: int
    sources: list[int]
    targets: list[int]


def by_kind(segments: Sequence[Segment]) -> Iterator[Singles | Segment]:
    """Yield the segments in order, with those of one row joined as long as none reads what another one writes."""
    at = 0
    while at < len(segments):
        end, written = at, set[int]()
        while end < len(segments) and segments[end].num_rows == 1 and segments[end].source not in written:
            written.add(segments[end].target)
            written.discard(0)
            end += 1
        if end - at > 1:
            chosen = segments[at:end]
            first = chosen[0].first_row
            yield Singles(first, first + len(chosen), [one.source for one in chosen], [one.target for one in chosen])
        else:
            yield segments[at]
            end = at + 1
        at = end


def write_states(pool: Tensor, targets: Sequence[int], states: Tensor) -> None:
    """Store states [B, ..] in slots. Slot 0 stays empty."""
    kept = [place for place, slot in enumerate(targets) if slot]
    if kept:
        chosen = states if len(kept) == len(targets) else states[kept]
        pool[[targets[place] for place in kept]] = chosen.to(pool.dtype)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Convolve x [T, C] with weight [C, P] in fp32, after the rows that `pool` [slots, P - 1, C] holds: [T, C] fp32.

    The last P - 1 rows of each segment are stored in its target.
    """
    taps = weight.float().t()  # [P, C]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for part in by_kind(segments):
        if isinstance(part, Singles):
            rows = x[part.first : part.last, None]
            window = torch.cat((pool[part.sources], rows), 1)  # [B, P, C]
            out[part.first : part.last] = (window.float() * taps).sum(1)
            write_states(pool, part.targets, window[:, 1:])
            continue
        last = part.first_row + part.num_rows
        window = torch.cat((pool[part.source], x[part.first_row : last]))  # [P - 1 + rows, C]
        out[part.first_row : last] = sum(window[i : i + part.num_rows].float() * tap for i, tap in enumerate(taps))
        write_states(pool, [part.target], window[None, part.num_rows :])
    return out if bias is None else out.add_(bias)


def short_conv(bcx: Tensor, conv: ShortConv, states: StateStore, segments: Sequence[Segment]) -> Tensor:
    """Return c * conv(b * x) [T, E], from b, c and x side by side in one tensor [T, 3 * E]."""
    b, c, x = bcx.chunk(3, -1)
    mixed = causal_conv(b * x, conv.weight, conv.bias, states.conv[conv.index], segments)
    return (c.float() * mixed).to(bcx.dtype)
