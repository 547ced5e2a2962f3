"""Check answers of the real model to many JSON schemas: each ends with `stop` and matches, or ends with `length`.

Run it with `make structured`, or `python -m tests.structured --schemas 240 --max-tokens 512`. The schemas are
hand-written and generated from a seed. They are validated by `jsonschema_rs`, which shares no
code with the implementation of the masks. The share of answers that end with `stop` is printed and has no limit: it
depends on the model, because the grammar alone decides which tokens are allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from random import Random
from typing import Any, NamedTuple

import jsonschema_rs

from quire.engine.generation import GenerationOutput, GenerationParams
from quire.engine.llm import LLM
from quire.text.grammar import json_schema_grammar

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


Schema = dict[str, Any]


def record(required: Sequence[str] | None = None, /, **properties: Any) -> Schema:
    """A closed object. All properties are required unless `required` is given."""
    return named(properties, required)


def named(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> Schema:
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": dict(properties), "required": names, "additionalProperties": False}


def text(**rules: Any) -> Schema:
    return {"type": "string", **rules}


def whole(**rules: Any) -> Schema:
    return {"type": "integer", **rules}


def number(**rules: Any) -> Schema:
    return {"type": "number", **rules}


def many(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


FLAG: Schema = {"type": "boolean"}
TREE: Schema = {
    "$defs": {
        "node": record(["name"], name=text(maxLength=12), children=many({"$ref": "#/$defs/node"}, maxItems=2)),
    },
    "$ref": "#/$defs/node",
}

HAND_WRITTEN: dict[str, Schema] = {
    "a person": record(name=text(), age=whole(minimum=0, maximum=150)),
    "open person": {"type": "object", "properties": {"name": text()}, "required": ["name"]},
    "any object": {"type": "object"},
    "any array": {"type": "array", "maxItems": 5},
    "a string": text(),
    "a short string": text(maxLength=10),
    "a long string": text(minLength=20, maxLength=80),
    "an integer": whole(),
    "a number": number(),
    "a flag": FLAG,
    "null": {"type": "null"},
    "a byte": whole(minimum=0, maximum=255),
    "below zero": whole(maximum=-1, minimum=-1000),
    "strictly between": whole(exclusiveMinimum=10, exclusiveMaximum=13),
    "a probability": number(minimum=0, maximum=1),
    "a temperature": number(minimum=-273.15, maximum=1000),
    "even": whole(multipleOf=2, minimum=0, maximum=100),
    "const string": {"const": "fixed"},
    "const object": {"const": {"a": [1, 2, {"b": None}]}},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of everything": {"enum": [1, "one", None, True, [1], {"one": 1}]},
    "enum in other scripts": {"enum": ["日本", "Ελλάδα", "Éire", "🇫🇷"]},
    "keys in other scripts": named({"名前": text(maxLength=8), "größe": number(minimum=0, maximum=3), "🎉": FLAG}),
    "keys to escape": named({'a"b': whole(minimum=0, maximum=9), "c\\d": whole(minimum=0, maximum=9), "e f": FLAG}),
    "string or null": record(nick={"type": ["string", "null"], "maxLength": 12}),
    "string or number": record(id={"type": ["string", "integer"], "maxLength": 12}),
    "anyOf": {"anyOf": [record(cat=text(maxLength=9)), record(dog=text(maxLength=9))]},
    "anyOf of types": {"anyOf": [text(maxLength=20), whole(), {"type": "null"}]},
    "oneOf by kind": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=number(minimum=0, maximum=100)),
            record(kind={"const": "square"}, side=number(minimum=0, maximum=100)),
        ]
    },
    "allOf": {"allOf": [{"properties": {"a": whole()}, "required": ["a"]}, record(["b"], a={}, b=FLAG)]},
    "array of strings": many(text(maxLength=12), minItems=1, maxItems=4),
    "exactly three": many(whole(minimum=0, maximum=9), minItems=3, maxItems=3),
    "empty array": many(text(), maxItems=0),
    "matrix": many(many(whole(minimum=0, maximum=9), minItems=2, maxItems=2), minItems=2, maxItems=2),
    "tuple": {"type": "array", "prefixItems": [text(maxLength=9), whole(), FLAG], "items": False, "minItems": 3},
    "array of records": many(record(name=text(maxLength=12), price=number(minimum=0)), minItems=1, maxItems=3),
    "tags": record(title=text(maxLength=40), tags=many({"enum": ["new", "old", "hot"]}, maxItems=3)),
    "optional fields": record(["a"], a=whole(), b=text(maxLength=9), c=FLAG),
    "all optional": record([], a=whole(), b=text(maxLength=9)),
    "no fields": record(),
    "nested": record(a=record(b=record(c=record(d=FLAG)))),
    "map of integers": {"type": "object", "additionalProperties": whole(), "maxProperties": 3, "minProperties": 1},
    "patterned keys": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": whole(minimum=0, maximum=9)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "a tree": TREE,
    "a list by reference": {
        "$defs": {
            "list": {"anyOf": [{"type": "null"}, record(head=whole(maximum=9), tail={"$ref": "#/$defs/list"})]},
        },
        "$ref": "#/$defs/list",
    },
    "two definitions": {
        "definitions": {"name": text(minLength=1, maxLength=12), "pet": record(name={"$ref": "#/definitions/name"})},
        **record(owner={"$ref": "#/definitions/name"}, pet={"$ref": "#/definitions/pet"}),
    },
    "date": record(day=text(format="date")),
    "time": record(at=text(format="time")),
    "date-time": record(at=text(format="date-time")),
    "uuid": record(id=text(format="uuid")),
    "ipv4": record(address=text(format="ipv4")),
    "ipv6": record(address=text(format="ipv6")),
    "phone": record(phone=text(pattern=r"^\+[0-9]{2} [0-9]{3} [0-9]{4}$")),
    "plate": text(pattern="^[A-Z]{3}-[0-9]{3}$"),
    "hex colour": record(colour=text(pattern="^#[0-9a-f]{6}$")),
    "version": text(pattern=r"^(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})$"),
    "a word somewhere": text(pattern="cat", maxLength=30),
    "a slug": text(pattern="^[a-z0-9]+(-[a-z0-9]+){0,4}$", maxLength=30),
    "weather": record(
        city=text(maxLength=20),
        unit={"enum": ["C", "F"]},
        days=many(record(day={"enum": ["Mon", "Tue"]}, high=whole(minimum=-50, maximum=60)), minItems=1, maxItems=3),
    ),
    "an invoice": record(
        number=text(pattern="^INV-[0-9]{4}$"),
        customer=record(name=text(maxLength=24), email=text(format="email", maxLength=40)),
        items=many(record(what=text(maxLength=20), count=whole(minimum=1), price=number(minimum=0)), maxItems=2),
        paid=FLAG,
    ),
    "a review": record(
        sentiment={"enum": ["good", "bad", "mixed"]}, score=whole(minimum=1, maximum=5), summary=text(maxLength=80)
    ),
    "a call": record(
        name={"const": "get_weather"}, arguments=record(city=text(maxLength=20), days=whole(minimum=1, maximum=7))
    ),
    "a title": {"title": "Thing", "description": "A thing.", "$schema": "https://json-schema.org/draft/2020-12/schema",
                **record(id={**whole(minimum=1), "description": "its number"})},
    "default and examples": record(level={**whole(minimum=0, maximum=3), "default": 1, "examples": [2]}),
}  # fmt: skip


def generated(seed: int) -> Schema:
    """An object of one to five fields, up to three levels deep, with all kinds of supported keywords."""
    return _object(Random(seed), 0)


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(1, 6 - depth))
    properties = {name: _value(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return named(properties, required)


def _value(rng: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [
        _string,
        _string,
        _integer,
        _number,
        _enum,
        _constant,
        _patterned,
        _formatted,
        _flag,
    ]
    if depth < 3:
        kinds += [_array, _array, _object_at, _union, _nullable]
    return rng.choice(kinds)(rng, depth)


def _object_at(rng: Random, depth: int) -> Schema:
    return _object(rng, depth)


def _string(rng: Random, _: int) -> Schema:
    rules = {}
    if rng.random() < 0.7:
        rules["maxLength"] = rng.randrange(4, 60)
    if rng.random() < 0.3:
        rules["minLength"] = rng.randrange(1, 4)
    return text(**rules)


def _integer(rng: Random, _: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    rules: dict[str, int] = {}
    if rng.random() < 0.7:
        rules[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        rules[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randrange(2, 5000)
    return whole(**rules)


def _number(rng: Random, _: int) -> Schema:
    low = round(rng.uniform(-100, 100), rng.randrange(3))
    return number(minimum=low, maximum=round(low + rng.uniform(0.5, 1000), 2)) if rng.random() < 0.8 else number()


def _enum(rng: Random, _: int) -> Schema:
    return {"enum": rng.sample(_WORDS, rng.randrange(1, 6))}


def _constant(rng: Random, _: int) -> Schema:
    return {"const": rng.choice([*_WORDS, 7, -1.5, True, None, [], {"k": "v"}])}


def _patterned(rng: Random, _: int) -> Schema:
    return text(pattern=rng.choice(_PATTERNS))


def _formatted(rng: Random, _: int) -> Schema:
    return text(format=rng.choice(("date", "time", "date-time", "uuid", "ipv4")))


def _flag(_: Random, _depth: int) -> Schema:
    return dict(FLAG)


def _array(rng: Random, depth: int) -> Schema:
    low = rng.randrange(3)
    return many(_value(rng, depth + 1), minItems=low, maxItems=low + rng.randrange(4))


def _union(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}


def _nullable(rng: Random, _: int) -> Schema:
    return {"type": [rng.choice(("integer", "boolean")), "null"]}


_NAMES = [
    "name", "id", "title", "count", "price", "city", "tags", "kind", "notes", "email", "größe", "名前", "is_active",
    "created_at", "first name", "x-y", "value", "items", "address", "parent",
]  # fmt: skip
_WORDS = [
    "red",
    "green",
    "blue",
    "small",
    "large",
    "Zürich",
    "東京",
    "yes",
    "no",
    "a b",
    'quo"te',
    "tab\there",
    "emoji 🎈",
]
_PATTERNS = [
    "^[A-Z]{2}[0-9]{4}$", "^[a-z]+@[a-z]+\\.(com|org)$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^[^ ]{1,12}$",
    "^\\d{1,3}(,\\d{3})*$", "^v[0-9]+(\\.[0-9]+){1,2}$", "^(?:[A-F0-9]{2}:){3}[A-F0-9]{2}$",
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
