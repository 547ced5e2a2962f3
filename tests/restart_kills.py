"""Kills processes that save their cache: `python -m tests.restart --kills 200`.

`python -m tests.restart_kills MODEL FOLDER MAX_BYTES THREADS` is the child. It prints one JSON line when it is ready,
answers one line of prompts after the other, and saves its cache while it waits for the next line.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from quire.engine.levels.block_file import TEMPORARY_PREFIX, DamagedBlock, check_block
from quire.engine.levels.cache_folder import STALE_S, Listing, list_files, space_folders
from quire.engine.model_text import ModelText
from tests.restart import Answer, Case, ShowProgress, answer_all, make_cases, open_engine

NUM_CASES = 24  # prompts, in all; several times what the folder can hold
CASES_PER_CHILD = 3
MAX_BYTES = 40 << 20  # so small that children evict
MAX_NEW_FILES = 12  # a child is killed when the folder has changed this often, or less


@dataclass(slots=True)
class KillOutcome:
    num_kills: int = 0
    num_during_writes: int = 0  # kills that left a temporary file
    num_while_idle: int = 0  # kills after the last save
    num_answers: int = 0
    num_equal: int = 0
    num_loaded_tokens: int = 0
    num_whole: int = 0  # files found after the kills, in all
    num_torn: int = 0  # files under a final name that are not whole
    num_restored: int = 0  # pieces that the next child found
    num_temporary: int = 0  # temporary files that kills left
    num_removed: int = 0  # of them, those that the next start removed
    problems: list[str] = field(default_factory=list)


def report_kills(outcome: KillOutcome) -> str:
    return (
        f"kills {outcome.num_kills}: {outcome.num_during_writes} within a write, {outcome.num_while_idle} after the"
        f" last save; answers {outcome.num_answers}, equal {outcome.num_equal},"
        f" tokens from disk {outcome.num_loaded_tokens};"
        f" files found whole {outcome.num_whole}, torn {outcome.num_torn}, restored {outcome.num_restored};"
        f" temporary files {outcome.num_temporary}, removed {outcome.num_removed}"
    )


def list_folder(folder: Path) -> Listing:
    found = Listing([], [], [], [])
    for space in space_folders(folder):
        more = list_files(space)
        for mine, others in zip(found, more, strict=True):
            cast(list[object], mine).extend(cast(list[object], others))
    return found


class Child:
    """A process that answers prompts and saves its cache."""

    def __init__(self, model: Path, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "tests.restart_kills", str(model), str(folder), str(MAX_BYTES), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.num_restored: int = self._read()["restored"]

    def ask(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([[case.prompt, case.salt] for case in cases]) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = self._read()["answers"]
        return answers

    def is_idle(self) -> bool:
        """Whether it has said that everything is saved."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the child is dead"
        found: dict[str, Any] = json.loads(line)
        return found


class Kills:
    def __init__(self, model: Path, folder: Path, seed: int, threads: int | None) -> None:
        self._model, self._folder = model, folder
        self._threads = threads or os.cpu_count() or 1
        self._random = random.Random(seed)
        text = ModelText.open(model)
        self._cases = make_cases(text, NUM_CASES, seed)
        text.close()
        self._reference = open_engine(model, None, enable_prefix_caching=False, kv_memory="64M", threads=self._threads)
        self._expected: dict[Case, Answer] = {}
        self.outcome = KillOutcome()

    def close(self) -> None:
        self._reference.close()

    def expect(self, case: Case) -> Answer:
        """The answer without a cache."""
        if case not in self._expected:
            (self._expected[case],) = answer_all(self._reference, [case])
        return self._expected[case]

    def run_child(self, *, is_killed: bool = True) -> None:
        """Start a child, check its answers, and kill it while it saves."""
        chosen = self._random.sample(self._cases, CASES_PER_CHILD)
        expected = [self.expect(case) for case in chosen]
        outcome = self.outcome
        child = Child(self._model, self._folder, self._threads)
        outcome.num_restored += child.num_restored
        outcome.num_removed += outcome.num_temporary - outcome.num_removed - len(list_folder(self._folder).temporaries)
        before = {file.path for file in list_folder(self._folder).files}
        for number, (answer, right) in enumerate(zip(child.ask(chosen), expected, strict=True)):
            outcome.num_answers += 1
            outcome.num_loaded_tokens += answer["loaded"]
            is_equal = (answer["tokens"], answer["logprobs"]) == ([*right.tokens], [*right.logprobs])
            outcome.num_equal += is_equal
            if not is_equal:
                outcome.problems.append(
                    f"kill {outcome.num_kills}, prompt {number}: {answer['tokens']} for {right.tokens}"
                )
        if is_killed:
            self._wait_for_kill(child, before)
        child.kill()
        if is_killed:
            self._inspect()

    def _wait_for_kill(self, child: Child, before: set[str]) -> None:
        """Wait until a random number of files is new or gone, and half of the time until a file is being written."""
        num_changes = self._random.randrange(MAX_NEW_FILES + 1)
        is_in_write = self._random.random() < 0.5
        while True:
            if child.is_idle():
                self.outcome.num_while_idle += 1
                return
            now = list_folder(self._folder)
            if len({file.path for file in now.files} ^ before) >= num_changes and (now.temporaries or not is_in_write):
                return

    def _inspect(self) -> None:
        """Check what a kill has left, and make temporary files so old that the next start removes them."""
        outcome, faults = self.outcome, Counter[str]()
        outcome.num_kills += 1
        found = list_folder(self._folder)
        for file in found.files:
            try:
                check_block(file.path)
                outcome.num_whole += 1
            except DamagedBlock as damage:
                outcome.num_torn += 1
                faults[damage.fault] += 1
        if faults:
            outcome.problems.append(f"kill {outcome.num_kills}: {dict(faults)}")
        outcome.num_during_writes += bool(found.temporaries)
        outcome.num_temporary += len(found.temporaries)
        for file in found.temporaries:
            old_ns = file.used_ns - int((STALE_S + 60) * 1e9)
            os.utime(file.path, ns=(old_ns, old_ns))


def run_kills(
    model: Path, folder: Path, count: int, show_progress: ShowProgress, *, seed: int = 0, threads: int | None = None
) -> KillOutcome:
    kills = Kills(model, folder, seed, threads)
    try:
        for number in range(count):
            kills.run_child()
            show_progress(f"kills {number + 1}/{count}")
        kills.run_child(is_killed=False)
    finally:
        kills.close()
    outcome = kills.outcome
    if outcome.num_removed != outcome.num_temporary:
        left = outcome.num_temporary - outcome.num_removed
        outcome.problems.append(f"{left} temporary files ({TEMPORARY_PREFIX}) were not removed")
    return outcome


def serve_child(model: Path, folder: Path, max_bytes: int, threads: int) -> None:
    engine = open_engine(model, folder, disk_cache=max_bytes, threads=threads)
    (disk,) = engine.scheduler.cache.stats().levels
    print(json.dumps({"restored": disk.num_pieces}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        cases = [Case(tuple(prompt), salt) for prompt, salt in json.loads(line)]
        answers = [
            {"tokens": one.tokens, "logprobs": one.logprobs, "loaded": one.cache.num_loaded_tokens}
            for one in answer_all(engine, cases)
        ]
        print(json.dumps({"answers": answers}), flush=True)
        while engine.has_idle_work:
            engine.idle()
            engine.transfers.wait(0.01)  # type: ignore[union-attr]
        print(json.dumps({"idle": True}), flush=True)
    engine.close()


if __name__ == "__main__":
    serve_child(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
