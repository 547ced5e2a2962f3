"""An engine over a model of `transformers` that is already loaded."""

from __future__ import annotations

from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.transformers_model import TransformersModel
from quire.backends.torch.runner import TorchRunner
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine
from tests.backends.torch.rig import Rig


class ModelRig(Rig):
    def __init__(
        self, model: TransformersModel, *, max_model_len: int = 256, num_blocks: int = 64, block_size: int = 16
    ) -> None:
        config = EngineConfig(backend="torch", num_blocks=num_blocks, max_num_seqs=8, threads=1, block_size=block_size)
        store = KVStore(model.kv_spec, num_blocks, block_size, model.dtype, model.device)
        runner = TorchRunner(model, store, max_num_seqs=8, max_model_len=max_model_len)
        self.use(Engine(runner, make_scheduler(runner, config)), config)
