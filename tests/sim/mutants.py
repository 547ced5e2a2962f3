"""Mutants: bugs inserted on purpose, as edits of the core's source. A test must find each of them."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_HYBRID = 1_000_000  # as in world.py, which a mutant's copy imports
WORLDS = "worlds"  # `found_by` of a mutant that the world simulation finds; otherwise the name of a test file


@dataclass(frozen=True, slots=True)
class Edit:
    file: str  # under quire/
    old: str  # must occur exactly once, so that a stale mutant is detected
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    found_by: str = WORLDS
    first_world: int = 0  # first seed to run: earlier worlds are known not to find it


def _mutant(name: str, file: str, old: str, new: str, found_by: str = WORLDS, *, first_world: int = 0) -> Mutant:
    return Mutant(name, (Edit(file, old, new),), found_by, first_world)


MUTANTS = (
    _mutant("unchained keys", "core/chain.py", "    state.update(parent_key)\n", ""),
    _mutant(
        "one salt matches another",
        "core/prefix.py",
        "return root_key(self._secret, salt)",
        'return root_key(self._secret, "")',
    ),
    _mutant(
        "full hit allowed",
        "core/kv_cache.py",
        "self.tree.match(self.chain(request), len(request.tokens) - 1)",
        "self.tree.match(self.chain(request), len(request.tokens))",
    ),
    _mutant(
        "evicted block left in the index",
        "core/block_pool.py",
        "descendants = self._tree.remove(block)",
        "descendants: list[KVCacheBlock] = []",
    ),
    _mutant(
        "publish before the KV exists",
        "core/planner.py",
        "        request.num_planned = end\n",
        "        request.num_planned = end\n        request.num_computed = min(end, num_known)\n        self._cache.publish(request)\n",
    ),
    _mutant(
        "hit not shared before take",
        "core/kv_cache.py",
        "        copies = self._start(request, hit) if not request.block_table else []\n",
        "        early = self.pool.take(max(0, -(-upto // self.block_size) - len(request.block_table) - len(hit.blocks) - (hit.tail is not None)))\n        copies = self._start(request, hit) if not request.block_table else []\n        request.block_table.extend(block.block_id for block in early)\n",
    ),
    _mutant(
        "leak on cancel",
        "core/scheduler.py",
        "        if request.state is RequestState.RUNNING:\n",
        "        if request.state is RequestState.RUNNING and reason is FinishReason.CANCELLED:\n            self._running.requests.remove(request)\n            self._running._free_batch_indices.append(request.batch_index)\n            request.epoch += 1\n        elif request.state is RequestState.RUNNING:\n",
    ),
    _mutant(
        "age lost on re-queue",
        "core/admission.py",
        "        victim.enqueued_ns = step.now_ns\n",
        "        victim.enqueued_ns = step.now_ns\n        victim.earlier_waits_ns = 0\n",
    ),
    _mutant("age earned while running", "core/admission.py", "        victim.enqueued_ns = step.now_ns\n", ""),
    _mutant(
        "running time counts as age",
        "core/admission.py",
        "victim.earlier_waits_ns = victim.waited_ns",
        "victim.earlier_waits_ns = step.now_ns - victim.arrived_ns",
    ),
    _mutant(
        "fork forgets its copy",
        "core/kv_cache.py",
        "            copies.append(BlockCopy(hit.tail.block_id, block.block_id))\n",
        "            pool.release((hit.tail,))\n",
    ),
    Mutant(
        "copy source reused",
        (
            Edit(
                "core/block_pool.py",
                "        self.share((source,))\n        return self.take(1)[0]",
                "        return self.take(1)[0]",
            ),
            Edit(
                "core/kv_cache.py",
                "        self.pool.release([self.pool.blocks[copy.source] for copy in copies])",
                "        return",
            ),
            Edit("core/check.py", "        _count(holders, [copy.source for copy in plan.copies])\n", "        pass\n"),
        ),
    ),
    Mutant(
        "old result applied to the new owner of a batch_index",
        (
            Edit(
                "core/scheduler.py",
                "            request = requests.get(piece.request_id)\n",
                "            request = next((r for r in self._running if r.batch_index == piece.batch_index), None)\n",
            ),
            Edit("core/scheduler.py", "request is None or request.epoch != piece.epoch:", "request is None:"),
        ),
    ),
    _mutant(
        "publish after preemption",
        "core/scheduler.py",
        "request is None or request.epoch != piece.epoch:",
        "request is None:",
    ),
    _mutant("preemption keeps the epoch", "core/running.py", "        request.epoch += 1\n", ""),
    _mutant(
        "position dropped while a twin is held",
        "core/prefix.py",
        "        if block.twins:\n            self._promote_twin(block, key)\n            return []\n",
        "",
    ),
    _mutant(
        "table cleared in place",
        "core/kv_cache.py",
        "        table = request.block_table\n        request.block_table = []",
        "        table = [*request.block_table]\n        request.block_table.clear()",
    ),
    _mutant("adoption of a longer tail", "core/prefix.py", " and run == tail.num_tokens", ""),
    _mutant(
        "adoption of a tail in use",
        "core/prefix.py",
        "tail.key is None and tail.ref_count == 0 and run",
        "tail.key is None and run",
    ),
    _mutant(
        "waiter of a cancelled owner stuck",
        "core/waiting.py",
        "while heap and (not is_owner or heap.first()[0][0] <= owner.num_computed):",
        "while heap and heap.first()[0][0] <= owner.num_computed:",
    ),
    _mutant(
        "equal draws for n > 1",
        "core/request.py",
        "replace(self.sampling, sample_index=sample_index)",
        "replace(self.sampling, sample_index=self.sampling.sample_index * sample_index)",
    ),
    _mutant(
        "null block handed out", "core/block_pool.py", "self.blocks[NULL_BLOCK_ID + 1 :]", "self.blocks[NULL_BLOCK_ID:]"
    ),
    _mutant("pins take the whole pool", "core/pins.py", "self.max_blocks = pool.num_usable // 2", "pool.num_usable"),
    _mutant(
        "revived blocks not counted", "core/kv_cache.py", "return num_new + num_revived - len", "return num_new - len"
    ),
    _mutant(
        "decodes not reserved",
        "core/planner.py",
        "self.max_num_batched_tokens - len(self._running), has",
        "self.max_num_batched_tokens, has",
    ),
    _mutant(
        "preemption within a tier",
        "core/policy.py",
        "waiting.priority < running.priority and self.urgency",
        "waiting.priority <= running.priority and self.urgency",
    ),
    _mutant(
        "preemption within a tier of the fair policy",
        "core/policy.py",
        "waiting.priority < running.priority and not",
        "waiting.priority <= running.priority and not",
    ),
    _mutant(
        "a tier that is owed is preempted",
        "core/policy.py",
        "waiting.priority < running.priority and not self._ledger.is_owed(running.priority)",
        "waiting.priority < running.priority",
    ),
    _mutant(
        "preempted again without progress",
        "core/admission.py",
        "                and not running.is_spared\n",
        "",
    ),
    _mutant(
        "growth preempts a request without progress",
        "core/planner.py",
        "if r.has_progressed or r is request)",
        "if True)",
        first_world=88,
    ),
    _mutant(
        "progress is not recorded",
        "core/admission.py",
        "        victim.num_preempted_at = max(victim.num_preempted_at, victim.num_computed)\n",
        "",
    ),
    _mutant(
        "served tokens not deducted from credit",
        "core/ledger.py",
        "changed = credit + gain - self._served[priority] * UNITS",
        "changed = credit + gain",
        "tests/core/test_ledger.py",
    ),
    _mutant(
        "spare capacity makes a debt",
        "core/ledger.py",
        "changed = max(changed, min(credit, 0))",
        "pass",
        "tests/core/test_ledger.py",
    ),
    _mutant(
        "no turn for a tier that is owed",
        "core/ledger.py",
        "owed = [priority for priority in self.credits if self.is_owed(priority)]",
        "owed: list[Priority] = []",
        "tests/core/test_fair.py",
    ),
    _mutant(
        "lower tiers go first",
        "core/ledger.py",
        "        for priority in TIERS:\n            yield Turn",
        "        for priority in reversed(TIERS):\n            yield Turn",
    ),
    _mutant(
        "decodes are not charged",
        "core/planner.py",
        "            self._ledger.charge_decodes(priority, tenant, num_tokens)\n",
        "            pass\n",
    ),
    _mutant(
        "prompts are not charged",
        "core/planner.py",
        "        self._ledger.charge(request, num_new)\n",
        "",
    ),
    _mutant(
        "outdated heap entry of a tenant is first",
        "core/tenants.py",
        "            elif now > time:\n                heapreplace(self._heap, (now, number, tenant))\n",
        "",
    ),
    _mutant(
        "idle tenants keep their credit",
        "core/tenants.py",
        "self._times[tenant] = max(self._times.get(tenant, 0), self._floor)",
        "self._times[tenant] = self._times.get(tenant, 0)",
        "tests/core/test_tenants.py",
    ),
    _mutant(
        "rationed rows do not alternate",
        "core/planner.py",
        "        request.last_step = self._num_steps\n",
        "",
        "tests/core/test_fair.py",
    ),
    _mutant(
        "rationed rows left out of an empty step",
        "core/planner.py",
        "        if not step.slices and step.left_out:\n            self._plan_left_out(step)\n",
        "",
        first_world=137,
    ),
    _mutant(
        "lower tiers lengthen a step without limit",
        "core/ledger.py",
        "self._alone_ns(cost, top) * SPARE_NUMERATOR // SPARE_DENOMINATOR",
        "self._alone_ns(cost, top) * 10",
        "tests/core/test_fair.py",
    ),
    _mutant(
        "tail published with uncomputed tokens",
        "core/kv_cache.py",
        "index, num_tail = divmod(request.num_computed, self.block_size)",
        "request.num_computed = min(request.num_planned, len(request.tokens))\n        index, num_tail = divmod(request.num_computed, self.block_size)",
    ),
    _mutant(
        "one token too many",
        "core/scheduler.py",
        "len(request.tokens) >= request.token_limit",
        "len(request.tokens) > request.token_limit",
    ),
    _mutant(
        "unknown token guessed",
        "core/planner.py",
        "tokens[start:end] if start < num_known else ()",
        "tokens[start:end] or tokens[-1:]",
    ),
    _mutant(
        "history without the prompt's hit",
        "core/planner.py",
        "                tokens,\n                wants_token",
        "                tokens[start:],\n                wants_token",
    ),
    _mutant(
        "descendants of an evicted block stay in the tree",
        "core/prefix.py",
        "return self._drop_descendants(key) if key in self._children else []",
        "return []",
    ),
    _mutant(
        "clock may run backwards",
        "core/scheduler.py",
        "self._now_ns = now_ns = max(self._now_ns, now_ns)",
        "self._now_ns = now_ns",
    ),
    _mutant(
        "a waiting head is overtaken",
        "core/planner.py",
        "                step.close(turn.tiers)  # no request overtakes a head that does not fit\n",
        "                return\n",
    ),
    _mutant(
        "head released before tail",
        "core/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        "tests/core/test_pool.py",
    ),
    _mutant(
        "the map misses blocks that lost their content",
        "core/block_pool.py",
        "                self._num_cached -= 1\n                self.free.remove(block)\n                self.free.prepend(block)\n                self._note((block,))\n",
        "                self._num_cached -= 1\n                self.free.remove(block)\n                self.free.prepend(block)\n",
        "tests/core/test_block_map.py",
    ),
    _mutant(
        "prompts beside answers without a limit",
        "core/planner.py",
        "        self._bound_prompts(step, len(running) - sum(map(len, wanting)))\n",
        "",
    ),
    _mutant(
        "unpublished blocks evicted last",
        "core/block_pool.py",
        "self.free.prepend(block)\n                else:",
        "self.free.append(block)\n                else:",
        "tests/core/test_pool.py",
    ),
    _mutant(
        "a child with other tokens counted as a hit",
        "core/children.py",
        "return after if after is not None and after.tokens == tokens else None",
        "return after",
    ),
    _mutant(
        "siblings do not wait",
        "core/admission.py",
        "        found = self._find_owner(step, request)\n",
        "        found = self._find_owner(step, request) if request.parent else None\n",
    ),
    _mutant("pins never expire", "core/scheduler.py", "        self.cache.pins.expire(now_ns)\n", ""),
    _mutant(
        "prompt logprobs from the cache",
        "core/kv_cache.py",
        "return self.is_caching and request.sampling.prompt_logprobs is None",
        "return self.is_caching",
    ),
    _mutant(
        "prompt logprobs from a parent",
        "core/admission.py",
        "parent.state is not RequestState.RUNNING or request.sampling.prompt_logprobs is not None:",
        "parent.state is not RequestState.RUNNING:",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "shared blocks counted as freed",
        "core/admission.py",
        "dropped[block] == blocks[block].ref_count and block not in kept",
        "holders[block] <= blocks[block].ref_count and block not in kept",
    ),
    _mutant(
        "a hit counted as freed",
        "core/admission.py",
        ".ref_count and block not in kept",
        ".ref_count",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "an evicted block stays the last child of its parent",
        "core/prefix.py",
        "            if parent is not None and parent.last_child is block:\n                parent.last_child = None\n",
        "",
    ),
    _mutant(
        "keys of cached blocks added twice",
        "core/chain.py",
        "self._keys += keys[len(self._keys) :]",
        "self._keys += keys",
        "tests/core/test_kv_cache.py",
    ),
    _mutant(
        "decode sits out while its input is in flight",
        "core/planner.py",
        "        if num_wanted <= 0:\n            return True\n",
        "        if num_wanted <= 0 or (step.has_in_flight and request.num_planned >= len(request.tokens) and len(self._running) > 1):\n            return True\n",
    ),
    _mutant(
        "long prompt sits out",
        "core/planner.py",
        "        if num_wanted <= 0:\n            return True\n",
        "        if num_wanted <= 0 or (num_wanted > 1 and step.allotted.get(request.request_id, 1) == 1):\n            return True\n",
    ),
    _mutant("released batch_indices not reported", "core/running.py", "return tuple(released)", "return ()"),
    _mutant(
        "fork waits for the first chunk only",
        "core/admission.py",
        "num_common = min(len(request.tokens), len(parent.tokens)) - 1",
        "num_common = 1",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "reused id receives old results",
        "core/scheduler.py",
        "        request.epoch = self._num_arrived << 32",
        "        request.epoch = 0",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "waiting requests overtake running prompts",
        "core/planner.py",
        "if wanting and (head is None or wanting[0][0] < self._head_turn_key(*head)):",
        "if wanting and head is None:",
        "tests/core/test_policy.py",
    ),
    _mutant(
        "both twins stay cached",
        "core/block_pool.py",
        "if block.parent_key is not None and self._tree.is_redundant(block):",
        "if False:",
    ),
    _mutant(
        "keys of running requests change with time",
        "core/policy.py",
        "        return request.enqueued_ns - request.earlier_waits_ns + request.priority * self._patience_ns\n",
        "        return request.enqueued_ns - request.earlier_waits_ns + request.priority * self._patience_ns + (request.state is RequestState.RUNNING) * request.waited_ns\n",
    ),
    _mutant(
        "pins keep the last blocks",
        "core/pins.py",
        "blocks = blocks[: self.max_blocks]",
        "blocks = blocks[-self.max_blocks :]",
        "tests/core/test_kv_cache.py",
    ),
    _mutant(
        "cached tokens of the last admission",
        "core/admission.py",
        "        else:\n            request.num_cached_tokens",
        "        if True:\n            request.num_cached_tokens",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "tails do not grow",
        "core/kv_cache.py",
        "        if block.tokens != tokens:\n",
        "        if not block.tokens:\n",
        "tests/core/test_kv_cache.py",
    ),
    _mutant(
        "budget given to tokens in flight",
        "core/planner.py",
        "request.token_limit - 1) - request.num_planned\n",
        "request.token_limit - 1) - request.num_computed\n",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "ordinary admission after a preemption",
        "core/admission.py",
        "        if not all(self._may_preempt(request, victim, step) for victim in step.victims):\n            return False",
        "        if False:\n            return False",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "later requests overtake a preempted one",
        "core/waiting.py",
        "return self._by_key.first()[0], self._by_arrival.first()[1]",
        "return self._by_key.first()",
    ),
    _mutant(
        "no batch row left for prefix waiters",
        "core/admission.py",
        "        if not is_entitled:\n",
        "        if False:\n",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "shares blocks of a parent it may preempt",
        "core/admission.py",
        "        if self._may_preempt(request, parent, step):\n            return hit",
        "        if False:\n            return hit",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "waits for a prefix that is never published",
        "core/admission.py",
        "if is_known and self.can_share(owner):",
        "if is_known:",
        "tests/core/test_scheduler.py",
    ),
    _mutant(
        "chain keys shared across salts",
        "core/chain.py",
        "        if self.root == other.root:\n            self._follow(other, known)\n",
        "        self._follow(other, known)\n",
        "tests/core/test_prefix.py",
    ),
    _mutant(
        "dropped pins still count for their owner",
        "core/pins.py",
        "        owner.num_blocks -= len(pin.blocks)\n",
        "",
        "tests/core/test_pins.py",
    ),
    _mutant(
        "a slice of an audit skips its last block",
        "core/check.py",
        "piece = slice(start, start + size)",
        "piece = slice(start, start + size - 1)",
        "tests/core/test_check.py",
    ),
    _mutant(
        "an audit continues after a change",
        "engine/worker/worker.py",
        "        self._is_audited = False\n        self._audit = None\n",
        "        self._is_audited = False\n",
        "tests/engine/test_audit.py",
    ),
    # Windows and recurrent states
    _mutant(
        "a snapshot is used after other tokens",
        "core/continuation.py",
        "state = found.get(run[: length * TOKEN_BYTES])",
        "state = next((one for one in found.values() if len(one.run) == length * TOKEN_BYTES), None)",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a snapshot is used one token too late",
        "core/continuation.py",
        "yield number * size + length, state",
        "yield min(number * size + length + 1, num_kv_tokens), state",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a window block is freed too early",
        "core/window_memory.py",
        "max(position - self.window + 1, 0)",
        "max(position - self.window + 2, 0)",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a hit needs one window block less",
        "core/continuation.py",
        "max(position - self._window + 1, 0)",
        "max(position - self._window + 1 + self._block_size, 0)",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a state is shared without a copy",
        "core/state_memory.py",
        "        return min(request.live_states, key=_position)\n",
        "        return request.state_slot or min(request.live_states, key=_position)\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a state is published before it exists",
        "core/state_memory.py",
        "if slot.position <= num_computed and not slot.is_published:",
        "if slot.position <= request.num_planned and not slot.is_published:",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a fork shares a state that its parent still writes",
        "core/state_memory.py",
        "            slot = self.pool.take()\n            slot.position = point\n",
        "            slot = self._next_live(request)\n            self.pool.share(slot)\n            slot.position = point\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a snapshot is released before the slice that reads it is done",
        "core/state_memory.py",
        "            if slot.position < num_computed:\n",
        "            if slot.position <= num_computed:\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "the state of a step in flight is kept as the end of an answer",
        "core/state_memory.py",
        "if is_kept and slot.position == request.num_computed > request.state_base:",
        "if is_kept and slot.position >= request.num_computed > request.state_base:",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "snapshots leave no slots for later requests",
        "core/state_memory.py",
        "        return self.pool.num_available > self.num_live * (self._max_num_seqs - self._num_started)\n",
        "        return self.pool.num_available > 0\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "cached keys and values are written again",
        "core/planner.py",
        "                request.kv_start,\n",
        "                0,\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a window tail is continued in place while others read it",
        "core/window_memory.py",
        "        if continuation.is_window_adoptable:\n",
        "        if True:\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "window blocks of a hit are not shared",
        "core/window_memory.py",
        "        pool.share(continuation.windows)\n",
        "",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a window block stays with a node that has other tokens",
        "core/hybrid.py",
        "                self.windows.pool.detach(block)\n",
        "                pass\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a tail gets the window block of fewer tokens",
        "core/window_memory.py",
        "if node.is_published and is_filled and",
        "if node.is_published and",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "snapshots stay after their block was evicted",
        "core/hybrid.py",
        "            self.states.pool.forget(block.key)\n",
        "            pass\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "a key of other content leads to a snapshot",
        "core/continuation.py",
        "if found is None or (number and blocks[number - 1].key != key):",
        "if found is None:",
        first_world=FIRST_HYBRID + 100,
    ),
    _mutant(
        "the window blocks of a preempted request leak",
        "core/window_memory.py",
        "        self.pool.release(self.blocks(table), is_kept=True)\n",
        "        self.pool.release(self.blocks(table[1:]), is_kept=True)\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "pinned states are never released",
        "core/pins.py",
        "            self._states.pool.release(pin.state)\n",
        "            pass\n",
        first_world=FIRST_HYBRID,
    ),
    _mutant(
        "keys and values are shared, and the tail is published over them",
        "core/kv_cache.py",
        " or request.num_computed < request.kv_start:",
        ":",
        first_world=FIRST_HYBRID,
    ),
)
