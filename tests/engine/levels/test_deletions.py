"""Deletions by `quire cache` while an engine uses the folder: it must not use or write again what was deleted."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.core.check import check_scheduler
from quire.engine.engine import Engine
from quire.engine.levels.disk_store import LOOK_S, ClearWatch, mark_cleared, open_space, root_secret
from quire.engine.worker.protocol import Answered, Ask, GetStats, Stats
from tests.engine.levels.contents import FACTS, all_files, make_content
from tests.engine.levels.test_disk_store import new_store, stored_numbers, write
from tests.engine.levels.test_engine_levels import CAPACITY, Client, make
from tests.engine.levels.test_worker_levels import Script, prompt, serve
from tests.waiting import ManualClock


def command(*arguments: str, folder: Path) -> None:
    outcome = CliRunner().invoke(app, ["cache", *arguments, "--cache-dir", str(folder)])
    assert outcome.exit_code == 0, outcome.output


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """An engine with cached content on the device, in host memory and on disk. It looks at the marks in every step."""
    engine = make(tmp_path / "kv", is_late=False, host_bytes=2000, disk_files=100)
    look_always(engine)
    client = Client(Random(3), CAPACITY)
    for _ in range(12):
        client.send(engine)
        client.finish(engine)
    yield engine
    engine.close()


def look_always(engine: Engine) -> None:
    """Let time for the next look at the marks have always passed."""
    assert engine.transfers is not None
    assert engine.transfers.disk is not None
    engine.transfers.disk.watch._next_s = 0.0
    engine.transfers.disk.watch._clock = partial(next, count(1.0, LOOK_S))


def num_pieces(engine: Engine) -> list[int]:
    """Pieces on the device, in host memory, and on disk."""
    stats = engine.scheduler.cache.stats()
    return [stats.num_cached, *(level.num_pieces for level in stats.levels)]


def num_indexed(engine: Engine) -> int:
    assert engine.transfers is not None
    assert engine.transfers.disk is not None
    return len(engine.transfers.disk.index.entries)


# Marks


def test_marks(tmp_path: Path) -> None:
    clock = ManualClock()
    space = open_space(tmp_path, "m", FACTS).path
    other = open_space(tmp_path, "m", {"a": "b"}).path
    mark_cleared(tmp_path)
    watch = ClearWatch(tmp_path, space, clock)
    assert watch.look(at_once=True) is None  # cleared before
    for folder in (tmp_path, space):
        mark_cleared(folder)
        assert watch.look() is None  # it has just looked
        clock.now_s += LOOK_S
        assert watch.look() == (folder / "cleared").stat().st_mtime_ns
        os.unlink(folder / "cleared")
        assert watch.look(at_once=True) is None
    mark_cleared(other)
    assert watch.look(at_once=True) is None


def test_what_other_processes_write_after_a_clear_stays(tmp_path: Path) -> None:
    first, second = new_store(tmp_path), new_store(tmp_path)
    mark_cleared(tmp_path)
    cleared_ns = first.watch.look(at_once=True)
    assert cleared_ns is not None
    for number, later_ns in ((1, 10**9), (2, 0), (3, 10**9), (4, 0)):
        write(first if number < 3 else second, number)
        content = make_content(number)
        os.utime(first.space.file(content.kind, content.key), ns=(cleared_ns + later_ns,) * 2)
    first.clear(cleared_ns)
    assert stored_numbers(tmp_path) == [3]
    assert len(first.index.entries) == 0


# The command


@pytest.mark.parametrize("model", [(), ("--model", "model")], ids=["all", "model"])
def test_a_clear_reaches_an_engine(engine: Engine, tmp_path: Path, model: tuple[str, ...]) -> None:
    folder = tmp_path / "kv"
    assert engine.save_cache(60)
    assert len(all_files(folder)) == num_indexed(engine) > 5
    assert all(num_pieces(engine))
    command("clear", "--yes", *model, folder=folder)
    assert engine.save_cache(60)  # at the end of a server, or while it is idle
    assert num_pieces(engine) == [0, 0, 0]
    assert all_files(folder) == []
    check_scheduler(engine.scheduler)
    client = Client(Random(3), CAPACITY)
    client.send(engine)
    client.finish(engine)
    assert client.num_loaded.total() == 0
    assert engine.save_cache(60)  # saving works
    assert 0 < len(all_files(folder)) == num_indexed(engine) == num_pieces(engine)[2]


def test_a_clear_of_another_model_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    open_space(tmp_path / "kv", "other", {"a": "b"})
    assert engine.save_cache(60)
    before = num_pieces(engine)
    command("clear", "--yes", "--model", "other", folder=tmp_path / "kv")
    assert engine.save_cache(60)
    assert num_pieces(engine) == before


def test_a_worker_looks_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have slept for long."""
    monkeypatch.setattr("quire.engine.worker.worker.SAVE_AFTER_S", 1e9)
    engine = make(tmp_path / "kv", is_late=False, disk_files=100)
    look_always(engine)

    class Commanded(Script):
        def receive(self, timeout_s: float | None) -> list[Any]:
            found = super().receive(timeout_s)
            if found and isinstance(found[0], Ask):
                command("clear", "--yes", folder=tmp_path / "kv")
            return found

    def has_ended() -> bool:
        if engine.has_work:
            return False
        if not any(isinstance(one, Answered) for one in channel.sent):
            channel._orders.append(Ask(7, GetStats()))
            return False
        return True

    channel = Commanded([prompt()], has_ended)
    serve(engine, channel)
    (answer,) = [one for one in channel.sent if isinstance(one, Answered)]
    stats = msgspec.msgpack.decode(answer.result, type=Stats)
    assert stats.cache.num_cached == 0
    engine.close()


def test_folders_without_a_server_are_not_marked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command("clear", folder=tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    root_secret(tmp_path / "kv")
    command("clear", folder=tmp_path / "kv")
    assert (tmp_path / "kv" / "cleared").stat().st_mode & 0o777 == 0o600
