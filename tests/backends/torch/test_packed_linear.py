"""Packed matrices: conversion from the layout of files, quantising, and loading a model with them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.base import BackendOptions
from quire.backends.torch.build import make_runner
from quire.backends.torch.fused_linear import FusedPackedLinear
from quire.backends.torch.layers import Linear
from quire.backends.torch.loading import WeightLoader, packed_format, weight_bytes
from quire.backends.torch.models.decoder import DecoderLayer, DecoderModel, DenseMlp
from quire.backends.torch.packed import (
    FP8_PER_OUTPUT,
    INT4_IN_GROUPS,
    JoinedLinear,
    PackedLinear,
    decoded,
    format_of,
    pack,
    quantize,
)
from quire.cli.doctor import GPU_BITS, PACKED_BITS
from quire.errors import InvalidRequest
from quire.weights.checkpoint import Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.opening import DummyCheckpoint, open_checkpoint
from quire.weights.packed import CodeType, PackedMatrix
from quire.weights.quants import pack_blocks
from quire.weights.spec import Activation
from tests.backends.torch.test_compiling import write_config
from tests.weights.layouts import random_blocks

# O outputs, I inputs

FP32 = torch.float32
CPU = torch.device("cpu")


def random_matrix(
    kind: CodeType,
    shape: tuple[int, int],
    group: tuple[int, int],
    *,
    has_zeros: bool = False,
    order: np.ndarray | None = None,
    seed: int = 0,
) -> PackedMatrix:
    rng = np.random.default_rng(seed)
    num_scales = -(-shape[0] // group[0]), -(-shape[1] // group[1])
    codes = rng.integers(0, 256, (shape[0], shape[1] * kind.bits // 8), dtype=np.uint8)
    if kind is CodeType.FP8:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    scales = rng.uniform(0.5, 1.5, num_scales).astype(np.float16).astype(np.float32) * 0.0625
    zeros = rng.integers(0, 16, num_scales).astype(np.float32) if has_zeros else None
    return PackedMatrix(kind, shape, codes, scales, group, zeros, order)


@pytest.mark.parametrize(
    ("kind", "shape", "group", "has_zeros"),
    [
        (CodeType.FP8, (256, 384), (128, 128), False),
        (CodeType.FP8, (100, 96), (1, 96), False),
        (CodeType.FP8, (100, 96), (100, 96), False),
        (CodeType.FP8, (200, 256), (128, 128), False),
        (CodeType.INT8, (9, 64), (1, 32), False),
        (CodeType.INT4, (9, 256), (1, 128), False),
        (CodeType.INT4, (9, 96), (1, 32), True),
        (CodeType.FP4, (9, 96), (1, 16), False),
    ],
)
def test_packing_keeps_every_weight(
    kind: CodeType, shape: tuple[int, int], group: tuple[int, int], has_zeros: bool
) -> None:
    matrices = [random_matrix(kind, shape, group, has_zeros=has_zeros, seed=seed) for seed in range(2)]
    for some in (matrices[:1], matrices):
        format = format_of(some)
        assert format is not None
        packed = pack(some, format, FP32, CPU)
        assert torch.equal(packed.decode(), torch.cat([decoded(one) for one in some]))
        assert packed.nbytes <= packed.shape.numel() * 1.6


def test_inputs_are_gathered_in_the_order_of_the_codes() -> None:
    order = np.random.default_rng(1).permutation(128).astype(np.int32)
    matrix = random_matrix(CodeType.INT4, (6, 128), (1, 32), has_zeros=True, order=order)
    plain = random_matrix(CodeType.INT4, (6, 128), (1, 32), has_zeros=True)
    assert torch.equal(decoded(matrix)[:, torch.from_numpy(order).long()], decoded(plain))
    format = format_of([matrix, matrix])
    assert format is not None
    linear = PackedLinear(pack([matrix, matrix], format, FP32, CPU))
    x = torch.randn(3, 128)
    whole = torch.cat((decoded(matrix), decoded(matrix)))
    torch.testing.assert_close(linear(x), x @ whole.t())
    assert format_of([matrix, plain]) is None


def test_formats_without_kernels() -> None:
    int4 = random_matrix(CodeType.INT4, (4, 128), (1, 64))
    assert format_of([int4, random_matrix(CodeType.FP8, (4, 128), (1, 128))]) is None
    assert format_of([int4, random_matrix(CodeType.INT4, (4, 128), (1, 32))]) is None
    assert format_of([random_matrix(CodeType.INT4, (4, 96), (1, 24))]) is None  # a group that no kernel knows
    assert format_of([random_matrix(CodeType.INT4, (4, 48), (1, 48))]) is None  # not whole blocks
    large = PackedMatrix(CodeType.INT4, int4.shape, int4.codes, int4.scales * 1e8, int4.group)
    assert format_of([large]) is None
    zeros = np.full((4, 2), 1e5, np.float32)  # fp16 ends at 65504
    assert format_of([replace(int4, zeros=zeros)]) is None
    fp8 = random_matrix(CodeType.FP8, (4, 128), (1, 64))
    assert format_of([replace(fp8, zeros=np.ones((4, 2), np.float32))]) is None


@pytest.mark.parametrize("kind", [CodeType.INT4, CodeType.INT8])
def test_fractional_zeros_are_rounded_to_fp16(kind: CodeType) -> None:
    matrix = random_matrix(kind, (6, 128), (1, 32))
    zeros = np.random.default_rng(1).uniform(-20, 20, matrix.scales.shape).astype(np.float32)
    matrix = replace(matrix, zeros=zeros)
    format = format_of([matrix])
    assert format is not None
    assert format.has_half_zeros
    error = pack([matrix], format, FP32, CPU).decode() - decoded(matrix)
    bound = torch.from_numpy(np.abs(zeros * matrix.scales)).repeat_interleave(32, 1) * 2**-11
    assert bool((error.abs() <= bound + 1e-6).all())


def test_zeros_that_one_matrix_lacks() -> None:
    """Matrices without zeros have the usual ones beside those with zeros, whole or not."""
    plain, whole = (random_matrix(CodeType.INT4, (6, 128), (1, 32), has_zeros=has_zeros) for has_zeros in (False, True))
    assert whole.zeros is not None
    half = replace(whole, zeros=whole.zeros + np.float32(0.5))
    for matrices, has_half_zeros in (([plain, whole], False), ([plain, half], True), ([whole, plain, half], True)):
        format = format_of(matrices)
        assert format is not None
        assert (format.has_zeros, format.has_half_zeros) == (True, has_half_zeros)
        assert torch.equal(pack(matrices, format, FP32, CPU).decode(), torch.cat([decoded(one) for one in matrices]))


def test_the_plain_product_is_that_of_the_decoded_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.backends.torch.packed.CHUNK_WEIGHTS", 1000)  # several chunks
    torch.manual_seed(0)
    weight = quantize(torch.randn(40, 256), INT4_IN_GROUPS)
    bias = torch.randn(40)
    linear = PackedLinear(weight, bias)
    x, out = torch.randn(5, 256), torch.full((5, 40), 7.0)
    want = x @ weight.decode().t() + bias
    torch.testing.assert_close(linear(x), want)
    assert linear(x, out) is out
    torch.testing.assert_close(out, want)
    assert linear.shape == (40, 256)


class PackedDummy(DummyCheckpoint):
    """A checkpoint whose matrices of layers are packed, in memory. The other tensors are invented by the loader."""

    def __init__(
        self, inner: Checkpoint, kind: CodeType, group: int, *, is_odd: bool = False, has_minima: bool = False
    ) -> None:
        self._inner = inner
        self._kind, self._group, self._is_odd, self._has_minima = kind, group, is_odd, has_minima

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_packed(self, name: str) -> PackedMatrix | None:
        if not name.startswith("layers.") or "norm" in name:
            return None
        shape = self._inner.tensors[name].shape
        kind = CodeType.FP8 if self._is_odd and "k_proj" in name else self._kind
        matrix = random_matrix(kind, (shape[0], shape[1]), (1, self._group), has_zeros=self._has_minima, seed=len(name))
        return matrix if matrix.zeros is None else replace(matrix, zeros=matrix.zeros + np.float32(0.3))


def llama(folder: Path) -> Checkpoint:
    return open_checkpoint(write_config("qwen3", folder), "dummy")


def load(checkpoint: Checkpoint, dtype: torch.dtype, **settings: Any) -> DecoderModel:
    return DecoderModel(WeightLoader(checkpoint, dtype, CPU, **settings), 512)


def linears(layer: DecoderLayer) -> list[object]:
    assert isinstance(layer.mlp, DenseMlp)
    return [layer.mixer.in_proj, layer.mixer.out_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]


def test_packed_matrices_stay_packed(tmp_path: Path) -> None:
    checkpoint = PackedDummy(llama(tmp_path), CodeType.INT4, 128)
    assert packed_format(checkpoint, None) == INT4_IN_GROUPS
    weights = load(checkpoint, torch.bfloat16)
    saved = 0
    for layer in weights.layers:
        for linear in linears(layer):
            assert isinstance(linear, PackedLinear)
            assert linear.packed.format == INT4_IN_GROUPS
            saved += linear.packed.shape.numel() * 2 - linear.packed.nbytes
    assert weights.num_bytes == weight_bytes(checkpoint.spec, torch.bfloat16) - saved
    assert weights.packed_types == ("int4",)
    assert isinstance(weights.head.weight, Tensor)


def test_mixed_matrices_have_their_own_products(tmp_path: Path) -> None:
    checkpoint = PackedDummy(llama(tmp_path), CodeType.INT4, 128, is_odd=True)
    weights = load(checkpoint, FP32)
    qkv, o_proj, *_ = linears(weights.layers[0])
    assert isinstance(qkv, JoinedLinear)
    assert isinstance(o_proj, PackedLinear)
    assert [type(part) for part in qkv.parts] == [PackedLinear] * 3  # the keys, in another format, divide the others
    matrices = [checkpoint.read_packed(f"layers.0.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
    whole = torch.cat([decoded(one) for one in matrices if one is not None])
    x = torch.randn(3, whole.shape[1])
    torch.testing.assert_close(qkv(x), x @ whole.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(qkv.project(x, is_graph=False), qkv(x))
    out = torch.empty(3, len(whole))
    assert qkv(x, out) is out
    assert torch.equal(out, qkv(x))
    assert weights.packed_types == ("fp8", "int4")


def test_joined_gates_and_biases() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 128), torch.randn(64), torch.randn(3, 128)
    joined = JoinedLinear(
        [Linear(weight[:32], bias[:32]), PackedLinear(quantize(weight[32:], INT4_IN_GROUPS), bias[32:])]
    )
    part = joined.parts[1]
    assert isinstance(part, PackedLinear)
    whole = x @ torch.cat((weight[:32], part.packed.decode())).t() + bias
    gate, up = whole.chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(joined.gated(x, Activation.SILU, is_graph=False), want, rtol=1e-4, atol=1e-4)


def test_a_cpu_decodes_minima_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Decoding in every step is slow there. A GPU keeps them packed."""
    checkpoint = PackedDummy(llama(tmp_path), CodeType.INT4, 32, has_minima=True)
    with caplog.at_level(logging.INFO):
        plain = load(checkpoint, FP32)
    assert not any(isinstance(one, PackedLinear) for one in linears(plain.layers[0]))
    assert caplog.text.count("are decoded to torch.float32: no kernel computes with them") == 1
    packed = load(checkpoint, FP32, packed_linear=FusedPackedLinear)
    for dense, one in zip(linears(plain.layers[0]), linears(packed.layers[0]), strict=True):
        assert isinstance(one, FusedPackedLinear)
        torch.testing.assert_close(one.packed.decode(), dense.weight, rtol=2e-3, atol=1e-3)  # type: ignore[attr-defined]
    assert plain.num_bytes > 1.5 * packed.num_bytes


@pytest.mark.parametrize(("bits", "kind"), [(8, "fp8"), (4, "int4")])
def test_quantising_at_load(bits: int, kind: str, tmp_path: Path) -> None:
    checkpoint = llama(tmp_path)
    plain, weights = (load(checkpoint, FP32, quantize_bits=one) for one in (None, bits))
    for one, other in zip(plain.layers, weights.layers, strict=True):
        for dense, packed in zip(linears(one), linears(other), strict=True):
            assert isinstance(packed, PackedLinear)
            error = packed.packed.decode() - dense.weight  # type: ignore[attr-defined]
            assert float(error.norm() / dense.weight.norm()) < 0.13  # type: ignore[attr-defined]
    assert torch.equal(plain.head.weight, weights.head.weight)
    assert plain.num_bytes > 1.5 * weights.num_bytes
    assert weights.packed_types == (kind,)


def test_packed_files_are_not_quantised_again(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_config("gpt_oss", tmp_path), "dummy")
    with pytest.raises(InvalidRequest, match="quantised already, to MXFP4"):
        make_runner(checkpoint, BackendOptions(device="cpu", quantize=8))


def test_older_gpus_decode_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels would not compile."""
    checkpoint = PackedDummy(llama(tmp_path), CodeType.FP8, 128)
    plain = llama(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, holds in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert FusedPackedLinear.holds(FP8_PER_OUTPUT) is holds
        assert FusedPackedLinear.holds(INT4_IN_GROUPS)
        weights = load(checkpoint, FP32, packed_linear=FusedPackedLinear)
        assert all(isinstance(one, FusedPackedLinear) is holds for one in linears(weights.layers[0]))
        if not holds:
            with pytest.raises(InvalidRequest, match="quantize = 8: this GPU has no instructions for FP8"):
                load(plain, FP32, packed_linear=FusedPackedLinear, quantize_bits=8)


@pytest.mark.parametrize("kind", [kind for kind in GPU_BITS if kind not in PACKED_BITS])
def test_bits_per_weight_of_gguf_types(kind: str) -> None:
    tensor = random_blocks(np.random.default_rng(0), TensorType(kind), 32, 256)
    data = np.frombuffer(tensor.data, np.uint8).reshape(32, -1)
    matrix = pack_blocks(RawTensor(TensorInfo("x", TensorType(kind), (32, 256), len(tensor.data)), data))
    assert matrix is not None
    format = format_of([matrix])
    assert format is not None
    packed = pack([matrix], format, FP32, CPU)
    assert packed.nbytes * 8 / packed.shape.numel() == GPU_BITS[kind]
    error = (packed.decode() - decoded(matrix)).abs()
    peak = decoded(matrix).abs().view(32, -1, 16).amax(2).repeat_interleave(16, 1)
    assert bool((error <= 2 * 2**-11 * (peak + decoded(matrix).abs().max())).all())


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [(CodeType.FP8, (128, 128), False), (CodeType.FP8, (1, 256), False), (CodeType.INT8, (1, 64), False),
     (CodeType.INT4, (1, 128), True), (CodeType.INT4, (1, 64), False)],
)  # fmt: skip
def test_bits_per_weight_of_safetensors(kind: CodeType, group: tuple[int, int], has_zeros: bool) -> None:
    matrix = random_matrix(kind, (256, 1024), group if group[1] < 256 else (1, 1024), has_zeros=has_zeros)
    format = format_of([matrix])
    assert format is not None
    packed = pack([matrix], format, FP32, CPU)
    assert packed.nbytes * 8 / packed.shape.numel() <= GPU_BITS[kind.upper()]
