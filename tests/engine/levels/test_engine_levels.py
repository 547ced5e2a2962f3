"""The engine with real levels on a fake runner: under evictions, loads, clears and restarts, answers stay right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, run_alone
from quire.core.check import check_scheduler
from quire.core.values import NS_PER_S, Level, SamplingParams
from quire.engine.composition import EngineConfig, OpenedLevels, make_scheduler
from quire.engine.engine import Engine
from quire.engine.generation import GenerationRequest
from tests.engine.levels.contents import all_files
from tests.restart import patient_loads

CAPACITY = Capacity(num_blocks=24, block_size=4, max_num_seqs=4, max_model_len=60, vocab_size=50)
HYBRID = replace(CAPACITY, window=6, num_window_blocks=24, num_states=24)
GREEDY = SamplingParams(temperature=0, max_tokens=3)


def make(
    folder: Path,
    capacity: Capacity = CAPACITY,
    *,
    is_late: bool,
    seed: int = 0,
    host_bytes: int = 0,
    disk_files: int = 0,
) -> Engine:
    """Make an engine over a new runner. `disk_files`: about as many blocks fit into the folder."""
    runner = FakeRunner(capacity, is_late=is_late, seed=seed)
    config = EngineConfig(max_chunk_tokens=8, host_cache=host_bytes, disk_cache=disk_files * 250, cache_dir=str(folder))
    levels = OpenedLevels(config, runner, "model", lambda: "digest")
    scheduler = make_scheduler(runner, config, levels=levels)
    levels.start(scheduler.cache.levels)
    return Engine(runner, scheduler, transfers=levels.transfers)


class Client:
    """Sends requests with common prefixes, and checks their answers."""

    def __init__(self, random: Random, capacity: Capacity) -> None:
        self._random = random
        self._capacity = capacity
        self._heads = [[random.randrange(50) for _ in range(40)] for _ in range(4)]
        self._num_sent = 0
        self._prompts: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}
        self.num_answers = 0
        self.num_loaded: Counter[Level] = Counter()

    @property
    def num_open(self) -> int:
        return len(self._prompts)

    def send(self, engine: Engine) -> None:
        head = self._random.choice(self._heads)
        tail = [self._random.randrange(50) for _ in range(self._random.randrange(8))]
        prompt = [*head[: self._random.randrange(1, 40)], *tail]
        self._num_sent += 1
        self._prompts[self._num_sent], self._answers[self._num_sent] = prompt, []
        engine.add(self._num_sent, GenerationRequest.of(prompt, GREEDY))

    def cancel(self, engine: Engine) -> None:
        for request_id in self._random.sample(sorted(self._prompts), min(1, len(self._prompts))):
            assert engine.cancel(request_id)
            del self._prompts[request_id]

    def step(self, engine: Engine) -> None:
        for output in engine.step():
            assert output.error is None, output.error
            if output.cache is not None and output.cache.source is not None:
                self.num_loaded[output.cache.source] += output.cache.num_loaded_tokens
            self._answers[output.request_id] += output.tokens
            if output.finish_reason is not None:
                self._check(output.request_id)

    def _check(self, request_id: int) -> None:
        capacity = self._capacity
        expected = run_alone(
            self._prompts.pop(request_id),
            GREEDY,
            3,
            block_size=4,
            vocab_size=50,
            window=capacity.window,
            has_states=bool(capacity.num_states),
        )
        assert self._answers[request_id] == expected
        self.num_answers += 1

    def finish(self, engine: Engine) -> None:
        while engine.has_work:
            self.step(engine)
        assert not self._prompts


@pytest.mark.parametrize("capacity", [CAPACITY, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize(("is_late", "has_overlap"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right(tmp_path: Path, seed: int, is_late: bool, has_overlap: bool, capacity: Capacity) -> None:
    random = Random(seed)
    capacity = replace(capacity, has_overlap=has_overlap)
    client = Client(random, capacity)
    for number in range(4):  # starts on the same folder
        engine = make(tmp_path / "kv", capacity, is_late=is_late, seed=seed, host_bytes=2000, disk_files=60)
        with patient_loads():
            for _ in range(150):
                action = random.random()
                if action < 0.3 and client.num_open < 8:
                    client.send(engine)
                elif action < 0.33:
                    client.cancel(engine)
                elif action < 0.335:
                    engine.clear_cache()
                elif action < 0.5 and not engine.has_work:
                    engine.idle()
                elif engine.has_work:
                    client.step(engine)
                check_scheduler(engine.scheduler)
            client.finish(engine)
        if number % 2:
            assert engine.save_cache(300)
        check_scheduler(engine.scheduler)
        engine.close()
    assert client.num_answers > 20
    assert client.num_loaded[Level.HOST] + client.num_loaded[Level.DISK] > 0


@pytest.mark.parametrize("is_late", [False, True])
def test_everything_is_saved_at_the_end(tmp_path: Path, is_late: bool) -> None:
    """With a step in flight, too: a device may copy only when no step is running."""
    capacity = replace(CAPACITY, has_overlap=True)
    engine = make(tmp_path / "kv", capacity, is_late=is_late, disk_files=100)
    client = Client(Random(0), capacity)
    for _ in range(3):
        client.send(engine)
        client.finish(engine)
    engine.add(99, GenerationRequest.of(list(range(30)), GREEDY))
    engine.step()
    assert engine.has_work
    assert engine.save_cache(300)
    num_cached = engine.scheduler.cache.stats().num_cached
    engine.close()
    assert len(all_files(tmp_path / "kv")) == num_cached > 5


def test_saving_ends_at_its_limit(tmp_path: Path) -> None:
    engine = make(tmp_path / "kv", is_late=False, disk_files=100)
    client = Client(Random(0), CAPACITY)
    client.send(engine)
    client.finish(engine)
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += NS_PER_S
        return now_ns

    engine.clock = clock
    assert not engine.save_cache(0.5)
    assert engine.save_cache(1e6)
    assert not engine.has_idle_work
    engine.close()
