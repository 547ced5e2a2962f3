"""`quire cache`: the prefix cache on disk. Every subcommand works while servers use the folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from quire.cli.http_stream import printable
from quire.cli.options import takes
from quire.cli.terminal import confirm_deletion, echo, progress_bar, short_path, show, table
from quire.core.step import MemoryKind
from quire.core.values import TOKEN_BYTES
from quire.engine.levels.block_file import FAULT_WORDS, DamagedBlock, Fault, check_block, read_header
from quire.engine.levels.disk_store import (
    SECRET_NAME,
    Listing,
    Space,
    StoredFile,
    list_files,
    mark_cleared,
    read_space,
    remove_stale,
    space_folders,
)
from quire.errors import CacheFolderError, InvalidRequest
from quire.sizes import file_size
from quire.weights import hub

T = TypeVar("T")
MAX_THREADS = 4
_BATCH = 256  # files handed to the threads at a time
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def cache() -> None:
    """Show, check and clear the prefix cache on disk (`quire serve --disk-cache`)."""


def _find_root(
    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir", metavar="DIR", help="The cache folder; by default $QUIRE_CACHE_DIR or ~/.cache/quire/kv."
        ),
    ] = None,
) -> Path:
    """The cache folder. Refuses a folder that is not one."""
    given, source = cache_dir, "--cache-dir"
    if given is None:
        given, source = os.environ.get("QUIRE_CACHE_DIR"), "QUIRE_CACHE_DIR"  # as for `quire serve`
    if given == "":
        raise InvalidRequest(f"{source} is empty: it must be the path of a folder")
    root = hub.cache_dir() / "kv" if given is None else Path(given).expanduser()
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        if given is None:
            return root  # nothing was cached yet
        raise InvalidRequest(f"{source} {root}: there is no such folder") from None
    except OSError as error:
        raise CacheFolderError(f"the cache folder {root} cannot be read: {error.strerror}") from None
    if names and SECRET_NAME not in names and not space_folders(root):
        raise InvalidRequest(f"{root} is not a cache folder of quire: it has neither a secret nor cached content")
    return root


@takes(root=_find_root)
def ls(*, root: Path, as_json: JsonOption = False) -> None:
    """List the models with cached content: files, size, tokens and last use."""
    spaces = [one for one in _read_spaces(root) if one.listing.files]
    names = _served_names(spaces)
    _count_all(spaces)
    spaces.sort(key=lambda one: one.used_ns, reverse=True)
    if as_json:
        found = [
            {
                "model": one.name,
                "path": str(one.path),
                "facts": dict(one.facts),
                "num_files": len(one.listing.files),
                "num_bytes": one.num_bytes,
                "num_tokens": one.num_tokens,
                "last_used_at": one.used_ns // 10**9,
                "served_name": names.get(one.name),
            }
            for one in spaces
        ]
        echo(json.dumps(found, indent=2))
    elif not spaces:
        echo(_nothing(root))
    else:
        rows = [
            (
                *map(printable, (_title(one.name, names), *(one.facts.get(name, "") for name in ("backend", "dtype")))),
                *(f"{len(one.listing.files):,}", file_size(one.num_bytes), f"{one.num_tokens:,}", _ago(one.used_ns)),
            )
            for one in spaces
        ]
        texts = ("model", "backend", "dtype")
        show(table((*texts, "files", "size", "tokens", "last use"), rows, texts=texts))
    _warn_of_unreadable(spaces)


@takes(root=_find_root)
def stats(*, root: Path, as_json: JsonOption = False) -> None:
    """Show the size of the whole cache, by kind of memory."""
    spaces = _read_spaces(root)
    files = [file for one in spaces for file in one.listing.files]
    _count_all(spaces)
    by_kind = {kind: [file.size for file in files if file.kind is kind] for kind in MemoryKind}
    used_ns = max((file.used_ns for file in files), default=None)
    document: dict[str, Any] = {
        "path": str(root),
        "num_models": sum(bool(one.listing.files) for one in spaces),
        "num_files": len(files),
        "num_bytes": sum(file.size for file in files),
        "num_tokens": sum(one.num_tokens for one in spaces),
        "kinds": {
            kind.name.lower(): {"num_files": len(sizes), "num_bytes": sum(sizes)} for kind, sizes in by_kind.items()
        },
        "num_temporary": sum(len(one.listing.temporaries) for one in spaces),
        "num_foreign": sum(len(one.listing.foreign) for one in spaces),
        "last_used_at": None if used_ns is None else used_ns // 10**9,
    }
    if as_json:
        echo(json.dumps(document, indent=2))
    elif used_ns is None:
        echo(_nothing(root))
    else:
        _print_stats(root, document, used_ns)
    _warn_of_unreadable(spaces)


@takes(root=_find_root)
def verify(
    *,
    root: Path,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read and check every file. The exit code is 1 if damaged or unreadable files are left.

    Damaged files are never used: servers delete them when they find them. Foreign files are files that quire did not
    write, and files of newer versions of quire. They are not used and not deleted.
    """
    spaces = _read_spaces(root)
    files = [(one.space, file) for one in spaces for file in one.listing.files]
    paths: defaultdict[Fault | None, list[str]] = defaultdict(list)
    with progress_bar("checking", "bytes", total=sum(file.size for _, file in files)) as update:
        for (_, file), fault in zip(files, _in_threads(lambda pair: _find_fault(*pair), files), strict=True):
            update(advance=file.size)
            paths[fault].append(file.path)
    paths.pop(Fault.MISSING, None)  # a server has evicted them
    good = len(paths.pop(None, ()))
    newer = paths.pop(Fault.NEWER_VERSION, [])
    unreadable = [*(path for one in spaces for path in one.listing.unreadable), *paths.pop(Fault.UNREADABLE, ())]
    faults = {path: fault for fault, found in paths.items() if fault is not None for path in found}
    deletion = _delete(faults if delete else ())
    foreign = [*newer, *(path for one in spaces for path in one.listing.foreign)]
    if as_json:
        document = {
            "path": str(root),
            "num_good": good,
            "num_damaged": len(faults),
            "num_foreign": len(foreign),
            "num_unreadable": len(unreadable),
            "num_deleted": len(deletion.deleted),
            "faults": dict(Counter(faults.values())),
            "damaged": [{"path": path, "fault": fault} for path, fault in faults.items()],
            "foreign": foreign,
            "unreadable": unreadable,
        }
        echo(json.dumps(document, indent=2))
    else:
        _print_faults(faults, unreadable, deletion)
        note = f", {len(deletion.deleted):,} of them deleted" if deletion.deleted else ""
        others = f", {len(unreadable):,} unreadable" if unreadable else ""
        echo(f"{good:,} good, {len(faults):,} damaged{note}, {len(foreign):,} foreign{others}")
        if faults and not delete:
            echo("Damaged files are not used; `quire cache verify --delete` deletes them.")
    if len(deletion.deleted) < len(faults) or unreadable:
        raise typer.Exit(1)


@takes(root=_find_root)
def clear(
    *,
    root: Path,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Only content of this model, by a name in `quire cache ls`."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="TIME", help="Only content that was not used for this long, like 12h, 7d or 2w."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete cached content of all models, or a part of it.

    Running servers drop it too, within a second or two: they clear their caches, memory included. With --older-than,
    they notice that files are gone when they look for them.
    """
    spaces = _read_spaces(root)
    if model is not None:
        spaces = _select(spaces, model, root)
    limit_ns = None if older_than is None else time.time_ns() - _parse_age_s(older_than) * 10**9
    found = [
        (one.name, file)
        for one in spaces
        for file in one.listing.files
        if file.is_regular and (limit_ns is None or file.used_ns < limit_ns)
    ]
    files = [file for _, file in found]
    if files:
        size = file_size(sum(file.size for file in files))
        names = printable(", ".join(sorted({name for name, _ in found})))
        question = f"Delete {len(files):,} files, {size}, of {names} from {short_path(root)}?"
        confirm_deletion(f"{len(files):,} files ({size})", question, is_confirmed=yes)
    deletion = _delete([file.path for file in files])
    for one in spaces:
        remove_stale(one.listing.temporaries)
    if older_than is None:
        _tell_servers([root] if model is None else [one.path for one in spaces])
    if files:
        freed = file_size(sum(file.size for file in files if file.path in deletion.deleted))
        reasons = ", ".join(sorted(set(deletion.errors.values())))
        note = f"; {len(deletion.errors):,} could not be deleted: {reasons}" if deletion.errors else ""
        echo(f"deleted {len(deletion.deleted):,} files: {freed} freed{note}")
    else:
        echo(f"nothing to delete in {short_path(root)}")
    if deletion.errors:
        raise typer.Exit(1)


# Name -> function, in the order of the help.
SUBCOMMANDS: dict[str, Callable[..., None]] = {"ls": ls, "stats": stats, "verify": verify, "clear": clear}


class _Deletion(NamedTuple):
    deleted: set[str]  # paths
    errors: dict[str, str]  # path -> why it could not be deleted


@dataclass(slots=True)
class _Listed:
    """A folder with the name of a space. `space` is None if its facts are missing or damaged."""

    path: Path
    space: Space | None
    listing: Listing
    num_tokens: int = 0  # set by `_count_all`
    num_unreadable: int = 0  # files whose tokens could not be counted

    @property
    def name(self) -> str:
        return self.space.name if self.space is not None else self.path.name

    @property
    def facts(self) -> Mapping[str, str]:
        return self.space.facts if self.space is not None else {}

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.listing.files)

    @property
    def used_ns(self) -> int:
        return max((file.used_ns for file in self.listing.files), default=0)


def _nothing(root: Path) -> str:
    return f"nothing is cached in {short_path(root)}"


def _read_spaces(root: Path) -> list[_Listed]:
    return [_Listed(path, read_space(path), list_files(path)) for path in space_folders(root)]


def _served_names(spaces: Iterable[_Listed]) -> dict[str, str]:
    """Names that a server shows, for spaces that are named by another name of the model: a file or a revision."""
    names = {Path(known.file_name).stem: known.name for known in hub.KNOWN_MODELS.values()}
    if any(re.fullmatch(r"[0-9a-f]{40}", one.name) for one in spaces):  # the import of the hub takes time
        names |= {folder.name: name for name, folder in hub.cached_folders()}
    return names


def _title(name: str, served_names: Mapping[str, str]) -> str:
    return f"{name} ({served_names[name]})" if name in served_names else name


def _select(spaces: list[_Listed], model: str, root: Path) -> list[_Listed]:
    served_names = _served_names(spaces)
    found = [one for one in spaces if model in (one.name, one.path.name, served_names.get(one.name))]
    if not found:
        names = sorted({_title(one.name, served_names) for one in spaces if one.listing.files})
        there = f"it has {', '.join(names)}" if names else "it is empty"
        raise InvalidRequest(f"--model {model!r}: {short_path(root)} has no content of such a model; {there}")
    return found


def _count_all(spaces: Sequence[_Listed]) -> None:
    """Count the tokens of KV blocks: window blocks and states are of the same tokens."""
    with progress_bar("reading headers", "count", total=sum(len(one.listing.files) for one in spaces)) as update:
        for one in spaces:
            files = one.listing.files
            for file, num_tokens in zip(files, _in_threads(_count_tokens, files), strict=True):
                one.num_unreadable += num_tokens is None
                one.num_tokens += (num_tokens or 0) if file.kind is MemoryKind.BLOCK else 0
                update(advance=1)


def _count_tokens(file: StoredFile) -> int | None:
    """Number of tokens in the header. None: the file cannot be read."""
    try:
        return len(read_header(file.path).content.tokens) // TOKEN_BYTES
    except DamagedBlock as damage:
        return None if damage.fault is Fault.UNREADABLE else 0


def _warn_of_unreadable(spaces: Iterable[_Listed]) -> None:
    if num_files := sum(one.num_unreadable for one in spaces):
        echo(f"quire: {num_files:,} files could not be read; their tokens are not counted", err=True)
    for path in (path for one in spaces for path in one.listing.unreadable):
        echo(f"quire: {short_path(Path(path))} could not be read; its files are not counted", err=True)


def _print_faults(faults: Mapping[str, Fault], unreadable: Iterable[str], deletion: _Deletion) -> None:
    for path, fault in faults.items():
        outcome = ", deleted" if path in deletion.deleted else ""
        if path in deletion.errors:
            outcome = f", could not be deleted: {deletion.errors[path]}"
        echo(f"{short_path(Path(path))}: {FAULT_WORDS[fault]}{outcome}")
    for path in unreadable:
        echo(f"{short_path(Path(path))}: {FAULT_WORDS[Fault.UNREADABLE]}")


def _find_fault(space: Space | None, file: StoredFile) -> Fault | None:
    """Check one file. None: it is intact and lies in the right place."""
    try:
        header = check_block(file.path)
    except DamagedBlock as damage:
        return damage.fault
    is_of_space = space is None or header.space == space.digest
    is_named = (header.content.kind, header.content.key) == (file.kind, file.key)
    return None if is_of_space and is_named else Fault.OTHER


def _delete(paths: Iterable[str]) -> _Deletion:
    """Delete files and links. Leaves folders, and continues after files that cannot be deleted."""
    deletion = _Deletion(set(), {})
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            continue
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
                deletion.deleted.add(path)
        except OSError as error:
            deletion.errors[path] = error.strerror or str(error)
    return deletion


def _tell_servers(folders: Iterable[Path]) -> None:
    """Leave marks in cache folders that exist."""
    for folder in folders:
        if not (folder / SECRET_NAME).exists() and not space_folders(folder) and read_space(folder) is None:
            continue  # no server uses it
        try:
            mark_cleared(folder)
        except OSError as error:
            text = f"quire: running servers were not told of it: {folder} cannot be written: {error.strerror or error}"
            echo(text, err=True)


def _in_threads(function: Callable[[T], Any], items: Iterable[T]) -> Iterator[Any]:
    """Results in order. Few calls wait at a time, so that Ctrl-C ends the command soon."""
    left = iter(items)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        while batch := list(islice(left, _BATCH)):
            yield from pool.map(function, batch)


def _print_stats(root: Path, document: dict[str, Any], used_ns: int) -> None:
    models = document["num_models"]
    echo(
        f"{short_path(root)}: {models} model{'s' if models != 1 else ''}, {document['num_files']:,} files,"
        f" {file_size(document['num_bytes'])}, {document['num_tokens']:,} tokens, last use {_ago(used_ns)}"
    )
    rows = [
        (kind, f"{counts['num_files']:,}", file_size(counts["num_bytes"])) for kind, counts in document["kinds"].items()
    ]
    show(table(("kind", "files", "size"), rows, texts=("kind",)))
    for field, text in (("num_temporary", "files being written"), ("num_foreign", "foreign files")):
        if document[field]:
            echo(f"{text}: {document[field]:,}")
    echo("The size limit is a setting of the servers that use the folder.")


def _ago(used_ns: int) -> str:
    seconds = max(0, time.time_ns() - used_ns) // 10**9
    for unit, size in (("day", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return f"{seconds} s ago"


def _parse_age_s(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9})\s*([smhdw])", text.strip(), re.ASCII)
    if found is None:
        raise InvalidRequest(f"--older-than {text!r:.80} is not a time like 12h, 7d or 2w")
    return int(found[1]) * _UNITS_S[found[2]]
