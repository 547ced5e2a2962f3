"""`quire replay` with real servers: requests, figures and errors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cli.prometheus_text import read_exposition, total
from quire.cli.replay_client import ReplayClient, Texts, find_vocab_size
from quire.cli.server_client import PATIENT, ServerClient
from quire.sim.replay import Ending
from quire.sim.traces import TraceRequest, text
from tests.cli.runs import quire
from tests.server.rig import Server, serving
from tests.test_docs import commands

KEY = "replay-0000-key"
NO_SERVER = {"QUIRE_SERVER": "", "QUIRE_API_KEY": ""}
STEPS = ("--base-ms", "5", "--token-us", "1", "--context-us", "0")  # nothing to measure
PAGE = Path(__file__).parents[2] / "docs/replay.md"
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    del default_model  # downloaded by the fixture
    options = ("--backend", "fake", "--device", "5ms", "--num-blocks", "400", "--log-format", "json")
    with serving(*options, "--api-key", KEY, key=KEY) as server:
        yield server


def replay(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return quire("replay", *arguments, "--server", server.url, "--api-key", KEY, env=NO_SERVER)


def document(outcome: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert isinstance(found, dict)
    return found


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(arrival_s: float, prompt: int = 96, output: int = 8, **more: Any) -> dict[str, Any]:
    return {"arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": output, **more}


# The whole command


def test_server_and_simulator_agree_where_time_does_not_matter(server: Server, tmp_path: Path) -> None:
    """Endings and cached tokens: the scheduler is the same. An answer of 400 steps of 5 ms cannot end in 0.4 s."""
    server.wait_free()
    system = [["system", 64]]
    trace = write(
        tmp_path / "t.jsonl",
        line(0.0, shared=system, priority="HIGH"),
        line(0.8, shared=system, priority="LOW"),
        line(1.6, shared=system, salt="another"),
        line(1.7, prompt=200, output=400, cancel_after_s=0.4),
        line(1.8, prompt=9000),
    )
    saved = tmp_path / "report.json"
    found = document(replay(server, trace, *STEPS, "--json", "--save", str(saved)))
    for side in ("live", "simulated"):
        assert found[side]["endings"] == {"finished": 3, "left": 1, "refused": 1, "failed": 0}, side
        assert found[side]["num_preemptions"] == 0
    assert found["live"]["hit_rate"] == pytest.approx(64 / (3 * 95))  # the second found the first's
    assert found["simulated"]["hit_rate"] == pytest.approx(64 / (3 * 95 + 199))
    assert set(found["tiers"]) == {"HIGH", "NORMAL", "LOW"}
    assert found["tiers"]["NORMAL"]["live"]["num_requests"] == 3
    assert found["scheduling"]["num_blocks"] == 400
    (problem,) = found["problems"]
    assert "9000" in problem
    served = json.loads(saved.read_text())["served"]
    assert [one["num_outputs"] for one in served[:3]] == [8, 8, 8]
    assert served[3]["num_outputs"] < 400
    assert all(one["sent_s"] >= one["due_s"] for one in served)
    server.wait_free()  # cancelled requests are gone


def test_step_times_are_measured(server: Server, tmp_path: Path) -> None:
    """The fake backend sleeps 5 ms per step. A busy machine takes longer, none takes less."""
    trace = write(tmp_path / "t.jsonl", *(line(0.1 * number, prompt=40) for number in range(6)))
    outcome = replay(server, trace, "--speed", "2")
    assert outcome.returncode == 0, outcome.stderr
    assert "6 requests (6 NORMAL) over 0.2 s: 240 tokens in, 48 out" in outcome.stdout
    rows = {words[0]: words[1:] for words in (row.rsplit(maxsplit=3) for row in outcome.stdout.splitlines()) if words}
    assert rows["requests finished"] == ["6", "6", "1.00"]
    live, simulated = float(rows["TTFT p50, s"][0]), float(rows["TTFT p50, s"][1])
    assert live >= 0.005
    assert simulated >= 0.005
    assert "A step of the server takes" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_a_trace_from_the_servers_own_log(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        server.chat("Hello there", priority="low")
    server.wait_for('"tier": "low"')
    log = tmp_path / "server.log"
    log.write_text(server.log)
    saved = tmp_path / "day.jsonl"
    outcome = quire("replay", "--from-log", str(log), "--dry-run", "--save-trace", str(saved), env=NO_SERVER)
    assert outcome.returncode == 0, outcome.stderr
    assert "no prompts share a prefix" in outcome.stderr
    lines = [json.loads(one) for one in saved.read_text().splitlines()]
    assert [one for one in lines if one["priority"] == "LOW" and one["output_tokens"] == 8]
    found = document(replay(server, str(saved), "--max-requests", "2", "--speed", "100", *STEPS, "--json"))
    assert found["live"]["endings"]["finished"] == 2


UNPLAYABLE: list[tuple[list[str], str]] = [
    ([], "give one trace, as an argument or with --from-log"),
    (["t.jsonl", "--from-log", "x.log"], "give one trace, as an argument or with --from-log"),
    (["nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
    (["bad.jsonl"], "bad.jsonl line 1: field 'output_tokens' = -1"),
    (["t.jsonl", "--speed", "0"], "--speed = 0.0 is not from 0.001 to 1000"),
    (["t.jsonl", "--max-requests", "0"], "--max-requests = 0 is less than 1"),
    (["t.jsonl", "--save", "."], "--save . is a folder"),
    (["t.jsonl", "--save-trace", "t.jsonl"], "--save-trace t.jsonl is the trace itself"),
    (["t.jsonl", "--server", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
    (["t.jsonl"], "QUIRE_SERVER is none: name one with --server URL"),
]


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", line(0.0))
    write(tmp_path / "bad.jsonl", line(0.0, output=-1))
    for arguments, message in UNPLAYABLE:
        outcome = quire("replay", *arguments, folder=tmp_path, env={"QUIRE_SERVER": "none", "QUIRE_API_KEY": ""})
        assert (outcome.returncode, outcome.stdout) == (2, ""), arguments
        assert message in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def test_a_server_that_refuses_the_key(server: Server, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", line(0.0))
    wrong = quire("replay", trace, "--server", server.url, "--api-key", "wrong-0000-key", env=NO_SERVER)
    assert "this API key is unknown" in wrong.stderr
    step = replay(server, trace, "--base-ms", "-1", "--token-us", "1", "--context-us", "1")
    assert "--base-ms = -1.0 is not from 0" in step.stderr
    model = replay(server, trace, "--model", "someone/else")
    assert "has no model 'someone/else'" in model.stderr
    for outcome in (wrong, step, model):
        assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)


@pytest.mark.nightly
def test_the_commands_of_the_page_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/replay.md, in order."""
    monkeypatch.chdir(tmp_path)
    server.chat()
    server.wait_for("quire.request")
    (tmp_path / "server.log").write_text(server.log)
    todo = commands(PAGE)
    assert len(todo) == 6
    for words in todo:
        smaller = ["--max-requests", "1", *STEPS] if words[1] == "replay" else []
        outcome = quire(*words[1:], *smaller, env={"QUIRE_SERVER": server.url, "QUIRE_API_KEY": KEY})
        assert outcome.returncode == 0, f"{words}: {outcome.stderr}"
        assert outcome.stdout


# Parts


def player(server: Server, salt: str) -> ReplayClient:
    remote = ServerClient(server.url, KEY, PATIENT)
    size = find_vocab_size(remote, MODEL)
    assert size == 32_000  # the largest it tries; this model has more
    return ReplayClient(remote, MODEL, Texts(size), salt)


def test_a_later_prompt_contains_the_answer_that_was_given(server: Server) -> None:
    """With made-up text in its place the match would end at the end of the question."""
    play = player(server, "turns")
    first = TraceRequest(0.0, 64, 32, shared=(("q1", 64),), output="a1")
    second = TraceRequest(0.0, 106, 4, shared=(("q1", 64), ("a1", 32), ("q2", 10)))
    (one,) = play.play([first])
    (two,) = play.play([second])
    assert (one.ending, one.num_outputs, one.num_cached_tokens) == (Ending.FINISHED, 32, 0)
    assert two.num_prompt_tokens == 106
    assert two.num_cached_tokens == 95  # all but the last token, which was never computed


def test_two_replays_share_nothing_in_the_cache(server: Server) -> None:
    todo = [TraceRequest(0.0, 64, 2, shared=(("same", 64),))]
    assert player(server, "once").play(todo)[0].num_cached_tokens == 0
    assert player(server, "again").play(todo)[0].num_cached_tokens == 0


def test_an_answer_received_too_late_stays_made_up() -> None:
    texts = Texts(1000)
    texts.expect(frozenset({"a1", "a2"}))
    texts.answered("a2", [1, 2, 3])
    prompt = TraceRequest(0.0, 8, 1, shared=(("a1", 4), ("a2", 4)))
    before = texts.prompt(0, prompt)
    assert before[:4] == [token % 1000 for token in text("a1", 4)]
    assert before[4:] == [1, 2, 3, text("a2", 4)[3] % 1000]  # the answer was shorter: the rest is made up
    texts.answered("a1", [7, 7, 7, 7])
    assert texts.prompt(0, prompt) == before  # unchanged, so that prompts still share it
    assert texts.num_made_up == 1


def test_the_exposition_is_read_as_prometheus_reads_it(server: Server) -> None:
    body = server.get("/metrics").body.decode()
    ours = [(one.name, one.labels, one.value) for one in read_exposition(body)]
    theirs = [
        (one.name, one.labels, one.value) for family in text_string_to_metric_families(body) for one in family.samples
    ]
    assert ours == theirs
    assert total(list(read_exposition('a{x="\\"}\\\\\\n"} 1\na{x="b"} 2\nrubbish\nb nan\n')), "a", x='"}\\\n') == 1
    assert total([], "a") is None


def test_token_ids_of_completions(server: Server) -> None:
    """The fields of vLLM: in a stream and in a complete answer, and only if requested."""
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    whole = server.post("/v1/completions", {**body, "return_token_ids": True}).json["choices"][0]["token_ids"]
    assert len(whole) == 5
    stream = server.post("/v1/completions", {**body, "return_token_ids": True, "stream": True}).body.decode()
    chunks = [json.loads(one.removeprefix("data: ")) for one in stream.split("\n\n") if one.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == whole
    assert "token_ids" not in server.post("/v1/completions", body).json["choices"][0]


# The real model


@pytest.mark.nightly
def test_the_real_model(default_model: Path, tmp_path: Path) -> None:
    """The quality of the prediction is not asserted: the machine may be busy. docs/replay.md has figures."""
    del default_model  # downloaded by the fixture
    trace = write(
        tmp_path / "t.jsonl", *(line(0.2 * number, prompt=48, output=6, shared=[["system", 32]]) for number in range(4))
    )
    with serving("--num-blocks", "100", "--max-model-len", "256") as real:
        found = document(quire("replay", trace, "--json", "--server", real.url, env=NO_SERVER))
    for side in ("live", "simulated"):
        assert found[side]["endings"]["finished"] == 4
        assert found[side]["hit_rate"] == pytest.approx(3 * 32 / (4 * 47))
        for name in ("output_tokens_per_s", "num_steps", "makespan_s"):
            assert found[side][name] > 0, name
        assert found[side]["ttft_s"]["p50"] > 0
