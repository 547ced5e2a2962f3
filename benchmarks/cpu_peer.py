"""Finds or builds llama.cpp (llama-cpp-python in a venv in quire's cache), and converts the model to its formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cpu_child import Task

from quire.weights.hub import cache_dir

PACKAGE = "llama-cpp-python"
BUILD_OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"  # for this machine; without image support
AS_SHIPPED = "as shipped"
FORMATS = (AS_SHIPPED, "Q4_0", "Q8_0")
CHILD = Path(__file__).with_name("cpu_llama.py")


def folder() -> Path:
    return cache_dir() / "benchmarks" / "llama.cpp"


def find() -> Path | None:
    """Return the Python that can import it, if it was built before."""
    python = folder() / "venv" / "bin" / "python"
    return python if python.exists() and version(python) else None


def build(say: Callable[[str], None]) -> Path:
    """Build it, which takes 15 minutes on two cores. pip's output goes to a file."""
    venv, log = folder() / "venv", folder() / "build.log"
    folder().mkdir(parents=True, exist_ok=True)
    say(f"building {PACKAGE} in {venv}: about 15 minutes on two cores; progress is in {log}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--verbose", "--no-binary", PACKAGE, PACKAGE]
    with log.open("w") as out:
        outcome = subprocess.run(
            command, stdout=out, stderr=out, env={**os.environ, "CMAKE_ARGS": BUILD_OPTIONS}, check=False
        )
    if outcome.returncode:
        sys.exit(f"llama.cpp could not be built, see {log}. --no-llama measures quire alone")
    return venv / "bin/python"


def version(python: Path) -> str:
    script = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    outcome = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False)
    return outcome.stdout.strip()


def model_in(file_format: str, model: Path, python: Path, num_threads: int) -> Path:
    """Return the model's file in this format, converted once from the given file."""
    if file_format == AS_SHIPPED:
        return model
    out = folder() / f"{model.stem}.{file_format}.gguf"
    if not out.exists():
        partial = out.with_suffix(".partial")
        task = Task("quantize", str(model), num_threads, settings={"format": file_format, "out": str(partial)})
        subprocess.run([str(python), str(CHILD), json.dumps(asdict(task))], check=True, stdout=subprocess.DEVNULL)
        partial.rename(out)
    return out
