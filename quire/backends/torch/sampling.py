"""Sampling for the whole batch at once.

Every backend follows this order: penalties, logit bias, forbidden tokens (min_tokens, grammar), temperature, min-p,
top-k, top-p, draw. A draw walks the kept tokens in the order of their ids until the cumulative probability passes the
request's random number (`quire.backends.sampling`). A row does not depend on the other rows. Reported logprobs are
the model's own, before all of these changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.backends.base import TokenMasks
from quire.backends.sampling import (
    NEVER,
    Ranks,
    draw_of,
    edits_of,
    is_changed,
    masks_by_row,
)
from quire.core.step import SeqSlice, TokenLogprobs

# S rows that sample, V vocabulary

TOP_P_CANDIDATES = 1024  # most top-p sets are this small; sorting the whole vocabulary costs thirty times as much


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tensors that are still on the device."""

    tokens: Tensor  # [S]
    is_broken: Tensor  # [S]: the logits of this row are not finite
    is_blocked: Tensor  # [S]: every token of this row was forbidden
    logprobs: Ranks | None


def penalize(logits: Tensor, rows: Sequence[SeqSlice], last_tokens: Tensor) -> None:
    """Apply penalties in place. `last_tokens` [S]: last token of each row's context, even if not in the plan."""
    for row, piece in enumerate(rows):
        params = piece.sampling
        if not params.has_penalty:
            continue
        end = piece.start + piece.length
        context = torch.tensor(piece.history[:end], dtype=torch.int64, device=logits.device)
        context = torch.cat((context, last_tokens[row : row + 1].long()))[:end]
        seen = torch.bincount(context, minlength=logits.shape[1]) > 0
        num_answered = torch.bincount(context[piece.num_prompt_tokens :], minlength=logits.shape[1]).float()
        own, repetition = logits[row], params.repetition_penalty
        picked = torch.where(seen, torch.where(own > 0, own / repetition, own * repetition), own)
        logits[row] = picked - params.frequency_penalty * num_answered - params.presence_penalty * (num_answered > 0)


def sample(logits: Tensor, rows: Sequence[SeqSlice], last_tokens: Tensor, masks: TokenMasks | None) -> Sampled:
    """Choose one token for each row of logits [S, V], which are changed in place."""
    best = logits.max(-1)
    is_broken = ~torch.isfinite(best.values)
    reported = [index for index, piece in enumerate(rows) if piece.sampling.logprobs is not None]
    raw = logits[reported]  # the model's own, before sampling changes them
    if masks or any(map(is_changed, rows)):
        penalize(logits, rows, last_tokens)
        _edit(logits, rows, masks_by_row(rows, masks, logits.shape[1]))
        best = logits.max(-1)
    tokens = best.indices
    drawn = [index for index, piece in enumerate(rows) if not piece.sampling.is_greedy]
    if len(drawn) == len(rows):
        tokens = _draw(logits, rows)
    elif drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
    is_blocked = ~(torch.isfinite(best.values) | is_broken)
    ranks = None
    if reported:
        counts = tuple(rows[index].sampling.logprobs or 0 for index in reported)
        ranks = rank(raw, tokens[reported], tuple(reported), counts)
    return Sampled(tokens, is_broken, is_blocked, ranks)


def _edit(logits: Tensor, rows: Sequence[SeqSlice], masks: Mapping[int, bytes]) -> None:
    """Add biases and forbid tokens, in place."""
    edits = {(row, token): value for row, piece in enumerate(rows) for token, value in edits_of(piece).items()}
    if edits:
        index, token = zip(*edits, strict=True)
        logits[list(index), list(token)] += torch.tensor(list(edits.values()), device=logits.device)
    if masks:
        masked = list(masks)
        together = bytearray().join(masks.values())
        packed = torch.frombuffer(together, dtype=torch.uint8).view(len(masked), -1).to(logits.device)
        bits = (packed[:, :, None] >> torch.arange(8, device=logits.device)) & 1
        is_forbidden = bits.view(len(masked), -1)[:, : logits.shape[1]] == 0
        logits[masked] = logits[masked].masked_fill_(is_forbidden, NEVER)


def _draw(logits: Tensor, rows: Sequence[SeqSlice]) -> Tensor:
    params = [piece.sampling for piece in rows]
    device, vocab_size = logits.device, logits.shape[1]
    temperatures = torch.tensor([p.temperature for p in params], device=device)
    logits = logits / temperatures[:, None]
    peak = logits.max(-1, keepdim=True).values
    floor = torch.full_like(peak, NEVER)  # tokens below it are cut off
    if any(p.min_p > 0 for p in params):
        floor = peak + torch.tensor([p.min_p for p in params], device=device).log()[:, None]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    if any(top_k):
        floor = torch.maximum(floor, _top_k_floor(logits, top_k))
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)
        floor = torch.maximum(floor, _top_p_floor(logits, peak, floor, top_p))
    weights = (logits - peak).exp_().masked_fill_(logits < floor, 0.0)  # [S, V]
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(list(map(draw_of, rows)), device=device, dtype=torch.float64) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    return tokens.clamp_(max=vocab_size - 1)


def _top_k_floor(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Return the k-th largest logit of each row. Ties with it are kept."""
    largest = logits.topk(max(top_k), -1).values
    counts = torch.tensor(top_k, device=logits.device)[:, None]
    floor = largest.gather(1, (counts - 1).clamp_(min=0))
    return torch.where(counts > 0, floor, NEVER)


def _top_p_floor(logits: Tensor, peak: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit of the smallest set whose share of the kept tokens reaches top_p."""
    vocab_size = logits.shape[1]
    kept = (logits - peak).exp_().masked_fill_(logits < floor, 0.0)
    goal = top_p * kept.sum(-1, dtype=torch.float64)  # [S]
    size = min(TOP_P_CANDIDATES, vocab_size)
    largest = kept.topk(size, -1).values.double()
    if bool((largest.sum(-1) < goal).any()):
        largest = kept.sort(-1, descending=True).values.double()
    before = largest.cumsum(-1) - largest
    last = (before < goal[:, None]).sum(-1, keepdim=True) - 1
    threshold = largest.gather(1, last.clamp_(min=0)).to(logits.dtype)  # a weight; compared below to find the logit
    result = torch.where(kept >= threshold, logits, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p[:, None] < 1, result, NEVER)


def rank(raw: Tensor, chosen: Tensor, rows: tuple[int, ...], counts: tuple[int, ...]) -> Ranks:
    logprobs = torch.log_softmax(raw, -1)
    picked = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > picked).sum(-1)
    top = logprobs.topk(min(max(counts), raw.shape[1]), -1)
    return Ranks(rows, counts, picked[:, 0], ranks, top.values, top.indices)


def rank_tokens(raw: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Return logprobs of given tokens, from the raw logits [N, V] of the positions before them."""
    chosen = torch.tensor(list(tokens), device=raw.device)
    ranked = rank(raw, chosen, tuple(range(len(tokens))), (count,) * len(tokens))
    return tuple(ranked.read(tokens).values())
