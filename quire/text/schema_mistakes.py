"""Finds mistakes in a JSON schema: keywords with impossible values and references to nothing. Pure.

A mistake is refused whether or not the request is strict. A keyword that is valid and cannot be enforced is none:
`quire/text/schemas.py` reports it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import InvalidRequest
from quire.text.patterns import hold_pattern
from quire.text.schema_refs import Place, References

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_SHOWN_CHARS = 80


class SchemaProblem(InvalidRequest):
    """A keyword of a schema is refused. `path`: its location in the schema; `what`: the rest of the message."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"grammar: {path or 'the schema'} {what}")
        self.path = path
        self.what = what

    def at(self, field: str) -> str:
        """The keyword's location in a request whose field holds the schema."""
        return f"{field}.{self.path}" if self.path else field


def check_mistakes(schema: Mapping[str, Any]) -> None:
    """Raise SchemaProblem for the first mistake. Keywords that are null are none: some clients write those."""
    references = References(schema)
    ending: set[str] = set()  # paths of schemas whose references are known to end
    seen: set[int] = set()
    rest = [references.root]
    while rest:
        place = rest.pop()
        if isinstance(place.schema, bool) or id(place.schema) in seen:
            continue
        if not isinstance(place.schema, Mapping):
            raise SchemaProblem(place.path, f"= {_shown(place.schema)} is not a schema")
        seen.add(id(place.schema))
        children: list[Place] = []
        for keyword, value in place.schema.items():
            if value is None:
                continue
            if rule := _CHECKS[keyword](value) if keyword in _CHECKS else "":
                raise SchemaProblem(place.at(keyword), f"= {_shown(value)} {rule}")
            children += _schemas_in(place, keyword, value)
            if keyword == "$ref" and (target := _target(place, references, ending)) is not None:
                children.append(target)
        rest += reversed(children)  # the first mistake in the schema's order is reported


def _target(place: Place, references: References, ending: set[str]) -> Place | None:
    """The schema that `$ref` names; None: it is outside of this schema. Raises SchemaProblem."""
    first = references.find(place.schema["$ref"], place.base)
    if first is None:
        if references.is_dangling(place.schema["$ref"], place.base):
            raise SchemaProblem(place.at("$ref"), f"= {_shown(place.schema['$ref'])} is not in this schema")
        return None
    passed: set[str] = set()
    one: Place | None = place
    while one is not None and one.path not in ending and isinstance(one.schema, Mapping):
        if one.path in passed:
            raise SchemaProblem(place.at("$ref"), f"= {_shown(place.schema['$ref'])} leads back to itself")
        passed.add(one.path)
        reference = one.schema.get("$ref")
        one = references.find(reference, one.base) if isinstance(reference, str) else None
    ending |= passed
    return first


def _schemas_in(place: Place, keyword: str, value: Any) -> list[Place]:
    if keyword in _MAPS:
        is_mixed = keyword == "dependencies"  # lists of names among its schemas
        return [place.child(keyword, name) for name, one in value.items() if not (is_mixed and isinstance(one, list))]
    if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        return [place.child(keyword, i) for i in range(len(value))]
    return [place.child(keyword)] if keyword in _SCHEMAS else []


# The rules. Each returns what is wrong with a value, or an empty text.


def _type(value: object) -> str:
    listed = value if isinstance(value, list) else [value]
    return "" if listed and all(one in TYPES for one in listed) else f"is not one of {', '.join(TYPES)}"


def _enum(value: object) -> str:
    return "" if isinstance(value, list) and value else "is not a list of one or more values"


def _count(value: object) -> str:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    is_count = is_whole and not isinstance(value, bool) and isinstance(value, int | float) and value >= 0
    return "" if is_count else "is not a non-negative integer"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound(value: object) -> str:
    return "" if _is_number(value) else "is not a number"


def _exclusive_bound(value: object) -> str:
    return "" if isinstance(value, bool) else _bound(value)  # a boolean in draft 4


def _multiple(value: object) -> str:
    return "" if isinstance(value, int | float) and _is_number(value) and value > 0 else "is not a number above 0"


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "is not true or false"


def _text(value: object) -> str:
    return "" if isinstance(value, str) else "is not a string"


def _pattern(value: object) -> str:
    if not isinstance(value, str):
        return "is not a string"
    held = hold_pattern(value)
    return f"is not a regular expression: {held.problem}" if held.is_invalid else ""


def _names(value: object) -> str:
    is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return "" if is_names else "is not a list of names"


def _map(value: object) -> str:
    return "" if isinstance(value, Mapping) else "is not an object"


def _pattern_map(value: object) -> str:
    if not isinstance(value, Mapping):
        return "is not an object"
    return next((f"has a name that {rule}" for name in value if (rule := _pattern(name))), "")


def _names_map(value: object) -> str:
    is_names = isinstance(value, Mapping) and not any(_names(one) for one in value.values() if isinstance(one, list))
    return "" if is_names else "is not an object of schemas or lists of names"


def _required_map(value: object) -> str:
    is_names = isinstance(value, Mapping) and not any(_names(one) for one in value.values())
    return "" if is_names else "is not an object of lists of names"


def _list(value: object) -> str:
    return "" if isinstance(value, list) else "is not a list"


def _full_list(value: object) -> str:
    return "" if isinstance(value, list) and value else "is not a list of one or more schemas"


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = frozenset(
    (
        *("items", "additionalItems", "unevaluatedItems", "contains", "not", "if", "then", "else"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
_COUNTS = ("Length", "Items", "Properties", "Contains")
_CHECKS: Mapping[str, Callable[[object], str]] = {
    "type": _type,
    "enum": _enum,
    **{f"{bound}{size}": _count for bound in ("min", "max") for size in _COUNTS},
    **dict.fromkeys(("minimum", "maximum"), _bound),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _exclusive_bound),
    "multipleOf": _multiple,
    "uniqueItems": _flag,
    **dict.fromkeys(("$ref", "format"), _text),
    "pattern": _pattern,
    "required": _names,
    **dict.fromkeys(("properties", "$defs", "definitions", "dependentSchemas"), _map),
    "patternProperties": _pattern_map,
    "dependencies": _names_map,
    "dependentRequired": _required_map,
    **dict.fromkeys(("allOf", "prefixItems"), _list),
    **dict.fromkeys(("anyOf", "oneOf"), _full_list),
}


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
