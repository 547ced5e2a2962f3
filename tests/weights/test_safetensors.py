"""Folders of safetensors: valid ones, shards, links, and forgeries."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ModelFileError, ModelNotFound, UnsupportedModel
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors, expected_tensors
from tests.weights.layouts import LAYOUTS, write_quantized
from tests.weights.makers import (
    HIDDEN,
    VOCAB,
    check_truncated,
    config,
    llama_arrays,
    safetensors_bytes,
    tiny_gguf,
    write_folder,
)

EMBEDDING = "model.embed_tokens.weight"
OWN_EMBEDDING = "embedding.weight"
INDEX = "model.safetensors.index.json"


def own_name(name: str) -> str:
    """Return quire's name of a tensor of a llama."""
    renamed = {
        "model.embed_tokens": "embedding", "lm_head": "head", "post_attention_layernorm": "mlp_norm",
        "input_layernorm": "input_norm", "self_attn.": "", "mlp.": "", "model.": "",
    }  # fmt: skip
    for old, new in renamed.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_tensor_is_read_as_it_was_written(tmp_path: Path, num_shards: int) -> None:
    arrays = llama_arrays()
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", num_shards=num_shards))
    check_tensors(checkpoint)
    assert set(checkpoint.tensors) == set(expected_tensors(checkpoint.spec))
    assert len(checkpoint.tensors) == len(arrays)
    for name, array in arrays.items():
        raw = checkpoint.read(own_name(name))
        assert (to_float32(raw) == array).all()
        assert not raw.data.flags.writeable
    assert checkpoint.read(OWN_EMBEDDING).data.shape == (VOCAB, 4 * HIDDEN)
    checkpoint.close()


def test_files_for_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert open_checkpoint(folder).tokenizer_files().tokenizer_json is None
    (folder / "tokenizer.json").write_bytes(b"{}")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    files = open_checkpoint(folder).tokenizer_files()
    assert (files.tokenizer_json, files.gguf, files.chat_template) == (b"{}", None, "plain")
    (folder / "chat_template.jinja").write_text("newer")
    assert open_checkpoint(folder).tokenizer_files().chat_template == "newer"


def test_multimodal_gemma_is_read_without_its_vision_part(tmp_path: Path) -> None:
    settings = config("Gemma3ForConditionalGeneration", text_config={"num_hidden_layers": 1, "hidden_size": 64})
    for prefix, head in (("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")):
        arrays = {f"{prefix}norm.weight": np.zeros(64, "<f4"), f"{head}x.weight": np.zeros(3, "<f4")}
        checkpoint = open_checkpoint(write_folder(tmp_path / "m", settings, arrays))
        assert list(checkpoint.tensors) == ["norm.weight"]


def test_known_unused_tensors_are_accepted(tmp_path: Path) -> None:
    arrays = llama_arrays() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    check_tensors(open_checkpoint(write_folder(tmp_path / "m", arrays=arrays)))
    check_tensors(open_checkpoint(write_folder(tmp_path / "m", config(tie_word_embeddings=True))))


def test_missing_and_unexpected_tensors_are_refused(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["model.norm.weight"], arrays["lm_head.weight"]
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    arrays[EMBEDDING] = arrays[EMBEDDING][:-1]
    with pytest.raises(ModelFileError) as refused:
        check_tensors(open_checkpoint(write_folder(tmp_path / "m", arrays=arrays)))
    assert "missing: norm.weight, head.weight; " in str(refused.value)
    assert "unexpected: 'layers.0.q_proj.bias'; " in str(refused.value)
    assert f"of the wrong shape: {OWN_EMBEDDING} (63, 64) for (64, 64)" in str(refused.value)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    made = write_folder(tmp_path / "made")
    home = tmp_path / "models--org--name"
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for file in made.iterdir():
        file.rename(home / "blobs" / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    check_tensors(open_checkpoint(snapshot))


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(tiny_gguf())
    assert open_checkpoint(tmp_path).path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(tiny_gguf())
    with pytest.raises(ModelFileError, match=r"holds 2 GGUF models; name one: one\.gguf, two\.gguf"):
        open_checkpoint(tmp_path)


# Forgeries


Spoil = Callable[[Path], object]


def edit(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def write(name: str, data: bytes | str) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def settings(**changes: Any) -> Spoil:
    return write("config.json", json.dumps(config(**changes)))


def entry(**changes: Any) -> Spoil:
    """Change the first row of the header."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        header[EMBEDDING] |= changes
        head = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + length :])

    return apply


def index(**changes: str) -> Spoil:
    def apply(folder: Path) -> None:
        names = dict.fromkeys(llama_arrays(), "model.safetensors") | {EMBEDDING: "model.safetensors"} | changes
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return apply


def only(name: str) -> Spoil:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def config_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def link_out(folder: Path) -> None:
    outside = folder.parent / "secret"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


def link_round(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


HUGE = b'{"a":' * 100_000
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "cut": (edit("model.safetensors", lambda data: data[:-9]), "not a valid safetensors file"),
    "longer than it says": (edit("model.safetensors", lambda data: data + b"more"), "not a valid safetensors file"),
    "empty": (write("model.safetensors", b""), "not a valid safetensors file|cannot be read"),
    "header of 2^60": (edit("model.safetensors", lambda data: struct.pack("<Q", 1 << 60) + data[8:]), "not a valid"),
    "header not JSON": (write("model.safetensors", struct.pack("<Q", 8) + b"nonsense"), "not a valid"),
    "overlap": (entry(data_offsets=[4, 16388]), "not a valid"),
    "offsets backwards": (entry(data_offsets=[16384, 0]), "not a valid"),
    "shape larger than its bytes": (entry(shape=[1 << 40, 1 << 40]), "not a valid"),
    "type of no name": (entry(dtype="F99"), "not a valid"),
    "float64": (entry(dtype="F64", shape=[32, 64]), "embed_tokens.weight' has type 'F64'"),
    "int8": (entry(dtype="I8", shape=[256, 64]), "embed_tokens.weight' has type 'I8'"),
    "float8": (entry(dtype="F8_E4M3", shape=[256, 64]), "has type 'F8_E4M3'"),
    "pickle only": (only("pytorch_model.bin"), "'pytorch_model.bin'.*convert to safetensors"),
    "checkpoint only": (only("model.ckpt"), "'model.ckpt'.*convert to safetensors"),
    "no weights": (only("notes.txt"), "neither model.safetensors nor"),
    "link out of the folder": (link_out, "points outside the folder"),
    "link to itself": (link_round, "neither|cannot be read"),
    "shard above": (index(x="../model.safetensors"), "is not a bare file name"),
    "shard by full path": (index(x="/etc/passwd"), "'/etc/passwd' is not a bare file name"),
    "shard on another system": (index(x="..\\x"), "is not a bare file name"),
    "shard dot dot": (index(x=".."), "is not a bare file name"),
    "shard with a NUL": (index(x="a\0b"), "is not a bare file name"),
    "shard of no name": (index(x=""), "is not a bare file name"),
    "shard that is not there": (index(x="model-2.safetensors"), "model-2.safetensors' cannot be read"),
    "tensor that is not there": (index(x="model.safetensors"), "lists 'x', which is not in the file"),
    "tensor not in the index": (write(INDEX, '{"weight_map": {"x": "model.safetensors"}}'), "is not listed in"),
    "index without a map": (write(INDEX, "{}"), "weight_map is None"),
    "map of numbers": (write(INDEX, '{"weight_map": {"x": 1}}'), r"weight_map\['x'\] is 1"),
    "map that is a list": (write(INDEX, '{"weight_map": []}'), r"weight_map is \[\]"),
    "index nested deeply": (write(INDEX, HUGE), "nested too deeply"),
    "config nested deeply": (write("config.json", HUGE), "nested too deeply"),
    "config not JSON": (write("config.json", "{"), "is not JSON"),
    "config a list": (write("config.json", "[1]"), "not an object"),
    "config not UTF-8": (write("config.json", b"\xff{}"), "is not JSON"),
    "config with NaN": (write("config.json", '{"rms_norm_eps": NaN}'), "NaN is not a JSON number"),
    "config with a huge number": (write("config.json", '{"x": %s}' % ("9" * 5000)), "is not JSON"),
    "config too large": (write("config.json", b" " * (17 << 20)), "is larger than"),
    "config a folder": (config_folder, "not a file"),
    "layers true": (settings(num_hidden_layers=True), "num_hidden_layers is True"),
    "layers 1e9": (settings(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "layers 2.0": (settings(num_hidden_layers=2.0), "num_hidden_layers is 2.0"),
    "hidden a string": (settings(hidden_size="64"), "hidden_size is '64'"),
    "hidden negative": (settings(hidden_size=-64), "hidden_size is -64"),
    "hidden missing": (settings(hidden_size=None), "hidden_size is missing"),
    "hidden not a multiple": (settings(hidden_size=65), "hidden_size is 65"),
    "vocabulary of 2^40": (settings(vocab_size=1 << 40), "vocab_size is 1099511627776"),
    "heads that do not divide": (settings(num_key_value_heads=3), "num_key_value_heads is 3: does not divide"),
    "no heads": (settings(num_attention_heads=0), "num_attention_heads is 0"),
    "odd heads": (settings(head_dim=17), "head_dim is 17"),
    "context of 2^30": (settings(max_position_embeddings=1 << 30), "max_position_embeddings is 1073741824"),
    "eps 0": (settings(rms_norm_eps=0), "rms_norm_eps is 0"),
    "eps 1": (settings(rms_norm_eps=1.0), "rms_norm_eps is 1.0"),
    "theta -1": (settings(rope_theta=-1), "rope_theta is -1"),
    "theta beyond floats": (settings(rope_theta=10**400), "rope_theta is 1000"),
    "eos beyond the vocabulary": (settings(eos_token_id=[2, 64]), r"eos_token_id\[1\] is 64"),
    "tied a string": (settings(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
    "activation": (settings(hidden_act="relu"), "hidden_act 'relu' is not one of"),
    "dtype": (settings(torch_dtype="float8"), "torch_dtype 'float8' is not one of"),
    "architecture": (settings(architecture="MambaForCausalLM"), "no equations for 'MambaForCausalLM'; `quire models"),
    "architectures a string": (settings(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM'"),
    "architecture a list": (settings(architectures=[["x"]]), r"architectures is \[\['x'\]\]: not a name of"),
    "no architecture": (settings(architectures=None), "architectures is missing"),
    "quantised": (settings(quantization_config={"quant_method": "hqq"}), "quantization_config.quant_method is 'hqq'"),
    "method a list": (settings(quantization_config={"quant_method": ["awq"]}), r"quant_method is \['awq'\]"),
    "bits missing": (settings(quantization_config={"quant_method": "gptq"}), "quantization_config.bits is missing"),
    "quantised by MLX": (settings(quantization={"bits": 4, "group_size": 64}), "quantization .bits 4"),
    "rope of no kind": (settings(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "'spiral' is not supported"),
    "rope dynamic": (settings(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
    "rope a list": (settings(rope_scaling=["linear"]), "rope_scaling is .'linear'.: not an object"),
    "rope without a factor": (settings(rope_scaling={"type": "linear"}), r"rope_scaling\.factor is missing"),
    "rope factor 0": (settings(rope_scaling={"type": "linear", "factor": 0}), r"rope_scaling\.factor is 0"),
    "temperature -1": (write("generation_config.json", '{"temperature": -1}'), "temperature is -1"),
    "top_p 2": (write("generation_config.json", '{"top_p": 2}'), "top_p is 2"),
    "generation eos": (write("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
    "template not a string": (write("tokenizer_config.json", '{"chat_template": {"x": 1}}'), "chat_template is"),
    "template not UTF-8": (write("chat_template.jinja", b"\xff"), "is not UTF-8"),
}  # fmt: skip


def open_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.tokenizer_files()
    check_tensors(checkpoint)


@pytest.mark.parametrize("case", HOSTILE)
def test_forged_folders_are_refused_by_name_and_value(case: str, tmp_path: Path) -> None:
    spoil, message = HOSTILE[case]
    folder = write_folder(tmp_path / "forged")
    spoil(folder)
    with pytest.raises(ModelFileError, match=message) as refused:
        open_all(folder)
    assert str(folder) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("spoil", ["head", "shapes"])
def test_a_file_that_is_truncated_while_it_is_opened_is_refused(tmp_path: Path, spoil: str) -> None:
    if spoil == "head":  # compared with the embedding
        write_folder(tmp_path / "m", config(tie_word_embeddings=True))
    else:
        write_quantized(tmp_path / "m", LAYOUTS["ct w4 g32"], config(), llama_arrays())
    check_truncated(tmp_path / "m", 0)


def test_a_file_beyond_the_address_space_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    os.truncate(folder / "model.safetensors", 1 << 40)
    script = (
        "import resource, sys; from pathlib import Path; from quire.errors import ModelFileError\n"
        "from quire.weights.opening import open_checkpoint; import numpy, safetensors\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try: open_checkpoint(Path(sys.argv[1]))\n"
        "except ModelFileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "cannot be read" in done.stdout


def test_other_paths_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match=r"neither config\.json nor"):
        open_checkpoint(tmp_path)
    for name, message in (("x.pt", "convert"), ("x.safetensors", "weights only"), ("x.txt", "neither a .gguf")):
        (tmp_path / name).write_bytes(safetensors_bytes({}))
        with pytest.raises(ModelFileError, match=message):
            open_checkpoint(tmp_path / name)


def test_unsupported_and_damaged_files_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        check_tensors(open_checkpoint(write_folder(tmp_path / "m", config("MambaForCausalLM"))))
