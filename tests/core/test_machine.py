"""A hypothesis state machine for pool, tree and cache manager: any order of calls, all invariants after each.

The world simulation calls them through the scheduler. Here they are called directly, in orders that no scheduler would
choose, and hypothesis shrinks a failure to the shortest sequence of calls.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.cache import pack_tokens
from quire.core.kv_cache import KVCacheManager
from quire.core.request import Request
from quire.core.step import BlockCopy
from tests.core.helpers import check_cache, pin_tokens

SALTS = ("", "other")
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCacheManager(12, 2)
        self.requests: list[Request] = []
        self.copies: list[BlockCopy] = []  # of steps in flight
        self.pins: set[str] = set()
        self.next_id = 1

    @rule(prompt=tokens, salt=st.sampled_from(SALTS), wants_tail=st.booleans())
    def begin(self, prompt: list[int], salt: str, wants_tail: bool) -> None:
        request = Request(self.next_id, prompt, salt=salt)
        self.next_id += 1
        hit = self.cache.match(request)
        assert hit.num_tokens < len(prompt)
        contents = b"".join(block.tokens for block in hit.blocks)
        contents += b"" if hit.tail is None else hit.tail.tokens[: hit.num_tail_tokens * 4]
        assert contents == pack_tokens(prompt[: hit.num_tokens])
        if not wants_tail:
            hit = hit.without_tail()
        if self.cache.shortage(request, len(prompt), hit) > 0:
            return
        num_free = self.cache.pool.num_free
        shortage = self.cache.shortage(request, len(prompt), hit)
        self.copies += self.cache.grow(request, len(prompt), hit)
        assert self.cache.pool.num_free == -shortage <= num_free
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.requests))
        child = Request(self.next_id, parent.tokens[: parent.num_prompt_tokens], salt=parent.salt, parent=parent)
        self.next_id += 1
        hit = self.cache.fork(parent, child)
        if self.cache.shortage(child, len(child.tokens), hit) > 0:
            return
        self.copies += self.cache.grow(child, len(child.tokens), hit)
        assert child.block_table[: len(hit.blocks)] == parent.block_table[: len(hit.blocks)]
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), new=st.lists(st.integers(0, 2), max_size=3), publishes_tail=st.booleans())
    def compute(self, data: st.DataObject, new: list[int], publishes_tail: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if self.cache.shortage(request, len(request.tokens) + len(new)) > 0:
            return
        self.settle()
        self.cache.grow(request, len(request.tokens) + len(new))
        request.tokens.extend(new)
        request.num_computed = request.num_planned = len(request.tokens)
        self.cache.publish(request)
        if publishes_tail:
            self.cache.publish_tail(request)

    @rule()
    def settle(self) -> None:
        self.cache.settle(self.copies)
        self.copies = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.cache.release(request)

    @rule(prompt=tokens, salt=st.sampled_from(SALTS), name=st.sampled_from("abc"), ttl=st.integers(1, 3))
    def pin(self, prompt: list[int], salt: str, name: str, ttl: int) -> None:
        assert pin_tokens(self.cache, name, prompt, salt, ttl) <= len(prompt)

    @rule(now=st.integers(1, 3))
    def expire(self, now: int) -> None:
        self.cache.pins.expire(now)

    @rule()
    def yield_pin(self) -> None:
        self.cache.pins.yield_oldest()

    @rule()
    def evict_unused(self) -> None:
        self.cache.pool.evict_unused()
        assert self.cache.stats().num_cached == 0

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert len(self.cache.tree) == 0

    @invariant()
    def invariants_hold(self) -> None:
        held = [block_id for request in self.requests for block_id in request.block_table]
        held += [copy.source for copy in self.copies]
        check_cache(self.cache, held, {self.cache.tree.root(salt) for salt in SALTS})

    def teardown(self) -> None:
        self.settle()
        for request in self.requests:
            self.cache.release(request)
        self.cache.pins.clear()
        assert self.cache.pool.num_free == self.cache.pool.num_usable


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,  # CI runs are reproducible; `make sim` tries new seeds
    suppress_health_check=[HealthCheck.too_slow],
)
