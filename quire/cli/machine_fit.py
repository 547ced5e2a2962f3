"""Whether a model fits into the memory of this machine: an estimate from the number and type of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.backends.machine import available_bytes, gpu_memory, has_fp8, has_metal, has_nvidia, total_bytes
from quire.sizes import memory_size
from quire.weights.gguf import BLOCKS

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


def read_memory() -> Memory:
    gpus = gpu_memory() if has_nvidia() or has_metal() else []
    gpu_total, gpu_free = max(gpus, default=(0, 0))
    return Memory(
        total_bytes(), available_bytes(), gpu_total, gpu_free, has_metal(), has_fp8=not has_nvidia() or has_fp8()
    )


def count_weights(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Weights by type, from their bytes in files."""
    return {kind: int(size * 8 / FILE_BITS[kind]) for kind, size in num_bytes.items()}


def fit(weights: Mapping[str, int], memory: Memory, *, has_experts: bool = False, has_sigmoids: bool = False) -> Fit:
    """Where a model runs. `weights`: how many it has of each type.

    `has_experts`: most of them are those of experts; `has_sigmoids`: which are chosen by sigmoids.
    """
    if memory.has_metal:
        return fit_mlx(_num_bytes(weights, METAL_BITS, OTHER_METAL_BITS), memory)
    bits = SIGMOID_GPU_BITS if has_sigmoids else EXPERT_GPU_BITS if has_experts else GPU_BITS
    if not memory.has_fp8:  # they are decoded when they are loaded
        bits = {**bits, "FP8": OTHER_GPU_BITS}
    on_gpu = _num_bytes(weights, bits, OTHER_GPU_BITS)
    if memory.gpu_total and on_gpu <= memory.gpu_total * SPARE:
        return Fit("cuda", on_gpu, on_gpu <= memory.gpu_free * SPARE)
    return _fit_cpu(_num_bytes(weights, CPU_BITS, OTHER_CPU_BITS), memory)


def fit_mlx(num_bytes: int, memory: Memory) -> Fit:
    """Where the mlx backend runs a model whose weights take this much memory: with Metal, only on the GPU."""
    if not memory.has_metal:
        return _fit_cpu(num_bytes, memory)
    if num_bytes > memory.gpu_total * SPARE:
        return Fit("", num_bytes, False)
    return Fit("metal", num_bytes, num_bytes <= memory.gpu_free * SPARE)


def _fit_cpu(num_bytes: int, memory: Memory) -> Fit:
    if num_bytes > memory.cpu_total * SPARE:
        return Fit("", num_bytes, False)
    return Fit("cpu", num_bytes, num_bytes <= memory.cpu_free * SPARE)


def _num_bytes(weights: Mapping[str, int], bits: Mapping[str, float], other_bits: float) -> int:
    return int(sum(count * bits.get(kind, other_bits) for kind, count in weights.items()) / 8)
