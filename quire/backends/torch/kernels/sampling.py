"""Sampling on the device: the definition of `quire.backends.torch.sampling`, in a few launches.

The vocabulary is divided into chunks. `_measure` computes each chunk's largest logit and the sum of its weights.
`_pick` finds the chunk that contains the draw and reads only that chunk again: two launches, and the logits are read
once. Rows with min-p, top-k or top-p cost two more launches: `_find_floors` finds the logit below which tokens are
dropped, and `_weigh` sums the rest. The order of a row's sums depends only on the size of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# S rows that sample, R of them whose logits are changed first, V vocabulary, C chunks of it

NUM_PARAMS = 5  # columns of the settings: temperature (0: greedy), min-p (0: no), top-k (0: all), top-p (1: all), draw
CHUNK = 2048  # small enough that one row has enough programs, and that the chunks' maxima narrow down top-k
TILE = 8192  # elements of a row that the one searching program reads at a time
ENTRIES = 256  # per program of `count` or `edit`
BROKEN = tl.constexpr(1)  # flag of a row: its logits are not finite
BLOCKED = tl.constexpr(2)  # flag of a row: every token is forbidden
PROMPT = tl.constexpr(1 << 30)  # bit of a count: the token is in the prompt. Lower bits: occurrences in the answer


class Scratch(NamedTuple):
    """Buffers between the kernels, for the rows of one launch."""

    peaks: Tensor  # [S, C] fp32: largest logit of a chunk; infinite if one is NaN
    bests: Tensor  # [S, C] int32: the first token with that logit
    sums: Tensor  # [S, C] fp32: weights of the chunk's tokens, relative to its own peak
    floors: Tensor  # [S] fp32: tokens below it are dropped
    candidates: Tensor  # [S, TILE] fp32: logits that may be the floor

    @staticmethod
    def empty(max_num_seqs: int, vocab_size: int, device: torch.device) -> Scratch:
        shape = (max_num_seqs, triton.cdiv(vocab_size, CHUNK))
        return Scratch(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(max_num_seqs, dtype=torch.float32, device=device),
            torch.empty((max_num_seqs, TILE), dtype=torch.float32, device=device),
        )


@triton.jit
def _weights(x, peak, scale):
    # A forbidden token has weight 0, also if all are forbidden: the difference of two infinities would be NaN.
    return tl.exp((x - tl.where(tl.abs(peak) < float("inf"), peak, 0.0)) * scale)


@triton.jit
def _scale(temperature):
    return 1.0 / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _load(row, column, vocab_size):
    x = tl.load(row + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)  # so that comparisons work: an infinite peak is reported as broken


@triton.jit(do_not_specialize=["rows", "settings"])
def _measure(
    logits, stride, rows, settings, peaks, bests, sums, floors, vocab_size, num_chunks,
    NUM_PARAMS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, place = tl.program_id(0), tl.program_id(1)
    x = _load(logits + place.to(tl.int64) * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab_size)
    scale = _scale(tl.load(settings + tl.load(rows + place) * NUM_PARAMS))
    peak, best = tl.max(x, 0, return_indices=True)  # the first of equal values
    entry = place * num_chunks + chunk
    tl.store(peaks + entry, peak)
    tl.store(bests + entry, chunk * CHUNK + best)
    tl.store(sums + entry, tl.sum(_weights(x, peak, scale), 0))
    if chunk == 0:
        tl.store(floors + place, float("-inf"))


@triton.jit(do_not_specialize=["rows", "settings"])
def _weigh(
    logits, stride, rows, settings, peaks, sums, floors, vocab_size, num_chunks,
    NUM_PARAMS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, place = tl.program_id(0), tl.program_id(1)
    floor = tl.load(floors + place)
    if floor == float("-inf"):
        return
    entry = place * num_chunks + chunk
    peak = tl.load(peaks + entry)
    if peak < floor:
        tl.store(sums + entry, 0.0)
        return
    x = _load(logits + place.to(tl.int64) * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab_size)
    scale = _scale(tl.load(settings + tl.load(rows + place) * NUM_PARAMS))
    tl.store(sums + entry, tl.sum(tl.where(x >= floor, _weights(x, peak, scale), 0.0), 0))


@triton.jit(do_not_specialize=["rows", "settings", "batch_indices", "last_samples", "out", "out_stride"])
def _pick(
    logits, stride, rows, settings, batch_indices, last_samples, out, out_stride, peaks, bests, sums, floors,
    vocab_size, num_chunks,
    NUM_PARAMS: tl.constexpr, CHUNK: tl.constexpr, C_PAD: tl.constexpr, IS_CHANGED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(rows + place)
    temperature = tl.load(settings + row * NUM_PARAMS)
    draw = tl.load(settings + row * NUM_PARAMS + 4).to(tl.float64)
    floor = tl.load(floors + place)
    batch_index = tl.load(batch_indices + row)
    scale = _scale(temperature)

    chunk = tl.arange(0, C_PAD)
    entry = place * num_chunks + chunk
    chunk_peak = tl.load(peaks + entry, mask=chunk < num_chunks, other=float("-inf"))
    chunk_sum = tl.load(sums + entry, mask=chunk < num_chunks, other=0.0)
    peak = tl.max(chunk_peak, 0)
    is_finite = tl.abs(peak) < float("inf")
    if (temperature > 0.0) & is_finite:
        mass = (chunk_sum * _weights(chunk_peak, peak, scale)).to(tl.float64)  # [C]
        target = draw * tl.sum(mass, 0)
        # If rounding keeps every sum below the target, the last chunk with any weight is chosen, here and below.
        last = tl.max(tl.where(mass > 0.0, chunk, 0), 0)
        passes = tl.cumsum(mass, 0) > target
        chosen = tl.minimum(tl.min(tl.where(passes, chunk, C_PAD), 0), last)
        target -= tl.sum(tl.where(chunk < chosen, mass, 0.0), 0)
        column = chosen * CHUNK + tl.arange(0, CHUNK)
        x = _load(logits + place.to(tl.int64) * stride, column, vocab_size)
        weight = tl.where(x >= floor, _weights(x, peak, scale), 0.0)
        last = tl.max(tl.where(weight > 0.0, column, 0), 0)
        passes = tl.cumsum(weight.to(tl.float64), 0) > target
        token = tl.minimum(tl.min(tl.where(passes, column, vocab_size), 0), last)
    else:
        chosen = tl.min(tl.where(chunk_peak == peak, chunk, C_PAD), 0)
        token = tl.load(bests + place * num_chunks + chosen)

    if IS_CHANGED:
        flag = tl.load(out + out_stride + row)  # set from the model's own logits
        flag = tl.where((flag == BROKEN) | is_finite, flag, BLOCKED)
    else:
        flag = tl.where(is_finite, 0, BROKEN)
    tl.store(out + row, token)
    tl.store(out + out_stride + row, flag)
    tl.store(last_samples + batch_index, token, mask=batch_index >= 0)


@triton.jit
def _to_key(x, SHIFT: tl.constexpr):
    """Map a float to an integer with the same order. With SHIFT = 16 the integers enumerate bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    bits = key << SHIFT
    bits = tl.where(bits < 0, bits | ((1 << SHIFT) - 1), bits)  # maps minus infinity to itself
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(logits, length, low, peak, goal, scale, IS_MASS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the largest float x, `low` or above, such that the logits >= x reach the goal in number or weight.

    The search keeps a range between a float that reaches the goal and one that does not. Three sums over the logits
    reduce it to a quarter, until one float is left. Rounding cannot mislead the search: a sum of fewer weights in the
    same order is never larger.
    """
    reaches = _to_key(low, SHIFT).to(tl.int64)
    fails = _to_key(peak, SHIFT).to(tl.int64) + 1
    while fails - reaches > 1:
        step = (fails - reaches + 3) // 4
        x1 = _from_key((reaches + step).to(tl.int32), SHIFT)
        x2 = _from_key((reaches + 2 * step).to(tl.int32), SHIFT)
        x3 = _from_key((reaches + 3 * step).to(tl.int32), SHIFT)
        sum1 = tl.zeros([TILE], tl.float32)
        sum2 = tl.zeros([TILE], tl.float32)
        sum3 = tl.zeros([TILE], tl.float32)
        for start in range(0, length, TILE):
            x = _load(logits, start + tl.arange(0, TILE), length)
            weight = tl.exp((x - peak) * scale) if IS_MASS else 1.0
            sum1 += tl.where(x >= x1, weight, 0.0)
            sum2 += tl.where(x >= x2, weight, 0.0)
            sum3 += tl.where(x >= x3, weight, 0.0)
        is1, is2, is3 = tl.sum(sum1, 0) >= goal, tl.sum(sum2, 0) >= goal, tl.sum(sum3, 0) >= goal
        num = is1.to(tl.int64) + is2.to(tl.int64) + is3.to(tl.int64)
        fails = tl.minimum(fails, reaches + (num + 1) * step)
        reaches += num * step
    return _from_key(reaches.to(tl.int32), SHIFT)


@triton.jit
def _raise_floor(
    logits, length, floor, low, bound, peak, total, top_k, top_p, scale, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """Return the floor after top-k and then top-p, at least `low` and `bound`. `total`: the weight of all tokens."""
    if top_k > 0.0:
        floor = tl.maximum(floor, _search(logits, length, low, peak, top_k, scale, False, SHIFT, TILE))
    if top_p < 1.0:
        if floor > float("-inf"):
            kept = tl.zeros([TILE], tl.float32)
            for start in range(0, length, TILE):
                x = _load(logits, start + tl.arange(0, TILE), length)
                kept += tl.where(x >= floor, tl.exp((x - peak) * scale), 0.0)
            total = tl.sum(kept, 0)
        low = tl.maximum(floor, bound)
        floor = tl.maximum(floor, _search(logits, length, low, peak, top_p * total, scale, True, SHIFT, TILE))
    return floor


@triton.jit
def _gather(logits, length, low, out, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Write the logits >= low to `out` in order and return their number; more than ROOM means too many."""
    num_found, start = 0, 0
    while (start < length) & (num_found <= ROOM):
        x = _load(logits, start + tl.arange(0, TILE), length)
        is_found = (x >= low).to(tl.int32)
        place = num_found + tl.cumsum(is_found, 0) - 1
        tl.store(out + place, x, mask=(is_found > 0) & (place < ROOM))
        num_found += tl.sum(is_found, 0)
        start += TILE
    tl.debug_barrier()  # other threads read what one thread wrote
    return num_found


@triton.jit
def _kth_peak(chunk_peak, k):
    """Return the k-th largest of the chunks' peaks: at least k logits reach it."""
    rank = tl.sum((chunk_peak[None, :] > chunk_peak[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(rank < k, chunk_peak, float("inf")), 0)


@triton.jit(do_not_specialize=["rows", "settings"])
def _find_floors(
    logits, stride, rows, settings, peaks, sums, floors, candidates, vocab_size, num_chunks,
    NUM_PARAMS: tl.constexpr, TILE: tl.constexpr, C_PAD: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    mine = settings + tl.load(rows + place) * NUM_PARAMS
    temperature, min_p = tl.load(mine), tl.load(mine + 1)
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3)
    top_k = tl.where(top_k < vocab_size, top_k, 0.0)
    if (min_p <= 0.0) & (top_k <= 0.0) & (top_p >= 1.0):
        return
    chunk = tl.arange(0, C_PAD)
    entry = place * num_chunks + chunk
    chunk_peak = tl.load(peaks + entry, mask=chunk < num_chunks, other=float("-inf"))
    chunk_sum = tl.load(sums + entry, mask=chunk < num_chunks, other=0.0)
    peak = tl.max(chunk_peak, 0)
    if tl.abs(peak) == float("inf"):  # broken or blocked: no search
        return
    scale = _scale(temperature)
    floor = tl.where(min_p > 0.0, peak + tl.log(tl.where(min_p > 0.0, min_p, 1.0)) * temperature, float("-inf"))
    if (top_k > 0.0) | (top_p < 1.0):
        total = tl.sum(chunk_sum * _weights(chunk_peak, peak, scale), 0)
        # The logits below this have less weight in total than top-p may drop: the peak alone has weight 1.
        rest = tl.where(top_p < 1.0, 1.0 - top_p, 1.0)
        bound = peak - (tl.log(vocab_size / rest) + 1.0) * temperature
        # Usually a few logits decide: they are copied and searched instead of the whole row.
        kth_peak = tl.where(top_k <= num_chunks, _kth_peak(chunk_peak, top_k), float("-inf"))
        low = tl.maximum(floor, tl.where(top_k > 0.0, kth_peak, tl.where(min_p > 0.0, floor, bound)))
        row = logits + place.to(tl.int64) * stride
        found = candidates + place * TILE
        num_found = TILE + 1
        if low > float("-inf"):
            num_found = _gather(row, vocab_size, low, found, TILE, TILE)
        if num_found <= TILE:
            floor = _raise_floor(found, num_found, floor, low, bound, peak, total, top_k, top_p, scale, SHIFT, TILE)
        else:
            floor = _raise_floor(row, vocab_size, floor, low, bound, peak, total, top_k, top_p, scale, SHIFT, TILE)
    tl.store(floors + place, floor)


@triton.jit(do_not_specialize=["rows", "counted", "penalties", "masked"])
def _change(
    logits, stride, rows, counted, penalties, counts, masked, masks, mask_bytes, out, vocab_size, CHUNK: tl.constexpr
):
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_in = column < vocab_size
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    x = tl.load(logits + row * stride + column, mask=is_in, other=0.0).to(tl.float32)
    batch_index = tl.load(counted + place).to(tl.int64)
    if batch_index >= 0:
        repetition, frequency = tl.load(penalties + place * 3), tl.load(penalties + place * 3 + 1)
        presence = tl.load(penalties + place * 3 + 2)
        count = tl.load(counts + batch_index * vocab_size + column, mask=is_in, other=0)
        num_answered = (count & (PROMPT - 1)).to(tl.float32)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(count != 0, repeated, x) - frequency * num_answered - tl.where(num_answered > 0.0, presence, 0.0)
    mask = tl.load(masked + place).to(tl.int64)
    if mask >= 0:
        byte = tl.load(masks + mask * mask_bytes + column // 8, mask=is_in, other=0).to(tl.int32)
        x = tl.where((byte >> (column % 8)) & 1 == 0, float("-inf"), x)
    tl.store(out + place * vocab_size + column, x, mask=is_in)


@triton.jit(do_not_specialize=["batch_indices", "tokens", "is_prompt", "last_tokens", "num_entries"])
def _count(batch_indices, tokens, is_prompt, last_tokens, num_entries, counts, vocab_size, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entry < num_entries
    batch_index = tl.load(batch_indices + entry, mask=is_in, other=0).to(tl.int64)
    token = tl.load(tokens + entry, mask=is_in, other=0)
    token = tl.where(token < 0, tl.load(last_tokens + (-1 - token), mask=is_in & (token < 0), other=0), token)
    from_prompt = tl.load(is_prompt + entry, mask=is_in, other=0) != 0
    place = counts + batch_index * vocab_size + token
    tl.atomic_or(place, PROMPT, mask=is_in & from_prompt)
    tl.atomic_add(place, 1, mask=is_in & (from_prompt == 0))


@triton.jit(do_not_specialize=["places", "tokens", "values", "num_entries"])
def _edit(places, tokens, values, num_entries, logits, vocab_size, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entry < num_entries
    place = tl.load(places + entry, mask=is_in, other=0).to(tl.int64)
    target = logits + place * vocab_size + tl.load(tokens + entry, mask=is_in, other=0)
    value = tl.load(target, mask=is_in, other=0.0) + tl.load(values + entry, mask=is_in, other=0.0)
    tl.store(target, value, mask=is_in)


def choose(
    logits: Tensor, rows: Tensor, settings: Tensor, batch_indices: Tensor, last_samples: Tensor, out: Tensor,
    scratch: Scratch, *, has_floor: bool, is_changed: bool,
) -> None:  # fmt: skip
    """Choose one token for each row of logits [N, V], which belong to `rows` [N] int32 of S.

    settings [S, NUM_PARAMS] fp32, batch_indices [S] int32. Tokens go to out[0, row] and last_samples[batch_index],
    flags to out[1, row]. `is_changed`: the logits are changed copies of the model's own, which were processed before
    and set the flag. A row is blocked if only its changed logits are not finite.
    """
    num_rows, vocab_size = logits.shape
    stride, num_chunks = logits.stride(0), scratch.peaks.shape[1]
    peaks, bests, sums, floors, candidates = scratch
    padded = triton.next_power_of_2(num_chunks)
    chunks = (num_chunks, num_rows)
    _measure[chunks](
        logits, stride, rows, settings, peaks, bests, sums, floors, vocab_size, num_chunks,
        NUM_PARAMS=NUM_PARAMS, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    if has_floor:
        _find_floors[(num_rows,)](
            logits, stride, rows, settings, peaks, sums, floors, candidates, vocab_size, num_chunks,
            NUM_PARAMS=NUM_PARAMS, TILE=TILE, C_PAD=padded, SHIFT=16 if logits.dtype is torch.bfloat16 else 0,
            num_warps=16,
        )  # fmt: skip
        _weigh[chunks](
            logits, stride, rows, settings, peaks, sums, floors, vocab_size, num_chunks,
            NUM_PARAMS=NUM_PARAMS, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    _pick[(num_rows,)](
        logits, stride, rows, settings, batch_indices, last_samples, out, out.stride(0), peaks, bests, sums, floors,
        vocab_size, num_chunks, NUM_PARAMS=NUM_PARAMS, CHUNK=CHUNK, C_PAD=padded, IS_CHANGED=is_changed, num_warps=8,
    )  # fmt: skip


def change(
    logits: Tensor, rows: Tensor, counts: Tensor, counted: Tensor, penalties: Tensor, masks: Tensor, masked: Tensor
) -> Tensor:
    """Return the logits of some rows [R] int32 in fp32 [R, V], with penalties; forbidden tokens are minus infinity.

    counted [R] int32: the row of counts [batch_indices, V] int32 that belongs to each, -1 without penalties.
    penalties [R, 3] fp32: repetition, frequency, presence. masked [R] int32: its row of masks, or -1.
    masks [N, bytes] uint8: one bit per token, lowest bit first, 1 if it is allowed.
    """
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    _change[(triton.cdiv(vocab_size, CHUNK), num_rows)](
        logits, logits.stride(0), rows, counted, penalties, counts, masked, masks, masks.shape[1], out, vocab_size,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return out


def count(counts: Tensor, batch_indices: Tensor, tokens: Tensor, is_prompt: Tensor, last_tokens: Tensor) -> None:
    """Add tokens [N] to the counts at batch_indices [N]. A negative token is last_tokens[-1 - token]. All int32."""
    num_entries = batch_indices.shape[0]
    _count[(triton.cdiv(num_entries, ENTRIES),)](
        batch_indices, tokens, is_prompt, last_tokens, num_entries, counts, counts.shape[1], BLOCK=ENTRIES, num_warps=4
    )


def edit(logits: Tensor, places: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values [N] fp32 to logits [R, V] fp32 at (places, tokens) [N] int32, which must be distinct."""
    num_entries = places.shape[0]
    _edit[(triton.cdiv(num_entries, ENTRIES),)](
        places, tokens, values, num_entries, logits, logits.shape[1], BLOCK=ENTRIES, num_warps=4
    )
