"""Opening the levels of an engine: errors name the setting, and a start changes nothing that is stored."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.backends.fake import FakeRunner
from quire.core.values import Level, SamplingParams
from quire.engine.composition import EngineConfig, OpenedLevels, check_cache_folders, make_engine, measure_disk
from quire.engine.engine import Engine
from quire.engine.generation import GenerationParams, GenerationRequest
from quire.engine.levels.block_file import file_bytes
from quire.engine.levels.disk_store import open_space
from quire.engine.llm import LLM
from quire.errors import CacheFolderError, InvalidRequest
from tests.engine.levels.contents import FACTS, all_files, temporary_files

BLOCK_BYTES = file_bytes(4 * 32, 8 * 32)  # of the fake runner
GREEDY = GenerationParams(temperature=0, max_tokens=4, ignore_eos=True)


def fake_engine(model: Path, folder: Path, **settings: Any) -> Engine:
    given = {"num_blocks": 100, "max_model_len": 256, "disk_cache": "1M", "cache_dir": str(folder), **settings}
    return make_engine(model, EngineConfig(backend="fake", **given))


def answer(engine: Engine, prompt: list[int], max_tokens: int = 4) -> list[int]:
    engine.add(1, GenerationRequest.of(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
    return tokens


def num_stored(engine: Engine) -> int:
    (disk,) = [level for level in engine.scheduler.cache.stats().levels if level.level == Level.DISK]
    return disk.num_pieces


def test_a_start_does_not_evict(tiny_model: Path, tmp_path: Path) -> None:
    """Measurements write files. In a folder that is full they would displace what is stored."""
    folder = tmp_path / "kv"
    engine = fake_engine(tiny_model, folder, disk_cache=4 * BLOCK_BYTES)
    answer(engine, list(range(1, 4 * 32 + 1)))
    assert engine.save_cache(60)
    engine.close()
    before = [file.path for file in all_files(folder)]
    assert len(before) == 4
    for _ in range(2):
        engine = fake_engine(tiny_model, folder, disk_cache=4 * BLOCK_BYTES)
        assert num_stored(engine) == 4
        engine.close()
    assert [file.path for file in all_files(folder)] == before
    assert not temporary_files(folder)


def test_the_speed_of_a_disk(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    space = open_space(tmp_path / "kv", "model", FACTS)
    found = measure_disk(space, 100_000, 2)
    assert found is not None
    assert found.bytes_per_s > 0
    assert os.listdir(space.path) == ["facts.json"]
    os.rename(space.path, tmp_path / "gone")
    assert measure_disk(space, 100_000, 2) is None


def test_sizes_that_hold_nothing(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("host_cache", "disk_cache"):
        with pytest.raises(
            InvalidRequest, match=rf"{name} = 100 bytes is too small for this model: it needs at least 512 bytes"
        ):
            make_engine(tiny_model, replace(EngineConfig(backend="fake", num_blocks=100), **{name: 100}))  # type: ignore[arg-type]
    fake_engine(tiny_model, tmp_path / "kv", disk_cache=512).close()


def test_a_failed_start_closes_the_runner(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[FakeRunner] = []

    def close(runner: FakeRunner) -> None:
        closed.append(runner)

    monkeypatch.setattr(FakeRunner, "close", close)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match=r"the cache folder .*/file is not a folder"):
        fake_engine(tiny_model, tmp_path / "file")
    assert len(closed) == 1

    def fail(*_: object) -> None:
        raise CacheFolderError("the cache folder cannot be read")

    monkeypatch.setattr(OpenedLevels, "start", fail)
    with pytest.raises(CacheFolderError, match="cannot be read"):
        fake_engine(tiny_model, tmp_path / "kv")
    assert len(closed) == 2


def test_folders_are_checked_before_models_are_loaded(tmp_path: Path) -> None:
    """server/test_disk_cache.py has the values that are refused."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=rf"cache_dir = '{tmp_path}/file': .*is not a folder"):
        check_cache_folders([EngineConfig(disk_cache=1000, cache_dir=str(tmp_path / "file"))])
    unused = EngineConfig(cache_dir=str(tmp_path / "kv"))
    with pytest.raises(InvalidRequest, match="has no effect: set disk_cache to a size too"):
        LLM(cache_dir=str(tmp_path / "kv"))
    assert not (tmp_path / "kv").exists()
    check_cache_folders([unused, EngineConfig(disk_cache=1000, cache_dir=str(tmp_path / "kv"))])  # of two models
    assert (tmp_path / "kv" / "secret").exists()


def test_an_llm_saves_its_cache_when_it_is_closed(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_blocks": 100, "threads": 1, "disk_cache": "10M", "cache_dir": str(tmp_path / "kv")}
    prompt = list(range(1, 200))
    with LLM(tiny_model, backend="native", **settings) as llm:
        (first,) = llm.generate([prompt], GREEDY)
    assert len(all_files(tmp_path / "kv")) >= 6
    llm.close()  # no effect the second time
    with LLM(tiny_model, backend="native", **settings) as llm:
        llm.engine.scheduler.cache.levels.ns_per_token = None  # loads pay, however fast this machine computes
        (again,) = llm.generate([prompt], GREEDY)
        assert again.completions[0].token_ids == first.completions[0].token_ids
        assert again.usage.cached_tokens == 198
        llm.engine.clear_cache()
    assert all_files(tmp_path / "kv") == []


def test_a_poisoned_cache_that_cannot_be_deleted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on: the files are not used by this process, and the operator is told."""
    engine = fake_engine(tiny_model, tmp_path / "kv")
    answer(engine, list(range(1, 100)))
    assert engine.save_cache(60)
    assert num_stored(engine) > 0

    def refuse(_: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        engine.drop_cache()
        with pytest.raises(CacheFolderError, match="not all files of"):
            engine.clear_cache()
    assert "the cache was cleared, but not all files of" in caplog.text
    assert num_stored(engine) == 0
    assert len(answer(engine, list(range(1, 100)))) == 4
    engine.close()
