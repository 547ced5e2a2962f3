"""What `make serve` would do on machines of other kinds, from its dry run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def dry_run(venv: Path, *variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("BACKEND", "MAKEFLAGS")}
    command = ["make", "--dry-run", "serve", f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("system", "machine", "backend"),
    [("Darwin", "arm64", "mlx"), ("Darwin", "x86_64", "native"), ("Linux", "aarch64", "native|torch")],
)
def test_the_backend_is_chosen_by_the_machine(system: str, machine: str, backend: str, tmp_path: Path) -> None:
    text = dry_run(tmp_path, f"SYSTEM={system}", f"MACHINE={machine}")
    assert any(f"--editable '.[server,{name},hub]'" in text for name in backend.split("|"))
    assert "--backend" not in text  # `quire serve` chooses it too


def test_a_backend_that_is_named_is_installed_and_served(tmp_path: Path) -> None:
    text = dry_run(tmp_path, "BACKEND=mlx")
    assert "--editable '.[server,mlx,hub]'" in text
    assert f"{tmp_path}/bin/quire serve --port 8000 --hello --backend mlx" in text
    assert f"touch {tmp_path}/.runtime-mlx" in text


def test_a_mac_without_a_compiler_gets_mlx_only(tmp_path: Path) -> None:
    on_mac = ("SYSTEM=Darwin", "MACHINE=arm64")
    assert "there is no C compiler: only the mlx backend is installed" in dry_run(tmp_path, *on_mac)
    assert "the native backend needs a C compiler: xcode-select --install" in dry_run(
        tmp_path, *on_mac, "BACKEND=native"
    )


def test_a_locked_install_compares_hashes_first(tmp_path: Path) -> None:
    locked = dry_run(tmp_path, "LOCKED=1")
    assert "--require-hashes --no-deps --only-binary :all: --requirement requirements/core.lock" in locked
    assert locked.index("--require-hashes") < locked.index("--editable")
    assert "--require-hashes" not in dry_run(tmp_path)
