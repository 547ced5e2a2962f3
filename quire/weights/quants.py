"""Converts tensors of any stored type to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import MissingExtra
from quire.weights.checkpoint import RawTensor, TensorType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 20  # decoded at once: the decoders make several copies of their input


def to_float32(raw: RawTensor) -> NDArray[np.float32]:
    """Return a copy with the shape `info.shape`."""
    import numpy as np

    kind, data = raw.info.type, np.ascontiguousarray(raw.data)
    if kind is TensorType.F32:
        return data.view("<f4").astype(np.float32).reshape(raw.info.shape)
    if kind is TensorType.F16:
        with np.errstate(invalid="ignore"):  # NaN is allowed
            return data.view("<f2").astype(np.float32).reshape(raw.info.shape)
    if kind is TensorType.BF16:  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(raw.info.shape)
    return _dequantize(raw, data)


def _dequantize(raw: RawTensor, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    import numpy as np

    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise MissingExtra.of(f"a tensor of type {raw.info.type}", "gguf") from None
    kind = GGMLQuantizationType[raw.info.type]
    out = np.empty(raw.info.shape, np.float32)
    rows = out.reshape(-1, raw.info.shape[-1])
    coded = data.reshape(rows.shape[0], -1)
    step = max(1, CHUNK_ELEMENTS // rows.shape[1])
    with np.errstate(all="ignore"):  # a scale in the file may be infinite
        for start in range(0, len(rows), step):
            rows[start : start + step] = dequantize(coded[start : start + step], kind)
    return out
