"""R14: hostile model files load or are refused, in little time and memory, and end no process."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, exactly, timed
from tests.gauntlet.file_mutants import CASES, EVERY, HAND_MADE, TARGETS, mutate_bytes, mutate_json
from tests.gauntlet.flood import idle_base, left_over
from tests.server.rig import Answer, Server, serving
from tests.tiny import write_tiny_model

MAX_S, MAX_BYTES = 2.0, 1 << 30
BATCH = 2_000  # mutants of one process: the start of a process takes as long as a few hundred mutants
QUICK_CASES = 40
MAX_DEATHS = 20  # of processes; after that, the rest of the mutants are skipped
# Targets whose mutants take ten times as long as the others. Fewer of them are opened.
COSTLY = (
    *("gguf of K types", "quantised safetensors", "chat template", "gguf of experts"),
    "safetensors of a mixture of experts",
)


@dataclass
class Outcome:
    """Everything that the processes of one or several targets reported."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    peak_bytes: int = 0

    def add(self, name: str, report: dict[str, Any]) -> None:
        self.outcomes.update(report["outcomes"])
        self.faults += report["faults"]
        self.peak_bytes = max(self.peak_bytes, report["peak"])
        if report["slowest_s"] > self.slowest_s:
            self.slowest_s, self.slowest = report["slowest_s"], f"{name}, seed {report['slowest']}"


def open_mutants(name: str, first: int, count: int, folder: Path, found: Outcome) -> None:
    """Open mutants in a process. If a signal ends it, count the current mutant, and continue with the next one."""
    progress = folder / f"{name}-{first}".replace(" ", "-")
    end = first + count
    for _ in range(MAX_DEATHS):
        order = [name, str(first), str(end - first), str(progress)]
        command = [sys.executable, "-m", "tests.gauntlet.file_mutants", *order]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found.add(name, json.loads(done.stdout))
            return
        if done.returncode > 0:
            raise RuntimeError(f"{name}: the process of the mutants failed: {done.stderr[-2000:]}")
        seed = int(progress.read_text())
        found.outcomes["signal"] += 1  # mutants before it in the same process are not in the sums
        found.faults.append(f"{name}: seed {seed}: ended by signal {-done.returncode}")
        first = seed + 1
        if first >= end:
            return


def all_mutants(gauntlet: Gauntlet) -> Outcome:
    found = Outcome()
    jobs = [(HAND_MADE, 0, gauntlet.size(len(CASES), QUICK_CASES))]
    if gauntlet.is_quick:
        jobs.append((EVERY, 0, 12 * len(TARGETS)))
    for name in () if gauntlet.is_quick else sorted(TARGETS, key=lambda name: name not in COSTLY):
        count = 1_450 if name in COSTLY else 4_000
        jobs += [(name, first, min(BATCH, count - first)) for first in range(0, count, BATCH)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in [pool.submit(open_mutants, *job, gauntlet.folder, found) for job in jobs]:
            done.result()
    return found


# A server whose model becomes hostile


@contextmanager
def two_models(gauntlet: Gauntlet) -> Iterator[tuple[Server, Path]]:
    """A server with the models `good` and `hostile`, which have been loaded once, and the folder of `hostile`."""
    folder = write_tiny_model(gauntlet.folder / "hostile")
    config = gauntlet.folder / "models.yaml"
    config.write_text(
        f"threads: 1\nmemory: 600M\nmodels:\n  - {{model: {gauntlet.tiny}, name: good, kv_memory: 16M}}\n"
        f"  - {{model: {folder}, name: hostile, kv_memory: 16M}}\n"
    )
    with serving("--config", str(config)) as server:
        load_hostile(server)
        server.chat(model="hostile")
        server.post("/v1/models/unload", {"model": "hostile"})
        server.chat(model="good")
        yield server, folder


def load_hostile(server: Server) -> Answer:
    return server.post("/v1/models/load", {"model": "hostile"})


def answer_of_good(server: Server) -> object:
    return server.chat(model="good", temperature=0).json["choices"]


def _spoil(rng: random.Random, good: Path, folder: Path) -> None:
    """Write a copy of a model with one damaged file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    name = rng.choice(("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"))
    path = folder / name
    if path.suffix == ".json":
        mutate_json(rng, path)
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 2000))


def hostile_in_a_server(gauntlet: Gauntlet) -> list[Figure]:
    """Load damaged models beside a good one."""
    where = "hostile models in a running server: "
    count = gauntlet.size(40, 2)
    found = Counter({"missing or changed answers of the other model": 0, "neither loaded nor refused": 0})
    with two_models(gauntlet) as (server, folder):
        base = idle_base(server)
        expected = answer_of_good(server)
        for seed in range(count):
            _spoil(random.Random(seed), gauntlet.tiny, folder)
            answer = load_hostile(server)
            if answer.status == 200:
                server.post("/v1/models/unload", {"model": "hostile"})
            found["neither loaded nor refused"] += answer.status != 200 and "error" not in answer.json
            found["missing or changed answers of the other model"] += answer_of_good(server) != expected
        found["deaths of the server"] += server.process.poll() is not None
        left = left_over(server, base, prefix=where)
    return [Figure("hostile models loaded into a running server", count), *counted(where, found), *left]


def hostile_files(gauntlet: Gauntlet) -> Sequence[Figure]:
    found = all_mutants(gauntlet)
    for fault in found.faults[:10]:
        gauntlet.say(fault)
    gauntlet.say(f"{dict(found.outcomes)}; slowest: {found.slowest}")
    total = sum(found.outcomes.values())
    return [
        Figure("hostile files", total, at_least=gauntlet.size(40_000, 200)),
        Figure("hostile files made by hand", gauntlet.size(len(CASES), QUICK_CASES), at_least=40),
        Figure("hostile files that load", found.outcomes["loads"], at_least=total // 50),
        Figure("hostile files refused with an error of quire", found.outcomes["refused"], at_least=total // 50),
        exactly("hostile files with another outcome", found.outcomes["fault"]),
        exactly("hostile files that ended a process by a signal", found.outcomes["signal"]),
        timed("time of the slowest hostile file", found.slowest_s, MAX_S),
        Figure(
            "peak memory of a process that opens hostile files",
            found.peak_bytes / 2**20,
            "MiB",
            at_most=MAX_BYTES / 2**20,
        ),
        *hostile_in_a_server(gauntlet),
    ]


ROWS: tuple[Row, ...] = (
    Row("R14", "Hostile model files load or are refused within 2 s and 1 GiB, and end no process", hostile_files, 600),
)
