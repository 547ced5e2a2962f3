"""Thousands of broken models: each loads or is refused, quickly and in little memory, without a crash."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.selection import mostly_nightly
from tests.weights.fuzz_child import TARGETS

FIRST_SEED = 20_000


@pytest.mark.parametrize("num_mutants", mostly_nightly([40, 700], 1))  # per target
def test_every_mutant_loads_or_is_refused(num_mutants: int) -> None:
    command = [sys.executable, "-m", "tests.weights.fuzz_child", str(FIRST_SEED), str(num_mutants)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["target"] for one in counts] == [target.name for target in TARGETS]
    for one in counts:
        assert one["loads"] + one["refused"] == num_mutants
        assert min(one["loads"], one["refused"]) > num_mutants // 50, one
