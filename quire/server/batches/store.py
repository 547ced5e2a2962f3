"""Files and batches on disk: content, a JSON file of metadata ("facts") beside it, and an index in memory.

Layout of the state directory, readable by its owner only:

    lock                       locked by the server that uses the directory
    files/file-ID.jsonl        content
    files/file-ID.json         facts; written last, so that a file with facts is complete
    batches/batch_ID.json      facts
    batches/batch_ID.out.jsonl, batch_ID.err.jsonl   results so far; they become files at the end

Facts are written to a draft and renamed, so a crash leaves the old or the new ones. File names are ids that this
module generates: no client input is part of a path.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta

from quire.batch.lines import ENDPOINTS
from quire.server.errors import ApiError, Kind
from quire.server.limits import Key

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
MAX_METADATA = 16
COMPLETION_WINDOW = "24h"
WINDOW_S = 86_400
MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_Id = Annotated[str, Meta(max_length=64)]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class UploadForm(msgspec.Struct):
    """The parts of a multipart upload."""

    file: Annotated[bytes, Meta(description="JSONL, one request per line.")]
    purpose: Annotated[Literal["batch"], Meta(description="The purpose of the file. Only batch is supported.")]


class FilesQuery(msgspec.Struct, frozen=True):
    after: Annotated[_Id | None, Meta(description="List the files that follow this one.")] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[_Id | None, Meta(description="Only files of this purpose.")] = None


class BatchesQuery(msgspec.Struct, frozen=True):
    after: Annotated[_Id | None, Meta(description="List the batches that follow this one.")] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_BATCHES)] = 20


class ExpiresAfter(msgspec.Struct):
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
    anchor: Literal["created_at"] = "created_at"


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: Annotated[_Id, Meta(description="An uploaded file of the purpose batch.")]
    endpoint: Annotated[
        str,
        Meta(description="The URL that every line of the file has.", extra_json_schema={"enum": list(ENDPOINTS)}),
    ]
    completion_window: Annotated[
        str,
        Meta(description="Requests that have not run by then expire.", extra_json_schema={"enum": [COMPLETION_WINDOW]}),
    ]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA, description="Returned with the batch."),
        ]
        | None
    ) = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Meta(description="How long the output files are kept; 30 days by default.")
    ] = None


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


MAX_FILES = 1000  # of one key
MAX_UPLOADS = 16  # at once
MAX_KEY_UPLOADS = 8  # of one key: uploads that do not end must not use up MAX_UPLOADS
MAX_BATCHES = 1000  # of one key; the oldest finished ones are deleted
MAX_UNFINISHED = 100  # batches of one key

log = logging.getLogger(__name__)


class StoredFile(msgspec.Struct):
    owner: str
    file: FileObject


class StoredBatch(msgspec.Struct):
    owner: str
    batch: BatchObject
    output_ttl_s: int = MAX_EXPIRY_S
    ending: Status | None = None  # the state in which it ends, from the moment that its results become files

    @property
    def is_finished(self) -> bool:
        return self.batch.status not in UNFINISHED

    @property
    def hex_id(self) -> str:
        return self.batch.id.removeprefix("batch_")


# Built at import, because they are used in a thread: see decision 0044.
DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (StoredFile, StoredBatch)
}

S = TypeVar("S", StoredFile, StoredBatch)


class StateDir:
    """The files and batches of one server. Belongs to one event loop; disk access runs in threads."""

    def __init__(self, path: Path, max_file_bytes: int, max_key_bytes: int) -> None:
        self.path = path
        self.max_file_bytes = max_file_bytes
        self._max_key_bytes = max_key_bytes
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}
        self.uploads: set[Upload] = set()  # that are being written
        self._lock_file: BinaryIO | None = None
        self._opening = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._saves: set[asyncio.Task[None]] = set()
        self.growing = threading.Lock()  # of files of a key, against its limit

    # The directory

    async def open(self) -> None:
        """Create the directory if it is missing, and lock it for this server. Raises ApiError if that fails."""
        async with self._opening:
            if self._lock_file is None:
                try:
                    await asyncio.to_thread(self._open)
                except OSError as error:
                    log.error("--state-dir %s cannot be used: %s", self.path, error.strerror or error)
                    text = "this server cannot use its state directory; its log has the reason"
                    raise ApiError(Kind.UNAVAILABLE, text, may_retry=False, reason="state_dir") from None

    @property
    def is_open(self) -> bool:
        return self._lock_file is not None

    async def close(self) -> None:
        """Release the directory after the writes that are in progress."""
        await asyncio.gather(*self._saves, return_exceptions=True)
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _open(self) -> None:
        for folder in (self.path, self.path / "files", self.path / "batches"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_file = os.fdopen(os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise OSError(0, "another server uses it; each server needs its own --state-dir") from None
        self._files |= _read_all(self.path / "files", StoredFile)
        self._batches |= _read_all(self.path / "batches", StoredBatch)
        self._remove_orphans()
        self._lock_file = lock_file

    def _remove_orphans(self) -> None:
        """Delete content whose facts were not written before a crash, unless a batch will still write them."""
        outputs = {one.batch.output_file_id for one in self._batches.values()}
        outputs |= {one.batch.error_file_id for one in self._batches.values()}
        for path in (self.path / "files").glob("*.jsonl"):
            if path.stem not in outputs and not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    # Files

    def begin_upload(self, key: Key, num_bytes: int) -> Upload:
        """Start an upload of this announced size. Bytes count towards the limit of the key as they arrive."""
        num_own = sum(one.owner == key.owner for one in self.uploads)
        if num_own >= MAX_KEY_UPLOADS or len(self.uploads) >= MAX_UPLOADS:
            whose = f"{num_own} files of this key" if num_own >= MAX_KEY_UPLOADS else f"{len(self.uploads)} files"
            text = f"{whose} are being uploaded, which is the limit"
            raise ApiError(Kind.OVERLOADED, text, retry_after_s=5.0, reason="uploads")
        num_files = sum(one.owner == key.owner for one in self._files.values())
        if num_files >= MAX_FILES:
            raise ApiError(Kind.TOO_LARGE, f"this key has {num_files} files, which is the limit: delete some")
        self.check_size(num_bytes)
        return Upload(self, key.owner)

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_file_bytes:
            text = f"a file of more than {self.max_file_bytes} bytes is not accepted; see --max-file-size"
            raise ApiError(Kind.TOO_LARGE, text, param="file")

    def num_bytes(self, owner: str) -> int:
        """Bytes of this owner, stored or being uploaded. Called from threads."""
        stored = sum(one.file.bytes for one in tuple(self._files.values()) if one.owner == owner)
        return stored + sum(one.num_bytes for one in tuple(self.uploads) if one.owner == owner)

    def check_room(self, owner: str, num_bytes: int) -> None:
        if self.num_bytes(owner) + num_bytes > self._max_key_bytes:
            text = f"the files of this key would exceed {self._max_key_bytes} bytes, its limit: delete some"
            raise ApiError(Kind.TOO_LARGE, text, param="file")

    async def add_file(self, owner: str, content: Path, facts: FileObject) -> FileObject:
        """Move content into the store under the id of its facts, unless it was moved before a crash."""
        stored = StoredFile(owner, facts)
        facts.bytes = await asyncio.to_thread(_move, content, self.content(facts.id))
        await self._save("files", facts.id, stored)
        self._files[facts.id] = stored
        return facts

    def content(self, file_id: str) -> Path:
        return self.path / "files" / f"{file_id}.jsonl"

    def find_file(self, file_id: str, key: Key, param: str | None = None) -> FileObject:
        found = self._files.get(file_id)
        if found is None or not _may_see(key, found.owner) or found.file.expires_at <= time.time():
            raise ApiError(Kind.NOT_FOUND, f"there is no file {file_id!r:.80}", param=param, reason="no_file")
        return found.file

    def list_files(self, key: Key) -> list[FileObject]:
        """The files that this key may see, newest first."""
        now_s = time.time()
        found = [one.file for one in self._files.values() if _may_see(key, one.owner) and one.file.expires_at > now_s]
        return sorted(found, key=lambda one: (one.created_at, one.id), reverse=True)

    async def delete_file(self, file_id: str) -> None:
        for one in self._batches.values():
            if one.batch.input_file_id == file_id and not one.is_finished:
                text = f"the file is the input of {one.batch.id}, which is {one.batch.status}: cancel that first"
                raise ApiError(Kind.INVALID, text, param="file_id")
        self._files.pop(file_id, None)
        await asyncio.to_thread(_remove, [self._facts("files", file_id), self.content(file_id)])

    # Batches

    def results(self, stored: StoredBatch, kind: str) -> Path:
        """The path of a batch's results while it runs. `kind`: out or err."""
        return self.path / "batches" / f"{stored.batch.id}.{kind}.jsonl"

    async def add_batch(self, stored: StoredBatch) -> None:
        unfinished = [one for one in self.unfinished() if one.owner == stored.owner]
        if len(unfinished) >= MAX_UNFINISHED:
            text = f"this key has {len(unfinished)} batches that have not ended, which is the limit"
            raise ApiError(Kind.RATE_LIMITED, text, retry_after_s=60.0, reason="key_batches")
        self._batches[stored.batch.id] = stored
        try:
            await self.save_batch(stored)
        except BaseException:
            del self._batches[stored.batch.id]  # the client gets an error, and nobody would run it
            raise
        ended = [one for one in self._in_order() if one.owner == stored.owner and one.is_finished]
        for old in ended[: max(0, len(ended) + len(unfinished) + 1 - MAX_BATCHES)]:
            await self._forget_batch(old)

    async def save_batch(self, stored: StoredBatch) -> None:
        await self._save("batches", stored.batch.id, stored)

    def find_batch(self, batch_id: str, key: Key) -> StoredBatch:
        found = self._batches.get(batch_id)
        if found is None or not _may_see(key, found.owner):
            raise ApiError(Kind.NOT_FOUND, f"there is no batch {batch_id!r:.80}", reason="no_batch")
        return found

    def list_batches(self, key: Key) -> list[BatchObject]:
        """The batches that this key may see, newest first."""
        return [one.batch for one in reversed(self._in_order()) if _may_see(key, one.owner)]

    def unfinished(self) -> list[StoredBatch]:
        """All unfinished batches, oldest first."""
        return [one for one in self._in_order() if not one.is_finished]

    def _in_order(self) -> list[StoredBatch]:
        return sorted(self._batches.values(), key=lambda one: (one.batch.created_at, one.batch.id))

    async def _forget_batch(self, stored: StoredBatch) -> None:
        self._batches.pop(stored.batch.id, None)
        paths = [self._facts("batches", stored.batch.id), self.results(stored, "out"), self.results(stored, "err")]
        await asyncio.to_thread(_remove, paths)

    # Both

    async def sweep(self) -> None:
        """Delete expired files, and finished batches 30 days after they were created."""
        now_s = time.time()
        inputs = {one.batch.input_file_id for one in self._batches.values() if not one.is_finished}
        for stored in list(self._files.values()):
            if stored.file.expires_at <= now_s and stored.file.id not in inputs:
                await self.delete_file(stored.file.id)
        for one in list(self._batches.values()):
            if one.is_finished and one.batch.created_at + MAX_EXPIRY_S <= now_s:
                await self._forget_batch(one)

    def _facts(self, folder: str, name: str) -> Path:
        return self.path / folder / f"{name}.json"

    async def _save(self, folder: str, name: str, value: msgspec.Struct) -> None:
        """Write facts. Cancelling the caller does not end the write, so that a later one cannot overtake it."""
        task = asyncio.create_task(self._save_alone(folder, name, value))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        await asyncio.shield(task)

    async def _save_alone(self, folder: str, name: str, value: msgspec.Struct) -> None:
        async with self._saving:  # one writer at a time, so that states are written in order
            await asyncio.to_thread(_write, self._facts(folder, name), msgspec.json.encode(value))


class Upload:
    """Content of an upload, until it is moved into the store.

    The lock is needed because a cancelled request may close the upload while a thread is still writing.
    """

    def __init__(self, store: StateDir, owner: str) -> None:
        self._store = store
        self.owner = owner
        self.path = store.path / "files" / f"{secrets.token_hex(12)}.upload"
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        store.uploads.add(self)

    def write(self, data: bytes) -> None:
        """Append content. Raises ValueError if the upload was closed."""
        self._store.check_size(self.num_bytes + len(data))
        with self._lock:
            if self._file.closed:
                raise ValueError("the upload was closed")
            with self._store.growing:
                self._store.check_room(self.owner, len(data))
                self.num_bytes += len(data)
            self._file.write(data)

    def finish(self) -> None:
        """Write the complete content to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Delete the content unless it was moved into the store."""
        with self._lock:
            try:
                self._file.close()  # writes what is buffered, which a full disk refuses
            finally:
                self._store.uploads.discard(self)
                self.path.unlink(missing_ok=True)


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Report an error of the disk to the client, and log it in one line."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        log.error("%s could not be stored in --state-dir: %s", what, reason)
        raise ApiError(Kind.FAILED, f"{what} could not be stored: {reason}", reason="storage") from None


def new_file(filename: str, num_bytes: int, purpose: str, ttl_s: int) -> FileObject:
    now = int(time.time())
    return FileObject(
        id=f"file-{secrets.token_hex(12)}",
        bytes=num_bytes,
        created_at=now,
        expires_at=now + ttl_s,
        filename=filename,
        purpose="batch" if purpose == "batch" else "batch_output",
    )


def _move(content: Path, place: Path) -> int:
    """Move content to its place and return its size."""
    if content.exists():
        content.replace(place)
    return place.stat().st_size


def _may_see(key: Key, owner: str) -> bool:
    return key.is_admin or key.owner == owner


def _read_all(folder: Path, kind: type[S]) -> dict[str, S]:
    """Read all facts, by id. Deletes drafts of a server that was killed."""
    found: dict[str, S] = {}
    for path in folder.iterdir():
        if path.suffix in (".draft", ".upload"):
            path.unlink(missing_ok=True)
        elif path.suffix == ".json" and (facts := _read(path, kind)) is not None:
            found[path.stem] = facts
    return found


def _read(path: Path, kind: type[S]) -> S | None:
    try:
        found: S = DECODERS[kind].decode(path.read_bytes())
        return found
    except (OSError, msgspec.DecodeError) as error:
        log.error("%s cannot be read and is ignored: %s", path, error)
        return None


def _write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".draft")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
