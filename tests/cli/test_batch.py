"""`quire batch`: locally and against servers, interrupted and continued, on pipes and on a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import Terminal, quire
from tests.cli.scripted import Reply, ScriptedServer, document, refusal
from tests.server.rig import FAKE, Server, children, command_line, serving
from tests.waiting import HANG_S, eventually, is_running

KEY = "sk-batch-00000001"
OPENAI_LINE = {
    "custom_id": "own",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "Hi", "max_tokens": 2},
}
ANSWER = {"usage": {"completion_tokens": 2}, "choices": []}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(str(tiny_model), *FAKE, "--api-key", KEY, key=KEY) as found:
        yield found


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def prompts(path: Path, count: int) -> Path:
    return write(path, *({"prompt": f"Prompt {number}", "custom_id": f"p-{number}"} for number in range(count)))


def read(path: Path) -> dict[str | None, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def at(server: Server) -> list[str]:
    return ["--server", server.url, "--api-key", KEY]


# Against a server


def test_pipes(server: Server) -> None:
    lines = "".join(json.dumps(f"Prompt {number}") + "\n" for number in range(40))
    outcome = quire("batch", "-", "-", *at(server), "--max-tokens", "2", "--quiet", stdin=lines)
    assert outcome.returncode == 0, outcome.stderr
    found = [json.loads(line)["custom_id"] for line in outcome.stdout.splitlines()]
    assert sorted(found) == sorted(f"line-{number}" for number in range(1, 41))
    assert outcome.stderr == ""


def test_a_priority_and_a_model_for_every_line(server: Server, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {**OPENAI_LINE, "body": {"prompt": "Hi", "model": "gpt-4o", "max_tokens": 1}})
    outcome = quire("batch", str(source), str(tmp_path / "a.jsonl"), *at(server))
    assert outcome.returncode == 1
    assert read(tmp_path / "a.jsonl")["own"]["response"]["status_code"] == 404
    given = ("--model", "tiny", "--priority", "normal")
    outcome = quire("batch", str(source), str(tmp_path / "b.jsonl"), *at(server), *given)
    assert outcome.returncode == 0, outcome.stderr
    assert read(tmp_path / "b.jsonl")["own"]["response"]["body"]["service_tier"] == "default"


def test_a_finished_batch_and_failed_lines(server: Server, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", '"Hi"', {"prompt": "Hi", "temperature": "hot"}), tmp_path / "out.jsonl"
    command = ("batch", str(source), str(out), *at(server), "--max-tokens", "2")
    assert quire(*command).returncode == 1
    before = out.read_bytes()
    again = quire(*command)
    assert again.returncode == 1  # a line has failed, now as before
    assert "every line has a result already" in again.stderr
    assert out.read_bytes() == before
    assert quire(*command, "--retry-failed").returncode == 1
    assert len(read(out)) == 2
    with source.open("a") as file:
        file.write('"more"\n')
    assert "continuing" in quire(*command).stderr
    assert len(read(out)) == 3


def test_what_cannot_work_is_refused_before_anything_runs(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", '"Hi"')
    out = write(tmp_path / "other.jsonl", "not a result")
    refused: list[tuple[list[str], str]] = [
        (["nowhere.jsonl", "out.jsonl"], "IN = 'nowhere.jsonl' is not a file"),
        ([str(source), str(source)], "is the input itself"),
        ([str(source), "out.jsonl", "--priority", "urgent"], "--priority 'urgent' is not one of"),
        ([str(source), "out.jsonl", "--backend", "gpu"], "--backend"),
        ([str(source), str(out)], "not the output of an interrupted batch"),
        ([str(source), "out.jsonl", "--server", "http://127.0.0.1:9", "--local"], "choose one"),
        ([str(source), "out.jsonl", "--server", "http://127.0.0.1:9"], "does not answer"),
    ]
    for arguments, text in refused:
        outcome = quire("batch", *arguments, folder=tmp_path)
        assert outcome.returncode == 2, (arguments, outcome)
        assert text in outcome.stderr, (arguments, outcome)
    assert out.read_text() == "not a result\n"


# A server that misbehaves


def test_a_server_that_goes_away_ends_the_run_and_the_next_one_continues(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    command = ("batch", str(source), str(out), "--max-in-flight", "1", "--retries", "2")
    with ScriptedServer() as server:
        server.answers(document(ANSWER), document(ANSWER), refusal(503, "draining"))
        outcome = quire(*command, "--server", server.url)
        assert outcome.returncode == 2
        assert "line 3 was sent 2 times" in outcome.stderr
        assert "2 lines have a result; run the same command again" in outcome.stderr
        server.answers(document(ANSWER))
        assert quire(*command, "--server", server.url).returncode == 0
    assert set(read(out)) == {f"p-{number}" for number in range(4)}


def test_an_answer_that_is_not_json_is_an_error_of_its_line(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    with ScriptedServer() as server:
        server.answers(Reply(200, [b"<html>\n"], {"content-type": "text/html"}))
        assert quire("batch", str(source), str(out), "--server", server.url).returncode == 1
    response = read(out)["p-0"]["response"]
    assert response["status_code"] == 502
    assert "<html>" in response["body"]["error"]["message"]


# A model of its own


def test_a_killed_run_continues_and_leaves_no_server(tiny_model: Path, tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    command = ["batch", str(source), str(out), "--model", str(tiny_model), "--backend", "fake", "--max-tokens", "60"]
    process = subprocess.Popen([sys.executable, "-m", "quire", *command], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, "some lines are done")
        (private,) = [pid for pid in children(process.pid) if "run_while_parent_lives" in command_line(pid)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
    eventually(lambda: not is_running(private), "its server has ended")
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_torn')
    outcome = quire(*command)
    assert outcome.returncode == 0, outcome.stderr
    assert "300 lines: 300 answered, 0 failed" in outcome.stderr
    assert set(read(out)) == {f"p-{number}" for number in range(300)}


def test_ctrl_c_on_a_terminal_and_again(server: Server, tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    command = ["batch", str(source), str(out), *at(server), "--max-tokens", "60", "--max-in-flight", "4"]
    with Terminal(*command, env={"COLUMNS": "120", "TERM": "xterm"}) as terminal:
        terminal.wait_for("/400")
        eventually(lambda: out.read_bytes().count(b"\n") >= 3, "some lines are done")
        terminal.type("\x03")
        at_end = terminal.wait_for("interrupted. ")
        terminal.wait_for("run the same command again to continue", after=at_end)
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.screen
    server.wait_free()
    with Terminal(*command, env={"COLUMNS": "120", "TERM": "xterm"}) as terminal:
        terminal.wait_for("continuing")
        terminal.wait_for("400 lines: 400 answered, 0 failed")
        assert terminal.exit_code() == 0
    assert set(read(out)) == {f"p-{number}" for number in range(400)}


@pytest.mark.nightly
def test_the_quick_start_of_the_page_runs(default_model: Path, tmp_path: Path) -> None:
    del default_model  # is here now
    page = (Path(__file__).parents[2] / "docs/batch.md").read_text()
    start, show = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[:2]
    script = f'quire() {{ {sys.executable} -m quire "$@" --threads 1 --kv-memory 64M; }}\n{start}{show}'
    outcome = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "3 lines: 3 answered, 0 failed" in outcome.stderr
    assert re.search(r"^line-1 .*Tokyo", outcome.stdout, re.MULTILINE)
    assert re.search(r"^sea ", outcome.stdout, re.MULTILINE)
