"""Comparison with the libraries that write AWQ, GPTQ, AutoRound and FP8 files, where they are installed.

Compared with autoawq 0.2.9, gptqmodel 7.7.0, auto-round 0.16.1, compressed-tensors 0.20.0 and transformers 5.22.2. In
one direction a library packs matrices, which are read as the library itself decodes them. In the other, a library
decodes what `tests.weights.layouts` writes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.weights.opening import open_checkpoint
from quire.weights.quantizing import quantize_folder
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors
from tests.weights.layouts import LAYOUTS, awq_config, float_config, fp8_config, gptq_config, packed_config
from tests.weights.makers import config, llama_arrays, write_folder
from tests.weights.test_safetensors import own_name

# O outputs, I inputs, G groups of inputs

GROUP = 32


class Made(NamedTuple):
    tensors: dict[str, Tensor]  # of one matrix, by the ending of their name
    weights: Tensor  # [O, I], as the library decodes them


class Library(NamedTuple):
    packages: tuple[str, ...]
    config: dict[str, Any]  # quantization_config
    make: Callable[[Tensor], Made]  # from a matrix [O, I]


def module(name: str) -> Any:
    return importlib.import_module(name)


def linear_of(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    return linear


class Codes(NamedTuple):
    scales: Tensor  # [O, G], exact in fp16
    zeros: Tensor  # [O, G]
    groups: Tensor  # [I]
    rounded: Tensor  # [O, I]: weights that have exact codes


def quantized(weight: Tensor, bits: int, *, is_symmetric: bool, has_order: bool = False) -> Codes:
    """Choose scales and zero points; weights are rounded, so that no library rounds them otherwise."""
    outputs, inputs = weight.shape
    most = 2**bits - 1
    groups = torch.arange(inputs) // GROUP
    if has_order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
    scales, zeros = torch.empty(outputs, inputs // GROUP), torch.empty(outputs, inputs // GROUP)
    for group in range(inputs // GROUP):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scales[:, group], zeros[:, group] = 2 * torch.maximum(-low, high) / most, (most + 1) / 2
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, most)
    scales = scales.half().float()
    wide, middle = scales[:, groups], zeros[:, groups]
    return Codes(scales, zeros, groups, ((weight / wide + middle).round().clamp(0, most) - middle) * wide)


def make_awq(weight: Tensor) -> Made:
    gemm, packing = module("awq.modules.linear.gemm"), module("awq.utils.packing_utils")
    found = quantized(weight, 4, is_symmetric=False)
    scales, zeros = found.scales.t().contiguous(), found.zeros.t().contiguous()
    layer = gemm.WQLinear_GEMM.from_linear(linear_of(found.rounded), 4, GROUP, scales=scales, zeros=zeros)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    weights = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP)
    return Made(tensors, weights.t())


def gptq_layer(shape: torch.Size, bits: int, *, is_symmetric: bool, has_order: bool) -> Any:
    return module("gptqmodel.nn_modules.qlinear.torch").TorchLinear(
        bits=bits, group_size=GROUP, sym=is_symmetric, desc_act=has_order, in_features=shape[1], out_features=shape[0]
    )


def make_gptq(bits: int, *, is_symmetric: bool, has_order: bool = False, version: int = 1) -> Any:
    def make(weight: Tensor) -> Made:
        found = quantized(weight, bits, is_symmetric=is_symmetric, has_order=has_order)
        layer = gptq_layer(weight.shape, bits, is_symmetric=is_symmetric, has_order=has_order)
        layer.pack(linear_of(found.rounded), found.scales, found.zeros, found.groups.int())
        layer.post_init()
        weights = layer.dequantize_weight().t().float()  # before the conversion: it decodes version 2
        if version == 1:
            settings = SimpleNamespace(bits=bits, pack_dtype=torch.int32)  # the package's own makes folders
            module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module(layer, settings)
        return Made({name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, weights)

    return make


def make_auto_round(ending: str, bits: int, *, is_symmetric: bool) -> Any:
    def make(weight: Tensor) -> Made:
        found = quantized(weight, bits, is_symmetric=is_symmetric)
        quant_linear = module(f"auto_round_extension.torch.qlinear_torch{ending}").QuantLinear
        layer = quant_linear(bits, GROUP, weight.shape[1], weight.shape[0], bias=False)
        layer.device = "cpu"
        layer.pack(linear_of(found.rounded), found.scales, found.zeros, device="cpu")
        weights = layer(torch.eye(weight.shape[1])).t()
        return Made({name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}, weights)

    return make


def make_fp8(**changes: Any) -> Any:
    def make(weight: Tensor) -> Made:
        fp8, configs = (
            module("transformers.integrations.finegrained_fp8"),
            module("transformers.utils.quantization_config"),
        )

        class Quantizer:
            quantization_config = configs.FineGrainedFP8Config(**changes)

        tensors = fp8.Fp8Quantize(Quantizer()).convert({"x.weight": weight})
        found = {name.removeprefix("x."): one for name, one in tensors.items()}
        decoded = fp8.Fp8Dequantize(Quantizer())._dequantize_one(
            found["weight"], found["weight_scale_inv"], output_dtype=torch.float32
        )
        return Made(found, decoded)

    return make


def package(name: str) -> Any:
    return pytest.importorskip(f"compressed_tensors.{name}")


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


def make_compressed(settings: dict[str, Any]) -> Any:
    def make(weight: Tensor) -> Made:
        scheme, compressor = scheme_of(settings), compressor_of(settings)
        packed = compressor.compress(parameters(weight, scheme.weights), scheme)
        return Made(packed, compressor.decompress(packed, scheme)["weight"].float())

    return make


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
GPTQ, ROUND = ("gptqmodel",), ("auto_round", "auto_round_extension")
LIBRARIES: dict[str, Library] = {
    "autoawq": Library(("awq",), awq_config(GROUP), make_awq),
    "gptqmodel": Library(GPTQ, gptq_config(4, GROUP), make_gptq(4, is_symmetric=True)),
    "gptqmodel asymmetric": Library(GPTQ, gptq_config(4, GROUP, sym=False), make_gptq(4, is_symmetric=False)),
    "gptqmodel act-order": Library(
        GPTQ, gptq_config(4, GROUP, desc_act=True), make_gptq(4, is_symmetric=True, has_order=True)
    ),
    "gptqmodel v2": Library(
        GPTQ,
        gptq_config(4, GROUP, sym=False, checkpoint_format="gptq_v2"),
        make_gptq(4, is_symmetric=False, version=2),
    ),
    "gptqmodel 8 bits": Library(GPTQ, gptq_config(8, GROUP), make_gptq(8, is_symmetric=True)),
    "gptqmodel 8 bits asymmetric": Library(
        GPTQ, gptq_config(8, GROUP, sym=False), make_gptq(8, is_symmetric=False)
    ),
    "auto-round": Library(
        ROUND,
        gptq_config(4, GROUP, quant_method="auto-round", packing_format="auto_round"),
        make_auto_round("", 4, is_symmetric=False),
    ),
    "auto-round as GPTQ": Library(
        ROUND,
        gptq_config(4, GROUP, quant_method="auto-round", packing_format="auto_round:auto_gptq"),
        make_auto_round("_zp", 4, is_symmetric=False),
    ),
    "auto-round 8 bits": Library(
        ROUND,
        gptq_config(8, GROUP, quant_method="auto-round", packing_format="auto_round:auto_gptq"),
        make_auto_round("_zp", 8, is_symmetric=True),
    ),
    "transformers fp8": Library(
        ("transformers",), fp8_config(weight_block_size=[32, 16]), make_fp8(weight_block_size=(32, 16))
    ),
    "transformers fp8 with powers of two": Library(
        ("transformers",),
        fp8_config(weight_block_size=[32, 32], scale_fmt="ue8m0"),
        make_fp8(weight_block_size=(32, 32), scale_fmt="ue8m0"),
    ),
    **{
        f"compressed-tensors {name}": Library(("compressed_tensors",), settings, make_compressed(settings))
        for name, settings in CONFIGS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_files_of_a_library_are_read_as_it_reads_them(name: str, tmp_path: Path) -> None:
    library = LIBRARIES[name]
    for package in library.packages:
        pytest.importorskip(package)
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for key, array in llama_arrays().items():
        weight = torch.from_numpy(array)
        if not key.endswith("proj.weight"):
            tensors[key] = weight
            continue
        made = library.make(weight)
        tensors |= {f"{key.removesuffix('weight')}{part}": one.contiguous() for part, one in made.tensors.items()}
        expected[key] = made.weights
        assert float((made.weights - weight).norm() / weight.norm()) < 0.15  # the library has packed this matrix
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config(quantization_config=library.config)))
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    assert expected
    for key, values in expected.items():
        found = torch.from_numpy(to_float32(checkpoint.read(own_name(key))))
        torch.testing.assert_close(found, values, rtol=TOLERANCES.get(name, 1e-6), atol=1e-6)


# gptqmodel and the layers of auto-round decode in fp16.
TOLERANCES = {name: 1e-3 for name in LIBRARIES if name.startswith(("gptqmodel", "auto-round"))}


def parts_of(layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the writer of a layout makes of a matrix, and the weights that it means."""
    rng = np.random.default_rng(0)
    written = LAYOUTS[layout].write(rng.standard_normal((64, 96)).astype(np.float32), rng)
    tensors = {name: torch.from_numpy(np.array(one.array)) for name, one in written.tensors.items()}
    return tensors, torch.from_numpy(written.weights)


def test_autoawq_reads_the_written_layout() -> None:
    packing = pytest.importorskip("awq.utils.packing_utils")
    tensors, weights = parts_of("awq g32")
    found = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, GROUP)
    torch.testing.assert_close(found.t(), weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["gptq g32", "gptq asymmetric", "gptq v2", "gptq act-order", "gptq 8 bits"])
def test_gptqmodel_reads_the_written_layout(layout: str) -> None:
    pytest.importorskip("gptqmodel")
    tensors, weights = parts_of(layout)
    bits = 8 if "8 bits" in layout else 4
    layer = gptq_layer(weights.shape, bits, is_symmetric=False, has_order="order" in layout)
    for name, one in tensors.items():
        layer.register_buffer(name, one)
    layer.post_init()
    if layout != "gptq v2":
        module("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    torch.testing.assert_close(layer.dequantize_weight().t().float(), weights, rtol=1e-3, atol=1e-6)


def test_transformers_reads_the_written_layout() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors, weights = parts_of("fp8 small blocks")
    codes = tensors["weight"].view(torch.float8_e4m3fn)
    found = fp8.Fp8Dequantize(None)._dequantize_one(codes, tensors["weight_scale_inv"], output_dtype=torch.float32)
    torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-6)


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
