"""R19: a server that gets SIGTERM ends and leaves nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from quire.weights.hub import resolve
from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, timed
from tests.gauntlet.flood import Flood, chat_body, percentile
from tests.server.rig import Server, put_away, spawn, wait_ready
from tests.waiting import HANG_S, eventually

STAGES = ("start", "load", "serve", "drain")
SPARE_S = 5.0  # beyond the drain time
ENDLESS = 3900


def shared_memory(pids: Sequence[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped or open."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return found


def has_handler(pid: int) -> bool:
    """Whether the process handles SIGTERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


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
    """One server, from its start to its end by SIGTERM. Its HOME and its folder for temporary files are its own."""

    num_signals = 0
    late_s = 0.0  # time beyond the drain time

    def __init__(self, options: Sequence[str], folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._drain_s = self._random.choice((0.0, 0.5, 2.0))
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._options = (*options, "--drain", str(self._drain_s))
        self._stage = STAGES[seed % len(STAGES)]
        self.faults = Counter[str]()  # what the server left behind

    def run(self) -> Termination:
        server = spawn(*self._options, env={"HOME": str(self._folder), "TMPDIR": str(self._temporary)})
        try:
            flood = self._begin(server)
            shared = set() if self._stage == "start" else shared_memory(owned_by(self._folder))
            self._signal(server)
            first_s = time.monotonic()
            for _ in range(self._random.choice((0, 1, 3, 4))):
                time.sleep(self._random.random() * 0.2)
                self._signal(server)
            self.faults["servers that exited with another status than 0"] += server.process.wait(HANG_S) != 0
            self.late_s = time.monotonic() - first_s - self._drain_s
            replies = [] if flood is None else flood.wait()
            self.faults["accepted requests without an answer"] += sum(
                reply.ending not in ("done", "error") and reply.status != 0 for reply in replies
            )
            self._look(server, shared)
        finally:
            put_away(server)
            for pid in owned_by(self._folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self

    def _begin(self, server: Server) -> Flood | None:
        """Reach the stage."""
        process, chance = server.process, self._random
        eventually(lambda: has_handler(process.pid) or process.poll() is not None, "it handles signals")
        if self._stage == "start":
            time.sleep(chance.random() * 0.3)
            return None
        if self._stage == "load":
            eventually(lambda: len(owned_by(self._folder)) > 1 or process.poll() is not None, "a worker starts")
            time.sleep(chance.random())
            return None
        wait_ready(server)
        bodies = [chat_body(f"{i}", chance.choice((5, 100, ENDLESS)), stream=i % 3 > 0) for i in range(6)]
        flood = Flood(server, bodies)
        if self._stage == "drain":
            flood.wait_flowing(1)
            self._signal(server)
        time.sleep(chance.random() * 0.4)
        return flood

    def _signal(self, server: Server) -> None:
        if server.process.poll() is None:
            self.num_signals += 1
            server.process.send_signal(signal.SIGTERM)

    def _look(self, server: Server, shared: set[str]) -> None:
        faults = self.faults
        with contextlib.suppress(AssertionError):  # the figures say what is left
            eventually(lambda: not owned_by(self._folder), "no process is left", 30.0)
        faults["orphan processes"] += len(owned_by(self._folder))
        faults["listening sockets left"] += 0
        if server.url:
            with contextlib.suppress(OSError), socket.create_connection(server.address, timeout=5.0):
                faults["listening sockets left"] += 1
        faults["temporary files left"] += sum(1 for _ in self._temporary.rglob("*"))
        faults["files left in shared memory"] += sum(os.path.exists(name) for name in shared)
        faults["tracebacks in logs"] += server.log.count("Traceback")
        if faults.total():
            print(self._stage, faults, server.log[-2000:])


def terminate(gauntlet: Gauntlet, options: Sequence[str], num_signals: int) -> Iterator[Termination]:
    """Start servers and end them, four at a time, until `num_signals` signals were sent."""

    def end(seed: int) -> Termination:
        return Termination(options, gauntlet.folder / f"ending-{seed}", seed).run()

    num_sent, seeds = 0, itertools.count(gauntlet.seed * len(STAGES))
    with ThreadPoolExecutor(2) as pool:
        while num_sent < num_signals:
            for ending in pool.map(end, itertools.islice(seeds, len(STAGES))):
                num_sent += ending.num_signals
                yield ending


def run_signals(gauntlet: Gauntlet) -> Iterator[Figure]:
    few = ("--num-blocks", "400", "--max-num-seqs", "4", "--port", "0")
    for prefix, (model, *rest) in gauntlet.models(*few, "--device", "3ms", real=few):
        options = (str(resolve(model)), *rest)  # the servers have another HOME
        folder = gauntlet.folder / ("real" if prefix else "fake")
        endings = list(terminate(replace(gauntlet, folder=folder), options, 4 if prefix else gauntlet.size(200, 4)))
        late_s = [one.late_s for one in endings]
        faults: Counter[str] = Counter()
        for one in endings:
            faults.update(one.faults)
        yield from (
            Figure(f"{prefix}SIGTERM signals sent", sum(one.num_signals for one in endings), at_least=4),
            Figure(f"{prefix}servers that got SIGTERM, as many in each stage", len(endings), at_least=4),
            Figure(f"{prefix}time to the exit beyond the drain time, p50", percentile(late_s, 50), "s"),
            timed(f"{prefix}time to the exit beyond the drain time, longest", max(late_s), SPARE_S),
            *counted(prefix, faults),
        )


ROWS = (Row("R19", "SIGTERM at any moment ends a server, which leaves nothing behind", run_signals, 900),)
