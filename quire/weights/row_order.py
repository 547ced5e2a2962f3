"""The order of the rows of queries and keys.

`RopeSpec` rotates pairs (0, R/2), (1, R/2 + 1), .. of a head's first R dimensions. Some files are made for pairs of
neighbours, (0, 1), (2, 3), ... Rows are quantised separately, so moving them is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quire.errors import ModelFileError
from quire.weights.checkpoint import RawTensor, TensorInfo, TensorType
from quire.weights.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item", bound=Any)

_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_PLAIN = (TensorType.F32, TensorType.F16, TensorType.BF16)


def in_halves(raw: RawTensor, spec: ModelSpec, source: str) -> RawTensor:
    """Return a tensor whose rotated pairs were neighbours in the order of `RopeSpec`. Others are returned unchanged."""
    heads = _heads(raw.info, spec, source)
    if heads is None:
        return raw
    rows = raw.data.reshape(heads.num_heads, heads.head_size, -1)
    return RawTensor(raw.info, _moved(rows, heads.rotary_size).reshape(raw.data.shape))


def rows_in_halves(info: TensorInfo, spec: ModelSpec, source: str) -> NDArray[np.int64] | None:
    """Return the row that is moved to each place by `in_halves`; None: all rows stay."""
    import numpy as np

    heads = _heads(info, spec, source)
    if heads is None:
        return None
    rows = np.arange(info.shape[0]).reshape(heads.num_heads, heads.head_size)
    return _moved(rows, heads.rotary_size).reshape(-1)


class _Heads(NamedTuple):
    num_heads: int
    head_size: int
    rotary_size: int


def _heads(info: TensorInfo, spec: ModelSpec, source: str) -> _Heads | None:
    """Return the heads whose rows a tensor holds; None: its rows are not rotated."""
    if not info.name.endswith(_ROTATED):
        return None
    attention = spec.layers[_layer_number(info.name, spec)].attention
    if attention.rope is None and spec.attention.rope is None:
        return None
    # A layer without positions may have any order, but queries and keys must have the same: it is reordered as well.
    rope = attention.rope or spec.attention.rope
    assert rope is not None
    num_heads = attention.num_heads if ".q_proj." in info.name else attention.num_kv_heads
    if info.shape[0] != num_heads * attention.head_size or (len(info.shape) == 1 and info.type not in _PLAIN):
        raise ModelFileError(f"{source}: tensor {info.name} is {info.type} {info.shape} for {num_heads} heads")
    return _Heads(num_heads, attention.head_size, rope.rotary_size)


def _layer_number(name: str, spec: ModelSpec) -> int:
    number = int(name.split(".")[1])
    return min(number, spec.num_layers - 1)


def _moved(rows: NDArray[Item], rotary_size: int) -> NDArray[Item]:
    """Return rows [heads, head size, ..] in the order of `RopeSpec`."""
    moved = rows.copy()
    moved[:, : rotary_size // 2] = rows[:, 0:rotary_size:2]
    moved[:, rotary_size // 2 : rotary_size] = rows[:, 1:rotary_size:2]
    moved.flags.writeable = False
    return moved
