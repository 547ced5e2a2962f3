"""Compiles the kernels of a model in parallel while its weights are loaded.

Triton compiles a kernel when it is first launched: half a second each, in sequence. Threads halve that time, but most
of it is Python, which blocks everything else in this process. Forked child processes therefore compile into Triton's
disk cache, with tensors that have only shapes, and never touch the GPU. Then this process launches each kernel once
with no work (padding rows, empty items), which loads it from the cache. If a child fails, its kernel is compiled later.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import select
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from quire.backends.machine import usable_cores
from quire.backends.torch.kernels.attention import Parts, attend, merge, tilings
from quire.backends.torch.kernels.blocks import copy_blocks, update_tables
from quire.backends.torch.kernels.elementwise import add_norm, embed, gated, norm
from quire.backends.torch.kernels.linear import (
    PARTS,
    THIN,
    gated_row_product,
    gated_tile_product,
    is_small,
    product_in_parts,
    row_product,
    tile_product,
)
from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kernels.sampling import NUM_PARAMS, Scratch, change, choose, edit
from quire.backends.torch.loading import NORM_DTYPE
from quire.weights.spec import ModelSpec

MAX_PROCESSES = 12
PATIENCE_S = 60
LATER_NICE = 19

log = logging.getLogger(__name__)

Calls = list[Callable[[], object]]  # each launches a kernel in the form a step uses, with no work


class Compiling:
    """Compilation in child processes, started at once. All calls use tensors on the device "meta".

    Each child compiles its share of the first calls, reports that, and continues with the later calls at a low
    priority: a server is ready by then, and the children must not take the cores from it. They are forked only once,
    because a fork of a process with a GPU takes 8 ms.
    """

    def __init__(self, first: Calls, later: Calls, target: GPUTarget) -> None:
        count = min(max(len(first), len(later)), usable_cores(), MAX_PROCESSES)
        context = multiprocessing.get_context("fork")
        self._reports, report = os.pipe()
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
            if not (reports := os.read(self._reports, num_left)):
                break
            num_left -= len(reports)
        self._close_reports()

    def _close_reports(self) -> None:
        if self._reports >= 0:
            os.close(self._reports)
            self._reports = -1

    def wait(self) -> None:
        """Wait until all are done, or the time limit has passed."""
        for child in self._children:
            child.join(max(self._deadline_s - time.monotonic(), 0))
            if child.is_alive():
                child.kill()
                child.join()
        self._close_reports()


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


def first_calls(spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device) -> Calls:
    """Return launches of the kernels that every step needs."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    num_heads, num_kv_heads, head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
    ints = zeros(16, kind=torch.int32)
    rows, padding = ints[:2], torch.full((2,), -1, dtype=torch.int32, device=device)
    tables, items = zeros(2, 16, kind=torch.int32), zeros(1, 6, kind=torch.int32)
    x, weight = zeros(2, spec.hidden_size), zeros(spec.hidden_size, kind=NORM_DTYPE)
    qkv = zeros(2, (num_heads + 2 * num_kv_heads) * head_size)
    layer = zeros(2, 2, num_kv_heads, block_size, head_size)
    angles = zeros(16, spec.rope.rotary_size // 2, kind=torch.float32)
    head_norm = zeros(head_size, kind=NORM_DTYPE) if spec.has_qk_norm else None
    rounds_first = spec.has_qk_norm and spec.rounds_norms_first
    q, parts = zeros(2, num_heads, head_size), Parts.empty(1, num_heads, head_size, device)
    logits, params = zeros(2, spec.vocab_size), zeros(2, NUM_PARAMS, kind=torch.float32)
    out, scratch = zeros(2, 2, kind=torch.int32), Scratch.empty(2, spec.vocab_size, device)
    calls: Calls = [
        lambda: choose(
            logits, rows, params, ints, zeros(16, kind=torch.int32), out, scratch, has_floor=False, is_changed=False
        ),
        lambda: rope_store(
            qkv,
            rows,
            padding,
            tables,
            angles,
            angles,
            layer,
            num_heads,
            head_norm,
            head_norm,
            spec.norm_eps,
            rounds_first=rounds_first,
        ),
        lambda: merge(parts, ints[:3], q, num_kv_heads),
        lambda: add_norm(x, None, weight, spec.norm_eps),
        lambda: add_norm(x.clone(), x.clone(), weight, spec.norm_eps),
        lambda: gated(zeros(2, 2 * spec.ffn_size), spec.activation),
        lambda: embed(rows, padding, ints, zeros(2, spec.hidden_size), spec.embedding_scale),
        lambda: update_tables(tables, ints[:1], ints[:1]),
        lambda: choose(
            logits, rows, params, ints, zeros(16, kind=torch.int32), out, scratch, has_floor=True, is_changed=False
        ),
    ]
    fixed = {"scale": spec.attention_scale, "cap": spec.attention_softcap}
    for window in {min(window, 1) for window in spec.windows}:
        calls += [
            partial(attend, q, layer, tables, rows, items, ints[:3], parts, q, tiling=tiling, window=window, **fixed)
            for tiling in tilings(head_size, dtype.itemsize)
        ]
    return calls


def later_calls(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> Calls:
    """Return launches, with shapes only, of the kernels for graphs of few rows and for rarer requests."""

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    hidden, heads_size = spec.hidden_size, spec.num_heads * spec.head_size
    qkv_size = heads_size + 2 * spec.num_kv_heads * spec.head_size
    qkv, back = meta(qkv_size, hidden), [meta(hidden, heads_size), meta(hidden, spec.ffn_size)]
    gate_up = meta(2 * spec.ffn_size, hidden)
    qkv_bias = meta(qkv_size) if spec.has_qkv_bias else None
    back_biases = [meta(hidden) if has else None for has in (spec.has_output_bias, spec.has_mlp_bias)]
    gate_up_bias = meta(2 * spec.ffn_size) if spec.has_mlp_bias else None
    calls: Calls = [
        partial(row_product, meta(1, hidden), qkv, qkv_bias),
        partial(gated_row_product, meta(1, hidden), gate_up, gate_up_bias, spec.activation),
    ]
    for weight, bias in zip(back, back_biases, strict=True):
        calls.append(partial(row_product, meta(1, weight.shape[1]), weight, bias))
    for rows in (16, 32, 64):
        if is_small(rows, qkv):
            calls.append(partial(tile_product, meta(rows, hidden), qkv, qkv_bias))
        if is_small(rows, gate_up):
            calls.append(partial(gated_tile_product, meta(rows, hidden), gate_up, gate_up_bias, spec.activation))
        for weight, bias in zip(back, back_biases, strict=True):
            if is_small(rows, weight):
                product = product_in_parts if len(weight) <= THIN else tile_product
                calls.append(partial(product, meta(rows, weight.shape[1]), weight, bias))
    parts, residual = meta(PARTS, 2, hidden, kind=torch.float32), meta(2, hidden)
    norm_weight = meta(hidden, kind=NORM_DTYPE)
    calls.append(partial(add_norm, parts, residual, norm_weight, spec.norm_eps))
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
    pool = meta(spec.num_layers, 2, 2, spec.num_kv_heads, block_size, spec.head_size)
    calls.append(partial(copy_blocks, pool, ints[:1], ints[:1]))
    if spec.has_post_norms:
        calls.append(partial(norm, parts, norm_weight, spec.norm_eps, dtype))
    return calls
