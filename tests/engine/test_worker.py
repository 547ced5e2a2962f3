"""A real worker process with a tiny model: requests, crashes, hangs, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner
from quire.core.values import FinishReason, SamplingParams
from quire.engine.composition import EngineConfig, make_scheduler
from quire.engine.engine import Engine, StepEstimator, Work
from quire.engine.generation import GenerationRequest
from quire.engine.worker.client import WorkerProcess
from quire.engine.worker.protocol import Add, Cancel, FrameReader, Stepped, Working, from_worker, pack, to_worker
from quire.engine.worker.worker import Worker
from quire.errors import ContextTooLong, InvalidRequest, QueueFull, WorkerDied
from tests.engine.serving import client, generate, request, result, run, until, usage, worker_pid
from tests.waiting import HANG_S, is_running, num_switches

pytestmark = pytest.mark.anyio


async def test_requests_are_batched_and_loading_is_reported(tiny_model: Path) -> None:
    progress: list[tuple[int, int]] = []
    async with client(tiny_model, on_loading=lambda done, total: progress.append((done, total))) as engine:
        prompts = [f"The dog number {i}" for i in range(12)]
        alone = [(await generate(engine, request(engine, prompt))).text for prompt in prompts[:3]]
        together = await asyncio.gather(*(generate(engine, request(engine, prompt)) for prompt in prompts))
        assert [output.text for output in together[:3]] == alone
        assert all(output.usage.completion_tokens == 8 for output in together)
        assert await usage(engine) == (0, 0, 0)
    assert progress[-1][0] == progress[-1][1] > 0


async def test_a_worker_that_hangs_is_killed(tiny_model: Path) -> None:
    async with client(tiny_model, hang_limit_s=1.0) as engine:
        await engine.start()
        pid = worker_pid(engine)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)  # idle: silence is normal
        assert worker_pid(engine) == pid
        with pytest.raises(WorkerDied, match="sent no message for 1 s"):
            await generate(engine, request(engine))
        assert not is_running(pid)


async def test_a_stop_string_ends_the_request_in_the_worker(tiny_model: Path) -> None:
    async with client(tiny_model) as engine:
        whole = await generate(engine, request(engine, max_tokens=60))
        stop = whole.text[5:8]
        output = await generate(engine, request(engine, max_tokens=2000, stop=stop))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.completions[0].finish_reason is FinishReason.STOP
        assert output.usage.completion_tokens < 60
        assert await usage(engine) == (0, 0, 0)


async def test_cancelling_one_waiter_of_a_load_does_not_affect_others(tiny_model: Path) -> None:
    async with client(tiny_model) as engine:
        asked = request(engine)
        first = asyncio.create_task(engine.start())
        await until(lambda: worker_pid(engine) is not None)
        second = asyncio.create_task(generate(engine, asked))
        third = asyncio.create_task(generate(engine, asked))
        await asyncio.sleep(0)
        pid = worker_pid(engine)
        first.cancel()
        second.cancel()
        assert (await third).usage.completion_tokens == 8
        assert (await generate(engine, asked)).usage.completion_tokens == 8
        assert worker_pid(engine) == pid


async def test_the_late_end_of_a_worker_does_not_affect_its_successor(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the old worker is reported after a new one has started."""
    async with client(tiny_model, hang_limit_s=1.0) as engine:
        await engine.start()
        assert engine._connection is not None
        first, connect = engine._connection.process, engine._connect
        engine._connect = partial(connect.func, engine.text.name, HANG_S, **connect.keywords)  # the next may be slow
        assert isinstance(first, WorkerProcess)
        is_served, wait = asyncio.Event(), first._wait_or_kill

        async def wait_longer(grace_s: float) -> int:
            await is_served.wait()
            return await wait(grace_s)

        monkeypatch.setattr(first, "_wait_or_kill", wait_longer)
        os.kill(first.pid, signal.SIGSTOP)
        lost = asyncio.create_task(generate(engine, request(engine)))
        await until(lambda: first.is_over)
        assert (await generate(engine, request(engine))).usage.completion_tokens == 8
        assert not lost.done()
        is_served.set()
        with pytest.raises(WorkerDied):
            await lost


async def test_repeated_deaths_back_off_and_close_is_final(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async with client(tiny_model) as engine:

        async def note(closed: Coroutine[Any, Any, bool], delay_s: float) -> None:
            closed.close()
            waits.append(delay_s)
            raise TimeoutError

        for num_deaths in (1, 2, 3):
            await engine.start()
            pid = worker_pid(engine)
            assert pid is not None
            with monkeypatch.context() as patch:
                patch.setattr("quire.engine.worker.client.asyncio.wait_for", note)
                os.kill(pid, signal.SIGKILL)
                while engine._num_early_deaths < num_deaths:
                    await asyncio.sleep(0.01)
                await engine.start()
        assert (await generate(engine, request(engine))).usage.completion_tokens == 8
        waiting = asyncio.create_task(engine.start())
        await engine.close()
        with pytest.raises(WorkerDied, match="closed"):
            await engine.start()
        await asyncio.gather(waiting, return_exceptions=True)
        assert worker_pid(engine) is None
    assert waits[:2] == [1.0, 2.0]


async def test_an_invalid_message_ends_only_its_request(tiny_model: Path) -> None:
    async with client(tiny_model) as engine:
        running = await engine.submit(request(engine, max_tokens=60))
        forged = await engine.submit(request(engine, max_tokens=60))
        assert engine._connection is not None
        ids = list(forged.request_ids)
        raw = msgspec.msgpack.encode({"type": "add", "request_ids": ids, "request": {"prompt": ["x"]}})
        assert isinstance(engine._connection.process, WorkerProcess)
        engine._connection.process._writer.push(len(raw).to_bytes(4, "little") + raw)
        engine._connection.process._flush()
        with pytest.raises(InvalidRequest):
            await result(forged)
        assert (await result(running)).usage.completion_tokens == 60


async def test_too_much_unread_data_is_refused(tiny_model: Path) -> None:
    async with client(tiny_model) as engine:
        innocent = await engine.submit(request(engine, max_tokens=30))
        large = GenerationRequest.of((70_000,) * 3_000_000, request(engine).sampling)
        with pytest.raises((QueueFull, ContextTooLong)) as caught:
            await asyncio.gather(*[generate(engine, large) for _ in range(8)])
        assert caught.type in (QueueFull, ContextTooLong)
        assert (await result(innocent)).usage.completion_tokens == 30


async def test_modules_in_the_working_directory_are_not_imported(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('HACKED', 'w').close()\n")
    monkeypatch.chdir(tmp_path)

    async with client(tiny_model) as engine:
        await generate(engine, request(engine))
    assert not (tmp_path / "HACKED").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_idle_costs_no_cpu(tiny_model: Path) -> None:
    async with client(tiny_model) as engine:
        await generate(engine, request(engine))
        pid = worker_pid(engine)
        assert pid is not None
        while True:  # until the audit has ended: then the worker sleeps without limit
            before, own_s = num_switches(pid), time.process_time()
            await asyncio.sleep(2)
            if num_switches(pid) == before and time.process_time() - own_s < 0.02:
                break


def test_the_client_does_not_import_torch() -> None:
    script = (
        "import sys, quire.engine.worker.client, quire.engine.worker.worker\n"
        "heavy = {'torch', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# The watchdog


class _Recorder:
    """A channel that records the messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def watched(*, has_overlap: bool) -> tuple[Worker, Engine, _Recorder]:
    """A worker after its warm-up, its engine and its channel."""
    runner = FakeRunner(Capacity(400, 4, max_num_seqs=4, max_model_len=1000, vocab_size=50, has_overlap=has_overlap))
    engine = Engine(runner, make_scheduler(runner, EngineConfig()))
    channel = _Recorder()
    worker = Worker(channel, engine, [])  # type: ignore[arg-type]
    worker.warm_up()
    assert channel.sent == []
    return worker, engine, channel


def announced(channel: _Recorder) -> list[float]:
    return [message.limit_s for message in channel.sent if isinstance(message, Working)]


def test_a_step_predicted_to_be_long_is_announced() -> None:
    worker, engine, channel = watched(has_overlap=False)
    worker._estimator = StepEstimator()
    worker._estimator.learn(Work(1, 1.0), 0.1)
    worker._estimator.learn(Work(100, 100.0), 10.0)
    engine.add(1, GenerationRequest.of([1] * 50, SamplingParams(temperature=0, max_tokens=1)))
    worker._step()
    (limit_s,) = announced(channel)
    assert 50 < limit_s < 60  # ten times the prediction
    assert isinstance(channel.sent[-1], Stepped)


def test_a_long_step_in_flight_is_announced_until_it_is_collected() -> None:
    """Its own announcement ends with the message of the previous step; the next plan is short."""
    worker, engine, channel = watched(has_overlap=True)
    worker._estimator = StepEstimator()
    worker._estimator.learn(Work(1, 1.0), 0.001)
    worker._estimator.learn(Work(100, 100.0), 10.0)
    engine.add(1, GenerationRequest.of([1] * 100, SamplingParams(temperature=0, max_tokens=2)))
    worker._step()  # enqueues the prompt
    worker._step()  # enqueues a decode, waits for the prompt
    assert len(announced(channel)) == 2
    assert [message.num_tokens for message in channel.sent if isinstance(message, Stepped)] == [0, 100]


def test_durations_are_attributed_to_the_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one step in flight, a call of `step` plans one and waits for the previous one."""
    worker, engine, _ = watched(has_overlap=True)
    learned: list[int] = []
    monkeypatch.setattr(worker._estimator, "learn", lambda work, _: learned.append(work.num_tokens))
    engine.add(1, GenerationRequest.of([1] * 20, SamplingParams(temperature=0, max_tokens=3)))
    planned: list[int] = []
    while engine.has_work:
        worker._step()
        planned.append(worker._planned.num_tokens)
    assert planned == [20, 1, 1, 0]
    assert learned == [0, 20, 1, 1]


LOUD = (
    "import socket, sys\n"
    "peer = socket.socket(fileno=int(sys.argv[1]))\n"
    "peer.sendall(bytes.fromhex(sys.argv[2]))\n"
    "peer.recv(1)\n"
    "peer.sendall(bytes.fromhex(sys.argv[3]))\n"
    "peer.recv(1)\n"
)


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_silent_worker_is_killed_unless_the_silence_was_announced(
    is_announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(Working(30.0) if is_announced else Stepped(()))

    def spawn(fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LOUD, str(fd), first.hex(), pack(Stepped(())).hex()]
        return subprocess.Popen(command, pass_fds=[fd])

    monkeypatch.setattr("quire.engine.worker.client._spawn", spawn)

    async def work() -> tuple[list[Any], list[str]]:
        messages: list[Any] = []
        ends: list[str] = []
        process = WorkerProcess(messages.append, ends.append)
        process.expect_message(60.0)
        await until(lambda: bool(messages))
        process.expect_message(0.7)
        if is_announced:
            process._heard_s += HANG_S  # as if this limit had applied when the message came
            await asyncio.sleep(1.0)  # longer than the limit
            process._socket.send(b"x")
        await until(lambda: bool(ends) or len(messages) > 1)
        seen = list(ends)
        process._process.kill()
        await process.close()
        return messages, seen

    messages, ends = run(work())
    if is_announced:
        assert ends == []
        assert messages == [Working(30.0), Stepped(())]
    else:
        assert "sent no message for 0.7 s" in ends[0]


# Preparation


class _Preparing(FakeRunner):
    """Has `num_pieces` to prepare and fails at one of them, if set. Records whether the engine had work."""

    def __init__(self, num_pieces: int, failing: int = -1) -> None:
        super().__init__(
            Capacity(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=100, vocab_size=50, has_overlap=False)
        )
        self.engine = Engine(self, make_scheduler(self, EngineConfig()))
        self.num_left = num_pieces
        self.num_calls = 0
        self.was_busy: list[bool] = []
        self._failing = failing

    def prepare(self) -> bool:
        self.was_busy.append(self.engine.has_work)
        self.num_calls += 1
        if self.num_calls == self._failing:
            raise RuntimeError("no memory for a graph")
        self.num_left -= 1
        return self.num_left > 0


class _Script(_Recorder):
    """A channel on which messages arrive at given calls. Records the timeout of each call."""

    def __init__(self, orders: dict[int, Any], num_calls: int) -> None:
        super().__init__()
        self._orders = orders
        self._num_calls = num_calls
        self.sleeps: list[float | None] = []

    def receive(self, timeout_s: float | None) -> list[Any]:
        self.sleeps.append(timeout_s)
        if len(self.sleeps) > self._num_calls:
            raise ConnectionError
        return [order] if (order := self._orders.get(len(self.sleeps))) is not None else []


def serve_script(runner: _Preparing, channel: _Script) -> list[int]:
    """Run a worker and return the generated tokens."""
    worker = Worker(channel, runner.engine, [])  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        worker.run()
    steps = [message for message in channel.sent if isinstance(message, Stepped)]
    full = [tuple(token for output in step.outputs for token in output.tokens) for step in steps]
    return [token for step, tokens in zip(steps, full, strict=True) for token in (*tokens, *step.token_ids)]


def ask(request_id: int) -> Add:
    sampling = SamplingParams(temperature=0, max_tokens=5)
    return Add((request_id,), GenerationRequest.of((1, 2, 3), sampling))


def test_a_runner_prepares_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.0)  # this channel does not sleep
    runner, channel = _Preparing(num_pieces=6), _Script({3: ask(1), 9: ask(2)}, num_calls=30)
    tokens = serve_script(runner, channel)
    assert len(tokens) == 10
    assert tokens[:5] == tokens[5:]
    assert runner.was_busy == [False] * 6  # two before the first request, one between, three after
    assert runner.num_calls == 6  # it reports when nothing is left
    assert channel.sleeps[:16] == [0.0] * 16  # messages are polled between pieces and steps
    assert channel.sleeps[-1] is None  # finally it sleeps


def test_a_failed_preparation_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.AUDIT_AFTER_S", 0.0)
    runner, channel = _Preparing(num_pieces=6, failing=3), _Script({5: ask(1)}, num_calls=30)
    assert len(serve_script(runner, channel)) == 5
    assert runner.num_calls == 3
    assert "no memory for a graph" in caplog.text
    assert channel.sleeps[-1] is None


# The protocol


def test_frames_are_read_however_the_stream_is_split() -> None:
    messages = [Cancel(i) for i in range(5)]
    data = b"".join(pack(message) for message in messages)
    for size in (1, 3, 7, len(data)):
        reader = FrameReader()
        frames = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
        assert [to_worker.decode(frame) for frame in frames] == messages


def test_invalid_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="frame of"):
        FrameReader().feed(b"\xff\xff\xff\xff....")
    with pytest.raises(msgspec.ValidationError):
        to_worker.decode(msgspec.msgpack.encode({"type": "add", "request_id": "x"}))
    with pytest.raises(msgspec.ValidationError):
        from_worker.decode(msgspec.msgpack.encode({"type": "exec", "code": "1"}))
    for sampling, words, problem in (
        ({"temperature": 1e9}, bytes(4), "temperature"),
        ({}, bytes(3), "prompt of 3 bytes"),
        ({}, b"", "prompt of 0 bytes"),
    ):
        request = {"sampling": sampling, "prompt": {"words": words, "largest": 0}}
        forged = {"type": "add", "request_ids": [1], "request": request}
        with pytest.raises(msgspec.ValidationError, match=problem):
            to_worker.decode(msgspec.msgpack.encode(forged))
