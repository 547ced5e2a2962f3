"""One loaded model: the requests to it, their answers, and the service that runs them.

`InferenceRequest` is a frozen value, checked when it is made. Codecs make it. `ModelService` tokenises its prompts,
submits it to the engine, enforces timeouts and counts usage. `ActiveRequest` is one that was accepted: its generations,
its timings, and the record that is written when it ends. The client of the engine is an `EngineClient`, or the client
of a cluster (`quire/scale`). Nothing here knows a protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from quire.backends.base import Progress
from quire.core.cache.prefix import CacheExplanation
from quire.core.values import FinishReason, Priority
from quire.engine.composition import EngineConfig
from quire.engine.model_text import TOO_LONG_HINT, ModelText
from quire.engine.outputs import Delta, GenerationOutput, Usage
from quire.engine.params import GenerationParams, GenerationRequest, PinPrefix
from quire.engine.worker.client import EngineClient, Generation, ModelClient
from quire.engine.worker.protocol import Stepped
from quire.errors import (
    ContextTooLong,
    InvalidRequest,
    QuireError,
    RequestFailed,
    TemplateError,
)
from quire.server.auth import Key
from quire.server.config import ModelConfig
from quire.server.errors import ApiError, Kind, from_quire
from quire.server.limits import (
    FairSlots,
    QueueTicket,
    Quotas,
    TierQueues,
)
from quire.server.observability.logs import log_request
from quire.server.observability.metrics import ActivityCounters, Metrics, RequestRecord
from quire.text.answers import AnswerParser
from quire.text.excerpt import Excerpt, stopped_text
from quire.text.messages import ChatRequest, Message, Part, Role

log = logging.getLogger(__name__)

MAX_PROMPTS = 64
MAX_SAMPLES_IN_ALL = 128
MAX_BREAKPOINTS = 4
MAX_TTL_S = 86_400.0
MAX_NAME_CHARS = 256
_SALT = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Prompt = ChatRequest | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A cache breakpoint: the prompt's cache is kept through part `part` of message `message` of the ChatRequest."""

    message: int
    part: int
    ttl_s: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.ttl_s) or not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"cache_control.ttl = {self.ttl_s!r} s is not above 0 and at most {MAX_TTL_S:g} s")


@dataclass(frozen=True, slots=True)
class ThinkingField:
    """A field of a body that sets whether, or how much, to think."""

    name: str
    wants: bool | None  # True: think; False: do not; None: how much


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request to generate, in the engine's terms."""

    model: str | None  # None: the default model
    prompts: tuple[Prompt, ...]
    params: GenerationParams
    is_unbounded: bool = False  # it requests an answer without a limit, not the model's default limit
    is_streaming: bool = False
    priority: Priority | None = None  # as requested; the key's tier bounds it
    cache_salt: str = ""
    cache_key: str | None = None  # the cache of this prompt is pinned under this name (OpenAI's prompt_cache_key)
    cache_ttl_s: float = 300.0
    breakpoints: tuple[Breakpoint, ...] = ()
    wants_cache: bool = False  # include the cache explanation in the response
    thinking_fields: tuple[ThinkingField, ...] = ()  # ignored if the model does not support them
    ignored: tuple[str, ...] = ()  # fields without effect, for the header x-quire-ignored-fields
    unenforced: tuple[str, ...] = ()  # schema keywords that are not enforced, for the header x-quire-unenforced

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(self.prompts)} entries, not 1 to {MAX_PROMPTS}")
        if len(self.prompts) * self.params.n > MAX_SAMPLES_IN_ALL:
            raise InvalidRequest(
                f"n = {self.params.n} for {len(self.prompts)} prompts is more than {MAX_SAMPLES_IN_ALL} answers"
            )
        if self.cache_salt and not _SALT.fullmatch(self.cache_salt):
            raise InvalidRequest(f"cache_salt = {self.cache_salt!r:.80} is not 1 to 128 of A-Z a-z 0-9 _ . : -")
        if self.cache_key is not None and not 1 <= len(self.cache_key) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"prompt_cache_key has {len(self.cache_key)} characters, not 1 to {MAX_NAME_CHARS}")
        if len(self.breakpoints) > MAX_BREAKPOINTS:
            raise InvalidRequest(f"cache_control appears {len(self.breakpoints)} times, more than {MAX_BREAKPOINTS}")


def priority_of(value: str | int | None) -> Priority | None:
    """Parse `priority`: a tier name, or a number as in vLLM (0 is normal, below 0 is high, above 0 is low)."""
    if value is None or isinstance(value, Priority):
        return value
    if isinstance(value, str):
        if value.upper() not in Priority.__members__:
            names = ", ".join(name.lower() for name in Priority.__members__)
            raise InvalidRequest(f"priority = {value!r:.80} is not one of {names}, or a whole number")
        return Priority[value.upper()]
    return Priority.NORMAL if value == 0 else Priority.HIGH if value < 0 else Priority.LOW


@dataclass(frozen=True, eq=False, slots=True)
class Caller:
    """Who sent a request, and where and when it arrived."""

    key: Key
    request_id: str
    endpoint: str
    arrived_s: float
    session: str = ""  # of a conversation, for the router of a cluster


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


class _IgnoringSink:
    """The sink for readers of the complete answer: they are not woken at each token."""

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        del index, token_id, text, now_s
        return True

    def take_delta(self, delta: Delta) -> bool:
        del delta
        return True


class ActiveRequest:
    """An async context manager: leaving it cancels unfinished generations and writes the record, once."""

    def __init__(
        self,
        service: ModelService,
        request: InferenceRequest,
        caller: Caller,
        priority: Priority,
        requests: Sequence[GenerationRequest],
        ticket: QueueTicket,
    ) -> None:
        self.request = request
        self.caller = caller
        self.priority = priority
        self.requests = tuple(requests)
        self.request_id = caller.request_id
        self.model = service.model
        self.created = int(time.time())
        self.generations: list[Generation] = []
        self.updated = asyncio.Event()
        self.ticket = ticket
        self.is_accepted = False  # it passed all limits
        self._service = service
        self.submitting: asyncio.Task[Any] | None = None  # the task that submits it to the engine
        self.error: Exception | None = None
        self._on_close: list[Callable[[], object]] = []
        self.is_closed = False
        self.load_s = 0.0  # time spent waiting for the model to load
        self._queued_s: float | None = None
        self._started_at_s: float | None = None
        self.is_waiting = False  # a reader waits in `next_batch`, and has taken everything

    async def __aenter__(self) -> ActiveRequest:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error if isinstance(error, Exception) else None)

    @property
    def system_fingerprint(self) -> str | None:
        return self._service.system_fingerprint

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def usage(self) -> Usage:
        """Token counts of all prompts so far."""
        parts = [generation.answers.usage for generation in self.generations]
        cached = sum(generation.num_cached_tokens for generation in self.generations)
        return Usage(
            self.num_prompt_tokens,
            sum(part.completion_tokens for part in parts),
            cached,
            sum(part.accepted_prediction_tokens for part in parts),
            sum(part.rejected_prediction_tokens for part in parts),
        )

    @property
    def num_values(self) -> int:
        """The number of tokens and scores that a whole answer is made of."""
        params, usage = self.request.params, self.usage
        num_values = usage.completion_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            num_values += usage.prompt_tokens * (1 + params.prompt_logprobs)
        return num_values

    @property
    def cache(self) -> CacheExplanation | None:
        """The cache explanation of the first prompt."""
        return self.generations[0].cache if self.generations else None

    @property
    def cache_text(self) -> Excerpt | None:
        """The text of the first prompt where its match with the cache ended."""
        cache = self.cache
        return None if cache is None else stopped_text(self._service.text.tokenizer, self.requests[0].prompt, cache)

    @property
    def num_thought_tokens(self) -> int:
        """Reasoning tokens in the answers to the first prompt so far."""
        if not self.generations:
            return 0
        answers = self.generations[0].answers.output().completions
        count = self._service.text.num_thought_tokens
        return sum(count(self._chat, self.requests[0].prompt, one.token_ids) for one in answers)

    def new_parser(self) -> AnswerParser:
        """Return a parser for one answer to the first prompt."""
        return self._service.text.new_parser(self._chat, self.requests[0].prompt)

    @property
    def _chat(self) -> ChatRequest | None:
        first = self.request.prompts[0]
        return first if isinstance(first, ChatRequest) else None

    @property
    def ignored(self) -> list[str]:
        """Names of the chat template arguments that this model's template does not use."""
        chat = self._chat
        if chat is None:
            return []
        template = self._service.text.template
        names = [f"chat_template_kwargs.{name}" for name in template.unknown_args(chat.template_args)]
        return [*names, *(one.name for one in self.request.thinking_fields if not template.can_think(one.wants))]

    @property
    def pinned_tokens(self) -> int:
        return self._service.pinned_tokens(self.requests[0])

    @property
    def is_started(self) -> bool:
        return self._started_at_s is not None

    @property
    def _first_at_s(self) -> float | None:
        return min((one.first_s for one in self.generations if one.first_s is not None), default=None)

    @property
    def _last_at_s(self) -> float | None:
        return max((one.last_s for one in self.generations if one.last_s is not None), default=None)

    @property
    def prefill_s(self) -> float | None:
        """From the start of the first prompt to the first token; None before that."""
        first_s = self._first_at_s
        return None if first_s is None or self._started_at_s is None else max(0.0, first_s - self._started_at_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last so far; None before the first."""
        first_s, last_s = self._first_at_s, self._last_at_s
        return None if first_s is None or last_s is None else last_s - first_s

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        if self.error is not None:  # it failed while it was being submitted
            generation.cancel()

    def start(self, queued_s: float) -> None:
        """Record that the engine has started the first prompt."""
        if self._started_at_s is None:
            self._queued_s = queued_s
            self._started_at_s = time.monotonic()
            self.ticket.start()

    def on_close(self, call: Callable[[], object]) -> None:
        self._on_close.append(call)

    def fail(self, error: Exception) -> None:
        """End the request with an error: its blocks are freed before the next step, and readers raise the error."""
        if self.error is None and not self.is_closed:
            self.error = error
            for generation in self.generations:
                generation.cancel()
            if self.submitting is not None:
                self.submitting.cancel()
            self.updated.set()

    async def wait_start(self) -> None:
        """Wait until the first prompt runs, so that its cache explanation is known, or until it has ended."""
        while True:
            self.updated.clear()
            if self.error is not None:
                raise self.error
            first = self.generations[0]
            if first.error is not None:
                raise first.error
            if first.is_started or first.answers.is_finished:
                return
            await self.updated.wait()

    async def next_batch(self) -> list[tuple[int, Delta]]:
        """Wait for new deltas, each with its prompt's number. Empty: the answers have ended.

        Raises the request's error. A batch holds all deltas since the previous one, so a slow reader receives fewer
        and longer batches.
        """
        while True:
            self.updated.clear()
            if self.error is not None:
                raise self.error
            batch = [(number, delta) for number, one in enumerate(self.generations) for delta in one.take()]
            if batch or all(generation.is_over for generation in self.generations):
                return batch
            self.is_waiting = True
            try:
                await self.updated.wait()
            finally:
                self.is_waiting = False

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        while batch := await self.next_batch():
            yield batch

    async def outputs(self) -> list[GenerationOutput]:
        """Wait for the end and return the complete answers, one per prompt."""
        for generation in self.generations:
            generation.sink = _IgnoringSink()
        async for _ in self.batches():
            pass
        return [generation.answers.result() for generation in self.generations]

    def close(self, error: Exception | None = None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for generation in self.generations:
            generation.cancel()
            generation.detach()
        self.ticket.leave()
        for call in self._on_close:
            call()
        self._on_close.clear()
        record = self._record(error or self.error)
        self._service.close_request(self)
        if self.is_accepted:  # a refused request is counted elsewhere
            self._service.count(self._service.metrics.finished, record)
            self._service.count(self._service.activity.finished, record)
            log_request(record)

    def _record(self, error: Exception | None) -> RequestRecord:
        now_s = time.monotonic()
        usage, cache = self.usage, self.cache
        first = self._first_at_s
        finish, kind = self._outcome(error)
        return RequestRecord(
            request_id=self.request_id,
            endpoint=self.caller.endpoint,
            model=self.model,
            key_name=self.caller.key.name,
            priority=self.priority,
            is_streaming=self.request.is_streaming,
            num_prompts=len(self.requests),
            n=self.request.params.n,
            max_tokens=self.request.params.max_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cache_reason=None if cache is None else cache.reason.value,
            cache_source=None if cache is None or cache.source is None else cache.source.value,
            queued_s=self._queued_s,
            ttft_s=None if first is None else first - self.caller.arrived_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            e2e_s=now_s - self.caller.arrived_s,
            finish=finish,
            error=kind,
        )

    def _outcome(self, error: Exception | None) -> tuple[str, str | None]:
        """Return the finish reason and the kind of error."""
        match error:
            case ClientGone():
                return "cancelled", None
            case ApiError(kind=Kind.CANCELLED):
                return "cancelled", error.reason
            case ApiError():
                return "error", error.reason
            case QuireError():
                return "error", from_quire(error).reason
            case None:
                reasons = {one.finish_reason for part in self.generations for one in part.answers.output().completions}
                if FinishReason.CANCELLED in reasons:
                    return "cancelled", None
                return (FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP).value, None
            case _:
                return "error", "internal"


class ClientSettings(NamedTuple):
    """What a client is made from."""

    model: ModelConfig
    text: ModelText
    engine: EngineConfig
    hang_limit_s: float
    on_loading: Progress
    on_step: Callable[[Stepped], None]
    on_gap: Callable[[float, int], None]


MakeClient = Callable[[ClientSettings], ModelClient]


def make_local_client(settings: ClientSettings) -> ModelClient:
    """A client whose worker runs on this machine."""
    return EngineClient(
        settings.model.path,
        settings.text,
        settings.engine,
        on_loading=settings.on_loading,
        hang_limit_s=settings.hang_limit_s,
        on_step=settings.on_step,
        on_gap=settings.on_gap,
        kv_events=settings.model.kv_events,
    )


MAX_ENCODERS = 4
MAX_INLINE_CHARS = (
    4000  # ASCII; about 1,000 tokens, which take 1 to 2 ms. Other characters take up to four times as long
)
MIN_WAIT_S = 1.0  # minimum time in the queue after a request has waited for its model to load
T = TypeVar("T")
Connect = Callable[[Callable[[Stepped], None]], ModelClient]  # its argument is called after each step of the engine


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
        self, request: InferenceRequest, caller: Caller, ticket: QueueTicket, waited_s: float = 0.0
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
