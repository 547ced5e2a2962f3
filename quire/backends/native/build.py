"""Makes a native runner from a checkpoint and the user's options."""

from __future__ import annotations

from quire.backends import kv_memory
from quire.backends.base import DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.kv_memory import KVMemory, KVSpec, MemoryRequest
from quire.backends.machine import choose_threads
from quire.backends.native.library import Engine, load_library
from quire.backends.native.memory import kv_costs
from quire.backends.native.model import NativeModel
from quire.backends.native.packing import pack_model
from quire.backends.native.runner import MAX_CHUNK_TOKENS, NativeRunner
from quire.backends.support import refuse_unsupported
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Runner:
    spec = checkpoint.spec
    refuse_unsupported(spec)
    load_library()
    if options.device not in ("auto", "cpu"):
        raise InvalidRequest(f"device = {options.device!r}: the native backend runs on the CPU; use --backend torch")
    if options.dtype not in ("auto", "int8"):
        raise InvalidRequest(
            f"dtype = {options.dtype!r}: the native backend stores weights in 4 and 8 bits only; use --backend torch"
        )
    max_model_len = options.context_within(spec.max_model_len)
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_SEQS
    num_threads = choose_threads(options.threads)
    packed = pack_model(checkpoint, num_threads, progress)
    engine = Engine(num_threads)
    try:
        sizes = _pool_sizes(spec, options, max_model_len, max_num_seqs)
        model = NativeModel(
            spec,
            packed,
            engine,
            num_blocks=sizes.num_blocks,
            num_window_blocks=sizes.num_window_blocks,
            num_states=sizes.num_states,
            block_size=options.block_size,
            max_model_len=max_model_len,
            precision=options.precision,
        )
    except BaseException:
        engine.close()
        raise
    return NativeRunner(model, max_num_seqs=sizes.max_num_seqs, max_chunk_tokens=sizes.max_chunk_tokens)


def _pool_sizes(spec: ModelSpec, options: BackendOptions, max_model_len: int, max_num_seqs: int) -> KVMemory:
    kv = KVSpec.of(spec).within(max_model_len)
    costs = kv_costs(kv, options.block_size, has_window_blocks=kv_memory.HAS_WINDOWS and kv.window > 0)
    limits = (max_model_len, max_num_seqs, MAX_CHUNK_TOKENS)
    return MemoryRequest(options, costs, *limits, has_overlap=False).divide_on_cpu()
