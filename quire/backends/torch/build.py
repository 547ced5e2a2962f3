"""Makes a torch runner from a checkpoint and the user's options."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import torch

from quire.backends.base import DEFAULT_MAX_CHUNK, DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.kv_division import KVCosts, KVMemory, MemoryRequest
from quire.backends.kv_spec import KVSpec
from quire.backends.machine import choose_threads
from quire.backends.support import refuse_unsupported, transformers_notice
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Linear
from quire.backends.torch.loading import load_weights
from quire.backends.torch.models.base import Model
from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.packed_linear import PackedLinear
from quire.backends.torch.runner import TorchRunner
from quire.backends.torch.state_store import StateStore
from quire.errors import InvalidRequest, UnsupportedModel, install_command
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES as DTYPES_IN_FILES
from quire.weights.spec import OTHER, ModelSpec

CUDA_SHARE = 0.9
CUDA_MAX_SEQS = 256
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

log = logging.getLogger(__name__)


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Runner:
    spec = checkpoint.spec
    _check_quantize(options.quantize, checkpoint)
    if options.kv_cache_dtype != "auto" and spec.family == OTHER:
        raise InvalidRequest(
            f"kv_cache_dtype = {options.kv_cache_dtype!r}: {spec.architecture} runs through transformers, and its KV"
            " cache has the type of the model"
        )
    device = _device(options.device)
    dtype = _dtype(options.dtype, spec, device)
    if device.type == "cpu":
        torch.set_num_threads(choose_threads(options.threads))
    max_model_len = options.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise InvalidRequest(f"{max_model_len = } is more than the {spec.max_model_len} tokens this model supports")
    max_num_seqs = options.max_num_seqs or (CUDA_MAX_SEQS if device.type == "cuda" else DEFAULT_MAX_SEQS)
    with torch.inference_mode():
        if device.type == "cuda" and _has_triton():
            from quire.backends.torch import build_cuda  # imports Triton, which is not always installed

            compiling = build_cuda.start_compiling(checkpoint, dtype, options, device)
            try:
                if _works():  # takes a second or two the first time
                    return build_cuda.make_cuda_runner(
                        checkpoint,
                        options,
                        dtype,
                        device,
                        compiling,
                        progress,
                        max_num_seqs=max_num_seqs,
                        max_model_len=max_model_len,
                    )
            except BaseException:
                compiling.cancel()
                raise
            compiling.cancel()
        model = load_model(checkpoint, dtype, device, max_model_len, progress, quantize_bits=options.quantize)
        request = memory_request(
            model, options, dtype, max_model_len, max_num_seqs, DEFAULT_MAX_CHUNK, has_overlap=device.type != "cpu"
        )
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            memory = request.divide(free, int(free * CUDA_SHARE))
        else:
            memory = request.divide_on_cpu()
        store, states = make_stores(model, stored_kv(model, options, max_model_len), memory, options.block_size, dtype)
    return TorchRunner(
        model,
        store,
        max_num_seqs=memory.max_num_seqs,
        max_model_len=max_model_len,
        max_chunk_tokens=memory.max_chunk_tokens,
        states=states,
    )


def _check_quantize(bits: int | None, checkpoint: Checkpoint) -> None:
    if bits is None:
        return
    spec = checkpoint.spec
    if spec.quantization not in DTYPES_IN_FILES:
        raise InvalidRequest(f"quantize = {bits}: {checkpoint.path} is quantised already, to {spec.quantization}")
    if spec.family == OTHER:
        raise InvalidRequest(f"quantize = {bits}: models that run with transformers are not quantised")


def memory_request(
    model: Model,
    options: BackendOptions,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_chunk_tokens: int,
    *,
    has_overlap: bool,
) -> MemoryRequest:
    """Return the request for a model's memory. Models of transformers keep whole contexts in all layers."""
    costs = KVCosts.of(
        stored_kv(model, options, max_model_len),
        options.block_size,
        dtype.itemsize,
        has_windows=model.spec.family != OTHER,
    )
    return MemoryRequest(options, costs, max_model_len, max_num_seqs, max_chunk_tokens, has_overlap)


def stored_kv(model: Model, options: BackendOptions, max_model_len: int) -> KVSpec:
    """Return what the layers of a model store."""
    return replace(model.kv_spec.within(max_model_len), is_fp8=options.kv_cache_dtype == "fp8")


def make_stores(
    model: Model, kv_spec: KVSpec, memory: KVMemory, block_size: int, dtype: torch.dtype
) -> tuple[KVStore, StateStore | None]:
    """Allocate the pools of a model. `dtype`: of its activations."""
    device = model.device
    store = KVStore(kv_spec, memory.num_blocks, block_size, dtype, device, memory.num_window_blocks)
    return store, StateStore(kv_spec, memory.num_states, dtype, device) if memory.num_states else None


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None,
    linear: type[Linear] = Linear,
    packed_linear: type[PackedLinear] = PackedLinear,
    quantize_bits: int | None = None,
) -> Model:
    """Load a model of quire's own equations; of others, those of transformers."""
    spec = checkpoint.spec
    if spec.family != OTHER:
        weights = load_weights(checkpoint, dtype, device, progress, linear, packed_linear, quantize_bits)
        return DecoderModel(spec, weights, max_model_len)
    if spec.quantization not in DTYPES_IN_FILES:
        refuse_unsupported(spec)
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(f"{spec.unsupported}. transformers may run it: {install_command('transformers')}")
    from quire.backends.torch.models.transformers_model import load_transformers_model

    model = load_transformers_model(checkpoint, dtype, device, max_model_len, progress)
    log.warning("%s", transformers_notice(spec.architecture))
    return model


def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    log.warning("Triton is not installed: the GPU runs plain PyTorch, many times slower. %s", install_command("triton"))
    return False


def _works() -> bool:
    """Return whether Triton works here. It compiles some C at its first use."""
    try:
        import triton

        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        log.warning(
            "Triton does not work here: the GPU runs plain PyTorch, many times slower. Triton needs a C compiler,"
            " Python's headers and a writable folder (TRITON_CACHE_DIR): %s",
            error,
        )
        return False
    return True


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name not in ("cpu", "cuda"):
        raise InvalidRequest(f"device = {name!r} is not auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise InvalidRequest("device = 'cuda', but PyTorch finds no CUDA device on this machine")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the dtype that suits the device: 16 bits on a GPU; fp32 on a CPU, because 16 bits are slow on most."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if spec.dtype == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise InvalidRequest(f"dtype = {name!r} is not auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]
