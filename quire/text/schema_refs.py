"""Resolves references within a JSON schema: pointers, anchors and ids. Fetches nothing. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

MAX_ADDRESS_CHARS = 2_000  # of an $id or a $ref
MAX_ADDRESS_STEPS = 32  # slashes of an address: joining two addresses takes time per slash
_NOWHERE = "nowhere:"  # replaces addresses that are too long; never resolved

_VALUES = frozenset(("const", "enum", "default", "examples"))  # contain values, not schemas


class Place(NamedTuple):
    """A subschema and its location in the given schema."""

    schema: Any
    path: str  # as in errors and headers: properties.email, anyOf[1]
    base: str  # the base address of its references

    def child(self, *keys: str | int) -> Place:
        schema, path, base = self
        for key in keys:
            schema = schema[key]
            path = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key
            base = _base(schema, base)
        return Place(schema, path, base)

    def at(self, keyword: str) -> str:
        return f"{self.path}.{keyword}" if self.path else keyword


class References:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = Place(root, "", _base(root, ""))
        self._found: dict[tuple[str, str], Place | None] = {}
        self._documents: dict[str, Place] = {"": self.root, self.root.base: self.root}
        self._anchors: dict[str, Place] = {}
        self._has_old_ids = False  # ids of drafts 4 to 7 that are not resolved
        self._is_scanned = False  # a schema without references needs no scan

    def _scan(self) -> None:
        self._is_scanned = True
        level = [self.root]
        while level:  # level by level, so that depth needs no stack
            for place in level:
                self._note(place)
            level = [child for place in level for child in _children(place)]

    def find(self, reference: str, base: str) -> Place | None:
        key = (reference, base)
        if not self._is_scanned:
            self._scan()
        if key not in self._found:
            self._found[key] = self._find(reference, base)
        return self._found[key]

    def is_dangling(self, reference: str, base: str) -> bool:
        """Whether a reference that was not found names a part of this schema, and not another document."""
        try:
            address, _ = _joined(base, reference)
        except ValueError:
            return False
        return address in self._documents and address != _NOWHERE and not self._has_old_ids

    def _find(self, reference: str, base: str) -> Place | None:
        try:
            address, fragment = _joined(base, reference)
        except ValueError:
            return None
        if address == _NOWHERE:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{address}#{fragment}")
        place = self._documents.get(address)
        try:
            for step in fragment.split("/")[1:] if place is not None else ():
                assert place is not None
                name = unquote(step).replace("~1", "/").replace("~0", "~")
                place = place.child(_index(name) if isinstance(place.schema, list) else name)
        except (LookupError, TypeError, ValueError):
            return None
        return place

    def _note(self, place: Place) -> None:
        if not isinstance(place.schema, Mapping):
            return
        if isinstance(place.schema.get("$id"), str):
            self._documents.setdefault(place.base, place)
        self._has_old_ids |= isinstance(place.schema.get("id"), str) or str(place.schema.get("$id")).startswith("#")
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := place.schema.get(keyword), str):
                self._anchors.setdefault(f"{place.base}#{anchor}", place)


def _index(name: str) -> int:
    """The number in a pointer to an item of a list. Python's `int` also reads signs, spaces and other digits."""
    if not (name.isascii() and name.isdigit()):
        raise ValueError
    return int(name)


def _base(schema: Any, base: str) -> str:
    address = schema.get("$id") if isinstance(schema, Mapping) else None
    if not isinstance(address, str):
        return base
    try:
        return _joined(base, address)[0]
    except ValueError:
        return base


def _joined(base: str, reference: str) -> tuple[str, str]:
    """An address and its fragment; _NOWHERE if too long. Raises ValueError if it is invalid."""
    is_long = len(reference) > MAX_ADDRESS_CHARS or reference.partition("#")[0].count("/") > MAX_ADDRESS_STEPS
    return (_NOWHERE, "") if is_long or base == _NOWHERE else _joined_short(base, reference)


@functools.lru_cache(maxsize=4096)
def _joined_short(base: str, reference: str) -> tuple[str, str]:
    if reference.startswith("#"):  # urljoin drops the base if it is a URN
        return base, reference[1:]
    address, fragment = urldefrag(urljoin(base, reference))
    is_long = len(address) > MAX_ADDRESS_CHARS or address.count("/") > MAX_ADDRESS_STEPS
    return (_NOWHERE, "") if is_long else (address, fragment)


def _children(place: Place) -> list[Place]:
    if isinstance(place.schema, Mapping):
        return [place.child(str(name)) for name in place.schema if name not in _VALUES]
    if isinstance(place.schema, list):
        return [place.child(i) for i in range(len(place.schema))]
    return []
