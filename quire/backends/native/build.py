"""Makes a native runner from a checkpoint and the user's options."""

from __future__ import annotations

from quire.backends.base import DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.kv_memory import PoolRequest
from quire.backends.machine import choose_threads
from quire.backends.native.library import Engine, load_library
from quire.backends.native.model import NativeModel, block_bytes
from quire.backends.native.packing import pack_model
from quire.backends.native.runner import NativeRunner
from quire.backends.support import refuse_unsupported
from quire.errors import InvalidRequest, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

NOT_NATIVE = ("gemma4", "gpt_oss")


def _refuse_families(spec: ModelSpec) -> None:
    if spec.family in NOT_NATIVE:
        raise UnsupportedModel(f"the native backend does not run {spec.family}; use --backend torch")


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Runner:
    spec = checkpoint.spec
    refuse_unsupported(spec)
    _refuse_families(spec)
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
        per_block = block_bytes(spec, options.block_size)
        model = NativeModel(
            spec,
            packed,
            engine,
            num_blocks=PoolRequest(options, per_block, max_model_len).num_blocks_on_cpu(),
            block_size=options.block_size,
            max_model_len=max_model_len,
            precision=options.precision,
        )
    except BaseException:
        engine.close()
        raise
    return NativeRunner(model, max_num_seqs=max_num_seqs)
