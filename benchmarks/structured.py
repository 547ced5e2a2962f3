"""Measures the cost of grammars: steps of constrained requests against steps of plain ones, alternating in one run.

    python benchmarks/structured.py                         # 16 of each, the default model

All requests decode while the clock runs, with the same lengths in both. The answers are long arrays of records, so none
ends early. The target: a step with 16 constrained rows takes less than 5 % longer. The cost of a mask depends on the
field: 15 to 30 us for a string, a number or a choice, about 100 us for a string with maxLength. There are therefore
records of common fields, and records with costly ones.
"""

from __future__ import annotations

import statistics
import time
from itertools import count
from typing import Any

import harness
from harness import say

from quire.bench.driver import driven
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.grammars import Compiled, Grammars, open_tokenizer
from quire.text.grammar import json_schema_grammar
from quire.weights.hub import resolve


def records(**properties: Any) -> dict[str, Any]:
    items = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "minItems": 500, "items": items}


TAGS = {"type": "array", "items": {"enum": ["new", "old", "hot"]}, "maxItems": 3}
SCHEMAS: dict[str, dict[str, Any]] = {
    "common fields": records(
        name={"type": "string"},
        age={"type": "integer"},
        score={"type": "number"},
        tags=TAGS,
        is_new={"type": "boolean"},
    ),
    "costly fields": records(
        name={"type": "string", "maxLength": 40},
        age={"type": "integer", "minimum": 0, "maximum": 120},
        email={"type": "string", "format": "email"},
        tags=TAGS,
    ),
}
NUM_PROMPT_TOKENS = 64
WARM_UP_STEPS = 4


def compare(engine: Engine, compiled: Compiled, num_rows: int, num_steps: int, num_rounds: int) -> None:
    sides = {
        "plain": lambda _round: time_steps(engine, None, num_rows, num_steps),
        "constrained": lambda _round: time_steps(engine, compiled, num_rows, num_steps),
    }
    found = harness.alternate(sides, num_rounds)
    plain_s, constrained_s = (statistics.median(one for times in found[side] for one in times) for side in sides)
    facts, count = engine.runner.facts(), num_rounds * num_steps
    print(f"{facts.backend}, {facts.device}, {facts.num_threads} threads: {num_rows} rows, {count} steps of each")
    change = f"{constrained_s / plain_s - 1:+.1%} per step (target: 5 %)"
    say(f"plain {plain_s * 1000:.2f} ms, constrained {constrained_s * 1000:.2f} ms: {change}")


def time_steps(engine: Engine, compiled: Compiled | None, num_rows: int, num_steps: int) -> list[float]:
    engine.clear_cache()
    times, most = [], engine.capacity.vocab_size - 100
    with driven(engine, count().__next__) as session:
        for row in range(num_rows):
            prompt = [100 + (row * 7919 + i * 31) % most for i in range(NUM_PROMPT_TOKENS)]
            sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=row, max_tokens=num_steps + 40)
            session.add(prompt, sampling, matcher=None if compiled is None else compiled.matcher())
        session.run(until=lambda: all(track.tokens for track in session.tracks.values()))
        for _ in range(WARM_UP_STEPS + num_steps):
            start_s = time.perf_counter()
            session.step()
            times.append(time.perf_counter() - start_s)
    return times[WARM_UP_STEPS:]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    path = resolve(args.model)
    engine = make_engine(path, EngineConfig(backend=args.backend, max_num_seqs=max(args.rows + 4, 8)))
    grammars = Grammars(lambda: open_tokenizer(path, "auto"), engine.capacity.vocab_size)
    for name, schema in SCHEMAS.items():
        print(f"{name}: ", end="")
        compare(engine, grammars.compile(json_schema_grammar(schema)), args.rows, args.steps, args.rounds)
    grammars.close()
    engine.close()


if __name__ == "__main__":
    main()
