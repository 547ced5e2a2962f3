"""`ModelSpec` from the metadata of a GGUF file: llama.cpp's keys, and its defaults for missing keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights import gemma4
from quire.weights.checkpoint import TensorInfo
from quire.weights.config import (
    DTYPES,
    MAX_FFN_SIZE,
    MAX_LAYERS,
    MAX_MULTIPLIER,
    Shape,
    ShapeKeys,
    read_generation,
    read_num_experts,
    read_shape,
)
from quire.weights.families import FAMILIES, GGUF_ARCHITECTURES, Family, Recurrence, Ropes, Windows
from quire.weights.fields import Fields, show
from quire.weights.recurrence import gguf_values, read_gguf_recurrent
from quire.weights.rope import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_FACTOR, MIN_THETA, scaled_rope
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    GenerationDefaults,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    QueryScaling,
    RopeSpec,
)

# The Gemmas whose attention scale does not follow from their head size, by number of layers; their files omit it.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

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
# Fields that change the equations if they are not 0.
# The last one: GLM-4.1V, whose rows have another order.
_UNKNOWN_EQUATIONS = ("attention.q_lora_rank", "nextn_predict_layers", "rope.dimension_sections")
_UNKNOWN_EXPERTS = ("expert_shared_count", "expert_shared_feed_forward_length")  # if there are routed experts
# Sizes that some files list by layer, although they are equal.
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
ReadFloats = Callable[[str, int], list[float] | None]


def find_family(metadata: Mapping[str, Any], source: str) -> Family:
    """Return the family. Several families share the name of an architecture: their fields tell them apart."""
    name = metadata.get("general.architecture")
    if name is None:
        raise ModelFileError(f"{source}: general.architecture is missing")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: architecture {show(name)} is not supported; these run: {', '.join(GGUF_ARCHITECTURES)}."
            " The model's folder of safetensors may run through transformers, on the torch backend"
        )
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    has_window = bool(metadata.get(f"{name}.attention.sliding_window"))
    rows = [row for row in FAMILIES if row.gguf == name]
    candidates = [row for row in rows if (row.experts is not None) == has_experts or (row.experts and row.experts.flag)]
    if not candidates:
        problem = "with experts is not supported" if has_experts else "needs expert_count, which is missing or 0"
        raise UnsupportedModel(f"{source}: architecture {name} {problem}")
    if name in ("llama", "olmo2"):  # Mistral's and OLMo 3's differ by their window
        return candidates[-1] if has_window else candidates[0]
    return candidates[0]


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read_floats: ReadFloats, source: str
) -> ModelSpec:
    """Make a spec. `tensors` (by GGUF name) shows what the metadata omits: tied embeddings and biases."""
    family = find_family(metadata, source)
    prefix = f"{family.gguf}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if "token_embd.weight" not in tensors:
        raise ModelFileError(f"{source}: tensor token_embd.weight is missing")
    values = gguf_values(values, family)
    values["vocab_size"] = tensors["token_embd.weight"].shape[0]
    plain = gemma4.first_sizes(values) if family.name == "gemma4" else _equal_sizes(values)
    fields = Fields(source, values | plain, prefix)
    _refuse_other_shapes(fields, family)
    shape = read_shape(fields, _KEYS)
    quantization = most_common_type(tensors)
    tokens = Fields(source, metadata)
    embedding_scale = _multiplier(fields, family, "embedding_scale")
    return ModelSpec(
        family=family.name,
        architecture=family.gguf,
        layers=(
            _gemma4_layers(fields, values, family, shape, tensors, read_floats)
            if family.name == "gemma4"
            else _layers(fields, family, shape, tensors, read_floats)
        ),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        norm_eps=shape.norm_eps,
        embedding_scale=math.sqrt(shape.hidden_size) if family.is_gemma else embedding_scale,
        logit_scale=1 / _multiplier(fields, family, "logit_scale"),
        logit_softcap=_softcap(fields, family, "final_logit_softcapping"),
        norm_offset=0.0,  # Gemma's offset of 1 is already in the weights
        rounds_norms_first=family.rounds_norms_first,
        is_tied="output.weight" not in tensors,
        dtype=DTYPES.get(quantization, "float16"),
        quantization=quantization,
        bos_token_id=next(iter(tokens.token_ids("tokenizer.ggml.bos_token_id", shape.vocab_size)), None),
        eos_token_ids=_eos(tokens, shape.vocab_size),
    )


def _equal_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that are listed by layer and equal in all of them."""
    listed = {name: values[name] for name in _BY_LAYER if isinstance(values.get(name), list)}
    num_layers = values.get("block_count")
    return {name: one[0] for name, one in listed.items() if one and len(one) == num_layers and len(set(one)) == 1}


def _softcap(fields: Fields, family: Family, name: str) -> float:
    default = float(family.defaults.get(name, 0.0))  # Gemma 2's files may omit it
    return fields.real(name, 0, 1e6, default) if family.is_gemma else 0.0


def _multiplier(fields: Fields, family: Family, name: str) -> float:
    return fields.real(name, 0, MAX_MULTIPLIER, 1.0, above_low=True) if family.has_multipliers else 1.0


# Layers


def _layers(
    fields: Fields, family: Family, shape: Shape, tensors: Mapping[str, TensorInfo], read_floats: ReadFloats
) -> tuple[LayerSpec, ...]:
    rope, local_rope = _ropes(fields, family, shape, read_floats)
    windows = _windows(fields, family, shape.num_layers)
    activation = family.activation or (Activation.GELU_TANH if family.is_gemma else Activation.SILU)
    dense = MlpSpec(shape.ffn_size, activation, has_bias="blk.0.ffn_down.bias" in tensors)
    experts = _experts(fields, family, shape, activation)
    recurrent = read_gguf_recurrent(fields, family, shape.num_layers)
    first = recurrent.index(None)  # whose tensors show the biases
    attention = {
        window: AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=_attention_scale(fields, family, shape),
            rope=local_rope if window and local_rope else rope,
            window=window,
            softcap=_softcap(fields, family, "attn_logit_softcapping"),
            qk_norm=family.qk_norm,
            query_scaling=_query_scaling(fields, family),
            has_qkv_bias=family.qkv_bias is True or f"blk.{first}.attn_q.bias" in tensors,
            has_output_bias=f"blk.{first}.attn_output.bias" in tensors,
            has_gate=family.has_gate,
            has_sinks=family.has_sinks,
        )
        for window in dict.fromkeys(windows)
    }
    has_rope = [not family.no_rope_every or (i + 1) % family.no_rope_every != 0 for i in range(shape.num_layers)]
    return tuple(
        LayerSpec(
            mixer=recurrent[index]
            or (attention[windows[index]] if has_rope[index] else replace(attention[windows[index]], rope=None)),
            mlp=experts if experts and f"blk.{index}.ffn_gate_inp.weight" in tensors else dense,
            has_pre_norms=family.has_pre_norms,
            has_post_norms=family.has_post_norms,
            residual_scale=_multiplier(fields, family, "residual_scale"),
        )
        for index in range(shape.num_layers)
    )


def _gemma4_layers(
    fields: Fields,
    values: Mapping[str, Any],
    family: Family,
    shape: Shape,
    tensors: Mapping[str, TensorInfo],
    read_floats: ReadFloats,
) -> tuple[LayerSpec, ...]:
    layers = gemma4.from_gguf(
        fields,
        values,
        tensors,
        read_floats,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        experts=_experts(fields, family, shape, Activation.GELU_TANH),
    )
    return layers.specs(Activation.GELU_TANH)


def _experts(fields: Fields, family: Family, shape: Shape, activation: Activation) -> ExpertsSpec | None:
    if family.experts is None or (family.experts.flag and not fields.get("expert_count")):
        return None
    num_experts = read_num_experts(fields, "expert_count", shape.num_layers)
    rule = family.experts.renormalizes
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=fields.whole("expert_used_count", 1, num_experts),
        size=fields.whole("expert_feed_forward_length", 1, MAX_FFN_SIZE, shape.ffn_size),
        activation=activation,
        # llama.cpp has it as a constant of the architecture: Qwen 3 renormalises and OLMoE does not.
        renormalizes=rule if isinstance(rule, bool) else family.name in ("qwen3_moe", "lfm2_moe"),
        scale=fields.real("expert_weights_scale", 0, MAX_MULTIPLIER, 1.0) or 1.0,
        has_sigmoid=bool(family.experts.bias),
        has_expert_bias=bool(family.experts.bias),
        shared_size=_shared_size(fields, family, shape),
        has_bias=family.experts.has_bias,
        has_router_bias=family.experts.has_bias,
        has_router_norm=family.experts.is_parallel,
        has_expert_scales=family.experts.is_parallel,
    )


def _shared_size(fields: Fields, family: Family, shape: Shape) -> int:
    if family.experts is None or not family.experts.shared_size:
        return 0
    return fields.whole("expert_shared_feed_forward_length", 1, MAX_FFN_SIZE, shape.ffn_size)


def _query_scaling(fields: Fields, family: Family) -> QueryScaling | None:
    beta = fields.real("attention.temperature_scale", 0, MAX_FACTOR, 0.0) if family.has_query_scaling else 0.0
    if not beta:
        return None
    return QueryScaling(beta, fields.whole("rope.scaling.original_context_length", 1, MAX_CONTEXT))


def most_common_type(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the type of most bytes, without the embedding, which is often stored with more bits."""
    num_bytes: Counter[str] = Counter()
    for name, info in tensors.items():
        if not name.startswith(("token_embd.", "model.embed_tokens.")) or len(tensors) == 1:
            num_bytes[info.type] += info.num_bytes
    return str(num_bytes.most_common(1)[0][0]) if num_bytes else "F32"


def generation_from_gguf(metadata: Mapping[str, Any], source: str) -> GenerationDefaults:
    return read_generation({name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}, source)


def _refuse_other_shapes(fields: Fields, family: Family) -> None:
    knows_shared = family.experts is None or bool(family.experts.shared_size)
    names = _UNKNOWN_EQUATIONS + (() if knows_shared else _UNKNOWN_EXPERTS)
    for name in names:
        value = fields.get(name)
        if any(value) if isinstance(value, list) else value:
            raise UnsupportedModel(f"{fields.source}: {fields.prefix}{name} is {show(value)}: not supported")
    if fields.get("rope.scaling.finetuned") is False and fields.prefix == "granite.":  # its switch for no positions
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}rope.scaling.finetuned is false: not supported")
    if family.recurrence is Recurrence.SHORT_CONV and fields.get("attention.sliding_window"):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}attention.sliding_window: not supported")
    if fields.get("attention.value_length") not in (None, fields.get("attention.key_length")):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}attention.value_length differs from key_length")


def _attention_scale(fields: Fields, family: Family, shape: Shape) -> float:
    if fields.get("attention.scale"):
        return fields.real("attention.scale", 0, 1e6, above_low=True)
    is_27b = GEMMA_27B_LAYERS.get(family.name) == shape.num_layers
    return float((shape.hidden_size / shape.num_heads if is_27b else shape.head_size) ** -0.5)


def _eos(tokens: Fields, vocab_size: int) -> tuple[int, ...]:
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for name in names for token in tokens.token_ids(name, vocab_size)))


# Rotary embeddings


def _ropes(fields: Fields, family: Family, shape: Shape, read_floats: ReadFloats) -> tuple[RopeSpec, RopeSpec | None]:
    rotary_size = fields.whole("rope.dimension_count", 2, shape.head_size, shape.head_size)
    if rotary_size % 2 or (rotary_size != shape.head_size and not family.has_partial_rotary):
        raise fields.wrong("rope.dimension_count", f"not the size of a head, {shape.head_size}")
    theta = fields.real("rope.freq_base", MIN_THETA, MAX_THETA, 1e4)
    scaling = _scaling(fields, family, shape)
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
    if family.ropes is Ropes.ONE:
        return rope, None
    default = 1e4 if family.ropes is Ropes.LOCAL_BASE else theta
    return rope, RopeSpec(fields.real("rope.freq_base_swa", MIN_THETA, MAX_THETA, default), rotary_size)


def _scaling(fields: Fields, family: Family, shape: Shape) -> Fields:
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
        values |= _yarn(fields, family, factor or shape.max_model_len / context)
    return Fields(fields.source, values, f"{fields.prefix}rope.scaling.")


def _yarn(fields: Fields, family: Family, factor: float) -> dict[str, Any]:
    multiplier = fields.real("rope.scaling.yarn_log_multiplier", 0, MAX_FACTOR, 0.0)
    if multiplier and not family.has_query_scaling:
        raise UnsupportedModel(
            f"{fields.source}: {fields.prefix}rope.scaling.yarn_log_multiplier is {multiplier:g}: not supported"
        )
    ext_factor = fields.get("rope.scaling.yarn_ext_factor")
    if ext_factor not in (None, 1.0):
        raise UnsupportedModel(
            f"{fields.source}: {fields.prefix}rope.scaling.yarn_ext_factor is {show(ext_factor)}: not supported"
        )

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    # In llama.cpp this value multiplies the default attention factor; in transformers it replaces the default.
    given = fields.real("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0)
    return {
        "beta_fast": fields.find_real("rope.scaling.yarn_beta_fast", MIN_FACTOR, MAX_FACTOR),
        "beta_slow": fields.find_real("rope.scaling.yarn_beta_slow", MIN_FACTOR, MAX_FACTOR),
        "truncate": family.name != "gpt_oss",  # as the model was trained; llama.cpp truncates for every model
        "attention_factor": given * grown(1) / (grown(multiplier) if multiplier else 1),
    }


# Windows


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.windows is Windows.NONE or family.window_flag:  # Qwen's key is present even if the model ignores it
        return (0,) * num_layers
    default = int(family.defaults.get("sliding_window") or 0) if family.name == "gemma2" else 0
    window = fields.whole("attention.sliding_window", 0, MAX_CONTEXT, default)
    if family.windows is Windows.ALL:
        return (window,) * num_layers
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
            raise fields.wrong("attention.sliding_window_pattern", f"not {num_layers} times true or false")
        return tuple(window if one else 0 for one in pattern)
    every = fields.whole("attention.sliding_window_pattern", 1, MAX_LAYERS, family.full_every)
    return tuple(window if (i + 1) % every else 0 for i in range(num_layers))
