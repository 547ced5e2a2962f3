"""Writes a quantised copy of a folder of safetensors, in the layout of compressed-tensors (`quire quantize`).

One tensor is in memory at a time. The copy is written into a temporary folder, which is renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvalidRequest, ModelFileError
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.config import DTYPES
from quire.weights.fields import member
from quire.weights.packed import CodeType, PackedMatrix, floats, fp8_values, pack_pairs
from quire.weights.quantization import FORMATS, GROUP_SIZES, WeightScheme
from quire.weights.quants import to_float32
from quire.weights.safetensors import INDEX, SafetensorsCheckpoint
from quire.weights.spec import DeltaNetSpec
from quire.weights.tensors import transformers_targets

# O outputs, I inputs, G groups in a row

Progress = Callable[[int, int], None]  # bytes done, bytes of all

_COPIED = ("*.json", "*.jinja", "*.txt", "*.md", "*.model", "LICENSE*")
# The last part of quire's names of the matrices that are quantised.
_QUANTIZED = (
    "q_proj", "k_proj", "v_proj", "q_gate", "o_proj", "gate_proj", "up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj", "out_proj",
)  # fmt: skip
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", re.ASCII)


class Report(NamedTuple):
    num_matrices: int  # quantised
    num_bytes: int  # of all weights written
    num_source_bytes: int


def quantize_folder(source: Path, target: Path, name: str, group_size: int, progress: Progress | None = None) -> Report:
    """Write a quantised copy of `source` to `target`, which must not exist."""
    if target.exists() or target.is_symlink():
        raise InvalidRequest(f"{target}: exists already; quire does not overwrite it")
    if name not in FORMATS:
        raise InvalidRequest(f"--format {name}: not one of {', '.join(FORMATS)}")
    if group_size not in GROUP_SIZES:
        raise InvalidRequest(f"--group-size {group_size}: not one of {', '.join(map(str, GROUP_SIZES))}")
    checkpoint = _open(source)
    try:
        scheme = FORMATS[name]
        writer = _Writer(checkpoint, scheme if scheme.is_float else scheme._replace(group=(1, group_size)), progress)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            report = writer.write(folder)
            folder.chmod(0o755)
            folder.rename(target)  # fails if a folder with files has appeared there
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return report
    finally:
        checkpoint.close()


def _open(source: Path) -> SafetensorsCheckpoint:
    if not (source / "config.json").is_file():
        raise InvalidRequest(
            f"{source}: is not a folder with config.json and safetensors; other files, such as GGUF, lack the tensor "
            "names that the copy needs: use the original model"
        )
    checkpoint = SafetensorsCheckpoint(source)
    spec = checkpoint.spec
    problem = spec.unsupported
    if not problem and spec.quantization not in DTYPES:
        problem = f"{source}: its weights are quantised already, to {spec.quantization}: use the original model"
    if problem:
        checkpoint.close()
        raise InvalidRequest(problem)
    return checkpoint


class _Part(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]


class _Matrix(NamedTuple):
    """Rows of a tensor of the source that become one quantised matrix."""

    module: str  # name of the matrix without .weight
    first_row: int  # counted through a stack
    shape: tuple[int, int]


class _Writer:
    def __init__(self, checkpoint: SafetensorsCheckpoint, scheme: WeightScheme, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._progress = progress
        self._files = checkpoint.file_tensors()
        infos = {info.name: info for infos in self._files.values() for info in infos}
        self._num_source_bytes = sum(info.num_bytes for info in infos.values())
        self._matrices = self._choose(infos)
        self._num_done = 0
        self._num_written = 0

    def write(self, folder: Path) -> Report:
        weight_map = {name: file for file in self._files for name in self._write_file(folder / file)}
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self._num_written}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2))
        self._copy_files(folder)
        num_matrices = sum(map(len, self._matrices.values()))
        return Report(num_matrices, self._num_written, self._num_source_bytes)

    def _write_file(self, path: Path) -> list[str]:
        """Write the tensors of one file and return their names. The header is written last, into room left for it."""
        infos = self._files[path.name]
        named = [one.module for info in infos for one in self._matrices.get(info.name, ())]
        named += [info.name for info in infos]
        room = sum(_MAX_PARTS * (len(json.dumps(name)) + _ENTRY_BYTES) for name in named) // 8 * 8
        header: dict[str, Any] = {}
        with path.open("wb") as stream:
            start = stream.seek(8 + room)
            for info in infos:
                for part in self._parts(info):
                    at = stream.tell() - start
                    stream.write(np.ascontiguousarray(part.data).data)
                    offsets = [at, stream.tell() - start]
                    header[part.name] = {"dtype": str(part.dtype), "shape": list(part.shape), "data_offsets": offsets}
                self._num_done += info.num_bytes
                if self._progress is not None:
                    self._progress(self._num_done, self._num_source_bytes)
            self._num_written += stream.tell() - start
            stream.seek(0)
            data = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
            stream.write(struct.pack("<Q", room) + data.ljust(room))
        return list(header)

    # Which tensors

    def _choose(self, infos: Mapping[str, TensorInfo]) -> dict[str, list[_Matrix]]:
        """Return the matrices that each tensor of the source becomes. Tensors that are not here are copied."""
        family = self._checkpoint.family
        assert family is not None
        targets = transformers_targets(infos, family, self._checkpoint.architecture)
        chosen: dict[str, list[_Matrix]] = {}
        for name, target in targets.items():
            ends = [own.removesuffix(".weight").rpartition(".")[2] for own in target.names]
            info = infos[name]
            is_matrix = all(own.endswith(".weight") for own in target.names) and set(ends) <= {*_QUANTIZED}
            if not is_matrix or (self._scheme.bits == 4 and self._is_state_output(target.names[0])):
                continue
            if matrices := _split(info, is_stack=target.is_stack):
                chosen[name] = matrices
        if not chosen:
            raise InvalidRequest(f"{self._checkpoint.path}: holds no matrix that can be quantised")
        self._check_groups(chosen)
        return chosen

    def _is_state_output(self, name: str) -> bool:
        """Return whether a matrix follows the state of a delta net. Published results with 4 bits for it are poor."""
        parts = name.split(".")
        spec = self._checkpoint.spec
        is_delta_net = parts[1].isdecimal() and isinstance(spec.layers[int(parts[1])].mixer, DeltaNetSpec)
        return is_delta_net and parts[2] == "out_proj"

    def _check_groups(self, chosen: Mapping[str, list[_Matrix]]) -> None:
        if self._scheme.is_float:
            return
        group_size = self._scheme.group[1]
        widths = {matrix.shape[1] for matrices in chosen.values() for matrix in matrices}
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        if group_size not in fitting:
            width = next(width for width in sorted(widths) if width % group_size)
            can = f"use {' or '.join(map(str, fitting))}" if fitting else "no group size does: use an FP8 format"
            raise InvalidRequest(
                f"--group-size {group_size} does not divide the {width} inputs of some matrices: {can}"
            )

    # What is written

    def _parts(self, info: TensorInfo) -> Iterator[_Part]:
        """The tensors that a tensor of the source becomes."""
        data = self._checkpoint.read_file_tensor(info.name)
        if info.name not in self._matrices:
            yield _Part(info.name, info.type, info.shape, data)
        for one in self._matrices.get(info.name, ()):
            row_bytes = len(data) // math.prod(info.shape[:-1])
            rows = data[one.first_row * row_bytes : (one.first_row + one.shape[0]) * row_bytes]
            raw = RawTensor(TensorInfo(info.name, info.type, one.shape, len(rows)), rows)
            for ending, dtype, values in self._encode(info, to_float32(raw)):
                yield _Part(f"{one.module}.{ending}", dtype, values.shape, values)

    def _encode(self, info: TensorInfo, weights: NDArray[np.float32]) -> Iterator[tuple[str, str, NDArray[Any]]]:
        """Yield the tensors of a quantised matrix: ending, type and values."""
        if not np.isfinite(weights).all():
            raise ModelFileError(f"{self._checkpoint.path}: tensor {info.name} has weights that are not finite")
        scheme = self._scheme
        scale_type = "F32" if scheme.group[0] > 1 else info.type
        matrix = _round(weights, scheme, lambda scales: floats(_encoded(scales, scale_type).view(np.uint8), scale_type))
        if scheme.is_float:
            yield "weight", "F8_E4M3", matrix.codes
        else:
            yield (
                "weight_packed",
                "I32",
                (matrix.codes ^ np.uint8(128) if scheme.bits == 8 else matrix.codes).view("<i4"),
            )
            yield "weight_shape", "I64", np.array(weights.shape, "<i8")
        yield "weight_scale", scale_type, _encoded(matrix.scales, scale_type)
        if matrix.zeros is not None:
            yield "weight_zero_point", "I32", _pack_rows(matrix.zeros.astype(np.uint8))

    # Other files

    def _copy_files(self, folder: Path) -> None:
        source = self._checkpoint.path
        names = {path.name for pattern in _COPIED for path in source.glob(pattern)} - {"config.json", INDEX}
        for name in sorted(names):
            if (source / name).is_file():
                shutil.copyfile(member(source, name), folder / name)
        config = {**self._checkpoint.config, "quantization_config": self._quantization_config()}
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    def _quantization_config(self) -> dict[str, Any]:
        scheme = self._scheme
        is_block = scheme.group[0] > 1
        weights: dict[str, Any] = {
            "num_bits": scheme.bits,
            "type": "float" if scheme.is_float else "int",
            "symmetric": scheme.is_symmetric,
            "dynamic": False,
            "strategy": "block" if is_block else "channel" if scheme.is_float else "group",
            "group_size": None if scheme.is_float else scheme.group[1],
            "block_structure": list(scheme.group) if is_block else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if scheme.is_float else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": self._ignored(),
            "kv_cache_scheme": None,
        }

    def _ignored(self) -> list[str]:
        """Return the modules with a matrix that is not quantised. Readers of the config need them by name."""
        kept = [
            info.name.removesuffix(".weight")
            for infos in self._files.values()
            for info in infos
            if len(info.shape) == 2 and info.name.endswith(".weight") and info.name not in self._matrices
        ]
        return sorted({*(name for name in kept if "embed_tokens" not in name), "lm_head"})


def _split(info: TensorInfo, *, is_stack: bool) -> list[_Matrix]:
    """Return the matrices of a tensor. A stack becomes a matrix per expert, under the names that files of FP8 use."""
    if not is_stack:
        module = info.name.removesuffix(".weight")
        return [_Matrix(module, 0, (info.shape[0], info.shape[1]))] if len(info.shape) == 2 else []
    stack = _STACK.fullmatch(info.name)
    if stack is None or len(info.shape) != 3:
        return []
    count, rows, columns = info.shape
    names = ("gate_proj", "up_proj") if stack[2] == "gate_up" else ("down_proj",)
    height = rows // len(names)
    return [
        _Matrix(f"{stack[1]}.{expert}.{name}", expert * rows + place * height, (height, columns))
        for expert in range(count)
        for place, name in enumerate(names)
    ]


# Bytes

_MAX_PARTS = 4  # tensors of a matrix
_ENTRY_BYTES = 200  # of a tensor in a header, beside its name


def _encoded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == TensorType.F32:
        return values.astype("<f4")
    if dtype == TensorType.F16:
        return np.clip(values, 2.0**-24, 65504).astype("<f2")  # a scale of 0 could not be divided by
    bits = values.astype("<f4").view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _pack_rows(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return codes of 4 bits [O, G] as words [O / 8, G], the first row in the lowest bits."""
    padded = np.zeros((-(-len(codes) // 8) * 8, codes.shape[1]), np.uint32)
    padded[: len(codes)] = codes
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    words: NDArray[np.uint32] = (padded.reshape(-1, 8, codes.shape[1]) << shifts).sum(1, dtype=np.uint32)
    return words


# Rounding takes the nearest code, without calibration data. A group of weights has one scale. It is stored in the type
# of the file's other tensors, so codes are computed with the stored scale.
FP8_MAX = 448.0
# The largest weight of a group is this many scales. With 7.5 or 8 it is cut to 7, and the others are closer.
_INT4_SPANS = (7.0, 7.5, 8.0)
_INT8_SPANS = (127.0,)

Store = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]  # rounds scales to the type that they are stored in


def _round(weights: NDArray[np.float32], scheme: WeightScheme, store: Store) -> PackedMatrix:
    if scheme.is_float:
        return round_fp8(weights, scheme.group, store)
    if scheme.is_symmetric:
        return round_symmetric(weights, scheme.bits, scheme.group[1], store)
    return round_asymmetric(weights, scheme.group[1], store)


def round_fp8(weights: NDArray[np.float32], group: tuple[int, int], store: Store) -> PackedMatrix:
    """Round to e4m3, with a scale for each rectangle of `group` weights."""
    rows, columns = weights.shape
    height, width = min(group[0] or rows, rows), min(group[1] or columns, columns)
    padded = np.zeros((-(-rows // height) * height, -(-columns // width) * width), np.float32)
    padded[:rows, :columns] = weights
    blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
    scales = store(_nonzero(np.abs(blocks).max((1, 3)) / np.float32(FP8_MAX)))
    scaled: NDArray[np.float32] = np.divide(blocks, scales[:, None, :, None], dtype=np.float32)
    codes = to_fp8(scaled).reshape(padded.shape)[:rows, :columns]
    return PackedMatrix(CodeType.FP8, (rows, columns), np.ascontiguousarray(codes), scales, (height, width))


def to_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest codes; of two equally near ones, the even one. Values beyond the range become the largest."""
    codes = np.searchsorted(_fp8_limits(), np.abs(values)).astype(np.uint8)
    return codes | np.signbit(values).astype(np.uint8) << np.uint8(7)


@cache
def _fp8_limits() -> NDArray[np.float32]:
    """Return the largest number that is rounded to each positive code but the last."""
    values = fp8_values()[:127]
    middles = (values[:-1] + values[1:]) / 2  # exact: neighbours differ by one of their 4 bits
    is_odd = np.arange(126) % 2 == 1
    return np.where(is_odd, np.nextafter(middles, np.float32(0)), middles)


def round_symmetric(weights: NDArray[np.float32], bits: int, width: int, store: Store) -> PackedMatrix:
    """Round groups of `width` weights of a row to signed integers; of several scales, take that of the least error."""
    groups = weights.reshape(len(weights), -1, width)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    largest = np.abs(groups).max(2)
    best = np.full(largest.shape, np.inf, np.float32)
    scales, codes = np.ones_like(largest), np.zeros(groups.shape, np.int8)
    for span in _INT4_SPANS if bits == 4 else _INT8_SPANS:
        tried = store(_nonzero(largest / np.float32(span)))
        rounded = np.clip(np.rint(groups / tried[..., None]), low, high)
        error = np.square(rounded * tried[..., None] - groups).sum(2)
        is_better = error < best
        best = np.where(is_better, error, best)
        scales = np.where(is_better, tried, scales)
        codes = np.where(is_better[..., None], rounded.astype(np.int8), codes)
    signed = codes.reshape(weights.shape)
    if bits == 8:
        return PackedMatrix(CodeType.INT8, weights.shape, signed.view(np.uint8), scales, (1, width))
    packed = pack_pairs((signed + np.int8(8)).view(np.uint8))
    return PackedMatrix(CodeType.INT4, weights.shape, packed, scales, (1, width))


def round_asymmetric(weights: NDArray[np.float32], width: int, store: Store) -> PackedMatrix:
    """Round groups of `width` weights of a row to 0 to 15, with a zero point for each group."""
    groups = weights.reshape(len(weights), -1, width)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = store(_nonzero((high - low) / np.float32(15)))
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = pack_pairs(codes.reshape(weights.shape))
    return PackedMatrix(CodeType.INT4, weights.shape, packed, scales, (1, width), zeros)


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales that can be divided by: groups of zeros have a scale of 1."""
    return np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
