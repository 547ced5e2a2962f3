"""Checked access to values from untrusted files. Errors contain the file, the field and the value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel

MAX_JSON_BYTES = 16 << 20
NO_NAMES: Mapping[str, str] = {}

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def show(value: object) -> str:
    """Format a value for an error message: short, and on one line, whatever it contains."""
    return _REPR.repr(value)


class Fields:
    """A mapping read by type and range. A null counts as a missing field.

    `names` has the file's own names of fields that other files name as config.json does. Errors contain those.
    """

    def __init__(
        self, source: str, values: Mapping[str, Any], prefix: str = "", names: Mapping[str, str] = NO_NAMES
    ) -> None:
        self.source = source
        self.values = values
        self.prefix = prefix
        self._names = names

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def key(self, name: str) -> str:
        return self._names.get(name, name)

    def get(self, name: str) -> Any:
        return self.values.get(self.key(name))

    def wrong(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix}{self.key(name)} is {show(self.get(name))}: {problem}")

    def require(self, is_right: bool, name: str, problem: str) -> None:
        if not is_right:
            raise self.wrong(name, problem)

    def support(self, is_supported: bool, problem: str) -> None:
        if not is_supported:
            raise UnsupportedModel(f"{self.source}: {problem}")

    def missing(self, name: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix}{self.key(name)} is missing")

    def find_whole(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        self.require(is_whole and low <= value <= high, name, f"not a whole number from {low} to {high}")
        return int(value)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        found = self.find_whole(name, low, high)
        if found is None and default is None:
            raise self.missing(name)
        return found if found is not None else default or 0

    def find_real(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        # Compared before it is converted: an int may be too large for a float. NaN is in no range.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and low <= value <= high and not (above_low and value == low)
        self.require(is_right, name, f"not a number {'above' if above_low else 'from'} {low:g} to {high:g}")
        return float(value)

    def real(
        self, name: str, low: float, high: float, default: float | None = None, *, above_low: bool = False
    ) -> float:
        found = self.find_real(name, low, high, above_low=above_low)
        if found is None and default is None:
            raise self.missing(name)
        return found if found is not None else default or 0.0

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        self.require(value is None or isinstance(value, bool), name, "not true or false")
        return default if value is None else bool(value)

    def find_text(self, name: str) -> str | None:
        value = self.get(name)
        self.require(value is None or isinstance(value, str), name, "not a string")
        return None if value is None else str(value)

    def table(self, name: str) -> Fields:
        """Return a nested mapping, empty if it is missing."""
        value = {} if self.get(name) is None else self.get(name)
        self.require(isinstance(value, dict), name, "not an object")
        return Fields(self.source, value, f"{self.prefix}{name}.")

    def find_table(self, name: str) -> Fields:
        """Return a nested mapping, empty if the field is missing or something else."""
        value = self.get(name)
        return Fields(self.source, value if isinstance(value, dict) else {}, f"{self.prefix}{name}.")

    def listed(self, name: str, length: int, what: str) -> list[Any]:
        """Return a list of exactly `length` items, which are not checked."""
        value = self.get(name)
        self.require(isinstance(value, list | tuple) and len(value) == length, name, f"not a list of {length} {what}")
        return list(value)

    def items(self, name: str, values: Sequence[Any]) -> Fields:
        """Return items of a list by the names that errors contain."""
        named = {f"{self.key(name)}[{i}]": item for i, item in enumerate(values)}
        return Fields(self.source, named, self.prefix)

    def flags(self, name: str, length: int) -> list[bool]:
        """Return a list with one entry per layer, true or false, which some files write as 1 or 0."""
        value = self.get(name)
        is_right = isinstance(value, list) and len(value) == length and all(one in (0, 1) for one in value)
        self.require(is_right, name, f"not {length} times true or false")
        return [bool(one) for one in value]

    def reals(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of exactly `length` numbers above `low`."""
        items = self.items(name, self.listed(name, length, "numbers"))
        return tuple(items.real(item, low, high, above_low=True) for item in items.values)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return token ids, given as one id, a list or null."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            return (self.whole(name, 0, vocab_size - 1),)
        self.require(len(value) <= 64, name, "more than 64 ids")
        items = self.items(name, value)
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
    data = read_bounded(path, max_bytes)
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ModelFileError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds {show(value)}: not an object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def member(folder: Path, name: str) -> Path:
    """Return a file of the folder by its bare name. A link may point to the hub cache of the same model only."""
    if not name or name in (".", "..") or any(one in name for one in "/\\\0"):
        raise ModelFileError(f"{folder}: {show(name)} is not a bare file name")
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a cycle of links
        raise ModelFileError(f"{folder}: {show(name)} cannot be read: {error}") from None
    allowed = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        allowed.append(home.parent.parent)
    if not any(real.is_relative_to(root) for root in allowed):
        raise ModelFileError(f"{folder}: {show(name)} is a link that points outside the folder, to {real}")
    if not real.is_file():
        raise ModelFileError(f"{folder}: {show(name)} is not a file")
    return path
