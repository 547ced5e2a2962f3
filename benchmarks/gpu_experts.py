"""Checks and times packed experts in the shape of Qwen3-30B-A3B: `gpu_formats.py --experts` calls this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from gpu_kernels import timed_us
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.backends.torch.kernel_compilation import Compiling
from quire.backends.torch.kernels import quantized_experts, routed_experts
from quire.backends.torch.kernels.experts import Routing, SortedSlots, is_alone, route, sort_slots
from quire.backends.torch.kernels.quantized_experts import AloneShape, QuantizedTile, quantized_product
from quire.backends.torch.kernels.routed_experts import expert_calls, run_experts
from quire.backends.torch.packed import PackedFormat, PackedWeight
from quire.backends.torch.packed_stack import PackedStack, Stack, multiplies_in_fp8
from quire.weights.spec import Activation

# T rows of the batch, K experts chosen per row

NUM_EXPERTS, NUM_CHOSEN, SIZE, WIDTH = 128, 8, 2048, 768
GATE_UP, DOWN = (NUM_EXPERTS, 2 * WIDTH, SIZE), (NUM_EXPERTS, SIZE, WIDTH)
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
CHECKED_ROWS = 8
ROUTINGS = 6  # different choices of experts in one measurement, so that the cache does not hold those of few rows
MAX_ERROR, MAX_FP8_ERROR = 1e-2, 8e-2  # relative: products in FP8 round both inputs
TILES = [
    QuantizedTile(*sizes, is_bulk)
    for sizes in ((64, 4, 3), (64, 4, 4), (64, 4, 6), (64, 8, 4), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4))
    for is_bulk in (False, True)
]
WIDE_TILES = [QuantizedTile(256, 8, 3, is_bulk=True), QuantizedTile(256, 8, 4, is_bulk=True)]  # of the second product
ALONE = [AloneShape(outputs, size, warps) for outputs in (1, 2, 4) for size, warps in ((256, 1), (512, 2), (1024, 2))]


class ExpertLine(NamedTuple):
    format: str
    rows: int
    us: float
    bf16_us: float
    num_bytes: float
    error: float
    max_error: float
    note: str = ""

    def __str__(self) -> str:
        rate, ops = self.num_bytes / self.us / 1e6, 6 * self.rows * NUM_CHOSEN * SIZE * WIDTH / self.us / 1e6
        flag = "" if self.error <= self.max_error else " WRONG"
        return (
            f"experts  {self.format:11} {self.rows:5} {self.us:8.1f} us {rate:6.2f} TB/s {ops:7.1f} TFLOP/s"
            f" bf16 {self.bf16_us:8.1f} us ratio {self.bf16_us / self.us:5.2f} error {self.error:.1e}{flag} {self.note}"
        )


class Pair(NamedTuple):
    gate_up: Stack
    down: Stack


def packed_pair(format: PackedFormat, seed: int) -> Pair:
    random = torch.Generator("cuda").manual_seed(seed)
    stacks = []
    for shape in (GATE_UP, DOWN):
        stack = PackedStack.empty(*shape, format, torch.bfloat16, "cuda")
        stack.invent(random, shape[2] ** -0.5)
        scales = stack.whole.scales
        scales.mul_(0.5 + torch.rand(scales.shape, device="cuda").to(scales.dtype))
        stacks.append(stack)
    return Pair(*stacks)


def dense_pair() -> Pair:
    def random(shape: tuple[int, int, int]) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[2] ** -0.5)

    return Pair(random(GATE_UP), random(DOWN))


def random_routings(num_rows: int) -> list[Routing]:
    logits = [torch.randn(num_rows, NUM_EXPERTS, device="cuda") for _ in range(ROUTINGS)]
    return [route(one, NUM_CHOSEN, renormalizes=True, scale=1.0) for one in logits]


def us_per_layer(pairs: list[Pair], x: Tensor, routings: list[Routing]) -> float:
    def run() -> None:
        for number, routing in enumerate(routings):
            run_experts(x, *pairs[number % len(pairs)], routing, Activation.SILU)

    return timed_us(run) / len(routings)


def wide(stack: Stack) -> PackedStack:
    """Return the same stack, decoded to fp32."""
    assert isinstance(stack, PackedStack)
    whole = stack.whole
    return PackedStack(
        PackedWeight(whole.codes, whole.scales, whole.zeros, whole.order, whole.format, torch.float32), len(stack)
    )


def relative_error(pair: Pair, x: Tensor, routing: Routing) -> float:
    """Compare some rows with fp64."""
    got = run_experts(x, *pair, routing, Activation.SILU)
    gate_up, down = wide(pair.gate_up), wide(pair.down)
    rows = sorted({0, len(x) - 1, *torch.randint(0, len(x), (CHECKED_ROWS,)).tolist()})
    exact = torch.zeros((len(rows), SIZE), dtype=torch.float64, device="cuda")
    for place, row in enumerate(rows):
        for n, weight in zip(routing.ids[row].tolist(), routing.weights[row].double(), strict=True):
            gate, up = (gate_up[n].double() @ x[row].double()).chunk(2)
            exact[place] += weight * (down[n].double() @ (F.silu(gate) * up))
    return float((got[rows].double() - exact).norm() / exact.norm())


def touched_bytes(pair: Pair, routings: list[Routing]) -> float:
    """Return the mean bytes of the experts that are chosen."""
    num_used = sum(len(torch.unique(one.ids)) for one in routings) / len(routings)
    return num_used / NUM_EXPERTS * (pair.gate_up.nbytes + pair.down.nbytes)


def compile_ahead(calls: list[Callable[[], object]]) -> None:
    """Compile in child processes, as a server does."""
    major, minor = torch.cuda.get_device_capability()
    Compiling(calls, [], GPUTarget("cuda", 10 * major + minor, 32)).wait()


def all_calls(formats: dict[str, PackedFormat], max_rows: int) -> list[Callable[[], object]]:
    stacks: list[list[Stack]] = [
        [PackedStack.empty(*shape, format, torch.bfloat16, "meta") for shape in (GATE_UP, DOWN)]
        for format in formats.values()
    ]
    stacks.append([torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in (GATE_UP, DOWN)])
    calls: list[Callable[[], object]] = []
    for gate_up, down in stacks:
        calls += expert_calls(
            gate_up, down, num_chosen=NUM_CHOSEN, activation=Activation.SILU, renormalizes=True, scale=1.0,
            logits_dtype=torch.float32, max_rows=max_rows,
        )  # fmt: skip
    return calls


def measure_experts(formats: dict[str, PackedFormat], rows: list[int], *, is_sweep: bool) -> Iterator[ExpertLine]:
    started_s = time.perf_counter()
    compile_ahead(all_calls(formats, max(rows)))
    print(f"compiled in {time.perf_counter() - started_s:.1f} s", flush=True)
    inputs = {count: torch.randn(count, SIZE, device="cuda").bfloat16() for count in rows}
    routings = {count: random_routings(count) for count in rows}
    dense = [dense_pair() for _ in range(2)]
    bf16_us = {count: us_per_layer(dense, x, routings[count]) for count, x in inputs.items()}
    del dense
    for name, format in formats.items():
        pairs = [packed_pair(format, seed) for seed in range(2)]
        for count, x in inputs.items():
            is_fp8 = multiplies_in_fp8(format) and count >= quantized_experts.FP8_ROWS
            line = partial(
                ExpertLine,
                name,
                count,
                bf16_us=bf16_us[count],
                num_bytes=touched_bytes(pairs[0], routings[count]),
                error=relative_error(pairs[0], torch.randn_like(x), routings[count][0]),
                max_error=MAX_FP8_ERROR if is_fp8 else MAX_ERROR,
            )
            yield line(us_per_layer(pairs, x, routings[count]))
            if is_sweep:
                sweep = sweep_alone if is_alone(count, NUM_EXPERTS, NUM_CHOSEN) else sweep_tiles
                for note, us in sweep(pairs, x, routings[count]):
                    yield line(us, note=note)


# Other shapes of programs


def sweep_alone(pairs: list[Pair], x: Tensor, routings: list[Routing]) -> Iterator[tuple[str, float]]:
    """Time a layer with other shapes of one of the two kernels."""
    before = quantized_experts.alone_shape
    for is_gated in (True, False):
        for shape in ALONE:
            if is_gated or shape.outputs == 1:  # the second kernel computes one output
                patched: Any = partial(_chosen_alone, shape, is_gated, before)
                quantized_experts.alone_shape = patched
                yield f"{'gate_up' if is_gated else 'down'} {tuple(shape)}", us_per_layer(pairs, x, routings)
    quantized_experts.alone_shape = before


def _chosen_alone(shape: AloneShape, swept: bool, usual: Any, num_bytes: int, *, is_gated: bool) -> AloneShape:
    found: AloneShape = usual(num_bytes, is_gated=is_gated)
    return shape if swept == is_gated else found


def sweep_tiles(pairs: list[Pair], x: Tensor, routings: list[Routing]) -> Iterator[tuple[str, float]]:
    """Time each of the two products alone, with other tiles; then a layer whose experts are decoded first."""
    num_rows, mean = len(x), len(x) * NUM_CHOSEN / NUM_EXPERTS
    least = min(max(int(triton.next_power_of_2(max(int(mean), 1))), 16), 128)
    down = pairs[0].down
    assert isinstance(down, PackedStack)
    ways = [False, True] if multiplies_in_fp8(down.format) else [False]
    cases = [
        (rows, tile, is_gated, is_fp8)
        for rows in sorted({least, min(2 * least, 128), max(least // 2, 16)})
        for is_gated in (True, False)
        for is_fp8 in ways
        for tile in (TILES if is_gated else TILES + WIDE_TILES)
        if is_fp8 or (not tile.is_bulk and rows <= 64)
    ]
    hidden = torch.randn(num_rows * NUM_CHOSEN, WIDTH, device="cuda").bfloat16()
    compile_ahead([partial(_product, case, _as_meta(pairs[0]), 1) for case in cases])
    slots = {rows: [sort_slots(one.ids, NUM_EXPERTS, rows) for one in routings] for rows in {case[0] for case in cases}}
    for case in cases:
        rows, tile, is_gated, is_fp8 = case
        run = partial(_run_products, case, pairs, x if is_gated else hidden, slots[rows])
        name = f"{'gate_up' if is_gated else 'down'} alone, {rows} rows {tuple(tile)}{' FP8' if is_fp8 else ''}"
        try:
            yield name, timed_us(run) / len(routings)
        except Exception as error:  # a shape that needs too much shared memory
            print(f"{name}: {type(error).__name__}")
    if not multiplies_in_fp8(down.format):
        before, quantized_experts.EXPANDED_ROWS = quantized_experts.EXPANDED_ROWS, 0
        yield "decoded first", us_per_layer(pairs, x, routings)
        quantized_experts.EXPANDED_ROWS = before


Case = tuple[int, QuantizedTile, bool, bool]  # rows of a tile, the tile, gated, in FP8


def _run_products(case: Case, pairs: list[Pair], x: Tensor, slots: list[SortedSlots]) -> None:
    for number, one in enumerate(slots):
        _multiply(case, pairs[number % len(pairs)], x, one)


def _product(case: Case, pair: Pair, num_rows: int) -> None:
    x = torch.empty(num_rows * (1 if case[2] else NUM_CHOSEN), SIZE if case[2] else WIDTH, dtype=torch.bfloat16)
    _multiply(case, pair, x.to("meta"), routed_experts._one_slot(NUM_CHOSEN))


def _multiply(case: Case, pair: Pair, x: Tensor, slots: SortedSlots) -> Tensor:
    rows, tile, is_gated, is_fp8 = case
    stack = pair.gate_up if is_gated else pair.down
    assert isinstance(stack, PackedStack)
    return quantized_product(
        x, stack, None, *slots, num_chosen=NUM_CHOSEN, rows=rows, tile=tile, kind=0 if is_gated else None, is_fp8=is_fp8
    )


def _as_meta(pair: Pair) -> Pair:
    formats = [stack.format for stack in pair if isinstance(stack, PackedStack)]
    shapes = (GATE_UP, DOWN)
    return Pair(
        *(PackedStack.empty(*shape, one, torch.bfloat16, "meta") for shape, one in zip(shapes, formats, strict=True))
    )


def summary(lines: list[ExpertLine]) -> Iterator[str]:
    """Yield the time of the experts of 48 layers."""
    for format in dict.fromkeys(line.format for line in lines):
        found = [line for line in lines if (line.format, line.note) == (format, "")]
        cells = [f"{one.rows}: {0.048 * one.us:.2f} ms (bf16 {0.048 * one.bf16_us:.2f})" for one in found]
        yield f"experts of 48 layers, {format}: {', '.join(cells)}"
