"""Reads Prometheus' text format, the format of a server's /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r'([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def read_exposition(text: str) -> Iterator[Sample]:
    """All samples. Lines in another format are skipped."""
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2] or "")}
        try:
            yield Sample(found[1], labels, float(found[3]))
        except ValueError:
            continue


def total(samples: list[Sample], name: str, **labels: str) -> float | None:
    """The sum of all series of a name with these labels; None if there are none."""
    found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    return sum(found) if found else None


def _unescaped(value: str) -> str:
    return re.sub(r"\\[\\\"n]", lambda found: _ESCAPES[found[0]], value)
