"""Steps as CUDA graphs: hundreds of launches recorded once and replayed as one.

There are two kinds of graphs. A decode graph is for steps in which every row is the next token of an answer; it ends
with the logits of all rows. A mixed graph is for steps with prompts; it ends with the hidden states of all rows,
because only some of them are sampled. Both run the same kernels over work items in a buffer, so a graph is limited by
its number of rows and items, not by the lengths of prompts and contexts. A step uses the smallest graph that holds it;
the remaining rows are padding that writes nothing.

Graphs are captured one at a time, after the server is ready, while the worker is idle (`Runner.prepare`). Under
constant load, a graph is captured when it was missed `MAX_MISSES` times. The largest graph is captured first: all
graphs share one memory pool, so the others fit in the memory of the largest.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch

from quire.backends.torch.inputs import Layout, StepInputs
from quire.backends.torch.kernels.linear import MAX_SPLIT

SAMPLED = 32  # numbers per row sent with the inputs of a step for sampling; long tables are sent separately
WHOLE_SIZE = 48  # from this size on contexts are rarely split, and a graph without the merge is worth its capture
MAX_MISSES = 3  # a capture takes about as long as two steps without a graph
FEW_DECODES = 32  # most decodes of the smaller mixed graphs: empty items for more of them take time in every layer
MAX_PADDING = 2  # a step uses a graph of at most this many times its rows

log = logging.getLogger(__name__)


class Recording(Protocol):
    def replay(self) -> None: ...


class Kind(NamedTuple):
    size: int  # rows
    is_wide: bool  # there are items of many rows: prompts, or siblings that share a prefix
    has_parts: bool  # a row's keys may be split, because contexts are long or few
    num_decodes: int | None = None  # most decodes of a mixed step; None: a step of decodes only

    @property
    def is_mixed(self) -> bool:
        return self.num_decodes is not None


class StepGraph(NamedTuple):
    kind: Kind
    layout: Layout
    recording: Recording
    is_final: bool  # captured with the kernels for few rows, not before they were compiled


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return sizes in powers of two, then in steps of 16, 32 and 128: padding costs little, and captures take time."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(384, max_num_seqs, 128)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def mixed_sizes(max_rows: int) -> tuple[int, ...]:
    """Return sizes up to `max_rows`. From 64 rows on, at most a third of a graph is padding."""
    sizes = [32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192]
    return tuple(size for size in sizes if size <= max_rows)


class StepGraphs:
    """The captured graphs, by kind.

    `run` computes a step of a kind over its inputs into buffers that all graphs share; its last argument is whether the
    kernels for few rows may be used. `room` returns how many items a kind may have. `is_compiled` returns whether those
    kernels are compiled.
    """

    def __init__(
        self,
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        room: Callable[[Kind], Layout],
        run: Callable[[StepInputs, Kind, bool], None],
        is_compiled: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._decode_sizes = decode_sizes  # ascending
        self._mixed_sizes = mixed_sizes  # ascending
        self._room = cache(room)  # every step asks for it
        self._run = run
        self._is_compiled = is_compiled
        self._device = device
        largest = [
            Kind(decode_sizes[-1], True, True),
            *(self._mixed_kind(size, decode_sizes[-1]) for size in mixed_sizes[-1:]),
        ]
        most = max(room(kind).size for kind in largest)
        # The inputs of sampling follow in the same buffer and stay valid until the next step.
        self.inputs = torch.zeros(most + SAMPLED * decode_sizes[-1], dtype=torch.int32, device=device)
        self._graphs: dict[Kind, StepGraph | None] = {}  # None: capturing failed
        self._misses: Counter[Kind] = Counter()
        self._pool: Any = None

    def find(self, layout: Layout, *, has_parts: bool) -> StepGraph | None:
        """Return the graph for a step of decodes, or None if it must run without one."""
        place = bisect_left(self._decode_sizes, layout.num_rows)
        if place == len(self._decode_sizes):
            return None
        size = self._decode_sizes[place]
        kind = Kind(size, layout.num_wide > 0, has_parts or size < WHOLE_SIZE)
        return self._get(kind) if self._room(kind).holds(layout) else None

    def find_mixed(self, layout: Layout, num_decodes: int) -> StepGraph | None:
        """Return the graph for a step with prompts, or None if it must run without one."""
        for size in self._mixed_sizes:
            if layout.num_rows <= size <= MAX_PADDING * max(layout.num_rows, self._mixed_sizes[0]):
                kind = self._mixed_kind(size, num_decodes)
                if num_decodes <= (kind.num_decodes or 0) and self._room(kind).holds(layout):
                    return self._get(kind)
        return None

    def prepare(self) -> bool:
        """Capture one missing graph, or capture one again that was captured before its kernels were compiled.

        Returns False if there is nothing to do at the moment.
        """
        is_compiled = self._is_compiled()
        for kind in dict.fromkeys([*self._prepared_kinds(), *self._graphs]):
            if kind not in self._graphs:
                if not is_compiled and kind.size <= MAX_SPLIT:
                    continue
            elif (graph := self._graphs[kind]) is None or graph.is_final or not is_compiled:
                continue
            self._capture(kind, is_compiled)
            return True
        return False

    def _get(self, kind: Kind) -> StepGraph | None:
        if kind not in self._graphs:
            self._misses[kind] += 1
            if self._misses[kind] < MAX_MISSES:
                return None
            self._capture(kind, self._is_compiled())
        elif (graph := self._graphs[kind]) is not None and not graph.is_final and self._is_compiled():
            self._capture(kind, is_compiled=True)  # CUDA frees the old one when the step that uses it has ended
        return self._graphs[kind]

    def _mixed_kind(self, size: int, num_decodes: int) -> Kind:
        most = self._decode_sizes[-1]
        return Kind(size, True, True, min(FEW_DECODES, most) if num_decodes <= FEW_DECODES else most)

    def _prepared_kinds(self) -> list[Kind]:
        """Return the largest kind, then the others from the smallest on, because a new server's first steps are small.

        Graphs for siblings are captured once siblings occur.
        """
        kinds = [Kind(size, False, True) for size in self._decode_sizes]
        kinds += [Kind(size, False, False) for size in self._decode_sizes if size >= WHOLE_SIZE]
        kinds += [self._mixed_kind(size, 0) for size in self._mixed_sizes]
        most = self._decode_sizes[-1]
        if most > FEW_DECODES:
            kinds += [self._mixed_kind(size, most) for size in self._mixed_sizes if size > FEW_DECODES]
        kinds.sort(key=lambda kind: kind.size)
        return [kinds[-1], *kinds[:-1]]

    def _capture(self, kind: Kind, is_compiled: bool) -> None:
        layout = self._room(kind)
        inputs = layout.carve(self.inputs)
        for array in inputs:
            array.zero_()
        inputs.batch_indices.fill_(-1)
        inputs.kept.fill_(-1)
        graph = None
        run = partial(self._run, inputs, kind, is_compiled)
        try:
            recording = self._record(run) if self._device.type == "cuda" else _Repeat(run)
            graph = StepGraph(kind, layout, recording, is_compiled or kind.size > MAX_SPLIT)
        except Exception as error:  # for example out of memory: steps of this kind run without a graph
            log.warning("a graph of %d rows was not captured: %s", kind.size, error)
            if (earlier := self._graphs.get(kind)) is not None:
                graph = earlier._replace(is_final=True)
        self._graphs[kind] = graph

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
