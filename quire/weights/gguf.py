"""GGUF files: a header whose every length is checked, and tensors mapped directly from the file.

The header is parsed here instead of by the gguf package because a forged header must be refused at once with
`ModelFileError`: no length is used before it is compared with the rest of the file. Metadata and vocabulary need
neither numpy nor gguf.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, FILE_TYPES, RawTensor, TensorInfo, TensorType, TokenizerFiles, map_file
from quire.weights.fields import Fields, show
from quire.weights.gguf_spec import find_family, generation_from_gguf, spec_from_gguf
from quire.weights.tensors import Place, gguf_layer, gguf_targets, is_left_over, place_tensors, rotated_heads

if TYPE_CHECKING:
    from quire.weights.packed import PackedMatrix

MAX_KEYS = 4096
MAX_TENSORS = 65_536
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY = 4 << 20  # elements
MAX_ARRAYS = 16 << 20  # elements of all arrays together: one byte in the file takes eight in memory
MAX_SPLITS = 1024
HEADER_BYTES = 16 << 20  # headers that are longer are mapped
DEFAULT_ALIGNMENT = 32

Buffer = bytes | mmap.mmap

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Scalar value types by number, with struct's format letter.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_READERS = {kind: struct.Struct(f"<{letter}") for kind, letter in _SCALARS.items()}
_U32, _U64 = _READERS[4], _READERS[10]


_OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


class GgufTensor(NamedTuple):
    info: TensorInfo  # its name is the one in the file
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _LongHeader(Exception):
    """The header is longer than the part of the file that was read."""


class _Cursor:
    """Reads forward through the file, never past its end. `buffer` is the start of the file, or all of it."""

    def __init__(self, source: str, buffer: Buffer, size: int) -> None:
        self.source = source
        self.buffer = buffer
        self.size = size  # of the file
        self.at = 0
        self.num_elements = 0  # in all arrays so far

    def wrong(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {field} {problem}")

    def require(self, is_right: bool, field: str, problem: str) -> None:
        if not is_right:
            raise self.wrong(field, problem)

    def take(self, num_bytes: int, field: str) -> int:
        """Skip `num_bytes` and return their start, or raise if the file ends before."""
        start = self.at
        if num_bytes > self.size - start:
            raise self.wrong(field, f"needs {num_bytes} bytes at {start} of {self.size}: the file ends before")
        self.at = start + num_bytes
        if self.at > len(self.buffer):
            raise _LongHeader
        return start

    def number(self, reader: struct.Struct, field: str) -> Any:
        return reader.unpack_from(self.buffer, self.take(reader.size, field))[0]

    def count(self, reader: struct.Struct, field: str, low: int, high: int) -> int:
        value: int = self.number(reader, field)
        self.require(low <= value <= high, field, f"is {value}: not from {low} to {high}")
        return value

    def string(self, field: str) -> str:
        length = self.count(_U64, f"length of {field}", 0, MAX_STRING_BYTES)
        start = self.take(length, field)
        try:
            return self.buffer[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.wrong(field, f"is not UTF-8: {error.reason} at byte {error.start}") from None

    def value(self, field: str) -> Any:
        kind = self.number(_U32, f"type of {field}")
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self.array(field)
        self.require(kind in _READERS, f"type of {field}", f"is {kind}: not a GGUF value type")
        value = self.number(_READERS[kind], field)
        return self.boolean(value, field) if kind == _BOOL else value

    def boolean(self, value: int, field: str) -> bool:
        self.require(value <= 1, field, f"is {value}: not true or false")
        return value == 1

    def array(self, field: str) -> list[Any]:
        kind = self.number(_U32, f"element type of {field}")
        name = f"element type of {field}"
        self.require(kind != _ARRAY, name, "is array: arrays in arrays are not supported")
        self.require(kind == _STRING or kind in _READERS, name, f"is {kind}: not a GGUF value type")
        length = self.count(_U64, f"length of {field}", 0, MAX_ARRAY)
        self.num_elements += length
        self.require(
            self.num_elements <= MAX_ARRAYS,
            field,
            f"brings the array elements to {self.num_elements}: more than {MAX_ARRAYS}",
        )
        if kind == _STRING:
            return self.strings(length, field)
        start = self.take(length * _READERS[kind].size, field)
        values = list(struct.unpack_from(f"<{length}{_SCALARS[kind]}", self.buffer, start))
        return [self.boolean(value, field) for value in values] if kind == _BOOL else values

    def strings(self, length: int, field: str) -> list[str]:
        """Read strings in a tight loop, because a vocabulary has 100,000. Errors are located after the loop stopped."""
        left = self.size - self.at
        self.require(8 * length <= left, field, f"has {length} strings, but {left} bytes are left")
        values: list[str] = []
        buffer, size, at, unpack = self.buffer, len(self.buffer), self.at, _U64.unpack_from
        try:
            for _ in range(length):
                start = at + 8
                end = start + unpack(buffer, at)[0]
                if end > size or end - start > MAX_STRING_BYTES:
                    break
                values.append(buffer[start:end].decode())
                at = end
        except (UnicodeDecodeError, struct.error):
            pass
        if len(values) < length:
            self.at = at
            self.string(f"{field}[{len(values)}]")  # raises the error for this string
            raise self.wrong(field, f"ends after {len(values)} of {length} strings")
        self.at = at
        return values


def read_header(path: Path, buffer: Buffer, size: int | None = None) -> GgufHeader:
    """Read everything before the tensors' bytes, or raise `ModelFileError`. `size`: of the file, if it is longer."""
    cursor = _Cursor(str(path), buffer, len(buffer) if size is None else size)
    magic = buffer[: cursor.take(4, "magic") + 4]
    cursor.require(magic == b"GGUF", "magic", f"is {magic!r}: not a GGUF file")
    version = cursor.number(_U32, "version")
    if version not in (2, 3):
        hint = " (big-endian files are not supported)" if version in (2 << 24, 3 << 24) else ""
        raise UnsupportedModel(f"{path}: version is {version}: not 2 or 3{hint}")
    num_tensors = cursor.count(_U64, "tensor count", 0, MAX_TENSORS)
    num_keys = cursor.count(_U64, "key count", 0, MAX_KEYS)
    metadata: dict[str, Any] = {}
    for i in range(num_keys):
        key = cursor.string(f"key {i}")
        cursor.require(key not in metadata, f"key {show(key)}", "occurs twice")
        metadata[key] = cursor.value(show(key))
    return GgufHeader(metadata, _read_tensors(cursor, num_tensors, _alignment(cursor, metadata)))


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_right = is_whole and 8 <= value <= 4096 and not value & (value - 1)
    cursor.require(is_right, "general.alignment", f"is {show(value)}: not a power of two from 8 to 4096")
    return int(value)


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    for i in range(num_tensors):
        tensor = _read_tensor(cursor, i, alignment)
        cursor.require(tensor.info.name not in found, f"tensor {show(tensor.info.name)}", "occurs twice")
        found[tensor.info.name] = tensor
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(info, start + offset) for name, (info, offset) in found.items()}
    end, before = 0, ""
    for name, (info, offset) in sorted(tensors.items(), key=lambda item: item[1].offset):
        field = f"tensor {show(name)}"
        cursor.require(offset >= end, field, f"at {offset} overlaps {show(before)}, which ends at {end}")
        end, before = offset + info.num_bytes, name
        cursor.require(
            end <= cursor.size, field, f"at {offset} has {info.num_bytes} bytes: the file ends at {cursor.size}"
        )
    return tensors


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> GgufTensor:
    """Read the description of a tensor, whose offset is from the start of the tensors."""
    name = cursor.string(f"name of tensor {index}")
    field = f"tensor {show(name)}"
    num_dims = cursor.count(_U32, f"dimensions of {field}", 1, MAX_DIMS)
    dims = [cursor.count(_U64, f"dimension {i} of {field}", 1, MAX_DIM) for i in range(num_dims)]
    number = cursor.number(_U32, f"type of {field}")
    if number not in FILE_TYPES:
        name = _OTHER_TYPES.get(number, f"number {number}")
        raise UnsupportedModel(
            f"{cursor.source}: {field} has type {name}, which is not supported; choose or convert to a file with these "
            f"types only: {', '.join(BLOCKS)}"
        )
    kind, block = FILE_TYPES[number]
    offset = cursor.number(_U64, f"offset of {field}")
    cursor.require(
        dims[0] % block.num_elements == 0,
        f"dimension 0 of {field}",
        f"is {dims[0]}: not a multiple of {kind}'s {block.num_elements}",
    )
    num_bytes = math.prod(dims) // block.num_elements * block.num_bytes
    is_inside = num_bytes <= cursor.size and offset <= cursor.size
    cursor.require(is_inside, field, f"of {num_bytes} bytes at {offset} is not in a file of {cursor.size}")
    cursor.require(offset % alignment == 0, f"offset of {field}", f"is {offset}: not a multiple of {alignment}")
    return GgufTensor(TensorInfo(name, kind, tuple(reversed(dims)), num_bytes), offset)


class _File:
    """One mapped GGUF file with its header."""

    def __init__(self, path: Path) -> None:
        self.buffer = map_file(path)
        try:
            size = len(self.buffer)
            try:
                self.header = read_header(path, self.buffer.copy(0, min(size, HEADER_BYTES)), size)
            except _LongHeader:
                self.header = read_header(path, self.buffer)
        except BaseException:
            self.buffer.close()
            raise


_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)


def is_later_part(path: Path) -> bool:
    """Return whether a file is a part of a split model other than its first."""
    name = _SPLIT_NAME.fullmatch(path.name)
    return name is not None and int(name[2]) != 1


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, by the name of its first part."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    return [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, int(name[3]) + 1)]


def _open_files(path: Path) -> list[_File]:
    """Open the file, or all parts of a split model, whose first part holds the metadata."""
    files = [_File(path)]
    count = files[0].header.metadata.get("split.count", 0)
    try:
        if count in (0, 1):
            return files
        name = _SPLIT_NAME.fullmatch(path.name)
        if not isinstance(count, int) or not 2 <= count <= MAX_SPLITS or not name or int(name[3]) != count:
            raise ModelFileError(f"{path}: split.count is {show(count)}, but the file name does not end in that")
        if int(name[2]) != 1 or files[0].header.metadata.get("split.no") != 0:
            raise ModelFileError(f"{path}: is a later part of a split model; open {name[1]}-00001-of-{name[3]}.gguf")
        for number, part in enumerate(part_paths(path)[1:], 1):
            files.append(_File(part))
            if files[-1].header.metadata.get("split.no") != number:
                raise ModelFileError(f"{part}: split.no is {show(files[-1].header.metadata.get('split.no'))}")
        return files
    except BaseException:
        for file in files:
            file.buffer.close()
        raise


class GgufCheckpoint:
    """A `Checkpoint` in GGUF, one file or several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _open_files(path)
        try:
            self._metadata = self._files[0].header.metadata
            self._file_tensors = self._merge()
            family = find_family(self._metadata, str(path))
            facts = {name: one.info for name, (_, one) in self._file_tensors.items()}
            self.spec = spec_from_gguf(self._metadata, facts, self._read_floats, str(path))
            self.generation = generation_from_gguf(self._metadata, str(path))
            self._is_permuted = family.is_permuted_in_gguf
            kept = {name: info for name, info in facts.items() if not is_left_over(name)}
            if family.skipped:  # the layers after the last one are the MTP head
                trunk = {name: one for name, one in kept.items() if gguf_layer(name) < self.spec.num_layers}
                self.spec = replace(self.spec, skipped=("MTP head",) if len(trunk) < len(kept) else ())
                kept = trunk
            self._places: dict[str, Place] = place_tensors(kept, gguf_targets(kept, family), self.spec, str(path))
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {name: place.info for name, place in self._places.items()}

    def read(self, name: str) -> RawTensor:
        from quire.weights import reading

        place = self._places[name]
        file, tensor = self._file_tensors[place.file_name]
        heads = rotated_heads(place.info, self.spec, str(self.path)) if self._is_permuted else None
        raw = reading.read_plain(file.buffer, tensor.offset, place, heads)
        return reading.restore_a_log(raw, str(self.path)) if name.endswith(".a_log") else raw

    def read_packed(self, name: str) -> PackedMatrix | None:
        from quire.weights.quants import pack_blocks

        return pack_blocks(self.read(name))

    def tokenizer_files(self) -> TokenizerFiles:
        words = {key: value for key, value in self._metadata.items() if key.startswith("tokenizer.ggml.")}
        template = Fields(str(self.path), self._metadata).find_text("tokenizer.chat_template")
        return TokenizerFiles(tokenizer_json=None, gguf=words, config={}, chat_template=template)

    def close(self) -> None:
        for file in self._files:
            with suppress(BufferError):  # a tensor is still in use: the map is freed with it
                file.buffer.close()

    def _merge(self) -> dict[str, tuple[_File, GgufTensor]]:
        merged: dict[str, tuple[_File, GgufTensor]] = {}
        for file in self._files:
            for name, tensor in file.header.tensors.items():
                if name in merged:
                    raise ModelFileError(f"{file.buffer.path}: tensor {show(name)} is also in another part")
                merged[name] = (file, tensor)
        total = self._metadata.get("split.tensors.count", len(merged))
        if len(self._files) > 1 and total != len(merged):
            raise ModelFileError(f"{self.path}: split.tensors.count is {show(total)}, but there are {len(merged)}")
        return merged

    def _read_floats(self, name: str, length: int) -> list[float] | None:
        """Read a small table of rotation factors, which does not need numpy. None: the files do not have it."""
        if name not in self._file_tensors:
            return None
        file, tensor = self._file_tensors[name]
        if tensor.info.type is not TensorType.F32 or tensor.info.shape != (length,):
            found = f"{tensor.info.type} {tensor.info.shape}"
            raise ModelFileError(f"{file.buffer.path}: tensor {name} is {found}: not F32 ({length},)")
        return list(struct.unpack(f"<{length}f", file.buffer.copy(tensor.offset, 4 * length)))
