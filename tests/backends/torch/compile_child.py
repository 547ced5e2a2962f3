"""Compiles every kernel of some models for an H200, without one: `python -m tests.backends.torch.compile_child FOLDER`

Prints the errors of Triton and ptxas. The parent sets the variables that Triton reads at import: no interpreter, and a
separate cache.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from quire.backends.torch.fused_linear import FusedPackedLinear
from quire.backends.torch.kernel_compilation import (
    Calls,
    _compile,
    first_calls,
    later_calls,
    packed_calls,
    routed_calls,
    state_calls,
)
from quire.backends.torch.kernels.blocks import PieceTable, move_pieces
from quire.backends.torch.kernels.convolution import short_conv_calls
from quire.backends.torch.kernels.delta_net import delta_net_calls
from quire.backends.torch.kernels.elementwise import gate_output
from quire.backends.torch.kernels.packed_products import is_fp8
from quire.backends.torch.kernels.routed_experts import expert_calls
from quire.backends.torch.kernels.sampling import count
from quire.backends.torch.packed import QUANTIZED, PackedFormat, PackedStack, PackedWeight, has_kernels
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


def uncounted(vocab_size: int) -> Calls:
    """Return the kernels that are compiled for the first request with a penalty."""
    ints = torch.empty(16, dtype=torch.int32, device="meta")
    return [partial(count, torch.empty(2, vocab_size, dtype=torch.int32, device="meta"), ints, ints, ints, ints)]


def of_states() -> Calls:
    """Return the kernels of layers with recurrent states, and of gated attention, in the sizes of Qwen3.5 and LFM2."""
    calls = short_conv_calls(2048, 3, torch.bfloat16, has_bias=False)
    calls += delta_net_calls(DeltaNetSpec(16, 16, 128, 128, 4), torch.bfloat16)
    calls += delta_net_calls(DeltaNetSpec(16, 32, 128, 128, 4, is_tiled=True), torch.bfloat16)
    calls += delta_net_calls(DeltaNetSpec(2, 6, 16, 32, 4), torch.bfloat16)  # smaller than products of 16 bits need
    out = torch.empty(2, 2048, dtype=torch.bfloat16, device="meta")
    return [*calls, partial(gate_output, out, out)]


def of_packed() -> Calls:
    """Return products with packed matrices of every format."""
    calls: Calls = []
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


def of_experts() -> Calls:
    """Return all kernels of experts in every format that they may have."""
    calls: Calls = []
    for format in FORMATS.values():
        if has_kernels(format):
            stacks = (PackedStack.empty(*shape, format, torch.bfloat16, "meta") for shape in EXPERT_SHAPES)
            calls += expert_calls(
                *stacks,
                num_chosen=2,
                activation=Activation.SILU,
                renormalizes=True,
                scale=1.0,
                logits_dtype=torch.bfloat16,
                max_rows=MAX_ROWS,
            )
    return calls


def of_pieces() -> Calls:
    """Return the kernels of block I/O, which are compiled when it is first asked for."""
    ints = torch.empty(4, dtype=torch.int32, device="meta")
    calls: Calls = []
    for word in (torch.int64, torch.int16):
        table = PieceTable(torch.empty(2, 3, dtype=torch.int64, device="meta"), 2048, 1024, word)
        staging = torch.empty(8192, dtype=word, device="meta")
        calls += [partial(move_pieces, table, ints, staging, is_gather=is_gather) for is_gather in (False, True)]
    return calls


class Judge:
    def __init__(self) -> None:
        self.num_compiled = self.num_failed = 0

    def judged(self, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                call()
                self.num_compiled += 1
            except Exception:
                self.num_failed += 1
                traceback.print_exc()

        return run


def main() -> int:
    calls: Calls = []
    for folder in sys.argv[1:]:
        spec = open_checkpoint(Path(folder), "dummy").spec
        calls += first_calls(spec, torch.bfloat16, BLOCK_SIZE, torch.device("meta"))
        calls += routed_calls(spec, torch.bfloat16, MAX_ROWS)
        calls += state_calls(spec, torch.bfloat16)
        calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE)
        calls += uncounted(spec.vocab_size)
        if folder == sys.argv[1]:
            for format in (QUANTIZED[8], PackedFormat(CodeType.FP8, 128, 128)):
                calls += packed_calls(spec, torch.bfloat16, format)
                calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE, format)
        if folder in sys.argv[1:3]:  # enough for all forms of attention over FP8
            calls += first_calls(spec, torch.bfloat16, BLOCK_SIZE, torch.device("meta"), has_fp8_kv=True)
            calls += later_calls(spec, torch.bfloat16, BLOCK_SIZE, has_fp8_kv=True)
    calls += of_packed()
    calls += of_experts()
    calls += of_states()
    calls += of_pieces()
    judge = Judge()
    _compile([judge.judged(call) for call in calls], TARGET, launcher)
    print(f"{judge.num_compiled} compiled, {judge.num_failed} failed")
    return int(judge.num_failed > 0 or judge.num_compiled < len(calls))


if __name__ == "__main__":
    sys.exit(main())
