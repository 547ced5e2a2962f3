"""Converts tensors of any stored type to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.errors import MissingExtra, UnsupportedModel
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
    """Decode rows in chunks. A tensor of experts [N, rows, columns] is N * rows rows."""
    import numpy as np

    decode = _decoder(raw.info.type)
    out = np.empty(raw.info.shape, np.float32)
    rows = out.reshape(-1, raw.info.shape[-1])
    coded = data.reshape(rows.shape[0], -1)
    step = max(1, CHUNK_ELEMENTS // rows.shape[1])
    with np.errstate(all="ignore"):  # a scale in the file may be infinite
        for start in range(0, len(rows), step):
            rows[start : start + step] = decode(coded[start : start + step])
    return out


def _decoder(kind: TensorType) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Return a function of rows of bytes [R, B] that returns rows of floats."""
    if kind in _CODEBOOKS:
        return lambda coded: _look_up(kind, coded)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise MissingExtra.of(f"a tensor of type {kind}", "gguf") from None
    if kind not in GGMLQuantizationType.__members__:
        raise UnsupportedModel(f"the installed gguf package does not decode {kind}: upgrade it")
    number = GGMLQuantizationType[kind]
    return lambda coded: dequantize(coded, number)


# 4-bit codes that are places in a table. The decoders of the gguf package are a third as fast.

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_CODEBOOKS = {TensorType.IQ4_NL: IQ4_CODES, TensorType.IQ4_XS: IQ4_CODES, TensorType.MXFP4: E2M1_CODES}


def _look_up(kind: TensorType, coded: NDArray[np.uint8]) -> NDArray[np.float32]:
    import numpy as np

    if kind is TensorType.MXFP4:
        blocks = coded.reshape(-1, 17)
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        codes = blocks[:, 1:]
    elif kind is TensorType.IQ4_NL:
        blocks = coded.reshape(-1, 18)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        codes = blocks[:, 2:]
    else:
        blocks = coded.reshape(-1, 136)
        scales = iq4_xs_scales(blocks)
        codes = blocks[:, 8:]
    values = np.empty((scales.size, 2, 16), np.float32)  # [groups, nibble, code]
    packed = codes.tobytes()
    for nibble in range(2):
        table = bytes(_CODEBOOKS[kind][byte >> 4 * nibble & 15] & 255 for byte in range(256))
        found = np.frombuffer(packed.translate(table), np.int8).reshape(-1, 16)  # faster than numpy's indexing
        np.multiply(found, scales.reshape(-1, 1), out=values[:, nibble], dtype=np.float32)
    return values.reshape(len(coded), -1)


def iq4_xs_scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return [N, 8]: a float16 times signed factors of 6 bits, of which 4 are in bytes 4 to 7, 2 in bytes 2 and 3."""
    import numpy as np

    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    factors: NDArray[np.float32] = (low | high << 4).astype(np.float32) - 32
    return scales * factors
