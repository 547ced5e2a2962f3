"""A real worker process with a real, tiny model: served, killed, stopped, starved, orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from quire.core.request import FinishReason, Priority, SamplingParams
from quire.engine.build import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.model import ModelText
from quire.engine.outputs import Delta
from quire.engine.params import GenerationParams, GenerationRequest
from quire.engine.wire import Add, Cancel, FrameReader, Stepped, from_worker, pack, to_worker
from quire.errors import ContextTooLong, InvalidRequest, ModelFileError, RequestFailed, WorkerDied

T = TypeVar("T")
LIMIT_S = 120.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


@asynccontextmanager
async def client(path: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    options = {name: settings.pop(name) for name in ("hang_limit_s", "on_loading") if name in settings}
    text = ModelText.open(path)
    config = EngineConfig(**{"num_blocks": 200, "max_seqs": 8, "num_threads": 1, **settings})
    engine = EngineClient(path, text, config, **options)
    try:
        yield engine
    finally:
        await engine.close()
        text.close()


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def request(engine: EngineClient, prompt: str = "The quick brown fox", **params: Any) -> GenerationRequest:
    settings = GenerationParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    return engine.text.request(engine.text.encode(prompt, engine.max_context), settings)


def test_requests_are_served_together_and_loading_is_told(tiny_model: Path) -> None:
    async def work() -> None:
        told: list[tuple[int, int]] = []
        async with client(tiny_model, on_loading=lambda done, total: told.append((done, total))) as engine:
            prompts = [f"The dog number {i}" for i in range(12)]
            alone = [(await engine.generate(request(engine, prompt))).text for prompt in prompts[:3]]
            together = await asyncio.gather(*(engine.generate(request(engine, prompt)) for prompt in prompts))
            assert [output.text for output in together[:3]] == alone
            assert all(output.usage.completion_tokens == 8 for output in together)
            stats = await engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.cache.num_in_use) == (0, 0, 0)
        assert told[-1][0] == told[-1][1] > 0

    run(work())


def test_deltas_stream_and_the_cache_is_counted(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            asked = request(engine, "The quick brown fox jumps over the lazy dog. " * 5, n=2, seed=3, temperature=1.0)
            generation = await engine.submit(asked)
            texts = ["", ""]
            async for delta in generation.deltas():
                texts[delta.index] += delta.text
            output = generation.answers.result()
            assert [one.text for one in output.completions] == texts
            again = await engine.generate(asked)
            assert [one.text for one in again.completions] == texts
            assert again.usage.cached_tokens == len(asked.prompt) - 1
            explained = await engine.explain(asked.prompt)
            assert explained.num_tokens == len(asked.prompt) - 1
            assert (await engine.explain(asked.prompt, salt="other")).num_tokens == 0

    run(work())


def test_leaving_early_frees_the_blocks(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            generation = await engine.submit(request(engine, max_tokens=2000))
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for _ in deltas:
                    break
            other = await engine.submit(request(engine, max_tokens=2000))
            other.cancel()
            stats = await engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.cache.num_in_use) == (0, 0, 0)

    run(work())


def test_what_is_refused_raises_there_and_disturbs_nobody(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            running = asyncio.create_task(engine.generate(request(engine, max_tokens=200)))
            vocabulary = engine.text.spec.vocab_size
            with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                await engine.generate(request(engine, logit_bias={vocabulary: 1.0}))
            with pytest.raises(ContextTooLong, match="4096"):
                await engine.generate(GenerationRequest((1,) * 5000, request(engine).sampling))
            assert (await running).usage.completion_tokens == 200

    run(work())


def test_a_killed_worker_fails_its_requests_and_the_next_gets_a_new_one(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            generations = [await engine.submit(request(engine, max_tokens=3000)) for _ in range(3)]
            pid = engine.worker_pid
            assert pid is not None
            async with contextlib.aclosing(generations[0].deltas()) as deltas:
                await anext(deltas)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(WorkerDied, match=r"tiny was ended by SIGKILL"):
                    await collect(deltas)
            for generation in generations[1:]:
                with pytest.raises(WorkerDied):
                    await generation.result()
            assert (await engine.generate(request(engine))).usage.completion_tokens == 8
            assert engine.worker_pid not in (None, pid)

    run(work())


def test_a_worker_that_hangs_is_ended(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model, hang_limit_s=1.0) as engine:
            await engine.start()
            pid = engine.worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.5)  # idle: silence means nothing
            assert engine.worker_pid == pid
            with pytest.raises(WorkerDied, match="no sign of life for 1 s"):
                await engine.generate(request(engine))
            assert not is_running(pid)

    run(work())


def test_a_model_that_cannot_be_loaded_says_why(tiny_model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            engine._path = tmp_path / "gone.gguf"
            engine._path.write_bytes(b"GGUF")
            with pytest.raises(ModelFileError, match=r"gone\.gguf"):
                await engine.start()

    run(work())


def test_text_that_cannot_be_made_ends_its_request_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            good = await engine.submit(request(engine, max_tokens=100))
            bad = await engine.submit(request(engine, "Ein kleiner Text", max_tokens=100))

            def fail(*_: object) -> None:
                raise RuntimeError("detokeniser")

            monkeypatch.setattr(bad.answers, "push", fail)
            with pytest.raises(RequestFailed, match="detokeniser"):
                await bad.result()
            assert (await good.result()).usage.completion_tokens == 100
            assert (await engine.stats()).cache.num_in_use == 0

    run(work())


def test_a_stop_string_ends_the_request_over_there(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            whole = await engine.generate(request(engine, max_tokens=60))
            stop = whole.text[5:8]
            output = await engine.generate(request(engine, max_tokens=2000, stop=stop))
            assert output.text == whole.text[: whole.text.index(stop)]
            assert output.completions[0].finish_reason is FinishReason.STOP
            assert output.usage.completion_tokens < 60
            assert (await engine.stats()).num_running == 0

    run(work())


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_costs_no_cpu(tiny_model: Path) -> None:
    async def work() -> None:
        async with client(tiny_model) as engine:
            await engine.generate(request(engine))
            pid = engine.worker_pid
            assert pid is not None
            await asyncio.sleep(0.3)
            before, own = cpu_ticks(pid), time.process_time()
            await asyncio.sleep(2)
            assert cpu_ticks(pid) - before <= 1  # of 200
            assert time.process_time() - own < 0.02

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_does_not_outlive_its_parent(tiny_model: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from quire.engine.build import EngineConfig\n"
        "from quire.engine.client import EngineClient\n"
        "from quire.engine.model import ModelText\n"
        "async def main():\n"
        "    path = Path(sys.argv[1])\n"
        "    client = EngineClient(path, ModelText.open(path), EngineConfig(num_blocks=50))\n"
        "    await client.start()\n"
        "    print(client.worker_pid, flush=True)\n"
        "    os._exit(1)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_model)], capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(done.stdout)
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the worker lives on")


def test_the_client_does_not_import_torch() -> None:
    script = (
        "import sys, quire.engine.client, quire.engine.worker\n"
        "heavy = {'torch', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# The wire


def test_frames_survive_any_cutting() -> None:
    messages = [Cancel(i) for i in range(5)]
    data = b"".join(pack(message) for message in messages)
    for size in (1, 3, 7, len(data)):
        reader = FrameReader()
        frames = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
        assert [to_worker.decode(frame) for frame in frames] == messages


def test_garbage_is_refused_not_obeyed() -> None:
    with pytest.raises(ValueError, match="frame of"):
        FrameReader().feed(b"\xff\xff\xff\xff....")
    with pytest.raises(msgspec.ValidationError):
        to_worker.decode(msgspec.msgpack.encode({"type": "add", "request_id": "x"}))
    with pytest.raises(msgspec.ValidationError):
        from_worker.decode(msgspec.msgpack.encode({"type": "exec", "code": "1"}))
    fields = {"request_id": 1, "prompt": [1], "priority": 1, "salt": "", "parent_id": None}
    forged = msgspec.msgpack.encode({"type": "add", "sampling": {"temperature": 1e9}, **fields})
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        to_worker.decode(forged)


def test_messages_come_back_as_they_were() -> None:
    sampling = SamplingParams(logit_bias={5: 1.5}, seed=2**63 - 1, logprobs=2)
    message = Add(1, (1, 2), sampling, Priority.LOW, "salt", None)
    assert to_worker.decode(pack(message)[4:]) == message
    assert from_worker.decode(pack(Stepped(()))[4:]) == Stepped(())
