"""Tensor names, and the exact set of tensors and shapes that a model must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint, TensorInfo
from quire.weights.fields import show
from quire.weights.spec import ModelSpec

MAX_LISTED = 5

# GGUF names and their Hugging Face names. Outside the layers:
_GGUF_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# In each layer, as blk.N.<name>:
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Differences by family. Gemma also norms the output of attention, so its `ffn_norm` is a different norm.
_GGUF_FAMILY = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}

# Tensors that are ignored: tables of angles, which are computed from the config.
_LEFT_OVER_NAMES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LEFT_OVER_ENDINGS = (".rotary_emb.inv_freq",)
# Tensors of multimodal models that are not part of the language model.
_VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
# Prefixes of the language model in multimodal models, in transformers 4 and 5.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


def from_gguf(name: str, family: str) -> str:
    """Return the Hugging Face name. An unknown name is returned unchanged, and `check_tensors` refuses it."""
    stem, dot, ending = name.rpartition(".")
    if not dot or ending not in ("weight", "bias"):
        return name
    if stem in _GGUF_WHOLE:
        return f"{_GGUF_WHOLE[stem]}.{ending}"
    parts = stem.split(".", 2)
    if len(parts) != 3 or parts[0] != "blk":
        return name
    known = {**_GGUF_LAYER, **_GGUF_FAMILY.get(family, {})}
    if parts[2] not in known or not _is_number(parts[1]):
        return name
    return f"model.layers.{parts[1]}.{known[parts[2]]}.{ending}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def from_transformers(name: str, architecture: str) -> str:
    """Return the canonical name, which is that of a text-only model."""
    if architecture == "Gemma3ForConditionalGeneration":
        for prefix, canonical in _TEXT_PREFIXES:
            if name.startswith(prefix):
                return canonical + name.removeprefix(prefix)
    return name


def is_left_over(name: str, architecture: str) -> bool:
    """Return whether a file may hold this tensor although no model needs it. The list is explicit."""
    if name in _LEFT_OVER_NAMES or name.endswith(_LEFT_OVER_ENDINGS):
        return True
    return architecture == "Gemma3ForConditionalGeneration" and name.startswith(_VISION_PREFIXES)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor the model needs, with its shape, rows first."""
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.is_tied:
        expected["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    layer = _layer_tensors(spec)
    for i in range(spec.num_layers):
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return expected


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.has_post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    if spec.has_qk_norm:
        tensors |= {f"self_attn.{one}_norm.weight": (spec.head_size,) for one in "qk"}
    if spec.is_fused:
        qkv = {"self_attn.qkv_proj": (q_size + 2 * kv_size, hidden)}
        mlp = {"mlp.gate_up_proj": (2 * ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    else:
        qkv = {f"self_attn.{one}_proj": (q_size if one == "q" else kv_size, hidden) for one in "qkv"}
        mlp = {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    output = {"self_attn.o_proj": (hidden, q_size)}
    biased = ((qkv, spec.has_qkv_bias), (output, spec.has_output_bias), (mlp, spec.has_mlp_bias))
    for group, has_bias in biased:
        tensors |= {f"{name}.weight": shape for name, shape in group.items()}
        if has_bias:
            tensors |= {f"{name}.bias": (shape[0],) for name, shape in group.items()}
    return tensors


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise unless the checkpoint has exactly the tensors of its model, and quire knows its equations."""
    if checkpoint.spec.unsupported:
        raise UnsupportedModel(checkpoint.spec.unsupported)
    expected = expected_tensors(checkpoint.spec)
    found: Mapping[str, TensorInfo] = checkpoint.tensors
    unexpected = [name for name in found if name not in expected]
    if checkpoint.spec.is_tied:  # some files contain the embedding twice
        unexpected = [name for name in unexpected if name != "lm_head.weight"]
    misshapen = [
        f"{name} {found[name].shape} for {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    problems = [
        _listed("missing", (name for name in expected if name not in found)),
        _listed("unexpected", (show(name) for name in unexpected)),
        _listed("of the wrong shape", misshapen),
    ]
    if any(problems):
        raise ModelFileError(f"{checkpoint.path}: tensors {'; '.join(filter(None, problems))}")


def _listed(what: str, names: Iterable[str]) -> str:
    every = list(names)
    if not every:
        return ""
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return f"{what}: {', '.join(every[:MAX_LISTED])}{more}"
