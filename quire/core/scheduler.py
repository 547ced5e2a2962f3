"""The scheduler of all requests: plans each step (`Planner`) and applies its result.

Plans depend on token counts, never on token values, so step N+1 can be planned while the device still runs step N.
Knows nothing of text, tensors or clocks: `now_ns` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from types import MappingProxyType

from quire.core.admission import Admission, GrowthRoom, Outcome, StepBuilder
from quire.core.cache import CacheExplanation
from quire.core.events import Observer, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.memory import NO_STATES
from quire.core.policy import Key, Policy, RunningSet, TierWork, Turn, WaitingQueue
from quire.core.request import Request, RequestState
from quire.core.step import SeqSlice, StepPlan, StepResult, TokenUpdate
from quire.core.values import TIERS, FinishReason, Priority
from quire.errors import Draining, InvalidRequest, InvariantViolation

MAX_IN_FLIGHT = 2  # uncommitted plans: one on the device, one just made
MIXED_ANSWERS = 64  # for every so many answers, a step may hold `max_mixed_tokens` prompt tokens
TurnKey = tuple[int, int, int]  # order within a turn: the policy's key, step of the last service, order of arrival


class Scheduler:
    """Owns all requests. `schedule` plans a step and `commit` applies its result.

    All changes to requests, blocks and queues go through this class, one call at a time.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_chunk_tokens: int = 512,
        max_mixed_tokens: int | None = None,
        max_model_len: int | None = None,
        max_waiting: int = 4096,
        observe: Observer = ignore,
    ) -> None:
        self.cache = cache
        self.policy = policy
        if max_model_len is not None and max_model_len < 2:
            raise InvalidRequest(f"{max_model_len = } is less than 2: one prompt token and one output token")
        self.max_model_len = cache.max_model_len if max_model_len is None else min(max_model_len, cache.max_model_len)
        for group in cache.memory.groups:
            group.reserve(max_num_seqs, min(max_chunk_tokens, self.max_model_len))
        self._requests: dict[int, Request] = {}  # running and waiting requests by id
        self.requests = MappingProxyType(self._requests)  # read-only view
        self.running = RunningSet(max_num_seqs, cache)
        self.waiting = WaitingQueue(policy.make_lane, max_waiting)
        self.planner = Planner(
            cache,
            policy,
            self.running,
            self.waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_mixed_tokens=max_mixed_tokens,
            observe=observe,
        )
        self.loads = self.planner.admission.loads
        self.in_flight: deque[StepPlan] = deque()  # plans that are not committed, the oldest first
        self._now_ns = 0
        self._num_arrived = 0
        self.num_drafted = self.num_accepted = 0  # draft tokens that were verified, and those that were right
        self._is_draining = False

    # Queries

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self.in_flight) or self.loads.has_work

    def explain(self, request: Request) -> CacheExplanation:
        """Explain how much of this request the cache would serve now, and why not more.

        Changes nothing.
        """
        return self.planner.admission.explain(request, self.cache.match(request))

    # Arrival and end of requests

    def add(self, request: Request, now_ns: int) -> None:
        """Add a request to the waiting queue, or raise and change nothing."""
        if self._is_draining:
            raise Draining("the scheduler is draining and accepts no new requests")
        if request.state is not RequestState.NEW or request.request_id in self._requests:
            raise InvalidRequest(f"request_id = {request.request_id} is in use, or the request was added before")
        self.cache.check_fits(request.num_prompt_tokens, self.max_model_len)
        self.waiting.check_room()
        self._now_ns = max(self._now_ns, now_ns)
        self._num_arrived += 1
        request.sequence = self._num_arrived
        request.epoch = self._num_arrived << 32  # unique, even if an id is reused while old results are in flight
        request.arrived_ns = request.enqueued_ns = self._now_ns
        request.state = RequestState.WAITING
        max_tokens = request.sampling.max_tokens or self.max_model_len
        request.token_limit = min(request.num_prompt_tokens + max_tokens, self.max_model_len)
        self._requests[request.request_id] = request
        self.policy.ledger.arrive(request)
        self.waiting.push(request)

    def cancel(self, request_id: int) -> bool:
        """End a request in any state and free its blocks.

        Returns False if it is not running or waiting.
        """
        return self._end(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: int, num_output_tokens: int) -> bool:
        """End a request whose output is complete after `num_output_tokens` (a stop string).

        Returns False if it is not running or waiting.
        """
        request = self._requests.get(request_id)
        if request is not None and not 0 <= num_output_tokens <= request.num_output_tokens:
            raise InvalidRequest(f"{num_output_tokens = } is not from 0 to {request.num_output_tokens}")
        return self._end(request_id, FinishReason.STOP, num_output_tokens)

    def fail(self, request_id: int) -> bool:
        """End a request that failed above the core.

        Returns False if it is not running or waiting.
        """
        return self._end(request_id, FinishReason.ERROR)

    def drain(self) -> None:
        """Reject new requests. Current requests are completed; then `has_work` is false."""
        self._is_draining = True

    # One step

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan the next step. Plans that are not empty must be committed in order."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            raise InvariantViolation(f"{len(self.in_flight)} plans are in flight: commit the oldest first")
        self._now_ns = now_ns = max(self._now_ns, now_ns)
        self.cache.pins.expire(now_ns)
        step = self.planner.draft(now_ns, has_in_flight=bool(self.in_flight))
        transfers = self.cache.levels.pop_plan()
        if not step.slices:
            return StepPlan((), (), (), (), *transfers)
        released = self.running.pop_released()
        plan = StepPlan(tuple(step.slices), tuple(step.copies), released, tuple(step.window_copies), *transfers)
        self.in_flight.append(plan)
        return plan

    # Lower levels

    def schedule_idle(self) -> StepPlan:
        """Plan saves of cached content while nothing runs. The plan has no slices."""
        self.cache.levels.saves.choose_idle(block for pin in self.cache.pins for block in pin.held.blocks)
        return StepPlan((), (), (), (), *self.cache.levels.pop_plan())

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Apply the result of the oldest plan in flight. Slices of an old epoch are dropped."""
        if not self.in_flight or self.in_flight[0] is not plan:
            raise InvariantViolation("commit of a plan that is not the oldest in flight")
        if len(result.tokens) != len(plan.slices):
            raise InvariantViolation(f"{len(result.tokens)} results for {len(plan.slices)} slices")
        self.in_flight.popleft()
        updates: list[TokenUpdate] = []
        requests, memory = self._requests, self.cache.memory
        # Before requests end: the sources of copies are ends of prefixes, to be evicted before the blocks they follow.
        if plan.copies or plan.window_copies:
            self.cache.settle(plan.copies, plan.window_copies)
        is_hybrid = memory.is_hybrid
        has_more = bool(result.failures or result.logprobs or result.prompt_logprobs)  # rare, so tested once
        for index, (piece, tokens) in enumerate(zip(plan.slices, result.tokens, strict=True)):
            request = requests.get(piece.request_id)
            if request is None or request.epoch != piece.epoch:
                continue
            if has_more and index in result.failures:
                self._end(request.request_id, FinishReason.ERROR)
                error = result.failures[index]
                updates.append(TokenUpdate(request.request_id, (), FinishReason.ERROR, error=error))
                continue
            if piece.num_drafts:
                tokens = self._settle_drafts(request, piece, tokens)
            else:
                self._advance(request, piece.start + piece.length)
                if is_hybrid:
                    memory.commit(request, self.cache.chain(request))
            if not has_more:
                if piece.wants_token:
                    updates.append(self._accept(request, piece, tokens))
            elif piece.wants_token or index in result.prompt_logprobs:
                update = self._accept(request, piece, tokens) if tokens else TokenUpdate(request.request_id, (), None)
                logprobs, prompt = result.logprobs.get(index, ()), result.prompt_logprobs.get(index)
                updates.append(update._replace(logprobs=logprobs[: len(tokens)], prompt_logprobs=prompt))
        return updates

    def _advance(self, request: Request, end: int) -> None:
        """Publish what is computed now: the tokens [0, end)."""
        num_before, cache = request.num_computed, self.cache
        request.num_computed = end
        if end // cache.block_size > request.num_published:
            cache.publish(request)
        if num_before < request.num_prompt_tokens <= end:
            cache.publish_tail(request)

    def _settle_drafts(self, request: Request, piece: SeqSlice, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Apply a slice with drafts: add its tokens, up to one that ends the request. Returns these tokens."""
        sampling, num_before = request.sampling, request.num_output_tokens
        for count, token in enumerate(tokens, 1):
            if token in request.stop_ids and num_before + count > sampling.min_tokens:
                tokens = tokens[:count]
                break
        self.num_drafted += piece.num_drafts
        self.num_accepted += len(tokens) - 1
        request.num_in_flight -= 1 + piece.num_drafts
        request.num_drafts, request.draft = 0, ()
        request.tokens.extend(tokens)
        request.num_planned = end = piece.start + piece.length - piece.num_drafts + len(tokens) - 1
        self._advance(request, end)
        memory = self.cache.memory
        if memory.states.is_used and end < piece.start + piece.length:
            memory.states.roll_back(request, piece)
        memory.commit(request, self.cache.chain(request))
        return tokens

    def _accept(self, request: Request, piece: SeqSlice, tokens: tuple[int, ...]) -> TokenUpdate:
        token = tokens[-1]
        if not piece.num_drafts:
            request.num_in_flight -= 1
            request.tokens.append(token)
        reason = None
        if token in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(request.tokens) >= request.token_limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(request.request_id, reason)
        return TokenUpdate(request.request_id, tokens, reason)

    def _end(self, request_id: int, reason: FinishReason, num_output_tokens: int | None = None) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self.policy.ledger.give_back(request)
        if request.state is RequestState.RUNNING:
            self.running.vacate(request)
        else:
            self.waiting.remove(request)
            request.epoch += 1
        if num_output_tokens is not None:  # a new array: a plan in flight reads the old one as its history
            request.tokens = request.tokens[: request.num_prompt_tokens + num_output_tokens]
        self.policy.ledger.leave(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        return True


class Planner:
    """Plans steps for the scheduler: the tokens of each request, admissions and preemptions. `draft` plans one step.

    A step is planned in two parts. The first consists of the turns of the policy's ledger. In each turn, running
    requests in prefill and waiting requests, merged by the policy's key, share the step's token budget; one token is
    reserved for every running request. In the second part all running requests, most urgent first, get blocks for their
    tokens. Victims are less urgent than the request that needs a block, so a request that is already in the plan is not
    preempted.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        running: RunningSet,
        waiting: WaitingQueue,
        *,
        max_num_batched_tokens: int,
        max_chunk_tokens: int,
        max_mixed_tokens: int | None = None,
        observe: Observer = ignore,
    ) -> None:
        if max_num_batched_tokens < running.max_num_seqs:
            raise InvalidRequest(
                f"{max_num_batched_tokens = } is less than max_num_seqs = {running.max_num_seqs}:"
                " every running request needs one token per step"
            )
        if max_chunk_tokens < 1:
            raise InvalidRequest(f"{max_chunk_tokens = } is less than 1")
        if max_mixed_tokens is not None and max_mixed_tokens < 1:
            raise InvalidRequest(f"{max_mixed_tokens = } is less than 1")
        self._cache = cache
        self._hybrid = cache.memory if cache.memory.is_hybrid else None
        self._policy = policy
        self._ledger = policy.ledger
        self._running = running
        self._waiting = waiting
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens
        self.max_mixed_tokens = max_mixed_tokens  # prompt tokens per MIXED_ANSWERS answers; None: no limit
        self._room = GrowthRoom(
            cache,
            running,
            max_chunk_tokens=max_chunk_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_tokens=max_mixed_tokens,
        )
        self.admission = Admission(
            cache, policy, running, waiting, room=self._room, max_chunk_tokens=max_chunk_tokens, observe=observe
        )
        self._num_steps = 0
        self._awaiting: Priority | None = None  # in the last step, a request of this tier needed memory of a spared one

    def draft(self, now_ns: int, *, has_in_flight: bool) -> StepBuilder:
        """Plan one step, and admit, preempt and advance requests accordingly."""
        step = StepBuilder(now_ns, self.max_num_batched_tokens - len(self._running), has_in_flight=has_in_flight)
        self._num_steps += 1
        self._room.forget_ended()
        self._waiting.unpark(self.admission.can_share)
        self.admission.loads.expire(now_ns)
        self._begin(step)
        if any(step.wanting) or any(map(self._waiting.num_ready, TIERS)):  # else no turn gives anything
            for turn in self._ledger.turns():
                self._take_turn(step, turn)
        self._plan_running(step)
        if not step.slices and step.left_out:
            self._plan_left_out(step)
        self._end(step)
        return step

    def _begin(self, step: StepBuilder) -> None:
        """Pass the work of every tier to the ledger, and record which prefixes are in flight."""
        running, waiting, wanting = self._running, self._waiting, step.wanting
        for request in tuple(running.prompts.values()):
            if len(request.tokens) - request.num_computed <= 1:
                del running.prompts[request.request_id]  # prefill is done
                continue
            self.admission.note_pending(step, request)
            if request.is_catching_up and not request.is_covered:
                step.saving.add(request.priority)
            if self._num_wanted(request) > 1:
                wanting[request.priority].append(request)
        num_ready = [waiting.num_ready(tier) for tier in TIERS]
        for tier in TIERS:
            head = waiting.head((tier,)) if num_ready[tier] else None
            if head is not None:
                step.needs[tier] = len(head[1].tokens) + self._cache.block_size
                if head[1].num_preemptions:
                    step.saving.add(tier)
        self._bound_prompts(step, len(running) - sum(map(len, wanting)))
        contexts = [0] * len(TIERS)
        if self._ledger.cost is not None:
            for request in running.requests:
                contexts[request.priority] += request.num_planned
        self._ledger.begin_step(
            [
                TierWork(
                    running.counts[tier] - len(wanting[tier]),
                    len(wanting[tier]),
                    num_ready[tier],
                    contexts[tier],
                )
                for tier in TIERS
            ],
            is_awaited=self._awaiting is not None or self._room.is_tight,
        )
        step.rationed = self._ledger.rationed
        if step.rationed:
            for request in running.requests:
                num_wanted = self._num_wanted(request) if request.priority in step.rationed else 0
                if num_wanted == 1 or (num_wanted > 1 and request.request_id not in running.prompts):
                    wanting[request.priority].append(request)

    def _bound_prompts(self, step: StepBuilder, num_answers: int) -> None:
        """Limit the prompt tokens of a step with answers, so that these do not wait long for their next token.

        A step with many answers takes longer in any case, so it may hold more prompt tokens.
        """
        if self.max_mixed_tokens is not None and num_answers > 0:
            step.budget = min(step.budget, self.max_mixed_tokens * -(-num_answers // MIXED_ANSWERS))

    def _end(self, step: StepBuilder) -> None:
        """Seal the plan: charge what is in it, and refund what turns gave to requests that found no memory."""
        self._awaiting = step.awaiting
        if step.allotted:
            for piece in step.slices:
                step.allotted.pop(piece.request_id, None)
            for request in [request for request in self._running if request.request_id in step.allotted]:
                self._ledger.refund(request, step.allotted[request.request_id])
        for (priority, tenant), num_tokens in step.decodes.items():
            self._ledger.charge_decodes(priority, tenant, num_tokens)
        for request in step.left_out:
            step.short.add(request.priority)
        for tier in TIERS:
            if self._waiting.num_ready(tier):
                step.short.add(tier)
        self._ledger.end_step(step.short, self.max_num_batched_tokens, step.needs, step.saving)

    @staticmethod
    def _num_wanted(request: Request) -> int:
        """Number of tokens left to plan.

        The last token of a request needs no KV: no token is computed after it. A request that awaits a sample wants no
        token.
        """
        if request.awaits_sample:
            return 0
        return min(len(request.tokens) + request.num_in_flight, request.token_limit - 1) - request.num_planned

    # Turns: running requests that want more tokens, and waiting requests

    def _take_turn(self, step: StepBuilder, turn: Turn) -> None:
        left = self.max_num_batched_tokens if turn.max_tokens is None else turn.max_tokens
        left_ns = turn.max_ns
        wanting = self._wanting(step, turn)
        # Tiers below a request that waits for memory of one of theirs admit nobody: it could be spared too.
        is_open = not turn.is_prepaid and (self._awaiting is None or min(turn.tiers) <= self._awaiting)
        while left > 0:
            head = self._waiting.head(turn.tiers) if is_open and not step.is_closed(turn.tiers) else None
            if wanting and (head is None or wanting[0][0] < self._head_turn_key(*head)):
                key, line = wanting[0]
                if key != (current := self._turn_key(line[-1])):
                    heapreplace(wanting, (current, line))  # its tenant has been served in the meantime
                    continue
                request = line[-1]
                num_most = self._num_affordable(turn, request, left, left_ns)
                if num_most < 1:
                    return
                line.pop()
                if request.state is RequestState.RUNNING:  # not preempted during this turn
                    num_given = self._give(step, request, num_most)
                    left -= num_given
                    left_ns = self._time_left(request, num_given, left_ns)
                if line:
                    heapreplace(wanting, (self._turn_key(line[-1]), line))
                else:
                    heappop(wanting)
            elif head is None:
                return
            elif self.admission.park(step, head[1]):
                continue
            elif (num_most := self._num_affordable(turn, head[1], left, left_ns)) < 1:
                return
            elif (outcome := self.admission.try_admit(step, head[1], is_owed=turn.is_owed)) is Outcome.PARKED:
                continue
            elif outcome is Outcome.UNCOVERED:
                is_open = False  # its tier saves credit for it; others may use the memory meanwhile
            elif outcome is Outcome.ADMITTED:
                num_given = self._give(step, head[1], num_most)
                left -= num_given
                left_ns = self._time_left(head[1], num_given, left_ns)
            else:
                step.close(turn.tiers)  # no request overtakes a head that does not fit

    def _num_affordable(self, turn: Turn, request: Request, left: int, left_ns: int | None) -> int:
        """Number of tokens that a turn may give to a request.

        An owed tier gets at least one, whatever it costs.
        """
        if left_ns is None:
            return left
        is_first = turn.is_owed and left_ns == turn.max_ns
        return min(left, max(self._ledger.affordable(request, left_ns), is_first))

    def _time_left(self, request: Request, num_tokens: int, left_ns: int | None) -> int | None:
        return None if left_ns is None else left_ns - num_tokens * self._ledger.price_ns(request)

    def _wanting(self, step: StepBuilder, turn: Turn) -> list[tuple[TurnKey, list[Request]]]:
        """Running requests that want tokens in this turn.

        A heap of lists, one per tenant, each in reverse order. Tokens given to a request change the heap position of
        its own list only.
        """
        lines: dict[tuple[Priority, str], list[Request]] = {}
        for tier in turn.tiers:
            for request in step.wanting[tier]:
                if turn.is_prepaid and not request.num_prepaid:
                    continue
                if request.state is RequestState.RUNNING and self._is_short(step, request):
                    lines.setdefault((tier, request.tenant), []).append(request)
        for line in lines.values():
            line.sort(key=self._turn_key, reverse=True)
        wanting = [(self._turn_key(line[-1]), line) for line in lines.values()]
        heapify(wanting)
        return wanting

    def _turn_key(self, request: Request) -> TurnKey:
        """Order within a turn.

        Rationed requests with equal policy keys alternate; others are ordered by arrival.
        """
        is_rationed = request.priority in self._ledger.rationed
        return self._policy.key(request), request.last_step if is_rationed else 0, request.sequence

    def _head_turn_key(self, key: Key, request: Request) -> TurnKey:
        """Order of a waiting request: after rationed running requests with the same policy key."""
        return key[0], self._num_steps if request.priority in self._ledger.rationed else 0, key[1]

    def _is_short(self, step: StepBuilder, request: Request) -> bool:
        """Whether a running request wants more tokens than it has in this step, and is allowed more."""
        own = 0 if request.priority in step.rationed else 1
        num_given = step.allotted.get(request.request_id, own)
        return num_given < min(self._num_wanted(request), self.max_chunk_tokens)

    def _give(self, step: StepBuilder, request: Request, left: int) -> int:
        """Give a request as many tokens as it wants and is allowed. Returns their number.

        One token per running request is reserved outside the budget, so the first token does not reduce the budget.
        """
        num_before = step.allotted.get(request.request_id, 0)
        num_wanted = min(self._num_wanted(request), self.max_chunk_tokens) - num_before
        num_new = min(num_wanted, left, step.budget + (num_before == 0))
        step.budget -= num_new - (num_before == 0)
        step.allotted[request.request_id] = num_before + num_new
        request.last_step = self._num_steps
        self._ledger.charge(request, num_new)
        return num_new

    # All running requests

    def _plan(self, step: StepBuilder, request: Request) -> bool:
        """Plan the slice of a running request. Returns False if the request was preempted."""
        if request.awaits_sample:
            return True
        tokens, start = request.tokens, request.num_planned
        num_known = len(tokens)
        num_wanted = num_known + request.num_in_flight - start
        if start + num_wanted >= request.token_limit:  # the last token needs no KV
            num_wanted = request.token_limit - 1 - start
        if num_wanted <= 0:
            return True
        length = step.allotted.get(request.request_id, 0)
        is_free = not length  # gets its reserved token without a turn
        if is_free:
            if request.priority in step.rationed:
                step.left_out.append(request)
                return True
            length = 1
            if num_wanted > 1 and request.request_id not in self._running.prompts:
                length = min(num_wanted, 1 + max(step.budget, 0), self.max_chunk_tokens)  # its state was rolled back
        elif length > num_wanted:
            length = num_wanted
        if length < num_wanted and length < self.max_chunk_tokens:
            step.short.add(request.priority)
        num_drafts = self._num_drafts(step, request, length) if request.draft and length == num_wanted else 0
        end = start + length + num_drafts
        hybrid, block_size = self._hybrid, self._cache.block_size
        num_held = len(request.block_table) if hybrid is None else hybrid.num_blocks(request)
        if end > num_held * block_size:
            if not self._make_room(step, request, end):
                return request.state is RequestState.RUNNING
            self._cache.extend(request, end)
        states = hybrid.states.plan(request, end) if hybrid is not None and hybrid.states.is_used else NO_STATES
        if is_free or num_drafts or request.num_prepaid:
            self._pay(step, request, length, length if is_free else 0, num_drafts)
        wants_token = end >= num_known
        if wants_token:
            request.num_in_flight += 1 + num_drafts
        request.num_planned = end
        request.num_drafts = num_drafts
        step.num_drafts += num_drafts
        computed: Sequence[int] = tokens[start:end] if start < num_known else ()
        if num_drafts:
            computed = (*computed, *request.draft[:num_drafts])
        assert request.batch_index is not None
        step.slices.append(
            SeqSlice(
                request.request_id,
                request.epoch,
                request.batch_index,
                computed,
                start,
                end - start,
                request.block_table,
                tokens,
                wants_token,
                request.sampling,
                request.num_prompt_tokens,
                request.kv_start,
                request.window_table,
                *states,
                num_drafts,
            )
        )
        return True

    def _pay(self, step: StepBuilder, request: Request, length: int, num_free: int, num_drafts: int) -> None:
        """Account for a slice. `num_free`: its tokens that no turn gave. They and the drafts are charged at the end."""
        if request.num_prepaid:
            self._ledger.use_prepaid(request, length)
        account = (request.priority, request.tenant)
        step.decodes[account] = step.decodes.get(account, 0) + num_free + num_drafts
        step.budget -= max(num_free - 1, 0) + num_drafts

    def _num_drafts(self, step: StepBuilder, request: Request, length: int) -> int:
        """Number of drafts to verify in this step, after `length` known tokens.

        Drafts get what is left: they take no tokens and batch rows from other requests, and blocks only if one stays
        free for every other running request. Without that block, another would soon be preempted for the guesses.
        """
        end = request.num_planned + length
        if request.num_in_flight or end < len(request.tokens):
            return 0
        if self._room.spared:
            return 0  # beside a spared request, others grow by a token per step
        budget = step.budget - (length - 1 if request.request_id not in step.allotted else 0)
        num_rows = self._running.max_num_seqs - len(self._running) - step.num_drafts
        limits = (budget, num_rows, request.token_limit - 1 - end, self.max_chunk_tokens - length)
        most = min(len(request.draft), *limits)
        num_blocks = len(request.block_table) if self._hybrid is None else self._hybrid.num_blocks(request)
        num_held = num_blocks * self._cache.block_size - end  # drafts that need no new block
        if most > num_held and self._cache.growth_shortage(request, end + most) + self._num_promised(request) > 0:
            most = num_held
        if most < 1 or (self._hybrid is not None and not self._hybrid.states.can_roll_back(request, end + most)):
            return 0
        return most

    def _plan_running(self, step: StepBuilder) -> None:
        running, index = self._running.requests, 0
        while index < len(running):
            if self._plan(step, running[index]):
                index += 1

    def _plan_left_out(self, step: StepBuilder) -> None:
        """Plan the rationed requests after all: no other request can compute anything in this step."""
        requests, step.left_out = step.left_out, []
        for request in requests:
            if request.state is RequestState.RUNNING:
                self._give(step, request, self.max_num_batched_tokens)
                self._plan(step, request)

    def _make_room(self, step: StepBuilder, request: Request, upto: int) -> bool:
        """Free blocks for a running request: drop pins, then preempt the least urgent.

        Returns False if it fails. Victims are chosen strictly by urgency, whatever credit their tiers have: the most
        urgent request can always grow, so no two requests wait for each other.
        """
        while self._cache.growth_shortage(request, upto) > 0:
            if self._cache.pins.yield_oldest():
                continue
            running = self._running.requests
            victim = self._find_victim(step, request)
            if victim is None:
                if len(running) == 1 and not step.has_in_flight and not self._cache.levels.loads:
                    raise InvariantViolation(f"{request!r} runs alone and cannot grow to {upto} tokens")
                return False  # the others started in this step, or the sources of copies in flight hold the blocks
            self.admission.preempt(step, victim, request)
            if victim is request:
                return False
        return True

    def _find_victim(self, step: StepBuilder, request: Request) -> Request | None:
        """The running request to preempt for one that needs blocks: a less urgent one, or the request itself.

        Of the least urgent tier, one that catches up after a preemption is preempted last, because its work would be
        lost again. None: only requests that started in this step are less urgent, or it runs alone.
        """
        running = self._running.requests
        victim: Request | None = None
        for other in reversed(running):
            if other is request or (victim is not None and other.urgency != victim.urgency):
                break
            if other.request_id not in step.admitted and (victim is None or victim.is_catching_up):
                victim = other
                if not other.is_catching_up:
                    break
        if victim is None and running[-1] is request and len(running) > 1 and request.request_id not in step.admitted:
            return request
        return victim

    def _num_promised(self, request: Request) -> int:
        """Number of blocks, in the pool that needs more, to leave free for the other running requests."""
        num_others = len(self._running) - 1
        debts = sum(self._cache.memory.windows.debt(other) for other in self._running if other is not request)
        return max(num_others, debts)
