"""Checked access to values from untrusted files. Errors contain the file, the field and the value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError

MAX_JSON_BYTES = 16 << 20

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def show(value: object) -> str:
    """Format a value for an error message: short, and on one line, whatever it contains."""
    return _REPR.repr(value)


class Fields:
    """A mapping read by type and range. A null counts as a missing field."""

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.source = source
        self.values = values
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def wrong(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix}{name} is {show(self.values.get(name))}: {problem}")

    def missing(self, name: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix}{name} is missing")

    def find_whole(self, name: str, low: int, high: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"not a whole number from {low} to {high}")
        return value

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        found = self.find_whole(name, low, high)
        if found is None and default is None:
            raise self.missing(name)
        return found if found is not None else default or 0

    def find_real(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        # Compared before it is converted: an int may be too large for a float. NaN is in no range.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above_low and value == low):
            raise self.wrong(name, f"not a number {'above' if above_low else 'from'} {low:g} to {high:g}")
        return float(value)

    def real(
        self, name: str, low: float, high: float, default: float | None = None, *, above_low: bool = False
    ) -> float:
        found = self.find_real(name, low, high, above_low=above_low)
        if found is not None:
            return found
        if default is None:
            raise self.missing(name)
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "not true or false")
        return value

    def find_text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "not a string")
        return value

    def table(self, name: str) -> Fields:
        """Return a nested mapping, empty if it is missing."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "not an object")
        return Fields(self.source, value, f"{self.prefix}{name}.")

    def reals(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of exactly `length` numbers above `low`."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.wrong(name, f"not a list of {length} numbers")
        items = Fields(self.source, {f"{name}[{i}]": item for i, item in enumerate(value)}, self.prefix)
        return tuple(items.real(item, low, high, above_low=True) for item in items.values)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return token ids, given as one id, a list or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            return (self.whole(name, 0, vocab_size - 1),)
        if len(value) > 64:
            raise self.wrong(name, "more than 64 ids")
        items = Fields(self.source, {f"{name}[{i}]": item for i, item in enumerate(value)}, self.prefix)
        return tuple(dict.fromkeys(items.whole(item, 0, vocab_size - 1) for item in items.values))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a whole file, or raise if it is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise ModelFileError(f"{path}: is larger than {max_bytes} bytes")
    return data


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object; other values are refused."""
    return parse_json(read_bounded(path, max_bytes), str(path))


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ModelFileError(f"{source}: is nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{source}: is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{source}: holds {show(value)}: not an object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
