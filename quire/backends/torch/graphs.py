"""Decode steps as CUDA graphs: hundreds of launches recorded once and replayed as one.

A graph has one batch size and one place in memory for its inputs; a batch takes the smallest that holds it, the rows
beyond it being padding that writes nothing. They are captured after the server is ready, one at a time, when nothing
else is to be done (`Runner.prepare`), or when a size was missed often under load that never ends. The largest first:
all share one pool of memory, and what the largest needs, the others find there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.backends.torch.inputs import Layout, StepInputs

SAMPLED = 32  # numbers a row that go down with a step beside its inputs: more than are ever needed
WHOLE_SIZE = 96  # from here on contexts are seldom split, and a graph without the merge is worth its capture
MAX_MISSES = 16  # steps of a size without a graph before it is captured though others wait


class Recording(Protocol):
    def replay(self) -> None: ...


class Kind(NamedTuple):
    size: int
    is_wide: bool  # siblings share a head
    has_parts: bool  # a row's keys may be split: long contexts, or few of them


class DecodeGraph(NamedTuple):
    layout: Layout
    logits: Tensor  # [rows, V]: overwritten by the next replay of any graph
    recording: Recording


def graph_sizes(max_seqs: int) -> tuple[int, ...]:
    """Powers of two, then steps of 16 and 32: padding costs little, and each takes a moment to capture."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, max_seqs, 32)]
    return (*(size for size in sizes if size < max_seqs), max_seqs)


class DecodeGraphs:
    """`run` computes the logits of all rows of its inputs, and merges parts or not. `room` says how many items of a
    size there may be."""

    def __init__(
        self,
        sizes: Sequence[int],
        room: Callable[[int, bool], Layout],
        run: Callable[[StepInputs, bool], Tensor],
        device: torch.device,
    ) -> None:
        self._sizes = sizes  # ascending
        self._room = room
        self._run = run
        self._device = device
        most = max(room(sizes[-1], True).size, room(sizes[-1], False).size)
        # What sampling reads comes along behind them, and stays where it is until the next step.
        self.inputs = torch.zeros(most + SAMPLED * sizes[-1], dtype=torch.int32, device=device)
        self._graphs: dict[Kind, DecodeGraph] = {}
        self._misses: Counter[Kind] = Counter()
        self._pool: Any = None

    def find(self, layout: Layout, *, has_parts: bool) -> DecodeGraph | None:
        """The graph for a step of decodes; None: it must run without."""
        size = next((size for size in self._sizes if size >= layout.num_rows), None)
        if size is None:
            return None
        kind = Kind(size, layout.num_wide > 0, has_parts or size < WHOLE_SIZE)
        graph = self._graphs.get(kind)
        if graph is None:
            if not self._room(size, kind.is_wide).holds(layout):
                return None
            self._misses[kind] += 1
            if self._misses[kind] < MAX_MISSES:
                return None
            graph = self._capture(kind)
        return graph if graph.layout.holds(layout) else None

    def prepare(self) -> bool:
        """Capture the largest one that is missing. Those for siblings come when siblings do."""
        for size in reversed(self._sizes):
            for has_parts in (True, False) if size >= WHOLE_SIZE else (True,):
                if (kind := Kind(size, False, has_parts)) not in self._graphs:
                    self._capture(kind)
                    return True
        return False

    def _capture(self, kind: Kind) -> DecodeGraph:
        layout = self._room(kind.size, kind.is_wide)
        inputs = layout.carve(self.inputs)
        inputs.slots.fill_(-1)
        inputs.narrow.zero_()
        inputs.wide.zero_()
        inputs.first_parts.zero_()
        inputs.tokens.zero_()
        inputs.positions.zero_()
        if self._device.type == "cuda":
            recording, logits = self._record(inputs, kind.has_parts)
        else:
            recording = _Again(partial(self._run, inputs, kind.has_parts))
            logits = recording.logits
        graph = self._graphs[kind] = DecodeGraph(layout, logits, recording)
        return graph

    def _record(self, inputs: StepInputs, has_parts: bool) -> tuple[Recording, Tensor]:
        """Not `torch.cuda.graph`, which collects garbage and waits for the device: that would hold everyone up."""
        self._run(inputs, has_parts)  # once as it is: what has to be compiled or loaded must be before the recording
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = self._run(inputs, has_parts)
        finally:
            graph.capture_end()
        return graph, logits


class _Again:
    """What stands for a graph where there is no CUDA: the same work on the same memory, done again."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.logits = run()

    def replay(self) -> None:
        self.logits.copy_(self._run())
