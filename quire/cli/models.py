"""`quire models`: what is on this machine, and what can be pulled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from quire.sizes import file_size
from quire.weights.hub import KNOWN_MODELS, LocalModel, local_models


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the models on this machine and the ones that can be pulled by name."""
    here = local_models()
    if as_json:
        typer.echo(json.dumps(_document(here), indent=2))
    else:
        _print_table(here)


def _document(here: list[LocalModel]) -> dict[str, object]:
    names = {model.name for model in here if not model.problem}
    return {
        "local": [{**asdict(model), "path": str(model.path)} for model in here],
        "known": [{**asdict(model), "is_local": model.name in names} for model in KNOWN_MODELS.values()],
    }


def _print_table(here: list[LocalModel]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a file has room for long names
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "format", "type", "architecture"):
        table.add_column(column, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for model in here:
        if not model.problem:
            row = [model.name, model.format, model.quantization, model.architecture, file_size(model.size_bytes)]
            table.add_row(*(Text(cell) for cell in row))
    names = {model.name for model in here if not model.problem}
    for known in KNOWN_MODELS.values():
        if known.name not in names:
            row = [known.name, "gguf", "", f"not here: quire pull {known.name}", file_size(known.size_bytes)]
            table.add_row(*(Text(cell, style="dim") for cell in row))
    console.print(table)
    for model in here:
        if model.problem:
            console.print(Text(f"{model.name}: {model.problem}"))
