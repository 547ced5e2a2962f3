"""The rig over the GPU runner. Without a GPU its kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.backends.torch.cuda import CudaRunner
from quire.backends.torch.fused_linear import FusedLinear, FusedPackedLinear
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from quire.weights.opening import open_checkpoint
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.rig import Rig

Change = Callable[[CudaRunner], None]


def fused_runner(
    path: Path,
    *,
    num_blocks: int = 64,
    block_size: int = 32,
    max_num_seqs: int = 8,
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    max_graph_tokens: int = 0,
    quantize_bits: int | None = None,
    is_fp8: bool = False,
) -> CudaRunner:
    checkpoint = open_checkpoint(path, load_format)
    device = torch.device(DEVICE)
    with torch.inference_mode():
        loader = WeightLoader(checkpoint, dtype, device, None, FusedLinear, FusedPackedLinear, quantize_bits)
        model = DecoderModel(loader, checkpoint.spec.max_model_len)
        kv_spec = replace(model.kv_spec, is_fp8=is_fp8)
        numbers = num_blocks if kv_spec.window else 0, 1 + 4 * max_num_seqs
        store = KVStore(kv_spec, num_blocks, block_size, dtype, device, *numbers)
        return CudaRunner(
            model,
            store,
            max_num_seqs=max_num_seqs,
            max_model_len=checkpoint.spec.max_model_len,
            max_graph_tokens=max_graph_tokens,
        )


class FusedRig(Rig):
    def __init__(self, path: Path, **settings: Any) -> None:
        self.runner = fused_runner(path, **settings)
        config = EngineConfig()
        self.use(Engine(self.runner, make_scheduler(self.runner, config)), config)
