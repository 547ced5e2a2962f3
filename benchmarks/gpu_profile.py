"""Profiles workload A: time by kind of kernel, and how long the device waits for the host."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import harness
import torch
from gpu_machine import Machine, Run
from gpu_workloads import Workload
from torch.profiler import ProfilerActivity, profile

MAX_PREFILL_STEPS = 40
HOST_GAP_US = 10.0  # a longer pause is not launch latency: the host was late
MAX_LISTED = 12
# The first pattern that matches the name of a kernel (on a CPU: an operation) determines its kind.
KINDS = (
    ("attention", r"^_attend|^_merge|flash|fmha|attention"),
    (
        "matrix products",
        r"nvjet|gemm|gemv|splitk|cutlass|cublas|xmma|matmul|^_(row_product|tile_product)|aten::(linear|mm|addmm|bmm|mv|addmv)",
    ),
    ("sampling", r"^_(measure|weigh|pick|find_floors|change|count|edit)\b|softmax|sort|topk|argmax|multinomial"),
    ("norms, rope, activation", r"^_(norm|gated|embed|rope_store)\b|rms_?norm|silu|gelu"),
    ("copies", r"memcpy|memset|^_(copy_blocks|update_tables)\b|copy_"),
)
OTHER = "other"


class Event(NamedTuple):
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of a run. Times in milliseconds."""

    what: str
    num_steps: int
    wall_ms: float  # without the profiler, which slows the host down
    span_ms: float  # with the profiler, from the first kernel to the last
    busy_ms: float  # while any kernel ran
    host_gap_ms: float  # pauses within the span caused by the host
    by_kind_ms: dict[str, float]
    top_ms: dict[str, float]  # by kernel name
    num_kernels: int

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_ms / self.wall_ms

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "idle_share": self.idle_share, "idle_share_profiled": 1 - self.busy_ms / self.span_ms}


def profile_windows(machine: Machine, workload: Workload) -> list[Window]:
    """Profile the steps that compute prompts, and some from the middle. Runs twice: without and with the profiler."""
    plain = machine.run(workload)
    num_steps = len(plain.steps)
    num_prefill = 1 + max(number for number, step in enumerate(plain.steps) if step.is_prefill)
    first = min(num_prefill, MAX_PREFILL_STEPS)
    wanted = machine.scale.profiled_steps
    middle = max((num_steps - wanted) // 2, first)
    ranges = {"prefill": range(first), "decode": range(middle, min(middle + wanted, num_steps - 1))}
    recorders = [_Recorder(steps) for steps in ranges.values()]

    def switch(number: int) -> None:
        for recorder in recorders:
            recorder.switch(number)

    machine.run(workload, on_step=switch)
    walls_ms = [wall_ms(plain, steps, has_overlap=machine.engine.capacity.has_overlap) for steps in ranges.values()]
    return [
        summarise(what, len(ranges[what]), took_ms, recorder.events())
        for what, took_ms, recorder in zip(ranges, walls_ms, recorders, strict=True)
    ]


def wall_ms(run: Run, steps: range, *, has_overlap: bool) -> float:
    """Return the time between the results of the step before and the last. With one in flight, the next call has it."""

    def done_s(number: int) -> float:
        return 0.0 if number < 0 else run.steps[number + has_overlap].done_s

    return 1e3 * (done_s(steps.stop - 1) - done_s(steps.start - 1))


class _Recorder:
    """A profiler that covers exactly some steps: nothing is in flight when it starts or stops."""

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self._profiler: profile | None = None
        self._trace: dict[str, Any] = {"traceEvents": []}

    def switch(self, number: int) -> None:
        if number not in (self._steps.start, self._steps.stop):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number == self._steps.start:
            activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
            self._profiler = profile(activities=[activity])
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.stop()
            with TemporaryDirectory() as folder:  # exported at once: the next profiler would replace it
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self._trace = json.loads(path.read_text())

    def events(self) -> list[Event]:
        return read_events(self._trace)


def read_events(trace: dict[str, Any]) -> list[Event]:
    """Return what ran on the device; on a CPU, the operations."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if torch.cuda.is_available() else ("cpu_op",)
    found = (one for one in trace["traceEvents"] if one.get("ph") == "X" and one.get("cat") in kinds)
    return sorted(
        (Event(one["name"], one["ts"], one["ts"] + one["dur"]) for one in found), key=lambda event: event.start
    )


def summarise(what: str, num_steps: int, wall_ms: float, events: Iterable[Event]) -> Window:
    """Summarise events. Overlapping time counts once, for the earlier event, so the kinds add up to the busy time."""
    by_kind = dict.fromkeys((*(kind for kind, _ in KINDS), OTHER), 0.0)
    by_name: defaultdict[str, float] = defaultdict(float)
    first = covered = None
    host_gap = 0.0
    num_kernels = 0
    for event in events:
        num_kernels += 1
        if first is None or covered is None:
            first = covered = event.start
        if event.start - covered > HOST_GAP_US:
            host_gap += event.start - covered
        own = max(0.0, event.end - max(event.start, covered))
        by_kind[kind_of(event.name)] += own
        by_name[event.name] += own
        covered = max(covered, event.end)
    if first is None or covered is None or covered == first:
        raise RuntimeError(f"the profiler recorded nothing in {num_steps} steps ({num_kernels} events)")
    top = sorted(by_name, key=by_name.__getitem__, reverse=True)[:MAX_LISTED]
    return Window(
        what=what,
        num_steps=num_steps,
        wall_ms=wall_ms,
        span_ms=(covered - first) / 1e3,
        busy_ms=sum(by_kind.values()) / 1e3,
        host_gap_ms=host_gap / 1e3,
        by_kind_ms={kind: us / 1e3 for kind, us in by_kind.items()},
        top_ms={name[:100]: by_name[name] / 1e3 for name in top},
        num_kernels=num_kernels,
    )


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name.lower())), OTHER)


def table(windows: dict[str, list[Window]]) -> str:
    """Return milliseconds per step and shares, by shape and window."""
    if not windows:
        return ""
    heads = ["", *(f"{shape}, {one.what}" for shape, found in windows.items() for one in found)]
    columns = [one for found in windows.values() for one in found]
    rows = [
        ["steps", *(str(one.num_steps) for one in columns)],
        ["ms per step", *(f"{one.wall_ms / one.num_steps:.3f}" for one in columns)],
        ["device busy, ms per step", *(f"{one.busy_ms / one.num_steps:.3f}" for one in columns)],
        ["device idle", *(f"{one.idle_share:.1%}" for one in columns)],
        ["thereof while the host was late (profiled)", *(f"{one.host_gap_ms / one.span_ms:.1%}" for one in columns)],
        ["kernels per step", *(f"{one.num_kernels / one.num_steps:.0f}" for one in columns)],
    ]
    for kind in columns[0].by_kind_ms:
        rows += [[kind, *(f"{one.by_kind_ms[kind] / one.busy_ms:.1%}" for one in columns)]]
    return harness.table(heads, rows)
