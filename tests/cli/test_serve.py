"""`quire serve`: options from flags, environment and file, errors that name them, terminal output."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from quire.backends.base import Capacity, RunnerFacts
from quire.backends.kv_memory import CPU_CAP, CPU_SHARE
from quire.cli.options import MemoryOption
from quire.cli.serve import _lan_address, announce, read_file
from quire.core.levels.levels import LevelStats
from quire.engine.composition import EngineConfig
from quire.engine.worker.protocol import Ready
from quire.server.config import ModelConfig, ServeConfig
from quire.server.launcher import Startup
from tests.cli.runs import quire
from tests.server.rig import FAKE, serving
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S


def refuse(*options: str, **env: str) -> str:
    """The error of a server that does not start."""
    outcome = quire("serve", *options, env=env)
    assert outcome.returncode != 0
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--port", "99999"), "--port = 99999 is not a whole number from 0 to 65535"),
    (("--max-queue", "0"), "--max-queue = 0 is not"),
    (("--max-num-seqs", "0"), "--max-num-seqs = 0 is not"),
    (("--max-num-seqs", "0"), "--max-num-seqs = 0 is not"),
    (("--max-model-len", "1"), "--max-model-len = 1 is not"),
    (("--queue-timeout", "nan"), "--queue-timeout = nan is not"),
    (("--max-body-size", "many"), "--max-body-size = 'many' is not a size"),
    (("--kv-memory", "900T"), "--kv-memory = 921,600 GiB is more than the "),
    (("--kv-memory", "2X"), "--kv-memory = '2X' is not a size"),
    (("--scheduling-policy", "lifo"), "--scheduling-policy = 'lifo' is not one of"),
    (("--kv-cache-dtype", "int4"), "--kv-cache-dtype = 'int4' is not one of auto, fp8"),
    (
        ("--kv-cache-dtype", "fp8", "--backend", "native"),
        "--kv-cache-dtype = 'fp8': only the torch backend supports it, and the backend is native",
    ),
    (("--quantization", "int3"), "--quantize = 'int3' is not one of 4, 8, int4, fp8"),
    (("--load-format", "pickle"), "--load-format = 'pickle' is not one of auto, dummy"),
    (("--metrics-compat", "tgi"), "--metrics-compat = 'tgi' is not one of vllm"),
    (("--log-level", "loud"), "--log-level = 'loud' is not one of"),
    (("--host", "0.0.0.0"), "no API key is set"),
    (("--kv-events", "5557"), "--kv-events = '5557' is not tcp://HOST:PORT with a port from 0 to 65535"),
    (("--kv-events", "tcp://*:5557"), "--kv-events = 'tcp://*:5557' would send the tokens of prompts to every network"),
    (("--kv-events-replay", "tcp://127.0.0.1:5558"), "--kv-events-replay = 'tcp://127.0.0.1:5558' needs --kv-events"),
    (("--api-key", "short"), "8 to 512"),
    (("--ssl-certfile", "nowhere.pem"), "TLS needs both"),
    (("--root-path", "api"), "--root-path = 'api' does not begin with /"),
    (("no/such/model",), "no/such/model"),
    (("--config", "nowhere.yaml"), "nowhere.yaml"),
    (("one", "--model", "two"), "name one model"),
]
BAD_FILES = [
    ("max-queue: yes", "max_queue = True is yes or no, and the option needs a value"),
    ("max-queu: 4", "'max_queu' is not an option of `quire serve`"),
    ("[1, 2]", "Expected `object | null`"),
    ("a: [", "config.yaml"),
    ("model: a\nmodels: [b]", "model and models exclude each other"),
    ("models: [./such/model]", "/such/model': no such file or folder"),
    ("model: such/model.gguf", "/such/model.gguf': no such file or folder"),
]


def test_what_cannot_work_is_refused_by_the_name_of_its_option(tmp_path: Path) -> None:
    for options, message in REFUSED:
        outcome = quire("serve", *options, folder=tmp_path)
        assert outcome.returncode != 0, options
        assert message in outcome.stderr


def test_a_bad_file_is_refused(tmp_path: Path) -> None:
    for number, (text, message) in enumerate(BAD_FILES):
        path = tmp_path / str(number) / "config.yaml"
        path.parent.mkdir()
        path.write_text(text)
        outcome = quire("serve", "--config", str(path), folder=tmp_path)
        assert outcome.returncode != 0, text
        assert message in outcome.stderr


def test_what_only_the_worker_finds_out_names_its_option_too(tiny_model: Path) -> None:
    said = refuse(str(tiny_model), "--dtype", "fp16", "--port", "0")
    assert "quire: --dtype = 'fp16' is not auto or one of" in said


def test_flags_go_before_the_environment_and_that_before_the_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("served-model-name: one\nmax-queue: 5\nmax-num-seqs: 3\nmax-model-len: 128\n")
    env = {"QUIRE_CONFIG": str(path), "QUIRE_MAX_QUEUE": "6", "QUIRE_MAX_NUM_SEQS": "4", "QUIRE_MAX_QUEU": "9"}
    with serving(str(tiny_model), *FAKE, "--max-num-seqs", "7", env=env) as server:
        server.wait_for("quire serves one at")
        server.wait_for("7 requests at once, up to 128 tokens each; 6 more may wait")
        server.wait_for("QUIRE_MAX_QUEU in the environment is not an option")


def test_shapes_without_weights_are_served(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with serving(str(folder), "--load-format", "dummy", "--num-blocks", "20", "--threads", "1") as server:
        server.wait_for(r"random weights \(--load-format dummy\): answers have no meaning")
        answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
        assert answer.json["usage"]["completion_tokens"] == 3
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refuse(str(folder), "--load-format", "dummy", "--port", "0")


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("one", "two"):
        write_tiny_model(tmp_path / "models" / name)
    (tmp_path / "keys.yaml").write_text("keys: [{name: a, key: sk-12345678}]\n")
    path = tmp_path / "config.yaml"
    path.write_text("api-keys-file: keys.yaml\nmodels: [./models/one, {model: models/two}, some/name, small]\n")
    found = read_file(path)
    assert found["api_keys_file"] == str(tmp_path / "keys.yaml")
    folder = tmp_path / "models"
    assert found["models"] == [str(folder / "one"), {"model": str(folder / "two")}, "some/name", "small"]
    path.write_text("# later\n")
    assert read_file(path) == {}
    path.write_text("api-keys-file: keys.yaml\nmodel: ./models/one\n")
    with serving(*FAKE, "--config", str(path)) as server:
        server.wait_for("quire serves one at")
        assert server.get("/v1/models").status == 401


def test_on_a_terminal_the_bar_ends_before_the_address_is_printed(tiny_model: Path) -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire", "serve", str(tiny_model), *FAKE, "--port", "0", "--hello"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = ""
    try:
        while text.count("  cache: ") < 2:  # of both questions
            assert select.select([terminal], [], [], HANG_S)[0], text
            text += os.read(terminal, 65536).decode(errors="replace")
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(terminal, 65536):
                text += data.decode(errors="replace")
        process.wait(HANG_S)
        os.close(terminal)
    assert process.returncode == 0
    before, _, after = text.partition("quire serves ")
    assert "loading tiny" in before
    assert before.rindex("\x1b[?25h") > before.rindex("\x1b[?25l")  # the cursor is visible again
    assert "loading tiny" not in after
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", after.replace("\x1b[", ""))


CAPACITY = Capacity(1001, 32, 8, 2048, 100)
WINDOWS = {"window": 64, "num_window_blocks": 51}
FACTS = RunnerFacts("native", "cpu", "int8", 2, kv_bytes=3 << 30, window_bytes=1 << 30, state_bytes=2 << 20)
METAL, GPU = {"device": "Apple M3 Max (Metal)"}, {"device": "cuda:0 (H200)"}
PHONE = "; on a phone or another machine: http://"


def start(
    memory: int | None = None,
    *,
    engine: Any = None,
    settings: Any = None,
    facts: Any = None,
    capacity: Any = None,
    **ready: Any,
) -> Startup:
    model = ModelConfig(Path("model"), ("model",), engine=EngineConfig(**(engine or {})))
    config = ServeConfig(models=(model,), **(settings or {}))
    found = Ready(replace(CAPACITY, **(capacity or {})), 2048, replace(FACTS, **(facts or {})), {}, **ready)
    return Startup(config, "model", found, {"all": 1.0}, memory)


def printed(startup: Startup, capsys: pytest.CaptureFixture[str]) -> str:
    announce(startup)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("startup", "line"),
    [
        (start(), "KV cache 3.0 GiB: 32,000 tokens in 1,000 blocks of 32 (40% of free memory, at most 4 GiB;"),
        (start(8 << 30), "(its share of the budget, at most 4 GiB; --kv-memory sets it)\n"),
        (start(facts=GPU), "(the memory that steps do not need; --kv-memory sets it)\n"),
        (start(facts=METAL), "(from the GPU memory that weights and steps leave; --kv-memory sets it)\n"),
        (start(8 << 30, facts=GPU), "(its share of the budget; --kv-memory sets it)\n"),
        (start(engine={"kv_memory": 1 << 30}), "(--kv-memory)\n"),
        (start(engine={"num_blocks": 100}), "(--num-blocks)\n"),
        (start(capacity=WINDOWS), "\n             with 50 window blocks (1.0 GiB)\n"),
        (
            start(capacity={**WINDOWS, "num_states": 21}),
            "\n             with 50 window blocks (1.0 GiB) and 20 recurrent states (2.0 MiB)\n",
        ),
        (start(), "\n  open to    this machine only, without a key\n"),
        (start(settings={"api_key": ("sk-12345678",)}), "\n  open to    clients with an API key\n"),
        (
            start(settings={"host": "0.0.0.0", "insecure": True, "port": 8001}),
            f"\n  open to    ALL CLIENTS that can reach it, without a key{PHONE}192.0.2.7:8001\n",
        ),
        (
            start(settings={"host": "0.0.0.0", "api_key": ("sk-12345678",)}),
            f"\n  open to    clients with an API key{PHONE}192.0.2.7:8000\n",
        ),
        (
            start(settings={"host": "10.1.2.3", "insecure": True}),
            f"\n  open to    ALL CLIENTS that can reach it, without a key{PHONE}10.1.2.3:8000\n",
        ),
        (start(), "\n  computes   native, cpu, int8, 2 threads\n  memory"),
        (start(facts={"num_threads": 1}), "\n  computes   native, cpu, int8, 1 thread\n"),
        (start(facts=METAL), "\n  computes   native, Apple M3 Max (Metal), int8\n"),
        (start(facts={"notice": "short requests"}), "int8, 2 threads\n             short requests\n"),
    ],
)
def test_the_start_prints_what_was_chosen(
    startup: Startup, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.serve._lan_address", lambda: "192.0.2.7")
    assert line in printed(startup, capsys)


def test_the_start_prints_the_folder_of_the_disk_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = LevelStats("disk", 0, 0, 1 << 30, 0, 0, 0, 0, 0, 0, 0, 5)
    startup = start(engine={"disk_cache": 1 << 30, "cache_dir": str(tmp_path)}, levels=(level,))
    line = f"disk cache up to 1.0 GiB; faster than computing from 5 tokens on\n             in {tmp_path}"
    assert f"{line}\n" in printed(startup, capsys)


def test_without_a_network_the_host_name_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("quire.cli.serve.socket.socket", refuse)
    assert _lan_address() == socket.gethostname()


def test_the_default_pool_is_documented_where_it_is_met() -> None:
    share, most = f"{CPU_SHARE:.0%}".replace("%", " %"), CPU_CAP >> 30
    option = get_args(MemoryOption)[1]
    assert f"{share} of free memory and at most {most}G on a CPU" in option.help
    for page in ("cpu.md", "serving.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        assert f"{share} of free memory, at most {most} GiB" in text
