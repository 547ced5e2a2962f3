"""Writes tool calls in each format, as models do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.tool_formats import Syntax, ToolFormat

QUOTE = '<|"|>'
START = "<|start|>assistant"


def written(format: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """All calls of an answer, with their markers."""
    texts = [one_call(format, name, arguments) for name, arguments in calls]
    if format.syntax is Syntax.HARMONY:
        return START.join(texts)
    if format.is_list:
        return f"{format.opening}[{', '.join(texts)}]{format.closing}"
    between = "" if format.syntax is Syntax.GEMMA else "\n"
    return between.join(f"{format.opening}{format.before}{text}{format.after}{format.closing}" for text in texts)


def one_call(format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    match format.syntax:
        case Syntax.JSON:
            return json.dumps({"name": name, format.arguments: arguments}, ensure_ascii=False)
        case Syntax.XML:
            values = [
                f"<parameter={key}>\n{value if isinstance(value, str) else dumped(value)}\n</parameter>\n"
                for key, value in arguments.items()
            ]
            return f"<function={name}>\n{''.join(values)}</function>"
        case Syntax.GEMMA:
            return f"call:{name}{gemma(dict(arguments))}"
        case Syntax.PYTHON:
            return f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"
        case Syntax.HARMONY:
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return head + dumped(arguments)


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def gemma(value: object) -> str:
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case dict():
            keys = sorted(value, key=str.lower)
            return "{" + ",".join(f"{key}:{gemma(value[key])}" for key in keys) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return dumped(value)


def python(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool) else dumped(value)
