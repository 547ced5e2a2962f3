"""Tests of the wheel: one per platform for any Python 3, installed without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from quire.backends.native.library import ABI
from quire.version import __version__

ROOT = Path(__file__).parents[1]
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
