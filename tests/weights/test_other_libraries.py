"""Comparison with the FP8 files of transformers, in both directions.

autoawq 0.2.9, gptqmodel 7.7.0, auto-round 0.16.1 and compressed-tensors 0.20.0 were compared in the same way, last in
commit fadc82c7: they are not installed with the development tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors
from tests.weights.layouts import LAYOUTS, fp8_config
from tests.weights.makers import config, llama_arrays
from tests.weights.test_safetensors import own_name

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
configs = pytest.importorskip("transformers.utils.quantization_config")


@pytest.mark.parametrize(
    ("settings", "block"), [({}, (32, 16)), ({"scale_fmt": "ue8m0"}, (32, 32))], ids=["floats", "powers of two"]
)
def test_files_are_read_as_transformers_reads_them(
    settings: dict[str, Any], block: tuple[int, int], tmp_path: Path
) -> None:
    class Quantizer:
        quantization_config = configs.FineGrainedFP8Config(weight_block_size=block, **settings)

    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for key, array in llama_arrays().items():
        weight = torch.from_numpy(array)
        if not key.endswith("proj.weight"):
            tensors[key] = weight
            continue
        made = fp8.Fp8Quantize(Quantizer()).convert({key: weight})
        tensors |= {name: one.contiguous() for name, one in made.items()}
        scales = next(one for name, one in made.items() if name.endswith("scale_inv"))
        expected[key] = fp8.Fp8Dequantize(Quantizer())._dequantize_one(made[key], scales, output_dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = fp8_config(weight_block_size=list(block), **settings)
    (tmp_path / "config.json").write_text(json.dumps(config(quantization_config=quantization)))
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    for key, values in expected.items():
        found = torch.from_numpy(to_float32(checkpoint.read(own_name(key))))
        torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)


def test_transformers_reads_the_written_layout() -> None:
    rng = np.random.default_rng(0)
    written = LAYOUTS["fp8 small blocks"].write(rng.standard_normal((64, 96)).astype(np.float32), rng)
    tensors = {name: torch.from_numpy(np.array(one.array)) for name, one in written.tensors.items()}
    codes = tensors["weight"].view(torch.float8_e4m3fn)
    found = fp8.Fp8Dequantize(None)._dequantize_one(codes, tensors["weight_scale_inv"], output_dtype=torch.float32)
    torch.testing.assert_close(found, torch.from_numpy(written.weights), rtol=1e-6, atol=1e-6)
