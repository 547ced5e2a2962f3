"""Layers with recurrent states in plain PyTorch: the reference for the kernels.

They are causal depthwise convolutions, alone (the mixer of LFM2) or before a gated delta net.

The state of a value head of a delta net is a matrix S [key size, value size]. A token has a key k, a value v, a query
q, a strength beta and the logarithm g < 0 of a decay. It changes the state, then reads it:

    S = S * exp(g);  d = (v - S^T k) * beta;  S = S + k d^T;  output S^T q

Several tokens are computed in chunks. Let c be the cumulative sum of g within a chunk. After its decay by token i, S is
exp(c_i) times the S before the chunk, plus the sum of exp(c_i - c_j) k_j d_j^T over earlier tokens j. So the
differences d are the solution of a triangular system. All of it is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import RMSNorm
from quire.backends.torch.state_work import Segment
from quire.weights.spec import DeltaNetSpec

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


def short_conv(bcx: Tensor, conv: ShortConv, store: KVStore, segments: Sequence[Segment]) -> Tensor:
    """Return c * conv(b * x) [T, E], from b, c and x side by side in one tensor [T, 3 * E]."""
    b, c, x = bcx.chunk(3, -1)
    mixed = causal_conv(b * x, conv.weight, conv.bias, store.conv[conv.index], segments)
    return (c.float() * mixed).to(bcx.dtype)


# T rows of the batch, B segments of one row, N rows of a chunk, H value heads, K key size and V value size of a head

CHUNK = 64  # rows
EPS = 1e-6  # in the norms of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Parameters of a delta net in one layer."""

    index: int  # of the layer
    spec: DeltaNetSpec
    conv: Tensor  # [channels, taps]
    taps: Tensor  # [taps, channels]: the same for the kernels, which read all channels of a tap
    decay: Tensor  # [H] fp32: -exp(a_log)
    dt_bias: Tensor  # [H] fp32
    norm: RMSNorm  # of each head's output
    key_heads: Tensor  # [H]: the key head of each value head


class Rows(NamedTuple):
    """The inputs of the recurrence for some rows, by value head. fp32."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H]: logarithm of the decay
    beta: Tensor  # [T, H]

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(one[first:last] for one in self))


def delta_net(mixed: Tensor, net: DeltaNet, store: KVStore, segments: Sequence[Segment]) -> Tensor:
    """Return the output [T, H * V] before its projection, from queries, keys, values, z, b and a side by side."""
    spec = net.spec
    sizes = [spec.num_channels, spec.value_size, spec.num_value_heads, spec.num_value_heads]
    qkv, z, b, a = mixed.split(sizes, -1)  # type: ignore[no-untyped-call]
    qkv = F.silu(causal_conv(qkv, net.conv, None, store.conv[net.index], segments))
    rows = _prepare(qkv, a.float(), b.float(), net)
    out = recur(rows, store.matrices[net.index], segments)  # [T, H, V]
    gates = F.silu(z.float()).view(out.shape)
    return (net.norm(out) * gates).view(len(mixed), -1).to(mixed.dtype)


def _prepare(qkv: Tensor, a: Tensor, b: Tensor, net: DeltaNet) -> Rows:
    spec = net.spec
    q, k, v = qkv.split([spec.key_size, spec.key_size, spec.value_size], -1)  # type: ignore[no-untyped-call]
    q, k = (_normed(one.reshape(len(qkv), spec.num_key_heads, -1))[:, net.key_heads] for one in (q, k))
    return Rows(
        q=q * spec.key_head_size**-0.5,
        k=k,
        v=v.reshape(len(qkv), spec.num_value_heads, -1),
        g=net.decay * F.softplus(a + net.dt_bias),
        beta=b.sigmoid(),
    )


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def recur(rows: Rows, pool: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Apply the rows to the states in `pool` [slots, H, K, V], segment by segment: [T, H, V]."""
    out = torch.empty_like(rows.v)
    for part in by_kind(segments):
        if isinstance(part, Singles):
            first, last = part.first, part.last
            out[first:last], states = _step(rows.part(first, last), pool[part.sources])
            write_states(pool, part.targets, states)
            continue
        state, end = pool[part.source], part.first_row + part.num_rows
        for first in range(part.first_row, end, CHUNK):
            last = min(first + CHUNK, end)
            if last - first == 1:
                out[first:last], stepped = _step(rows.part(first, last), state[None])
                state = stepped[0]
            else:
                out[first:last], state = _chunk(rows.part(first, last), state)
        write_states(pool, [part.target], state[None])
    return out


def _step(rows: Rows, states: Tensor) -> tuple[Tensor, Tensor]:
    """Apply one row to each of the states [B, H, K, V]; return outputs [B, H, V] and the new states."""
    states = states * rows.g.exp()[..., None, None]
    difference = (rows.v - _read(states, rows.k)) * rows.beta[..., None]
    states = states + rows.k[..., None] * difference[..., None, :]
    return _read(states, rows.q), states


def _read(states: Tensor, keys: Tensor) -> Tensor:
    return (keys[..., None, :] @ states)[..., 0, :]  # [B, H, V]


def _chunk(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply N rows to a state [H, K, V]; return outputs [N, H, V] and the new state."""
    q, k, v = (one.transpose(0, 1) for one in (rows.q, rows.k, rows.v))  # [H, N, ..]
    decay = rows.g.t().cumsum(-1)  # [H, N]
    since_start = decay.exp()[..., None]
    between = (decay[:, :, None] - decay[:, None, :]).tril().exp().tril()  # [H, N, N]; tril first: exp may overflow
    beta = rows.beta.t()[..., None]
    system = (k @ k.transpose(1, 2) * between * beta).tril(-1)
    known = (v - (k * since_start) @ state) * beta
    differences = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # [H, N, V]
    out = (q * since_start) @ state + (q @ k.transpose(1, 2) * between) @ differences
    until_end = (decay[:, -1:] - decay).exp()[..., None]
    state = state * since_start[:, -1:] + (k * until_end).transpose(1, 2) @ differences
    return out.transpose(0, 1), state
