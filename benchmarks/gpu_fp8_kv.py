"""Times attention over a KV cache in FP8 on this GPU, beside the same attention in bf16.

    PYTHONPATH=. python benchmarks/gpu_fp8_kv.py
    PYTHONPATH=. python benchmarks/gpu_fp8_kv.py --sweep      # other shapes of programs too

Medians of CUDA graphs over the memory of several layers, in microseconds per layer. FP8 is computed over the codes of
the same keys and values, and compared with the attention in bf16 over the decoded ones first.
`pytest tests/backends/torch -k fp8` compares the kernels with float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from gpu_kernels import BLOCK, HEAD_SIZE, KV_HEADS, LAYERS, NUM_BLOCKS, SHAPES, Case, contexts_of_a
from torch import Tensor

from quire.backends.torch.kernels.attention import NARROW, WIDE, WIDE_FP8, Tiling
from quire.backends.torch.kv_store import decode, encode

MAX_ERROR = 0.02  # relative: bf16 rounds the weights of the softmax and the results
NARROW_TILINGS = [
    NARROW._replace(keys=keys, num_warps=num_warps, num_stages=num_stages)
    for keys in (32, 64, 128, 256)
    for num_warps in (4, 8)
    for num_stages in (2, 3, 4)
]
WIDE_TILINGS = [
    WIDE._replace(keys=keys, num_warps=num_warps, num_stages=num_stages)
    for keys in (32, 64, 128)
    for num_warps in (4, 8)
    for num_stages in (2, 3)
]

Requests = tuple[list[int], list[tuple[int, int]]]  # contexts of decodes; cached and new tokens of prompts


def workloads() -> Iterator[tuple[str, Requests]]:
    for step in (50, 600):
        contexts = contexts_of_a(step)
        yield f"A after {step}, {len(contexts)} decodes", (contexts, [])
    yield "1 x 8,192", ([8192], [])
    yield "8 x 8,192", ([8192] * 8, [])
    yield "16 prompts of 512", ([], [(0, 512)] * 16)
    yield "a prompt of 4,096", ([], [(0, 4096)])


def make_pools() -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the same numbers in bf16."""
    shape = NUM_BLOCKS, 2, KV_HEADS, BLOCK, HEAD_SIZE
    codes = torch.empty(LAYERS, *shape, dtype=torch.uint8, device="cuda")
    scales = torch.empty(LAYERS, *shape[:-1], dtype=torch.bfloat16, device="cuda")
    plain = torch.empty(LAYERS, *shape, dtype=torch.bfloat16, device="cuda")
    for layer in range(LAYERS):
        codes[layer], scales[layer] = encode(torch.randn(shape, device="cuda"))
        decode(codes[layer], scales[layer], plain[layer])
    return codes, scales, plain


def us(case: Case, narrow: Tiling, wide: Tiling) -> float | None:
    """Return the time, or None if the programs do not fit the card."""
    try:
        return case.us(narrow, wide)
    except Exception as error:
        print(f"    {narrow} {wide}: {type(error).__name__}")
        return None


def sweep(case: Case, *, is_wide: bool) -> str:
    """Return the fastest tiling."""
    found = []
    for tiling in WIDE_TILINGS if is_wide else NARROW_TILINGS:
        took = us(case, NARROW, tiling) if is_wide else us(case, tiling, WIDE_FP8)
        if took is not None:
            found.append((took, tiling))
    took, best = min(found)
    return f"; best {took:.1f} us with {best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other shapes of programs too")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    codes, scales, plain = make_pools()
    for shape, num_heads in SHAPES.items():
        for name, (contexts, prompts) in workloads():
            wide, fp8 = (
                Case(contexts, prompts, num_heads, pool, scales=some) for pool, some in ((plain, None), (codes, scales))
            )
            fp8.q.copy_(wide.q)
            before, after = wide.us(), fp8.us(NARROW, WIDE_FP8)
            error = float((wide.out.float() - fp8.out.float()).norm() / wide.out.float().norm())
            assert error < MAX_ERROR, f"{shape}, {name}: {error = }"
            more = sweep(fp8, is_wide=bool(prompts)) if options.sweep else ""
            rate = fp8.num_bytes / after / 1e6
            print(f"{shape}: {name}: bf16 {before:.1f} us, fp8 {after:.1f} us ({rate:.2f} TB/s), {error = :.4f}{more}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
