"""`ModelSpec` from Hugging Face's config.json, in the forms transformers 4 and 5 write.

A missing field has the default of transformers. A model that quire cannot compute is refused here, and the error names
the field: a model that loads and then answers nonsense is worse than one that does not load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.errors import UnsupportedModel
from quire.weights import gemma4
from quire.weights.families import BY_ARCHITECTURE, BY_MODEL_TYPE, BY_NAME, Family, Ropes, Windows
from quire.weights.fields import Fields, show
from quire.weights.quantization import read_quantization
from quire.weights.recurrence import lfm2_ffn_size, lfm2_values, read_recurrent
from quire.weights.rope import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_THETA, scaled_rope
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

MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 131_072
MAX_FFN_SIZE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1024
MAX_VOCAB_SIZE = 4 << 20
MAX_EXPERTS = 4096
MAX_ALL_EXPERTS = 1 << 16  # of all layers: a forged number would take memory before the weights are read
MAX_TOP_K = (1 << 31) - 1
MAX_MULTIPLIER = 1e6

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
# Fields whose null replaces the default of transformers.
_NULLS = (
    "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "num_key_value_heads",
    "hidden_size_per_layer_input",
)  # fmt: skip
_TEXT_TYPES = {"ministral3": ("mistral",)}  # further values of text_config.model_type
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
QUANTIZED = ("quantization", "quantization_config")  # fields that say that weights are quantised. MLX writes both
MAX_NAME_LENGTH = 100
_ARCHITECTURE = re.compile(rf"[\w.-]{{1,{MAX_NAME_LENGTH}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, checked against their limits and against each other."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class ShapeKeys:
    """A file format's names of the sizes."""

    num_layers: str = "num_hidden_layers"
    hidden_size: str = "hidden_size"
    ffn_size: str = "intermediate_size"
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    head_size: str = "head_dim"
    vocab_size: str = "vocab_size"
    max_model_len: str = "max_position_embeddings"
    norm_eps: str = "rms_norm_eps"


def read_shape(fields: Fields, keys: ShapeKeys) -> Shape:
    hidden_size = fields.whole(keys.hidden_size, 1, MAX_HIDDEN_SIZE)
    num_heads = fields.whole(keys.num_heads, 1, MAX_HEADS)
    num_kv_heads = fields.whole(keys.num_kv_heads, 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong(keys.num_kv_heads, f"does not divide {keys.num_heads} {num_heads}")
    head_size = fields.find_whole(keys.head_size, 2, MAX_HEAD_SIZE)
    if head_size is None:
        head_size = hidden_size // num_heads
        if hidden_size % num_heads or not 2 <= head_size <= MAX_HEAD_SIZE:
            raise fields.wrong(keys.hidden_size, f"not {keys.num_heads} {num_heads} times 2 to {MAX_HEAD_SIZE}")
    if head_size % 2:
        raise fields.wrong(keys.head_size, f"heads of {head_size} cannot be rotated: the size is not even")
    return Shape(
        num_layers=fields.whole(keys.num_layers, 1, MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=fields.whole(keys.ffn_size, 1, MAX_FFN_SIZE),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=fields.whole(keys.vocab_size, 1, MAX_VOCAB_SIZE),
        max_model_len=fields.whole(keys.max_model_len, 1, MAX_CONTEXT),
        norm_eps=_eps(fields, keys.norm_eps),
    )


def _eps(fields: Fields, name: str) -> float:
    default = 1e-6 if name == ShapeKeys().norm_eps else None  # llama.cpp and LFM2 have no default
    eps = fields.real(name, 0, 1, default, above_low=True)
    if eps == 1:
        raise fields.wrong(name, "not below 1")
    return eps


def spec_from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str, quantization: str
) -> ModelSpec:
    """Make a spec. `quantization` is the type of most weights, which config.json does not always contain."""
    whole = Fields(source, config)
    refuse_quantized(whole)
    architecture = find_architecture(whole)
    family = BY_ARCHITECTURE[architecture]
    fields = _text_fields(whole, family, architecture)
    refuse_other_layers(whole)
    _refuse_settings(fields, family)
    shape = read_shape(fields, ShapeKeys(ffn_size=family.ffn_size, norm_eps=family.norm_eps))
    if family.name == "lfm2":
        shape = replace(shape, ffn_size=lfm2_ffn_size(fields, shape.ffn_size))
    is_gemma, scales = family.is_gemma, _multipliers(fields, family)
    return ModelSpec(
        family=family.name,
        architecture=architecture,
        layers=_layers(fields, family, shape, scales),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        norm_eps=shape.norm_eps,
        embedding_scale=math.sqrt(shape.hidden_size) if is_gemma else scales.embedding,
        logit_scale=1 / scales.logits,
        logit_softcap=fields.real("final_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
        norm_offset=1.0 if family.has_norm_offset or (is_gemma and not family.has_plain_norms) else 0.0,
        rounds_norms_first=family.rounds_norms_first,
        is_tied=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields, whole, quantization),
        quantization=quantization,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", shape.vocab_size)), None),
        eos_token_ids=read_eos(fields, generation, shape.vocab_size),
    )


def _refuse_settings(fields: Fields, family: Family) -> None:
    """Raise for settings that change the equations and that quire does not know."""
    if fields.prefix:
        _refuse_other_text_model(fields, family)
    if family.name == "gemma4":
        gemma4.refuse_settings(fields)
    elif family.is_gemma and fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"{fields.source}: use_bidirectional_attention is true: only causal models are supported"
        )
    if family.activation is Activation.CLAMPED_SWIGLU:
        for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if fields.real(name, 0, MAX_MULTIPLIER) != known:
                raise UnsupportedModel(
                    f"{fields.source}: {name} is {show(fields.get(name))}: only {known} is supported"
                )
    if fields.get("clip_qkv") is not None:
        raise UnsupportedModel(f"{fields.source}: clip_qkv is {show(fields.get('clip_qkv'))}: not supported")
    if family.name == "ministral3" and fields.get("model_type") == "ministral3":
        fields.table("rope_parameters").real("rope_theta", MIN_THETA, MAX_THETA)  # required: its default is not plain


# Layers


def _layers(fields: Fields, family: Family, shape: Shape, scales: _Multipliers) -> tuple[LayerSpec, ...]:
    if family.name == "gemma4":
        return _gemma4_layers(fields, family, shape)
    rope, local_rope = _ropes(fields, family, shape)
    has_rope = _has_rope(fields, family, shape.num_layers)
    is_gemma = family.is_gemma
    scale_of = fields.real("query_pre_attn_scalar", 0, 1e6, above_low=True) if is_gemma else float(shape.head_size)
    activation = family.activation or _activation(fields, "hidden_activation" if is_gemma else "hidden_act")
    dense = MlpSpec(shape.ffn_size, activation, has_bias=_bias(fields, family.mlp_bias))
    experts = _experts(fields, family, shape.num_layers, activation)
    is_routed = _routed_layers(fields, family, shape.num_layers)
    windows = _windows(fields, family, shape.num_layers)
    recurrent = read_recurrent(fields, family, shape.num_layers)
    attention = {
        window: AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=scale_of**-0.5 if scales.attention is None else scales.attention,
            rope=local_rope if window and local_rope else rope,
            window=window,
            softcap=fields.real("attn_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
            qk_norm=family.qk_norm,
            query_scaling=_query_scaling(fields, family),
            has_qkv_bias=_bias(fields, family.qkv_bias),
            has_output_bias=_bias(fields, family.output_bias),
            has_sinks=family.has_sinks,
            has_gate=family.has_gate,
        )
        for window in dict.fromkeys(windows)
    }
    return tuple(
        LayerSpec(
            mixer=recurrent[index]
            or (attention[windows[index]] if has_rope[index] else replace(attention[windows[index]], rope=None)),
            mlp=experts if experts and is_routed[index] else dense,
            has_pre_norms=family.has_pre_norms,
            has_post_norms=family.has_post_norms,
            residual_scale=scales.residual,
        )
        for index in range(shape.num_layers)
    )


def _gemma4_layers(fields: Fields, family: Family, shape: Shape) -> tuple[LayerSpec, ...]:
    activation = _activation(fields, "hidden_activation")
    layers = gemma4.from_config(
        fields,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        ffn_size=shape.ffn_size,
        experts=_experts(fields, family, shape.num_layers, activation),
    )
    return layers.specs(activation)


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def _has_rope(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    if not family.no_rope_every:
        return [True] * num_layers
    listed = fields.get("no_rope_layers")  # despite its name, 1 is for a layer with positions
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
            raise fields.wrong("no_rope_layers", f"not a list of {num_layers} times 0 or 1")
        return [bool(one) for one in listed]
    every = fields.whole("no_rope_layer_interval", 1, MAX_LAYERS, family.no_rope_every)
    return [(i + 1) % every != 0 for i in range(num_layers)]


class _Multipliers(NamedTuple):
    embedding: float = 1.0
    attention: float | None = None  # None: one over the root of the head size
    residual: float = 1.0
    logits: float = 1.0  # logits are divided by it


def _multipliers(fields: Fields, family: Family) -> _Multipliers:
    if not family.has_multipliers:
        return _Multipliers()

    def read(name: str) -> float:
        return fields.real(name, 0, MAX_MULTIPLIER, 1.0, above_low=True)

    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return _Multipliers(*map(read, names))


def _query_scaling(fields: Fields, family: Family) -> QueryScaling | None:
    rope = fields.table("rope_parameters")
    beta = rope.find_real("llama_4_scaling_beta", 0, MAX_FACTOR)
    if not family.has_query_scaling or not beta:
        return None
    return QueryScaling(beta, rope.whole("original_max_position_embeddings", 1, MAX_CONTEXT))


# Experts


def read_num_experts(fields: Fields, name: str, num_layers: int) -> int:
    num_experts = fields.whole(name, 1, MAX_EXPERTS)
    if num_experts * num_layers > MAX_ALL_EXPERTS:
        raise fields.wrong(name, f"more than {MAX_ALL_EXPERTS} experts in {num_layers} layers")
    return num_experts


def _experts(fields: Fields, family: Family, num_layers: int, activation: Activation) -> ExpertsSpec | None:
    names = family.experts
    if names is None or (names.flag and not fields.flag(names.flag, False)):
        return None
    holder = names.num_experts
    if names.num_experts == "num_experts" and fields.get("num_local_experts") is not None:
        holder = "num_local_experts"  # as transformers 5 writes it
    num_experts = read_num_experts(fields, holder, num_layers)
    rule = names.renormalizes
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=fields.whole(names.num_chosen, 1, num_experts),
        size=fields.whole(names.size, 1, MAX_FFN_SIZE),
        activation=activation,
        renormalizes=fields.flag(rule, False) if isinstance(rule, str) else rule,
        scale=fields.real("routed_scaling_factor", 0, MAX_MULTIPLIER, 1.0, above_low=True) if names.bias else 1.0,
        has_sigmoid=bool(names.bias),
        has_expert_bias=bool(names.bias) and fields.flag(names.bias, False),
        shared_size=fields.whole(names.shared_size, 1, MAX_FFN_SIZE) if names.shared_size else 0,
        has_bias=names.has_bias,
        has_router_bias=names.has_bias,
        has_router_norm=names.is_parallel,
        has_expert_scales=names.is_parallel,
    )


def _routed_layers(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    if family.experts is None:
        return [False] * num_layers
    if family.experts.num_dense_layers:
        num_dense = fields.whole(family.experts.num_dense_layers, 0, MAX_LAYERS)
        return [i >= num_dense for i in range(num_layers)]
    every = fields.whole("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise fields.wrong("mlp_only_layers", "not a list of layer numbers")
    return [i not in dense and (i + 1) % every == 0 for i in range(num_layers)]


# Names


def name_architecture(config: Fields) -> str:
    """Return the class name in a config, supported or not; the model type if the config has no class name."""
    named = config.get("architectures")
    if named is None or named == []:
        model_type = config.find_text("model_type")
        name: Any = BY_MODEL_TYPE.get(model_type or "", model_type)
        if name is None:
            raise config.missing("architectures")
    elif isinstance(named, list) and len(named) == 1:
        name = named[0]
    else:
        raise config.wrong("architectures", "not a list of one name")
    if not isinstance(name, str) or not _ARCHITECTURE.fullmatch(name):
        field = "architectures" if named else "model_type"
        raise config.wrong(field, f"not a name of at most {MAX_NAME_LENGTH} letters, digits, '_', '-' and '.'")
    return name


def find_architecture(config: Fields) -> str:
    """Return the class name in a config if its equations are supported."""
    name = name_architecture(config)
    if name not in BY_ARCHITECTURE:
        raise UnsupportedModel(
            f"{config.source}: quire has no equations for {show(name)}; `quire models --families` lists those it has"
        )
    return name


def refuse_quantized(config: Fields) -> None:
    """Raise if the weights are quantised in a way that quire does not read: by MLX, or by an unknown method.

    The experts of gpt-oss are published in MXFP4, which quire reads.
    """
    if has_packed_experts(config):
        return
    inner = config.get("text_config")
    nested = Fields(config.source, inner, "text_config.") if isinstance(inner, dict) else Fields(config.source, {})
    for fields in (config, nested):
        if value := fields.get("quantization"):
            value = value.get("bits") if isinstance(value, dict) else value
            raise UnsupportedModel(
                f"{config.source}: {fields.prefix}quantization (bits {show(value)}): quantised safetensors are not "
                "supported if MLX made them; use the original model or a GGUF of it"
            )
    read_quantization(config)


def has_packed_experts(config: Fields) -> bool:
    """Return whether the file holds the experts of gpt-oss in MXFP4, and nothing else is quantised."""
    method = config.get("quantization_config")
    is_mxfp4 = isinstance(method, dict) and method.get("quant_method") == "mxfp4"
    return is_mxfp4 and config.get("quantization") is None and BY_NAME["gpt_oss"] is _find_family(config)


def _find_family(config: Fields) -> Family | None:
    return BY_ARCHITECTURE.get(name_architecture(config))


def refuse_other_layers(config: Fields) -> None:
    """Raise if a class that quire knows has layers of another kind: mlx-lm may run them, unlike unknown settings."""
    architecture = find_architecture(config)
    family = BY_ARCHITECTURE[architecture]
    fields = _text_fields(config, family, architecture)
    if family.name == "ministral3" and architecture in family.nested:
        _refuse_other_text_model(fields, family)
    if family.name != "granite4":
        return
    types = fields.get("layer_types")
    if not isinstance(types, list) or any(one not in ("attention", "full_attention") for one in types):
        raise UnsupportedModel(
            f"{fields.source}: layer_types is {show(types)}: Granite 4 runs only if all layers are attention; "
            "the H models have layers with a state"
        )
    if (num_experts := fields.get("num_local_experts")) != 0:
        raise UnsupportedModel(
            f"{fields.source}: num_local_experts is {show(num_experts)}: only dense Granite 4 is supported"
        )
    if (kind := fields.get("position_embedding_type")) != "rope":
        raise UnsupportedModel(f"{fields.source}: position_embedding_type {show(kind)} is not supported, only rope")


def _refuse_other_text_model(fields: Fields, family: Family) -> None:
    kind = fields.get("model_type")
    if kind not in (None, *family.model_types, *_TEXT_TYPES.get(family.name, ())):
        raise UnsupportedModel(f"{fields.source}: {fields.prefix}model_type {show(kind)} is not {family.name}")


def _text_fields(config: Fields, family: Family, architecture: str) -> Fields:
    """Return the language model's fields with transformers' defaults. The outer file takes precedence."""
    values: Mapping[str, Any] = config.values
    prefix = ""
    if architecture in family.nested:
        prefix = "text_config."
        inner = config.table("text_config").values
        outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
        values = {**inner, **{name: config.get(name) for name in outer if name in config}}
    if family.name in ("lfm2", "lfm2_moe"):
        values = lfm2_values(values)
    given = {name: value for name, value in values.items() if value is not None or name in _NULLS}
    if family.name == "ministral3" and given.get("model_type") == "mistral":
        family = BY_NAME["mistral"]  # the text of Mistral Small 3
    return Fields(config.source, {**_defaults(family, given), **given}, prefix)


def _defaults(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's defaults. Ids of tokens that the model's vocabulary does not have are left out."""
    defaults = dict(family.defaults)
    vocab_size = given.get("vocab_size")
    for name in ("bos_token_id", "eos_token_id"):
        ids = defaults.get(name, [])
        largest = max(ids, default=-1) if isinstance(ids, list) else ids
        if isinstance(vocab_size, int) and name in defaults and largest >= vocab_size:
            del defaults[name]
    return defaults


def _activation(fields: Fields, name: str) -> Activation:
    value = fields.find_text(name) or "silu"
    if value not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.source}: {name} {show(value)} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _dtype(fields: Fields, whole: Fields, quantization: str) -> str:
    name = "dtype" if "dtype" in fields or "dtype" in whole else "torch_dtype"
    holder = fields if name in fields else whole
    value = (holder.find_text(name) or DTYPES.get(quantization, "bfloat16")).removeprefix("torch.")
    if value not in DTYPES.values():
        raise UnsupportedModel(f"{fields.source}: {name} {show(value)} is not one of {', '.join(DTYPES.values())}")
    return value


# Rotary embeddings


def _ropes(fields: Fields, family: Family, shape: Shape) -> tuple[RopeSpec, RopeSpec | None]:
    """Return the rope of the layers with full attention, and that of layers with a window if it differs."""
    parameters = fields.table("rope_parameters")
    by_type = [name for name in ("full_attention", "sliding_attention") if name in parameters]
    if family.ropes is Ropes.ONE:
        scaling = fields.table("rope_scaling")
        scaling = scaling if scaling.values else parameters
        for name in ("full_attention", "sliding_attention"):
            if name in scaling:
                raise UnsupportedModel(
                    f"{fields.source}: {scaling.prefix}{name}: rotation by layer type is not for {family.name}"
                )
        return _rope(fields, scaling, shape, family, "rope_theta", 1e4), None
    flat = [name for name in parameters.values if name not in ("full_attention", "sliding_attention")]
    if flat and (by_type or family.ropes is Ropes.LOCAL_BASE):
        raise parameters.wrong(flat[0], "not under full_attention or sliding_attention")
    # In the old form `rope_scaling` applies only to the layers with full attention.
    old = parameters if flat else fields.table("rope_scaling")
    full = parameters.table("full_attention") if "full_attention" in parameters else old
    local = parameters.table("sliding_attention")
    if family.ropes is Ropes.LOCAL_BASE:
        return (
            _rope(fields, full, shape, family, "rope_theta", 1e6),
            _rope(fields, local, shape, family, "rope_local_base_freq", 1e4),
        )
    wide = _rope(fields, full, shape, family, "rope_theta", 1e4)
    if local.values:
        return wide, _rope(fields, local, shape, family, "rope_theta", 1e4)
    return wide, RopeSpec(wide.theta, wide.rotary_size)


def _rope(
    fields: Fields, scaling: Fields, shape: Shape, family: Family, theta_name: str, default_theta: float
) -> RopeSpec:
    theta = fields.real(theta_name, MIN_THETA, MAX_THETA, default_theta)
    theta = scaling.real("rope_theta", MIN_THETA, MAX_THETA, theta)
    values = dict(scaling.values)
    if "original_max_position_embeddings" in fields:  # outside rope_scaling in phi3; takes precedence
        values["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    if family.name == "phi3" and (values.get("rope_type") or values.get("type")) in ("su", "yarn"):
        values["rope_type"] = "longrope"  # the old names in phi3's first files
    rotary_size = _rotary_size(fields, scaling, shape, family)
    return scaled_rope(Fields(fields.source, values, scaling.prefix), theta, rotary_size, shape.max_model_len)


def _rotary_size(fields: Fields, scaling: Fields, shape: Shape, family: Family) -> int:
    holder = scaling if "partial_rotary_factor" in scaling else fields
    part = holder.real("partial_rotary_factor", 0, 1, 1.0, above_low=True)
    if part != 1 and not family.has_partial_rotary:
        raise UnsupportedModel(
            f"{fields.source}: {holder.prefix}partial_rotary_factor {part:g} is not supported for {family.name}"
        )
    rotary_size = int(shape.head_size * part)
    if rotary_size < 2 or rotary_size % 2:
        raise holder.wrong("partial_rotary_factor", f"rotates {rotary_size} of {shape.head_size}: not an even number")
    return rotary_size


# Windows


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.windows is Windows.NONE:
        return (0,) * num_layers
    window = fields.find_whole("sliding_window", 1, MAX_CONTEXT)
    if family.window_flag and not fields.flag(family.window_flag, False):
        window = None
    types = fields.get("layer_types")
    if family.windows is Windows.ALL:
        has_window = [window is not None] * num_layers
    elif types is not None:
        has_window = [_is_sliding(fields, types, num_layers, i) for i in range(num_layers)]
    elif family.full_every:
        every = fields.whole("sliding_window_pattern", 1, MAX_LAYERS, family.full_every)
        has_window = [(i + 1) % every != 0 for i in range(num_layers)]
    elif family.no_rope_every:
        has_window = [window is not None and not rotates for rotates in _has_rope(fields, family, num_layers)]
    else:
        first = fields.whole("max_window_layers", 0, MAX_LAYERS, 0)
        has_window = [window is not None and i >= first for i in range(num_layers)]
    if any(has_window) and window is None:
        raise fields.wrong("sliding_window", "layers with a sliding window need it")
    return tuple((window or 0) if one else 0 for one in has_window)


def _is_sliding(fields: Fields, types: Any, num_layers: int, layer: int) -> bool:
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", f"not a list of {num_layers} names")
    if types[layer] not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(
            f"{fields.source}: {fields.prefix}layer_types[{layer}] {show(types[layer])} is not "
            "full_attention or sliding_attention"
        )
    return bool(types[layer] == "sliding_attention")


# End tokens and sampling defaults


def read_eos(config: Fields, generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens. generation_config.json takes precedence: it lists the tokens that end a chat turn."""
    given = Fields(config.source.replace("config.json", "generation_config.json"), generation)
    return given.token_ids("eos_token_id", vocab_size) or config.token_ids("eos_token_id", vocab_size)


def read_generation(values: Mapping[str, Any], source: str) -> GenerationDefaults:
    fields = Fields(source, values)
    return GenerationDefaults(
        temperature=fields.find_real("temperature", 0, 100),
        top_k=fields.find_whole("top_k", 0, MAX_TOP_K),
        top_p=fields.find_real("top_p", 0, 1, above_low=True),
        min_p=fields.find_real("min_p", 0, 1),
        repetition_penalty=fields.find_real("repetition_penalty", 0, 100, above_low=True),
    )
