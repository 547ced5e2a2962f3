"""Drives an engine of one shape: token ids in, steps until all requests are done."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch
from gpu_workloads import Scale, Workload, first_turn_of_tree, next_turn_of_tree, write_shape

from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine, make_scheduler
from quire.engine.engine import Engine, EngineOutput
from quire.engine.tuning import calm_collector


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every engine from the command line. None: the backend's default."""

    device: str = "auto"
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    kv_bytes: int | None = None
    dtype: str = "bfloat16"
    num_layers: int | None = None  # the first layers of the shape
    quantize: int | None = None  # bits
    kv_cache_dtype: str = "auto"

    def config(self, scale: Scale, **changes: object) -> EngineConfig:
        config = EngineConfig(
            device=self.device,
            dtype=self.dtype,
            load_format="dummy",
            max_num_seqs=scale.max_num_seqs,
            max_model_len=scale.max_model_len,
            max_num_batched_tokens=self.step_tokens,
            max_chunk_tokens=self.chunk_tokens,
            kv_memory=self.kv_bytes,
            quantize=self.quantize,
            kv_cache_dtype=self.kv_cache_dtype,
            enable_drafts=False,  # models with random weights repeat themselves, which would count as speed
        )
        return replace(config, **changes)  # type: ignore[arg-type]


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    tops: list[dict[int, float]] = field(default_factory=list)  # logprobs of the best tokens, if requested


@dataclass(slots=True)
class StepRecord:
    num_requests: int
    num_tokens: int
    done_s: float = 0.0  # when its call returned, since the start of the run

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens > self.num_requests


@dataclass(slots=True)
class Run:
    wall_s: float
    answers: list[Answer]
    steps: list[StepRecord]

    @property
    def num_out(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def num_cached(self) -> int:
        return sum(answer.num_cached for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_out / self.wall_s


class Machine(AbstractContextManager["Machine"]):
    """One model on the device, and the engine over it."""

    def __init__(self, shape: str, scale: Scale, settings: Settings, folder: Path) -> None:
        self.scale = scale
        self.spec = write_shape(shape, scale, folder, settings.num_layers)
        self.config = settings.config(scale)
        started_s = time.perf_counter()
        self.engine = make_engine(folder, self.config)
        self.loaded_s = time.perf_counter() - started_s
        calm_collector()  # as a worker does
        self._num_requests = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free everything, so that the card is empty for the next shape."""
        self.engine.close()
        del self.engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def prepare(self) -> list[float]:
        """Capture all graphs, as an idle server does. Return the seconds of each."""
        took_s: list[float] = []
        while True:
            started_s = time.perf_counter()
            if not self.engine.runner.prepare():
                return took_s
            took_s.append(time.perf_counter() - started_s)

    def uncached_engine(self) -> Engine:
        """Return a scheduler over the same weights without prefix cache. Only one of the two may have requests."""
        runner = self.engine.runner
        return Engine(runner, make_scheduler(runner, replace(self.config, enable_prefix_caching=False)))

    def run(
        self,
        workload: Workload,
        engine: Engine | None = None,
        on_step: Callable[[int], None] | None = None,
        *,
        keeps_cache: bool = False,
    ) -> Run:
        """Run from the first request to the last token. `on_step` is called with the number of each step before it."""
        engine = engine or self.engine
        if not keeps_cache:
            engine.clear_cache()
        steps: list[StepRecord] = []
        engine.on_plan = lambda plan: steps.append(StepRecord(len(plan.slices), plan.num_tokens))
        answers: dict[int, Answer] = {}
        _synchronize()
        started_s = time.perf_counter()
        for prompt, sampling in zip(workload.prompts, workload.samplings, strict=True):
            answers[self._add(engine, prompt, sampling)] = Answer()
        while engine.has_work:
            if on_step is not None:
                on_step(len(steps))
            for output in engine.step():
                _take(answers[output.request_id], output)
            steps[-1].done_s = time.perf_counter() - started_s
        run = Run(time.perf_counter() - started_s, list(answers.values()), steps)
        if run.num_out != workload.num_out:
            raise RuntimeError(f"{workload.name}: {run.num_out} tokens were generated, not {workload.num_out}")
        return run

    def run_tree(self) -> Run:
        """Run all turns of workload T, one after the other."""
        turn = first_turn_of_tree(self.scale)
        runs = [self.run(turn)]
        for number in range(2, self.scale.t_turns + 1):
            answers = [answer.tokens for answer in runs[-1].answers]
            histories = [prompt + answer for prompt, answer in zip(turn.prompts, answers, strict=True)]
            turn = next_turn_of_tree(self.scale, number, histories)
            runs.append(self.run(turn, keeps_cache=True))
        every = [answer for run in runs for answer in run.answers]
        return Run(sum(run.wall_s for run in runs), every, [step for run in runs for step in run.steps])

    def _add(self, engine: Engine, prompt: list[int], sampling: SamplingParams) -> int:
        self._num_requests += 1
        engine.add(self._num_requests, prompt, sampling)
        return self._num_requests


def _take(answer: Answer, output: EngineOutput) -> None:
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id} failed: {output.error}")
    answer.tokens += output.tokens
    answer.num_cached = output.num_cached_tokens
    answer.tops += [dict(entry.top) for entry in output.logprobs]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
