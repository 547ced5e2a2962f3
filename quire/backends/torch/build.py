"""Makes a torch runner from a checkpoint and the user's options."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import torch

from quire.backends.base import DEFAULT_MAX_CHUNK, DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.kv_memory import KVCosts, KVMemory, KVSpec, MemoryRequest
from quire.backends.machine import choose_threads
from quire.backends.support import refuse_unsupported, transformers_notice
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Linear
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.packed import PackedLinear
from quire.backends.torch.runner import TorchRunner
from quire.errors import InvalidRequest, UnsupportedModel, install_command
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES as DTYPES_IN_FILES
from quire.weights.spec import OTHER, ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

log = logging.getLogger(__name__)


@torch.inference_mode()
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
    max_model_len = options.context_within(spec.max_model_len)
    if device.type == "cuda":
        from quire.backends.torch.build_cuda import make_cuda_runner  # imports Triton, which is not always installed

        return make_cuda_runner(checkpoint, options, dtype, device, max_model_len, progress)
    torch.set_num_threads(choose_threads(options.threads))
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_SEQS
    model = load_model(checkpoint, dtype, device, max_model_len, progress, quantize_bits=options.quantize)
    request = memory_request(model, options, dtype, max_model_len, max_num_seqs, DEFAULT_MAX_CHUNK, has_overlap=False)
    memory = request.divide_on_cpu()
    return TorchRunner(
        model,
        make_store(model, stored_kv(model, options, max_model_len), memory, options.block_size, dtype),
        max_num_seqs=memory.max_num_seqs,
        max_model_len=max_model_len,
        max_chunk_tokens=memory.max_chunk_tokens,
    )


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


def make_store(model: Model, kv_spec: KVSpec, memory: KVMemory, block_size: int, dtype: torch.dtype) -> KVStore:
    """Allocate the pools of a model. `dtype`: of its activations."""
    numbers = memory.num_window_blocks, memory.num_states
    return KVStore(kv_spec, memory.num_blocks, block_size, dtype, model.device, *numbers)


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
        loader = WeightLoader(checkpoint, dtype, device, progress, linear, packed_linear, quantize_bits)
        return DecoderModel(loader, max_model_len)
    if spec.quantization not in DTYPES_IN_FILES:
        refuse_unsupported(spec)
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(f"{spec.unsupported}. transformers may run it: {install_command('transformers')}")
    from quire.backends.torch.models.transformers_model import load_transformers_model

    model = load_transformers_model(checkpoint, dtype, device, max_model_len)
    log.warning("%s", transformers_notice(spec.architecture))
    return model


def _check_quantize(bits: int | None, checkpoint: Checkpoint) -> None:
    if bits is None:
        return
    spec = checkpoint.spec
    if spec.quantization not in DTYPES_IN_FILES:
        raise InvalidRequest(f"quantize = {bits}: {checkpoint.path} is quantised already, to {spec.quantization}")
    if spec.family == OTHER:
        raise InvalidRequest(f"quantize = {bits}: models that run with transformers are not quantised")


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name not in ("cpu", "cuda"):
        raise InvalidRequest(f"device = {name!r} is not auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise InvalidRequest("device = 'cuda', but PyTorch finds no CUDA device on this machine")
    if name == "cuda" and importlib.util.find_spec("triton") is None:
        raise InvalidRequest(f"device = 'cuda' needs Triton: {install_command('triton')}. Or use --device cpu")
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
