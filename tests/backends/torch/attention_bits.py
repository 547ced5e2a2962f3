"""Compares attention bit by bit between divisions of the work, and measures its time. Needs a GPU.

    python tests/backends/torch/attention_bits.py bits [--jobs 12] [--only bf16-128-4]
    python tests/backends/torch/attention_bits.py time

`time` also runs with the code before pieces: PYTHONPATH=/path/of/that/tree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.backends.torch import attention_work
from quire.backends.torch.attention_work import Prompt, Siblings, Sizes, find_siblings, group_drafts, plan_work
from quire.backends.torch.kernels import attention as kernels
from quire.backends.torch.kernels.attention import attend, merge, rows_per_item, tilings
from quire.backends.torch.kv_store import encode

# T rows, H query heads, K kv heads, G = H / K, D head size

BLOCK = 32
CONTEXT = 9000
MAX_PARTS = 4096
HAS_PIECES = hasattr(attention_work, "SPARE")  # otherwise only `time` works
SPARE = getattr(attention_work, "SPARE", 0)


class Case(NamedTuple):
    kind: str  # bf16, fp16, fp32 or fp8
    head_size: int
    num_groups: int
    num_kv_heads: int = 2
    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False

    @property
    def name(self) -> str:
        more = f"-window{self.window}" * (self.window > 0) + f"-cap{self.cap:g}" * (self.cap > 0)
        return f"{self.kind}-{self.head_size}-{self.num_groups}{more}" + "-sinks" * self.has_sinks

    @property
    def dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "fp32": torch.float32}.get(self.kind, torch.bfloat16)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.num_groups

    def sizes(self, target: int = 528) -> Sizes:
        rows = rows_per_item(tilings(self.head_size, self.dtype.itemsize)[1], self.num_groups)
        return Sizes(self.num_kv_heads, BLOCK, rows, target, max(target // 2, 1), MAX_PARTS)


CASES = [
    Case(kind, size, groups) for kind in ("bf16", "fp16", "fp8") for size in (64, 128, 256) for groups in (1, 2, 4, 8)
]
CASES += [
    Case(kind, size, 4, window=window, cap=cap, has_sinks=has_sinks)
    for kind in ("bf16", "fp8")
    for size in (64, 128)
    for window, cap, has_sinks in ((128, 0.0, True), (1000, 0.0, False), (0, 30.0, False), (4096, 50.0, True))
]


class Decode(NamedTuple):
    position: int
    batch_index: int


class Bench:
    """A cache with a few sequences, and attention of any rows of them."""

    def __init__(
        self, case: Case, tables: np.ndarray[Any, Any], num_blocks: int, device: str, num_layers: int = 1
    ) -> None:
        self.case, self.tables, self.device = case, tables, device
        generator = torch.Generator(device).manual_seed(1)
        shape = (num_blocks, 2, case.num_kv_heads, BLOCK, case.head_size)
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        for _ in range(num_layers):
            layer = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            layer[0] = 0
            if case.kind == "fp8":
                tokens = torch.randn(shape[:4], generator=generator, device=device)
                self.layers.append(encode(layer * torch.exp2(2 * tokens)[..., None]))
            else:
                self.layers.append((layer.to(case.dtype), None))
        if HAS_PIECES:
            size = kernels.part_size(case.num_heads, case.head_size)
            self.parts: Any = torch.empty(MAX_PARTS, size, device=device)
        else:
            old: Any = kernels
            self.parts = old.Parts.empty(MAX_PARTS, case.num_heads, case.head_size, torch.device(device))
        sinks = torch.randn(case.num_heads, generator=generator, device=device)
        self.sinks = sinks if case.has_sinks else None
        self._tables = torch.from_numpy(tables).to(device)

    def launches(
        self, q: Tensor, decodes: Sequence[Decode], prompts: Sequence[Prompt], siblings: Sequence[Siblings] = (),
        sizes: Sizes | None = None, *, is_graph: bool = False,
    ) -> Callable[[Tensor, int], None]:  # fmt: skip
        """Return what computes these rows, the decodes first, into out [T, H, D] in a layer."""
        case = self.case
        sizes = sizes or case.sizes()
        starts, owners = (np.array([row[i] for row in decodes], np.int32) for i in (0, 1))
        window = 0 if siblings else case.window
        work = plan_work(starts, owners, siblings, prompts, len(q), sizes, window)
        positions = [row.position for row in decodes]
        for prompt in prompts:
            positions += range(prompt.start, prompt.start + prompt.length)
        on_device = [self._send(np.array(positions, np.int32)), *map(self._send, work)]
        lists = [on_device[2], on_device[3]]
        settings: dict[str, int] = {}
        if is_graph:  # as many programs as there are in a graph, the rest of them empty
            settings = {"num_spare": SPARE} if HAS_PIECES else {}
            most = len(decodes) + sizes.target // sizes.num_kv_heads + 1 + SPARE
            lists[0] = torch.nn.functional.pad(lists[0], (0, 0, 0, most - len(lists[0])))
        narrow, wide = tilings(case.head_size, q.itemsize, **({} if HAS_PIECES else {"is_fp8": case.kind == "fp8"}))
        num_merged = work.num_merged

        def run(out: Tensor, layer: int) -> None:
            keys, scales = self.layers[layer]
            for items, tiling in ((lists[1], wide), (lists[0], narrow)):
                if len(items):
                    attend(
                        q, keys, self._tables, on_device[0], items, on_device[1], self.parts, out, tiling=tiling,
                        scale=case.head_size**-0.5, window=case.window, cap=case.cap, sinks=self.sinks, scales=scales,
                        **(settings if items is lists[0] else {}),
                    )  # fmt: skip
            if num_merged:
                merge(self.parts, on_device[1], out[:num_merged], self.sinks)

        return run

    def run(self, q: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        out = torch.full_like(q, float("nan"))
        self.launches(q, *arguments, **settings)(out, 0)
        return out

    def _send(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


# Bits


class Found(NamedTuple):
    way: str
    num_rows: int
    num_differing: int


def _tables(context: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return 260 tables, the number of blocks, and a block that must not be read.

    Table 0 is the sequence. Those up to 255 begin with its blocks, table 256 has copies of them from the middle on, and
    the last is of another sequence.
    """
    num_blocks = -(-context // BLOCK)
    tables = np.zeros((260, num_blocks), np.int32)
    tables[:] = 1 + np.arange(num_blocks)
    middle = num_blocks // 2
    tables[256, middle:] += num_blocks
    tables[257:] = 1 + 2 * num_blocks + np.arange(num_blocks)
    return tables, 2 + 3 * num_blocks, 1 + 3 * num_blocks


def _positions(context: int, count: int) -> list[int]:
    """Return positions all over the context, and those at the ends of blocks and pieces."""
    ends = [end + more for end in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) for more in (-1, 0, 1)]
    found = {0, context - 1, *ends, *range(17, context, max(context // count, 1))}
    positions = sorted(position for position in found if position < context)
    return positions[:: max(len(positions) // (2 * count), 1)]


def differing_rows(
    device: str, case: Case, context: int = CONTEXT, num_others: int = 255, num_positions: int = 40
) -> list[Found]:
    """Compute rows of one sequence in many ways, and count those whose bits are not those of one long prompt."""
    tables, num_blocks, poison = _tables(context)
    bench = Bench(case, tables, num_blocks, device)
    half, copied = tables[0, len(tables[0]) // 2 :], tables[256, len(tables[0]) // 2 :]
    for tensor in bench.layers[0]:
        if tensor is not None:
            tensor[torch.from_numpy(copied).long()] = tensor[torch.from_numpy(half).long()]
    keys, scales = bench.layers[0]
    if scales is None:
        keys[poison] = float("inf")
    else:
        keys[poison], scales[poison] = 0x7F, float("nan")
    generator = torch.Generator(device).manual_seed(2)
    shape = (context, case.num_heads, case.head_size)
    queries = (2 * torch.randn(shape, generator=generator, device=device)).to(case.dtype)
    others = torch.randn((600, *shape[1:]), generator=generator, device=device).to(case.dtype)
    found: list[Found] = []
    expected = torch.empty_like(queries)

    def compare(way: str, positions: Sequence[int], out: Tensor) -> None:
        differs = (out.view(len(out), -1) != expected[positions].view(len(out), -1)).any(1)
        found.append(Found(way, len(positions), int(differs.sum())))

    def chunks(size: int, most: int, sizes: Sizes | None = None) -> Tensor:
        parts = []
        for start in range(0, most, size):
            length = min(size, most - start)
            one = length == 1
            decodes, prompts = [Decode(start, 0)] * one, [Prompt(0, length, start, 0)] * (not one)
            parts.append(bench.run(queries[start : start + length], decodes, prompts, (), sizes))
        return torch.cat(parts)

    expected.copy_(chunks(context, context, case.sizes(1)))
    assert bool(expected.isfinite().all()), case
    plain = _plain(bench, queries[-1], context - 1)
    assert float((expected[-1].double() - plain).abs().max()) < 0.02 * float(plain.abs().max()), case
    for size in (13, 64, 512, 2048):
        most = context if size > 13 else min(context, 12 * num_others)
        compare(f"chunks of {size}", range(most), chunks(size, most))
    some = [position for position in _positions(context, num_positions) if position > 0]
    for target in (528, 1):
        sizes = case.sizes(target)
        rows = [bench.run(queries[[at]], [Decode(at, 0)], (), (), sizes) for at in some]
        compare(f"decodes alone, {target} programs", some, torch.cat(rows))
        rows = []
        for at in some[::4]:  # beside 255 others, and a prompt
            number = at % num_others
            decodes = [Decode((at * 31 + 7 * row) % context, 257) for row in range(num_others)]
            decodes.insert(number, Decode(at, 0))
            q = torch.cat((others[:number], queries[[at]], others[number : num_others + 37]))
            prompts = [Prompt(num_others + 1, 37, at, 258)] * (at + 37 < context)
            rows.append(bench.run(q[: len(decodes) + 37 * len(prompts)], decodes, prompts, (), sizes)[[number]])
        compare(f"decodes beside others, {target} programs", some[::4], torch.cat(rows))
    many = _positions(context, num_others)[-256:]
    compare("many decodes", many, bench.run(queries[many], [Decode(at, row) for row, at in enumerate(many)], ()))
    _compare_groups(bench, queries, compare, context)
    if case.window:
        _compare_behind_windows(bench, queries, compare, _positions(context, num_positions), poison)
    return found


def _plain(bench: Bench, q: Tensor, position: int) -> Tensor:
    """Return attention of one row in fp64: only that the bits are those of the right numbers."""
    case = bench.case
    layer, scales = bench.layers[0]
    blocks = layer[torch.from_numpy(bench.tables[0]).long().to(layer.device)]  # [blocks, 2, K, BLOCK, D]
    numbers = blocks.double() if scales is None else blocks.view(torch.float8_e4m3fn).double()
    if scales is not None:
        numbers *= scales[torch.from_numpy(bench.tables[0]).long().to(layer.device)].double()[..., None]
    first = max(position + 1 - case.window, 0) if case.window else 0
    seen = numbers.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first : position + 1]  # [2, K, keys, D]
    scores = torch.einsum("kgd,knd->kgn", q.double().view(case.num_kv_heads, -1, case.head_size), seen[0])
    scores *= case.head_size**-0.5
    if case.cap:
        scores = case.cap * torch.tanh(scores / case.cap)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(-1)
    if bench.sinks is not None:
        total = total + (bench.sinks.double().view(case.num_kv_heads, -1) - peak[..., 0]).exp()
    mean = torch.einsum("kgn,knd->kgd", weights, seen[1]) / total[..., None]
    return mean.reshape(case.num_heads, case.head_size)


Compare = Callable[[str, Sequence[int], Tensor], None]


def _compare_groups(bench: Bench, queries: Tensor, compare: Compare, context: int) -> None:
    sizes = bench.case.sizes()
    for count in (4, 16, 250)[: 2 + (context == CONTEXT)]:
        ends = [context - 1 - 31 * row % (context // 3) for row in range(count)]
        starts, owners = np.array(ends, np.int32), np.arange(count, dtype=np.int32)
        grouping = find_siblings(bench.tables, owners, starts, sizes)
        assert grouping is not None
        order = grouping.order.tolist()
        rows = [ends[row] for row in order]
        decodes = [Decode(ends[row], row) for row in order]
        compare(f"{count} siblings", rows, bench.run(queries[rows], decodes, (), grouping.siblings, sizes))
    ends = [context - 1 - 5 * row for row in range(12)]  # of the first half, and eight of them of more
    owners = np.array([*range(8), *[256] * 4], np.int32)
    grouping = find_siblings(bench.tables, owners, np.array(ends, np.int32), sizes)
    assert grouping is not None
    order = grouping.order.tolist()
    rows = [ends[row] for row in order]
    decodes = [Decode(ends[row], int(owners[row])) for row in order]
    compare(
        f"{len(grouping.siblings)} nested groups", rows, bench.run(queries[rows], decodes, (), grouping.siblings, sizes)
    )
    for start in (context // 3, context // 2, context - 6):
        rows = list(range(start, start + 5))
        siblings = group_drafts([0] * 5, rows, sizes)
        assert siblings
        out = bench.run(queries[rows], [Decode(at, 0) for at in rows], (), siblings, sizes)
        compare(f"drafts of 5 at {start}", rows, out)


def _compare_behind_windows(bench: Bench, queries: Tensor, compare: Compare, positions: list[int], poison: int) -> None:
    """Blocks behind the window belong to others, who may have written infinities."""
    window = bench.case.window
    tables = bench.tables.copy()
    for row, at in enumerate(positions):
        tables[row, : max(at + 1 - window, 0) // BLOCK] = poison
    bench._tables.copy_(torch.from_numpy(tables))
    decodes = [Decode(at, row) for row, at in enumerate(positions)]
    compare("decodes, nothing behind the window", positions, bench.run(queries[positions], decodes, ()))
    for row, at in list(enumerate(positions))[:-1:3]:
        length = min(200, len(queries) - at)
        out = bench.run(queries[at : at + length], (), [Prompt(0, length, at, row)])
        compare("chunks, nothing behind the window", range(at, at + length), out)
    bench._tables.copy_(torch.from_numpy(bench.tables))


def _bits_of(case: Case) -> tuple[str, list[Found]]:
    try:
        return case.name, differing_rows("cuda", case)
    except Exception as error:
        return f"{case.name}: {error!r}", [Found("failed", 0, 1)]


def compare_bits(names: Sequence[str], num_jobs: int) -> bool:
    cases = [case for case in CASES if not names or any(case.name.startswith(name) for name in names)]
    is_equal = True
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        for name, found in pool.map(_bits_of, cases):
            rows, differing = sum(one.num_rows for one in found), sum(one.num_differing for one in found)
            print(f"{name}: {differing} of {rows} rows differ", flush=True)
            for way in dict.fromkeys(one.way for one in found if one.num_differing):
                of = [one for one in found if one.way == way]
                print(f"    {way}: {sum(one.num_differing for one in of)} of {sum(one.num_rows for one in of)}")
            is_equal &= not differing
    return is_equal


# Time


class Load(NamedTuple):
    name: str
    decodes: tuple[int, int] = (0, 0)  # number, and keys of each
    prompts: tuple[int, int] = (0, 0)  # number, and tokens of each
    cached: int = 0  # tokens before each prompt
    shared: int = 0  # keys at the beginning that all decodes share


LOADS = [
    *(Load(f"decode {count} x {keys}", (count, keys)) for count, keys in ((1, 1024), (1, 2048), (1, 8192), (1, 32768))),
    *(
        Load(f"decode {count} x {keys}", (count, keys))
        for count, keys in ((4, 2048), (32, 1024), (256, 1024), (8, 16384))
    ),
    Load("decode 32 x 3000, 2500 shared", (32, 3000), shared=2500),
    Load("decode 256 x 1500, 1000 shared", (256, 1500), shared=1000),
    *(
        Load(f"prefill {count} x {tokens}", prompts=(count, tokens))
        for count, tokens in ((1, 2048), (8, 512), (1, 16384))
    ),
    Load("prefill 512 after 16384", prompts=(1, 512), cached=16384),
]


def _loaded(case: Case, load: Load) -> tuple[Bench, Tensor, Callable[[Tensor, int], None]]:
    count, keys = load.decodes
    num_prompts, tokens = load.prompts
    blocks = [-(-keys // BLOCK)] * count + [-(-(load.cached + tokens) // BLOCK)] * num_prompts
    firsts = np.cumsum([1, *blocks])
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    for row, size in enumerate(blocks):
        tables[row, :size] = firsts[row] + np.random.default_rng(row).permutation(size)
        tables[row, : load.shared // BLOCK] = tables[0, : load.shared // BLOCK]
    num_bytes = int(firsts[-1]) * 2 * case.num_kv_heads * BLOCK * case.head_size * case.dtype.itemsize
    num_layers = min(max(256 * 2**20 // num_bytes, 1), 12)
    bench = Bench(case, tables, int(firsts[-1]), "cuda", num_layers)
    num_rows = count + num_prompts * tokens
    q = torch.randn(num_rows, case.num_heads, case.head_size, device="cuda").to(case.dtype)
    starts, owners = np.full(count, keys - 1, np.int32), np.arange(count, dtype=np.int32)
    grouping = find_siblings(tables, owners, starts, case.sizes()) if load.shared else None
    decodes = [Decode(keys - 1, int(row)) for row in (owners if grouping is None else grouping.order)]
    prompts = [Prompt(count + row * tokens, tokens, load.cached, count + row) for row in range(num_prompts)]
    siblings = () if grouping is None else grouping.siblings
    return bench, q, bench.launches(q, decodes, prompts, siblings, is_graph=not prompts)


def milliseconds(case: Case, load: Load) -> float:
    """Return the median time of a layer within a graph of several layers, which are too large for the cache."""
    bench, q, run = _loaded(case, load)
    out = torch.empty_like(q)
    num_layers = len(bench.layers)
    run(out, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            run(out, layer)
    times: list[float] = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / num_layers)
    return statistics.median(times)


def measure(kinds: Sequence[str]) -> None:
    print(f"with pieces of {attention_work.PIECE}" if HAS_PIECES else "before pieces")
    for kind in kinds:
        for num_groups in (2, 4):
            case = Case(kind, 128, num_groups, 8)
            for load in LOADS:
                time_us = 1000 * milliseconds(case, load)
                print(f"{kind} H={case.num_heads} K=8 D=128, {load.name}: {time_us:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("bits", "time"))
    parser.add_argument("--only", nargs="*", default=[], help="cases, or kinds of numbers for `time`")
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    if options.part == "time":
        measure(options.only or ["bf16", "fp8"])
    else:
        sys.exit(not compare_bits(options.only, options.jobs))


if __name__ == "__main__":
    main()
