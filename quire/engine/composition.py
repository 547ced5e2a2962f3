"""Composes an engine from a checkpoint, a backend's runner, a KV cache with its levels, and a scheduler.

The speed of prompts and of loads is measured here, to load only what would take longer to compute.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from itertools import repeat
from math import inf
from pathlib import Path
from types import ModuleType

from quire.backends.base import (
    KV_CACHE_DTYPES,
    PRECISIONS,
    BackendOptions,
    BlockIO,
    Capacity,
    Progress,
    Runner,
)
from quire.backends.machine import has_nvidia, is_apple_silicon
from quire.backends.support import mlx_reads, refuse_unsupported, skip_notice
from quire.core.cache import BLOCK_SIZE, KEY_BYTES
from quire.core.events import Observer, ignore
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.levels import NO_SAVES, Levels, SaveLimits
from quire.core.levels.lower_level import LevelSpeed, LowerLevel, PieceCounts, PieceSizes
from quire.core.policy import make_policy
from quire.core.scheduler import Scheduler
from quire.core.step import Content, MemoryKind, MemoryRef
from quire.core.values import Level, SamplingParams
from quire.engine.engine import Engine
from quire.engine.fingerprint import DIGESTS, Fingerprinting, describe, system_fingerprint, weights_digest
from quire.engine.generation import GenerationRequest
from quire.engine.levels.block_file import TEMPORARY_PREFIX, BlockRead, DamagedBlock, read_blocks, write_block
from quire.engine.levels.disk_store import DiskStore, Space, reads_per_thread, root_secret
from quire.engine.levels.transfers import Slots, Transfers
from quire.errors import CacheFolderError, InvalidRequest, MissingExtra, QuireError
from quire.sizes import compared_sizes, memory_size, parse_size
from quire.weights.checkpoint import Checkpoint
from quire.weights.hub import cache_dir
from quire.weights.opening import LOAD_FORMATS, open_checkpoint, text_files, weight_files
from quire.weights.spec import ModelSpec

MIN_PROMPT, MAX_PROMPT, GROWTH = 32, 2048, 4  # tokens of the measured prompts, each so many times the one before
MAX_PREFILL_S = 0.25  # no longer prompt is measured after one took this long
MAX_PIECES = 16
NUM_ROUNDS = 8  # reads of each file
MAX_BYTES = 64 << 20

log = logging.getLogger(__name__)


def measure_prefill(make_engine: Callable[[int], Engine], max_tokens: int) -> int | None:
    """Return nanoseconds per prompt token, of the longest prompt that takes little time. None: too short to tell.

    `make_engine` makes an engine without cache for a prompt of this many tokens.
    """
    found = None
    num_tokens = MIN_PROMPT
    while num_tokens <= min(MAX_PROMPT, max_tokens):
        took_s = min(_time_prompt(make_engine, num_tokens) for _ in range(2))  # the first of a size may compile
        found = round(took_s * 1e9 / num_tokens)
        if took_s > MAX_PREFILL_S:
            break
        num_tokens *= GROWTH
    return found


def _time_prompt(make_engine: Callable[[int], Engine], num_tokens: int) -> float:
    engine = make_engine(num_tokens)
    engine.add(0, GenerationRequest.of((0,) * num_tokens, SamplingParams(temperature=0, max_tokens=1)))
    start_s = time.monotonic()
    while engine.has_work:
        engine.step()
    return time.monotonic() - start_s


def measure_import(block_io: BlockIO, num_blocks: int) -> LevelSpeed:
    """Return the speed of copies from host memory into the runner's memory. Overwrites the first blocks.

    `num_blocks`: of the runner; window blocks, if no layer has others.
    """
    kind = MemoryKind.BLOCK if block_io.sizes.block else MemoryKind.WINDOW
    size = block_io.sizes.of(kind)
    count = max(1, min(MAX_PIECES, MAX_BYTES // size, num_blocks - 1))
    memory = block_io.allocate(count * size)
    buffers = [memory[at : at + size] for at in range(0, count * size, size)]
    targets = [MemoryRef(kind, number) for number in range(1, count + 1)]

    def copy(number: int) -> float:
        start_s = time.monotonic()
        pending = block_io.import_(targets[:number], buffers[:number])
        while not pending.is_done():
            time.sleep(0)
        return time.monotonic() - start_s

    copy(count)  # kernels are compiled, pages are touched
    return _speed(min(copy(1) for _ in range(3)), size, min(copy(count) for _ in range(3)), count * size)


def measure_disk(space: Space, size: int, num_readers: int) -> LevelSpeed | None:
    """Return the speed of verified reads of new files. None if the folder cannot be written.

    New files are in the page cache, like all files if only the process was restarted. Loads correct the speed later.
    The files are temporary and outside of the budget: a measurement must not evict cached content.
    """
    count = max(2, min(MAX_PIECES, MAX_BYTES // size))
    content = Content(MemoryKind.BLOCK, os.urandom(KEY_BYTES), bytes(KEY_BYTES), b"")
    payload = memoryview(bytearray(os.urandom(size)))
    names = [f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}" for _ in range(count)]
    paths = [os.path.join(space.path, name) for name in names]

    def read(first: int, number: int) -> None:
        reads = [BlockRead(paths[at], content, buffers[at]) for at in range(first, min(first + number, count))]
        for damage in filter(None, read_blocks(reads, space.digest, time.time_ns())):
            raise damage

    try:
        for path in paths:
            write_block(path, space.digest, content, payload)
        buffers = [memoryview(bytearray(size)) for _ in paths]
        start_s = time.monotonic()
        read(0, 1)
        single_s = time.monotonic() - start_s
        number = reads_per_thread(count, size, num_readers)
        firsts = list(range(0, count, number))
        with ThreadPoolExecutor(num_readers) as readers:
            list(readers.map(read, firsts, repeat(number)))  # starts the threads
            start_s = time.monotonic()
            list(readers.map(read, firsts * NUM_ROUNDS, repeat(number)))
            total_s = time.monotonic() - start_s
        return _speed(single_s, size, total_s, size * count * NUM_ROUNDS)
    except (OSError, DamagedBlock) as error:
        log.warning("the speed of the cache folder could not be measured: %s", error)
        return None
    finally:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)


def _speed(single_s: float, single_bytes: int, total_s: float, total_bytes: int) -> LevelSpeed:
    """Return the speed of many pieces, and the latency: what one piece takes beyond that speed."""
    bytes_per_s = total_bytes / max(total_s, 1e-6)
    latency_s = max(single_s - single_bytes / bytes_per_s, 0.0)
    return LevelSpeed(round(latency_s * 1e9), max(round(bytes_per_s), 1))


def in_sequence(one: LevelSpeed, other: LevelSpeed) -> LevelSpeed:
    """Return the speed of a load that takes two copies."""
    bytes_per_s = 1 / (1 / one.bytes_per_s + 1 / other.bytes_per_s)
    return LevelSpeed(one.latency_ns + other.latency_ns, max(round(bytes_per_s), 1))


READ_BYTES = 256 << 20  # of buffers for content that is read from files: all that reads hold, also those that hang
SAVE_BYTES = 128 << 20  # of buffers that wait to be written
MIN_PIECES = 2
NUM_READERS = max(1, min(16, os.cpu_count() or 1))


class OpenedLevels:
    """The levels of one engine, before and after its scheduler is made."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        model: str,
        digest: Callable[[], str],
    ) -> None:
        """`digest`: of the weights. Raises InvalidRequest if the runner does not support these levels."""
        block_io = runner.block_io()
        if block_io is None:
            name = "disk_cache" if config.disk_cache else "host_cache"
            reason = f"the {runner.facts().backend} backend does not support it on this device"
            raise InvalidRequest(f"{name} = {memory_size(getattr(config, name))}: {reason}")
        if config.host_cache and block_io.is_host_memory:
            raise InvalidRequest(
                f"host_cache = {memory_size(config.host_cache)}: the KV cache of this backend is in host memory"
                " already; kv_memory sets its size"
            )
        capacity = runner.capacity()
        pool_sizes = capacity.num_blocks, capacity.num_window_blocks, capacity.num_states
        self.block_io = block_io
        sizes = block_io.sizes
        self.secret = b""  # of the folder; empty: there is none
        self._disk: DiskStore | None = None
        self.levels: list[LowerLevel] = []
        pieces = (sizes.block, sizes.window, sizes.state)
        for name, given in (("host_cache", config.host_cache), ("disk_cache", config.disk_cache)):
            if given and given < MIN_PIECES * sum(pieces):
                there, needed = compared_sizes(given, MIN_PIECES * sum(pieces))
                raise InvalidRequest(f"{name} = {there} is too small for this model: it needs at least {needed}")
        host_slots = None
        if config.host_cache:
            counts = divide(config.host_cache, pieces, pool_sizes)
            host_slots = Slots(block_io.allocate, sizes, counts, is_early=True)
            self.levels.append(LowerLevel(Level.HOST, pieces, counts))
        read_counts, save_counts = (
            at_most(divide(num_bytes, pieces, pool_sizes), pool_sizes) for num_bytes in (READ_BYTES, SAVE_BYTES)
        )
        if config.disk_cache and (folder := disk_cache_folder(config)) is not None:
            self.secret = root_secret(folder)  # keys depend on it
            facts = describe(digest(), config.load_format, runner.facts())
            facts |= {"secret": sha256(self.secret).hexdigest()[:16]}
            self._disk = DiskStore(folder, facts, config.disk_cache, name=model)
            self.levels.append(LowerLevel(Level.DISK, pieces, store_bytes=config.disk_cache, buffers=read_counts))
        # Of a model whose layers all have windows, window blocks.
        self._block_bytes, self._num_blocks = (
            (sizes.block, pool_sizes[0]) if sizes.block else (sizes.window, pool_sizes[1])
        )
        self.save_limits = SaveLimits(
            max_bytes=block_io.max_exports * self._block_bytes,
            idle_bytes=block_io.pieces_per_step * self._block_bytes,
            max_pending=sum(save_counts) + (4 * block_io.max_exports if config.host_cache else 0),
            max_writes=min(count for count in save_counts if count),
        )
        has_pinned = self._disk is not None and not block_io.is_host_memory  # which takes time to allocate
        read_slots = Slots(block_io.allocate, sizes, read_counts, is_early=has_pinned)
        self._slots = (read_slots,) if host_slots is None else (host_slots, read_slots)
        self.transfers = Transfers(
            block_io,
            host_slots,
            self._disk,
            read_slots=read_slots,
            save_slots=Slots(block_io.allocate, sizes, save_counts),
            num_readers=NUM_READERS,
        )

    def start(self, levels: Levels) -> None:
        """Tell the cache what is on disk, and measure the speed of loads."""
        copies = measure_import(self.block_io, self._num_blocks)
        for level in self.levels:
            level.speed = copies
        if self._disk is not None:
            reads = measure_disk(self._disk.space, self._block_bytes, NUM_READERS)
            self.levels[-1].speed = copies if reads is None else in_sequence(reads, copies)
            levels.restore(Level.DISK, self._disk.scan())
        for level in self.levels:
            level.is_filled = levels.break_even(level) is not None
            if not level.is_filled:
                log.warning("nothing is saved to the %s cache: loads would take longer than computing", level.level)
        for slots in self._slots:
            slots.allocate_all()


def divide(num_bytes: int, sizes: PieceSizes, pool_sizes: PieceCounts) -> PieceCounts:
    """Divide memory among the kinds of pieces as the runner's own memory is divided; at least a few of each."""
    total = sum(size * count for size, count in zip(sizes, pool_sizes, strict=True))
    blocks, windows, states = (
        max(num_bytes * count // total, MIN_PIECES) if size else 0
        for size, count in zip(sizes, pool_sizes, strict=True)
    )
    return blocks, windows, states


def at_most(counts: PieceCounts, pool_sizes: PieceCounts) -> PieceCounts:
    """Limit buffers to the pieces of the runner: no more can be loaded or saved at the same time."""
    blocks, windows, states = map(min, counts, pool_sizes)
    return blocks, windows, states


# A backend is a module with `make_runner(checkpoint, options, progress)`.
BACKENDS: dict[str, str] = {
    "native": "quire.backends.native.runner",
    "torch": "quire.backends.torch.build",
    "mlx": "quire.backends.mlx.build",
    "fake": "quire.backends.fake",
}


CHOICES = {
    "backend": ("auto", *BACKENDS),
    "precision": PRECISIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "load_format": LOAD_FORMATS,
}
DEVICES = ("auto", "cpu", "cuda", "metal")
QUANTIZING = ("mlx", "torch", "fake")  # backends that know `quantize`
QUANTIZE_NAMES = {"4": 4, "8": 8, "int4": 4, "fp8": 8}  # bits; the names are those of formats on a GPU
FP8_KV = ("torch", "fake")  # backends that know `kv_cache_dtype`
SIZES = ("kv_memory", "host_cache", "disk_cache")  # may be text such as 8G
BOUNDS = {  # of whole numbers
    "threads": (1, inf),
    "num_blocks": (2, inf),
    "kv_memory": (1, inf),
    "max_model_len": (2, inf),
    "host_cache": (0, inf),
    "disk_cache": (0, inf),
    "block_size": (1, 1024),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_chunk_tokens": (1, 1 << 20),
    "max_mixed_tokens": (1, 1 << 20),
    "max_waiting": (1, 1 << 24),
}
REQUIRED = ("block_size", "max_waiting")  # of these, None is refused


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Settings that determine scheduling: policy, limits and pool size. An administrator sees them."""

    scheduling_policy: str
    patience: float | None  # None, here and below: the policy's default
    normal_share: float | None
    low_share: float | None
    num_blocks: int  # including the null block
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_mixed_tokens: int | None  # in a server; None: no limit
    max_waiting: int
    enable_prefix_caching: bool
    has_costly_rows: bool
    window: int  # largest window of the layers with window blocks
    num_window_blocks: int  # including the null block; 0: none
    num_states: int  # including the empty state; 0: the model has no recurrent states
    num_live_states: int  # per running request


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All engine settings, as plain values. It is sent to the worker process unchanged."""

    backend: str = "auto"  # mlx on Apple silicon, torch if there is an NVIDIA GPU, else native
    device: str = "auto"
    dtype: str = "auto"
    precision: str = "balanced"
    quantize: int | str | None = None  # MLX and torch: quantise 16-bit weights when they are loaded; see QUANTIZE_NAMES
    kv_cache_dtype: str = "auto"  # torch: "fp8" stores keys and values in 8 bits
    load_format: str = "auto"
    threads: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_memory: int | None = None  # bytes; text such as "512M" or "2G" is converted
    max_num_seqs: int | None = None  # None, here and below: the backend's choice for its device
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_mixed_tokens: int | None = None  # None: no limit; in a server, the backend's choice
    max_waiting: int = 4096
    scheduling_policy: str = "fair"
    patience: float | None = None
    normal_share: float | None = None
    low_share: float | None = None
    enable_prefix_caching: bool = True
    enable_drafts: bool = True  # guess tokens from repeated text and verify several in one step, where that pays
    host_cache: int | None = None  # bytes of host memory for content evicted from a GPU; None or 0: off
    disk_cache: int | None = None  # bytes of disk; None or 0: off
    cache_dir: str | None = None  # folder of the disk cache; None: `kv` in quire's own cache folder

    def __post_init__(self) -> None:
        self._parse_sizes()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidRequest(f"{name} = {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.backend != "fake" and self.device not in DEVICES:  # the fake backend reads its speed from it
            raise InvalidRequest(f"device = {self.device!r} is not {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
        if self.quantize is not None and str(self.quantize) not in QUANTIZE_NAMES:
            raise InvalidRequest(f"quantize = {self.quantize!r} is not one of {', '.join(QUANTIZE_NAMES)}")
        if self.backend != "auto":
            _check_kv_cache_dtype(self)
        make_policy(self.scheduling_policy, self.patience, self.normal_share, self.low_share)  # refuses invalid values
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is None and name not in REQUIRED:
                continue
            if type(value) is not int or not low <= value <= high:
                span = f"of at least {low}" if high == inf else f"from {low} to {high}"
                raise InvalidRequest(f"{name} = {value!r} is not a whole number {span}")
        self._check_cache()

    def _parse_sizes(self) -> None:
        for name in SIZES:
            value: object = getattr(self, name)
            if isinstance(value, str):
                is_off = value == "0" and name != "kv_memory"
                object.__setattr__(self, name, 0 if is_off else parse_size(name, value))  # frozen after this

    def _check_cache(self) -> None:
        for name in ("enable_prefix_caching", "enable_drafts"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} = {getattr(self, name)!r} is not true or false")
        for name in ("host_cache", "disk_cache"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise InvalidRequest(f"{name} = {memory_size(getattr(self, name))} needs prefix caching, which is off")
        if self.cache_dir == "":
            raise InvalidRequest("cache_dir = '' is not the path of a folder")

    def scheduling(self, capacity: Capacity) -> Scheduling:
        """The scheduler's settings for an engine of this capacity."""
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
            max_mixed_tokens=self.max_mixed_tokens or capacity.max_mixed_tokens,
            max_waiting=self.max_waiting,
            enable_prefix_caching=self.enable_prefix_caching,
            has_costly_rows=capacity.has_costly_rows,
            window=capacity.window,
            num_window_blocks=capacity.num_window_blocks,
            num_states=capacity.num_states,
            num_live_states=capacity.num_live_states,
        )

    @property
    def quantize_bits(self) -> int | None:
        """Bits per weight, for weights that are quantised when they are loaded."""
        return None if self.quantize is None else QUANTIZE_NAMES[str(self.quantize)]

    def backend_options(self) -> BackendOptions:
        values = {**asdict(self), "quantize": self.quantize_bits}
        return BackendOptions(**{field.name: values[field.name] for field in fields(BackendOptions)})


def make_engine(
    path: Path,
    config: EngineConfig,
    progress: Progress | None = None,
    observe: Observer = ignore,
    *,
    is_server: bool = False,
    chain_secret: bytes = b"",
    on_open: Callable[[ModelSpec], None] | None = None,
) -> Engine:
    """Load a model and compose its engine. The checkpoint is closed: the runner holds the weights.

    `is_server`: clients wait for single tokens, so the backend's limit of prompts beside answers is used.
    `chain_secret`: see `make_scheduler`. `on_open` is called before the weights are loaded.
    """
    checkpoint = open_checkpoint(path, config.load_format)
    try:
        if on_open is not None:
            on_open(checkpoint.spec)
        runner = make_runner(checkpoint, config, progress)
    finally:
        checkpoint.close()
    try:
        levels = None
        if config.host_cache or config.disk_cache:
            name = path.stem if path.is_file() else path.name
            files = weight_files(path, config.load_format)
            levels = OpenedLevels(config, runner, name, lambda: weights_digest(files, _digest_memo(config)))
        scheduler = make_scheduler(
            runner, config, observe, is_server=is_server, levels=levels, chain_secret=chain_secret
        )
        if levels is None or not scheduler.cache.levels.levels:
            return Engine(runner, scheduler, has_drafts=config.enable_drafts)
        if config.backend != "fake":  # which computes nothing, so that no load would ever pay
            scheduler.cache.levels.ns_per_token = measure_prefill(
                lambda num_tokens: make_bare_engine(runner, num_tokens + 1), runner.capacity().max_model_len - 1
            )
        levels.start(scheduler.cache.levels)
    except BaseException:
        runner.close()
        raise
    return Engine(runner, scheduler, transfers=levels.transfers, has_drafts=config.enable_drafts)


def _digest_memo(config: EngineConfig) -> Path:
    """Where digests of files are remembered: beside the content that they are a key of."""
    return (disk_cache_folder(config) or cache_dir()) / DIGESTS


def begin_fingerprint(path: Path, config: EngineConfig, engine: Engine, on_end: Callable[[], None]) -> Fingerprinting:
    """Compute the `system_fingerprint` of an engine in a thread, which calls `on_end`."""
    facts = engine.runner.facts()
    has_drafts = config.enable_drafts and engine.capacity.max_drafts > 0 and not facts.is_row_exact

    def fingerprint_of(weights: str, text: str) -> str:
        return system_fingerprint(describe(weights, config.load_format, facts), text, has_drafts=has_drafts)

    files = weight_files(path, config.load_format), text_files(path)
    return Fingerprinting(*files, _digest_memo(config), fingerprint_of, on_end)


def disk_cache_folder(config: EngineConfig) -> Path | None:
    """The folder of the disk cache. None: there is none."""
    if not config.disk_cache:
        return None
    return cache_dir() / "kv" if config.cache_dir is None else Path(config.cache_dir).expanduser()


def check_cache_folders(configs: Sequence[EngineConfig]) -> None:
    """Refuse folders of the disk cache that cannot be used, before models are loaded. Creates missing folders.

    `configs`: of all models. A folder that none of them uses is a mistake.
    """
    unused = [config.cache_dir for config in configs if config.cache_dir is not None]
    if unused and not any(config.disk_cache for config in configs):
        is_zero = any(config.disk_cache == 0 for config in configs)
        reason = "disk_cache is 0, which turns the disk cache off" if is_zero else "set disk_cache to a size too"
        raise InvalidRequest(f"cache_dir = {unused[0]!r} has no effect: {reason}")
    for folder in {disk_cache_folder(config): None for config in configs}:
        try:
            if folder is not None:
                root_secret(folder)
        except CacheFolderError as error:
            raise InvalidRequest(f"cache_dir = {str(folder)!r}: {error}") from None


def make_bare_engine(runner: Runner, num_tokens: int) -> Engine:
    """Make an engine without cache, with just enough blocks for one request of this many tokens."""
    num_blocks = -(-num_tokens // runner.capacity().block_size) + 1  # plus the null block
    return Engine(runner, make_scheduler(runner, EngineConfig(enable_prefix_caching=False), num_blocks=num_blocks))


def make_runner(checkpoint: Checkpoint, config: EngineConfig, progress: Progress | None = None) -> Runner:
    _check_quantize(config, checkpoint.spec)
    _check_kv_cache_dtype(config, checkpoint.spec)
    backend = import_backend(config, checkpoint.spec)
    if notice := skip_notice(checkpoint.spec):
        log.warning("%s: %s", checkpoint.path.name, notice)
    runner: Runner = backend.make_runner(checkpoint, config.backend_options(), progress)
    if notice := runner.facts().notice:
        log.warning("%s: %s", checkpoint.path.name, notice)
    return runner


def _check_quantize(config: EngineConfig, spec: ModelSpec) -> None:
    if config.quantize is None:
        return
    name = choose_backend(config, spec)
    if name not in QUANTIZING:
        raise InvalidRequest(
            f"quantize = {config.quantize}: the {name} backend cannot quantise weights at load; mlx and torch can"
        )
    if name == "mlx" and config.quantize == "fp8":
        raise InvalidRequest("quantize = fp8: the mlx backend quantises to integers of 4 or 8 bits")


def _check_kv_cache_dtype(config: EngineConfig, spec: ModelSpec | None = None) -> None:
    if config.kv_cache_dtype != "auto" and (name := choose_backend(config, spec)) not in FP8_KV:
        raise InvalidRequest(
            f"kv_cache_dtype = {config.kv_cache_dtype!r}: only the torch backend supports it, and the backend is {name}"
        )


def check_supported(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise if the backend that these settings choose does not run the model, before a process is started for it."""
    if spec.unsupported:
        name = choose_backend(config, spec)
        if name == "native" or (name == "torch" and spec.has_other_layers):
            refuse_unsupported(spec)
    _check_kv_cache_dtype(config, spec)


def choose_backend(config: EngineConfig, spec: ModelSpec | None = None) -> str:
    """Resolve `auto`: mlx on Apple silicon, torch for an NVIDIA GPU and settings only torch supports, else native.

    Where the native library is missing, torch or mlx is used instead. A model that quire has no equations for needs
    torch, with transformers.
    """
    if config.backend != "auto":
        return config.backend
    has_torch = importlib.util.find_spec("torch") is not None
    has_mlx = importlib.util.find_spec("mlx") is not None and importlib.util.find_spec("mlx_lm") is not None
    may_use_mlx = has_mlx and is_apple_silicon() and (spec is None or mlx_reads(spec))
    if config.device == "metal" or (config.device == "auto" and may_use_mlx):
        return "mlx"
    if config.device == "cuda" or config.dtype not in ("auto", "int8"):
        return "torch"
    if config.device == "auto" and has_torch and has_nvidia():
        return "torch"
    if config.kv_cache_dtype != "auto":
        log.warning("kv_cache_dtype = %s: using the torch backend, which is slower on a CPU", config.kv_cache_dtype)
        return "torch"
    if spec is not None and spec.unsupported and has_torch and importlib.util.find_spec("transformers") is not None:
        return "torch"
    if (has_torch or has_mlx) and (problem := _native_problem()) is not None:
        other = "torch" if has_torch else "mlx"
        log.warning("using the %s backend instead of the native one, which is faster: %s", other, problem)
        return other
    return "native"


def _native_problem() -> str | None:
    """Why the native backend cannot be used; None if it can."""
    try:
        from quire.backends.native.library import load_library

        load_library()
    except (ImportError, QuireError) as error:
        return str(error)
    return None


def import_backend(config: EngineConfig, spec: ModelSpec | None = None) -> ModuleType:
    """The backend's module. Importing its libraries may take seconds the first time."""
    name = choose_backend(config, spec)
    try:
        return importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of(f"the {name} backend", error.name) from error


def make_scheduler(
    runner: Runner,
    config: EngineConfig,
    observe: Observer = ignore,
    *,
    num_blocks: int | None = None,
    is_server: bool = False,
    levels: OpenedLevels | None = None,
    chain_secret: bytes = b"",
) -> Scheduler:
    """Make a scheduler for a runner. `num_blocks`: use at most this many blocks, as the warm-up does.

    `chain_secret`: shared with other replicas. A disk cache has its own.
    """
    capacity = runner.capacity()
    if num_blocks is not None:
        capacity = replace(capacity, num_blocks=min(num_blocks, capacity.num_blocks))
    given = config.scheduling(capacity)
    policy = make_policy(given.scheduling_policy, given.patience, given.normal_share, given.low_share)
    # A secret root, so that a client cannot craft tokens whose chain keys collide with another tenant's.
    cache = KVCacheManager(
        given.num_blocks,
        given.block_size,
        secret=(levels.secret if levels is not None else b"") or chain_secret or secrets.token_bytes(16),
        is_caching=given.enable_prefix_caching,
        window=given.window,
        num_window_blocks=given.num_window_blocks,
        num_states=given.num_states,
        num_live_states=given.num_live_states,
        levels=() if levels is None else levels.levels,
        save_limits=NO_SAVES if levels is None else levels.save_limits,
    )
    return Scheduler(
        cache,
        policy,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_chunk_tokens=given.max_chunk_tokens,
        max_mixed_tokens=given.max_mixed_tokens if is_server else config.max_mixed_tokens,
        max_model_len=given.max_model_len,
        max_waiting=given.max_waiting,
        observe=observe,
    )
