"""The server process that `quire batch` starts for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.http_stream import ServerError
from quire.cli.server_client import PATIENT, ServerClient, serving
from quire.errors import RequestFailed
from tests.server.rig import children, command_line
from tests.waiting import eventually

FAKE = ("--backend", "fake", "--num-blocks", "400", "--max-num-seqs", "2")


def is_alive(pid: int) -> bool:
    return bool(command_line(pid))  # empty for a process that has ended, reaped or not


def test_a_server_runs_until_it_is_no_longer_needed(tiny_model: Path) -> None:
    with serving(str(tiny_model), FAKE) as process:
        server = ServerClient(process.url, None, PATIENT)
        server.wait_until_ready()
        assert server.fetch("/version")["scheduling"]["max_num_seqs"] == 2
        workers = children(process.pid)
        assert workers
        assert process.pid in children(os.getpid())
    assert not is_alive(process.pid)
    eventually(lambda: not any(map(is_alive, workers)), "its workers have ended")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RequestFailed])
@pytest.mark.kept("KeyboardInterrupt")
def test_a_server_is_stopped_whatever_happens(tiny_model: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), serving(str(tiny_model), FAKE) as process:
        raise error("something happens")
    assert not is_alive(process.pid)


def test_a_server_that_does_not_react_is_killed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.server_client.STOP_S", 0.1)
    with serving(str(tiny_model), FAKE) as process:
        os.kill(process.pid, signal.SIGSTOP)
    assert not is_alive(process.pid)


def test_options_of_the_environment_do_not_reach_the_server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-somebody-elses-secret")
    monkeypatch.setenv("QUIRE_LOW_SHARE", "0.5")
    with serving(str(tiny_model), FAKE) as process:
        version = ServerClient(process.url, None, PATIENT).fetch("/version")  # no key
    assert version["scheduling"]["low_share"] is None


def test_the_error_of_a_server_that_cannot_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="did not start: it ended with exit code 2") as caught,
        serving(str(tmp_path / "nowhere"), FAKE),
    ):
        raise AssertionError("it started")
    assert "no such file or folder" in str(caught.value)


def test_what_a_server_lacks_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"Hi"\n')
    script = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from quire.cli.main import run\n"
        "sys.argv = ['quire', 'batch', 'in.jsonl', '-', '--local', '--model', '/no/such/model']\n"
        "run()\n"
    )
    command = [sys.executable, "-c", script]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 2
    how = f"{sys.executable} -m pip install uvicorn"
    assert outcome.stderr == f"quire: a private server needs uvicorn, which is not installed: {how}\n"
