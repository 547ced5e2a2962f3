"""The inputs sent to the device: changes of block tables, steps with padding, and the graphs that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.torch import attention_work, inputs
from quire.backends.torch.attention_work import ITEM_FIELDS, Grouping, Sizes, find_siblings
from quire.backends.torch.graphs import (
    FEW_DECODES,
    MAX_MISSES,
    SAMPLED,
    WHOLE_SIZE,
    Kind,
    StepGraphs,
)
from quire.backends.torch.inputs import (
    BlockTables,
    Division,
    Layout,
    Staging,
    Step,
    StepInputs,
    arrange,
)
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams

CPU = torch.device("cpu")
LAYOUTS = [
    Layout(1, 1, 0),
    Layout(16, 17, 3),
    Layout(33, 0, 5),
    Layout(5, 7, 1),
    Layout(5, 7, 1, 6, 3, 0, num_kept=5),
    Layout(5, 7, 1, 6, 3, 2, 2, 3, 1, 5),
    Layout(5, 7, 1, num_decodes=5, num_kept=5),
]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_work, "PIECE", 64)


SIZES = Sizes(num_kv_heads=2, block_size=4, rows_per_item=8, target=40, wide_target=20, max_parts=4096)


def piece(
    batch_index: int, table: Sequence[int], start: int, length: int = 1, tokens: Sequence[int] | None = None
) -> SeqSlice:
    tokens = range(100 * batch_index, 100 * batch_index + length) if tokens is None else tokens
    return SeqSlice(batch_index, 0, batch_index, tokens, start, length, table, (), True, SamplingParams(), 1)


# Block tables


class Device:
    """Applies updates as the device does."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.flat = np.zeros(tables.host.size, np.int32)

    def update(self, *slices: SeqSlice) -> list[int]:
        """Return the blocks that were sent."""
        places, blocks = self.tables.update(slices)
        assert len(places) == len(blocks) == len(set(places))
        self.flat[places] = blocks
        assert np.array_equal(self.flat.reshape(self.tables.host.shape), self.tables.host)
        return blocks


def test_tables_follow_random_requests() -> None:
    rng = Random(2)
    device = Device(BlockTables(5, 20, 4, CPU))
    running: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for _ in range(2000):
        batch_index = rng.randrange(5)
        if batch_index not in running or rng.random() < 0.05:
            running[batch_index], lengths[batch_index] = [], 0
        count = min(rng.choice([1, 1, 1, 7]), 80 - lengths[batch_index])
        if count == 0:
            del running[batch_index]
            continue
        lengths[batch_index] += count
        table = running[batch_index]
        while len(table) * 4 < lengths[batch_index] + rng.randrange(6) and len(table) < 20:
            table.append(rng.randrange(1, 10**6))
        if rng.random() < 0.02:
            device.tables.forget()
        device.update(piece(batch_index, table, lengths[batch_index] - count, count))
        num_blocks = -(-lengths[batch_index] // 4)
        assert device.tables.host[batch_index, :num_blocks].tolist() == table[:num_blocks]


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_are_contiguous_and_aligned(layout: Layout) -> None:
    """Kernels are compiled for addresses that are multiples of 16 bytes, and again for others."""
    flat = np.zeros(layout.size, np.int32)
    carved = layout.carve(flat)
    end = 0
    for number, array in enumerate(carved, 1):
        if not array.size:
            continue
        offset = (array.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // 4
        assert offset % 16 == 0
        assert offset >= end
        end = offset + array.size
        array[...] = number
    assert end <= layout.size
    for number, array in enumerate(carved, 1):
        assert (array == number).all()
    rows = layout.num_rows
    assert list(map(len, carved)) == [rows, rows, rows, 2 * rows + 1, *layout[1:]]
    assert {array.shape[1:] for array in (carved.narrow, carved.wide, carved.window_wide)} == {(ITEM_FIELDS,)}
    tensor = torch.from_numpy(flat)
    for array, piece_ in zip(carved, layout.carve(tensor), strict=True):
        assert np.array_equal(array, piece_.numpy())
        assert not piece_.numel() or piece_.data_ptr() == array.__array_interface__["data"][0]


def test_a_layout_holds_layouts_that_are_smaller_in_every_size() -> None:
    layout = Layout(4, 10, 2)
    assert layout.holds(layout)
    assert layout.holds(Layout(1, 10, 0))
    for larger in (Layout(5, 1, 0), Layout(1, 11, 0), Layout(1, 1, 3)):
        assert not layout.holds(larger)
    layout = Layout(*range(4, 14))
    assert layout.holds(layout)
    for number in range(10):
        sizes = list(layout)
        sizes[number] += 1
        assert not layout.holds(Layout(*sizes))


# Steps


def arranged(*slices: SeqSlice) -> Step:
    tables = BlockTables(16, 100, SIZES.block_size, CPU)
    tables.update(slices)
    return arrange(slices, tables, Division(SIZES))


def written(step: Step, layout: Layout) -> StepInputs:
    inputs = layout.carve(np.full(layout.size, 77, np.int32))  # left from the previous step
    step.write(inputs)
    return inputs


def test_rows_are_decodes_first_then_prompts() -> None:
    step = arranged(
        piece(3, [1, 2, 3], 4, 3),
        piece(5, [4, 5, 6], 9),
        piece(1, [7], 0, 2),
        piece(2, [8, 9], 5, tokens=()),
    )
    assert step.order == (1, 3, 0, 2)
    assert [one.batch_index for one in step.slices] == [5, 2, 3, 1]
    assert step.last_rows.tolist() == [0, 1, 4, 6]
    assert not step.is_decode
    inputs = written(step, step.layout)
    assert inputs.tokens.tolist() == [500, -1, 300, 301, 302, 100, 101]  # -1: the row's own last sample
    assert inputs.positions.tolist() == [9, 5, 4, 5, 6, 0, 1]
    assert inputs.batch_indices.tolist() == [5, 2, 3, 3, 3, 1, 1]
    assert inputs.narrow[:, :6].tolist() == [[0, 1, 5, 0, 10, 0], [1, 1, 2, 0, 6, 0]]
    assert sorted(inputs.wide[:, :6].tolist()) == [[2, 3, 3, 0, 7, 0], [5, 2, 1, 0, 2, 0]]
    assert not inputs.first_parts.any()


WINDOW = Division(SIZES, 8, SIZES._replace(rows_per_item=4), has_states=True)


def test_windows_states_and_shared_keys() -> None:
    """Items of window layers begin with the first piece within the window of 8 tokens, also those of siblings."""
    head = list(range(1, 41))
    decodes = [piece(row, [*head, 90 + row, 70], 161)._replace(state_source=row, state_target=9) for row in range(4)]
    prompt = piece(5, list(range(1, 60)), 20, 10)._replace(kv_start=23, state_source=7, state_target=8)
    tables = BlockTables(16, 100, SIZES.block_size, CPU, 8)
    slices = [one._replace(window_table=[3] * 60) for one in (*decodes, prompt)]
    tables.update(slices)
    step = arrange(slices, tables, WINDOW)
    assert any(item[2] == 0 and item[1] == 4 for item in step.work.wide.tolist())  # all siblings read one table
    narrow = [[row, 1, row, 128, 162, 0] for row in range(4)]  # the first key within the window is 154
    assert sorted(step.window_work.narrow[:, :6].tolist()) == narrow
    wide = [[4, 4, 5, 0, 24, 0], [8, 4, 5, 0, 28, 0], [12, 2, 5, 0, 30, 0]]
    assert sorted(step.window_work.wide[:, :6].tolist()) == wide
    inputs = written(step, Layout(20, 60, 9, 41, 7, 5, 6, 4, 2, 20))
    assert inputs.window_narrow[:, 1].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert inputs.window_wide[:, 1].tolist() == [2, 4, 4, 0, 0]
    assert inputs.batch_indices.tolist() == [0, 1, 2, 3, *[5] * 10, *[-1] * 6]
    assert inputs.kept.tolist() == [0, 1, 2, 3, *[-1] * 3, *[5] * 7, *[-1] * 6]
    assert inputs.decodes.tolist() == [[0, 9], [1, 9], [2, 9], [3, 9], [0, 0], [0, 0]]
    assert inputs.chunks[0, :5].tolist() == [4, 10, 0, 7, 8]
    assert not inputs.chunks[1:].any()
    assert inputs.sequences.tolist() == [[0, 1], [0, 0]]


def test_padding_rows_have_no_sequence_and_no_effect() -> None:
    long = list(range(1, 60))
    step = arranged(piece(4, long, 200), piece(0, [70], 2))
    assert step.is_decode
    assert step.work.first_parts.tolist() == [0, 0, 4, 4, 4]  # the first is split
    inputs = written(step, Layout(6, 9, 4))
    assert inputs.tokens.tolist() == [400, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [200, 2, 0, 0, 0, 0]
    assert inputs.batch_indices.tolist() == [4, 0, -1, -1, -1, -1]
    assert inputs.first_parts.tolist() == [0, 0, *[4] * 11]  # no parts to merge
    assert inputs.narrow[:, 1].tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert inputs.wide[:, 1].tolist() == [0, 0, 0, 0]
    assert np.array_equal(inputs.narrow[:5], step.work.narrow)


def test_siblings_are_adjacent() -> None:
    head = list(range(1, 41))  # 160 keys
    family = [piece(batch_index, [*head, 100 + batch_index], 160 + batch_index % 3) for batch_index in range(0, 10, 2)]
    strangers = [piece(batch_index, [200 + batch_index, 300 + batch_index], 5) for batch_index in (1, 3)]
    step = arranged(family[0], strangers[0], family[1], strangers[1], *family[2:])
    assert [one.batch_index for one in step.slices] == [0, 2, 4, 6, 8, 1, 3]  # by first block, otherwise in order
    assert step.order == (0, 2, 4, 5, 6, 1, 3)
    assert step.is_decode
    inputs = written(step, step.layout)
    assert sorted(inputs.wide[:, :6].tolist()) == [[0, 5, 0, 0, 64, 0], [0, 5, 0, 64, 128, 1]]
    assert inputs.batch_indices.tolist() == [0, 2, 4, 6, 8, 1, 3]
    assert inputs.positions.tolist() == [160, 162, 161, 160, 162, 5, 5]
    assert inputs.tokens.tolist() == [0, 200, 400, 600, 800, 100, 300]


def test_drafts_of_a_request_share_its_context_if_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_work, "MIN_DRAFT_KEYS", 128)
    long, short = list(range(1, 51)), [60, 61, 62]
    drafted = [piece(2, long, 162 + number) for number in range(5)]
    few = [piece(3, long, 162 + number) for number in range(3)]
    others = [piece(0, short, 3 + number) for number in range(4)]
    step = arranged(*drafted, *few, *others)
    assert step.order == tuple(range(12))
    assert sorted(step.work.wide[:, :6].tolist()) == [[0, 5, 2, 0, 64, 0], [0, 5, 2, 64, 128, 1]]
    narrow = step.work.narrow.tolist()
    assert {item[3] for item in narrow if item[0] < 5} == {128}  # what follows the shared keys
    assert {item[3] for item in narrow if item[0] >= 5} == {0, 128}
    assert sorted(item[4] for item in narrow if item[0] < 5) == [163, 164, 165, 166, 167]


class CountedTables(BlockTables):
    """Counts how often siblings are searched for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(16, 100, SIZES.block_size, CPU)
        self.num_searches = 0
        monkeypatch.setattr(inputs, "find_siblings", self._find)

    def _find(self, *args: Any) -> Grouping | None:
        self.num_searches += 1
        return find_siblings(*args)

    def arrange(self, *slices: SeqSlice) -> Step:
        self.update(slices)
        return arrange(slices, self, Division(SIZES))


def wide_items(step: Step) -> list[list[int]]:
    """Return the wide items without their batch index: it may be that of any row."""
    return sorted(np.delete(step.work.wide, 2, axis=1).tolist())


def test_siblings_are_searched_for_when_the_decodes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    head = list(range(1, 41))  # 160 keys
    lists = [[*head, *range(100 * row, 100 * row + 20)] for row in range(1, 7)]

    def family(start: int, rows: Sequence[int] = range(5)) -> list[SeqSlice]:
        return [piece(row, lists[row], start + row) for row in rows]

    tables = CountedTables(monkeypatch)
    first = tables.arrange(*family(160))
    assert wide_items(first) == [[0, 5, 0, 64, 0], [0, 5, 64, 128, 1]]
    for start in range(161, 180):  # new blocks of their own change nothing
        step = tables.arrange(*family(start))
        assert wide_items(step) == wide_items(first)
        assert sorted(step.starts.tolist()) == [start + row for row in range(5)]
        assert [one.start for one in step.slices] == step.starts.tolist()
    tables.arrange(*family(180), piece(9, [700, 701], 0, 5))  # nor does the table of a prompt
    assert tables.num_searches == 1
    assert wide_items(tables.arrange(*family(182, range(4)))) == [[0, 4, 0, 64, 0], [0, 4, 64, 128, 1]]
    assert wide_items(tables.arrange(*family(183, [3, 1, 2, 0]))) == [[0, 4, 0, 64, 0], [0, 4, 64, 128, 1]]
    assert tables.num_searches == 3
    assert not wide_items(tables.arrange(*family(184, range(3))))
    assert tables.num_searches == 3  # three decodes are too few
    others = [[*range(100 * row, 100 * row + 60)] for row in range(1, 5)]
    for start in (185, 186):
        assert not wide_items(tables.arrange(*[piece(row, others[row], start) for row in range(4)]))
    assert tables.num_searches == 4  # that there are none is known too


def test_another_table_at_the_same_batch_index_is_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    head = list(range(1, 41))
    lists = [[*head, 100 + row] for row in range(4)]
    tables = CountedTables(monkeypatch)
    assert wide_items(tables.arrange(*(piece(row, lists[row], 160) for row in range(4))))
    lists[2] = [*range(200, 240), 102]  # the request was preempted, and its batch index reused
    assert not wide_items(tables.arrange(*(piece(row, lists[row], 161) for row in range(4))))
    lists[2] = [*head, 102]
    assert wide_items(tables.arrange(*(piece(row, lists[row], 162) for row in range(4))))
    tables.forget()
    assert wide_items(tables.arrange(*(piece(row, lists[row], 162) for row in range(4))))
    assert tables.num_searches == 4


def test_staging_takes_turns_and_grows() -> None:
    staging = Staging(CPU)
    out = torch.zeros(100, dtype=torch.int32)
    seen = []
    for turn in range(5):
        host = staging.begin(10 + 10 * turn)
        assert len(host) >= 10 + 10 * turn
        host[: 10 + 10 * turn] = turn
        seen.append(host)
        staging.send(10 + turn, out)
        assert out[: 10 + turn].eq(turn).all()
    assert (seen[4][:50] == 4).all()
    assert (seen[3][:40] == 3).all()  # a buffer that may still be read is not written
    assert (seen[2][:30] == 2).all()


# Graphs


class Graphs(StepGraphs):
    """Graphs over a pass that returns the tokens it saw."""

    def __init__(self, sizes: Sequence[int], mixed: Sequence[int] = ()) -> None:
        self.runs: list[tuple[int, bool]] = []
        self.has_special_kernels: list[bool] = []
        self.is_compiled = True
        self.is_short_of_memory = False
        super().__init__(sizes, mixed, self.room_of, self.compute, lambda: self.is_compiled, CPU)

    def room_of(self, kind: Kind) -> Layout:
        num_decodes = kind.size if kind.num_decodes is None else kind.num_decodes
        return Layout(kind.size, num_decodes + 5, kind.size if kind.is_wide else 0)

    def compute(self, inputs: StepInputs, kind: Kind, is_compiled: bool) -> None:
        self.runs.append((len(inputs.tokens), kind.has_parts))
        self.has_special_kernels.append(is_compiled)
        self.seen: list[int] = inputs.tokens.tolist()
        if self.is_short_of_memory:
            raise torch.OutOfMemoryError("of 96 MiB there are 7")

    def kinds(self) -> list[Kind]:
        return list(self._graphs)


def test_graphs_are_prepared_the_largest_first_then_the_smallest() -> None:
    graphs = Graphs([1, 4, WHOLE_SIZE, 128])
    num_calls = 0
    while graphs.prepare():
        num_calls += 1
    assert graphs.kinds() == [
        Kind(128, False, False),  # contexts are rarely split there
        Kind(1, False, True),
        Kind(4, False, True),
        Kind(WHOLE_SIZE, False, True),
        Kind(WHOLE_SIZE, False, False),
        Kind(128, False, True),
    ]
    assert num_calls == 6
    assert graphs.find(Layout(1, 1, 0), has_parts=True) is not None


def test_a_step_uses_the_smallest_graph_that_holds_it() -> None:
    graphs = Graphs([1, 4, 100])
    assert graphs.find(Layout(3, 3, 0), has_parts=True) is None  # not captured yet
    while graphs.prepare():
        pass

    def found(num_rows: int, num_narrow: int, num_wide: int = 0, *, has_parts: bool = True) -> Any:
        graph = graphs.find(Layout(num_rows, num_narrow, num_wide), has_parts=has_parts)
        if graph is None:
            return None
        graph.recording.replay()
        return graphs.runs[-1]

    assert found(1, 1) == (1, True)
    assert found(2, 2) == found(4, 9) == (4, True)
    assert found(4, 10) is None  # more items than it has room for
    assert found(5, 10) == (100, True)
    assert found(5, 10, has_parts=False) == (100, False)
    assert found(2, 2, has_parts=False) == (4, True)  # small ones always merge
    assert found(101, 101) is None
    assert found(3, 3, 1) is None  # those for siblings are captured once siblings occur


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_size_that_is_missed_often_is_captured(is_wide: bool) -> None:
    graphs = Graphs([1, 4])
    layout = Layout(3, 4, 2 if is_wide else 0)
    for _ in range(MAX_MISSES - 1):
        assert graphs.find(layout, has_parts=True) is None
    assert graphs.find(Layout(3, 10, 0), has_parts=True) is None  # a step it could not hold is not a miss
    assert graphs.find(Layout(1, 1, 0), has_parts=True) is None  # nor is another size
    assert not graphs.runs
    graph = graphs.find(layout, has_parts=True)
    assert graph is not None
    assert graphs.kinds() == [Kind(4, is_wide, True)]
    assert graphs.find(layout, has_parts=True) is graph
    graph.recording.replay()
    assert set(graphs.runs) == {(4, True)}


def test_a_graph_of_few_rows_is_captured_again_once_its_kernels_are_compiled() -> None:
    graphs = Graphs([1, 4, 400])
    graphs.is_compiled = False
    for _ in range(MAX_MISSES - 1):
        assert graphs.find(Layout(3, 4, 0), has_parts=True) is None
    graph = graphs.find(Layout(3, 4, 0), has_parts=True)
    assert graph is not None  # requests do not wait for the compiler
    assert not any(graphs.has_special_kernels)
    while graphs.prepare():
        pass
    assert graphs.kinds() == [Kind(4, False, True), Kind(400, False, False), Kind(400, False, True)]
    graphs.is_compiled = True
    while graphs.prepare():
        pass
    assert set(graphs.kinds()) == {Kind(size, False, True) for size in (1, 4, 400)} | {Kind(400, False, False)}
    assert graphs.has_special_kernels[-2:] == [True, True]
    assert graphs.find(Layout(3, 4, 0), has_parts=True) is not graph
    assert not graphs.prepare()


def test_a_failed_second_capture_keeps_the_first_graph() -> None:
    graphs = Graphs([8])
    graphs.is_compiled = False
    early = [graphs.find(Layout(3, 4, 0), has_parts=True) for _ in range(MAX_MISSES)][-1]
    assert early is not None
    graphs.is_compiled, graphs.is_short_of_memory = True, True
    later = graphs.find(Layout(3, 4, 0), has_parts=True)
    assert later is not None
    assert later.recording is early.recording
    assert not graphs.prepare()  # it is not tried again


def test_a_step_with_prompts_uses_the_smallest_mixed_graph_that_holds_it() -> None:
    graphs = Graphs([1, 100], mixed=[32, 64, 128])
    while graphs.prepare():
        pass

    def found(num_rows: int, num_decodes: int, num_wide: int) -> Kind | None:
        graph = graphs.find_mixed(Layout(num_rows, num_decodes, num_wide), num_decodes)
        return None if graph is None else graph.kind

    assert found(5, 0, 1) == Kind(32, True, True, FEW_DECODES)
    assert found(33, 32, 1) == Kind(64, True, True, FEW_DECODES)
    assert found(64, 33, 1) == Kind(64, True, True, 100)
    assert found(40, 3, 65) is None  # too many items even for twice its rows
    assert found(65, 3, 65) == Kind(128, True, True, FEW_DECODES)
    assert found(129, 3, 1) is None
    assert Graphs([4], mixed=[]).find_mixed(Layout(3, 3, 1), 1) is None


def test_a_failed_capture_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs([1, 4])
    graphs.is_short_of_memory = True
    assert graphs.prepare()
    assert "a graph of 4 rows was not captured: of 96 MiB there are 7" in caplog.text
    graphs.is_short_of_memory = False
    assert graphs.prepare()
    assert not graphs.prepare()
    for _ in range(2 * MAX_MISSES):
        assert graphs.find(Layout(3, 4, 0), has_parts=True) is None
    assert graphs.find(Layout(1, 1, 0), has_parts=True) is not None


def test_inputs_of_sampling_fit_after_the_inputs_of_every_graph() -> None:
    graphs = Graphs([1, 4, 100])
    for size in (1, 4, 100):
        for is_wide in (False, True):
            assert graphs.room_of(Kind(size, is_wide, True)).size + SAMPLED * size <= len(graphs.inputs)
