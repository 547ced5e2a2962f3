"""An engine of one shape, driven directly: token ids in, steps until all requests are done."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import Scale, Workload, first_turn_of_tree, next_turn_of_tree, write_shape
from harness import say

from quire.bench.driver import Session, Track
from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.composition import EngineConfig, make_engine, make_scheduler
from quire.engine.engine import Engine
from quire.engine.process import calm_collector

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
class Run:
    wall_s: float
    tracks: list[Track]
    num_steps: int

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

    def uncached_engine(self) -> Engine:
        """Return a scheduler over the same weights without prefix cache. Only one of the two may have requests."""
        runner = self.engine.runner
        return Engine(runner, make_scheduler(runner, replace(self.config, enable_prefix_caching=False)))

    def run(self, workload: Workload, engine: Engine | None = None, *, keeps_cache: bool = False) -> Run:
        """Run from the first request to the last token."""
        engine = engine or self.engine
        if not keeps_cache:
            engine.clear_cache()
        session = Session(engine, self.next_id)
        num_steps = 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        for prompt, sampling in zip(workload.prompts, workload.samplings, strict=True):
            session.add(prompt, sampling)
        while engine.has_work:
            session.step()
            num_steps += 1
        run = Run(time.perf_counter() - started_s, list(session.tracks.values()), num_steps)
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
        tracks = [track for run in runs for track in run.tracks]
        return Run(sum(run.wall_s for run in runs), tracks, sum(run.num_steps for run in runs))


@contextmanager
def loaded(
    shape: str, scale: Scale, config: EngineConfig, folder: Path, num_layers: int | None = None
) -> Iterator[Machine]:
    """A machine whose graphs are captured. Frees everything, so that the card is empty for the next shape."""
    machine = Machine(shape, scale, config, folder, num_layers)
    try:
        started_s, num_graphs = time.perf_counter(), 0
        while machine.engine.runner.prepare():
            num_graphs += 1
        prepared_s = time.perf_counter() - started_s
        facts, num_blocks = machine.engine.runner.facts(), machine.engine.capacity.num_blocks
        say(
            f"{shape}: loaded in {machine.loaded_s:.1f} s; {num_blocks} blocks, {facts.kv_bytes / 1e9:.1f} GB;"
            f" {num_graphs} graphs in {prepared_s:.1f} s"
        )
        yield machine
    finally:
        machine.engine.close()
        del machine.engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
