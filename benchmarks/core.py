"""Measures the core: time per operation, step, prompt and audit, and the prefix tree without any hits.

    python benchmarks/core.py            all tables, about a minute
    python benchmarks/core.py --quick    a smoke run

Prints ratios measured in this run. The claims (docs/performance.md): the time per operation grows by less than 3x from
1e3 to 1e6 blocks, schedule + commit of 256 decodes takes less than 1 ms, and the tree at 0 % hits costs less than 1 %
of a step of the smallest real model.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from random import Random

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner
from quire.core.check import audit
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Fair
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import PackedPrompt, Priority, SamplingParams
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.engine.worker.protocol import Add, pack, to_worker
from quire.engine.worker.worker import MAX_VISITED_BLOCKS

CONTEXT = 2048
SMALLEST_STEP_MS = (
    1000 / 176
)  # SmolLM2-135M, one stream on 2 cores, the fastest llama.cpp reaches: the shortest real step


def nanoseconds(work: Callable[[], int], repeats: int) -> float:
    """Return the median time per operation of `work`, which returns how many operations it did."""
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        count = work()
        samples.append((time.perf_counter_ns() - begin) / count)
    return statistics.median(samples)


def operations(num_blocks: int, repeats: int) -> dict[str, float]:
    """Return times per block, in a pool full of cached content, so that every take evicts."""
    random = Random(num_blocks)
    cache = KVCacheManager(num_blocks)
    cached = [fill(cache, request_id, random) for request_id in range(max(1, (num_blocks - 1) // 65))]
    pool = cache.pool
    batch = list(pool.free)[:: max(1, pool.num_free // 64)][:64]
    lookups = random.sample(cached, min(8, len(cached)))
    fresh = [Request(i, random.choices(range(32_000), k=CONTEXT)) for i in range(8)]
    lives = [Request(i, random.choices(range(32_000), k=CONTEXT)) for i in range(40)]
    for request in [*lookups, *fresh]:
        cache.match(request)  # keys are computed once per request; only the walk is timed here

    def share_release() -> int:
        for _ in range(8):
            pool.share(batch)
            pool.release(batch)
        return 8 * len(batch)

    def match(requests: list[Request]) -> int:
        for request in requests:
            cache.match(request)
        return len(requests) * CONTEXT // cache.block_size

    def take() -> int:
        pool.take(16)
        return 16

    table = {
        "share + release": nanoseconds(share_release, repeats),
        "match, hit": nanoseconds(lambda: match(lookups), repeats),
        "match, miss (a request)": nanoseconds(lambda: match(fresh), repeats) * CONTEXT / cache.block_size,
        "life of a fresh block": nanoseconds(lambda: live(cache, lives.pop()), min(repeats, 40)),
    }
    # Last, because it evicts the content that the others look up, and only while there is something to evict.
    table["take, evicting"] = nanoseconds(take, min(repeats, (num_blocks - 1) // 32))
    return table


def live(cache: KVCacheManager, request: Request) -> int:
    """Run a new request: its blocks are taken (evicting others), hashed, published and released."""
    cache.grow(request, CONTEXT)
    request.num_computed = CONTEXT
    cache.publish(request)
    cache.release(request)
    return CONTEXT // cache.block_size


def fill(cache: KVCacheManager, request_id: int, random: Random) -> Request:
    """Compute one request and leave its blocks in the cache."""
    request = Request(request_id, random.choices(range(32_000), k=CONTEXT + 8))
    cache.grow(request, len(request.tokens))
    request.num_computed = len(request.tokens)
    cache.publish(request)
    cache.release(request)
    return Request(request_id, request.tokens[: CONTEXT + 1])


def result_of(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult(tuple((token,) if piece.wants_token else () for piece in plan.slices))


def decoding(num_running: int, num_blocks: int, context: int = CONTEXT) -> Scheduler:
    """Return a scheduler with `num_running` requests in the middle of their answers."""
    random = Random(1)
    scheduler = Scheduler(
        KVCacheManager(num_blocks),
        Fair(),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running + 65_536,
        max_chunk_tokens=context,
    )
    for request_id in range(num_running):
        scheduler.add(Request(request_id, random.choices(range(32_000), k=context)), now_ns=request_id)
    while any(len(request.tokens) == context for request in scheduler.running) or len(scheduler.waiting):
        plan = scheduler.schedule(now_ns=10**9)
        scheduler.commit(plan, result_of(plan))
    return scheduler


def step_us(scheduler: Scheduler, num_steps: int) -> float:
    """Return the median schedule + commit time with one step in flight, as the engine runs it."""
    samples = []
    before = scheduler.schedule(now_ns=2 * 10**9)
    for step in range(num_steps):
        result = result_of(before)
        begin = time.perf_counter_ns()
        plan = scheduler.schedule(now_ns=2 * 10**9 + step)
        scheduler.commit(before, result)
        samples.append((time.perf_counter_ns() - begin) / 1000)
        before = plan
    return statistics.median(samples)


def waiting_us(crowd: int) -> float:
    """Return the median time of a step that computes a chunk of a prompt for which `crowd` siblings wait."""
    prompt = Random(3).choices(range(32_000), k=8_192)
    scheduler = Scheduler(KVCacheManager(40_000), Fair(), max_num_seqs=crowd + 1, max_num_batched_tokens=crowd + 513)
    for request_id in range(crowd + 1):
        scheduler.add(Request(request_id, prompt, SamplingParams(max_tokens=1)), now_ns=request_id)
    samples = []
    for step in range(15):
        begin = time.perf_counter_ns()
        plan = scheduler.schedule(now_ns=(step + 1) * 10**7)
        samples.append((time.perf_counter_ns() - begin) / 1000)
        scheduler.commit(plan, result_of(plan))
    return statistics.median(samples)


def life_us(*, is_caching: bool, num_requests: int, num_decodes: int) -> float:
    """Return the mean scheduler time per step over whole requests that share nothing, one after the other."""
    random = Random(2)
    scheduler = Scheduler(KVCacheManager(1024, is_caching=is_caching), Fair(), max_num_seqs=1)
    sampling = SamplingParams(max_tokens=num_decodes)
    prompts = [random.choices(range(32_000), k=CONTEXT) for _ in range(num_requests)]
    spent, steps = 0, 0
    for request_id, prompt in enumerate(prompts):
        request = Request(request_id, prompt, sampling)
        begin = time.perf_counter_ns()
        scheduler.add(request, now_ns=0)
        while scheduler.has_work:
            plan = scheduler.schedule(now_ns=0)
            scheduler.commit(plan, result_of(plan))
            steps += 1
        spent += time.perf_counter_ns() - begin
    return spent / steps / 1000


def admission_us(num_tokens: int, repeats: int) -> dict[str, float]:
    """Return microseconds a worker spends on a prompt: from its message to the queue, and to find it in the cache."""
    prompt = PackedPrompt.of(Random(4).choices(range(32_000), k=num_tokens))
    frame = pack(Add((1,), prompt, SamplingParams(max_tokens=1), Priority.NORMAL, ""))[4:]
    capacity = Capacity(num_tokens // 32 + 10, 32, 8, num_tokens + 100, 32_000)
    runner = FakeRunner(capacity)
    engine = Engine(runner, make_scheduler(runner, EngineConfig()))
    cache, ids = engine.scheduler.cache, count(1)
    requests: list[Request] = []

    def add() -> int:
        message = to_worker.decode(frame)
        assert isinstance(message, Add)
        request_id = next(ids)
        engine.add(request_id, message.prompt, message.sampling)
        requests.append(engine.scheduler.requests[request_id])
        return 1

    def match() -> int:
        requests.append(Request(0, prompt))
        cache.match(requests[-1])
        return 1

    table = {"decode and Engine.add": nanoseconds(add, repeats) / 1000}
    table["match, nothing cached"] = nanoseconds(match, repeats) / 1000
    first = requests[0]
    cache.grow(first, num_tokens)
    first.num_computed = num_tokens
    cache.publish(first)
    table["match, all cached"] = nanoseconds(match, repeats) / 1000
    return table


def idle_audit(num_blocks: int) -> tuple[int, float, float]:
    """Audit a pool full of cached content. Return slices, and CPU milliseconds in total and of the longest slice."""
    random = Random(5)
    scheduler = Scheduler(KVCacheManager(num_blocks), Fair())
    for request_id in range((num_blocks - 1) // 65):
        fill(scheduler.cache, request_id, random)
    times, slices = [], audit(scheduler, max_blocks=MAX_VISITED_BLOCKS)
    while True:
        begin = time.process_time_ns()  # CPU time of this process: others may run in between
        is_over = next(slices, slices) is slices
        times.append((time.process_time_ns() - begin) / 1e6)
        if is_over:
            return len(times), sum(times), max(times)


def pin_us(num_blocks: int, repeats: int) -> float:
    """Return the time of a pin of 64 blocks that makes one of 64 other pins yield: half the pool is pinned."""
    board = (cache := KVCacheManager(num_blocks)).pins
    size = max(board.max_blocks // 500, 1)
    blocks = cache.pool.blocks[1:]
    for start in range(0, board.max_blocks, size):
        board.pin(f"{start % 7}/{start}", tuple(blocks[start : start + size]), 10**18)
    numbers = count()

    def pin() -> int:
        start = board.max_blocks + next(numbers) % (board.max_blocks - 64)
        board.pin(f"new/{start}", tuple(blocks[start : start + 64]), 10**18)
        return 1

    return nanoseconds(pin, repeats) / 1000


def row(cells: Iterable[object]) -> str:
    first, *rest = cells
    return f"  {first!s:26}" + "".join(f"{cell!s:>14}" for cell in rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small pools, few repeats")
    options = parser.parse_args()
    sizes = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000)
    repeats = 20 if options.quick else 200
    gc.disable()  # otherwise the collector walks the million blocks of the tables repeatedly
    print(f"quire core, Python {platform.python_version()} on {platform.machine()}\n")

    print("nanoseconds per block, pool full of cached content")
    print(row(["blocks", *(f"{size:,}" for size in sizes), "last/first"]))
    tables = [operations(size, repeats) for size in sizes]
    for name in tables[0]:
        cells = [table[name] for table in tables]
        print(row([name, *(f"{cell:,.0f}" for cell in cells), f"{cells[-1] / cells[0]:.2f}x"]))

    print(f"\nschedule + commit, one step in flight, all decoding at {CONTEXT} tokens")
    print(row(["running", "us a step", "us a request"]))
    for num_running in (1, 64) if options.quick else (1, 64, 256, 1024):
        took = step_us(decoding(num_running, num_running * 80 + 2), repeats)
        print(row([num_running, f"{took:,.0f}", f"{took / num_running:.2f}"]))

    print("\nschedule + commit of 8 decodes, by pool size")
    steps = [step_us(decoding(8, size), repeats) for size in sizes]
    print(row(["blocks", *(f"{size:,}" for size in sizes), "last/first"]))
    print(row(["us a step", *(f"{took:,.1f}" for took in steps), f"{steps[-1] / steps[0]:.2f}x"]))

    print("\nschedule, 8,192-token siblings waiting for the one that computes their prompt")
    crowds = (16, 64) if options.quick else (16, 256, 1_000)
    print(row(["waiting", *(f"{crowd:,}" for crowd in crowds)]))
    print(row(["us a step", *(f"{waiting_us(crowd):,.0f}" for crowd in crowds)]))

    lengths = (1_024, 8_192) if options.quick else (1_024, 16_384, 131_072)
    print("\nadmitting a prompt, microseconds")
    print(row(["tokens", *(f"{length:,}" for length in lengths)]))
    admissions = [admission_us(length, min(repeats, 20)) for length in lengths]
    for name in admissions[0]:
        print(row([name, *(f"{table[name]:,.0f}" for table in admissions)]))

    print(
        f"\nan idle worker's audit, {MAX_VISITED_BLOCKS} blocks per slice; a pin of 64 blocks with half the pool pinned"
    )
    pools = [size for size in sizes if size <= 100_000]
    print(row(["blocks", *(f"{size:,}" for size in pools)]))
    audits = [idle_audit(size) for size in pools]
    print(row(["slices", *(f"{num_slices:,}" for num_slices, _, _ in audits)]))
    print(row(["ms in all", *(f"{total:,.0f}" for _, total, _ in audits)]))
    print(row(["ms, the longest slice", *(f"{longest:.2f}" for _, _, longest in audits)]))
    print(row(["us a pin", *(f"{pin_us(size, repeats):,.0f}" for size in pools)]))

    lives = 3 if options.quick else 20
    pairs = [
        [life_us(is_caching=is_caching, num_requests=lives, num_decodes=256) for is_caching in (True, False)]
        for _ in range(3)
    ]
    on, off = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"\nprefix tree at 0 % hits, one stream, {CONTEXT} tokens in and 256 out")
    print(f"  {on:.1f} us a step with it, {off:.1f} without: {on - off:.1f} us, which is")
    share = (on - off) / 1000 / SMALLEST_STEP_MS
    print(f"  {share:.2%} of the shortest real step ({SMALLEST_STEP_MS:.1f} ms: SmolLM2-135M, one token, 2 cores)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
