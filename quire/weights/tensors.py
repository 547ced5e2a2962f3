"""The tensors of a model under quire's own names, and where they lie in a file.

Every tensor is one matrix or vector: `layers.3.q_proj.weight`, `layers.3.experts.17.down_proj.weight`. A file may hold
several of them in one tensor: q, k and v as rows of one matrix, or an expert's matrices stacked over all experts. Rows
are stored one after the other in every format, so each of quire's tensors is still a range of bytes. Queries and their
gates are the exception: their rows alternate by head, so `Place.stripe` says which rows are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint, TensorInfo, TensorType
from quire.weights.families import BY_NAME, Family
from quire.weights.fields import show
from quire.weights.spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, ModelSpec, QKNorm

MAX_LISTED = 5

Shape = tuple[int, ...]


class Target(NamedTuple):
    """What a tensor of a file holds."""

    names: tuple[str, ...]  # quire's tensors, one below the other; of a stack, with {} for the number of the expert
    is_stack: bool = False  # [experts, rows, columns]
    is_striped: bool = False  # the rows of the tensors alternate by head


class Stripe(NamedTuple):
    """The heads that a tensor has in another one whose rows alternate by head: `place` of every `num_parts` heads."""

    place: int
    num_parts: int
    num_heads: int


class Place(NamedTuple):
    """Where one of quire's tensors lies."""

    info: TensorInfo
    file_name: str  # of the file's tensor that holds it
    offset: int  # bytes, from the start of that tensor
    stripe: Stripe = Stripe(0, 1, 1)  # of one part: the tensor is a range of bytes
    first_row: int = 0  # of that tensor; of a stack [N, rows, columns], counted through all N

    @property
    def num_file_bytes(self) -> int:
        """Bytes from `offset` on that hold the tensor."""
        return self.info.num_bytes * self.stripe.num_parts


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return every tensor the model needs, with its shape, rows first."""
    expected: dict[str, Shape] = {
        "embedding.weight": (spec.vocab_size, spec.hidden_size),
        "norm.weight": (spec.hidden_size,),
    }
    if not spec.is_tied:
        expected["head.weight"] = (spec.vocab_size, spec.hidden_size)
    if spec.ple_size:
        width = spec.num_layers * spec.ple_size
        expected["ple_embedding.weight"] = (spec.vocab_size, width)
        expected["ple_model_proj.weight"] = (width, spec.hidden_size)
        expected["ple_model_norm.weight"] = (spec.ple_size,)
    for index, layer in enumerate(spec.layers):
        expected |= {f"layers.{index}.{name}": shape for name, shape in layer_tensors(layer, spec.hidden_size).items()}
    return expected


def layer_tensors(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    return {
        **_norms(layer, hidden_size),
        **_mixer(layer, hidden_size),
        **_mlp(layer, hidden_size),
        **_layer_extras(layer, hidden_size),
    }


def _norms(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    before = ("input_norm", "mlp_norm") if layer.has_pre_norms else ()
    after = ("post_attention_norm", "post_mlp_norm") if layer.has_post_norms else ()
    parallel = ("experts_norm", "post_dense_norm", "post_experts_norm") if layer.parallel_experts is not None else ()
    return {f"{name}.weight": (hidden_size,) for name in (*before, *after, *parallel)}


def _mixer(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        return _attention(mixer, hidden_size)
    if isinstance(mixer, DeltaNetSpec):
        return _delta_net(mixer, hidden_size)
    return {
        **_linear("in_proj", 3 * hidden_size, hidden_size, has_bias=mixer.has_bias),  # rows of b, c and x
        "conv.weight": (hidden_size, mixer.num_taps),
        **({"conv.bias": (hidden_size,)} if mixer.has_bias else {}),
        **_linear("out_proj", hidden_size, hidden_size, has_bias=mixer.has_bias),
    }


def _attention(attention: AttentionSpec, hidden_size: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {}
    if attention.qk_norm is QKNorm.HEAD:
        tensors["q_norm.weight"] = (attention.head_size,)
        if attention.shared_with is None:
            tensors["k_norm.weight"] = (attention.head_size,)
    elif attention.qk_norm is QKNorm.WIDTH:
        tensors |= {"q_norm.weight": (attention.q_size,), "k_norm.weight": (attention.kv_size,)}
    rows = {"q_proj": attention.q_size}
    if attention.shared_with is None:
        rows["k_proj"] = attention.kv_size
        if not attention.is_key_value:
            rows["v_proj"] = attention.kv_size
    if attention.has_gate:
        rows["q_gate"] = attention.q_size
    for name, size in rows.items():
        tensors |= _linear(name, size, hidden_size, has_bias=attention.has_qkv_bias)
    if attention.has_sinks:
        tensors["sinks.weight"] = (attention.num_heads,)
    return tensors | _linear("o_proj", hidden_size, attention.q_size, has_bias=attention.has_output_bias)


def _delta_net(net: DeltaNetSpec, hidden_size: int) -> dict[str, Shape]:
    return {
        "in_proj_qkv.weight": (net.num_channels, hidden_size),
        "in_proj_z.weight": (net.value_size, hidden_size),
        "in_proj_b.weight": (net.num_value_heads, hidden_size),
        "in_proj_a.weight": (net.num_value_heads, hidden_size),
        "conv.weight": (net.num_channels, net.num_taps),  # the last tap is for the token itself
        "a_log": (net.num_value_heads,),  # g = -exp(a_log) * softplus(a + dt_bias)
        "dt_bias": (net.num_value_heads,),
        "gated_norm.weight": (net.value_head_size,),
        "out_proj.weight": (hidden_size, net.value_size),
    }


def _mlp(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    mlp, experts = layer.mlp, layer.experts
    dense = {} if isinstance(mlp, ExpertsSpec) else _gated("", mlp.size, hidden_size, has_bias=mlp.has_bias)
    return dense if experts is None else dense | _experts(experts, hidden_size)


def _experts(experts: ExpertsSpec, hidden_size: int) -> dict[str, Shape]:
    tensors = _linear("router", experts.num_experts, hidden_size, has_bias=experts.has_bias)
    if experts.has_router_norm:
        tensors |= {"router_norm.weight": (hidden_size,), "expert_scales.weight": (experts.num_experts,)}
    if experts.has_expert_bias:
        tensors["expert_bias"] = (experts.num_experts,)
    for expert in range(experts.num_experts):
        tensors |= _gated(f"experts.{expert}.", experts.size, hidden_size, has_bias=experts.has_bias)
    if experts.shared_size:
        tensors |= _gated("shared.", experts.shared_size, hidden_size, has_bias=False)
        tensors["shared_gate.weight"] = (1, hidden_size)
    return tensors


def _layer_extras(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {}
    if layer.has_output_scale:
        tensors["output_scale.weight"] = (1,)
    if layer.ple_size:
        tensors |= _linear("ple_gate", layer.ple_size, hidden_size, has_bias=False)
        tensors |= _linear("ple_proj", hidden_size, layer.ple_size, has_bias=False)
        tensors["ple_norm.weight"] = (hidden_size,)
    return tensors


def _gated(prefix: str, size: int, hidden_size: int, *, has_bias: bool) -> dict[str, Shape]:
    return {
        **_linear(f"{prefix}gate_proj", size, hidden_size, has_bias=has_bias),
        **_linear(f"{prefix}up_proj", size, hidden_size, has_bias=has_bias),
        **_linear(f"{prefix}down_proj", hidden_size, size, has_bias=has_bias),
    }


def _linear(name: str, num_outputs: int, num_inputs: int, *, has_bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (num_outputs, num_inputs)}
    return weight | {f"{name}.bias": (num_outputs,)} if has_bias else weight


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def norm_offset(spec: ModelSpec, name: str) -> float:
    """Return what is added to the weights of a norm. The gated norm of a delta net has no offset in any file."""
    return 0.0 if name.endswith("gated_norm.weight") else spec.norm_offset


def num_weights(spec: ModelSpec) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(spec).values())


def num_active_weights(spec: ModelSpec) -> int:
    """Return how many weights one token is multiplied by: one embedding matrix, and of the experts the chosen ones."""
    total = num_weights(spec) - (0 if spec.is_tied else spec.vocab_size * spec.hidden_size)
    total -= spec.vocab_size * spec.num_layers * spec.ple_size  # one row of it is added
    for layer in spec.layers:
        if (experts := layer.experts) is not None:
            total -= 3 * (experts.num_experts - experts.num_chosen) * experts.size * spec.hidden_size
    return total


# Where they lie


def place_tensors(
    found: Mapping[str, TensorInfo], targets: Mapping[str, Target], spec: ModelSpec, source: str
) -> dict[str, Place]:
    """Return quire's tensors among those of a file. A tensor without a target, or of another shape, is kept whole.

    `check_tensors` refuses the latter.
    """
    expected = expected_tensors(spec)
    places: dict[str, Place] = {}
    for file_name, info in found.items():
        target = targets.get(file_name)
        parts = _divide(info, target, expected, spec) if target else None
        if parts is None:
            name = target.names[0] if target else file_name
            parts = [Place(info._replace(name=name), file_name, 0)]
        for part in parts:
            if part.info.name in places:
                other = places[part.info.name].file_name
                raise ModelFileError(
                    f"{source}: tensor {show(file_name)} duplicates {show(part.info.name)}, which {show(other)} holds"
                )
            places[part.info.name] = part
    return places


def _divide(info: TensorInfo, target: Target, expected: Mapping[str, Shape], spec: ModelSpec) -> list[Place] | None:
    """Return the parts of a file's tensor, or None if it does not have the shape of all of them together."""
    num_stacked = info.shape[0] if target.is_stack else 1
    first = [expected.get(name.format(0)) for name in target.names]
    shapes = [shape for shape in first if shape is not None]
    if len(shapes) != len(first) or not shapes:
        return None
    whole: Shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if target.is_stack:
        name = target.names[0]
        has_experts = name.format(num_stacked - 1) in expected and name.format(num_stacked) not in expected
        if info.shape != (num_stacked, *whole) or not has_experts:  # exactly those of the model
            return None
    elif _without_ones(info.shape) != _without_ones(whole):
        return None
    if target.is_striped:
        count = len(shapes)
        num_heads = spec.layers[int(target.names[0].split(".")[1])].attention.num_heads
        return [
            Place(
                TensorInfo(name, info.type, shape, info.num_bytes // count), info.name, 0, Stripe(i, count, num_heads)
            )
            for i, (name, shape) in enumerate(zip(target.names, shapes, strict=True))
        ]
    num_rows = num_stacked * whole[0]
    places, first_row = [], 0
    for expert in range(num_stacked):
        for name, shape in zip(target.names, shapes, strict=True):
            part = TensorInfo(name.format(expert), info.type, shape, info.num_bytes * shape[0] // num_rows)
            places.append(Place(part, info.name, info.num_bytes * first_row // num_rows, first_row=first_row))
            first_row += shape[0]
    return places


def _without_ones(shape: Shape) -> Shape:
    """A convolution is [channels, 1, taps] in some files, and a matrix with one row is a vector in others."""
    return tuple(size for size in shape if size != 1)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise unless the checkpoint has exactly the tensors of its model, and quire knows its equations."""
    if checkpoint.spec.unsupported:
        raise UnsupportedModel(checkpoint.spec.unsupported)
    expected = expected_tensors(checkpoint.spec)
    found: Mapping[str, TensorInfo] = checkpoint.tensors
    unexpected = [name for name in found if name not in expected and not _is_unused(name, checkpoint.spec)]
    if checkpoint.spec.is_tied:  # some files contain the embedding twice
        unexpected = [name for name in unexpected if name != "head.weight"]
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


def _is_unused(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor belongs to the keys or values of a layer that has none: some files contain it."""
    parts = name.split(".")
    if len(parts) != 4 or parts[2] not in ("k_proj", "v_proj", "k_norm") or not parts[1].isdecimal():
        return False
    layer = int(parts[1])
    mixer = spec.layers[layer].mixer if layer < spec.num_layers else None
    return isinstance(mixer, AttentionSpec) and mixer.shared_with is not None


def _listed(what: str, names: Iterable[str]) -> str:
    every: Sequence[str] = list(names)
    if not every:
        return ""
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return f"{what}: {', '.join(every[:MAX_LISTED])}{more}"


# Names in files: Hugging Face's and GGUF's, and the tensors that they hold. There are two tables, one per format.
# A family's row (`families.py`) adds what differs. In the names of a layer's tensors, # stands for the number of an
# expert; a stack holds one tensor of every expert.

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


# Rows of queries and keys are reordered. `RopeSpec` rotates pairs (0, R/2), (1, R/2 + 1), .. of a head's first R
# dimensions. Some files are made for pairs of neighbours, (0, 1), (2, 3), ...

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
    number = int(info.name.split(".")[1])
    attention = spec.layers[min(number, spec.num_layers - 1)].attention
    if attention.rope is None and spec.attention.rope is None:
        return None
    # A layer without positions may have any order, but queries and keys must have the same: it is reordered as well.
    rope = attention.rope or spec.attention.rope
    assert rope is not None
    num_heads = attention.num_heads if ".q_proj." in info.name else attention.num_kv_heads
    if info.shape[0] != num_heads * attention.head_size or (len(info.shape) == 1 and info.type not in _PLAIN):
        raise ModelFileError(f"{source}: tensor {info.name} is {info.type} {info.shape} for {num_heads} heads")
    return Heads(num_heads, attention.head_size, rope.rotary_size)
