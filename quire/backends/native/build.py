"""Makes a native runner from a checkpoint and the user's options."""

from __future__ import annotations

from quire.backends.base import DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.kv_memory import PoolRequest
from quire.backends.kv_spec import KVSpec
from quire.backends.machine import choose_threads
from quire.backends.native.library import Engine, load_library
from quire.backends.native.memory import PoolSizes, full_block_bytes, window_block_bytes
from quire.backends.native.model import NativeModel
from quire.backends.native.packing import pack_model
from quire.backends.native.runner import NativeRunner
from quire.backends.support import refuse_unsupported
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

# Whether layers with a window get their own blocks. The scheduler must then fill `window_table` of every slice.
HAS_WINDOW_BLOCKS = False
STATES_PER_SEQUENCE = 4  # slots: one that changes, and snapshots


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
    max_model_len = options.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise InvalidRequest(f"{max_model_len = } is more than the {spec.max_model_len} tokens this model supports")
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
    return NativeRunner(model, max_num_seqs=max_num_seqs)


def _pool_sizes(spec: ModelSpec, options: BackendOptions, max_model_len: int, max_num_seqs: int) -> PoolSizes:
    """Return the sizes of the pools. With window blocks, there are as many of them as of other blocks."""
    kv = KVSpec.of(spec).within(max_model_len)
    has_window_blocks = HAS_WINDOW_BLOCKS and kv.window > 0
    per_block = full_block_bytes(kv, options.block_size, has_window_blocks=has_window_blocks)
    per_block += window_block_bytes(kv, options.block_size) if has_window_blocks else 0
    num_blocks = PoolRequest(options, per_block, max_model_len).num_blocks_on_cpu()
    num_states = STATES_PER_SEQUENCE * max_num_seqs + 1 if kv.has_states else 0
    return PoolSizes(num_blocks, num_blocks if has_window_blocks else 0, num_states)
