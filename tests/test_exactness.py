"""The check of bits (`tests.exactness`) on the native backend: it compares all conditions, and it finds mutants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import exactness
from tests.exactness import CONDITIONS, MUTANTS, Exactness, main, mutated


def run_rounds(path: Path, folder: Path, mutant: str = "", count: int = 1) -> Exactness:
    rig = Exactness(path, 3, 100, 8, backend="native", num_blocks=200, max_num_seqs=12)
    with mutated(rig.recorder.inner.model, mutant):
        rig.open_levels(folder)
        for number in range(count):
            rig.run_round(number)
    rig.close()
    return rig


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "NUM_REQUESTS", 20)


def test_bits_do_not_depend_on_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    rig = run_rounds(tiny_model, tmp_path, count=4)
    assert rig.failures == []
    assert rig.num_rows["all"] > 1500
    for name in (*CONDITIONS, "alone", "decodes", "ends of chunks", "rows of guesses"):
        assert rig.num_rows[name] > 0, name
    for name in ("cached tokens", "copied blocks", "preempted slices", "loads from disk", "rows after other tokens"):
        assert rig.events[name] > 0, name


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, tiny_model: Path, tmp_path: Path) -> None:
    rig = run_rounds(tiny_model, tmp_path, mutant)
    assert 0 < rig.num_wrong["all"] < rig.num_rows["all"]
    assert rig.failures[0].startswith("seed 3, round 0, request ")
    assert 0 < rig.largest < 1e-5


def test_the_command(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sums of PyTorch on a CPU depend on the number of rows. Rows of a prompt are compared too."""
    options = ["--model", str(tiny_model), "--longest", "100", "--tokens", "8", "--at-once", "12", "--kv-memory", "10M"]
    assert main([*options, "--rows", "100", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "rows of prompts" in shown
    assert "DIFFERENT: seed 0, round 0, request " in shown
    assert main([*options, "--rows", "100", "--backend", "native", "--mutant", "layout"]) == 0
    assert "mutant layout: found" in capsys.readouterr().out
