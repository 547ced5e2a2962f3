"""`ModelSpec` of a model that quire has no equations for: mlx-lm and transformers have those of many more models.

Such a spec holds what text, server and display need: names, sizes and token ids. Fields that only equations use have
neutral values. Three kinds of models are described here: architectures that quire does not know, quantised weights, and
layers of another kind in a known architecture (the H models of Granite 4).
A known architecture with a setting that quire does not know is refused by `spec_from_config`, because mlx-lm ignores
some of these settings, and the answers would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.errors import UnsupportedModel
from quire.weights.config import (
    DTYPES,
    MAX_CONTEXT,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    QUANTIZED,
    find_architecture,
    name_architecture,
    read_eos,
    refuse_other_layers,
    refuse_quantized,
    spec_from_config,
)
from quire.weights.fields import Fields, show
from quire.weights.spec import OTHER, Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec

DEFAULT_CONTEXT = 2048
MAX_LATENT_SIZE = 65_536  # of multi-head latent attention
MAX_BITS = 16
MAX_GROUP_SIZE = 65_536
MAX_METHOD_LENGTH = 40
MAX_LISTED_CHARS = 200

# Objects of a multimodal config.json that hold the fields of its language model.
_NESTED = ("text_config", "language_config", "llm_config")
# The names of each size in the configs of different models, of which the first that is given counts, and its limit.
_SIZES: Mapping[str, tuple[tuple[str, ...], int]] = {
    "num_layers": (
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), MAX_LAYERS,
    ),
    "hidden_size": (("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), MAX_HIDDEN_SIZE),
    "num_heads": (("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"), MAX_HEADS),
    "num_kv_heads": (("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"), MAX_HEADS),
    "head_size": (("head_dim", "kv_channels", "attention_head_dim"), MAX_HEAD_SIZE),
    "latent_size": (("kv_lora_rank",), MAX_LATENT_SIZE),
    "rotated_size": (("qk_rope_head_dim",), MAX_HEAD_SIZE),
    "vocab_size": (("vocab_size", "padded_vocab_size", "num_vocab"), MAX_VOCAB_SIZE),
    "max_model_len": (
        (
            "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "max_seq_len",
            "max_context_length", "model_max_length", "block_size",
        ),
        MAX_CONTEXT,
    ),
}  # fmt: skip
LAYER_TYPES = ("layer_types", "layers_block_type", "block_types")  # names of the list of layers
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", "dense", "sparse", "moe", "mlp"}
_PATTERN = "hybrid_override_pattern"  # one letter per layer: M is Mamba
_STATE_FIELDS = ("ssm_state_size", "mamba_d_state", "state_size", "d_state", "ssm_cfg")  # that Mamba layers have
_ENCODER_FIELDS = ("is_encoder_decoder", "encoder_layers", "num_encoder_layers", "decoder_layers")


def read_spec(config: Mapping[str, Any], generation: Mapping[str, Any], source: str, quantization: str) -> ModelSpec:
    """Make a spec of any model. `quantization` is the type of most weights that are not packed."""
    whole = Fields(source, config)
    reason = find_unsupported(whole)
    if not reason:
        return spec_from_config(config, generation, source, quantization)
    if _refusal(refuse_other_layers, whole):
        spec = _lenient_spec(whole, generation, quantization, reason)
    else:  # quire would have the equations if the weights were not quantised
        spec = spec_from_config(_unquantized(config), generation, source, quantization)
    shown = _quantization(whole) or quantization
    return replace(spec, family=OTHER, quantization=shown, unsupported=reason)


def find_unsupported(config: Fields) -> str:
    """Return why quire's own equations do not run a model, from its architecture and quantisation; empty: they may."""
    problem = _refusal(refuse_other_layers, config)
    if not problem:
        return _refusal(refuse_quantized, config)
    is_known = not _refusal(find_architecture, config)
    layers = "" if is_known else find_other_layers(config.values)  # the error names those of a known class
    how = _quantization(config)
    return "; ".join(part for part in (problem, layers, f"its weights are quantised ({how})" if how else "") if part)


def _refusal(check: Callable[[Fields], object], config: Fields) -> str:
    """Return why a check refuses a config, empty if it does not."""
    try:
        check(config)
    except UnsupportedModel as error:
        return str(error)
    return ""


def find_other_layers(config: Mapping[str, Any]) -> str:
    """Return which layers of a config.json do not run over blocks of keys and values; empty: none is known."""
    inner: Mapping[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), {})
    values = {**config, **inner}
    if encoder := next((name for name in _ENCODER_FIELDS if values.get(name)), ""):
        return f"{encoder} is {show(values[encoder])}: only decoders run, not an encoder with a decoder"
    state = next((f"{name} is {show(values[name])}" for name in _STATE_FIELDS if values.get(name)), "")
    mamba = f" (Mamba: {state})" if state else ""
    rule = "do not run: only attention to all tokens or to a window does"
    listed = {name: kinds for name in LAYER_TYPES if isinstance(kinds := values.get(name), list | tuple)}
    for name, kinds in listed.items():
        named = {kind if isinstance(kind, str) and kind.isidentifier() else show(kind) for kind in kinds}
        if others := ", ".join(sorted(named - _ATTENTION_LAYERS)):
            return f"{name}: layers of type {others[:MAX_LISTED_CHARS]}{mamba} {rule}"
    pattern = values.get(_PATTERN)
    if isinstance(pattern, str) and "M" in pattern:
        return f"{_PATTERN} is {show(pattern)}: layers of type M (Mamba) {rule}"
    return "" if listed or not state else f"{state}: Mamba layers {rule}"


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in QUANTIZED}
    inner = kept.get("text_config")
    if isinstance(inner, dict):
        kept["text_config"] = {name: value for name, value in inner.items() if name not in QUANTIZED}
    return kept


# Architectures that quire does not know


def _read_sizes(holders: Sequence[Fields], reason: str) -> dict[str, int]:
    """Read sizes by any of their names, from the language model's fields before those of the whole config."""
    sizes: dict[str, int] = {}
    for size, (names, high) in _SIZES.items():
        if given := [(holder, name) for holder in holders for name in names if name in holder]:
            sizes[size] = _whole_or_largest(*given[0], high)
    listed = [kinds for holder in holders for name in LAYER_TYPES if isinstance(kinds := holder.get(name), list)]
    if listed and 1 <= len(listed[0]) <= MAX_LAYERS:  # some models have only a list of their layers (nemotron_h)
        sizes.setdefault("num_layers", len(listed[0]))
    missing = [_SIZES[size][0][0] for size in ("num_layers", "hidden_size", "vocab_size") if size not in sizes]
    if missing:
        is_known = bool(find_other_layers(holders[-1].values))  # a better reason than a missing size
        raise UnsupportedModel(reason if is_known else f"{reason}; {holders[0].prefix}{missing[0]} is missing")
    return sizes


def _whole_or_largest(fields: Fields, name: str, high: int) -> int:
    """Return a size. Some models list it by layer, 0 or null for a layer without it: the largest is returned."""
    value = fields.get(name)
    if not isinstance(value, list):
        return fields.whole(name, 1, high)
    fields.require(1 <= len(value) <= MAX_LAYERS, name, f"not a list of 1 to {MAX_LAYERS} numbers")
    items = fields.items(name, value)
    return max(1, *(items.find_whole(item, 0, high) or 0 for item in items.values))


def _lenient_spec(whole: Fields, generation: Mapping[str, Any], quantization: str, reason: str) -> ModelSpec:
    nested = [whole.table(name) for name in _NESTED if name in whole]
    inner = nested[0] if nested else whole
    sizes = _read_sizes([*nested[:1], whole], reason)
    hidden_size, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
    num_heads = sizes.get("num_heads", 1)  # state-space models have none
    num_kv_heads, head_size = sizes.get("num_kv_heads", num_heads), sizes.get("head_size", hidden_size // num_heads)
    # Twice the product of KV heads and head size is the number of elements per token in a layer's KV.
    if "latent_size" in sizes:  # latent attention caches one vector, and the rotated part of the key
        num_kv_heads, head_size = 1, -(-(sizes["latent_size"] + sizes.get("rotated_size", 0)) // 2)
    # The outer file takes precedence for these, as in `spec_from_config`.
    fields = Fields(
        whole.source, {**inner.values, **{key: one for key, one in whole.values.items() if one is not None}}
    )
    attention = AttentionSpec(num_heads, num_kv_heads, max(1, head_size), scale=1.0, rope=None)
    return ModelSpec(
        family=OTHER,
        architecture=name_architecture(whole),
        layers=(LayerSpec(attention, MlpSpec(0, Activation.SILU)),) * sizes["num_layers"],
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_model_len=sizes.get("max_model_len", DEFAULT_CONTEXT),
        norm_eps=0.0,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        norm_offset=0.0,
        rounds_norms_first=False,
        is_tied=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields, quantization),
        quantization=quantization,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=read_eos(fields, generation, vocab_size),
        has_other_layers=bool(find_other_layers(whole.values)),
    )


def _dtype(fields: Fields, quantization: str) -> str:
    given = fields.find_text("dtype" if "dtype" in fields else "torch_dtype") or ""
    name = given.removeprefix("torch.")
    return name if name in DTYPES.values() else DTYPES.get(quantization, "bfloat16")


# Quantisation, for display


def _quantization(whole: Fields) -> str:
    """Return how weights are quantised: "4 bits, groups of 64", "mxfp4"; empty: they are not."""
    for holder in (whole, whole.find_table("text_config")):
        for name in QUANTIZED:
            if holder.get(name):
                return _describe(holder.table(name))
    return ""


def _describe(fields: Fields) -> str:
    """Describe MLX's form (bits, group_size, mode) and that of transformers (quant_method)."""
    for name in ("mode", "quant_method"):
        text = fields.find_text(name)
        if text is not None and text != "affine":
            is_name = len(text) <= MAX_METHOD_LENGTH and text.isprintable()
            fields.require(is_name, name, f"not a name of at most {MAX_METHOD_LENGTH} characters")
            return text
    bits = fields.find_whole("bits", 1, MAX_BITS)
    group_size = fields.find_whole("group_size", 1, MAX_GROUP_SIZE)
    if bits is None:
        return "quantised"
    return f"{bits} bits" if group_size is None else f"{bits} bits, groups of {group_size}"
