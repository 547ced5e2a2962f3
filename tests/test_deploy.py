"""What is installed: the files in deploy/, `make serve` on other machines, the wheel, the lock, the list of packages.

No container engine is needed: each instruction is checked against the repository, and the command that the image runs
is started here with the image's environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.utils import canonicalize_name

from quire.backends.native.library import ABI
from quire.version import __version__
from tests import dependencies
from tests.dependencies import LOCK, ROOT, bill, changed_files, closure, read_lock, unlocked
from tests.server.rig import serving

DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continuation lines joined, comments left out."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def arguments(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def image_environment() -> dict[str, str]:
    return dict(entry.split("=", 1) for line in arguments("ENV") for entry in shlex.split(line))


def test_copied_files_exist_and_suffice_to_build_a_wheel() -> None:
    copied = [shlex.split(rest) for rest in arguments("COPY")]
    sources = {source for parts in copied if not parts[0].startswith("--from") for source in parts[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {"pyproject.toml", "CMakeLists.txt", "quire", project["project"]["readme"]}
    assert needed | set(project["project"]["license-files"]) <= sources


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (install,) = (rest for rest in arguments("RUN") if rest.startswith("pip install"))
    found = re.search(r"\[([\w,$]+)\]", install)
    assert found is not None
    for backend in ("native", "torch"):
        names = found[1].replace("$BACKEND", backend).split(",")
        assert set(names) <= set(project["optional-dependencies"])


def test_the_command_of_the_image_serves_and_is_healthy(tmp_path: Path, tiny_model: Path) -> None:
    """The entry point with the image's environment, but for the port and the folder of the cache."""
    command = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert command == ["quire", "serve"]
    environment = image_environment()
    assert environment["QUIRE_HOST"] == "0.0.0.0"
    environment |= {"QUIRE_API_KEY": "a-secret-of-the-test", "QUIRE_CACHE": str(tmp_path)}
    del environment["QUIRE_PORT"]
    with serving(str(tiny_model), "--backend", "fake", env=environment) as server:
        (check,) = arguments("HEALTHCHECK")
        code = json.loads(check[check.index("[") :])[2].replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", headers={"authorization": "Bearer a-secret-of-the-test"}).status == 200


def test_without_a_key_the_image_refuses_to_start(tmp_path: Path, tiny_model: Path) -> None:
    environment = {**os.environ, **image_environment(), "QUIRE_CACHE": str(tmp_path)}
    environment.pop("QUIRE_API_KEY", None)
    command = [sys.executable, "-m", "quire", "serve", str(tiny_model), "--backend", "fake"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert outcome.returncode != 0
    assert "API key" in outcome.stderr


def test_compose_agrees_with_the_image() -> None:
    compose: dict[str, Any] = msgspec.yaml.decode((DEPLOY / "compose.yaml").read_bytes())
    service = compose["services"]["quire"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert set(service["build"]["args"]) <= {rest.partition("=")[0] for rest in arguments("ARG")}
    (volume,) = service["volumes"]
    name, _, place = volume.partition(":")
    assert name in compose["volumes"]
    assert place == arguments("VOLUME")[0] == image_environment()["QUIRE_CACHE"]
    assert service["ports"][0].endswith(":" + arguments("EXPOSE")[0])


def test_the_example_config_is_valid(tmp_path: Path, tiny_model: Path) -> None:
    """The file of /etc/quire, but for the model and the port, starts a server."""
    values = msgspec.yaml.decode((DEPLOY / "quire.yaml").read_bytes())
    values |= {"models": [str(tiny_model)], "backend": "fake"}
    del values["port"]
    path = tmp_path / "quire.yaml"
    path.write_bytes(msgspec.yaml.encode(values))
    with serving("--config", str(path)) as server:
        assert server.get("/health").status == 200


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    assert "/opt/quire/bin/quire serve --config /etc/quire/quire.yaml" in text
    unit = tmp_path / "quire.service"
    unit.write_text(text.replace("/opt/quire/bin/quire", sys.executable), encoding="utf-8")
    outcome = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=120
    )
    assert "quire.service" not in outcome.stderr, outcome.stderr


def dry_run(venv: Path, *variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("BACKEND", "MAKEFLAGS")}
    command = ["make", "--dry-run", "serve", f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


NO_COMPILER = "there is no C compiler: only the mlx backend is installed"
NEEDS_COMPILER = "the native backend needs a C compiler: xcode-select --install"
MAC = ("SYSTEM=Darwin", "MACHINE=arm64")


@pytest.mark.parametrize(
    ("variables", "backends", "words"),
    [
        (MAC, "mlx", NO_COMPILER),
        (("SYSTEM=Darwin", "MACHINE=x86_64"), "native", ""),
        (("SYSTEM=Linux", "MACHINE=aarch64"), "native|torch", ""),
        (("BACKEND=mlx",), "mlx", "bin/quire serve --port 8000 --hello --backend mlx"),
        ((*MAC, "BACKEND=native"), "native", NEEDS_COMPILER),
    ],
)
def test_the_backend_is_named_or_chosen_by_the_machine(
    variables: tuple[str, ...], backends: str, words: str, tmp_path: Path
) -> None:
    text = dry_run(tmp_path, *variables)
    installed = [name for name in backends.split("|") if f"--editable '.[server,{name},hub]'" in text]
    assert len(installed) == 1
    assert words in text
    assert ("--backend" in text) == ("BACKEND" in variables[-1])  # otherwise `quire serve` chooses it too
    assert f"touch {tmp_path}/.runtime-{installed[0]}" in text


def test_a_locked_install_compares_hashes_first(tmp_path: Path) -> None:
    locked = dry_run(tmp_path, "LOCKED=1")
    assert "--require-hashes --no-deps --only-binary :all: --requirement requirements/core.lock" in locked
    assert locked.index("--require-hashes") < locked.index("--editable")
    assert "--require-hashes" not in dry_run(tmp_path)


LIBRARIES = (".so", ".dylib")
LOOK = """
import ctypes, json, sys
from pathlib import Path
import quire.backends.native as native
(path,) = (one for one in Path(native.__file__).parent.iterdir() if one.suffix in (".so", ".dylib"))
library = ctypes.CDLL(str(path))
library.quire_kernels.restype = ctypes.c_char_p
print(json.dumps([str(path), library.quire_abi(), library.quire_kernels().decode()]))
"""


def pip_wheel(source: Path, folder: Path, *defines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel with compiler warnings as errors. If cmake is not installed, pip has to download it."""
    isolation = ["--no-build-isolation"] if shutil.which("cmake") else []
    settings = (
        f"build-dir={folder / 'objects'}",
        "cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON",
        "cmake.define.CMAKE_C_FLAGS_RELEASE=-O0 -DNDEBUG",  # without optimization, the build takes a third of the time
        *(f"cmake.define.{define}" for define in defines),
    )
    options = [*isolation, *(f"--config-settings={setting}" for setting in settings)]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir", str(folder), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the source distribution, which must contain all necessary files."""
    folder = tmp_path_factory.mktemp("wheel")
    script = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    outcome = pip_wheel(source, folder)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.nightly
def test_the_wheel_is_for_any_python_3_of_a_platform(wheel: Path) -> None:
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("quire_llm", __version__, "py3", "none")
    assert platform.startswith(("linux_", "macosx_"))


@pytest.mark.nightly
def test_the_wheel_contains_the_libraries_and_no_c_sources(wheel: Path) -> None:
    held = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.startswith("quire/")}
    libraries = {path for path in held if path.suffix in LIBRARIES}
    assert {path.parent.as_posix() for path in libraries} == {"quire/backends/native", "quire/engine/levels"}
    everything = {path.relative_to(ROOT) for path in (ROOT / "quire").rglob("*") if path.is_file()}
    assert held - libraries == {
        path for path in everything if not {"__pycache__", "csrc"} & set(path.parts) and path.suffix not in LIBRARIES
    }


@pytest.mark.nightly
def test_the_wheel_runs_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # Provides the dependencies, but not quire: Python does not read .pth files of folders in PYTHONPATH.
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": sysconfig.get_path("purelib")}
    looked = subprocess.run(
        [str(python), "-c", LOOK], env=bare, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert looked.returncode == 0, looked.stderr
    path, abi, kernels = json.loads(looked.stdout)
    assert Path(path).is_relative_to(tmp_path)
    assert abi == ABI
    examined = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "quire"), "doctor", "--json"],
        env=bare, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    native = json.loads(examined.stdout)["backends"][0]
    assert (native["name"], native["runs"], native["kernels"]) == ("native", True, kernels)


def test_a_build_without_a_compiler_fails_with_a_message(tmp_path: Path) -> None:
    outcome = pip_wheel(ROOT, tmp_path, CC=str(tmp_path / "no-compiler"))
    assert outcome.returncode != 0
    assert "No working C compiler was found" in outcome.stdout + outcome.stderr


@pytest.mark.nightly
def test_a_wheel_without_the_library_runs_the_other_backends(tmp_path: Path) -> None:
    outcome = pip_wheel(ROOT, tmp_path, "QUIRE_NATIVE=OFF", CC=str(tmp_path / "no-compiler"))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as held:
        assert not [name for name in held.namelist() if name.endswith(LIBRARIES)]
        held.extractall(tmp_path / "site")
    bare = {
        "PATH": os.defpath,
        "HOME": str(Path.home()),
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), sysconfig.get_path("purelib"))),
    }
    examined = subprocess.run(
        [sys.executable, "-S", "-m", "quire", "doctor", "--json"],
        env=bare, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    runs = {one["name"]: one["runs"] for one in json.loads(examined.stdout)["backends"]}
    assert (runs["native"], runs["mlx"]) == (False, True)


@pytest.mark.parametrize(("native", "is_built"), [("AUTO", True), ("ON", False)])
@pytest.mark.kept("AUTO")
@pytest.mark.nightly
def test_a_mac_without_a_compiler_needs_none(native: str, is_built: bool, tmp_path: Path) -> None:
    """Without the Command Line Tools, `cc` opens a dialog: it must not be called, and xcode-select fails."""
    for name, code in (("xcode-select", 2), ("cc", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called-{name}\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    outcome = pip_wheel(ROOT, tmp_path, "CMAKE_HOST_APPLE=ON", f"QUIRE_NATIVE={native}", PATH=path)
    assert (outcome.returncode == 0) == is_built, outcome.stdout + outcome.stderr
    assert is_built or "No working C compiler was found" in outcome.stdout + outcome.stderr
    assert (tmp_path / "called-xcode-select").exists()
    assert not (tmp_path / "called-cc").exists()


def test_every_package_of_the_core_is_locked_with_hashes() -> None:
    """If this fails, run `make lock`."""
    assert unlocked() == []
    assert all(hashes for _, hashes in read_lock().values())


def test_the_core_has_few_packages_and_no_cuda() -> None:
    packages = closure()
    assert len(packages) <= 45
    assert not [name for name in packages if re.search(r"nvidia|cuda|cudnn|cublas|triton|torch|cupy", name)]


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {str(canonicalize_name(name)): version for name, version in lines}
    assert {name: version for name, (version, _) in read_lock().items()} == {name: pinned[name] for name in read_lock()}


def test_other_versions_and_missing_hashes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LOCK.read_text()
    version = read_lock()["starlette"][0]
    other = tmp_path / "core.lock"
    other.write_text(text.replace(f"starlette=={version}", "starlette==0.1"))
    monkeypatch.setattr(dependencies, "read_lock", lambda: read_lock(other))
    assert unlocked() == [f"starlette=={version}"]


def test_a_changed_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"typer": closure(())["typer"]}
    assert changed_files(packages) == []
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert changed_files(packages)


def test_the_bill_of_materials() -> None:
    packages = closure()
    found = json.loads(json.dumps(bill(packages)))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [one["name"] for one in found["components"]] == list(packages)
    refs = {one["bom-ref"] for one in found["components"]} | {"quire-llm"}
    assert {one["ref"] for one in found["dependencies"]} == refs
    assert all(set(one["dependsOn"]) <= refs for one in found["dependencies"])
    assert all(one["externalReferences"][0]["hashes"] for one in found["components"])
