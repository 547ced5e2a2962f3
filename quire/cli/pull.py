"""`quire pull`: download a model and print its path."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quire.cli.terminal import echo, safe
from quire.errors import DownloadFailed
from quire.sizes import file_size
from quire.weights.hub import DEFAULT_MODEL, HubName, Progress, cache_dir, find_cached, find_known, is_path, models_dir
from quire.weights.hub import pull as pull_model


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name from `quire models`, or org/name of the Hugging Face hub; org/name:Q4_K_M for a GGUF file.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download a model even if it will not run here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the bare path.")] = False,
) -> None:
    """Download a model; without a name, the default one. Checks first whether the model runs on this machine."""
    wanted = name or DEFAULT_MODEL
    check_download(wanted, is_forced=force)
    with download_bar(wanted) as progress:
        path = pull_model(wanted, progress)
    echo(json.dumps({"name": wanted, "path": str(path)}) if as_json else str(path))


def check_download(name: str, *, is_forced: bool) -> None:
    """Refuse a model that would not run here, before it is downloaded. Models on this machine are not checked."""
    from quire.cli.pull_check import check, free_disk_bytes

    known, hub_name = find_known(name), None if is_path(name) else HubName.parse(name)
    if known is not None:
        free = free_disk_bytes(cache_dir())
        if free < known.size_bytes and not is_forced and not (models_dir() / known.file_name).is_file():
            size, there = file_size(known.size_bytes), file_size(free)
            raise DownloadFailed(f"{known.name} needs {size}, and {there} are free in {cache_dir()}")
    elif hub_name is not None and find_cached(hub_name) is None and not is_offline():
        echo(check(hub_name, is_forced=is_forced), err=True)


def is_offline() -> bool:
    """Whether the hub's library must not use the network: then only its cache is searched."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def download_bar(name: str) -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal; the path on stdout can be piped."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()  # not before: the library of the hub draws its own bars
        if what not in tasks:
            tasks[what] = bar.add_task(f"{what} {safe(name)}", total=total)
        bar.update(tasks[what], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()
