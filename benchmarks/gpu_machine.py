"""An engine of one shape, driven directly: token ids in, steps until all requests are done."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import Scale, Workload, first_turn_of_tree, next_turn_of_tree, write_shape

from quire.bench.driver import Session, Track
from quire.core.step import StepPlan
from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.composition import EngineConfig, make_engine, make_scheduler
from quire.engine.engine import Engine
from quire.engine.worker.garbage_collection import calm_collector

ONE = SamplingParams(temperature=0, max_tokens=1)


def engine_config(scale: Scale, device: str = "auto", **settings: Any) -> EngineConfig:
    config = EngineConfig(
        device=device,
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=scale.max_num_seqs,
        max_model_len=scale.max_model_len,
        enable_drafts=False,  # models with random weights repeat themselves, which would count as speed
    )
    return replace(config, **settings)


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
    tracks: list[Track]
    steps: list[StepRecord]

    @property
    def num_out(self) -> int:
        return sum(len(track.tokens) for track in self.tracks)

    @property
    def num_cached(self) -> int:
        return sum(track.num_cached_tokens for track in self.tracks)

    @property
    def tokens_per_s(self) -> float:
        return self.num_out / self.wall_s


class Machine:
    """One model on the device, and the engine over it."""

    def __init__(
        self, shape: str, scale: Scale, config: EngineConfig, folder: Path, num_layers: int | None = None
    ) -> None:
        self.scale = scale
        self.config = config
        self.spec = write_shape(shape, scale, folder, num_layers)
        started_s = time.perf_counter()
        self.engine = make_engine(folder, config)
        self.loaded_s = time.perf_counter() - started_s
        self.next_id = itertools.count().__next__
        calm_collector()  # as a worker does

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
        on_step: Callable[[int], None] = lambda _number: None,
        *,
        keeps_cache: bool = False,
    ) -> Run:
        """Run from the first request to the last token. `on_step` is called with the number of each step before it."""
        engine = engine or self.engine
        if not keeps_cache:
            engine.clear_cache()
        steps: list[StepRecord] = []

        def note(plan: StepPlan) -> None:
            steps.append(StepRecord(len(plan.slices), plan.num_tokens))

        engine.on_plan = note
        session = Session(engine, self.next_id)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        for prompt, sampling in zip(workload.prompts, workload.samplings, strict=True):
            session.add(prompt, sampling)
        while engine.has_work:
            on_step(len(steps))
            session.step()
            steps[-1].done_s = time.perf_counter() - started_s
        run = Run(time.perf_counter() - started_s, list(session.tracks.values()), steps)
        if run.num_out != workload.num_out:
            raise RuntimeError(f"{workload.name}: {run.num_out} tokens were generated, not {workload.num_out}")
        return run

    def send(self, prompt: list[int], *, keeps_cache: bool = True) -> tuple[float, Track]:
        """Return the milliseconds to an answer of one token. A server packs prompts in another process."""
        packed: Any = PackedPrompt.of(prompt)
        run = self.run(Workload("send", [packed], [ONE]), keeps_cache=keeps_cache)
        return 1e3 * run.wall_s, run.tracks[0]

    def run_tree(self) -> Run:
        """Run all turns of workload T, one after the other."""
        turn = first_turn_of_tree(self.scale)
        runs = [self.run(turn)]
        for number in range(2, self.scale.t_turns + 1):
            histories = [[*one, *track.tokens] for one, track in zip(turn.prompts, runs[-1].tracks, strict=True)]
            turn = next_turn_of_tree(self.scale, number, histories)
            runs.append(self.run(turn, keeps_cache=True))
        tracks, steps = [track for run in runs for track in run.tracks], [step for run in runs for step in run.steps]
        return Run(sum(run.wall_s for run in runs), tracks, steps)


@contextmanager
def loaded(
    shape: str, scale: Scale, config: EngineConfig, folder: Path, num_layers: int | None = None
) -> Iterator[Machine]:
    """A machine whose graphs are captured. Frees everything, so that the card is empty for the next shape."""
    machine = Machine(shape, scale, config, folder, num_layers)
    try:
        graphs_s = machine.prepare()
        facts, num_blocks = machine.engine.runner.facts(), machine.engine.capacity.num_blocks
        print(
            f"{shape}: loaded in {machine.loaded_s:.1f} s; {num_blocks} blocks, {facts.kv_bytes / 1e9:.1f} GB;"
            f" {len(graphs_s)} graphs in {sum(graphs_s):.1f} s, longest {max(graphs_s, default=0.0):.2f} s",
            flush=True,
        )
        yield machine
    finally:
        machine.engine.close()
        del machine.engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
