"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.cli import terminal
from quire.cli.server_client import printable


def print_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table without lines; columns of numbers come last."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    terminal.console().print(table)
