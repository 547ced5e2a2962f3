"""Converts a folder saved by transformers 5 to GGUF, with the keys and names that llama.cpp's converter writes.

Tensor names come from the tables of the gguf package, not from those under test. There is no vocabulary, and weights
are written as they are, in 32 bits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.weights import converting_states as states

Arrays = dict[str, NDArray[Any]]
Keys = dict[str, Any]
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Mistral3ForConditionalGeneration": gguf.MODEL_ARCH.MISTRAL3,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Gemma4ForConditionalGeneration": gguf.MODEL_ARCH.GEMMA4,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
}
# Those that the converter derives from its Llama: it writes rope.dimension_count and reorders the rows of q and k.
_LIKE_LLAMA = (
    gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3, gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.MISTRAL3,
)  # fmt: skip
_GEMMAS = (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3)
_BARE = re.compile(r"layers\.(\d+)\.router\.(scale|per_expert_scale)")
_BARE_NAMES = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
_EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe|feed_forward)\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(folder: Path, path: Path, *, fuses_experts: bool = False, packs_experts: bool = False) -> Path:
    """Convert. `fuses_experts`: gate and up of the experts in one tensor, an option of the converter.

    `packs_experts`: in MXFP4, which weights that were in MXFP4 before do not lose anything by.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    fields = {**config, **config.get("text_config", {})}
    arrays: Arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(file)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in _keys(fields, arch).items():
        _add(writer, key, value)
    for kind in ("bos", "eos"):
        if isinstance(token_id := fields.get(f"{kind}_token_id"), int):
            writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token_id)
    for name, array in _tensors(arrays, fields, arch, fuses_experts=fuses_experts).items():
        if packs_experts and name.endswith("_exps.weight"):
            packed = gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType.MXFP4)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    key = f"{writer.arch}.{name}"
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# Keys


def _keys(fields: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> Keys:
    keys: Keys = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(fields.get("rms_norm_eps") or fields["norm_eps"]),
    }
    has_head_size = fields.get("head_dim") is not None and arch is not gguf.MODEL_ARCH.GRANITE
    if has_head_size and arch is not gguf.MODEL_ARCH.PHI3:
        keys |= {"attention.key_length": fields["head_dim"], "attention.value_length": fields["head_dim"]}
    if arch is not gguf.MODEL_ARCH.GEMMA2:  # its converter writes no rotary keys
        keys |= _rope_keys(fields)
    num_experts = fields.get("num_local_experts", fields.get("num_experts"))
    if num_experts is not None:
        keys["expert_count"] = num_experts
        if fields.get("num_experts_per_tok") is not None:
            keys["expert_used_count"] = fields["num_experts_per_tok"]
    if arch in _LIKE_LLAMA:
        keys |= {"vocab_size": fields["vocab_size"], "rope.dimension_count": head_size(fields)}
    if arch in _MORE_KEYS:
        keys |= _MORE_KEYS[arch](fields)
    return keys


def _rope_keys(fields: Mapping[str, Any]) -> Keys:
    every = fields["rope_parameters"]
    rope = every.get("full_attention", every)
    keys: Keys = {"rope.freq_base": float(rope["rope_theta"])}
    if "sliding_attention" in every:
        keys["rope.freq_base_swa"] = float(every["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope":
        keys["rope.scaling.type"] = kind
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        names = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        keys |= {f"rope.scaling.{names[name]}": float(rope[name]) for name in names if rope.get(name) is not None}
    return keys


def head_size(fields: Mapping[str, Any]) -> int:
    return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])


def _granite_keys(fields: Mapping[str, Any]) -> Keys:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    keys: Keys = {key: float(fields[name]) for name, key in names.items() if fields.get(name)}
    if "shared_intermediate_size" in fields:  # the dense models of Granite 4
        keys |= {
            "expert_shared_feed_forward_length": fields["shared_intermediate_size"],
            "attention.head_count_kv": [fields["num_key_value_heads"]] * fields["num_hidden_layers"],
            "rope.scaling.finetuned": True,
            "ssm.conv_kernel": fields["mamba_d_conv"],
            "ssm.state_size": fields["mamba_d_state"],
        }
    return keys


def _ministral_keys(fields: Mapping[str, Any]) -> Keys:
    rope = fields["rope_parameters"]
    if fields["model_type"] != "ministral3":
        return {}
    return {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


def _olmo_keys(fields: Mapping[str, Any]) -> Keys:
    if "sliding_window" not in fields:
        return {}
    pattern = [one == "sliding_attention" for one in fields["layer_types"]]
    return {"attention.sliding_window": fields["sliding_window"], "attention.sliding_window_pattern": pattern}


def _gemma2_keys(fields: Mapping[str, Any]) -> Keys:
    return {
        "attn_logit_softcapping": float(fields["attn_logit_softcapping"]),
        "final_logit_softcapping": float(fields["final_logit_softcapping"]),
        "attention.sliding_window": fields["sliding_window"],
    }


def _phi_keys(fields: Mapping[str, Any]) -> Keys:
    rope = fields["rope_parameters"]
    part = rope.get("partial_rotary_factor", 1.0)
    context = rope.get("original_max_position_embeddings") or fields["original_max_position_embeddings"]
    keys: Keys = {
        "rope.scaling.original_context_length": context,
        "rope.dimension_count": int(part * fields["hidden_size"]) // fields["num_attention_heads"],
        "attention.sliding_window": fields.get("sliding_window") or 0,
    }
    if rope.get("long_factor"):
        scale = fields["max_position_embeddings"] / context
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0
    return keys


def _gemma4_keys(fields: Mapping[str, Any]) -> Keys:
    is_local = [one == "sliding_attention" for one in fields["layer_types"]]
    full = next(iter(fields["per_layer_config"].values()))
    num_shared = fields["num_kv_shared_layers"]
    keys: Keys = {
        "attention.sliding_window": fields["sliding_window"],
        "attention.sliding_window_pattern": is_local,
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": fields["hidden_size_per_layer_input"],
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": fields["head_dim"],
        "attention.value_length_swa": fields["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": fields["head_dim"],
        "final_logit_softcapping": float(fields["final_logit_softcapping"]),
    }
    if "num_key_value_heads" in full:
        sizes = (full["num_key_value_heads"], fields["num_key_value_heads"])
        keys["attention.head_count_kv"] = [sizes[one] for one in is_local]
    if fields["use_double_wide_mlp"]:
        size, first = fields["intermediate_size"], fields["num_hidden_layers"] - num_shared
        keys["feed_forward_length"] = [size if i < first else 2 * size for i in range(fields["num_hidden_layers"])]
    if fields["enable_moe_block"]:
        keys |= {
            "expert_used_count": fields["top_k_experts"],
            "expert_feed_forward_length": fields["moe_intermediate_size"],
        }
    return keys


_MORE_KEYS: dict[gguf.MODEL_ARCH, Callable[[Mapping[str, Any]], Keys]] = {
    gguf.MODEL_ARCH.QWEN3MOE: lambda fields: {"expert_feed_forward_length": fields["moe_intermediate_size"]},
    gguf.MODEL_ARCH.OLMO2: _olmo_keys,
    gguf.MODEL_ARCH.GRANITE: _granite_keys,
    gguf.MODEL_ARCH.MISTRAL3: _ministral_keys,
    gguf.MODEL_ARCH.GLM4: lambda fields: {
        "rope.dimension_count": int(head_size(fields) * fields["rope_parameters"].get("partial_rotary_factor", 0.5))
    },
    gguf.MODEL_ARCH.GEMMA2: _gemma2_keys,
    gguf.MODEL_ARCH.GEMMA3: lambda fields: {"attention.sliding_window": fields["sliding_window"]},
    gguf.MODEL_ARCH.PHI3: _phi_keys,
    gguf.MODEL_ARCH.GPT_OSS: lambda fields: {
        "attention.sliding_window": fields["sliding_window"],
        "expert_feed_forward_length": fields["intermediate_size"],
    },
    gguf.MODEL_ARCH.GEMMA4: _gemma4_keys,
    **dict.fromkeys(states.DELTA_NETS, states.delta_net_keys),
    **dict.fromkeys(states.SHORT_CONVS, states.short_conv_keys),
}


# Tensors


def _tensors(arrays: Arrays, fields: Mapping[str, Any], arch: gguf.MODEL_ARCH, *, fuses_experts: bool) -> Arrays:
    arrays = {name.replace("language_model.model.", "model."): array for name, array in arrays.items()}
    arrays = {name.replace("language_model.lm_head.", "lm_head."): array for name, array in arrays.items()}
    is_vision = ("vision_tower", "multi_modal_projector")
    arrays = {name: array for name, array in arrays.items() if not any(one in name for one in is_vision)}
    names = gguf.get_tensor_name_map(arch, fields["num_hidden_layers"])
    found: Arrays = {}
    for name, array in _interleaved(_split(_stacked(arrays))).items():
        if (bare := _BARE.search(name)) is not None:
            found[f"blk.{bare[1]}.{_BARE_NAMES[bare[2]]}"] = array
            continue
        renamed = names.get_name(states.renamed(name), try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        found[renamed] = _changed(name, array, fields, arch)
    if fuses_experts:
        found = _fused(found)
    return found | _rope_tables(fields, arch)


def _stacked(arrays: Arrays) -> Arrays:
    """Return the tensors with those of all experts of a layer in one."""
    found: Arrays = {}
    experts: dict[str, dict[int, NDArray[Any]]] = {}
    for name, array in arrays.items():
        if one := _EXPERT.fullmatch(name):
            prefix = one[1].replace("model.", "").replace("block_sparse_moe", "feed_forward")
            prefix = prefix if "feed_forward" in prefix else one[1]
            experts.setdefault(f"{prefix}.{one[3]}.weight", {})[int(one[2])] = array
        else:
            found[name] = array
    return found | {name: np.stack([every[i] for i in range(len(every))]) for name, every in experts.items()}


def _split(arrays: Arrays) -> Arrays:
    """Return the tensors with Granite 4's fused matrices divided, under the names of Granite 3."""
    found: Arrays = {}
    for name, array in arrays.items():
        if ".shared_mlp.input_linear." in name:
            gate, up = np.split(array, 2)
            found[name.replace("shared_mlp.input_linear", "mlp.gate_proj")] = gate
            found[name.replace("shared_mlp.input_linear", "mlp.up_proj")] = up
        else:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = array
    return found


def _interleaved(arrays: Arrays) -> Arrays:
    """Return the tensors with the experts of gpt-oss divided into gates and ups, rows first."""
    found: Arrays = {}
    for name, array in arrays.items():
        if ".mlp.experts.gate_up_proj" in name:
            whole = array if name.endswith("_bias") else array.swapaxes(1, 2)
            ending = "bias" if name.endswith("_bias") else "weight"
            prefix = name.split("gate_up_proj")[0]
            found |= {f"{prefix}gate_proj.{ending}": whole[:, ::2], f"{prefix}up_proj.{ending}": whole[:, 1::2]}
        elif name.endswith(".mlp.experts.down_proj"):
            found[f"{name}.weight"] = array.swapaxes(1, 2)
        elif name.endswith(".mlp.experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = array
        elif name.endswith((".sinks", ".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")):
            found[f"{name}.weight"] = array
        else:
            found[name] = array
    return found


def _changed(name: str, array: NDArray[Any], fields: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> NDArray[Any]:
    if arch in states.DELTA_NETS:
        return states.changed(name, array, fields)
    if arch in states.SHORT_CONVS and ".conv.conv." in name:
        return array.reshape(len(array), -1)
    if arch in _GEMMAS and name.endswith("norm.weight"):
        return array + np.float32(1)
    num_heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    which = name.split(".")[-2]
    if arch not in _LIKE_LLAMA or which not in num_heads:
        return array
    heads = num_heads[which]
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _fused(arrays: Arrays) -> Arrays:
    found = {name: array for name, array in arrays.items() if "gate_exps" not in name and "up_exps" not in name}
    for name, gate in arrays.items():
        if "gate_exps" in name:
            up = arrays[name.replace("gate_exps", "up_exps")]
            found[name.replace("gate_exps", "gate_up_exps")] = np.concatenate([gate, up], 1)
    return found


def _rope_tables(fields: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> Arrays:
    """Return the measured factors: of Llama 3 one table, of Phi 3 two."""
    rope = fields["rope_parameters"]
    if arch is gguf.MODEL_ARCH.GEMMA4:
        size = next(iter(fields["per_layer_config"].values()))["head_dim"]
        num_rotated = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * num_rotated + [1e30] * (size // 2 - num_rotated)
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{one}.weight": np.array(rope[f"{one}_factor"], np.float32) for one in ("long", "short")}
    if rope.get("rope_type") != "llama3" or arch not in _LIKE_LLAMA:
        return {}
    size, factor, factors = head_size(fields), rope["factor"], []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, size, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / size) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}
