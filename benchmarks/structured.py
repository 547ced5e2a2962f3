"""Measures the cost of grammars: steps of constrained requests against steps of plain ones, alternating in one run.

    python benchmarks/structured.py                         # 16 of each, the default model
    python benchmarks/structured.py --first                 # the first structured answer of a fresh server
    python benchmarks/structured.py --first --wait 10       # the same, 10 s after the server is ready

All requests decode while the clock runs, with the same lengths in both. The answers are long arrays of records, so none
ends early. The target: a step with 16 constrained rows takes less than 5 % longer. The cost of a mask depends on the
field: 15 to 30 us for a string, a number or a choice, about 100 us for a string with maxLength. There are therefore
records of common fields, and records with costly ones.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import harness
from harness import say

from quire.bench.http_load import HttpStream
from quire.cli.bench_server import serving
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.structured.grammars import Compiled, open_grammars
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
NUM_BUSY = 2  # CPU-bound processes
NUM_LATER = 5  # structured answers after the first


# The cost of a step


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
    for row in range(num_rows):
        prompt = [100 + (row * 7919 + i * 31) % (engine.capacity.vocab_size - 100) for i in range(NUM_PROMPT_TOKENS)]
        sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=row, max_tokens=num_steps + 40)
        engine.add(row, prompt, sampling, matcher=None if compiled is None else compiled.matcher())
    requests = [request for row in range(num_rows) if (request := engine.scheduler.get(row)) is not None]
    while any(request.num_output_tokens < 1 for request in requests):
        engine.step()
    times = []
    for _ in range(WARM_UP_STEPS + num_steps):
        start_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start_s)
    for row in range(num_rows):
        engine.cancel(row)
    while engine.has_work:
        engine.step()
    engine.clear_cache()
    return times[WARM_UP_STEPS:]


# The first structured answer of a fresh server


def measure_first(path: Path, num_rounds: int, wait_s: float) -> None:
    """Compare the first structured answer of a server with later ones of other schemas, which are compiled too."""
    for num_busy in (0, NUM_BUSY):
        with harness.cpu_bound_processes(num_busy):
            rounds = [first_and_later(path, wait_s) for _ in range(num_rounds)]
        ready_s, first_s, later_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        longest_s = max(first for _, first, _ in rounds)
        say(
            f"beside {num_busy} CPU-bound processes, medians of {num_rounds} servers: ready after {ready_s:.2f} s;"
            f" {wait_s:g} s later, first token of the first structured answer after {first_s:.3f} s (longest"
            f" {longest_s:.3f}), of a later one after {later_s:.3f} s: ratio {first_s / later_s:.1f}"
        )


def first_and_later(path: Path, wait_s: float) -> tuple[float, float, float]:
    """Seconds until a server is ready, to the first token of its first structured answer, and of later ones."""
    start_s = time.perf_counter()
    with serving(str(path), ()) as server:
        ready_s = time.perf_counter() - start_s
        time.sleep(wait_s)
        times = [first_token_s(server.url, f"name{number}") for number in range(1 + NUM_LATER)]
    return ready_s, times[0], statistics.median(times[1:])


def first_token_s(url: str, name: str) -> float:
    schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    body = {
        "messages": [{"role": "user", "content": "Name a city."}],
        "max_tokens": 4,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    start_s = time.perf_counter()
    for event in HttpStream(url, "/v1/chat/completions", body).events():
        if any(choice["delta"].get("content") for choice in event["choices"]):
            return time.perf_counter() - start_s
    raise SystemExit("the answer has no token")


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--wait", type=float, default=0.0)
    args = parser.parse_args()
    path = resolve(args.model)
    if args.first:
        measure_first(path, args.rounds, args.wait)
        return
    engine = make_engine(path, EngineConfig(backend=args.backend, max_num_seqs=max(args.rows + 4, 8)))
    grammars = open_grammars(path, "auto", engine.capacity.vocab_size)
    for name, schema in SCHEMAS.items():
        print(f"{name}: ", end="")
        compare(engine, grammars.compile(json_schema_grammar(schema)), args.rows, args.steps, args.rounds)
    grammars.close()
    engine.close()


if __name__ == "__main__":
    main()
