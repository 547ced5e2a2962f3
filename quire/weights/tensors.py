"""The tensors of a model under quire's own names, and where they lie in a file.

Every tensor is one matrix or vector: `layers.3.q_proj.weight`, `layers.3.experts.17.down_proj.weight`. A file may hold
several of them in one tensor: q, k and v as rows of one matrix, or an expert's matrices stacked over all experts. Rows
are stored one after the other in every format, so each of quire's tensors is still a range of bytes. Queries and their
gates are the exception: their rows alternate by head, so `Place.stripe` says which rows are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint, TensorInfo
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
    tensors: dict[str, Shape] = {}
    if layer.has_pre_norms:
        tensors |= {"input_norm.weight": (hidden_size,), "mlp_norm.weight": (hidden_size,)}
    if layer.has_post_norms:
        tensors |= {"post_attention_norm.weight": (hidden_size,), "post_mlp_norm.weight": (hidden_size,)}
    if layer.parallel_experts is not None:
        names = ("experts_norm", "post_dense_norm", "post_experts_norm")
        tensors |= {f"{name}.weight": (hidden_size,) for name in names}
    return tensors


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
    tensors: dict[str, Shape] = {}
    if not isinstance(mlp, ExpertsSpec):
        tensors |= _gated("", mlp.size, hidden_size, has_bias=mlp.has_bias)
    return tensors if experts is None else tensors | _experts(experts, hidden_size)


def _experts(experts: ExpertsSpec, hidden_size: int) -> dict[str, Shape]:
    tensors = _linear("router", experts.num_experts, hidden_size, has_bias=experts.has_router_bias)
    if experts.has_router_norm:
        tensors["router_norm.weight"] = (hidden_size,)
    if experts.has_expert_scales:
        tensors["expert_scales.weight"] = (experts.num_experts,)
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
        if info.shape != (num_stacked, *whole):
            return None
    elif _without_ones(info.shape) != _without_ones(whole):
        return None
    if target.is_striped:
        return _stripes(info, target, shapes, spec)
    if target.is_stack and not _has_experts(target.names[0], num_stacked, expected):
        return None
    num_rows = num_stacked * whole[0]
    places, first_row = [], 0
    for expert in range(num_stacked):
        for name, shape in zip(target.names, shapes, strict=True):
            part = TensorInfo(name.format(expert), info.type, shape, info.num_bytes * shape[0] // num_rows)
            places.append(Place(part, info.name, info.num_bytes * first_row // num_rows, first_row=first_row))
            first_row += shape[0]
    return places


def _stripes(info: TensorInfo, target: Target, shapes: Sequence[Shape], spec: ModelSpec) -> list[Place]:
    count = len(shapes)
    num_heads = spec.layers[int(target.names[0].split(".")[1])].attention.num_heads
    return [
        Place(TensorInfo(name, info.type, shape, info.num_bytes // count), info.name, 0, Stripe(i, count, num_heads))
        for i, (name, shape) in enumerate(zip(target.names, shapes, strict=True))
    ]


def _without_ones(shape: Shape) -> Shape:
    """A convolution is [channels, 1, taps] in some files, and a matrix with one row is a vector in others."""
    return tuple(size for size in shape if size != 1)


def _has_experts(name: str, count: int, expected: Mapping[str, Shape]) -> bool:
    """Return whether the model has exactly this many experts."""
    return name.format(count - 1) in expected and name.format(count) not in expected


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
