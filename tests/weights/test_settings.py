"""Settings of config.json and GGUF keys that are easy to overlook, compared with transformers and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.support import MLX_GGUF_FAMILIES
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorInfo, TensorType
from quire.weights.config import spec_from_config
from quire.weights.opening import open_checkpoint
from quire.weights.spec import ModelSpec
from quire.weights.tensors import Target, check_tensors, place_tensors
from tests.weights.makers import config, llama_arrays, tiny_gguf, write_folder


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_config(config(architecture, **changes), {}, "config.json", "F32")


def test_a_head_that_differs_from_the_embedding_is_used_although_the_config_ties_them(tmp_path: Path) -> None:
    arrays = llama_arrays()
    settings = config(tie_word_embeddings=True)
    own = open_checkpoint(write_folder(tmp_path / "own", settings, arrays))
    assert not own.spec.is_tied
    check_tensors(own)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    twice = open_checkpoint(write_folder(tmp_path / "twice", settings, arrays))
    assert twice.spec.is_tied
    check_tensors(twice)


def test_a_null_replaces_the_default_of_transformers() -> None:
    gemma = spec("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (gemma.attention.softcap, gemma.logit_softcap) == (0.0, 0.0)
    assert (spec("Gemma2ForCausalLM").attention.softcap, spec("Gemma2ForCausalLM").logit_softcap) == (50.0, 30.0)
    assert spec("MistralForCausalLM", num_key_value_heads=None).attention.num_kv_heads == 4
    assert spec("SeedOssForCausalLM", head_dim=None).attention.head_size == 16


def test_windows_that_are_switched_on_have_the_default_size() -> None:
    assert spec("Qwen3MoeForCausalLM", use_sliding_window=True).windows == (4096, 4096)
    assert spec("Qwen3MoeForCausalLM").windows == (0, 0)


def test_the_text_of_mistral_small_3_has_the_defaults_of_mistral() -> None:
    text = {**config(), "model_type": "mistral"}
    del text["rms_norm_eps"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "torch_dtype": "float32"}
    assert spec_from_config(whole, {}, "config.json", "F32").norm_eps == 1e-6
    assert spec_from_config(whole, {}, "config.json", "F32").windows == (4096, 4096)


def opened(tmp_path: Path, **keys: Any) -> ModelSpec:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(**keys))
    return open_checkpoint(path).spec


def test_gguf_keys_without_a_default_are_required(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="layer_norm_rms_epsilon is missing"):
        opened(tmp_path, llama__attention__layer_norm_rms_epsilon=None)


def test_gguf_keys_of_other_equations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope\.dimension_sections is"):
        opened(tmp_path, llama__rope__dimension_sections=[8, 12, 12, 0])
    assert opened(tmp_path, llama__rope__dimension_sections=[0, 0, 0, 0]).family == "llama"


def test_a_stack_of_more_experts_than_the_model_has_is_not_divided() -> None:
    """A forged file could make millions of them, before its tensors are checked."""
    experts = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    model = spec("Qwen3MoeForCausalLM", **experts)
    info = TensorInfo("stack", TensorType.F32, (1_000_000, 1, 64), 256_000_000)
    target = Target(("layers.0.experts.{}.gate_proj.weight",), is_stack=True)
    assert list(place_tensors({"stack": info}, {"stack": target}, model, "file")) == [
        "layers.0.experts.{}.gate_proj.weight"
    ]


def test_families_whose_gguf_files_mlx_reads() -> None:
    from quire.backends.mlx.spec_model import MODEL_TYPES

    assert tuple(MODEL_TYPES) == MLX_GGUF_FAMILIES


def test_the_saved_head_of_a_multimodal_mistral_is_read(tmp_path: Path) -> None:
    """transformers 5 writes a tied outer config and a separate head for these models."""
    arrays = {f"language_model.{name}": array for name, array in llama_arrays().items()}
    text = {**config(), "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    folder = write_folder(tmp_path / "model", whole, arrays)
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    assert not checkpoint.spec.is_tied
    head = np.frombuffer(checkpoint.read("head.weight").data.tobytes(), np.float32)
    assert np.array_equal(head, llama_arrays()["lm_head.weight"].ravel())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
