"""Thousands of broken models: each loads or is refused, quickly and in little memory, without a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gauntlet.file_mutants import EVERY, TARGETS
from tests.selection import mostly_nightly

FIRST_SEED = 20_000


@pytest.mark.parametrize("num_mutants", mostly_nightly([40, 700], 1))  # per target
def test_every_mutant_loads_or_is_refused(num_mutants: int, tmp_path: Path) -> None:
    order = [EVERY, str(FIRST_SEED), str(num_mutants * len(TARGETS)), str(tmp_path / "progress")]
    command = [sys.executable, "-m", "tests.gauntlet.file_mutants", *order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (tmp_path / "progress").read_text() + done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert min(report["outcomes"]["loads"], report["outcomes"]["refused"]) > num_mutants * len(TARGETS) // 50
