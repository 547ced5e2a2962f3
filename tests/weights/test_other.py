"""Models that only mlx-lm runs: their specs, their files, hostile configs, and the refusal of quire's own backends."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends import support
from quire.engine.composition import EngineConfig, check_supported, make_engine
from quire.engine.llm import LLM
from quire.engine.model_text import ModelText
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.fields import Fields
from quire.weights.opening import open_checkpoint
from quire.weights.other import DEFAULT_CONTEXT, find_unsupported, read_spec
from quire.weights.spec import OTHER, ModelSpec
from quire.weights.tensors import check_tensors
from tests.weights.makers import (
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    config,
    safetensors_bytes,
    write_folder,
)
from tests.weights.mlx_folder import write_mlx_model

QUANTIZATION = {"group_size": 64, "bits": 4}


def read(settings: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    return read_spec(settings, generation or {}, "config.json", "BF16")


def heads(spec: ModelSpec) -> tuple[int, int, int]:
    one = spec.attention
    return one.num_heads, one.num_kv_heads, one.head_size


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in 4 bits, as mlx-lm writes it."""
    return write_mlx_model(tmp_path_factory.mktemp("mlx") / "tiny-4bit")


# Specs


def test_an_unknown_architecture_has_a_spec_with_the_reason() -> None:
    spec = read(config("NemotronHForCausalLM", eos_token_id=[2, 3], tie_word_embeddings=True))
    assert (spec.family, spec.architecture, spec.quantization) == (OTHER, "NemotronHForCausalLM", "BF16")
    assert spec.unsupported.startswith("config.json: quire has no equations for 'NemotronHForCausalLM'; `quire models")
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert heads(spec) == (HEADS, KV_HEADS, HEAD)
    assert (spec.eos_token_ids, spec.is_tied, spec.dtype) == ((2, 3), True, "float32")
    assert read(config("NemotronHForCausalLM"), {"eos_token_id": [5]}).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"quantization": QUANTIZATION}, "4 bits, groups of 64"),
        ({"quantization": QUANTIZATION, "quantization_config": QUANTIZATION}, "4 bits, groups of 64"),
        ({"quantization": {"bits": 8}}, "8 bits"),
        ({"quantization": {**QUANTIZATION, "mode": "affine"}}, "4 bits, groups of 64"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mxfp4"),
        ({"quantization": {**QUANTIZATION, "lm_head": {"bits": 6, "group_size": 64}}}, "4 bits, groups of 64"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "hqq"),
        ({"quantization_config": {"something": 1}}, "quantised"),
    ],
)
def test_quantisation_is_described(fields: dict[str, Any], shown: str) -> None:
    for architecture in ("LlamaForCausalLM", "DeepseekV3ForCausalLM"):
        spec = read(config(architecture, **fields))
        assert (spec.family, spec.architecture, spec.quantization) == (OTHER, architecture, shown)
        assert spec.unsupported
    assert "quantised safetensors are not supported" in read(config(**fields)).unsupported


def test_a_quantised_model_of_a_known_architecture_has_its_defaults() -> None:
    """Gemma's files omit sizes that transformers knows."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "quantization_config": QUANTIZATION}
    spec = read({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (spec.vocab_size, *heads(spec), spec.is_tied) == (262_208, 8, 4, 256, True)
    assert "text_config.quantization_config" in spec.unsupported
    assert spec.quantization == "4 bits, groups of 64"


def test_unknown_settings_of_a_known_architecture_are_refused() -> None:
    """mlx-lm ignores some of them, and would answer nonsense."""
    every: tuple[dict[str, Any], ...] = ({}, {"quantization": QUANTIZATION})
    for fields in every:
        with pytest.raises(UnsupportedModel, match="hidden_act 'relu' is not one of"):
            read(config(hidden_act="relu", **fields))


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_the_language_model_of_a_multimodal_config(name: str) -> None:
    inner = config("Inner", eos_token_id=2, bos_token_id=1, torch_dtype="bfloat16")
    outer = {"architectures": ["SomeVisionModel"], "hidden_size": 9, "eos_token_id": [3], name: inner}
    spec = read(outer)
    assert (spec.architecture, spec.hidden_size, spec.vocab_size) == ("SomeVisionModel", HIDDEN, VOCAB)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.dtype) == (1, (3,), "bfloat16")
    del inner["vocab_size"]
    assert read({**outer, "vocab_size": 77}).vocab_size == 77  # some give it outside only
    with pytest.raises(UnsupportedModel, match=rf"'SomeVisionModel'; .*; {name}\.vocab_size is missing"):
        read(outer)


NAMES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "gpt2": (
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024},
        (12, 768, 12, 12, 64, 1024),
    ),
    "olmo": (
        {"n_layers": 16, "d_model": 2048, "n_heads": 16, "max_sequence_length": 4096},
        (16, 2048, 16, 16, 128, 4096),
    ),
    "openelm": (
        {
            "num_transformer_layers": 2, "model_dim": 1280, "num_query_heads": [12, 20], "num_kv_heads": [0, 5],
            "head_dim": 64, "max_context_length": 2048,
        },
        (2, 1280, 20, 5, 64, 2048),
    ),
    "exaone": (
        {
            "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
        },
        (32, 4096, 32, 8, 128, 32768),
    ),
    "afm7": (
        {"num_layers": 4, "hidden_dim": 512, "num_heads": 8, "num_kv_heads": 2},
        (4, 512, 8, 2, 64, DEFAULT_CONTEXT),
    ),
    "glm": (
        {
            "num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "multi_query_group_num": 2,
            "kv_channels": 128, "seq_length": 131072,
        },
        (28, 4096, 32, 2, 128, 131072),
    ),
    "mamba": ({"num_hidden_layers": 24, "hidden_size": 768}, (24, 768, 1, 1, 768, DEFAULT_CONTEXT)),
    # One vector of 512 and a rotated key of 64: 576 elements, as 1 head of 288 has for keys and values.
    "deepseek_v3": (
        {
            "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 163840,
        },
        (61, 7168, 128, 1, 288, 163840),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", NAMES)
def test_sizes_have_other_names_in_other_models(model_type: str) -> None:
    fields, sizes = NAMES[model_type]
    spec = read({"model_type": model_type, "vocab_size": 1000, **fields})
    assert (spec.num_layers, spec.hidden_size, *heads(spec), spec.max_model_len) == sizes
    assert (spec.architecture, spec.vocab_size) == (model_type, 1000)
    assert support.find_mlx_problem(model_type) == ""  # it is one of mlx-lm's


# Hostile configs


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no vocabulary": ({"vocab_size": None}, "quire has no equations for 'Other'; .*; vocab_size is missing"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "no width": ({"hidden_size": None}, "hidden_size is missing"),
    "vocabulary of 2^40": ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
    "vocabulary 0": ({"vocab_size": 0}, "vocab_size is 0"),
    "vocabulary a string": ({"vocab_size": "64"}, "vocab_size is '64'"),
    "vocabulary true": ({"vocab_size": True}, "vocab_size is True"),
    "layers 1e9": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "heads -1": ({"num_attention_heads": -1}, "num_attention_heads is -1"),
    "heads of text": ({"num_key_value_heads": ["x"]}, r"num_key_value_heads\[0\] is 'x'"),
    "no heads in the list": ({"num_key_value_heads": []}, r"num_key_value_heads is \[\]"),
    "too many heads in the list": ({"num_key_value_heads": [1] * 2000}, "num_key_value_heads is .*not a list of 1 to"),
    "head of 2^20": ({"head_dim": 1 << 20}, "head_dim is 1048576"),
    "rank of 2^40": ({"kv_lora_rank": 1 << 40}, "kv_lora_rank is 1099511627776"),
    "context of 2^30": ({"max_position_embeddings": 1 << 30}, "max_position_embeddings is 1073741824"),
    "eos beyond the vocabulary": ({"eos_token_id": [2, 64]}, r"eos_token_id\[1\] is 64"),
    "a thousand eos": ({"eos_token_id": [2] * 1000}, "more than 64 ids"),
    "tied a string": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    "text config a list": ({"text_config": [1]}, r"text_config is \[1\]: not an object"),
    "dtype a number": ({"torch_dtype": 16}, "torch_dtype is 16: not a string"),
    "bits 99": ({"quantization": {"bits": 99}}, r"quantization\.bits is 99"),
    "bits text": ({"quantization": {"bits": "4"}}, r"quantization\.bits is '4'"),
    "groups 0": ({"quantization": {"bits": 4, "group_size": 0}}, r"quantization\.group_size is 0"),
    "quantisation a list": ({"quantization": [4]}, r"quantization is \[4\]: not an object"),
    "method of 1 MB": ({"quantization_config": {"quant_method": "x" * (1 << 20)}}, "quant_method is 'xxx"),
    "method of control characters": ({"quantization_config": {"quant_method": "a\x1b[31m"}}, "quant_method is"),
    "architecture of control characters": ({"architectures": ["a\x1b[31m"]}, "architectures is .*not a name"),
    "architecture of 1 MB": ({"architectures": ["A" * (1 << 20)]}, "architectures is .*not a name"),
    "two architectures": ({"architectures": ["A", "B"]}, "architectures is .*not a list of one name"),
    "type a number": ({"architectures": None, "model_type": 5}, "model_type is 5: not a string"),
    "type a path": ({"architectures": None, "model_type": "../../x"}, "model_type is '../../x': not a name"),
    "neither architecture nor type": ({"architectures": None}, "architectures is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configs_are_refused_by_name_and_value(case: str, tmp_path: Path) -> None:
    fields, message = HOSTILE[case]
    folder = write_folder(tmp_path / "m", {**config("Other"), **fields})
    with pytest.raises(ModelFileError, match=message) as refused:
        open_checkpoint(folder)
    assert str(folder) in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert str(refused.value).isprintable()


def test_a_dtype_that_quire_does_not_know_is_not_an_error() -> None:
    assert read(config("Other", torch_dtype="float8_e4m3fn")).dtype == "bfloat16"


# Files


def test_a_packed_model_opens(packed: Path) -> None:
    checkpoint = open_checkpoint(packed)
    spec = checkpoint.spec
    assert (spec.family, spec.architecture, spec.quantization) == (OTHER, "LlamaForCausalLM", "4 bits, groups of 32")
    assert spec.eos_token_ids == (2, 3)
    assert "model.norm.weight" in checkpoint.tensors
    assert "lm_head.weight" not in checkpoint.tensors  # U32
    assert checkpoint.read("model.norm.weight").info.shape == (64,)
    template = checkpoint.tokenizer_files().chat_template
    assert template is not None
    assert "<|im_start|>" in template
    checkpoint.close()


def test_its_text_side_works(packed: Path) -> None:
    text = ModelText.open(packed)
    try:
        assert text.eos_token_ids[:2] == (2, 3)
        assert text.tokenizer.decode(text.encode("The dog", 100)) == "The dog"
    finally:
        text.close()


def test_packed_tensors_in_a_model_that_is_not_quantised_are_refused(packed: Path, tmp_path: Path) -> None:
    settings = json.loads((packed / "config.json").read_text())
    del settings["quantization"], settings["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes((packed / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModel, match=r"has type 'U32', which is not supported"):
        open_checkpoint(tmp_path)


def other_folder(folder: Path, num_shards: int = 1) -> Path:
    return write_folder(folder, config("Other"), num_shards=num_shards)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_files_that_mlx_lm_reads_are_listed(num_shards: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(other_folder(tmp_path / "m", num_shards))
    assert len(checkpoint.tensors) == 3 + 9 * LAYERS
    assert checkpoint.spec.quantization == "F32"
    (tmp_path / "m" / "model-extra.safetensors").write_bytes(safetensors_bytes({"more": np.ones((2, 2), np.float32)}))
    assert "more" in open_checkpoint(tmp_path / "m").tensors  # mlx-lm reads it as well, in an index or not


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def link_out(folder: Path) -> None:
    outside = folder.parent / "secret.safetensors"
    outside.write_bytes(safetensors_bytes({"more": np.ones((2, 2), np.float32)}))
    (folder / "model-extra.safetensors").symlink_to(outside)


def copy(folder: Path) -> None:
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data)


def remove_all(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "not a valid safetensors file"),
        (link_out, "points outside the folder"),
        (copy, "is also in another file of the folder"),
        (remove_all, "holds neither model.safetensors nor"),
        (lambda folder: os.remove(folder / "model-00002-of-00002.safetensors"), "00002.safetensors' cannot be read"),
    ],
)
def test_broken_files_are_refused(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "m", num_shards=2)
    spoil(folder)
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(folder)


# Backends


def reason(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.spec.unsupported


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_quires_own_backends_refuse_it_by_name(backend: str, packed: Path) -> None:
    message = f"{reason(packed)}. The mlx backend may run it: --backend mlx"
    for make in (lambda: make_engine(packed, EngineConfig(backend=backend)), lambda: LLM(packed, backend=backend)):
        with pytest.raises(UnsupportedModel) as refused:
            make()
        assert str(refused.value) == message


def test_the_tokenizer_is_not_read_before_the_refusal(packed: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((packed / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    with pytest.raises(UnsupportedModel, match="quantised safetensors are not supported"):
        LLM(tmp_path, backend="native")


def test_weights_cannot_be_checked_or_made_up(packed: Path) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        check_tensors(open_checkpoint(packed))
    assert str(refused.value) == reason(packed)
    with pytest.raises(UnsupportedModel) as refused:
        open_checkpoint(packed, "dummy")
    assert str(refused.value) == reason(packed)


def test_mlx_and_the_fake_backend_are_not_refused(packed: Path) -> None:
    spec = open_checkpoint(packed).spec
    for backend in ("mlx", "fake"):
        check_supported(spec, EngineConfig(backend=backend))
    with pytest.raises(UnsupportedModel):
        check_supported(spec, EngineConfig(backend="native"))
    with LLM(packed, backend="fake") as llm:
        assert llm.generate(["The dog"])[0].usage.completion_tokens


def test_the_advice_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert support.mlx_hint() == ". The mlx backend may run it: --backend mlx"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else find(name))
    assert support.mlx_hint() == ""
    assert support.find_mlx_problem("llama") == "mlx-lm is not installed"
    monkeypatch.setattr(support, "is_apple_silicon", lambda: True)
    assert "install mlx-lm" in support.mlx_hint()


@pytest.mark.parametrize(
    ("model_type", "has"),
    [("llama", True), ("kimi_k2", True), ("bert", False), ("../utils", False), ("", False), (None, False), (5, False)],
)
def test_types_of_models_that_mlx_lm_has(model_type: object, has: bool) -> None:
    assert (support.find_mlx_problem(model_type) == "") == has


def test_the_reason_of_an_unknown_and_quantised_model_names_its_architecture() -> None:
    """The advice to use the original model would be wrong."""
    found = find_unsupported(Fields("config.json", config("Other", quantization=QUANTIZATION)))
    assert "quire has no equations for 'Other'" in found
