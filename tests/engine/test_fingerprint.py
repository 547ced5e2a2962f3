"""`system_fingerprint`: it differs exactly where answers may differ."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.backends.native.library import choose_kernels, kernels_available
from quire.engine import fingerprint as arithmetic
from quire.engine.composition import EngineConfig, begin_fingerprint, make_engine
from quire.engine.fingerprint import Fingerprinting, describe
from quire.engine.levels.disk_store import find_spaces
from quire.engine.worker import client as client_module
from quire.engine.worker.client import WorkerConnection
from quire.engine.worker.protocol import Fingerprinted, Ready
from tests.engine.serving import client
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "m")


def fingerprint(path: Path, **settings: Any) -> str:
    """Of a real engine."""
    config = EngineConfig(**{"num_blocks": 40, "threads": 1, "max_num_seqs": 4, **settings})
    engine = make_engine(path, config)
    ended = threading.Event()
    try:
        found = begin_fingerprint(path, config, engine, ended.set).wait()
        assert ended.wait(HANG_S)
        assert found.startswith("fp_")
        return found
    finally:
        engine.close()


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "native": [
        {},
        {"precision": "exact"},
        {"precision": "fast"},
        {"load_format": "dummy"},
    ],
    "torch": [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"enable_drafts": False},  # verified in larger batches, which round in other ways
        {"load_format": "dummy"},
    ],
    "fake": [{}, {"block_size": 16}],
}
EQUAL: dict[str, list[dict[str, Any]]] = {
    "native": [
        {},
        {"max_num_seqs": 2},
        {"num_blocks": 60},
        {"threads": 2},
        {"scheduling_policy": "fcfs"},
        {"enable_drafts": False},  # a row has the same bits in any batch
        {"enable_prefix_caching": False},
        {"max_waiting": 7, "max_num_batched_tokens": 99, "max_chunk_tokens": 33},
    ],
    "torch": [{}, {"max_num_seqs": 2}, {"num_blocks": 60}, {"scheduling_policy": "fcfs"}, {"device": "cpu"}],
    "fake": [{}, {"device": "1ms"}, {"max_num_seqs": 2}, {"enable_drafts": False}],
}


@pytest.mark.parametrize("backend", DIFFERENT)
def test_settings_that_change_arithmetic_change_the_fingerprint(model: Path, backend: str) -> None:
    found = [fingerprint(model, backend=backend, **settings) for settings in DIFFERENT[backend]]
    assert len(set(found)) == len(found), dict(zip(map(str, DIFFERENT[backend]), found, strict=True))


@pytest.mark.parametrize("backend", EQUAL)
def test_other_settings_do_not(model: Path, backend: str) -> None:
    found = {str(settings): fingerprint(model, backend=backend, **settings) for settings in EQUAL[backend]}
    assert len(set(found.values())) == 1, found


@pytest.fixture
def _best_kernels() -> Iterator[None]:
    yield
    choose_kernels(kernels_available()[0])


@pytest.mark.usefixtures("_best_kernels")
def test_every_variant_of_the_kernels_has_its_own(model: Path) -> None:
    found = set()
    for name in kernels_available():
        choose_kernels(name)
        found.add(fingerprint(model, backend="native"))
    assert len(found) == len(kernels_available())


def copy_of(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


def test_the_files_of_the_model(model: Path, tmp_path: Path) -> None:
    """Contents count, the name of the model does not: also of the files that determine prompts and sampling."""
    first = fingerprint(model, backend="fake")
    assert fingerprint(copy_of(model, tmp_path / "another name"), backend="fake") == first
    found = [first]
    for name in ("model.safetensors", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        folder = copy_of(model, tmp_path / name)
        file = folder / name
        data = file.read_bytes() if file.exists() else b"{}"
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("safetensors") else data + b" ")
        found.append(fingerprint(folder, backend="fake"))
    assert len(set(found)) == len(found)


def test_the_disk_cache_has_the_same_description(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    config = EngineConfig(backend="native", num_blocks=200, threads=1, disk_cache="9M", cache_dir=str(folder))  # type: ignore[arg-type]
    engine = make_engine(model, config)
    (space,) = find_spaces(folder)
    facts = {name: value for name, value in space.facts.items() if name != "secret"}
    assert facts == describe(facts["weights"], "auto", engine.runner.facts())
    engine.close()
    cached = fingerprint(model, backend="native", num_blocks=200, disk_cache="9M", cache_dir=str(folder))
    assert cached == fingerprint(model, backend="native")


def test_large_files_do_not_delay_the_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digest is computed after it, and remembered: the next start has it at once."""
    monkeypatch.setattr(arithmetic, "MAX_AWAITED_BYTES", 0)
    monkeypatch.setattr(arithmetic, "MAX_FORGOTTEN_BYTES", 0)
    may_end, ended = threading.Event(), threading.Event()

    def fingerprint_of(weights: str, text: str) -> str:
        assert may_end.wait(HANG_S)
        return weights + text

    files, memo = [model / "model.safetensors"], tmp_path / "folder" / "digests.json"
    found = Fingerprinting(files, [model / "tokenizer.json"], memo, fingerprint_of, ended.set)
    assert (found.wait(), found.found) == ("", "")
    may_end.set()
    assert ended.wait(HANG_S)
    assert len(found.found) == 64 + len("tokenizer.json=") + 64
    assert memo.exists()


def test_a_file_that_cannot_be_read_leaves_answers_without_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "text").mkdir()  # reading it raises an error
    ended = threading.Event()
    found = Fingerprinting([tmp_path / "a"], [tmp_path / "text"], tmp_path / "memo", lambda *_: "fp", ended.set)
    assert found.wait() == ""
    assert ended.is_set()


LATE = """
import sys, time
from pathlib import Path
from quire.engine import fingerprint
from quire.engine.worker import worker
flag, digest = Path(sys.argv.pop()), fingerprint.weights_digest
def wait(*values):
    while not flag.exists():
        time.sleep(0.01)
    return digest(*values)
fingerprint.MAX_AWAITED_BYTES, fingerprint.weights_digest = 0, wait
worker.main()
"""


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_client_learns_it_with_the_start_or_later(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Once. An idle worker reports a late one by itself."""
    messages: list[Any] = []
    take_message = WorkerConnection._take_message

    def take(self: WorkerConnection, message: Any) -> None:
        messages.extend([message] if isinstance(message, Ready | Fingerprinted) else [])
        take_message(self, message)

    monkeypatch.setattr(WorkerConnection, "_take_message", take)
    flag = tmp_path / "flag"

    def spawn(fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", LATE, str(fd), str(flag)], pass_fds=[fd])

    if is_late:
        monkeypatch.setattr(client_module, "_spawn", spawn)
    expected = fingerprint(model, backend="fake")
    async with client(model, backend="fake") as engine:
        before = engine.system_fingerprint
        assert before is None
        await engine.start()
        if is_late:
            before = engine.system_fingerprint
            assert before is None
            flag.touch()
            await asyncio.to_thread(eventually, lambda: engine.system_fingerprint is not None, "it is known")
        for _ in range(2):  # when it answers the second time, its loop has run
            await engine.stats()
        assert engine.system_fingerprint == expected
    assert [type(one) for one in messages] == [Ready, Fingerprinted][: 1 + is_late]
