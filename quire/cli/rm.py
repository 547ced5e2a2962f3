"""`quire rm`: delete a model that `quire pull` has downloaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.models import short_path
from quire.cli.terminal import confirm, echo
from quire.errors import InvalidRequest, ModelNotFound
from quire.sizes import file_size
from quire.weights.gguf import is_later_part
from quire.weights.hub import (
    KNOWN_MODELS,
    HubName,
    cached_folders,
    find_known,
    is_model,
    is_path,
    local_models,
    models_dir,
    resolve,
)


@dataclass(frozen=True, slots=True)
class Removal:
    """Files of a model, and folders that are removed when they are empty."""

    name: str
    path: Path
    files: tuple[Path, ...]
    folders: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.lstat().st_size for file in self.files if not file.is_symlink())


def rm(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A downloaded model that `quire models` lists.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a downloaded model from the disk."""
    found = find_removal(name)
    size = file_size(found.num_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(f"deleting {found.name} ({size}) needs --yes: standard input is not a terminal")
        if not confirm(f"Delete {found.name}, {size}, from {short_path(found.path)}?"):
            raise typer.Exit(1)
    for file in found.files:
        file.unlink(missing_ok=True)
    for folder in found.folders:
        _remove_empty(folder)
    echo(f"deleted {found.name}: {size} freed")


def find_removal(name: str) -> Removal:
    """The files to delete. Refuses models that `quire pull` did not download."""
    known = find_known(name)
    if known is not None:
        path = models_dir() / known.file_name
        if not path.is_file():
            raise ModelNotFound(f"{known.name} is not on this machine")
        return Removal(known.name, path, (path,))
    path = Path(name).expanduser()
    if is_path(name) or is_model(path):
        raise InvalidRequest(f"{name}: quire did not download this model; delete {path.absolute()} yourself")
    own = models_dir() / f"{name}.gguf"
    if "/" not in name and own.is_file() and own.name not in {model.file_name for model in KNOWN_MODELS.values()}:
        raise InvalidRequest(f"{name}: quire did not download this model; delete {own} yourself")
    hub_name = HubName.parse(name)
    homes = {repo: folder.parent.parent for repo, folder in cached_folders()}
    if hub_name is None or hub_name.repo not in homes:
        raise ModelNotFound(f"{name}: no such model on this machine; `quire models` lists them")
    home = homes[hub_name.repo]
    return _whole_repository(hub_name.repo, home) if hub_name.gguf is None else _one_gguf(name, home)


def _whole_repository(repo: str, home: Path) -> Removal:
    files = tuple(path for path in sorted(home.rglob("*")) if path.is_symlink() or path.is_file())
    return Removal(repo, home, files, (home,))


def _one_gguf(name: str, home: Path) -> Removal:
    """The links of one model in the snapshots, and the blobs they point to."""
    model = next((one for one in local_models() if one.name == name), None)
    path = model.path if model is not None else resolve(name)
    stem = path.name.partition("-00001-of-")[0]
    parts = [path, *(file for file in path.parent.glob("*.gguf") if is_later_part(file) and file.name.startswith(stem))]
    blobs = [part.resolve() for part in parts if part.is_symlink()]
    return Removal(name, path, (*parts, *(blob for blob in blobs if blob.is_relative_to(home))))


def _remove_empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
    folder.rmdir()
