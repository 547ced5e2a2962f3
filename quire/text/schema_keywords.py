"""Rewrites the keywords of one JSON schema that hold no schemas: types, values, bounds, sizes. Pure.

Each function takes a `Draft`, reads its keywords and writes the form that the grammar compiler enforces exactly. A
keyword without such a form is dropped and reported.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from quire.text.patterns import hold_pattern
from quire.text.schema_closing import Closing
from quire.text.schema_formats import FORMATS, MAX_LENGTHS, NATIVE_FORMATS, NUMBER_FORMATS, format_patterns
from quire.text.schema_logic import KINDS, canonical
from quire.text.schema_refs import Place
from quire.text.schema_sizes import Room

MAX_OPTIONS = 64  # alternatives that one keyword is expanded to
MAX_ORDERS = 65  # of unique items: enough for all orders of four values. Each is expensive to compile.
MAX_DISTINCT = 16  # values of unique items
MAX_ORDERS_CHARS = 16_384
MAX_EXACT = 2**53  # up to here every JSON parser reads integers exactly
LEAST_BOUND = 1e-15  # smaller ones have more digits than the compiler accepts
MAX_COUNT = 2**31 - 1  # of minLength and similar keywords
MAX_MULTIPLE = 10_000  # of a multipleOf without its decimal point: its automaton has as many states
MAX_SHARED_MULTIPLE = 500  # if several may apply to one value: the compiler multiplies their states

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Held = Any  # a schema for the compiler: a boolean or a dict
ShareFormat = Callable[[str, Held], Held | None]  # the schema of a format, as a reference; None: no room left

TOO_LONG = "it would make the schema too long"


@dataclass(slots=True)
class Draft:
    """A rewritten schema under construction."""

    place: Place
    kinds: frozenset[str]  # of values that `type` allows
    problems: dict[str, str]  # why a keyword is not enforced, by its path
    closing: Closing
    room: Room
    out: dict[str, Any] = field(default_factory=dict)
    extra: list[Held] = field(default_factory=list)  # schemas that must match as well

    @property
    def given(self) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = self.place.schema
        return schema

    def drop(self, keyword: str, why: str) -> None:
        self.problems.setdefault(self.place.at(keyword), why)

    def fits(self, keyword: str, added: object) -> bool:
        """Whether there is room for a keyword's rewritten form. If not, the keyword is dropped."""
        is_small = self.room.takes(added)
        if not is_small:
            self.drop(keyword, TOO_LONG)
        return is_small

    def one_of(self, keyword: str, kind: str, options: Iterable[Held]) -> None:
        """Require that values of this kind match one of the options. Values of other kinds are allowed."""
        others = [one for one in KINDS if one != kind and one in self.kinds]
        written: list[Held] = [{"type": others}] if others else []
        num_left = self.room.num_left
        for option in options:
            if not self.fits(keyword, option):
                self.room.num_left = num_left
                return
            written.append(option)
        self.extra.append({"anyOf": written})

    def count(self, keyword: str) -> int | None:
        """The value of a keyword such as maxLength."""
        value = self.given.get(keyword)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON Schema treats 2.0 as an integer
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.drop(keyword, "it is not a non-negative integer")
        elif value > MAX_COUNT:
            self.drop(keyword, f"it is more than {MAX_COUNT}")
        else:
            return value
        return None


def hold_type(draft: Draft) -> None:
    types = draft.given["type"]
    listed = types if isinstance(types, list) else [types]
    unknown = [one for one in listed if one not in (*KINDS, "integer")]
    if unknown or not listed:
        draft.drop("type", f"{json.dumps(unknown[0] if unknown else types)[:40]} is not a JSON Schema type")
    else:
        draft.out["type"] = types


def hold_values(draft: Draft) -> None:
    for keyword in ("enum", "const"):
        if keyword not in draft.given:
            continue
        values = draft.given["enum"] if keyword == "enum" else [draft.given["const"]]
        if not isinstance(values, list):
            draft.drop(keyword, "it is not a list")
        elif not all(_is_exact(value) for value in values):
            draft.drop(keyword, f"it has a number beyond {MAX_EXACT} that JSON parsers round")
        else:
            draft.out[keyword] = draft.given[keyword]


def _is_exact(value: object) -> bool:
    """Whether the compiler reproduces the value exactly."""
    match value:
        case bool() | None | str():
            return True
        case int():
            return abs(value) < 2**63 and int(float(value)) == value
        case float():
            return math.isfinite(value)
        case list():
            return all(_is_exact(item) for item in value)
        case Mapping():
            return all(_is_exact(item) for item in value.values())
    return False


# Numbers


def hold_numbers(draft: Draft, *, has_many_multiples: bool) -> None:
    if "number" not in draft.kinds:
        return
    for keyword in BOUNDS:
        if keyword in draft.given:
            _hold_bound(draft, keyword)
    for keyword in ("minimum", "maximum"):
        exclusive = f"exclusive{keyword.capitalize()}"
        if draft.given.get(exclusive) is True and keyword in draft.out:  # the syntax of draft 4
            draft.out[exclusive] = draft.out.pop(keyword)
    if "multipleOf" in draft.given:
        _hold_multiple(draft, MAX_SHARED_MULTIPLE if has_many_multiples else MAX_MULTIPLE)


def _hold_bound(draft: Draft, keyword: str) -> None:
    value = draft.given[keyword]
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        draft.drop(keyword, "it is not a number")
    elif abs(value) > MAX_EXACT:
        draft.drop(keyword, f"it is beyond {MAX_EXACT}")
    elif value and abs(value) < LEAST_BOUND:
        draft.drop(keyword, f"it is closer to 0 than {LEAST_BOUND:g}")
    else:
        draft.out[keyword] = value


def _hold_multiple(draft: Draft, limit: int) -> None:
    value = draft.given["multipleOf"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e400:
        draft.drop("multipleOf", "it is not a number above 0")
        return
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    number = int("".join(map(str, digits))) * 10 ** max(0, exponent)
    if number * (10 ** max(0, -exponent) if limit == MAX_SHARED_MULTIPLE else 1) > limit or exponent < -9:
        draft.drop("multipleOf", "it has too many digits")
    elif not _survives_tens(value, number, max(0, -exponent)):
        draft.drop("multipleOf", "it has no exact binary form")
    else:
        draft.out["multipleOf"] = value


def _survives_tens(value: float, number: int, num_decimals: int) -> bool:
    """Whether the compiler's conversion is exact: it multiplies by ten until no decimals are left, and may round."""
    value = float(value)
    for _ in range(num_decimals):
        if value.is_integer():
            return False
        value *= 10
    return value == number


# Strings


def hold_strings(draft: Draft, share: ShareFormat | None = None) -> None:
    """Rewrite lengths, `pattern` and `format`.

    `share`: turns the pattern of a format into a reference. None: patterns are written inline.
    """
    if "string" in draft.kinds:
        for keyword in ("minLength", "maxLength"):
            if (size := draft.count(keyword)) is not None:
                draft.out[keyword] = size
        if "pattern" in draft.given:
            _hold_pattern(draft)
    if "format" in draft.given:
        _hold_format(draft, share)


def _hold_pattern(draft: Draft) -> None:
    pattern = draft.given["pattern"]
    if not isinstance(pattern, str):
        draft.drop("pattern", "it is not a string")
        return
    held = hold_pattern(pattern)
    if held.problem:
        draft.drop("pattern", held.problem)
    if sum(map(len, held.sources)) <= len(pattern) + 10 or draft.fits("pattern", held.sources):
        _add_patterns(draft, held.sources)


def _add_patterns(draft: Draft, sources: Iterable[str]) -> None:
    for source in sources:
        if "pattern" in draft.out:
            draft.extra.append({"pattern": source})
        else:
            draft.out["pattern"] = source


def _hold_format(draft: Draft, share: ShareFormat | None) -> None:
    name = draft.given["format"]
    if not draft.kinds & {"string", "number"}:
        return
    if not isinstance(name, str):
        draft.drop("format", "it is not a string")
    elif name in NUMBER_FORMATS:
        low, high = NUMBER_FORMATS[name]
        if "number" in draft.kinds:
            draft.extra.append({"minimum": low, "maximum": high})
    elif "string" not in draft.kinds and (name in FORMATS or name in NATIVE_FORMATS):
        pass  # it applies to strings only
    elif name in FORMATS or name in NATIVE_FORMATS:
        if name in NATIVE_FORMATS:
            draft.out["format"] = name
        length = {"maxLength": MAX_LENGTHS[name]} if name in MAX_LENGTHS else {}
        patterns = format_patterns(name)
        if share is not None and patterns:
            parts = [{"pattern": source} for source in patterns]
            shared = share(name, {**parts[0], **length, **({"allOf": parts[1:]} if parts[1:] else {})})
            if shared is None:
                draft.drop("format", TOO_LONG)
            elif draft.fits("format", shared):
                draft.extra.append(shared)
        elif not patterns or draft.fits("format", patterns):
            _add_patterns(draft, patterns)
            draft.extra += [length] if length else []
    else:
        draft.drop("format", f"{json.dumps(name)[:40]} is not a format this server knows")


# Arrays


def hold_unique(draft: Draft, items: object) -> None:
    """Rewrite `uniqueItems`.

    `items`: the schema of all items, with references resolved. None: the items have several schemas.
    """
    is_unique = draft.given["uniqueItems"]
    most = draft.out.get("maxItems")
    if is_unique is False or (most is not None and most <= 1):
        return
    if is_unique is not True:
        draft.drop("uniqueItems", "it is neither true nor false")
        return
    values = _finite(items)
    if values is None:
        draft.drop("uniqueItems", "the items are not a short enum")
        return
    least, most = draft.out.get("minItems", 0), len(values) if most is None else min(most, len(values))
    num_orders = 0
    for size in range(least, most + 1):
        num_orders += math.perm(len(values), size)
        if num_orders > MAX_ORDERS:
            draft.drop("uniqueItems", f"there are more than {MAX_ORDERS} ways to order them")
            return
    orders = [list(one) for size in range(least, most + 1) for one in itertools.permutations(values, size)]
    if len(json.dumps(orders)) > MAX_ORDERS_CHARS:
        draft.drop("uniqueItems", "the items are not a short enum")
        return
    draft.one_of("uniqueItems", "array", [{"enum": orders}])


def _finite(items: object) -> list[object] | None:
    """All values of a schema, if they are few and listed explicitly."""
    if not isinstance(items, Mapping):
        return None
    values = [items["const"]] if "const" in items else items.get("enum")
    if values is None and items.get("type") == "boolean":
        values = [False, True]
    if not isinstance(values, list) or len(values) > MAX_DISTINCT or not all(_is_exact(value) for value in values):
        return None
    return list({canonical(value): value for value in values}.values())


def hold_contains(draft: Draft, item: Held, other: Held | None) -> None:
    """Rewrite `contains`. `item`: the schema of contained items. `other`: its negation, if that is known."""
    least = draft.count("minContains")
    least = 1 if least is None else least
    most = draft.count("maxContains")
    size = draft.out.get("maxItems")
    if item is True or item == {}:  # every item matches
        draft.one_of("contains", "array", [{"minItems": least, **({} if most is None else {"maxItems": most})}])
        return
    if least:
        if size is None or size > MAX_OPTIONS or math.comb(size, least) > MAX_OPTIONS:
            draft.drop("contains", "an array without a small maxItems has too many positions for it")
        else:
            places = itertools.combinations(range(size), least)
            draft.one_of("contains", "array", (_items_at(one, item, True, one[-1] + 1) for one in places))
    if most is not None and (size is None or size > most):
        if size is None or other is None or size > MAX_OPTIONS or math.comb(size, most) > MAX_OPTIONS:
            draft.drop("maxContains", "an array without a small maxItems has too many positions for it")
        else:
            places = itertools.combinations(range(size), most)
            draft.one_of("maxContains", "array", (_items_at(one, True, other, 0, size) for one in places))


def _items_at(chosen: tuple[int, ...], item: Held, other: Held, least: int, size: int | None = None) -> Held:
    """An array with the chosen items of one schema, and all others of another."""
    items = [item if place in chosen else other for place in range(least if size is None else size)]
    return {"type": "array", "prefixItems": items, "minItems": least}


# Objects


def hold_property_counts(draft: Draft, *, is_whole: bool) -> None:
    """Rewrite `minProperties` and `maxProperties`. `is_whole`: no other schema of the value lists properties."""
    least, most = draft.count("minProperties"), draft.count("maxProperties")
    properties = draft.out.get("properties", {})
    required = set(draft.out.get("required", ()))
    optional = [name for name, schema in properties.items() if name not in required and schema is not False]
    is_closed = draft.out.get("additionalProperties") is False and "patternProperties" not in draft.out
    if least is not None and least > len(required):
        if is_whole and not optional:
            draft.out["minProperties"] = least
        elif is_whole and is_closed and math.comb(len(optional), missing := least - len(required)) <= MAX_OPTIONS:
            choices = itertools.combinations(optional, missing)
            needed = ({"type": "object", "required": list(chosen)} for chosen in choices)
            draft.one_of("minProperties", "object", needed)
        else:
            draft.drop("minProperties", "too many properties are optional")
    if most is not None and not (is_whole and is_closed and most >= len(required) + len(optional)):
        if is_whole and not optional:
            draft.out["maxProperties"] = most
        elif is_whole and is_closed and math.comb(len(optional), room := max(0, most - len(required))) <= MAX_OPTIONS:
            choices = itertools.combinations(optional, len(optional) - room)
            missed = ({"type": "object", "properties": dict.fromkeys(chosen, False)} for chosen in choices)
            draft.one_of("maxProperties", "object", missed)
        else:
            draft.drop("maxProperties", "too many properties are optional")
