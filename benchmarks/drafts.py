"""Speed with and without drafts, of one stream and of several, in one run.

    python benchmarks/drafts.py                                # the default model on this machine's CPU
    python benchmarks/drafts.py --backend torch --device cuda  # on a GPU

Workloads: `copy` repeats a file, `edit` the same with a prediction of the answer, `json` extracts fields of a letter by
a schema, `free` writes text that repeats nothing (temperature 1). Rounds with and without drafts alternate. Answers are
compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.engine.engine import EngineOutput
from quire.engine.llm import LLM
from quire.engine.params import GenerationParams
from quire.engine.worker.step_estimate import NO_WORK, StepEstimator, work_of
from quire.text.grammar import Grammar, GrammarKind

FILE = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the length of the border of a rectangle."""
    return 2 * (width + height)


def describe(name, width, height):
    """Return a sentence about a rectangle."""
    return f"{name} has an area of {area(width, height)} and a perimeter of {perimeter(width, height)}"
'''
LETTER = (
    "Dear team, please process order 4711 of 3 March 2026 for Ada Lovelace, 12 Analytical Road, London. She ordered two"
    " brass gears for the difference engine and one punched card reader. The order was paid by bank transfer. Kind"
    " regards, Charles Babbage"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer"},
        "customer_name": {"type": "string", "maxLength": 30},
        "customer_address": {"type": "string", "maxLength": 60},
        "ordered_items": {"type": "string", "maxLength": 120},
        "payment_method": {"enum": ["bank transfer", "credit card", "cash on delivery"]},
        "signed_by": {"type": "string", "maxLength": 30},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]


class Workload(NamedTuple):
    name: str
    prompt: str
    params: GenerationParams


WORKLOADS = (
    Workload(
        "copy",
        f"Repeat this file exactly:\n```python\n{FILE}```",
        GenerationParams(temperature=0, max_tokens=160, ignore_eos=True),
    ),
    Workload(
        "edit",
        f"Rename the function area to surface in this file:\n```python\n{FILE}```",
        GenerationParams(temperature=0, max_tokens=160, ignore_eos=True, prediction=FILE.replace("area", "surface")),
    ),
    Workload(
        "json",
        f"Extract the fields of this letter as JSON:\n\n{LETTER}",
        GenerationParams(
            temperature=0, max_tokens=160, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, sort_keys=True))
        ),
    ),
    Workload(
        "free",
        "Write a story about a lighthouse.",
        GenerationParams(temperature=1.0, top_p=1.0, seed=7, max_tokens=160, ignore_eos=True),
    ),
)


class Run(NamedTuple):
    tokens: list[tuple[int, ...]]
    seconds: float
    num_steps: int

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Side:
    """An engine whose scheduler knows the cost of a step, as in a worker."""

    def __init__(self, model: str, *, has_drafts: bool, **settings: object) -> None:
        self.llm = LLM(model, enable_drafts=has_drafts, enable_prefix_caching=False, **settings)  # type: ignore[arg-type]
        engine = self.llm.engine
        self._estimator = StepEstimator()
        self._planned = self._running = NO_WORK
        self._step = engine.step
        self.num_steps = 0
        engine.on_plan = lambda plan: setattr(self, "_planned", work_of(plan))
        engine.step = self._timed  # type: ignore[method-assign]
        while engine.runner.prepare():
            pass

    def _timed(self) -> list[EngineOutput]:
        engine, start_s = self.llm.engine, time.monotonic()
        outputs = self._step()
        done = self._planned
        if engine.capacity.has_overlap:
            done, self._running = self._running, self._planned
        self._estimator.learn(done, time.monotonic() - start_s)
        self.num_steps += 1
        if engine.capacity.has_costly_rows:
            engine.scheduler.policy.ledger.cost = self._estimator.cost()
        return outputs

    def run(self, workload: Workload, num_streams: int) -> Run:
        before = self.num_steps
        start_s = time.monotonic()
        outputs = self.llm.chat([workload.prompt] * num_streams, workload.params, progress=False)
        seconds = time.monotonic() - start_s
        return Run([output.completions[0].token_ids for output in outputs], seconds, self.num_steps - before)


def measure(sides: Sequence[Side], workload: Workload, num_streams: int, rounds: int) -> None:
    runs: list[list[Run]] = [[], []]
    for number in range(rounds + 1):  # the first round warms up
        for side, found in zip(sides, runs, strict=True):
            run = side.run(workload, num_streams)
            if number:
                found.append(run)
    plain, drafted = ([run.speed for run in found] for found in runs)
    ratios = [after / before for before, after in zip(plain, drafted, strict=True)]
    is_equal = all(one.tokens == other.tokens for one, other in zip(*runs, strict=True))
    scheduler = sides[1].llm.engine.scheduler
    print(
        f"{workload.name:5} {num_streams:3} streams: {statistics.median(plain):9.1f} ->"
        f" {statistics.median(drafted):9.1f} tok/s, {statistics.median(ratios):5.2f} times"
        f" ({min(ratios):.2f} to {max(ratios):.2f});"
        f" steps {runs[0][-1].num_steps} -> {runs[1][-1].num_steps};"
        f" {scheduler.num_accepted} of {scheduler.num_drafted} drafts right so far;"
        f" answers {'equal' if is_equal else 'DIFFER'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", default="1", help="numbers of streams, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="copy,edit,json,free")
    options = parser.parse_args()
    model = str(Path(options.model)) if Path(options.model).exists() else options.model
    settings = {"backend": options.backend, "device": options.device, "dtype": options.dtype, "num_blocks": 2000}
    sides = [Side(model, has_drafts=has_drafts, **settings) for has_drafts in (False, True)]
    print(f"{sides[0].llm.engine.runner.facts()}")
    for workload in WORKLOADS:
        if workload.name in options.only.split(","):
            for num_streams in map(int, options.streams.split(",")):
                measure(sides, workload, num_streams, options.rounds)
    for side in sides:
        side.llm.close()


if __name__ == "__main__":
    main()
