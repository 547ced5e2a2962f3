"""Answers in the shape of many schemas, by the real model: every one that ends with `stop` must match its schema.

`make structured`, or `python -m tests.structured --schemas 240 --max-tokens 512`. The schemas of `tests/schemas.py` are
written by hand and generated from a seed. The judge is `jsonschema_rs`, which shares nothing with what makes the masks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jsonschema_rs

from quire.engine.llm import LLM
from quire.engine.outputs import GenerationOutput
from quire.engine.params import GenerationParams
from quire.text.grammar import json_schema_grammar
from tests.schemas import HAND_WRITTEN, generated

MIN_STOPPED = 0.95
MAX_SHOWN = 12


class Verdict(NamedTuple):
    name: str
    reason: str  # stop, length, error
    problem: str  # what the judge says against an answer that ended
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structured")
    parser.add_argument("--schemas", type=int, default=240, help="hand-written ones first, then generated")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=None, help="none: the model's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(arguments)
    schemas = collect(options.schemas, options.seed)
    params = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    with LLM(backend=options.backend) as llm:
        verdicts = ask(llm, schemas, params)
    return report(verdicts, options.max_tokens)


def collect(num_schemas: int, seed: int) -> dict[str, dict[str, Any]]:
    schemas = dict(list(HAND_WRITTEN.items())[:num_schemas])
    for number in range(num_schemas - len(schemas)):
        schemas[f"generated {number}"] = generated(seed * 100_000 + number)
    return schemas


def ask(llm: LLM, schemas: dict[str, dict[str, Any]], params: dict[str, Any]) -> list[Verdict]:
    questions = [
        f"Write one short example as JSON that matches this JSON schema: {json.dumps(schema, ensure_ascii=False)}"
        for schema in schemas.values()
    ]
    shapes = [GenerationParams(grammar=json_schema_grammar(schema), **params) for schema in schemas.values()]
    outputs = llm.chat(questions, shapes)
    return [judge(name, schema, output) for (name, schema), output in zip(schemas.items(), outputs, strict=True)]


def judge(name: str, schema: dict[str, Any], output: GenerationOutput) -> Verdict:
    (completion,) = output.completions
    problem = ""
    if completion.finish_reason == "stop":
        try:
            jsonschema_rs.validate(schema, json.loads(completion.text), validate_formats=True)
        except (ValueError, jsonschema_rs.ValidationError) as error:
            problem = str(error).splitlines()[0]
    return Verdict(name, completion.finish_reason, problem or completion.error or "", completion.text)


def report(verdicts: Sequence[Verdict], max_tokens: int) -> int:
    """The exit code: 0 where the bar is reached."""
    reasons = Counter(verdict.reason for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if verdict.reason == "stop" and verdict.problem]
    share = reasons["stop"] / len(verdicts)
    print(f"{len(verdicts)} schemas, at most {max_tokens} tokens: {dict(reasons)}")
    print(f"ended with stop: {share:.1%} (bar: {MIN_STOPPED:.0%}); of those, {len(wrong)} do not match (bar: 0)")
    for verdict in [*wrong, *(one for one in verdicts if one.reason != "stop")][:MAX_SHOWN]:
        print(
            f"  {verdict.name}: {verdict.reason}: {verdict.problem or verdict.text[:40] + ' ... ' + verdict.text[-60:]}"
        )
    return 0 if not wrong and share >= MIN_STOPPED and not reasons["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
