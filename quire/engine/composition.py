"""Composes an engine: a checkpoint, a backend's runner, a cache of its size and a scheduler over it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType

from quire.backends.base import PRECISIONS, BackendOptions, Capacity, Progress, Runner
from quire.backends.machine import has_nvidia
from quire.core.block import BLOCK_SIZE
from quire.core.events import Observer, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import make_policy
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import InvalidRequest, MissingExtra, QuireError
from quire.sizes import parse_size
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import LOAD_FORMATS, open_checkpoint

# A backend is a module with `make_runner(checkpoint, options, progress)`, and the extra that brings what it needs.
BACKENDS: dict[str, str] = {
    "native": "quire.backends.native.build",
    "torch": "quire.backends.torch.build",
    "fake": "quire.backends.fake",
}

log = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
LIMITS = {
    "block_size": 1024,
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 1 << 20,
    "max_chunk_tokens": 1 << 20,
    "max_waiting": 1 << 24,
}
CHOSEN = ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens")  # by the backend, if they are not given


@dataclass(frozen=True, slots=True)
class Scheduling:
    """All that decides who runs when, and in how much memory: the simulator takes the same."""

    scheduling_policy: str
    patience: float | None  # None, here and below: the policy's own
    normal_share: float | None
    low_share: float | None
    num_blocks: int  # the null block included
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_waiting: int
    enable_prefix_caching: bool
    has_costly_rows: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that can be set, in plain values: it travels to the worker process as it is."""

    backend: str = "auto"  # torch where there is a GPU for it, else native
    device: str = "auto"
    dtype: str = "auto"
    precision: str = "balanced"
    load_format: str = "auto"
    threads: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_memory: int | None = None  # bytes; text such as "512M" or "2G" is converted
    max_num_seqs: int | None = None  # None, here and below: as the backend thinks best for its device
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_waiting: int = 4096
    scheduling_policy: str = "fair"
    patience: float | None = None
    normal_share: float | None = None
    low_share: float | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        kv_memory: object = self.kv_memory
        if isinstance(kv_memory, str):
            object.__setattr__(self, "kv_memory", parse_size("kv_memory", kv_memory))  # frozen after this
        if self.backend not in ("auto", *BACKENDS):
            raise InvalidRequest(f"backend = {self.backend!r} is not one of auto, {', '.join(BACKENDS)}")
        if self.backend != "fake" and self.device not in DEVICES:  # the fake takes its speed there
            raise InvalidRequest(f"device = {self.device!r} is not {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
        if self.precision not in PRECISIONS:
            raise InvalidRequest(f"precision = {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        make_policy(self.scheduling_policy, self.patience, self.normal_share, self.low_share)  # refuses what cannot be
        if self.load_format not in LOAD_FORMATS:
            raise InvalidRequest(f"load_format = {self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        for name, low in (("threads", 1), ("num_blocks", 2), ("kv_memory", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise InvalidRequest(f"{name} = {value!r} is not a whole number of at least {low}")
        for name, high in LIMITS.items():
            value = getattr(self, name)
            if value is None and name in CHOSEN:
                continue
            if type(value) is not int or not 1 <= value <= high:
                raise InvalidRequest(f"{name} = {value!r} is not a whole number from 1 to {high}")
        if type(self.enable_prefix_caching) is not bool:
            raise InvalidRequest(f"enable_prefix_caching = {self.enable_prefix_caching!r} is not true or false")

    def scheduling(self, capacity: Capacity) -> Scheduling:
        """What the scheduler of an engine with that capacity is given."""
        return Scheduling(
            scheduling_policy=self.scheduling_policy,
            patience=self.patience,
            normal_share=self.normal_share,
            low_share=self.low_share,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_num_seqs=capacity.max_num_seqs,
            max_model_len=capacity.max_model_len,
            max_num_batched_tokens=max(
                self.max_num_batched_tokens or capacity.max_num_batched_tokens, capacity.max_num_seqs
            ),
            max_chunk_tokens=self.max_chunk_tokens or capacity.max_chunk_tokens,
            max_waiting=self.max_waiting,
            enable_prefix_caching=self.enable_prefix_caching,
            has_costly_rows=capacity.has_costly_rows,
        )

    def backend_options(self) -> BackendOptions:
        values = asdict(self)
        return BackendOptions(**{field.name: values[field.name] for field in fields(BackendOptions)})


def make_engine(
    path: Path, config: EngineConfig, progress: Progress | None = None, observe: Observer = ignore
) -> Engine:
    """Load a model and make it ready. The checkpoint is closed again: its weights are in the runner."""
    checkpoint = open_checkpoint(path, config.load_format)
    try:
        runner = make_runner(checkpoint, config, progress)
    finally:
        checkpoint.close()
    return Engine(runner, make_scheduler(runner, config, observe))


def make_runner(checkpoint: Checkpoint, config: EngineConfig, progress: Progress | None = None) -> Runner:
    backend = import_backend(config)
    runner: Runner = backend.make_runner(checkpoint, config.backend_options(), progress)
    return runner


def choose_backend(config: EngineConfig) -> str:
    """Of `auto`: torch for a GPU and for what only torch has, native for everything else."""
    if config.backend != "auto":
        return config.backend
    has_torch = importlib.util.find_spec("torch") is not None
    if config.device == "cuda" or config.dtype not in ("auto", "int8"):
        return "torch"
    if config.device == "auto" and has_torch and has_nvidia():
        return "torch"
    if has_torch and (problem := _native_problem()) is not None:
        log.warning("the torch backend runs in place of the native one, slower: %s", problem)
        return "torch"
    return "native"


def _native_problem() -> str | None:
    """Why the native backend cannot be used here; None: it can."""
    try:
        from quire.backends.native.library import load_library

        load_library()
    except (ImportError, QuireError) as error:
        return str(error)
    return None


def import_backend(config: EngineConfig) -> ModuleType:
    """The module that makes runners. Its libraries may take seconds, the first time."""
    name = choose_backend(config)
    try:
        return importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of(f"the {name} backend", error.name) from error


def make_scheduler(
    runner: Runner, config: EngineConfig, observe: Observer = ignore, *, num_blocks: int | None = None
) -> Scheduler:
    """`num_blocks`: fewer than the runner has, for a scheduler that serves little."""
    capacity = runner.capacity()
    if num_blocks is not None:
        capacity = replace(capacity, num_blocks=min(num_blocks, capacity.num_blocks))
    given = config.scheduling(capacity)
    policy = make_policy(given.scheduling_policy, given.patience, given.normal_share, given.low_share)
    # A secret root: nobody can prepare tokens whose chain keys collide with another tenant's.
    cache = KVCacheManager(
        given.num_blocks,
        given.block_size,
        secret=secrets.token_bytes(16),
        is_caching=given.enable_prefix_caching,
        observe=observe,
    )
    return Scheduler(
        cache,
        policy,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_chunk_tokens=given.max_chunk_tokens,
        max_model_len=given.max_model_len,
        max_waiting=given.max_waiting,
        observe=observe,
    )
