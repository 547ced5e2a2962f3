"""`transformers` with the weights as the native backend rounded them, and keys and values in fp16 as in its pool.

The remaining difference is the rounding of inputs, which `exact` does to 16 bits. Routers and convolutions are not
rounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.weights.checkpoint import TensorType
from tests.backends.native.matrices import floats
from tests.backends.torch.families import Reference

AMPLIFICATION = 8.0  # of rounding errors by Gemma 4, whose scores are not divided by the root of the head size
NOT_ROUNDED = (
    *("mlp.gate.weight", "feed_forward.gate.weight", "shared_expert_gate.weight", "conv1d.weight", "conv.weight"),
    *("router.weight", "router.proj.weight", "_bias"),
)

_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"{one}_proj": f"self_attn.{one}_proj" for one in "qkvo"},
    **{f"{one}_proj": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}


def llama_name(name: str) -> str:
    """Return the name that a tensor has in a Llama checkpoint of transformers."""
    *prefix, stem, ending = name.split(".")
    return ".".join((*(["model", *prefix] if prefix else []), _LLAMA_NAMES[stem], ending))


def _half_cache(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    from transformers.models.gemma2 import modeling_gemma2  # the one that knows soft caps
    from transformers.models.gpt_oss import modeling_gpt_oss  # the one that knows sinks

    attend = (modeling_gpt_oss if hasattr(module, "sinks") else modeling_gemma2).eager_attention_forward
    return attend(module, query, key.half().float(), value.half().float(), *rest, **named)


def _rounded(matrix: Tensor) -> Tensor:
    return torch.from_numpy(floats(matrix.numpy(), TensorType.F32).unpack().copy())


class RoundedReference(Reference):
    """The file holds the original weights; the reference model holds the weights after packing."""

    def __init__(self, name: str, folder: Path, seed: int = 0, **changes: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface  # imported here: it takes seconds
        from transformers.masking_utils import eager_mask

        super().__init__(name, folder, seed, **changes)
        self.amplification = AMPLIFICATION if name.startswith("gemma4") else 1.0
        matrices = [(name, one) for name, one in self.model.named_parameters() if not name.endswith(NOT_ROUNDED)]
        self.has_experts = any(parameter.dim() == 3 for _, parameter in matrices)
        is_transposed = self.model.config.model_type == "gpt_oss"
        for _, parameter in matrices:
            if parameter.dim() == 2:
                parameter.data = _rounded(parameter.data)
            elif parameter.dim() == 3 and is_transposed:  # of all experts, inputs first
                parameter.data = torch.stack([_rounded(one.T.contiguous()).T for one in parameter.data]).contiguous()
            elif parameter.dim() == 3:  # of all experts
                parameter.data = torch.stack([_rounded(one) for one in parameter.data])
        AttentionInterface.register("half_cache", _half_cache)
        AttentionMaskInterface.register("half_cache", eager_mask)
        self.model.set_attn_implementation("half_cache")
