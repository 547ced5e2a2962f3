"""Decides which objects of a JSON schema are closed: those that list properties and do not mention others. Pure.

Several schemas may apply to one value (`allOf`, `$ref`, the branches of `anyOf`), and a name listed by one of them is
allowed by the others. Therefore names are collected over all schemas of a value before any of them is closed. If that
takes too many steps, the object stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.text.schema_logic import Budget
from quire.text.schema_refs import Place, References

_BRANCHES = ("anyOf", "oneOf")
_PARTS = ("allOf", "$ref", "if", "then", "else", "dependentSchemas", "dependencies")  # apply to the same value
_NAMES_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_OWN_OTHERS = ("additionalProperties", "propertyNames")  # limit the unlisted names of a schema

_SPEAKS_OF_NAMES = frozenset((*_PARTS, *_BRANCHES, "properties", "unevaluatedProperties"))
_LISTS_NAMES = frozenset((*_PARTS, *_BRANCHES, *_NAMES_OTHERS, "properties", "required"))
MAX_COPIES = 10_000  # of names, which are copied into every branch


class Closing(NamedTuple):
    """How one schema is closed."""

    names: frozenset[str] | None  # the only allowed properties; None: unchanged
    for_branches: frozenset[str] | None  # properties allowed in its branches besides their own; None: unchanged
    is_known: bool = True  # False: unchanged because the analysis takes too many steps


LEFT_OPEN = Closing(None, None)
UNKNOWN = Closing(None, None, is_known=False)


class _Listed(NamedTuple):
    """Property names listed by the schemas of one value."""

    names: frozenset[str] = frozenset()
    has_properties: bool = False
    is_stated: bool = False  # whether a schema states if others are allowed

    @classmethod
    def by_all(cls, listed: Sequence[_Listed]) -> _Listed:
        return cls(
            frozenset().union(*(one.names for one in listed)),
            any(one.has_properties for one in listed),
            any(one.is_stated for one in listed),
        )


class _TooManySteps(Exception):
    pass


class PropertyNames:
    def __init__(self, references: References) -> None:
        self._references = references
        self._budget = Budget()  # once it is exhausted, no further object is closed
        # Keyed by the id of a schema and its base. The value holds the schema, so that its id is not reused.
        self._known: dict[tuple[int, str], tuple[Mapping[str, Any], _Listed]] = {}
        self._seen: set[tuple[int, str]] = set()  # visited since the outermost schema
        self._is_partial = False  # a visited schema was reached again: results in between are incomplete

    def closing(self, place: Place, outer: frozenset[str] | None) -> Closing:
        """How to close a schema.

        `outer`: names listed by enclosing schemas of the same value. None: those schemas close the object.
        """
        schema = place.schema
        if not outer and schema.keys().isdisjoint(_SPEAKS_OF_NAMES):
            return LEFT_OPEN
        if not schema.keys().isdisjoint(_OWN_OTHERS) or (outer is None and not _is_explicit(schema)):
            return LEFT_OPEN
        try:
            return self._closing(place, outer)
        except _TooManySteps:
            return UNKNOWN

    def _closing(self, place: Place, outer: frozenset[str] | None) -> Closing:
        schema = place.schema
        self._take()
        own = _Listed.by_all([_own_listed(schema, _OWN_OTHERS), *self._listed_in(place, _PARTS)])
        branches = {key: _Listed.by_all(self._listed_in(place, (key,))) for key in _BRANCHES if key in schema}
        if _is_explicit(schema):
            if not own.is_stated and all(one.names <= own.names and not one.is_stated for one in branches.values()):
                return Closing(own.names, None)
            return LEFT_OPEN
        if outer is None or own.is_stated or "unevaluatedProperties" in schema:
            return LEFT_OPEN
        names = outer | own.names
        self._take(len(names))
        adding = [key for key, listed in branches.items() if not listed.names <= names or listed.is_stated]
        if len(adding) == 1 and (num_copies := len(names) * len(self.parts(place, adding[0]))) <= MAX_COPIES:
            self._take(num_copies)
            return Closing(None, names)
        if adding:
            if any(one.is_stated for one in branches.values()):
                return LEFT_OPEN
            names |= frozenset().union(*(one.names for one in branches.values()))
        has_properties = own.has_properties or bool(outer) or any(one.has_properties for one in branches.values())
        least = schema.get("minProperties")
        is_too_small = isinstance(least, int | float) and least > len(names)
        return Closing(names if has_properties and not is_too_small else None, None)

    def shared(self, place: Place, outer: frozenset[str] | None) -> frozenset[str]:
        """Properties that several schemas of the value describe. Closing one would exclude names of the others."""
        if place.schema.keys().isdisjoint((*_PARTS, *_BRANCHES)) and not outer:
            return frozenset()
        properties = place.schema.get("properties")
        groups = [outer or frozenset(), frozenset(properties if isinstance(properties, Mapping) else ())]
        try:
            self._take(sum(map(len, groups)))
            groups += [listed.names for listed in self._listed_in(place, _PARTS)]
            groups += [_Listed.by_all(self._listed_in(place, (keyword,))).names for keyword in _BRANCHES]
        except _TooManySteps:
            return frozenset()  # no object will be closed
        counts = Counter(name for group in groups for name in group)
        return frozenset(name for name, count in counts.items() if count > 1)

    def is_whole(self, place: Place) -> bool:
        """Whether certainly no other schema of the same value lists properties."""
        if place.schema.keys().isdisjoint((*_PARTS, *_BRANCHES)):
            return True
        try:
            return not any(listed.names for listed in self._listed_in(place, (*_PARTS, *_BRANCHES)))
        except _TooManySteps:
            return False

    def _take(self, num_names: int = 0) -> None:
        if not self._budget.take(num_values=num_names):
            raise _TooManySteps

    def _listed_by(self, place: Place) -> _Listed:
        """Names listed by a schema. In a cycle of references the outermost schema gets the names of all."""
        schema = place.schema
        if not isinstance(schema, Mapping) or schema.keys().isdisjoint(_LISTS_NAMES):
            return _Listed()
        key = (id(schema), place.base)
        if key in self._known:
            return self._known[key][1]
        if key in self._seen:
            self._is_partial = True
            return _Listed()
        is_outermost = not self._seen
        self._seen.add(key)
        try:
            inner = self._listed_in(place, (*_PARTS, *_BRANCHES))
            listed = _Listed.by_all([_own_listed(schema, _NAMES_OTHERS), *inner])
            if is_outermost or not self._is_partial:
                self._known[key] = schema, listed
        finally:
            if is_outermost:
                self._seen.clear()
                self._is_partial = False
        return listed

    def _listed_in(self, place: Place, keywords: tuple[str, ...]) -> list[_Listed]:
        """Names listed by each schema under these keywords, all of the same value."""
        found: list[_Listed] = []
        for keyword in keywords:
            if keyword not in place.schema:
                continue
            for part in self.parts(place, keyword):
                found.append(self._listed_by(part))
                self._take(len(found[-1].names))
        return found

    def parts(self, place: Place, keyword: str) -> list[Place]:
        """Schemas of the same value under a keyword."""
        value = place.schema.get(keyword)
        if keyword == "$ref":
            found = self._references.find(value, place.base) if isinstance(value, str) else None
            return [] if found is None else [found]
        if keyword in ("if", "then", "else"):
            return [] if value is None else [place.child(keyword)]
        if isinstance(value, Mapping):
            return [place.child(keyword, name) for name in value]
        return [place.child(keyword, i) for i in range(len(value))] if isinstance(value, list) else []


def _own_listed(schema: Mapping[str, Any], others: tuple[str, ...]) -> _Listed:
    """Names listed by the schema itself. `others`: keywords that describe unlisted names."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return _Listed(frozenset(names), "properties" in schema, any(key in schema for key in others))


def _is_explicit(schema: Mapping[str, object]) -> bool:
    """Whether the schema itself forbids names that no schema of the value lists."""
    return (
        schema.get("unevaluatedProperties") is False
        and "additionalProperties" not in schema
        and not any(key in schema for key in ("if", "dependentSchemas", "dependencies", "not"))
    )
