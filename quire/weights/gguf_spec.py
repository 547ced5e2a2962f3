"""`ModelSpec` from the metadata of a GGUF file: llama.cpp's keys, and its defaults for missing keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorInfo
from quire.weights.config import DTYPES, MAX_LAYERS, Shape, ShapeKeys, read_generation, read_shape
from quire.weights.fields import Fields, show
from quire.weights.rope import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_FACTOR, MIN_THETA, scaled_rope
from quire.weights.spec import Activation, GenerationDefaults, ModelSpec, RopeSpec

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
GEMMA3_27B_LAYERS = 62  # the one Gemma whose attention scale does not follow from its head size; its files omit it

_KEYS = ShapeKeys(
    num_layers="block_count",
    hidden_size="embedding_length",
    ffn_size="feed_forward_length",
    num_heads="attention.head_count",
    num_kv_heads="attention.head_count_kv",
    head_size="attention.key_length",
    vocab_size="vocab_size",
    max_model_len="context_length",
    norm_eps="attention.layer_norm_rms_epsilon",
)
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
ReadFloats = Callable[[str, int], list[float] | None]


def find_family(metadata: Mapping[str, Any], source: str) -> str:
    name = metadata.get("general.architecture")
    if name is None:
        raise ModelFileError(f"{source}: general.architecture is missing")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModel(
            f"{source}: architecture {show(name)} is not supported; these run: {', '.join(FAMILIES)}"
        )
    return name


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read_floats: ReadFloats, source: str
) -> ModelSpec:
    """Make a spec. `tensors` (by GGUF name) shows what the metadata omits: tied embeddings and biases."""
    family = find_family(metadata, source)
    values = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    if "token_embd.weight" not in tensors:
        raise ModelFileError(f"{source}: tensor token_embd.weight is missing")
    values["vocab_size"] = tensors["token_embd.weight"].shape[0]
    fields = Fields(source, values, f"{family}.")
    _refuse_other_shapes(fields)
    shape = read_shape(fields, _KEYS)
    rope, local_rope = _ropes(fields, family, shape, read_floats)
    is_gemma = family == "gemma3"
    quantization = most_common_type(tensors)
    tokens = Fields(source, metadata)
    return ModelSpec(
        family=family,
        architecture=family,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        norm_eps=shape.norm_eps,
        rope=rope,
        local_rope=local_rope,
        windows=_windows(fields, family, shape.num_layers),
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        attention_scale=_attention_scale(fields, is_gemma, shape),
        embedding_scale=math.sqrt(shape.hidden_size) if is_gemma else 1.0,
        norm_offset=0.0,  # Gemma's offset of 1 is already in the weights
        attention_softcap=fields.real("attn_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
        logit_softcap=fields.real("final_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
        is_tied="output.weight" not in tensors,
        has_qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_down.bias" in tensors,
        has_qk_norm=family in ("qwen3", "gemma3"),
        has_post_norms=is_gemma,
        is_fused=family == "phi3",
        dtype=DTYPES.get(quantization, "float16"),
        quantization=quantization,
        bos_token_id=next(iter(tokens.token_ids("tokenizer.ggml.bos_token_id", shape.vocab_size)), None),
        eos_token_ids=_eos(tokens, shape.vocab_size),
    )


def most_common_type(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the type of most bytes, without the embedding, which is often stored with more bits."""
    num_bytes: Counter[str] = Counter()
    for name, info in tensors.items():
        if not name.startswith(("token_embd.", "model.embed_tokens.")) or len(tensors) == 1:
            num_bytes[info.type] += info.num_bytes
    return str(num_bytes.most_common(1)[0][0]) if num_bytes else "F32"


def generation_from_gguf(metadata: Mapping[str, Any], source: str) -> GenerationDefaults:
    return read_generation({name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}, source)


def _refuse_other_shapes(fields: Fields) -> None:
    for name in ("expert_count", "attention.q_lora_rank"):
        if fields.get(name):
            raise UnsupportedModel(f"{fields.source}: {fields.prefix}{name} is {show(fields.get(name))}: not supported")
    if fields.get("attention.value_length") not in (None, fields.get("attention.key_length")):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}attention.value_length differs from key_length")


def _attention_scale(fields: Fields, is_gemma: bool, shape: Shape) -> float:
    if "attention.scale" in fields:
        return fields.real("attention.scale", 0, 1e6, above_low=True)
    is_27b = is_gemma and shape.num_layers == GEMMA3_27B_LAYERS
    return float((shape.hidden_size / shape.num_heads if is_27b else shape.head_size) ** -0.5)


def _eos(tokens: Fields, vocab_size: int) -> tuple[int, ...]:
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for name in names for token in tokens.token_ids(name, vocab_size)))


# Rotary embeddings


def _ropes(fields: Fields, family: str, shape: Shape, read_floats: ReadFloats) -> tuple[RopeSpec, RopeSpec | None]:
    rotary_size = fields.whole("rope.dimension_count", 2, shape.head_size, shape.head_size)
    if rotary_size % 2 or (rotary_size != shape.head_size and family != "phi3"):
        raise fields.wrong("rope.dimension_count", f"not the size of a head, {shape.head_size}")
    theta = fields.real("rope.freq_base", MIN_THETA, MAX_THETA, 1e4)
    scaling = _scaling(fields, shape)
    for key, name in (("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")):
        factors = read_floats(name, rotary_size // 2)
        if factors is not None:
            scaling.values = {**scaling.values, key: factors}
    if "short_factor" in scaling:
        scaling.values = {**scaling.values, "type": "longrope"}
        # The file holds the final number; the values it is computed from may be missing.
        attention = fields.real("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0)
        scaling.values = {**scaling.values, "attention_factor": attention}
    rope = scaled_rope(scaling, theta, rotary_size, shape.max_model_len)
    measured = read_floats("rope_freqs.weight", rotary_size // 2)
    if measured is not None:
        factors_read = Fields(fields.source, {"rope_freqs.weight": measured})
        rope = RopeSpec(
            theta, rotary_size, factors_read.reals("rope_freqs.weight", rotary_size // 2, MIN_FACTOR, MAX_FACTOR)
        )
    if family != "gemma3":
        return rope, None
    return rope, RopeSpec(fields.real("rope.freq_base_swa", MIN_THETA, MAX_THETA, 1e4), rotary_size)


def _scaling(fields: Fields, shape: Shape) -> Fields:
    """Return the rope.scaling.* keys in the form of config.json."""
    kind = fields.find_text("rope.scaling.type")
    factor = fields.find_real("rope.scaling.factor", MIN_FACTOR, MAX_FACTOR)
    if kind is None and (old := fields.find_real("rope.scale_linear", MIN_FACTOR, MAX_FACTOR)):
        kind, factor = "linear", old
    values: dict[str, Any] = {"type": kind, "factor": factor}
    if kind == "linear" and factor is None:
        values["factor"] = 1.0
    context = fields.whole("rope.scaling.original_context_length", 1, MAX_CONTEXT, shape.max_model_len)
    values["original_max_position_embeddings"] = context
    if kind == "yarn":
        values |= _yarn(fields, factor or shape.max_model_len / context)
    return Fields(fields.source, values, f"{fields.prefix}rope.scaling.")


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    for name in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
        if fields.get(name) not in (None, 0.0 if name.endswith("multiplier") else 1.0):
            raise UnsupportedModel(f"{fields.source}: {fields.prefix}{name} is {show(fields.get(name))}: not supported")
    # In llama.cpp this value multiplies the default attention factor; in transformers it replaces the default.
    given = fields.real("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0)
    grown = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return {
        "beta_fast": fields.find_real("rope.scaling.yarn_beta_fast", MIN_FACTOR, MAX_FACTOR),
        "beta_slow": fields.find_real("rope.scaling.yarn_beta_slow", MIN_FACTOR, MAX_FACTOR),
        "attention_factor": given * grown,
    }


# Windows


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    if family in ("qwen2", "qwen3"):  # the key is present even if the model does not use it
        return (0,) * num_layers
    window = fields.whole("attention.sliding_window", 0, MAX_CONTEXT, 0)
    if family != "gemma3":
        return (window,) * num_layers
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
            raise fields.wrong("attention.sliding_window_pattern", f"not {num_layers} times true or false")
        return tuple(window if one else 0 for one in pattern)
    every = fields.whole("attention.sliding_window_pattern", 1, MAX_LAYERS, 6)
    return tuple(window if (i + 1) % every else 0 for i in range(num_layers))
