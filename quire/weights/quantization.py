"""How the weights of a safetensors checkpoint are quantised: `quantization_config` of config.json.

Which modules are quantised is not read from the config: a quantised module has scales in the files, and others have
none. So the lists of modules (`ignore`, `modules_to_not_convert`, `targets`) are not evaluated. They may contain
regular expressions, and one from an untrusted file can run for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quire.errors import UnsupportedModel
from quire.weights.fields import Fields, show

FIELD = "quantization_config"
MAX_CONFIG_GROUPS = 256
MAX_GROUP_SIZE = 65_536
MIN_GROUP_SIZE = 8


class Method(StrEnum):
    """Who lays out the tensors."""

    FP8 = "fp8"  # Qwen, DeepSeek, Mistral: `weight`, and `weight_scale_inv` for blocks or for the whole matrix
    COMPRESSED = "compressed-tensors"  # llm-compressor
    AWQ = "awq"  # AutoAWQ
    GPTQ = "gptq"  # AutoGPTQ, GPTQModel


class WeightScheme(NamedTuple):
    """The codes of matrices and the weights that share a scale."""

    bits: int
    is_float: bool
    group: tuple[int, int]  # rows and columns; 0: all of them

    def group_of(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        rows, columns = self.group
        return min(rows or num_rows, num_rows), min(columns or num_columns, num_columns)


@dataclass(frozen=True, slots=True)
class Quantization:
    method: Method
    schemes: tuple[WeightScheme, ...]  # a matrix has one of them
    zero_offset: int = 0  # added to stored zero points
    has_kv_scales: bool = False  # files contain scales of keys and values, which are not used


def read_quantization(config: Fields) -> Quantization | None:
    """Return how weights are quantised, None if they are not; raise if quire cannot read them.

    Multimodal models may say so beside their language model's sizes.
    """
    holder = config if config.get(FIELD) else _nested(config)
    if not holder.get(FIELD):
        return None
    fields = holder.table(FIELD)
    method = fields.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise UnsupportedModel(
            f"{config.source}: {fields.prefix}quant_method is {show(method)}: quantised safetensors are not supported "
            f"with it, but with {', '.join(_METHODS)}; use another file, the original model or a GGUF of it"
        )
    return read(fields)


def _nested(config: Fields) -> Fields:
    inner = config.get("text_config")
    return Fields(config.source, inner if isinstance(inner, dict) else {}, f"{config.prefix}text_config.")


def _refuse(fields: Fields, name: str, known: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{fields.source}: {fields.prefix}{name} is {show(fields.get(name))}: not supported, only {known}"
    )


def _group_size(fields: Fields, name: str = "group_size") -> int:
    """Return the columns of a group, 0 for a scale per row, which files write as -1."""
    if fields.get(name) == -1:
        return 0
    return fields.whole(name, MIN_GROUP_SIZE, MAX_GROUP_SIZE)


def _bits(fields: Fields, name: str, *known: int) -> int:
    bits = fields.whole(name, 1, 32)
    if bits not in known:
        raise _refuse(fields, name, " and ".join(map(str, known)))
    return bits


# FP8


def _read_fp8(fields: Fields) -> Quantization:
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _refuse(fields, "fmt", "e4m3")
    if fields.get("weight_block_size") is not None:
        return Quantization(Method.FP8, (WeightScheme(8, True, _block(fields, "weight_block_size")),))
    whole, channel = WeightScheme(8, True, (0, 0)), WeightScheme(8, True, (1, 0))
    return Quantization(Method.FP8, (whole, channel))


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.get(name)
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)
    if not is_pair or not all(1 <= one <= MAX_GROUP_SIZE for one in value):
        raise fields.wrong(name, f"not two whole numbers from 1 to {MAX_GROUP_SIZE}")
    return value[0], value[1]


# compressed-tensors

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense")


def _read_compressed(fields: Fields) -> Quantization:
    _check_format(fields)
    sparsity = fields.table("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise _refuse(sparsity, "format", "dense")
    transforms = fields.table("transform_config")
    if transforms.get("config_groups"):
        raise _refuse(transforms, "config_groups", "weights without transforms of their inputs")
    groups = fields.table("config_groups")
    if not 1 <= len(groups.values) <= MAX_CONFIG_GROUPS:
        raise fields.wrong("config_groups", f"not an object of 1 to {MAX_CONFIG_GROUPS} groups")
    schemes = [_compressed_scheme(groups.table(name)) for name in groups.values]
    known = tuple(dict.fromkeys(one for one in schemes if one is not None))
    return Quantization(Method.COMPRESSED, known, has_kv_scales=fields.get("kv_cache_scheme") is not None)


def _check_format(fields: Fields) -> None:
    if fields.get("format") is not None and fields.get("format") not in _FORMATS:
        raise _refuse(fields, "format", ", ".join(_FORMATS))


def _compressed_scheme(group: Fields) -> WeightScheme | None:
    """Return the scheme of one config group; None: its weights are not quantised."""
    _check_format(group)
    for name in ("input_activations", "output_activations"):
        activations = group.table(name)
        # Activations keep 16 bits here. For weights made for FP8 activations that is more precise; weights made for
        # integer activations are often scaled against them.
        if activations.values and (activations.get("type") != "float" or activations.get("num_bits") != 8):
            raise UnsupportedModel(
                f"{group.source}: {activations.prefix}type is {show(activations.get('type'))}, num_bits "
                f"{show(activations.get('num_bits'))}: activations of other types than 8-bit floats are not supported"
            )
    weights = group.table("weights")
    if not weights.values:
        return None
    kind = weights.get("type")
    if kind not in (None, "int", "float"):
        raise _refuse(weights, "type", "int and float")
    is_float = kind == "float"
    bits = _bits(weights, "num_bits", 8) if is_float else _bits(weights, "num_bits", 4, 8)
    if weights.get("dynamic") not in (None, False):
        raise _refuse(weights, "dynamic", "false")
    return WeightScheme(bits, is_float, _compressed_group(weights))


def _compressed_group(weights: Fields) -> tuple[int, int]:
    group_size = weights.get("group_size")
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = weights.get("strategy") or default
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, _group_size(weights)
    if strategy == "block":
        return _block(weights, "block_structure")
    raise _refuse(weights, "strategy", "tensor, channel, group and block")


# Integers of 4 and 8 bits


def _read_awq(fields: Fields) -> Quantization:
    version = fields.get("version")
    if version is not None and str(version).lower() != "gemm":
        raise _refuse(fields, "version", "gemm")
    old = "q_group_size" if "q_group_size" in fields else "group_size"
    bits = _bits(fields, "w_bit" if "w_bit" in fields else "bits", 4)
    return Quantization(Method.AWQ, (WeightScheme(bits, False, (1, _group_size(fields, old))),))


_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the first format stores zero points less 1


def _read_gptq(fields: Fields) -> Quantization:
    name = fields.get("checkpoint_format") or "gptq"
    if not isinstance(name, str) or name not in _GPTQ_OFFSETS or fields.get("is_marlin_format"):
        field = "is_marlin_format" if name in _GPTQ_OFFSETS else "checkpoint_format"
        raise _refuse(fields, field, "checkpoint_format gptq and gptq_v2")
    return _gptq(fields, _GPTQ_OFFSETS[name])


def _gptq(fields: Fields, zero_offset: int) -> Quantization:
    scheme = WeightScheme(_bits(fields, "bits", 4, 8), False, (1, _group_size(fields)))
    return Quantization(Method.GPTQ, (scheme,), zero_offset)


def _read_auto_round(fields: Fields) -> Quantization:
    """Read a config of AutoRound, which writes the layouts of others."""
    packing = fields.get("packing_format")
    if fields.get("data_type") not in (None, "int"):
        raise _refuse(fields, "data_type", "int")
    if packing in ("auto_round:auto_gptq", "auto_round:gptq"):
        return _gptq(fields, _GPTQ_OFFSETS["gptq"])
    if packing in ("auto_round", "auto_round:gptqmodel"):
        return _gptq(fields, _GPTQ_OFFSETS["gptq_v2"])
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        return _read_awq(fields)
    raise _refuse(fields, "packing_format", "auto_round, auto_round:auto_gptq and auto_round:auto_awq")


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
}
