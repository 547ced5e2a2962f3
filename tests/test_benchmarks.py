"""Benchmarks run; what they measure is not a test's business."""

import subprocess
import sys
from pathlib import Path


def test_the_core_benchmark_runs() -> None:
    script = Path(__file__).parents[1] / "benchmarks/core.py"
    outcome = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    for word in ("share + release", "take, evicting", "us a step", "prefix tree at 0 % hits"):
        assert word in outcome.stdout
