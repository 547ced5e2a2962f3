"""Thousands of broken models: each loads or is refused, quickly and in little memory, without a crash."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.weights.fuzz_child import TARGETS

MUTANTS = 700  # per target
FIRST_SEED = 20_000


def test_every_mutant_loads_or_is_refused() -> None:
    command = [sys.executable, "-m", "tests.weights.fuzz_child", str(FIRST_SEED), str(MUTANTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["target"] for one in counts] == [target.name for target in TARGETS]
    for one in counts:
        assert one["loads"] + one["refused"] == MUTANTS
        assert min(one["loads"], one["refused"]) > MUTANTS // 50, one
