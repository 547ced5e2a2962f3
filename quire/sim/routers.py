"""Routers of a simulated cluster: how the replica for a request is chosen."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Protocol

from quire.core.cache.block import BLOCK_SIZE
from quire.core.cache.chain import TokenChain, hash_block_tokens, root_key
from quire.core.policy import NS_PER_S
from quire.scale.prefix_index import DEFAULT_MAX_BLOCKS
from quire.scale.routing import PrefixRouter, Prompt, ReplicaLoad
from quire.sim.traces import TraceRequest

NUM_POINTS = 100  # of each replica on the ring of consistent hashing


class Router(Protocol):
    def choose(self, number: int, one: TraceRequest) -> int:
        """The replica for request `number` of a trace."""

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Take what a replica says of itself, from time to time."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def choose(self, number: int, one: TraceRequest) -> int:
        del one
        return number % self._num_replicas

    def report(self, replica: int, load: ReplicaLoad) -> None: ...


class PowerOfTwo:
    """Of two random replicas, the one with fewer requests. Counts its own between reports."""

    def __init__(self, num_replicas: int) -> None:
        self._counts = [0] * num_replicas
        self._random = Random(0)

    def choose(self, number: int, one: TraceRequest) -> int:
        del number, one
        count = len(self._counts)
        pair = self._random.sample(range(count), 2) if count > 1 else [0]
        chosen = min(pair, key=self._counts.__getitem__)
        self._counts[chosen] += 1
        return chosen

    def report(self, replica: int, load: ReplicaLoad) -> None:
        self._counts[replica] = load.num_requests


class ConsistentHash:
    """By the session of a request, or by the start of its prompt if it has none. Knows no load."""

    def __init__(self, num_replicas: int) -> None:
        places = [(replica, point) for replica in range(num_replicas) for point in range(NUM_POINTS)]
        ring = sorted((_hash(f"{replica} {point}"), replica) for replica, point in places)
        self._points: list[int] = [point for point, _ in ring]
        self._replicas: list[int] = [replica for _, replica in ring]

    def choose(self, number: int, one: TraceRequest) -> int:
        name = f"{one.salt} {one.session or one.prompt_ids(number)[:BLOCK_SIZE]}"
        return self._replicas[bisect_left(self._points, _hash(name)) % len(self._points)]

    def report(self, replica: int, load: ReplicaLoad) -> None: ...


class ByPrefix:
    """By expected work: cached prefixes, queues and memory (`quire.scale.routing`)."""

    def __init__(self, num_replicas: int, block_size: int = BLOCK_SIZE, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._router = PrefixRouter(num_replicas, block_size, max_blocks)
        self.index = self._router.index
        self.num_expected_tokens: dict[int, int] = {}  # request -> prompt tokens that its replica should compute

    def choose(self, number: int, one: TraceRequest) -> int:
        tokens = one.prompt_ids(number)
        chain = TokenChain(root_key(b"", one.salt), array("I", tokens), self._block_size, hash_block_tokens)
        keys = [chain.key(index) for index in range((len(tokens) - 1) // self._block_size)]
        num_blocks = -(-(len(tokens) + one.output_tokens) // self._block_size)
        prompt = Prompt(len(tokens), one.priority, num_blocks)
        chosen = self._router.choose(prompt, keys, one.session, round(one.arrival_s * NS_PER_S))
        self.num_expected_tokens[number] = len(tokens) - chosen.num_cached_tokens
        return chosen.replica

    def report(self, replica: int, load: ReplicaLoad) -> None:
        self._router.loads[replica] = load


ROUTERS: dict[str, Callable[[int], Router]] = {
    "prefix": ByPrefix,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "consistent-hash": ConsistentHash,
}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def imbalance(values: Sequence[float]) -> float:
    """The largest value, relative to the mean."""
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
