"""The work items of attention: every key is read once, and there are no more items than a CUDA graph holds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.backends.torch.attention_work import (
    MIN_CHUNK,
    MIN_SHARED,
    MIN_SIBLINGS,
    NO_ITEMS,
    Ints,
    Prompt,
    Siblings,
    Sizes,
    Work,
    find_siblings,
    order_decodes,
    plan_work,
)
from quire.backends.torch.cuda import MIN_PARTS, CudaRunner
from quire.backends.torch.inputs import Layout

NUM_CASES = 1500
NUM_ROOMS = 4000


@dataclass
class Case:
    """Decodes in the order of their rows, then prompts."""

    tables: Ints  # [batch_indices, blocks]: 0 if empty
    starts: Ints
    batch_indices: Ints
    siblings: list[Siblings]
    prompts: list[Prompt]
    sizes: Sizes

    def plan(self) -> Work:
        return plan_work(self.starts, self.batch_indices, self.siblings, self.prompts, self.num_rows, self.sizes)

    @property
    def num_rows(self) -> int:
        return len(self.starts) + sum(prompt.length for prompt in self.prompts)

    def rows(self) -> Iterator[tuple[int, int]]:
        """Yield position and batch index of every row."""
        yield from zip(self.starts.tolist(), self.batch_indices.tolist(), strict=True)
        for prompt in self.prompts:
            yield from ((prompt.start + i, prompt.batch_index) for i in range(prompt.length))


def random_sizes(rng: Random, block_size: int, num_rows: int) -> Sizes:
    return Sizes(
        num_kv_heads=rng.choice([1, 2, 3, 8, 32]),
        block_size=block_size,
        rows_per_item=rng.choice([4, 16, 42, 128]),
        target=rng.choice([1, 4, 40, 528]),
        wide_target=rng.choice([1, 2, 20, 264]),
        max_parts=rng.choice([2 * num_rows, 3 * num_rows, 4096]),
    )


def random_tables(rng: Random, lengths: list[int], block_size: int) -> Ints:
    """Make one table per length, in groups that start with none, some or all of the same blocks."""
    tables = np.zeros((len(lengths), -(-max(lengths) // block_size)), np.int32)
    numbers = itertools.count(1)
    leader = 0
    for batch_index, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        tables[batch_index, :num_blocks] = [next(numbers) for _ in range(num_blocks)]
        if batch_index == 0 or rng.random() < 0.3:
            leader = batch_index
        elif rng.random() < 0.9:
            shared = rng.choice([num_blocks, rng.randrange(num_blocks + 1)])
            shared = min(shared, -(-lengths[leader] // block_size))
            tables[batch_index, :shared] = tables[leader, :shared]
    return tables


def random_case(rng: Random, *, num_decodes: int, num_prompts: int) -> Case:
    block_size = rng.choice([1, 8, 16, 32, 128])
    longest = rng.choice([1, 40, 300, 1500])
    floor = rng.choice([0, longest // 2])
    starts = np.array([rng.randrange(floor, longest) for _ in range(num_decodes)], np.int32)
    tables = random_tables(rng, [*(starts + 1).tolist(), 1], block_size)
    batch_indices = np.array(rng.sample(range(num_decodes), num_decodes), np.int32)
    starts = starts[batch_indices]
    siblings: list[Siblings] = []
    if num_decodes > 1 and (order := order_decodes(tables[batch_indices, 0])) is not None:
        starts, batch_indices = starts[order], batch_indices[order]
        siblings = find_siblings(tables, batch_indices, starts, block_size)
    prompts, row = [], num_decodes
    for number in range(num_prompts):
        length = rng.randrange(2, rng.choice([3, 20, 200]))
        prompts.append(Prompt(row, length, rng.choice([0, rng.randrange(900)]), num_decodes + number))
        row += length
    return Case(tables, starts, batch_indices, siblings, prompts, random_sizes(rng, block_size, row))


def check_items(case: Case, work: Work) -> None:
    """Check that every row reads each key up to its own once, through its own blocks, in the parts of `first_parts`."""
    rows = list(case.rows())
    read = np.zeros((len(rows), max(position for position, _ in rows) + 1), np.int8)
    parts: dict[int, list[int]] = defaultdict(list)
    for row, num_rows, batch_index, low, high, part in [*work.narrow.tolist(), *work.wide.tolist()]:
        assert 1 <= num_rows <= case.sizes.rows_per_item
        assert 0 <= low < high <= max(position for position, _ in rows[row : row + num_rows]) + 1
        for index in range(row, row + num_rows):
            position, own = rows[index]
            read[index, low:high] += 1
            parts[index].append(part)
            if batch_index != own:
                assert index < len(case.starts)
                blocks = slice(low // case.sizes.block_size, -(-high // case.sizes.block_size))
                assert high <= position
                assert (case.tables[batch_index, blocks] == case.tables[own, blocks]).all()
    counts = np.diff(work.first_parts)
    assert len(counts) == len(rows)
    assert work.first_parts[0] == 0
    assert work.first_parts[-1] <= case.sizes.max_parts
    for index, (position, _) in enumerate(rows):
        assert (read[index, : position + 1] == 1).all(), index
        assert sorted(parts[index]) == list(range(len(parts[index])))
        assert counts[index] == (len(parts[index]) if len(parts[index]) > 1 else 0)


def room(sizes: Sizes, num_rows: int, is_wide: bool) -> Layout:
    runner: Any = SimpleNamespace(_sizes=sizes)
    return CudaRunner._room(runner, num_rows, is_wide)


def check_room(case: Case, work: Work) -> None:
    assert not case.prompts
    layout = Layout(case.num_rows, len(work.narrow), len(work.wide))
    assert room(case.sizes, case.num_rows, layout.num_wide > 0).holds(layout)


@pytest.mark.parametrize("num_prompts", [0, 1, 3])
def test_every_key_is_read_once(num_prompts: int) -> None:
    rng = Random(num_prompts)
    num_wide = num_split = num_shared = 0
    for _ in range(NUM_CASES // 3):
        case = random_case(rng, num_decodes=rng.randrange(0 if num_prompts else 1, 25), num_prompts=num_prompts)
        work = case.plan()
        check_items(case, work)
        if not num_prompts:
            check_room(case, work)
        for items in (work.narrow, work.wide):
            assert (np.diff(items[:, 4] - items[:, 3]) <= 0).all()  # longest first
            for row in np.unique(items[:, 0]):  # whole tiles of keys except for the last piece
                pieces = items[items[:, 0] == row]
                lengths = (pieces[:, 4] - pieces[:, 3])[pieces[:, 4] < pieces[:, 4].max()]
                assert not (lengths % MIN_CHUNK).any()
        assert (work.narrow[:, 1] == 1).all()
        num_wide += len(work.wide)
        num_split += int(work.first_parts[-1]) > 0
        num_shared += bool(case.siblings)
    assert min(num_wide, num_split, num_shared) > 50  # not all cases are easy


def test_decodes_are_planned_the_same_with_and_without_prompts() -> None:
    """With a prompt in the step, decodes take another path through the planner: their items must be the same."""
    rng = Random(7)
    num_split = 0
    for _ in range(NUM_CASES // 3):
        case = random_case(rng, num_decodes=rng.randrange(1, 40), num_prompts=0)
        case.siblings = []
        case.sizes = case.sizes._replace(max_parts=4096)
        work, num_rows = case.plan(), case.num_rows
        beside = plan_work(case.starts, case.batch_indices, (), [Prompt(num_rows, 2, 0, 99)], num_rows + 2, case.sizes)
        assert np.array_equal(work.narrow, beside.narrow)
        assert np.array_equal(work.first_parts, beside.first_parts[: num_rows + 1])
        assert work.wide is NO_ITEMS
        assert beside.wide.tolist() == [[num_rows, 2, 99, 0, 2, 0]]
        num_split += int(work.first_parts[-1]) > 0
    assert num_split > 50


def extreme_case(rng: Random) -> Case:
    """Make a case as large as a runner would get: many sequences, long contexts, some of them siblings."""
    max_num_seqs = rng.choice([1, 2, 4, 5, 64, 256, 1024])
    num_kv_heads, num_groups = rng.choice([1, 2, 3, 4, 8, 16, 32]), rng.choice([1, 2, 3, 4, 8, 16, 32])
    num_cores = rng.choice([8, 20, 78, 132, 148])
    sizes = Sizes(
        num_kv_heads, 32, max(128 // num_groups, 1), 4 * num_cores, 2 * num_cores, max(MIN_PARTS, 4 * max_num_seqs)
    )
    num_rows = rng.choice([1, max_num_seqs, rng.randrange(1, max_num_seqs + 1)])
    longest = rng.choice([1, 127, 128, 129, 4096, 131_072, 1_000_000])
    starts = np.array([rng.choice([0, longest - 1, rng.randrange(longest)]) for _ in range(num_rows)], np.int32)
    siblings, row = [], 0
    while rng.random() < 0.9 and row < num_rows:
        last = row + rng.choice([4, 5, 7, 17, 129, rng.randrange(4, 300)])
        if last > num_rows:
            break
        if rng.random() < 0.7:
            starts[row:last] = longest - 1
        shared = int(starts[row:last].min()) // 32 * 32
        if shared >= MIN_SHARED:
            siblings.append(Siblings(row, last, shared))
        row = last + rng.choice([0, 0, 1, 9])
    return Case(NO_ITEMS, starts, np.arange(num_rows, dtype=np.int32), siblings, [], sizes)


def test_a_graph_has_room_for_any_decodes() -> None:
    """Graphs have a fixed size, which is safe because there are never more items than `_room` returns."""
    rng = Random(1)
    num_full = num_wide = 0
    for number in range(NUM_ROOMS):
        case = extreme_case(rng)
        work = case.plan()
        check_room(case, work)
        assert work.first_parts[-1] <= case.sizes.max_parts
        larger = case.num_rows + rng.randrange(100)  # graph sizes differ from the batch
        assert room(case.sizes, larger, True).holds(Layout(case.num_rows, len(work.narrow), len(work.wide)))
        counts = np.bincount(work.narrow[:, 0], minlength=case.num_rows)
        for row, num_rows in work.wide[:, :2].tolist():
            counts[row : row + num_rows] += 1
        assert np.array_equal(np.diff(work.first_parts), np.where(counts > 1, counts, 0)), number
        num_wide += len(work.wide) > 0
        num_full += len(work.narrow) >= room(case.sizes, case.num_rows, False).num_narrow - 2
    assert num_wide > 300
    assert num_full > 300  # the bound is tight, not generous


@pytest.mark.parametrize("has_prompt", [False, True])
def test_few_parts_make_longer_pieces(has_prompt: bool) -> None:
    starts, batch_indices = np.full(20, 99_999, np.int32), np.arange(20, dtype=np.int32)
    sizes = Sizes(1, 32, 128, 4096, 2048, 4096)
    prompts = [Prompt(20, 300, 50_000, 20)] if has_prompt else []
    num_rows = 320 if has_prompt else 20
    parts = [
        int(plan_work(starts, batch_indices, [], prompts, num_rows, sizes._replace(max_parts=most)).first_parts[-1])
        for most in (100_000, 2000, 700, 40)
    ]
    assert parts == sorted(parts, reverse=True)
    assert 40 >= parts[3] < parts[2] <= 700 < parts[1] <= 2000 < parts[0]


def test_the_card_is_shared_evenly() -> None:
    """A single long context is divided among all programs, but never into pieces below the minimum."""
    sizes = Sizes(8, 32, 64, 528, 264, 4096)
    work = plan_work(np.array([99_999], np.int32), np.array([3], np.int32), [], [], 1, sizes)
    assert 50 <= len(work.narrow) <= 66
    lengths = work.narrow[:, 4] - work.narrow[:, 3]
    assert lengths.max() - lengths[:-1].min() <= MIN_CHUNK
    assert (work.narrow[:, 2] == 3).all()
    short = plan_work(np.array([MIN_CHUNK - 1], np.int32), np.array([0], np.int32), [], [], 1, sizes)
    assert short.narrow.tolist() == [[0, 1, 0, 0, MIN_CHUNK, 0]]
    many = plan_work(np.full(600, 999, np.int32), np.arange(600, dtype=np.int32), [], [], 600, sizes)
    assert len(many.narrow) == 600
    assert not many.first_parts.any()


# Siblings


def test_siblings_share_full_blocks() -> None:
    rng = Random(5)
    num_found = num_refused = 0
    for _ in range(NUM_CASES // 2):
        block_size = rng.choice([1, 8, 32, 128])
        lengths = [rng.randrange(1, 600) if rng.random() < 0.2 else rng.randrange(300, 600) for _ in range(24)]
        tables = random_tables(rng, lengths, block_size)
        batch_indices = np.array(rng.sample(range(24), rng.randrange(2, 25)), np.int32)
        starts = np.array([lengths[batch_index] - 1 for batch_index in batch_indices.tolist()], np.int32)
        groups: dict[int, list[int]] = defaultdict(list)  # batch indices by their first block
        for batch_index in batch_indices.tolist():
            groups[int(tables[batch_index, 0])].append(batch_index)
        order = order_decodes(tables[batch_indices, 0])
        assert (order is None) == (len(groups) == len(batch_indices))
        if order is None:
            continue
        batch_indices, starts = batch_indices[order], starts[order]
        expected = {}
        for members in groups.values():
            width = min(lengths[batch_index] - 1 for batch_index in members) // block_size
            shared = 0
            while shared < width and len({int(tables[batch_index, shared]) for batch_index in members}) == 1:
                shared += 1
            if len(members) >= MIN_SIBLINGS and shared * block_size >= MIN_SHARED:
                expected[tuple(members)] = shared * block_size
            num_refused += len(members) > 1 and tuple(members) not in expected
        found = {
            tuple(batch_indices[group.first : group.last].tolist()): group.shared
            for group in find_siblings(tables, batch_indices, starts, block_size)
        }
        assert found == expected
        num_found += len(found)
    assert min(num_found, num_refused) > 200


def test_a_shared_prefix_is_read_once() -> None:
    """Five decodes with 256 shared keys: one wide item for those, and one item each for the tails."""
    tables = np.array([[1, 2, 10 + batch_index, 20 + batch_index] for batch_index in range(5)], np.int32)
    batch_indices = np.arange(5, dtype=np.int32)
    starts = np.array([256, 300, 383, 384, 400], np.int32)
    siblings = find_siblings(tables, batch_indices, starts, 128)
    assert siblings == [Siblings(0, 5, 256)]
    work = plan_work(starts, batch_indices, siblings, [], 5, Sizes(2, 128, 64, 4, 2, 4096))
    assert work.wide.tolist() == [[0, 5, 0, 0, 256, 0]]
    assert sorted(work.narrow.tolist()) == [[row, 1, row, 256, int(starts[row]) + 1, 1] for row in range(5)]
    assert work.first_parts.tolist() == [0, 2, 4, 6, 8, 10]
    assert find_siblings(tables, batch_indices[:3], starts[:3], 128) == []  # too few
