"""`ModelSpec` from Hugging Face's config.json, in the forms transformers 4 and 5 write.

A missing field has the default of transformers. A model that quire cannot compute is refused here, and the error names
the field: a model that loads and then answers nonsense is worse than one that does not load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModel
from quire.weights.fields import Fields, show
from quire.weights.rope import MAX_CONTEXT, MAX_THETA, MIN_THETA, scaled_rope
from quire.weights.spec import Activation, GenerationDefaults, ModelSpec, RopeSpec

MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 131_072
MAX_FFN_SIZE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1024
MAX_VOCAB_SIZE = 4 << 20
MAX_TOP_K = (1 << 31) - 1

# The family whose equations an architecture follows. A new family adds a row here and a file to each backend.
ALIASES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # the language model only; the vision part is ignored
    "Phi3ForCausalLM": "phi3",
}
MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Defaults of transformers for fields that config.json omits. Gemma's files rely on them, even for sizes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Fields of config.json that say that the weights are quantised, and the field in them that says how. MLX writes both.
QUANTIZED = {"quantization": "bits", "quantization_config": "quant_method"}
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
    eps = fields.real(name, 0, 1, 1e-6, above_low=True)
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
    family = ALIASES[architecture]
    fields = _text_fields(whole, architecture)
    shape = read_shape(fields, ShapeKeys())
    rope, local_rope = _ropes(fields, family, shape)
    is_gemma, is_llama = family == "gemma3", architecture == "LlamaForCausalLM"
    attention_bias = is_llama and fields.flag("attention_bias", False)
    if family in ("qwen3", "gemma3"):
        attention_bias = fields.flag("attention_bias", False)
    if is_gemma and fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(f"{source}: use_bidirectional_attention is true: only causal models are supported")
    scale_of = fields.real("query_pre_attn_scalar", 0, 1e6, above_low=True) if is_gemma else float(shape.head_size)
    return ModelSpec(
        family=family,
        architecture=architecture,
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
        windows=_windows(fields, architecture, shape.num_layers),
        activation=_activation(fields, "hidden_activation" if is_gemma else "hidden_act"),
        attention_scale=scale_of**-0.5,
        embedding_scale=math.sqrt(shape.hidden_size) if is_gemma else 1.0,
        norm_offset=1.0 if is_gemma else 0.0,
        attention_softcap=fields.real("attn_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
        logit_softcap=fields.real("final_logit_softcapping", 0, 1e6, 0.0) if is_gemma else 0.0,
        is_tied=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=is_llama and fields.flag("mlp_bias", False),
        has_qk_norm=family in ("qwen3", "gemma3"),
        has_post_norms=is_gemma,
        is_fused=family == "phi3",
        dtype=_dtype(fields, whole, quantization),
        quantization=quantization,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", shape.vocab_size)), None),
        eos_token_ids=read_eos(fields, generation, shape.vocab_size),
    )


def name_architecture(config: Fields) -> str:
    """Return the class name in a config, supported or not; the model type if the config has no class name."""
    named = config.get("architectures")
    if named is None or named == []:
        model_type = config.find_text("model_type")
        name: Any = MODEL_TYPES.get(model_type or "", model_type)
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
    if name not in ALIASES:
        raise UnsupportedModel(f"{config.source}: {show(name)} is not supported; these run: {', '.join(ALIASES)}")
    return name


def refuse_quantized(config: Fields) -> None:
    """Raise if the weights are quantised. Multimodal models may say so beside their language model's sizes."""
    inner = config.get("text_config")
    nested = Fields(config.source, inner, "text_config.") if isinstance(inner, dict) else Fields(config.source, {})
    for fields in (config, nested):
        for name, method in QUANTIZED.items():
            if value := fields.get(name):
                value = value.get(method) if isinstance(value, dict) else value
                raise UnsupportedModel(
                    f"{config.source}: {fields.prefix}{name} ({method} {show(value)}): quantised safetensors are not "
                    "supported; use the original model or a GGUF of it"
                )


def _text_fields(config: Fields, architecture: str) -> Fields:
    """Return the language model's fields with transformers' defaults. The outer file takes precedence."""
    values: Mapping[str, Any] = config.values
    prefix = ""
    if architecture == "Gemma3ForConditionalGeneration":
        prefix = "text_config."
        inner = config.table("text_config").values
        outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
        values = {**inner, **{name: config.get(name) for name in outer if name in config}}
    given = {name: value for name, value in values.items() if value is not None or name == "sliding_window"}
    return Fields(config.source, {**DEFAULTS[architecture], **given}, prefix)


def _activation(fields: Fields, name: str) -> Activation:
    value = fields.find_text(name) or "silu"
    if value not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.source}: {name} {show(value)} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _dtype(fields: Fields, whole: Fields, quantization: str) -> str:
    name = "dtype" if "dtype" in fields or "dtype" in whole else "torch_dtype"
    holder = fields if name in fields else whole
    value = (holder.find_text(name) or DTYPES[quantization]).removeprefix("torch.")
    if value not in DTYPES.values():
        raise UnsupportedModel(f"{fields.source}: {name} {show(value)} is not one of {', '.join(DTYPES.values())}")
    return value


# Rotary embeddings


def _ropes(fields: Fields, family: str, shape: Shape) -> tuple[RopeSpec, RopeSpec | None]:
    parameters = fields.table("rope_parameters")
    if family == "gemma3":
        flat = [name for name in parameters.values if name not in ("full_attention", "sliding_attention")]
        if flat:
            raise parameters.wrong(flat[0], "not under full_attention or sliding_attention")
        # In the old form `rope_scaling` applies only to the layers with full attention.
        full = parameters.table("full_attention") if "full_attention" in parameters else fields.table("rope_scaling")
        local = parameters.table("sliding_attention")
        return (
            _rope(fields, full, shape, family, "rope_theta", 1e6),
            _rope(fields, local, shape, family, "rope_local_base_freq", 1e4),
        )
    scaling = fields.table("rope_scaling")
    scaling = scaling if scaling.values else parameters
    for name in ("full_attention", "sliding_attention"):
        if name in scaling:
            raise UnsupportedModel(
                f"{fields.source}: {scaling.prefix}{name}: rotation by layer type is only for gemma3"
            )
    return _rope(fields, scaling, shape, family, "rope_theta", 1e4), None


def _rope(
    fields: Fields, scaling: Fields, shape: Shape, family: str, theta_name: str, default_theta: float
) -> RopeSpec:
    theta = fields.real(theta_name, MIN_THETA, MAX_THETA, default_theta)
    theta = scaling.real("rope_theta", MIN_THETA, MAX_THETA, theta)
    values = dict(scaling.values)
    if "original_max_position_embeddings" in fields:  # outside rope_scaling in phi3; takes precedence
        values["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    if family == "phi3" and (values.get("rope_type") or values.get("type")) in ("su", "yarn"):
        values["rope_type"] = "longrope"  # the old names in phi3's first files
    rotary_size = _rotary_size(fields, scaling, shape, family)
    return scaled_rope(Fields(fields.source, values, scaling.prefix), theta, rotary_size, shape.max_model_len)


def _rotary_size(fields: Fields, scaling: Fields, shape: Shape, family: str) -> int:
    holder = scaling if "partial_rotary_factor" in scaling else fields
    part = holder.real("partial_rotary_factor", 0, 1, 1.0, above_low=True)
    if part != 1 and family != "phi3":
        raise UnsupportedModel(f"{fields.source}: {holder.prefix}partial_rotary_factor {part:g} is only for phi3")
    rotary_size = int(shape.head_size * part)
    if rotary_size < 2 or rotary_size % 2:
        raise holder.wrong("partial_rotary_factor", f"rotates {rotary_size} of {shape.head_size}: not an even number")
    return rotary_size


# Windows


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    window = fields.find_whole("sliding_window", 1, MAX_CONTEXT)
    family = ALIASES[architecture]
    if architecture == "LlamaForCausalLM" or (family in ("qwen2", "qwen3") and not _uses_window(fields)):
        window = None
    types = fields.get("layer_types")
    if types is not None and family in ("qwen2", "qwen3", "gemma3"):
        has_window = [_is_sliding(fields, types, num_layers, i) for i in range(num_layers)]
    elif family in ("qwen2", "qwen3"):
        first = fields.whole("max_window_layers", 0, MAX_LAYERS)
        has_window = [window is not None and i >= first for i in range(num_layers)]
    elif family == "gemma3":
        every = fields.whole("sliding_window_pattern", 1, MAX_LAYERS)
        has_window = [(i + 1) % every != 0 for i in range(num_layers)]
    else:
        has_window = [window is not None] * num_layers
    if any(has_window) and window is None:
        raise fields.wrong("sliding_window", "layers with a sliding window need it")
    return tuple((window or 0) if one else 0 for one in has_window)


def _uses_window(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", False)


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
