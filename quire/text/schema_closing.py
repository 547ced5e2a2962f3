"""Which objects of a JSON schema are closed: those that list properties and do not speak of others. Pure.

A value may have several schemas at once (`allOf`, `$ref`, the branches of `anyOf`), and a name that one of them lists
is no invented name for the others. So names are collected over all schemas of a value before one of them is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from quire.text.schema_refs import Place, References

_BRANCHES = ("anyOf", "oneOf")
_PARTS = ("allOf", "$ref", "if", "then", "else", "dependentSchemas", "dependencies")  # other schemas of the same value
_NAMES_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")

_SPEAKS_OF_NAMES = frozenset((*_PARTS, *_BRANCHES, "properties", "unevaluatedProperties"))
MAX_COPIES = 10_000  # of names, where every branch lists those of the others


class Closing(NamedTuple):
    """How one schema is closed."""

    names: frozenset[str] | None  # it has these properties and no others; None: it is left as it is
    for_branches: frozenset[str] | None  # what its branches may have besides their own; None: they are left as they are


LEFT_OPEN = Closing(None, None)


class _Listed(NamedTuple):
    """What schemas of one value say about the names of its properties."""

    names: frozenset[str] = frozenset()
    has_properties: bool = False
    is_stated: bool = False  # whether there may be others

    def joined(self, other: _Listed) -> _Listed:
        return _Listed(
            self.names | other.names,
            self.has_properties or other.has_properties,
            self.is_stated or other.is_stated,
        )


class PropertyNames:
    def __init__(self, references: References) -> None:
        self._references = references

    def closing(self, place: Place, outer: frozenset[str] | None) -> Closing:
        """`outer`: names that schemas of the same value list. None: those see to it that the object is closed."""
        schema = place.schema
        if not outer and schema.keys().isdisjoint(_SPEAKS_OF_NAMES):
            return LEFT_OPEN
        own = self._listed_by(place, is_own=True)
        branches = {key: self._listed_in(place, (key,)) for key in _BRANCHES if key in schema}
        if _is_explicit(schema):
            if not own.is_stated and all(one.names <= own.names and not one.is_stated for one in branches.values()):
                return Closing(own.names, None)
            return LEFT_OPEN
        if outer is None or own.is_stated or "unevaluatedProperties" in schema:
            return LEFT_OPEN
        names = outer | own.names
        adding = [key for key, listed in branches.items() if not listed.names <= names or listed.is_stated]
        if len(adding) == 1 and len(names) * len(self.parts(place, adding[0])) <= MAX_COPIES:
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
        """Properties that several schemas of the value describe: one that is closed would exclude the others."""
        if place.schema.keys().isdisjoint((*_PARTS, *_BRANCHES)) and not outer:
            return frozenset()
        properties = place.schema.get("properties")
        groups = [outer or frozenset(), frozenset(properties if isinstance(properties, Mapping) else ())]
        groups += [self._listed_by(part).names for keyword in _PARTS for part in self.parts(place, keyword)]
        groups += [self._listed_in(place, (keyword,)).names for keyword in _BRANCHES]
        counts = Counter(name for group in groups for name in group)
        return frozenset(name for name, count in counts.items() if count > 1)

    def is_whole(self, place: Place) -> bool:
        """Whether no other schema of the same value lists properties."""
        return not self._listed_in(place, (*_PARTS, *_BRANCHES)).names

    def _listed_by(self, place: Place, *, is_own: bool = False, seen: set[str] | None = None) -> _Listed:
        """`seen`: places that were looked at already, for references may lead in circles."""
        schema = place.schema
        seen = set() if seen is None else seen
        if not isinstance(schema, Mapping) or place.path in seen:
            return _Listed()
        seen.add(place.path)
        properties, required = schema.get("properties"), schema.get("required")
        names = list(properties) if isinstance(properties, Mapping) else []
        names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        others = _NAMES_OTHERS if not is_own else ("additionalProperties", "propertyNames")
        listed = _Listed(frozenset(names), "properties" in schema, any(key in schema for key in others))
        parts = _PARTS if is_own else (*_PARTS, *_BRANCHES)
        return listed.joined(self._listed_in(place, parts, seen))

    def _listed_in(self, place: Place, keywords: tuple[str, ...], seen: set[str] | None = None) -> _Listed:
        listed = _Listed()
        seen = {place.path} if seen is None else seen
        for keyword in keywords:
            if keyword not in place.schema:
                continue
            for part in self.parts(place, keyword):
                listed = listed.joined(self._listed_by(part, seen=seen))
        return listed

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


def _is_explicit(schema: Mapping[str, object]) -> bool:
    """Whether it says itself that names which no schema of the value lists are forbidden."""
    return (
        schema.get("unevaluatedProperties") is False
        and "additionalProperties" not in schema
        and not any(key in schema for key in ("if", "dependentSchemas", "dependencies", "not"))
    )
