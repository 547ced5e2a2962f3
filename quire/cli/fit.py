"""Whether and where a model runs on this machine, for commands that load nothing.

`fit` estimates memory from the number and type of the weights; `find_backend_problem` asks the backend that `auto`
selects.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.backends.machine import available_bytes, gpu_memory, has_fp8, has_metal, has_nvidia, total_bytes
from quire.backends.support import find_mlx_problem, find_transformers_problem, mlx_hint, transformers_hint
from quire.engine.composition import EngineConfig, choose_backend
from quire.errors import QuireError
from quire.sizes import memory_size
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.fields import member, read_json
from quire.weights.gguf import BLOCKS
from quire.weights.hub import weight_bytes
from quire.weights.spec import ModelSpec

# Of one weight in a file.
FILE_BITS: dict[str, float] = {kind: 8 * block.num_bytes / block.num_elements for kind, block in BLOCKS.items()}
PACKED_BITS = {"FP8": 8.125, "INT8": 8.25, "INT4": 4.5}  # of quantised safetensors: most have groups of 64 to 128
MLX_4BIT = "4 bits"  # of MLX's own checkpoints: groups of 64 weights, each with a scale and a bias of 16 bits
MLX_FILE_BITS = {MLX_4BIT: 4.5}
# In memory, native backend (docs/cpu.md).
CPU_BITS = {**dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0", "INT4"), 5.0), "MXFP4": 4.5}
OTHER_CPU_BITS = 8.5
# In the memory of an NVIDIA GPU (docs/models.md). Embeddings have 16 bits, which is not counted here.
GPU_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q4_K": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q5_K": 9.0,
    "Q6_K": 9.0,
    "Q8_0": 8.5,
    "MXFP4": 4.5,
    **PACKED_BITS,
}
EXPERT_GPU_BITS = {**GPU_BITS, "MXFP4": 4.25}  # scales of experts in MXFP4 have 8 bits
SIGMOID_GPU_BITS = {"MXFP4": 4.25}  # experts that are chosen by sigmoids are decoded
OTHER_GPU_BITS = 16.0
# On MLX, packed types of a GGUF stay packed, with a scale and a bias of 16 bits for 32 weights (docs/apple.md).
METAL_BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q5_1": 6.0,
    "Q5_0": 6.0,
    "Q5_K": 6.0,
    "Q4_1": 5.0,
    "Q4_0": 5.0,
    "Q4_K": 5.0,
    "MXFP4": 6.0,
    "TQ1_0": 3.0,
    "TQ2_0": 3.0,
    **MLX_FILE_BITS,
}
OTHER_METAL_BITS = 9.0  # the others have 8 bits
SPARE = 0.85  # the share of the memory that weights may take; the rest is for the KV cache and activations


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this machine. `gpu_*` are those of the GPU with most memory; 0: there is none.

    With `has_metal`, they are the share of the CPU's memory that the GPU of an Apple chip may use. Without `has_fp8`,
    NVIDIA GPUs have no instructions for FP8.
    """

    cpu_total: int
    cpu_free: int
    gpu_total: int = 0
    gpu_free: int = 0
    has_metal: bool = False
    has_fp8: bool = True

    @property
    def best_device(self) -> str:
        return "metal" if self.has_metal else "cuda" if self.gpu_total else "cpu"


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a model runs: on the GPU, on the CPU, or nowhere."""

    device: str  # cuda, metal, cpu, or empty: its weights do not fit
    num_bytes: int  # bytes of the weights on that device; if they do not fit, on Metal or the CPU
    is_free: bool  # whether that much memory is free now

    def __str__(self) -> str:
        name = {"cuda": "GPU", "metal": "GPU", "cpu": "CPU"}.get(self.device)
        if name is None:
            return f"too large: {memory_size(self.num_bytes)} of weights"
        return name if self.is_free else f"{name}, once {memory_size(self.num_bytes)} are free"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, as far as they decide where it runs."""

    counts: Mapping[str, int]  # by type
    has_experts: bool = False  # most of them are those of experts
    has_sigmoids: bool = False  # which are chosen by sigmoids
    mlx_bytes: int | None = None  # of a model that runs with mlx-lm, if at all: it keeps them as they are in the files

    @classmethod
    def of(cls, checkpoint: Checkpoint, path: Path) -> Weights:
        spec = checkpoint.spec
        counts: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            counts[tensor.type.value] += math.prod(tensor.shape)
        return cls(counts, spec.has_experts, spec.has_sigmoids, weight_bytes(path) if needs_mlx(spec) else None)


def read_memory() -> Memory:
    gpus = gpu_memory() if has_nvidia() or has_metal() else []
    gpu_total, gpu_free = max(gpus, default=(0, 0))
    return Memory(
        total_bytes(), available_bytes(), gpu_total, gpu_free, has_metal(), has_fp8=not has_nvidia() or has_fp8()
    )


def free_disk_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which may not exist yet."""
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    return shutil.disk_usage(existing).free


def fit(model: Weights, memory: Memory) -> Fit:
    """Where a model runs: with Metal only on the GPU, else on an NVIDIA GPU if it fits, else on the CPU."""
    if memory.has_metal:
        decoded = _num_bytes(model.counts, METAL_BITS, OTHER_METAL_BITS)
        num_bytes = decoded if model.mlx_bytes is None else model.mlx_bytes
        return _fit_into("metal", num_bytes, memory.gpu_total, memory.gpu_free)
    if model.mlx_bytes is not None:
        return _fit_into("cpu", model.mlx_bytes, memory.cpu_total, memory.cpu_free)
    bits = SIGMOID_GPU_BITS if model.has_sigmoids else EXPERT_GPU_BITS if model.has_experts else GPU_BITS
    if not memory.has_fp8:  # they are decoded when they are loaded
        bits = {**bits, "FP8": OTHER_GPU_BITS}
    on_gpu = _fit_into("cuda", _num_bytes(model.counts, bits, OTHER_GPU_BITS), memory.gpu_total, memory.gpu_free)
    if memory.gpu_total and on_gpu.device:
        return on_gpu
    return _fit_into("cpu", _num_bytes(model.counts, CPU_BITS, OTHER_CPU_BITS), memory.cpu_total, memory.cpu_free)


def _fit_into(device: str, num_bytes: int, total: int, free: int) -> Fit:
    fits = num_bytes <= total * SPARE
    return Fit(device if fits else "", num_bytes, fits and num_bytes <= free * SPARE)


def _num_bytes(counts: Mapping[str, int], bits: Mapping[str, float], other_bits: float) -> int:
    return int(sum(count * bits.get(kind, other_bits) for kind, count in counts.items()) / 8)


# Backends


def find_backend_problem(unsupported: str, config: Mapping[str, Any] | None = None) -> str:
    """Return why `--backend auto` does not run a model; empty: it may run it.

    `unsupported` is `ModelSpec.unsupported`. `config` holds the contents of config.json, if there is one: transformers
    may run the model. Asking transformers takes seconds.
    """
    if not unsupported:
        return ""
    if choose_backend(EngineConfig()) == "mlx":
        return "" if config is None else find_mlx_problem(config.get("model_type"))
    problem = "" if config is None else find_transformers_problem(config)
    if config is not None and not problem:
        return ""
    if problem and problem in unsupported:  # layers that no backend runs
        return unsupported
    has_mlx = config is None or not find_mlx_problem(config.get("model_type"))
    hint = mlx_hint() if has_mlx else ""
    return f"{unsupported}{f'; {problem}' if problem else transformers_hint()}{hint}"


def needs_mlx(spec: ModelSpec) -> bool:
    """Return whether a model runs with mlx-lm, if at all: transformers runs weights of 16 bits on other backends."""
    return bool(spec.unsupported) and (spec.quantization not in DTYPES or choose_backend(EngineConfig()) == "mlx")


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return config.json of a model folder; None for a file, or if it cannot be read."""
    try:
        return read_json(member(path, "config.json")) if path.is_dir() else None
    except QuireError:
        return None
