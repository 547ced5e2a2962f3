"""`quire sim`, and `quire` without a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.version import __version__
from tests.cli.runs import quire


def test_version_and_bare_call() -> None:
    assert quire("--version").stdout.strip() == f"quire {__version__}"
    assert re.search(r"sim +Run the scheduler", quire().stderr)


def test_sim_prints_a_table_a_person_can_read() -> None:
    outcome = quire("sim", "--requests", "80", "--num-blocks", "300", "--num-blocks=2000")
    assert outcome.returncode == 0, outcome.stderr
    for word in ("policy", "aging", "fcfs", "2,000", "GiB", "TTFT", "wait", "hits", "empted", "HIGH", "NORMAL", "LOW"):
        assert word in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert outcome.stderr == ""


def test_sim_reports_requests_without_a_complete_answer(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 5000},
        {"arrival_s": 0, "prompt_tokens": 9000, "output_tokens": 5},
        {"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 500, "cancel_after_s": 0.1, "priority": "LOW"},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = quire("sim", "t.jsonl", "--num-blocks", "50", "--scheduling-policy", "aging", folder=tmp_path)
    assert "1 of 2 NORMAL cut at the end of the context" in outcome.stdout
    assert "1 of 2 NORMAL refused: too long for the pool" in outcome.stdout
    assert "1 of 1 LOW not answered in full: the client disconnected" in outcome.stdout
    assert (
        "1 of 2 NORMAL refused" in quire("sim", "-", "--num-blocks=50", stdin=(tmp_path / "t.jsonl").read_text()).stdout
    )


def test_sim_gives_json_for_programs() -> None:
    outcome = quire(
        "sim",
        "--requests",
        "60",
        "--scheduling-policy",
        "aging",
        "--num-blocks",
        "500",
        "--json",
        "--no-enable-prefix-caching",
    )
    document = json.loads(outcome.stdout)
    assert document["machine"]["kv_bytes"] == 131_072
    assert document["config"]["block_size"] == 32
    (run,) = document["runs"]
    assert (run["policy"], run["blocks"], run["hit_rate"]) == ("aging", 500, 0)
    assert run["output_tokens_per_s"] > 0
    assert sum(tier["requests"] for tier in run["tiers"].values()) == 60
    names = {f"{name}_{kind}" for name in ("ttft_s", "wait_s", "tpot_s", "total_s") for kind in ("p50", "p95", "max")}
    assert names | {"finished", "cut", "left", "too_long", "queue_full"} <= set(run["tiers"]["HIGH"])


AGENTS = ("--scenario", "agents", "--requests", "30", "--rate", "6", "--max-num-seqs", "8", "--base-ms", "15")


def test_sim_compares_placement_rules_of_states() -> None:
    outcome = quire("sim", *AGENTS, "--states=20", "--requests=9", "--machine", "h200-qwen3.5-35b-a3b")
    assert outcome.returncode == 0, outcome.stderr
    _, _, _, _, reference, *rows = map(str.split, outcome.stdout.splitlines())
    assert reference[:4] == ["65,536", "blocks,", "no", "states"]
    assert [row[0] for row in rows if row] == ["all", "prompt", "answer", "message", "branch", "every-1024"]
    assert rows[0][1:3] == ["20", "1.3"]  # states and GB
    assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_sim_compares_routers() -> None:
    options = ("--scenario", "tree", "--requests", "20", "--num-blocks", "400")
    outcome = quire("sim", *options, "--replicas", "2", "--replicas", "3")
    assert outcome.returncode == 0, outcome.stderr
    rows = [line.split()[:1] for line in outcome.stdout.splitlines()[4:]]
    assert rows == [*[["2"]] * 3, [], *[["3"]] * 3]
    for word in ("prefix", "round-robin"):
        assert word in outcome.stdout


def test_a_saved_trace_gives_the_same_figures_again(tmp_path: Path) -> None:
    options = ("--scheduling-policy", "aging", "--num-blocks", "400", "--json")
    first = quire("sim", "--requests", "60", "--save-trace", "day.jsonl", *options, folder=tmp_path)
    again = quire("sim", "day.jsonl", *options, folder=tmp_path)
    assert json.loads(first.stdout)["runs"] == json.loads(again.stdout)["runs"]
    assert len((tmp_path / "day.jsonl").read_text().splitlines()) == 60


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
@pytest.mark.kept("png")
def test_sim_draws(tmp_path: Path, name: str, magic: bytes) -> None:
    outcome = quire("sim", "--requests", "40", "--num-blocks", "400", "--plot", name, folder=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_plot_without_matplotlib_names_the_package(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None\n"
        "from quire.cli.main import run; run()"
    )
    command = [sys.executable, "-c", script, "sim", "--requests", "10", "--plot", "x.png"]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert outcome.returncode == 2
    how = f"{sys.executable} -m pip install matplotlib"
    assert outcome.stderr == f"quire: --plot needs matplotlib, which is not installed: {how}\n"
    assert outcome.stdout == ""  # refused before the run


BAD: list[tuple[list[str], str]] = [
    (["nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
    (["--scheduling-policy", "lifo"], "--scheduling-policy = 'lifo' is not one of fair, aging, fcfs"),
    (["--scenario", "chaos"], "--scenario = 'chaos' is not one of mixed, backlog, saturated, tenants, agents"),
    (["--low-share", "2"], "--low-share = 2.0 is not a number above 0 and below 1"),
    (["--low-share", "0.2", "--scheduling-policy", "fcfs"], "--low-share is for --scheduling-policy fair only"),
    (["--block-size", "33"], "--block-size = 33 is not a power of two"),
    (["--machine", "abacus"], "--machine 'abacus' is not one of cpu-smollm2-135m"),
    (["--base-ms", "-1"], "--base-ms = -1"),
    (["--requests", "0"], "--requests = 0 is not from 1"),
    (["--rate", "0"], "--rate = 0"),
    (["--max-num-seqs", "0"], "--max-num-seqs = 0"),
    (["--max-waiting", "0"], "--max-waiting = 0"),
    (["--max-num-batched-tokens", "3"], "--max-num-batched-tokens = 3 is less than max_num_seqs"),
    (["--patience", "-3"], "--patience = -3"),
    (["--patience", "3", "--scheduling-policy", "fcfs"], "--patience is for --scheduling-policy aging only"),
    (["some.jsonl", "--rate", "3"], "--rate is for a synthetic trace, and some.jsonl was given"),
    (["--states", "32"], "--states = 32 is less than 129: each of max_num_seqs = 64"),
    (["--states", "200", "--places", "prompt,end"], "--places 'prompt,end': 'end' is not one of prompt, answer,"),
    (["--states", "200", "--places", "every-0"], "--places 'every-0': 'every-0' is not one of"),
    (["--places", "prompt"], "--places needs --states"),
    (["--states", "200", "--plot", "x.png"], "--plot cannot be combined with --states"),
    (["--window", "64"], "--window and --num-window-blocks must be given together"),
    (["--window", "0", "--num-window-blocks", "99"], "--window = 0 is less than 1"),
    (["--window", "64", "--num-window-blocks", "9"], "--num-window-blocks = 9 is less than"),
    (["--plot", "x.gif"], "--plot x.gif does not end in .png or .svg"),
]


def test_bad_options_are_one_line_on_stderr(tmp_path: Path) -> None:
    for arguments, message in BAD:
        outcome = quire("sim", *arguments, folder=tmp_path)
        assert outcome.returncode == 2, arguments
        assert message in outcome.stderr
        assert len(outcome.stderr.strip().splitlines()) == 1
        assert outcome.stdout == ""


def test_a_bad_trace_names_line_and_field(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": -1}\n')
    outcome = quire("sim", "bad.jsonl", folder=tmp_path)
    assert outcome.returncode == 2
    assert "bad.jsonl line 1: field 'output_tokens' = -1" in outcome.stderr
