"""Checks and times products with packed weights on this GPU, beside the same products in bf16.

    PYTHONPATH=. python benchmarks/gpu_formats.py                      # the shapes of Llama-3-8B
    PYTHONPATH=. python benchmarks/gpu_formats.py --experts            # the experts of Qwen3-30B-A3B
    PYTHONPATH=. python benchmarks/gpu_formats.py --formats int4-32,q4_k,q5_k,q6_k,mxfp4  # those of GGUF files
    PYTHONPATH=. python benchmarks/gpu_formats.py --formats q6_k,int8 --matrices head --rows 1,2,16,64,256

Every product is compared with fp64 first, on fresh random inputs and over outputs filled with NaN. Times are medians of
CUDA graphs over several copies of each matrix, so that the cache does not hold it. The table is printed last.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F
from harness import say
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.kernel_compilation import Compiling
from quire.backends.torch.kernels import quantized_experts
from quire.backends.torch.kernels.experts import Routing, route
from quire.backends.torch.kernels.routed_experts import expert_calls, run_experts
from quire.backends.torch.layers import Fp8Product, Fp8Rows, Inputs, Linear, Outputs
from quire.backends.torch.packed import PackedFormat, PackedStack, PackedWeight, Stack, multiplies_in_fp8
from quire.weights.packed import CodeType
from quire.weights.spec import Activation

# E experts, K chosen per row

L2_BYTES = 256 << 20  # copies of a matrix take this much, several times the cache
FORMATS = {
    "fp8": PackedFormat(CodeType.FP8, 1, 0),
    "fp8-blocks": PackedFormat(CodeType.FP8, 128, 128),
    "int4": PackedFormat(CodeType.INT4, 1, 128),
    "int4-zeros": PackedFormat(CodeType.INT4, 1, 128, has_zeros=True),
    "int4-32": PackedFormat(CodeType.INT4, 1, 32),
    "q4_k": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True),  # also Q4_1
    "q5_k": PackedFormat(CodeType.INT8, 1, 32, has_zeros=True, has_half_zeros=True),
    "q6_k": PackedFormat(CodeType.INT8, 1, 16),
    "int8": PackedFormat(CodeType.INT8, 1, 0),
    "mxfp4": PackedFormat(CodeType.FP4, 1, 32),
    "fp4-16": PackedFormat(CodeType.FP4, 1, 16),
}
ROWS, EXPERT_ROWS = (1, 2, 4, 16, 64, 256, 512, 2048), (1, 4, 16, 64, 256, 1024, 4096)
CHECKED_ROWS = 8  # of experts
ROUTINGS = 6  # different choices of experts in one measurement, so that the cache does not hold those of few rows

Calls = list[Callable[[], object]]


def timed_us(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of replaying the launches of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times: list[float] = sorted(first.elapsed_time(last) for first, last in itertools.pairwise(marks))
    return 1000 * times[repeats // 2]


class Line(NamedTuple):
    what: str
    format: str
    rows: int
    us: float
    bf16_us: float
    num_bytes: float
    num_ops: int
    error: float
    max_error: float

    def __str__(self) -> str:
        rate, ops = self.num_bytes / self.us / 1e6, self.num_ops / self.us / 1e6
        flag = "" if self.error <= self.max_error else " WRONG"
        return (
            f"{self.what:8} {self.format:11} {self.rows:5} {self.us:8.1f} us {rate:6.2f} TB/s {ops:7.1f} TFLOP/s"
            f" bf16 {self.bf16_us:8.1f} us ratio {self.bf16_us / self.us:5.2f} error {self.error:.1e}{flag}"
        )


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def in_fp32(weight: PackedWeight) -> PackedWeight:
    """The same weight, decoded to fp32."""
    return PackedWeight(weight.codes, weight.scales, weight.zeros, weight.order, weight.format, torch.float32)


def vary(scales: Tensor) -> None:
    scales.mul_(0.5 + torch.rand(scales.shape, device="cuda").to(scales.dtype))


# Dense matrices


class Matrix(NamedTuple):
    """A matrix of a layer, multiplied as in a model, where the next matrix has the same format."""

    name: str
    outputs: int
    inputs: int
    role: str  # the method of `Linear`

    @property
    def num_ops(self) -> int:
        return 2 * self.outputs * self.inputs

    def _call(self, linear: Linear, x: Tensor) -> Inputs | Outputs:
        if self.role == "gated":
            return linear.gated(x, Activation.SILU, is_graph=True, reader=linear)
        if self.role == "logits":
            return linear(x)
        method: Callable[..., Outputs] = getattr(linear, self.role)
        return method(x, is_graph=True)

    def calls(self, format: PackedFormat, rows: Sequence[int]) -> Calls:
        linear = FusedPackedLinear(PackedWeight.empty(self.outputs, self.inputs, format, torch.bfloat16, "meta"))
        inputs = [torch.empty(count, self.inputs, dtype=torch.bfloat16, device="meta") for count in rows]
        return [partial(self._call, linear, x) for x in inputs]

    def dense(self) -> list[Any]:
        std, count = self.inputs**-0.5, max(-(-L2_BYTES // (2 * self.outputs * self.inputs)), 2)
        shape = self.outputs, self.inputs
        return [FusedLinear(torch.randn(shape, device="cuda").mul_(std).bfloat16()) for _ in range(count)]

    def packed(self, format: PackedFormat) -> list[Any]:
        random = torch.Generator("cuda").manual_seed(time.time_ns() % 2**31)
        found: list[FusedPackedLinear] = []
        while len(found) < 2 or sum(one.packed.nbytes for one in found) < L2_BYTES:
            weight = PackedWeight.empty(self.outputs, self.inputs, format, torch.bfloat16, "cuda")
            weight.invent(random, self.inputs**-0.5)
            vary(weight.scales)
            found.append(FusedPackedLinear(weight))
        return found

    def us(self, linears: list[Any], x: Tensor) -> float:
        return timed_us(lambda: [self._call(linear, x) for linear in linears]) / len(linears)

    def num_bytes(self, linear: Any, _x: Tensor) -> float:
        return float((linear.packed if isinstance(linear, FusedPackedLinear) else linear.weight).nbytes)

    def error(self, linear: Any, x: Tensor) -> float:
        with poisoned():
            found = exact_value(self._call(linear, x))
        exact = x.double() @ in_fp32(linear.packed).decode().double().t()
        if self.role == "gated":
            gate, up = exact.chunk(2, -1)
            exact = F.silu(gate) * up
        return relative_error(found, exact)

    def max_error(self, linear: Any, num_rows: int) -> float:
        return 6e-3 if linear.fp8_inputs(num_rows) is None else 6e-2  # FP8 rounds the inputs too


MATRICES = {  # of Llama-3-8B
    "qkv": Matrix("qkv", 6144, 4096, "project"),
    "o": Matrix("o", 4096, 4096, "project_back"),
    "gate_up": Matrix("gate_up", 28672, 4096, "gated"),
    "down": Matrix("down", 4096, 14336, "project_back"),
    "head": Matrix("head", 128256, 4096, "logits"),  # not in the defaults: files of FP8 and INT4 have it in 16 bits
}


def exact_value(y: Inputs | Outputs) -> Tensor:
    """Add up parts and apply scales."""
    if isinstance(y, Fp8Rows):
        wide = y.scales.double().repeat_interleave(-(-y.codes.shape[1] // y.scales.shape[1]), 1)
        return (y.codes.double() * wide[:, : y.codes.shape[1]])[: len(y)]
    if isinstance(y, Fp8Product):
        return y.values.double() * y.row_scales.double() * y.output_scales.double()
    return y.double().sum(0) if y.dim() == 3 else y.double()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new outputs with NaN."""
    tensor: Any = Tensor
    new_empty = tensor.new_empty

    def poison(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        out: Tensor = new_empty(self, *shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() and out.itemsize > 1 else out

    tensor.new_empty = poison
    try:
        yield
    finally:
        tensor.new_empty = new_empty


# Routed experts


class Experts:
    """The experts of a layer of Qwen3-30B-A3B: both products, and the sum over the chosen ones."""

    name = "experts"
    num_experts, num_chosen, inputs, width = 128, 8, 2048, 768
    shapes = (num_experts, 2 * width, inputs), (num_experts, inputs, width)
    num_ops = 6 * num_chosen * inputs * width

    def __init__(self, rows: Sequence[int]) -> None:
        self._routings = {count: [self._route(count) for _ in range(ROUTINGS)] for count in rows}

    def _route(self, num_rows: int) -> Routing:
        logits = torch.randn(num_rows, self.num_experts, device="cuda")
        return route(logits, self.num_chosen, renormalizes=True, scale=1.0)

    def calls(self, format: PackedFormat | None, rows: Sequence[int]) -> Calls:
        stacks: list[Stack] = [
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            if format is None
            else PackedStack.empty(*shape, format, torch.bfloat16, "meta")
            for shape in self.shapes
        ]
        return list(
            expert_calls(
                *stacks, num_chosen=self.num_chosen, activation=Activation.SILU, renormalizes=True, scale=1.0,
                logits_dtype=torch.float32, max_rows=max(rows),
            )
        )  # fmt: skip

    def dense(self) -> list[Any]:
        return [
            tuple(torch.randn(shape, device="cuda").mul_(shape[2] ** -0.5).bfloat16() for shape in self.shapes)
            for _ in range(2)
        ]

    def packed(self, format: PackedFormat) -> list[Any]:
        random = torch.Generator("cuda").manual_seed(time.time_ns() % 2**31)
        pairs = []
        for _ in range(2):
            pair = [PackedStack.empty(*shape, format, torch.bfloat16, "cuda") for shape in self.shapes]
            for stack, shape in zip(pair, self.shapes, strict=True):
                stack.whole.invent(random, shape[2] ** -0.5)
                vary(stack.whole.scales)
            pairs.append(pair)
        return pairs

    def us(self, pairs: list[Any], x: Tensor) -> float:
        routings = self._routings[len(x)]

        def run() -> None:
            for number, routing in enumerate(routings):
                gate_up, down = pairs[number % len(pairs)]
                run_experts(x, gate_up, down, routing, Activation.SILU)

        return timed_us(run) / len(routings)

    def num_bytes(self, pair: Any, x: Tensor) -> float:
        """Return the mean bytes of the experts that are chosen."""
        routings = self._routings[len(x)]
        num_used = sum(len(torch.unique(one.ids)) for one in routings) / len(routings)
        return num_used / self.num_experts * float(sum(stack.nbytes for stack in pair))

    def error(self, pair: Any, x: Tensor) -> float:
        """Compare some rows."""
        routing = self._routings[len(x)][0]
        found = run_experts(x, pair[0], pair[1], routing, Activation.SILU)
        gate_up, down = (PackedStack(in_fp32(stack.whole), len(stack)) for stack in pair)
        rows = sorted({0, len(x) - 1, *torch.randint(0, len(x), (CHECKED_ROWS,)).tolist()})
        exact = torch.zeros((len(rows), self.inputs), dtype=torch.float64, device="cuda")
        for place, row in enumerate(rows):
            for n, weight in zip(routing.ids[row].tolist(), routing.weights[row].double(), strict=True):
                gate, up = (gate_up[n].double() @ x[row].double()).chunk(2)
                exact[place] += weight * (down[n].double() @ (F.silu(gate) * up))
        return relative_error(found[rows].double(), exact)

    def max_error(self, pair: Any, num_rows: int) -> float:
        is_fp8 = multiplies_in_fp8(pair[0].format) and num_rows >= quantized_experts.FP8_ROWS
        return 8e-2 if is_fp8 else 1e-2


# The run


def compile_ahead(calls: Calls) -> None:
    """Compile in child processes, as a server does."""
    started_s = time.perf_counter()
    major, minor = torch.cuda.get_device_capability()
    Compiling(calls, [], GPUTarget("cuda", 10 * major + minor, 32)).wait()
    say(f"compiled in {time.perf_counter() - started_s:.1f} s")


def measure(subject: Matrix | Experts, formats: Sequence[str], rows: Sequence[int]) -> Iterator[Line]:
    inputs = [torch.randn(count, subject.inputs, device="cuda").bfloat16() for count in rows]
    dense = subject.dense()
    bf16_us = [subject.us(dense, x) for x in inputs]
    del dense
    for name in formats:
        weights = subject.packed(FORMATS[name])
        for x, before_us in zip(inputs, bf16_us, strict=True):
            yield Line(
                subject.name,
                name,
                len(x),
                subject.us(weights, x),
                before_us,
                subject.num_bytes(weights[0], x),
                len(x) * subject.num_ops,
                subject.error(weights[0], torch.randn_like(x)),
                subject.max_error(weights[0], len(x)),
            )


def summary(lines: Sequence[Line], num_layers: int) -> Iterator[str]:
    """Yield the time of these products in all layers of a model, without the head."""
    for name in dict.fromkeys(line.format for line in lines):
        cells = []
        for rows in dict.fromkeys(line.rows for line in lines):
            found = [one for one in lines if (one.format, one.rows) == (name, rows) and one.what != "head"]
            ours_ms, bf16_ms = (
                num_layers * sum(us) / 1000 for us in ([one.us for one in found], [one.bf16_us for one in found])
            )
            cells.append(f"{rows}: {ours_ms:.2f} ms (bf16 {bf16_ms:.2f})")
        yield f"{num_layers} layers, {name}: {', '.join(cells)}"


@torch.inference_mode()
def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--formats", type=harness.names(FORMATS), default=("fp8", "fp8-blocks", "int4"))
    parser.add_argument("--rows", type=harness.numbers, help=f"default: {','.join(map(str, ROWS))}")
    parser.add_argument("--matrices", type=harness.names(MATRICES), default=("qkv", "o", "gate_up", "down"))
    parser.add_argument("--experts", action="store_true", help="routed experts instead of dense matrices")
    args = parser.parse_args()
    rows = args.rows or (EXPERT_ROWS if args.experts else ROWS)
    formats: list[PackedFormat | None] = [FORMATS[name] for name in args.formats]
    if args.experts:
        subjects: list[Any] = [Experts(rows)]
        formats.append(None)
    else:
        subjects = [MATRICES[name] for name in args.matrices]
    compile_ahead([call for subject in subjects for format in formats for call in subject.calls(format, rows)])
    lines = []
    for subject in subjects:
        for line in measure(subject, args.formats, rows):
            say(str(line))
            lines.append(line)
    print(torch.cuda.get_device_name(), torch.__version__)
    for text in summary(lines, 48 if args.experts else 32):
        print(text)


if __name__ == "__main__":
    main()
