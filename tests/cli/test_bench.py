"""`quire bench` on a model with random weights. No test asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from quire.bench.driver import run_bench
from quire.bench.report import BenchConfig, BenchReport, Progress
from quire.cli import bench as command
from quire.engine.llm import LLM
from quire.errors import QuireError
from tests.bench.test_bench import fairness

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(command.bench)
SMALL = ("--clients", "1,2", "--clients", "3", "--rounds", "1", "--prompt-tokens", "16", "--output-tokens", "4")
SHORT = ("--seconds", "1", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def refusal(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, arguments)
    assert isinstance(outcome.exception, QuireError), outcome.output
    return str(outcome.exception)


def test_a_whole_run_writes_its_report(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a" / "report"
    outcome = CliRunner().invoke(app, ["--model", model, *SMALL, *SHORT, "--threads", "1", "--out", str(out), "--json"])
    printed = json.loads(outcome.stdout)  # one object and nothing else
    assert outcome.exit_code == int(bool(printed["not_held"])), outcome.output  # fairness may fail on a busy machine
    assert list(printed["speedup"]) == ["2", "3"]
    assert printed["speedup"]["3"] > 0
    assert {"ttft_cold_ms", "ttft_hit_ms", "shared_blocks", "copies"} <= set(printed["prefix"])
    assert (printed["prefix"]["shared_blocks"], printed["prefix"]["copies"]) == (32, 0)
    drafts = printed["drafts"]
    assert {"draft_tokens", "draft_tokens_accepted", "acceptance", "tokens_per_step", "ratio"} <= set(drafts)
    fairness = printed["fairness"]
    assert fairness["idle"]["requests"] == 20
    assert len(fairness["backlog"]["windows"]) == 3
    assert fairness["backlog"]["latency"]["requests"] > 0
    assert fairness["saturated"]["guaranteed_share"] == 0.125
    assert fairness["resumed"]["latency"]["requests"] == 3
    assert printed["setup"]["max_num_seqs"] == 64  # of the first three parts; fairness has an engine of its own
    assert printed["throughput"]["baseline"]["num_threads"] == 1
    assert {"cpu", "cores", "date", "load_average_before"} <= set(printed["machine"])
    assert "Wrote report.json, report.md and speedup.png" in outcome.stderr
    assert json.loads((out / "report.json").read_text()) == printed
    page = (out / "report.md").read_text()
    for words in (
        "# quire bench: tiny",
        "![",
        "speedup.png",
        "ref count 2;",
        "One at a time is the best of",
        "Expectation met.",
        "draft tokens (",
        "| idle | 20 |",
    ):
        assert words in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert any(row.startswith("| 3 | ") for row in rows)
    assert all(row.count("|") == rows[-1].count("|") for row in rows[-7:])
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_a_person_gets_tables_that_fit(model: str) -> None:
    outcome = CliRunner().invoke(
        app, ["--model", model, *SMALL, *("--only", "speedup", "--only", "prefix", "--only", "drafts")]
    )
    assert outcome.exit_code == 0, outcome.output
    for words in (
        "clients",
        "ratio",
        "decode",
        "A shared prefix",
        "instead of 8,192",
        "prefix cache: 0",
        "tokens per step",
    ):
        assert words in " ".join(outcome.stdout.split())
    assert "Fairness" not in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("resumed_s", "rows"), [(None, 0), (3.5, 2)])
def test_figures_of_fairness_are_printed(
    resumed_s: float | None, rows: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of tests/bench/test_bench.py. Fairness alone starts no engine for the other parts."""
    monkeypatch.setattr(command, "run_bench", lambda *_: pytest.fail("it measured other parts"))
    report = fairness(resumed_s=resumed_s)
    monkeypatch.setattr(command, "measure_fairness", lambda *_: report)
    monkeypatch.setattr(command, "measure_resumed", lambda *_: report.resumed)
    outcome = CliRunner().invoke(app, ["--model", model, "--only", "fairness", "--backend", "fake"])
    assert outcome.exit_code == (0 if resumed_s is None else 1), outcome.output
    text = " ".join(outcome.stdout.split())
    for words in ("Fairness between priorities", "idle 20 100 100 100", "backlog 15-30 s 1 200 200 200 2.00"):
        assert words in text
    assert "a share of 13.0%. Its guaranteed share is 12.5%, and it should reach 11.2%." in text
    assert (text.count("small pool, idle 3 1000") + text.count("LOW resumed 2 1000 3500 3500 3.50")) == rows
    assert ("preempted, lost its cached blocks and resumed" in text) == (rows > 0)
    assert max(map(len, outcome.stdout.splitlines())) <= 80


def test_a_broken_promise_is_reported_and_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(llm: LLM, config: BenchConfig, progress: Progress) -> BenchReport:
        report = run_bench(llm, replace(config, head_tokens=64), progress)
        assert report.prefix is not None
        return replace(report, prefix=replace(report.prefix, copies=2, is_held=False))

    monkeypatch.setattr(command, "run_bench", run)
    outcome = CliRunner().invoke(app, ["--model", model, *SMALL, "--only", "prefix"])
    assert outcome.exit_code == 1
    assert "not met: prefix: 2 blocks shared with ref counts 2 to 2 and 2 copies" in outcome.stderr
    assert "EXPECTATION NOT MET." in " ".join(outcome.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clients", "2,x"), "--clients 'x' of '2,x' is not a whole number of at least 1"),
        (("--clients", "0,2"), "--clients '0' of '0,2' is not a whole number of at least 1"),
        (("--clients", "1"), "--clients = (1,) has no number above 1"),
        (("--only", "speed"), "--only 'speed' is not one of speedup, prefix, drafts, fairness"),
        (("--threads", "0"), "--threads = 0 is not"),
        (("--max-num-seqs", "5000"), "--max-num-seqs = 5000 is not a whole number from 1 to 4096"),
        (
            ("--only", "fairness", "--prompt-tokens", "9999"),
            "fairness needs 10063 tokens of context, and the model has",
        ),
        (("--device", "tpu"), "--device = 'tpu' is not auto, cpu, cuda or metal"),
        (("--prompt-tokens", "9999"), "speedup needs 10063 tokens of context, and the model has 4096"),
    ],
)
def test_an_option_that_cannot_work_is_named(model: str, arguments: tuple[str, ...], message: str) -> None:
    assert refusal("--model", model, *arguments).startswith(message)


def test_without_matplotlib_there_is_a_report_without_a_plot(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    outcome = CliRunner().invoke(app, ["--model", model, *SMALL, "--only", "speedup", "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert "speedup.png" not in (tmp_path / "report.md").read_text()
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("Wrote ")]
    how = f"{sys.executable} -m pip install matplotlib"
    assert line.endswith(f"but no speedup.png: it needs matplotlib, which is not installed: {how}")


def test_the_command_imports_nothing_heavy() -> None:
    script = (
        "import sys, quire.cli.bench\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers', 'rich.progress'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stderr
