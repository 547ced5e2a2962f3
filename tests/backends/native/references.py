"""`transformers` with the weights as the native backend rounded them, and keys and values in fp16 as in its pool.

The remaining difference is the rounding of inputs, which `exact` does to 16 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.weights.checkpoint import TensorType
from tests.backends.native.matrices import floats
from tests.backends.torch.families import Reference


def _half_cache(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward(module, query, key.half().float(), value.half().float(), *rest, **named)


class RoundedReference(Reference):
    """The file holds the original weights; the reference model holds the weights after packing."""

    def __init__(self, name: str, folder: Path, seed: int = 0, **changes: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface  # imported here: it takes seconds
        from transformers.masking_utils import eager_mask

        super().__init__(name, folder, seed, **changes)
        for parameter in self.model.parameters():
            if parameter.dim() == 2:
                parameter.data = torch.from_numpy(floats(parameter.data.numpy(), TensorType.F32).unpack().copy())
        AttentionInterface.register("half_cache", _half_cache)
        AttentionMaskInterface.register("half_cache", eager_mask)
        self.model.set_attn_implementation("half_cache")
