"""quire, measured in its own process: token ids into an engine, greedy tokens out.

python benchmarks/cpu_ours.py '{"kind": "decode", "model": "x.gguf", "num_threads": 2, "num_clients": 8}'
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_task
from cpu_task import SLACK_TOKENS, Task

from quire.core.cache import BLOCK_SIZE
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.engine.process import calm_collector


class Machine:
    def __init__(self, task: Task) -> None:
        config = EngineConfig(
            threads=task.num_threads,
            max_num_seqs=task.num_clients,
            max_model_len=task.context,
            num_blocks=task.num_clients * -(-task.context // BLOCK_SIZE) + 1,  # all clients at full length
            **task.settings,
        )
        self.engine: Engine = make_engine(Path(task.model), config)
        self.vocab_size = self.engine.capacity.vocab_size
        self._max_tokens = task.output_tokens + SLACK_TOKENS
        self._num_requests = 0
        self._running: set[int] = set()
        calm_collector()  # as a worker does

    def read(self, tokens: list[int]) -> int:
        self._add(tokens, 1)
        outputs: list[EngineOutput] = []
        while not outputs:
            outputs = self._step()
        return outputs[0].num_cached_tokens

    def begin(self, prompts: Sequence[list[int]]) -> None:
        self._running = {self._add(tokens, self._max_tokens) for tokens in prompts}
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._step() if output.tokens}

    def step(self) -> None:
        num_tokens = sum(len(output.tokens) for output in self._step())
        if num_tokens != len(self._running):
            raise RuntimeError(f"a step returned {num_tokens} tokens for {len(self._running)} clients")

    def clear(self) -> None:
        for request_id in self._running:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self._step()
        self.engine.clear_cache()

    def facts(self) -> dict[str, Any]:
        facts = self.engine.runner.facts()
        return {"backend": facts.backend, "dtype": facts.dtype, "threads": facts.num_threads}

    def _add(self, tokens: list[int], max_tokens: int) -> int:
        self._num_requests += 1
        self.engine.add(
            self._num_requests, GenerationRequest.of(tokens, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        )
        return self._num_requests

    def _step(self) -> list[EngineOutput]:
        outputs = self.engine.step()
        if error := next((output.error for output in outputs if output.error is not None), None):
            raise RuntimeError(error)
        return outputs


if __name__ == "__main__":
    cpu_task.run(Machine, {})
