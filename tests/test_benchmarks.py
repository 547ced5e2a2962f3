"""Benchmarks run; what they measure is not a test's business."""

import subprocess
import sys
from pathlib import Path


def test_the_benchmarks_of_the_server_run(tiny_model: Path) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    for script, options, words in (
        ("serve.py", ["--model", str(tiny_model)], ("bare tok/s", "overhead", "|       2 |")),
        (
            "chaos.py",
            ["--fake", str(tiny_model)],
            ("disconnect to free blocks", "overload: 8 clients", "kill -9: 4 of 4"),
        ),
    ):
        command = [sys.executable, str(folder / script), "--quick", *options]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert outcome.returncode == 0, outcome.stderr
        for word in words:
            assert word in outcome.stdout, outcome.stdout


def test_the_core_benchmark_runs() -> None:
    script = Path(__file__).parents[1] / "benchmarks/core.py"
    outcome = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    for word in ("share + release", "take, evicting", "us a step", "prefix tree at 0 % hits"):
        assert word in outcome.stdout
