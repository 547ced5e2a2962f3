"""`quire quantize`: what it writes, keeps and refuses; quantised checkpoints in an engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from quire.engine.generation import GenerationParams
from quire.engine.llm import LLM
from quire.errors import InvalidRequest, ModelFileError
from quire.weights.opening import open_checkpoint
from quire.weights.packed import dequantize, fp8_values
from quire.weights.quantization import FORMATS
from quire.weights.quantizing import quantize_folder, round_asymmetric, round_fp8, round_symmetric, to_fp8
from quire.weights.tensors import check_tensors
from tests.backends.torch.rig import Rig
from tests.cli.runs import quire
from tests.weights.layouts import LAYOUTS, Layout, write_quantized, write_tensors
from tests.weights.makers import Stored, config, llama_arrays, moe_arrays, moe_config, tiny_gguf, write_folder
from tests.weights.plain_folder import read_all

# Root mean square of the error, relative to that of the weights, for normal weights in groups of 32: bounds.
ERRORS = {"fp8": 0.03, "fp8-channel": 0.03, "w4a16": 0.12, "w4a16-asym": 0.11, "w8a16": 0.007}


def relative_error(found: Any, expected: Any) -> float:
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


# Rounding


def test_the_nearest_codes_of_fp8() -> None:
    values = fp8_values()
    finite = values[np.isfinite(values)]
    assert (values[to_fp8(finite)] == finite).all()
    rng = np.random.default_rng(0)
    given = (rng.standard_normal(10_000) * 2.0 ** rng.integers(-12, 9, 10_000)).astype(np.float32)
    given = np.clip(given, -448, 448)
    distances = np.abs(given[:, None] - finite[None]).min(1)
    assert (np.abs(values[to_fp8(given)] - given) == distances).all()
    middles = np.array([17 / 8 * 0.5, 19 / 8 * 0.5, 1e9, -1e9], np.float32)  # between two codes; beyond all
    assert values[to_fp8(middles)].tolist() == [1.0, 1.25, 448.0, -448.0]


def test_groups_of_zeros_and_of_one_sign() -> None:
    weights = np.zeros((8, 64), np.float32)
    weights[1] = np.linspace(1, 2, 64)
    for matrix in (
        round_symmetric(weights, 4, 32, lambda one: one),
        round_symmetric(weights, 8, 32, lambda one: one),
        round_asymmetric(weights, 32, lambda one: one),
        round_fp8(weights, (4, 32), lambda one: one),
    ):
        found = dequantize(matrix)
        assert (found[2:] == 0).all()
        assert np.abs(found[1] - weights[1]).max() < 0.15


# Folders


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_copy_is_close_to_its_source(name: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", num_shards=2)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.bin").write_bytes(b"x")
    steps: list[tuple[int, int]] = []
    report = quantize_folder(source, tmp_path / "made", name, 32, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (report.num_source_bytes, report.num_source_bytes)
    assert report.num_matrices == 14
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert not list(tmp_path.glob(".made*"))
    checkpoint = open_checkpoint(tmp_path / "made")
    check_tensors(checkpoint)
    before, after = read_all(source), read_all(tmp_path / "made")
    for own, expected in before.items():
        if own.endswith("proj.weight"):
            assert checkpoint.tensors[own].type == ("FP8" if "fp8" in name else "INT4" if "w4" in name else "INT8")
            assert relative_error(after[own], expected) < ERRORS[name], own
        else:
            assert (after[own] == expected).all()


def test_experts_and_routers(tmp_path: Path) -> None:
    """Stacks of experts become one matrix for each expert; routers stay as they are."""
    for is_stacked in (False, True):
        source = write_folder(tmp_path / f"source{is_stacked}", moe_config(), moe_arrays(is_stacked=is_stacked))
        made = tmp_path / f"made{is_stacked}"
        assert quantize_folder(source, made, "w4a16", 32).num_matrices == 2 * (4 + 4 * 3)
        before, after = read_all(source), read_all(made)
        check_tensors(open_checkpoint(made))
        for own, expected in before.items():
            assert relative_error(after[own], expected) < ERRORS["w4a16"]
        assert (after["layers.0.router.weight"] == before["layers.0.router.weight"]).all()
        ignored = json.loads((made / "config.json").read_text())["quantization_config"]["ignore"]
        assert ignored == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


@pytest.mark.parametrize(("dtype", "bits"), [("F16", "<f2"), ("BF16", "<u2")])
def test_scales_have_the_type_of_the_weights(dtype: str, bits: str, tmp_path: Path) -> None:
    def encode(array: Any) -> Any:
        return array.astype("<f2") if dtype == "F16" else (array.view(np.uint32) >> 16).astype(bits)

    arrays = {name: encode(array) for name, array in llama_arrays().items()}
    source = write_folder(tmp_path / "source", arrays=arrays, dtype=dtype)
    for name in FORMATS:
        quantize_folder(source, tmp_path / name, name, 32)
        after = read_all(tmp_path / name)
        for own, expected in read_all(source).items():
            assert relative_error(after[own], expected) < ERRORS[name]


# Refusals


def test_sources_and_targets_that_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "x.gguf").write_bytes(tiny_gguf())
    with pytest.raises(InvalidRequest, match="exists already"):
        quantize_folder(source, tmp_path / "there", "fp8", 128)
    with pytest.raises(InvalidRequest, match=r"x\.gguf: is not a folder with config.json and safetensors"):
        quantize_folder(tmp_path / "x.gguf", tmp_path / "made", "fp8", 128)
    with pytest.raises(InvalidRequest, match="--group-size 128 does not divide the 64 inputs of some matrices: use 32"):
        quantize_folder(source, tmp_path / "made", "w4a16", 128)
    quantize_folder(source, tmp_path / "fp8", "fp8", 128)
    with pytest.raises(InvalidRequest, match="quantised already, to FP8"):
        quantize_folder(tmp_path / "fp8", tmp_path / "made", "w4a16", 32)
    other = write_folder(tmp_path / "other", config("MambaForCausalLM"))
    with pytest.raises(InvalidRequest, match="no equations for 'MambaForCausalLM'"):
        quantize_folder(other, tmp_path / "made", "fp8", 128)
    assert not (tmp_path / "made").exists()


def test_nothing_is_left_after_a_failure(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.layers.1.mlp.down_proj.weight"][3, 3] = np.nan
    source = write_folder(tmp_path / "source", arrays=arrays)
    with pytest.raises(ModelFileError, match=r"layers.1.mlp.down_proj.weight has weights that are not finite"):
        quantize_folder(source, tmp_path / "made", "fp8", 128)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    outcome = quire("quantize", str(source), str(tmp_path / "made"), "--format", "w8a16", "--group-size", "32")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert "14 matrices quantised to w8a16, " in outcome.stdout
    for arguments, message in (
        (["--format", "w3"], "--format w3: not one of fp8, fp8-channel, w4a16, w4a16-asym, w8a16"),
        (["--format", "w4a16", "--group-size", "16"], "--group-size 16: not one of 32, 64, 128"),
        (["--group-size", "64"], "--group-size 64: the format fp8 has no groups"),
    ):
        refused = quire("quantize", str(source), str(tmp_path / "again"), *arguments)
        assert refused.returncode == 2
        assert message in refused.stderr
    assert "exists already" in quire("quantize", str(source), str(tmp_path / "made")).stderr


def test_unused_tensors_are_copied(tmp_path: Path) -> None:
    """Parts that quire does not run, such as a vision tower, stay in the copy."""
    text = config(num_hidden_layers=2, head_dim=16, model_type="gemma3_text")
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    arrays = {f"model.language_model.{name.removeprefix('model.')}": one for name, one in llama_arrays().items()}
    arrays["model.vision_tower.x.weight"] = np.ones((3, 5), np.float32)
    source = write_folder(tmp_path / "source", settings, arrays)
    quantize_folder(source, tmp_path / "made", "fp8-channel", 32)
    data = (tmp_path / "made" / "model.safetensors").read_bytes()
    assert b"model.vision_tower.x.weight" in data
    assert b"model.language_model.layers.0.mlp.up_proj.weight_scale" in data


PROMPT = "The dog ran to"
CHOSEN = (
    "fp8 small blocks", "ct fp8 channel", "ct w4 asymmetric", "ct w4 act-order", "ct w8 g64", "awq g32", "gptq 8 bits",
)  # fmt: skip


KEPT = ("ct w4 asymmetric", "awq g32")  # the native backend keeps their codes, and rounds plain weights to 8 bits


def write_pair(source: Path, folder: Path, layout: Layout) -> tuple[Path, Path]:
    """Write a quantised copy of a model, and one with the weights that it means."""
    settings: dict[str, Any] = json.loads((source / "config.json").read_text())
    arrays = dict(load_file(source / "model.safetensors"))
    for i in range(settings["num_hidden_layers"]):  # 96 inputs are not a multiple of 64
        down = f"model.layers.{i}.mlp.down_proj.weight"
        arrays[down] = np.concatenate((arrays[down], arrays[down][:, :32]), axis=1)
        for name in ("gate", "up"):
            rows = f"model.layers.{i}.mlp.{name}_proj.weight"
            arrays[rows] = np.concatenate((arrays[rows], arrays[rows][:32]))
    settings["intermediate_size"] = 128
    quantized, plain = folder / "quantized", folder / "plain"
    for one in (quantized, plain):
        shutil.copytree(source, one)
    weights = write_quantized(quantized, layout, settings, arrays)
    write_tensors(plain, settings, {name: Stored("F32", one) for name, one in weights.items()})
    return quantized, plain


def answer(folder: Path, backend: str) -> list[str]:
    params = GenerationParams(temperature=0.0, max_tokens=12)
    with LLM(folder, backend=backend, device="cpu", threads=1, num_blocks=16) as llm:
        return [one.text for one in llm.generate([PROMPT, "A cat"], params)]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_quantised_model_answers_as_its_weights_do(name: str, backend: str, tiny_model: Path, tmp_path: Path) -> None:
    quantized, plain = write_pair(tiny_model, tmp_path, LAYOUTS[name])
    if backend == "native" and name in KEPT:
        exact = distribution(plain, "torch")
        assert distance(distribution(quantized, backend), exact) < 0.9 * distance(distribution(plain, backend), exact)
    else:
        assert answer(quantized, backend) == answer(plain, backend)


def distribution(folder: Path, backend: str) -> torch.Tensor:
    """Log probabilities [tokens, V] after several prompts."""
    rig = Rig(folder, backend=backend, num_blocks=16, **({"precision": "exact"} if backend == "native" else {}))
    rows = [rig.answer([*range(3, 3 + length)], 1).rows[0] for length in range(2, 34, 4)]
    rig.engine.close()
    return torch.stack(rows)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm())
