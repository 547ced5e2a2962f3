"""`quire generate` and `quire chat` with a real server and the real model: the same answers as without a server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.weights.hub import DEFAULT_MODEL
from tests.cli.runs import LIMIT_S, Terminal, quire
from tests.server.rig import Server, serving

KEY = "command-0000-key"
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
GREEDY = ("--temperature", "0", "--max-tokens", "16")
NO_SERVER = {"QUIRE_SERVER": "", "QUIRE_API_KEY": ""}


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    del default_model  # downloaded by the fixture
    with serving("--api-key", KEY, "--num-blocks", "400", key=KEY) as server:
        yield server


def ask(server: Server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return quire(*arguments, "--server", server.url, "--api-key", KEY, stdin=stdin, env=NO_SERVER)


def document(outcome: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert isinstance(found, dict)
    return found


# generate


def test_the_answer_alone_is_on_stdout(server: Server) -> None:
    outcome = ask(server, "generate", QUESTION, *GREEDY)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, f"{ANSWER}\n", "")
    server.wait_for("key=key-1 .*completion_tokens=8 ")  # the server has answered


def test_the_environment_names_the_server(server: Server) -> None:
    env = {"QUIRE_SERVER": f"{server.url}/v1", "QUIRE_API_KEY": KEY}  # with /v1, as in OPENAI_BASE_URL
    outcome = quire("generate", "-", *GREEDY, stdin=f"{QUESTION}\n", env=env)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, f"{ANSWER}\n", "")


@pytest.mark.nightly
def test_json_is_what_it_is_locally(server: Server) -> None:
    """The same seed gives the same answers with and without a server. The protocol has no token ids and ranks."""
    options = ("--json", "--seed", "3", "-n", "2", "--max-tokens", "6", "--logprobs", "1")
    there = document(ask(server, "generate", QUESTION, *options))
    here = document(quire("generate", QUESTION, *options, "--local", env=NO_SERVER))
    assert there.keys() == here.keys()
    assert there["model"] == here["model"] == DEFAULT_MODEL
    assert [one["text"] for one in there["completions"]] == [one["text"] for one in here["completions"]]
    assert [one["finish_reason"] for one in there["completions"]] == ["length", "length"]
    assert there["usage"].keys() == here["usage"].keys()
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert there["usage"][name] == here["usage"][name]
    assert there["cache"].keys() == here["cache"].keys()
    assert there["timings"].keys() == here["timings"].keys()
    for remote, local in zip(there["logprobs"], here["logprobs"], strict=True):
        assert (remote["text"], remote["bytes"]) == (local["text"], local["bytes"])
        assert remote["logprob"] == pytest.approx(local["logprob"], abs=1e-3)
        assert [top["text"] for top in remote["top"]] == [top["text"] for top in local["top"]]


def test_raw_prompts(server: Server) -> None:
    raw = ("generate", "The capital of Japan is", "--raw", "--temperature", "0", "--max-tokens", "2")
    assert ask(server, *raw).stdout == " Tokyo.\n"
    found = document(ask(server, *raw, "--json", "--logprobs", "2"))
    assert (found["text"], found["finish_reason"]) == (" Tokyo.", "length")
    assert [entry["text"] for entry in found["logprobs"]] == [" Tokyo", "."]
    assert found["usage"]["cached_tokens"] == found["usage"]["prompt_tokens"] - 1 == 4
    assert found["cache"]["reason"] == "complete"


def test_stop(server: Server) -> None:
    found = document(ask(server, "generate", QUESTION, *GREEDY, "--stop", " is", "--json"))
    assert (found["text"], found["finish_reason"]) == ("The capital of Japan", "stop")


def test_errors_are_one_line(server: Server) -> None:
    wrong = quire("generate", "Hi", "--server", server.url, "--api-key", "wrong-0000-key", env=NO_SERVER)
    assert f"{server.url}: this API key is unknown" in wrong.stderr
    without = quire("generate", "Hi", "--server", server.url, env=NO_SERVER)
    assert "no API key was sent" in without.stderr
    assert "--api-key or QUIRE_API_KEY sets a key" in without.stderr
    model = ask(server, "generate", "Hi", "--model", "someone/else")
    assert f"has no model 'someone/else', only {DEFAULT_MODEL}" in model.stderr
    long = ask(server, "generate", "-", stdin="word " * 9000)
    assert "8192" in long.stderr
    for outcome in (wrong, without, model, long):
        assert (outcome.returncode, outcome.stdout) == (2, "")
        assert outcome.stderr.count("\n") == 1


def test_ctrl_c_cancels_the_request_on_the_server(server: Server) -> None:
    server.wait_free()
    command = [sys.executable, "-m", "quire", "generate", "Count.", "--ignore-eos", "--max-tokens", "2000"]
    command += ["--server", server.url, "--api-key", KEY]
    env = {**os.environ, **NO_SERVER}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as run:
        assert run.stdout is not None
        assert run.stdout.read(3)
        assert server.stats()["num_running"] == 1
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130
    server.wait_free()


def test_a_running_request_is_listed_and_cancelled(server: Server) -> None:
    server.wait_free()
    command = [sys.executable, "-m", "quire", "generate", "Count.", "--ignore-eos", "--max-tokens", "2000"]
    command += ["--server", server.url, "--api-key", KEY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **NO_SERVER}
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.read(3)
        (request,) = json.loads(ask(server, "ps", "--requests", "--json").stdout)
        assert (request["model"], request["state"], request["max_tokens"]) == (DEFAULT_MODEL, "running", 2000)
        assert request["id"] in ask(server, "ps").stdout
        assert ask(server, "cancel", request["id"]).stdout == f"{request['id']} is cancelled\n"
        run.stdout.read()
        assert "the request was cancelled" in run.stderr.read()
        assert run.wait(LIMIT_S) == 2
    server.wait_free()
    again = ask(server, "cancel", request["id"])
    assert (again.returncode, again.stdout) == (2, "")
    assert f"id = '{request['id']}' is not a request in progress" in again.stderr


# chat


def test_a_conversation(server: Server) -> None:
    lines = f"{QUESTION}\nAnd of Italy?\n/stats\n/exit\n"
    outcome = ask(server, "chat", *GREEDY, stdin=lines)
    assert outcome.returncode == 0, outcome.stderr
    first, second, last, turns, cache = outcome.stdout.splitlines()
    assert first == ANSWER
    assert "Rome" in second
    found = re.fullmatch(r"last answer: \d+ tokens, .*; (\d+) of (\d+) prompt tokens cached", last)
    assert found is not None
    prompt = len(server.post("/tokenize", {"messages": [{"role": "user", "content": QUESTION}]}).json["tokens"])
    assert int(found[1]) == prompt + 7  # the first question and its answer
    assert turns == "conversation: 2 turns, 8192 tokens of context"
    assert re.fullmatch(r"cache: \d+ of 399 blocks hold earlier text, \d+ evicted; .*", cache) is not None


def test_at_a_terminal(server: Server) -> None:
    """The server is named, and Ctrl-C stops the answer but not the conversation."""
    server.wait_free()
    options = ("--server", server.url, "--api-key", KEY, "--max-tokens", "2000", "--temperature", "0")
    terminal = Terminal("chat", *options, env=NO_SERVER)
    try:
        at = terminal.wait_for(f"using {DEFAULT_MODEL} on {server.url}")
        at = terminal.wait_for("> ", after=at)
        terminal.type("Write a very long story about a ship.\n")
        at = terminal.wait_for("ship", after=terminal.wait_for("ship.", after=at))  # the echo, then the answer
        terminal.type("\x03")
        at = terminal.wait_for("[stopped]", after=at)
        server.wait_free()
        terminal.type(f"/reset\n{QUESTION}\n")
        terminal.wait_for("> ", after=terminal.wait_for(ANSWER, after=at))
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
