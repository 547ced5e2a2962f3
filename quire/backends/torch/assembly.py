"""The parts of a torch runner: the model, and the pools of its memory."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import torch

from quire.backends.base import BackendOptions, Progress
from quire.backends.kv_memory import KVCosts, KVMemory, KVSpec, MemoryRequest
from quire.backends.support import refuse_unsupported, transformers_notice
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Linear
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel
from quire.backends.torch.packed import PackedLinear
from quire.errors import UnsupportedModel, install_command
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES as DTYPES_IN_FILES
from quire.weights.spec import OTHER

log = logging.getLogger(__name__)


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

    model = load_transformers_model(checkpoint, dtype, device, max_model_len, progress)
    log.warning("%s", transformers_notice(spec.architecture))
    return model
