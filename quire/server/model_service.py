"""Serves one loaded model: tokenises prompts, submits requests to the engine, enforces timeouts, counts usage.

Knows no protocol: codecs pass an `InferenceRequest` and read an `ActiveRequest`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from quire.core.values import Priority
from quire.engine.model_text import TOO_LONG_HINT, ModelText
from quire.engine.params import GenerationParams, GenerationRequest, PinPrefix
from quire.engine.worker.client import Generation
from quire.engine.worker.protocol import Stepped
from quire.errors import ContextTooLong, RequestFailed, TemplateError
from quire.server.active_request import ActiveRequest, RequestInfo
from quire.server.auth import Key
from quire.server.errors import ApiError, Kind
from quire.server.inference_request import Breakpoint, InferenceRequest, Prompt
from quire.server.limits import FairSlots, QueueTicket, Quotas, TierQueues
from quire.server.model_client import ModelClient
from quire.server.observability.metrics import ActivityCounters, Metrics
from quire.text.messages import ChatRequest, Message, Part, Role

MAX_ENCODERS = 4
MAX_INLINE_CHARS = (
    4000  # ASCII; about 1,000 tokens, which take 1 to 2 ms. Other characters take up to four times as long
)
MIN_WAIT_S = 1.0  # minimum time in the queue after a request has waited for its model to load
T = TypeVar("T")
Connect = Callable[[Callable[[Stepped], None]], ModelClient]  # its argument is called after each step of the engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    max_queue: int = 512  # requests
    max_queued_tokens: int = 1 << 20
    queue_timeout_s: float = 60.0


class ModelService:
    """Runs the requests of one loaded model. Belongs to one event loop."""

    def __init__(
        self,
        text: ModelText,
        connect: Connect,
        names: tuple[str, ...],
        limits: ServiceLimits,
        metrics: Metrics,
        queues: TierQueues,
        quotas: Quotas,
        default_max_tokens: int | None = None,
    ) -> None:
        """`default_max_tokens`: of requests that set no limit; None: up to the end of the context."""
        self.text = text
        self.client = connect(self._take_step)
        self.names = names
        self.metrics = metrics
        self.activity = ActivityCounters()
        self.limits = limits
        self.created = int(time.time())
        self.queues = queues
        self.quotas = quotas
        self._default_max_tokens = default_max_tokens
        self.is_draining = False
        self._is_cut = False
        self._num_open = 0
        self._num_encoding = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._active: set[ActiveRequest] = set()
        num_encoders = min(MAX_ENCODERS, os.cpu_count() or 1)
        self._encoders = ThreadPoolExecutor(num_encoders, "quire-encode")
        self._encoder_slots = FairSlots(num_encoders)
        self._question_slots = FairSlots(1)

    @property
    def model(self) -> str:
        return self.names[0]

    @property
    def system_fingerprint(self) -> str | None:
        return self.client.system_fingerprint

    @property
    def max_model_len(self) -> int:
        return self.client.max_model_len

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def active_requests(self) -> Collection[ActiveRequest]:
        """Requests that have passed all limits and have not ended."""
        return self._active

    def salt_for(self, key: Key, cache_salt: str) -> str:
        """Return the salt of the chain keys. Different keys or salts share no cached blocks."""
        if not key.namespace and not cache_salt:
            return ""
        parts = f"{len(key.namespace)}:{key.namespace}:{cache_salt}"
        return hashlib.sha256(parts.encode()).hexdigest()[:32]

    # Requests

    async def open(
        self, request: InferenceRequest, caller: RequestInfo, ticket: QueueTicket, waited_s: float = 0.0
    ) -> ActiveRequest:
        """Tokenise the prompts, check the limits and submit the request to the engine.

        `ticket` is the request's place in the queue, held for `waited_s` so far. Raises ApiError or QuireError; the
        ticket is then returned and nothing is held.
        """
        self._enter()
        active: ActiveRequest | None = None
        try:
            if self.is_draining:
                raise shutting_down()
            salt = self.salt_for(caller.key, request.cache_salt)
            priority = ticket.priority
            owner = caller.key.name
            is_short = _is_short(request.prompts)
            requests = [
                await self._request(request, prompt, priority, salt, owner, caller.session, is_short=is_short)
                for prompt in request.prompts
            ]
            if self._is_cut:
                raise shutting_down()
            active = ActiveRequest(self, request, caller, priority, requests, ticket)
            await self._submit(active, max(self.limits.queue_timeout_s - waited_s, MIN_WAIT_S))
        except BaseException as error:
            if active is None:
                ticket.leave()
                self._leave()
            else:
                active.close(error if isinstance(error, Exception) else None)
            raise
        return active

    async def _submit(self, active: ActiveRequest, limit_s: float) -> None:
        active.ticket.grow(active.num_prompt_tokens)
        quota = self.quotas.of(active.caller.key)
        quota.enter(active.num_prompt_tokens)
        active.on_close(quota.leave)
        active.is_accepted = True
        self._active.add(active)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self._time_out, active)
        active.on_close(timer.cancel)
        started = partial(self._begin, active)
        active.submitting = asyncio.current_task()
        try:
            async with asyncio.timeout(limit_s):
                for request in active.requests:
                    active.add(await self.client.submit(request, updated=active.updated, on_start=started))
        except TimeoutError:
            raise self._too_late("the model is still loading", active.priority) from None
        except asyncio.CancelledError:
            if active.error is None:
                raise
            raise active.error from None  # it was ended by `fail`
        finally:
            active.submitting = None

    def close_request(self, active: ActiveRequest) -> None:
        """Called once by a request when it ends."""
        if active in self._active:
            self._active.remove(active)
            self.quotas.of(active.caller.key).use(active.usage.completion_tokens)
        self._leave()

    def _time_out(self, active: ActiveRequest) -> None:
        if not active.is_started:
            waited = f"waited {self.limits.queue_timeout_s:g} s in the queue"
            active.fail(self._too_late(waited, active.priority))

    def _too_late(self, what: str, priority: Priority) -> ApiError:
        return ApiError(
            Kind.OVERLOADED,
            f"{what}: the limit is {self.limits.queue_timeout_s:g} s",
            retry_after_s=self.queues.retry_after_s(priority),
            reason="queue_timeout",
        )

    def _begin(self, active: ActiveRequest, generation: Generation) -> None:
        if not active.is_started:
            active.start(generation.queued_s or 0.0)
            self.count(self.metrics.started, active.priority, generation.queued_s or 0.0)

    def _take_step(self, stepped: Stepped) -> None:
        self.count(self.metrics.stepped, stepped)
        self.count(self.activity.stepped, stepped)

    def count(self, count: Callable[..., None], *values: object) -> None:
        """Call a metrics function. An error in it must not end the request or stop other counting."""
        try:
            count(*values)
        except Exception:
            log.exception("updating a metric failed")

    # Text

    async def encode(self, prompt: Prompt, owner: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Tokenise a prompt: a short text at once, others in a thread, because a long one takes seconds.

        Under load, a thread waits for the interpreter's lock longer than tokenising a short text takes. `owner`: the
        name of the key; keys take turns.
        """
        is_short = isinstance(prompt, str) and _is_short((prompt,)) and self.text.tokenizer.is_inline
        if isinstance(prompt, tuple) or is_short:
            return self._encode_now(prompt, add_special=add_special)
        return await self.in_turn(owner, partial(self._encode_now, prompt, add_special=add_special))

    def _encode_now(self, prompt: Prompt, *, add_special: bool = True) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            return self.text.encode(prompt, self.max_model_len, add_special=add_special)
        return self.text.encode_chat(prompt, self.max_model_len)

    async def render(self, chat: ChatRequest, owner: str) -> str:
        """The prompt of a conversation as text."""
        return await self.in_turn(owner, partial(self.text.render_chat, chat, self.max_model_len))

    async def in_turn(self, owner: str, work: Callable[[], T]) -> T:
        """Run work on text in a thread, when it is the turn of this key."""
        self._num_encoding += 1
        self._is_idle.clear()
        try:
            return await self._encoder_slots.run(owner, self._encoders, work)
        finally:
            self._num_encoding -= 1
            self._note_idle()

    def question(self, owner: str) -> AbstractAsyncContextManager[None]:
        """The turn of this key to ask the worker for a report, which takes time between two steps."""
        return self._question_slots.turn(owner)

    async def _request(
        self,
        request: InferenceRequest,
        prompt: Prompt,
        priority: Priority,
        salt: str,
        owner: str,
        session: str = "",
        *,
        is_short: bool,
    ) -> GenerationRequest:
        """Tokenise a prompt and make its request: at once if both are quick, else in a thread, in turn."""
        chat = prompt if isinstance(prompt, ChatRequest) else None
        params = self._bounded(request)

        def build() -> tuple[tuple[int, ...], GenerationRequest]:
            tokens = self._encode_now(prompt)
            if len(tokens) >= self.max_model_len:
                limit = f"this model's maximum context length is {self.max_model_len} tokens, the answer included"
                raise ContextTooLong(f"prompt of {len(tokens)} tokens does not fit: {limit}; {TOO_LONG_HINT}")
            return tokens, self.text.request(tokens, params, priority=priority, salt=salt, tenant=owner, chat=chat)

        is_quick = chat is None and is_short and not params.prediction  # a prediction is tokenised too
        is_quick = is_quick and (isinstance(prompt, tuple) or self.text.tokenizer.is_inline)
        tokens, built = build() if is_quick else await self.in_turn(owner, build)
        pins: list[PinPrefix] = []
        if chat is not None:
            found = [await self._prefix_pin(chat, end, tokens, salt, owner) for end in request.breakpoints]
            pins += [pin for pin in found if pin is not None]
        if request.cache_key is not None:
            pins.append(PinPrefix(_pin_id(owner, salt, "key", request.cache_key), len(tokens), request.cache_ttl_s))
        session = session or request.cache_key or ""
        return replace(built, pins=tuple(pins), session=session) if pins or session else built

    def _bounded(self, request: InferenceRequest) -> GenerationParams:
        """The request's params, with the default limit if it sets none. The limit may exceed the context."""
        params, limit = request.params, self._default_max_tokens
        if params.max_tokens is not None or request.is_unbounded or limit is None:
            return params
        return replace(params, max_tokens=max(limit, params.min_tokens))

    async def _prefix_pin(
        self, chat: ChatRequest, end: Breakpoint, tokens: tuple[int, ...], salt: str, owner: str
    ) -> PinPrefix | None:
        """The pin of a breakpoint: of the common prefix of the prompt and the rendering up to there, if there is one.

        A template may need a user turn. One is added after a system message, and the common prefix ends before it.
        """
        messages = list(chat.messages[: end.message + 1])
        last = messages[-1]
        messages[-1] = replace(last, parts=last.parts[: end.part + 1])
        if last.role is Role.SYSTEM:
            messages.append(Message(Role.USER, (Part("\u2060"),)))
        head_chat = replace(chat, messages=messages, add_generation_prompt=False, continue_last=False)

        def find() -> PinPrefix | None:
            head = self._encode_now(head_chat)
            pairs = enumerate(zip(head, tokens, strict=False))
            size = next((i for i, (one, other) in pairs if one != other), min(len(head), len(tokens)))
            return PinPrefix(_pin_id(owner, salt, "prefix", str(tokens[:size])), size, end.ttl_s) if size else None

        try:
            return await self.in_turn(owner, find)
        except (TemplateError, RequestFailed):
            return None

    def pinned_tokens(self, request: GenerationRequest) -> int:
        """Number of tokens that the request's pins will hold: full blocks, at most half of the pool."""
        capacity = self.client.capacity
        if capacity is None or not request.pins or not self.client.is_caching:
            return 0
        num_blocks = max(pin.num_tokens for pin in request.pins) // capacity.block_size
        return min(num_blocks, (capacity.num_blocks - 1) // 2) * capacity.block_size

    # Shutdown

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def cut(self, error: ApiError | None = None) -> None:
        """End the remaining requests with an error."""
        self.is_draining = self._is_cut = True
        for active in tuple(self._active):
            active.fail(error or shutting_down())

    async def close(self) -> None:
        self.cut()
        await self.client.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self.text.close()

    def _enter(self) -> None:
        self._num_open += 1
        self._is_idle.clear()

    def _leave(self) -> None:
        self._num_open -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._num_open and not self._num_encoding:
            self._is_idle.set()


def shutting_down() -> ApiError:
    return ApiError(Kind.UNAVAILABLE, "the server is shutting down", retry_after_s=5.0, reason="draining")


def _is_short(prompts: Sequence[Prompt]) -> bool:
    """Return whether tokenising these texts delays other requests by at most a few milliseconds."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return sum(len(text) if text.isascii() else 4 * len(text) for text in texts) <= MAX_INLINE_CHARS


def _pin_id(owner: str, salt: str, kind: str, name: str) -> str:
    """An id of the owner, for fairness among pins, and a digest of the content."""
    return f"{owner.replace('/', '_')}/{hashlib.sha256(f'{salt}|{kind}|{name}'.encode()).hexdigest()[:32]}"
