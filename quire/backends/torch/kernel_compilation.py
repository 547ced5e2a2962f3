"""Compiles the kernels of a model in parallel while its weights are loaded.

Triton compiles a kernel when it is first launched: half a second each, in sequence. Threads halve that time, but most
of it is Python, which blocks everything else in this process. Forked child processes therefore compile into Triton's
disk cache, with tensors that have only shapes, and never touch the GPU. Then this process launches each kernel once
with no work (padding rows, empty items), which loads it from the cache. If a child fails, its kernel is compiled later.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import select
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from quire.backends import kv_memory
from quire.backends.kv_memory import KVSpec
from quire.backends.machine import usable_cores
from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.kernels.attention import attend, merge, part_size, tilings
from quire.backends.torch.kernels.blocks import copy_blocks, update_tables
from quire.backends.torch.kernels.chaining import MAX_EARLY_ROWS
from quire.backends.torch.kernels.convolution import short_conv_calls
from quire.backends.torch.kernels.delta_net import delta_net_calls, is_supported, projected_size
from quire.backends.torch.kernels.elementwise import (
    add_norm,
    add_norm_in_fp8,
    embed,
    gate_output,
    gated,
    norm,
    norm_columns,
)
from quire.backends.torch.kernels.linear import MAX_FEW, MAX_SPLIT, PARTS, large_product, tile_product
from quire.backends.torch.kernels.packed_products import is_unscaled
from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kernels.routed_experts import Calls as Calls
from quire.backends.torch.kernels.routed_experts import expert_calls
from quire.backends.torch.kernels.sampling import NUM_PARAMS, Scratch, change, choose, edit
from quire.backends.torch.layers import Fp8Inputs, Fp8Product, Linear, Outputs
from quire.backends.torch.loading import NORM_DTYPE, ExpertFormats, has_expert_kernels, qkv_rows
from quire.backends.torch.packed import Mxfp4Stack, PackedFormat, PackedLinear, PackedStack, PackedWeight, Stack
from quire.weights.checkpoint import TensorType
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    MlpSpec,
    ModelSpec,
    QKNorm,
    QueryScaling,
    RopeSpec,
    ShortConvSpec,
)

MAX_PROCESSES = 12
PATIENCE_S = 60
LATER_NICE = 19

log = logging.getLogger(__name__)


class Compiling:
    """Compilation in child processes, started at once. All calls use tensors on the device "meta".

    Each child compiles its share of the first calls, reports that, and continues with the later calls at a low
    priority: a server is ready by then, and the children must not take the cores from it. They are forked only once,
    because a fork of a process with a GPU takes 8 ms.
    """

    def __init__(self, first: Calls, later: Calls, target: GPUTarget) -> None:
        count = min(max(len(first), len(later)), usable_cores(), MAX_PROCESSES)
        context = multiprocessing.get_context("fork")
        reports, report = os.pipe()
        self._reports = open(reports, "rb", buffering=0)  # noqa: SIM115
        with _no_collection(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: the children need none
            self._children = [
                context.Process(
                    target=_compile_shares,
                    args=(first[number::count], later[number::count], target, report),
                    daemon=True,
                )
                for number in range(count)
            ]
            try:
                for child in self._children:
                    child.start()
            except (OSError, ValueError, AssertionError) as error:  # no memory, or a process that may not fork
                log.info("kernels are not compiled in advance: %s", error)
        os.close(report)  # the end of the last child then ends the reports
        self._children = [child for child in self._children if child.pid is not None]
        self._deadline_s = time.monotonic() + PATIENCE_S

    @property
    def is_running(self) -> bool:
        if time.monotonic() > self._deadline_s:
            self.wait()
        return any(child.is_alive() for child in self._children)

    def cancel(self) -> None:
        self._deadline_s = 0.0
        self.wait()

    def wait_first(self) -> None:
        """Wait until the first calls are compiled, or all children have ended, or the time limit has passed."""
        num_left = len(self._children)
        while num_left > 0:
            left_s = max(self._deadline_s - time.monotonic(), 0)
            if not select.select([self._reports], [], [], left_s)[0]:
                break
            if not (reports := self._reports.read(num_left)):
                break
            num_left -= len(reports)
        self._reports.close()

    def wait(self) -> None:
        """Wait until all are done, or the time limit has passed."""
        for child in self._children:
            child.join(max(self._deadline_s - time.monotonic(), 0))
            if child.is_alive():
                child.kill()
                child.join()
        self._reports.close()


def launch(calls: Calls, device: torch.device) -> None:
    """Load the compiled kernels, in parallel."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(_launch, call, device) for call in calls]:
            if (error := future.exception()) is not None:
                log.warning("a kernel was not compiled in advance: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in children forked here: freeing tensors of the parent would abort them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _NoDevice:
    """Replaces the GPU's driver in a process that launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> object:
        return self._target


def _compile_shares(first: Calls, later: Calls, target: GPUTarget, report: int) -> None:
    """Compile in a child process. Sends one byte to `report` after the first calls."""
    os.closerange(3, report)  # the parent's open files must close with the parent
    os.closerange(report + 1, 4096)
    _compile(first, target)
    os.write(report, b"!")
    os.close(report)
    os.nice(LATER_NICE)
    _compile(later, target)


def _compile(calls: Calls, target: GPUTarget, launcher: Callable[..., object] = CudaLauncher) -> None:
    """Compile: every launch stops after the compilation."""
    jit: Any = triton.JITFunction
    launch = jit.run

    def compile_only(self: object, *args: object, grid: object, warmup: bool, **options: object) -> object:
        del warmup
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        with contextlib.suppress(Exception):  # compile the C stub that passes the arguments here as well
            launcher(kernel.src, kernel.metadata)
        return kernel

    jit.run = compile_only
    triton.runtime.driver.set_active(_NoDevice(target))
    with torch.inference_mode():
        for call in calls:
            with contextlib.suppress(Exception):
                call()
    jit.run = launch


@torch.inference_mode()
def _launch(call: Callable[[], object], device: torch.device) -> None:
    with torch.cuda.device(device):
        call()


def first_calls(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device, *, has_fp8_kv: bool = False
) -> Calls:
    """Return launches of the kernels that every step needs."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    ints = zeros(16, kind=torch.int32)
    rows, padding = ints[:2], torch.full((2,), -1, dtype=torch.int32, device=device)
    tables = zeros(2, 16, kind=torch.int32)
    x, weight = zeros(2, spec.hidden_size), zeros(spec.hidden_size, kind=NORM_DTYPE)
    logits, params = zeros(2, spec.vocab_size), zeros(2, NUM_PARAMS, kind=torch.float32)
    out, scratch = zeros(2, 2, kind=torch.int32), Scratch.empty(2, spec.vocab_size, device)
    factors = _scales(spec)
    calls: Calls = [
        lambda: choose(
            logits, rows, params, ints, zeros(16, kind=torch.int32), out, scratch, has_floor=False, is_changed=False
        ),
        lambda: add_norm(x, None, weight, spec.norm_eps),
        *(partial(_add_norm, x, weight, spec.norm_eps, factor) for factor in factors),
        *_embed_calls(spec, rows, padding, ints, zeros),
        lambda: update_tables(tables, ints[:1], ints[:1]),
        lambda: choose(
            logits, rows, params, ints, zeros(16, kind=torch.int32), out, scratch, has_floor=True, is_changed=False
        ),
    ]
    if dtype != torch.float32:  # products of a step without a graph
        matrices = (zeros(128, 128), zeros(64, 512))  # sums of one part, and of several
        calls += [
            partial(tile_product, zeros(rows, one.shape[1]), one, None) for rows in (16, 32, 64) for one in matrices
        ]
    for mlp in dict.fromkeys(layer.mlp for layer in spec.layers):
        if isinstance(mlp, MlpSpec):
            calls.append(partial(gated, zeros(2, 2 * mlp.size), mlp.activation))
    for attention in _kinds_of_attention(spec):
        calls += _attention_calls(attention, spec, dtype, block_size, device, has_fp8_kv=has_fp8_kv)
    return calls


def _add_norm(x: Tensor, weight: Tensor, eps: float, factors: tuple[float, float]) -> object:
    return add_norm(x.clone(), x.clone(), weight, eps, *factors)


def _scales(spec: ModelSpec) -> dict[tuple[float, float], None]:
    """Return one of each kind of factors that sums of residuals have. Only whether a factor is 1 matters."""
    scales = {(layer.residual_scale, 1.0): None for layer in spec.layers}
    return scales | {(layer.residual_scale, 0.5): None for layer in spec.layers if layer.has_output_scale}


def _embed_calls(spec: ModelSpec, rows: Tensor, padding: Tensor, ints: Tensor, zeros: Callable[..., Tensor]) -> Calls:
    tables = [(zeros(2, spec.hidden_size), spec.embedding_scale)]
    if spec.ple_size:
        tables.append((zeros(2, spec.num_layers * spec.ple_size), spec.ple_size**0.5))
    return [partial(embed, rows, padding, ints, table, scale) for table, scale in tables]


def _kinds_of_attention(spec: ModelSpec) -> list[AttentionSpec]:
    """Return one of each kind that needs its own kernels: the size of a window and of the angles does not matter."""
    kinds = {
        replace(
            one,
            window=min(one.window, 1),
            rope=one.rope and RopeSpec(1.0, one.rope.rotary_size),
            query_scaling=one.query_scaling and QueryScaling(1.0, 1),
            is_key_value=False,
            shared_with=None if one.shared_with is None else 0,
        ): None
        for one in (layer.mixer for layer in spec.layers)
        if isinstance(one, AttentionSpec)
    }
    return list(kinds)


def may_share_rows(spec: ModelSpec) -> bool:
    """Return whether a step may compute tokens whose keys are in shared blocks: for a window, or for a state."""
    kv_spec = KVSpec.of(spec)
    return kv_spec.has_states or (kv_memory.HAS_WINDOWS and kv_spec.window > 0)


def _attention_calls(
    attention: AttentionSpec,
    spec: ModelSpec,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    *,
    has_fp8_kv: bool,
) -> Calls:
    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    num_heads, num_kv_heads, head_size = attention.num_heads, attention.num_kv_heads, attention.head_size
    ints = zeros(16, kind=torch.int32)
    rows, padding = ints[:2], torch.full((2,), -1, dtype=torch.int32, device=device)
    tables, items = zeros(2, 16, kind=torch.int32), zeros(1, 6, kind=torch.int32)
    qkv = zeros(2, qkv_rows(attention))
    layer = zeros(2, 2, num_kv_heads, block_size, head_size, kind=torch.uint8 if has_fp8_kv else dtype)
    scales = zeros(2, 2, num_kv_heads, block_size, kind=torch.bfloat16) if has_fp8_kv else None
    angles = None
    if attention.rope is not None:
        angles = zeros(16, attention.rope.rotary_size // 2, kind=torch.float32)
    is_normed = attention.qk_norm is QKNorm.HEAD
    norm_weight = zeros(head_size, kind=NORM_DTYPE) if is_normed else None
    factors = zeros(16, kind=torch.float32) if attention.query_scaling else None
    sinks = zeros(num_heads, kind=torch.float32) if attention.has_sinks else None
    q, parts = zeros(2, num_heads, head_size), zeros(part_size(num_heads, head_size), kind=torch.float32)
    store = partial(rope_store, qkv, rows, padding, tables, angles, angles, layer, num_heads, norm_weight, norm_weight)
    rounds_first = is_normed and spec.rounds_norms_first
    kept = padding if may_share_rows(spec) and not (kv_memory.HAS_WINDOWS and attention.window) else None
    calls: Calls = [
        partial(
            store,
            spec.norm_eps if is_normed else 0.0,
            rounds_first=rounds_first,
            query_factors=factors,
            has_value_norm=attention.has_value_norm,
            is_shared=attention.is_shared,
            kept=kept,
            scales=scales,
        ),
        partial(merge, parts, ints[:5], q, sinks),
    ]
    if attention.qk_norm is QKNorm.WIDTH:
        wide = zeros(attention.q_size, kind=NORM_DTYPE)
        calls.append(partial(norm_columns, qkv, 0, attention.q_size, wide, spec.norm_eps))
        calls.append(partial(norm_columns, qkv, attention.q_size, attention.kv_size, wide, spec.norm_eps))
    run = partial(attend, q, layer, tables, rows, items, ints[:5], parts, q, sinks=sinks, scales=scales)
    calls += [
        partial(run, tiling=tiling, window=attention.window, scale=attention.scale, cap=attention.softcap)
        for tiling in tilings(head_size, dtype.itemsize)
    ]
    return calls


def routed_calls(spec: ModelSpec, dtype: torch.dtype, max_rows: int, formats: Sequence[ExpertFormats] = ()) -> Calls:
    """Return launches, with shapes only, of the kernels of routed experts for steps of up to `max_rows` rows.

    `formats`: of packed experts, all that the layers have.
    """
    calls: Calls = []

    def meta(shape: tuple[int, int, int], format: PackedFormat | None) -> Stack:
        if spec.quantization == TensorType.MXFP4:
            return Mxfp4Stack.empty(*shape, dtype, "meta")
        if format is not None:
            return PackedStack.empty(*shape, format, dtype, "meta")
        return torch.empty(shape, dtype=dtype, device="meta")

    pairs: Sequence[tuple[PackedFormat | None, PackedFormat | None]] = formats or [(None, None)]
    for experts, (gate_up, down) in itertools.product(dict.fromkeys(layer.experts for layer in spec.layers), pairs):
        if experts is not None and has_expert_kernels(experts):
            calls += expert_calls(
                meta((experts.num_experts, 2 * experts.size, spec.hidden_size), gate_up),
                meta((experts.num_experts, spec.hidden_size, experts.size), down),
                num_chosen=experts.num_chosen,
                activation=experts.activation,
                renormalizes=experts.renormalizes,
                scale=experts.scale,
                logits_dtype=dtype,
                max_rows=max_rows,
                has_bias=experts.has_bias,
                has_expert_scales=experts.has_router_norm,
            )
    return calls


def state_calls(spec: ModelSpec, dtype: torch.dtype) -> Calls:
    """Return launches, with shapes only, of the kernels of layers with recurrent states."""
    calls: Calls = []
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers):
        if isinstance(mixer, DeltaNetSpec) and is_supported(mixer):
            calls += delta_net_calls(mixer, dtype)
        elif isinstance(mixer, ShortConvSpec):
            calls += short_conv_calls(spec.hidden_size, mixer.num_taps, dtype, has_bias=mixer.has_bias)
        elif isinstance(mixer, AttentionSpec) and mixer.has_gate:
            out = torch.empty(2, mixer.q_size, dtype=dtype, device="meta")
            calls.append(partial(gate_output, out, out))
    return calls


def later_calls(
    spec: ModelSpec,
    dtype: torch.dtype,
    block_size: int,
    packed_format: PackedFormat | None = None,
    *,
    has_fp8_kv: bool = False,
) -> Calls:
    """Return launches, with shapes only, of the kernels for graphs of few rows and for rarer requests.

    `packed_format`: of the matrices that are packed.
    """

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    calls = _product_calls(spec, dtype, packed_format)
    if dtype != torch.float32:
        for num_outputs, sizes in ((4096, (300, 600, 1300)), (1024, (300, 2048, 8192))):  # one part, and several
            weight = meta(num_outputs, 4096)
            calls += [partial(large_product, meta(size, 4096), weight, None) for size in sizes]
    calls += _norm_calls(spec, dtype)
    calls += _fp8_norm_calls(spec, dtype, packed_format, MAX_EARLY_ROWS, is_graph=True)
    ints, params = meta(16, kind=torch.int32), meta(1, NUM_PARAMS, kind=torch.float32)
    out, scratch = meta(2, 1, kind=torch.int32), Scratch.empty(1, spec.vocab_size, torch.device("meta"))
    logits, altered = meta(1, spec.vocab_size), meta(1, spec.vocab_size, kind=torch.float32)
    for has_floor in (False, True):
        run = partial(choose, altered, ints, params, ints, ints, out, scratch)
        calls.append(partial(run, has_floor=has_floor, is_changed=True))
    masks, counts = meta(1, -(-spec.vocab_size // 8), kind=torch.uint8), meta(1, spec.vocab_size, kind=torch.int32)
    penalties = meta(3, kind=torch.float32)
    calls += [
        partial(change, logits, ints[:1], counts, ints[:1], penalties, masks, ints[:1]),
        partial(edit, altered, ints[:1], ints[:1], penalties[:1]),
    ]
    for attention in _kinds_of_attention(spec):
        shape = spec.num_layers, 2, 2, attention.num_kv_heads, block_size, attention.head_size
        pools = [meta(*shape)]
        if has_fp8_kv:
            pools = [meta(*shape, kind=torch.uint8), meta(*shape[:-1], kind=torch.bfloat16)]
        calls += [partial(copy_blocks, pool, ints[:1], ints[:1]) for pool in pools]
    return calls


def _norm_calls(spec: ModelSpec, dtype: torch.dtype) -> Calls:
    """Return the norms of graphs of few rows: after whole products and products in parts, launched early or not."""
    hidden = spec.hidden_size
    calls: Calls = []
    weight = torch.empty(hidden, dtype=NORM_DTYPE, device="meta")
    has_post_norms = any(layer.has_post_norms for layer in spec.layers)
    for num_rows, has_parts in ((1, False), (MAX_FEW, False), (MAX_SPLIT, True)):
        row = torch.empty(num_rows, hidden, dtype=dtype, device="meta")
        parts = torch.empty(PARTS, num_rows, hidden, dtype=torch.float32, device="meta")
        x = parts if has_parts else row
        run = partial(add_norm, x, row, weight, spec.norm_eps, is_graph=True)
        calls += [partial(run, factor, 1.0 if has_parts else total) for factor, total in _scales(spec)]
        if not has_parts:
            calls.append(partial(add_norm, row, None, weight, spec.norm_eps, is_graph=True))
        if has_post_norms:
            calls.append(partial(norm, x, weight, spec.norm_eps, dtype, is_graph=True))
    return calls


class _Matrices(NamedTuple):
    """Each kind of matrix of a model once."""

    linears: list[Linear]  # of products with the hidden state
    backs: list[Linear]  # of products to the hidden size
    gated: list[tuple[Linear, Activation]]


def _matrices(spec: ModelSpec, dtype: torch.dtype, packed_format: PackedFormat | None) -> _Matrices:
    def meta(num_outputs: int, num_inputs: int, has_bias: bool, may_be_packed: bool = True) -> Linear:
        bias = torch.empty(num_outputs, dtype=dtype, device="meta") if has_bias else None
        if packed_format is not None and may_be_packed and packed_format.fits(num_inputs):
            packed = PackedWeight.empty(num_outputs, num_inputs, packed_format, dtype, "meta")
            return FusedPackedLinear(packed, bias)
        return FusedLinear(torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta"), bias)

    hidden = spec.hidden_size
    inner: dict[tuple[int, bool, bool], None] = {}  # outputs of the products with the hidden state
    back: dict[tuple[int, bool, bool], None] = {}  # inputs of those to the hidden size
    gates: dict[tuple[int, bool, Activation], None] = {}
    for layer in spec.layers:
        mlp, mixer = layer.mlp, layer.mixer
        if isinstance(mixer, AttentionSpec):
            inner[qkv_rows(mixer), mixer.has_qkv_bias, True] = None
            back[mixer.q_size, mixer.has_output_bias, True] = None
        elif isinstance(mixer, DeltaNetSpec):
            inner[projected_size(mixer), False, True] = None
            back[mixer.value_size, False, True] = None
        else:
            inner[3 * hidden, mixer.has_bias, True] = None
            back[hidden, mixer.has_bias, True] = None
        if isinstance(mlp, MlpSpec):
            back[mlp.size, mlp.has_bias, True] = None
            gates[mlp.size, mlp.has_bias, mlp.activation] = None
        if (experts := layer.experts) is not None:
            inner[experts.num_experts, experts.has_bias, False] = None
            if experts.shared_size:
                inner[1, False, False] = None  # its gate
                back[experts.shared_size, False, True] = None
                gates[experts.shared_size, False, experts.activation] = None
        if layer.ple_size:
            inner[layer.ple_size, False, False] = None
            back[layer.ple_size, False, False] = None
    if spec.ple_size:
        inner[spec.num_layers * spec.ple_size, False, False] = None
    inner[spec.vocab_size, False, False] = None  # the head
    return _Matrices(
        [meta(size, hidden, *flags) for size, *flags in inner],
        [meta(hidden, size, *flags) for size, *flags in back],
        [(meta(2 * size, hidden, has_bias), activation) for size, has_bias, activation in gates],
    )


def packed_calls(spec: ModelSpec, dtype: torch.dtype, packed_format: PackedFormat | None) -> Calls:
    """Return launches, with shapes only, of the products of many rows with packed matrices."""
    linears, backs, gated_linears = _matrices(spec, dtype, packed_format)
    calls: Calls = []
    for linear in (*linears, *backs, *(linear for linear, _ in gated_linears)):
        if isinstance(linear, PackedLinear):
            for num_rows in (64, 256, 1024):
                x = torch.empty(num_rows, linear.packed.shape[1], dtype=dtype, device="meta")
                calls.append(partial(linear, x))
    for num_rows in (64, 1024):
        calls += _fp8_norm_calls(spec, dtype, packed_format, num_rows, is_graph=False)
        for gate_up, activation in gated_linears:
            reader = next(linear for linear in backs if linear.shape[1] == gate_up.shape[0] // 2)
            if reader.fp8_inputs(num_rows) is not None:
                x = torch.empty(num_rows, spec.hidden_size, dtype=dtype, device="meta")
                calls.append(partial(gate_up.gated, x, activation, is_graph=False, reader=reader))
    return calls


def _fp8_norm_calls(
    spec: ModelSpec, dtype: torch.dtype, packed_format: PackedFormat | None, num_rows: int, *, is_graph: bool
) -> Calls:
    """Return the norms that are rounded to FP8, and those that apply the scales of a product in FP8."""
    linears, backs, gated_linears = _matrices(spec, dtype, packed_format)
    taken = {linear.fp8_inputs(num_rows) for linear in (*linears, *(one for one, _ in gated_linears))} - {None}
    x = torch.empty(num_rows, spec.hidden_size, dtype=dtype, device="meta")
    weight = torch.empty(spec.hidden_size, dtype=NORM_DTYPE, device="meta")
    has_post_norms = any(layer.has_post_norms for layer in spec.layers)
    calls: Calls = []
    added: list[Outputs] = [x]  # what may be added to a residual
    product = None
    if any(isinstance(one, PackedLinear) and is_unscaled(num_rows, one.packed, one.bias) for one in backs):
        product = Fp8Product(x, weight.new_empty(num_rows, 1), weight)
    if product is not None and has_post_norms:
        calls.append(partial(norm, product, weight, spec.norm_eps, dtype, is_graph=is_graph))
    elif product is not None:
        added.append(product)
    for one in added:
        run = partial(add_norm, one, x, weight, spec.norm_eps, is_graph=is_graph)
        rounded = partial(add_norm_in_fp8, one, x, weight, spec.norm_eps, is_graph=is_graph)
        for factors in _scales(spec):
            calls += [partial(run, *factors)] if one is product else []
            calls += [partial(rounded, *factors, has_groups=kind is Fp8Inputs.PER_GROUP) for kind in taken]
    first = partial(add_norm_in_fp8, x, None, weight, spec.norm_eps, is_graph=is_graph)
    calls += [partial(first, has_groups=kind is Fp8Inputs.PER_GROUP) for kind in taken]
    return calls


def _product_calls(spec: ModelSpec, dtype: torch.dtype, packed_format: PackedFormat | None) -> Calls:
    """Return the products of few rows."""
    calls: Calls = []
    linears, backs, gated_linears = _matrices(spec, dtype, packed_format)

    def add(num_rows: int, linear: Linear, call: Callable[..., object], *arguments: object) -> None:
        if linear.has_kernel(num_rows) and linear.fp8_inputs(num_rows) is None:
            x = torch.empty(num_rows, linear.shape[1], dtype=dtype, device="meta")
            calls.append(partial(call, x, *arguments, is_graph=True))

    for num_rows in (1, 2, 4, 16, 32, 64, 128, 256):
        for linear, activation in gated_linears:
            add(num_rows, linear, linear.gated, activation)
        for linear in linears:
            add(num_rows, linear, linear.project)
        for linear in backs:
            add(num_rows, linear, linear.project_back)
    return calls
