"""Decode steps as CUDA graphs: hundreds of launches recorded once and replayed as one.

A graph has one batch size and one input buffer. A batch uses the smallest graph that holds it; the remaining rows are
padding that writes nothing. Graphs are captured one at a time, after the server is ready, while the worker is idle
(`Runner.prepare`). Under constant load, a graph is captured when its size was missed often. The largest graph is
captured first: all graphs share one memory pool, so the others fit in the memory of the largest.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from quire.backends.torch.inputs import Layout, StepInputs

SAMPLED = 32  # numbers per row sent with the inputs of a step for sampling; long tables are sent separately
WHOLE_SIZE = 48  # from this size on contexts are rarely split, and a graph without the merge is worth its capture
MAX_MISSES = 16  # steps without a graph of their size until it is captured even while requests wait

log = logging.getLogger(__name__)


class Recording(Protocol):
    def replay(self) -> None: ...


class Kind(NamedTuple):
    size: int
    is_wide: bool  # siblings share a prefix
    has_parts: bool  # a row's keys may be split, because contexts are long or few


class DecodeGraph(NamedTuple):
    layout: Layout
    recording: Recording


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return sizes in powers of two, then in steps of 16, 32 and 128: padding costs little, and captures take time."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(384, max_num_seqs, 128)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """The captured graphs, by kind.

    `run` computes the logits of all rows of its inputs into a buffer that all graphs share, with or without merging
    parts. `room` returns how many items a size may have. `may_capture` returns whether the kernels that only graphs use
    are compiled.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        room: Callable[[int, bool], Layout],
        run: Callable[[StepInputs, bool], None],
        may_capture: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._sizes = sizes  # ascending
        self._room = room
        self._run = run
        self._may_capture = may_capture
        self._device = device
        most = max(room(sizes[-1], True).size, room(sizes[-1], False).size)
        # The inputs of sampling follow in the same buffer and stay valid until the next step.
        self.inputs = torch.zeros(most + SAMPLED * sizes[-1], dtype=torch.int32, device=device)
        self._graphs: dict[Kind, DecodeGraph | None] = {}  # None: capturing failed
        self._misses: Counter[Kind] = Counter()
        self._pool: Any = None

    def find(self, layout: Layout, *, has_parts: bool) -> DecodeGraph | None:
        """Return the graph for a step of decodes, or None if it must run without one."""
        size = next((size for size in self._sizes if size >= layout.num_rows), None)
        if size is None:
            return None
        kind = Kind(size, layout.num_wide > 0, has_parts or size < WHOLE_SIZE)
        graph = self._graphs.get(kind)
        if kind not in self._graphs:
            if not self._room(size, kind.is_wide).holds(layout):
                return None
            self._misses[kind] += 1
            if self._misses[kind] < MAX_MISSES or not self._may_capture():
                return None
            graph = self._capture(kind)
        return graph if graph is not None and graph.layout.holds(layout) else None

    def prepare(self) -> bool:
        """Capture the largest missing graph. Those for siblings are captured once siblings occur."""
        for size in reversed(self._sizes):
            for has_parts in (True, False) if size >= WHOLE_SIZE else (True,):
                if (kind := Kind(size, False, has_parts)) not in self._graphs:
                    self._capture(kind)
                    return True
        return False

    def _capture(self, kind: Kind) -> DecodeGraph | None:
        layout = self._room(kind.size, kind.is_wide)
        inputs = layout.carve(self.inputs)
        inputs.batch_indices.fill_(-1)
        inputs.narrow.zero_()
        inputs.wide.zero_()
        inputs.first_parts.zero_()
        inputs.tokens.zero_()
        inputs.positions.zero_()
        graph = None
        run = partial(self._run, inputs, kind.has_parts)
        try:
            graph = DecodeGraph(layout, self._record(run) if self._device.type == "cuda" else _Repeat(run))
        except Exception as error:  # for example out of memory: steps of this kind run without a graph
            log.warning("a graph of %d rows was not captured: %s", kind.size, error)
        self._graphs[kind] = graph
        return graph

    def _record(self, run: Callable[[], None]) -> Recording:
        """Capture a graph without `torch.cuda.graph`, which collects garbage and waits for the device: a long delay."""
        run()  # once without recording: everything must be compiled and loaded before
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        return graph


class _Repeat:
    """Replaces a graph where there is no CUDA: repeats the same work on the same memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        run()

    def replay(self) -> None:
        self._run()
