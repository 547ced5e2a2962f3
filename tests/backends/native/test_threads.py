"""The thread pool: every unit runs exactly once, whatever the timing, and idle threads sleep."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from quire.backends import native
from quire.backends.native.model import Engine
from tests.backends.native.matrices import floats, project
from tests.waiting import HANG_S, eventually

SOURCES = Path(native.__file__).parent / "csrc"
STRESS = Path(__file__).with_name("threads_stress.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
FLAGS = ["-std=c11", "-O1", "-g", f"-I{SOURCES}", str(STRESS), str(SOURCES / "threads.c"), "-lpthread"]
TASKS = Path("/proc/self/task")


def compiled(folder: Path, *flags: str) -> Path | None:
    """Compile the stress program. Returns None if the compiler does not support the flags."""
    assert COMPILER is not None
    program = folder / "stress"
    outcome = subprocess.run([COMPILER, *flags, *FLAGS, "-o", str(program)], capture_output=True, check=False)
    return program if outcome.returncode == 0 else None


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(("flags", "num_pieces"), [((), 3000), (("-fsanitize=thread",), 600)], ids=["plain", "tsan"])
@pytest.mark.kept("plain")
def test_every_unit_runs_once(flags: tuple[str, ...], num_pieces: int, tmp_path: Path) -> None:
    """Up to 16 threads, some of which sleep within units, and pieces of work without a pause between them."""
    program = compiled(tmp_path, *flags)
    if program is None:
        assert flags, "the stress program does not compile"
        pytest.skip(f"the compiler does not support {flags[0]}")
    # `make sanitize` preloads another sanitizer
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    for seed in range(3):
        command = [str(program), str(seed), str(num_pieces)]
        outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
        if "unexpected memory mapping" in outcome.stderr:
            pytest.skip("the thread sanitizer does not support this kernel's address space")
        assert (outcome.returncode, outcome.stdout) == (0, "ok\n"), outcome.stderr


@pytest.mark.skipif(not TASKS.exists(), reason="needs /proc")
def test_idle_threads_sleep() -> None:
    before = {task.name for task in TASKS.iterdir()}
    engine = Engine(6)
    ours = [task for task in TASKS.iterdir() if task.name not in before]
    assert len(ours) == 5

    def is_asleep() -> bool:
        return all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S" for task in ours)

    for _ in range(3):
        eventually(is_asleep, "all threads sleep")
        project(engine, [floats(np.ones((400, 64)))], np.ones((5, 64), np.float32), 0)
    eventually(is_asleep, "all threads sleep")
    engine.close()
