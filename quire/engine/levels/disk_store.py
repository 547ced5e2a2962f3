"""Cached content on disk: a folder of files with a byte budget, shared by several models and processes.

The budget is for the whole folder. When a write needs room, the least recently used files are deleted, those of other
models and processes included. The time of a file's last change is the time of its last use: the order survives a
restart, and every process sees it. There are no locks between processes, because none are needed: files appear and
disappear whole, and a file that is gone is a cache miss. Within a process one thread writes, and any may read.

A process knows its own writes at once, and those of others from the next listing of the folder. A write lists the
folder if the last listing is older than `RESCAN_S` and than 50 times the time that it took. So listing takes at most
2 % of the time, and the folder exceeds its budget by at most what other processes write in that interval.

`FileIndex` is the files in the cache folder, as one process knows them: sizes, and the order of their last use.

quire creates the folder readable by its owner only:

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
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from quire.core.step import Content, MemoryKind
from quire.engine.levels.block_file import (
    TEMPORARY_PREFIX,
    VERSION,
    BlockRead,
    DamagedBlock,
    Fault,
    file_bytes,
    read_blocks,
    read_header,
    write_block,
    write_private,
)
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


# The store


class Entry(NamedTuple):
    """A file. `content` is known if this process has scanned or written the file."""

    size: int
    used_ns: int
    content: Content | None


class FileIndex:
    """Files by path, least recently used first, within a budget of bytes. Makes no system calls.

    Any thread may call any method; the one that writes lists the folder too. A file that others delete while the folder
    is listed may stay known until the next listing. A file that was used since it was entered is evicted later: see
    `DiskStore._evict`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.num_bytes = 0
        self._gone: dict[Content, None] = {}

    def put(self, path: str, entry: Entry) -> None:
        """Enter a file as the most recently used one."""
        with self._lock:
            self.drop(path)
            self.entries[path] = entry
            self.num_bytes += entry.size
            if entry.content is not None:
                self._gone.pop(entry.content, None)

    def drop(self, path: str) -> None:
        with self._lock:
            entry = self.entries.pop(path, None)
            if entry is not None:
                self.num_bytes -= entry.size

    def learn(self, path: str, content: Content) -> bool:
        """Remember what a file contains. Returns False if there is no such file."""
        with self._lock:
            entry = self.entries.get(path)
            if entry is not None:
                self.entries[path] = entry._replace(content=content)
            return entry is not None

    def knows(self, path: str) -> bool:
        """Whether the content of a file is known."""
        entry = self.entries.get(path)
        return entry is not None and entry.content is not None

    # Room

    def pop_oldest(self) -> tuple[str, Entry] | None:
        with self._lock:
            if not self.entries:
                return None
            path, entry = next(iter(self.entries.items()))
            self.drop(path)
            return path, entry

    # Content that is not there any more

    def note_gone(self, entry: Entry) -> None:
        if entry.content is not None:
            self._gone[entry.content] = None

    def take_gone(self) -> tuple[Content, ...]:
        """Content that is gone since the last call, evicted here or deleted by others."""
        with self._lock:
            gone, self._gone = tuple(self._gone), {}
            return gone

    # Listings

    def end_listing(self, found: Iterable[StoredFile]) -> None:
        """Replace the entries by what a listing found."""
        with self._lock:
            old, self.entries = self.entries, OrderedDict()
            for file in sorted(found, key=_by_use):
                known = old.pop(file.path, None)
                self.entries[file.path] = Entry(file.size, file.used_ns, None if known is None else known.content)
            for entry in old.values():
                self.note_gone(entry)
            self.num_bytes = sum(entry.size for entry in self.entries.values())


def _by_use(file: StoredFile) -> tuple[int, str]:
    return file.used_ns, file.path


RESCAN_S = 10.0
RESCAN_COST = 50  # times the duration of the last listing
CALL_BYTES = 8 << 20  # that a thread reads in one call: a return from C may wait for the GIL
PAUSE_S = 30.0  # without writes after one failed: the next would fail too

# The file is not at fault, or it belongs to another version of quire.
KEPT_FAULTS = (Fault.MISSING, Fault.UNREADABLE, Fault.NEWER_VERSION)
# Something else has the name of this one file: other writes can succeed.
_SINGLE_FILE_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """Result of a write."""

    is_stored: bool  # False: writes are paused, there is no room, or the write failed
    gone: tuple[Content, ...]  # content of this space that was found or stored before and is not there any more


def reads_per_thread(num_reads: int, size: int, num_threads: int) -> int:
    """Number of files of this size that a thread should read in one call, so that no thread has nothing to read."""
    return min(-(-num_reads // num_threads), max(CALL_BYTES // max(size, 1), 1))


class DiskStore:
    """Files of cached content under `root`, for a runner with these facts.

    Any threads may read; one at a time may write, list and delete.

    `facts` name everything that determines the bytes of cached content besides its tokens; content is found only by a
    store with equal facts. `name` is the model's, for people. Raises CacheFolderError if the folder cannot be used.
    """

    def __init__(
        self,
        root: Path,
        facts: Mapping[str, str],
        max_bytes: int,
        *,
        name: str = "model",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = root_secret(root)
        self.space = open_space(root, name, facts)
        self._root = root
        self.watch = ClearWatch(root, self.space.path, clock)
        self._own_prefix = f"{self.space.path}{os.sep}"
        self.index = FileIndex(max_bytes)
        self._clock = clock
        self._next_listing_s = 0.0
        self._paused_until_s = 0.0
        self._has_failed = False  # the last write; a file that has the name of a folder does not count

    def scan(self) -> Iterator[Content]:
        """List the content of this space, least recently used first.

        Reads headers only: damage of a payload is found when it is read. Deletes files with damaged headers or of an
        older format, and temporary files of processes that died. Raises CacheFolderError if the folder cannot be read.
        """
        try:
            own = self._list_root()
        except OSError as error:
            text = f"the cache folder {self._root} cannot be read: {error.strerror or error}"
            raise CacheFolderError(text) from error
        for file in own:
            content = self._identify(file)
            if content is not None and self.index.learn(file.path, content):
                yield content

    def write(self, content: Content, payload: memoryview) -> Written:
        """Store content, after deleting the least recently used files if there is no room. Raises no OSError.

        Content that is stored already is not written again.
        """
        size = file_bytes(len(content.tokens), payload.nbytes)
        path = self.space.file(content.kind, content.key)
        is_stored = False
        try:
            if size <= self.index.max_bytes and not self.is_paused:
                if self._clock() >= self._next_listing_s:
                    self._list_root()
                if not self._renew(path, size, content):
                    self._write(path, content, payload, size)
                is_stored = True
        except OSError as error:
            self._note_error(error)
        return Written(is_stored, self.index.take_gone())

    def read_many(self, contents: Sequence[Content], outs: Sequence[memoryview]) -> list[DamagedBlock | None]:
        """Read contents into buffers. Returns what is wrong with each; damaged files are deleted."""
        paths = [self.space.file(content.kind, content.key) for content in contents]
        reads = [BlockRead(*read) for read in zip(paths, contents, outs, strict=True)]
        found = read_blocks(reads, self.space.digest, time.time_ns())
        for read, damage in zip(reads, found, strict=True):
            if damage is not None:
                self._note_damage(read.path, damage.fault)
        return found

    def remove(self, content: Content) -> None:
        """Delete content. Raises OSError if it cannot be deleted."""
        path = self.space.file(content.kind, content.key)
        self.index.drop(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)

    def clear(self, cleared_ns: int | None = None) -> None:
        """Delete all content of this space. If some of it cannot be deleted, deletes the rest and raises OSError.

        `cleared_ns`: another process cleared the cache then. Files that are newer are kept, except those that this
        process has written, because they may have old content.
        """
        problem: OSError | None = None
        self._next_listing_s = 0.0  # files that others have deleted are known until then
        for file in list_files(self.space.path).files:
            if cleared_ns is not None and file.used_ns > cleared_ns and not self.index.knows(file.path):
                continue
            self.index.drop(file.path)
            try:
                if file.is_regular:
                    os.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    @property
    def is_paused(self) -> bool:
        """Whether writes are not tried for a while, because one failed."""
        return self._clock() < self._paused_until_s

    # Writing. An entry leaves the index before its file is deleted, and enters it after the file was written: a thread
    # that does the opposite meanwhile leaves at most an entry without a file, never a file that nobody counts.

    def _renew(self, path: str, size: int, content: Content) -> bool:
        """Whether the content is stored already. If so, it is used now."""
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return False
            now_ns = time.time_ns()
            os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self.index.put(path, Entry(size, now_ns, content))
        return True

    def _write(self, path: str, content: Content, payload: memoryview, size: int) -> None:
        """Make room and write a file."""
        while self.index.num_bytes + size > self.index.max_bytes:
            if (oldest := self.index.pop_oldest()) is not None:  # else a reader has found a damaged file meanwhile
                self._evict(*oldest)
        self._write_file(path, content, payload)
        self.index.put(path, Entry(size, time.time_ns(), content))
        if self._has_failed:
            log.warning("cached content is saved to %s again", self._root)
        self._has_failed = False

    def _write_file(self, path: str, content: Content, payload: memoryview) -> None:
        try:
            write_block(path, self.space.digest, content, payload)
        except FileNotFoundError:  # the first file of its folder, or somebody deleted folders
            if not self._root.is_dir():
                log.warning("the cache folder %s was deleted: creating it again", self._root)
                make_private(self._root)
                write_secret(self._root, self._secret)  # the files depend on it
                self._next_listing_s = 0.0  # the next write reports the files that are gone
            restore_space(self.space)
            make_private(Path(path).parent, parents=False)
            write_block(path, self.space.digest, content, payload)

    def _evict(self, path: str, entry: Entry) -> None:
        """Delete a file, unless another process has used it since."""
        try:
            used_ns = os.lstat(path).st_mtime_ns
            if used_ns > entry.used_ns:
                self.index.put(path, entry._replace(used_ns=used_ns))
                return
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # another process was faster
        except OSError:
            self.index.put(path, entry)
            raise
        self.index.note_gone(entry)

    def _note_error(self, error: OSError) -> None:
        if error.errno in _SINGLE_FILE_ERRORS:
            log.warning("cached content cannot be saved to %s: %s", self._root, error)
            return
        self._paused_until_s = self._clock() + PAUSE_S
        if not self._has_failed:
            text = "cached content cannot be saved to %s: %s; it is tried again after %g s"
            log.warning(text, self._root, error.strerror or error, PAUSE_S)
        self._has_failed = True

    # What is in the folder

    def _identify(self, file: StoredFile) -> Content | None:
        """Read the header of a file of this space. Deletes a file that cannot be used."""
        path = file.path
        try:
            space, content, _ = read_header(path)
            if space != self.space.digest or self.space.file(content.kind, content.key) != path:
                raise DamagedBlock(Fault.OTHER, path)
        except DamagedBlock as damage:
            self._note_damage(path, damage.fault)
            return None
        return content

    def _note_damage(self, path: str, fault: Fault) -> None:
        if fault not in KEPT_FAULTS or fault is Fault.MISSING:
            self.index.drop(path)
        if fault not in KEPT_FAULTS:
            with suppress(OSError):  # a directory, or a read-only folder
                os.unlink(path)

    def _list_root(self) -> list[StoredFile]:
        """List the files of all spaces. Returns those of this space, least recently used first."""
        begin_s = self._clock()
        found: list[StoredFile] = []
        remove_stale(entry.path for entry in _scan(self._root, []) if entry.name.startswith(TEMPORARY_PREFIX))
        for folder in space_folders(self._root):
            listing = list_files(folder)
            found += listing.files
            remove_stale(listing.temporaries)
        self.index.end_listing(file for file in found if file.is_regular)
        now_s = self._clock()
        self._next_listing_s = now_s + max(RESCAN_S, RESCAN_COST * (now_s - begin_s))
        return sorted((file for file in found if file.path.startswith(self._own_prefix)), key=_by_use)
