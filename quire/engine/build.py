"""Composes an engine: a checkpoint, a backend's runner, a cache of its size and a scheduler over it."""

from __future__ import annotations

import importlib
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType

from quire.backends.base import BackendOptions, Progress, Runner
from quire.core.block import BLOCK_SIZE
from quire.core.events import Observer, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import POLICIES, Aging
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import InvalidRequest, MissingExtra
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import LOAD_FORMATS, open_checkpoint

# A backend is a module with `make_runner(checkpoint, options, progress)`, and the extra that brings what it needs.
BACKENDS: dict[str, tuple[str, str]] = {
    "torch": ("quire.backends.torch.build", "torch"),
    "fake": ("quire.backends.fake", ""),
}

LIMITS = {
    "block_size": 1024,
    "max_seqs": 4096,
    "max_step_tokens": 1 << 20,
    "max_chunk_tokens": 1 << 20,
    "max_waiting": 1 << 24,
}
CHOSEN = ("max_seqs", "max_step_tokens", "max_chunk_tokens")  # by the backend, if they are not given


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that can be set, in plain values: it travels to the worker process as it is."""

    backend: str = "torch"
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    num_threads: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_bytes: int | None = None
    max_seqs: int | None = None  # None, here and below: as the backend thinks best for its device
    max_context: int | None = None
    max_step_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_waiting: int = 4096
    policy: str = "aging"
    patience_s: float | None = None
    is_caching: bool = True

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidRequest(f"backend = {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.policy not in POLICIES:
            raise InvalidRequest(f"policy = {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.load_format not in LOAD_FORMATS:
            raise InvalidRequest(f"load_format = {self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        for name, low in (("num_threads", 1), ("num_blocks", 2), ("kv_bytes", 1), ("max_context", 2)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise InvalidRequest(f"{name} = {value!r} is not a whole number of at least {low}")
        for name, high in LIMITS.items():
            value = getattr(self, name)
            if value is None and name in CHOSEN:
                continue
            if type(value) is not int or not 1 <= value <= high:
                raise InvalidRequest(f"{name} = {value!r} is not a whole number from 1 to {high}")
        if type(self.is_caching) is not bool:
            raise InvalidRequest(f"is_caching = {self.is_caching!r} is not true or false")
        if self.patience_s is not None:
            if type(self.patience_s) not in (int, float):
                raise InvalidRequest(f"patience_s = {self.patience_s!r} is not a number of seconds")
            Aging(self.patience_s)  # refuses what is out of range

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
    runner: Runner = import_backend(config).make_runner(checkpoint, config.backend_options(), progress)
    return runner


def import_backend(config: EngineConfig) -> ModuleType:
    """The module that makes runners. Its libraries may take seconds, the first time."""
    module_name, extra = BACKENDS[config.backend]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra(
            f"the {config.backend} backend needs {error.name}: pip install 'quire[{extra}]'", name=error.name
        ) from error


def make_scheduler(runner: Runner, config: EngineConfig, observe: Observer = ignore) -> Scheduler:
    capacity = runner.capacity()
    policy = POLICIES[config.policy]()
    if config.patience_s is not None and isinstance(policy, Aging):
        policy = Aging(config.patience_s)
    # A secret root: nobody can prepare tokens whose chain keys collide with another tenant's.
    cache = KVCacheManager(
        capacity.num_blocks,
        capacity.block_size,
        secret=secrets.token_bytes(16),
        is_caching=config.is_caching,
        observe=observe,
    )
    return Scheduler(
        cache,
        policy,
        max_seqs=capacity.max_seqs,
        max_step_tokens=max(config.max_step_tokens or capacity.max_step_tokens, capacity.max_seqs),
        max_chunk_tokens=config.max_chunk_tokens or capacity.max_chunk_tokens,
        max_context=capacity.max_context,
        max_waiting=config.max_waiting,
        observe=observe,
    )
