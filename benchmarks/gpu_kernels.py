"""Measures single kernels on this GPU: bytes or operations per second, and the library's figures if it has the same.

    PYTHONPATH=. python benchmarks/gpu_kernels.py

Everything is timed inside CUDA graphs over the memory of several layers, so that the cache does not hold it; medians.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.torch.attention_work import Prompt, Siblings, Sizes, find_siblings, plan_work
from quire.backends.torch.device_sampling import DeviceSampler, fill_params
from quire.backends.torch.kernels.attention import NARROW, WIDE, Parts, Tiling, attend, merge, rows_per_item
from quire.backends.torch.kernels.linear import THIN, is_small, product_in_parts, row_product, tile_product
from quire.backends.torch.kernels.sampling import NUM_PARAMS
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams

LAYERS = 6
BLOCK, KV_HEADS, HEAD_SIZE, NUM_BLOCKS = 32, 8, 128, 16_500
SHAPES = {"Qwen3-0.6B": 16, "Llama-3-8B": 32}  # query heads
MATRICES = {
    "qkv, 0.6B": (4096, 1024),
    "o, 0.6B": (1024, 2048),
    "down, 0.6B": (1024, 3072),
    "qkv, 8B": (6144, 4096),
    "o, 8B": (4096, 4096),
}


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


def contexts_of_a(step: int, seed: int = 0) -> list[int]:
    """Return the contexts of workload A after `step` tokens of every answer, for the requests still running."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(256):
        length = rng.randint(100, 1024)
        for _ in range(length):
            rng.randint(0, 10000)
        prompts.append(length)
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]


class Case:
    """One step's attention: decodes with these contexts, then prompts of (cached, new) tokens.

    `heads` names the prefixes of each decode and their tokens: decodes that name the same ones share their blocks.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        prompts: Sequence[tuple[int, int]],
        num_heads: int,
        pool: Tensor,
        heads: Sequence[Sequence[tuple[str, int]]] = (),
        scales: Tensor | None = None,
    ) -> None:
        device, self.num_decodes = pool.device, len(contexts)
        free = iter((np.random.default_rng(0).permutation(NUM_BLOCKS - 1) + 1).tolist())
        self.host_tables = np.zeros((self.num_decodes + len(prompts), 512), np.int32)
        shared: dict[str, list[int]] = {}
        lengths = [*contexts, *(cached + new for cached, new in prompts)]
        for number, length in enumerate(lengths):
            table: list[int] = []
            for name, num_tokens in heads[number] if number < len(heads) else ():
                if name not in shared:
                    shared[name] = list(itertools.islice(free, num_tokens // BLOCK))
                table += shared[name]
            table += itertools.islice(free, -(-length // BLOCK) - len(table))
            self.host_tables[number, : len(table)] = table
        self.starts = np.array(contexts, np.int32) - 1
        self.prompts, self.positions = [], list(self.starts)
        for number, (cached, new) in enumerate(prompts):
            self.prompts.append(Prompt(len(self.positions), new, cached, self.num_decodes + number))
            self.positions += range(cached, cached + new)
        self.tables = torch.from_numpy(self.host_tables).to(device)
        self.q = torch.randn(len(self.positions), num_heads, HEAD_SIZE, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.pool, self.parts = pool, Parts.empty(8192, num_heads, HEAD_SIZE, device)
        self.scales = scales  # of keys and values in FP8
        vector_bytes = HEAD_SIZE * pool.itemsize + (0 if scales is None else scales.itemsize)
        self.num_bytes = 2 * KV_HEADS * vector_bytes * sum(lengths)
        self.num_ops = sum(4 * num_heads * HEAD_SIZE * new * (cached + new / 2) for cached, new in prompts)

    def us(
        self, narrow: Tiling = NARROW, wide: Tiling = WIDE, programs: int = 4, *, has_siblings: bool = True
    ) -> float:
        """Return microseconds per layer. Without siblings, every decode reads all its keys alone."""
        num_heads, device = self.q.shape[1], self.pool.device
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        per_item = rows_per_item(wide, num_heads // KV_HEADS)
        sizes = Sizes(KV_HEADS, BLOCK, per_item, cores * programs, cores * 2, 8192)
        rows = np.arange(self.num_decodes, dtype=np.int32)
        siblings: Sequence[Siblings] = ()
        grouping = find_siblings(self.host_tables, rows, self.starts, sizes) if has_siblings else None
        if grouping is not None:
            rows, siblings = rows[grouping.order], grouping.siblings
        work = plan_work(self.starts[rows], rows, siblings, self.prompts, len(self.q), sizes)
        in_order = [*self.starts[rows].tolist(), *self.positions[self.num_decodes :]]
        positions = torch.tensor(in_order, dtype=torch.int32, device=device)
        first_parts = torch.from_numpy(work.first_parts).to(device)
        lists = [
            (torch.from_numpy(items).to(device), tiling) for items, tiling in ((work.narrow, narrow), (work.wide, wide))
        ]

        def run() -> None:
            for number, layer in enumerate(self.pool):
                for items, tiling in lists:
                    if len(items):
                        attend(
                            self.q, layer, self.tables, positions, items, first_parts, self.parts, self.out,
                            tiling=tiling, scale=HEAD_SIZE**-0.5, window=0, cap=0.0,
                            scales=None if self.scales is None else self.scales[number],
                        )  # fmt: skip
                if work.first_parts[-1]:
                    merge(self.parts, first_parts, self.out)

        return timed_us(run) / len(self.pool)


def sibling_cases(num_heads: int, pool: Tensor) -> Iterator[tuple[str, Case]]:
    """Yield decodes that share prefixes. Prefixes end with full blocks, as in the prefix cache."""
    contexts, heads = [2112 + number for number in range(64)], [[("head", 2048)]] * 64
    yield "64 with a shared prefix of 2,048", Case(contexts, (), num_heads, pool, heads)
    contexts, heads = [8256 + number for number in range(63)], [[("head", 32), ("rest", 8160)]] * 63
    yield "63 with a shared prefix of 8,192", Case(contexts, (), num_heads, pool, heads)
    stranger = Case([*contexts, 40], (), num_heads, pool, [*heads, [("head", 32)]])
    yield "63 with a shared prefix of 8,192 and one of 40 tokens", stranger
    contexts = [2100 + number % 200 for number in range(256)]
    heads = [[("system", 1472), (f"persona {number % 8}", 512)] for number in range(256)]
    yield "8 personas of 500 x 32 users, system prompt of 1,500", Case(contexts, (), num_heads, pool, heads)
    heads = [[("system", 1472), (f"persona {number % 40}", 512)] for number in range(256)]
    yield "40 personas of 500, 256 users, system prompt of 1,500", Case(contexts, (), num_heads, pool, heads)


def attention() -> None:
    pool = torch.randn(
        LAYERS, NUM_BLOCKS, 2, KV_HEADS, BLOCK, HEAD_SIZE, device="cuda", dtype=torch.bfloat16
    )  # fmt: skip
    print("\nattention, per layer\n")
    for shape, num_heads in SHAPES.items():
        for step in (50, 300, 600, 850, 1000):
            case = Case(contexts_of_a(step), (), num_heads, pool)
            us = case.us()
            rate = case.num_bytes / us / 1e6
            print(f"{shape}: A after {step:4}, {len(case.starts):3} decodes: {us:6.1f} us, {rate:.2f} TB/s")
        for name, contexts in (("1 x 256", [256]), ("1 x 8,192", [8192]), ("8 x 8,192", [8192] * 8)):
            case = Case(contexts, (), num_heads, pool)
            us = case.us()
            print(f"{shape}: {name}: {us:6.1f} us, {case.num_bytes / us / 1e6:.2f} TB/s")
        for name, case in sibling_cases(num_heads, pool):
            print(f"{shape}: {name}: {case.us():6.1f} us; separately {case.us(has_siblings=False):6.1f} us")
        case = Case((), [(0, 512)] * 16, num_heads, pool)
        us = case.us()
        print(f"{shape}: 16 prompts of 512: {us:6.1f} us, {case.num_ops / us / 1e6:.0f} TFLOP/s")


def products() -> None:
    """Measure over many copies of each matrix, as in a model's layers."""
    print("\nproducts, us (ours / the library's)\n")
    for name, (outputs, inputs) in MATRICES.items():
        weights = torch.randn(max(512 * 2**20 // (outputs * inputs * 2), 8), outputs, inputs, device="cuda").bfloat16()
        cells = []
        for rows in (1, 4, 16, 32, 64):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            library = timed_us(lambda x=x, weights=weights: _each(lambda w: F.linear(x, w), weights)) / len(weights)  # type: ignore[misc]
            product = _ours(rows, weights[0])
            ours = library
            if product is not None:
                ours = timed_us(lambda x=x, p=product, weights=weights: _each(lambda w: p(x, w, None), weights))  # type: ignore[misc]
                ours /= len(weights)
            cells.append(f"{rows}: {ours:.1f} / {library:.1f}")
        print(f"{name}: {', '.join(cells)}")


def _each(action: Callable[[Tensor], object], weights: Tensor) -> None:
    for weight in weights:
        action(weight)


def _ours(rows: int, weight: Tensor) -> Callable[[Tensor, Tensor, None], Tensor] | None:
    if rows == 1:
        return row_product
    if not is_small(rows, weight):
        return None
    return product_in_parts if len(weight) <= THIN else tile_product


def sampling() -> None:
    print("\nsampling 256 rows of 151,936, ms\n")
    vocab_size, rows = 151_936, 256
    kinds = {
        "temperature": {},
        "top-p": {"top_p": 0.9},
        "top-k and top-p": {"top_k": 50, "top_p": 0.9},
        "penalties": {"frequency_penalty": 0.5},
    }
    device = torch.device("cuda")
    logits = (2 * torch.randn(rows, vocab_size, device=device)).bfloat16()
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    batch_indices = torch.arange(rows, dtype=torch.int32, device=device)
    for name, settings in kinds.items():
        sampler = DeviceSampler(vocab_size, rows, device)
        params = SamplingParams(temperature=0.8, **settings)  # type: ignore[arg-type]
        slices = [
            SeqSlice(batch_index, 0, batch_index, (5,), 9, 1, (), [5] * 10, True, params, 5)
            for batch_index in range(rows)
        ]
        host = np.empty((rows, NUM_PARAMS), np.float32)
        special_rows = fill_params(host, slices)
        sent, out = torch.from_numpy(host).to(device), torch.empty((2, rows), dtype=torch.int32, device=device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]  # type: ignore[no-untyped-call]
        for mark in marks:
            sampler.sample(logits, slices, special_rows, sent, batch_indices, zeros, zeros.clone(), None, out)
            mark.record()
        torch.cuda.synchronize()
        times = sorted(first.elapsed_time(last) for first, last in itertools.pairwise(marks[1:]))
        print(f"{name}: {times[len(times) // 2]:.3f}")


if __name__ == "__main__":
    with torch.inference_mode():
        print(torch.cuda.get_device_name(), torch.__version__)
        attention()
        products()
        sampling()
