"""ctypes declarations of csrc/block_files.c, which reads files of cached content without the GIL.

Without the library everything works, but slower: an install on a Mac without a compiler has none.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ABI = 1
DIGEST_BYTES = 32

_NAME = "libquire_files.dylib" if sys.platform == "darwin" else "libquire_files.so"

log = logging.getLogger(__name__)


class Sums(ctypes.Structure):
    """The sums of a checksum, for each lane."""

    _fields_ = (("words", ctypes.c_uint64 * 8), ("totals", ctypes.c_uint64 * 8))


class _File(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        ("header", ctypes.c_char_p),
        ("header_bytes", ctypes.c_uint64),
        ("payload", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_uint64),
        ("sums", Sums),
        ("digest", ctypes.c_uint8 * DIGEST_BYTES),
        ("is_read", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class FileRead(NamedTuple):
    """A file to read: the header that it must have, and the buffer for its payload."""

    path: str
    header: bytes
    payload: memoryview


class FileFound(NamedTuple):
    """What was read besides the payload: its sums, and the digest that is stored in the file."""

    sums: Sums
    digest: bytes


class FileLibrary:
    def __init__(self, path: Path) -> None:
        """Raises OSError if the library cannot be loaded, or is of another version."""
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "quire_files_abi") or library.quire_files_abi() != ABI:
            raise OSError(f"{path} is of another version of quire")
        self._add_bytes, self._read_files = library.quire_add_bytes, library.quire_read_files
        self._add_bytes.argtypes = (ctypes.POINTER(Sums), ctypes.c_void_p, ctypes.c_uint64)
        self._read_files.argtypes = (ctypes.POINTER(_File), ctypes.c_uint64, ctypes.c_int64)
        self._add_bytes.restype = self._read_files.restype = None

    def add_bytes(self, sums: Sums, part: memoryview) -> None:
        """Add content to the sums."""
        address, holder = _address(part)
        self._add_bytes(sums, address, part.nbytes)
        del holder

    def read_files(self, reads: Sequence[FileRead], now_ns: int) -> list[FileFound | None]:
        """Read files that are used at this time. None: the file is missing, or not as expected."""
        files = (_File * len(reads))()
        holders = []  # of the memory that C uses
        for file, read in zip(files, reads, strict=True):
            address, holder = _address(read.payload)
            holders.append(holder)
            file.path, file.header, file.header_bytes = read.path.encode(), read.header, len(read.header)
            file.payload, file.payload_bytes = address, read.payload.nbytes
        self._read_files(files, len(reads), now_ns)
        return [FileFound(file.sums, bytes(file.digest)) if file.is_read else None for file in files]


def _address(buffer: memoryview) -> tuple[int, object]:
    """The address of a buffer, and what keeps it valid."""
    if not buffer.nbytes:
        return 0, None
    if buffer.readonly:
        copy = ctypes.create_string_buffer(bytes(buffer), buffer.nbytes)
        return ctypes.addressof(copy), copy
    shared = ctypes.c_char.from_buffer(buffer)
    return ctypes.addressof(shared), shared


@cache
def load_library() -> FileLibrary | None:
    """The installed library; None if there is none."""
    path = Path(__file__).with_name(_NAME)
    if not path.exists():
        return None
    try:
        return FileLibrary(path)
    except OSError as error:
        log.warning("files of cached content are read in Python, which is slower: %s", error)
        return None
