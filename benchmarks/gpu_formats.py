"""Checks and times products with packed weights on this GPU, beside the same products in bf16.

    PYTHONPATH=. python benchmarks/gpu_formats.py                      # the shapes of Llama-3-8B
    PYTHONPATH=. python benchmarks/gpu_formats.py --formats int4 --rows 1,16 --sweep
    PYTHONPATH=. python benchmarks/gpu_formats.py --experts            # the experts of Qwen3-30B-A3B
    PYTHONPATH=. python benchmarks/gpu_formats.py --experts --formats fp8-blocks --rows 256 --sweep
    PYTHONPATH=. python benchmarks/gpu_formats.py --formats int4-32,q4_k,q5_k,q6_k,mxfp4  # those of GGUF files
    PYTHONPATH=. python benchmarks/gpu_formats.py --formats q6_k,int8 --matrices head --rows 1,2,16,64,256

Every product is compared with fp64 first, on fresh random inputs and over outputs filled with NaN. Times are medians of
CUDA graphs over several copies of each matrix, so that the cache does not hold it. `--sweep` times other shapes of
programs too. The table is printed last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import gpu_experts
import torch
import torch.nn.functional as F
from gpu_kernels import timed_us
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.kernel_compilation import Compiling
from quire.backends.torch.kernels import packed_linear
from quire.backends.torch.kernels.packed_linear import Strip, Tile
from quire.backends.torch.layers import Fp8Product, Fp8Rows, Inputs, Linear, Outputs
from quire.backends.torch.packed import PackedFormat, PackedWeight
from quire.weights.packed import CodeType
from quire.weights.spec import Activation

ROWS = (1, 2, 4, 16, 64, 256, 512, 2048)
L2_BYTES = 256 << 20  # copies of a matrix take this much, several times the cache
MAX_ERROR = {False: 6e-3, True: 6e-2}  # relative; True: inputs are rounded to FP8
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
STRIPS = [Strip(2, 1024, 2), Strip(4, 1024, 2), Strip(8, 1024, 2), Strip(4, 2048, 4), Strip(8, 2048, 4),
          Strip(2, 512, 1), Strip(4, 512, 1), Strip(8, 512, 1), Strip(2, 2048, 4)]  # fmt: skip
TILES = [Tile(16, 4, 6), Tile(32, 2, 6), Tile(32, 4, 4), Tile(32, 4, 6), Tile(64, 4, 3), Tile(64, 4, 5), Tile(64, 4, 7),
         Tile(128, 4, 4), Tile(128, 8, 4)]  # fmt: skip


class Matrix(NamedTuple):
    outputs: int
    inputs: int
    role: str  # the method of `Linear`


LLAMA = {
    "qkv": Matrix(6144, 4096, "project"),
    "o": Matrix(4096, 4096, "project_back"),
    "gate_up": Matrix(28672, 4096, "gated"),
    "down": Matrix(4096, 14336, "project_back"),
}
HEAD = {"head": Matrix(128256, 4096, "logits")}  # not in the defaults: files of FP8 and INT4 have it in 16 bits
MATRICES = LLAMA | HEAD


class Line(NamedTuple):
    matrix: str
    format: str
    rows: int
    us: float
    bf16_us: float
    num_bytes: int
    num_ops: int
    error: float
    note: str = ""
    is_rounded: bool = False  # inputs are rounded to FP8

    def __str__(self) -> str:
        rate, ops = self.num_bytes / self.us / 1e6, self.num_ops / self.us / 1e6
        flag = "" if self.error <= MAX_ERROR[self.is_rounded] else " WRONG"
        return (
            f"{self.matrix:8} {self.format:11} {self.rows:5} {self.us:8.1f} us {rate:6.2f} TB/s {ops:7.1f} TFLOP/s"
            f" bf16 {self.bf16_us:8.1f} us ratio {self.bf16_us / self.us:5.2f} error {self.error:.1e}{flag} {self.note}"
        )


def call(linear: Linear, role: str, x: Tensor) -> Inputs | Outputs:
    """Multiply as in a model, where the next matrix has the same format."""
    if role == "gated":
        return linear.gated(x, Activation.SILU, is_graph=True, reader=linear)
    if role == "logits":
        return linear(x)
    method: Callable[..., Outputs] = getattr(linear, role)
    return method(x, is_graph=True)


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


def relative_error(linear: FusedPackedLinear, role: str, x: Tensor) -> float:
    with poisoned():
        got = exact_value(call(linear, role, x))
    weight = linear.packed
    wide = PackedWeight(weight.codes, weight.scales, weight.zeros, weight.order, weight.format, torch.float32)
    exact = x.double() @ wide.dense().double().t()
    if role == "gated":
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    return float((got - exact).norm() / exact.norm())


def random_packed(matrix: Matrix, format: PackedFormat, count: int) -> list[FusedPackedLinear]:
    random = torch.Generator("cuda").manual_seed(time.time_ns() % 2**31)
    found = []
    for _ in range(count):
        weight = PackedWeight.empty(matrix.outputs, matrix.inputs, format, torch.bfloat16, "cuda")
        weight.invent(random, matrix.inputs**-0.5)
        weight.scales.mul_(0.5 + torch.rand(weight.scales.shape, device="cuda").to(weight.scales.dtype))
        found.append(FusedPackedLinear(weight))
    return found


def us_per_product(linears: list[Any], role: str, x: Tensor) -> float:
    def run() -> None:
        for linear in linears:
            call(linear, role, x)

    return timed_us(run) / len(linears)


def copies(num_bytes: int) -> int:
    return max(-(-L2_BYTES // num_bytes), 2)


def compile_ahead(matrices: list[str], formats: list[str], rows: list[int]) -> None:
    """Compile in child processes, as a server does."""
    calls: list[Callable[[], object]] = []
    for matrix in (MATRICES[one] for one in matrices):
        for name in formats:
            weight = PackedWeight.empty(matrix.outputs, matrix.inputs, FORMATS[name], torch.bfloat16, "meta")
            for count in rows:
                x = torch.empty(count, matrix.inputs, dtype=torch.bfloat16, device="meta")
                calls.append(partial(call, FusedPackedLinear(weight), matrix.role, x))
    major, minor = torch.cuda.get_device_capability()
    Compiling(calls, [], GPUTarget("cuda", 10 * major + minor, 32)).wait()


def measure(matrices: list[str], formats: list[str], rows: list[int], *, is_sweep: bool) -> Iterator[Line]:
    for name, matrix in ((one, MATRICES[one]) for one in matrices):
        weights = [
            torch.randn(matrix.outputs, matrix.inputs, device="cuda").div_(matrix.inputs**0.5).bfloat16()
            for _ in range(copies(2 * matrix.outputs * matrix.inputs))
        ]
        dense = [FusedLinear(weight) for weight in weights]
        inputs = {count: torch.randn(count, matrix.inputs, device="cuda").bfloat16() for count in rows}
        bf16_us = {count: us_per_product(dense, matrix.role, x) for count, x in inputs.items()}
        del weights, dense
        for format in formats:
            size = FORMATS[format]
            linears = random_packed(matrix, size, 1)
            num_bytes = linears[0].num_bytes
            linears += random_packed(matrix, size, copies(num_bytes) - 1)
            line = partial(Line, name, format, num_bytes=num_bytes)
            for count, x in inputs.items():
                fresh = torch.randn_like(x)
                error = relative_error(linears[0], matrix.role, fresh)
                num_ops = 2 * count * matrix.outputs * matrix.inputs
                run = partial(us_per_product, linears, matrix.role, x)
                is_rounded = linears[0].fp8_inputs(count) is not None
                best = partial(line, count, bf16_us=bf16_us[count], num_ops=num_ops, error=error, is_rounded=is_rounded)
                yield best(us=run())
                if is_sweep and count <= packed_linear.MAX_ROWS:
                    for note, us in sweep(count, run):
                        yield best(us=us, note=note)


def sweep(num_rows: int, run: Callable[[], float]) -> Iterator[tuple[str, float]]:
    """Time other shapes of programs."""
    is_single = num_rows == 1
    name = "row_strip" if is_single else "tile_shape"
    before = getattr(packed_linear, name)
    for shape in STRIPS if is_single else TILES:
        setattr(packed_linear, name, lambda *_sizes, shape=shape, **_flags: shape)
        try:
            yield str(tuple(shape)), run()
        except Exception as error:  # a shape that needs too much shared memory
            print(f"{shape}: {type(error).__name__}")
    setattr(packed_linear, name, before)


def summary(lines: list[Line], formats: list[str], rows: list[int]) -> Iterator[str]:
    """Yield the time of these products in a step of Llama-3-8B, without the head."""
    for format in formats:
        cells = []
        for count in rows:
            found = [
                one for one in lines if (one.format, one.rows, one.note) == (format, count, "") and one.matrix in LLAMA
            ]
            ours, bf16 = (32 * sum(getattr(one, kind) for one in found) / 1000 for kind in ("us", "bf16_us"))
            cells.append(f"{count}: {ours:.2f} ms (bf16 {bf16:.2f})")
        yield f"all layers, {format}: {', '.join(cells)}"


def show_matrices(matrices: list[str], formats: list[str], rows: list[int], *, is_sweep: bool) -> None:
    started_s = time.perf_counter()
    compile_ahead(matrices, formats, rows)
    print(f"compiled in {time.perf_counter() - started_s:.1f} s", flush=True)
    with torch.inference_mode():
        lines = []
        for line in measure(matrices, formats, rows, is_sweep=is_sweep):
            lines.append(line)
            if is_sweep:
                print(line, flush=True)
    print(torch.cuda.get_device_name(), torch.__version__, f"{time.perf_counter() - started_s:.0f} s")
    for line in lines:
        if not is_sweep:
            print(line)
    for text in summary(lines, formats, rows):
        print(text)


def show_experts(formats: list[str], rows: list[int], *, is_sweep: bool) -> None:
    with torch.inference_mode():
        lines = []
        for line in gpu_experts.measure_experts({one: FORMATS[one] for one in formats}, rows, is_sweep=is_sweep):
            print(line, flush=True)
            lines.append(line)
    print(torch.cuda.get_device_name(), torch.__version__)
    for text in gpu_experts.summary(lines):
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="fp8,fp8-blocks,int4", help=f"some of {','.join(FORMATS)}")
    parser.add_argument("--rows", help=f"default: {','.join(map(str, ROWS))}")
    parser.add_argument("--matrices", default=",".join(LLAMA))
    parser.add_argument("--experts", action="store_true", help="routed experts instead of dense matrices")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    usual = gpu_experts.ROWS if args.experts else ROWS
    formats, rows = args.formats.split(","), [int(one) for one in args.rows.split(",")] if args.rows else [*usual]
    if args.experts:
        show_experts(formats, rows, is_sweep=args.sweep)
    else:
        show_matrices(args.matrices.split(","), formats, rows, is_sweep=args.sweep)


if __name__ == "__main__":
    main()
