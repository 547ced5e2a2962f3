"""`quire doctor`, `quire pull` and `quire models` on machines where something is missing."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.backends import machine
from quire.backends.native.library import NativeUnavailable, load_library
from quire.cli import doctor
from quire.cli.main import app
from tests.cli.runs import quire


def examine(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.usefixtures("default_model")
@pytest.mark.nightly
def test_a_machine_that_has_everything() -> None:
    outcome = quire("doctor", "--json", env={"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2"})
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["can_generate"]
    assert not [problem for problem in report["problems"] if problem["is_essential"]]
    assert 0 < report["hardware"]["available_bytes"] <= report["hardware"]["memory_bytes"]
    backends = {backend["name"]: backend for backend in report["backends"]}
    assert all(backends[name]["runs"] for name in ("torch cpu", "native", "mlx"))
    assert backends["native"]["kernels"] not in backends["native"]["other_kernels"]
    assert all(report["packages"][name] for name in ("torch", "mlx", "mlx-lm"))
    assert {model["name"]: model["opens"] for model in report["models"]}["smollm2-135m-instruct"]
    assert (report["environment"]["HF_TOKEN"], report["environment"]["OMP_NUM_THREADS"]) == ("set, not shown", "2")
    assert "hf_secret" not in outcome.stdout
    assert str(Path.home()) + "/" not in outcome.stdout


def test_without_a_model_the_command_to_get_one_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "not-yet"))
    monkeypatch.setattr(doctor, "local_models", list)
    outcome = examine()
    assert outcome.exit_code == 1
    assert "MISSING: there is no model on this machine that can be opened\n    quire pull" in outcome.stdout
    assert outcome.stdout.endswith("quire cannot run models here yet.\n")


def test_a_broken_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken.gguf").write_bytes(b"GGUF, or is it")
    report = json.loads(examine("--json").stdout)
    (model,) = [model for model in report["models"] if model["name"] == "broken"]
    assert not model["opens"]
    assert any(problem["what"].startswith("broken cannot be opened: ") for problem in report["problems"])


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize(
    ("package", "code"),
    [("tokenizers", 1), ("numpy", 1), ("huggingface-hub", 0)],
)
def test_a_missing_package_comes_with_its_command(package: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == package else version(name))
    outcome = examine("--json")
    assert outcome.exit_code == code
    (problem,) = [one for one in json.loads(outcome.stdout)["problems"] if one["what"].startswith(package)]
    assert problem["how"] == doctor._anonymous(f"{sys.executable} -m pip install {package}")


NO_TORCH = {"works": False, "problem": "", "gpus": []}
NO_MLX = {"works": False, "problem": "", "device": "", "gpus": []}
NO_NATIVE = {"works": False, "problem": "why", "kernels": "", "others": []}


@pytest.mark.usefixtures("default_model")
def test_without_torch_only_a_gpu_misses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else version(name))
    monkeypatch.setattr(doctor, "_torch", lambda: NO_TORCH)
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    outcome = examine()
    assert outcome.exit_code == 0
    assert "torch             not installed" in outcome.stdout
    assert "pip install torch" not in outcome.stdout
    (tmp_path / "version").write_text("NVRM version: a driver")
    outcome = examine()
    assert outcome.exit_code == 0
    how = doctor._anonymous(f"{sys.executable} -m pip install torch")
    assert f"which quire needs to use it, is not installed\n    {how}\n" in outcome.stdout


def test_a_library_that_does_not_load_names_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    with pytest.raises(NativeUnavailable, match=r"library broken.so cannot be loaded \(.*broken.so: .*gcc or clang"):
        load_library.__wrapped__()


@pytest.mark.usefixtures("default_model")
def test_without_any_backend_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_torch", lambda: NO_TORCH)
    monkeypatch.setattr(doctor, "_mlx", lambda: NO_MLX)
    monkeypatch.setattr(doctor, "_native", lambda: NO_NATIVE)
    outcome = examine()
    assert outcome.exit_code == 1
    assert "MISSING: the native backend cannot be loaded: why" in outcome.stdout


# Apple silicon


FACTS = {
    "device_name": "Apple M3 Max",
    "architecture": "applegpu_g15s",
    "memory_size": 64 << 30,
    "max_recommended_working_set_size": 48 << 30,
    "max_buffer_length": 36 << 30,
}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A Mac with these facts of `mx.device_info`, where neither torch nor the C library are installed."""
    monkeypatch.setattr(machine, "is_apple_silicon", lambda: True)
    monkeypatch.setattr(doctor, "_torch", lambda: NO_TORCH)
    monkeypatch.setattr(doctor, "_native", lambda: NO_NATIVE)

    def install(facts: object, *, has_metal: bool = True) -> None:
        core: Any = ModuleType("mlx.core")
        core.metal = SimpleNamespace(is_available=lambda: has_metal)
        core.gpu, core.is_available = "gpu", lambda _device: has_metal
        core.device_info = lambda: facts
        monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
        monkeypatch.setitem(sys.modules, "mlx.core", core)
        monkeypatch.setattr(sys.modules["mlx"], "core", core, raising=False)
        monkeypatch.setitem(sys.modules, "mlx_lm", ModuleType("mlx_lm"))

    return install


@pytest.mark.usefixtures("default_model")
def test_apple_silicon_with_mlx_needs_nothing_else(mac: Callable[..., None]) -> None:
    mac(FACTS)
    outcome = examine()
    assert outcome.exit_code == 0, outcome.stdout
    assert "gpu       Apple M3 Max, uses the memory of the machine, up to 48.0 GiB\n" in outcome.stdout
    assert "native      does not run here\n" in outcome.stdout
    assert "mlx         runs in 2 to 16 bits (Apple M3 Max, Metal)\n" in outcome.stdout
    assert "note: the native backend cannot be loaded: why\n" in outcome.stdout
    assert "MISSING" not in outcome.stdout
    report = json.loads(examine("--json").stdout)
    assert report["can_generate"]
    expected = {"name": "Apple M3 Max", "memory_bytes": 64 << 30, "limit_bytes": 48 << 30}
    assert report["hardware"]["gpus"] == [expected]


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("facts", [{}, {"device_name": 7, "memory_size": "much"}, None])
def test_other_facts_of_mlx_do_not_matter(facts: object, mac: Callable[..., None]) -> None:
    mac(facts)
    outcome = examine()
    assert outcome.exit_code == 0, outcome.stdout
    assert "mlx         runs in 2 to 16 bits" in outcome.stdout


@pytest.mark.usefixtures("default_model")
def test_a_mac_without_a_gpu_is_noted(mac: Callable[..., None]) -> None:
    mac(FACTS, has_metal=False)
    assert "note: this is Apple silicon, and MLX finds no GPU\n" in examine().stdout


@pytest.mark.usefixtures("default_model")
def test_apple_silicon_without_mlx_comes_with_its_command(
    mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    del mac
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name.startswith("mlx") else version(name))
    monkeypatch.setitem(sys.modules, "mlx.core", None)  # importing it raises ModuleNotFoundError
    outcome = examine()
    assert outcome.exit_code == 1
    how = doctor._anonymous(f"{sys.executable} -m pip install mlx mlx-lm")
    what = "this is Apple silicon, and quire needs mlx and mlx-lm to use its GPU"
    assert f"MISSING: {what}\n    {how}\n" in outcome.stdout


@pytest.mark.usefixtures("default_model")
def test_an_mlx_that_cannot_be_imported_says_why(mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mac(FACTS)

    def fail() -> dict[str, Any]:
        raise ImportError("Symbol not found: _MTLCreateSystemDefaultDevice")

    finder = SimpleNamespace(find_spec=lambda name, *_: fail() if name == "mlx_lm" else None)
    monkeypatch.delitem(sys.modules, "mlx_lm")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    outcome = examine()
    assert outcome.exit_code == 1
    assert "MISSING: MLX is installed and cannot be imported: ImportError: Symbol not found" in outcome.stdout


def test_the_cpu_of_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "machdep.cpu.brand_string": "Apple M3 Max",
        "hw.optional.arm.FEAT_DotProd": "1",
        "hw.optional.arm.FEAT_I8MM": "1",
        "hw.optional.arm.FEAT_BF16": "0",
    }
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine, "read_sysctl", lambda name: values.get(name, ""))
    assert doctor.read_cpu() == ("Apple M3 Max", ["asimddp", "i8mm"])
    values.clear()
    assert doctor.read_cpu()[0]


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        ("CPU part\t: 0xd40\nFeatures\t: fp asimddp i8mm sve\n", "Neoverse V1", ["asimddp", "i8mm", "sve"]),
        ("CPU part\t: 0xfff\nFeatures\t: fp\n", "ARM part 0xfff", []),
        ("model name\t: Xeon: 3\nflags\t\t: sse avx2 amx_int8\n", "Xeon: 3", ["avx2", "amx_int8"]),
    ],
)
def test_cpus(text: str, name: str, features: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    assert doctor.read_cpu() == (name, features)


def test_paths_do_not_contain_the_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    given = {"a": ["/home/alice/models", "/home/alice", "/scratch/alice/x: broken", "/home/alicex", 3, None]}
    assert doctor._anonymous(given) == {"a": ["~/models", "~", "/scratch/$USER/x: broken", "/home/alicex", 3, None]}
