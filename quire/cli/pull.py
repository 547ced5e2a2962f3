"""`quire pull`: fetch a model, and say where it lies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quire.weights.hub import DEFAULT_MODEL
from quire.weights.hub import pull as pull_model
from quire.weights.wheel import Progress


def pull(
    name: Annotated[
        str | None,
        typer.Argument(help="A model `quire models` lists, or org/name of the hub; org/name:Q4_K_M for a GGUF in it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the bare path.")] = False,
) -> None:
    """Fetch a model so that it can be served; with no name, the default one."""
    wanted = name or DEFAULT_MODEL
    with download_bar(wanted) as progress:
        path = pull_model(wanted, progress)
    typer.echo(json.dumps({"name": wanted, "path": str(path)}) if as_json else str(path))


@contextmanager
def download_bar(name: str) -> Iterator[Progress | None]:
    """A bar on stderr, so that the path can be piped; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()  # only now: the hub draws bars of its own
        if what not in tasks:
            tasks[what] = bar.add_task(f"{what} {name}", total=total)
        bar.update(tasks[what], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()
