"""JSON Schema: which keywords are enforced, mistakes in a schema, and the schema that the grammar compiler gets. Pure.

`KEYWORDS` is the table: what a keyword's value must be, which schemas it contains, and how it is enforced. llguidance
enforces the keywords that are passed on. It refuses most others, and some values it would not enforce exactly. A
keyword that cannot be enforced is omitted and reported: a value that matches the held schema matches the given one in
every keyword that is not reported.

Objects that list `properties` without `additionalProperties` are closed, so that a model cannot invent names.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

from quire.errors import InvalidRequest
from quire.text.patterns import hold_pattern

KINDS = ("null", "boolean", "number", "string", "array", "object")  # integers are numbers
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_HELD_CHARS = 64 * 1024  # of a rewritten schema: the limit of a grammar
MAX_GROWTH_CHARS = 32_000  # by patterns, formats and names
MAX_SCHEMAS = 5_000  # subschemas of a rewritten schema
MAX_DEPENDENCIES = 6  # each doubles the number of variants of the object
MAX_EXACT = 2**53  # up to here every JSON parser reads integers exactly
LEAST_BOUND = 1e-15  # smaller ones have more digits than the compiler accepts
MAX_COUNT = 2**31 - 1  # of minLength and similar keywords
MAX_MULTIPLE = 10_000  # of a multipleOf without its decimal point: its automaton has as many states
MAX_SHARED_MULTIPLE = 500  # if a schema has several: the compiler multiplies their states
MAX_SHOWN_CHARS = 80

WHOLE = "$"  # reported as the path if only the type of the schema is enforced
_IDS = ("$id", "id")  # the second of draft 4
# Keywords with schemas that apply to the same value.
_SAME_VALUE = ("allOf", "$ref", "if", "then", "else", "dependentSchemas", "dependencies", "anyOf", "oneOf")
_STATES_OTHERS = ("additionalProperties", "propertyNames", "patternProperties", "unevaluatedProperties")

Held = Any  # a schema for the compiler: a boolean or a dict
_TOO_LONG = "it would make the schema too long"
_LIMITED_SIZES = "its properties are optional, or others are allowed"


class SchemaProblem(InvalidRequest):
    """A keyword of a schema is refused. `path`: its location in the schema; `what`: the rest of the message."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"grammar: {path or 'the schema'} {what}")
        self.path = path
        self.what = what

    def at(self, field: str) -> str:
        """The keyword's location in a request whose field holds the schema."""
        return f"{field}.{self.path}" if self.path else field


class SchemaNotHeld(SchemaProblem):
    """A strict schema has a keyword that cannot be enforced."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, f"cannot be enforced: {why}")


@dataclass(frozen=True, slots=True)
class HeldSchema:
    schema: dict[str, Any]
    unenforced: tuple[str, ...] = ()  # paths of keywords


class _TooLarge(Exception):
    pass


# Places and references


class Place(NamedTuple):
    """A subschema and its location in the given schema."""

    schema: Any
    path: str  # as in errors and headers: properties.email, anyOf[1]
    is_foreign: bool = False  # inside of a schema with its own `$id`, from which references start

    def child(self, *keys: str | int) -> Place:
        schema, path, is_foreign = self
        for key in keys:
            schema = schema[key]
            path = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key
            is_foreign |= isinstance(schema, Mapping) and any(isinstance(schema.get(name), str) for name in _IDS)
        return Place(schema, path, is_foreign)

    def at(self, keyword: str) -> str:
        return f"{self.path}.{keyword}" if self.path else keyword

    def inner(self, keyword: str) -> list[Place]:
        """The schemas under a keyword of the table. Lists of names among them are left out."""
        value = self.schema[keyword]
        inner = KEYWORDS[keyword].inner
        if inner == "map":
            is_mixed = keyword == "dependencies"
            names = [name for name, one in value.items() if not (is_mixed and isinstance(one, list))]
            return [self.child(keyword, name) for name in names]
        if inner == "list" or (keyword == "items" and isinstance(value, list)):
            return [self.child(keyword, i) for i in range(len(value))]
        return [self.child(keyword)] if inner else []

    def given(self) -> Iterator[tuple[str, Any]]:
        """The keywords of the table. One that is null is absent: some clients write those."""
        for keyword, value in self.schema.items():
            if keyword in KEYWORDS and (value is not None or keyword == "const"):
                yield keyword, value


class References:
    """Resolves references by pointer, within a schema. Fetches nothing.

    Anchors, and references of schemas that have an `$id`, are not resolved.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = Place(root, "")
        self._found: dict[str, Place | None] = {}

    def find(self, place: Place) -> Place | None:
        """The target of a schema's reference, if it has one that can be resolved."""
        pointer = place.schema.get("$ref")
        if place.is_foreign or not _is_pointer(pointer):
            return None
        if pointer not in self._found:
            self._found[pointer] = self._find(pointer)
        return self._found[pointer]

    def _find(self, pointer: str) -> Place | None:
        place = self.root
        try:
            for step in pointer.split("/")[1:]:
                name = unquote(step).replace("~1", "/").replace("~0", "~")
                # Python's `int` also reads signs, spaces and other digits. A list has no item of another name.
                is_index = isinstance(place.schema, list) and name.isascii() and name.isdigit()
                place = place.child(int(name) if is_index else name)
        except (LookupError, TypeError, ValueError):
            return None
        return place


def _is_pointer(reference: object) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


# Mistakes


def check_mistakes(schema: Mapping[str, Any]) -> None:
    """Raise SchemaProblem for the first mistake: an impossible value of a keyword, or a reference to nothing.

    A mistake is refused whether or not the request is strict.
    """
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
        for keyword, value in place.given():
            if rule := KEYWORDS[keyword].rule(value):
                raise SchemaProblem(place.at(keyword), f"= {_shown(value)} {rule}")
            children += place.inner(keyword)
            if keyword == "$ref" and (target := _target(place, references, ending)) is not None:
                children.append(target)
        rest += reversed(children)  # the first mistake in the schema's order is reported


def _target(place: Place, references: References, ending: set[str]) -> Place | None:
    """The schema that `$ref` names; None: it is not resolved. Raises SchemaProblem."""
    first = references.find(place)
    if first is None:
        if _is_pointer(place.schema["$ref"]) and not place.is_foreign:
            raise SchemaProblem(place.at("$ref"), f"= {_shown(place.schema['$ref'])} is not in this schema")
        return None
    passed: set[str] = set()
    one: Place | None = place
    while one is not None and one.path not in ending and isinstance(one.schema, Mapping):
        if one.path in passed:
            raise SchemaProblem(place.at("$ref"), f"= {_shown(place.schema['$ref'])} leads back to itself")
        passed.add(one.path)
        one = references.find(one)
    ending |= passed
    return first


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


# Rules for the values of keywords. Each returns what is wrong with a value, or an empty text.

Rule = Callable[[Any], str]


def _rule(what: str, is_right: Callable[[Any], bool]) -> Rule:
    def rule(value: Any) -> str:
        return "" if is_right(value) else f"is not {what}"

    return rule


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(one in TYPES for one in listed)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _pattern_rule(value: Any) -> str:
    if not isinstance(value, str):
        return "is not a string"
    held = hold_pattern(value)
    return f"is not a regular expression: {held.problem}" if held.is_invalid else ""


def _patterns_rule(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "is not an object"
    return next((f"has a name that {rule}" for name in value if (rule := _pattern_rule(name))), "")


def _are_lists_of_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_list_of_names, value.values()))


def _are_schemas_or_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_list_of_names(one) for one in value.values() if isinstance(one, list))


_NUMBER = _rule("a number", _is_number)
_NUMBER_OR_FLAG = _rule("a number", lambda value: isinstance(value, int | float))  # a boolean in draft 4
_POSITIVE = _rule("a number above 0", lambda value: _is_number(value) and value > 0)
_COUNT = _rule("a non-negative integer", lambda value: _is_number(value) and value >= 0 and value % 1 == 0)
_FLAG = _rule("true or false", lambda value: isinstance(value, bool))
_TEXT = _rule("a string", lambda value: isinstance(value, str))
_MAP = _rule("an object", lambda value: isinstance(value, Mapping))
_LIST = _rule("a list", lambda value: isinstance(value, list))
_SCHEMAS = _rule("a list of one or more schemas", lambda value: isinstance(value, list) and bool(value))
_VALUES = _rule("a list of one or more values", lambda value: isinstance(value, list) and bool(value))
_ANY = _rule("", lambda _: True)


# The held schema


def hold_schema(schema: Mapping[str, Any], *, strict: bool = False) -> HeldSchema:
    """Rewrite a schema without mistakes. If strict, raises SchemaNotHeld for the first unenforceable keyword."""
    holder = _Holder(schema)
    try:
        held = holder.whole()
        if len(json.dumps(held, ensure_ascii=False)) > MAX_HELD_CHARS:
            raise _TooLarge
    except (RecursionError, _TooLarge):  # references can nest deeply, and one schema can have two forms
        held = {"type": schema["type"]} if schema.get("type") in KINDS else {}
        holder.problems = {WHOLE: "the schema is too large, or its references nest too deeply"}
    if strict and holder.problems:
        raise SchemaNotHeld(*next(iter(holder.problems.items())))
    return HeldSchema(held, tuple(holder.problems))


class _Holder:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.references = References(root)
        self._definitions: dict[str, Held] = {}
        self._names: dict[tuple[str, bool], str] = {}  # of definitions, keyed by what they depend on
        source = str(root)
        self.max_multiple = MAX_SHARED_MULTIPLE if source.count("'multipleOf'") > 1 else MAX_MULTIPLE
        self._room = max(0, min(MAX_GROWTH_CHARS, MAX_HELD_CHARS - len(source)))
        self._num_schemas = 0
        self.problems: dict[str, str] = {}

    def whole(self) -> dict[str, Any]:
        held = self.hold(self.references.root)
        return {**held, "$defs": self._definitions} if self._definitions else held

    def hold(self, place: Place, *, is_whole: bool = True) -> Held:
        """Rewrite a schema. `is_whole`: no enclosing schema applies to the same value, so that it closes an object."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _TooLarge
        if isinstance(place.schema, bool):
            return place.schema
        if _is_reference(place.schema) and (target := self.references.find(place)) is not None:
            return self.defined(target, is_whole=is_whole)
        parts = [keyword for keyword in _SAME_VALUE if place.schema.get(keyword) is not None]
        draft = _Draft(self, place, kinds_of(place.schema), is_whole, parts)
        for keyword, value in place.given():  # in the schema's order, which is the order of an object's fields
            row = KEYWORDS[keyword]
            if row.kind and row.kind not in draft.kinds:
                continue
            if isinstance(row.hold, str):
                draft.drop(keyword, row.hold)
            elif row.hold is not None:
                row.hold(draft, keyword, value)
        _close(draft)
        _limit_properties(draft)
        if draft.extra:
            draft.out["allOf"] = [*draft.out.get("allOf", ()), *draft.extra]
        return draft.out

    def defined(self, target: Place, *, is_whole: bool) -> Held:
        """A reference to the rewritten target. It has two forms, because an object is closed in some places only."""
        return self._share((target.path, is_whole), lambda: self.hold(target, is_whole=is_whole))

    def format(self, name: str) -> Held:
        """A reference to the schema of a format, which is long."""
        parts: list[Held] = [{"pattern": hold_pattern(FORMATS[name]).source}]
        parts += [{"pattern": hold_pattern(_MAILBOX).source}] if name == "email" else []
        parts += [{"maxLength": MAX_LENGTHS[name]}] if name in MAX_LENGTHS else []
        return self._share((f" {name}", False), lambda: {"allOf": parts})  # no path starts with a space

    def _share(self, key: tuple[str, bool], make: Callable[[], Held]) -> Held:
        if key not in self._names:
            name = self._names[key] = f"d{len(self._definitions)}"
            self._definitions[name] = True  # placeholder for recursive references
            self._definitions[name] = make()
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def fits(self, num_chars: int) -> bool:
        """Whether there is room for so many characters; if so, they are reserved."""
        is_small = num_chars <= self._room
        self._room -= num_chars if is_small else 0
        return is_small

    def target(self, place: Place) -> Any:
        """The target of a schema that is only a reference, or the schema itself."""
        for _ in range(8):
            if not _is_reference(place.schema):
                break
            found = self.references.find(place)
            if found is None:
                break
            place = found
        return place.schema


@dataclass(slots=True)
class _Draft:
    """A rewritten schema under construction."""

    holder: _Holder
    place: Place
    kinds: frozenset[str]  # of values that `type` allows
    is_whole: bool  # no enclosing schema applies to the same value
    parts: list[str]  # keywords with further schemas of the value
    out: dict[str, Any] = field(default_factory=dict)
    extra: list[Held] = field(default_factory=list)  # schemas that must match as well

    def drop(self, keyword: str, why: str) -> None:
        self.holder.problems.setdefault(self.place.at(keyword), why)

    def has(self, *keywords: str) -> bool:
        return any(keyword in self.place.schema for keyword in keywords)

    def are_whole(self, keyword: str) -> bool:
        """Whether each schema under one of the `parts` is the only one that describes its objects."""
        is_only = self.is_whole and self.parts == [keyword] and not self.has("properties", "required", *_STATES_OTHERS)
        return is_only and (keyword != "allOf" or len(self.place.schema[keyword]) == 1)


def _listed(schema: Mapping[str, Any]) -> set[str]:
    """The names that a schema itself lists."""
    return {name for key in ("properties", "required") for name in schema.get(key) or ()}


def _adds_names(schema: Any, names: set[str]) -> bool:
    """Whether a schema of the same value may allow other names."""
    if not isinstance(schema, Mapping):
        return False
    return any(key in schema for key in (*_STATES_OTHERS, *_SAME_VALUE)) or not names.issuperset(_listed(schema))


def _is_reference(schema: Any) -> bool:
    """Whether a schema is a reference without other keywords that constrain a value."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return False
    return all(keyword not in KEYWORDS or KEYWORDS[keyword].hold in (None, _ref) for keyword in schema)


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of values that `type` allows."""
    types = schema.get("type") or KINDS
    return frozenset("number" if one == "integer" else one for one in ([types] if isinstance(types, str) else types))


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


# How keywords are enforced. Each adds to the draft, or drops the keyword.


def _keep(draft: _Draft, keyword: str, value: Any) -> None:
    draft.out[keyword] = value


def _values(draft: _Draft, keyword: str, value: Any) -> None:
    if _is_exact(value):
        draft.out[keyword] = value
    else:
        draft.drop(keyword, f"it has a number beyond {MAX_EXACT} that JSON parsers round")


def _is_exact(value: object) -> bool:
    """Whether the compiler reproduces the value exactly."""
    match value:
        case bool():
            return True
        case int():
            return abs(value) < 2**63 and int(float(value)) == value
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_exact, value))
        case Mapping():
            return all(map(_is_exact, value.values()))
    return True


def _bound(draft: _Draft, keyword: str, value: Any) -> None:
    if abs(value) > MAX_EXACT:
        draft.drop(keyword, f"it is beyond {MAX_EXACT}")
    elif value and abs(value) < LEAST_BOUND:
        draft.drop(keyword, f"it is closer to 0 than {LEAST_BOUND:g}")
    else:
        draft.out[keyword] = value


def _multiple(draft: _Draft, keyword: str, value: Any) -> None:
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    if not isinstance(exponent, int) or exponent < -9 or abs(exponent) + len(digits) > 20:
        draft.drop(keyword, "it has too many digits")
        return
    number, num_decimals = int("".join(map(str, digits))) * 10 ** max(0, exponent), max(0, -exponent)
    limit = draft.holder.max_multiple
    if number * (10**num_decimals if limit == MAX_SHARED_MULTIPLE else 1) > limit:
        draft.drop(keyword, "it has too many digits")
    elif not _survives_tens(value, number, num_decimals):
        draft.drop(keyword, "it has no exact binary form")
    else:
        draft.out[keyword] = value


def _survives_tens(value: float, number: int, num_decimals: int) -> bool:
    """Whether the compiler's conversion is exact: it multiplies by ten until no decimals are left, and may round."""
    value = float(value)
    for _ in range(num_decimals):
        if value.is_integer():
            return False
        value *= 10
    return value == number


def _count(draft: _Draft, keyword: str, value: Any) -> None:
    if value > MAX_COUNT:
        draft.drop(keyword, f"it is more than {MAX_COUNT}")
    else:
        draft.out[keyword] = int(value)  # JSON Schema treats 2.0 as an integer


def _pattern(draft: _Draft, keyword: str, value: str) -> None:
    held = hold_pattern(value)
    if held.problem:
        draft.drop(keyword, held.problem)
    if not draft.holder.fits(max(0, len(held.source) - len(value) - 10)):
        draft.drop(keyword, _TOO_LONG)
    elif held.source:
        draft.out[keyword] = held.source


def _format(draft: _Draft, keyword: str, value: str) -> None:
    if not draft.kinds & {"string", "number"}:
        return
    if value in NUMBER_FORMATS:
        low, high = NUMBER_FORMATS[value]
        draft.extra += [{"minimum": low, "maximum": high}] if "number" in draft.kinds else []
    elif value not in FORMATS:
        draft.drop(keyword, f"{json.dumps(value)[:40]} is not a format this server knows")
    elif "string" in draft.kinds:  # it applies to strings only
        draft.extra.append(draft.holder.format(value))


def _schema(draft: _Draft, keyword: str, value: Any) -> None:
    if isinstance(value, list):
        draft.out["prefixItems"] = [draft.holder.hold(one) for one in draft.place.inner(keyword)]
    else:
        draft.out[keyword] = draft.holder.hold(draft.place.child(keyword))


def _additional_items(draft: _Draft, keyword: str, _value: Any) -> None:
    if isinstance(draft.place.schema.get("items"), list):  # the syntax of draft 7
        draft.out["items"] = draft.holder.hold(draft.place.child(keyword))


def _unique(draft: _Draft, keyword: str, value: bool) -> None:
    if value and draft.place.schema.get("maxItems", 2) > 1:
        draft.drop(keyword, "items are not compared with each other")


def _properties(draft: _Draft, keyword: str, value: Mapping[str, Any]) -> None:
    is_whole = draft.is_whole and not draft.parts
    draft.out[keyword] = {
        name: draft.holder.hold(draft.place.child(keyword, name), is_whole=is_whole) for name in value
    }


def _pattern_properties(draft: _Draft, keyword: str, value: Mapping[str, Any]) -> None:
    held = {name: hold_pattern(name) for name in value}
    broken = [name for name in value if held[name].problem]
    for name in broken:
        draft.drop(f"{keyword}.{name}", held[name].problem)
    if broken:  # it is unknown which names are additional
        for other in ("additionalProperties", "unevaluatedProperties"):
            if draft.place.schema.get(other, True) is not True:
                draft.drop(other, "it depends on patternProperties, which cannot be enforced")
        draft.out["additionalProperties"] = True
        return
    schemas = [draft.holder.hold(one) for one in draft.place.inner(keyword)]
    either = f"^(?:{'|'.join(one.source[1:-1] for one in held.values())})$"
    if any(one != schemas[0] for one in schemas):
        draft.drop(keyword, "its patterns may match the same name")
        schemas = [True]
    draft.out[keyword] = {either: schemas[0]} if value else {}


def _additional_properties(draft: _Draft, keyword: str, _value: Any) -> None:
    draft.out.setdefault(keyword, draft.holder.hold(draft.place.child(keyword)))


def _property_names(draft: _Draft, keyword: str, _value: Any) -> None:
    """Rewrite propertyNames as a pattern. Values follow the schema of additional properties."""
    schema = draft.holder.target(draft.place.child(keyword))
    pattern = _names_pattern(schema)
    if pattern is None or draft.has("properties", "patternProperties"):
        if schema is not True and schema != {}:
            draft.drop(keyword, "it is not a single enum or pattern, or the object has named properties")
    elif draft.holder.fits(len(pattern)):
        others = draft.place.schema.get("additionalProperties")
        held = True if others is None else draft.holder.hold(draft.place.child("additionalProperties"))
        draft.out |= {"patternProperties": {pattern: held}, "additionalProperties": False}
    else:
        draft.drop(keyword, _TOO_LONG)


def _names_pattern(schema: Any) -> str | None:
    """A schema of strings as a single pattern, or None."""
    if schema is False:
        return r"^[^\x{0}-\x{10FFFF}]$"
    given = dict(Place(schema, "").given()) if isinstance(schema, Mapping) else {}
    given.pop("type", None)
    values = [given["const"]] if "const" in given else given.get("enum")
    if values is not None and len(given) == 1:
        texts = ["".join(f"\\x{{{ord(char):X}}}" for char in one) for one in values if isinstance(one, str)]
        return f"^(?:{'|'.join(texts)})$"
    if given and given.keys() <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{int(given.get('minLength', 0))},{int(given['maxLength']) if 'maxLength' in given else ''}}})$"
    held = hold_pattern(given["pattern"]) if given.keys() == {"pattern"} else None
    return None if held is None or held.problem else held.source


def _unevaluated_properties(draft: _Draft, keyword: str, value: Any) -> None:
    if value is True or draft.has("additionalProperties"):
        return
    if draft.parts or draft.has("not", "$dynamicRef", "propertyNames"):
        draft.drop(keyword, "it depends on what other keywords match")
    else:
        draft.out["additionalProperties"] = draft.holder.hold(draft.place.child(keyword))


def _dependencies(draft: _Draft, keyword: str, value: Mapping[str, Any]) -> None:
    if len(value) > MAX_DEPENDENCIES:
        draft.drop(keyword, f"it has more than {MAX_DEPENDENCIES} names")
        return
    for name, one in value.items():
        is_names = isinstance(one, list)
        then = {"required": one} if is_names else draft.holder.hold(draft.place.child(keyword, name), is_whole=False)
        draft.extra.append({"anyOf": [{"properties": {name: False}}, then]})


def _parts(draft: _Draft, keyword: str, _value: Any) -> None:
    is_whole = draft.are_whole(keyword)
    draft.out[keyword] = [draft.holder.hold(part, is_whole=is_whole) for part in draft.place.inner(keyword)]


def _one_of(draft: _Draft, keyword: str, _value: Any) -> None:
    parts = draft.place.inner(keyword)
    if not _exclude_each_other([draft.holder.target(part) for part in parts]):
        draft.drop(keyword, "more than one of its schemas may match")
    draft.extra.append({"anyOf": [draft.holder.hold(part, is_whole=draft.are_whole(keyword)) for part in parts]})


def _exclude_each_other(schemas: Sequence[Any]) -> bool:
    """Whether no value matches two of the schemas, by type, by listed values or by those of a required property."""
    if not all(isinstance(schema, Mapping) for schema in schemas):
        return False
    tags = [name for schema in schemas for name in schema.get("required") or ()][:8]
    return any(_are_marked([_marks(schema, tag) for schema in schemas]) for tag in (None, *tags))


def _marks(schema: Mapping[str, Any], tag: str | None) -> set[tuple[str, str]]:
    """The kinds of a schema's values, each with a value that is listed for it, or with "" for any."""
    kinds = kinds_of(schema)
    if kinds == {"object"} and tag is not None and tag in (schema.get("required") or ()):
        one = (schema.get("properties") or {}).get(tag)
        return {("object", f"{kind} {value}") for kind, value in _marks(one, None) if value} if one else set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        return {(kind, "") for kind in kinds}
    is_plain = {isinstance(value, str) or (isinstance(value, int) and abs(value) <= MAX_EXACT) for value in values}
    return {(kind_of(value), json.dumps(value) if is_plain == {True} else "") for value in values}


def _are_marked(marks: Sequence[set[tuple[str, str]]]) -> bool:
    seen = Counter(mark for own in marks for mark in own)
    whole = {kind for kind, value in seen if not value}
    is_apart = all(count == 1 for count in seen.values())
    return all(marks) and is_apart and not any(value and kind in whole for kind, value in seen)


def _if(draft: _Draft, keyword: str, _value: Any) -> None:
    if draft.has("then", "else"):
        draft.drop(keyword, "the compiler has no conditions")


def _ref(draft: _Draft, keyword: str, _value: str) -> None:
    target = draft.holder.references.find(draft.place)
    if target is None:
        draft.drop(keyword, "it is not a pointer within this schema, and nothing is fetched")
    else:
        draft.out |= draft.holder.defined(target, is_whole=draft.are_whole(keyword))


def _close(draft: _Draft) -> None:
    """Exclude names that are not listed, unless other schemas of the value may list them."""
    schema, names = draft.place.schema, _listed(draft.place.schema)
    is_open = draft.has("additionalProperties", "propertyNames", "unevaluatedProperties", "$ref")
    if not draft.is_whole or is_open or schema.get("properties") is None or "additionalProperties" in draft.out:
        return
    others = [place.schema for keyword in draft.parts for place in draft.place.inner(keyword)]
    if (schema.get("minProperties") or 0) > len(names) or any(_adds_names(one, names) for one in others):
        return
    properties = draft.out.get("properties", {})
    added = sorted(names - properties.keys())
    if draft.holder.fits(sum(len(name) + 10 for name in added) + 25):
        draft.out |= {"properties": properties | dict.fromkeys(added, True), "additionalProperties": False}


def _limit_properties(draft: _Draft) -> None:
    """Enforce minProperties and maxProperties as far as the compiler can.

    With optional properties it can count one of them.
    """
    is_whole = draft.is_whole and not draft.parts
    schema, properties = draft.place.schema, draft.out.get("properties", {})
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    num_required = len(set(draft.out.get("required", ())))
    num_optional = len(properties.keys() - set(draft.out.get("required", ())))
    is_closed = draft.out.get("additionalProperties") is False and "patternProperties" not in draft.out
    if "object" not in draft.kinds:
        return
    limits = {}  # those that the properties do not keep anyway
    if least is not None and least > num_required:
        limits["minProperties"] = least
    if most is not None and not (is_whole and is_closed and most >= num_required + num_optional):
        limits["maxProperties"] = most
    for keyword, limit in limits.items():
        if is_whole and (not num_optional or (is_closed and limit == num_required + 1)):
            _count(draft, keyword, limit)
        else:
            draft.drop(keyword, _LIMITED_SIZES)


# Formats of `format`, as patterns: the compiler knows some of them, but its dates have a February 29 in every year, and
# its e-mail addresses have mailboxes and labels of any length.
_SHORT_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LEAP_DAY = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_DAY})"
)
# A leap second is the last second of a day, and is written in UTC.
_OFFSET = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
# No label has hyphens as third and fourth character: that prefix marks encoded international names.
_LABEL = (
    r"[A-Za-z0-9](?:[A-Za-z0-9]|{m}[A-Za-z0-9](?:{m}{{0,59}}[A-Za-z0-9])?|{m}-[A-Za-z0-9](?:{m}{{0,58}}[A-Za-z0-9])?)?"
)
_LABEL = _LABEL.format(m="[A-Za-z0-9-]")
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9a-fA-F]{1,4}"
_HALVES = "|".join(rf"(?:{_GROUP}:){{{n}}}(?::{_GROUP}){{1,{7 - n}}}" for n in range(1, 7))
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_MAILBOX = "^[^@]{1,64}@"  # what e-mail addresses match as well
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;={more}-]|%[0-9A-Fa-f]{{2}})"
_SEGMENT, _QUERY = _URI_CHAR.format(more=":@"), _URI_CHAR.format(more=":@/?")
_AUTHORITY = rf"(?:{_URI_CHAR.format(more=':')}*@)?{_URI_CHAR.format(more='')}*(?::[0-9]*)?"
FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "duration": rf"^P(?:[0-9]+W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_SHORT_LABEL}(?:\.{_SHORT_LABEL})*$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": rf"^(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,7}}:|{_HALVES}|:(?:(?::{_GROUP}){{1,7}}|:))$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri": (
        rf"^[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/?(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?)"
        rf"(?:\?{_QUERY}*)?(?:#{_QUERY}*)?$"
    ),
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
MAX_LENGTHS: Mapping[str, int] = {"hostname": 253, "email": 254}
# Integer formats of OpenAPI. int64 is missing because its bounds exceed those of the compiler.
NUMBER_FORMATS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}


class Keyword(NamedTuple):
    rule: Rule  # what its value must be
    hold: Callable[[_Draft, str, Any], None] | str | None = None  # a text: why it is not enforced; None: no constraint
    kind: str = ""  # of the values that it constrains; empty: all
    inner: str = ""  # the schemas in its value: one ("schema"), a list, or a map


KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(_rule(f"one of {', '.join(TYPES)}", _is_type), _keep),
    "enum": Keyword(_VALUES, _values),
    "const": Keyword(_ANY, _values),
    **dict.fromkeys(("minimum", "maximum"), Keyword(_NUMBER, _bound, "number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), Keyword(_NUMBER_OR_FLAG, _bound, "number")),
    "multipleOf": Keyword(_POSITIVE, _multiple, "number"),
    **dict.fromkeys(("minLength", "maxLength"), Keyword(_COUNT, _count, "string")),
    "pattern": Keyword(_pattern_rule, _pattern, "string"),
    "format": Keyword(_TEXT, _format),
    "prefixItems": Keyword(_LIST, _schema, "array", "list"),
    "items": Keyword(_ANY, _schema, "array", "schema"),
    "additionalItems": Keyword(_ANY, _additional_items, "array", "schema"),
    **dict.fromkeys(("minItems", "maxItems"), Keyword(_COUNT, _count, "array")),
    "uniqueItems": Keyword(_FLAG, _unique, "array"),
    "contains": Keyword(_ANY, "items are not counted", "array", "schema"),
    **dict.fromkeys(("minContains", "maxContains"), Keyword(_COUNT)),
    "unevaluatedItems": Keyword(_ANY, "it depends on what other keywords match", "array", "schema"),
    "properties": Keyword(_MAP, _properties, "object", "map"),
    "required": Keyword(_rule("a list of names", _is_list_of_names), _keep, "object"),
    "patternProperties": Keyword(_patterns_rule, _pattern_properties, "object", "map"),
    "additionalProperties": Keyword(_ANY, _additional_properties, "object", "schema"),
    "propertyNames": Keyword(_ANY, _property_names, "object", "schema"),
    "unevaluatedProperties": Keyword(_ANY, _unevaluated_properties, "object", "schema"),
    **dict.fromkeys(("minProperties", "maxProperties"), Keyword(_COUNT)),  # see _limit_properties
    "dependentRequired": Keyword(_rule("an object of lists of names", _are_lists_of_names), _dependencies, "object"),
    "dependentSchemas": Keyword(_MAP, _dependencies, "object", "map"),
    "dependencies": Keyword(
        _rule("an object of schemas or lists of names", _are_schemas_or_names), _dependencies, "object", "map"
    ),
    "allOf": Keyword(_LIST, _parts, inner="list"),
    "anyOf": Keyword(_SCHEMAS, _parts, inner="list"),
    "oneOf": Keyword(_SCHEMAS, _one_of, inner="list"),
    "not": Keyword(_ANY, "the compiler has no negation", inner="schema"),
    "if": Keyword(_ANY, _if, inner="schema"),
    **dict.fromkeys(("then", "else"), Keyword(_ANY, inner="schema")),  # without `if` they constrain nothing
    "$ref": Keyword(_TEXT, _ref),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), Keyword(_ANY, "its target depends on other schemas")),
    **dict.fromkeys(("$defs", "definitions"), Keyword(_MAP, inner="map")),
}
