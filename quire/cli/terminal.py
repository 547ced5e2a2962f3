"""Text for the terminal. Names, messages and metadata of files, templates and servers cannot control it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from quire.engine.worker.log_lines import escaped

if TYPE_CHECKING:
    from rich.console import Console

KEPT = "\n\t"  # control characters that texts of several lines and columns have


def safe(text: str) -> str:
    """The text with its control characters as in JSON: ESC as \\u001b. Line ends and tabs stay."""
    return escaped(text, KEPT)


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a message or facts to stdout, or to stderr. Answers of models are written by `AnswerWriter`."""
    typer.echo(safe(text), nl=nl, err=err)


def confirm(question: str) -> bool:
    """Ask for y or n at the terminal."""
    return typer.confirm(safe(question))


def console(file_width: int = 200) -> Console:
    """A console for tables and texts, which are escaped. A file has room for long names."""
    from rich.console import Console, RenderHook
    from rich.segment import Segment

    class Escaped:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __rich_console__(self, console: Console, options: Any) -> Iterator[Segment]:
            for one in console.render(self._inner, options):
                yield one if one.control else Segment(safe(one.text), one.style)

    class Hook(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [Escaped(one) for one in renderables]

    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found = Console(highlight=False, markup=False, width=file_width)
    found.push_render_hook(Hook())
    return found
