"""Decodes bodies, queries and stored files into types whose decoders are built at import.

msgspec builds the type information of a Struct at its first use, and publishes it before it is complete: a second
thread that decodes the same type at that moment reads a null pointer, and the process ends (decision 0044). Therefore
a type is decoded only after `build_decoders`, which a module calls when it is imported, before there are threads.

`unknown_fields` finds fields of a body that its type does not define, at any depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T", bound=msgspec.Struct)

_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}


def build_decoders(*kinds: type[msgspec.Struct]) -> None:
    """Build the decoders of these types, with the type information of all types in their fields."""
    for kind in kinds:
        _decoders[kind] = msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON. May be called in any thread. Raises msgspec's errors."""
    value: T = _decoder(kind).decode(data)
    return value


def convert(values: Mapping[str, str], kind: type[T]) -> T:
    """Convert texts, such as query parameters. May be called in any thread. Raises msgspec's errors."""
    _decoder(kind)  # raises for an unknown type
    return msgspec.convert(values, kind, strict=False)


def built_types() -> frozenset[type[msgspec.Struct]]:
    return frozenset(_decoders)


def _decoder(kind: type[T]) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        raise TypeError(f"{kind.__qualname__} has no decoder: call build_decoders where the type is defined")
    return _decoders[kind]


def unknown_fields(value: Any, kind: type[msgspec.Struct]) -> dict[str, list[str]]:
    """Return the paths of unknown fields, such as `messages[2].cache_control`.

    The keys are paths without numbers, `messages[].cache_control`. The values are the first occurrence, and for
    tools every occurrence, because a tool may be ignored as a whole.
    """
    found: dict[str, list[str]] = {}
    _walk(value, _shape(kind), "", found)
    return found


_NUMBER = re.compile(r"\[\d+\]")
Shape = dict[str, Any]  # field -> the shape of the structs in it, or None; "[]": the shape of a list's items


def _walk(value: Any, shape: Shape | None, path: str, found: dict[str, list[str]]) -> None:
    if shape is None:
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            _walk(item, shape.get("[]"), f"{path}[{i}]", found)
    elif isinstance(value, dict) and "{}" in shape:
        fields = shape["{}"]
        for name, item in value.items():
            full = f"{path}.{name}" if path else name
            if name not in fields:
                places = found.setdefault(_NUMBER.sub("[]", full), [])
                if not places or full.startswith("tools["):
                    places.append(full)
            elif fields[name] is not None:
                _walk(item, fields[name], full, found)


@lru_cache(maxsize=64)
def _shape(kind: type[msgspec.Struct]) -> Shape | None:
    return _shape_of(inspect.type_info(kind))


def _shape_of(node: inspect.Type) -> Shape | None:
    """{"{}": fields} for a struct, {"[]": items} for a list, both for a union of them; None: no struct in it."""
    match node:
        case inspect.Metadata(type=inner):
            return _shape_of(inner)
        case inspect.StructType():
            fields = {field.encode_name: _shape_of(field.type) for field in node.fields}
            if node.tag_field is not None:
                fields[node.tag_field] = None
            return {"{}": fields}
        case inspect.ListType(item_type=item):
            inner_shape = _shape_of(item)
            return None if inner_shape is None else {"[]": inner_shape}
        case inspect.UnionType(types=types):
            merged: Shape = {}
            for one in types:
                merged |= _shape_of(one) or {}
            return merged or None
        case _:
            return None
