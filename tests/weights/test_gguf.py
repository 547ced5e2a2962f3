"""GGUF: reading valid files, and refusing forged ones."""

from __future__ import annotations

import gc
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, FILE_TYPES, TensorType, map_file
from quire.weights.families import BY_NAME
from quire.weights.gguf import GgufCheckpoint
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import Target, check_tensors, gguf_targets
from tests.weights.makers import (
    F32,
    HEAD,
    HIDDEN,
    LAYERS,
    Q4_0,
    Q8_0,
    VOCAB,
    Tensor,
    check_truncated,
    encoded,
    llama_keys,
    llama_tensors,
    make_gguf,
    text,
    tiny_gguf,
)


def opened(tmp_path: Path, data: bytes) -> GgufCheckpoint:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    return GgufCheckpoint(path)


def test_metadata_tensors_and_vocabulary_of_a_valid_file(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, tiny_gguf())
    check_tensors(checkpoint)
    spec = checkpoint.spec
    assert (spec.family, spec.num_layers, spec.attention.head_size, spec.vocab_size) == ("llama", LAYERS, HEAD, VOCAB)
    assert (spec.is_tied, spec.quantization, spec.eos_token_ids) == (True, "Q4_0", (2,))
    files = checkpoint.tokenizer_files()
    assert files.gguf is not None
    assert files.gguf["tokenizer.ggml.tokens"][3] == "t3"
    assert files.chat_template == "{{ messages }}"
    assert all(np.isfinite(to_float32(checkpoint.read(name))).all() for name in checkpoint.tensors)
    checkpoint.close()


def test_the_documentation_lists_every_type() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    listed = page.partition("Tensor types:")[2].partition("A file with any other")[0]
    assert {*re.findall(r"\w+", listed)} == {kind.value for kind, _ in FILE_TYPES.values()}
    assert {*TensorType} - {*BLOCKS} == {TensorType.FP8, TensorType.INT8, TensorType.INT4}  # of safetensors only


def test_tensors_are_views_of_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, tiny_gguf())
    raw = checkpoint.read("embedding.weight")
    assert raw.data.shape == (VOCAB, HIDDEN // 32 * 34)
    assert not raw.data.flags.writeable
    checkpoint.close()
    assert raw.data.sum() > 0  # still mapped, because it is in use
    del raw
    checkpoint.close()
    with pytest.raises(ModelFileError, match="is closed"):
        checkpoint.read("norm.weight")


def test_metadata_and_vocabulary_import_neither_numpy_nor_gguf(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
    code = (
        "import sys; from pathlib import Path; from quire.weights.opening import open_checkpoint;"
        "one = open_checkpoint(Path(sys.argv[1])); one.tokenizer_files();"
        "sys.exit(bool({'numpy', 'gguf', 'safetensors', 'huggingface_hub', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "tiny.gguf")], check=False).returncode == 0


def test_a_quantised_row_is_moved_whole(tmp_path: Path) -> None:
    tensors = llama_tensors()
    checkpoint = opened(tmp_path, make_gguf(llama_keys(), list(tensors.items())))
    raw = checkpoint.read("layers.0.k_proj.weight").data
    stored = np.frombuffer(tensors["blk.0.attn_k.weight"].data, np.uint8).reshape(raw.shape)
    assert (raw[1] == stored[2]).all()
    assert (raw[HEAD // 2] == stored[1]).all()
    assert (raw[HEAD] == stored[HEAD]).all()


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "token_embd.weight", ["embedding.weight"]),
        ("llama", "output_norm.weight", ["norm.weight"]),
        ("llama", "output.weight", ["head.weight"]),
        ("llama", "blk.11.attn_norm.weight", ["layers.11.input_norm.weight"]),
        ("llama", "blk.0.ffn_norm.weight", ["layers.0.mlp_norm.weight"]),
        ("qwen2", "blk.0.attn_q.bias", ["layers.0.q_proj.bias"]),
        ("qwen3", "blk.0.attn_k_norm.weight", ["layers.0.k_norm.weight"]),
        ("gemma3", "blk.0.attn_norm.weight", ["layers.0.input_norm.weight"]),
        ("gemma3", "blk.0.post_attention_norm.weight", ["layers.0.post_attention_norm.weight"]),
        ("gemma3", "blk.0.ffn_norm.weight", ["layers.0.mlp_norm.weight"]),
        ("gemma3", "blk.0.post_ffw_norm.weight", ["layers.0.post_mlp_norm.weight"]),
        ("phi3", "blk.3.attn_qkv.weight", [f"layers.3.{one}_proj.weight" for one in "qkv"]),
        ("phi3", "blk.3.ffn_up.weight", ["layers.3.gate_proj.weight", "layers.3.up_proj.weight"]),
        ("llama", "blk.3.ffn_up.weight", ["layers.3.up_proj.weight"]),
        ("llama", "blk.03.ffn_up.weight", None),
        ("qwen3_moe", "blk.0.ffn_gate_inp.weight", ["layers.0.router.weight"]),
        ("llama", "nonsense", None),
    ],
)
def test_names(family: str, name: str, expected: list[str] | None) -> None:
    found = gguf_targets([name], BY_NAME[family])
    assert found == ({} if expected is None else {name: Target(tuple(expected))})


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    tensors = list(llama_tensors().items())
    split = {"split__count": 2, "split__tensors__count": len(tensors)}
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(make_gguf(llama_keys(**split, split__no=0), tensors[:7]))
    second.write_bytes(make_gguf([("split.no", 1), ("split.count", 2)], tensors[7:]))
    check_tensors(open_checkpoint(first))
    check_tensors(open_checkpoint(tmp_path))
    with pytest.raises(ModelFileError, match="later part"):
        GgufCheckpoint(second)
    second.write_bytes(make_gguf([("split.no", 1)], tensors[8:]))
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count is 20, but there are 19"):
        GgufCheckpoint(first)
    second.unlink()
    with pytest.raises(ModelFileError, match="m-00002-of-00002"):
        GgufCheckpoint(first)


# Forgeries

KEYS, TENSORS = llama_keys(), list(llama_tensors().items())


def with_key(name: str | bytes, value: Any) -> bytes:
    return make_gguf([*KEYS, (name, value)], TENSORS)


def with_tensor(name: str | bytes, one: Tensor) -> bytes:
    return make_gguf(KEYS, [*TENSORS, (name, one)])


def patched(at: int, data: bytes) -> bytes:
    whole = tiny_gguf()
    return whole[:at] + data + whole[at + len(data) :]


def array(kind: int, length: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, length) + data


ZEROS, ROPE = bytes(256), "rope_freqs.weight"
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "three bytes": (lambda: b"GGU", "magic needs 4 bytes"),
    "other magic": (lambda: patched(0, b"GGML"), "magic is b'GGML'"),
    "version 1": (lambda: patched(4, struct.pack("<I", 1)), "version is 1"),
    "big-endian": (lambda: patched(4, struct.pack(">I", 3)), "big-endian"),
    "2^40 tensors": (lambda: patched(8, struct.pack("<Q", 1 << 40)), "tensor count is 1099511627776"),
    "2^63 keys": (lambda: patched(16, struct.pack("<Q", 1 << 63)), "key count is 9223372036854775808"),
    "more keys than are there": (lambda: patched(16, struct.pack("<Q", 4000)), "the file ends before|is |UTF-8|twice"),
    "only a header": (lambda: tiny_gguf()[:24], "the file ends before"),
    "cut in the keys": (lambda: tiny_gguf()[:300], "the file ends before"),
    "cut in the weights": (lambda: tiny_gguf()[:-500], "the file ends at"),
    "key of 2^62 bytes": (lambda: patched(24, struct.pack("<Q", 1 << 62)), "length of key 0 is 4611686018427387904"),
    "key of 15 MiB": (lambda: patched(24, struct.pack("<Q", 15 << 20)), "key 0 needs 15728640 bytes"),
    "key not UTF-8": (lambda: with_key(b"\xff\xfe", 1), "is not UTF-8"),
    "key twice": (lambda: with_key("llama.block_count", 2), "'llama.block_count' occurs twice"),
    "unknown value type": (lambda: with_key("x", struct.pack("<I", 77)), "type of 'x' is 77"),
    "bool of 2": (lambda: with_key("x", struct.pack("<IB", 7, 2)), "'x' is 2: not true or false"),
    "string value not UTF-8": (lambda: with_key("x", struct.pack("<I", 8) + text(b"\xc0")), "'x' is not UTF-8"),
    "array of 2^40": (lambda: with_key("x", array(5, 1 << 40)), "length of 'x' is 1099511627776"),
    "array longer than the file": (lambda: with_key("x", array(5, 4_000_000)), "'x' needs 16000000 bytes"),
    "strings longer than the file": (lambda: with_key("x", array(8, 4_000_000)), "'x' has 4000000 strings"),
    "string in an array too long": (lambda: with_key("x", array(8, 1, struct.pack("<Q", 1 << 50))), r"'x'\[0\] is"),
    "string in an array not UTF-8": (lambda: with_key("x", array(8, 2, text("a") + text(b"\x80"))), r"'x'\[1\] is not"),
    "array in an array": (lambda: with_key("x", array(9, 1, array(5, 0))), "arrays in arrays"),
    "array of type 99": (lambda: with_key("x", array(99, 1)), "element type of 'x' is 99"),
    "alignment 0": (lambda: with_key("general.alignment", 0), r"general\.alignment is 0"),
    "alignment 24": (lambda: with_key("general.alignment", 24), r"general\.alignment is 24"),
    "alignment 2^31": (lambda: with_key("general.alignment", 1 << 31), r"general\.alignment is 2147483648"),
    "alignment a string": (lambda: with_key("general.alignment", "32"), r"general\.alignment is '32'"),
    "alignment true": (lambda: with_key("general.alignment", True), r"general\.alignment is True"),
    "five dimensions": (lambda: with_tensor("x", Tensor((1,) * 5, F32, ZEROS)), "dimensions of tensor 'x' is 5"),
    "no dimensions": (lambda: with_tensor("x", Tensor((), F32, ZEROS)), "dimensions of tensor 'x' is 0"),
    "dimension 0": (lambda: with_tensor("x", Tensor((0,), F32, b"")), "dimension 0 of tensor 'x' is 0"),
    "dimension 2^63": (lambda: with_tensor("x", Tensor((1 << 63,), F32, b"")), "is 9223372036854775808"),
    "product beyond 64 bits": (lambda: with_tensor("x", Tensor((1 << 33, 1 << 33), F32, b"")), "is not in a file of"),
    "product that wraps to 0": (lambda: with_tensor("x", Tensor((1 << 32, 1 << 32), F32, b"")), "is not in a file of"),
    "half a block": (lambda: with_tensor("x", Tensor((48, 2), Q4_0, ZEROS)), "is 48: not a multiple of Q4_0's 32"),
    "type of no number": (lambda: with_tensor("x", Tensor((32,), 999, ZEROS)), "tensor 'x' has type number 999"),
    "type we do not read": (
        lambda: with_tensor("x", Tensor((64,), 40, ZEROS)),
        "tensor 'x' has type NVFP4, which is not supported; choose or convert to a file with these types only: F32, ",
    ),
    "offset beyond the file": (lambda: with_tensor("x", Tensor((8,), F32, ZEROS, 1 << 40)), "is not in a file of"),
    "offset 2^64 - 32": (lambda: with_tensor("x", Tensor((8,), F32, ZEROS, 2**64 - 32)), "is not in a file of"),
    "offset not aligned": (lambda: with_tensor("x", Tensor((8,), F32, ZEROS, 8)), "is 8: not a multiple of 32"),
    "overlap": (lambda: with_tensor("x", Tensor((8,), F32, ZEROS, 32)), "overlaps 'token_embd.weight'"),
    "last one ends outside": (lambda: with_tensor("x", Tensor((1024,), F32, ZEROS)), "the file ends at"),
    "tensor twice": (lambda: with_tensor("output_norm.weight", Tensor((8,), F32, ZEROS)), "occurs twice"),
    "tensor name not UTF-8": (lambda: with_tensor(b"\xff", Tensor((8,), F32, ZEROS)), "name of tensor 20 is not UTF-8"),
    "no architecture": (lambda: tiny_gguf(general__architecture=None), r"general\.architecture is missing"),
    "other architecture": (lambda: tiny_gguf(general__architecture="mamba"), "'mamba' is not supported; these run"),
    "no layers": (lambda: tiny_gguf(llama__block_count=0), r"llama\.block_count is 0"),
    "too many layers": (lambda: tiny_gguf(llama__block_count=1025), r"llama\.block_count is 1025"),
    "layers a string": (lambda: tiny_gguf(llama__block_count="2"), r"llama\.block_count is '2'"),
    "heads by layer": (lambda: tiny_gguf(llama__attention__head_count=[4, 2]), r"head_count is \[4, 2\]"),
    "heads of more layers": (lambda: tiny_gguf(llama__attention__head_count=[4] * 3), r"head_count is \[4, 4, 4\]"),
    "heads of no layer": (lambda: tiny_gguf(llama__attention__head_count_kv=[]), r"head_count_kv is \[\]"),
    "layers to predict further tokens": (lambda: tiny_gguf(llama__nextn_predict_layers=1), "predict_layers is 1: not"),
    "heads that do not divide": (lambda: tiny_gguf(llama__attention__head_count_kv=3), "does not divide"),
    "odd head": (lambda: tiny_gguf(llama__attention__key_length=15), "the size is not even"),
    "eps NaN": (lambda: tiny_gguf(llama__attention__layer_norm_rms_epsilon=float("nan")), "rms_epsilon is nan"),
    "theta infinite": (lambda: tiny_gguf(llama__rope__freq_base=float("inf")), r"rope\.freq_base is inf"),
    "eos beyond the vocabulary": (lambda: tiny_gguf(tokenizer__ggml__eos_token_id=64), "eos_token_id is 64"),
    "experts without a number": (lambda: tiny_gguf(llama__expert_count=8), r"llama\.expert_used_count is missing"),
    "unknown scaling": (lambda: tiny_gguf(llama__rope__scaling__type="ntk"), "rope scaling 'ntk' is not supported"),
    "a template that is none": (lambda: tiny_gguf(tokenizer__chat_template=7), "chat_template is 7"),
    "split without a name for it": (lambda: tiny_gguf(split__count=3), r"split\.count is 3"),
    "rope table of the wrong size": (lambda: with_tensor(ROPE, Tensor((4,), F32, ZEROS)), r"not F32 \(8,\)"),
    "rope table of zeros": (lambda: with_tensor(ROPE, Tensor((8,), F32, bytes(32))), r"rope_freqs.weight\[0\]"),
    "no embedding": (lambda: make_gguf(KEYS, TENSORS[1:]), "token_embd.weight is missing"),
    "a norm missing": (lambda: make_gguf(KEYS, [TENSORS[0], *TENSORS[2:]]), "missing: norm.weight"),
    "a tensor left over": (lambda: with_tensor("blk.9.attn_q.weight", Tensor((8,), F32, ZEROS)), "unexpected: 'lay"),
}  # fmt: skip


def open_all(path: Path) -> None:
    checkpoint = GgufCheckpoint(path)
    checkpoint.tokenizer_files()
    check_tensors(checkpoint)


@pytest.mark.parametrize("case", HOSTILE)
def test_forged_files_are_refused_by_name_and_value(case: str, tmp_path: Path) -> None:
    make, message = HOSTILE[case]
    path = tmp_path / "forged.gguf"
    path.write_bytes(make())
    with pytest.raises(ModelFileError, match=message) as refused:
        open_all(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_header_that_is_longer_than_what_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opened(tmp_path, tiny_gguf())
    for num_bytes in (4, 30, 100, 333, 1000, 2000):
        monkeypatch.setattr("quire.weights.gguf.HEADER_BYTES", num_bytes)
        assert opened(tmp_path, tiny_gguf()).tensors == whole.tensors


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_file_that_is_truncated_while_it_is_opened_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "x.gguf"
    tables = Tensor((8,), F32, np.ones(8, np.float32).tobytes())
    path.write_bytes(make_gguf(KEYS, [*TENSORS, (ROPE, tables)]))
    check_truncated(path, num_bytes)


def test_misshapen_tensors_are_listed_five_at_most(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, tiny_gguf(llama__feed_forward_length=100))
    with pytest.raises(ModelFileError, match=r"wrong shape: layers\.0\.gate_proj.* and 1 more"):
        check_tensors(checkpoint)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_cannot_be_mapped_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()  # also files of earlier tests
    num_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is empty"):
        map_file(tmp_path / "empty.gguf")
    gc.collect()
    assert num_files >= (len(os.listdir("/proc/self/fd")) if num_files else 0)


def test_paths_that_are_not_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufCheckpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


# Parameters of other families


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    plain = opened(tmp_path, tiny_gguf())
    (tmp_path / "other").mkdir()
    checkpoint = opened(tmp_path / "other", tiny_gguf(llama__attention__sliding_window=32))
    assert (checkpoint.spec.family, checkpoint.spec.windows) == ("mistral", (32, 32))
    for name in plain.tensors:
        assert (checkpoint.read(name).data == plain.read(name).data).all()


def test_all_end_tokens_are_read(tmp_path: Path) -> None:
    ends = {"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 2}
    assert opened(tmp_path, tiny_gguf(**ends)).spec.eos_token_ids == (2, 5)


def test_sampling_defaults_of_a_gguf(tmp_path: Path) -> None:
    keys = [*KEYS, ("general.sampling.temp", encoded(0.5)), ("general.sampling.top_k", 20)]
    generation = opened(tmp_path, make_gguf(keys, TENSORS)).generation
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.5, 20, None)


def test_unsupported_and_damaged_files_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        opened(tmp_path, tiny_gguf(general__architecture="mamba"))
    assert not issubclass(ModelFileError, UnsupportedModel)
    assert Q8_0 == 8  # the type numbers are part of the format
