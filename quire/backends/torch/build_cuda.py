"""Makes the GPU runner. The memory of the largest step is measured first, and the KV pool gets the rest."""

from __future__ import annotations

import logging
import math
import time

import torch
import triton
from triton.backends.compiler import GPUTarget

from quire.backends.base import BackendOptions, Progress
from quire.backends.kv_memory import KVMemory, KVSpec
from quire.backends.torch.assembly import load_model, make_store, memory_request, stored_kv
from quire.backends.torch.cuda import CudaRunner
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.graphs import graph_sizes, mixed_sizes
from quire.backends.torch.kernel_compilation import (
    Compiling,
    first_calls,
    later_calls,
    launch,
    packed_calls,
    routed_calls,
    state_calls,
)
from quire.backends.torch.kernels.delta_net import is_supported
from quire.backends.torch.loading import expert_formats, packed_format
from quire.backends.torch.models.decoder import layer_weights
from quire.core.scheduler import MIXED_ANSWERS
from quire.core.step import SeqSlice, StepPlan
from quire.core.values import SamplingParams
from quire.errors import InvalidRequest, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import OTHER, DeltaNetSpec, ModelSpec

MAX_SEQS = 256  # by default
STEP_S = 0.25  # approximate duration of the largest step, which has only prompts
MAX_GAP_S = 0.0024  # prompts in a step with up to 64 answers may delay these by about this much
MIN_MIXED_ROWS = 512  # smaller steps would waste most of their time: they read all weights for any number of rows
SPARE_ROWS = 8
LAUNCH_S = 0.012  # of all kernels of a step from Python; steps whose products take longer do not need a graph
MAX_GRAPH_TOKENS = 4096
PRODUCT_RATE = 6e14  # operations per second that the matrix products of a large step reach on an H200
STEP_TOKENS = (2048, 16384)  # minimum and maximum: enough to fill the card and to hide the host's work
MARGIN = 0.04  # share of the card's memory left free for the driver and the allocator
GRAPH_BYTES = 4 << 20  # driver memory per captured graph, beside the memory its steps use

log = logging.getLogger(__name__)


def start_compiling(
    checkpoint: Checkpoint, dtype: torch.dtype, options: BackendOptions, device: torch.device
) -> Compiling:
    """Start compiling in child processes: the kernels that every step needs, then the others."""
    spec, block_size = checkpoint.spec, options.block_size
    major, minor = torch.cuda.get_device_capability(device)
    target = GPUTarget("cuda", 10 * major + minor, 32)  # the same as Triton's driver reports once it runs
    if spec.family == OTHER:  # the shapes of its kernels are known only when it is loaded
        return Compiling([], [], target)
    is_fp8 = options.kv_cache_dtype == "fp8"
    first = first_calls(spec, dtype, block_size, torch.device("meta"), has_fp8_kv=is_fp8)
    formats = expert_formats(checkpoint, options.quantize)
    first += routed_calls(spec, dtype, default_step_tokens(layer_weights(spec)), formats)
    first += state_calls(spec, dtype)
    format = packed_format(checkpoint, options.quantize)
    first += packed_calls(spec, dtype, format)
    return Compiling(first, later_calls(spec, dtype, block_size, format, has_fp8_kv=is_fp8), target)


def make_cuda_runner(
    checkpoint: Checkpoint,
    options: BackendOptions,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None,
) -> CudaRunner:
    compiling = start_compiling(checkpoint, dtype, options, device)
    try:
        _check_triton()  # takes a second or two the first time
        return _make_runner(checkpoint, options, dtype, device, compiling, max_model_len, progress)
    except BaseException:
        compiling.cancel()
        raise


def _check_triton() -> None:
    """Raise if Triton does not work here. It compiles some C at its first use."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        raise InvalidRequest(
            "device = 'cuda': Triton does not work here. It needs a C compiler, Python's headers and a writable folder"
            f" (TRITON_CACHE_DIR): {error}. Or use --device cpu"
        ) from error


def _make_runner(
    checkpoint: Checkpoint,
    options: BackendOptions,
    dtype: torch.dtype,
    device: torch.device,
    compiling: Compiling,
    max_model_len: int,
    progress: Progress | None,
) -> CudaRunner:
    max_num_seqs = options.max_num_seqs or MAX_SEQS
    _refuse_delta_nets(checkpoint.spec)
    model = load_model(
        checkpoint, dtype, device, max_model_len, progress, FusedLinear, FusedPackedLinear, options.quantize
    )
    compiling.wait_first()
    if model.spec.family != OTHER:
        kv_type = options.kv_cache_dtype
        launch(first_calls(model.spec, dtype, options.block_size, device, has_fp8_kv=kv_type == "fp8"), device)
    step_tokens = max(options.max_num_batched_tokens or default_step_tokens(model.num_layer_weights), max_num_seqs)
    graph_tokens = min(_num_tokens_within(LAUNCH_S, model.num_layer_weights), MAX_GRAPH_TOKENS, step_tokens)
    request = memory_request(model, options, dtype, max_model_len, max_num_seqs, step_tokens, has_overlap=True)
    kv_spec = stored_kv(model, options, max_model_len)
    needed, token_s = measure_step(
        model,
        kv_spec,
        options.block_size,
        dtype,
        step_tokens,
        max_num_seqs,
        max_model_len,
        has_windows=request.costs.window > 0,
    )
    reserved = (
        needed
        + _reserved_for_graphs(needed, step_tokens, max_num_seqs, graph_tokens)
        + _reserved_for_rare(model.spec, max_num_seqs)
    )
    free, total = torch.cuda.mem_get_info(device)
    memory = request.divide(free - reserved, free - reserved - int(MARGIN * total))
    log.info("a prompt token takes %.2f us in a large step", 1e6 * token_s)
    log.info("a step needs up to %.2f GB, with graphs and rarer requests %.2f GB", needed / 1e9, reserved / 1e9)
    return CudaRunner(
        model,
        make_store(model, kv_spec, memory, options.block_size, dtype),
        max_num_seqs=memory.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        max_chunk_tokens=memory.max_chunk_tokens,
        max_mixed_tokens=_mixed_tokens(token_s),
        max_graph_tokens=graph_tokens,
        compiling=compiling,
        has_graphs=model.is_capturable,
    )


def _refuse_delta_nets(spec: ModelSpec) -> None:
    for layer in spec.layers:
        if isinstance(layer.mixer, DeltaNetSpec) and not is_supported(layer.mixer):
            sizes = layer.mixer.key_head_size, layer.mixer.value_head_size
            raise UnsupportedModel(
                f"delta nets with head sizes {sizes} and {layer.mixer.num_taps} taps have no GPU kernel:"
                " use --device cpu"
            )


def _reserved_for_graphs(needed: int, step_tokens: int, max_num_seqs: int, graph_tokens: int) -> int:
    """Return the bytes of the graphs' memory pool, which holds the largest of their steps, plus those of the driver."""
    num_graphs = 4 * len(graph_sizes(max_num_seqs))  # with and without parts, with and without siblings
    num_graphs += 2 * len(mixed_sizes(graph_tokens))  # for few and for many decodes
    return needed * max(max_num_seqs, graph_tokens) // step_tokens + GRAPH_BYTES * num_graphs


def _reserved_for_rare(spec: ModelSpec, max_num_seqs: int) -> int:
    """Return the bytes of penalty counts and of temporaries for logprobs: three numbers per row and token."""
    return 3 * 4 * max_num_seqs * spec.vocab_size


def _mixed_tokens(token_s: float) -> int:
    """Return the prompt tokens that fit `MAX_GAP_S`, such that a step with 64 answers fits a graph of that size.

    Prompts in progress have a token each outside the limit, hence the spare rows.
    """
    fitting = [size for size in mixed_sizes(int(MAX_GAP_S / token_s)) if size >= MIN_MIXED_ROWS]
    return max(fitting, default=MIN_MIXED_ROWS) - MIXED_ANSWERS - SPARE_ROWS


def default_step_tokens(num_weights: int) -> int:
    """Return a power of two that depends on the model's size: 16,384 for 1 billion weights, 8,192 for 8 billion."""
    low, high = STEP_TOKENS
    return min(max(1 << max(_num_tokens_within(STEP_S, num_weights).bit_length() - 1, 0), low), high)


def _num_tokens_within(seconds: float, num_weights: int) -> int:
    """Return the number of tokens whose products take this long on an H200."""
    return int(seconds * PRODUCT_RATE / (2 * num_weights))


def measure_step(
    model: Model,
    kv_spec: KVSpec,
    block_size: int,
    dtype: torch.dtype,
    step_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    has_windows: bool = False,
) -> tuple[int, float]:
    """Return the bytes that the largest step takes, a prompt for each sequence, and its seconds per token.

    Runs on its own pools, just large enough, which are freed afterwards. The first step loads libraries, so the second
    is timed. All rows use the same blocks and states: their content does not matter.
    """
    device = model.device
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    length = max(min(-(-step_tokens // max_num_seqs), max_model_len), 1)
    table = range(1, 1 - (-length // block_size))
    num_states = 2 if model.kv_spec.has_states else 0
    memory = KVMemory(len(table) + 1, max_num_seqs, length, len(table) + 1 if has_windows else 0, num_states)
    store = make_store(model, kv_spec, memory, block_size, dtype)
    runner = CudaRunner(model, store, max_num_seqs=max_num_seqs, max_model_len=max_model_len, has_graphs=False)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = tuple(i % model.spec.vocab_size for i in range(length))  # different ones choose different experts
    took_s = 0.0
    for start, count in ((length - 1, 1), (0, length), (0, length)):  # a decode each, then prompts
        started_s = time.monotonic()
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
                window_table=table,
                state_target=num_states and 1,
            )
            for batch_index in range(max_num_seqs)
        )
        runner.forward(StepPlan(slices, (), ()))
        runner.sample(None)
        runner.collect()
        took_s = time.monotonic() - started_s
    peak = torch.cuda.max_memory_allocated(device)
    runner.close()
    del runner, store
    torch.cuda.empty_cache()
    return math.ceil(1.1 * (peak - base)), took_s / (length * max_num_seqs)  # 10 % for fragmentation
