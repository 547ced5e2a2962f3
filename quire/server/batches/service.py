"""Files and batches: their storage, and the service that runs batches.

`StateDir` keeps content, a JSON file of metadata ("facts") beside it, and an index in memory. Layout of the state
directory, readable by its owner only:

    lock                       locked by the server that uses the directory
    files/file-ID.jsonl        content
    files/file-ID.json         facts; written last, so that a file with facts is complete
    batches/batch_ID.json      facts
    batches/batch_ID.out.jsonl, batch_ID.err.jsonl   results so far; they become files at the end

Facts are written to a draft and renamed, so a crash leaves the old or the new ones. File names are ids that this
module generates: no client input is part of a path.

`BatchService` runs one batch at a time for each key, at low priority. The states of a batch are `validating`,
`in_progress`, `finalizing` and `completed`. Each change is written to disk, and results are appended as they arrive, so
that after a restart only the lines without a result are run. An unexpected exception ends a batch as `failed`, with an
error in its list and the results so far; a disk that may take writes again is waited for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from quire.batch.runner import (
    ENDPOINTS,
    BatchLine,
    BatchRequest,
    BatchRunner,
    InvalidLine,
    LineParser,
    LineSettings,
    Reply,
    Result,
    ResultFile,
    ResultScan,
    RetryPolicy,
    lock_file,
    result_id,
)
from quire.server.errors import ApiError, Kind
from quire.server.limits import Key, KeyRing

log = logging.getLogger(__name__)

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


class _Page(msgspec.Struct, kw_only=True):
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileList(_Page, kw_only=True):
    data: list[FileObject]


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


class BatchList(_Page, kw_only=True):
    data: list[BatchObject]


MAX_FILES = 1000  # of one key
MAX_UPLOADS = 16  # at once
MAX_KEY_UPLOADS = 8  # of one key: uploads that do not end must not use up MAX_UPLOADS
MAX_BATCHES = 1000  # of one key; the oldest finished ones are deleted
MAX_UNFINISHED = 100  # batches of one key


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
        self._writer = ThreadPoolExecutor(1, "quire-store")  # states are written in order
        self.growing = threading.Lock()  # of files of a key, against its limit

    # The directory

    async def open(self) -> bool:
        """Create the directory if it is missing, and lock it for this server. Raises ApiError if that fails.

        Returns whether it was opened now.
        """
        async with self._opening:
            if self._lock_file is not None:
                return False
            try:
                await asyncio.to_thread(self._open)
            except OSError as error:
                log.error("--state-dir %s cannot be used: %s", self.path, error.strerror or error)
                text = "this server cannot use its state directory; its log has the reason"
                raise ApiError(Kind.UNAVAILABLE, text, may_retry=False, reason="state_dir") from None
            return True

    async def close(self) -> None:
        """Release the directory after the writes that are in progress."""
        await asyncio.to_thread(self._writer.shutdown)
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _open(self) -> None:
        for folder in (self.path, self.path / "files", self.path / "batches"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = lock_file(self.path / "lock")
        except BlockingIOError:
            raise OSError(0, "another server uses it; each server needs its own --state-dir") from None
        self._files |= _read_all(self.path / "files", StoredFile)
        self._batches |= _read_all(self.path / "batches", StoredBatch)
        self._remove_orphans()
        self._lock_file = lock

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

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise if the files of this owner, stored or being uploaded, leave no room. Called from threads."""
        num_stored = sum(one.file.bytes for one in tuple(self._files.values()) if one.owner == owner)
        num_uploaded = sum(one.num_bytes for one in tuple(self.uploads) if one.owner == owner)
        if num_stored + num_uploaded + num_bytes > self._max_key_bytes:
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
        """Write facts. Cancelling the caller does not end the write, and no later one overtakes it."""
        data = msgspec.json.encode(value)
        writing = asyncio.get_running_loop().run_in_executor(self._writer, _write, self._facts(folder, name), data)
        await asyncio.shield(writing)


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
        elif path.suffix == ".json":
            try:
                found[path.stem] = DECODERS[kind].decode(path.read_bytes())
            except (OSError, msgspec.DecodeError) as error:
                log.error("%s cannot be read and is ignored: %s", path, error)
    return found


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


RESULT_FILES = {"out": "output_file_id", "err": "error_file_id"}  # kind of results -> field of the batch
MAX_LISTED_ERRORS = 100
MAX_IN_FLIGHT = 256  # requests of all batches
SWEEP_S = 3600.0
PRIORITY = "low"
# Errors of a disk that may end: a batch waits for that.
STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})
STORAGE_RETRY_S = 10.0


class Sends(Protocol):
    """The part of `Sender` that `BatchService` uses."""

    @property
    def max_num_seqs(self) -> int: ...
    async def send(self, key: Key, url: str, body: bytes, request_id: str) -> Reply: ...


class BatchService:
    """Runs the batches of all keys. Belongs to one event loop."""

    def __init__(self, store: StateDir, sender: Sends, keys: KeyRing) -> None:
        self.store = store
        self._sender = sender
        self._keys = keys
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the batches of an owner
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of unfinished batches, by id
        self._processing: set[str] = set()  # ids of batches whose task may be cancelled: they wait or run
        self._sweeping: asyncio.Task[None] | None = None
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._is_stopping = False

    # Called by the server

    async def start(self) -> None:
        """Continue the unfinished batches of an earlier run. Called once a model is loaded. Creates no directory."""
        self._in_flight = asyncio.Semaphore(min(MAX_IN_FLIGHT, self._sender.max_num_seqs))
        with suppress(Exception):  # the store has logged it, and requests get the error
            if (self.store.path / "batches").is_dir():
                await self.open()

    async def open(self) -> None:
        """Open and lock the state directory. Called before each use of the store."""
        if not await self.store.open():
            return
        self._sweeping = asyncio.create_task(self._sweep())
        unfinished = self.store.unfinished()
        if unfinished:
            log.info("continuing %d batch(es)", len(unfinished))
        for stored in unfinished:
            self._enqueue(stored)

    async def stop(self) -> None:
        """Cancel requests in flight. Their lines have no result and run again after the next start."""
        self._is_stopping = True
        tasks = [*self._tasks.values(), *([self._sweeping] if self._sweeping is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.close()

    async def _sweep(self) -> None:
        while True:
            try:
                await self.store.sweep()
            except Exception:
                log.exception("expired files could not be deleted")
            await asyncio.sleep(SWEEP_S)

    # Called by the endpoints

    async def create(self, request: CreateBatchRequest, key: Key) -> BatchObject:
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=COMPLETION_WINDOW,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=request.metadata,
        )
        after = request.output_expires_after
        stored = StoredBatch(key.owner, batch, MAX_EXPIRY_S if after is None else after.seconds)
        await self.store.add_batch(stored)
        self._enqueue(stored)
        return batch

    async def cancel(self, stored: StoredBatch) -> BatchObject:
        """Cancel a batch and its requests in flight. Results so far are kept."""
        batch = stored.batch
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            if batch.id in self._processing:
                self._tasks[batch.id].cancel()
            await self.store.save_batch(stored)
        return batch

    # Running

    def _enqueue(self, stored: StoredBatch) -> None:
        if not self._is_stopping:
            task = self._tasks[stored.batch.id] = asyncio.create_task(self._run(stored))
            task.add_done_callback(lambda _: self._tasks.pop(stored.batch.id))

    async def _run(self, stored: StoredBatch) -> None:
        """Run a batch from its current state to its end. Only a stop of the server leaves it unfinished.

        If its results or its state cannot be stored, try again later.
        """
        name, last = stored.batch.id, ""
        while True:
            try:
                if stored.ending is None:
                    stored.ending = await self._ending(stored)
                return await self._finalize(stored, stored.ending)
            except Exception as error:  # of the end of the batch only, such as a thread that cannot start
                why = str((error.strerror if isinstance(error, OSError) else None) or error)
                if why != last:
                    is_known = isinstance(error, OSError)
                    text = "%s cannot be stored: %s; it goes on when that has ended"
                    log.error(text, name, why, exc_info=None if is_known else error)
                last = why
            await asyncio.sleep(STORAGE_RETRY_S)

    async def _ending(self, stored: StoredBatch) -> Status:
        """Process a batch, which may be cancelled, and return the state in which it ends.

        Raises only what may succeed later: an OSError of a disk.
        """
        batch = stored.batch
        try:
            status = await self._process_or_cancel(stored)
            if status == "expired":
                await asyncio.to_thread(_expire, self.store, stored)
            return status
        except Exception as error:
            if _may_end(error):
                raise
            self._note_failure(batch, error)
            return "failed"

    async def _process_or_cancel(self, stored: StoredBatch) -> Status:
        """Process a batch when the earlier ones of its owner have been processed. It may be cancelled meanwhile."""
        batch = stored.batch
        self._processing.add(batch.id)
        try:
            async with self._turns[stored.owner]:
                return "cancelled" if batch.status == "cancelling" else await self._process(stored)
        except asyncio.CancelledError:
            if self._is_stopping:
                raise
            if batch.status != "cancelling":
                raise RuntimeError("the batch was cancelled by no request") from None
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return "cancelled"
        finally:
            self._processing.discard(batch.id)

    def _note_failure(self, batch: BatchObject, error: BaseException) -> None:
        """Log an unexpected error, and list it in the batch."""
        if not isinstance(error, _Failed):
            log.error("%s failed", batch.id, exc_info=error)
        message = str(error) if isinstance(error, _Failed) else "the server failed; its log has the reason"
        listed = [] if batch.errors is None else batch.errors.data
        batch.errors = BatchErrors([BatchError("server_error", message), *listed])

    async def _process(self, stored: StoredBatch) -> Status:
        """Validate, then send until the end of the completion window."""
        batch = stored.batch
        key = self._keys.find_owner(stored.owner)
        if key is None:
            raise _Failed("the API key that created this batch is no longer in use")
        source = self.store.content(batch.input_file_id)
        if batch.status == "validating":
            batch.request_counts, errors, num_valid = await asyncio.to_thread(_validate, source, batch.endpoint)
            batch.errors = BatchErrors(errors) if errors else None
            if not num_valid:
                return "failed"
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await self.store.save_batch(stored)
        if batch.status == "in_progress":
            window = asyncio.timeout(max(0.0, batch.expires_at - time.time()))
            try:
                async with window:
                    await self._send_all(stored, source, key)
            except TimeoutError:
                if not window.expired():  # a timeout of something else
                    raise
                return "expired"
        return "completed"

    async def _send_all(self, stored: StoredBatch, source: Path, key: Key) -> None:
        async def send(request: BatchRequest) -> Reply:
            async with self._in_flight:
                return await self._sender.send(key, request.url, request.body, result_id(request.number, stored.hex_id))

        with (
            _open_results(self.store, stored) as (good, bad),
            _open_lines(source, stored.batch.endpoint, good.scan) as lines,
        ):

            def take(result: Result) -> None:
                (good if result.is_good else bad).write(result)
                _count(stored.batch, good.scan)

            _count(stored.batch, good.scan)
            retry = RetryPolicy(max_tries=None)  # until the batch expires
            await BatchRunner(lines, send, take, max_in_flight=self._share(key), retry=retry).run()

    def _share(self, key: Key) -> int:
        """Maximum requests in flight of one batch: at most half of the requests that the key may have open."""
        most = min(MAX_IN_FLIGHT, self._sender.max_num_seqs)
        limit = key.limits.max_requests
        return most if limit is None else max(1, min(most, limit // 2))

    # Finishing

    async def _finalize(self, stored: StoredBatch, status: Status) -> None:
        """Turn results into files. Each step may be repeated after a crash."""
        batch = stored.batch
        for kind, field in RESULT_FILES.items():
            path = self.store.results(stored, kind)
            if getattr(batch, field) is None and path.is_file() and path.stat().st_size:
                setattr(batch, field, new_file("", 0, "batch_output", 0).id)
        if status == "completed":
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await self.store.save_batch(stored)
        for kind, field in RESULT_FILES.items():
            if (file_id := getattr(batch, field)) is not None:
                name = f"{batch.id}_{field.removesuffix('_file_id')}.jsonl"
                facts = new_file(name, 0, "batch_output", stored.output_ttl_s)
                facts.id = file_id
                try:
                    await self.store.add_file(stored.owner, self.store.results(stored, kind), facts)
                except Exception as error:
                    if _may_end(error):
                        raise
                    self._note_failure(batch, error)
                    status = "failed"
                    setattr(batch, field, None)
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        await self.store.save_batch(stored)
        counts = batch.request_counts
        log.info("%s %s: %d of %d lines, %d failed", batch.id, status, counts.completed, counts.total, counts.failed)


def _may_end(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in STORAGE


class _Failed(Exception):
    """The whole batch failed. The message is sent to the client."""


@contextmanager
def _open_results(store: StateDir, stored: StoredBatch) -> Iterator[tuple[ResultFile, ResultFile]]:
    """The two result files of a running batch. Both have one scan, of both."""
    scan = ResultScan()
    with (
        closing(ResultFile.append(store.results(stored, "out"), scan, stored.hex_id)) as good,
        closing(ResultFile.append(store.results(stored, "err"), scan, stored.hex_id)) as bad,
    ):
        yield good, bad


def _count(batch: BatchObject, scan: ResultScan) -> None:
    batch.request_counts.completed, batch.request_counts.failed = scan.num_good, scan.num_failed


@contextmanager
def _open_lines(source: Path, endpoint: str, done: ResultScan) -> Iterator[Iterator[BatchLine]]:
    """The lines that have no result."""
    with source.open("rb") as file:
        parser = LineParser(LineSettings(priority=PRIORITY, endpoint=endpoint, allows_plain=False))
        yield (line for line in parser.parse_all(file) if line.number not in done.finished)


def _validate(source: Path, endpoint: str) -> tuple[RequestCounts, list[BatchError], int]:
    """Return the counts, the first errors, and the number of valid lines."""
    counts, num_valid = RequestCounts(), 0
    errors: list[BatchError] = []
    with _open_lines(source, endpoint, ResultScan()) as lines:
        for line in lines:
            counts.total += 1
            num_valid += isinstance(line, BatchRequest)
            if isinstance(line, InvalidLine) and len(errors) < MAX_LISTED_ERRORS:
                errors.append(BatchError(line.code, line.message, line.number, line.param))
    if not counts.total:
        errors.append(BatchError("empty_file", "the input file has no lines"))
    return counts, errors, num_valid


def _expire(store: StateDir, stored: StoredBatch) -> None:
    """Write an error for each line that has no result."""
    batch, source = stored.batch, store.content(stored.batch.input_file_id)
    text = "the completion window of the batch ended before this request was run"
    with _open_results(store, stored) as (good, bad), _open_lines(source, batch.endpoint, good.scan) as lines:
        for line in lines:
            bad.write(Result(InvalidLine(line.number, line.custom_id, text, code="batch_expired"), None))
        _count(batch, good.scan)
