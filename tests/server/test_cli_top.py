"""`quire top` with a server: one frame, snapshots as JSON, and a server that stops and starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runs import Terminal, quire
from tests.server.rig import FAKE, Server, serving
from tests.waiting import eventually

KEY = "top-0000-key"
NO_SERVER = {"QUIRE_SERVER": "", "QUIRE_API_KEY": "", "COLUMNS": "80", "LINES": "24"}
LONG = {"prompt": [1] * 70, "max_tokens": 6000, "ignore_eos": True, "stream": True}
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    del default_model  # downloaded by the fixture
    with serving(*FAKE, "--device", "20ms", "--api-key", KEY, key=KEY) as server:
        yield server


def test_one_frame_shows_a_request_that_runs(server: Server) -> None:
    facts = (server.url, MODEL, "in 399 blocks of 32 tokens", "1 running", "waiting 0 high", "hits", "tok/s", "req_")

    def is_whole() -> bool:  # a busy server may not have statistics of its worker yet
        outcome = quire("top", "--once", "--server", server.url, "--api-key", KEY, env=NO_SERVER)
        assert (outcome.returncode, outcome.stderr) == (0, "")
        assert max(map(len, outcome.stdout.splitlines())) <= 80
        return all(words in outcome.stdout for words in facts)

    with server.begin(LONG, "/v1/completions"):
        eventually(is_whole, str(facts))
    server.wait_free()


def test_snapshots_for_a_program(server: Server) -> None:
    once = quire("top", "--once", "--json", "--server", server.url, "--api-key", KEY, env=NO_SERVER)
    (found,) = map(json.loads, once.stdout.splitlines())
    assert found["models"][0]["name"] == MODEL
    command = [sys.executable, "-m", "quire", "top", "--json", "--interval", "0.1", "--server", server.url]
    with subprocess.Popen([*command, "--api-key", KEY], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        first, second = json.loads(run.stdout.readline()), json.loads(run.stdout.readline())
        run.terminate()
    assert second["tick"] > first["tick"]


def test_at_a_terminal_it_waits_for_a_stopped_server(default_model: Path) -> None:
    del default_model  # downloaded by the fixture
    with (
        serving(*FAKE) as server,
        Terminal("top", "--server", server.url, "--interval", "0.1", env={**NO_SERVER, "TERM": "xterm"}) as terminal,
    ):
        at = terminal.wait_for(MODEL)
        server.stop()
        terminal.wait_for("disconnected: ", after=at)
        port = str(server.address[1])
        with serving(*FAKE, "--port", port, "--served-model-name", "come-back"):
            terminal.wait_for("come-back", after=at)
            terminal.type("\x03")
            assert terminal.exit_code() == 0
