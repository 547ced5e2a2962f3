"""R19: a server that gets SIGTERM ends and leaves nothing behind. R26: a second server on the same port."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import Flood, chat_body
from tests.gauntlet.watch import percentile
from tests.server.rig import Reply, Server, put_away, serving, spawn, wait_ready
from tests.server.test_chaos import has_handler
from tests.waiting import HANG_S, eventually

FAKE = ("--backend", "fake", "--num-blocks", "400", "--device", "3ms", "--max-num-seqs", "4")
STAGES = ("start", "load", "serve", "drain")
SPARE_S = 5.0  # beyond the drain time
ENDLESS = 3900


@dataclass
class Ending:
    """The end of a server that got SIGTERM, and what it left behind."""

    stage: str
    num_signals: int = 0
    status: int | None = 0
    over_s: float = 0.0  # time beyond the drain time
    num_orphans: int = 0
    num_sockets: int = 0
    num_files: int = 0
    num_shared: int = 0  # files in /dev/shm
    num_unanswered: int = 0
    num_tracebacks: int = 0
    lines: list[str] = field(default_factory=list)


def shared_memory(pids: Sequence[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped or open."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return found


def owned_by(folder: Path) -> list[int]:
    """Processes whose HOME is this folder: also children that inherit few variables, wherever they are in the tree."""
    mark, found = f"HOME={folder}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


class Termination:
    """One server, from its start to its end. Its HOME and its folder for temporary files are its own."""

    def __init__(self, model: str, options: Sequence[str], folder: Path, stage: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._drain_s = self._random.choice((0.0, 0.5, 2.0))
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._model, self._options = model, (*options, "--drain", str(self._drain_s))
        self.ending = Ending(stage)

    def run(self) -> Ending:
        env = {"HOME": str(self._folder), "TMPDIR": str(self._temporary)}
        server = spawn(self._model, *self._options, env=env)
        replies: list[Reply] = []
        shared: set[str] = set()
        try:
            flood = self._begin(server)
            if (found := owned_by(self._folder)) and self.ending.stage != "start":
                shared = shared_memory(found)
            self._signal(server)
            first_s = time.monotonic()
            self._signal_again(server)
            self.ending.status = server.process.wait(HANG_S)
            self.ending.over_s = time.monotonic() - first_s - self._drain_s
            replies = [] if flood is None else flood.wait()
            self._look(server, replies, shared)
        finally:
            put_away(server)
            for pid in owned_by(self._folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self.ending

    def _begin(self, server: Server) -> Flood | None:
        """Reach the stage."""
        pid, chance = server.process.pid, self._random
        eventually(lambda: has_handler(pid) or server.process.poll() is not None, "it handles signals")
        if self.ending.stage == "start":
            time.sleep(chance.random() * 0.3)
            return None
        if self.ending.stage == "load":
            eventually(lambda: len(owned_by(self._folder)) > 1 or server.process.poll() is not None, "a worker starts")
            time.sleep(chance.random())
            return None
        wait_ready(server)
        bodies = [chat_body(f"{i}", chance.choice((5, 100, ENDLESS)), stream=i % 3 > 0) for i in range(6)]
        flood = Flood(server, bodies)
        if self.ending.stage == "drain":
            flood.wait_flowing(1)
            self._signal(server)
        time.sleep(chance.random() * 0.4)
        return flood

    def _signal(self, server: Server) -> None:
        if server.process.poll() is None:
            self.ending.num_signals += 1
            server.process.send_signal(signal.SIGTERM)

    def _signal_again(self, server: Server) -> None:
        for _ in range(self._random.choice((0, 1, 3, 4))):
            time.sleep(self._random.random() * 0.2)
            self._signal(server)

    def _look(self, server: Server, replies: Sequence[Reply], shared: set[str]) -> None:
        ending = self.ending
        with contextlib.suppress(AssertionError):  # the figures say what is left
            eventually(lambda: not owned_by(self._folder), "no process is left", 30.0)
        ending.num_orphans = len(owned_by(self._folder))
        if server.url:
            with contextlib.suppress(OSError), socket.create_connection(server.address, timeout=5.0):
                ending.num_sockets += 1
        ending.num_files = sum(1 for _ in self._temporary.rglob("*"))
        ending.num_shared = sum(os.path.exists(name) for name in shared)
        ending.num_unanswered = sum(reply.ending not in ("done", "error") and reply.status != 0 for reply in replies)
        ending.num_tracebacks = server.log.count("Traceback")
        ending.lines = [server.log[-2000:]]


def terminate(gauntlet: Gauntlet, num_signals: int) -> list[Ending]:
    """Start servers and end them, two at a time, until `num_signals` signals were sent."""
    endings: list[Ending] = []
    lock = threading.Lock()
    seeds = iter(range(10**6))

    def work() -> None:
        while True:
            with lock:
                if sum(one.num_signals for one in endings) >= num_signals and len(endings) >= len(STAGES):
                    return
                seed = next(seeds)
            folder = gauntlet.folder / f"ending-{seed}"
            stage = STAGES[seed % len(STAGES)]
            one = Termination(str(gauntlet.tiny), FAKE, folder, stage, gauntlet.seed + seed).run()
            with lock:
                endings.append(one)

    assert gauntlet.tiny.is_dir()  # made once, before the threads
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()
    return endings


def ending_figures(prefix: str, endings: Sequence[Ending]) -> list[Figure]:
    late_s = [one.over_s for one in endings]
    for one in endings:
        if one.status or one.num_tracebacks:
            print(one.stage, one.status, *one.lines)
    return [
        Figure(f"{prefix}SIGTERM signals sent", sum(one.num_signals for one in endings)),
        Figure(f"{prefix}servers that got SIGTERM", len(endings)),
        exactly(f"{prefix}servers that exited with another status than 0", sum(one.status != 0 for one in endings)),
        Figure(f"{prefix}time to the exit beyond the drain time, p50", percentile(late_s, 50), "s"),
        Figure(
            f"{prefix}time to the exit beyond the drain time, longest", max(late_s), "s", at_most=SPARE_S, is_timed=True
        ),
        exactly(f"{prefix}orphan processes", sum(one.num_orphans for one in endings)),
        exactly(f"{prefix}listening sockets left", sum(one.num_sockets for one in endings)),
        exactly(f"{prefix}files left in shared memory", sum(one.num_shared for one in endings)),
        exactly(f"{prefix}temporary files left", sum(one.num_files for one in endings)),
        exactly(f"{prefix}accepted requests without an answer", sum(one.num_unanswered for one in endings)),
        exactly(f"{prefix}tracebacks in logs", sum(one.num_tracebacks for one in endings)),
    ]


def run_signals(gauntlet: Gauntlet) -> Sequence[Figure]:
    endings = terminate(gauntlet, gauntlet.size(200, 4))
    figures = ending_figures("", endings)
    for stage in STAGES:
        count = sum(one.stage == stage for one in endings)
        figures.append(Figure(f"servers that got SIGTERM in the stage '{stage}'", count, at_least=1))
    if not gauntlet.is_quick:
        with serving(gauntlet.model, "--num-blocks", "400", "--drain", "1") as server:
            relatives = psutil.Process(server.process.pid).children(recursive=True)
            flood = Flood(server, [chat_body(f"{i}", 1000) for i in range(4)])
            flood.wait_flowing()
            begin_s = time.monotonic()
            status = server.stop()
            late_s = time.monotonic() - begin_s - 1
            lost = sum(reply.ending not in ("done", "error") for reply in flood.wait())
            figures += [
                exactly("real model: servers that exited with another status than 0", int(status != 0)),
                Figure(
                    "real model: time to the exit beyond the drain time", late_s, "s", at_most=SPARE_S, is_timed=True
                ),
                exactly("real model: orphan processes", len(psutil.wait_procs(relatives, timeout=30)[1])),
                exactly("real model: accepted requests without an answer", lost),
            ]
    return figures


# R26: a second server on the same port


def second_server(model: str, server: Server) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "serve", model, *FAKE, "--port", str(server.address[1])]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def run_second(gauntlet: Gauntlet) -> Sequence[Figure]:
    count = gauntlet.size(10, 1)
    parts: list[tuple[str, tuple[str, ...], int]] = [("", (str(gauntlet.tiny), *FAKE), count)]
    if not gauntlet.is_quick:
        parts.append(("real model: ", (gauntlet.model, "--num-blocks", "400"), 1))
    figures: list[Figure] = []
    for prefix, options, num_tries in parts:
        with serving(*options) as server:
            worker, unclear, zero, touched = server.worker_pid, 0, 0, 0
            for _ in range(num_tries):
                flood = Flood(server, [chat_body(f"{i}", 300) for i in range(3)])
                flood.wait_flowing()
                other = second_server(str(gauntlet.tiny), server)
                zero += other.returncode == 0
                said = other.stderr.strip().splitlines()
                is_clear = len(said) == 1 and str(server.address[1]) in said[0] and "in use" in said[0]
                unclear += not is_clear or bool(other.stdout.strip())
                touched += sum(reply.ending != "done" for reply in flood.wait())
                if not is_clear:
                    gauntlet.say(other.stderr[-1000:])
            figures += [
                Figure(f"{prefix}second servers started on the port", num_tries, at_least=num_tries),
                exactly(f"{prefix}second servers that exit with status 0", zero),
                exactly(f"{prefix}second servers whose error is not one line with the port", unclear),
                exactly(f"{prefix}streams of the first server that failed", touched),
                exactly(f"{prefix}failed requests of the first server afterwards", int(server.chat().status != 200)),
                exactly(f"{prefix}restarts of the first server's worker", int(server.worker_pid != worker)),
            ]
    return figures


ROWS = (
    Row("R19", "SIGTERM at any moment ends a server, which leaves nothing behind", run_signals, 900),
    Row("R26", "A second server on the same port exits with an error and does not disturb the first", run_second, 240),
)
