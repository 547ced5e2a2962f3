"""Quantised checkpoints in an engine: each answers as a plain checkpoint of the same weights does."""

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
from tests.backends.torch.rig import Rig
from tests.weights.layouts import LAYOUTS, Layout, Stored, write_quantized, write_tensors

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
