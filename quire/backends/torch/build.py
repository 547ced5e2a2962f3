"""Makes a torch runner from a checkpoint and the user's options."""

from __future__ import annotations

import importlib.util

import torch

from quire.backends.base import DEFAULT_MAX_CHUNK, DEFAULT_MAX_SEQS, BackendOptions, Progress, Runner
from quire.backends.machine import choose_threads
from quire.backends.torch.assembly import load_model, make_store, memory_request, stored_kv
from quire.backends.torch.runner import TorchRunner
from quire.errors import InvalidRequest, install_command
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES as DTYPES_IN_FILES
from quire.weights.spec import OTHER, ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
