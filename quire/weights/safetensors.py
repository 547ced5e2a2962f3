"""Weights in Hugging Face's layout: safetensors in one file or in shards, beside config.json.

The safetensors package validates each header. The bytes are then mapped here, so that bfloat16 needs no torch and
nothing is copied. Only files of the folder itself are opened, whatever names an index contains.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import MissingExtra, ModelFileError, UnsupportedModel
from quire.weights import gpt_oss
from quire.weights.checkpoint import FileMap, RawTensor, TensorInfo, TensorType, map_file
from quire.weights.fields import member, read_json, show
from quire.weights.folder import ModelFolder
from quire.weights.gguf_spec import most_common_type
from quire.weights.quantization import (
    PART_BYTES,
    FileTensor,
    PackedTensor,
    find_packed,
    is_part,
    is_unused,
)
from quire.weights.tensors import (
    Heads,
    Place,
    expected_tensors,
    find_skipped,
    is_left_over,
    place_tensors,
    rotated_heads,
    transformers_targets,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.weights.packed import PackedMatrix

MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_SHARDS = 4096
MAX_TENSORS = 1 << 20  # a mixture of experts has three matrices per expert and layer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPARED = 1 << 20  # bytes at a time
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_KNOWN_TYPES = ("F32", "F16", "BF16")


class _Shard(NamedTuple):
    path: Path
    buffer: FileMap
    start: int  # offset of the tensors' bytes
    header: Mapping[str, Any]


class SafetensorsCheckpoint(ModelFolder):
    """A `Checkpoint` in safetensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shards: list[_Shard] = []
        self._file_tensors: dict[str, FileTensor] = {}
        self._experts: dict[str, gpt_oss.ExpertPart] = {}
        self._parts: dict[str, FileTensor] = {}
        self._packed: dict[str, PackedTensor] = {}
        self._skipped: set[str] = set()  # parts of the model
        try:
            if self.unsupported:
                self._add_others()
            else:
                for shard, name in self._listed():
                    self._add(shard, name)
            found = {name: _info(one) for name, one in self._file_tensors.items()}
            found |= self._find_packed()
            self.spec = replace(self.read_spec(most_common_type(found)), skipped=tuple(sorted(self._skipped)))
            self._places = self._find_places(found)
            if self.spec.is_tied and self._has_own_head():  # the rule of transformers
                self.spec = replace(self.spec, is_tied=False)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: place.info for name, place in self._places.items()},
            **{name: part.info for name, part in self._experts.items()},
        }

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of weights, all of them checked."""
        return tuple(shard.path for shard in self._shards)

    def read(self, name: str) -> RawTensor:
        from quire.weights import reading

        if (part := self._experts.get(name)) is not None:
            return reading.read_expert(part, self._file_tensors)
        matrix = self.read_packed(name)
        place = self._places[name]
        if matrix is not None:
            return reading.as_floats(place.info, matrix)
        tensor = self._file_tensors[place.file_name]
        return reading.read_plain(tensor.buffer, tensor.offset, place, self._heads(place))

    def read_packed(self, name: str) -> PackedMatrix | None:
        from quire.weights import quants, reading

        if name in self._experts:
            return quants.pack_blocks(self.read(name))
        place = self._places[name]
        tensor = self._packed.get(place.file_name)
        return None if tensor is None else reading.read_packed(tensor, place, self._heads(place), str(self.path))

    def _heads(self, place: Place) -> Heads | None:
        is_moved = self.family is not None and self.family.is_interleaved
        return rotated_heads(place.info, self.spec, str(self.path)) if is_moved else None

    def file_tensors(self) -> dict[str, list[TensorInfo]]:
        """Return all tensors under their names in the files, by file, also those that quire does not use."""
        found: dict[str, list[TensorInfo]] = {}
        for shard in self._shards:
            tensors = sorted((_read_entry(shard, name) for name in shard.header), key=lambda one: one.offset)
            found[shard.path.name] = [_info(one) for one in tensors]
        return found

    def read_file_tensor(self, file_name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor under its name in the files."""
        from quire.weights import reading

        shard = next(one for one in self._shards if file_name in one.header)
        return reading.tensor_bytes(_read_entry(shard, file_name))

    def close(self) -> None:
        for shard in self._shards:
            with suppress(BufferError):  # a tensor is still in use: the map is freed with it
                shard.buffer.close()

    def _listed(self) -> Iterator[tuple[_Shard, str]]:
        """Yield every tensor of the checkpoint with the file that holds it."""
        if not (self.path / INDEX).exists():
            # Without an index, a single file, or all shards: mlx-lm reads such folders.
            for path in [self._single()] if (self.path / SINGLE).exists() else self._all_files():
                shard = self._open(path)
                yield from ((shard, name) for name in shard.header)
            return
        path = member(self.path, INDEX)
        weight_map = _read_index(path)
        for file in dict.fromkeys(weight_map.values()):
            shard = self._open(member(self.path, file))
            for name in shard.header:
                if weight_map.get(name) != file:
                    raise ModelFileError(f"{shard.path}: tensor {show(name)} is not listed in {INDEX} for this file")
                yield shard, name
        found = {name for shard in self._shards for name in shard.header}
        missing = [name for name in weight_map if name not in found]
        if missing:
            raise ModelFileError(f"{path}: weight_map lists {show(missing[0])}, which is not in the file it names")

    def _all_files(self) -> list[Path]:
        """Return every file of weights in the folder."""
        files = sorted(path.name for path in self.path.glob("model*.safetensors"))
        if len(files) > MAX_SHARDS:
            raise ModelFileError(f"{self.path}: holds {len(files)} files of weights: more than {MAX_SHARDS}")
        return [member(self.path, file) for file in files] or [self._single()]

    def _add_others(self) -> None:
        """Check the files of a model that quire has no equations for, and list the tensors whose type quire can name.

        mlx-lm reads every `model*.safetensors` and ignores the index. Here the index only says which files are missing.
        """
        if (self.path / INDEX).exists():
            for file in dict.fromkeys(_read_index(member(self.path, INDEX)).values()):
                member(self.path, file)
        names: set[str] = set()
        for path in self._all_files():
            shard = self._open(path)
            for name, entry in shard.header.items():
                if name in names:
                    raise ModelFileError(f"{path}: tensor {show(name)} is also in another file of the folder")
                names.add(name)
                if _is_described(entry):
                    self._file_tensors[name] = _read_entry(shard, name)
            if len(names) > MAX_TENSORS:
                raise ModelFileError(f"{self.path}: holds more than {MAX_TENSORS} tensors")

    def _single(self) -> Path:
        if (self.path / SINGLE).exists():
            return member(self.path, SINGLE)
        try:
            files = sorted(path.name for path in self.path.iterdir())
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        unsafe = [name for name in files if name.endswith(UNSAFE_SUFFIXES)]
        if unsafe:
            raise UnsupportedModel(
                f"{self.path}: holds {show(unsafe[0])}, a format that can run code when read; convert to safetensors"
            )
        raise ModelFileError(f"{self.path}: holds neither {SINGLE} nor {INDEX}")

    def _open(self, path: Path) -> _Shard:
        start, header = _read_header(path)
        shard = _Shard(path, map_file(path), start, header)
        self._shards.append(shard)
        return shard

    def _add(self, shard: _Shard, name: str) -> None:
        if is_left_over(name):
            return
        family = self.family
        if family and (part := find_skipped(name, family, is_multimodal=self.is_multimodal)):
            self._skipped.add(part)
            return
        if name in self._file_tensors or name in self._parts:
            raise ModelFileError(f"{shard.path}: tensor {show(name)} is also in another file of the folder")
        if self.quantization is None or not self._add_part(shard, name):
            self._file_tensors[name] = _read_entry(shard, name)

    def _add_part(self, shard: _Shard, name: str) -> bool:
        """Add a tensor that belongs to a quantised matrix. Returns whether it does."""
        if is_unused(name):
            return True
        entry = shard.header[name]
        if not is_part(name, entry.get("dtype") if isinstance(entry, dict) else None):
            return False
        self._parts[name] = _check_entry(shard, name, PART_BYTES)
        return True

    def _find_packed(self) -> dict[str, TensorInfo]:
        """Find the quantised matrices and return their descriptions by the name of a plain matrix."""
        quantization = self.quantization
        if quantization is None:
            return {}
        self._packed = find_packed(self._parts, quantization, str(self.path))
        for name in self._packed:
            if name in self._file_tensors:
                raise ModelFileError(f"{self.path}: {show(name)} is stored twice, plain and quantised")
        return {name: tensor.info for name, tensor in self._packed.items()}

    def _has_own_head(self) -> bool:
        """Return whether the file holds a head that differs from the embedding, whatever config.json says."""
        head, embedding = self._places.get("head.weight"), self._places.get("embedding.weight")
        if head is not None and head.file_name in self._packed:
            return True
        if head is None or embedding is None or head.info[1:] != embedding.info[1:]:
            return False
        pieces = range(0, head.info.num_bytes, COMPARED)
        return any(self._read_piece(head, at) != self._read_piece(embedding, at) for at in pieces)

    def _read_piece(self, place: Place, at: int = 0) -> bytes:
        """Read a part of a tensor without the map, because the server does this too: see FileMap."""
        tensor = self._file_tensors[place.file_name]
        return tensor.buffer.copy(tensor.offset + place.offset + at, min(COMPARED, place.info.num_bytes - at))

    def _find_places(self, found: Mapping[str, TensorInfo]) -> dict[str, Place]:
        family = self.family
        if family is None:
            return {name: Place(info, name, 0) for name, info in found.items()}
        if family.name == gpt_oss.FAMILY:
            self._experts = gpt_oss.find_parts(found, self.spec, str(self.path))
            found = {name: info for name, info in found.items() if not gpt_oss.is_experts(name)}
        targets = transformers_targets(found, family, self.architecture)
        places = place_tensors(found, targets, self.spec, str(self.path))
        return places if self.quantization is None else self._without_zero_biases(places)

    def _without_zero_biases(self, places: dict[str, Place]) -> dict[str, Place]:
        """Leave out biases that the model does not have. AutoGPTQ writes one, full of zeros, for every matrix."""
        expected = expected_tensors(self.spec)
        extra = [
            name
            for name, place in places.items()
            if name.endswith(".bias")
            and name not in expected
            and f"{place.file_name.removesuffix('.bias')}.weight" in self._packed
            and not any(any(self._read_piece(place, at)) for at in range(0, place.info.num_bytes, COMPARED))
        ]
        return {name: place for name, place in places.items() if name not in extra}


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not 1 <= len(weight_map) <= MAX_TENSORS:
        raise ModelFileError(f"{path}: weight_map is {show(weight_map)}: not an object of 1 to {MAX_TENSORS} names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ModelFileError(f"{path}: weight_map[{show(name)}] is {show(file)}: not a file name")
    num_files = len(set(weight_map.values()))
    if num_files > MAX_SHARDS:
        raise ModelFileError(f"{path}: weight_map names {num_files} files: more than {MAX_SHARDS}")
    return weight_map


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the start of the bytes and the table of tensors, which the safetensors package validates first."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra.of("a safetensors file", "safetensors") from None
    try:
        with safe_open(str(path), framework="numpy"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ModelFileError(f"{path}: its header has {length} bytes: more than {MAX_HEADER_BYTES}")
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ModelFileError(f"{path}: is not a valid safetensors file: {error}") from None
    except (OSError, MemoryError, ValueError, RecursionError, struct.error) as error:
        # MemoryError: the file is larger than the address space that this process may have.
        raise ModelFileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS + 1:
        raise ModelFileError(f"{path}: its header is not an object of at most {MAX_TENSORS} tensors")
    header.pop("__metadata__", None)
    return 8 + length, header


def _is_described(entry: Any) -> bool:
    """Whether `_read_entry` can describe a tensor. It cannot describe packed weights, scalars and empty tensors."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and shape != [] and all(shape) and entry.get("dtype") in _KNOWN_TYPES


def _read_entry(shard: _Shard, name: str) -> FileTensor:
    """Return one row of the table. The package has validated it; the offsets are checked once more."""
    entry = shard.header[name]
    if isinstance(entry, dict) and entry.get("dtype") == "U8" and gpt_oss.is_packed_part(name):
        return _check_entry(shard, name, {"U8": 1})
    tensor = _check_entry(shard, name, {one: PART_BYTES[one] for one in _KNOWN_TYPES})
    if not tensor.shape:
        raise ModelFileError(f"{shard.path}: tensor {show(name)} has shape (): not whole numbers above 0")
    return tensor


def _info(tensor: FileTensor) -> TensorInfo:
    kind = TensorType.MXFP4 if tensor.dtype == "U8" else TensorType(tensor.dtype)  # bytes: a part of MXFP4
    return TensorInfo(tensor.name, kind, tensor.shape, tensor.num_bytes)


def _check_entry(shard: _Shard, name: str, item_bytes: Mapping[str, int]) -> FileTensor:
    """Return a tensor, whose type must be in `item_bytes`."""
    field = f"{shard.path}: tensor {show(name)}"
    entry = shard.header[name]
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ModelFileError(f"{field} is {show(entry)}: not a type, a shape and two offsets") from None
    if dtype not in item_bytes:
        can = ", ".join(item_bytes)
        raise UnsupportedModel(f"{field} has type {show(dtype)}, which is not supported; these are: {can}")
    if not all(isinstance(one, int) for one in (*shape, begin, end)) or min(shape, default=1) < 1:
        raise ModelFileError(f"{field} has shape {show(shape)} at {show((begin, end))}: not whole numbers above 0")
    num_bytes = item_bytes[dtype] * math.prod(shape)
    if not 0 <= begin <= end <= len(shard.buffer) - shard.start or end - begin != num_bytes:
        raise ModelFileError(f"{field} has {num_bytes} bytes at {begin} to {end}: not in the file")
    return FileTensor(name, dtype, shape, num_bytes, shard.buffer, shard.start + begin)
