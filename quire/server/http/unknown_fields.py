"""Finds fields of a body that its type does not define, at any depth."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect


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
