"""Checks and times the copies of blocks between a GPU's KV pool and host memory (`CudaBlockIO`).

    PYTHONPATH=. python benchmarks/gpu_transfers.py
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_transfers.py --quick   # tiny shapes, no times: any machine

The pool has the shape of Llama-3-8B: 32 layers, 8 KV heads of 128, bf16, blocks of 32 tokens, 4 MiB in all layers. No
weights are needed. First bits are compared, also while other kernels overwrite what is exported. Then copies of 1 to
256 blocks are timed, beside one plain copy of pinned memory in the same run, and the steps of a synthetic model (which
reads 14 GB of weights) are timed alone, beside imports and beside exports. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from quire.backends.base import PendingCopy
from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.backends.torch.cuda_block_io import CudaBlockIO
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.state_store import StateStore
from quire.core.step import MemoryKind, MemoryRef

LLAMA = KVSpec((LayerKV(8, 128),) * 32)
# All kinds of memory, and layers of different shapes; the states are those of Qwen3.5-0.8B.
HYBRID = KVSpec(((LayerKV(4, 128, window=1024),) * 5 + (LayerKV(2, 256), LayerState(3, 6144, 16, 128, 128))) * 3)
TINY = KVSpec((LayerKV(2, 16), LayerKV(1, 32, window=16), LayerState(3, 24, 2, 8, 8)))
COUNTS = (1, 16, 64, 256)
REPEATS = 7
TARGET_MS = 25.0  # for 1 GiB, host to pool
TARGET_SLOWDOWN = 1.1  # of steps beside copies
MIB = 1 << 20
LAYERS, HIDDEN, WIDTH, ROWS = 32, 4096, 53248, 64  # of the synthetic model: as many weights as Llama-3-8B, 64 decodes


class Pool:
    """Pools of a model without its weights, with random content."""

    def __init__(self, spec: KVSpec, counts: tuple[int, int, int], device: torch.device) -> None:
        num_blocks, num_window_blocks, num_states = counts
        self.store = KVStore(spec, num_blocks, 32, torch.bfloat16, device, num_window_blocks)
        self.states = StateStore(spec, num_states, torch.bfloat16, device) if num_states else None
        self.counts = counts
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        started_s = time.perf_counter()
        self.io = CudaBlockIO(self.store, self.states, counts, "benchmark", self.stream)
        self.ready_s = time.perf_counter() - started_s
        self.pools = [
            self.store.layers_of(is_window=False),
            self.store.layers_of(is_window=True),
            self.states.pools() if self.states is not None else [],
        ]
        for pool in self.all_pools():
            words = pool.view(torch.uint8).view(-1)
            words.random_(256)
        self.wait()

    def all_pools(self) -> list[Tensor]:
        return [pool for pools in self.pools for pool in pools]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pieces(self, rng: Random, count: int | None = None) -> list[MemoryRef]:
        """Return pieces in a random order: all, or some blocks."""
        if count is not None:
            return [MemoryRef(MemoryKind.BLOCK, number) for number in rng.sample(range(1, self.counts[0]), count)]
        kinds = zip(MemoryKind, self.counts, strict=True)
        found = [MemoryRef(kind, number) for kind, total in kinds for number in range(1, total)]
        rng.shuffle(found)
        return found

    def content(self, ref: MemoryRef) -> Tensor:
        return torch.cat([pool[ref.index].reshape(-1).view(torch.uint8) for pool in self.pools[ref.kind]])

    def buffers(self, pieces: Sequence[MemoryRef], order: Random | None = None) -> list[memoryview]:
        """Return buffers side by side; with `order`, in a random order."""
        sizes = [self.io.sizes.of(ref.kind) for ref in pieces]
        whole, at, found = self.io.allocate(sum(sizes)), 0, []
        for size in sizes:
            found.append(whole[at : at + size])
            at += size
        if order is not None:
            assert len(set(sizes)) == 1
            order.shuffle(found)
        return found


def finish(copy: PendingCopy) -> None:
    while not copy.is_done():
        pass


def as_tensor(buffer: memoryview) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


# Bits


def check(name: str, is_right: bool) -> bool:
    print(f"  {'ok   ' if is_right else 'WRONG'} {name}")
    return is_right


@torch.inference_mode()
def check_round_trip(pool: Pool, pieces: list[MemoryRef]) -> bool:
    """Export, overwrite at once on the stream of the steps, then import into other places."""
    rng, io = Random(1), pool.io
    expected = [pool.content(ref).cpu() for ref in pieces]
    buffers = pool.buffers(pieces)
    copy = io.export(pieces, buffers)
    with torch.cuda.stream(pool.stream):
        for some in pool.all_pools():
            some[1:].view(torch.uint8).fill_(7)
    finish(copy)
    is_right = all(torch.equal(as_tensor(one), other) for one, other in zip(buffers, expected, strict=True))
    result = check(f"export of {len(pieces)} pieces that steps overwrite at once", is_right)
    places = list(pieces)
    for kind in MemoryKind:
        own = [at for at, ref in enumerate(pieces) if ref.kind is kind]
        for at, other in zip(own, rng.sample(own, len(own)), strict=True):
            places[at] = pieces[other]
    finish(io.import_(places, buffers))
    is_right = all(torch.equal(pool.content(ref).cpu(), one) for ref, one in zip(places, expected, strict=True))
    return check("import into other places", is_right) and result


@torch.inference_mode()
def check_order(pool: Pool) -> bool:
    """A step in flight still reads what an import will overwrite; many small calls follow each other."""
    rng, io = Random(2), pool.io
    pieces = pool.pieces(rng, min(64, pool.counts[0] - 1))
    old = [pool.content(ref) for ref in pieces]
    buffers = pool.buffers(pieces)
    for buffer in buffers:
        as_tensor(buffer).random_(256)
    pool.wait()
    with torch.cuda.stream(pool.stream):
        busy_work(pool.device)
        read = [pool.content(ref) for ref in pieces]
    finish(io.import_(pieces, buffers))
    pool.wait()
    result = check(
        "an import waits for steps that read the old content",
        all(torch.equal(one, two) for one, two in zip(read, old, strict=True)),
    )
    is_right = all(
        torch.equal(pool.content(ref).cpu(), as_tensor(one)) for ref, one in zip(pieces, buffers, strict=True)
    )
    result = check("and replaces it", is_right) and result
    copies, found = [], []
    for number, ref in enumerate(pieces):  # one call for each piece, each overwritten right after its call
        found.append(pool.buffers([ref])[0])
        copies.append(io.export([ref], found[-1:]))
        with torch.cuda.stream(pool.stream):
            for some in pool.pools[ref.kind]:
                some[ref.index].view(torch.uint8).fill_(number % 256)
    for copy in copies:
        finish(copy)
    is_right = all(torch.equal(as_tensor(one), as_tensor(two)) for one, two in zip(found, buffers, strict=True))
    return check("many exports of one piece", is_right) and result


def busy_work(device: torch.device) -> None:
    """Keep the current stream busy for some milliseconds."""
    size = 8192 if device.type == "cuda" else 64
    x = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(8):
        x = x @ x


# Times


def plain_copies(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Return GB/s of one copy of pinned memory, to the device and from it."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def timed(target: Tensor, source: Tensor) -> float:
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize(device)
            started_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started_s)
        return num_bytes / statistics.median(times) / 1e9

    return timed(there, host), timed(host, there)


def time_copies(pool: Pool) -> None:
    size = pool.io.sizes.block
    to_device, to_host = plain_copies(256 * size, pool.device)
    print(f"\nplain copies of {256 * size / 1e9:.2f} GB: {to_device:.1f} GB/s to the device, {to_host:.1f} from it")
    limits = f"{pool.io.pieces_per_step} beside a step, at most {pool.io.max_exports} exported at once"
    print(f"blocks of {size / MIB:.2f} MiB: {limits}; kernels and staging ready in {pool.ready_s:.2f} s")
    print("pieces  buffers   |  export ms   host ms   GB/s  of plain  |  import ms   host ms   GB/s  of plain")
    for count in COUNTS:
        for name, order in (("adjacent", None), ("scattered", Random(0))):
            pieces = pool.pieces(Random(count), count)
            buffers = pool.buffers(pieces, order)
            cells = []
            for call, plain in ((pool.io.export, to_host), (pool.io.import_, to_device)):
                total_s, host_s = timed_call(pool, partial(call, pieces, buffers))
                rate = count * size / total_s / 1e9
                cells.append(f"{1e3 * total_s:9.2f} {1e3 * host_s:9.3f} {rate:6.1f}   {rate / plain:6.0%}")
            print(f"{count:6}  {name:9} |  {cells[0]}  |  {cells[1]}")
    print(f"target: import of 1 GiB in at most {TARGET_MS:g} ms")


def timed_call(pool: Pool, call: Callable[[], PendingCopy]) -> tuple[float, float]:
    """Return the seconds until a copy is done, and those of the call itself."""
    totals, calls = [], []
    for _ in range(REPEATS):
        pool.wait()
        started_s = time.perf_counter()
        copy = call()
        calls.append(time.perf_counter() - started_s)
        finish(copy)
        totals.append(time.perf_counter() - started_s)
    return statistics.median(totals), statistics.median(calls)


def time_pinning(pool: Pool) -> None:
    print("\npinning: allocate, and torch.empty(pin_memory=True) of other memory, GB/s")
    for num_bytes in (64 * MIB, 256 * MIB, 1024 * MIB):
        times = []
        for _ in range(3):
            started_s = time.perf_counter()
            pool.io.allocate(num_bytes)
            times.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        other = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        other[::4096] = 0
        torch_s = time.perf_counter() - started_s
        rate = num_bytes / statistics.median(times) / 1e9
        print(f"  {num_bytes // MIB:5} MiB: {rate:6.2f}   torch {num_bytes / torch_s / 1e9:6.2f}")
        del other


# Beside steps


class Steps:
    """Steps of a synthetic model, enqueued as the runner does: one is in flight while the next is enqueued."""

    def __init__(self, pool: Pool) -> None:
        self._stream, device = pool.stream, pool.device
        weights = [torch.randn(WIDTH, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
        x = torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
        self._numbers = torch.zeros(16384, dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros(16384, dtype=torch.int32, device=device)
        self._results = [torch.zeros(256, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._graph = torch.cuda.CUDAGraph()
        pool.wait()
        with torch.cuda.stream(self._stream):
            torch.nn.functional.linear(x, weights[0])  # loads the library
            torch.cuda.synchronize(device)
            self._graph.capture_begin(capture_error_mode="thread_local")
            for weight in weights:
                torch.nn.functional.linear(x, weight)
            self._graph.capture_end()
        self._events: list[torch.cuda.Event] = []

    def run(self, num_steps: int, between: Callable[[], None]) -> list[float]:
        """Return the seconds from step to step. `between` is called before each step is enqueued."""
        ends = []
        for number in range(num_steps):
            between()
            with torch.cuda.stream(self._stream):
                self._inputs.copy_(self._numbers, non_blocking=True)
                self._graph.replay()
                self._results[number % 2].copy_(self._inputs[:256], non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)
            if len(self._events) > 1:
                self._events.pop(0).synchronize()
                ends.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(ends)]


class Load:
    """Starts a copy when the last one is done. Called between steps."""

    def __init__(self, start: Callable[[], PendingCopy]) -> None:
        self._start = start
        self._copy: PendingCopy | None = None
        self.num_done = 0

    def __call__(self) -> None:
        if self._copy is not None and self._copy.is_done():
            self.num_done += 1
            self._copy = None
        if self._copy is None:
            self._copy = self._start()


def time_beside_steps(pool: Pool) -> None:
    io, num_steps = pool.io, 200
    pieces = pool.pieces(Random(0), 256)
    buffers = pool.buffers(pieces, Random(1))
    few = pool.pieces(Random(1), io.pieces_per_step)
    steps = Steps(pool)
    steps.run(20, lambda: None)
    print(
        f"\nsteps beside copies, scattered buffers, {num_steps} steps each; target: at most {TARGET_SLOWDOWN:.2f} times"
    )
    alone = 0.0
    loads: list[tuple[str, Load | None, int]] = [
        ("alone", None, 0),
        ("imports of 256 blocks", Load(lambda: io.import_(pieces, buffers)), 256),
        (f"imports of {len(few)} blocks", Load(lambda: io.import_(few, buffers[: len(few)])), len(few)),
        (f"exports of {len(few)} blocks", Load(lambda: io.export(few, buffers[: len(few)])), len(few)),
        ("exports of 256 blocks", Load(lambda: io.export(pieces, buffers)), 256),
        ("alone again", None, 0),
    ]
    for name, load, count in loads:
        started_s = time.perf_counter()
        times = sorted(steps.run(num_steps, load or (lambda: None)))
        took_s = time.perf_counter() - started_s
        middle, slow = times[len(times) // 2], times[int(0.99 * len(times))]
        alone = alone or middle
        rate = load.num_done * count * io.sizes.block / took_s / 1e9 if load is not None else 0.0
        mean = statistics.fmean(times)
        print(
            f"  {name:22} {1e3 * middle:6.2f} ms per step ({middle / alone:.2f}), mean {1e3 * mean:.2f}"
            f" ({mean / alone:.2f} of the median alone), p99 {1e3 * slow:.2f}, copies {rate:.1f} GB/s"
        )
        pool.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes; without a GPU, only the bits are checked")
    parser.add_argument("--blocks", type=int, default=2048, help="of the pool of Llama-3-8B, 4 MiB each")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device), f"torch {torch.__version__}")
    elif not options.quick:
        print("there is no GPU here: use --quick")
        return 2
    with torch.inference_mode():
        print("bits, all kinds of memory:")
        hybrid = Pool(TINY if options.quick else HYBRID, (60, 50, 30), device)
        is_right = check_round_trip(hybrid, hybrid.pieces(Random(0)))
        is_right = check_order(hybrid) and is_right
        hybrid.io.close()
        del hybrid
        if not options.quick:
            pool = Pool(LLAMA, (options.blocks, 0, 0), device)
            print("bits, Llama-3-8B:")
            is_right = check_round_trip(pool, pool.pieces(Random(0), 1000)) and is_right
            is_right = check_order(pool) and is_right
            time_pinning(pool)
            time_copies(pool)
            time_beside_steps(pool)
            pool.io.close()
    print("all bits are right" if is_right else "BITS ARE WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
