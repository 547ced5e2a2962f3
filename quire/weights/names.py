"""Tensor names in files: Hugging Face's and GGUF's, and the tensors of `quire.weights.tensors` they hold.

There are two tables, one per format. A family's row (`families.py`) adds what differs. In the names of a layer's
tensors, # stands for the number of an expert; a stack holds one tensor of every expert.

Rows of queries and keys are reordered. `RopeSpec` rotates pairs (0, R/2), (1, R/2 + 1), .. of a head's first R
dimensions. Some files are made for pairs of neighbours, (0, 1), (2, 3), ... Rows are quantised separately, so moving
them is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire.errors import ModelFileError
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.families import BY_NAME, Family
from quire.weights.spec import ModelSpec
from quire.weights.tensors import Target, expected_tensors

# Of the whole model: Hugging Face, GGUF, quire.
_WHOLE = (
    ("model.embed_tokens", "token_embd", "embedding"),
    ("lm_head", "output", "head"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd", "ple_embedding"),  # Gemma 4, as the next two
    ("model.per_layer_model_projection", "per_layer_model_proj", "ple_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm", "ple_model_norm"),
)
# Of each layer, after model.layers.N. and blk.N.
_LAYER = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("self_attn.q_proj", "attn_q", "q_proj"),
    ("self_attn.k_proj", "attn_k", "k_proj"),
    ("self_attn.v_proj", "attn_v", "v_proj"),
    ("self_attn.o_proj", "attn_output", "o_proj"),
    ("self_attn.q_norm", "attn_q_norm", "q_norm"),
    ("self_attn.k_norm", "attn_k_norm", "k_norm"),
    ("post_attention_layernorm", "ffn_norm", "mlp_norm"),
    ("mlp.gate_proj", "ffn_gate", "gate_proj"),
    ("mlp.up_proj", "ffn_up", "up_proj"),
    ("mlp.down_proj", "ffn_down", "down_proj"),
    ("mlp.gate", "ffn_gate_inp", "router"),
)
# Tensors of a layer whose names have no ending in Hugging Face's files, or another one in GGUF files.
_BARE = {
    "self_attn.sinks": "sinks",
    "layer_scalar": "output_scale",
    "router.scale": "router_norm",
    "router.per_expert_scale": "expert_scales",
}
_GGUF_BARE = {"ffn_gate_inp.scale": "router_norm", "ffn_down_exps.scale": "expert_scales"}
_EXPERTS = {f"mlp.experts.#.{name}": (f"experts.#.{name}",) for name in ("gate_proj", "up_proj", "down_proj")}
_STACKS = {  # transformers 5 holds experts so, and some checkpoints are saved so; the names have no ending
    "mlp.experts.gate_up_proj": ("experts.#.gate_proj", "experts.#.up_proj"),
    "mlp.experts.down_proj": ("experts.#.down_proj",),
    "experts.gate_up_proj": ("experts.#.gate_proj", "experts.#.up_proj"),
    "experts.down_proj": ("experts.#.down_proj",),
    "feed_forward.experts.gate_up_proj": ("experts.#.gate_proj", "experts.#.up_proj"),
    "feed_forward.experts.down_proj": ("experts.#.down_proj",),
}
_WEIGHT_STACKS = {name: tuple(f"{own}.weight" for own in owns) for name, owns in _STACKS.items()}
_GGUF_STACKS = {
    "ffn_gate_exps": ("experts.#.gate_proj",),
    "ffn_up_exps": ("experts.#.up_proj",),
    "ffn_down_exps": ("experts.#.down_proj",),
    "ffn_gate_up_exps": ("experts.#.gate_proj", "experts.#.up_proj"),
}

# Tensors that are ignored: tables of angles, which are computed from the config.
_LEFT_OVER_NAMES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LEFT_OVER_ENDINGS = (".rotary_emb.inv_freq",)
# Tensors of multimodal models that are not part of the language model.
_VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
)
# Prefixes of the language model in multimodal models, in transformers 4 and 5.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_HF_LAYER = re.compile(rf"model\.layers\.{_NUMBER}\.(.+)", re.ASCII)
_GGUF_LAYER = re.compile(rf"blk\.{_NUMBER}\.(.+)", re.ASCII)
_EXPERT = re.compile(rf"(.*\.experts)\.{_NUMBER}\.(.+)", re.ASCII)


def transformers_targets(names: Iterable[str], family: Family, architecture: str) -> dict[str, Target]:
    """Return what each tensor of a safetensors checkpoint holds. Unknown names are left out."""
    layer = {name: (own,) for name, _, own in _LAYER} | _EXPERTS | dict(family.names)
    whole = {name: own for name, _, own in _WHOLE} | {family.norm_names[0]: "norm"}
    found = {}
    for name in names:
        plain = _without_prefix(name) if architecture in family.nested or family.skipped else name
        if (target := _target(plain, whole, layer, _WEIGHT_STACKS, _BARE, _HF_LAYER)) is not None:
            found[name] = target
    return found


def gguf_targets(names: Iterable[str], family: Family) -> dict[str, Target]:
    """Return what each tensor of a GGUF file holds. Unknown names are left out."""
    layer = {name: (own,) for _, name, own in _LAYER} | dict(family.gguf_names)
    whole = {name: own for _, name, own in _WHOLE} | {family.norm_names[1]: "norm"}
    stacks = {
        f"{name}.{ending}": tuple(f"{own}.{ending}" for own in owns)
        for name, owns in _GGUF_STACKS.items()
        for ending in ("weight", "bias")
    }
    found = {name: _target(name, whole, layer, stacks, _GGUF_BARE, _GGUF_LAYER) for name in names}
    return {name: target for name, target in found.items() if target is not None}


def gguf_layer(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; 0 for those of the whole model."""
    found = _GGUF_LAYER.fullmatch(name)
    return int(found[1]) if found else 0


def _without_prefix(name: str) -> str:
    for prefix, canonical in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


def _target(
    name: str,
    whole: Mapping[str, str],
    layer: Mapping[str, tuple[str, ...]],
    stacks: Mapping[str, tuple[str, ...]],
    bare: Mapping[str, str],
    in_layer: re.Pattern[str],
) -> Target | None:
    stem, _, ending = name.rpartition(".")
    if ending in ("weight", "bias") and stem in whole:
        return Target((f"{whole[stem]}.{ending}",))
    found = in_layer.fullmatch(name)
    if not found:
        return None
    prefix, rest = f"layers.{found[1]}.", found[2]
    if rest in stacks:
        return Target(tuple(f"{prefix}{own.replace('#', '{}')}" for own in stacks[rest]), is_stack=True)
    if rest in bare:
        return Target((f"{prefix}{bare[rest]}.weight",))
    if rest in layer:  # the name of a parameter that has no ending
        return Target((f"{prefix}{layer[rest][0]}",))
    stem, _, ending = rest.rpartition(".")
    if ending not in ("weight", "bias"):
        return None
    expert = ""
    if numbered := _EXPERT.fullmatch(stem):
        expert, stem = numbered[2], f"{numbered[1]}.#.{numbered[3]}"
    if stem not in layer:
        return None
    names = tuple(f"{prefix}{own.replace('#', expert)}.{ending}" for own in layer[stem])
    return Target(names, is_striped="q_gate" in layer[stem])


def is_left_over(name: str) -> bool:
    """Return whether a file may hold this tensor although no model needs it. The list is explicit."""
    return name in _LEFT_OVER_NAMES or name.endswith(_LEFT_OVER_ENDINGS)


def find_skipped(name: str, family: Family, *, is_multimodal: bool) -> str:
    """Return the part of a model that a tensor belongs to and that quire does not run; empty: the tensor is needed."""
    part = next((part for prefix, part in family.skipped.items() if name.startswith(prefix)), "")
    if part or not is_multimodal or not name.startswith(_VISION_PREFIXES):
        return part
    return "audio tower" if "audio" in name.split(".")[1] else "vision tower"


def transformers_parameters(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the tensors that transformers' class for a model without experts has, and those of quire each holds."""
    expected = expected_tensors(spec)
    layer = {name: (own,) for name, _, own in _LAYER} | dict(BY_NAME[spec.family].names)
    found: dict[str, tuple[str, ...]] = {}
    stems: list[tuple[str, tuple[str, ...]]] = [(name, (own,)) for name, _, own in _WHOLE]
    stems.append((BY_NAME[spec.family].norm_names[0], ("norm",)))
    for index in range(spec.num_layers):
        stems += [
            (f"model.layers.{index}.{name}", tuple(f"layers.{index}.{own}" for own in owns))
            for name, owns in sorted(layer.items(), key=lambda item: -len(item[1]))  # fused ones first
        ]
    used: set[str] = set()
    for name, owns in stems:
        for ending in ("weight", "bias"):
            held = tuple(f"{own}.{ending}" for own in owns)
            if all(one in expected and one not in used for one in held):
                found[f"{name}.{ending}"] = held
                used.update(held)
    return found


_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_PLAIN = (TensorType.F32, TensorType.F16, TensorType.BF16)


class Heads(NamedTuple):
    num_heads: int
    head_size: int
    rotary_size: int


def rotated_heads(info: TensorInfo, spec: ModelSpec, source: str) -> Heads | None:
    """Return the heads whose rows a tensor holds; None: its rows are not rotated.

    `quire.weights.reading` moves them if their rotated pairs are neighbours in the file.
    """
    if not info.name.endswith(_ROTATED):
        return None
    attention = spec.layers[_layer_number(info.name, spec)].attention
    if attention.rope is None and spec.attention.rope is None:
        return None
    # A layer without positions may have any order, but queries and keys must have the same: it is reordered as well.
    rope = attention.rope or spec.attention.rope
    assert rope is not None
    num_heads = attention.num_heads if ".q_proj." in info.name else attention.num_kv_heads
    if info.shape[0] != num_heads * attention.head_size or (len(info.shape) == 1 and info.type not in _PLAIN):
        raise ModelFileError(f"{source}: tensor {info.name} is {info.type} {info.shape} for {num_heads} heads")
    return Heads(num_heads, attention.head_size, rope.rotary_size)


def _layer_number(name: str, spec: ModelSpec) -> int:
    number = int(name.split(".")[1])
    return min(number, spec.num_layers - 1)
