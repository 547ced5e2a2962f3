"""The models of this server, loaded or not: which one a request means, and how it comes to be loaded.

Knows no protocol. What goes and stays is the manager's to decide (`quire/engine/model_manager.py`).
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
from quire.backends.machine import has_nvidia
from quire.core.request import Priority
from quire.engine.model_manager import ManagedModel, ModelManager, ModelState, Needs
from quire.engine.model_text import ModelText
from quire.engine.worker.client import EngineClient
from quire.engine.worker.process import HANG_LIMIT_S
from quire.engine.worker.protocol import Ready, Stepped
from quire.errors import (
    InvalidRequest,
    MissingExtra,
    ModelFileError,
    ModelNotFound,
    ModelTooLarge,
    QuireError,
    TemplateError,
)
from quire.server.active_request import ActiveRequest, Caller
from quire.server.auth import Key
from quire.server.config import ModelConfig
from quire.server.errors import ApiError, Kind
from quire.server.inference_request import InferenceRequest
from quire.server.limits import MAX_RETRY_AFTER_S, IntakeRate, QueueTicket, Quotas, Reading, TierQueues
from quire.server.model_service import ModelService, ServiceLimits, ending
from quire.server.observability.metrics import Exposition, Metrics
from quire.weights.hub import size_of
from quire.weights.opening import open_checkpoint

HALF_BYTES, FP32_BYTES = 2, 4  # an element of KV: an estimate, until a worker says what its pool takes
LAST_STATS_S = 1.0  # for a worker that is about to be closed
LAST_WORK_S = 5.0  # for what has no lease, or was cut

__all__ = ["Model", "ModelState", "Models", "OpeningRequest", "Shared"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shared:
    """What all models of a server have in common."""

    limits: ServiceLimits = field(default_factory=ServiceLimits)
    exposition: Exposition = field(default_factory=Exposition)
    quotas: Quotas = field(default_factory=Quotas)
    hang_limit_s: float = HANG_LIMIT_S
    # One thread opens all files: each new one would leave a heap of its own behind.
    opener: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quire-open"))


class Model:
    """One model of this server. What clients may call it: `name`, and `aliases`."""

    def __init__(self, config: ModelConfig, shared: Shared) -> None:
        self.name = config.names[0]
        self.aliases = config.names[1:]
        self.config = config
        self.service: ModelService | None = None  # while it is loaded
        self.progress: float | None = None  # of loading, 0 to 1
        self._first_report: tuple[float, float] | None = None  # when the reading of weights began, and at what progress
        self.created = int(time.time())
        self.metrics = Metrics(self.name, exposition=shared.exposition)
        self.door = TierQueues(shared.limits.max_queue, shared.limits.max_queued_tokens)
        self.seat = ManagedModel(self, is_pinned=config.is_pinned, idle_unload_s=config.idle_unload)
        self.max_model_len: int | None = config.engine.max_model_len  # None: nobody has looked yet
        self.full_context: int | None = None  # what it would be, had it memory enough
        self.on_loading: Progress | None = None
        self.open_s = 0.0  # how long its text took to open, the last time
        self._shared = shared
        self._supervising: asyncio.Task[None] | None = None
        self._weight_bytes = size_of(config.path)  # of its files, until a worker has said
        self._token_bytes: float | None = None  # of KV

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def root(self) -> str:
        return self.config.root or self.name

    @property
    def state(self) -> ModelState:
        return self.seat.state

    @property
    def is_pinned(self) -> bool:
        return self.seat.is_pinned

    def priority_of(self, request: InferenceRequest, key: Key) -> Priority:
        """What the request asks for, or the model's, or the key's; never above what the key may have."""
        return key.priority(self.config.priority if request.priority is None else request.priority)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it to load."""
        return len(self.seat.waiters)

    @property
    def num_bytes(self) -> int:
        """Weights and KV as held; while it is not loaded, its weights alone."""
        return self.seat.num_bytes or self.needs.weight_bytes

    @property
    def facts(self) -> Ready | None:
        return None if self.service is None else self.service.client.facts

    # What the manager asks

    @property
    def needs(self) -> Needs:
        engine = self.config.engine
        if self._token_bytes is None:
            return Needs(self._weight_bytes, 0, engine.kv_memory if engine.num_blocks is None else None)
        kv_bytes = engine.kv_memory
        if engine.num_blocks is not None:
            kv_bytes = int(engine.num_blocks * engine.block_size * self._token_bytes)
        blocks = -(-(self.full_context or 1) // engine.block_size) + 1  # and the null block
        return Needs(self._weight_bytes, int(blocks * engine.block_size * self._token_bytes), kv_bytes)

    async def measure(self) -> Needs:
        """Read the facts in its files, once."""
        if self._token_bytes is None:
            await asyncio.get_running_loop().run_in_executor(self._shared.opener, self._measure)
        return self.needs

    def _measure(self) -> None:
        checkpoint = open_checkpoint(self.config.path, self.config.engine.load_format)
        spec = checkpoint.spec
        checkpoint.close()
        self.full_context = min(self.config.engine.max_model_len or spec.max_model_len, spec.max_model_len)
        self.max_model_len = self.full_context
        engine = self.config.engine
        is_half = engine.backend in ("auto", "native") or (engine.device != "cpu" and has_nvidia())
        element_bytes = HALF_BYTES if is_half else FP32_BYTES
        self._token_bytes = 2.0 * spec.num_layers * spec.num_kv_heads * spec.head_size * element_bytes

    async def load(self, kv_bytes: int | None) -> int:
        config, began_s = self.config, time.monotonic()
        engine = config.engine
        if kv_bytes is not None and engine.num_blocks is None:
            engine = replace(engine, kv_memory=kv_bytes)
        opening = partial(ModelText.open, config.path, self.root, engine.load_format, config.tool_format)
        text = await asyncio.get_running_loop().run_in_executor(self._shared.opener, opening)
        self.open_s = time.monotonic() - began_s

        def connect(on_step: Callable[[Stepped], None]) -> EngineClient:
            hang_s = self._shared.hang_limit_s
            return EngineClient(
                config.path, text, engine, on_loading=self._take_progress, hang_limit_s=hang_s, on_step=on_step
            )

        shared = self._shared
        names, limits = self.names, shared.limits
        max_tokens = None if config.default_max_tokens == -1 else config.default_max_tokens
        service = ModelService(text, connect, names, limits, self.metrics, self.door, shared.quotas, max_tokens)
        self.metrics.forget_worker()
        await self._start(service)
        self.door.expect(_intake(service.client))
        return self._take_facts(service.client.facts)

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
        """Returns the bytes it holds, as far as it says."""
        if ready is None:
            return 0
        self.max_model_len = ready.max_model_len
        if self.full_context is not None and self.max_model_len < self.full_context:
            log.warning(
                "%s takes %s tokens of context instead of %s: its KV cache has no room for more",
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
        """How long the rest of its weights takes to read, at the speed since the first report; None: not known.

        What came before that report, waiting for room and starting a process, does not grow with the weights.
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
        self.door.expect(None)
        service, self.service = self.service, None
        supervising, self._supervising = self._supervising, None
        if service is None or supervising is None:
            return
        with suppress(TimeoutError):  # of a question that is still being tokenised, or a client that does not read
            await asyncio.wait_for(service.wait_idle(), LAST_WORK_S)
        await _end(supervising)
        with suppress(TimeoutError, QuireError):
            stats = await asyncio.wait_for(service.client.stats(), LAST_STATS_S)
            self.metrics.take(stats, service.client)
        await service.close()
        del service
        give_back()

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
    """Belongs to one event loop."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        shared: Shared,
        *,
        budget_bytes: int | None = None,
        kv_cap_bytes: int | None = None,
    ) -> None:
        self._models = [Model(config, shared) for config in configs]
        self._by_name = {name: model for model in self._models for name in model.names}
        self.manager = ModelManager([model.seat for model in self._models], budget_bytes, kv_cap_bytes)
        self.limits = shared.limits
        self.exposition = shared.exposition
        self._opener = shared.opener
        self.reading = Reading()
        self.is_draining = False
        self.has_started = False  # what is loaded at the start is
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[OpeningRequest] = set()

    def __iter__(self) -> Iterator[Model]:
        """In the order given."""
        return iter(self._models)

    @property
    def default(self) -> Model:
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may call them, aliases included."""
        return tuple(self._by_name)

    @property
    def num_open(self) -> int:
        """Requests under way, those that wait for a load included."""
        return self._num_open

    @property
    def max_model_len(self) -> int:
        """The largest that is known."""
        return max(model.max_model_len or 0 for model in self._models)

    def find(self, name: str | None) -> Model:
        """None or an empty name: the default, which is the first."""
        if not name:
            return self.default
        if (model := self._by_name.get(name)) is None:
            text = f"model = {name!r:.200} is not served here; this server has {', '.join(self._by_name)}"
            raise ApiError(Kind.NO_MODEL, text, param="model")
        return model

    # Requests

    def check_open(self, key: Key) -> None:
        """Before a body is read: whether anything of this key could be taken now, whichever model it is for."""
        if self.is_draining:
            raise ending()
        refusals: list[ApiError] = []
        for model in self._models:
            try:
                model.door.check(key)
            except ApiError as error:
                refusals.append(error)
        if len(refusals) == len(self._models):
            raise refusals[0]

    async def open(self, request: InferenceRequest, caller: Caller) -> ActiveRequest:
        """Hand it to the model it names, when that is loaded. Raises ApiError or QuireError, and then holds nothing."""
        if self.is_draining:
            raise ending()
        model = self.find(request.model)
        priority = model.priority_of(request, caller.key)
        ticket = model.door.enter(request.params.n * len(request.prompts), priority, caller.key.name)
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
        active = [one for model in self._models if model.service is not None for one in model.service.works]
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
        """For a question that is asked at once. Who waits before it asks, or asks twice, wants `RequestContext.use`."""
        model = self.find(name)
        await self.hold(model)
        self.release(model)
        assert model.service is not None
        return model.service

    async def hold(self, model: Model) -> None:
        """It is loaded then, and stays so until `release`."""
        self._num_open += 1
        self._is_idle.clear()
        try:
            if model.state is not ModelState.READY:
                self._tell_wait(model)
            async with asyncio.timeout(self.limits.queue_timeout_s):
                await self.manager.hold(model.seat)
        except BaseException as error:
            self._leave()
            if isinstance(error, TimeoutError | QuireError):
                raise self._refusal(model, error) from error
            raise

    def release(self, model: Model) -> None:
        self.manager.release(model.seat)
        self._leave()

    def _leave(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._is_idle.set()

    def _tell_wait(self, model: Model) -> None:
        num_waiting = model.num_waiting + 1
        if num_waiting & (num_waiting - 1) == 0 and self.has_started:  # 1, 2, 4: a crowd is not told one by one
            eta_s = self.eta_s(model)
            about = "" if eta_s is None else f", about {eta_s:.1f} s more"
            log.info("%d request(s) wait for %s, which is %s%s", num_waiting, model.name, model.state, about)

    def eta_s(self, model: Model) -> float | None:
        """Until it is loaded, as far as can be said."""
        return self.manager.eta_s(model.seat, model.reading_s)

    def _refusal(self, model: Model, error: Exception) -> ApiError:
        if self.is_draining:
            return ending()
        match error:
            case TimeoutError():
                text = f"{model.name} is {model.state}: the limit of {self.limits.queue_timeout_s:g} s is over"
                retry_s = min(self.eta_s(model) or model.door.retry_after_s(), MAX_RETRY_AFTER_S)
                return ApiError(Kind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_timeout")
            case ModelTooLarge():
                return ApiError(Kind.UNAVAILABLE, str(error), may_retry=False, reason="model_too_large")
            case _:
                return _load_failed(model, error)

    # The keeper

    async def start(self) -> None:
        """Load what is to be there from the start. Raises what kept the first one from it."""
        await self.manager.load(self.default.seat)
        self.has_started = True

    async def preload(self) -> None:
        """The others that are to be loaded without being asked for. Failures are in the log, and tried again on use."""
        for model in self._models[1:]:
            if model.config.is_preloaded:
                with suppress(QuireError):
                    await self.manager.load(model.seat)

    async def load(self, model: Model) -> None:
        try:
            await self.manager.load(model.seat)
        except QuireError as error:
            raise self._refusal(model, error) from error

    async def unload(self, model: Model, *, is_forced: bool = False) -> None:
        await self.manager.unload(model.seat, is_forced=is_forced)

    def begin(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a task of its own, which ends with the server at the latest."""
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it is told; where nobody does, the log is

    # The end

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait for what is here, so long at most. True: all of it ended."""
        self.is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), limit_s)
        return self._num_open == 0

    def cut(self) -> None:
        """End what is left, with an error to each client."""
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
    """Why is for the keeper, and without the folder: the rest of it may name paths, which are nobody's business."""
    why = str(error).replace(str(model.config.path), model.config.path.name)
    told = f"{model.name} could not be loaded: {why}"
    text = told
    if not isinstance(error, InvalidRequest):
        text = f"{model.name} could not be loaded ({type(error).__name__}); the server's log says why"
    is_lasting = isinstance(error, InvalidRequest | ModelFileError | ModelNotFound | MissingExtra)
    return ApiError(
        Kind.UNAVAILABLE,
        text,
        retry_after_s=None if is_lasting else 10.0,  # until somebody mends it
        may_retry=not is_lasting,
        reason="load_failed",
        admin_message=told,
    )


def give_back() -> None:
    """What the text of a model took of this process: cycles are collected now, and free pages leave the heap."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _intake(client: EngineClient) -> IntakeRate | None:
    facts, scheduling = client.facts, client.scheduling
    if facts is None or scheduling is None:
        return None
    return IntakeRate(facts.step_s, scheduling.max_num_batched_tokens, scheduling.max_num_seqs)


def _warm_up(text: ModelText) -> None:
    """Start the process that renders templates, and find a bad template now; raw prompts work without one."""
    if text.template.exists:
        try:
            text.template.check()
        except TemplateError as error:
            log.warning("chat will not work, only raw prompts: %s", error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it was told to whoever waited for the worker
