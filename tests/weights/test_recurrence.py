"""Layers with a recurrent state: what files say of them, and the parts of files that are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.backends.kv_memory import KVSpec
from quire.backends.support import skip_notice
from quire.cli.models import find_facts
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.config import spec_from_config
from quire.weights.gguf import read_header
from quire.weights.gguf_spec import spec_from_gguf
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, ModelSpec, ShortConvSpec
from quire.weights.tensors import check_tensors, norm_offset, num_active_weights, num_weights
from tests.weights.makers import F32, Tensor, make_gguf
from tests.weights.test_families import same_tensors

pytest.importorskip("transformers")
from tests.backends.torch.families import Reference
from tests.weights.converting import write_gguf

ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN_27B: dict[str, Any] = {  # as published, without fields that change nothing
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17_408,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        **LINEAR,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "rope_parameters": ROPE,
    },
}
QWEN_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        **LINEAR,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "rope_parameters": ROPE,
    },
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    inner = {**config["text_config"], **changes} if "text_config" in config else None
    changed = {**config, "text_config": inner} if inner else {**config, **changes}
    return spec_from_config(changed, {}, "config.json", "BF16")


def test_sizes_of_real_models() -> None:
    dense, routed = read(QWEN_27B), read(QWEN_35B)
    assert 26.5e9 < num_weights(dense) < 28e9
    assert 34e9 < num_weights(routed) < 36e9
    assert 2.5e9 < num_active_weights(routed) < 3.6e9
    assert KVSpec.of(dense).state_bytes(2) == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)  # 154 MB
    assert KVSpec.of(dense).block_bytes(1, 2) == 65_536
    assert KVSpec.of(routed).block_bytes(1, 2) == 20_480
    assert [isinstance(layer.mixer, AttentionSpec) for layer in dense.layers[:8]] == [False, False, False, True] * 2
    attention = dense.attention
    assert (attention.rope and attention.rope.rotary_size, attention.head_size, attention.has_gate) == (64, 256, True)
    assert isinstance(routed.mlp, ExpertsSpec)
    assert (routed.mlp.shared_size, routed.mlp.renormalizes) == (512, True)


def test_only_the_gated_norm_has_no_offset() -> None:
    spec = read(QWEN_27B)
    assert norm_offset(spec, "layers.0.input_norm.weight") == norm_offset(spec, "layers.3.q_norm.weight") == 1
    assert norm_offset(spec, "norm.weight") == 1
    assert norm_offset(spec, "layers.0.gated_norm.weight") == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"layer_types": ["linear_attention"] * 64}, "no layer attends"),
        ({"layer_types": ["full_attention"] * 63}, "not a list of 64 names"),
        ({"layer_types": ["mamba"] * 64}, r"layer_types\[0\] 'mamba' is not full_attention or linear_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 40}, "not a multiple of 16 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"model_type": "qwen4"}, "model_type 'qwen4'"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        read(QWEN_27B, **changes)


LFM2: dict[str, Any] = {  # LFM2-1.2B in the form of its first files
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65_536,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_ff_dim": 12_288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "tie_embedding": True,
}


def test_lfm2_with_the_names_of_its_first_files() -> None:
    spec = read(LFM2)
    assert 1.1e9 < num_weights(spec) < 1.25e9
    assert (spec.is_tied, spec.norm_eps, spec.attention.rope and spec.attention.rope.theta) == (True, 1e-5, 1e6)
    attends = [i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, AttentionSpec)]
    assert attends == [2, 5, 8, 10, 12, 14]
    assert spec.layers[0].mixer == ShortConvSpec(3)
    assert read(LFM2, block_auto_adjust_ff_dim=False).mlp.size == 12_288
    assert spec.mlp.size == 8192
    with pytest.raises(ModelFileError, match="full_attn_idxs"):
        read(LFM2, full_attn_idxs="all")


def test_key_heads() -> None:
    assert DeltaNetSpec(2, 6, 4, 4, 4).key_heads == (0, 0, 0, 1, 1, 1)
    assert DeltaNetSpec(2, 6, 4, 4, 4, is_tiled=True).key_heads == (0, 1, 0, 1, 0, 1)


# Parts that are skipped


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Reference("qwen3_5", tmp_path_factory.mktemp("saved")).path


def write_multimodal(source: Path, folder: Path) -> Path:
    """Write a copy as a multimodal model: nested fields, another prefix, a vision tower and an MTP head."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    arrays = load_file(source / "model.safetensors")
    found = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: array
        for name, array in arrays.items()
    }
    found["model.visual.blocks.0.attn.qkv.weight"] = np.zeros((4, 4), np.float32)
    found["mtp.layers.0.self_attn.q_proj.weight"] = np.zeros((4, 4), np.float32)
    found["mtp.fc.weight"] = np.zeros((4, 8), np.float32)
    save_file(found, folder / "model.safetensors")
    return folder


def test_vision_towers_and_mtp_heads_are_skipped(saved: Path, tmp_path: Path) -> None:
    plain, whole = open_checkpoint(saved), open_checkpoint(write_multimodal(saved, tmp_path / "multimodal"))
    check_tensors(whole)
    assert whole.spec.layers == plain.spec.layers
    assert plain.spec.skipped == ()
    assert whole.spec.skipped == ("MTP head", "vision tower")
    same_tensors(plain, whole)
    assert skip_notice(plain.spec) == ""
    notice = "MTP head and vision tower are skipped: quire runs the language model only"
    assert skip_notice(whole.spec) == notice
    assert find_facts(whole, whole.path)["skipped"] == ["MTP head", "vision tower"]


def test_the_mtp_head_of_a_gguf_is_skipped(saved: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(write_gguf(saved, tmp_path / "m.gguf"))
    data = (tmp_path / "m.gguf").read_bytes()
    header = read_header(tmp_path / "m.gguf", data)
    keys = {**header.metadata, "qwen35.nextn_predict_layers": 1}
    keys["qwen35.block_count"] += 1
    tensors = {
        info.name: Tensor(info.shape[::-1], F32, data[offset : offset + info.num_bytes])
        for info, offset in header.tensors.values()
    }
    for name in ("attn_norm", "nextn.eh_proj", "ffn_up"):
        tensors[f"blk.5.{name}.weight"] = Tensor((8, 8), F32, bytes(256))
    (tmp_path / "mtp.gguf").write_bytes(make_gguf(list(keys.items()), list(tensors.items())))
    other = open_checkpoint(tmp_path / "mtp.gguf")
    check_tensors(other)
    assert other.spec.skipped == ("MTP head",)
    assert other.spec.layers == plain.spec.layers
    assert plain.spec.skipped == ()
    assert other.tensors.keys() == plain.tensors.keys()


# GGUF


def gguf_spec(architecture: str, keys: dict[str, Any]) -> ModelSpec:
    embedding = {"token_embd.weight": TensorInfo("token_embd.weight", TensorType.F32, (64, 64), 64 * 64 * 4)}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": one for key, one in keys.items()}}
    return spec_from_gguf(metadata, embedding, lambda _name, _length: None, "m.gguf")


SIZES: dict[str, Any] = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 96,
}  # fmt: skip


def test_gguf_lists_of_layers() -> None:
    spec = gguf_spec("qwen35", {**SIZES, **SSM})
    assert [isinstance(layer.mixer, DeltaNetSpec) for layer in spec.layers] == [True, True, True, False]
    assert spec.layers[0].mixer == DeltaNetSpec(2, 4, 16, 24, 4, is_tiled=True)
    listed = gguf_spec("qwen35", {**SIZES, **SSM, "attention.recurrent_layers": [True, False, True, False]})
    assert [isinstance(layer.mixer, DeltaNetSpec) for layer in listed.layers] == [True, False, True, False]
    conv = gguf_spec("lfm2", {**SIZES, "attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3})
    assert [isinstance(layer.mixer, ShortConvSpec) for layer in conv.layers] == [True, False, True, True]
    assert conv.attention.num_kv_heads == 2


@pytest.mark.parametrize(
    ("architecture", "changes", "match"),
    [
        ("qwen35", {"ssm.inner_size": 97}, "not a multiple of 4 heads"),
        ("qwen35", {"ssm.time_step_rank": 5}, "not a multiple of 2 key heads"),
        ("qwen35", {"full_attention_interval": 5}, "no layer attends"),
        ("qwen35", {"attention.recurrent_layers": [True] * 3}, "not 4 times true or false"),
        ("qwen35", {"nextn_predict_layers": 9}, "nextn_predict_layers is 9"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "attention.head_count_kv"),
        ("lfm2", {"attention.head_count_kv": [2, 0, 0]}, "not a list of 4 numbers"),
        ("lfm2", {"attention.sliding_window": 128}, "attention.sliding_window"),
    ],
)
def test_gguf_values_that_are_refused(architecture: str, changes: dict[str, Any], match: str) -> None:
    keys = {**SIZES, **(SSM if architecture == "qwen35" else {"shortconv.l_cache": 3}), **changes}
    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        gguf_spec(architecture, keys)


def test_decays_that_are_not_negative_are_refused(saved: Path, tmp_path: Path) -> None:
    path = write_gguf(saved, tmp_path / "m.gguf")
    data = path.read_bytes()
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.0.ssm_a")
    start = int(tensor.data_offset)
    path.write_bytes(data[:start] + np.zeros(6, np.float32).tobytes() + data[start + 24 :])
    with pytest.raises(ModelFileError, match=r"layers\.0\.a_log has values that are not negative"):
        to_float32(open_checkpoint(path).read("layers.0.a_log"))
