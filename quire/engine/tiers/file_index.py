"""Index of the files in the cache folder, as one process knows them: sizes, and the order of their last use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from quire.core.step import Content
from quire.engine.tiers.cache_folder import StoredFile


class Entry(NamedTuple):
    """A file. `content` is known if this process has scanned, read or written the file."""

    size: int
    used_ns: int
    content: Content | None


class IndexSizes(NamedTuple):
    num_files: int
    num_bytes: int
    own_files: int
    own_bytes: int


class FileIndex:
    """Files by path, least recently used first, within a budget of bytes. Makes no system calls.

    Any thread may call any method. A listing of the folder takes a while, in which other threads add and delete files:
    paths that change between `begin_listing` and `end_listing` keep what is known about them.
    """

    def __init__(self, max_bytes: int, own_prefix: str) -> None:
        self.max_bytes = max_bytes
        self._own_prefix = own_prefix  # of the paths in this process's own space
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._num_bytes = 0
        self._own_files = 0
        self._own_bytes = 0
        self._reserved = 0  # bytes of files that are being written
        self._gone: dict[Content, None] = {}
        self._changed: set[str] | None = None  # since the listing began; None: no listing runs

    def put(self, path: str, entry: Entry) -> None:
        """Enter a file as the most recently used one."""
        with self._lock:
            self._remove(path)
            self._entries[path] = entry
            self._count(path, entry.size, 1)
            if entry.content is not None:
                self._gone.pop(entry.content, None)

    def drop(self, path: str) -> None:
        with self._lock:
            self._remove(path)

    def learn(self, path: str, content: Content) -> bool:
        """Remember what a file contains. Returns False if there is no such file."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is None:
                return False
            self._entries[path] = entry._replace(content=content)
            return True

    def own_paths(self) -> list[str]:
        with self._lock:
            return [path for path in self._entries if path.startswith(self._own_prefix)]

    def known_paths(self) -> list[str]:
        """Own paths whose content is known."""
        with self._lock:
            known = [path for path, entry in self._entries.items() if entry.content is not None]
        return [path for path in known if path.startswith(self._own_prefix)]

    def sizes(self) -> IndexSizes:
        with self._lock:
            return IndexSizes(len(self._entries), self._num_bytes, self._own_files, self._own_bytes)

    # Room

    def reserve(self, size: int) -> bool:
        """Reserve room for a file that will be written. Returns False if files must be deleted first."""
        with self._lock:
            has_room = self._num_bytes + self._reserved + size <= self.max_bytes
            if has_room:
                self._reserved += size
            return has_room

    def release(self, size: int) -> None:
        """End a reservation."""
        with self._lock:
            self._reserved -= size

    def pop_oldest(self) -> tuple[str, Entry] | None:
        with self._lock:
            if not self._entries:
                return None
            path, entry = next(iter(self._entries.items()))
            self._remove(path)
            return path, entry

    # Content that is not there any more

    def note_gone(self, entry: Entry) -> None:
        with self._lock:
            self._note_gone(entry)

    def take_gone(self) -> tuple[Content, ...]:
        """Content that is gone since the last call, evicted here or deleted by others."""
        with self._lock:
            gone, self._gone = tuple(self._gone), {}
            return gone

    # Listings

    def begin_listing(self) -> None:
        with self._lock:
            self._changed = set()

    def abandon_listing(self) -> None:
        with self._lock:
            self._changed = None

    def end_listing(self, found: Iterable[StoredFile]) -> None:
        """Replace the entries by what a listing found, except those that changed while it ran."""
        with self._lock:
            old, changed, self._changed = self._entries, self._changed or set(), None
            new = {path: entry for path in changed if (entry := old.get(path)) is not None}
            for file in found:
                if file.path not in changed:
                    known = old.get(file.path)
                    new[file.path] = Entry(file.size, file.used_ns, None if known is None else known.content)
            for path, entry in old.items():
                if path not in new:
                    self._note_gone(entry)
            self._entries = OrderedDict(sorted(new.items(), key=lambda pair: (pair[1].used_ns, pair[0])))
            own = [entry.size for path, entry in new.items() if path.startswith(self._own_prefix)]
            self._num_bytes = sum(entry.size for entry in new.values())
            self._own_files, self._own_bytes = len(own), sum(own)

    def _remove(self, path: str) -> None:
        if self._changed is not None:
            self._changed.add(path)
        entry = self._entries.pop(path, None)
        if entry is not None:
            self._count(path, -entry.size, -1)

    def _count(self, path: str, num_bytes: int, num_files: int) -> None:
        self._num_bytes += num_bytes
        if path.startswith(self._own_prefix):
            self._own_bytes += num_bytes
            self._own_files += num_files

    def _note_gone(self, entry: Entry) -> None:
        if entry.content is not None:
            self._gone[entry.content] = None
