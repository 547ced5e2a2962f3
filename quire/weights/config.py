"""`ModelSpec` from Hugging Face's config.json, in the forms transformers 4 and 5 write.

A missing field has the default of transformers. A model that quire cannot compute is refused here, and the error names
the field: a model that loads and then answers nonsense is worse than one that does not load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.families import BY_ARCHITECTURE, BY_MODEL_TYPE, BY_NAME, DELTA_NET, Family, Ropes, Windows
from quire.weights.fields import Fields, show
from quire.weights.quantization import read_quantization
from quire.weights.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    GenerationDefaults,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    QKNorm,
    QueryScaling,
    RopeSpec,
    ShortConvSpec,
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
MAX_CONTEXT = 1 << 24
MIN_THETA = 1e-3  # smaller values overflow in the power and make no sense
MAX_THETA = 1e12
MIN_FACTOR = 1e-3  # factors are divisors
MAX_FACTOR = 1e6
MAX_TAPS = 64
MAX_EPS = 0.5
MAX_PLE_SIZE = 8192

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


def read_shape(fields: Fields) -> Shape:
    heads, eps = fields.key("num_attention_heads"), "rms_norm_eps"
    hidden_size = fields.whole("hidden_size", 1, MAX_HIDDEN_SIZE)
    num_heads = fields.whole("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.whole("num_key_value_heads", 1, MAX_HEADS, num_heads)
    fields.require(num_heads % num_kv_heads == 0, "num_key_value_heads", f"does not divide {heads} {num_heads}")
    head_size = fields.find_whole("head_dim", 2, MAX_HEAD_SIZE)
    if head_size is None:
        head_size = hidden_size // num_heads
        is_right = hidden_size % num_heads == 0 and 2 <= head_size <= MAX_HEAD_SIZE
        fields.require(is_right, "hidden_size", f"not {heads} {num_heads} times 2 to {MAX_HEAD_SIZE}")
    fields.require(head_size % 2 == 0, "head_dim", f"heads of {head_size} cannot be rotated: the size is not even")
    return Shape(
        num_layers=fields.whole("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=fields.whole("intermediate_size", 1, MAX_FFN_SIZE),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=fields.whole("vocab_size", 1, MAX_VOCAB_SIZE),
        max_model_len=fields.whole("max_position_embeddings", 1, MAX_CONTEXT),
        # llama.cpp and LFM2 have no default.
        norm_eps=fields.real(eps, 0, MAX_EPS, 1e-6 if fields.key(eps) == eps else None, above_low=True),
    )


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
    shape = read_shape(fields)
    if family.name == "lfm2":
        shape = replace(shape, ffn_size=_lfm2_ffn_size(fields, shape.ffn_size))
    is_gemma, embedding_scale = family.is_gemma, read_multiplier(fields, family, "embedding_multiplier")
    return ModelSpec(
        family=family.name,
        architecture=architecture,
        layers=(_gemma4_layers if family.name == "gemma4" else _layers)(fields, family, shape),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        norm_eps=shape.norm_eps,
        embedding_scale=math.sqrt(shape.hidden_size) if is_gemma else embedding_scale,
        logit_scale=1 / read_multiplier(fields, family, "logits_scaling"),
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
        _refuse_gemma4_settings(fields)
    elif family.is_gemma:
        fields.support(
            not fields.flag("use_bidirectional_attention", False),
            "use_bidirectional_attention is true: only causal models are supported",
        )
    if family.activation is Activation.CLAMPED_SWIGLU:
        for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            fields.support(
                fields.real(name, 0, MAX_FACTOR) == known,
                f"{name} is {show(fields.get(name))}: only {known} is supported",
            )
    fields.support(fields.get("clip_qkv") is None, f"clip_qkv is {show(fields.get('clip_qkv'))}: not supported")
    if family.name == "ministral3" and fields.get("model_type") == "ministral3":
        fields.table("rope_parameters").real("rope_theta", MIN_THETA, MAX_THETA)  # required: its default is not plain


# Layers


def _layers(fields: Fields, family: Family, shape: Shape) -> tuple[LayerSpec, ...]:
    scale = float(shape.head_size) ** -0.5
    if family.is_gemma:
        scale = fields.real("query_pre_attn_scalar", 0, 1e6, above_low=True) ** -0.5
    elif family.has_multipliers:
        scale = read_multiplier(fields, family, "attention_multiplier")
    return read_layers(fields, family, shape, _ropes(fields, family, shape), scale)


def read_layers(
    fields: Fields, family: Family, shape: Shape, ropes: tuple[RopeSpec, RopeSpec | None], scale: float
) -> tuple[LayerSpec, ...]:
    """Read the layers of a family whose layers differ in mixer, window, rope and MLP only.

    `ropes`: of the layers with full attention, and of those with a window if it differs.
    """
    activation = family.activation or _activation(fields, "hidden_activation" if family.is_gemma else "hidden_act")
    dense = MlpSpec(shape.ffn_size, activation, has_bias=_rule(fields, family.mlp_bias))
    experts = read_experts(fields, family, shape.num_layers, activation)
    is_routed = _routed_layers(fields, family, shape.num_layers)
    windows = _windows(fields, family, shape.num_layers)
    has_rope = _has_rope(fields, family, shape.num_layers)
    recurrent = _recurrent(fields, family, shape.num_layers)
    attention = AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        scale=scale,
        rope=None,
        softcap=fields.real("attn_logit_softcapping", 0, 1e6, 0.0) if family.is_gemma else 0.0,
        qk_norm=family.qk_norm,
        query_scaling=_query_scaling(fields, family),
        has_qkv_bias=_rule(fields, family.qkv_bias),
        has_output_bias=_rule(fields, family.output_bias),
        has_sinks=family.has_sinks,
        has_gate=family.has_gate,
    )
    layer_ropes = [(ropes[1] if window and ropes[1] else ropes[0]) for window in windows]
    return tuple(
        LayerSpec(
            mixer=recurrent[i] or replace(attention, window=windows[i], rope=layer_ropes[i] if has_rope[i] else None),
            mlp=experts if experts and is_routed[i] else dense,
            has_pre_norms=family.has_pre_norms,
            has_post_norms=family.has_post_norms,
            residual_scale=read_multiplier(fields, family, "residual_multiplier"),
        )
        for i in range(shape.num_layers)
    )


def _rule(fields: Fields, rule: bool | str) -> bool:
    """Return what is the same in all models of a family, or is a flag of the file."""
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def _has_rope(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    if not family.no_rope_every:
        return [True] * num_layers
    if "no_rope_layers" in fields:  # despite its name, 1 is for a layer with positions
        return fields.flags("no_rope_layers", num_layers)
    every = fields.whole("no_rope_layer_interval", 1, MAX_LAYERS, family.no_rope_every)
    return [(i + 1) % every != 0 for i in range(num_layers)]


def read_multiplier(fields: Fields, family: Family, name: str) -> float:
    return fields.real(name, 0, MAX_FACTOR, 1.0, above_low=True) if family.has_multipliers else 1.0


def _query_scaling(fields: Fields, family: Family) -> QueryScaling | None:
    holder = fields.table("rope_parameters") if "rope_parameters" in fields else fields
    beta = holder.find_real("llama_4_scaling_beta", 0, MAX_FACTOR)
    if not family.has_query_scaling or not beta:
        return None
    return QueryScaling(beta, holder.whole("original_max_position_embeddings", 1, MAX_CONTEXT))


# Recurrent layers


def _recurrent(fields: Fields, family: Family, num_layers: int) -> list[DeltaNetSpec | ShortConvSpec | None]:
    """Return the mixers of the layers that do not attend, None for the others, from config.json."""
    if not family.recurrence:
        return [None] * num_layers
    fields.support(
        not family.has_gate or fields.flag("attn_output_gate", True),
        f"{fields.prefix}attn_output_gate is false: not supported",
    )
    attends = _attends(fields, family, num_layers)
    if family.recurrence == DELTA_NET:
        mixer: DeltaNetSpec | ShortConvSpec = _delta_net(fields)
    else:
        mixer = ShortConvSpec(fields.whole("conv_L_cache", 2, MAX_TAPS), has_bias=fields.flag("conv_bias", False))
    return [None if one else mixer for one in attends]


def _attends(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    name = "layer_types"
    if name in fields:
        attends = [one == "full_attention" for one in _layer_types(fields, num_layers, family.recurrence)]
    elif family.recurrence == DELTA_NET:
        name = "full_attention_interval"
        every = fields.whole(name, 1, MAX_FFN_SIZE)
        attends = [(i + 1) % every == 0 for i in range(num_layers)]
    else:
        name = "full_attn_idxs"
        indices = fields.get(name) if name in fields else list(range(num_layers))
        is_right = isinstance(indices, list) and all(isinstance(one, int) for one in indices)
        fields.require(is_right, name, "not a list of layer numbers")
        attends = [i in indices for i in range(num_layers)]
    fields.require(any(attends), name, "no layer attends")
    return attends


def _delta_net(fields: Fields) -> DeltaNetSpec:
    num_key_heads = fields.whole("linear_num_key_heads", 1, MAX_HEADS)
    num_heads = fields.whole("linear_num_value_heads", 1, MAX_HEADS)
    fields.require(
        num_heads % num_key_heads == 0, "linear_num_value_heads", f"not a multiple of {num_key_heads} key heads"
    )
    value_size = fields.find_whole("ssm.inner_size", 1, MAX_FFN_SIZE)  # of all value heads, in files of llama.cpp
    if value_size is None:
        head_size = fields.whole("linear_value_head_dim", 1, MAX_HEAD_SIZE)
    else:
        fields.require(value_size % num_heads == 0, "ssm.inner_size", f"not a multiple of {num_heads} heads")
        head_size = value_size // num_heads
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_heads,
        key_head_size=fields.whole("linear_key_head_dim", 1, MAX_HEAD_SIZE),
        value_head_size=head_size,
        num_taps=fields.whole("linear_conv_kernel_dim", 2, MAX_TAPS),
        is_tiled=value_size is not None and num_heads != num_key_heads,
    )


def _lfm2_ffn_size(fields: Fields, given: int) -> int:
    """Return the width of the MLP, which LFM2 derives from the width in the file."""
    if not fields.flag("block_auto_adjust_ff_dim", False):
        return given
    size = 2 * given // 3
    multiple = fields.whole("block_multiple_of", 1, MAX_FFN_SIZE)
    if fields.get("block_ffn_dim_multiplier") is not None:
        size = int(fields.real("block_ffn_dim_multiplier", 0, 1e3, above_low=True) * size)
        size = -(-size // multiple) * multiple
    return size


# Experts


def read_experts(fields: Fields, family: Family, num_layers: int, activation: Activation) -> ExpertsSpec | None:
    names = family.experts
    if names is None or (names.flag and not fields.flag(names.flag, False)):
        return None
    holder = names.num_experts
    if names.num_experts == "num_experts" and fields.get("num_local_experts") is not None:
        holder = "num_local_experts"  # as transformers 5 writes it
    num_experts = fields.whole(holder, 1, MAX_EXPERTS)
    is_right = num_experts * num_layers <= MAX_ALL_EXPERTS
    fields.require(is_right, holder, f"more than {MAX_ALL_EXPERTS} experts in {num_layers} layers")
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=fields.whole(names.num_chosen, 1, num_experts),
        size=fields.whole(names.size, 1, MAX_FFN_SIZE),
        activation=activation,
        renormalizes=_rule(fields, names.renormalizes),
        scale=fields.real("routed_scaling_factor", 0, MAX_FACTOR, 1.0, above_low=True)
        if names.bias or names.has_scale
        else 1.0,
        has_sigmoid=bool(names.bias),
        has_expert_bias=bool(names.bias) and fields.flag(names.bias, False),
        shared_size=fields.whole(names.shared_size, 1, MAX_FFN_SIZE) if names.shared_size else 0,
        has_bias=names.has_bias,
        has_router_norm=names.is_parallel,
    )


def _routed_layers(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    if family.experts is None:
        return [False] * num_layers
    if family.experts.num_dense_layers:
        num_dense = fields.whole(family.experts.num_dense_layers, 0, MAX_LAYERS)
        return [i >= num_dense for i in range(num_layers)]
    every = fields.whole("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.get("mlp_only_layers") or []
    is_right = isinstance(dense, list) and all(isinstance(one, int) for one in dense)
    fields.require(is_right, "mlp_only_layers", "not a list of layer numbers")
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
    else:
        config.require(isinstance(named, list) and len(named) == 1, "architectures", "not a list of one name")
        name = named[0]
    is_name = isinstance(name, str) and _ARCHITECTURE.fullmatch(name) is not None
    config.require(
        is_name,
        "architectures" if named else "model_type",
        f"not a name of at most {MAX_NAME_LENGTH} letters, digits, '_', '-' and '.'",
    )
    return str(name)


def find_architecture(config: Fields) -> str:
    """Return the class name in a config if its equations are supported."""
    name = name_architecture(config)
    config.support(
        name in BY_ARCHITECTURE,
        f"quire has no equations for {show(name)}; `quire models --families` lists those it has",
    )
    return name


def refuse_quantized(config: Fields) -> None:
    """Raise if the weights are quantised in a way that quire does not read: by MLX, or by an unknown method.

    The experts of gpt-oss are published in MXFP4, which quire reads.
    """
    if has_packed_experts(config):
        return
    for fields in (config, config.find_table("text_config")):
        if value := fields.get("quantization"):
            value = value.get("bits") if isinstance(value, dict) else value
            raise UnsupportedModel(
                f"{config.source}: {fields.prefix}quantization (bits {show(value)}): quantised safetensors are not "
                "supported if MLX made them; use the original model or a GGUF of it"
            )
    read_quantization(config)


def has_packed_experts(config: Fields) -> bool:
    """Return whether the file holds the experts of gpt-oss in MXFP4, and nothing else is quantised."""
    if BY_ARCHITECTURE.get(name_architecture(config)) is not BY_NAME["gpt_oss"]:
        return False
    method = config.get("quantization_config")
    is_mxfp4 = isinstance(method, dict) and method.get("quant_method") == "mxfp4"
    return is_mxfp4 and config.get("quantization") is None


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
    fields.support(
        isinstance(types, list) and all(one in ("attention", "full_attention") for one in types),
        f"layer_types is {show(types)}: Granite 4 runs only if all layers are attention; "
        "the H models have layers with a state",
    )
    num_experts, kind = fields.get("num_local_experts"), fields.get("position_embedding_type")
    fields.support(num_experts == 0, f"num_local_experts is {show(num_experts)}: only dense Granite 4 is supported")
    fields.support(kind == "rope", f"position_embedding_type {show(kind)} is not supported, only rope")


def _refuse_other_text_model(fields: Fields, family: Family) -> None:
    kind = fields.get("model_type")
    fields.support(
        kind in (None, *family.model_types, *_TEXT_TYPES.get(family.name, ())),
        f"{fields.prefix}model_type {show(kind)} is not {family.name}",
    )


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
        old = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}  # names in the first files
        values = {**values, **{name: values[alias] for alias, name in old.items() if values.get(alias) is not None}}
    given = {name: value for name, value in values.items() if value is not None or name in _NULLS}
    if family.name == "ministral3" and given.get("model_type") == "mistral":
        family = BY_NAME["mistral"]  # the text of Mistral Small 3
    names = {"intermediate_size": family.ffn_size, "rms_norm_eps": family.norm_eps}
    return Fields(config.source, {**_defaults(family, given), **given}, prefix, names)


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
    fields.support(value in _ACTIVATIONS, f"{name} {show(value)} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _dtype(fields: Fields, whole: Fields, quantization: str) -> str:
    name = "dtype" if "dtype" in fields or "dtype" in whole else "torch_dtype"
    holder = fields if name in fields else whole
    value = (holder.find_text(name) or DTYPES.get(quantization, "bfloat16")).removeprefix("torch.")
    fields.support(value in DTYPES.values(), f"{name} {show(value)} is not one of {', '.join(DTYPES.values())}")
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
            fields.support(
                name not in scaling, f"{scaling.prefix}{name}: rotation by layer type is not for {family.name}"
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
    fields.support(
        part == 1 or family.has_partial_rotary,
        f"{holder.prefix}partial_rotary_factor {part:g} is not supported for {family.name}",
    )
    rotary_size = int(shape.head_size * part)
    is_right = rotary_size >= 2 and rotary_size % 2 == 0
    holder.require(is_right, "partial_rotary_factor", f"rotates {rotary_size} of {shape.head_size}: not an even number")
    return rotary_size


# Scaled rotary embeddings as divisors of the frequencies, one per pair, equal to those of transformers.


def scaled_rope(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Make a rope. `scaling` is in config.json's form: a type, its parameters, and the context it was trained for."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        can = ", ".join(SCALINGS)
        raise UnsupportedModel(f"{scaling.source}: rope scaling {show(kind)} is not supported; these are: {can}")
    return SCALINGS[kind](scaling, theta, rotary_size, max_model_len)


def _plain(_scaling: Fields, theta: float, rotary_size: int, _max_context: int) -> RopeSpec:
    return RopeSpec(theta, rotary_size)


def _linear(scaling: Fields, theta: float, rotary_size: int, _max_context: int) -> RopeSpec:
    return RopeSpec(theta, rotary_size, (scaling.real("factor", MIN_FACTOR, MAX_FACTOR),) * (rotary_size // 2))


def _llama3(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Stretch long waves by `factor`, keep short ones, and blend those between."""
    factor = scaling.real("factor", MIN_FACTOR, MAX_FACTOR)
    low = scaling.real("low_freq_factor", MIN_FACTOR, MAX_FACTOR)
    high = scaling.real("high_freq_factor", MIN_FACTOR, MAX_FACTOR)
    scaling.require(high > low, "high_freq_factor", f"not above low_freq_factor {low:g}")
    context = _trained_context(scaling, max_model_len)
    factors = []
    for i in range(rotary_size // 2):
        turns = context / (2 * math.pi * theta ** (2 * i / rotary_size))  # within the trained context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - keep) / factor + keep))
    return RopeSpec(theta, rotary_size, tuple(factors))


def _yarn(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Like llama3, but blended by the index of the pair; cosines and sines grow with the logarithm of the factor."""
    if theta <= 1:
        raise ModelFileError(f"{scaling.source}: rope theta is {theta:g}: yarn needs more than 1")
    context = _trained_context(scaling, max_model_len)
    factor = scaling.find_real("factor", MIN_FACTOR, MAX_FACTOR) or max_model_len / context
    fast = scaling.find_real("beta_fast", MIN_FACTOR, MAX_FACTOR) or 32.0
    slow = scaling.find_real("beta_slow", MIN_FACTOR, MAX_FACTOR) or 1.0

    def pair_turning(num_turns: float) -> float:
        return rotary_size * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(fast), pair_turning(slow)
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    span = high - low or 0.001
    stretch = [min(max((i - low) / span, 0.0), 1.0) for i in range(rotary_size // 2)]
    factors = tuple(1 / (one / factor + 1 - one) for one in stretch)
    return RopeSpec(theta, rotary_size, factors, _yarn_attention(scaling, factor))


def _yarn_attention(scaling: Fields, factor: float) -> float:
    given = scaling.find_real("attention_factor", MIN_FACTOR, MAX_FACTOR)
    if given is not None:
        return given
    mscale = scaling.find_real("mscale", 0, MAX_FACTOR)
    mscale_all = scaling.find_real("mscale_all_dim", 0, MAX_FACTOR)
    if not mscale or not mscale_all:
        return yarn_growth(factor)
    return yarn_growth(factor, mscale) / yarn_growth(factor, mscale_all)


def yarn_growth(factor: float, scale: float = 1.0) -> float:
    """Return what cosines and sines are multiplied by in a context that is `factor` times the trained one."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Use two measured lists of factors: one for contexts up to the trained length, one for longer ones."""
    context = _trained_context(scaling, max_model_len)
    short = scaling.reals("short_factor", rotary_size // 2, MIN_FACTOR, MAX_FACTOR)
    long = scaling.reals("long_factor", rotary_size // 2, MIN_FACTOR, MAX_FACTOR)
    factor = scaling.find_real("factor", MIN_FACTOR, MAX_FACTOR) or max_model_len / context
    attention = scaling.find_real("attention_factor", MIN_FACTOR, MAX_FACTOR)
    if attention is None:
        attention = 1.0 if factor <= 1 or context == 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return RopeSpec(theta, rotary_size, short, attention, long, context)


def _trained_context(scaling: Fields, max_model_len: int) -> int:
    return scaling.whole("original_max_position_embeddings", 1, MAX_CONTEXT, max_model_len)


SCALINGS: dict[str, Callable[[Fields, float, int, int], RopeSpec]] = {
    "default": _plain,
    "none": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


# Windows


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.windows is Windows.NONE:
        return (0,) * num_layers
    window = fields.find_whole("sliding_window", 1, MAX_CONTEXT)
    if family.window_flag and not fields.flag(family.window_flag, False):
        window = None
    if family.windows is Windows.ALL:
        has_window = [window is not None] * num_layers
    elif "layer_types" in fields:
        has_window = [one == "sliding_attention" for one in _layer_types(fields, num_layers, "sliding_attention")]
    elif family.full_every:
        every = fields.whole("sliding_window_pattern", 1, MAX_LAYERS, family.full_every)
        has_window = [(i + 1) % every != 0 for i in range(num_layers)]
    elif family.no_rope_every:
        has_window = [window is not None and not rotates for rotates in _has_rope(fields, family, num_layers)]
    else:
        first = fields.whole("max_window_layers", 0, MAX_LAYERS, 0)
        has_window = [window is not None and i >= first for i in range(num_layers)]
    fields.require(window is not None or not any(has_window), "sliding_window", "layers with a sliding window need it")
    return tuple((window or 0) if one else 0 for one in has_window)


def _layer_types(fields: Fields, num_layers: int, other: str) -> list[str]:
    """Return the field layer_types, whose entries are full_attention or `other`."""
    types = fields.listed("layer_types", num_layers, "names")
    known = ("full_attention", other)
    for i, one in enumerate(types):
        fields.support(one in known, f"{fields.prefix}layer_types[{i}] {show(one)} is not {' or '.join(known)}")
    return types


# Gemma 4: layers with a window and layers with full attention have their own head sizes and numbers of KV heads. The
# last layers of the small models read the keys and values of an earlier layer, and have wider MLPs. The text of all
# models is the same architecture; towers for images and sound are ignored.

_OVERRIDES = ("head_dim", "num_key_value_heads")


def make_gemma4_layers(
    fields: Fields,
    activation: Activation,
    *,
    num_heads: int,
    head_sizes: Sequence[int],
    num_kv_heads: Sequence[int],
    ffn_sizes: Sequence[int],
    windows: Sequence[int],
    has_values: Sequence[bool],
    num_shared: int,
    ple_size: int,
    rope: RopeSpec,
    local_rope: RopeSpec,
    experts: ExpertsSpec | None,
) -> tuple[LayerSpec, ...]:
    """Make the layers of what both formats say about them. Sequences have one entry per layer.

    `windows`: 0 is full attention, whose rope is `rope`. `has_values`: otherwise values are the raw keys. `num_shared`:
    the last layers, which read the keys and values of the last layer of the same kind before them. `fields`: for
    errors, which name what does not fit together.
    """
    first, kv_heads = len(windows) - num_shared, sorted(set(num_kv_heads))
    source_of = {window: i for i, window in enumerate(windows[:first])}
    fields.require(source_of.keys() >= set(windows), "num_kv_shared_layers", "no layer of the same kind comes before")
    fields.require(
        not any(num_heads % one for one in kv_heads),
        "num_attention_heads",
        f"not a multiple of the numbers of KV heads {kv_heads}",
    )
    layers = []
    for i, window in enumerate(windows):
        is_shared = i >= first
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads[i],
            head_size=head_sizes[i],
            scale=1.0,  # queries and keys are normed
            rope=local_rope if window else rope,
            window=window,
            qk_norm=QKNorm.HEAD,
            has_value_norm=not is_shared,
            is_key_value=not is_shared and not has_values[i],
            shared_with=source_of[window] if is_shared else None,
        )
        layer = LayerSpec(
            mixer=attention,
            mlp=MlpSpec(ffn_sizes[i], activation),
            has_post_norms=True,
            parallel_experts=experts,
            has_output_scale=True,
            ple_size=ple_size,
        )
        layers.append(layer)
    return tuple(layers)


def _gemma4_layers(fields: Fields, family: Family, shape: Shape) -> tuple[LayerSpec, ...]:
    num_layers, activation = shape.num_layers, _activation(fields, "hidden_activation")
    is_full = [(i + 1) % family.full_every == 0 for i in range(num_layers)]
    if "layer_types" in fields:
        is_full = [one == "full_attention" for one in _layer_types(fields, num_layers, "sliding_attention")]
    is_full[-1] = True  # transformers forces the last
    window = fields.whole("sliding_window", 1, MAX_CONTEXT)
    num_shared = fields.whole("num_kv_shared_layers", 0, num_layers - 1, 0)
    is_wide = fields.flag("use_double_wide_mlp", False)
    head_sizes, kv_heads = _gemma4_heads(fields, is_full, shape.head_size, shape.num_kv_heads)
    ropes = fields.table("rope_parameters")
    full_size = next((size for size, full in zip(head_sizes, is_full, strict=True) if full), shape.head_size)
    return make_gemma4_layers(
        fields,
        activation,
        num_heads=shape.num_heads,
        head_sizes=head_sizes,
        num_kv_heads=kv_heads,
        ffn_sizes=[shape.ffn_size * (2 if is_wide and i >= num_layers - num_shared else 1) for i in range(num_layers)],
        windows=[0 if full else window for full in is_full],
        has_values=[not full or not fields.flag("attention_k_eq_v", False) for full in is_full],
        num_shared=num_shared,
        ple_size=_ple_size(fields),
        rope=_gemma4_rope(ropes.table("full_attention"), 1e6, full_size),
        local_rope=_gemma4_rope(ropes.table("sliding_attention"), 1e4, shape.head_size),
        experts=read_experts(fields, family, num_layers, activation),
    )


def _refuse_gemma4_settings(fields: Fields) -> None:
    """Raise for settings that change the equations. Bidirectional attention among the tokens of an image does not."""
    fields.support(
        fields.get("use_bidirectional_attention") in (None, False, "vision"),
        f"use_bidirectional_attention is {show(fields.get('use_bidirectional_attention'))}: "
        "only causal models are supported",
    )
    fields.support(
        not fields.flag("attention_bias", False), f"{fields.prefix}attention_bias is true: not supported for Gemma 4"
    )


def _gemma4_heads(
    fields: Fields, is_full: list[bool], head_size: int, num_kv_heads: int
) -> tuple[list[int], list[int]]:
    """Return the size of a head and the number of KV heads of each layer. Newer files list what differs by layer."""
    listed = fields.table("per_layer_config")
    if "per_layer_config" in fields:
        for name, entry in listed.values.items():
            is_right = isinstance(entry, dict) and all(field in _OVERRIDES for field in entry)
            listed.require(is_right, name, f"not an object with {' and '.join(_OVERRIDES)} only")
        tables = [listed.table(str(i)) for i in range(len(is_full))]
    else:
        values = {"head_dim": fields.whole("global_head_dim", 2, MAX_HEAD_SIZE, 512)}
        if fields.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in fields:
            values["num_key_value_heads"] = fields.whole("num_global_key_value_heads", 1, MAX_HEADS)
        whole, none = Fields(fields.source, values, fields.prefix), Fields(fields.source, {}, fields.prefix)
        tables = [whole if full else none for full in is_full]
    sizes = [table.whole("head_dim", 2, MAX_HEAD_SIZE, head_size) for table in tables]
    fields.require(
        all(size % 2 == 0 for size in sizes), "head_dim", "heads cannot be rotated: the size of one is not even"
    )
    by_kind = {(full, size) for full, size in zip(is_full, sizes, strict=True)}
    fields.require(
        len(by_kind) <= len(set(is_full)),
        "per_layer_config",
        "layers of the same kind have different head sizes: not supported",
    )
    return sizes, [table.whole("num_key_value_heads", 1, MAX_HEADS, num_kv_heads) for table in tables]


def _ple_size(fields: Fields) -> int:
    size = fields.find_whole("hidden_size_per_layer_input", 0, MAX_PLE_SIZE) or 0
    fields.require(
        not size or fields.get("vocab_size_per_layer_input") in (None, fields.get("vocab_size")),
        "vocab_size_per_layer_input",
        f"not vocab_size {show(fields.get('vocab_size'))}",
    )
    return size


def _gemma4_rope(scaling: Fields, default_theta: float, head_size: int) -> RopeSpec:
    theta = scaling.real("rope_theta", MIN_THETA, MAX_THETA, default_theta)
    kind = scaling.get("rope_type") or "default"
    if kind == "default":
        return RopeSpec(theta, head_size)
    scaling.support(kind == "proportional", f"{scaling.prefix}rope_type {show(kind)} is not supported for Gemma 4")
    part = scaling.real("partial_rotary_factor", 0, 1, 1.0)
    factor = scaling.real("factor", MIN_FACTOR, MAX_FACTOR, 1.0)
    num_rotated = int(part * head_size // 2)  # the first pairs of a head; the others do not turn at all
    return RopeSpec(theta, head_size, (factor,) * num_rotated + (math.inf,) * (head_size // 2 - num_rotated))


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
