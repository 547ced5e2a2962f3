"""Whether a model fits into the memory of this machine: an estimate from the number and type of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from quire.backends.machine import available_bytes, gpu_memory, has_nvidia, is_apple_silicon
from quire.sizes import memory_size

FILE_BITS: dict[str, float] = {  # of one weight in a file
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_1": 6,
    "Q5_0": 5.5,
    "Q5_K": 5.5,
    "Q4_1": 5,
    "Q4_0": 4.5,
    "Q4_K": 4.5,
}
CPU_BITS = {"Q4_0": 5.0, "Q4_1": 5.0, "Q4_K": 5.0}  # in memory, native backend (docs/cpu.md)
OTHER_CPU_BITS = 8.5
GPU_BITS = 16.0
SPARE = 0.85  # the share of the memory that weights may take; the rest is for the KV cache and activations


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this machine. `gpu_*` are those of the GPU with most memory; 0: there is none."""

    cpu_total: int
    cpu_free: int
    gpu_total: int = 0
    gpu_free: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a model runs: on the GPU, on the CPU, or nowhere."""

    device: str  # cuda, metal, cpu, or empty: its weights do not fit
    num_bytes: int  # bytes of the weights on that device; on the CPU if they do not fit
    is_free: bool  # whether that much memory is free now

    def __str__(self) -> str:
        name = {"cuda": "GPU", "metal": "GPU", "cpu": "CPU"}.get(self.device)
        if name is None:
            return f"too large: {memory_size(self.num_bytes)} of weights"
        return name if self.is_free else f"{name}, once {memory_size(self.num_bytes)} are free"


def read_memory() -> Memory:
    cpu_total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu_free = available_bytes()
    gpus = gpu_memory() if has_nvidia() else []
    gpu_total, gpu_free = max(gpus, default=(0, 0))
    return Memory(cpu_total, cpu_free, gpu_total, gpu_free)


def count_weights(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Weights by type, from their bytes in files."""
    return {kind: int(size * 8 / FILE_BITS[kind]) for kind, size in num_bytes.items()}


def fit(weights: Mapping[str, int], memory: Memory) -> Fit:
    """Where a model runs. `weights`: how many it has of each type."""
    on_gpu = int(sum(weights.values()) * GPU_BITS / 8)
    if memory.gpu_total and on_gpu <= memory.gpu_total * SPARE:
        return Fit("cuda", on_gpu, on_gpu <= memory.gpu_free * SPARE)
    on_cpu = int(sum(count * CPU_BITS.get(kind, OTHER_CPU_BITS) for kind, count in weights.items()) / 8)
    if on_cpu <= memory.cpu_total * SPARE:
        return Fit("cpu", on_cpu, on_cpu <= memory.cpu_free * SPARE)
    return Fit("", on_cpu, False)


def fit_mlx(num_bytes: int, memory: Memory) -> Fit:
    """Where the mlx backend runs a model. It keeps weights as they are in the files, in the memory of the CPU."""
    if num_bytes > memory.cpu_total * SPARE:
        return Fit("", num_bytes, False)
    device = "metal" if is_apple_silicon() else "cpu"
    return Fit(device, num_bytes, num_bytes <= memory.cpu_free * SPARE)
