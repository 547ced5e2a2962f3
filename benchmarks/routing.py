"""Routes a million requests to a hundred replicas, on paper: how much is reused, how even the load is, what it costs.

    PYTHONPATH=. python benchmarks/routing.py                        # 1,000,000 requests, 100 replicas: minutes
    PYTHONPATH=. python benchmarks/routing.py --requests 20000 --replicas 10

The router is the real one: `PrefixRouter` of the core, fed by reports of the replicas. A replica
is a model of one: a cache of blocks, least recently used first, and two queues in time, for prompts and for answers.
`quire sim --replicas` runs whole schedulers instead, and is a thousand times slower. Requests are those of the scenario
`tree`: a system prompt, personas after it, and users with three turns each.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from quire.core.values import Priority
from quire.scale.routing import PrefixRouter, Prompt, ReplicaLoad

BLOCK = 32
NS = 1_000_000_000
TOKEN_NS = 24_000  # of a prompt: Llama-3-8B on an H200
STEP_NS = 12_000_000  # of an answer token, in a batch
TURNS = 3
REPORT_NS = NS // 2
ROUTERS = ("prefix", "sessions", "round-robin")


class Turn(NamedTuple):
    """A request: the keys of its whole blocks, and its lengths."""

    arrival_ns: int
    user: int
    keys: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int


def keys_after(parent: bytes, name: str, count: int) -> list[bytes]:
    """Keys of blocks that follow others, as chain keys do, from a name instead of tokens."""
    seed = blake2b(parent + name.encode(), digest_size=8).digest()
    return [(int.from_bytes(seed, "little") + number).to_bytes(9, "little")[:8] for number in range(count)]


def make_turns(num_requests: int, rate: float, num_personas: int, seed: int) -> Iterator[Turn]:
    """The requests in order of arrival. Few of them exist at a time."""
    random = Random(seed)
    pending: list[tuple[int, int, int, list[bytes], int]] = []  # arrival, user, turn, keys so far, tokens so far
    system = keys_after(b"", "system", 20)
    personas = [[*system, *keys_after(system[-1], f"persona {number}", 28)] for number in range(num_personas)]
    now_ns = user = num_made = 0
    while num_made < num_requests:
        if not pending or now_ns <= pending[0][0]:
            persona = personas[min(int(random.expovariate(1) * num_personas / 4), num_personas - 1)]
            heapq.heappush(pending, (now_ns, user, 0, persona, len(persona) * BLOCK))
            user += 1
            now_ns += round(random.expovariate(rate / TURNS) * NS)
            continue
        arrival_ns, who, turn, keys, tokens = heapq.heappop(pending)
        question, answer = random.randint(40, 200), random.randint(40, 160)
        prompt_tokens = tokens + question
        whole = [*keys, *keys_after(keys[-1], f"{who} {turn}", prompt_tokens // BLOCK - len(keys))]
        yield Turn(arrival_ns, who, tuple(whole), prompt_tokens, answer)
        num_made += 1
        if turn + 1 < TURNS:
            after_ns = arrival_ns + round(random.uniform(10, 40) * NS)
            heapq.heappush(pending, (after_ns, who, turn + 1, whole, prompt_tokens + answer))


class PaperReplica:
    """A cache and two queues."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.added: list[bytes] = []
        self.removed: list[bytes] = []
        self.busy_ns = self.num_hit_tokens = self.num_requests = 0
        self.prompts_end_ns = 0  # when all prompts so far are computed
        self._ends: list[int] = []  # of the answers, a heap

    def take(self, turn: Turn) -> int:
        """Serve a request. Returns the nanoseconds until its first token."""
        cache, hit = self.cache, 0
        for key in turn.keys:
            if key not in cache:
                break
            hit += 1
        for key in reversed(turn.keys[:hit]):
            cache.move_to_end(key)
        for key in reversed(turn.keys[hit:]):
            cache[key] = None
        self.added += turn.keys[hit:]
        while len(cache) > self.num_blocks:
            self.removed.append(cache.popitem(last=False)[0])
        num_cached = min(hit * BLOCK, turn.prompt_tokens - 1)
        work_ns = (turn.prompt_tokens - num_cached) * TOKEN_NS
        start_ns = max(turn.arrival_ns, self.prompts_end_ns)
        if self.num_running(turn.arrival_ns) >= self.max_num_seqs:
            start_ns = max(start_ns, heapq.heappop(self._ends))
        self.prompts_end_ns = start_ns + work_ns
        heapq.heappush(self._ends, self.prompts_end_ns + turn.output_tokens * STEP_NS)
        self.busy_ns += work_ns + turn.output_tokens * STEP_NS // self.max_num_seqs
        self.num_hit_tokens += num_cached
        self.num_requests += 1
        return self.prompts_end_ns - turn.arrival_ns

    def num_running(self, now_ns: int) -> int:
        while self._ends and self._ends[0] <= now_ns:
            heapq.heappop(self._ends)
        return len(self._ends)

    def load(self, now_ns: int) -> ReplicaLoad:
        queued = max(self.prompts_end_ns - now_ns, 0) // TOKEN_NS
        return ReplicaLoad((0, queued, 0), self.num_running(now_ns), self.max_num_seqs)


class ReportedRouter:
    """The router of the core, with reports that are up to half a second old."""

    def __init__(self, replicas: list[PaperReplica], max_blocks: int) -> None:
        self.replicas = replicas
        self.router = PrefixRouter(len(replicas), BLOCK, max_blocks)
        self.index = self.router.index
        self.next_report_ns = 0

    def choose(self, turn: Turn) -> int:
        if turn.arrival_ns >= self.next_report_ns:
            self._report(turn.arrival_ns)
        prompt = Prompt(turn.prompt_tokens, Priority.NORMAL, (turn.prompt_tokens + turn.output_tokens) // BLOCK)
        return self.router.choose(prompt, turn.keys, str(turn.user), turn.arrival_ns).replica

    def _report(self, now_ns: int) -> None:
        self.next_report_ns = now_ns + REPORT_NS
        for number, replica in enumerate(self.replicas):
            self.router.loads[number] = replica.load(now_ns)
            self.index.add(number, replica.added)
            self.index.remove(number, replica.removed)
            replica.added, replica.removed = [], []


def run(options: argparse.Namespace, router: str) -> None:
    replicas = [PaperReplica(options.blocks, options.max_num_seqs) for _ in range(options.replicas)]
    by_prefix = ReportedRouter(replicas, options.index_blocks)
    waits: deque[int] = deque(maxlen=100_000)
    num_tokens = routing_ns = 0
    began_s = time.monotonic()
    for number, turn in enumerate(make_turns(options.requests, options.rate, options.personas, options.seed)):
        begin_ns = time.perf_counter_ns()
        if router == "prefix":
            chosen = by_prefix.choose(turn)
        else:
            chosen = (turn.user if router == "sessions" else number) % len(replicas)
        routing_ns += time.perf_counter_ns() - begin_ns
        waits.append(replicas[chosen].take(turn))
        num_tokens += turn.prompt_tokens
    ordered = sorted(waits)
    busy = [replica.busy_ns for replica in replicas]
    hits = sum(replica.num_hit_tokens for replica in replicas) / num_tokens
    print(
        f"{router}: {hits:.1%} of {num_tokens:,} prompt tokens cached;"
        f" imbalance {max(busy) * len(busy) / sum(busy):.2f};"
        f" TTFT p50 {ordered[len(ordered) // 2] / 1e6:.0f} ms, p95 {ordered[len(ordered) * 95 // 100] / 1e6:.0f} ms;"
        f" {routing_ns / options.requests / 1000:.0f} us per decision; index {len(by_prefix.index):,} blocks,"
        f" {by_prefix.index.num_bytes / 1e6:.1f} MB; took {time.monotonic() - began_s:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: 15 per replica")
    parser.add_argument("--personas", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=8_000, help="of each replica")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--index-blocks", type=int, default=500_000, help="limit of the router's index")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.rate = options.rate or 15.0 * options.replicas
    for router in options.routers.split(","):
        run(options, router)


if __name__ == "__main__":
    main()
