"""The models of this server, loaded or not: finds the model of a request and loads it.

Knows no protocol. `quire/engine/model_manager.py` decides which models are unloaded.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.backends.base import Progress
from quire.backends.kv_memory import KVSpec
from quire.backends.machine import has_nvidia
from quire.core.values import Priority
from quire.engine.composition import check_supported
from quire.engine.model_manager import ManagedModel, ModelManager, ModelState, Needs
from quire.engine.model_text import ModelText
from quire.engine.worker.client import HANG_LIMIT_S, ModelClient
from quire.engine.worker.protocol import Ready, Stepped
from quire.errors import (
    InvalidRequest,
    MissingExtra,
    ModelFileError,
    ModelNotFound,
    ModelTooLarge,
    QuireError,
    RequestFailed,
    TemplateError,
)
from quire.server.auth import Key
from quire.server.config import ModelConfig
from quire.server.errors import ApiError, Kind
from quire.server.limits import (
    MAX_RETRY_AFTER_S,
    NUM_PARSERS,
    BodyBytes,
    FairSlots,
    IntakeRate,
    QueueTicket,
    Quotas,
    TierQueues,
)
from quire.server.model_service import (
    ActiveRequest,
    Caller,
    ClientSettings,
    InferenceRequest,
    MakeClient,
    ModelService,
    ServiceLimits,
    make_local_client,
    shutting_down,
)
from quire.server.observability.metrics import Exposition, Metrics
from quire.weights.hub import size_of
from quire.weights.opening import open_checkpoint

log = logging.getLogger(__name__)

HALF_BYTES, FP32_BYTES = 2, 4  # of a KV element: an estimate until a worker reports the size of its pool
PLAIN_BITS = {"F32": 32, "F16": 16, "BF16": 16}  # of weights that can be quantised while they are loaded
FINAL_STATS_S = 1.0  # time for the last stats of a worker before it is closed
UNLOAD_DRAIN_S = 5.0  # time for tokenisation and cut requests to end

__all__ = ["Model", "ModelState", "Models", "OpeningRequest", "SharedResources"]


@dataclass(slots=True)
class SharedResources:
    """Limits and resources that all models of a server share."""

    limits: ServiceLimits = field(default_factory=ServiceLimits)
    exposition: Exposition = field(default_factory=Exposition)
    quotas: Quotas = field(default_factory=Quotas)
    hang_limit_s: float = HANG_LIMIT_S
    make_client: MakeClient = make_local_client
    # One thread opens all model files: every new thread would leave its own heap behind.
    opener: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quire-open"))


class Model:
    """One model of this server. Requests may use its `name` and its `aliases`."""

    def __init__(self, config: ModelConfig, shared: SharedResources) -> None:
        self.name = config.names[0]
        self.aliases = config.names[1:]
        self.config = config
        self.service: ModelService | None = None  # while it is loaded
        self.progress: float | None = None  # of loading, 0 to 1
        self._first_report: tuple[float, float] | None = None  # time and progress of the first report
        self.created = int(time.time())
        self.metrics = Metrics(self.name, exposition=shared.exposition)
        self.queues = TierQueues(shared.limits.max_queue, shared.limits.max_queued_tokens)
        self.managed = ManagedModel(self, is_pinned=config.is_pinned, idle_unload_s=config.idle_unload)
        self.max_model_len: int | None = config.engine.max_model_len  # None: not read yet
        self.full_context: int | None = None  # max_model_len if the KV cache had enough memory
        self.on_loading: Progress | None = None
        self.open_s = 0.0  # duration of the last opening of its tokenizer and template
        self._shared = shared
        self._supervising: asyncio.Task[None] | None = None
        self._weight_bytes = size_of(config.path)  # size of its files until a worker reports it
        self._token_bytes: float | None = None  # KV bytes per token

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def root(self) -> str:
        return self.config.root or self.name

    @property
    def state(self) -> ModelState:
        return self.managed.state

    @property
    def is_pinned(self) -> bool:
        return self.managed.is_pinned

    def priority_of(self, request: InferenceRequest, key: Key) -> Priority:
        """The request's priority, else the model's, else the key's; never above the key's ceiling."""
        return key.priority(self.config.priority if request.priority is None else request.priority)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the model to load."""
        return len(self.managed.waiters)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and KV cache; of the weights alone while the model is not loaded."""
        return self.managed.num_bytes or self.needs.weight_bytes

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
            await asyncio.get_running_loop().run_in_executor(self._shared.opener, self._measure)
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
        text = await asyncio.get_running_loop().run_in_executor(self._shared.opener, opening)
        self.open_s = time.monotonic() - began_s

        shared = self._shared

        def connect(on_step: Callable[[Stepped], None]) -> ModelClient:
            progress, on_gap = self._take_progress, self.metrics.tokens
            return shared.make_client(
                ClientSettings(config, text, engine, shared.hang_limit_s, progress, on_step, on_gap)
            )

        names, limits = self.names, shared.limits
        max_tokens = None if config.default_max_tokens == -1 else config.default_max_tokens
        service = ModelService(text, connect, names, limits, self.metrics, self.queues, shared.quotas, max_tokens)
        self.metrics.forget_worker()
        await self._start(service)
        self.queues.expect(_intake(service.client))
        self._log_events(service.client.facts)
        return self._take_facts(service.client.facts)

    def _log_events(self, ready: Ready | None) -> None:
        if ready is None or (events := ready.kv_events) is None:
            return
        replay = "" if events.replay_endpoint is None else f", replay at {events.replay_endpoint}"
        log.info("%s: KV events at %s%s, topic %r", self.name, events.endpoint, replay, events.topic)
        if events.silent_because is not None:
            log.warning("%s: no KV events are sent, because %s", self.name, events.silent_because)

    async def _start(self, service: ModelService) -> None:
        supervising = asyncio.create_task(service.client.supervise(), name=f"supervise {self.name}")
        self.progress, self._first_report = 0.0, None
        try:
            warming = asyncio.to_thread(_warm_up, service.text)
            results = await asyncio.gather(service.client.start(), warming, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await _end(supervising)
            await service.close()
            raise
        finally:
            self.progress = None
        self.service, self._supervising = service, supervising

    def _take_facts(self, ready: Ready | None) -> int:
        """Store the worker's report. Returns the bytes it holds; 0: not reported."""
        if ready is None:
            return 0
        self.max_model_len = ready.max_model_len
        if self.full_context is not None and self.max_model_len < self.full_context:
            log.warning(
                "%s has a context of %s tokens instead of %s: its KV cache is too small for more",
                self.name,
                f"{self.max_model_len:,}",
                f"{self.full_context:,}",
            )
        if ready.weight_bytes:
            self._weight_bytes = ready.weight_bytes
        if ready.kv_bytes:
            self._token_bytes = ready.kv_bytes / (ready.capacity.num_blocks * ready.capacity.block_size)
        is_known = ready.weight_bytes and ready.kv_bytes
        return ready.weight_bytes + ready.kv_bytes if is_known else 0

    @property
    def reading_s(self) -> float | None:
        """Estimated time to read the rest of the weights, at the speed since the first report; None: unknown.

        The time before the first report (waiting for memory, starting a process) does not depend on the weights.
        """
        if self._first_report is None or self.progress is None:
            return None
        began_s, first = self._first_report
        done = self.progress - first
        return (time.monotonic() - began_s) * (1 - self.progress) / done if done > 0 else None

    def _take_progress(self, num_done: int, num_bytes: int) -> None:
        self.progress = num_done / num_bytes if num_bytes else 0.0
        if self._first_report is None:
            self._first_report = time.monotonic(), self.progress
        if self.on_loading is not None:
            self.on_loading(num_done, num_bytes)

    async def unload(self) -> None:
        self.queues.expect(None)
        service, self.service = self.service, None
        supervising, self._supervising = self._supervising, None
        if service is None or supervising is None:
            return
        with suppress(TimeoutError):  # a prompt is still being tokenised, or a client does not read
            await asyncio.wait_for(service.wait_idle(), UNLOAD_DRAIN_S)
        await _end(supervising)
        with suppress(TimeoutError, QuireError):
            stats = await asyncio.wait_for(service.client.stats(), FINAL_STATS_S)
            self.metrics.take(stats, service.client)
        await service.close()
        del service
        release_heap()

    def cut(self) -> None:
        if self.service is not None:
            text = f"{self.name} is being unloaded"
            self.service.cut(ApiError(Kind.UNAVAILABLE, text, retry_after_s=5.0, reason="unloading"))


@dataclass(eq=False, slots=True)
class OpeningRequest:
    """A request that no engine has yet: it waits for its model to load, or is being tokenized."""

    request: InferenceRequest
    caller: Caller
    served_by: Model
    priority: Priority
    task: asyncio.Task[Any] | None
    error: ApiError | None = None

    @property
    def model(self) -> str:
        return self.served_by.name

    def fail(self, error: ApiError) -> None:
        """End it from outside; the client gets the error."""
        if self.error is None and self.task is not None:
            self.error = error
            self.task.cancel()


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
        self.manager = ModelManager([model.managed for model in self._models], budget_bytes, kv_cap_bytes)
        self.limits = shared.limits
        self.exposition = shared.exposition
        self._opener = shared.opener
        self.body_bytes = BodyBytes()
        self.parsing = FairSlots(NUM_PARSERS)
        self.rendering = FairSlots(1)  # of metrics
        self.is_draining = False
        self.has_started = False  # the first model has been loaded
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[OpeningRequest] = set()

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
    def num_open(self) -> int:
        """Number of open requests, including those that wait for a model to load."""
        return self._num_open

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
        refusals: list[ApiError] = []
        for model in self._models:
            try:
                model.queues.check(key)
            except ApiError as error:
                refusals.append(error)
        if len(refusals) == len(self._models):
            raise refusals[0]

    async def open(self, request: InferenceRequest, caller: Caller) -> ActiveRequest:
        """Load the model if needed and open the request. Raises ApiError or QuireError; nothing is held then."""
        if self.is_draining:
            raise shutting_down()
        model = self.find(request.model)
        priority = model.priority_of(request, caller.key)
        ticket = model.queues.enter(request.params.n * len(request.prompts), priority, caller.key.name)
        opening = OpeningRequest(request, caller, model, priority, asyncio.current_task())
        self._opening.add(opening)
        try:
            return await self._open(request, caller, model, ticket)
        except asyncio.CancelledError:
            if opening.error is None:
                raise
            raise opening.error from None
        finally:
            self._opening.discard(opening)

    def in_progress(self) -> list[ActiveRequest | OpeningRequest]:
        """The requests of all models that are not finished, in no particular order."""
        active = [one for model in self._models if model.service is not None for one in model.service.active_requests]
        callers = {id(one.caller) for one in active}
        return [*active, *(one for one in self._opening if id(one.caller) not in callers)]

    async def _open(
        self, request: InferenceRequest, caller: Caller, model: Model, ticket: QueueTicket
    ) -> ActiveRequest:
        began_s = time.monotonic()
        try:
            await self.hold(model)
        except BaseException:
            ticket.leave()
            raise
        load_s = time.monotonic() - began_s
        try:
            assert model.service is not None
            active = await model.service.open(request, caller, ticket, load_s)
        except BaseException:
            self.release(model)
            raise
        active.load_s = load_s
        active.on_close(partial(self.release, model))
        return active

    async def use(self, name: str | None) -> ModelService:
        """Return the service of a model for one immediate call. For longer use, see `RequestContext.use`."""
        model = self.find(name)
        await self.hold(model)
        self.release(model)
        assert model.service is not None
        return model.service

    async def hold(self, model: Model) -> None:
        """Load the model and keep it loaded until `release`."""
        self._num_open += 1
        self._is_idle.clear()
        try:
            if model.state is not ModelState.READY:
                self._log_wait(model)
            async with asyncio.timeout(self.limits.queue_timeout_s):
                await self.manager.hold(model.managed)
        except BaseException as error:
            self._leave()
            if isinstance(error, TimeoutError | QuireError):
                raise self._refusal(model, error) from error
            raise

    def release(self, model: Model) -> None:
        self.manager.release(model.managed)
        self._leave()

    def _leave(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._is_idle.set()

    def _log_wait(self, model: Model) -> None:
        num_waiting = model.num_waiting + 1
        if num_waiting & (num_waiting - 1) == 0 and self.has_started:  # 1, 2, 4, ...: not a line per request
            eta_s = self.eta_s(model)
            about = "" if eta_s is None else f", about {eta_s:.1f} s more"
            log.info("%d request(s) are waiting for %s, which is %s%s", num_waiting, model.name, model.state, about)

    def eta_s(self, model: Model) -> float | None:
        """Estimated time until the model is loaded; None: unknown."""
        return self.manager.eta_s(model.managed, model.reading_s)

    def _refusal(self, model: Model, error: Exception) -> ApiError:
        if self.is_draining:
            return shutting_down()
        match error:
            case TimeoutError():
                limit = f"the request waited {self.limits.queue_timeout_s:g} s, which is the limit"
                text = f"{model.name} is {model.state}: {limit}"
                retry_s = min(self.eta_s(model) or model.queues.retry_after_s(), MAX_RETRY_AFTER_S)
                return ApiError(Kind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_timeout")
            case ModelTooLarge():
                return ApiError(Kind.UNAVAILABLE, str(error), may_retry=False, reason="model_too_large")
            case _:
                return _load_failed(model, error)

    # Loading and unloading

    async def start(self) -> None:
        """Load the first model. Raises if it cannot be loaded."""
        await self.manager.load(self.default.managed)
        self.has_started = True

    async def preload(self) -> None:
        """Load the other models that are configured to be preloaded. A failure is logged; the next request retries."""
        for model in self._models[1:]:
            if model.config.is_preloaded:
                with suppress(QuireError):
                    await self.manager.load(model.managed)

    async def load(self, model: Model) -> None:
        try:
            await self.manager.load(model.managed)
        except QuireError as error:
            raise self._refusal(model, error) from error

    async def unload(self, model: Model, *, is_forced: bool = False) -> None:
        await self.manager.unload(model.managed, is_forced=is_forced)

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
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), limit_s)
        return self._num_open == 0

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
        self._opener.shutdown(wait=False, cancel_futures=True)


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


def release_heap() -> None:
    """Free the memory of an unloaded model's tokenizer: collect cycles, and return free heap pages to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _intake(client: ModelClient) -> IntakeRate | None:
    facts, scheduling = client.facts, client.scheduling
    if facts is None or scheduling is None:
        return None
    return IntakeRate(facts.step_s, scheduling.max_num_batched_tokens, scheduling.max_num_seqs)


def _warm_up(text: ModelText) -> None:
    """Start the process that renders templates and check the template; raw prompts work without one."""
    if text.template.exists:
        try:
            text.template.check()
        except (TemplateError, RequestFailed) as error:
            log.warning("the chat template does not work, only raw prompts do: %s", error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # already raised where the worker was awaited
