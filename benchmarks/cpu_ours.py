"""quire, measured in its own process: token ids into an engine, greedy tokens out.

python benchmarks/cpu_ours.py '{"kind": "decode", "model": "x.gguf", "num_threads": 2, "num_clients": 8}'
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import cpu_child
from cpu_child import SLACK_TOKENS, Task

from quire.core.cache.block import BLOCK_SIZE
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine, EngineOutput
from quire.engine.tuning import calm_collector

WARM_UP = -1  # number of the warm-up request
WARM_UP_TOKENS = 16


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
        calm_collector()  # as a worker does

    def warm_up(self) -> None:
        self.add(WARM_UP, WARM_UP_TOKENS, 4)
        while self.engine.has_work:
            self.step()
        self.engine.clear_cache()

    def add(self, number: int, num_tokens: int, max_tokens: int, head: list[int] | None = None) -> None:
        tokens = [*(head or ()), *cpu_child.prompt(number, num_tokens, self.vocab_size)]
        self.engine.add(number, tokens, SamplingParams(temperature=0.0, max_tokens=max_tokens))

    def step(self) -> list[EngineOutput]:
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        return outputs

    def first_token_s(self) -> tuple[float, int]:
        """Run until the only request has its one-token answer. Return the seconds and the number of cached tokens."""
        started_s = time.perf_counter()
        while True:
            for output in self.step():
                if output.tokens:
                    return time.perf_counter() - started_s, output.num_cached_tokens

    def findings(self, value: float, **more: Any) -> dict[str, Any]:
        facts = self.engine.runner.facts()
        return {
            "value": value,
            **more,
            "memory": cpu_child.memory(facts.weight_bytes, facts.kv_bytes),
            "facts": {"backend": facts.backend, "dtype": facts.dtype, "threads": facts.num_threads},
        }


def decode(task: Task) -> dict[str, Any]:
    """Measure tokens per second of all clients together, over the steps in which all of them decode."""
    machine = Machine(task)
    machine.warm_up()
    waiting = set(range(task.num_clients))
    started_s = time.perf_counter()
    for number in waiting:
        machine.add(number, task.prompt_tokens, task.output_tokens + SLACK_TOKENS)
    while waiting:
        waiting -= {output.request_id for output in machine.step() if output.tokens}
    begun_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(task.output_tokens):
        num_tokens = sum(len(output.tokens) for output in machine.step())
        if num_tokens != task.num_clients:
            raise RuntimeError(f"a step returned {num_tokens} tokens for {task.num_clients} clients")
    ended_s, used_s = time.perf_counter(), time.process_time() - used_s
    return machine.findings(
        task.num_clients * task.output_tokens / (ended_s - begun_s),
        tokens_per_cpu_s=task.num_clients * task.output_tokens / used_s,
        prompts_tokens_per_s=task.num_clients * task.prompt_tokens / (begun_s - started_s),
    )


def prefill(task: Task) -> dict[str, Any]:
    """Measure prompt tokens per second, one prompt at a time."""
    machine = Machine(task)
    machine.warm_up()
    took_s = []
    for number in range(task.repeats):
        machine.add(number, task.prompt_tokens, 1)
        took_s.append(machine.first_token_s()[0])
        machine.engine.clear_cache()
    return machine.findings(task.prompt_tokens / statistics.median(took_s))


def prefix(task: Task) -> dict[str, Any]:
    """Measure milliseconds to the first token of a request whose prefix is cached."""
    machine = Machine(task)
    machine.warm_up()
    head = cpu_child.prompt(0, task.prompt_tokens, machine.vocab_size)
    machine.add(1, task.tail_tokens, 1, head)
    cold_s = machine.first_token_s()[0]
    took_s = []
    for number in range(2, 2 + task.repeats):
        machine.add(number, task.tail_tokens, 1, head)
        one_s, num_cached = machine.first_token_s()
        if num_cached < task.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE:
            raise RuntimeError(f"only {num_cached} of {task.prompt_tokens} tokens came from the cache")
        took_s.append(one_s)
    return machine.findings(1e3 * statistics.median(took_s), cold_ms=1e3 * cold_s)


def start(task: Task) -> dict[str, Any]:
    """Generate one token. The parent measures the time."""
    machine = Machine(task)
    machine.add(0, task.prompt_tokens, 1)
    machine.first_token_s()
    cpu_child.report(cpu_child.FIRST_TOKEN)
    return machine.findings(0.0)


if __name__ == "__main__":
    cpu_child.run({"decode": decode, "prefill": prefill, "prefix": prefix, "start": start})
