"""`transformers` on the same card in the same run: its own continuous batching, `generate_batch`."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from gpu_workloads import QWEN, SHAPES, TINY, Scale, Workload


def run_peer(scale: Scale, workload: Workload, warm_up: Workload) -> float:
    """Return output tokens per second on Qwen3-0.6B's shape. The first call, which compiles, is not counted."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {**SHAPES[QWEN], **(TINY if scale.is_quick else {})}
    config = Qwen3Config(**{key: value for key, value in shape.items() if key not in ("architectures", "dtype")})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    try:
        _generate(model, scale, warm_up)
        started_s = time.perf_counter()
        num_tokens = _generate(model, scale, workload)
        return num_tokens / (time.perf_counter() - started_s)
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _generate(model: Any, scale: Scale, workload: Workload) -> int:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    length = workload.samplings[0].max_tokens
    settings = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32) if scale.is_quick else None
    results = model.generate_batch(workload.prompts, generation_config=settings, continuous_batching_config=small)
    num_tokens = sum(len(one.generated_tokens) for one in results.values())
    if num_tokens != workload.num_out:
        raise RuntimeError(f"transformers generated {num_tokens} tokens, not {workload.num_out}")
    return num_tokens
