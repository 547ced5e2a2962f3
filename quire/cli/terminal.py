"""Text for the terminal: messages, answers, tables, progress bars.

Names, messages and metadata of files, templates and servers cannot control the terminal.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quire.engine.process import escaped
from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

KEPT = "\n\t"  # control characters that texts of several lines and columns have
# A model must not move the cursor or set colours of a terminal: of control characters, only \n and \t are printed.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in KEPT}


def safe(text: str) -> str:
    """The text with its control characters as in JSON: ESC as \\u001b. Line ends and tabs stay."""
    return escaped(text, KEPT)


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a message or facts to stdout, or to stderr. Answers of models are written by `AnswerWriter`."""
    typer.echo(safe(text), nl=nl, err=err)


def confirm_deletion(what: str, question: str, *, is_confirmed: bool) -> None:
    """Ask before something is deleted, unless the user gave --yes."""
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest(f"deleting {what} needs --yes: standard input is not a terminal")
    if not typer.confirm(safe(question)):
        raise typer.Exit(1)


def short_path(path: Path) -> str:
    """The path with ~ for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else str(path)


class AnswerWriter:
    """Writes answers to stdout without delay, and reasoning to stderr if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_stderr_terminal = sys.stderr.isatty()
        self._is_dumb = os.environ.get("TERM") == "dumb"  # would print the codes for dim text
        self._is_line_open = self._is_thought_open = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for characters that the encoding of the terminal lacks

    def think(self, text: str) -> None:
        """Write reasoning, dimmed, to stderr if that is a terminal."""
        if text and self._is_stderr_terminal:
            self._is_thought_open = True
            text = text.translate(_CONTROLS)
            typer.echo(text if self._is_dumb else typer.style(text, dim=True), nl=False, err=True)

    def say(self, text: str) -> None:
        if text:
            self._end_thought()
            self._is_line_open = not text.endswith("\n")  # before the flush, after which Ctrl-C may interrupt
            sys.stdout.write(text.translate(_CONTROLS) if self._is_terminal else text)
            sys.stdout.flush()

    def end_line(self) -> None:
        self._end_thought()
        if self._is_line_open:
            self.say("\n")

    def _end_thought(self) -> None:
        if self._is_thought_open:
            self._is_thought_open = False
            typer.echo("", err=True)


# Tables


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Container[str], gap: int = 2, **style: Any
) -> Table:
    """A table without lines. Columns that are not in `texts` have numbers, which are never divided."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, padding=(0, gap, 0, 0), **style)
    for column in columns:
        is_text = column in texts
        found.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        found.add_row(*(Text(safe(cell)) for cell in row))
    return found


def show(*parts: str | Table, file_width: int = 200) -> None:
    """Print texts and tables to stdout, as wide as the terminal. A file has room for long names."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=file_width)
    for part in parts:
        console.print(safe(part) if isinstance(part, str) else part)


# Progress bars


def make_bar(*columns: str, is_transient: bool = True) -> Progress:
    """A progress bar on stderr: a description, the bar and the named columns, which are below or fields of the task."""
    from rich import progress
    from rich.console import Console

    kinds: dict[str, Callable[[], ProgressColumn]] = {
        "count": progress.MofNCompleteColumn,
        "bytes": progress.DownloadColumn,
        "speed": progress.TransferSpeedColumn,
        "left": progress.TimeRemainingColumn,
        "passed": progress.TimeElapsedColumn,
    }
    shown = [progress.TextColumn("{task.description}", markup=False), progress.BarColumn()]
    shown += [
        kinds[name]() if name in kinds else progress.TextColumn(f"{{task.fields[{name}]}}", markup=False)
        for name in columns
    ]
    return progress.Progress(*shown, console=Console(stderr=True), transient=is_transient)


@contextmanager
def progress_bar(what: str, *columns: str, total: int | None = None) -> Iterator[Callable[..., object]]:
    """A progress bar on stderr if that is a terminal. Yields `rich.progress.Progress.update` of its task.

    Without a text it is drawn with the first update: the library of the hub may draw its own bars instead.
    """
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    bar = make_bar(*columns)
    task = bar.add_task(safe(what), total=total)
    if what:
        bar.start()

    def update(**fields: Any) -> None:
        bar.start()
        bar.update(task, **fields)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def bytes_bar(what: str, *columns: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes that are read or written, of a total that is known later."""
    with progress_bar(what, "bytes", *columns) as update:

        def show(done: int, total: int) -> None:
            update(completed=done, total=total)

        yield show


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar for the files of a model, of which one is downloaded at a time. None: not at a terminal.

    Without a function to call, the library of the hub draws no bars either.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with progress_bar("", "bytes", "speed", "left") as update:

        def show(what: str, done: int, total: int) -> None:
            update(completed=done, total=total, description=f"{what} {safe(name)}")

        yield show
