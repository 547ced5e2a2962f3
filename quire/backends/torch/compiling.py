"""Compiles the kernels a model needs, side by side, while its weights are loaded.

Triton compiles when a kernel is first launched, one after the other: half a second each. Launched from many threads
they take little longer than the slowest. What is launched here does nothing: padding rows, empty items.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from quire.backends.torch.kernels.attention import NARROW, WIDE, Parts, attend, merge
from quire.backends.torch.kernels.blocks import update_tables
from quire.backends.torch.kernels.elementwise import add_norm, embed, gated
from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kernels.sampling import NUM_PARAMS, Scratch, choose
from quire.weights.spec import ModelSpec

NUM_THREADS = 12

log = logging.getLogger(__name__)


class Compiling:
    """Under way from the start. A kernel that does not compile here says why when it is needed."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "compile")
        self._device = device
        calls = kernel_calls(spec, dtype, block_size, device)
        self._futures: list[Future[None]] = [self._pool.submit(self._run, call) for call in calls]

    def wait(self) -> None:
        for future in self._futures:
            if (error := future.exception()) is not None:
                log.warning("a kernel was not compiled ahead: %s: %s", type(error).__name__, error)
        self._pool.shutdown()

    def _run(self, call: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.device(self._device):
            call()


def kernel_calls(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device
) -> list[Callable[[], object]]:
    """Each launches a kernel, in the form in which a step launches it, on nothing."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    num_heads, num_kv_heads, head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
    ints = zeros(16, kind=torch.int32)
    rows, padding = ints[:2], torch.full((2,), -1, dtype=torch.int32, device=device)
    tables, items = zeros(2, 16, kind=torch.int32), zeros(1, 6, kind=torch.int32)
    x, weight = zeros(2, spec.hidden_size), zeros(spec.hidden_size)
    qkv = zeros(2, (num_heads + 2 * num_kv_heads) * head_size)
    layer = zeros(2, 2, num_kv_heads, block_size, head_size)
    angles = zeros(16, spec.rope.rotary_size // 2, kind=torch.float32)
    head_norm = zeros(head_size) if spec.has_qk_norm else None
    q, parts = zeros(2, num_heads, head_size), Parts.empty(1, num_heads, head_size, device)
    logits, params = zeros(2, spec.vocab_size), zeros(2, NUM_PARAMS, kind=torch.float32)
    out, scratch = zeros(2, 2, kind=torch.int32), Scratch.empty(2, spec.vocab_size, device)
    calls: list[Callable[[], object]] = [
        lambda: choose(
            logits, rows, params, ints, zeros(16, kind=torch.int32), out, scratch, has_floor=False, is_changed=False
        ),
        lambda: rope_store(
            qkv, rows, padding, tables, angles, angles, layer, num_heads, head_norm, head_norm, spec.norm_eps
        ),
        lambda: merge(parts, ints[:3], q, num_kv_heads),
        lambda: add_norm(x, None, weight, spec.norm_eps),
        lambda: add_norm(x.clone(), x.clone(), weight, spec.norm_eps),
        lambda: gated(zeros(2, 2 * spec.ffn_size), spec.activation),
        lambda: embed(rows, padding, ints, zeros(2, spec.hidden_size), spec.embedding_scale),
        lambda: update_tables(tables, ints[:1], ints[:1]),
    ]
    fixed = {"scale": spec.attention_scale, "cap": spec.attention_softcap}
    for window in {min(window, 1) for window in spec.windows}:
        calls += [
            partial(attend, q, layer, tables, rows, items, ints[:3], parts, q, tiling=tiling, window=window, **fixed)
            for tiling in (NARROW, WIDE)
        ]
    return calls
