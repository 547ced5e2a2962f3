"""Causal depthwise convolutions with states, and the layer of LFM2 that consists of one.

A state has the last `taps - 1` inputs of a sequence, oldest first. A decode reads a state and writes the state shifted
by its row, both in the same program. Chunks of a prompt run in parallel and read rows of the step; only the first rows
read the state. A later launch writes the new state, because it may be in the slot that the first rows read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.torch.state_work import CHUNK_FIELDS, CHUNK_ROWS, DECODE_FIELDS, SEQUENCE_FIELDS, StateWork

# T rows of the batch, C channels, E hidden size, S slots

MIN_TAPS, MAX_TAPS = 2, 4
ROWS = 16  # of a chunk in a program: more need too many registers
SHORT_BLOCK = 128  # channels of a program


@triton.jit
def _inputs(x, channel, mask, C: tl.constexpr, IS_GATED: tl.constexpr):
    value = tl.load(x + channel, mask=mask, other=0.0)
    if IS_GATED:  # columns b, c, x of LFM2: the input is b * x
        other = tl.load(x + 2 * C + channel, mask=mask, other=0.0)
        value = (value.to(tl.float32) * other.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def old_inputs(conv, source, channel, is_in, C: tl.constexpr, TAPS: tl.constexpr):
    """Return the three inputs [channels] before a row, the last first: 0 where the state has fewer rows."""
    at = conv + source * ((TAPS - 1) * C) + channel
    is_old = is_in & (source != 0)
    one = tl.load(at + (TAPS - 2) * C, mask=is_old, other=0.0)
    two, three = tl.zeros_like(one), tl.zeros_like(one)
    if TAPS > 2:
        two = tl.load(at + (TAPS - 3) * C, mask=is_old, other=0.0)
    if TAPS > 3:
        three = tl.load(at, mask=is_old, other=0.0)
    return one, two, three


@triton.jit
def weighted(now, one, two, three, taps, channel, is_in, C: tl.constexpr, TAPS: tl.constexpr):
    """Return the convolution [channels] of one row in fp32, given its input and those before it."""
    at = taps + channel
    y = now.to(tl.float32) * tl.load(at + (TAPS - 1) * C, mask=is_in, other=0.0).to(tl.float32)
    y += one.to(tl.float32) * tl.load(at + (TAPS - 2) * C, mask=is_in, other=0.0).to(tl.float32)
    if TAPS > 2:
        y += two.to(tl.float32) * tl.load(at + (TAPS - 3) * C, mask=is_in, other=0.0).to(tl.float32)
    if TAPS > 3:
        y += three.to(tl.float32) * tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    return y


@triton.jit
def store_row(now, one, two, conv, target, channel, is_in, C: tl.constexpr, TAPS: tl.constexpr):
    """Store the state after one row. All threads must have read the state before it."""
    at = conv + target * ((TAPS - 1) * C) + channel
    tl.store(at + (TAPS - 2) * C, now, mask=is_in)
    if TAPS > 2:
        tl.store(at + (TAPS - 3) * C, one, mask=is_in)
    if TAPS > 3:
        tl.store(at, two, mask=is_in)


@triton.jit
def convolve(
    x, conv, taps, row, num_rows, num_before, source, channel, is_in,
    C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, M: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Return the convolution [M, channels] of a chunk in fp32. `num_before` rows of its sequence precede it."""
    m = tl.arange(0, M)
    is_row = m < num_rows
    y = tl.zeros((M, channel.shape[0]), tl.float32)
    for t in tl.static_range(TAPS):
        place = m + (t - TAPS + 1)
        mask = (is_row & (num_before + place >= 0))[:, None] & is_in[None, :]
        value = _inputs(x + (row + place).to(tl.int64)[:, None] * WIDTH, channel[None, :], mask, C, IS_GATED)
        y += value.to(tl.float32) * tl.load(taps + t * C + channel, mask=is_in, other=0.0).to(tl.float32)[None, :]
    if (num_before < TAPS - 1) & (source != 0):
        for tap in tl.static_range(TAPS - 1):
            old = num_before + m + tap  # of the state
            is_old = (is_row & (old < TAPS - 1))[:, None] & is_in[None, :]
            at = conv + (source.to(tl.int64) * (TAPS - 1) + old)[:, None] * C + channel[None, :]
            kept = tl.load(at, mask=is_old, other=0.0).to(tl.float32)
            y += kept * tl.load(taps + tap * C + channel, mask=is_in, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def store_inputs(
    x, conv, row, num_rows, num_before, source, target, channel, is_in,
    C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, PAD: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Store the last inputs of a sequence up to the end of a chunk as a state, for channels of this program alone."""
    t = tl.arange(0, PAD)
    num_inputs = num_before + num_rows
    place = num_inputs - (TAPS - 1) + t  # of the input in the step; negative: in the state before
    is_tap = (t < TAPS - 1)[:, None] & is_in[None, :]
    at = x + (row - num_before + place).to(tl.int64)[:, None] * WIDTH
    new = _inputs(at, channel[None, :], is_tap & (place >= 0)[:, None], C, IS_GATED)
    at = conv + (source.to(tl.int64) * (TAPS - 1) + num_inputs + t)[:, None] * C + channel[None, :]
    old = tl.load(at, mask=is_tap & (place < 0)[:, None] & (source != 0), other=0.0)
    tl.debug_barrier()  # the target may be the source
    at = conv + (target.to(tl.int64) * (TAPS - 1) + t)[:, None] * C + channel[None, :]
    tl.store(at, tl.where((place >= 0)[:, None], new, old), mask=is_tap)


@triton.jit
def _short_decode(projected, taps, bias, conv, decodes, out, E: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source, target = tl.load(decodes + row * 2).to(tl.int64), tl.load(decodes + row * 2 + 1).to(tl.int64)
    if target == 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = channel < E
    x = projected + row * 3 * E
    now = _inputs(x, channel, is_in, E, True)
    one, two, three = old_inputs(conv, source, channel, is_in, E, TAPS)
    y = weighted(now, one, two, three, taps, channel, is_in, E, TAPS)
    if bias is not None:
        y += tl.load(bias + channel, mask=is_in, other=0.0).to(tl.float32)
    gate = tl.load(x + E + channel, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * E + channel, (y * gate).to(out.dtype.element_ty), mask=is_in)
    tl.debug_barrier()  # the target may be the source
    store_row(now, one, two, conv, target, channel, is_in, E, TAPS)


@triton.jit
def _short_chunk(
    projected, taps, bias, conv, chunks, out,
    E: tl.constexpr, TAPS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0) // (M // ROWS) * 6
    skipped = tl.program_id(0) % (M // ROWS) * ROWS
    num_rows = tl.load(chunk + 1) - skipped
    if num_rows <= 0:
        return
    row, num_before, source = tl.load(chunk) + skipped, tl.load(chunk + 2) + skipped, tl.load(chunk + 3)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = channel < E
    y = convolve(projected, conv, taps, row, num_rows, num_before, source, channel, is_in, E, 3 * E, TAPS, ROWS, True)
    if bias is not None:
        y += tl.load(bias + channel, mask=is_in, other=0.0).to(tl.float32)[None, :]
    m = tl.arange(0, ROWS)
    rows = (row + m).to(tl.int64)[:, None]
    mask = (m < num_rows)[:, None] & is_in[None, :]
    gate = tl.load(projected + rows * 3 * E + E + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows * E + channel[None, :], (y * gate).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _short_store(
    projected, conv, chunks, sequences, E: tl.constexpr, TAPS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0)
    first, last = tl.load(sequences + sequence * 2), tl.load(sequences + sequence * 2 + 1)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    while first < last:
        end = tl.load(chunks + first * 6 + 5)
        chunk = chunks + (end - 1) * 6
        row, num_rows, num_before = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
        source, target = tl.load(chunk + 3), tl.load(chunk + 4)
        store_inputs(
            projected, conv, row, num_rows, num_before, source, target, channel, channel < E, E, 3 * E, TAPS, PAD, True
        )
        first = end


@cache
def padded(size: int) -> int:
    return int(triton.next_power_of_2(size))


def short_conv(projected: Tensor, taps: Tensor, bias: Tensor | None, conv: Tensor, work: StateWork) -> Tensor:
    """Return c * conv(b * x) [T, E], given b, c and x side by side [T, 3E], and update the states.

    taps: [taps, E]; bias: [E]; conv: [S, taps - 1, E].
    """
    num_taps, size = taps.shape
    out = projected.new_empty((len(projected), size))
    num_blocks, pad = -(-size // SHORT_BLOCK), padded(num_taps)
    if len(work.decodes):
        _short_decode[(len(work.decodes), num_blocks)](
            projected, taps, bias, conv, work.decodes, out,
            E=size, TAPS=num_taps, BLOCK=SHORT_BLOCK, num_warps=4,
        )  # fmt: skip
    if len(work.sequences):
        _short_chunk[(len(work.chunks) * (CHUNK_ROWS // ROWS), num_blocks)](
            projected, taps, bias, conv, work.chunks, out,
            E=size, TAPS=num_taps, M=CHUNK_ROWS, ROWS=ROWS, BLOCK=SHORT_BLOCK, num_warps=4,
        )  # fmt: skip
        _short_store[(len(work.sequences), num_blocks)](
            projected, conv, work.chunks, work.sequences,
            E=size, TAPS=num_taps, PAD=pad, BLOCK=SHORT_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def empty_work(num_decodes: int, num_chunks: int, num_sequences: int) -> StateWork:
    """Return work with shapes only, for compilation."""
    shapes = ((num_decodes, DECODE_FIELDS), (num_chunks, CHUNK_FIELDS), (num_sequences, SEQUENCE_FIELDS))
    return StateWork(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes))


def short_conv_calls(size: int, num_taps: int, dtype: torch.dtype, *, has_bias: bool) -> list[Callable[[], object]]:
    """Return launches, with shapes only, of all kernels of `short_conv`."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bias = meta(size) if has_bias else None
    return [
        partial(
            short_conv, meta(2, 3 * size), meta(num_taps, size), bias, meta(2, num_taps - 1, size), empty_work(1, 1, 1)
        )
    ]
