"""Compiles the kernels of a model in parallel while its weights are loaded.

Triton compiles a kernel when it is first launched: half a second each, in sequence. Threads halve that time, but most
of it is Python, which blocks everything else in this process. Forked child processes therefore compile into Triton's
disk cache, and never touch the GPU. They run steps of the model with tensors that have only shapes, in which nothing is
launched. If a child fails, its kernels are compiled later.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from quire.backends import kv_memory
from quire.backends.kv_memory import KVSpec
from quire.backends.machine import usable_cores
from quire.backends.torch.experts import Experts
from quire.backends.torch.fused import DeviceState, FusedPass
from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.inputs import Layout, StateLayout, WindowLayout
from quire.backends.torch.kernels.attention import Parts
from quire.backends.torch.kernels.blocks import copy_blocks, update_tables
from quire.backends.torch.kernels.delta_net import MAX_FEW
from quire.backends.torch.kernels.routed_experts import row_counts
from quire.backends.torch.kernels.sampling import NUM_PARAMS, Scratch, change, choose, edit
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.layers import Inputs, Linear, plain
from quire.backends.torch.loading import NORM_DTYPE, ExpertFormats, WeightLoader, is_quantized
from quire.backends.torch.models.decoder import DecoderModel, RoutedMlp
from quire.backends.torch.packed import Mxfp4Stack, PackedFormat, PackedStack, PackedWeight, Stack
from quire.backends.torch.state_store import StateStore
from quire.weights.checkpoint import TensorType
from quire.weights.spec import AttentionSpec, LayerSpec, ModelSpec
from quire.weights.tensors import expected_tensors

META = torch.device("meta")
MAX_PROCESSES = 12
PATIENCE_S = 60
LATER_NICE = 19

log = logging.getLogger(__name__)

Call = Callable[[], object]  # launches kernels in the forms that a step uses, with no work


class Compiling:
    """Compilation in child processes, started at once. All calls use tensors on the device "meta".

    Each child makes all calls and compiles its share of the kernels that they launch: first those of the first calls,
    which it reports, then those of the later calls at a low priority: a server is ready by then, and the children must
    not take the cores from it. They are forked only once, because a fork of a process with a GPU takes 8 ms.
    """

    def __init__(self, first: Iterable[Call], later: Iterable[Call], target: GPUTarget) -> None:
        count = min(usable_cores(), MAX_PROCESSES) if first or later else 0
        context = multiprocessing.get_context("fork")
        self._reports, report = os.pipe()
        with _no_collection(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: the children need none
            self._children = [
                context.Process(
                    target=_compile_shares,
                    args=(first, later, Compiler(target, number, count), report),
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


def _compile_shares(first: Iterable[Call], later: Iterable[Call], compiler: Compiler, report: int) -> None:
    """Compile in a child process. Sends one byte to `report` after the first calls."""
    os.closerange(3, report)  # the parent's open files must close with the parent
    os.closerange(report + 1, 4096)
    compiler.run(first)
    os.write(report, b"!")
    os.close(report)
    os.nice(LATER_NICE)
    compiler.run(later)


class Compiler:
    """Compiles the kernels that calls launch, once in each form. Of `count` processes, each compiles its share."""

    def __init__(
        self, target: GPUTarget, number: int = 0, count: int = 1, launcher: Callable[..., object] = CudaLauncher
    ) -> None:
        self._target = target
        self._number, self._count = number, count
        self._launcher = launcher
        self._forms: set[object] = set()

    def run(self, calls: Iterable[Call]) -> list[Exception]:
        """Make calls: every launch stops after the compilation. Returns the errors."""
        jit: Any = triton.JITFunction
        launch = jit.run
        errors: list[Exception] = []

        def compile_only(kernel: Any, *args: object, grid: object, warmup: bool, **options: object) -> None:
            del warmup
            form = (kernel, *map(_form, args), *((name, _form(value, value)) for name, value in options.items()))
            if form in self._forms:
                return
            is_mine = len(self._forms) % self._count == self._number
            self._forms.add(form)
            try:
                compiled = launch(kernel, *args, grid=grid, warmup=True, **options) if is_mine else None
            except Exception as error:  # a kernel that is not compiled now is compiled when it is first launched
                errors.append(error)
                return
            if compiled is not None:
                with contextlib.suppress(Exception):  # compile the C stub that passes the arguments here as well
                    self._launcher(compiled.src, compiled.metadata)

        jit.run = compile_only
        triton.runtime.driver.set_active(_NoDevice(self._target))
        with torch.inference_mode():
            remaining = iter(calls)
            while True:
                try:
                    next(remaining)()
                except StopIteration:
                    break
                except Exception as error:
                    errors.append(error)
        jit.run = launch
        return errors


def _form(value: object, constant: object = None) -> object:
    """Return what a kernel is compiled for: the type of a tensor, whether a number is 1, a multiple of 16, or large."""
    if isinstance(value, Tensor):
        return value.dtype
    if constant is not None:
        return constant
    if type(value) is int:
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)


# What is compiled


class ShapeLoader(WeightLoader):
    """Makes the matrices of a model with shapes only, in the formats that they have in memory.

    `packed_format`: of the matrices that are packed; `experts`: of the two matrices of packed experts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
        experts: ExpertFormats | None = None,
    ) -> None:
        self.spec, self.device, self.linear_class = spec, META, FusedLinear
        self.num_saved, self.packed_types = 0, set()
        self._dtype, self._format, self._experts = dtype, packed_format, experts
        self._shapes = expected_tensors(spec)

    def matrix(self, name: str) -> Tensor:
        rows, *others = self._shapes[name]
        return self._empty(min(rows, 2) if name.endswith("embedding.weight") else rows, *others)  # any row of a table

    def vector(self, name: str) -> Tensor:
        return self._empty(*self._shapes[name], kind=NORM_DTYPE)

    def norm(self, name: str) -> Tensor:
        return self.vector(name)

    def number(self, name: str) -> float:
        del name
        return 0.5  # only whether a factor is 1 matters

    def linear(self, prefix: str, *roles: str, has_bias: bool = False) -> Linear:
        shapes = [self._shapes[f"{prefix}{role}.weight"] for role in roles]
        num_outputs, num_inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        bias = self._empty(num_outputs) if has_bias else None
        if self._format is not None and is_quantized(roles[0]) and self._format.fits(num_inputs):
            packed = PackedWeight.empty(num_outputs, num_inputs, self._format, self._dtype, META)
            return FusedPackedLinear(packed, bias)
        return FusedLinear(self._empty(num_outputs, num_inputs), bias)

    def experts(self, gate_up: list[list[str]], down: list[list[str]], *, may_pack: bool) -> tuple[Stack, Stack]:
        formats = self._experts if may_pack and self._experts is not None else (None, None)
        first, second = (self._stacked(names, format) for names, format in zip((gate_up, down), formats, strict=True))
        return first, second

    def biases(self, groups: list[list[str]]) -> Tensor:
        return self._empty(len(groups), sum(self._shapes[f"{name}.weight"][0] for name in groups[0]))

    def _stacked(self, groups: list[list[str]], format: PackedFormat | None) -> Stack:
        shapes = [self._shapes[f"{name}.weight"] for name in groups[0]]
        shape = (len(groups), sum(one[0] for one in shapes), shapes[0][1])
        if self.spec.quantization == TensorType.MXFP4:
            return Mxfp4Stack.empty(*shape, self._dtype, META)
        return self._empty(*shape) if format is None else PackedStack.empty(*shape, format, self._dtype, META)

    def _empty(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=kind or self._dtype, device=META)


def _kinds_of_layers(spec: ModelSpec) -> ModelSpec:
    """Return a model with one layer of each kind. Per-layer embeddings are as wide as the number of layers."""
    if spec.ple_size:
        return spec
    found: dict[LayerSpec, int] = {}
    for layer in spec.layers:
        kind, mixer = layer, layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.shared_with is not None:
            owner = found[spec.layers[mixer.shared_with]]
            kind = replace(layer, mixer=replace(mixer, shared_with=owner))
        found.setdefault(kind, len(found))
    return replace(spec, layers=tuple(found))


class ShapePass:
    """Runs steps of a model with shapes only: every kernel of such a step is launched, in the form that it uses.

    A step has decodes and prompts, and rows whose contexts are split.
    """

    def __init__(self, loader: ShapeLoader, dtype: torch.dtype, block_size: int, *, has_fp8_kv: bool = False) -> None:
        self._model = DecoderModel(loader, 2)
        kv_spec = replace(self._model.kv_spec, is_fp8=has_fp8_kv)
        device, num_windows = loader.device, 2 if kv_memory.HAS_WINDOWS and kv_spec.window else 0
        num_heads = max(layer.num_kv_heads * layer.num_groups for layer in kv_spec.kv_layers)
        tables = torch.empty(2, 16, dtype=torch.int32, device=device)
        self._state = DeviceState(
            store=KVStore(kv_spec, 2, block_size, dtype, device, num_windows),
            tables=tables,
            window_tables=tables,
            last_samples=tables[0],
            parts=Parts.empty(1, num_heads, max(layer.head_size for layer in kv_spec.kv_layers), device),
            states=StateStore(kv_spec, 2, dtype, device) if kv_spec.has_states else None,
        )

    def expert_rows(self, max_rows: int) -> list[int]:
        """Return numbers of rows whose steps together use all kernels of experts."""
        mlps = [one for layer in self._model.layers for one in (layer.mlp, layer.parallel and layer.parallel.mlp)]
        return [
            num_rows
            for mlp in mlps
            if isinstance(mlp, RoutedMlp) and not mlp.experts.has_sigmoid
            for num_rows in row_counts(mlp.experts.gate_up, mlp.experts.down, mlp.experts.num_chosen, max_rows)
        ]

    def copy_blocks(self) -> None:
        ints = _meta(1, kind=torch.int32)
        for _, pool in self._state.store.all_pools():
            copy_blocks(pool, ints, ints)

    def run(self, num_rows: int, work: StateLayout, *, is_graph: bool = False) -> None:
        window = WindowLayout(1, 1) if self._state.store.num_window_blocks else None
        layout = Layout(num_rows, 1, 1, window, work if self._state.states is not None else None)
        inputs = layout.carve(torch.empty(layout.size, dtype=torch.int32, device=META))
        self._model.forward(_Pass(inputs, self._state, num_merged=1, is_graph=is_graph))


class _Pass(FusedPass):
    def route(self, x: Inputs, router: Linear, experts: Experts, router_input: Tensor | None = None) -> Tensor:
        if not experts.has_sigmoid:
            return super().route(x, router, experts, router_input)
        self.project(x, router)
        return plain(x)  # the plain version computes these experts, which needs numbers


PACKED_ROWS = (64, 256, 1024)  # with packed matrices, steps of so many rows have other kernels
GRAPH_ROWS = (1, 2, 4, 16, 32, 64, 128)
BOTH_KINDS = StateLayout(1, 1, 1)  # a decode and a prompt


def first_calls(
    spec: ModelSpec,
    dtype: torch.dtype,
    block_size: int,
    max_rows: int,
    packed_format: PackedFormat | None = None,
    experts: Sequence[ExpertFormats] = (),
    *,
    has_fp8_kv: bool = False,
) -> Iterator[Call]:
    """Yield steps, with shapes only, that launch what steps without graphs need, and the kernels around them.

    `experts`: the formats of packed experts, all that the layers have. The model is made when its first step is asked
    for, in a child: the first operation with shapes only imports a large part of PyTorch.
    """
    kinds = _kinds_of_layers(spec)
    yield from _sampling_calls(spec, dtype)
    for formats in experts or (None,):
        step = ShapePass(ShapeLoader(kinds, dtype, packed_format, formats), dtype, block_size, has_fp8_kv=has_fp8_kv)
        rows = dict.fromkeys(
            [2, *((*PACKED_ROWS, max_rows) if packed_format is not None else ()), *step.expert_rows(max_rows)]
        )
        yield from (partial(step.run, num_rows, BOTH_KINDS) for num_rows in rows)
        if KVSpec.of(spec).has_states:
            yield partial(step.run, 2, StateLayout(0, 1, MAX_FEW))  # many prompts


def later_calls(
    spec: ModelSpec,
    dtype: torch.dtype,
    block_size: int,
    packed_format: PackedFormat | None = None,
    experts: Sequence[ExpertFormats] = (),
    *,
    has_fp8_kv: bool = False,
) -> Iterator[Call]:
    """Yield the same for graphs of few rows and for rarer requests."""
    loader = ShapeLoader(_kinds_of_layers(spec), dtype, packed_format, next(iter(experts), None))
    step = ShapePass(loader, dtype, block_size, has_fp8_kv=has_fp8_kv)
    yield from (partial(step.run, num_rows, StateLayout(1, 0, 0), is_graph=True) for num_rows in GRAPH_ROWS)
    yield from _rare_calls(spec, dtype)
    yield step.copy_blocks


def _sampling_calls(spec: ModelSpec, dtype: torch.dtype) -> list[Call]:
    """Return the kernels before and after the layers of every step."""
    ints, logits = _meta(2, kind=torch.int32), _meta(2, spec.vocab_size, kind=dtype)
    params, out = _meta(2, NUM_PARAMS, kind=torch.float32), _meta(2, 2, kind=torch.int32)
    run = partial(choose, logits, ints, params, ints, ints, out, Scratch.empty(2, spec.vocab_size, META))
    calls: list[Call] = [partial(run, has_floor=has_floor, is_changed=False) for has_floor in (False, True)]
    return [*calls, partial(update_tables, _meta(2, 16, kind=torch.int32), ints, ints)]


def _rare_calls(spec: ModelSpec, dtype: torch.dtype) -> list[Call]:
    """Return the kernels of requests with penalties, biases or grammars."""
    ints, altered = _meta(2, kind=torch.int32), _meta(2, spec.vocab_size, kind=torch.float32)
    params, out = _meta(2, NUM_PARAMS, kind=torch.float32), _meta(2, 2, kind=torch.int32)
    run = partial(choose, altered, ints, params, ints, ints, out, Scratch.empty(2, spec.vocab_size, META))
    masks, counts = _meta(2, -(-spec.vocab_size // 8), kind=torch.uint8), _meta(2, spec.vocab_size, kind=torch.int32)
    penalties, logits = _meta(6, kind=torch.float32), _meta(2, spec.vocab_size, kind=dtype)
    return [
        *(partial(run, has_floor=has_floor, is_changed=True) for has_floor in (False, True)),
        partial(change, logits, ints, counts, ints, penalties, masks, ints),
        partial(edit, altered, ints, ints, penalties[:2]),
    ]


def _meta(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=kind, device=META)
