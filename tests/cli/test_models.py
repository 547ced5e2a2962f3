"""`quire models`, `show`, `run` and `doctor MODEL`, and names of commands, also those of Ollama."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.backends import machine
from quire.cli import doctor as fit_module
from quire.cli import main
from quire.cli.doctor import FILE_BITS, MLX_4BIT, MLX_FILE_BITS, Memory, Weights, fit
from quire.cli.main import ADVICE, COMMANDS, app
from quire.cli.models import AGENT_CONTEXT, SUGGESTIONS, family_rows, suggest
from quire.cli.options import check_memory
from quire.engine.composition import EngineConfig
from quire.errors import InvalidRequest
from quire.text.reasoning import REASONING_FORMATS
from quire.text.tool_formats import TOOL_FORMATS
from quire.weights.families import BY_NAME, FAMILIES
from quire.weights.hub import HubName
from tests.backends.torch.families import EVERY_FAMILY
from tests.cli.runs import EchoLLM, Terminal
from tests.cli.scripted import NAME, ScriptedServer
from tests.tiny import write_tiny_model
from tests.weights.makers import config, llama_arrays, tiny_gguf, write_folder

GB = 10**9
LAPTOP = Memory(cpu_total=16 * GB, cpu_free=10 * GB)
GPU = Memory(cpu_total=64 * GB, cpu_free=50 * GB, gpu_total=24 * GB, gpu_free=23 * GB)
MAC = Memory(cpu_total=32 * GB, cpu_free=24 * GB, gpu_total=21 * GB, gpu_free=21 * GB, has_metal=True)


def run(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


# Names of commands


@pytest.mark.parametrize("name", sorted(ADVICE))
def test_commands_of_ollama_name_their_replacement(name: str) -> None:
    outcome = run(name, "something")
    assert isinstance(outcome.exception, InvalidRequest)
    assert str(outcome.exception) == f"there is no command {name!r}: {ADVICE[name]}"
    assert name not in COMMANDS


def test_an_unknown_command_suggests_the_nearest() -> None:
    for typed, meant in (("genrate", "generate"), ("modles", "models"), ("unlaod", "unload"), ("sevre", "serve")):
        assert f"did you mean {meant}" in str(run(typed).exception)
    assert str(run("xyzzy").exception) == "there is no command 'xyzzy': `quire --help` lists the commands"


def test_help_groups_the_commands_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nsys.argv = ['quire', '--help']\nfrom quire.cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "names = {'httpx', 'httpcore', 'torch', 'numpy', 'starlette', 'msgspec', 'rich', 'huggingface_hub'}\n"
        "print(sorted(names & set(sys.modules)), file=sys.stderr)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    titles = [line for line in outcome.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Run a model:", "Serve models:", "Models on this machine:", "Measure:"]
    assert outcome.stderr == "[]\n"


# quire models


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one GGUF in quire's cache, and the memory of a laptop."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("quire.cli.models.read_memory", lambda: LAPTOP)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(tiny_gguf())
    return tmp_path


def test_models_have_paths_and_sizes(here: Path) -> None:
    (here / "models" / "broken.gguf").write_bytes(tiny_gguf()[:100])
    outcome = run("models")
    assert run("list").stdout == run("ls").stdout == outcome.stdout
    head, mine, *rest = outcome.stdout.splitlines()
    assert head.split() == ["name", "architecture", "type", "size", "path"]
    assert mine.split() == ["mine", "llama", "Q4_0", "0.1", "MB", str(here / "models" / "mine.gguf")]
    assert rest[0].startswith("broken: ")
    assert "smollm2-135m-instruct" in outcome.stdout
    assert "Qwen/Qwen3-8B-GGUF:Q4_K_M" in outcome.stdout
    document = json.loads(run("models", "--json").stdout)
    assert document["suggested"][-1]["device"] == "cpu"


def test_suggestions_are_models_that_quire_runs() -> None:
    for one in SUGGESTIONS:
        name = HubName.parse(one.name)
        assert name is not None
        assert (name.gguf is None) == (one.type in ("BF16", MLX_4BIT))
        assert (name.repo.startswith("mlx-community/")) == (one.type == MLX_4BIT)
        assert one.family in BY_NAME or one.type == MLX_4BIT  # mlx-lm has more
        assert one.type in FILE_BITS or one.type in MLX_FILE_BITS
        assert one.max_model_len >= AGENT_CONTEXT
        billions = float(one.parameters.removesuffix("B"))
        assert 0.7 * billions < one.weights.counts[one.type] / 1e9 < 1.6 * billions  # the size agrees with the name


def test_suggestions_fit_into_the_memory() -> None:
    names = [one.name for one, _ in suggest(LAPTOP, set())]
    assert "Qwen/Qwen3-8B-GGUF:Q4_K_M" in names
    assert "Qwen/Qwen3-14B-GGUF:Q4_K_M" not in names  # 10 GB in memory, and there must be room for the KV cache
    assert not any(":" not in name for name in names)  # without a GPU, GGUF files only
    assert suggest(LAPTOP, {"Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf"})[-1][0].parameters != "8B"
    on_gpu = suggest(GPU, set())
    assert {place.device for _, place in on_gpu} == {"cuda"}
    assert on_gpu[-1][0].name == "Qwen/Qwen3-8B"
    assert suggest(Memory(GB, GB // 10), set()) == []
    on_mac = suggest(MAC, set())
    assert {(place.device, one.type) for one, place in on_mac} == {("metal", MLX_4BIT)}
    assert on_mac[-1][0].parameters == "30B"  # the weights of 32B would leave no room for the KV cache


@pytest.mark.parametrize(
    ("weights", "memory", "device", "num_bytes"),
    [
        (Weights({"Q4_K": 8 * GB}), LAPTOP, "cpu", 5 * GB),
        (Weights({"Q4_K": 8 * GB}), GPU, "cuda", 5 * GB),
        (Weights({"Q4_K": 8 * GB}, has_experts=True), GPU, "cuda", 5 * GB),
        (Weights({"Q4_K": 8 * GB}, has_experts=True, has_sigmoids=True), GPU, "cuda", 16 * GB),  # they are decoded
        (Weights({"MXFP4": 16 * GB, "BF16": GB}, has_experts=True), GPU, "cuda", int(10.5 * GB)),
        (Weights({"Q6_K": 8 * GB, "F32": GB}), GPU, "cuda", 11 * GB),
        (Weights({"BF16": 70 * GB}), LAPTOP, "", 74.375 * GB),
        (Weights({"BF16": 20 * GB}), GPU, "cpu", 21.25 * GB),  # 40 GB for the GPU, 21 in 8 bits
        (Weights({"INT4": 30 * GB}), GPU, "cuda", int(16.875 * GB)),  # stays packed
        (Weights({"FP8": 16 * GB, "BF16": GB}), GPU, "cuda", 18.25 * GB),
        (Weights({"FP8": 22 * GB}), GPU, "cpu", 23.375 * GB),  # no room for the KV cache
        (Weights({"BF16": 8 * GB}), MAC, "metal", 16 * GB),  # stays in 16 bits
        (Weights({"Q4_K": 8 * GB}), MAC, "metal", 5 * GB),
        (Weights({"Q6_K": 8 * GB}), MAC, "metal", 9 * GB),
        (Weights({"BF16": 14 * GB}), MAC, "", 28 * GB),  # although the CPU could hold it
    ],
)
def test_where_a_model_fits(weights: Weights, memory: Memory, device: str, num_bytes: float) -> None:
    place = fit(weights, memory)
    assert (place.device, place.num_bytes) == (device, num_bytes)


def test_where_a_model_fits_as_text() -> None:
    eight = Weights({"Q4_K": 8 * GB})
    assert [str(fit(eight, memory)) for memory in (LAPTOP, GPU, MAC)] == ["CPU", "GPU", "GPU"]
    assert str(fit(eight, Memory(16 * GB, 2 * GB))) == "CPU, once 4.7 GiB are free"
    assert str(fit(Weights({"BF16": 70 * GB}), LAPTOP)) == "too large: 69.3 GiB of weights"


def test_memory_of_a_mac_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_metal", lambda: True)
    monkeypatch.setattr(machine, "total_bytes", lambda: 64 << 30)
    monkeypatch.setattr(machine, "available_bytes", lambda: 60 << 30)
    monkeypatch.setattr(machine, "SYSCTL", ("false",))
    assert fit_module.read_memory() == Memory(64 << 30, 60 << 30, 48 << 30, 48 << 30, has_metal=True)


def test_kv_memory_on_a_mac_may_be_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Memory(32 * GB, 2 * GB, 21 * GB, 2 * GB, has_metal=True)
    monkeypatch.setattr(fit_module, "read_memory", lambda: busy)
    check_memory(EngineConfig(kv_memory=8 << 30))
    with pytest.raises(InvalidRequest, match=r"kv_memory = 24.0 GiB is more than the 19.6 GiB that the GPU may use"):
        check_memory(EngineConfig(kv_memory=24 << 30))
    with pytest.raises(InvalidRequest, match=r"free memory"):
        check_memory(EngineConfig(kv_memory=8 << 30, backend="native"))


def test_memory_of_gpus_is_that_of_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '8192, 100\\n24576, 24000\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "has_nvidia", lambda: True)
    monkeypatch.setattr(machine, "NVIDIA_SMI", (str(program),))
    found = fit_module.read_memory()
    assert (found.gpu_total, found.gpu_free) == (24576 << 20, 24000 << 20)
    monkeypatch.setattr(machine, "NVIDIA_SMI", (str(tmp_path / "none"),))
    assert fit_module.read_memory().gpu_total == 0


def test_fp8_needs_twice_the_memory_on_gpus_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, memory = Weights({"FP8": 14 * 10**9}), fit_module.Memory(1 << 40, 1 << 40, 24 << 30, 24 << 30)
    assert fit_module.fit(weights, memory).device == "cuda"
    assert fit_module.fit(weights, replace(memory, has_fp8=False)).device == "cpu"
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    monkeypatch.setattr(machine, "NVIDIA_CAPABILITY", (str(program),))
    for answer, has_fp8 in (("9.0\n8.9\n", True), ("9.0\n8.6\n", False), ("", True)):
        program.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        assert machine.has_fp8() is has_fp8


# quire show


def test_show_has_the_facts_of_a_model(here: Path) -> None:
    outcome = run("show", "./mine.gguf")
    assert "no such file or folder" in str(outcome.exception)
    path = str(here / "models" / "mine.gguf")
    lines = dict(line.split("  ", 1) for line in run("show", path).stdout.splitlines() if "  " in line)
    assert lines["family"].strip() == "llama (llama)"
    assert lines["path"].strip() == path
    assert lines["runs here"].strip() == "CPU"
    assert lines["memory"].strip().endswith("of KV cache for 256 tokens")
    facts = json.loads(run("show", path, "--json").stdout)
    assert (facts["family"], facts["runs_on"], facts["size_bytes"]) == ("llama", "cpu", len(tiny_gguf()))
    assert facts["num_parameters"] == sum(facts["weights"].values())


def test_show_of_a_model_that_only_mlx_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packed weights do not say how many parameters it has."""
    folder = write_folder(
        tmp_path / "packed", {**config("LlamaForCausalLM"), "quantization": {"bits": 4, "group_size": 32}}
    )
    facts = json.loads(run("show", str(folder), "--json").stdout)
    assert (facts["num_parameters"], facts["weights"]) == (None, {})
    monkeypatch.setattr(fit_module, "choose_backend", lambda _: "mlx")
    assert fit_module.find_backend_problem("no equations") == ""
    assert fit_module.find_backend_problem("no equations", {"model_type": "llama"}) == ""
    assert "nonsense" in fit_module.find_backend_problem("no equations", {"model_type": "nonsense"})
    assert fit_module.find_backend_problem("") == ""


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
def test_an_error_of_a_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "sim", "--requests", "1", "--save-trace", "/dev/full"])
    with pytest.raises(SystemExit) as end:
        main.run()
    assert end.value.code == 1
    assert capsys.readouterr().err == "quire: No space left on device\n"


# quire run


def test_run_answers_a_prompt(echo: EchoLLM) -> None:
    assert run("run", "smollm2", "What", "is", "this?").stdout == "What is this?\n"
    assert run("run", "smollm2", stdin="From a pipe.\n").stdout == "From a pipe.\n"
    assert [messages[0] for messages in echo.seen] == ["What is this?", "From a pipe."]


def test_run_without_a_prompt_is_a_chat() -> None:
    with ScriptedServer() as server, Terminal("run", NAME, env={"QUIRE_SERVER": server.url}) as terminal:
        terminal.wait_for(f"{NAME}, 60 tokens of context. /help for help.\r\n> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0


def report(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    outcome = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    return outcome.exit_code, json.loads(outcome.stdout)


def test_a_model_that_runs(tmp_path: Path) -> None:
    code, found = report(write_tiny_model(tmp_path / "tiny"))
    assert (code, found["runs"], found["problem"]) == (0, True, "")
    assert (found["family"], found["backend"], found["device"]) == ("llama", "native", "cpu")
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, keys and values, KV heads, head size, 16 bits
    assert found["cached_tokens"] > found["max_model_len"] == 4096
    text = CliRunner().invoke(app, ["doctor", str(tmp_path / "tiny")]).stdout
    assert "runs here   yes, on the CPU with the native backend" in text


def test_a_tokenizer_that_a_load_would_refuse(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["normalizer"] = {"type": "Prepend", "prepend": "a" * 1000}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    code, found = report(folder)
    assert (code, found["runs"]) == (1, False)
    assert "normalizer of type 'Prepend': one character may become 1001 characters" in found["problem"]


def test_a_folder_with_only_a_config(tmp_path: Path) -> None:
    """Before a download: everything that the config tells."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("LlamaForCausalLM", model_type="llama")))
    code, found = report(folder)
    assert (code, found["runs"], found["has_weights"], found["has_tokenizer"]) == (0, True, False, False)
    assert found["weight_bytes"] > 0
    text = CliRunner().invoke(app, ["doctor", str(folder)]).stdout
    assert "yes, on the CPU with the native backend, once its weights are in this folder" in text
    assert "it has no tokenizer.json" in text
    settings = config("NewestForCausalLM", model_type="newest")
    (folder / "config.json").write_text(json.dumps(settings))
    code, found = report(folder)
    assert (code, found["runs"]) == (1, False)
    assert "quire has no equations for 'NewestForCausalLM'" in found["problem"]


def test_recurrent_states_and_windows(tmp_path: Path) -> None:
    for name in ("qwen3_5", "gpt_oss"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(EVERY_FAMILY[name]().to_dict()))
        code, found = report(folder)
        assert (code, found["problem"]) == (0, "")
        text = CliRunner().invoke(app, ["doctor", str(folder)]).stdout
        if name == "qwen3_5":
            assert found["state_bytes"] > 0
            assert found["cached_states"] > 64
            assert f"{found['cached_states']:,} recurrent states" in text
        else:
            assert found["window"] > 0
            assert "layers with a window keep the last" in text


def test_missing_tensors_are_found_without_a_load(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    code, found = report(write_folder(tmp_path / "model", arrays=arrays))
    assert (code, found["runs"]) == (1, False)
    assert "tensors missing: layers.1.up_proj.weight" in found["problem"]


def test_a_model_without_own_equations_runs_through_transformers(tmp_path: Path) -> None:
    settings = config("GPTNeoXForCausalLM", model_type="gpt_neox")
    code, found = report(write_folder(tmp_path / "model", settings))
    assert (code, found["backend"]) == (0, "torch")
    assert "GPTNeoXForCausalLM runs through transformers" in found["notice"]
    assert "correct, slower than a native family" in found["notice"]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    settings = config("NewestForCausalLM", model_type="newest")
    code, found = report(write_folder(tmp_path / "model", settings))
    assert (code, found["runs"]) == (1, False)
    assert "quire has no equations for 'NewestForCausalLM'" in found["problem"]
    assert "transformers has no models of type 'newest'" in found["problem"]


def test_a_model_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "read_memory", lambda: Memory(cpu_total=50_000, cpu_free=40_000))
    code, found = report(write_tiny_model(tmp_path / "tiny"))
    assert (code, found["runs"]) == (1, False)
    assert "more than this machine has" in found["problem"]


def test_less_memory_than_one_context_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "read_memory", lambda: Memory(cpu_total=1 << 30, cpu_free=1 << 20))
    text = CliRunner().invoke(app, ["doctor", str(write_tiny_model(tmp_path / "tiny"))]).stdout
    assert "--kv-memory sets the size" in text


def test_the_table_of_families() -> None:
    outcome = CliRunner().invoke(app, ["models", "--families", "--json"])
    assert json.loads(outcome.stdout)["families"] == family_rows()
    text = CliRunner().invoke(app, ["models", "--families"]).stdout
    assert all(row.name in text for row in FAMILIES)


def test_formats_in_the_table_exist() -> None:
    assert {row.tools for row in FAMILIES} <= {"", *(one.name for one in TOOL_FORMATS)}
    assert {row.reasoning for row in FAMILIES} <= {"", *(one.name for one in REASONING_FORMATS)}
    assert len({row.name for row in FAMILIES}) == len(FAMILIES)
