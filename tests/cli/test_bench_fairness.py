"""The fairness part of `quire bench`, with a real server. No test asserts a time or a share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.cli.bench import Load, NewTokens, Shape, Stream, StreamClient
from quire.cli.server_client import PATIENT, ServerClient, ServerError, ServerProcess, serving
from quire.core.values import Priority
from quire.errors import ContextTooLong, RequestFailed
from tests.server.rig import children, command_line

FAKE = ("--backend", "fake", "--num-blocks", "400", "--max-num-seqs", "2")
SHORT = Shape(8, 4)


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait without a limit: pytest has one."""
    while not is_so():
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return bool(command_line(pid))  # empty for a process that has ended, reaped or not


def servers_of(pid: int) -> list[int]:
    return [child for child in children(pid) if "quire serve" in command_line(child)]


@pytest.fixture(scope="module")
def process(tiny_model: Path) -> Iterator[ServerProcess]:
    with serving(str(tiny_model), FAKE) as process:
        yield process


@pytest.fixture
def client(process: ServerProcess) -> StreamClient:
    return StreamClient(ServerClient(process.url, None, PATIENT), "tiny", range(10, 200), seed=0)


# The server


def test_a_server_runs_until_it_is_no_longer_needed(tiny_model: Path) -> None:
    with serving(str(tiny_model), FAKE) as process:
        server = ServerClient(process.url, None, PATIENT)
        server.wait_until_ready()
        assert server.get("/version")["scheduling"]["max_num_seqs"] == 2
        workers = children(process.pid)
        assert workers
        assert process.pid in servers_of(os.getpid())
    assert not is_alive(process.pid)
    wait_until(lambda: not any(map(is_alive, workers)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RequestFailed])
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
        version = ServerClient(process.url, None, PATIENT).get("/version")  # no key
    assert version["scheduling"]["low_share"] is None


def test_the_error_of_a_server_that_cannot_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="did not start: it ended with exit code 2") as caught,
        serving(str(tmp_path / "nowhere"), FAKE),
    ):
        raise AssertionError("it started")
    assert "no such file or folder" in str(caught.value)


def test_what_a_server_lacks_is_named_before_anything_is_measured() -> None:
    script = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from quire.cli.main import run\n"
        "sys.argv = ['quire', 'bench', '--only', 'fairness', '--model', '/no/such/model']\n"
        "run()\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 2
    how = f"{sys.executable} -m pip install uvicorn"
    assert outcome.stderr == f"quire: the server of the fairness part needs uvicorn, which is not installed: {how}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.kept("15")
def test_a_bench_that_is_interrupted_leaves_no_server(tiny_model: Path, number: signal.Signals) -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "from quire.cli.main import run\n"
        "run()\n"
    )
    options = ("--model", str(tiny_model), "--backend", "fake", "--only", "fairness", "--seconds", "3600")
    command = [sys.executable, "-c", script, "bench", *options]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(children(server) for server in servers_of(bench.pid)))  # its worker runs
        (server,) = servers_of(bench.pid)
        os.kill(bench.pid, number)
        assert bench.wait() != 0
        assert not is_alive(server)
    finally:
        bench.kill()
        bench.wait()


# The clients


def test_a_stream_gives_every_token_of_every_prompt(client: StreamClient) -> None:
    found: list[NewTokens] = []
    Stream(client, client.body(Priority.LOW, SHORT, 3)).read(found.append)
    assert {one.prompt for one in found} == {0, 1, 2}
    for prompt in range(3):
        assert sum(one.num_tokens for one in found if one.prompt == prompt) == SHORT.output_tokens
        assert sum(one.is_finished for one in found if one.prompt == prompt) == 1


def test_prompts_and_salts_are_never_the_same(client: StreamClient) -> None:
    bodies = [client.body(Priority.HIGH, SHORT, 64) for _ in range(3)]
    prompts = [tuple(prompt) for body in bodies for prompt in body["prompt"]]
    assert len(set(prompts)) == 3 * 64
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({body["cache_salt"] for body in bodies}) == 3
    for body in bodies:
        assert len({prompt[0] for prompt in body["prompt"]}) == 64  # the cache shares even one token


def test_a_stream_that_is_cut_ends_without_an_error(client: StreamClient, process: ServerProcess) -> None:
    stream = Stream(client, client.body(Priority.LOW, Shape(8, 4000)))
    seen: list[NewTokens] = []

    def take(new: NewTokens) -> None:
        seen.append(new)
        stream.cut()

    stream.read(take)
    assert seen
    assert not any(new.is_finished for new in seen)
    wait_until(lambda: not ServerClient(process.url, None, PATIENT).get("/v1/cache/stats")["num_running"])


def test_a_stream_that_was_cut_before_it_began_sends_nothing(client: StreamClient) -> None:
    stream = Stream(client, client.body(Priority.LOW, SHORT))
    stream.cut()
    stream.read(lambda new: pytest.fail(str(new)))


def test_both_tiers_have_tokens_and_a_load_never_runs_out(client: StreamClient, process: ServerProcess) -> None:
    server = ServerClient(process.url, None, PATIENT)
    loads = [Load(client, tier, SHORT, 6) for tier in (Priority.HIGH, Priority.LOW)]
    for load in loads:
        load.start()
    try:
        wait_until(lambda: min(_checked(load).num_tokens for load in loads) > 10 * 6 * sum(SHORT))
        assert min(load.num_open for load in loads) >= 6
    finally:
        for load in loads:
            load.stop()
    for load in loads:
        load.check()  # a cancelled stream is no error
    wait_until(lambda: not server.get("/v1/cache/stats")["num_running"])


def _checked(load: Load) -> Load:
    load.check()
    return load


def test_a_refused_load_raises(client: StreamClient) -> None:
    load = Load(client, Priority.LOW, Shape(5000, 4), 2)  # the model has 4096
    load.start()
    with pytest.raises(ContextTooLong, match="4096"):
        wait_until(load.check)
    load.stop()


# All of it
