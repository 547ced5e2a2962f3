"""Makes an MLX runner from a checkpoint and the user's options."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx_lm

from quire.backends.base import (
    DEFAULT_MAX_CHUNK,
    DEFAULT_MAX_SEQS,
    BackendOptions,
    Capacity,
    Progress,
    Runner,
    RunnerFacts,
)
from quire.backends.block_io import layout_text, model_key
from quire.backends.kv_memory import KVCosts, MemoryRequest
from quire.backends.machine import available_bytes
from quire.backends.mlx.batch import BatchMode, build_passes
from quire.backends.mlx.kernel_check import check, find_least_rows
from quire.backends.mlx.loading import load_model
from quire.backends.mlx.model import PagedModel, adapt_model
from quire.backends.mlx.paged_cache import GATHER_BYTES, LAYOUT, DecodeKernel, KVStore, LayerShape
from quire.backends.mlx.paged_decode import PagedDecode, Shape
from quire.backends.mlx.parameters import dtype_name, file_errors, main_layout, num_bytes
from quire.backends.mlx.runner import MlxRunner, OwnThread
from quire.backends.support import backend_hint, rope_notice
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams
from quire.errors import InvalidRequest, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.fields import member, read_json

log = logging.getLogger(__name__)

GPU_SHARE = 0.85  # of the memory that weights and steps leave, for the KV pool
CPU_CAP = 1 << 30  # of the pool on a CPU, which is for tests: MLX writes every byte of a new array
MIN_CACHE = 256 << 20  # lower bound on the bytes of freed buffers that MLX may keep for the next step
MAX_BATCHED_TOKENS = 2048
MEASURED_TOKENS = 256  # of the step that is measured when a model is loaded
MAX_GAP_S = 0.1  # a server's bound on the time that a prompt beside answers adds to a step
MIN_MIXED_TOKENS = 32


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Runner:
    thread = OwnThread()
    try:
        return thread.run(_make_runner, thread, checkpoint, options, progress)
    except UnsupportedModel as error:
        thread.stop()
        config = read_json(member(checkpoint.path, "config.json")) if checkpoint.path.is_dir() else None
        architecture = f"{checkpoint.spec.architecture} does not run on the mlx backend"
        hint = backend_hint(checkpoint.spec, config)
        raise UnsupportedModel(f"{architecture}: {error}{hint}") from error
    except BaseException:
        thread.stop()
        raise


def _make_runner(
    thread: OwnThread, checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None
) -> MlxRunner:
    is_gpu = _use_device(options.device)
    max_model_len = options.context_within(checkpoint.spec.max_model_len)
    if is_gpu:
        mx.set_memory_limit(_limit())
        mx.set_cache_limit(MIN_CACHE)  # what loading frees is not kept
    model = load_model(checkpoint, options, progress)
    with file_errors(checkpoint.path):
        paged, shapes, vocab_size = adapt_model(model, checkpoint.spec.vocab_size, str(checkpoint.path))
    kernel = _find_kernel(shapes[0].attention(options.block_size)) if is_gpu else None
    measured = _measure(paged, shapes, options.block_size, min(MEASURED_TOKENS, max_model_len)) if is_gpu else None
    mx.clear_cache()
    num_blocks = _num_blocks(options, shapes, max_model_len, measured)
    store = KVStore(shapes, num_blocks, options.block_size)
    if kernel is not None:
        store.use_kernel(kernel)
    mx.eval(store.arrays)
    if mx.metal.is_available():  # macOS keeps this much in memory
        mx.set_wired_limit(min(mx.get_active_memory() + mx.get_cache_memory() + MIN_CACHE, _limit()))
    capacity = Capacity(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs or DEFAULT_MAX_SEQS,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        has_overlap=paged.mode is BatchMode.FLAT,
        has_costly_rows=not is_gpu,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_chunk_tokens=options.max_chunk_tokens or DEFAULT_MAX_CHUNK,
        max_mixed_tokens=_max_mixed_tokens(measured),
    )
    device, weights = _device_name() if is_gpu else "cpu", str(main_layout(model) or dtype_name(shapes[0].dtype))
    layout = layout_text(
        "mlx",
        LAYOUT,
        libraries=f"{mx.__version__},{mlx_lm.__version__}",  # type: ignore[attr-defined]
        device=device,
        weights=weights,  # as loaded, possibly quantised
        kv=",".join(sorted({dtype_name(shape.dtype) for shape in shapes})),
        block_size=options.block_size,
        model=model_key(checkpoint.spec, shapes, max_model_len),
    )
    facts = RunnerFacts(
        backend=f"mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}",  # type: ignore[attr-defined]
        device=device,
        dtype=weights,
        num_threads=1,
        weight_bytes=num_bytes(model),
        kv_bytes=store.num_bytes,
        notice=rope_notice(checkpoint.spec, max_model_len),
        layout=layout,
    )
    return MlxRunner(paged, store, capacity, facts, thread)


def _use_device(name: str) -> bool:
    """Set MLX's device. Returns whether it is a GPU."""
    is_metal = mx.metal.is_available()
    is_cuda = not is_metal and mx.cuda.is_available()
    has = {"cpu": True, "metal": is_metal, "cuda": is_cuda}
    if name == "auto":
        name = "metal" if is_metal else "cuda" if is_cuda else "cpu"
    if not has.get(name, False):
        found = ", ".join(one for one, is_there in has.items() if is_there)
        raise InvalidRequest(f"device = {name!r}, but MLX finds only: {found}")
    mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)
    return name != "cpu"


def _device_name() -> str:
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or "gpu"
    return f"{name} ({'Metal' if mx.metal.is_available() else 'CUDA'})"


def _find_kernel(shape: Shape) -> DecodeKernel | None:
    """Return the paged-decode kernel, if it compiles, agrees with MLX's attention and is faster for some batches."""
    if not shape.is_supported:
        return None
    try:
        kernel = PagedDecode()
        if (problem := check(kernel, shape)) is None:
            least_rows = find_least_rows(kernel, shape)
            log.info("the paged-decode kernel is used from %s rows on", least_rows)
            return None if least_rows is None else DecodeKernel(kernel, shape, least_rows)
    except Exception as error:  # compilers report errors of many types
        problem = f"{type(error).__name__}: {error}"
    log.warning("the paged-decode kernel is not used; large batches and long contexts are slower: %s", problem)
    return None


# Memory


def _limit() -> int:
    """Return the bytes that MLX may use on this GPU."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if size := info.get(name):
            return int(size)
    return available_bytes()


@dataclass(frozen=True, slots=True)
class _Measured:
    """Cost of a step, per token of a prompt."""

    num_bytes: float
    seconds: float


def _measure(model: PagedModel, shapes: Sequence[LayerShape], block_size: int, num_tokens: int) -> _Measured:
    """Run a prompt twice and measure the second run."""
    num_blocks = -(-num_tokens // block_size) + 1
    store = KVStore(shapes, num_blocks, block_size)
    piece = SeqSlice(
        request_id=0,
        epoch=0,
        batch_index=0,
        tokens=[1] * num_tokens,
        start=0,
        length=num_tokens,
        block_table=list(range(1, num_blocks)),
        history=[1] * num_tokens,
        wants_token=True,
        sampling=SamplingParams(temperature=0.0),
        num_prompt_tokens=num_tokens,
    )
    num_bytes, began_s = 0, 0.0
    for _ in range(2):
        mx.eval(store.arrays)
        mx.reset_peak_memory()
        before, began_s = mx.get_active_memory(), time.monotonic()
        for step in build_passes([piece], block_size, store.max_gathered, mx.zeros(1, mx.int32), model.mode):
            logits, hidden = model.forward(step, store, list(step.last_rows.values()))
            mx.eval(logits, hidden, store.arrays)
        num_bytes = mx.get_peak_memory() - before
    return _Measured(num_bytes / num_tokens, (time.monotonic() - began_s) / num_tokens)


def _num_blocks(
    options: BackendOptions, shapes: Sequence[LayerShape], max_model_len: int, measured: _Measured | None
) -> int:
    per_block = options.block_size * sum(shape.token_bytes for shape in shapes)
    limits = (max_model_len, options.max_num_seqs or DEFAULT_MAX_SEQS, DEFAULT_MAX_CHUNK)
    pool = MemoryRequest(options, KVCosts(per_block), *limits, has_overlap=True)
    if measured is None:
        free = available_bytes()
        return pool.divide(free, min(free // 2, CPU_CAP)).num_blocks
    largest_step = options.max_num_batched_tokens or MAX_BATCHED_TOKENS
    step_bytes = int(measured.num_bytes * largest_step) + 2 * GATHER_BYTES  # and a copy of it in another layout
    mx.set_cache_limit(max(step_bytes, MIN_CACHE))
    free = _limit() - mx.get_active_memory() - step_bytes
    if longest := int(mx.device_info().get("max_buffer_length", 0)):  # of one layer's keys or values
        widest = max(shape.num_heads * max(shape.key_size, shape.value_size) * shape.dtype.size for shape in shapes)
        free = min(free, longest // (widest * options.block_size) * per_block)
    # The default leaves memory in use to other programs. If a larger pool is configured, macOS swaps that memory out.
    return pool.divide(free, int(min(free, available_bytes() - step_bytes) * GPU_SHARE)).num_blocks


def _max_mixed_tokens(measured: _Measured | None) -> int | None:
    if measured is None:
        return MIN_MIXED_TOKENS * 2
    return max(int(MAX_GAP_S / measured.seconds), MIN_MIXED_TOKENS)
