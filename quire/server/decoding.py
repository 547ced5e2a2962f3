"""Decodes bodies, queries and stored files into types whose decoders are built at import.

msgspec builds the type information of a Struct at its first use, and publishes it before it is complete: a second
thread that decodes the same type at that moment reads a null pointer, and the process ends (decision 0044). Therefore
a type is decoded only after `build_decoders`, which a module calls when it is imported, before there are threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

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
