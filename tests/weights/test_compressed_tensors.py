"""Comparison with the compressed-tensors package, where it is installed. Compared with version 0.20.0."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.weights.opening import open_checkpoint
from quire.weights.quantizing import quantize_folder
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors
from tests.weights.layouts import float_config, packed_config
from tests.weights.makers import config, llama_arrays, write_folder
from tests.weights.test_safetensors import own_name

pytest.importorskip("compressed_tensors")

CONFIGS: dict[str, dict[str, Any]] = {
    "w4 g32": packed_config(4, 32),
    "w4 g32 asymmetric": packed_config(4, 32, symmetric=False),
    "w4 channel asymmetric": packed_config(4, -1, symmetric=False),
    "w8 g32": packed_config(8, 32),
    "w8 g32 asymmetric": packed_config(8, 32, symmetric=False),
    "fp8 channel": float_config("channel"),
    "fp8 tensor": float_config("tensor"),
    "fp8 block": float_config("block", block_structure=[32, 32]),
}


def package(name: str) -> Any:
    return importlib.import_module(f"compressed_tensors.{name}")


def scheme_of(settings: dict[str, Any]) -> Any:
    return package("quantization").QuantizationScheme.model_validate(settings["config_groups"]["group_0"])


def compressor_of(settings: dict[str, Any]) -> Any:
    return package("compressors").BaseCompressor.get_value_from_registry(settings["format"])


def parameters(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Scales and zero points of a matrix, computed by the package."""
    rows, columns = weight.shape
    if args.strategy == "block":
        blocks = weight.view(rows // 32, 32, columns // 32, 32).permute(0, 2, 1, 3).flatten(2)
    elif args.strategy == "tensor":
        blocks = weight.view(1, -1)
    else:
        blocks = weight.view(rows, -1, args.group_size or columns)
    helpers = package("quantization.utils.helpers")
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_the_package_are_read_as_it_reads_them(name: str, tmp_path: Path) -> None:
    settings = CONFIGS[name]
    scheme, compressor = scheme_of(settings), compressor_of(settings)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for key, array in llama_arrays().items():
        weight = torch.from_numpy(array)
        if not key.endswith("proj.weight"):
            tensors[key] = weight
            continue
        packed = compressor.compress(parameters(weight, scheme.weights), scheme)
        tensors |= {f"{key.removesuffix('weight')}{part}": one.contiguous() for part, one in packed.items()}
        expected[key] = compressor.decompress(packed, scheme)["weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config(quantization_config=settings)))
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    assert expected
    for key, values in expected.items():
        found = torch.from_numpy(to_float32(checkpoint.read(own_name(key))))
        torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "fp8-channel", "w4a16", "w4a16-asym", "w8a16"])
def test_the_package_reads_what_quire_writes(name: str, tmp_path: Path) -> None:
    quantize_folder(write_folder(tmp_path / "source"), tmp_path / "made", name, 32)
    settings = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    package("quantization").QuantizationConfig.model_validate(settings)
    scheme, compressor = scheme_of(settings), compressor_of(settings)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "made")
    for key in (key for key in llama_arrays() if key.endswith("proj.weight")):
        stem = key.removesuffix("weight")
        packed = {part.removeprefix(stem): one for part, one in tensors.items() if part.startswith(stem)}
        values = compressor.decompress(packed, scheme)["weight"].float()
        found = torch.from_numpy(to_float32(checkpoint.read(own_name(key))))
        torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)
