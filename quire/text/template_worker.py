"""Renders a chat template, which is untrusted code, in a process of its own (`quire/text/limited_child.py`).

Jinja's sandbox restricts access, but does not prevent endless loops or memory exhaustion, and unlike a thread a process
can be killed. Imports no quire modules.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 4 * 1024 * 1024


class Refusal(TemplateError):
    """The template called raise_exception: it does not accept the conversation."""


class OutputTooLong(TemplateError):
    pass


class GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training. Rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: object) -> None:
    raise Refusal(str(message))


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML: models are not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """Set up as in transformers, which templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


class Worker:
    def __init__(self) -> None:
        self._environment = environment()
        self._template: jinja2.Template | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        return self._load(order["source"]) if "source" in order else {"text": self._render(order["variables"])}

    def _load(self, source: str) -> dict[str, Any]:
        names = meta.find_undeclared_variables(self._environment.parse(source))
        self._template = self._environment.from_string(source)
        return {"variables": sorted(names)}

    def _render(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(**variables):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise OutputTooLong(f"its text is longer than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # a lone surrogate must fail here, not later
        return text
