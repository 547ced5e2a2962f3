"""`quire models`: the models on this machine, and models that can be pulled and run on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import terminal
from quire.cli.backend_fit import find_backend_problem, read_config
from quire.cli.families import family_rows
from quire.cli.machine_fit import Fit, read_memory
from quire.cli.suggestions import AGENT_CONTEXT, Suggestion, suggest
from quire.cli.terminal import echo
from quire.sizes import file_size
from quire.weights.hub import KNOWN_MODELS, LocalModel, local_models

if TYPE_CHECKING:
    from rich.console import Console


def models(
    families: Annotated[
        bool, typer.Option("--families", help="List the model families that run, and nothing else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the models on this machine with sizes and paths, and suggest models that run on it."""
    if families:
        echo(json.dumps({"families": family_rows()}, indent=2)) if as_json else _print_families()
        return
    here = [_with_problem(model) for model in local_models()]
    names = {model.name for model in here if not model.problem}
    suggested = suggest(read_memory(), names)
    if as_json:
        echo(json.dumps(_document(here, names, suggested), indent=2))
    else:
        _print_tables(here, names, suggested)


def _print_families() -> None:
    from rich.table import Table

    console = terminal.console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("FAMILY", "MODELS", "TOOLS", "REASONING"):
        table.add_column(head, overflow="fold")
    for row in family_rows():
        table.add_row(row["family"], row["models"], row["tools"], row["reasoning"] or "")
    console.print(table)
    console.print(
        "\nEach runs on the native and torch backends, from safetensors and GGUF files. The mlx backend runs the models"
        "\nof mlx-lm. Other decoders run through transformers on the torch backend: `quire doctor PATH` says which.",
    )


def _with_problem(model: LocalModel) -> LocalModel:
    """The model, with a problem if the backend of this machine does not run it."""
    problem = model.problem or find_backend_problem(model.unsupported, read_config(model.path))
    return replace(model, problem=problem)


def _document(here: list[LocalModel], names: set[str], suggested: list[tuple[Suggestion, Fit]]) -> dict[str, object]:
    return {
        "local": [{**asdict(model), "path": str(model.path)} for model in here],
        "known": [{**asdict(model), "is_local": model.name in names} for model in KNOWN_MODELS.values()],
        "suggested": [
            {**asdict(one), "size_bytes": one.size_bytes, "device": place.device} for one, place in suggested
        ],
    }


def _print_tables(here: list[LocalModel], names: set[str], suggested: list[tuple[Suggestion, Fit]]) -> None:
    from rich.text import Text

    console = terminal.console()
    _print_local(console, here)
    missing = [known for known in KNOWN_MODELS.values() if known.name not in names]
    if missing or suggested:
        if names:
            console.print()
        console.print(Text("Can be pulled and runs here:"))
        rows = [(one.name, "gguf", "", file_size(one.size_bytes), "") for one in missing]
        rows += [
            (one.name, one.family, one.type, file_size(one.size_bytes), f"{one.max_model_len:,}")
            for one, _ in suggested
        ]
        _print_rows(console, ("quire pull ...", "family", "type", "size", "context"), rows)
    if suggested:
        console.print(Text(f"Coding agents need at least {AGENT_CONTEXT:,} tokens of context, and KV memory for them."))


def _print_local(console: Console, here: list[LocalModel]) -> None:
    from rich.text import Text

    rows = [
        (model.name, model.architecture, model.quantization, file_size(model.size_bytes), short_path(model.path))
        for model in here
        if not model.problem
    ]
    if rows:
        _print_rows(console, ("name", "architecture", "type", "size", "path"), rows)
    for model in here:
        if model.problem:
            console.print(Text(f"{model.name}: {model.problem} ({short_path(model.path)})"))


def _print_rows(console: Console, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column in ("size", "context")
        settings: dict[str, Any] = {"justify": "right", "no_wrap": True} if is_number else {"overflow": "fold"}
        table.add_column(column, **settings)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def short_path(path: Path) -> str:
    """The path with ~ for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else str(path)
