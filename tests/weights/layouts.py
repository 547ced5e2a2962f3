"""Writers of quantised safetensors, from the published layouts. They share nothing with the readers.

A matrix is rounded to codes here in the simplest way. What counts is `Written.weights`: the values that the layout's
own definition gives the stored codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.weights.checkpoint import BLOCKS, FILE_TYPES, TensorType
from tests.weights.makers import (
    EXPERTS,
    VOCAB,
    Stored,
    Tensor,
    llama_keys,
    make_gguf,
    mixed_safetensors,
    moe_keys,
    set_scales,
)

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Written:
    tensors: dict[str, Stored]  # by the ending of their name
    weights: Floats  # as the layout defines them


@dataclass(frozen=True, slots=True)
class Layout:
    """One kind of quantised checkpoint."""

    config: dict[str, Any]  # quantization_config
    write: Callable[[Floats, np.random.Generator], Written]
    kind: str = "INT4"  # quire's name of the type


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    return (values.astype("<f4").view(np.uint32) >> 16).astype("<u2")


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp8_value(code: int) -> float:
    """The value of a byte in e4m3fn."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FP8_VALUES = np.array([fp8_value(code) for code in range(256)], np.float32)
_FINITE = np.argsort(np.where(np.isnan(FP8_VALUES), np.inf, FP8_VALUES), kind="stable")[:254]


def to_fp8(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Round to the nearest code."""
    table = FP8_VALUES[_FINITE]
    after = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    is_lower = values - table[after - 1] < table[after] - values
    return _FINITE[np.where(is_lower, after - 1, after)].astype(np.uint8)


def pack_words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack unsigned codes [R, C] along C into I32, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        word, place = divmod(column, per_word)
        words[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


# FP8


def fp8(
    height: int, width: int, *, scale_dtype: str = "F32", ending: str = "weight_scale_inv", shape: Any = None
) -> Any:
    """Write e4m3 with a scale for each `height` times `width` weights; 0: for all rows or columns."""

    def write(weights: Floats, _rng: np.random.Generator) -> Written:
        rows, columns = weights.shape
        tall, wide = height or rows, width or columns
        scales = np.zeros((-(-rows // tall), -(-columns // wide)), np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weights[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
                scales[i, j] = np.abs(block).max() / 448
        stored = to_bf16(scales) if scale_dtype == "BF16" else scales
        scales = from_bf16(stored) if scale_dtype == "BF16" else scales
        every = scales.repeat(tall, 0)[:rows].repeat(wide, 1)[:, :columns]
        codes = to_fp8(weights / every)
        kept = stored if shape is None else stored.reshape(shape)
        tensors = {"weight": Stored("F8_E4M3", codes), ending: Stored(scale_dtype, kept)}
        return Written(tensors, (FP8_VALUES[codes] * every).astype(np.float32))

    return write


# Integers


class Codes(NamedTuple):
    codes: NDArray[np.uint8]  # [O, I], unsigned
    scales: Floats  # [O, G]
    zeros: NDArray[np.uint8]  # [O, G], unsigned
    groups: NDArray[np.int64]  # [I]: the group of each input

    @property
    def weights(self) -> Floats:
        centred = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.groups]
        return centred * self.scales[:, self.groups]


def round_codes(
    weights: Floats, bits: int, width: int, groups: NDArray[np.int64] | None = None, *, is_symmetric: bool, dtype: str
) -> Codes:
    rows, columns = weights.shape
    width = width if width > 0 else columns
    groups = np.arange(columns) // width if groups is None else groups
    num_groups, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((rows, num_groups), np.float32), np.zeros((rows, num_groups), np.uint8)
    for group in range(num_groups):
        part = weights[:, groups == group]
        if is_symmetric:
            scales[:, group], zeros[:, group] = np.abs(part).max(1) / (top // 2), top // 2 + 1
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, top)
    scales = from_bf16(to_bf16(scales)) if dtype == "BF16" else scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(weights / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.uint8)
    return Codes(codes, scales, zeros, groups)


def shuffled_groups(columns: int, width: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Groups of inputs as act-order makes them: `width` inputs each, anywhere."""
    return rng.permutation(columns) // width


def compressed(
    bits: int, width: int, *, is_symmetric: bool = True, has_order: bool = False, has_int8_zeros: bool = False
) -> Any:
    """compressed-tensors, pack-quantized: rows of words; zero points packed along the rows."""

    def write(weights: Floats, rng: np.random.Generator) -> Written:
        rows, columns = weights.shape
        groups = shuffled_groups(columns, width, rng) if has_order else None
        made = round_codes(weights, bits, width, groups, is_symmetric=is_symmetric, dtype="BF16")
        tensors = {
            "weight_packed": Stored("I32", pack_words(made.codes, bits)),
            "weight_scale": Stored("BF16", to_bf16(made.scales)),
            "weight_shape": Stored("I64", np.array([rows, columns], "<i8")),
        }
        if not is_symmetric and has_int8_zeros:
            signed = made.zeros.astype(np.int16) - 2 ** (bits - 1)
            tensors["weight_zero_point"] = Stored("I8", signed.astype(np.int8))
        elif not is_symmetric:
            words = np.ascontiguousarray(pack_words(made.zeros.T, bits).T)
            tensors["weight_zero_point"] = Stored("I32", words)
        if has_order:
            tensors["weight_g_idx"] = Stored("I32", made.groups.astype("<i4"))
        return Written(tensors, made.weights)

    return write


def compressed_int8(weights: Floats, _rng: np.random.Generator) -> Written:
    """compressed-tensors, int-quantized: signed bytes and a scale per row."""
    made = round_codes(weights, 8, -1, is_symmetric=True, dtype="BF16")
    signed = (made.codes.astype(np.int16) - 128).astype(np.int8)
    tensors = {"weight": Stored("I8", signed), "weight_scale": Stored("BF16", to_bf16(made.scales))}
    return Written(tensors, made.weights)


def gptq(bits: int, width: int, *, is_symmetric: bool, has_order: bool = False, zero_offset: int = 1) -> Any:
    def write(weights: Floats, rng: np.random.Generator) -> Written:
        columns = weights.shape[1]
        groups = shuffled_groups(columns, width, rng) if has_order else None
        made = round_codes(weights, bits, width, groups, is_symmetric=is_symmetric, dtype="F16")
        zeros = np.maximum(made.zeros, zero_offset)  # the first format cannot store a zero point of 0
        made = made._replace(zeros=zeros)
        tensors = {
            "qweight": Stored("I32", np.ascontiguousarray(pack_words(made.codes, bits).T)),  # along the inputs
            "qzeros": Stored("I32", pack_words(made.zeros.T - np.uint8(zero_offset), bits)),
            "scales": Stored("F16", np.ascontiguousarray(made.scales.T).astype("<f2")),
            "g_idx": Stored("I32", made.groups.astype("<i4")),
        }
        return Written(tensors, made.weights)

    return write


def awq(width: int) -> Any:
    """AutoAWQ's gemm version: eight outputs in a word, in the order 0 2 4 6 1 3 5 7."""

    def interleave(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        out = codes.copy()
        for first in range(0, codes.shape[1], 8):
            for place, chosen in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, first + place] = codes[:, first + chosen]
        return out

    def write(weights: Floats, _rng: np.random.Generator) -> Written:
        made = round_codes(weights, 4, width, is_symmetric=False, dtype="F16")
        tensors = {
            "qweight": Stored("I32", pack_words(interleave(made.codes.T), 4)),
            "qzeros": Stored("I32", pack_words(interleave(made.zeros.T), 4)),
            "scales": Stored("F16", np.ascontiguousarray(made.scales.T).astype("<f2")),
        }
        return Written(tensors, made.weights)

    return write


# quantization_config


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"dynamic": False, "observer": "minmax", "symmetric": True, "type": "int", **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
        },
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def packed_config(bits: int, width: int, **weights: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": width} if width > 0 else {"strategy": "channel", "group_size": None}
    return compressed_config("pack-quantized", **{"num_bits": bits, **strategy, **weights})


def float_config(strategy: str, **weights: Any) -> dict[str, Any]:
    config = compressed_config("float-quantized", num_bits=8, strategy=strategy, **{"type": "float", **weights})
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    config["config_groups"]["group_0"]["input_activations"] = activations
    return config


def gptq_config(bits: int, width: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": width, "desc_act": False, "sym": True, **changes}


def awq_config(width: int, **changes: Any) -> dict[str, Any]:
    common = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    return {**common, "group_size": width, "modules_to_not_convert": None, **changes}


def fp8_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **changes}


ROUND = {"packing_format": "auto_round:auto_gptq", "data_type": "int"}
LAYOUTS: dict[str, Layout] = {
    "fp8 blocks": Layout(fp8_config(), fp8(128, 128), "FP8"),
    "fp8 blocks, bf16 scales": Layout(fp8_config(), fp8(128, 128, scale_dtype="BF16"), "FP8"),
    "fp8 small blocks": Layout(fp8_config(weight_block_size=[32, 16]), fp8(32, 16), "FP8"),
    "fp8 whole, scalar": Layout(
        fp8_config(weight_block_size=None), fp8(0, 0, scale_dtype="BF16", shape=()), "FP8"
    ),
    "fp8 whole, AutoFP8": Layout(
        fp8_config(weight_block_size=None, activation_scheme="static"),
        fp8(0, 0, ending="weight_scale", shape=(1,)),
        "FP8",
    ),
    "ct fp8 channel": Layout(float_config("channel"), fp8(1, 0, scale_dtype="BF16", ending="weight_scale"), "FP8"),
    "ct fp8 tensor": Layout(float_config("tensor"), fp8(0, 0, ending="weight_scale", shape=(1,)), "FP8"),
    "ct fp8 block": Layout(
        float_config("block", block_structure=[128, 128]), fp8(128, 128, ending="weight_scale"), "FP8"
    ),
    **{f"ct w4 g{width}": Layout(packed_config(4, width), compressed(4, width)) for width in (32, 64, 128)},
    "ct w4 channel": Layout(packed_config(4, -1), compressed(4, -1)),
    "ct w4 asymmetric": Layout(packed_config(4, 32, symmetric=False), compressed(4, 32, is_symmetric=False)),
    "ct w4 channel asymmetric": Layout(packed_config(4, -1, symmetric=False), compressed(4, -1, is_symmetric=False)),
    "ct w4 bytes of zeros": Layout(
        packed_config(4, 32, symmetric=False), compressed(4, 32, is_symmetric=False, has_int8_zeros=True)
    ),
    "ct w4 act-order": Layout(packed_config(4, 32, actorder="group"), compressed(4, 32, has_order=True)),
    "ct w8 g64": Layout(packed_config(8, 64), compressed(8, 64), "INT8"),
    "ct w8 channel": Layout(packed_config(8, -1), compressed(8, -1), "INT8"),
    "ct w8 asymmetric": Layout(packed_config(8, 32, symmetric=False), compressed(8, 32, is_symmetric=False), "INT8"),
    "ct int8": Layout(compressed_config("int-quantized", num_bits=8, strategy="channel"), compressed_int8, "INT8"),
    **{f"awq g{width}": Layout(awq_config(width), awq(width)) for width in (32, 64, 128, -1)},
    **{
        f"gptq g{width}": Layout(gptq_config(4, width), gptq(4, width, is_symmetric=True))
        for width in (32, 64, 128, -1)
    },
    "gptq asymmetric": Layout(gptq_config(4, 32, sym=False), gptq(4, 32, is_symmetric=False)),
    "gptq v2": Layout(
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), gptq(4, 32, is_symmetric=False, zero_offset=0)
    ),
    "gptq act-order": Layout(gptq_config(4, 32, desc_act=True), gptq(4, 32, is_symmetric=False, has_order=True)),
    "gptq 8 bits": Layout(gptq_config(8, 32), gptq(8, 32, is_symmetric=True), "INT8"),
    "gptq 8 bits act-order": Layout(gptq_config(8, 64), gptq(8, 64, is_symmetric=False, has_order=True), "INT8"),
    "auto-round gptq": Layout(
        gptq_config(4, 32, **ROUND, quant_method="auto-round"), gptq(4, 32, is_symmetric=True)
    ),
    "auto-round awq": Layout(
        gptq_config(4, 32, quant_method="auto-round", packing_format="auto_round:auto_awq"), awq(32)
    ),
}  # fmt: skip


# Folders


def is_quantized(name: str) -> bool:
    return name.endswith("proj.weight")


def quantize_arrays(
    layout: Layout, arrays: Mapping[str, NDArray[Any]], seed: int = 0, chosen: Callable[[str], bool] = is_quantized
) -> tuple[dict[str, Stored], dict[str, Floats]]:
    """Return the tensors of a file, and the weights that they mean. Only `chosen` matrices are quantised."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Stored] = {}
    weights: dict[str, Floats] = {}
    for name, array in arrays.items():
        if not chosen(name):
            tensors[name], weights[name] = Stored("F32", array), array
            continue
        written = layout.write(array, rng)
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{ending}": one for ending, one in written.tensors.items()}
        weights[name] = written.weights
    return tensors, weights


def write_tensors(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """Write a folder of tensors of several types."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(mixed_safetensors(tensors))
    return folder


def write_quantized(
    folder: Path, layout: Layout, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> dict[str, Floats]:
    """Write a folder and return the weights that it means."""
    tensors, weights = quantize_arrays(layout, arrays)
    write_tensors(folder, {**settings, "quantization_config": layout.config}, tensors)
    return weights


HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 256, 256, 2, 4, 2
F32 = TensorType.F32
NUMBERS = {kind: number for number, (kind, _block) in FILE_TYPES.items()}
# Scale and minimum of blocks of random bytes whose weights are about 0.05.
SCALES = {
    "Q4_K": (4e-4, 3e-3), "Q5_K": (2e-4, 3e-3), "Q6_K": (4e-5, 0.0), "MXFP4": (0.02, 0.0), "Q4_0": (0.01, 0.0),
    "Q4_1": (0.01, -0.08), "Q5_0": (0.005, 0.0), "Q5_1": (0.005, -0.08), "Q8_0": (7e-4, 0.0),
}  # fmt: skip


def random_blocks(rng: np.random.Generator, kind: TensorType, rows: int, columns: int) -> Tensor:
    """Make a matrix of random codes, or of random numbers."""
    if kind is F32:
        return Tensor(
            (columns, rows), NUMBERS[F32], (rng.standard_normal((rows, columns)) / 20).astype("<f4").tobytes()
        )
    block = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows * columns // block.num_elements, block.num_bytes), np.uint8)
    set_scales(kind, blocks, rng.uniform(0.5, 1.5, (len(blocks), 2)) * SCALES.get(kind, (1 / 64, 1 / 64)))
    return Tensor((columns, rows), NUMBERS[kind], blocks.tobytes())


def k_quants(kind: str | None = None, num_layers: int = LAYERS) -> bytes:
    """Make a llama model in Q4_K, with values, down projections and the head in Q6_K; or all of it in `kind`."""
    rng = np.random.default_rng(0)
    most, others = (TensorType(kind), TensorType(kind)) if kind else (TensorType.Q4_K, TensorType.Q6_K)
    ones = Tensor((HIDDEN,), NUMBERS[F32], np.ones(HIDDEN, "<f4").tobytes())
    tensors = {
        "token_embd.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output.weight": random_blocks(rng, others, VOCAB, HIDDEN),
        "output_norm.weight": ones,
    }
    head_size = HIDDEN // HEADS
    for i in range(num_layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": ones,
            f"blk.{i}.ffn_norm.weight": ones,
            f"blk.{i}.attn_q.weight": random_blocks(rng, most, HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": random_blocks(rng, most, KV_HEADS * head_size, HIDDEN),
            f"blk.{i}.attn_v.weight": random_blocks(rng, others, KV_HEADS * head_size, HIDDEN),
            f"blk.{i}.attn_output.weight": random_blocks(rng, most, HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": random_blocks(rng, most, FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": random_blocks(rng, most, FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": random_blocks(rng, others, HIDDEN, FFN),
        }
    keys = llama_keys(
        llama__block_count=num_layers,
        llama__embedding_length=HIDDEN,
        llama__feed_forward_length=FFN,
        llama__attention__head_count=HEADS,
        llama__attention__head_count_kv=KV_HEADS,
    )
    return make_gguf(keys, list(tensors.items()))


def write_k_quants(folder: Path, kind: str | None = None) -> Path:
    path = folder / f"{kind or 'mixed'}.gguf"
    path.write_bytes(k_quants(kind))
    return path


def expert_quants(types: Sequence[tuple[str, str]], ffn: int = FFN) -> bytes:
    """Make a mixture of experts. `types`: of gates and ups, and of downs, in each layer; other matrices are F32."""
    rng = np.random.default_rng(0)
    head_size = HIDDEN // HEADS

    def ones(count: int) -> Tensor:
        return Tensor((count,), NUMBERS[F32], np.ones(count, "<f4").tobytes())

    def stack(kind: str, rows: int, columns: int) -> Tensor:
        whole = random_blocks(rng, TensorType(kind), EXPERTS * rows, columns)
        return whole._replace(dims=(columns, rows, EXPERTS))

    tensors = {
        "token_embd.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output.weight": random_blocks(rng, F32, VOCAB, HIDDEN),
        "output_norm.weight": ones(HIDDEN),
    }
    for i, (gate_up, down) in enumerate(types):
        layer = {
            "attn_norm": ones(HIDDEN),
            "ffn_norm": ones(HIDDEN),
            "attn_q_norm": ones(head_size),
            "attn_k_norm": ones(head_size),
            "attn_q": random_blocks(rng, F32, HIDDEN, HIDDEN),
            "attn_k": random_blocks(rng, F32, KV_HEADS * head_size, HIDDEN),
            "attn_v": random_blocks(rng, F32, KV_HEADS * head_size, HIDDEN),
            "attn_output": random_blocks(rng, F32, HIDDEN, HIDDEN),
            "ffn_gate_inp": random_blocks(rng, F32, EXPERTS, HIDDEN),
            "ffn_gate_exps": stack(gate_up, ffn, HIDDEN),
            "ffn_up_exps": stack(gate_up, ffn, HIDDEN),
            "ffn_down_exps": stack(down, HIDDEN, ffn),
        }
        tensors |= {f"blk.{i}.{name}.weight": one for name, one in layer.items()}
    keys = moe_keys(
        qwen3moe__block_count=len(types),
        qwen3moe__embedding_length=HIDDEN,
        qwen3moe__expert_feed_forward_length=ffn,
        qwen3moe__attention__head_count=HEADS,
        qwen3moe__attention__head_count_kv=KV_HEADS,
        qwen3moe__attention__key_length=head_size,
    )
    return make_gguf(keys, list(tensors.items()))
