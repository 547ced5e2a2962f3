"""Measures the cost of grammars: steps of constrained requests against steps of plain ones, alternating in one run.

    python benchmarks/structured.py                         # 16 of each, the default model
    python benchmarks/structured.py --hostile               # grammars that are refused, and their cost to others
    python benchmarks/structured.py --unique 10000          # memory, over that many different schemas
    python benchmarks/structured.py --first                 # the first structured answer of a fresh server
    python benchmarks/structured.py --first --wait 10       # the same, 10 s after the server is ready

All requests decode while the clock runs, with the same lengths in both. The answers are long arrays of records, so none
ends early. The target: a step with 16 constrained rows takes less than 5 % longer. The cost of a mask depends on the
field: 15 to 30 us for a string, a number or a choice, about 100 us for a string with maxLength. There are therefore
records of common fields, and records with costly ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from busy import cpu_bound_processes

from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.structured.grammars import Compiled, Grammars, open_grammars
from quire.errors import InvalidRequest
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar, lark_grammar, regex_grammar
from quire.weights.hub import resolve


def records(**properties: Any) -> dict[str, Any]:
    items = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
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
HOSTILE: tuple[Grammar, ...] = (
    regex_grammar("[ab]*a[ab]{40}"),
    regex_grammar("a{100000}"),
    regex_grammar("((a{1,100}){1,100}){1,100}"),
    regex_grammar("|".join(f"w{i}x" for i in range(3000))),
    regex_grammar("(a|b|ab|ba|aab){1,3000}(.*x){30}"),
    regex_grammar("a?" * 20000),
    regex_grammar("(" * 5000 + ")" * 5000),
    Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:9/schema"}'),
    json_schema_grammar({"enum": [f"value {i}" for i in range(4000)]}),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999999}'),
    json_schema_grammar({"allOf": [{"type": "string", "pattern": f"a{i}.*b"} for i in range(200)]}),
    json_schema_grammar({"properties": {f"p{i}": {"type": "string"} for i in range(1200)}}),
    lark_grammar("start: (x x x?){1,300}\nx: y y? y?\ny: /a*b?/ | /[ab]*/ | \"c\""),
    lark_grammar("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"'),
)  # fmt: skip
NUM_PROMPT_TOKENS = 64
WARM_UP_STEPS = 4
NUM_BUSY = 2  # CPU-bound processes
NUM_LATER = 5  # structured answers after the first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--unique", type=int, default=0)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--wait", type=float, default=0.0)
    options = parser.parse_args()
    path = resolve(options.model)
    if options.first:
        measure_first(path, options.rounds, options.wait)
        return
    if options.unique:
        engine = make_engine(path, EngineConfig(backend="fake"))
        measure_memory(open_grammars(path, "auto", engine.capacity.vocab_size), options.unique)
        return
    engine = make_engine(path, EngineConfig(backend=options.backend, max_num_seqs=max(options.rows + 4, 8)))
    grammars = open_grammars(path, "auto", engine.capacity.vocab_size)
    if options.hostile:
        measure_hostile(engine, grammars, options.rows)
    else:
        for name, schema in SCHEMAS.items():
            print(f"{name}: ", end="")
            compare(engine, grammars.compile(json_schema_grammar(schema)), options.rows, options.steps, options.rounds)
    grammars.close()
    engine.close()


# The cost of a step


def compare(engine: Engine, compiled: Compiled, num_rows: int, num_steps: int, num_rounds: int) -> None:
    plain: list[float] = []
    constrained: list[float] = []
    for _ in range(num_rounds):
        plain += time_steps(engine, None, num_rows, num_steps)
        constrained += time_steps(engine, compiled, num_rows, num_steps)
    before, after = statistics.median(plain), statistics.median(constrained)
    facts = engine.runner.facts()
    print(f"{facts.backend}, {facts.device}, {facts.num_threads} threads: {num_rows} rows, {len(plain)} steps of each")
    change = f"{after / before - 1:+.1%} per step (target: 5 %)"
    print(f"plain {before * 1000:.2f} ms, constrained {after * 1000:.2f} ms: {change}")


def time_steps(engine: Engine, compiled: Compiled | None, num_rows: int, num_steps: int) -> list[float]:
    for row in range(num_rows):
        prompt = [100 + (row * 7919 + i * 31) % (engine.capacity.vocab_size - 100) for i in range(NUM_PROMPT_TOKENS)]
        sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=row, max_tokens=num_steps + 40)
        engine.add(row, prompt, sampling, matcher=None if compiled is None else compiled.matcher())
    requests = [request for row in range(num_rows) if (request := engine.scheduler.get(row)) is not None]
    while any(request.num_output_tokens < 1 for request in requests):
        engine.step()
    times = list(timed(engine, WARM_UP_STEPS + num_steps))[WARM_UP_STEPS:]
    for row in range(num_rows):
        engine.cancel(row)
    while engine.has_work:
        engine.step()
    engine.clear_cache()
    return times


def timed(engine: Engine, num_steps: int) -> Iterator[float]:
    for _ in range(num_steps):
        start_s = time.perf_counter()
        engine.step()
        yield time.perf_counter() - start_s


# Hostile grammars beside plain streams


def measure_hostile(engine: Engine, grammars: Grammars, num_rows: int) -> None:
    """Compile each grammar, in threads as in a worker, and generate from it for a while among plain rows."""
    grammars.compile(regex_grammar("a"))
    plain = time_steps(engine, None, num_rows, 48)
    print(f"alone: {summary(plain)}")
    for grammar in HOSTILE:
        outcome, times = run_beside(engine, grammars, grammar, num_rows)
        print(f"{grammar.source[:44]!r:50} {outcome:90.90} others: {summary(times)}")


def run_beside(engine: Engine, grammars: Grammars, grammar: Grammar, num_rows: int) -> tuple[str, list[float]]:
    for row in range(num_rows):
        engine.add(row, [1, 2, 3, row + 5], SamplingParams(seed=row))
    job = grammars.submit(grammar)
    times: list[float] = []
    while not job.done():
        times += timed(engine, 1)
    outcome = "compiled"
    try:
        engine.add(num_rows, [1, 2, 3], SamplingParams(seed=1, max_tokens=48), matcher=job.result().matcher())
        while engine.scheduler.get(num_rows) is not None and len(times) < 4000:
            start_s = time.perf_counter()
            found = [output for output in engine.step() if output.request_id == num_rows and output.finish_reason]
            times.append(time.perf_counter() - start_s)
            outcome = next((f"{one.finish_reason}: {one.error or ''}" for one in found), outcome)
    except InvalidRequest as error:
        outcome = f"refused: {error}"
    for row in range(num_rows + 1):
        engine.cancel(row)
    while engine.has_work:
        engine.step()
    return outcome, times


def summary(times: Sequence[float]) -> str:
    if not times:
        return "no step"
    ordered = sorted(times)
    p50, p99 = statistics.median(ordered), ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return f"{len(times)} steps, p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f}, max {ordered[-1] * 1000:.1f}"


# The first structured answer of a fresh server


def measure_first(path: Path, num_rounds: int, wait_s: float) -> None:
    """Compare the first structured answer of a server with later ones of other schemas, which are compiled too."""
    for num_busy in (0, NUM_BUSY):
        rounds = []
        for _ in range(num_rounds):
            with cpu_bound_processes(num_busy):
                rounds.append(first_and_later(path, wait_s))
        ready_s, first_s, later_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        longest_s = max(first for _, first, _ in rounds)
        print(
            f"beside {num_busy} CPU-bound processes, medians of {num_rounds} servers: ready after {ready_s:.2f} s;"
            f" {wait_s:g} s later, first token of the first structured answer after {first_s:.3f} s (longest"
            f" {longest_s:.3f}), of a later one after {later_s:.3f} s: ratio {first_s / later_s:.1f}",
            flush=True,
        )


def first_and_later(path: Path, wait_s: float) -> tuple[float, float, float]:
    """Seconds until a server is ready, to the first token of its first structured answer, and of later ones."""
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "quire", "serve", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(line.split()[-1] for line in process.stdout if "http://" in line)
            ready_s = time.perf_counter() - start_s
            time.sleep(wait_s)
            times = [first_token_s(url, {f"name{number}": {"type": "string"}}) for number in range(1 + NUM_LATER)]
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    return ready_s, times[0], statistics.median(times[1:])


def first_token_s(url: str, properties: dict[str, Any]) -> float:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    body = {
        "messages": [{"role": "user", "content": "Name a city."}],
        "max_tokens": 4,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    headers = {"Content-Type": "application/json"}
    start_s = time.perf_counter()
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if b'"content":"' in line and b'"content":""' not in line:
                return time.perf_counter() - start_s
    raise SystemExit("the answer has no token")


# Memory


def measure_memory(grammars: Grammars, num_schemas: int) -> None:
    """Compile all schemas and generate one token of each: memory must be bounded by the cache, not by their number."""
    for number in range(300):  # fill the cache before counting
        grammars.compile(unique(-number - 1)).matcher().mask()
    before, start_s = resident_bytes(), time.perf_counter()
    for number in range(num_schemas):
        grammars.compile(unique(number)).matcher().mask()
        if number % 1000 == 999:
            print(f"{number + 1} schemas: RSS {(resident_bytes() - before) / 2**20:+.1f} MB", flush=True)
    took_s = time.perf_counter() - start_s
    grown = f"RSS {(resident_bytes() - before) / 2**20:+.1f} MB (target: 64)"
    print(f"{num_schemas} schemas, {took_s / num_schemas * 1000:.1f} ms each: {grown}")


def unique(number: int) -> Grammar:
    names = [f"field_{number}_{i}" for i in range(1 + number % 9)]
    fields = {name: {"type": "string", "maxLength": 1 + number % 50} for name in names}
    return json_schema_grammar({"type": "object", "properties": fields, "required": names[:2]})


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
