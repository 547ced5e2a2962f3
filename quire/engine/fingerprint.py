"""Describes everything that determines the numbers that an engine computes, besides its tokens.

The same description is the key of cached content on disk and a part of `system_fingerprint`. It contains a digest of
the files of the model.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from quire.backends.base import RunnerFacts
from quire.engine.levels.block_file import write_private
from quire.engine.process import lower_thread_priority
from quire.version import __version__

DIGESTS = "digests.json"  # the memo, in a cache folder
PIECE_BYTES = 64 << 20  # pieces of a file are digested in parallel
BUFFER_BYTES = 1 << 20
MAX_THREADS = 8
MAX_MEMO_FILES = 1000
_MAX_MEMO_BYTES = 1 << 20
_MEMO_FORMAT = 1


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
    identities = {path: _identity(path) for path in paths}
    entries = {path: known.get(str(path), [""]) for path in identities}
    digests: dict[Path, str] = {path: entry[-1] for path, entry in entries.items() if entry[:-1] == identities[path]}
    sizes = {path: identity[0] for path, identity in identities.items() if path not in digests}
    if sizes:
        new = _digest_files(sizes, max_threads or MAX_THREADS)
        digests |= new
        for path, digest in new.items():
            known.pop(str(path), None)
            if _identity(path) == identities[path]:  # else it changed while it was read
                known[str(path)] = [*identities[path], digest]
        if memo is not None:
            _write_memo(memo, known)
    return sha256("\n".join(sorted(digests[path] for path in paths)).encode()).hexdigest()


def _digest_files(sizes: dict[Path, int], max_threads: int) -> dict[Path, str]:
    """Digest of each file: SHA-256 of the SHA-256 digests of its pieces."""
    pieces = [(path, start) for path, size in sizes.items() for start in range(0, size, PIECE_BYTES)]
    num_threads = max(1, min(max_threads, os.cpu_count() or 1, len(pieces)))
    found = {path: sha256(f"{size}\n".encode()) for path, size in sizes.items()}
    with ExitStack() as stack:  # one thread: the caller's, with its priority
        run = map if num_threads == 1 else stack.enter_context(ThreadPoolExecutor(num_threads)).map
        for (path, _), digest in zip(pieces, run(_digest_piece, pieces), strict=True):
            found[path].update(digest)
    return {path: digest.hexdigest() for path, digest in found.items()}


def _digest_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest, left = sha256(), PIECE_BYTES
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, BUFFER_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _identity(path: Path) -> list[int]:
    """Size, modification time and inode: what is compared instead of the content of a file."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


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
        write_private(memo, [json.dumps({"format": _MEMO_FORMAT, "files": dict(kept)}).encode()])


# The digest of larger files is not awaited by the start of a worker: 1.6 GB/s with one core that has SHA instructions.
MAX_AWAITED_BYTES = 256 << 20
MAX_FORGOTTEN_BYTES = 16 << 20  # takes 10 ms: not worth an entry in the memo
log = logging.getLogger(__name__)


def describe(weights: str, load_format: str, facts: RunnerFacts) -> dict[str, str]:
    """`weights`: the digest of the files with the weights and their settings.

    The layout has the kernels, the precision, the libraries, the device and the types that the runner computes and
    stores in; the type of the weights says how they were quantised at load.
    """
    return {
        "weights": weights,
        "load_format": load_format,
        "layout": facts.layout,
        "backend": facts.backend,
        "dtype": facts.dtype,
    }


def system_fingerprint(arithmetic: Mapping[str, str], text: str, *, has_drafts: bool) -> str:
    """Identifies everything on the side of the server that changes answers.

    `text`: the names and digests of the files that determine prompts and sampling. `has_drafts`: tokens are guessed and
    verified in larger batches, with a runner whose results depend on the batch.
    """
    facts = {**arithmetic, "text": text, "drafts": str(has_drafts), "quire": __version__}
    return "fp_" + sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


class Fingerprinting:
    """Computes the fingerprint of an engine in a thread, because it depends on the contents of the model's files.

    Digests are remembered, so that only the first start with new files reads them. `on_end` is called in the thread.
    """

    def __init__(
        self,
        weights: Sequence[Path],
        text: Sequence[Path],
        memo: Path,
        fingerprint_of: Callable[[str, str], str],
        on_end: Callable[[], None],
    ) -> None:
        num_bytes = sum(file.stat().st_size for file in (*weights, *text))
        self._memo = memo if num_bytes > MAX_FORGOTTEN_BYTES else None
        self._is_large = num_bytes > MAX_AWAITED_BYTES
        self.found = ""  # it is not known yet, or the files cannot be read
        arguments = weights, text, fingerprint_of, on_end
        self._thread = threading.Thread(target=self._run, name="fingerprint", args=arguments, daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Wait for the fingerprint, unless the files are large."""
        if not self._is_large:
            self._thread.join()
        return self.found

    def _run(
        self,
        weights: Sequence[Path],
        text: Sequence[Path],
        fingerprint_of: Callable[[str, str], str],
        on_end: Callable[[], None],
    ) -> None:
        try:
            if self._is_large:
                lower_thread_priority()
            max_threads = 1 if self._is_large else None
            digest = weights_digest(weights, self._memo, max_threads)
            texts = [f"{file.name}={weights_digest([file], self._memo, max_threads)}" for file in text]
            self.found = fingerprint_of(digest, " ".join(texts))
        except OSError as error:
            log.warning("answers have no system_fingerprint: a file of the model cannot be read: %s", error)
        on_end()
