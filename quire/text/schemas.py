"""Rewrites a JSON schema so that the grammar compiler can enforce it, and reports what it cannot. Pure.

`hold_schema` uses only keywords that the grammar compiler enforces exactly. Other keywords are rewritten if an
equivalent form exists (`not`, `if`, `contains` and `uniqueItems` in small cases, syntax of older drafts); otherwise
they are omitted and reported. The result is called the held schema: a value that matches it matches the given schema
in every keyword that is not reported.

Objects that list `properties` without `additionalProperties` are closed, so that a model cannot invent names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.text.patterns import HeldPattern, hold_pattern, start_apart
from quire.text.schema_closing import LEFT_OPEN, PropertyNames
from quire.text.schema_keywords import (
    BOUNDS,
    TOO_LONG,
    Draft,
    Held,
    hold_contains,
    hold_numbers,
    hold_property_counts,
    hold_strings,
    hold_type,
    hold_unique,
    hold_values,
)
from quire.text.schema_logic import (
    ANNOTATIONS,
    KINDS,
    Budget,
    Side,
    are_discriminated,
    are_disjoint,
    canonical,
    kinds_of,
    negated,
)
from quire.text.schema_mistakes import SchemaProblem
from quire.text.schema_refs import Place, References
from quire.text.schema_sizes import MAX_HELD_CHARS, Room, num_chars

MAX_SCHEMAS = 5_000  # subschemas of a rewritten schema
MAX_DEPENDENCIES = 6  # each doubles the number of variants of the object
MAX_PATTERNS = 64  # of the names of one object: all pairs are compared
MIN_SHARED_CHARS = 40  # of a schema that becomes a definition: a reference to it has about half as many
MAX_EXCLUSIVE = 4  # branches of a oneOf that are made disjoint by negation

WHOLE = "$"  # reported as the path if only the type of the schema is enforced
_UNKNOWN_REFERENCE = "it is not in this schema, and nothing is fetched"
_UNKNOWN_NAMES = "too many schemas list properties, so other names are not excluded"


class Unenforced(NamedTuple):
    path: str  # of the keyword, inside the schema
    why: str


class SchemaNotHeld(SchemaProblem):
    """A strict schema has a keyword that cannot be enforced."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, f"cannot be enforced: {why}")


@dataclass(frozen=True, slots=True)
class HeldSchema:
    schema: dict[str, Any]
    unenforced: tuple[Unenforced, ...] = ()


def hold_schema(schema: Mapping[str, Any], *, strict: bool = False) -> HeldSchema:
    """Rewrite a schema. If strict, raises SchemaNotHeld for the first keyword that cannot be enforced."""
    holder = _Holder(schema)
    try:
        held = holder.whole()
        if num_chars(held, MAX_HELD_CHARS) > MAX_HELD_CHARS:
            raise _TooLarge
    except (RecursionError, _TooLarge):  # references can nest deeply, and one schema can expand to many
        held = {"type": schema["type"]} if schema.get("type") in KINDS else {}
        holder.problems = {WHOLE: "the schema is too large, or its references nest too deeply"}
    if strict and holder.problems:
        raise SchemaNotHeld(*next(iter(holder.problems.items())))
    return HeldSchema(held, tuple(Unenforced(*item) for item in holder.problems.items()))


class _TooLarge(Exception):
    pass


class _Holder:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._references = References(root)
        self._names_of = PropertyNames(self._references)
        self._definitions: dict[str, Held] = {}
        self._names: dict[tuple[str, bool, frozenset[str]], str] = {}  # of definitions, keyed by what they depend on
        self._shared: frozenset[str] = frozenset()  # properties of the current value that several schemas describe
        text = str(root)
        self._has_many_multiples = text.count("'multipleOf'") > 1
        self._has_many_formats = text.count("'format'") > 1
        self._room = Room(len(text))
        self._steps = self._all_steps()
        self._budget = Budget()
        self._num_left = MAX_SCHEMAS
        self.problems: dict[str, str] = {}

    def whole(self) -> dict[str, Any]:
        held = self._hold(self._references.root, frozenset())
        if not isinstance(held, dict):
            held = {} if held else {"enum": []}
        return {**held, "$defs": self._definitions} if self._definitions else held

    def _hold(self, place: Place, outer: frozenset[str] | None) -> Held:
        """Rewrite a schema.

        `outer`: names listed by enclosing schemas of the same value. None: those schemas close the object.
        """
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooLarge
        if isinstance(place.schema, bool):
            return place.schema
        if not isinstance(place.schema, Mapping):
            self.problems.setdefault(place.path, "it is not a schema")
            return True
        if not outer and isinstance(place.schema.get("$ref"), str) and _is_only("$ref", place.schema):
            target = self._references.find(place.schema["$ref"], place.base)
            if target is not None:
                return self._defined(target, is_closed=outer is not None)
        enclosing = self._shared
        self._shared = self._names_of.shared(place, outer) | (enclosing if outer is None else frozenset())
        closing = self._names_of.closing(place, outer)
        if not closing.is_known:
            self.problems.setdefault(place.at("additionalProperties"), _UNKNOWN_NAMES)
        draft = Draft(place, kinds_of(place.schema), self.problems, closing, self._room)
        # In the schema's order, which is the order of an object's fields. One step handles all of its keywords.
        for step in dict.fromkeys(self._steps[key] for key in place.schema if key in self._steps):
            step(draft)
        _close(draft)
        if "object" in draft.kinds:
            hold_property_counts(draft, is_whole=outer is not None and self._names_of.is_whole(place))
        if draft.extra:
            draft.out["allOf"] = [*draft.out.get("allOf", ()), *draft.extra]
        self._shared = enclosing
        return draft.out

    def _all_steps(self) -> dict[str, Callable[[Draft], None]]:
        return {
            "type": hold_type,
            **dict.fromkeys(("enum", "const"), hold_values),
            **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), self._strings),
            **dict.fromkeys((*BOUNDS, "multipleOf"), self._numbers),
            **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), self._arrays),
            **dict.fromkeys(("uniqueItems", "contains"), self._arrays),
            **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), self._objects),
            **dict.fromkeys(("propertyNames", "unevaluatedProperties"), self._objects),
            "unevaluatedItems": self._unevaluated_items,
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "not": self._not,
            "if": self._if,
            "$ref": self._ref,
            **dict.fromkeys(("$dynamicRef", "$recursiveRef"), self._dynamic_ref),
            **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), self._dependencies),
        }

    # References

    def _defined(self, target: Place, *, is_closed: bool) -> Held:
        key = (target.path, is_closed, frozenset() if is_closed else self._shared)
        if key not in self._names:
            name = self._names[key] = f"d{len(self._definitions)}"
            self._definitions[name] = True  # placeholder for recursive references
            self._definitions[name] = self._hold(target, frozenset() if is_closed else None)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _share(self, held: Held) -> Held:
        """A reference to the schema, for use in several places. Short schemas are returned unchanged."""
        if num_chars(held, MIN_SHARED_CHARS) <= MIN_SHARED_CHARS:
            return held
        name = f"d{len(self._definitions)}"
        self._definitions[name] = held
        return {"$ref": f"#/$defs/{name}"}

    def _share_format(self, name: str, held: Held) -> Held | None:
        key = (f" {name}", False, frozenset[str]())  # no path starts with a space
        if key not in self._names:
            if not self._room.takes(held):
                return None
            self._names[key] = f"d{len(self._definitions)}"
            self._definitions[self._names[key]] = held
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _ref(self, draft: Draft) -> None:
        reference = draft.given["$ref"]
        target = self._references.find(reference, draft.place.base) if isinstance(reference, str) else None
        if target is None:
            draft.drop("$ref", _UNKNOWN_REFERENCE)
        else:
            draft.out |= self._defined(target, is_closed=False)

    def _dynamic_ref(self, draft: Draft) -> None:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in draft.given:
                draft.drop(keyword, "its target depends on other schemas")

    def _target(self, place: Place) -> Place:
        """The target of a schema that is only a reference, or the schema itself."""
        for _ in range(8):
            if not isinstance(place.schema, Mapping) or not isinstance(place.schema.get("$ref"), str):
                break
            if not _is_only("$ref", place.schema):
                break
            found = self._references.find(place.schema["$ref"], place.base)
            if found is None:
                break
            place = found
        return place

    def _resolver(self, place: Place) -> Callable[[str], Any]:
        def resolve(reference: str) -> Any:
            found = self._references.find(reference, place.base)
            return None if found is None or found.base != place.base else found.schema

        return resolve

    def _resolve_held(self, reference: str) -> Any:
        return self._definitions.get(reference.removeprefix("#/$defs/"))

    # Keywords that contain schemas

    def _strings(self, draft: Draft) -> None:
        hold_strings(draft, self._share_format if self._has_many_formats else None)

    def _numbers(self, draft: Draft) -> None:
        hold_numbers(draft, has_many_multiples=self._has_many_multiples)

    def _arrays(self, draft: Draft) -> None:
        if "array" not in draft.kinds:
            return
        schema, place = draft.given, draft.place
        prefix, items = (
            ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")
        )
        for keyword in ("minItems", "maxItems"):
            if (size := draft.count(keyword)) is not None:
                draft.out[keyword] = size
        if isinstance(schema.get(prefix), list):
            places = [place.child(prefix, i) for i in range(len(schema[prefix]))]
            draft.out["prefixItems"] = [self._hold(item, frozenset()) for item in places]
        elif prefix in schema:
            draft.drop(prefix, "it is not a list")
        if items in schema:
            draft.out["items"] = self._hold(place.child(items), frozenset())
        if "uniqueItems" in schema:
            has_one_schema = items in schema and prefix not in schema
            hold_unique(draft, self._target(place.child(items)).schema if has_one_schema else None)
        if "contains" in schema:
            self._contains(draft)

    def _contains(self, draft: Draft) -> None:
        before = dict(self._definitions), self._room.num_left, len(draft.extra)
        place = draft.place.child("contains")
        item = self._exactly(place.schema, place)
        if item is None:
            draft.drop("contains", "not all of its schema can be enforced")
            return
        opposite = self._opposite(place) if "maxContains" in draft.given else None
        hold_contains(draft, self._share(item), None if opposite is None else self._share(opposite))
        if len(draft.extra) == before[2]:
            self._definitions, self._room.num_left = before[:2]

    def _unevaluated_items(self, draft: Draft) -> None:
        others = ("allOf", "$ref", "$dynamicRef", "if", "contains", "not", "anyOf", "oneOf")
        if draft.given["unevaluatedItems"] is True or "items" in draft.given or "array" not in draft.kinds:
            return
        if any(key in draft.given for key in others):
            draft.drop("unevaluatedItems", "it depends on what other keywords match")
        else:
            draft.out["items"] = self._hold(draft.place.child("unevaluatedItems"), frozenset())

    def _objects(self, draft: Draft) -> None:
        if "object" not in draft.kinds:
            return
        schema, place = draft.given, draft.place
        if isinstance(schema.get("properties"), Mapping):
            places = {name: place.child("properties", name) for name in schema["properties"]}
            draft.out["properties"] = {
                name: self._hold(one, None if name in self._shared else frozenset()) for name, one in places.items()
            }
        elif "properties" in schema:
            draft.drop("properties", "it is not an object")
        required = schema.get("required")
        if isinstance(required, list) and all(isinstance(name, str) for name in required):
            draft.out["required"] = required
        elif "required" in schema:
            draft.drop("required", "it is not a list of names")
        if "additionalProperties" in schema:
            draft.out["additionalProperties"] = self._hold(place.child("additionalProperties"), frozenset())
        if "unevaluatedProperties" in schema:
            self._unevaluated_properties(draft)
        if "patternProperties" in schema:
            self._pattern_properties(draft)
        if "propertyNames" in schema:
            self._property_names(draft)

    def _unevaluated_properties(self, draft: Draft) -> None:
        schema = draft.given
        others = ("allOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "dependencies", "not", "anyOf", "oneOf")
        if (
            schema["unevaluatedProperties"] is True
            or "additionalProperties" in schema
            or draft.closing.names is not None
        ):
            return
        if any(key in schema for key in others):
            draft.drop("unevaluatedProperties", "it depends on what other keywords match")
        else:
            place = draft.place.child("unevaluatedProperties")
            draft.out["additionalProperties"] = self._hold(place, frozenset())

    def _pattern_properties(self, draft: Draft) -> None:
        given = draft.given["patternProperties"]
        if not isinstance(given, Mapping):
            draft.drop("patternProperties", "it is not an object")
            return
        if len(given) > MAX_PATTERNS:
            draft.drop("patternProperties", f"it has more than {MAX_PATTERNS} patterns")
            _open_names(draft)
            return
        patterns: dict[str, HeldPattern] = {name: hold_pattern(name) for name in given}
        broken = [name for name, held in patterns.items() if held.problem or len(held.sources) != 1]
        for name in broken:
            draft.drop(f"patternProperties.{name}", patterns[name].problem or "a look-ahead is not supported here")
        if broken:
            _open_names(draft)
            return
        schemas = {name: self._hold(draft.place.child("patternProperties", name), frozenset()) for name in given}
        held = list(patterns.values())
        if all(self._budget.take() and start_apart(a, b) for i, a in enumerate(held) for b in held[i + 1 :]):
            draft.out["patternProperties"] = {patterns[name].sources[0]: schemas[name] for name in given}
            return
        either = f"^(?:{'|'.join(one.sources[0][1:-1] for one in held)})$"
        if len({canonical(schema) for schema in schemas.values()}) == 1:
            draft.out["patternProperties"] = {either: next(iter(schemas.values()))}
        else:
            draft.drop("patternProperties", "its patterns may match the same name")
            draft.out["patternProperties"] = {either: True}

    def _property_names(self, draft: Draft) -> None:
        """Rewrite propertyNames as listed names or as a pattern. Values follow the schema of additional properties."""
        given = draft.given["propertyNames"]
        others = draft.out.get("additionalProperties", True)
        if given is False:
            draft.one_of("propertyNames", "object", [{"type": "object", "maxProperties": 0}])
            return
        if given is True or given == {} or others is False:
            is_free = others is not False or not ({"properties", "patternProperties"} & draft.given.keys())
            if is_free:
                return
        schema = self._target(draft.place.child("propertyNames")).schema
        known = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"} | ANNOTATIONS
        is_plain = isinstance(schema, Mapping) and schema.keys() <= known and "patternProperties" not in draft.given
        place = Place(schema, draft.place.at("propertyNames"), draft.place.base)
        names = Draft(place, frozenset(("string",)), {}, LEFT_OPEN, self._room)
        if is_plain:
            for step in (hold_values, hold_strings):
                step(names)
        listed = names.out.get("enum", [names.out["const"]] if "const" in names.out else None)
        if is_plain and not names.problems and listed is not None and names.out.keys() <= {"enum", "const"}:
            self._only_names(draft, [name for name in listed if isinstance(name, str)], others)
        elif is_plain and not names.problems and not draft.out.get("properties") and _pattern_of(names) is not None:
            draft.out["patternProperties"] = {_pattern_of(names): others}
            draft.out["additionalProperties"] = False
        else:
            draft.drop("propertyNames", "it is not a single enum or pattern, or the object has named properties")

    def _only_names(self, draft: Draft, names: list[str], others: Held) -> None:
        allowed = dict.fromkeys(names)
        properties = {
            name: schema if name in allowed else False for name, schema in draft.out.get("properties", {}).items()
        }
        shared = self._share(others) if len(allowed) > 1 else others
        added = {name: shared for name in allowed if name not in properties}
        if draft.fits("propertyNames", added):
            draft.out["properties"] = properties | added
            draft.out["additionalProperties"] = False

    # Schemas of the same value

    def _all_of(self, draft: Draft) -> None:
        if isinstance(draft.given["allOf"], list):
            draft.out["allOf"] = [self._hold(part, None) for part in self._names_of.parts(draft.place, "allOf")]
        else:
            draft.drop("allOf", "it is not a list")

    def _any_of(self, draft: Draft) -> None:
        if isinstance(draft.given["anyOf"], list):
            parts = self._names_of.parts(draft.place, "anyOf")
            draft.out["anyOf"] = [self._hold(part, draft.closing.for_branches) for part in parts]
        else:
            draft.drop("anyOf", "it is not a list")

    def _one_of(self, draft: Draft) -> None:
        if not isinstance(draft.given["oneOf"], list):
            draft.drop("oneOf", "it is not a list")
            return
        parts = self._names_of.parts(draft.place, "oneOf")
        held = [self._hold(part, draft.closing.for_branches) for part in parts]
        if not self._exclude_each_other(parts, held):
            opposites = [self._opposite(part) for part in parts] if len(parts) <= MAX_EXCLUSIVE else [None]
            if None in opposites:
                draft.drop("oneOf", "more than one of its schemas may match")
            else:
                if len(parts) > 2:
                    opposites = [self._share(opposite) for opposite in opposites]
                held = [
                    {"allOf": [one, *(other for j, other in enumerate(opposites) if j != i)]}
                    for i, one in enumerate(held)
                ]
        draft.extra.append({"anyOf": held})

    def _exclude_each_other(self, parts: list[Place], held: list[Held]) -> bool:
        """Whether no value of a rewritten branch matches another branch as it was given."""
        if are_discriminated([self._target(part).schema for part in parts]):
            return True
        return all(
            are_disjoint(
                Side(one, self._resolve_held, self._budget), Side(part.schema, self._resolver(part), self._budget)
            )
            for i, one in enumerate(held)
            for j, part in enumerate(parts)
            if i != j
        )

    def _opposite(self, place: Place) -> Held | None:
        found = negated(place.schema, self._resolver(place), self._budget)
        return None if found is None else self._exactly(found, place)

    def _not(self, draft: Draft) -> None:
        opposite = self._opposite(draft.place.child("not"))
        if opposite is None:
            draft.drop("not", "its negation cannot be enforced")
        else:
            draft.extra.append(opposite)

    def _if(self, draft: Draft) -> None:
        if not {"then", "else"} & draft.given.keys():
            return
        place = draft.place.child("if")
        condition, opposite = self._exactly(place.schema, place), self._opposite(place)
        if condition is None or opposite is None:
            draft.drop("if", "its negation cannot be enforced")
            return
        then, otherwise = (
            self._hold(draft.place.child(key), None) if key in draft.given else True for key in ("then", "else")
        )
        draft.extra.append({"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]})

    def _dependencies(self, draft: Draft) -> None:
        if "object" not in draft.kinds:
            return
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            given = draft.given.get(keyword, {})
            if not isinstance(given, Mapping) or len(given) > MAX_DEPENDENCIES:
                draft.drop(keyword, f"it is not an object of at most {MAX_DEPENDENCIES} names")
                continue
            for name, value in given.items():
                if not isinstance(value, list):
                    then = self._hold(draft.place.child(keyword, name), None)
                elif all(isinstance(one, str) for one in value):
                    then = {"required": value}
                else:
                    draft.drop(f"{keyword}.{name}", "it is not a list of names")
                    continue
                draft.extra.append({"anyOf": [{"properties": {name: False}}, then]})

    def _exactly(self, schema: object, place: Place) -> Held | None:
        """The rewritten schema of the same value, or None if a keyword cannot be enforced.

        It gets definitions of its own, because existing ones may have omitted keywords.
        """
        if self._room.is_used_up:
            return None
        before = self.problems, self._names, dict(self._definitions)
        num_left = self._room.num_left
        self.problems, self._names = {}, {}
        held = self._hold(Place(schema, place.path, place.base), None)
        added = [self._definitions[name] for name in self._definitions.keys() - before[2].keys()]
        is_exact = not self.problems and self._room.takes([held, *added], num_taken=num_left - self._room.num_left)
        self.problems, self._names = before[:2]
        if not is_exact:
            self._definitions, self._room.num_left = before[2], num_left
        return held if is_exact else None


def _open_names(draft: Draft) -> None:
    """Leave the object open: without patternProperties it is unknown which names are additional."""
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if draft.given.get(keyword, True) is not True:
            draft.drop(keyword, "it depends on patternProperties, which cannot be enforced")
    draft.out.pop("additionalProperties", None)
    draft.closing = LEFT_OPEN


def _close(draft: Draft) -> None:
    if draft.closing.names is None:
        return
    properties = draft.out.get("properties", {})
    added = draft.closing.names - properties.keys()
    if not draft.room.takes(["additionalProperties", added]):  # no room: the object stays open
        if "unevaluatedProperties" in draft.given:
            draft.drop("unevaluatedProperties", TOO_LONG)
        return
    draft.out["properties"] = properties
    for name in sorted(added):
        properties[name] = True
    draft.out["additionalProperties"] = False


def _is_only(keyword: str, schema: Mapping[str, Any]) -> bool:
    return schema.keys() - ANNOTATIONS == {keyword}


def _pattern_of(names: Draft) -> str | None:
    """A schema of strings as a single pattern, or None."""
    if names.extra or "format" in names.out:
        return None
    least, most = names.out.get("minLength", 0), names.out.get("maxLength")
    if "pattern" not in names.out:
        return f"^(?s:.{{{least},{'' if most is None else most}}})$"
    return names.out["pattern"] if names.out.keys() <= {"pattern"} else None
