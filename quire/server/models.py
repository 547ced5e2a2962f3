"""The models of this server, loaded or not, and the requests to them. Knows no protocol.

`InferenceRequest` is a frozen value, checked when it is made. Codecs make it. `Models` finds its model and loads it;
`quire/engine/model_manager.py` decides which models are unloaded. `ModelService` runs the requests of one loaded model:
it tokenises prompts, submits them to the engine, enforces timeouts and counts usage. `ActiveRequest` is a request that
was accepted: its generations, its timings, and the record that is written when it ends. The client of the engine is an
`EngineClient`, or the client of a cluster (`quire/scale`).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from quire.backends.base import Progress
from quire.backends.kv_memory import KVSpec
from quire.backends.machine import has_nvidia
from quire.core.cache import CacheExplanation
from quire.core.values import FinishReason, Priority
from quire.engine.composition import EngineConfig, check_supported
from quire.engine.generation import (
    Delta,
    Generation,
    GenerationOutput,
    GenerationParams,
    GenerationRequest,
    PinPrefix,
    Usage,
)
from quire.engine.model_manager import ManagedModel, ModelManager, ModelState, Needs
from quire.engine.model_text import TOO_LONG_HINT, ModelText
from quire.engine.worker.client import HANG_LIMIT_S, EngineClient, ModelClient
from quire.engine.worker.protocol import Ready
from quire.errors import (
    ContextTooLong,
    InvalidRequest,
    MissingExtra,
    ModelFileError,
    ModelNotFound,
    ModelTooLarge,
    QuireError,
    RequestFailed,
    TemplateError,
)
from quire.server.config import ModelConfig
from quire.server.errors import ApiError, Kind, from_quire
from quire.server.limits import (
    MAX_RETRY_AFTER_S,
    NUM_PARSERS,
    RATE_WINDOW_S,
    BodyBytes,
    FairSlots,
    Key,
    QueueTicket,
    Quota,
    TierQueue,
    check_room,
)
from quire.server.metrics import Exposition, Metrics, RequestRecord, log_request
from quire.text.messages import AnswerParser, ChatRequest, Message, Part, Role
from quire.text.tokenizer import Excerpt, stopped_text
from quire.weights.hub import size_of
from quire.weights.opening import open_checkpoint

log = logging.getLogger(__name__)

MAX_PROMPTS = 64
MAX_SAMPLES_IN_ALL = 128
MAX_BREAKPOINTS = 4
MAX_NAME_CHARS = 256
_SALT = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Prompt = ChatRequest | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A cache breakpoint: the prompt's cache is kept through part `part` of message `message` of the ChatRequest."""

    message: int
    part: int
    ttl_s: float  # a value of the protocol's table


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
    format_field: str | None = field(default=None, compare=False)  # the field that the grammar is from, for errors

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

    def take_token(self, _index: int, _token_id: int, _text: str, _now_s: float) -> bool:
        return True

    def take_delta(self, _delta: Delta) -> bool:
        return True


class ActiveRequest:
    """A request from its place in the queue to its end: it waits for its model to load, is tokenised, and is answered.

    An async context manager: leaving it cancels unfinished generations and writes the record, once.
    """

    def __init__(self, model: Model, request: InferenceRequest, caller: Caller, ticket: QueueTicket) -> None:
        self.request = request
        self.caller = caller
        self.priority = ticket.priority
        self.requests: tuple[GenerationRequest, ...] = ()  # empty: not tokenised yet
        self.request_id = caller.request_id
        self.served_by = model
        self.created = int(time.time())
        self.generations: list[Generation] = []
        self.updated = asyncio.Event()
        self.ticket = ticket
        self.is_accepted = False  # it passed all limits
        self.service: ModelService  # since its model is loaded
        self.opening: asyncio.Task[Any] | None = None  # the task that waits for its model and submits it to the engine
        self.error: Exception | None = None
        self.on_close = ExitStack()  # what ends with this request
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
    def model(self) -> str:
        return self.served_by.name

    @property
    def system_fingerprint(self) -> str | None:
        return self.service.client.system_fingerprint

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def usage(self) -> Usage:
        """Token counts of all prompts so far."""
        parts = [generation.usage for generation in self.generations]
        return Usage(
            self.num_prompt_tokens,
            sum(part.completion_tokens for part in parts),
            sum(part.cached_tokens for part in parts),
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
        return None if cache is None else stopped_text(self.service.text.tokenizer, self.prompt, cache)

    @property
    def num_thought_tokens(self) -> int:
        """Reasoning tokens in the answers to the first prompt so far."""
        if not self.generations:
            return 0
        count = self.service.text.num_thought_tokens
        return sum(count(self.chat, self.prompt, one.token_ids) for one in self.generations[0].samples)

    def new_parser(self) -> AnswerParser:
        """Return a parser for one answer to the first prompt."""
        return self.service.text.new_parser(self.chat, self.prompt)

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens of the first prompt."""
        return self.requests[0].prompt.tokens

    @property
    def chat(self) -> ChatRequest | None:
        first = self.request.prompts[0]
        return first if isinstance(first, ChatRequest) else None

    @property
    def ignored(self) -> list[str]:
        """Names of the chat template arguments that this model's template does not use."""
        chat = self.chat
        if chat is None:
            return []
        template = self.service.text.template
        names = [f"chat_template_kwargs.{name}" for name in template.unknown_args(chat.template_args)]
        return [*names, *(one.name for one in self.request.thinking_fields if not template.can_think(one.wants))]

    @property
    def pinned_tokens(self) -> int:
        return self.service.pinned_tokens(self.requests[0])

    @property
    def is_started(self) -> bool:
        return self._started_at_s is not None

    @property
    def _first_at_s(self) -> float | None:
        return min((one.first_s for one in self.generations if one.first_s is not None), default=None)

    @property
    def prefill_s(self) -> float | None:
        """From the start of the first prompt to the first token; None before that."""
        first_s = self._first_at_s
        return None if first_s is None or self._started_at_s is None else max(0.0, first_s - self._started_at_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last so far; None before the first."""
        if (first_s := self._first_at_s) is None:
            return None
        return max(one.last_s for one in self.generations if one.last_s is not None) - first_s

    def start(self, generation: Generation) -> None:
        """Record that the engine has started a prompt. The first one counts."""
        if self._started_at_s is None:
            self._queued_s = generation.queued_s or 0.0
            self._started_at_s = time.monotonic()
            self.ticket.start()
            self.served_by.metrics.started(self.priority, self._queued_s)

    def fail(self, error: Exception) -> None:
        """End the request with an error: its blocks are freed before the next step, and readers raise the error."""
        if self.error is None and not self.is_closed:
            self.error = error
            for generation in self.generations:
                generation.cancel()
            if self.opening is not None:
                self.opening.cancel()
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
            if first.is_started or first.is_finished:
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
        return [generation.whole() for generation in self.generations]

    def close(self, error: Exception | None = None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.opening = None
        for generation in self.generations:
            generation.cancel()
            generation.detach()
        self.ticket.leave()
        with self.on_close:  # also if the record cannot be written
            if self.is_accepted:  # a refused request is counted elsewhere
                self.service.close_request(self, self._record(error or self.error))

    def _record(self, error: Exception | None) -> RequestRecord:
        usage, cache = self.usage, self.cache
        first_s, decode_s = self._first_at_s, self.decode_s
        finish, kind = self._outcome(error)
        params = self.request.params
        return RequestRecord(
            id=self.request_id,
            key=self.caller.key.name,
            endpoint=self.caller.endpoint,
            tier=self.priority.name.lower(),
            num_samples=params.n * len(self.requests),
            finished_at=time.time(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cache_reason=None if cache is None else cache.reason.value,
            cache_source=None if cache is None or cache.source is None else cache.source.value,
            ttft_s=None if first_s is None else first_s - self.caller.arrived_s,
            duration_s=time.monotonic() - self.caller.arrived_s,
            tokens_per_s=(usage.completion_tokens - 1) / decode_s if decode_s and usage.completion_tokens > 1 else None,
            finish=finish,
            error=kind,
            model=self.model,
            is_streaming=self.request.is_streaming,
            num_prompts=len(self.requests),
            n=params.n,
            max_tokens=params.max_tokens,
            queued_s=self._queued_s,
            prefill_s=self.prefill_s,
            decode_s=decode_s,
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
                reasons = {one.finish_reason for part in self.generations for one in part.samples}
                if reasons & {FinishReason.CANCELLED, None}:
                    return "cancelled", None
                return (FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP).value, None
            case _:
                return "error", "internal"


MakeClient = Callable[..., ModelClient]  # called as `make_local_client` is


def make_local_client(
    model: ModelConfig, text: ModelText, engine: EngineConfig, *, hang_limit_s: float, **on_event: Any
) -> ModelClient:
    """A client whose worker runs on this machine. `on_event`: on_loading, on_step and on_gap."""
    return EngineClient(model.path, text, engine, kv_events=model.kv_events, hang_limit_s=hang_limit_s, **on_event)


MAX_ENCODERS = 4
MAX_RECENT = 256  # ended requests
MAX_INLINE_CHARS = (
    4000  # ASCII; about 1,000 tokens, which take 1 to 2 ms. Other characters take up to four times as long
)
MIN_WAIT_S = 1.0  # minimum time in the queue after a request has waited for its model to load
T = TypeVar("T")


class ModelService:
    """Runs the requests of one loaded model. Belongs to one event loop."""

    def __init__(self, served: Model, text: ModelText, engine: EngineConfig) -> None:
        shared = served.shared
        self.served = served
        self.text = text
        self.client = shared.make_client(
            served.config,
            text,
            engine,
            hang_limit_s=shared.hang_limit_s,
            on_loading=served.take_progress,
            on_step=served.metrics.stepped,
            on_gap=served.metrics.tokens,
        )
        self._supervising = asyncio.create_task(self.client.supervise(), name=f"supervise {served.name}")
        # Ended requests, the newest last. More are kept than shown, because a key sees only its own.
        self.recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self._is_cut = False
        self.active_requests: set[ActiveRequest] = set()  # that have passed all limits and have not ended
        num_encoders = min(MAX_ENCODERS, os.cpu_count() or 1)
        self._encoders = ThreadPoolExecutor(num_encoders, "quire-encode")
        self._encoder_slots = FairSlots(num_encoders)
        self.questions = FairSlots(1)  # to the worker, for reports that take time between two steps

    def salt_for(self, key: Key, cache_salt: str) -> str:
        """Return the salt of the chain keys. Different keys or salts share no cached blocks."""
        if not key.namespace and not cache_salt:
            return ""
        parts = f"{len(key.namespace)}:{key.namespace}:{cache_salt}"
        return hashlib.sha256(parts.encode()).hexdigest()[:32]

    # Requests

    async def open(self, active: ActiveRequest) -> None:
        """Tokenise the prompts, check the limits and submit the request to the engine."""
        prompts = active.request.prompts
        is_short = _is_short(prompts)
        built = [await self._request(active, prompt, is_short=is_short) for prompt in prompts]
        if self._is_cut:
            raise shutting_down()
        active.requests = tuple(built)
        active.ticket.grow(active.num_prompt_tokens)
        key, quotas = active.caller.key, self.served.shared.quotas
        quota = quotas.get(key.name) or quotas.setdefault(key.name, Quota(key.limits))
        quota.enter(active.num_prompt_tokens)
        active.on_close.callback(quota.leave)
        active.is_accepted = True
        self.active_requests.add(active)
        limit_s = max(self.served.shared.queue_timeout_s - active.load_s, MIN_WAIT_S)
        timer = asyncio.get_running_loop().call_later(limit_s, self._time_out, active)
        active.on_close.callback(timer.cancel)
        for request in active.requests:
            parser = self.text.turn_parser(active.chat, request.prompt.tokens)
            generation = await self.client.submit(
                request, new_parser=parser, updated=active.updated, on_start=active.start
            )
            active.generations.append(generation)
            if active.error is not None:  # it failed while it was being submitted
                generation.cancel()

    def close_request(self, active: ActiveRequest, record: RequestRecord) -> None:
        """Called once by an accepted request when it ends."""
        self.active_requests.remove(active)
        self.served.shared.quotas[active.caller.key.name].use(active.usage.completion_tokens)
        self.served.metrics.finished(record)
        self.recent.append(record)
        log_request(record)

    def _time_out(self, active: ActiveRequest) -> None:
        if active.is_started:
            return
        limit = f"{self.served.shared.queue_timeout_s:g} s"
        what = f"waited {limit} in the queue" if active.opening is None else "the model is still loading"
        retry_s = self.served.queues[active.priority].retry_after_s()
        text = f"{what}: the limit is {limit}"
        active.fail(ApiError(Kind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_timeout"))

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
            return self.text.encode(prompt, self.client.max_model_len, add_special=add_special)
        return self.text.encode_chat(prompt, self.client.max_model_len)

    async def in_turn(self, owner: str, work: Callable[[], T]) -> T:
        """Run work on text in a thread, when it is the turn of this key."""
        return await self._encoder_slots.run(owner, self._encoders, work)

    async def _request(self, active: ActiveRequest, prompt: Prompt, *, is_short: bool) -> GenerationRequest:
        """Tokenise a prompt and make its request: at once if both are quick, else in a thread, in turn."""
        request, caller, priority = active.request, active.caller, active.priority
        owner, salt = caller.key.name, self.salt_for(caller.key, request.cache_salt)
        chat = prompt if isinstance(prompt, ChatRequest) else None
        params = self._bounded(request)

        def build() -> tuple[tuple[int, ...], GenerationRequest]:
            tokens = self._encode_now(prompt)
            if len(tokens) >= self.client.max_model_len:
                limit = (
                    f"this model's maximum context length is {self.client.max_model_len} tokens, the answer included"
                )
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
        session = caller.session or request.cache_key or ""
        return replace(built, pins=tuple(pins), session=session) if pins or session else built

    def _bounded(self, request: InferenceRequest) -> GenerationParams:
        """The request's params, with the default limit if it sets none. The limit may exceed the context."""
        params, limit = request.params, self.served.config.default_max_tokens
        if params.max_tokens is not None or request.is_unbounded or limit == -1:  # the rest of the context
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

    def cut(self, error: ApiError | None = None) -> None:
        """End the remaining requests with an error."""
        self._is_cut = True
        for active in tuple(self.active_requests):
            active.fail(error or shutting_down())

    async def close(self) -> None:
        self._supervising.cancel()
        await asyncio.wait({self._supervising})
        if not self._supervising.cancelled():
            self._supervising.exception()  # already raised where the worker was awaited
        self.cut()
        await self.client.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self.text.close()


def not_loaded(name: str) -> ApiError:
    return ApiError(Kind.UNAVAILABLE, f"{name} is not loaded", retry_after_s=5.0, reason="loading")


def shutting_down() -> ApiError:
    return ApiError(Kind.UNAVAILABLE, "the server is shutting down", retry_after_s=5.0, reason="draining")


def _is_short(prompts: Sequence[Prompt]) -> bool:
    """Return whether tokenising these texts delays other requests by at most a few milliseconds."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return sum(len(text) if text.isascii() else 4 * len(text) for text in texts) <= MAX_INLINE_CHARS


def _pin_id(owner: str, salt: str, kind: str, name: str) -> str:
    """An id of the owner, for fairness among pins, and a digest of the content."""
    return f"{owner.replace('/', '_')}/{hashlib.sha256(f'{salt}|{kind}|{name}'.encode()).hexdigest()[:32]}"


HALF_BYTES, FP32_BYTES = 2, 4  # of a KV element: an estimate until a worker reports the size of its pool
PLAIN_BITS = {"F32": 32, "F16": 16, "BF16": 16}  # of weights that can be quantised while they are loaded
FINAL_STATS_S = 1.0  # time for the last stats of a worker before it is closed
UNLOAD_DRAIN_S = 5.0  # time for cut requests to end
DRAIN_POLL_S = 0.01


@dataclass(slots=True)
class SharedResources:
    """Limits and resources that all models of a server share."""

    max_queue: int = 512  # requests
    max_queued_tokens: int = 1 << 20
    queue_timeout_s: float = 60.0
    exposition: Exposition = field(default_factory=Exposition)
    quotas: dict[str, Quota] = field(default_factory=dict)  # by the name of the key
    hang_limit_s: float = HANG_LIMIT_S
    make_client: MakeClient = make_local_client
    # One thread opens all model files: every new thread would leave its own heap behind.
    opener: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quire-open"))


class Model(ManagedModel):
    """One model of this server. Requests may use each of its `names`; responses have the first one, its `name`."""

    def __init__(self, config: ModelConfig, shared: SharedResources) -> None:
        super().__init__(config.names[0], is_pinned=config.is_pinned, idle_unload_s=config.idle_unload)
        self.names = config.names
        self.config = config
        self.service: ModelService | None = None  # while it is loaded
        self.progress: float | None = None  # of loading, 0 to 1
        self.created = int(time.time())
        self.metrics = Metrics(self.name, exposition=shared.exposition)
        self.queues = {tier: TierQueue(shared.max_queue, shared.max_queued_tokens) for tier in Priority}
        self.max_model_len: int | None = config.engine.max_model_len  # None: not read yet
        self.full_context: int | None = None  # max_model_len if the KV cache had enough memory
        self.on_loading: Progress | None = None
        self.open_s = 0.0  # duration of the last opening of its tokenizer and template
        self.shared = shared
        self._weight_bytes = size_of(config.path)  # size of its files until a worker reports it
        self._token_bytes: float | None = None  # KV bytes per token

    @property
    def root(self) -> str:
        return self.config.root or self.name

    def priority_of(self, request: InferenceRequest, key: Key) -> Priority:
        """The request's priority, else the model's, else the key's; never above the key's ceiling."""
        return key.priority(self.config.priority if request.priority is None else request.priority)

    @property
    def size_bytes(self) -> int:
        """Bytes of weights and KV cache; of the weights alone while the model is not loaded."""
        return self.num_bytes or self.needs.weight_bytes

    @property
    def loaded(self) -> ModelService:
        """The service of a model that is loaded. Raises ApiError if it is not."""
        if self.service is None:
            raise not_loaded(self.name)
        return self.service

    @property
    def facts(self) -> Ready | None:
        return None if self.service is None else self.service.client.facts

    # Called by the manager

    @property
    def needs(self) -> Needs:
        engine = self.config.engine
        if self._token_bytes is None:
            return Needs(self._weight_bytes, 0, engine.kv_memory if engine.num_blocks is None else None)
        kv_bytes = engine.kv_memory
        if engine.num_blocks is not None:
            kv_bytes = int(engine.num_blocks * engine.block_size * self._token_bytes)
        blocks = -(-(self.full_context or 1) // engine.block_size) + 1  # + 1: the null block
        return Needs(self._weight_bytes, int(blocks * engine.block_size * self._token_bytes), kv_bytes)

    async def measure(self) -> Needs:
        """Read the sizes from the model's files, once."""
        if self._token_bytes is None:
            await asyncio.get_running_loop().run_in_executor(self.shared.opener, self._measure)
        return self.needs

    def _measure(self) -> None:
        checkpoint = open_checkpoint(self.config.path, self.config.engine.load_format)
        spec = checkpoint.spec
        checkpoint.close()
        check_supported(spec, self.config.engine)
        self.full_context = min(self.config.engine.max_model_len or spec.max_model_len, spec.max_model_len)
        self.max_model_len = self.full_context
        engine = self.config.engine
        is_half = engine.backend in ("auto", "native", "mlx") or (engine.device != "cpu" and has_nvidia())
        element_bytes = HALF_BYTES if is_half and engine.dtype != "float32" else FP32_BYTES
        bits = engine.quantize_bits
        if bits is not None and spec.quantization in PLAIN_BITS:  # with a scale and a bias for 64 weights
            self._weight_bytes = int(self._weight_bytes * (bits + 0.5) / PLAIN_BITS[spec.quantization])
        self._token_bytes = float(KVSpec.of(spec, is_fp8=engine.kv_cache_dtype == "fp8").block_bytes(1, element_bytes))

    async def load(self, kv_bytes: int | None) -> int:
        config, began_s = self.config, time.monotonic()
        engine = config.engine
        if kv_bytes is not None and engine.num_blocks is None:
            engine = replace(engine, kv_memory=kv_bytes)
        opening = partial(ModelText.open, config.path, self.root, engine.load_format, config.tool_format)
        text = await asyncio.get_running_loop().run_in_executor(self.shared.opener, opening)
        self.open_s = time.monotonic() - began_s

        service = ModelService(self, text, engine)
        self.metrics.forget_worker()
        await self._start(service)
        return self._take_facts(service.client.facts)

    async def _start(self, service: ModelService) -> None:
        self.progress = 0.0
        try:
            warming = asyncio.to_thread(_warm_up, service.text)
            results = await asyncio.gather(service.client.start(), warming, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await service.close()
            raise
        finally:
            self.progress = None
        self.service = service

    def _take_facts(self, ready: Ready | None) -> int:
        """Store and log the worker's report. Returns the bytes it holds; 0: not reported."""
        if ready is None:
            return 0
        if (events := ready.kv_events) is not None:
            replay = "" if events.replay_endpoint is None else f", replay at {events.replay_endpoint}"
            log.info("%s: KV events at %s%s, topic %r", self.name, events.endpoint, replay, events.topic)
            if events.silent_because is not None:
                log.warning("%s: no KV events are sent, because %s", self.name, events.silent_because)
        self.max_model_len = ready.max_model_len
        if self.full_context is not None and self.max_model_len < self.full_context:
            log.warning(
                "%s has a context of %s tokens instead of %s: its KV cache is too small for more",
                self.name,
                f"{self.max_model_len:,}",
                f"{self.full_context:,}",
            )
        if ready.facts.weight_bytes:
            self._weight_bytes = ready.facts.weight_bytes
        if ready.facts.kv_bytes:
            self._token_bytes = ready.facts.kv_bytes / (ready.capacity.num_blocks * ready.capacity.block_size)
        is_known = ready.facts.weight_bytes and ready.facts.kv_bytes
        return ready.facts.weight_bytes + ready.facts.kv_bytes if is_known else 0

    def take_progress(self, num_done: int, num_bytes: int) -> None:
        self.progress = num_done / num_bytes if num_bytes else 0.0
        if self.on_loading is not None:
            self.on_loading(num_done, num_bytes)

    async def unload(self) -> None:
        service, self.service = self.service, None
        if service is None:
            return
        await wait_until(lambda: not self.is_busy, UNLOAD_DRAIN_S)  # a client may not read
        with suppress(TimeoutError, QuireError):
            stats = await asyncio.wait_for(service.client.stats(), FINAL_STATS_S)
            self.metrics.take(stats, service.client)
        await service.close()
        del service
        gc.collect()  # the cycles of its tokenizer
        with suppress(OSError, AttributeError):  # only glibc returns free heap pages to the system
            ctypes.CDLL(None).malloc_trim(0)

    def cut(self) -> None:
        if self.service is not None:
            text = f"{self.name} is being unloaded"
            self.service.cut(ApiError(Kind.UNAVAILABLE, text, retry_after_s=5.0, reason="unloading"))


class Models:
    """All models of a server. Belongs to one event loop."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        shared: SharedResources,
        *,
        budget_bytes: int | None = None,
        kv_cap_bytes: int | None = None,
    ) -> None:
        self._models = [Model(config, shared) for config in configs]
        self._by_name = {name: model for model in self._models for name in model.names}
        self.manager = ModelManager(self._models, budget_bytes, kv_cap_bytes)
        self.shared = shared
        self.body_bytes = BodyBytes()
        self.parsing = FairSlots(NUM_PARSERS)
        self.rendering = FairSlots(1)  # of metrics
        self.is_draining = False
        self.has_started = False  # the first model has been loaded
        self.num_open = 0  # open requests, including those that wait for a model to load; not the loads themselves
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: set[ActiveRequest] = set()  # of all models, that have not ended

    def __iter__(self) -> Iterator[Model]:
        """Iterate in the configured order."""
        return iter(self._models)

    @property
    def default(self) -> Model:
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, aliases included."""
        return tuple(self._by_name)

    @property
    def max_model_len(self) -> int:
        """The largest known context of all models."""
        return max(model.max_model_len or 0 for model in self._models)

    def find(self, name: str | None) -> Model:
        """Return the model of this name. None or an empty name: the default, which is the first model."""
        if not name:
            return self.default
        if (model := self._by_name.get(name)) is None:
            text = f"model = {name!r:.200} is not served; this server has {', '.join(self._by_name)}"
            raise ApiError(Kind.NO_MODEL, text, param="model")
        return model

    # Requests

    def check_open(self, key: Key) -> None:
        """Raise if no model could accept a request of this key. Called before the body is read."""
        if self.is_draining:
            raise shutting_down()
        check_room((model.queues[tier] for model in self._models for tier in key.tiers), key.name)

    def enter(self, request: InferenceRequest, caller: Caller) -> ActiveRequest:
        """Take a place in the queue of the request's model. The caller opens the request, and closes it."""
        if self.is_draining:
            raise shutting_down()
        model = self.find(request.model)
        priority = model.priority_of(request, caller.key)
        num_requests = request.params.n * len(request.prompts)
        ticket = QueueTicket(model.queues[priority], priority, caller.key.name, num_requests)
        active = ActiveRequest(model, request, caller, ticket)
        self.requests.add(active)
        active.on_close.callback(self.requests.discard, active)
        return active

    async def open(self, active: ActiveRequest) -> None:
        """Load the model if needed and submit the request. Raises ApiError or QuireError; nothing is held then."""
        began_s = time.monotonic()
        active.opening = task = asyncio.current_task()
        try:
            await self.hold(active.served_by)
            active.on_close.callback(self.release, active.served_by)
            active.load_s = time.monotonic() - began_s
            active.service = active.served_by.loaded
            await active.service.open(active)
            active.opening = None
        except asyncio.CancelledError:
            active.close(active.error)
            if active.error is None or task is None or task.uncancel():
                raise
            raise active.error from None  # it was ended by `fail`, and by nobody else
        except BaseException as error:
            active.close(error if isinstance(error, Exception) else None)
            raise

    async def hold(self, model: Model) -> None:
        """Load the model and keep it loaded until `release`."""
        self.num_open += 1
        try:
            if model.state is not ModelState.READY:
                self._log_wait(model)
            async with asyncio.timeout(self.shared.queue_timeout_s):
                await self.manager.hold(model)
        except BaseException as error:
            self.num_open -= 1
            if isinstance(error, TimeoutError | QuireError):
                raise self._refusal(model, error) from error
            raise

    def release(self, model: Model) -> None:
        self.manager.release(model)
        self.num_open -= 1

    def _log_wait(self, model: Model) -> None:
        num_waiting = len(model.waiters) + 1
        if num_waiting & (num_waiting - 1) == 0 and self.has_started:  # 1, 2, 4, ...: not a line per request
            eta_s = self.manager.eta_s(model)
            about = "" if eta_s is None else f", about {eta_s:.1f} s more"
            log.info("%d request(s) are waiting for %s, which is %s%s", num_waiting, model.name, model.state, about)

    def _refusal(self, model: Model, error: Exception) -> ApiError:
        if self.is_draining:
            return shutting_down()
        match error:
            case TimeoutError():
                limit = f"the request waited {self.shared.queue_timeout_s:g} s, which is the limit"
                text = f"{model.name} is {model.state}: {limit}"
                retry_s = min(self.manager.eta_s(model) or RATE_WINDOW_S, MAX_RETRY_AFTER_S)
                return ApiError(Kind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_timeout")
            case ModelTooLarge():
                return ApiError(Kind.UNAVAILABLE, str(error), may_retry=False, reason="model_too_large")
            case _:
                return _load_failed(model, error)

    # Loading and unloading

    async def start(self) -> None:
        """Load the first model. Raises if it cannot be loaded."""
        await self.manager.load(self.default)
        self.has_started = True

    async def preload(self) -> None:
        """Load the other models that are configured to be preloaded. A failure is logged; the next request retries."""
        for model in self._models[1:]:
            if model.config.is_preloaded:
                with suppress(QuireError):
                    await self.manager.load(model)

    async def load(self, model: Model) -> None:
        try:
            await self.manager.load(model)
        except QuireError as error:
            raise self._refusal(model, error) from error

    def begin(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task that is cancelled when the server stops."""
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: a caller that waits for the task gets it

    # Shutdown

    async def drain(self, limit_s: float) -> bool:
        """Refuse new requests and wait at most `limit_s` for the open ones. Returns whether all of them ended."""
        self.is_draining = True
        return await wait_until(lambda: not self.num_open, limit_s)

    def cut(self) -> None:
        """End the remaining requests with an error."""
        self.is_draining = True
        self.manager.refuse()
        for model in self._models:
            if model.service is not None:
                model.service.cut()

    async def close(self) -> None:
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await self.manager.close()
        self.shared.opener.shutdown(wait=False, cancel_futures=True)


def _load_failed(model: Model, error: Exception) -> ApiError:
    """The error of a failed load. Only admin keys receive the cause: it may name paths (not the model's folder)."""
    why = str(error).replace(str(model.config.path), model.config.path.name)
    admin_message = f"{model.name} could not be loaded: {why}"
    text = admin_message
    if not isinstance(error, InvalidRequest):
        text = f"{model.name} could not be loaded ({type(error).__name__}); see the server log"
    is_lasting = isinstance(error, InvalidRequest | ModelFileError | ModelNotFound | MissingExtra)
    return ApiError(
        Kind.UNAVAILABLE,
        text,
        retry_after_s=None if is_lasting else 10.0,  # a lasting error needs the operator
        may_retry=not is_lasting,
        reason="load_failed",
        admin_message=admin_message,
    )


async def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition at the end of a server or a model. Returns whether it was met within the limit."""
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        await asyncio.sleep(DRAIN_POLL_S)
    return is_so()


def _warm_up(text: ModelText) -> None:
    """Start the process that renders templates and check the template; raw prompts work without one."""
    if text.template.source is not None:
        try:
            text.template.check()
        except (TemplateError, RequestFailed) as error:
            log.warning("the chat template does not work, only raw prompts do: %s", error)
