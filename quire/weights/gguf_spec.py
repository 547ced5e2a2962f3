"""`ModelSpec` from the metadata of a GGUF file: llama.cpp's keys, and its defaults for missing keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorInfo
from quire.weights.config import (
    DTYPES,
    MAX_CONTEXT,
    MAX_FACTOR,
    MAX_FFN_SIZE,
    MAX_HEAD_SIZE,
    MAX_PLE_SIZE,
    MAX_THETA,
    MIN_FACTOR,
    MIN_THETA,
    Shape,
    make_gemma4_layers,
    read_experts,
    read_generation,
    read_layers,
    read_multiplier,
    read_shape,
    scaled_rope,
    yarn_growth,
)
from quire.weights.families import FAMILIES, GGUF_ARCHITECTURES, SHORT_CONV, Family, Ropes, Windows
from quire.weights.fields import Fields, show
from quire.weights.spec import (
    Activation,
    GenerationDefaults,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

# The Gemmas whose attention scale does not follow from their head size, by number of layers; their files omit it.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

_NAMES = {  # llama.cpp's names of the fields that it stores as config.json does
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "routed_scaling_factor": "expert_weights_scale",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "conv_L_cache": "shortconv.l_cache",
}
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
    values = _plain_values(values, family)
    values["vocab_size"] = tensors["token_embd.weight"].shape[0]
    fields = Fields(source, values | _first_sizes(values, family), prefix, _NAMES)
    _refuse_other_shapes(fields, family)
    shape = read_shape(fields)
    fields, family = _as_in_config(fields, family, shape, tensors)
    quantization = most_common_type(tensors)
    tokens = Fields(source, metadata)
    ends = [tokens.token_ids(f"tokenizer.ggml.{name}_token_id", shape.vocab_size) for name in ("eos", "eot", "eom")]
    embedding_scale = read_multiplier(fields, family, "embedding_multiplier")
    return ModelSpec(
        family=family.name,
        architecture=family.gguf,
        layers=(
            _gemma4_layers(fields, values, family, shape, tensors, read_floats)
            if family.name == "gemma4"
            else read_layers(
                fields,
                family,
                shape,
                _ropes(fields, family, shape, read_floats),
                _attention_scale(fields, family, shape),
            )
        ),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        norm_eps=shape.norm_eps,
        embedding_scale=math.sqrt(shape.hidden_size) if family.is_gemma else embedding_scale,
        logit_scale=1 / read_multiplier(fields, family, "logits_scaling"),
        logit_softcap=fields.real("final_logit_softcapping", 0, 1e6, 0.0) if family.is_gemma else 0.0,
        norm_offset=0.0,  # Gemma's offset of 1 is already in the weights
        rounds_norms_first=family.rounds_norms_first,
        is_tied="output.weight" not in tensors,
        dtype=DTYPES.get(quantization, "float16"),
        quantization=quantization,
        bos_token_id=next(iter(tokens.token_ids("tokenizer.ggml.bos_token_id", shape.vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(chain.from_iterable(ends))),
    )


def _first_sizes(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the sizes that are listed by layer as those of the first layer. They are equal, but for Gemma 4."""
    listed = {name: values[name] for name in _BY_LAYER if isinstance(values.get(name), list)}
    if family.name != "gemma4":
        num_layers = values.get("block_count")
        listed = {name: one for name, one in listed.items() if len(one) == num_layers and len(set(one)) == 1}
    return {name: sizes[0] for name, sizes in listed.items() if sizes}


def _as_in_config(
    fields: Fields, family: Family, shape: Shape, tensors: Mapping[str, TensorInfo]
) -> tuple[Fields, Family]:
    """Return fields and the family's row as `read_layers` reads them. Tensors show what the metadata omits."""
    values = dict(fields.values)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):  # Gemma 2's files may omit these, and the window
        values.setdefault(name, family.defaults.get(name))
    if family.name == "gemma2":
        values.setdefault("attention.sliding_window", family.defaults["sliding_window"])
    # 0: none. The key of Qwen is present even if the model ignores it.
    values["attention.sliding_window"] = values.get("attention.sliding_window") or None
    if isinstance(values.get("attention.sliding_window_pattern"), list):
        is_local = fields.flags("attention.sliding_window_pattern", shape.num_layers)
        values["layer_types"] = ["sliding_attention" if one else "full_attention" for one in is_local]
    if family.recurrence:
        values |= _recurrent_layers(fields, family, shape.num_layers)
    experts = family.experts
    if experts is not None:
        names = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
        values = dict.fromkeys(names, shape.ffn_size) | {experts.bias: True} | values
        values["expert_weights_scale"] = values.get("expert_weights_scale") or None
        has_router = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(shape.num_layers)]
        values["mlp_only_layers"] = [i for i, one in enumerate(has_router) if not one]
        experts = replace(
            experts,
            num_experts="expert_count",
            num_chosen="expert_used_count",
            size=names[0],
            shared_size=names[1] if experts.shared_size else "",
            # llama.cpp has it as a constant of the architecture: Qwen 3 renormalises and OLMoE does not.
            renormalizes=experts.renormalizes is True or family.name in ("qwen3_moe", "lfm2_moe"),
            num_dense_layers="",
            flag="",
            has_scale=True,
        )
    in_layers = {name.split(".", 2)[-1] for name in tensors}
    family = replace(
        family,
        qkv_bias=family.qkv_bias is True or "attn_q.bias" in in_layers,
        output_bias="attn_output.bias" in in_layers,
        mlp_bias="ffn_down.bias" in in_layers,
        windows=Windows.NONE if family.window_flag else family.windows,
        activation=family.activation or (Activation.GELU_TANH if family.is_gemma else Activation.SILU),
        experts=experts if values.get("expert_count") or (family.experts and not family.experts.flag) else None,
    )
    return Fields(fields.source, values, fields.prefix, _NAMES), family


def _recurrent_layers(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields of config.json that say which layers do not attend."""
    if "attention.recurrent_layers" in fields:
        has_state = fields.flags("attention.recurrent_layers", num_layers)
    elif (counts := fields.get("kv_heads_by_layer")) is not None:
        fields.require(len(counts) == num_layers, "num_key_value_heads", f"not a list of {num_layers} numbers")
        has_state = [one == 0 for one in counts]
    else:
        return {"full_attention_interval": fields.whole("full_attention_interval", 1, MAX_FFN_SIZE, 4)}
    return {"layer_types": [family.recurrence if one else "full_attention" for one in has_state]}


def _gemma4_layers(
    fields: Fields,
    by_layer: Mapping[str, Any],
    family: Family,
    shape: Shape,
    tensors: Mapping[str, TensorInfo],
    read_floats: ReadFloats,
) -> tuple[LayerSpec, ...]:
    """`by_layer` holds the values of sizes that may be lists."""
    window = fields.whole("attention.sliding_window", 1, MAX_CONTEXT)
    pattern = fields.flags("attention.sliding_window_pattern", shape.num_layers)
    full_size = fields.whole("head_dim", 2, MAX_HEAD_SIZE)
    local_size = fields.whole("attention.key_length_swa", 2, MAX_HEAD_SIZE, full_size)
    fields.require(
        full_size % 2 == 0 and local_size % 2 == 0, "head_dim", "heads cannot be rotated: the size is not even"
    )
    for name, size in (("rope.dimension_count", full_size), ("rope.dimension_count_swa", local_size)):
        fields.require(fields.whole(name, 2, MAX_HEAD_SIZE, size) == size, name, f"not the size of a head, {size}")
    return make_gemma4_layers(
        fields,
        Activation.GELU_TANH,
        num_heads=shape.num_heads,
        head_sizes=[local_size if one else full_size for one in pattern],
        num_kv_heads=_sizes(fields, by_layer, "attention.head_count_kv", shape.num_layers),
        ffn_sizes=_sizes(fields, by_layer, "feed_forward_length", shape.num_layers),
        windows=[window if one else 0 for one in pattern],
        has_values=[f"blk.{i}.attn_v.weight" in tensors for i in range(shape.num_layers)],
        num_shared=fields.whole("num_kv_shared_layers", 0, shape.num_layers - 1, 0),
        ple_size=fields.whole("embedding_length_per_layer_input", 0, MAX_PLE_SIZE, 0),
        rope=_gemma4_rope(fields, read_floats, full_size),
        local_rope=RopeSpec(fields.real("rope.freq_base_swa", MIN_THETA, MAX_THETA, 1e4), local_size),
        experts=read_experts(fields, family, shape.num_layers, Activation.GELU_TANH),
    )


def _sizes(fields: Fields, by_layer: Mapping[str, Any], name: str, num_layers: int) -> list[int]:
    value = by_layer.get(name)
    listed = value if isinstance(value, list) else [value] * num_layers
    fields.require(len(listed) == num_layers, name, f"not a list of {num_layers} numbers")
    items = fields.items(name, listed)
    return [items.whole(item, 1, MAX_FFN_SIZE) for item in items.values]


def _gemma4_rope(fields: Fields, read_floats: ReadFloats, head_size: int) -> RopeSpec:
    """Return the rope of full attention. Pairs that do not turn have a huge divisor in the file."""
    theta = fields.real("rope.freq_base", MIN_THETA, MAX_THETA, 1e6)
    factors = _measured(
        fields, [min(one, MAX_FACTOR) for one in read_floats("rope_freqs.weight", head_size // 2) or ()]
    )
    return RopeSpec(theta, head_size, tuple(math.inf if one == MAX_FACTOR else one for one in factors))


def _measured(fields: Fields, factors: Sequence[float]) -> tuple[float, ...]:
    """Check the divisors of a tensor of them, if there is one."""
    checked = Fields(fields.source, {"rope_freqs.weight": factors})
    return checked.reals("rope_freqs.weight", len(factors), MIN_FACTOR, MAX_FACTOR)


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
        is_set = any(value) if isinstance(value, list) else bool(value)
        fields.support(not is_set, f"{fields.prefix}{name} is {show(value)}: not supported")
    fields.support(
        fields.get("rope.scaling.finetuned") is not False or fields.prefix != "granite.",
        f"{fields.prefix}rope.scaling.finetuned is false: not supported",
    )
    fields.support(
        family.recurrence != SHORT_CONV or not fields.get("attention.sliding_window"),
        f"{fields.prefix}attention.sliding_window: not supported",
    )
    fields.support(
        fields.get("attention.value_length") in (None, fields.get("attention.key_length")),
        f"{fields.prefix}attention.value_length differs from key_length",
    )


def _attention_scale(fields: Fields, family: Family, shape: Shape) -> float:
    if fields.get("attention.scale"):
        return fields.real("attention.scale", 0, 1e6, above_low=True)
    is_27b = GEMMA_27B_LAYERS.get(family.name) == shape.num_layers
    return float((shape.hidden_size / shape.num_heads if is_27b else shape.head_size) ** -0.5)


# Recurrent layers


def _plain_values(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return metadata in the form of models without a recurrence: one number of KV heads, no layers of the MTP head."""
    found = dict(values)
    if not family.recurrence:
        return found
    if "feed_forward_length" not in found and "expert_feed_forward_length" in found:
        found["feed_forward_length"] = found["expert_feed_forward_length"]
    num_layers, num_extra = found.get("block_count"), found.get("nextn_predict_layers", 0)
    if isinstance(num_layers, int) and isinstance(num_extra, int) and 0 < num_extra < num_layers:
        found["block_count"] = num_layers - num_extra
        found["nextn_predict_layers"] = 0
        for name, value in found.items():
            if isinstance(value, list) and len(value) == num_layers:
                found[name] = value[: num_layers - num_extra]
    found.pop("rope.dimension_sections", None)  # rows of an image; the positions of text are equal in all of them
    counts = found.get("attention.head_count_kv")
    if isinstance(counts, list) and all(isinstance(one, int) for one in counts):
        used = {one for one in counts if one}
        if len(used) == 1:
            found |= {"attention.head_count_kv": used.pop(), "kv_heads_by_layer": counts}
    return found


# Rotary embeddings


def _ropes(fields: Fields, family: Family, shape: Shape, read_floats: ReadFloats) -> tuple[RopeSpec, RopeSpec | None]:
    rotary_size = fields.whole("rope.dimension_count", 2, shape.head_size, shape.head_size)
    is_right = rotary_size % 2 == 0 and (rotary_size == shape.head_size or family.has_partial_rotary)
    fields.require(is_right, "rope.dimension_count", f"not the size of a head, {shape.head_size}")
    theta = fields.real("rope.freq_base", MIN_THETA, MAX_THETA, 1e4)
    scaling = _scaling(fields, family, shape)
    for key, name in (("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")):
        factors = read_floats(name, rotary_size // 2)
        if factors is not None:
            scaling.values = {**scaling.values, key: factors}
    if "short_factor" in scaling:
        # The file holds the final number; the values it is computed from may be missing.
        attention = fields.real("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0)
        scaling.values = {**scaling.values, "type": "longrope", "attention_factor": attention}
    rope = scaled_rope(scaling, theta, rotary_size, shape.max_model_len)
    measured = read_floats("rope_freqs.weight", rotary_size // 2)
    if measured is not None:
        rope = RopeSpec(theta, rotary_size, _measured(fields, measured))
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
    context = fields.whole("rope.scaling.original_context_length", 1, MAX_CONTEXT, shape.max_model_len)
    values: dict[str, Any] = {"type": kind, "factor": factor, "original_max_position_embeddings": context}
    if kind == "linear" and factor is None:
        values["factor"] = 1.0
    if kind == "yarn":
        values |= _yarn(fields, family, factor or shape.max_model_len / context)
    return Fields(fields.source, values, f"{fields.prefix}rope.scaling.")


def _yarn(fields: Fields, family: Family, factor: float) -> dict[str, Any]:
    multiplier = fields.real("rope.scaling.yarn_log_multiplier", 0, MAX_FACTOR, 0.0)
    fields.support(
        not multiplier or family.has_query_scaling,
        f"{fields.prefix}rope.scaling.yarn_log_multiplier is {multiplier:g}: not supported",
    )
    ext_factor = fields.get("rope.scaling.yarn_ext_factor")
    fields.support(
        ext_factor in (None, 1.0), f"{fields.prefix}rope.scaling.yarn_ext_factor is {show(ext_factor)}: not supported"
    )

    # In llama.cpp this value multiplies the default attention factor; in transformers it replaces the default.
    given = fields.real("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0)
    return {
        "beta_fast": fields.find_real("rope.scaling.yarn_beta_fast", MIN_FACTOR, MAX_FACTOR),
        "beta_slow": fields.find_real("rope.scaling.yarn_beta_slow", MIN_FACTOR, MAX_FACTOR),
        "truncate": family.name != "gpt_oss",  # as the model was trained; llama.cpp truncates for every model
        "attention_factor": given * yarn_growth(factor) / (yarn_growth(factor, multiplier) if multiplier else 1),
    }
