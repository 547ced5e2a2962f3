"""The usable share of a machine, read from files and programs that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.backends import machine


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "VM_STAT", (str(tmp_path / "vm_stat"),))
    monkeypatch.setattr(machine, "SYSCTL", (str(tmp_path / "sysctl"),))
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
    assert machine.available_bytes() == machine.total_bytes() // 2


def write_program(path: Path, output: str, code: int = 0) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\nexit {code}\n")
    path.chmod(0o755)


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                     9436.
Pages active:                                 774260.
Pages inactive:                               915780.
Pages speculative:                              1639.
Pages throttled:                                   0.
Pages wired down:                             184732.
Pages purgeable:                               22877.
"Translation faults":                       37287533.
Pages copy-on-write:                         5732353.
File-backed pages:                           1021174.
Anonymous pages:                              670505.
Pages stored in compressor:                   371034.
"""


def test_available_memory_of_a_mac_is_read_from_vm_stat(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "meminfo").unlink()
    monkeypatch.setattr(machine, "total_bytes", lambda: 32 << 30)
    write_program(files / "vm_stat", VM_STAT)
    assert machine.available_bytes() == (9436 + 915780 + 1639) * 16384
    monkeypatch.setattr(machine, "total_bytes", lambda: 8 << 30)  # more than there is cannot be free
    assert machine.available_bytes() == 8 << 30


@pytest.mark.parametrize(("output", "code"), [("", 0), ("no statistics\n", 0), (VM_STAT, 1)])
def test_other_output_of_vm_stat_is_ignored(
    output: str, code: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "meminfo").unlink()
    monkeypatch.setattr(machine, "total_bytes", lambda: 16 << 30)
    write_program(files / "vm_stat", output, code)
    assert machine.available_bytes() == 8 << 30


def test_the_gpu_of_a_mac_may_use_a_share_of_the_memory(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16, 32 and 96 GiB are what Metal reports on such machines: 10922, 21845 and 73728 MiB."""
    shares = {total: machine.metal_limit_bytes(total << 30) >> 20 for total in (16, 32, 96)}
    assert shares == {16: 10922, 32: 21845, 96: 73728}
    write_program(files / "sysctl", "0\n")  # its default
    assert machine.metal_limit_bytes(96 << 30) == 72 << 30
    write_program(files / "sysctl", "80000\n")  # chosen by the owner
    assert machine.metal_limit_bytes(96 << 30) == 80000 << 20
    monkeypatch.setattr(machine, "has_metal", lambda: True)
    monkeypatch.setattr(machine, "total_bytes", lambda: 96 << 30)
    assert machine.gpu_memory() == [(80000 << 20, 8000 * 1024)]  # no more is free than the machine has


def test_metal_needs_an_apple_chip_and_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_apple_silicon", lambda: True)
    assert machine.has_metal()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlx_lm" else object())
    assert not machine.has_metal()
    monkeypatch.undo()
    monkeypatch.setattr(machine, "is_apple_silicon", lambda: False)
    assert not machine.has_metal()


def test_default_threads_are_omp_num_threads_or_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    for value, expected in (("3", 3), ("64", 8), ("2,1", 2), ("0", 8), ("x", 8), ("", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert machine.default_threads() == expected
    monkeypatch.undo()
    assert machine.usable_cores() >= 1
