"""Models of the hub that quire runs, for `quire models`: families it supports, in file types it reads.

Sizes are of the download, rounded. A GGUF in 4 bits is for a CPU, a folder in 16 bits for an NVIDIA GPU, and a folder
in MLX's 4 bits for Apple silicon.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cli.machine_fit import FILE_BITS, MLX_4BIT, MLX_FILE_BITS, Fit, Memory, fit

AGENT_CONTEXT = 32_768  # tokens; coding agents such as Claude Code send prompts of this order


@dataclass(frozen=True, slots=True)
class Suggestion:
    name: str  # for `quire pull`
    family: str
    parameters: str
    type: str  # of most weights
    size_gb: float
    max_model_len: int

    @property
    def size_bytes(self) -> int:
        return int(self.size_gb * 1e9)

    @property
    def weights(self) -> dict[str, int]:
        return {self.type: int(self.size_bytes * 8 / {**FILE_BITS, **MLX_FILE_BITS}[self.type])}


SUGGESTIONS = (
    Suggestion("Qwen/Qwen3-0.6B-GGUF:Q8_0", "qwen3", "0.6B", "Q8_0", 0.64, 40_960),
    Suggestion("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", "gemma3", "1B", "Q4_K", 0.81, 32_768),
    Suggestion("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "llama", "1B", "Q4_K", 0.81, 131_072),
    Suggestion("Qwen/Qwen3-1.7B-GGUF:Q8_0", "qwen3", "1.7B", "Q8_0", 1.8, 40_960),
    Suggestion("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "llama", "3B", "Q4_K", 2.0, 131_072),
    Suggestion("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "gemma3", "4B", "Q4_K", 2.5, 131_072),
    Suggestion("bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M", "phi3", "4B", "Q4_K", 2.5, 131_072),
    Suggestion("unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M", "qwen3", "4B", "Q4_K", 2.5, 262_144),
    Suggestion("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "qwen2", "7B", "Q4_K", 4.7, 32_768),
    Suggestion("Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen3", "8B", "Q4_K", 5.0, 40_960),
    Suggestion("Qwen/Qwen3-14B-GGUF:Q4_K_M", "qwen3", "14B", "Q4_K", 9.0, 40_960),
    Suggestion("Qwen/Qwen3-0.6B", "qwen3", "0.6B", "BF16", 1.5, 40_960),
    Suggestion("Qwen/Qwen3-4B-Instruct-2507", "qwen3", "4B", "BF16", 8.0, 262_144),
    Suggestion("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2", "7B", "BF16", 15.2, 32_768),
    Suggestion("Qwen/Qwen3-8B", "qwen3", "8B", "BF16", 16.4, 40_960),
    Suggestion("Qwen/Qwen3-14B", "qwen3", "14B", "BF16", 29.5, 40_960),
    Suggestion("Qwen/Qwen3-32B", "qwen3", "32B", "BF16", 65.5, 40_960),
    Suggestion("mlx-community/Qwen3-0.6B-4bit", "qwen3", "0.6B", MLX_4BIT, 0.34, 40_960),
    Suggestion("mlx-community/Llama-3.2-1B-Instruct-4bit", "llama", "1B", MLX_4BIT, 0.70, 131_072),
    Suggestion("mlx-community/Qwen3-1.7B-4bit", "qwen3", "1.7B", MLX_4BIT, 0.97, 40_960),
    Suggestion("mlx-community/Llama-3.2-3B-Instruct-4bit", "llama", "3B", MLX_4BIT, 1.8, 131_072),
    Suggestion("mlx-community/Phi-4-mini-instruct-4bit", "phi3", "4B", MLX_4BIT, 2.2, 131_072),
    Suggestion("mlx-community/Qwen3-4B-Instruct-2507-4bit", "qwen3", "4B", MLX_4BIT, 2.3, 262_144),
    Suggestion("mlx-community/Qwen2.5-Coder-7B-Instruct-4bit", "qwen2", "7B", MLX_4BIT, 4.3, 32_768),
    Suggestion("mlx-community/Qwen3-8B-4bit", "qwen3", "8B", MLX_4BIT, 4.6, 40_960),
    Suggestion("mlx-community/Qwen3-14B-4bit", "qwen3", "14B", MLX_4BIT, 8.3, 40_960),
    Suggestion("mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", "qwen3_moe", "30B", MLX_4BIT, 17.2, 262_144),
    Suggestion("mlx-community/Qwen3-32B-4bit", "qwen3", "32B", MLX_4BIT, 18.4, 40_960),
)
KINDS = {"cuda": ("BF16",), "metal": (MLX_4BIT,), "cpu": ("Q8_0", "Q4_K")}  # types that are suggested for a device


def suggest(memory: Memory, local_names: set[str]) -> list[tuple[Suggestion, Fit]]:
    """The models that fit into the free memory, smallest first; those on this machine are left out.

    With an NVIDIA GPU: folders in 16 bits. On Apple silicon: folders in MLX's 4 bits. On other machines: GGUF files.
    """
    device = memory.best_device
    local_repos = {name.partition(":")[0] for name in local_names}
    found: list[tuple[Suggestion, Fit]] = []
    for one in SUGGESTIONS:
        place = fit(one.weights, memory)
        is_here = one.name.partition(":")[0] in local_repos
        if one.type in KINDS[device] and place.device == device and place.is_free and not is_here:
            found.append((one, place))
    return sorted(found, key=lambda row: row[0].size_gb)
