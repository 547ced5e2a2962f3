"""The usable share of a machine, read from files that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.backends import machine


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    return tmp_path


def test_available_memory_is_read_from_meminfo(files: Path) -> None:
    assert machine.available_bytes() == 8000 * 1024
    (files / "memory.max").write_text("max\n")
    (files / "memory.current").write_text("5\n")
    assert machine.available_bytes() == 8000 * 1024


def test_a_container_limit_applies_and_file_pages_do_not_count(files: Path) -> None:
    (files / "memory.max").write_text("1000000\n")
    (files / "memory.current").write_text("900000\n")
    assert machine.available_bytes() == 100_000
    (files / "memory.stat").write_text("anon 100000\ninactive_file 700000\nactive_file 50000\n")
    assert machine.available_bytes() == 850_000


def test_without_meminfo_half_of_the_memory_is_available(files: Path) -> None:
    (files / "meminfo").unlink()
    assert machine.available_bytes() > 1 << 20


def test_default_threads_are_omp_num_threads_or_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    for value, expected in (("3", 3), ("64", 8), ("2,1", 2), ("0", 8), ("x", 8), ("", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert machine.default_threads() == expected
    monkeypatch.undo()
    assert machine.usable_cores() >= 1
