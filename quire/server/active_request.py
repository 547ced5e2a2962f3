"""A request to a model, independent of protocols, and its answers.

`InferenceRequest` is a frozen value, checked when it is made. Codecs make it. `ActiveRequest` is one that was accepted:
its generations, its timings, and the record that is written when it ends.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from quire.core.cache.prefix import CacheExplanation
from quire.core.values import FinishReason, Priority
from quire.engine.model_text import ModelText
from quire.engine.outputs import Delta, GenerationOutput, Usage
from quire.engine.params import GenerationParams, GenerationRequest
from quire.engine.worker.client import Generation
from quire.errors import InvalidRequest, QuireError
from quire.server.auth import Key
from quire.server.errors import ApiError, Kind, from_quire
from quire.server.limits import QueueTicket
from quire.server.observability.logs import log_request
from quire.server.observability.metrics import ActivityCounters, Metrics, RequestRecord
from quire.text.answers import AnswerParser
from quire.text.excerpt import Excerpt, stopped_text
from quire.text.messages import ChatRequest

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


class RequestInfo(Protocol):
    """The parts of `RequestContext` that an `ActiveRequest` uses."""

    @property
    def key(self) -> Key: ...
    @property
    def request_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def session(self) -> str: ...


class ServiceInterface(Protocol):
    """The parts of `ModelService` that an `ActiveRequest` uses."""

    @property
    def model(self) -> str: ...
    @property
    def text(self) -> ModelText: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def activity(self) -> ActivityCounters: ...
    @property
    def system_fingerprint(self) -> str | None: ...
    def pinned_tokens(self, request: GenerationRequest) -> int: ...
    def count(self, count: Callable[..., None], *values: object) -> None: ...
    def close_request(self, active: ActiveRequest) -> None: ...


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
        service: ServiceInterface,
        request: InferenceRequest,
        caller: RequestInfo,
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
