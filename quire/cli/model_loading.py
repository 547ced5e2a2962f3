"""Opens the model of a command: on a running server that has it, or in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.chat_model import ChatModel, LocalModel
from quire.cli.options import option_name, options_named
from quire.cli.pull import download_bar
from quire.cli.remote_model import find_server
from quire.cli.server_client import choose_address, chosen_key
from quire.cli.terminal import echo, safe
from quire.errors import ModelNotFound, QuireError
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

if TYPE_CHECKING:
    from quire.engine.llm import LLM


def open_chat_model(
    model: str | None, settings: dict[str, Any], *, server: str | None, api_key: str | None, is_local: bool
) -> ChatModel:
    """The model on a running server that has it, else in this process. Engine settings select this process."""
    address = choose_address(server, is_local=is_local, engine_options=[option_name(name) for name in settings])
    if address is not None:
        remote = find_server(address, model, chosen_key(api_key))
        if remote is not None:
            return remote
    return LocalModel(open_llm(model, settings), model or DEFAULT_MODEL)


def open_llm(model: str | None, settings: dict[str, Any]) -> LLM:
    """Load a model, with a progress bar on a terminal. A known model that is not here is downloaded first."""
    from quire.engine.llm import LLM

    path, name = locate(model), model or DEFAULT_MODEL
    with options_named(), _memory_named(name), loading_bar(name) as progress:
        return LLM(path, progress=progress, **settings)


def locate(name: str | None) -> Path:
    try:
        return resolve(name)
    except ModelNotFound:
        known = find_known(name or DEFAULT_MODEL)
        if known is None:
            raise
    echo(f"{known.name} is not on this machine: downloading it, {known.size_bytes / 1e6:.0f} MB", err=True)
    with download_bar(known.name) as progress:
        return pull(known.name, progress)


@contextmanager
def _memory_named(name: str) -> Iterator[None]:
    """Report a model that does not fit into memory in one line. On a CPU, PyTorch raises RuntimeError for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"alloc|out of memory", str(error)):
            raise
        advice = "try a smaller --kv-memory or --max-model-len, or a smaller model"
        raise QuireError(f"{name}: does not fit into the memory of this machine; {advice}") from None


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr while weights are read; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {safe(name)}", total=None)  # unknown while PyTorch is imported
        yield lambda done, total: bar.update(task, completed=done, total=total)
