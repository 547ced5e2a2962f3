"""The real model with a disk cache: answers after a restart, with damaged files, and with other weights or settings.

`python -m tests.restart` does the same with hundreds of prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.core.levels.levels import LevelStats
from quire.core.values import Level
from quire.engine.engine import Engine
from quire.engine.model_text import ModelText
from tests.engine.levels.contents import all_files
from tests.restart import Answer, Case, answer_again, answer_in_batches, compare, make_cases, open_engine

NUM_CASES = 16


class Stored(NamedTuple):
    """A folder with the cache of an engine that has ended."""

    folder: Path
    num_files: int
    cases: list[Case]
    answers: list[Answer]


def disk_stats(engine: Engine) -> LevelStats:
    (found,) = engine.scheduler.cache.stats().levels
    assert found.level == Level.DISK
    return found


@pytest.fixture(scope="module")
def stored(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("restart") / "kv"
    text = ModelText.open(default_model)
    cases = make_cases(text, NUM_CASES)
    text.close()
    assert len({len(case.prompt) for case in cases}) > 10
    assert len({case.salt for case in cases}) == 4
    engine = open_engine(default_model, folder, threads=1)
    answers = answer_in_batches(engine, cases)
    assert any(answer.cache.num_tokens for answer in answers)  # some share prefixes
    engine.close()
    return Stored(folder, len(all_files(folder)), cases, answers)


@pytest.mark.nightly
def test_answers_after_a_restart(default_model: Path, stored: Stored) -> None:
    engine = open_engine(default_model, stored.folder, threads=1)
    assert disk_stats(engine).num_pieces == stored.num_files > 50
    outcome = compare(stored.cases, stored.answers, answer_again(engine, stored.cases))
    stats = disk_stats(engine)
    engine.close()
    assert outcome.problems == []
    assert (outcome.num_prompts, outcome.num_equal, outcome.num_recomputed) == (NUM_CASES, NUM_CASES, 0)
    assert outcome.num_from_disk > 1000
    assert outcome.share_from_disk == 1
    assert (stats.num_failed_loads, stats.num_failed_saves) == (0, 0)


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {},
    "precision": {"precision": "exact"},
    "block size": {"block_size": 16},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.kept("weights")
@pytest.mark.nightly
def test_other_weights_or_settings_use_nothing_of_the_folder(
    default_model: Path, stored: Stored, tmp_path: Path, name: str
) -> None:
    path = default_model
    if name == "weights":  # one byte of the last tensor
        path = tmp_path / "other.gguf"
        data = bytearray(default_model.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
    before = {file.path for file in all_files(stored.folder)}
    engine = open_engine(path, stored.folder, threads=1, **OTHERS[name])
    assert disk_stats(engine).num_pieces == 0
    shortest = sorted(stored.cases, key=lambda case: len(case.prompt))[:2]
    answers = answer_in_batches(engine, shortest)
    engine.close()
    assert [answer.cache.num_tokens for answer in answers] == [0, 0]
    assert before < {file.path for file in all_files(stored.folder)}  # its own files are elsewhere
    if name == "weights":
        path.unlink()  # pytest would keep it
