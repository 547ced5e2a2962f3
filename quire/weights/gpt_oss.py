"""The experts of gpt-oss in safetensors: rows of gates and ups alternate, and matrices are packed or transposed.

Files have one of two forms. MXFP4, as OpenAI publishes it: `gate_up_proj_blocks` [N, 2F, E / 32, 16] with two codes in
a byte, and `gate_up_proj_scales` [N, 2F, E / 32]. 16 or 32 bits, as transformers saves it: `gate_up_proj` [N, E, 2F].
Both are read as every other file: one matrix of rows per expert, in MXFP4 with the blocks of GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from quire.errors import ModelFileError
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.fields import show
from quire.weights.spec import ModelSpec

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
        layer, kind = int(match[1]), match[3]
        experts = spec.layers[layer].experts if layer < spec.num_layers else None
        if experts is None:
            raise ModelFileError(f"{source}: tensor {show(name)} is of a layer that the model does not have")
        is_gate_up = match[2] == "gate_up"
        owns = ("gate_proj", "up_proj") if is_gate_up else ("down_proj",)
        rows, columns = (experts.size, spec.hidden_size) if is_gate_up else (spec.hidden_size, experts.size)
        _check(info, found, kind, experts.num_experts, rows * len(owns), columns, source)
        ending, shape = ("bias", (rows,)) if kind == "_bias" else ("weight", (rows, columns))
        num_bytes = info.num_bytes // experts.num_experts // len(owns)
        if kind == "_blocks":
            num_bytes = rows * (columns // GROUP) * BLOCK_BYTES
        for expert, (first, own) in product(range(experts.num_experts), enumerate(owns)):
            part = TensorInfo(f"layers.{layer}.experts.{expert}.{own}.{ending}", info.type, shape, num_bytes)
            parts[part.name] = ExpertPart(part, name, kind, expert, first, len(owns))
    return parts


def _check(
    info: TensorInfo, found: Mapping[str, TensorInfo], kind: str, num_experts: int, num_rows: int, num_columns: int,
    source: str,
) -> None:  # fmt: skip
    """Raise unless a tensor has the shape and type of its kind, and its scales if it has them."""
    shapes: dict[str, tuple[int, ...]] = {
        "": (num_columns, num_rows),
        "_bias": (num_rows,),
        "_blocks": (num_rows, num_columns // GROUP, GROUP // 2),
    }
    expected = (num_experts, *shapes[kind])
    if info.shape != expected or (kind == "_blocks" and num_columns % GROUP):
        raise ModelFileError(f"{source}: tensor {show(info.name)} has shape {info.shape} for {expected}")
    if (kind == "_blocks") != (info.type is TensorType.MXFP4):
        raise ModelFileError(f"{source}: tensor {show(info.name)} has type {info.type}")
    if kind == "_blocks":
        scales = found.get(info.name.removesuffix("_blocks") + "_scales")
        if scales is None or scales.shape != expected[:-1]:
            shape = None if scales is None else scales.shape
            raise ModelFileError(
                f"{source}: the scales of tensor {show(info.name)} have shape {shape} for {expected[:-1]}"
            )
