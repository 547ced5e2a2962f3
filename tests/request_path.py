"""Prints the files of quire that a chat request enters, by process, in the order of their first call:

    python -m tests.request_path

The request is the second one of a server with the default model, a stream over HTTP. It counts up to its line of the
log, which is the last thing that the server does for it. `*` marks files that the server also enters without a request
in as much time.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.server.rig import Server, serving
from tests.waiting import eventually

# Every process of the server starts with this. Python 3.11 has no `sys.monitoring`: a profile function sees the same
# calls. A worker prepares grammars in threads after its start, which takes as long as some requests.
RECORDER = """
import os, signal, sys, threading
name = f"{os.environ['ENTERED']}/{os.getpid()}"
entered = {}
def enter(frame, event, _):
    if event == "call" and not threading.current_thread().name.startswith("grammar"):
        entered[frame.f_code.co_filename] = None
def write(*_):
    files = list(entered)
    entered.clear()
    with open(name + ".part", "w") as file:
        file.write("\\n".join(files))
    os.rename(file.name, name + ".files")
signal.signal(signal.SIGUSR2, write)
open(name + ".begun", "w").close()
threading.setprofile(enter)
sys.setprofile(enter)
"""
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}


class Entered(NamedTuple):
    files: list[str]  # from the root of the package
    idle: set[str]


def files_entered() -> dict[int, Entered]:
    """The files that each process enters."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(RECORDER)
        records = Path(folder, "entered")
        records.mkdir()
        env = {"PYTHONPATH": folder, "ENTERED": str(records)}
        with serving("--backend", "native", "--num-blocks", "100", env=env) as server:
            server.chat()
            _await_log(server, 1)
            processes = [int(path.stem) for path in records.glob("*.begun")]
            _taken(records, processes)
            begun_s = time.monotonic()
            assert server.post("/v1/chat/completions", BODY).status == 200
            _await_log(server, 2)
            found = _taken(records, processes)
            time.sleep(time.monotonic() - begun_s)
            idle = _taken(records, processes)
    return {pid: Entered(files, set(idle[pid])) for pid, files in found.items()}


def _await_log(server: Server, num_requests: int) -> None:
    eventually(lambda: server.log.count(" finish=") == num_requests, "the log has a line for each request")


def _taken(records: Path, processes: list[int]) -> dict[int, list[str]]:
    """What the processes have entered since the last time, without the audit of a worker that is idle for a second."""
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    eventually(lambda: len(list(records.glob("*.files"))) == len(processes), "all processes write their files")
    found = {}
    for path in records.glob("*.files"):
        names = [name.rpartition("/quire/")[2] for name in path.read_text().splitlines() if "/quire/" in name]
        found[int(path.stem)] = [name for name in names if name != "core/check.py"]
        path.unlink()
    return found


def distinct(entered: dict[int, Entered]) -> set[str]:
    return {name for one in entered.values() for name in one.files}


def main() -> None:
    entered = files_entered()
    for pid, one in sorted(entered.items()):
        print(f"process {pid}: {len(one.files)} files, {len(one.idle)} without a request")
        for name in one.files:
            print(f"  {name}{' *' * (name in one.idle)}")
    print(f"{len(distinct(entered))} files in all")


if __name__ == "__main__":
    main()
