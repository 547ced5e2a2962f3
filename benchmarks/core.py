"""Measures the core: time per operation, step and prompt, and the prefix tree without any hits.

    python benchmarks/core.py            all tables, about a minute
    python benchmarks/core.py --quick    a smoke run

Prints ratios measured in this run. The claims (docs/performance.md): the time per operation grows by less than 3x from
1e3 to 1e6 blocks, schedule + commit of 256 decodes takes less than 1 ms, and the tree at 0 % hits costs less than 1 %
of a step of the smallest real model.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from random import Random

import harness

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import Fair
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.engine.generation import GenerationRequest
from quire.engine.worker.protocol import Add, pack, to_worker

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
    """Run a new request: its blocks are taken (evicting others), hashed, published and released. Return how many."""
    cache.grow(request, len(request.tokens))
    request.num_computed = len(request.tokens)
    cache.publish(request)
    cache.release(request)
    return len(request.tokens) // cache.block_size


def fill(cache: KVCacheManager, request_id: int, random: Random) -> Request:
    """Compute one request and leave its blocks in the cache. Return one that finds them."""
    tokens = random.choices(range(32_000), k=CONTEXT + 8)
    live(cache, Request(request_id, tokens))
    return Request(request_id, tokens[: CONTEXT + 1])


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(tuple((7,) if piece.wants_token else () for piece in plan.slices))


def step(scheduler: Scheduler, now_ns: int) -> None:
    plan = scheduler.schedule(now_ns=now_ns)
    scheduler.commit(plan, result_of(plan))


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
        step(scheduler, now_ns=10**9)
    return scheduler


def step_us(scheduler: Scheduler, num_steps: int) -> float:
    """Return the median schedule + commit time with one step in flight, as the engine runs it."""
    samples = []
    before = scheduler.schedule(now_ns=2 * 10**9)
    for number in range(num_steps):
        result = result_of(before)
        begin = time.perf_counter_ns()
        plan = scheduler.schedule(now_ns=2 * 10**9 + number)
        scheduler.commit(before, result)
        samples.append((time.perf_counter_ns() - begin) / 1000)
        before = plan
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
            step(scheduler, now_ns=0)
            steps += 1
        spent += time.perf_counter_ns() - begin
    return spent / steps / 1000


def admission_us(num_tokens: int, repeats: int) -> float:
    """Return microseconds that a worker's loop is held up by a prompt: from its message to the queue."""
    prompt = PackedPrompt.of(Random(4).choices(range(32_000), k=num_tokens))
    frame = pack(Add((1,), GenerationRequest(prompt, SamplingParams(max_tokens=1))))[4:]
    runner = FakeRunner(Capacity(num_tokens // 32 + 10, 32, 8, num_tokens + 100, 32_000))
    engine, ids = Engine(runner, make_scheduler(runner, EngineConfig())), count(1)

    def add() -> int:
        message = to_worker.decode(frame)
        assert isinstance(message, Add)
        engine.add(next(ids), message.request)
        return 1

    return nanoseconds(add, repeats) / 1000


# The tables


def show(title: str, heads: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n{title}")
    for first, *rest in (heads, *rows):
        print(f"  {first!s:26}" + "".join(f"{_cell(one):>14}" for one in rest))


def _cell(value: object) -> str:
    return str(value) if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def growth(values: Sequence[float]) -> list[object]:
    return [*values, f"{values[-1] / values[0]:.2f}x"]


def show_sizes(sizes: Sequence[int], repeats: int) -> None:
    tables = [operations(size, repeats) for size in sizes]
    rows = [[name, *growth([table[name] for table in tables])] for name in tables[0]]
    show("nanoseconds per block, pool full of cached content", ["blocks", *sizes, "last/first"], rows)
    steps = [step_us(decoding(8, size), repeats) for size in sizes]
    show(
        "schedule + commit of 8 decodes, by pool size",
        ["blocks", *sizes, "last/first"],
        [["us a step", *growth(steps)]],
    )


def show_steps(counts: Sequence[int], repeats: int) -> None:
    took = [step_us(decoding(count, count * 80 + 2), repeats) for count in counts]
    rows = [[f"{count:,}", us, us / count] for count, us in zip(counts, took, strict=True)]
    title = f"schedule + commit, one step in flight, all decoding at {CONTEXT} tokens"
    show(title, ["running", "us a step", "us a request"], rows)


def show_prompts(lengths: Sequence[int], repeats: int) -> None:
    times = [admission_us(length, min(repeats, 20)) for length in lengths]
    show("admitting a prompt, microseconds", ["tokens", *lengths], [["decode and Engine.add", *times]])


def show_tree(num_lives: int) -> None:
    sides = {
        "with": lambda _: life_us(is_caching=True, num_requests=num_lives, num_decodes=256),
        "without": lambda _: life_us(is_caching=False, num_requests=num_lives, num_decodes=256),
    }
    with_us, without_us = map(statistics.median, harness.alternate(sides, 3).values())
    print(f"\nprefix tree at 0 % hits, one stream, {CONTEXT} tokens in and 256 out")
    print(f"  {with_us:.1f} us a step with it, {without_us:.1f} without: {with_us - without_us:.1f} us, which is")
    share = (with_us - without_us) / 1000 / SMALLEST_STEP_MS
    print(f"  {share:.2%} of the shortest real step ({SMALLEST_STEP_MS:.1f} ms: SmolLM2-135M, one token, 2 cores)")


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="small pools, few repeats")
    is_quick = parser.parse_args().quick
    sizes = (1_000, 10_000) if is_quick else (1_000, 10_000, 100_000, 1_000_000)
    repeats = 20 if is_quick else 200
    gc.disable()  # otherwise the collector walks the million blocks of the tables repeatedly
    print(f"quire core, Python {platform.python_version()} on {platform.machine()}")
    show_sizes(sizes, repeats)
    show_steps((1, 64) if is_quick else (1, 64, 256, 1024), repeats)
    show_prompts((1_024, 8_192) if is_quick else (1_024, 16_384, 131_072), repeats)
    show_tree(3 if is_quick else 20)


if __name__ == "__main__":
    main()
