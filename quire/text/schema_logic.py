"""Negation of a JSON schema, and whether two schemas are disjoint. Pure.

Positive results are certain. None and False mean "not known".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.text.patterns import any_text_but

KINDS = ("null", "boolean", "number", "string", "array", "object")  # integers are numbers
MAX_DEPTH = 8
MAX_STEPS = 10_000
MAX_NUMBERS = 8  # of an enum to negate: every gap between two becomes a range
MAX_TEXTS_CHARS = 512  # of an enum to negate
MAX_TEXT_CHARS = 60  # of one of its texts: the negating pattern nests a group per character
STEPS_PER_CHAR = 3  # of a text in an enum to negate, because its pattern is long
VALUES_PER_STEP = 16  # names or values compared in one step: each comparison is fast

Schema = bool | Mapping[str, Any]
Resolve = Callable[[str], Schema | None]  # the target of a reference

# Keywords that constrain nothing by themselves.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$defs", "definitions"),
        *("contentEncoding", "contentMediaType", "contentSchema", "then", "else", "minContains", "maxContains"),
    )
)
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Budget:
    """Limits the total number of steps for one schema."""

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_left = num_steps
        self._allowed: dict[int, tuple[Mapping[str, Any], _Allowed]] = {}

    def take(self, num_steps: int = 1, *, num_values: int = 0) -> bool:
        self._num_left -= num_steps + num_values // VALUES_PER_STEP
        return self._num_left >= 0

    def allowed_by(self, schema: Mapping[str, Any]) -> _Allowed:
        """Values that a schema allows. Cached by id; the cache holds the schema, so that its id is not reused."""
        if id(schema) not in self._allowed:
            kinds, values = kinds_of(schema), _values(schema)
            if values is not None:
                kinds &= frozenset(map(kind_of, values.values()))
            self._allowed[id(schema)] = schema, _Allowed(kinds, None if values is None else frozenset(values))
        return self._allowed[id(schema)][1]


class _Allowed(NamedTuple):
    """Values allowed by `type`, `enum` and `const` of one schema."""

    kinds: frozenset[str]
    values: frozenset[str] | None  # in canonical form; None: any of these kinds


def kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def canonical(value: object) -> str:
    """A text that is equal for equal values of JSON Schema: 1 and 1.0, and objects in any order."""
    match value:
        case float() if value.is_integer():
            return str(int(value))
        case list():
            return f"[{','.join(canonical(item) for item in value)}]"
        case Mapping():
            items = sorted((str(name), canonical(item)) for name, item in value.items())
            return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in items) + "}"
    return json.dumps(value)


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of values that `type` allows."""
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list) or not all(one in KINDS or one == "integer" for one in types):
        return frozenset(KINDS)
    return frozenset("number" if one == "integer" else one for one in types)


# Negation


def negated(schema: object, resolve: Resolve, budget: Budget, depth: int = 0) -> Schema | None:
    """A schema of all values that this one refuses, or None if no enforceable one is known."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH or not budget.take():
        return None
    options: list[Schema] = []
    for keyword, value in schema.items():
        found = _negated_keyword(keyword, value, resolve, budget, depth)
        if found is None:
            return None
        options += found
    return {"anyOf": options} if options else False


def _negated_keyword(keyword: str, value: Any, resolve: Resolve, budget: Budget, depth: int) -> list[Schema] | None:
    """Schemas of the values that violate a keyword, one for each way to violate it."""
    if keyword in ANNOTATIONS:
        return []
    if keyword in _OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
        kind, opposite, shift = _OPPOSITES[keyword]
        return [{"type": kind, opposite: value + shift}] if value + shift >= 0 or kind == "number" else []
    match keyword:
        case "type":
            return _negated_type(value)
        case "const":
            return _negated_values([value], budget)
        case "enum" if isinstance(value, list):
            return _negated_values(value, budget)
        case "required" if isinstance(value, list) and all(isinstance(name, str) for name in value):
            if not budget.take(4 * len(value)):  # each adds two schemas
                return None
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties" if isinstance(value, Mapping):
            return _negated_properties(value, resolve, budget, depth)
        case "not":
            return [value]
        case "anyOf" | "allOf" if isinstance(value, list):
            parts = [negated(part, resolve, budget, depth + 1) for part in value]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            return known if keyword == "allOf" else [{"allOf": known}]
        case "$ref" if isinstance(value, str):
            found = negated(resolve(value), resolve, budget, depth + 1)
            return None if found is None else [found]
    return None


def _negated_type(value: object) -> list[Schema] | None:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not all(one in KINDS for one in types):
        return None  # also for "integer": no schema matches only numbers with a fraction
    others = [kind for kind in KINDS if kind not in types]
    return [{"type": others}] if others else []


def _negated_values(values: Sequence[object], budget: Budget) -> list[Schema] | None:
    if not budget.take(num_values=len(values)):
        return None
    kinds = {kind_of(value) for value in values}
    texts = [value for value in values if isinstance(value, str)]
    num_chars = sum(map(len, texts))
    if kinds & {"array", "object"} or num_chars > MAX_TEXTS_CHARS or max(map(len, texts), default=0) > MAX_TEXT_CHARS:
        return None
    if not budget.take(STEPS_PER_CHAR * num_chars):
        return None
    options: list[Schema] = []
    if others := [kind for kind in KINDS if kind not in kinds]:
        options.append({"type": others})
    if texts:
        options.append({"type": "string", "pattern": any_text_but(texts)})
    if len(missing := {True, False} - {value for value in values if isinstance(value, bool)}) == 1:
        options.append({"enum": list(missing)})
    numbers = sorted({one for one in values if isinstance(one, int | float) and not isinstance(one, bool)})
    if len(numbers) > MAX_NUMBERS:
        return None
    if numbers:
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        for low, high in itertools.pairwise(numbers):
            options.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return options


def _negated_properties(
    properties: Mapping[str, Any], resolve: Resolve, budget: Budget, depth: int
) -> list[Schema] | None:
    options: list[Schema] = []
    for name, schema in properties.items():
        found = negated(schema, resolve, budget, depth + 1)
        if found is None:
            return None
        if found is not False:
            options.append({"type": "object", "properties": {name: found}, "required": [name]})
    return options


# Disjointness


class Side(NamedTuple):
    """A schema and the resolver of its references."""

    schema: object
    resolve: Resolve
    budget: Budget


def are_disjoint(one: Side, other: Side, depth: int = 0) -> bool:
    """Whether no value matches both."""
    if depth > MAX_DEPTH or not one.budget.take():
        return False
    if one.schema is False or other.schema is False:
        return True
    if not isinstance(one.schema, Mapping) or not isinstance(other.schema, Mapping):
        return False
    parts, other_parts = _parts(one), _parts(other)
    for a, b in itertools.product(parts, other_parts):
        if not one.budget.take():
            return False
        if _are_plainly_disjoint(a, b, depth):
            return True
    return _is_split(parts, other, depth) or _is_split(other_parts, one, depth)


def _is_split(parts: Sequence[Side], other: Side, depth: int) -> bool:
    """Whether the branches of one part are all disjoint from the other."""
    for part in parts:
        assert isinstance(part.schema, Mapping)
        for keyword in ("anyOf", "oneOf"):
            branches = part.schema.get(keyword)
            if isinstance(branches, list) and all(
                are_disjoint(part._replace(schema=branch), other, depth + 1) for branch in branches
            ):
                return True
    return False


def _parts(side: Side, depth: int = 0) -> list[Side]:
    """The schema and those it requires: a value that matches it matches all of them."""
    if not isinstance(side.schema, Mapping) or depth > MAX_DEPTH or (depth and not side.budget.take()):
        return []
    parts = [side]
    inner = side.schema.get("allOf")
    for part in inner if isinstance(inner, list) else ():
        parts += _parts(side._replace(schema=part), depth + 1)
    if isinstance(reference := side.schema.get("$ref"), str):
        parts += _parts(side._replace(schema=side.resolve(reference)), depth + 1)
    return parts


def _are_plainly_disjoint(one: Side, other: Side, depth: int) -> bool:
    """Whether their own keywords exclude every kind of value that both allow."""
    a, b = one.schema, other.schema
    assert isinstance(a, Mapping)
    assert isinstance(b, Mapping)
    by_a, by_b = one.budget.allowed_by(a), one.budget.allowed_by(b)
    if by_a.values is not None and by_b.values is not None:
        if not one.budget.take(num_values=min(len(by_a.values), len(by_b.values))):
            return False
        if by_a.values.isdisjoint(by_b.values):
            return True
    common = by_a.kinds & by_b.kinds
    return common.isdisjoint(("null", "boolean")) and all(_is_kind_disjoint(kind, one, other, depth) for kind in common)


def are_discriminated(schemas: Sequence[object]) -> bool:
    """Whether each schema, or one required property of it, lists values that no other schema lists."""
    known = [schema for schema in schemas if isinstance(schema, Mapping)]
    if len(known) < len(schemas) or not known:
        return False
    if _have_own_values(known):
        return True
    if any(kinds_of(schema) != {"object"} for schema in known):
        return False
    return any(_have_own_values([_tag(schema, name) for schema in known]) for name in _names(known[0].get("required")))


def _tag(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    tag = properties.get(name) if isinstance(properties, Mapping) else None
    return tag if isinstance(tag, Mapping) and name in _names(schema.get("required")) else {}


def _names(required: object) -> list[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _have_own_values(schemas: Sequence[Mapping[str, Any]]) -> bool:
    seen: set[str] = set()
    for schema in schemas:
        values = _values(schema)
        if values is None or not seen.isdisjoint(values) or not all(map(_is_plain, values.values())):
            return False
        seen.update(values)
    return True


def _is_plain(value: object) -> bool:
    """Whether a value is certainly enforced exactly."""
    return value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) <= 2**53)


def _values(schema: Mapping[str, Any]) -> dict[str, object] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {canonical(value): value for value in values} if isinstance(values, list) else None


def _is_kind_disjoint(kind: str, one: Side, other: Side, depth: int) -> bool:
    a, b = one.schema, other.schema
    assert isinstance(a, Mapping)
    assert isinstance(b, Mapping)
    if kind == "number":
        return _is_below(a, b) or _is_below(b, a)
    if kind in _SIZES:
        least, most = _SIZES[kind]
        if any(_number(x, most, 1e400) < _number(y, least, 0) for x, y in ((a, b), (b, a))):
            return True
    if kind != "object":
        return False
    names = [*_names(a.get("required")), *_names(b.get("required"))]
    if not one.budget.take(num_values=len(names)):
        return False
    return any(are_disjoint(_property(one, name), _property(other, name), depth + 1) for name in names)


def _property(side: Side, name: str) -> Side:
    """The schema of a property of this name."""
    assert isinstance(side.schema, Mapping)
    properties = side.schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return side._replace(schema=properties[name])
    others = True if "patternProperties" in side.schema else side.schema.get("additionalProperties", True)
    return side._replace(schema=others)


def _is_below(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    end, exclusive_end = _number(low, "maximum", 1e400), _number(low, "exclusiveMaximum", 1e400)
    start, exclusive_start = _number(high, "minimum", -1e400), _number(high, "exclusiveMinimum", -1e400)
    top, bottom = min(end, exclusive_end), max(start, exclusive_start)
    return top < bottom or (top == bottom and (exclusive_end == top or exclusive_start == bottom))


def _number(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword, default)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
