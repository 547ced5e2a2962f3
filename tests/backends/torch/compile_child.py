"""Compiles every kernel of some models for an H200, without one: `python -m tests.backends.torch.compile_child FOLDER`

Prints the errors of Triton and ptxas. The parent sets the variables that Triton reads at import: no interpreter, and a
separate cache.
"""

from __future__ import annotations

import sys
import traceback
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from quire.backends.torch.fused_linear import FusedPackedLinear
from quire.backends.torch.kernel_compilation import Call, Compiler, first_calls, later_calls
from quire.backends.torch.kernels.blocks import PieceTable, gather_pieces, scatter_pieces
from quire.backends.torch.kernels.convolution import short_conv
from quire.backends.torch.kernels.delta_net import MAX_FEW, DeltaWeights, delta_net, projected_size
from quire.backends.torch.kernels.elementwise import gate_output
from quire.backends.torch.kernels.experts import route
from quire.backends.torch.kernels.packed_products import is_fp8
from quire.backends.torch.kernels.routed_experts import row_counts, run_experts
from quire.backends.torch.kernels.sampling import count
from quire.backends.torch.packed import QUANTIZED, PackedFormat, PackedStack, PackedWeight, has_kernels
from quire.backends.torch.state_store import CHUNK_FIELDS, DECODE_FIELDS, SEQUENCE_FIELDS, StateWork
from quire.weights.opening import open_checkpoint
from quire.weights.packed import CodeType
from quire.weights.spec import Activation, DeltaNetSpec

BLOCK_SIZE = 32
MAX_ROWS = 8192
TARGET = GPUTarget("cuda", 90, 32)
EXPERT_SHAPES = (8, 512, 512), (8, 512, 256)  # gates and ups, downs
FORMATS = {
    "fp8": PackedFormat(CodeType.FP8, 1, 0),
    "fp8 in blocks": PackedFormat(CodeType.FP8, 128, 128),
    "int8": PackedFormat(CodeType.INT8, 1, 32),
    "int4": PackedFormat(CodeType.INT4, 1, 128),
    "int4 with zeros": PackedFormat(CodeType.INT4, 1, 128, has_zeros=True),
    "int4 in small groups": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True),
    "int4 with minima": PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True),
    "int8 with minima": PackedFormat(CodeType.INT8, 1, 32, has_zeros=True, has_half_zeros=True),
    "int8 in small groups": PackedFormat(CodeType.INT8, 1, 16),
    "fp4": PackedFormat(CodeType.FP4, 1, 16),
    "fp4 in 32": PackedFormat(CodeType.FP4, 1, 32),
}


def launcher(_source: object, _metadata: object) -> None:
    """Replaces the stub that passes arguments, which needs a machine with a GPU."""


def uncounted(vocab_size: int) -> list[Call]:
    """Return the kernels that are compiled for the first request with a penalty."""
    ints = torch.empty(16, dtype=torch.int32, device="meta")
    return [partial(count, torch.empty(2, vocab_size, dtype=torch.int32, device="meta"), ints, ints, ints, ints)]


def meta(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def work_of(*counts: int) -> StateWork:
    fields = (DECODE_FIELDS, CHUNK_FIELDS, SEQUENCE_FIELDS)
    return StateWork(*(meta(count, size, kind=torch.int32) for count, size in zip(counts, fields, strict=True)))


def of_delta_net(spec: DeltaNetSpec) -> list[Call]:
    heads, channels = spec.num_value_heads, spec.num_channels
    by_head, norm = meta(heads, kind=torch.float32), meta(spec.value_head_size, kind=torch.float32)
    weights = DeltaWeights(meta(spec.num_taps, channels), by_head, by_head, norm, 1e-6)
    conv = meta(2, spec.num_taps - 1, channels)
    matrices = meta(2, heads, spec.key_head_size, spec.value_head_size, kind=torch.float32)
    run = partial(delta_net, meta(2, projected_size(spec)), weights, spec, conv, matrices)
    return [
        *(partial(run, work_of(*counts)) for counts in ((1, 1, 1), (0, 1, MAX_FEW))),
        partial(run, work_of(1, 0, 0), is_graph=True),
    ]


def of_states() -> list[Call]:
    """Return the kernels of layers with recurrent states, and of gated attention, in the sizes of Qwen3.5 and LFM2."""
    calls: list[Call] = [
        partial(short_conv, meta(2, 3 * 2048), meta(3, 2048), None, meta(2, 2, 2048), work_of(1, 1, 1)),
        partial(gate_output, meta(2, 2048), meta(2, 2048)),
    ]
    calls += of_delta_net(DeltaNetSpec(16, 16, 128, 128, 4))
    calls += of_delta_net(DeltaNetSpec(16, 32, 128, 128, 4, is_tiled=True))
    return calls + of_delta_net(DeltaNetSpec(2, 6, 16, 32, 4))  # smaller than products of 16 bits need


def of_packed() -> list[Call]:
    """Return products with packed matrices of every format."""
    calls: list[Call] = []
    for format in FORMATS.values():
        for dtype in (torch.bfloat16, torch.float16):
            linear = FusedPackedLinear(PackedWeight.empty(1024, 512, format, dtype, "meta"))
            for num_rows in (1, 16, 64):
                x = torch.empty(num_rows, 512, dtype=dtype, device="meta")
                calls.append(partial(linear.gated, x, Activation.SILU, is_graph=True))
                calls.append(partial(linear.project_back, x, is_graph=True))
            calls += [partial(linear, torch.empty(count, 512, dtype=dtype, device="meta")) for count in (64, 1024)]
            if not is_fp8(linear.packed):
                x = torch.empty(128, 512, dtype=dtype, device="meta")
                calls.append(partial(linear.project, x, is_graph=True))
    return calls


def run_rows(gate_up: PackedStack, down: PackedStack, num_rows: int) -> None:
    num_experts, size, _ = down.shape
    routing = route(meta(num_rows, num_experts), 2, renormalizes=True, scale=1.0)
    run_experts(meta(num_rows, size), gate_up, down, routing, Activation.SILU)


def of_experts() -> list[Call]:
    """Return all kernels of experts in every format that they may have."""
    calls: list[Call] = []
    for format in FORMATS.values():
        if has_kernels(format):
            first, second = (PackedStack.empty(*shape, format, torch.bfloat16, "meta") for shape in EXPERT_SHAPES)
            calls += [partial(run_rows, first, second, num_rows) for num_rows in row_counts(first, second, 2, MAX_ROWS)]
    return calls


def of_pieces() -> list[Call]:
    """Return the kernels of block I/O, which are compiled when it is first asked for."""
    ints = torch.empty(4, dtype=torch.int32, device="meta")
    calls: list[Call] = []
    for word in (torch.int64, torch.int16):
        table = PieceTable(torch.empty(2, 3, dtype=torch.int64, device="meta"), 2048, 1024, word)
        staging = torch.empty(8192, dtype=word, device="meta")
        calls += [partial(gather_pieces, table, ints, staging), partial(scatter_pieces, table, ints, staging)]
    return calls


def main() -> int:
    calls: list[Call] = []
    for folder in sys.argv[1:]:
        spec = open_checkpoint(Path(folder), "dummy").spec
        calls += first_calls(spec, torch.bfloat16, BLOCK_SIZE, MAX_ROWS)
        calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE)
        calls += uncounted(spec.vocab_size)
        if folder == sys.argv[1]:
            for format in (QUANTIZED[8], PackedFormat(CodeType.FP8, 128, 128)):
                calls += first_calls(spec, torch.bfloat16, BLOCK_SIZE, MAX_ROWS, format)
                calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE, format)
        if folder in sys.argv[1:3]:  # enough for all forms of attention over FP8
            calls += first_calls(spec, torch.bfloat16, BLOCK_SIZE, MAX_ROWS, has_fp8_kv=True)
            calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE, has_fp8_kv=True)
    calls += of_packed()
    calls += of_experts()
    calls += of_states()
    calls += of_pieces()
    errors = Compiler(TARGET, launcher=launcher).run(calls)
    for error in errors:
        traceback.print_exception(error)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
