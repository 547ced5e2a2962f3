"""The experts of gpt-oss in safetensors: rows of gates and ups alternate, and matrices are packed or transposed.

Files have one of two forms. MXFP4, as OpenAI publishes it: `gate_up_proj_blocks` [N, 2F, E / 32, 16] with two codes in
a byte, and `gate_up_proj_scales` [N, 2F, E / 32]. 16 or 32 bits, as transformers saves it: `gate_up_proj` [N, E, 2F].
Both are read as every other file: one matrix of rows per expert, in MXFP4 with the blocks of GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from quire.errors import ModelFileError
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.fields import show
from quire.weights.spec import ExpertsSpec, ModelSpec

# N experts, E hidden size, F width of an expert

FAMILY = "gpt_oss"
GROUP = 32  # weights that share an exponent
BLOCK_BYTES = 17  # in GGUF: an exponent and 16 bytes of codes

_EXPERTS = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.mlp\.experts\.(gate_up|down)_proj(|_bias|_blocks|_scales)")


class ExpertPart(NamedTuple):
    """Where one tensor of one expert lies."""

    info: TensorInfo
    file_name: str
    kind: str  # what follows the matrix's name: nothing, _bias or _blocks
    expert: int
    first: int  # row of the file's matrix
    step: int  # from row to row: 2 if gates and ups alternate


def is_packed_part(name: str) -> bool:
    """Return whether a tensor of bytes is a part of an MXFP4 tensor."""
    found = _EXPERTS.fullmatch(name)
    return found is not None and found[3] in ("_blocks", "_scales")


def is_experts(name: str) -> bool:
    return _EXPERTS.fullmatch(name) is not None


def find_parts(found: Mapping[str, TensorInfo], spec: ModelSpec, source: str) -> dict[str, ExpertPart]:
    """Return quire's tensors of the experts among the tensors of the files."""
    parts: dict[str, ExpertPart] = {}
    for name, info in found.items():
        match = _EXPERTS.fullmatch(name)
        if match is None or match[3] == "_scales":
            continue
        layer, which, kind = int(match[1]), match[2], match[3]
        experts = spec.layers[layer].experts if layer < spec.num_layers else None
        if experts is None:
            raise ModelFileError(f"{source}: tensor {show(name)} is of a layer that the model does not have")
        _check(name, info, found, which, kind, experts, spec.hidden_size, source)
        for expert in range(experts.num_experts):
            for part in _parts(info, which, kind, expert, f"layers.{layer}.experts.{expert}.", experts, spec):
                parts[part.info.name] = part
    return parts


def _check(
    name: str, info: TensorInfo, found: Mapping[str, TensorInfo], which: str, kind: str, experts: ExpertsSpec,
    hidden_size: int, source: str,
) -> None:  # fmt: skip
    num_rows, num_columns = (2 * experts.size, hidden_size) if which == "gate_up" else (hidden_size, experts.size)
    num_groups = num_columns // GROUP
    shapes: dict[str, tuple[int, ...]] = {
        "": (num_columns, num_rows),
        "_bias": (num_rows,),
        "_blocks": (num_rows, num_groups, GROUP // 2),
    }
    expected = (experts.num_experts, *shapes[kind])
    if info.shape != expected or (kind == "_blocks" and num_columns % GROUP):
        raise ModelFileError(f"{source}: tensor {show(name)} has shape {info.shape} for {expected}")
    if (kind == "_blocks") != (info.type is TensorType.MXFP4):
        raise ModelFileError(f"{source}: tensor {show(name)} has type {info.type}")
    if kind == "_blocks":
        scales = found.get(name.removesuffix("_blocks") + "_scales")
        if scales is None or scales.shape != expected[:-1]:
            shape = None if scales is None else scales.shape
            raise ModelFileError(f"{source}: the scales of tensor {show(name)} have shape {shape} for {expected[:-1]}")


def _parts(
    info: TensorInfo, which: str, kind: str, expert: int, prefix: str, experts: ExpertsSpec, spec: ModelSpec
) -> list[ExpertPart]:
    names = ("gate_proj", "up_proj") if which == "gate_up" else ("down_proj",)
    rows, columns = (experts.size, spec.hidden_size) if which == "gate_up" else (spec.hidden_size, experts.size)
    ending, shape = ("bias", (rows,)) if kind == "_bias" else ("weight", (rows, columns))
    num_bytes = info.num_bytes // experts.num_experts // len(names)
    if kind == "_blocks":
        num_bytes = rows * (columns // GROUP) * BLOCK_BYTES
    return [
        ExpertPart(TensorInfo(f"{prefix}{name}.{ending}", info.type, shape, num_bytes), info.name, kind, expert, first,
                   len(names))
        for first, name in enumerate(names)
    ]  # fmt: skip
