"""Workers that die or hang: errors of their requests, and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.worker.client import EngineClient, WorkerProcess
from quire.engine.worker.protocol import Ask, Failed, GetStats, Load, pack
from quire.errors import LostBeforeStart, ModelFileError, WorkerDied
from tests.engine.serving import SLOW, client, generate, request, result, until, worker_pid

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def supervised(path: Path, **settings: Any) -> AsyncIterator[tuple[EngineClient, asyncio.Task[None]]]:
    """A supervised client with a ready worker."""
    async with client(path, backend="fake", **settings) as engine:
        watching = asyncio.create_task(engine.supervise())
        try:
            await until(lambda: engine.facts is not None)
            yield engine, watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def kill(engine: EngineClient, number: signal.Signals = signal.SIGKILL) -> int:
    pid = worker_pid(engine)
    assert pid is not None
    os.kill(pid, number)
    return pid


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux has the file")
async def test_a_worker_does_not_get_the_keys_of_the_server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY", "OF_ANOTHER_PROGRAM"):
        monkeypatch.setenv(name, "sk-secret-00000001")

    async with supervised(tiny_model) as (engine, _):
        variables = Path(f"/proc/{worker_pid(engine)}/environ").read_bytes().split(b"\0")
        assert [one.partition(b"=")[0] for one in variables if b"sk-secret" in one] == [b"OF_ANOTHER_PROGRAM"]


# Errors


async def test_running_requests_get_worker_died_and_waiting_ones_lost_before_start(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake", max_num_seqs=1, device="20ms") as engine:
        running = await engine.submit(request(engine, max_tokens=3000))
        waiting = await engine.submit(request(engine))
        await until(lambda: bool(running.take()))
        kill(engine)
        with pytest.raises(WorkerDied, match="was ended by SIGKILL") as died:
            await result(running)
        with pytest.raises(LostBeforeStart, match="was ended by SIGKILL"):
            await result(waiting)
        assert not isinstance(died.value, LostBeforeStart)
        assert (await generate(engine, waiting.request)).usage.completion_tokens == 8


async def test_a_request_in_the_first_step_gets_worker_died(tiny_model: Path) -> None:
    """It may have been the cause, so a retry is not safe."""
    async with client(tiny_model, backend="fake", device="300ms") as engine:
        killed: list[int] = []
        generation = await engine.submit(request(engine), on_start=lambda _: killed.append(kill(engine)))
        with pytest.raises(WorkerDied) as died:
            await result(generation)
        assert not isinstance(died.value, LostBeforeStart)


async def test_the_last_message_is_read_even_if_the_worker_left_messages_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "import socket, sys\n"
        "peer = socket.socket(fileno=int(sys.argv[1]))\n"
        "peer.recv(1)\n"
        "peer.sendall(bytes.fromhex(sys.argv[2]))\n"
        "sys.exit(3)\n"
    )

    def spawn(fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, str(fd), pack(Failed("InvariantViolation", "why")).hex()]
        return subprocess.Popen(command, pass_fds=[fd])

    monkeypatch.setattr("quire.engine.worker.client._spawn", spawn)

    messages: list[Any] = []
    ends: list[str] = []
    process = WorkerProcess(messages.append, ends.append)
    process.send(Ask(1, GetStats()))
    process._process.wait()
    for number in range(2, 5):
        process.send(Ask(number, GetStats()))  # never read
    await until(lambda: bool(ends))
    assert messages == [Failed("InvariantViolation", "why")]
    assert ends == ["ended with exit code 3"]


async def test_a_worker_ignores_sigterm_and_sigint(tiny_model: Path) -> None:
    """A service manager sends them to the whole process group; the server finishes its requests first."""
    async with client(tiny_model, backend="fake", device="5ms") as engine:
        generation = await engine.submit(request(engine, max_tokens=40))
        await until(lambda: bool(generation.take()))
        kill(engine, signal.SIGTERM)
        kill(engine, signal.SIGINT)
        assert (await result(generation)).usage.completion_tokens == 40


# Restarts


async def test_supervision_and_requests_start_only_one_worker(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        watching = asyncio.create_task(engine.supervise())
        asked = request(engine)
        await asyncio.gather(*(generate(engine, asked) for _ in range(5)))
        assert engine.num_restarts == 0
        pid = kill(engine)
        await until(lambda: worker_pid(engine) != pid)
        await asyncio.gather(*(generate(engine, asked) for _ in range(5)))
        assert engine.num_restarts == 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_failure_of_the_first_load_is_raised(tiny_model: Path, tmp_path: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        (tmp_path / "broken.gguf").write_bytes(b"GGUF")
        engine._load = Load(str(tmp_path / "broken.gguf"), engine._config)
        with pytest.raises(ModelFileError, match=r"broken\.gguf"):
            await engine.supervise()


async def test_later_load_failures_are_retried(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MAX_BACKOFF_S", 0.1)
    async with supervised(tiny_model) as (engine, watching):
        good, engine._load = engine._load, Load(str(tmp_path / "gone.gguf"), engine._config)
        kill(engine)
        await until(lambda: "could not be started again" in caplog.text)
        assert not watching.done()
        assert (engine.facts, engine.is_moving) == (None, False)
        engine._load = good
        await until(lambda: engine.facts is not None)
        assert engine.num_restarts >= 2


async def test_a_failed_process_start_is_retried(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MAX_BACKOFF_S", 0.1)

    async with supervised(tiny_model) as (engine, watching):

        def fail(_fd: int) -> None:
            raise BlockingIOError("no process left")

        with monkeypatch.context() as patch:
            patch.setattr("quire.engine.worker.client._spawn", fail)
            kill(engine)
            await until(lambda: engine._num_early_deaths >= 2)
            with pytest.raises(WorkerDied, match="no process left"):
                await engine.start()
        assert not watching.done()
        await until(lambda: engine.facts is not None)


# is_moving


async def test_is_moving_is_false_for_a_silent_worker_with_work(tiny_model: Path) -> None:
    async with client(tiny_model, hang_limit_s=600.0, **SLOW) as engine:
        states = [engine.is_moving]  # there is no worker
        await engine.start()

        def is_moving_a_minute_later() -> bool:
            assert engine._connection is not None
            assert isinstance(engine._connection.process, WorkerProcess)
            engine._connection.process._heard_s -= 60
            return engine.is_moving

        states.append(is_moving_a_minute_later())  # idle: silence is normal
        generation = await engine.submit(request(engine, max_tokens=3900))
        states.append(engine.is_moving)  # the limit starts with the work
        await until(lambda: bool(generation.take()))
        kill(engine, signal.SIGSTOP)
        states.append(is_moving_a_minute_later())
        assert states == [False, True, True, False]
        kill(engine, signal.SIGCONT)
        await until(lambda: engine.is_moving)
        generation.cancel()
