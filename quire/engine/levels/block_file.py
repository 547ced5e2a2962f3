"""Files of cached content: one file holds one block, window block or recurrent state.

    head      fixed fields: magic, version, kind, lengths, space, key, parent key
    tokens    packed, as in `Content.tokens`
    SHA-256   of everything before it, so that a scan can check a header without reading the payload
    payload   the bytes of the runner's memory
    SHA-256   of the header and of the checksum of the payload

The space is a digest of everything that determines the payload besides the tokens: weights, backend, layout. A file is
used only if every field is what the reader expects and both digests match. This module knows single files; folders and
budgets are in `quire.engine.levels.disk_store`.

The checksum of the payload finds damage, not forgery: anyone who can write to the folder can also write a matching
digest. SHA-256 of the payload would not change that, and takes 10 to 60 times as long. The payload is a sequence of
32-bit words in 8 lanes: word `i` is in lane `i % 8`. Bytes that are missing from the last row of lanes are zero. Each
lane has two sums modulo 2^64, as in Fletcher's checksum: of its words, and of all values that the first sum had, so
that the order matters. Damage of one or two words of a lane is always found. Damage of more is missed only if both sums
of all lanes happen to stay the same. The C library adds 19 GB/s on one core of a Xeon, numpy 0.5. CRC-32 of zlib
reaches 3 GB/s, and SHA-256 0.3.

Intact files are read by the C library (csrc/block_files.c), several in one call and without the GIL. Whatever it does
not accept is read again here, which finds out what is wrong with the file. Without the library everything works, but
slower: an install on a Mac without a compiler has none.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import stat
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from quire.core.cache import KEY_BYTES
from quire.core.step import Content, MemoryKind
from quire.errors import QuireError

LANES = 8
ROW_BYTES = 4 * LANES

ABI = 1
DIGEST_BYTES = 32

_NAME = "libquire_files.dylib" if sys.platform == "darwin" else "libquire_files.so"

log = logging.getLogger(__name__)


class Sums(ctypes.Structure):
    """The sums of a checksum, for each lane, in the order in which they are hashed. Machines are little-endian."""

    _fields_ = (("words", ctypes.c_uint64 * 8), ("totals", ctypes.c_uint64 * 8))


def checksum(content: memoryview) -> bytes:
    if (library := load_library()) is not None:
        total = Sums()
        address, holder = _address(content)
        library.add_bytes(total, address, content.nbytes)
        del holder
        return bytes(total)
    import numpy as np  # part of every backend; `quire cache` needs it only if there is no C library

    padded = bytes(content) + bytes(-len(content) % ROW_BYTES)
    rows = np.frombuffer(padded, "<u4").reshape(-1, LANES).astype(np.uint64)
    return bytes(rows.sum(0)) + bytes(rows.cumsum(0).sum(0))


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


class BlockRead(NamedTuple):
    """A payload to read, and the buffer for it."""

    path: str
    content: Content
    out: memoryview


class FileLibrary:
    def __init__(self, path: Path) -> None:
        """Raises OSError if the library cannot be loaded, or is of another version."""
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "quire_files_abi") or library.quire_files_abi() != ABI:
            raise OSError(f"{path} is of another version of quire")
        # `add_bytes` adds content at an address to sums.
        self.add_bytes, self._read_files = library.quire_add_bytes, library.quire_read_files
        self.add_bytes.argtypes = (ctypes.POINTER(Sums), ctypes.c_void_p, ctypes.c_uint64)
        self._read_files.argtypes = (ctypes.POINTER(_File), ctypes.c_uint64, ctypes.c_int64)
        self.add_bytes.restype = self._read_files.restype = None

    def read_files(self, reads: Sequence[BlockRead], space: bytes, now_ns: int) -> list[bool]:
        """Read payloads that are used at this time. Returns False for files that are missing, or not as expected."""
        files = (_File * len(reads))()
        headers = [_pack_header(space, read.content, read.out.nbytes) for read in reads]
        holders = []  # of the memory that C uses
        for file, read, header in zip(files, reads, headers, strict=True):
            file.payload, holder = _address(read.out.cast("B"))
            holders.append(holder)
            file.path, file.header = read.path.encode(), header
            file.header_bytes, file.payload_bytes = len(header), read.out.nbytes
        self._read_files(files, len(reads), now_ns)
        return [
            bool(file.is_read) and sha256(header + bytes(file.sums)).digest() == bytes(file.digest)
            for file, header in zip(files, headers, strict=True)
        ]


def _address(buffer: memoryview) -> tuple[int, object]:
    """The address of a writable buffer, and what keeps it valid."""
    if not buffer.nbytes:
        return 0, None
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


MAGIC = b"quireKV\n"
VERSION = 1
SPACE_BYTES = 32
MAX_TOKEN_BYTES = 1 << 16  # a damaged length must not make a reader allocate memory
TEMPORARY_PREFIX = ".tmp-"

_HEAD = struct.Struct(f"<8sHBxIQ{SPACE_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
_FIRST_READ = 512  # bytes; the whole header of a block of up to 98 tokens


class Fault(StrEnum):
    """Why a file is not used."""

    MISSING = "missing"
    NOT_A_FILE = "not_a_file"  # a directory, a symbolic link, a device
    UNREADABLE = "unreadable"  # the system refuses: permissions, a damaged disk, too many open files
    TRUNCATED = "truncated"
    TOO_LONG = "too_long"
    MAGIC = "magic"
    OLDER_VERSION = "older_version"
    NEWER_VERSION = "newer_version"
    HEADER = "header"  # the digest of the header does not match
    OTHER = "other"  # intact, but not what its reader expects: other weights, tokens, kind or size
    DIGEST = "digest"  # the payload does not have the checksum that was stored with it


FAULT_WORDS = {
    Fault.MISSING: "the file is missing",
    Fault.NOT_A_FILE: "not a file, but a folder, a link or a device",
    Fault.UNREADABLE: "the system refuses to read it",
    Fault.TRUNCATED: "the end of the file is missing",
    Fault.TOO_LONG: "the file is longer than its header says",
    Fault.MAGIC: "the file does not begin like a file of quire",
    Fault.OLDER_VERSION: "written by an older version of quire, in another format",
    Fault.NEWER_VERSION: "written by a newer version of quire, in another format",
    Fault.HEADER: "the header does not match its checksum",
    Fault.OTHER: "content of other weights, settings or tokens than the name says",
    Fault.DIGEST: "the content does not match its checksum",
}


class DamagedBlock(QuireError):
    """A file of cached content that must not be used."""

    def __init__(self, fault: Fault, path: Path | str, detail: str = "") -> None:
        super().__init__(f"{path}: {fault}{': ' if detail else ''}{detail}")
        self.fault = fault
        self.path = path


class Header(NamedTuple):
    """The part of a file before the payload."""

    space: bytes
    content: Content
    payload_bytes: int


def file_bytes(num_token_bytes: int, payload_bytes: int) -> int:
    """Size of a file."""
    return _HEAD.size + num_token_bytes + DIGEST_BYTES + payload_bytes + DIGEST_BYTES


def write_private(path: Path | str, parts: Sequence[bytes | memoryview], *, may_replace: bool = True) -> None:
    """Write a file for this user only, complete or not at all.

    The file appears under its name when all of it is on disk: it is written to a temporary name in the same folder,
    synced and renamed. The folder is not synced: after a power failure the file may be missing. Raises FileExistsError
    if it exists and may not be replaced.
    """
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(descriptor, 0o600)  # whatever the umask is
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.writev(descriptor, [left]) :]
            now_ns = time.time_ns()  # the time of the last use, finer than the clock of the file system
            os.utime(descriptor, ns=(now_ns, now_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if may_replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # unlike a rename, fails if the name exists
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_block(path: Path | str, space: bytes, content: Content, payload: memoryview) -> None:
    """Write a file of content. A file that is lost costs no more than computing the content again."""
    payload = payload.cast("B")
    header = _pack_header(space, content, payload.nbytes)
    digest = sha256(header + checksum(payload)).digest()
    write_private(path, [header, payload, digest])


def read_block(path: Path | str, space: bytes, content: Content, out: memoryview) -> None:
    """Read the payload of `content` into `out`. Raises DamagedBlock; then `out` has no defined content.

    Reads are buffered: the page cache makes a second read faster, and neither the file nor `out` needs the alignment
    of O_DIRECT.
    """
    with _opened(path) as (descriptor, size):
        header, raw = _read_header(path, descriptor, size)
        if header != (space, content, out.nbytes):
            raise DamagedBlock(Fault.OTHER, path)
        _read_payload(path, descriptor, raw, out.cast("B"))


def check_block(path: Path | str) -> Header:
    """Read and check a whole file. Raises DamagedBlock."""
    with _opened(path) as (descriptor, size):
        header, raw = _read_header(path, descriptor, size)
        _read_payload(path, descriptor, raw, memoryview(bytearray(header.payload_bytes)))
        return header


def _read_payload(path: Path | str, descriptor: int, header: bytes, out: memoryview) -> None:
    """Read the payload, and compare its checksum."""
    stored = memoryview(bytearray(DIGEST_BYTES))
    os.lseek(descriptor, len(header), os.SEEK_SET)
    for left in (out, stored):
        while left:
            num_bytes = os.readv(descriptor, [left])
            if num_bytes == 0:
                raise DamagedBlock(Fault.TRUNCATED, path, "the file became shorter")
            left = left[num_bytes:]
    if sha256(header + checksum(out)).digest() != stored:
        raise DamagedBlock(Fault.DIGEST, path)


def read_blocks(reads: Sequence[BlockRead], space: bytes, now_ns: int) -> list[DamagedBlock | None]:
    """Read payloads, and set the time of their last use. Returns what is wrong with each file.

    The C library reads files that are as expected. The others are read here.
    """
    library = load_library()
    are_read = [False] * len(reads) if library is None else library.read_files(reads, space, now_ns)
    return [
        None if is_read else _read_alone(read, space, now_ns) for read, is_read in zip(reads, are_read, strict=True)
    ]


def _read_alone(read: BlockRead, space: bytes, now_ns: int) -> DamagedBlock | None:
    try:
        read_block(read.path, space, read.content, read.out)
    except DamagedBlock as damage:
        return damage
    with suppress(OSError):  # the file was evicted meanwhile, or the folder is read-only
        os.utime(read.path, ns=(now_ns, now_ns), follow_symlinks=False)
    return None


def read_header(path: Path | str) -> Header:
    """Read and check everything but the payload and its digest. Raises DamagedBlock."""
    with _opened(path) as (descriptor, size):
        return _read_header(path, descriptor, size)[0]


def _pack_header(space: bytes, content: Content, payload_bytes: int) -> bytes:
    """Everything before the payload."""
    kind, key, parent_key, tokens = content
    assert (len(space), len(key), len(parent_key)) == (SPACE_BYTES, KEY_BYTES, KEY_BYTES)
    assert len(tokens) <= MAX_TOKEN_BYTES
    head = _HEAD.pack(MAGIC, VERSION, kind, len(tokens), payload_bytes, space, key, parent_key) + tokens
    return head + sha256(head).digest()


@contextmanager
def _opened(path: Path | str) -> Iterator[tuple[int, int]]:
    """Open a regular file. Yields its descriptor and its size."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedBlock(Fault.MISSING, path) from None
    except OSError as error:
        is_special = error.errno in (errno.ELOOP, errno.ENXIO)
        raise DamagedBlock(Fault.NOT_A_FILE if is_special else Fault.UNREADABLE, path, str(error)) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedBlock(Fault.NOT_A_FILE, path)
        yield descriptor, found.st_size
    except OSError as error:
        raise DamagedBlock(Fault.UNREADABLE, path, str(error)) from error
    finally:
        os.close(descriptor)


def _read_header(path: Path | str, descriptor: int, size: int) -> tuple[Header, bytes]:
    """Read, check and return the header, also as bytes."""
    raw = os.pread(descriptor, _FIRST_READ, 0)
    if len(raw) < _HEAD.size:
        raise DamagedBlock(Fault.TRUNCATED, path, f"{size} bytes")
    magic, version, kind, num_token_bytes, payload_bytes, space, key, parent_key = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise DamagedBlock(Fault.MAGIC, path)
    if version != VERSION:
        fault = Fault.OLDER_VERSION if version < VERSION else Fault.NEWER_VERSION
        raise DamagedBlock(fault, path, f"format {version}, not {VERSION}")
    expected = file_bytes(num_token_bytes, payload_bytes)
    if size != expected:
        raise DamagedBlock(
            Fault.TRUNCATED if size < expected else Fault.TOO_LONG, path, f"{size} bytes, not {expected}"
        )
    if num_token_bytes > MAX_TOKEN_BYTES:
        raise DamagedBlock(Fault.HEADER, path, f"{num_token_bytes} bytes of tokens")
    end = _HEAD.size + num_token_bytes
    if len(raw) < end + DIGEST_BYTES:
        raw += os.pread(descriptor, end + DIGEST_BYTES - len(raw), len(raw))
    raw = raw[: end + DIGEST_BYTES]
    if sha256(raw[:end]).digest() != raw[end:]:
        raise DamagedBlock(Fault.HEADER, path)
    try:
        content = Content(MemoryKind(kind), key, parent_key, raw[_HEAD.size : end])
    except ValueError:
        raise DamagedBlock(Fault.HEADER, path, f"{kind = }") from None
    return Header(space, content, payload_bytes), raw
