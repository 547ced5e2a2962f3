"""Drives a runner with hand-made plans over whole contexts or window blocks, and compares distributions.

`WindowBlocks` takes the part of the scheduler. It gives blocks in a random order, frees those behind the window after
every step and fills freed blocks with NaN, so that any read of them shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from quire.backends.base import Runner
from quire.backends.torch.kv_store import KVStore
from quire.core.step import BlockCopy, SeqSlice, StepPlan
from quire.core.values import SamplingParams

VOCAB = 160
Take = tuple[int, int]  # request, number of its tokens to compute


class Blocks:
    """Blocks of whole contexts, in a random order."""

    def __init__(self, store: KVStore, rng: Random) -> None:
        self.size = store.block_size
        self.free = rng.sample(range(1, store.num_blocks), store.num_blocks - 1)
        self.tables: dict[int, list[int]] = {}

    def grow(self, request: int, end: int) -> list[int]:
        table = self.tables.setdefault(request, [])
        while len(table) * self.size < end:
            table.append(self.free.pop())
        return table


class WindowBlocks(Blocks):
    def __init__(self, store: KVStore, rng: Random, window: int) -> None:
        super().__init__(store, rng)
        self.free = rng.sample(range(1, store.num_window_blocks), store.num_window_blocks - 1)
        self.window = window
        self.pools = [pool for shape, pool in store.pools.items() if shape.window]
        self.fill(self.free, float("nan"))

    def fill(self, blocks: Sequence[int], value: float) -> None:
        for pool in self.pools:
            pool[:, list(blocks)] = value

    def grow(self, request: int, end: int) -> list[int]:
        before = len(self.tables.get(request, ()))
        table = super().grow(request, end)
        self.fill(table[before:], 3.0)  # the content of another request: finite
        return table

    def commit(self, request: int, num_computed: int) -> None:
        """Free the blocks that no later token reads."""
        table = self.tables[request]
        for index in range(max(num_computed - self.window + 1, 0) // self.size):
            if table[index]:
                self.free.insert(0, table[index])
                self.fill([table[index]], float("nan"))
                table[index] = 0


class Driver:
    """Computes given tokens of several requests on one runner, and keeps the distribution after every slice."""

    def __init__(self, runner: Any, tokens: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.runner: Runner = runner
        self.tokens = tokens
        rng = Random(seed)
        store: KVStore = runner.store
        self.blocks = Blocks(store, rng)
        self.windows = WindowBlocks(store, rng, max(store.windows)) if store.windows else None
        self.computed = [0] * len(tokens)
        self.rows: dict[tuple[int, int], Tensor] = {}  # by request and position of its last token
        self.window_copies: tuple[BlockCopy, ...] = ()

    def slice(self, request: int, count: int, **changes: Any) -> SeqSlice:
        start = self.computed[request]
        end = start + count
        made = SeqSlice(
            request_id=request,
            epoch=0,
            batch_index=request,
            tokens=self.tokens[request][start:end],
            start=start,
            length=count,
            block_table=self.blocks.grow(request, end),
            history=self.tokens[request],
            wants_token=True,
            sampling=SamplingParams(temperature=0.0, logprobs=VOCAB),
            num_prompt_tokens=1,
            window_table=() if self.windows is None else self.windows.grow(request, end),
        )
        return made._replace(**changes)

    @torch.inference_mode()
    def step(self, *takes: Take, **changes: Any) -> None:
        slices = [self.slice(*take, **changes) for take in takes]
        self.runner.forward(StepPlan(tuple(slices), (), (), self.window_copies))
        self.window_copies = ()
        self.runner.sample(None)
        result = self.runner.collect()
        assert not result.failures
        for index, (request, count) in enumerate(takes):
            self.computed[request] += count
            row = torch.full((VOCAB,), float("nan"))
            found, values = zip(*result.logprobs[index][0].top, strict=True)
            row[torch.tensor(found)] = torch.tensor(values)
            self.rows[request, self.computed[request] - 1] = row
            if self.windows is not None:
                self.windows.commit(request, self.computed[request])


def difference(first: Driver, second: Driver) -> float:
    """Return the largest difference of log-probabilities. NaN if any is NaN."""
    assert first.rows.keys() == second.rows.keys()
    found = torch.stack([(row - second.rows[key]).abs() for key, row in first.rows.items()])
    assert found.isfinite().all()
    return float(found.max())


def check_shared_keys(reference: Any, runner: Any, num_shared: int, bound: float) -> None:
    """A second request computes a cached prefix again for its window: it reads the shared blocks and leaves them."""
    tokens = [random_tokens(60, 1)] * 2
    alone, driver = Driver(reference, tokens), Driver(runner, tokens)
    alone.step((1, 34))
    alone.step((1, 1))
    driver.step((0, 34))
    full, tail = divmod(num_shared, runner.store.block_size)
    shared = driver.blocks.tables[0][: full + (tail > 0)]
    driver.blocks.tables[1] = shared[:]
    driver.rows.clear()
    pools = [pool for shape, pool in runner.store.pools.items() if not shape.window]
    before = [pool[:, shared].clone() for pool in pools]
    for pool in pools:
        pool[:, shared[full:], :, :, tail:] = 7.0  # the end of the block is ours to write
    driver.step((1, 34), kv_start=num_shared)
    driver.step((1, 1), kv_start=num_shared)
    assert difference(alone, driver) <= bound
    for old, pool in zip(before, pools, strict=True):
        assert torch.equal(old[:, :full], pool[:, shared[:full]])
        assert torch.equal(old[:, full:, :, :, :tail], pool[:, shared[full:], :, :, :tail])
        assert not pool[:, 0].any()  # the null block


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
