"""Workers that die, hang and come back: who is told what, and who starts the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.worker.client import EngineClient
from quire.engine.worker.process import WorkerProcess
from quire.engine.worker.protocol import Failed, GetStats, Stepped, Working, pack
from quire.errors import LostBeforeStart, ModelFileError, WorkerDied
from tests.engine.serving import SLOW, client, request, run, until
from tests.waiting import HANG_S


@asynccontextmanager
async def supervised(path: Path, **settings: Any) -> AsyncIterator[tuple[EngineClient, asyncio.Task[None]]]:
    """A client whose worker is kept alive, once it serves."""
    async with client(path, backend="fake", **settings) as engine:
        watching = asyncio.create_task(engine.supervise())
        try:
            await until(lambda: engine.facts is not None)
            yield engine, watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def kill(engine: EngineClient, number: signal.Signals = signal.SIGKILL) -> int:
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, number)
    return pid


# Who is told what


def test_who_ran_is_told_of_the_death_and_who_waited_may_ask_again(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model, backend="fake", max_num_seqs=1, device="20ms") as engine:
            news = asyncio.Event()
            running = await engine.submit(request(engine, max_tokens=3000), updated=news)
            waiting = await engine.submit(request(engine), updated=news)
            await until(lambda: bool(running.take()))
            kill(engine)
            with pytest.raises(WorkerDied, match="was ended by SIGKILL") as died:
                await running.result()
            with pytest.raises(LostBeforeStart, match="was ended by SIGKILL"):
                await waiting.result()
            assert not isinstance(died.value, LostBeforeStart)
            assert news.is_set()
            assert (await engine.generate(waiting.answers.request)).usage.completion_tokens == 8

    run(work())


def test_who_was_in_the_first_step_of_a_worker_that_died_did_not_wait(tiny_model: Path) -> None:
    """It may have been the reason: asking again is not safe."""

    async def work() -> None:
        async with client(tiny_model, backend="fake", device="300ms") as engine:
            killed: list[int] = []
            generation = await engine.submit(request(engine), on_start=lambda _: killed.append(kill(engine)))
            with pytest.raises(WorkerDied) as died:
                await generation.result()
            assert not isinstance(died.value, LostBeforeStart)

    run(work())


def test_what_a_worker_said_last_is_heard_though_it_left_orders_unread(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("quire.engine.worker.process._spawn", spawn)

    async def work() -> None:
        news: list[Any] = []
        ends: list[str] = []
        process = WorkerProcess(news.append, ends.append)
        process.send(GetStats(1))
        process._process.wait()
        for number in range(2, 5):
            process.send(GetStats(number))  # nobody reads this any more
        await until(lambda: bool(ends))
        assert news == [Failed("InvariantViolation", "why")]
        assert ends == ["ended with exit code 3"]

    run(work())


def test_a_signal_that_asks_for_an_end_is_not_for_the_worker(tiny_model: Path) -> None:
    """A service manager sends it to the whole group; the server serves to the end first."""

    async def work() -> None:
        async with client(tiny_model, backend="fake", device="5ms") as engine:
            generation = await engine.submit(request(engine, max_tokens=40))
            await until(lambda: bool(generation.take()))
            kill(engine, signal.SIGTERM)
            kill(engine, signal.SIGINT)
            assert (await generation.result()).usage.completion_tokens == 40

    run(work())


# Who starts the next one


def test_a_worker_that_dies_is_replaced_without_being_asked(tiny_model: Path) -> None:
    async def work() -> None:
        async with supervised(tiny_model) as (engine, watching):
            assert engine.num_restarts == 0
            first = kill(engine)
            await until(lambda: engine.facts is not None and engine.worker_pid not in (None, first))
            assert engine.num_restarts == 1
            assert (await engine.generate(request(engine))).usage.completion_tokens == 8
            await engine.close()
            await watching  # it ends by itself

    run(work())


def test_supervision_and_requests_start_one_worker_between_them(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model, backend="fake") as engine:
            watching = asyncio.create_task(engine.supervise())
            asked = request(engine)
            await asyncio.gather(*(engine.generate(asked) for _ in range(5)))
            assert engine.num_restarts == 0
            pid = kill(engine)
            await until(lambda: engine.worker_pid != pid)
            await asyncio.gather(*(engine.generate(asked) for _ in range(5)))
            assert engine.num_restarts == 1
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    run(work())


def test_a_model_that_cannot_be_loaded_the_first_time_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with client(tiny_model, backend="fake") as engine:
            engine._path = tmp_path / "broken.gguf"
            engine._path.write_bytes(b"GGUF")
            with pytest.raises(ModelFileError, match=r"broken\.gguf"):
                await engine.supervise()

    run(work())


def test_a_model_that_cannot_be_loaded_again_is_tried_until_it_can(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MAX_BACKOFF_S", 0.1)

    async def work() -> None:
        async with supervised(tiny_model) as (engine, watching):
            good, engine._path = engine._path, tmp_path / "gone.gguf"
            kill(engine)
            await until(lambda: "could not be started again" in caplog.text)
            assert not watching.done()
            assert (engine.facts, engine.is_moving) == (None, False)
            engine._path = good
            await until(lambda: engine.facts is not None)
            assert engine.num_restarts >= 2

    with caplog.at_level(logging.ERROR):
        run(work())


def test_a_process_that_cannot_be_started_is_tried_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MAX_BACKOFF_S", 0.1)

    async def work() -> None:
        async with supervised(tiny_model) as (engine, watching):

            def fail(_fd: int) -> None:
                raise BlockingIOError("no process left")

            with monkeypatch.context() as patch:
                patch.setattr("quire.engine.worker.process._spawn", fail)
                kill(engine)
                await until(lambda: engine._num_early_deaths >= 2)
                with pytest.raises(WorkerDied, match="no process left"):
                    await engine.start()
            assert not watching.done()
            await until(lambda: engine.facts is not None)

    run(work())


def test_a_close_does_not_wait_for_a_pause(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.client.MAX_BACKOFF_S", 10 * HANG_S)

    async def work() -> None:
        async with supervised(tiny_model) as (engine, watching):
            engine._num_early_deaths = 50  # the pause is longer than the test may take
            kill(engine)
            await until(lambda: engine._pause is not None)
            asked = asyncio.create_task(engine.start())
            await engine.close()
            await watching
            with pytest.raises(WorkerDied, match="closed"):
                await asked

    run(work())


def test_supervision_that_is_cancelled_leaves_the_worker_alone(tiny_model: Path) -> None:
    async def work() -> None:
        async with supervised(tiny_model) as (engine, watching):
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            assert (await engine.generate(request(engine))).usage.completion_tokens == 8
            assert engine.num_restarts == 0

    run(work())


# Whether it moves


def test_a_worker_moves_unless_it_is_silent_with_work(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model, hang_limit_s=600.0, **SLOW) as engine:
            states = [engine.is_moving]  # there is no worker
            await engine.start()

            def is_moving_a_minute_later() -> bool:
                assert engine._connection is not None
                engine._connection.process._heard_s -= 60
                return engine.is_moving

            states.append(is_moving_a_minute_later())  # nothing is asked of it: silence means nothing
            generation = await engine.submit(request(engine, max_tokens=3900))
            states.append(engine.is_moving)  # its time began with the work
            await until(lambda: bool(generation.take()))
            kill(engine, signal.SIGSTOP)
            states.append(is_moving_a_minute_later())
            assert states == [False, True, True, False]
            kill(engine, signal.SIGCONT)
            await until(lambda: engine.is_moving)
            generation.cancel()

    run(work())


def test_a_worker_that_announced_a_long_step_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has spoken again."""
    script = (
        "import socket, sys\n"
        "peer = socket.socket(fileno=int(sys.argv[1]))\n"
        "peer.sendall(bytes.fromhex(sys.argv[2]))\n"
        "peer.recv(1)\n"
        "peer.sendall(bytes.fromhex(sys.argv[3]))\n"
        "peer.recv(1)\n"
    )

    def spawn(fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, str(fd), pack(Working(77.0)).hex(), pack(Stepped(())).hex()]
        return subprocess.Popen(command, pass_fds=[fd])

    monkeypatch.setattr("quire.engine.worker.process._spawn", spawn)

    async def work() -> list[float]:
        news: list[Any] = []
        process = WorkerProcess(news.append, lambda _: None)
        process.expect_message(60.0)
        found = [process.announced_s]
        await until(lambda: len(news) == 1)
        found.append(process.announced_s)
        process._socket.send(b"x")
        await until(lambda: len(news) == 2)
        found.append(process.announced_s)
        await process.close()
        return found

    assert run(work()) == [0.0, 77.0, 0.0]
