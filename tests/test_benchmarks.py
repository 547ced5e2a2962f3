"""Tests that the benchmarks run. Their measurements are not tested."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.backends.native.library import kernels_available

FOLDER = Path(__file__).parents[1] / "benchmarks"
BARE = ("msgspec", "starlette", "uvicorn", "typer", "rich", "gguf", "pytest", "jinja2", "hypothesis", "yaml")


def run(script: str, *options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    return outcome


# Options, and what is printed
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "serve.py": (
        "--quick --endpoints completions,chat,responses,messages,ollama --model",
        ("bare tok/s", "|       2 |", "us/token", "| completions |", "| ollama      |"),
    ),
    "structured.py": ("--rows 2 --steps 3 --rounds 1 --model", ("2 rows, 3 steps of each", "per step (target: 5 %)")),
    "restart.py": (
        "--quick --threads 1 --only prefix,cost,others --model",
        (
            "| computed | ",
            "| KV cache | ",
            "| disk, page cache | ",
            "| disk, cold | ",
            "disk cache costs",
            "beside loads",
        ),
    ),
    "gpu_hybrid.py": (
        "--quick --device cpu --models qwen3.5-0.8b",
        ("99 reused; + 16 tokens", "17 of 117 computed", "63 prompt tokens computed (once: 63)", "tokens hold at most"),
    ),
    "drafts.py": (
        "--backend torch --device cpu --rounds 1 --streams 1,2 --only predicted,json,wrong --model",
        ("predicted   1 streams", "json        2 streams", "wrong ", "tokens per step", "answers equal"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("script", SMALL)
def test_a_benchmark_of_a_model_runs(script: str, tiny_model: Path) -> None:
    options, words = SMALL[script]
    found = run(script, *options.split(), *([tiny_model] * options.endswith("--model"))).stdout
    assert "DIFFER" not in found
    for word in words:
        assert word in found


@pytest.mark.nightly
def test_the_benchmark_of_formats_runs(tiny_model: Path) -> None:
    outcome = run("formats.py", "--model", tiny_model, "--windows", 64, "--chats", 2)
    names = [line.split()[0] for line in outcome.stdout.splitlines()[1:6]]
    assert names == ["fp8", "fp8-channel", "w4a16", "w4a16-asym", "w8a16"]  # 96 inputs: only groups of 32
    assert "w4a16, groups of 64: --group-size 64 does not divide the 96 inputs" in outcome.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("default_model")  # its tokenizer is used
def test_the_benchmark_over_http_runs() -> None:
    serve = [f"--serve={option}" for option in ("--device", "cpu", "--backend", "torch")]
    found = run("online.py", "--quick", "--models", "qwen3-0.6b", "--rounds", 1, *serve).stdout
    assert re.search(r"^\| 1 client \| [1-9]", found, re.MULTILINE)
    assert re.search(r"^\| 4 clients \| [1-9]", found, re.MULTILINE)


@pytest.mark.nightly
def test_the_first_answer_of_the_default_model_is_right(default_model: Path) -> None:
    kernels = ("--kernels", kernels_available()[0], "--precision", "balanced")
    options = ("--model", default_model, "--answers", 20, *kernels)
    found = run("first_answer.py", *options).stdout
    assert " balanced: 20 of 20 sampled answers and 5 of 5 examples are right; least margin " in found
    run("first_answer.py", *options, "--top-p", 1, "--temperature", 2, code=1)  # most answers are wrong


def test_the_core_benchmark_runs() -> None:
    found = run("core.py", "--quick").stdout
    for word in ("share + release", "take, evicting", "us a step", "prefix tree at 0 % hits"):
        assert word in found


@pytest.mark.nightly
def test_the_gpu_benchmark_runs_every_stage() -> None:
    found = run("gpu.py", "--quick", "--models", "qwen3-0.6b").stdout
    for name in ("ready, cold", "A, seed 0", "A, seed 1", "B", "C", "C x 4 over the best single", "T"):
        assert f"| {name} | qwen3-0.6b |" in found
    assert "| prefix cache at 0 % hits | qwen3-0.6b |" in found
    assert found.rpartition("|\n\n")[2].count(": ok") == 4


@pytest.mark.nightly
def test_a_failed_stage_is_reported_and_the_others_run() -> None:
    options = ("--quick", "--models", "qwen3-0.6b", "--only", "C,ready", "--device", "tpu")
    outcome = run("gpu.py", *options, code=1)
    assert outcome.stderr == "not correct: ready, cold, qwen3-0.6b; qwen3-0.6b\n"
    assert "device = 'tpu' is not auto, cpu, cuda or metal" in outcome.stdout


@pytest.mark.nightly
def test_the_gpu_benchmark_does_not_import_packages_missing_on_a_gpu_machine() -> None:
    script = f"import sys; sys.modules |= dict.fromkeys({BARE}); sys.path.insert(0, {str(FOLDER)!r}); import gpu"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


# benchmarks/cpu.py


@pytest.mark.nightly
def test_the_cpu_benchmark_runs(tiny_model: Path) -> None:
    found = run("cpu.py", "--quick", "--no-llama", "--busy", 1, "--model", tiny_model).stdout
    for name in (
        *("decode, 1 client", "decode, 1 client, per CPU second", "decode, 4 clients", "peak memory, 4 clients"),
        *("prefill of 64", "first token, head of 64, cached", "first token, head of 64, new"),
        "process start to first token",
    ):
        assert re.search(rf"^\| {name} \| [0-9.,]+ \S+ \| [0-9.,]+ ", found, re.MULTILINE)
    assert "Against fp32 of the shipped file" in found


@pytest.mark.nightly
def test_a_failed_contender_is_reported_and_the_others_run(default_model: Path) -> None:
    options = ("--quick", "--only", "start", "--model", default_model, "--llama", sys.executable)
    outcome = run("cpu.py", *options, code=1)
    assert "llama_cpp is not installed here" in outcome.stdout
    assert "| process start to first token |" in outcome.stdout
    assert outcome.stderr == "failed: process start to first token, as shipped\n"


def test_ratios_are_computed_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was slow in the second round. If other processes used the machine, `is_held` is None."""
    monkeypatch.syspath_prepend(str(FOLDER))
    cpu = importlib.import_module("cpu")
    rates = {"quire": (100, 50, 80), "as shipped": (10, 5, 10), "Q4_0": (50, 25, 20)}
    for unit, best, shipped, is_held in (("tok/s", 2, 10, True), ("ms", 1 / 10, 1 / 10, False)):
        workload = cpu.Workload({}, (cpu.Row("decode", unit, "value", best_bar=1.5),))
        report = cpu.Report(list(rates), [workload])
        for others, expected in ((0.0, is_held), (0.5, None)):
            report.found["decode"] = {
                name: [{"value": value, "others": others} for value in values] for name, values in rates.items()
            }
            figure = report.figures()[0]
            assert figure["medians"] == {"quire": 80, "as shipped": 10, "Q4_0": 25}
            assert figure["times_best"] == pytest.approx(best)
            assert figure["times"]["as shipped"] == pytest.approx(shipped)
            assert figure["is_held"] is expected
