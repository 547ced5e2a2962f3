"""Makes the GPU's runner: how much memory steps need is measured first, and the KV pool gets the rest."""

from __future__ import annotations

import logging
import math
import time
from operator import sub

import torch
from triton.backends.compiler import GPUTarget

from quire.backends.base import BackendOptions, Progress
from quire.backends.kv_memory import PoolRequest
from quire.backends.torch.cuda import CudaRunner
from quire.backends.torch.graphs import graph_sizes
from quire.backends.torch.kernel_compilation import Compiling, first_calls, launch
from quire.backends.torch.kv_store import KVStore, block_bytes
from quire.backends.torch.loading import load_weights
from quire.backends.torch.models import MODELS
from quire.backends.torch.models.llama import LlamaModel
from quire.core.request import SamplingParams
from quire.core.step import SeqSlice, StepPlan
from quire.weights.checkpoint import Checkpoint
from quire.weights.names import expected_tensors
from quire.weights.spec import ModelSpec

STEP_S = 0.25  # about how long a step of prompts may hold up everyone's next token
PRODUCT_RATE = 6e14  # operations a second that the matrix products of a large step reach on an H200
STEP_TOKENS = (2048, 16384)  # at least and at most: enough to fill the card, and to hide the host behind it
MARGIN = 0.04  # of the card's memory is left alone: what the driver and the allocator take beside us
GRAPH_BYTES = 4 << 20  # what the driver keeps of a captured graph, beside the memory its steps use

log = logging.getLogger(__name__)


def start_compiling(spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device) -> Compiling:
    """What every step needs, beside this process, which goes on."""
    major, minor = torch.cuda.get_device_capability(device)
    target = GPUTarget("cuda", 10 * major + minor, 32)  # as Triton's driver says, once it runs
    return Compiling(first_calls(spec, dtype, block_size, torch.device("meta")), target)


def make_cuda_runner(
    checkpoint: Checkpoint,
    options: BackendOptions,
    dtype: torch.dtype,
    device: torch.device,
    compiling: Compiling,
    progress: Progress | None,
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> CudaRunner:
    clock = [time.monotonic()]
    weights = load_weights(checkpoint, dtype, device, progress)
    model = MODELS[checkpoint.spec.family](checkpoint.spec, weights, max_model_len)
    clock.append(time.monotonic())
    compiling.wait()
    clock.append(time.monotonic())
    launch(first_calls(checkpoint.spec, dtype, options.block_size, device), device)
    clock.append(time.monotonic())
    step_tokens = max(options.max_num_batched_tokens or default_step_tokens(model.spec), max_num_seqs)
    needed = measure_step(model, options.block_size, dtype, step_tokens, max_num_seqs, max_model_len)
    reserved = (
        needed + _reserved_for_graphs(needed, step_tokens, max_num_seqs) + _reserved_for_rare(model.spec, max_num_seqs)
    )
    free, total = torch.cuda.mem_get_info(device)
    pool = PoolRequest(options, block_bytes(model.spec, options.block_size, dtype), max_model_len)
    num_blocks = pool.num_blocks(free - reserved, free - reserved - int(MARGIN * total))
    clock.append(time.monotonic())
    log.info("seconds: weights %.2f, compiled %.2f, loaded %.2f, measured %.2f", *map(sub, clock[1:], clock))
    log.info("a step needs up to %.2f GB, with graphs and rarer requests %.2f GB", needed / 1e9, reserved / 1e9)
    store = KVStore(model.spec, num_blocks, options.block_size, dtype, device)
    return CudaRunner(
        model,
        store,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        max_chunk_tokens=options.max_chunk_tokens or step_tokens,
    )


def _reserved_for_graphs(needed: int, step_tokens: int, max_num_seqs: int) -> int:
    """They have a pool of their own, which takes what the step of most rows takes; and the driver keeps something."""
    num_graphs = 4 * len(graph_sizes(max_num_seqs))  # with and without parts, with and without siblings
    return needed * max_num_seqs // step_tokens + GRAPH_BYTES * num_graphs


def _reserved_for_rare(spec: ModelSpec, max_num_seqs: int) -> int:
    """What penalties keep, and what they and logprobs take for a moment: a number for every token of every row."""
    return 3 * 4 * max_num_seqs * spec.vocab_size


def default_step_tokens(spec: ModelSpec) -> int:
    """A power of two, by the arithmetic of a token: 16,384 for a model of a billion weights, 8,192 for eight."""
    num_weights = sum(math.prod(shape) for name, shape in expected_tensors(spec).items() if "layers" in name)
    fitting = int(STEP_S * PRODUCT_RATE / (2 * num_weights))
    low, high = STEP_TOKENS
    return min(max(1 << max(fitting.bit_length() - 1, 0), low), high)


def measure_step(
    model: LlamaModel, block_size: int, dtype: torch.dtype, step_tokens: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Bytes that the largest step takes while it runs: everyone's prompt, and a token for each.

    Run on a pool of its own, just large enough, which is given back.
    """
    device = model.embedding.device
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    length = max(min(-(-step_tokens // max_num_seqs), max_model_len), 1)
    table = range(1, 1 - (-length // block_size))  # everyone's: what they read does not matter
    store = KVStore(model.spec, len(table) + 1, block_size, dtype, device)
    runner = CudaRunner(model, store, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = (0,) * length
    for start, count in ((0, length), (length - 1, 1)):  # a prompt each, and its last token again: a decode
        slices = tuple(
            SeqSlice(
                request_id=batch_index,
                epoch=0,
                batch_index=batch_index,
                tokens=tokens[:count],
                start=start,
                length=count,
                block_table=table,
                history=tokens,
                wants_token=True,
                sampling=SamplingParams(temperature=1.0, max_tokens=1),
                num_prompt_tokens=length,
            )
            for batch_index in range(max_num_seqs)
        )
        runner.forward(StepPlan(slices, (), ()))
        runner.sample(None)
        runner.collect()
    peak = torch.cuda.max_memory_allocated(device)
    runner.close()
    del runner, store
    torch.cuda.empty_cache()
    return math.ceil(1.1 * (peak - base))  # fragments
