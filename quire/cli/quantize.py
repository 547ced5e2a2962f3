"""`quire quantize`: write a copy of a model with weights of fewer bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.models import short_path
from quire.cli.terminal import echo, safe
from quire.errors import InvalidRequest
from quire.sizes import file_size
from quire.weights.hub import resolve
from quire.weights.quantizing import FORMATS, GROUP_SIZES, Progress, quantize_folder

DEFAULT_FORMAT = "fp8"
DEFAULT_GROUP_SIZE = 128


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder of safetensors, or a downloaded model that has one.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write. It must not exist.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="fp8: blocks of 128 x 128; fp8-channel: a scale per output, faster on a GPU; w4a16, w8a16: 4"
            " or 8 bits in groups; w4a16-asym: 4 bits with zero points.",
        ),
    ] = DEFAULT_FORMAT,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Weights that share a scale, for w4a16, w4a16-asym and w8a16: 32, 64 or 128. Default: 128.",
        ),
    ] = None,
) -> None:
    """Write a copy of a model with quantised weights, in the layout of compressed-tensors, which vLLM reads too.

    Weights are rounded to the nearest code, without calibration. Norms, embeddings, head and routers stay as they are.
    """
    if form not in FORMATS:
        raise InvalidRequest(f"--format {form}: not one of {', '.join(FORMATS)}")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise InvalidRequest(f"--group-size {group_size}: not one of {', '.join(map(str, GROUP_SIZES))}")
    if group_size is not None and not FORMATS[form].is_grouped:
        raise InvalidRequest(f"--group-size {group_size}: the format {form} has no groups")
    group_size = group_size or DEFAULT_GROUP_SIZE
    with _bar(target.name) as progress:
        report = quantize_folder(resolve(source), target, form, group_size, progress)
    before, after = file_size(report.num_source_bytes), file_size(report.num_bytes)
    echo(f"{short_path(target)}: {report.num_matrices:,} matrices quantised to {form}, {before} -> {after}")


@contextmanager
def _bar(name: str) -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"writing {safe(name)}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
