"""The scheduler: plans each step for running and waiting requests.

Plans depend on token counts, never on token values, so step N+1 can be planned while the device still runs step N.
Knows nothing of text, tensors or clocks: `now_ns` is an argument.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType

from quire.core.cache.prefix import CacheExplanation
from quire.core.events import Observer, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.planner import Planner
from quire.core.policy import Policy, RunningSet, WaitingQueue
from quire.core.request import Request, RequestState
from quire.core.step import SeqSlice, StepPlan, StepResult, TokenUpdate
from quire.core.values import FinishReason
from quire.errors import Draining, InvalidRequest, InvariantViolation

MAX_IN_FLIGHT = 2  # uncommitted plans: one on the device, one just made


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
        self.loads = self.planner.loads
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
