"""Reads the tensors of a checkpoint, one at a time, fused as the layers of a model use them.

Each tensor is read, converted and copied before the next one, so the peak memory is the model and one tensor. The
checkpoint's contents are checked before anything is allocated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.backends.base import Progress
from quire.backends.torch.layers import Linear
from quire.backends.torch.packed import (
    MAX_EXPONENT,
    QUANTIZED,
    ExpertStack,
    JoinedLinear,
    Mxfp4Stack,
    PackedFormat,
    PackedLinear,
    PackedStack,
    PackedWeight,
    Stack,
    decoded,
    fitting_format,
    format_of,
    have_common_kernels,
    pack,
    quantize,
    stack_format,
)
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorType
from quire.weights.opening import DummyCheckpoint
from quire.weights.packed import PackedMatrix
from quire.weights.quants import to_float32
from quire.weights.spec import AttentionSpec, ExpertsSpec, ModelSpec
from quire.weights.tensors import check_tensors, expected_tensors, is_norm, norm_offset

NORM_DTYPE = torch.float32
IN_FP32 = (".a_log", ".dt_bias", ".expert_bias")  # like norms
DUMMY_SEED = 0
DUMMY_FACTOR = 0.875  # not 1, which needs fewer operations
DUMMY_STD = 0.02  # as most models are initialised: answers are nonsense, but every number is finite

NOT_QUANTIZED = ("router", "shared_gate", "head", "ple_gate", "ple_proj", "ple_model_proj")  # small, or sensitive
PROBED = ("q_proj", "down_proj", "in_proj_qkv", "in_proj")  # matrices that show the format of a file

_FACTORS = ("output_scale.weight", "expert_scales.weight")
_NATIVE = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}

log = logging.getLogger(__name__)


def qkv_rows(attention: AttentionSpec) -> int:
    """Return the rows of the product that gives queries, keys and values. Raw keys that are also values count twice."""
    return attention.qkv_size + (attention.q_size if attention.has_gate else 0)


@dataclass(frozen=True, slots=True)
class _Run:
    """Matrices with the same input that one product computes with."""

    names: list[str]
    matrices: list[PackedMatrix]  # empty: stored in 16 or 32 bits
    format: PackedFormat | None  # None: 16 bits in memory


class WeightLoader:
    """Reads matrices as class `linear`, and as `packed_linear` where they stay packed.

    `quantize_bits`: quantise the matrices of the layers that the file stores in 16 or 32 bits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        linear: type[Linear] = Linear,
        packed_linear: type[PackedLinear] = PackedLinear,
        quantize_bits: int | None = None,
    ) -> None:
        check_tensors(checkpoint)
        self.spec, self.device = checkpoint.spec, device
        self.linear_class = linear
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._packed_linear = packed_linear
        self._quantized = None if quantize_bits is None else QUANTIZED[quantize_bits]
        self.num_saved = 0  # bytes, by packed matrices
        self.packed_types: set[str] = set()
        self._random = torch.Generator(device).manual_seed(DUMMY_SEED)
        self._decoded: set[str] = set()  # formats without a kernel, which were logged
        self._progress = progress
        self._num_done = 0
        self._num_bytes = sum(checkpoint.tensors[name].num_bytes for name in expected_tensors(self.spec))

    @property
    def num_bytes(self) -> int:
        """Memory of the model's weights. Complete when all are loaded."""
        return weight_bytes(self.spec, self._dtype) - self.num_saved

    def linear(self, prefix: str, *roles: str, has_bias: bool = False) -> Linear:
        """Load matrices with the same input, stacked along their outputs."""
        parts = [self._part(run, has_bias=has_bias) for run in self._runs([f"{prefix}{role}" for role in roles])]
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def _runs(self, names: list[str]) -> list[_Run]:
        """Divide matrices into runs of one format."""
        runs: list[_Run] = []
        for name in names:
            matrix = self._checkpoint.read_packed(f"{name}.weight")
            run = self._run([name], [] if matrix is None else [matrix])
            if runs and bool(runs[-1].matrices) == bool(run.matrices):
                joined = self._run(runs[-1].names + run.names, runs[-1].matrices + run.matrices)
                if len({one.format is None for one in (joined, run, runs[-1])}) == 1:
                    runs[-1] = joined
                    continue
            runs.append(run)
        return runs

    def _run(self, names: list[str], matrices: list[PackedMatrix]) -> _Run:
        format = format_of(matrices) if matrices else None
        return _Run(names, matrices, format if format and self._packed_linear.holds(format) else None)

    def _part(self, run: _Run, *, has_bias: bool) -> Linear:
        """Load matrices of one format. Keep them packed, or decode them if the kernels do not know their format."""
        bias = self._stack([f"{name}.bias" for name in run.names]) if has_bias else None
        if not run.matrices:
            weight = self._stack([f"{name}.weight" for name in run.names])
            if self._quantized is not None and is_quantized(run.names[0]) and self._quantized.fits(weight.shape[1]):
                self._check_held(self._quantized)
                return self._pack_linear(quantize(weight, self._quantized), bias)
            return self.linear_class(weight, bias)
        self._report(sum(self._checkpoint.tensors[f"{name}.weight"].num_bytes for name in run.names))
        if run.format is not None:
            return self._pack_linear(pack(run.matrices, run.format, self._dtype, self.device), bias)
        return self.linear_class(self._decode(run.matrices), bias)

    def _decode(self, matrices: list[PackedMatrix]) -> Tensor:
        kinds = ", ".join(sorted({f"{one.type} in groups of {one.group}" for one in matrices}))
        self._log_decoded(kinds)
        num_outputs = sum(one.shape[0] for one in matrices)
        weight = torch.empty((num_outputs, matrices[0].shape[1]), dtype=self._dtype, device=self.device)
        first = 0
        for one in matrices:
            weight[first : first + one.shape[0]] = decoded(one).to(self.device)
            first += one.shape[0]
        return weight

    def _log_decoded(self, kinds: str) -> None:
        if kinds not in self._decoded:  # once, not for every layer
            self._decoded.add(kinds)
            log.info("weights of %s are decoded to %s: no kernel computes with them", kinds, self._dtype)

    def _pack_linear(self, packed: PackedWeight, bias: Tensor | None) -> Linear:
        self._count(packed)
        return self._packed_linear(packed, bias)

    def _count(self, packed: PackedWeight | ExpertStack) -> None:
        self.num_saved += math.prod(packed.shape) * self._dtype.itemsize - packed.nbytes
        if not packed.format.has_exponents:
            self.packed_types.add(packed.format.type)

    def matrix(self, name: str) -> Tensor:
        return self._stack([name])

    def experts(self, gate_up: list[list[str]], down: list[list[str]], *, may_pack: bool) -> tuple[Stack, Stack]:
        """Load the two matrices of every expert. They stay packed if the kernels compute with both."""
        first, second = (self._expert_matrices(groups, may_pack=may_pack) for groups in (gate_up, down))
        if not _have_common_kernels(first, second):
            first, second = (
                one if isinstance(one, Tensor) else torch.stack([one[expert] for expert in range(len(one))])
                for one in (first, second)
            )
        for one in (first, second):
            if not isinstance(one, Tensor):
                self._count(one)
        return first, second

    def _expert_matrices(self, groups: list[list[str]], *, may_pack: bool) -> Stack:
        """Load groups of matrices of the same shapes, each group one below the other: [groups, rows, columns].

        Matrices that are all in MXFP4, or all in another format that the kernels know, stay packed. `--quantize`
        applies to matrices of 16 or 32 bits.
        """
        groups = [[f"{name}.weight" for name in group] for group in groups]
        names = [name for group in groups for name in group]
        packed: Stack | None = None
        if all(self._checkpoint.tensors[name].type is TensorType.MXFP4 for name in names):
            packed = self._mxfp4(groups)
        elif may_pack:
            packed = self._packed(groups) or self._quantized_experts(groups)
        if packed is not None:
            return packed
        whole = self._stack(names)
        return whole.view(len(groups), -1, whole.shape[-1])

    def _stack_shape(self, groups: list[list[str]]) -> tuple[int, int, int]:
        shapes = [self._checkpoint.tensors[name].shape for name in groups[0]]
        return len(groups), sum(shape[0] for shape in shapes), shapes[0][1]

    def _packed(self, groups: list[list[str]]) -> PackedStack | None:
        """Load matrices that are packed in the file, or return None if they have no common format with kernels."""
        stack: PackedStack | None = None
        for expert, first, name in self._places(groups):
            if (matrix := self._checkpoint.read_packed(name)) is None:
                return None
            format = stack_format(matrix)
            is_other = format and stack and stack.format.without_zeros != format.without_zeros
            if format is None or is_other or not self._packed_linear.holds(format):
                self._log_decoded(f"experts in {matrix.type} in groups of {matrix.group}")
                return None
            if stack is None:
                stack = PackedStack.empty(*self._stack_shape(groups), format, self._dtype, self.device)
            stack.set_rows(expert, first, matrix)
            self._report(self._checkpoint.tensors[name].num_bytes)
        return stack

    def _places(self, groups: list[list[str]]) -> Iterator[tuple[int, int, str]]:
        """Yield the number of the group of each tensor, its first row in the group, and its name."""
        for number, group in enumerate(groups):
            first = 0
            for name in group:
                yield number, first, name
                first += self._checkpoint.tensors[name].shape[0]

    def _check_held(self, format: PackedFormat) -> None:
        if not self._packed_linear.holds(format):
            raise InvalidRequest("quantize = 8: this GPU has no instructions for FP8; quantize = 4 needs none")

    def _quantized_experts(self, groups: list[list[str]]) -> PackedStack | None:
        """Load matrices and quantise those of one expert at a time; None: without `--quantize`, or nothing fits."""
        shape = self._stack_shape(groups)
        is_plain = all(self._checkpoint.tensors[name].type in _NATIVE for name in groups[0])
        if self._quantized is None or not is_plain or (format := fitting_format(self._quantized, shape[2])) is None:
            return None
        self._check_held(format)
        stack = PackedStack.empty(*shape, format, self._dtype, self.device)
        if isinstance(self._checkpoint, DummyCheckpoint):
            stack.whole.invent(self._random, DUMMY_STD)
            self._report(sum(self._checkpoint.tensors[name].num_bytes for group in groups for name in group))
            return stack
        for expert, group in enumerate(groups):
            stack.quantize(expert, self._stack(group))
        return stack

    def biases(self, groups: list[list[str]]) -> Tensor:
        """Load the biases of groups of matrices: [groups, rows]."""
        return self._stack([f"{name}.bias" for group in groups for name in group]).view(len(groups), -1)

    def _mxfp4(self, groups: list[list[str]]) -> Mxfp4Stack | None:
        """Load matrices in MXFP4, or return None if their exponents are too large to compute with."""
        stack = Mxfp4Stack.empty(*self._stack_shape(groups), self._dtype, self.device)
        if isinstance(self._checkpoint, DummyCheckpoint):
            stack.whole.invent(self._random, DUMMY_STD)
        else:
            for expert, first, name in self._places(groups):
                stack.set_rows(expert, first, self._checkpoint.read(name))
        if int(stack.whole.scales.max()) > MAX_EXPONENT:
            return None
        self._report(sum(self._checkpoint.tensors[name].num_bytes for group in groups for name in group))
        return stack

    def norm(self, name: str) -> Tensor:
        """Load in fp32 whatever the model's dtype: Gemma's norms are 1 + w, and in bf16 the 1 would absorb w."""
        return self.vector(name).add_(norm_offset(self.spec, name))

    def vector(self, name: str) -> Tensor:
        return self._stack([name], NORM_DTYPE)

    def _stack(self, names: list[str], dtype: torch.dtype | None = None) -> Tensor:
        shapes = [self._checkpoint.tensors[name].shape for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        out = torch.empty((num_rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self.device)
        for (_, first, name), shape in zip(self._places([names]), shapes, strict=True):
            if (packed := self._checkpoint.read_packed(name)) is not None:  # a matrix that has no packed product
                out[first : first + shape[0]].copy_(decoded(packed))
            elif not isinstance(self._checkpoint, DummyCheckpoint):
                out[first : first + shape[0]].copy_(_to_tensor(self._checkpoint.read(name)))
            self._report(self._checkpoint.tensors[name].num_bytes)
        if isinstance(self._checkpoint, DummyCheckpoint):
            self._invent(out, names[0])
        return out

    def _invent(self, out: Tensor, name: str) -> None:
        if is_norm(name):
            out.fill_(1 - norm_offset(self.spec, name))
        elif name.endswith(_FACTORS):
            out.fill_(DUMMY_FACTOR)
        else:
            out.normal_(0, DUMMY_STD, generator=self._random)  # on the device, which makes 8 billion numbers per second

    def _report(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        if self._progress is not None:
            self._progress(min(self._num_done, self._num_bytes), self._num_bytes)  # some tensors are read twice


def is_quantized(name: str) -> bool:
    """Return whether `--quantize` applies to a matrix, named without `.weight`."""
    return name.rsplit(".", 1)[-1] not in NOT_QUANTIZED


def packed_format(checkpoint: Checkpoint, quantize_bits: int | None) -> PackedFormat | None:
    """Return the format of a model's packed matrices, or None. It is that of one of them, and may not be all's."""
    if quantize_bits is not None:
        return QUANTIZED[quantize_bits]
    for name in expected_tensors(checkpoint.spec):
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in PROBED:
            matrix = checkpoint.read_packed(name)
            return None if matrix is None else format_of([matrix])
    return None


ExpertFormats = tuple[PackedFormat, PackedFormat]  # of gates and ups, and of downs


def expert_formats(checkpoint: Checkpoint, quantize_bits: int | None) -> tuple[ExpertFormats, ...]:
    """Return the different formats of a model's packed experts. They are those of the first expert of a layer.

    Layers may differ: Q4_K_M files store some down projections in Q6_K. One layer is read for each pair of types.
    """
    found: dict[tuple[object, ...], tuple[PackedFormat | None, ...]] = {}
    for i, layer in enumerate(checkpoint.spec.layers):
        if layer.experts is not None and has_expert_kernels(layer.experts):
            names = [f"layers.{i}.experts.0.{name}.weight" for name in ("gate_proj", "down_proj")]
            kind = (layer.experts, *(checkpoint.tensors[name].type for name in names))
            if kind not in found:
                found[kind] = tuple(_stack_format(checkpoint, name, quantize_bits) for name in names)
    pairs = ((gate_up, down) for gate_up, down in found.values() if gate_up is not None and down is not None)
    return tuple(dict.fromkeys(pair for pair in pairs if have_common_kernels(*pair)))


def _stack_format(checkpoint: Checkpoint, name: str, quantize_bits: int | None) -> PackedFormat | None:
    """Return the format in memory of a matrix of an expert; None: it is not packed."""
    if (matrix := checkpoint.read_packed(name)) is not None:
        return stack_format(matrix)
    num_inputs = checkpoint.tensors[name].shape[1]
    return None if quantize_bits is None else fitting_format(QUANTIZED[quantize_bits], num_inputs)


def has_expert_kernels(spec: ExpertsSpec) -> bool:
    """Return whether the kernels compute these experts. Others use the plain version, which is slow if packed."""
    return not spec.has_sigmoid


def _have_common_kernels(gate_up: Stack, down: Stack) -> bool:
    if isinstance(gate_up, ExpertStack) and isinstance(down, ExpertStack):
        return have_common_kernels(gate_up.format, down.format)
    return type(gate_up) is type(down)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory that a model's weights take in `dtype`."""
    return sum(
        math.prod(shape) * (NORM_DTYPE if is_norm(name) or name.endswith(IN_FP32) else dtype).itemsize
        for name, shape in expected_tensors(spec).items()
    )


def _to_tensor(raw: RawTensor) -> Tensor:
    dtype = _NATIVE.get(raw.info.type)
    if dtype is None:
        return torch.from_numpy(to_float32(raw))
    # Copied out of the mapped file first: torch accepts no read-only memory. This copy is the extra tensor of the peak.
    return torch.from_numpy(raw.data.copy()).view(-1).view(dtype).view(raw.info.shape)
