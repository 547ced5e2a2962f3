"""Digest of the files of a model, so that cached content is used only with the weights that computed it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine.levels.cache_folder import write_private

DIGESTS = "digests.json"  # the memo, in a cache folder
PIECE_BYTES = 64 << 20  # pieces of a file are digested in parallel
BUFFER_BYTES = 1 << 20
MAX_THREADS = 8
MAX_MEMO_FILES = 1000
_MAX_MEMO_BYTES = 1 << 20
_MEMO_FORMAT = 1


class _Identity(NamedTuple):
    """What is compared instead of the content of a file."""

    size: int
    mtime_ns: int
    inode: int


def weights_digest(files: Sequence[Path], memo: Path | None, max_threads: int | None = None) -> str:
    """SHA-256 of the contents of all files, in hexadecimal. The order and the names of the files do not matter.

    Digests are remembered in the JSON file `memo` by real path, size, modification time and inode, so that the next
    start does not read the files. The memo only saves time: one that is damaged or cannot be written is ignored.
    None: there is none. `max_threads`: that read files at the same time; None: as many as pay.
    """
    if not files:
        raise ValueError("no files to digest")
    paths = [Path(os.path.realpath(file)) for file in files]
    known = {} if memo is None else _read_memo(memo)
    digests: dict[Path, str] = {}
    unknown: dict[Path, _Identity] = {}
    for path in paths:
        identity = _identity(path)
        entry = known.get(str(path))
        if entry is not None and entry[:-1] == [*identity]:
            digests[path] = entry[-1]
        else:
            unknown[path] = identity
    if unknown:
        for path, digest in _digest_files(unknown, max_threads or MAX_THREADS).items():
            digests[path] = digest
            known.pop(str(path), None)
            if _identity(path) == unknown[path]:  # else it changed while it was read
                known[str(path)] = [*unknown[path], digest]
        if memo is not None:
            _write_memo(memo, known)
    return sha256("\n".join(sorted(digests[path] for path in paths)).encode()).hexdigest()


def _digest_files(files: dict[Path, _Identity], max_threads: int) -> dict[Path, str]:
    """Digest of each file: SHA-256 of the SHA-256 digests of its pieces."""
    pieces = [(path, start) for path, identity in files.items() for start in range(0, identity.size, PIECE_BYTES)]
    num_threads = max(1, min(max_threads, os.cpu_count() or 1, len(pieces)))
    found = {path: sha256(f"{identity.size}\n".encode()) for path, identity in files.items()}
    with ExitStack() as stack:  # one thread: the caller's, with its priority
        run = map if num_threads == 1 else stack.enter_context(ThreadPoolExecutor(num_threads)).map
        for (path, _), digest in zip(pieces, run(_digest_piece, pieces), strict=True):
            found[path].update(digest)
    return {path: digest.hexdigest() for path, digest in found.items()}


def _digest_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest = sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        for part in _parts(file, PIECE_BYTES):
            digest.update(part)
    return digest.digest()


def _parts(file: Any, num_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while num_bytes:
        count = file.readinto(buffer[: min(num_bytes, len(buffer))])
        if not count:
            return
        yield buffer[:count]
        num_bytes -= count


def _identity(path: Path) -> _Identity:
    found = path.stat()
    return _Identity(found.st_size, found.st_mtime_ns, found.st_ino)


def _read_memo(memo: Path) -> dict[str, list[Any]]:
    """Real path -> size, modification time, inode, digest."""
    try:
        with open(memo, "rb") as file:
            found = json.loads(file.read(_MAX_MEMO_BYTES))
        if found["format"] != _MEMO_FORMAT:
            return {}
        return {path: entry for path, entry in found["files"].items() if _is_valid(entry)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _is_valid(entry: object) -> bool:
    match entry:
        case [int(), int(), int(), str(digest)]:
            return len(digest) == 2 * sha256().digest_size
        case _:
            return False


def _write_memo(memo: Path, known: dict[str, list[Any]]) -> None:
    """Write the newest entries. Entries of deleted files are dropped."""
    kept = [(path, entry) for path, entry in known.items() if os.path.exists(path)][-MAX_MEMO_FILES:]
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_private(memo, json.dumps({"format": _MEMO_FORMAT, "files": dict(kept)}).encode())
