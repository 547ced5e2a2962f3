"""The work items of attention: every key is read once, and there are no more items than a CUDA graph holds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.backends.torch import attention_work
from quire.backends.torch.attention_work import (
    MIN_SIBLINGS,
    NO_ITEMS,
    PART_KEYS,
    PIECE,
    PIECES,
    SPARE,
    Ints,
    Prompt,
    Siblings,
    Sizes,
    Work,
    _choose,
    _floor,
    _starts,
    find_siblings,
    max_wide_tiles,
    plan_work,
)
from quire.backends.torch.cuda import MIN_PARTS, CudaRunner
from quire.backends.torch.graphs import Kind
from quire.backends.torch.inputs import Division, Layout

NUM_CASES = 750
NUM_ROOMS = 2000


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_work, "PIECE", 64)


@dataclass
class Case:
    """Decodes in the order of their rows, then prompts."""

    tables: Ints  # [batch_indices, blocks]: 0 if empty
    starts: Ints
    batch_indices: Ints
    siblings: Sequence[Siblings]
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
        max_parts=rng.choice([4 * num_rows, 5 * num_rows, 4096]),
    )


def random_tables(rng: Random, lengths: list[int], block_size: int) -> Ints:
    """Make one table per length, as a random tree: each begins with none, some or all of the blocks of another."""
    tables = np.zeros((len(lengths), -(-max(lengths) // block_size)), np.int32)
    numbers = itertools.count(1)
    leader, turnover = 0, rng.choice([0.05, 0.3, 0.6])
    for batch_index, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        tables[batch_index, :num_blocks] = [next(numbers) for _ in range(num_blocks)]
        if batch_index and rng.random() < 0.95:
            if rng.random() < turnover:
                leader = rng.randrange(batch_index)
            shared = rng.choice([num_blocks, num_blocks, rng.randrange(num_blocks + 1)])
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
    prompts, row = [], num_decodes
    for number in range(num_prompts):
        length = rng.randrange(2, rng.choice([3, 20, 200]))
        prompts.append(Prompt(row, length, rng.choice([0, rng.randrange(900)]), num_decodes + number))
        row += length
    case = Case(tables, starts, batch_indices, (), prompts, random_sizes(rng, block_size, row))
    if (grouping := find_siblings(tables, batch_indices, starts, case.sizes)) is not None:
        assert sorted(grouping.order.tolist()) == list(range(num_decodes))
        case.starts, case.batch_indices = starts[grouping.order], batch_indices[grouping.order]
        case.siblings = grouping.siblings
        shared = np.zeros(num_decodes, np.int32)
        for group in grouping.siblings:
            assert (shared[group.first : group.last] == group.low).all()  # nested groups continue at the same key
            shared[group.first : group.last] = group.high
        assert np.array_equal(shared, grouping.shared[grouping.order])
    return case


def check_items(case: Case, work: Work, window: int = 0) -> None:
    """Check that every row reads each key up to its own once, in the order of its parts, from the right blocks."""
    rows = list(case.rows())
    starts = set(_starts(attention_work.PIECE).tolist())
    parts: list[dict[tuple[bool, int], tuple[int, int]]] = [{} for _ in rows]
    for is_narrow, items in ((False, work.wide), (True, work.narrow)):
        for row, num_rows, batch_index, low, high, part, num_shared, shared in items.tolist():
            first = is_narrow and part == 0  # goes on from what the row shares
            bounds = work.first_parts[2 * row : 2 * row + 2].tolist()
            assert [shared, shared + num_shared] == (bounds if first else [0, 0])
            assert 1 <= num_rows <= (1 if is_narrow else case.sizes.rows_per_item)
            assert low in starts
            assert low < high <= rows[row + num_rows - 1][0] + 1
            for index in range(row, row + num_rows):
                position, own = rows[index]
                assert (is_narrow, part) not in parts[index]
                parts[index][is_narrow, part] = low, high
                if batch_index != own:
                    assert index < len(case.starts)
                    blocks = slice(low // case.sizes.block_size, -(-high // case.sizes.block_size))
                    assert high <= position
                    assert (case.tables[batch_index, blocks] == case.tables[own, blocks]).all()
    counts = np.diff(work.first_parts).reshape(-1, 2).tolist()
    assert len(counts) == len(rows)
    assert work.first_parts[0] == 0
    assert work.first_parts[-1] <= case.sizes.max_parts
    split = [index for index, (_, num_own) in enumerate(counts) if num_own]
    assert work.num_merged == (split[-1] + 1 if split else 0)
    for index, (position, _) in enumerate(rows):
        is_decode = index < len(case.starts)
        ranges = [parts[index][key] for key in sorted(parts[index])]
        assert sorted(parts[index]) == [
            *((False, part) for part in range(counts[index][0] if is_decode else max(counts[index][1], 1))),
            *((True, part) for part in range(max(counts[index][1], 1) if is_decode else 0)),
        ]
        assert counts[index][1] != 1
        check_left_fold(parts[index], ranges, position, window)


def check_left_fold(
    parts: dict[tuple[bool, int], tuple[int, int]], ranges: list[tuple[int, int]], position: int, window: int
) -> None:
    """Check that the parts of a row follow each other, and that all are single pieces but those that begin a sum.

    These are the first one, and the first narrow item: it goes on from the sum of the parts before it.
    """
    assert ranges[0][0] <= max(position + 1 - window, 0) if window else ranges[0][0] == 0
    assert [high for _, high in ranges[:-1]] == [low for low, _ in ranges[1:]]
    assert ranges[-1][1] > position
    for key, (low, high) in parts.items():
        if (low, high) != ranges[0] and key != (True, 0):
            assert _floor(high - 1) == low


def room(sizes: Sizes, num_rows: int, is_wide: bool) -> Layout:
    runner: Any = SimpleNamespace(_division=Division(sizes))
    return CudaRunner._room(runner, Kind(num_rows, is_wide, True))


def check_room(case: Case, work: Work) -> None:
    assert not case.prompts
    layout = Layout(case.num_rows, len(work.narrow), len(work.wide))
    assert room(case.sizes, case.num_rows, layout.num_wide > 0).holds(layout)
    assert num_tiles(case.siblings, case.sizes) <= max_wide_tiles(case.num_rows, case.sizes)
    if layout.num_wide:
        more = case.sizes.wide_target // case.sizes.num_kv_heads + 1 + SPARE
        assert layout.num_wide <= max_wide_tiles(case.num_rows, case.sizes) + more


def num_tiles(siblings: Sequence[Siblings], sizes: Sizes) -> int:
    return sum(-(-(group.last - group.first) // sizes.rows_per_item) for group in siblings)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("num_prompts", [0, 1, 3])
def test_every_key_is_read_once(num_prompts: int) -> None:
    rng = Random(num_prompts)
    num_wide = num_split = num_shared = num_nested = 0
    for _ in range(NUM_CASES // 3):
        case = random_case(rng, num_decodes=rng.randrange(0 if num_prompts else 1, 33), num_prompts=num_prompts)
        work = case.plan()
        check_items(case, work)
        if not num_prompts:
            check_room(case, work)
        for items in (work.narrow, work.wide):
            assert (np.diff(items[:, 4] - items[:, 3]) <= 0).all()  # longest first
        assert (work.narrow[:, 1] == 1).all()
        num_wide += len(work.wide)
        num_split += int(work.first_parts[-1]) > 0
        num_shared += bool(case.siblings)
        num_nested += any(group.low for group in case.siblings)
    assert min(num_wide, num_split, num_shared, num_nested) > 25  # not all cases are easy


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("num_prompts", [0, 1, 3])
def test_with_a_window_only_its_blocks_are_read(num_prompts: int) -> None:
    rng = Random(num_prompts)
    num_split = num_behind = 0
    for _ in range(NUM_CASES // 3):
        case = random_case(rng, num_decodes=rng.randrange(0 if num_prompts else 1, 20), num_prompts=num_prompts)
        case.siblings = ()
        window = rng.choice([1, 30, 128, 500, 10_000])
        work = plan_work(case.starts, case.batch_indices, (), case.prompts, case.num_rows, case.sizes, window)
        check_items(case, work, window)
        rows = list(case.rows())
        for row, _, _, low, *_ in [*work.narrow.tolist(), *work.wide.tolist()]:
            first = _floor(max(rows[row][0] + 1 - window, 0))
            assert first <= low
            num_behind += first > 0
        num_split += int(work.first_parts[-1]) > 0
        if not case.prompts:
            assert room(case.sizes, case.num_rows, False).holds(Layout(case.num_rows, len(work.narrow), 0))
    assert min(num_split, num_behind) > 10


@pytest.mark.usefixtures("short_pieces")
def test_decodes_are_planned_the_same_with_and_without_prompts() -> None:
    """With a prompt in the step, decodes take another path through the planner: their items must be the same."""
    rng = Random(7)
    num_split = 0
    for _ in range(NUM_CASES // 3):
        case = random_case(rng, num_decodes=rng.choice([1, rng.randrange(1, 40)]), num_prompts=0)
        sizes = case.sizes._replace(max_parts=4096)
        window, num_rows = rng.choice([0, 0, 1, 30, 500]), case.num_rows
        work = plan_work(case.starts, case.batch_indices, (), (), num_rows, sizes, window)
        prompts = [Prompt(num_rows, 2, 0, 99)]
        beside = plan_work(case.starts, case.batch_indices, (), prompts, num_rows + 2, sizes, window)
        assert np.array_equal(work.narrow, beside.narrow)
        assert np.array_equal(work.first_parts, beside.first_parts[: 2 * num_rows + 1])
        assert not len(work.wide)
        assert beside.wide[:, :6].tolist() == [[num_rows, 2, 99, 0, 2, 0]]
        num_split += int(work.first_parts[-1]) > 0
    assert num_split > 25


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
    common = np.zeros(num_rows - 1, np.int64)  # keys that each row shares with the next: any numbers are possible
    for _ in range(rng.choice([0, 3, 20, 100, num_rows])):
        row, count = rng.randrange(num_rows), rng.choice([4, 5, 7, 17, 129, rng.randrange(4, 1000)])
        common[row : row + count - 1] += _floor(rng.choice([256, 512, 4096, rng.randrange(1 + longest // 8)]))
    common = _floor(np.minimum(common, longest))
    starts = np.maximum(starts, np.maximum(np.append(common, 0), np.append(0, common))).astype(np.int32)
    siblings = _choose(common.tolist(), max_wide_tiles(num_rows, sizes), sizes) if num_rows > 1 else ()
    return Case(NO_ITEMS, starts, np.arange(num_rows, dtype=np.int32), siblings, [], sizes)


def test_a_graph_has_room_for_any_decodes() -> None:
    """Graphs have a fixed size, which is safe because there are never more items than `_room` returns."""
    rng = Random(1)
    num_full = num_wide = num_nested = num_tight = 0
    for number in range(NUM_ROOMS):
        case = extreme_case(rng)
        work = case.plan()
        check_room(case, work)
        assert work.first_parts[-1] <= case.sizes.max_parts
        larger = case.num_rows + rng.randrange(100)  # graph sizes differ from the batch
        assert room(case.sizes, larger, True).holds(Layout(case.num_rows, len(work.narrow), len(work.wide)))
        counts = np.bincount(2 * work.narrow[:, 0] + 1, minlength=2 * case.num_rows)
        counts[1::2] *= counts[1::2] > 1
        for row, num_rows in work.wide[:, :2].tolist():
            counts[2 * row : 2 * (row + num_rows) : 2] += 1
        assert np.array_equal(np.diff(work.first_parts), counts), number
        num_wide += len(work.wide) > 0
        num_nested += any(group.low for group in case.siblings)
        num_tight += num_tiles(case.siblings, case.sizes) >= max_wide_tiles(case.num_rows, case.sizes) - 1 > 3
        num_full += len(work.narrow) > room(case.sizes, case.num_rows, False).num_narrow - SPARE / 2
    assert min(num_wide, num_nested) > 100
    assert num_tight > 2
    assert num_full > 30  # there is room for more, but not for much more


def test_the_card_is_shared_evenly() -> None:
    """A single long context is divided among all programs, but never into pieces below the minimum."""
    sizes = Sizes(8, 32, 64, 528, 264, 4096)
    work = plan_work(np.array([99_999], np.int32), np.array([3], np.int32), [], [], 1, sizes)
    assert 66 <= len(work.narrow) <= 170  # nearly one for each piece
    lengths = work.narrow[:, 4] - work.narrow[:, 3]
    assert lengths.max() <= 2 * 100_000 / 66
    assert (work.narrow[:, 2] == 3).all()
    short = plan_work(np.array([PIECE - 1], np.int32), np.array([0], np.int32), [], [], 1, sizes)
    assert short.narrow.tolist() == [[0, 1, 0, 0, PIECE, 0, 0, 0]]
    many = plan_work(np.full(600, 999, np.int32), np.arange(600, dtype=np.int32), [], [], 600, sizes)
    assert len(many.narrow) == 600
    assert not many.first_parts.any()


def test_pieces_grow_with_the_keys_before_them() -> None:
    starts = _starts(PIECE)
    assert starts[:3].tolist() == [0, PIECE, 2 * PIECE]
    lengths = np.diff(starts)
    assert (lengths[:PIECES] == PIECE).all()
    assert (starts[PIECES:-1] // lengths[PIECES:] >= PIECES // 2).all()
    assert (starts[PIECES:-1] // lengths[PIECES:] < PIECES).all()
    assert _floor(PIECE * PIECES + 2 * PIECE - 1) == PIECE * PIECES


# Siblings


Prefix = tuple[tuple[int, ...], ...]


def expected_siblings(blocks: list[tuple[int, ...]], sizes: Sizes) -> list[tuple[frozenset[int], int, int]]:
    """Return rows, low and high of every group, found by its definition. Takes the full blocks of every row."""
    found = []
    starts = _starts(attention_work.PIECE).tolist()

    def pieces(row: tuple[int, ...]) -> Prefix:
        keys = [block for block in row for _ in range(sizes.block_size)]
        return tuple(tuple(keys[a:b]) for a, b in itertools.pairwise(starts[:99]) if b <= len(keys))

    prefixes = [pieces(row) for row in blocks]
    parts_left = min(sizes.max_parts // 4, SPARE * 3 // 2)
    tiles_left = max_wide_tiles(len(prefixes), sizes)

    def tiles(rows: list[int]) -> int:
        return -(-len(rows) // sizes.rows_per_item)

    def visit(rows: list[int], low: int) -> None:
        nonlocal tiles_left, parts_left
        depth = 0
        while all(len(prefixes[row]) > depth for row in rows) and len({prefixes[row][depth] for row in rows}) == 1:
            depth += 1
        by_block: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row in rows:
            if len(prefixes[row]) > depth:
                by_block[prefixes[row][depth]].append(row)
        inside = [some for some in by_block.values() if len(some) >= MIN_SIBLINGS]
        high = starts[depth]
        num_readers = len(rows) - sum(len(some) - tiles(some) for some in inside)
        cost = depth - starts.index(low) if low else 1
        pays = (num_readers - tiles(rows)) * (high - low) >= PART_KEYS * len(rows) * cost
        cost *= low > 0
        has_room = tiles(rows) <= tiles_left and cost * len(rows) <= parts_left
        if pays and high > low and has_room:
            found.append((frozenset(rows), low, high))
            tiles_left -= tiles(rows)
            parts_left -= cost * len(rows)
            low = high
        for some in inside:
            visit(some, low)

    in_order = sorted(range(len(blocks)), key=lambda row: np.array(blocks[row], np.int32).tobytes())
    if len(prefixes) >= MIN_SIBLINGS:
        visit(in_order, 0)
    return found


@pytest.mark.usefixtures("short_pieces")
def test_groups_are_those_that_pay() -> None:
    """Compared with groups found by their definition, one block at a time, in random trees of tables."""
    rng = Random(5)
    num_found = num_nested = num_none = 0
    for _ in range(NUM_CASES // 2):
        block_size = rng.choice([1, 8, 32, 128])
        lengths = [rng.randrange(1, 900) if rng.random() < 0.2 else rng.randrange(600, 900) for _ in range(40)]
        tables = random_tables(rng, lengths, block_size)
        batch_indices = np.array(rng.sample(range(40), rng.randrange(2, 41)), np.int32)
        starts = np.array([lengths[batch_index] - 1 for batch_index in batch_indices.tolist()], np.int32)
        sizes = Sizes(2, block_size, rng.choice([1, 2, 4, 16, 64]), 40, 20, 4096)
        prefixes = [
            tuple(tables[batch_index, : start // block_size].tolist())
            for batch_index, start in zip(batch_indices.tolist(), starts.tolist(), strict=True)
        ]
        expected = expected_siblings(prefixes, sizes)
        grouping = find_siblings(tables, batch_indices, starts, sizes)
        num_none += grouping is None
        if grouping is None:
            assert not expected
            continue
        found = [
            (frozenset(grouping.order[group.first : group.last].tolist()), group.low, group.high)
            for group in grouping.siblings
        ]
        assert found == expected
        num_found += len(found)
        num_nested += any(low for _, low, _ in found)
    assert min(num_found, num_nested, num_none) > 50
