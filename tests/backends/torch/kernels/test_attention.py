"""Attention by work items, compared with plain attention in fp64, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from quire.backends.torch import attention_work
from quire.backends.torch.attention_work import (
    ITEM_FIELDS,
    Ints,
    Prompt,
    Siblings,
    Sizes,
    Work,
    find_siblings,
    plan_work,
)
from quire.backends.torch.kernels.attention import attend, merge, part_size, rows_per_item, tilings
from quire.backends.torch.kv_store import decode, encode
from tests.backends.torch.attention_bits import Case, differing_rows
from tests.backends.torch.kernels.device import DEVICE

# In the interpreter only: the cap of a number far beyond it, which is finite all the same.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.sweep("file")]

# T rows of the batch, H query heads, K kv heads, D head size

NAN = float("nan")
NUM_PARTS = 1500
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]  # no bf16 products in the interpreter
NUM_ROUNDS = 10 if DEVICE == "cuda" else 1
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_work, "PIECE", 64)


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int


class StepMix(NamedTuple):
    """The requests of a step."""

    decodes: tuple[int, ...] = ()  # their positions
    prompts: tuple[tuple[int, int], ...] = ()  # cached and computed tokens of each
    siblings: tuple[int, int] = (0, 0)  # their number, and the keys of their shared prefix
    inner: tuple[int, int] = (0, 0)  # the number of siblings that share more, and the keys of that
    target: int = 40  # programs for which the work is divided


@dataclass
class Step:
    shape: Shape
    q: Tensor  # [T, H, D]
    layer: Tensor
    tables: Ints
    positions: list[int]
    batch_indices: list[int]
    siblings: Sequence[Siblings]
    work: Work
    scales: Tensor | None = None  # of keys and values in FP8

    def to_fp8(self) -> None:
        """Store keys and values in FP8, those of each token on a scale of its own."""
        tokens = torch.randn(self.layer.shape[:4], generator=torch.Generator().manual_seed(1))
        self.layer, self.scales = encode(self.layer.float() * torch.exp2(2 * tokens).to(DEVICE)[..., None])

    def run(self, *, scale: float, window: int = 0, cap: float = 0.0, padding: int = 0) -> Tensor:
        """Run as in a graph: with padding rows and items after the others, into memory full of garbage."""
        num_rows, num_heads, head_size = self.q.shape
        more = torch.full((padding, num_heads, head_size), NAN, dtype=self.q.dtype, device=DEVICE)
        q, out = torch.cat((self.q, more)), torch.full_like(torch.cat((self.q, more)), NAN)
        parts = torch.full((NUM_PARTS, part_size(num_heads, head_size)), NAN, device=DEVICE)
        positions = on_device(np.array(self.positions + [0] * padding))
        first_parts = on_device(np.pad(self.work.first_parts, (0, 2 * padding), mode="edge"))
        tables = on_device(self.tables)
        narrow, wide = tilings(head_size, q.dtype.itemsize)
        for items, tiling in ((self.work.wide, wide), (self.work.narrow, narrow)):
            empty = np.full((padding, ITEM_FIELDS), 2**30)
            empty[:, 1] = 0
            items = np.concatenate((items, empty))
            if len(items):
                attend(
                    q, self.layer, tables, positions, on_device(items), first_parts, parts, out,
                    tiling=tiling, scale=scale, window=window, cap=cap, scales=self.scales,
                )  # fmt: skip
        if self.work.first_parts[-1]:
            merge(parts, first_parts, out)
        num_parts = int(self.work.first_parts[-1])
        assert not parts[:num_parts].view(-1, head_size + 4)[:, : head_size + 2].isnan().any()
        assert parts[num_parts:].isnan().all()  # no other part was written
        assert out[num_rows:].isnan().all()  # and no padding row
        return out[:num_rows]

    def expected(self, *, scale: float, window: int = 0, cap: float = 0.0) -> Tensor:
        num_rows, num_heads, head_size = self.q.shape
        num_kv_heads, block_size = self.shape.num_kv_heads, self.shape.block_size
        out = torch.empty(num_rows, num_heads, head_size, dtype=torch.float64)
        q, layer = self.q.cpu().double(), self.layer.cpu().double()
        if self.scales is not None:
            decode(self.layer.cpu(), self.scales.cpu(), layer)
        for row, (position, batch_index) in enumerate(zip(self.positions, self.batch_indices, strict=True)):
            first = max(position - window + 1, 0) if window else 0
            at = np.arange(first, position + 1)
            blocks = torch.from_numpy(self.tables[batch_index, at // block_size]).long()
            seen = layer[blocks, :, :, torch.from_numpy(at % block_size)]  # [keys, 2, K, D]
            keys, values = seen.permute(1, 2, 0, 3)
            scores = q[row].view(num_kv_heads, -1, head_size) @ keys.mT * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[row] = (scores.softmax(-1) @ values).view(num_heads, head_size)
        return out


def on_device(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(DEVICE)


def make_step(shape: Shape, mix: StepMix, seed: int, dtype: torch.dtype = torch.float32) -> Step:
    rng = Random(seed)
    num_siblings, head = mix.siblings
    num_inner, more = mix.inner
    block_size = shape.block_size
    lengths = [head + more] * num_inner + [head] * (num_siblings - num_inner)
    starts = [length + rng.randrange(3 * block_size) for length in lengths] + list(mix.decodes)
    ends = [start + 1 for start in starts] + [sum(prompt) for prompt in mix.prompts]
    needs = [-(-end // block_size) for end in ends]
    free = list(range(1, sum(needs) + 2))
    rng.shuffle(free)
    batch_indices = rng.sample(range(len(ends) + 2), len(ends))
    tables = np.zeros((len(ends) + 2, max(needs) + 1), np.int32)  # entries beyond a sequence are the null block
    common = [free.pop() for _ in range((head + more) // block_size)]
    lengths += [0] * (len(ends) - num_siblings)
    for batch_index, need, length in zip(batch_indices, needs, lengths, strict=True):
        own = common[: length // block_size]
        tables[batch_index, :need] = own + [free.pop() for _ in range(need - len(own))]
    decodes = np.array(list(zip(starts, batch_indices, strict=False)), np.int32).reshape(-1, 2)
    num_heads, num_kv_heads, head_size, _ = shape
    wide_rows = rows_per_item(tilings(head_size, dtype.itemsize)[1], num_heads // num_kv_heads)
    sizes = Sizes(num_kv_heads, block_size, wide_rows, mix.target, mix.target, NUM_PARTS)
    siblings: Sequence[Siblings] = ()
    if (grouping := find_siblings(tables, decodes[:, 1], decodes[:, 0], sizes)) is not None:
        decodes, siblings = decodes[grouping.order], grouping.siblings
    positions, rows, prompts = decodes[:, 0].tolist(), decodes[:, 1].tolist(), []
    for (start, length), batch_index in zip(mix.prompts, batch_indices[len(starts) :], strict=True):
        prompts.append(Prompt(len(rows), length, start, batch_index))
        positions += range(start, start + length)
        rows += [batch_index] * length
    generator = torch.Generator().manual_seed(seed)
    layer = torch.randn(sum(needs) + 2, 2, num_kv_heads, block_size, head_size, generator=generator)
    # The null block and the rest of the last blocks hold large stale numbers, which must not be read.
    layer[0] = 1e4
    for batch_index, end in zip(batch_indices, ends, strict=True):
        layer[tables[batch_index, (end - 1) // block_size], :, :, (end - 1) % block_size + 1 :] = -1e4
    return Step(
        shape,
        (torch.randn(len(rows), num_heads, head_size, generator=generator) * 2).to(DEVICE, dtype),
        layer.to(DEVICE, dtype),
        tables,
        positions,
        rows,
        siblings,
        plan_work(decodes[:, 0].copy(), decodes[:, 1].copy(), siblings, prompts, len(rows), sizes),
    )


def check(step: Step, *, window: int = 0, cap: float = 0.0, padding: int = 2) -> None:
    scale = step.shape.head_size**-0.5
    out = step.run(scale=scale, window=window, cap=cap, padding=padding)
    expected = step.expected(scale=scale, window=window, cap=cap)
    assert out.isfinite().all()
    assert float((out.cpu().double() - expected).abs().max()) < BOUNDS[out.dtype]


def check_fp8(step: Step, *, window: int = 0, cap: float = 0.0, padding: int = 2) -> None:
    """Compare with the decoded keys and values: only weights of the softmax are rounded, to fp16, and results."""
    step.to_fp8()
    scale = step.shape.head_size**-0.5 / 4  # keys are larger than in other tests
    out = step.run(scale=scale, window=window, cap=cap, padding=padding)
    expected = step.expected(scale=scale, window=window, cap=cap)
    assert out.isfinite().all()
    bound = 2e-6 if out.dtype == torch.float32 else 1e-2
    assert float((out.cpu().double() - expected).abs().max()) < bound * float(expected.abs().max())


MIXED = StepMix((0, 40, 201), ((0, 9), (37, 20)), (5, 160), target=12)  # 160: not whole tiles of keys
SHAPES = [
    Shape(2, 2, 16, 8),
    Shape(4, 2, 32, 32),
    Shape(6, 2, 80, 16),
    Shape(3, 3, 64, 32),
    Shape(8, 1, 128, 16),
    Shape(16, 2, 64, 8),
    Shape(9, 3, 96, 32),
    Shape(4, 1, 256, 32),  # smaller tiles
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mixed_step(shape: Shape, dtype: torch.dtype) -> None:
    for seed in range(NUM_ROUNDS):
        step = make_step(shape, MIXED, seed, dtype)
        assert len(step.siblings) == 1
        assert 0 < np.count_nonzero(np.diff(step.work.first_parts)) < len(step.positions)  # split rows and whole ones
        check(step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (24, 0.0), (130, 0.0), (0, 5.0), (40, 20.0), (1000, 1.0)])
def test_windows_and_caps(window: int, cap: float, dtype: torch.dtype) -> None:
    """With a small window, whole parts and the siblings' prefix are masked for every row."""
    for seed in range(NUM_ROUNDS):
        check(make_step(Shape(4, 2, 32, 16), MIXED._replace(inner=(4, 160)), seed, dtype), window=window, cap=cap)


@pytest.mark.parametrize(
    "mix",
    [
        StepMix(decodes=(0,)),
        StepMix(decodes=(127, 128, 129, 0, 255)),
        StepMix(decodes=(2600,), target=1000),  # more parts than are merged at a time
        StepMix(decodes=(900, 3, 400), target=1000),
        StepMix(prompts=((0, 2),)),
        StepMix(prompts=((0, 70), (0, 33))),  # more rows than an item holds
        StepMix(prompts=((300, 70),), target=1000),  # a chunk after a cached prefix, split
        StepMix(siblings=(4, 128)),
        StepMix(siblings=(40, 256), target=1000),  # more siblings than an item holds
        StepMix(siblings=(8, 160), inner=(4, 352)),
        StepMix(decodes=(9, 300), prompts=((0, 9),), siblings=(40, 256), inner=(36, 256), target=1000),
    ],
    ids=str,
)
def test_steps_of_one_kind(mix: StepMix) -> None:
    step = make_step(Shape(8, 2, 32, 32), mix, 1)
    if mix.target > 40:
        assert int(np.diff(step.work.first_parts).max()) >= 3
    assert len(step.siblings) == (mix.siblings[0] > 0) + (mix.inner[0] > 0)
    check(step, padding=0)
    if mix.decodes == (2600,):
        assert step.work.first_parts[-1] > 16
        check(step, window=1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape: Shape, dtype: torch.dtype) -> None:
    for seed in range(NUM_ROUNDS):
        check_fp8(make_step(shape, MIXED, seed, dtype))


@pytest.mark.parametrize(("window", "cap"), [(24, 0.0), (0, 5.0), (40, 20.0)])
def test_fp8_with_windows_and_caps(window: int, cap: float) -> None:
    check_fp8(make_step(Shape(4, 2, 32, 16), MIXED._replace(inner=(4, 160)), 1), window=window, cap=cap)


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-20, 2.0**14, 2.0**60])
def test_fp8_with_tiny_and_huge_numbers(factor: float) -> None:
    """Scales, scaled queries and weights in fp16 neither overflow nor lose digits."""
    step = make_step(Shape(4, 2, 64, 32), MIXED, 2, torch.bfloat16)
    step.layer *= factor
    step.q /= factor
    check_fp8(step)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_fp8_that_is_not_finite() -> None:
    """A key or value that is not finite makes all rows that see it NaN."""
    for part in (0, 1):
        step = make_step(Shape(2, 1, 32, 32), StepMix(prompts=((0, 40),)), 4)
        step.layer[step.tables[step.batch_indices[0], 0], part, 0, 20, 3] = float("inf" if part else "nan")
        step.to_fp8()
        assert step.run(scale=0.1)[20:].isnan().all()


def test_scores_far_apart() -> None:
    """Softmax of scores of hundreds: the parts' sums exceed fp32, their logarithms do not."""
    step = make_step(Shape(4, 2, 32, 32), StepMix((300, 700), siblings=(4, 256), target=1000), 3)
    step.q *= 100
    assert step.work.first_parts[-1] > 10
    out, expected = step.run(scale=1.0), step.expected(scale=1.0)
    assert float((out.cpu().double() - expected).abs().max()) < 2e-3


def test_blocks_beyond_32_bits() -> None:
    """Only the pages that are used take memory."""
    step = make_step(Shape(2, 1, 64, 32), StepMix((70,), prompts=((3, 5),)), 0)
    num_blocks = 2**31 // (2 * 32 * 64) + len(step.layer)
    layer = torch.empty(num_blocks, *step.layer.shape[1:], dtype=torch.float32, device=DEVICE)
    layer[0] = step.layer[0]
    layer[-len(step.layer) + 1 :] = step.layer[1:]
    out = step.run(scale=0.125)
    step.tables = np.where(step.tables, step.tables + num_blocks - len(step.layer), 0).astype(np.int32)
    step.layer = layer
    assert torch.equal(step.run(scale=0.125), out)


@pytest.mark.skipif(DEVICE == "cuda", reason="there, attention_bits.py compares more")
@pytest.mark.parametrize("case", [Case("fp32", 16, 2, 1), Case("fp8", 16, 4, 1, window=70, has_sinks=True)], ids=str)
def test_bits_do_not_depend_on_the_division_of_the_work(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products row by row: those of numpy have other bits in larger matrices."""

    def dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        rows = [np.matmul(row[None], b.data, dtype=d.data.dtype)[0] for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(attention_work, "MIN_DRAFT_KEYS", 64)
    found = differing_rows("cpu", case, context=200, num_others=2, num_positions=3)
    assert sum(one.num_rows for one in found) > 400
    assert not [one for one in found if one.num_differing]
