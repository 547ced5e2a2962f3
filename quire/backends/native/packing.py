"""Packs a checkpoint's weights into 4 and 8 bits, in the layout of csrc/pack.c.

Types whose groups of 32 are a scale and small numbers keep their codes: Q4_0, Q4_1, Q4_K, TQ1_0, TQ2_0 and MXFP4 in 4
bits, Q8_0, Q5_0, IQ4_NL and IQ4_XS in 8 bits. So do 4-bit matrices of safetensors (`int4_blocks`). All others are
rounded to 8 bits in groups of 32: they have groups of 16 (Q2_K, Q3_K, Q6_K), 5 bits and a minimum (Q5_1, Q5_K), other
codebooks, or columns in another order. Routers stay in fp32: rounded scores would choose other experts. Matrices are
packed in parallel: the library releases the interpreter lock.

4-bit matrices of safetensors (AWQ, GPTQ, compressed-tensors) become blocks of Q4_0 and Q4_1, which csrc/pack.c reads.
The codes are those of the file. Scales are rounded to fp16, which files have already, or bf16, whose numbers fp16 holds
down to 6.1e-5. The minimum of a group, -zero * scale, is rounded to fp16 too: that changes a weight by at most 2 ** -11
of the minimum, less than 1 % of the distance between two codes.

Packed experts are in one block of memory, or in a mapped file if the model is too large for the machine's memory. Of a
file's pages, the operating system keeps those in memory that were used last, and reads the others again when they are
needed: such a model becomes slow, but runs.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.backends.base import Progress
from quire.backends.machine import available_bytes
from quire.backends.native.library import GROUP, Bytes, Expert, Floats, Layer, Linear, Matrix, load_library
from quire.errors import InvalidRequest, UnsupportedModel
from quire.sizes import compared_sizes, memory_size
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorType
from quire.weights.hub import cache_dir
from quire.weights.opening import DummyCheckpoint
from quire.weights.packed import INT4_ZERO, CodeType, PackedMatrix, unpack_pairs
from quire.weights.quants import to_float32
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    Mixer,
    MlpSpec,
    ShortConvSpec,
)
from quire.weights.tensors import check_tensors, expected_tensors, is_norm, norm_offset

MAX_ZERO = 16
MAX_HALF = 65504.0  # of fp16


class Blocks(NamedTuple):
    type: TensorType
    data: Bytes  # [O, bytes of a row]


def find_block_type(matrix: PackedMatrix) -> TensorType | None:
    """Return the type whose blocks hold a matrix, or None if no type does.

    Columns must be in the order of the inputs, which they are not in GPTQ files with act-order, in whole groups.
    """
    rows, columns = matrix.group
    is_whole = matrix.shape[1] % GROUP == 0 and (columns % GROUP == 0 or columns >= matrix.shape[1])
    if matrix.type is not CodeType.INT4 or matrix.order is not None or not is_whole or rows < 1:
        return None
    if not np.abs(matrix.scales).max(initial=0) < MAX_HALF / MAX_ZERO:  # also if a scale is NaN
        return None
    return TensorType.Q4_0 if matrix.zeros is None else TensorType.Q4_1


def to_blocks(matrix: PackedMatrix, kind: TensorType) -> Blocks:
    """Return a matrix in blocks of `find_block_type`, or of Q4_1, which holds those of Q4_0 as well."""
    num_rows, num_columns = matrix.shape
    num_groups = num_columns // GROUP
    codes = unpack_pairs(matrix.codes).reshape(num_rows, num_groups, 2, GROUP // 2)
    scales = _by_block(matrix, matrix.scales)
    parts = [_half_bytes(scales)]
    if kind is TensorType.Q4_1:
        zeros = np.float32(INT4_ZERO) if matrix.zeros is None else _by_block(matrix, matrix.zeros)
        parts.append(_half_bytes(-zeros * scales))
    parts.append(codes[:, :, 0] | codes[:, :, 1] << np.uint8(4))
    return Blocks(kind, np.concatenate(parts, axis=2).reshape(num_rows, -1))


def _by_block(matrix: PackedMatrix, values: np.ndarray) -> np.ndarray:
    """Return values of groups [rows of groups, G] as values of blocks [O, I / 32]."""
    num_rows, num_columns = matrix.shape
    rows, columns = matrix.group
    spread = np.repeat(values, rows, axis=0)[:num_rows]
    if columns >= num_columns:
        return np.repeat(spread, num_columns // GROUP, axis=1)
    return np.repeat(spread, columns // GROUP, axis=1)[:, : num_columns // GROUP]


def _half_bytes(values: np.ndarray) -> Bytes:
    return values.astype("<f2")[:, :, None].view(np.uint8)


MEMORY_SHARE = 0.8  # of the available memory: packed weights that need more have their experts in a file
ALIGNMENT = 64

log = logging.getLogger(__name__)


class ExpertMemory:
    """Memory by tensor name, in the order of the names: the matrices of an expert are next to each other."""

    def __init__(self, sizes: Mapping[str, int], *, other_bytes: int) -> None:
        """Reserve memory. `other_bytes` are needed for the other weights."""
        self._places: dict[str, slice] = {}
        num_bytes = 0
        for name, size in sizes.items():
            self._places[name] = slice(num_bytes, num_bytes + size)
            num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        available = available_bytes()
        self.is_file = bool(sizes) and num_bytes + other_bytes > MEMORY_SHARE * available
        if not self.is_file:
            self._whole: Bytes = np.empty(num_bytes, np.uint8)
            return
        needed, free = compared_sizes(num_bytes + other_bytes, available)
        log.warning(
            "the weights take %s and %s of memory are free: the %s of experts are mapped from a file in %s."
            " Steps wait for the disk whenever they need experts that are not in memory",
            needed,
            free,
            memory_size(num_bytes),
            cache_dir(),
        )
        self._whole = map_new_file(cache_dir(), num_bytes)

    def __getitem__(self, name: str) -> Bytes:
        return self._whole[self._places[name]]


def map_new_file(folder: Path, num_bytes: int) -> Bytes:
    """Map a new file without a name: its space on the disk is freed when the array is, or when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        needed, left = compared_sizes(num_bytes, free)
        raise InvalidRequest(
            f"the model is larger than the memory: its experts need a file of {needed}, and the disk of {folder} has"
            f" {left} left. Free some space, or set QUIRE_CACHE to a folder on another disk"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # without reserved space, a full disk would kill the process
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


DUMMY_STD = 0.02
DUMMY_KIND = 1  # of random matrices: 8 bits, see csrc/quire.h
CODE_STD = 73.9  # of bytes that are all equally frequent
FACTORS = ("expert_scales.weight", "output_scale.weight")
VECTORS = (  # of a layer, or of some layers
    *("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm", "q_norm", "k_norm", "sinks"),
    *("post_dense_norm", "post_experts_norm", "experts_norm", "ple_norm"),
)

UNPACKED = ("router.weight", "shared_gate.weight", "conv.weight")  # matrices that stay in fp32
ROUTER_VECTORS = {"router_bias": "router.bias", "choice_bias": "expert_bias", "expert_scales": "expert_scales.weight"}
ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 3}  # as in csrc/quire.h
DELTA_NET, SHORT_CONV = 1, 2  # the same, of mixers

# Types that C reads from the file's bytes, numbered as in csrc/quire.h. Other types are decoded to F32 first.
SOURCES = {
    TensorType.Q4_0: 0,
    TensorType.Q4_1: 1,
    TensorType.Q4_K: 2,
    TensorType.Q8_0: 3,
    TensorType.F32: 4,
    TensorType.F16: 5,
    TensorType.BF16: 6,
    TensorType.Q5_0: 7,
    TensorType.Q5_1: 8,
    TensorType.Q2_K: 9,
    TensorType.Q3_K: 10,
    TensorType.Q5_K: 11,
    TensorType.Q6_K: 12,
    TensorType.IQ4_NL: 13,
    TensorType.IQ4_XS: 14,
    TensorType.MXFP4: 15,
    TensorType.TQ1_0: 16,
    TensorType.TQ2_0: 17,
}


@dataclass
class PackedModel:
    """Structures for C, and the arrays they point into, which have the same lifetime."""

    layers: list[Layer]
    norm: Floats
    embedding: Linear
    head: Linear
    arrays: list[Bytes | Floats] = field(default_factory=list)
    has_experts_on_disk: bool = False
    ple_embedding: Linear = field(default_factory=Linear)
    ple_proj: Linear = field(default_factory=Linear)
    ple_norm: Floats | None = None

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack_model(checkpoint: Checkpoint, num_threads: int, progress: Progress | None = None) -> PackedModel:
    check_tensors(checkpoint)
    packer = _Packer(checkpoint, progress)
    spec = checkpoint.spec
    with ThreadPoolExecutor(num_threads) as pool:
        packer.start(pool)
    embedding = packer.linear("", ["embedding"])
    head = embedding if spec.is_tied else packer.linear("", ["head"])
    layers = [_layer(packer, layer, index) for index, layer in enumerate(spec.layers)]
    arrays = list(packer.arrays.values())
    packed = PackedModel(layers, packer.floats("norm.weight"), embedding, head, arrays, packer.experts.is_file)
    if spec.ple_size:
        packed.ple_embedding = packer.linear("", ["ple_embedding"])
        packed.ple_proj = packer.linear("", ["ple_model_proj"])
        packed.ple_norm = packer.floats("ple_model_norm.weight")
    return packed


def _layer(packer: _Packer, spec: LayerSpec, index: int) -> Layer:
    prefix = f"layers.{index}."
    layer = Layer(activation=ACTIVATIONS[spec.mlp.activation])
    _add_mixer(layer, packer, spec.mixer, prefix)
    if spec.experts is not None:
        _add_experts(layer, packer, spec.experts, prefix)
    if isinstance(spec.mlp, MlpSpec):
        layer.gate_up, layer.down = _mlp(packer, prefix)
    if spec.ple_size:
        layer.ple_gate, layer.ple_proj = packer.linear(prefix, ["ple_gate"]), packer.linear(prefix, ["ple_proj"])
    for name in VECTORS:
        if f"{prefix}{name}.weight" in packer.arrays:
            setattr(layer, name, packer.floats(f"{prefix}{name}.weight").ctypes.data)
    layer.output_scale = float(packer.floats(f"{prefix}output_scale.weight")[0]) if spec.has_output_scale else 1.0
    return layer


def _add_mixer(layer: Layer, packer: _Packer, mixer: Mixer, prefix: str) -> None:
    inputs, output = ["in_proj"], "out_proj"
    if isinstance(mixer, AttentionSpec):
        inputs, output = _attention_inputs(mixer), "o_proj"
    elif isinstance(mixer, DeltaNetSpec):
        inputs = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    layer.qkv, layer.o = packer.linear(prefix, inputs), packer.linear(prefix, [output])
    if not isinstance(mixer, AttentionSpec):
        _add_recurrence(layer, packer, mixer, prefix)


def _attention_inputs(attention: AttentionSpec) -> list[str]:
    names = ["q_proj"]
    if attention.shared_with is None:
        names += ["k_proj"] if attention.is_key_value else ["k_proj", "v_proj"]
    return [*names, "q_gate"] if attention.has_gate else names


def _add_recurrence(layer: Layer, packer: _Packer, mixer: DeltaNetSpec | ShortConvSpec, prefix: str) -> None:
    net = layer.recurrence
    weight = packer.derive(f"{prefix}conv.weight", np.transpose)
    net.weight, (net.num_taps, net.num_channels) = weight.ctypes.data, weight.shape
    if f"{prefix}conv.bias" in packer.arrays:
        net.bias = packer.floats(f"{prefix}conv.bias").ctypes.data
    layer.mixer = SHORT_CONV
    if isinstance(mixer, DeltaNetSpec):
        layer.mixer, net.is_tiled = DELTA_NET, mixer.is_tiled
        net.num_key_heads, net.num_value_heads = mixer.num_key_heads, mixer.num_value_heads
        net.key_size, net.value_size = mixer.key_head_size, mixer.value_head_size
        net.decays = packer.derive(f"{prefix}a_log", lambda log: -np.exp(log)).ctypes.data
        net.dt_bias = packer.floats(f"{prefix}dt_bias").ctypes.data
        net.norm = packer.floats(f"{prefix}gated_norm.weight").ctypes.data


def _mlp(packer: _Packer, prefix: str) -> tuple[Linear, Linear]:
    return packer.linear(prefix, ["gate_proj", "up_proj"]), packer.linear(prefix, ["down_proj"])


def _add_experts(layer: Layer, packer: _Packer, spec: ExpertsSpec, prefix: str) -> None:
    experts = [Expert(*_mlp(packer, f"{prefix}experts.{number}.")) for number in range(spec.num_experts)]
    layer.experts = ctypes.cast((Expert * spec.num_experts)(*experts), ctypes.POINTER(Expert))
    layer.router = packer.floats(f"{prefix}router.weight").ctypes.data
    layer.num_experts, layer.num_chosen = spec.num_experts, spec.num_chosen
    layer.renormalizes, layer.experts_scale, layer.has_sigmoid = spec.renormalizes, spec.scale, spec.has_sigmoid
    if spec.has_router_norm:
        scale = np.float32(packer.hidden_size**-0.5)
        layer.router_norm = packer.derive(f"{prefix}router_norm.weight", lambda weight: weight * scale).ctypes.data
    for target, name in ROUTER_VECTORS.items():
        if (whole := f"{prefix}{name}") in packer.arrays:
            setattr(layer, target, packer.floats(whole).ctypes.data)
    if spec.shared_size:
        layer.shared = Expert(*_mlp(packer, f"{prefix}shared."))
        layer.shared_gate = packer.floats(f"{prefix}shared_gate.weight").ctypes.data


class _Packer:
    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self.arrays: dict[str, Bytes | Floats] = {}
        self.hidden_size = checkpoint.spec.hidden_size
        self._checkpoint = checkpoint
        self._progress = progress
        self._kinds: dict[str, int] = {}
        self._int4_types: dict[str, TensorType] = {}  # by the kind of matrix: q_proj
        self._lock = threading.Lock()
        self._num_done = 0
        expected = expected_tensors(checkpoint.spec)
        self._num_bytes = sum(checkpoint.tensors[name].num_bytes for name in expected)
        sizes = {name: self._packed_bytes(name) for name, shape in expected.items() if is_packed(name, shape)}
        experts = {name: size for name, size in sizes.items() if ".experts." in name}
        self.experts = ExpertMemory(experts, other_bytes=sum(sizes.values()) - sum(experts.values()))

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Pack all tensors."""
        names = expected_tensors(self._checkpoint.spec)
        for future in [pool.submit(self._take, name) for name in names]:
            future.result()

    def linear(self, prefix: str, names: list[str]) -> Linear:
        """Return matrices with the same input, one below the other, with their biases if they have any."""
        linear = Linear(num_parts=len(names))
        for place, name in enumerate(names):
            weight = f"{prefix}{name}.weight"
            rows, cols = self._checkpoint.tensors[weight].shape
            linear.parts[place] = Matrix(self.arrays[weight].ctypes.data, self._kinds[weight], rows, cols)
        biases = [self.arrays[bias] for name in names if (bias := f"{prefix}{name}.bias") in self.arrays]
        if biases:
            whole = self.arrays[f"{prefix}{names[0]}.bias of all"] = np.concatenate(biases).astype(np.float32)
            linear.bias = whole.ctypes.data
        return linear

    def derive(self, name: str, function: Callable[[Floats], Floats]) -> Floats:
        """Return floats computed from those of a tensor, and keep them instead."""
        array: Floats = np.ascontiguousarray(function(self.floats(name)), np.float32)
        self.arrays[name] = array
        return array

    def floats(self, name: str) -> Floats:
        array = self.arrays[name]
        assert array.dtype == np.float32
        return array.view(np.float32)

    def _take(self, name: str) -> None:
        info = self._checkpoint.tensors[name]
        if is_packed(name, info.shape):
            array: Bytes | Floats = self._matrix(name)
        else:
            offset = norm_offset(self._checkpoint.spec, name) if is_norm(name) else 0.0
            array = self._floats(name) + np.float32(offset)
        with self._lock:
            self.arrays[name] = array
            self._num_done += info.num_bytes
            if self._progress is not None:
                self._progress(self._num_done, self._num_bytes)

    def _floats(self, name: str) -> Floats:
        if isinstance(self._checkpoint, DummyCheckpoint):
            shape, spec = self._checkpoint.tensors[name].shape, self._checkpoint.spec
            if name.endswith(UNPACKED):
                return _random(name).standard_normal(shape, np.float32) * np.float32(DUMMY_STD)
            value = 1 - norm_offset(spec, name) if is_norm(name) else float(name.endswith(FACTORS))
            return np.full(shape, value, np.float32)
        floats = to_float32(self._checkpoint.read(name))
        return floats.reshape(self._checkpoint.tensors[name].shape)

    def _packed_bytes(self, name: str) -> int:
        """Return the size of a matrix. For 4-bit safetensors it is an estimate: `_blocks` decides."""
        info = self._checkpoint.tensors[name]
        if isinstance(self._checkpoint, DummyCheckpoint):
            self._kinds[name] = DUMMY_KIND
        else:
            self._kinds[name] = _kind_of(self._int4_type(name) if info.type is TensorType.INT4 else info.type)
        return self._num_packed(name)

    def _num_packed(self, name: str) -> int:
        return int(load_library().quire_packed_bytes(self._kinds[name], *self._checkpoint.tensors[name].shape))

    def _int4_type(self, name: str) -> TensorType:
        """Return the type of blocks of the first matrix of this kind. Only reading one shows the order of its columns.

        All experts have one type, because their memory is allocated before they are read.
        """
        role = name.removesuffix(".weight").rsplit(".", 1)[-1]
        key = f"experts.{role}" if ".experts." in name else role
        if key not in self._int4_types:
            matrix = self._checkpoint.read_packed(name)
            found = None if matrix is None else find_block_type(matrix)
            is_expert = found is not None and ".experts." in name
            self._int4_types[key] = TensorType.Q4_1 if is_expert else found or TensorType.F32
        return self._int4_types[key]

    def _matrix(self, name: str) -> Bytes:
        rows, cols = self._checkpoint.tensors[name].shape
        is_expert = ".experts." in name
        if isinstance(self._checkpoint, DummyCheckpoint):
            out: Bytes = self.experts[name] if is_expert else np.empty(self._num_packed(name), np.uint8)
            _fill_random(name, out)
            return out
        kind, data = self._blocks(name)
        self._kinds[name] = _kind_of(kind)
        out = self.experts[name] if is_expert else np.empty(self._num_packed(name), np.uint8)
        load_library().quire_pack(SOURCES[kind], data.ctypes.data, rows, cols, out.ctypes.data)
        return out

    def _blocks(self, name: str) -> tuple[TensorType, Bytes | Floats]:
        """Return a matrix as C reads it."""
        if self._checkpoint.tensors[name].type is TensorType.INT4:
            matrix = self._checkpoint.read_packed(name)
            kind = None if matrix is None else find_block_type(matrix)
            if ".experts." in name:
                expected = self._int4_type(name)
                if (kind is None) != (expected is TensorType.F32):
                    raise UnsupportedModel(
                        f"{self._checkpoint.path}: tensor {name} has another order of columns or other groups than the"
                        " same matrix of the first expert"
                    )
                kind = None if kind is None else expected
            if matrix is not None and kind is not None:
                return to_blocks(matrix, kind)
        raw: RawTensor = self._checkpoint.read(name)
        if raw.info.type in SOURCES:
            return raw.info.type, np.ascontiguousarray(raw.data)
        return TensorType.F32, to_float32(raw)


def _kind_of(kind: TensorType) -> int:
    return int(load_library().quire_source_kind(SOURCES.get(kind, SOURCES[TensorType.F32])))


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith(UNPACKED)


def _random(name: str) -> np.random.Generator:
    """Return a generator for one tensor: the same in every run, and another for every tensor."""
    return np.random.default_rng(list(name.encode()))


def _fill_random(name: str, out: Bytes) -> None:
    """Write random codes with one scale. Rounding random numbers instead would take minutes for many experts."""
    out.view(np.uint64)[:] = _random(name).integers(0, 1 << 64, out.nbytes // 8, np.uint64)
    groups = out.reshape(-1, 8 * (GROUP + 2))  # of 8 rows: codes, then scales
    groups[:, 8 * GROUP :].view(np.float16)[:] = DUMMY_STD / CODE_STD
