"""The folder of the disk cache: its layout, and lists of its files. quire creates it readable by its owner only.

    ROOT/secret                              secret of the chain keys, for all processes that use the folder
    ROOT/digests.json                        digests of weights that were computed before
    ROOT/NAME-0123456789abcdef/              a space: content of one model, computed in one way
    ROOT/NAME-0123456789abcdef/facts.json    what the space is a digest of
    ROOT/cleared, SPACE/cleared              marks of clears
    ROOT/NAME-0123456789abcdef/5e/block-5e1c....kv

A file is named by the kind and the key of its content, and lies in one of 256 folders by the first byte of the key.
The time of its last change is the time of its last use. Files with other names are not quire's: they are counted as
foreign and never deleted.

By the marks running servers learn that `quire cache clear` has deleted the content of all models or of one. A mark is
an empty file. A server looks whether its time has changed. A mark that disappears means nothing: the folder may have
been deleted and created again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from quire.core.step import MemoryKind
from quire.engine.levels.block_file import TEMPORARY_PREFIX, VERSION, write_private
from quire.errors import CacheFolderError, InvalidRequest

LOOK_S = 1.0  # between two looks at the marks


class ClearWatch:
    """Looks for new marks. A look opens two files."""

    def __init__(self, root: Path, space: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._marks = (root / CLEARED_NAME, space / CLEARED_NAME)
        self._clock = clock
        self._seen: dict[Path, int] = {}  # mark -> its time
        self._next_s = 0.0
        self.look(at_once=True)

    def look(self, *, at_once: bool = False) -> int | None:
        """When another process has deleted all content, memory included. None: it has not since the last look.

        `at_once`: look even if the last look was a moment ago.
        """
        now_s = self._clock()
        if now_s < self._next_s and not at_once:
            return None
        self._next_s = now_s + LOOK_S
        cleared_ns: int | None = None
        for path in self._marks:
            with suppress(OSError), open(path, "rb") as file:
                time_ns = os.fstat(file.fileno()).st_mtime_ns
                if time_ns != self._seen.get(path):
                    self._seen[path] = time_ns
                    cleared_ns = max(cleared_ns or 0, time_ns)
        return cleared_ns


def mark_cleared(folder: Path) -> None:
    """Let the servers that use a root or a space clear their caches. Raises OSError."""
    write_private(folder / CLEARED_NAME, [])


SECRET_BYTES = 32
SECRET_NAME = "secret"
FACTS_NAME = "facts.json"
CLEARED_NAME = "cleared"
STALE_S = 3600.0  # a temporary file of this age was left by a process that died: a write takes seconds

_SPACE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}-([0-9a-f]{16})")
_PREFIX_NAME = re.compile(r"[0-9a-f]{2}")
_FILE_NAME = re.compile(r"(block|window|state)-([0-9a-f]{32})\.kv")
_MAX_FACTS_BYTES = 1 << 20
_PROBE_BYTES = 1 << 16


class StoredFile(NamedTuple):
    """A file of cached content, by its name; nothing of it was read."""

    path: str
    kind: MemoryKind
    key: bytes
    size: int
    used_ns: int  # time of the last use
    is_regular: bool = True  # False: a directory or a link has the name of a file


class Listing(NamedTuple):
    """The files of one space."""

    files: list[StoredFile]
    temporaries: list[str]  # being written, or left by a process that died
    foreign: list[str]  # names that quire does not use
    unreadable: list[str]  # folders that may not be read


@dataclass(frozen=True, slots=True)
class Space:
    """A folder of files that one runner can use, and what determines their bytes."""

    path: Path
    name: str  # of the model; for people
    digest: bytes
    facts: Mapping[str, str] = field(hash=False)

    def file(self, kind: MemoryKind, key: bytes) -> str:
        """The path of a file: a text, because a scan makes many of them, and a Path takes longer than a system call."""
        return os.path.join(self.path, key[:1].hex(), f"{kind.name.lower()}-{key.hex()}.kv")


def space_digest(facts: Mapping[str, str]) -> bytes:
    """Digest of everything that determines the bytes of cached content, besides its tokens."""
    if not facts or not all(isinstance(text, str) for pair in facts.items() for text in pair):
        raise InvalidRequest(f"facts = {dict(facts)!r:.200} is not a table of names and texts with at least one row")
    return sha256(b"quire space\n" + json.dumps(dict(facts), sort_keys=True).encode()).digest()


def open_root(root: Path) -> None:
    """Create the folder if it does not exist. Raises CacheFolderError if it cannot or must not be used."""
    try:
        if not root.exists():
            make_private(root)
        found = root.stat()
    except OSError as error:
        where = "" if error.filename is None or Path(error.filename) == root else f": {error.filename}"
        raise CacheFolderError(f"the cache folder {root} cannot be used: {error.strerror or error}{where}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheFolderError(f"the cache folder {root} is not a folder")
    if found.st_mode & stat.S_IWOTH:
        # A folder such as /tmp must stay as it is: others use it.
        is_own = not found.st_mode & stat.S_ISVTX and os.path.lexists(root / SECRET_NAME)
        advice = f"run `chmod o-w {root}`" if is_own else f"choose a folder for it alone, such as {root / 'quire-kv'}"
        raise CacheFolderError(f"every user of this machine can write to the cache folder {root}: {advice}")


def open_space(root: Path, name: str, facts: Mapping[str, str]) -> Space:
    """Find or create the folder for these facts. A folder of another name with the same facts is used."""
    digest = space_digest(facts)
    for found in find_spaces(root):
        if found.digest == digest:
            return found
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:64].strip("._-") or "model"
    space = Space(root / f"{readable}-{digest.hex()[:16]}", name, digest, dict(facts))
    try:
        restore_space(space)
    except OSError as error:
        raise CacheFolderError(f"the cache folder {space.path} cannot be used: {error.strerror or error}") from error
    return space


def restore_space(space: Space) -> None:
    """Create what is missing of the folder itself. Raises OSError if the root is gone."""
    make_private(space.path, parents=False)
    path = space.path / FACTS_NAME
    if read_space(space.path) is None:
        facts = {"format": VERSION, "name": space.name, "space": space.digest.hex(), "facts": dict(space.facts)}
        write_private(path, [json.dumps(facts, indent=2).encode() + b"\n"])


def find_spaces(root: Path) -> list[Space]:
    """The spaces in a folder, by name. A folder without valid facts is not one."""
    return [space for path in space_folders(root) if (space := read_space(path)) is not None]


def space_folders(root: Path) -> list[Path]:
    """Folders with the name of a space. Links are not followed."""
    try:
        with os.scandir(root) as entries:
            found = [one for one in entries if _SPACE_NAME.fullmatch(one.name)]
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [root / name for name in sorted(names)]


def read_space(path: Path) -> Space | None:
    """The space in a folder. None if its facts are missing, damaged or those of another folder."""
    try:
        with open(path / FACTS_NAME, "rb") as file:
            found = json.loads(file.read(_MAX_FACTS_BYTES))
        facts, name = found["facts"], found["name"]
        digest = space_digest(facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # InvalidRequest is a ValueError
        return None
    named = _SPACE_NAME.fullmatch(path.name)
    if named is None or named[1] != digest.hex()[:16] or found.get("space") != digest.hex() or type(name) is not str:
        return None
    return Space(path, name, digest, facts)


def list_files(folder: Path) -> Listing:
    """List the files of a space. Leaves out what disappears meanwhile. Links are not followed."""
    listing = Listing([], [], [], [])
    for prefix in _scan(folder, listing.unreadable):
        if prefix.name in (FACTS_NAME, CLEARED_NAME):
            continue
        if prefix.name.startswith(TEMPORARY_PREFIX):
            listing.temporaries.append(prefix.path)
        elif not _PREFIX_NAME.fullmatch(prefix.name) or not prefix.is_dir(follow_symlinks=False):
            listing.foreign.append(prefix.path)
        else:
            _list_prefix(listing, prefix)
    return listing


def _list_prefix(listing: Listing, prefix: os.DirEntry[str]) -> None:
    for entry in _scan(prefix.path, listing.unreadable):
        found = _FILE_NAME.fullmatch(entry.name)
        if found is not None and found[2].startswith(prefix.name):
            kind, key = MemoryKind[found[1].upper()], bytes.fromhex(found[2])
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_regular = stat.S_ISREG(status.st_mode)
                listing.files.append(StoredFile(entry.path, kind, key, status.st_size, status.st_mtime_ns, is_regular))
        elif entry.name.startswith(TEMPORARY_PREFIX):
            listing.temporaries.append(entry.path)
        else:
            listing.foreign.append(entry.path)


def _scan(folder: Path | str, unreadable: list[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        unreadable.append(str(folder))
    except (FileNotFoundError, NotADirectoryError):
        pass
    return []


def list_drafts(root: Path) -> list[str]:
    """Temporary files in the root itself."""
    return [entry.path for entry in _scan(root, []) if entry.name.startswith(TEMPORARY_PREFIX)]


def remove_stale(temporaries: Iterable[str]) -> None:
    """Remove temporary files of processes that died."""
    for path in temporaries:
        with suppress(OSError):
            found = os.lstat(path)
            if time.time_ns() - found.st_mtime_ns > STALE_S * 1e9 and stat.S_ISREG(found.st_mode):
                os.unlink(path)


def make_private(folder: Path, *, parents: bool = True) -> None:
    """Create a folder for this user only, whatever the umask is. An existing one is left as it is."""
    try:
        if parents:
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(0o700)


def write_problem(folder: Path) -> str | None:
    """Why nothing can be saved to a folder: the system's reason. None: a small file can be written."""
    probe = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        write_private(probe, [bytes(_PROBE_BYTES)])
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with suppress(OSError):
            os.unlink(probe)
    return None


def root_secret(root: Path) -> bytes:
    """The secret of the chain keys of this folder, created by the first process that asks for it.

    With the same secret, processes and restarts give the same keys to the same tokens. Nobody without it can compute
    the key of a prompt. Raises CacheFolderError if the file is damaged or other users can read it.
    """
    open_root(root)
    path = root / SECRET_NAME
    try:
        with suppress(FileNotFoundError):
            return _read_secret(path)
        write_secret(root, secrets.token_bytes(SECRET_BYTES))
        return _read_secret(path)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        problem = f"the secret {path} cannot be read or written: {error.strerror or error}"
        raise CacheFolderError(f"{path} is a link: replace it by a file" if is_link else problem) from error


def write_secret(root: Path, secret: bytes) -> None:
    """Store the secret of a folder, unless it has one. Raises OSError."""
    with suppress(FileExistsError):  # another process was faster: its secret is the one to use
        write_private(root / SECRET_NAME, [secret], may_replace=False)


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CacheFolderError(f"{path} is not a file: delete it, so that quire writes a new secret")
        if found.st_mode & 0o077:
            raise CacheFolderError(
                f"other users may read {path} (mode {stat.S_IMODE(found.st_mode):04o}): delete the file, so that quire"
                " writes a new secret, or run `chmod 600` on it if nobody has read it. With a new secret, the content"
                " cached so far is not found any more"
            )
        data = os.read(descriptor, SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) != SECRET_BYTES:
        raise CacheFolderError(
            f"{path} has {found.st_size} bytes, not {SECRET_BYTES}: it is damaged. Restore it, or delete it, so that"
            " quire writes a new one. With a new secret, the content cached so far is not found any more"
        )
    return data
