"""Runs a real Ray cluster with replicas of a model, and talks to it over a real socket."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.rig import ONE_THREAD, PATIENCE, Server, command_line
from tests.waiting import HANG_S, eventually


@dataclass
class Cluster(Server):
    """A deployed quire. `process` is the driver."""

    folder: Path = Path()
    said: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)

    def order(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.said.get(timeout=HANG_S)

    @property
    def worker_pid(self) -> int:
        """The worker, if there is one replica."""
        (pid,) = self.worker_pids()
        return pid

    def worker_pids(self) -> list[int]:
        """The workers of all replicas of this cluster."""
        return [pid for pid in descendants(self.process.pid) if "quire.engine.worker.worker" in command_line(pid)]

    def replica_pids(self) -> list[int]:
        """Ray's processes of the replicas."""
        found = [pid for pid in descendants(self.process.pid) if ":replicas" in command_line(pid)]
        return [pid for pid in found if "ServeReplica" in command_line(pid)]

    @property
    def log(self) -> str:
        """The output of the driver, and of Ray's processes."""
        files = self.folder.glob("ray/session_latest/logs/worker*")
        return "".join([*self.stdout, *self.stderr, *(file.read_text(errors="replace") for file in files)])

    def wait_for(self, pattern: str) -> str:
        def line() -> str | None:
            return next((line for line in self.log.splitlines() if re.search(pattern, line)), None)

        return eventually(line, pattern) or ""

    def replicas(self) -> list[dict[str, Any]]:
        """What the server says of its replicas."""
        models = self.get("/v1/watch?once=true").json["models"]
        engine = models[0]["engine"]
        return [] if engine is None else list(engine["replicas"])

    def wait_replicas(self, count: int) -> None:
        def is_so() -> bool:
            found = self.replicas()
            return len(found) == count and all(one["is_accepting"] for one in found)

        eventually(is_so, f"{count} replicas accept requests")


def descendants(pid: int) -> list[int]:
    """All processes below one. Ray's processes are started by others of its own."""
    import psutil  # type: ignore[import-untyped]

    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def settings_of(options: tuple[str, ...]) -> dict[str, Any]:
    """Options of a command line as settings of a file."""
    settings: dict[str, Any] = {}
    left = list(options)
    while left:
        name = left.pop(0)
        if not name.startswith("--"):
            settings["model"] = name
            continue
        key = name.removeprefix("--").replace("-", "_")
        value: Any = True if not left or left[0].startswith("--") else left.pop(0)
        settings[key] = int(value) if isinstance(value, str) and value.isdecimal() else value
    return settings


@contextlib.contextmanager
def deployed(
    settings: dict[str, Any], *, replicas: int | None = 2, num_nodes: int = 1, key: str | None = None
) -> Iterator[Cluster]:
    """A cluster with these settings of `quire deploy`."""
    with tempfile.TemporaryDirectory(prefix="qd-") as name:
        folder = Path(name)
        file = folder / "deploy.yaml"
        number = {} if replicas is None else {"replicas": replicas}
        write(file, {"port": 0, "state_dir": "none", **number, **settings})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scale.driver", str(file), str(num_nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD, **PATIENCE, "RAY_TMPDIR": name, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        cluster = Cluster(process, "", [], [], key=key, folder=folder)
        threads = [
            threading.Thread(target=_listen, args=(cluster,), daemon=True),
            threading.Thread(target=lambda: cluster.stderr.extend(process.stderr or ()), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            # Processes of Ray and the replicas start: on a busy machine that took more than five minutes.
            first = cluster.said.get(timeout=3 * HANG_S)
            assert "url" in first, f"{first}\n{cluster.log}"
            cluster.url = first["url"]
            yield cluster
        finally:
            _end(cluster, threads)


def write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items()))


def _listen(cluster: Cluster) -> None:
    for line in cluster.process.stdout or ():
        cluster.stdout.append(line)
        if line.startswith("{"):
            cluster.said.put(json.loads(line))
    cluster.said.put({"error": "the driver has ended"})


def _end(cluster: Cluster, threads: list[threading.Thread]) -> None:
    process = cluster.process
    below = descendants(process.pid)
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for pid in [process.pid, *below]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(HANG_S)
    for thread in threads:
        thread.join(60)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
