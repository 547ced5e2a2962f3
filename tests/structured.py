"""Check answers of the real model to many JSON schemas: each ends with `stop` and matches, or ends with `length`.

Run it with `make structured`, or `python -m tests.structured --schemas 240 --max-tokens 512`. The schemas of
`tests/schemas.py` are hand-written and generated from a seed. They are validated by `jsonschema_rs`, which shares no
code with the implementation of the masks. The share of answers that end with `stop` is printed and has no limit: it
depends on the model, because the grammar alone decides which tokens are allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import jsonschema_rs

from quire.engine.generation import GenerationOutput, GenerationParams
from quire.engine.llm import LLM
from quire.text.grammar import json_schema_grammar
from tests.schemas import HAND_WRITTEN, generated

MAX_SHOWN = 12


class Verdict(NamedTuple):
    name: str
    reason: str  # stop, length, error
    problem: str  # error message; empty if there is none
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structured")
    parser.add_argument(
        "--schemas", type=int, default=240, help="number of schemas: hand-written first, then generated"
    )
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=None, help="default: that of the model")
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
    max_tokens = params["max_tokens"]
    return [judge(*one, output, max_tokens) for one, output in zip(schemas.items(), outputs, strict=True)]


def judge(name: str, schema: dict[str, Any], output: GenerationOutput, max_tokens: int) -> Verdict:
    (completion,) = output.completions
    problem = completion.error or ""
    if completion.finish_reason == "stop":
        problem = judge_text(schema, completion.text)
    elif completion.finish_reason == "length" and len(completion.token_ids) != max_tokens:
        problem = f"cut after {len(completion.token_ids)} tokens"
    return Verdict(name, completion.finish_reason, problem, completion.text)


def judge_text(schema: dict[str, Any], text: str) -> str:
    """Validation error of an answer, or an empty string. Numbers are parsed as decimals, which have no range limit."""
    try:
        jsonschema_rs.validate(schema, json.loads(text, parse_float=Decimal), validate_formats=True)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def report(verdicts: Sequence[Verdict], max_tokens: int) -> int:
    """Print a summary. Returns the exit code: 0 if all answers are correct."""
    reasons = Counter(verdict.reason for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if verdict.problem or verdict.reason not in ("stop", "length")]
    share = reasons["stop"] / len(verdicts)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    print(f"{len(verdicts)} schemas, at most {max_tokens} tokens: {counts}")
    print(f"ended with stop: {share:.1%}; does not match, or ended otherwise: {len(wrong)} (must be 0)")
    for verdict in [*wrong, *(one for one in verdicts if one.reason == "length")][:MAX_SHOWN]:
        print(
            f"  {verdict.name}: {verdict.reason}: {verdict.problem or verdict.text[:40] + ' ... ' + verdict.text[-60:]}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
