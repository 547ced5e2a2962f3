"""From a checkpoint and what the user asked for to a runner that is ready."""

from __future__ import annotations

import torch

from quire.backends.base import BackendOptions, Progress
from quire.backends.machine import available_bytes, default_threads, usable_cores
from quire.backends.torch.kv_store import KVStore, block_bytes, blocks_in
from quire.backends.torch.loading import load_weights
from quire.backends.torch.models import MODELS
from quire.backends.torch.runner import TorchRunner
from quire.errors import InvalidRequest, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

CPU_SHARE = 0.4  # of the memory available once the weights are loaded, for the KV pool
CPU_CAP = 4 << 30  # a laptop has other things to do
CUDA_SHARE = 0.9
MIN_POOL_TOKENS = 512  # a pool chosen by quire that holds less is no use to anybody
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def make_runner(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> TorchRunner:
    spec = checkpoint.spec
    if spec.family not in MODELS:
        raise UnsupportedModel(f"model family {spec.family!r} is not one the torch backend runs: {', '.join(MODELS)}")
    device = _device(options.device)
    dtype = _dtype(options.dtype, spec, device)
    if device.type == "cpu":
        torch.set_num_threads(_num_threads(options.num_threads))
    max_context = options.max_context or spec.max_context
    if max_context > spec.max_context:
        raise InvalidRequest(f"{max_context = } is more than the {spec.max_context} this model was made for")
    with torch.inference_mode():
        weights = load_weights(checkpoint, dtype, device, progress)
        model = MODELS[spec.family](spec, weights, max_context)
        num_blocks = _num_blocks(options, spec, dtype, device, max_context)
        store = KVStore(spec, num_blocks, options.block_size, dtype, device)
    return TorchRunner(model, store, max_seqs=options.max_seqs, max_context=max_context)


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name not in ("cpu", "cuda"):
        raise InvalidRequest(f"device = {name!r} is not auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise InvalidRequest("device = 'cuda', but PyTorch finds no CUDA device here")
    return torch.device(name)


def _dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """What the machine does well: 16 bits on a GPU; on a CPU fp32, where most have no fast 16-bit products."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if spec.dtype == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise InvalidRequest(f"dtype = {name!r} is not auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _num_threads(asked: int | None) -> int:
    num_cores = usable_cores()
    if asked is not None and asked > num_cores:
        raise InvalidRequest(f"num_threads = {asked} is more than the {num_cores} cores this process may use")
    return asked or default_threads()


def _num_blocks(
    options: BackendOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_context: int
) -> int:
    """As many as were asked for, or as the memory budget holds, but no more than could ever be used."""
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else available_bytes()
    per_block = block_bytes(spec, options.block_size, dtype)
    if options.num_blocks is not None:
        if options.num_blocks * per_block > free:
            raise InvalidRequest(
                f"num_blocks = {options.num_blocks} take {options.num_blocks * per_block:,} bytes of KV"
                f" cache; {free:,} are free"
            )
        return options.num_blocks
    if options.kv_bytes is not None:
        if options.kv_bytes > free:
            raise InvalidRequest(f"kv_bytes = {options.kv_bytes:,} is more than the {free:,} bytes that are free")
        num_blocks = blocks_in(options.kv_bytes, spec, options.block_size, dtype)
    else:
        budget = int(free * CUDA_SHARE) if is_cuda else min(int(free * CPU_SHARE), CPU_CAP)
        num_blocks = budget // per_block
        num_tokens = (num_blocks - 1) * options.block_size
        if num_tokens < min(MIN_POOL_TOKENS, max_context):
            raise InvalidRequest(
                f"kv_bytes: {free:,} bytes are free, and the {budget:,} of them that would be taken hold a context of"
                f" {max(num_tokens, 0)} tokens. Free some memory, or say how much to take"
            )
    return min(num_blocks, options.max_seqs * -(-max_context // options.block_size) + 1)  # everyone at full length
