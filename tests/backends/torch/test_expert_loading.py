"""Loading of experts: which stay packed, in which format, and that whole models compute with the same weights."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.backends.torch.experts import Experts
from quire.backends.torch.fused_linear import FusedPackedLinear
from quire.backends.torch.loading import (
    WeightLoader,
    expert_formats,
    weight_bytes,
)
from quire.backends.torch.models.decoder import DecoderModel, RoutedMlp
from quire.backends.torch.packed import FP8_PER_OUTPUT, INT4_IN_GROUPS, PackedFormat, PackedLinear, PackedStack, decoded
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint
from quire.weights.opening import open_checkpoint
from quire.weights.packed import CodeType, PackedMatrix
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.rig import Rig
from tests.backends.torch.test_compiling import write_config
from tests.backends.torch.test_experts import dense
from tests.backends.torch.test_packed_linear import PackedDummy, random_matrix
from tests.selection import mostly_nightly
from tests.weights.layouts import (
    LAYOUTS,
    Layout,
    expert_quants,
    fp8,
    fp8_config,
    quantize_arrays,
    write_quantized,
)
from tests.weights.makers import EXPERTS, LAYERS, Stored, mixed_safetensors, moe_arrays, moe_config, write_folder

# E hidden size, F width of an expert

FP32, CPU = torch.float32, torch.device("cpu")
SMALL_BLOCKS = Layout(fp8_config(weight_block_size=[32, 32]), fp8(32, 32), "FP8")
KEPT = {
    "fp8 in small blocks": (SMALL_BLOCKS, PackedFormat(CodeType.FP8, 32, 32)),
    "fp8 whole": (LAYOUTS["fp8 whole, scalar"], FP8_PER_OUTPUT),
    "ct fp8 channel": (LAYOUTS["ct fp8 channel"], FP8_PER_OUTPUT),
    "ct w4 g32": (LAYOUTS["ct w4 g32"], PackedFormat(CodeType.INT4, 1, 32)),
    "ct w4 asymmetric": (LAYOUTS["ct w4 asymmetric"], PackedFormat(CodeType.INT4, 1, 32, has_zeros=True)),
    "gptq g32": (LAYOUTS["gptq g32"], PackedFormat(CodeType.INT4, 1, 32)),
    "gptq asymmetric": (LAYOUTS["gptq asymmetric"], PackedFormat(CodeType.INT4, 1, 32, has_zeros=True)),
    "awq g32": (LAYOUTS["awq g32"], PackedFormat(CodeType.INT4, 1, 32, has_zeros=True)),
    "gptq 8 bits": (LAYOUTS["gptq 8 bits"], PackedFormat(CodeType.INT8, 1, 32)),
    "ct w8 asymmetric": (LAYOUTS["ct w8 asymmetric"], PackedFormat(CodeType.INT8, 1, 32, True, False, True)),
}


def small_arrays() -> dict[str, NDArray[np.float32]]:
    """Return a mixture of experts whose outputs are about 1."""
    return {
        name: array if array.ndim == 1 else (array / array.shape[-1] ** 0.5).astype(np.float32)
        for name, array in moe_arrays().items()
    }


def experts_of(weights: DecoderModel) -> list[Experts]:
    return [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, RoutedMlp)]


def stacks_of(weights: DecoderModel) -> list[PackedStack]:
    found = [stack for experts in experts_of(weights) for stack in (experts.gate_up, experts.down)]
    assert all(isinstance(stack, PackedStack) for stack in found)
    return found  # type: ignore[return-value]


def file_stacks(weights: dict[str, NDArray[np.float32]]) -> list[Tensor]:
    """Return the matrices of all experts, stacked as in memory."""
    found = []
    for i in range(LAYERS):
        prefix = f"model.layers.{i}.mlp.experts."
        for parts in (("gate", "up"), ("down",)):
            groups = [
                np.concatenate([weights[f"{prefix}{expert}.{part}_proj.weight"] for part in parts])
                for expert in range(EXPERTS)
            ]
            found.append(torch.from_numpy(np.stack(groups)))
    return found


def load(checkpoint: Checkpoint, bits: int | None = None, **settings: Any) -> DecoderModel:
    with torch.inference_mode():
        return DecoderModel(WeightLoader(checkpoint, FP32, CPU, quantize_bits=bits, **settings), 512)


@pytest.mark.parametrize("name", KEPT)
def test_experts_stay_packed(name: str, tmp_path: Path) -> None:
    layout, format = KEPT[name]
    meant = write_quantized(tmp_path, layout, moe_config(), moe_arrays())
    checkpoint = open_checkpoint(tmp_path)
    assert expert_formats(checkpoint, None) == ((format, format),)
    reports: list[tuple[int, int]] = []
    weights = load(checkpoint, progress=lambda *report: reports.append(report), packed_linear=FusedPackedLinear)
    stacks = stacks_of(weights)
    for stack, want in zip(stacks, file_stacks(meant), strict=True):
        assert stack.format == format
        torch.testing.assert_close(dense(stack), want, rtol=2e-3, atol=1e-6)  # scales of groups are rounded to fp16
        assert torch.equal(stack[2], dense(stack)[2])
    assert weights.packed_types == (str(format.type),)
    linears = [
        one
        for layer in weights.layers
        for one in (layer.mixer.in_proj, layer.mixer.out_proj)
        if isinstance(one, PackedLinear)
    ]
    saved = sum(4 * stack.shape.numel() - stack.nbytes for stack in stacks)
    saved += sum(4 * linear.packed.shape.numel() - linear.packed.nbytes for linear in linears)
    assert weights.num_bytes == weight_bytes(checkpoint.spec, FP32) - saved
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1]


class Blocks(PackedDummy):
    """Its experts are in blocks as Qwen's FP8 files have them."""

    def read_packed(self, name: str) -> PackedMatrix | None:
        if ".experts." not in name:
            return None
        shape = self.tensors[name].shape
        return random_matrix(CodeType.FP8, (shape[0], shape[1]), (128, 128), seed=len(name))


def test_blocks_of_128(tmp_path: Path) -> None:
    blocks = PackedFormat(CodeType.FP8, 128, 128)
    checkpoint = Blocks(mixture(tmp_path, moe_intermediate_size=256), CodeType.FP8, 128)
    assert [stack.format for stack in stacks_of(load(checkpoint))] == [blocks, blocks]
    checkpoint = Blocks(mixture(tmp_path, moe_intermediate_size=192), CodeType.FP8, 128)
    (experts,) = experts_of(load(checkpoint))  # 192 inputs are not whole blocks, so both matrices are decoded
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    want = checkpoint.read_packed("layers.0.experts.5.up_proj.weight")
    assert want is not None
    assert torch.equal(experts.gate_up[5, 192:], decoded(want))


def mixture(folder: Path, **changes: Any) -> Checkpoint:
    """Return a model without weights, of 8 experts with E = 512."""
    path = write_config("qwen3_moe", folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, **changes}))
    return open_checkpoint(path, "dummy")


Q4_K = PackedFormat(CodeType.INT4, 1, 32, has_zeros=True, has_half_zeros=True)
Q5_K, Q6_K = replace(Q4_K, type=CodeType.INT8), PackedFormat(CodeType.INT8, 1, 16)
MINIMA = {
    "Q4_K": ([("Q4_K", "Q4_K")] * 2, [(Q4_K, Q4_K)]),
    "Q4_K_M": ([("Q4_K", "Q6_K"), ("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")], [(Q4_K, Q6_K), (Q4_K, Q4_K)]),
    "Q4_1": ([("Q4_1", "Q4_1")], [(Q4_K, Q4_K)]),
    "Q5_K_M": ([("Q5_K", "Q6_K"), ("Q5_K", "Q5_K")], [(Q5_K, Q6_K), (Q5_K, Q5_K)]),
    "Q5_1, Q5_0": ([("Q5_1", "Q5_0")], [(Q5_K, PackedFormat(CodeType.INT8, 1, 32))]),
}


@pytest.mark.parametrize("name", MINIMA)
def test_experts_with_minima_stay_packed_on_a_gpu(name: str, tmp_path: Path) -> None:
    types, formats = MINIMA[name]
    (tmp_path / "experts.gguf").write_bytes(expert_quants(types))
    checkpoint = open_checkpoint(tmp_path / "experts.gguf")
    assert list(expert_formats(checkpoint, None)) == formats
    packed, plain = load(checkpoint, packed_linear=FusedPackedLinear), load(checkpoint)
    one_of = dict(zip(dict.fromkeys(types), formats, strict=True))
    for i, (one, other) in enumerate(zip(experts_of(packed), experts_of(plain), strict=True)):
        for stack, whole, format in ((one.gate_up, other.gate_up, one_of[types[i]][0]),
                                     (one.down, other.down, one_of[types[i]][1])):  # fmt: skip
            assert isinstance(stack, PackedStack)
            assert stack.format == format
            assert isinstance(whole, Tensor)  # decoded, on a CPU
            torch.testing.assert_close(dense(stack), whole, rtol=2e-3, atol=2e-4)  # rounded to fp16
    saved = sum(4 * stack.shape.numel() - stack.nbytes for stack in stacks_of(packed))
    assert packed.num_bytes == weight_bytes(checkpoint.spec, FP32) - saved


@pytest.mark.parametrize("name", ["gptq act-order", "ct w4 act-order", "fp8 small blocks"])
def test_formats_without_kernels_are_decoded(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = LAYOUTS[name]
    if name == "fp8 small blocks":  # groups of 8 columns
        layout = Layout(fp8_config(weight_block_size=[32, 8]), fp8(32, 8), "FP8")
    meant = write_quantized(tmp_path, layout, moe_config(), moe_arrays())
    checkpoint = open_checkpoint(tmp_path)
    assert expert_formats(checkpoint, None) == ()
    with caplog.at_level(logging.INFO):
        weights = load(checkpoint)
    found = [stack for experts in experts_of(weights) for stack in (experts.gate_up, experts.down)]
    for matrix, want in zip(found, file_stacks(meant), strict=True):
        assert isinstance(matrix, Tensor)
        torch.testing.assert_close(matrix, want)
    assert caplog.text.count("weights of experts in") == 1


@pytest.mark.parametrize(
    "odd",
    [
        ".experts.3.up_proj.",  # one matrix of a stack
        "down_proj",  # all of one of the two stacks
    ],
)
def test_mixed_experts_are_decoded(odd: str, tmp_path: Path) -> None:
    """Some matrices of the file are in 32 bits."""
    layout = LAYOUTS["ct w4 asymmetric"]
    tensors, meant = quantize_arrays(
        layout, moe_arrays(), chosen=lambda name: name.endswith("proj.weight") and odd not in name
    )
    (tmp_path / "config.json").write_text(json.dumps({**moe_config(), "quantization_config": layout.config}))
    (tmp_path / "model.safetensors").write_bytes(mixed_safetensors(tensors))
    weights = load(open_checkpoint(tmp_path))
    found = [stack for experts in experts_of(weights) for stack in (experts.gate_up, experts.down)]
    is_packed = [isinstance(stack, PackedStack) for stack in found]
    assert is_packed == [False] * 4
    for matrix, want in zip(found, file_stacks(meant), strict=True):
        torch.testing.assert_close(matrix, want, rtol=2e-3, atol=1e-6)
    assert weights.packed_types == ("int4",)  # of attention
    saved = weight_bytes(open_checkpoint(tmp_path).spec, FP32) - weights.num_bytes
    assert 0 < saved < sum(4 * one.numel() for one in file_stacks(meant)) / 4


# `--quantize`


@pytest.mark.parametrize(("bits", "kind", "error"), [(8, "fp8", 0.04), (4, "int4", 0.14)])
def test_quantising_at_load(bits: int, kind: str, error: float, tmp_path: Path) -> None:
    write_folder(tmp_path, moe_config(), moe_arrays())
    checkpoint = open_checkpoint(tmp_path)
    plain, weights = load(checkpoint), load(checkpoint, bits)
    assert weights.packed_types == (kind,)
    (formats,) = expert_formats(checkpoint, bits)
    for one, other in zip(experts_of(plain), experts_of(weights), strict=True):
        for number, (matrix, stack) in enumerate(((one.gate_up, other.gate_up), (one.down, other.down))):
            assert isinstance(matrix, Tensor)
            assert isinstance(stack, PackedStack)
            assert stack.format == formats[number]
            assert float((dense(stack) - matrix).norm() / matrix.norm()) < error
    assert all(isinstance(layer.mlp, RoutedMlp) for layer in weights.layers)
    assert not any(isinstance(layer.mlp.router, PackedLinear) for layer in weights.layers)  # type: ignore[union-attr]


class WithoutFp8(PackedLinear):
    """As on a GPU without instructions for FP8."""

    @classmethod
    def holds(cls, format: PackedFormat) -> bool:
        return format.type is not CodeType.FP8


def test_experts_in_fp8_are_decoded_on_gpus_without_it(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, LAYOUTS["ct fp8 channel"], moe_config(), moe_arrays())
    weights = load(open_checkpoint(tmp_path), packed_linear=WithoutFp8)
    found = [matrix for experts in experts_of(weights) for matrix in (experts.gate_up, experts.down)]
    assert weights.packed_types == ()
    for matrix, want in zip(found, file_stacks(meant), strict=True):
        assert isinstance(matrix, Tensor)
        torch.testing.assert_close(matrix, want)


def test_quantising_experts_to_fp8_needs_a_gpu_with_it(tmp_path: Path) -> None:
    write_folder(tmp_path, moe_config(), moe_arrays())
    with pytest.raises(InvalidRequest, match="quantize = 8: this GPU has no instructions for FP8"):
        load(open_checkpoint(tmp_path), 8, packed_linear=WithoutFp8)
    assert load(open_checkpoint(tmp_path), 4, packed_linear=WithoutFp8).packed_types == ("int4",)


def test_groups_follow_the_width(tmp_path: Path) -> None:
    checkpoint = mixture(tmp_path, moe_intermediate_size=96)
    (formats,) = expert_formats(checkpoint, 4)
    assert formats == (INT4_IN_GROUPS, PackedFormat(CodeType.INT4, 1, 32))
    assert [stack.format for stack in stacks_of(load(checkpoint, 4))] == [*formats]


def test_a_width_that_nothing_fits_keeps_its_bits(tmp_path: Path) -> None:
    checkpoint = mixture(tmp_path, moe_intermediate_size=100)
    assert expert_formats(checkpoint, 4) == ()
    (experts,) = experts_of(load(checkpoint, 4))
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    assert expert_formats(checkpoint, 8) == ((FP8_PER_OUTPUT, FP8_PER_OUTPUT),)


def test_random_experts_are_never_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = mixture(tmp_path)
    monkeypatch.setattr(PackedStack, "quantize", None)
    stacks = stacks_of(load(checkpoint, 8))
    for stack in stacks:
        assert 0.01 < float(dense(stack).std()) < 0.04


# Whole models


@pytest.mark.parametrize("name", mostly_nightly(["fp8 in small blocks", "ct w4 asymmetric", "awq g32"], 2))
@pytest.mark.kept("fp8")
def test_a_packed_model_computes_as_its_weights_do(name: str, tmp_path: Path) -> None:
    layout, _ = KEPT[name]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    meant = write_quantized(packed, layout, moe_config(), small_arrays())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(moe_config()))
    (plain / "model.safetensors").write_bytes(mixed_safetensors({n: Stored("F32", one) for n, one in meant.items()}))
    prompt = [5, 33, 12, 61, 4, 9, 17]
    want = torch.stack(Rig(plain, max_model_len=64).answer(prompt, 3).rows)
    for rig in (Rig(packed, max_model_len=64), FusedRig(packed)):
        got = torch.stack(rig.answer(prompt, 3).rows)
        assert float((got - want).abs().max()) < 0.02  # scales of groups are rounded to fp16
