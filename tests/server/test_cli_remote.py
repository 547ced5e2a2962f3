"""`quire generate` and `quire chat` with a real server and the real model: the same answers as without a server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runs import quire
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


# generate


def test_the_answer_alone_is_on_stdout(server: Server) -> None:
    outcome = ask(server, "generate", QUESTION, *GREEDY)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, f"{ANSWER}\n", "")
    server.wait_for("key=key-1 .*completion_tokens=8 ")  # the server has answered


# chat


def test_a_conversation(server: Server) -> None:
    lines = f"{QUESTION}\nAnd of Italy?\n/stats\n/exit\n"
    outcome = ask(server, "chat", *GREEDY, stdin=lines)
    assert outcome.returncode == 0, outcome.stderr
    first, second, last, turns = outcome.stdout.splitlines()
    assert first == ANSWER
    assert "Rome" in second
    found = re.fullmatch(r"last answer: \d+ tokens, .*; (\d+) of (\d+) prompt tokens cached", last)
    assert found is not None
    prompt = len(server.post("/tokenize", {"messages": [{"role": "user", "content": QUESTION}]}).json["tokens"])
    assert int(found[1]) == prompt + 7  # the first question and its answer
    assert turns == "conversation: 2 turns, 8192 tokens of context"
