"""Runs batches inside the server: one at a time for each key, at low priority. Continues them after a restart.

The states of a batch are `validating`, `in_progress`, `finalizing` and `completed`. Each change is written to disk, and
results are appended as they arrive, so that after a restart only the lines without a result are run. An unexpected
exception ends a batch as `failed`, with an error in its list and the results so far; a disk that may take writes again
is waited for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from quire.batch.lines import BatchLine, BatchRequest, InvalidLine, LineParser, LineSettings
from quire.batch.results import Reply, Result, ResultFile, ResultScan, result_id
from quire.batch.runner import BatchRunner, RetryPolicy
from quire.server.batches.store import (
    COMPLETION_WINDOW,
    MAX_EXPIRY_S,
    WINDOW_S,
    BatchError,
    BatchErrors,
    BatchObject,
    CreateBatchRequest,
    RequestCounts,
    StateDir,
    Status,
    StoredBatch,
    new_file,
)
from quire.server.limits import Key, KeyRing

MAX_LISTED_ERRORS = 100
MAX_IN_FLIGHT = 256  # requests of all batches
SWEEP_S = 3600.0
PRIORITY = "low"
# Errors of a disk that may end: a batch waits for that.
STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})
STORAGE_RETRY_S = 10.0

log = logging.getLogger(__name__)


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
        self._queues: dict[str, deque[StoredBatch]] = {}  # owner -> unfinished batches; the first one runs
        self._tasks: dict[str, asyncio.Task[None]] = {}  # owner -> the task that runs them
        self._processing: set[str] = set()  # ids of batches whose task may be cancelled
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
        if self.store.is_open:
            return
        await self.store.open()
        if self._sweeping is None:
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
            queue = self._queues.get(stored.owner, deque())
            if batch.id in self._processing:
                self._tasks[stored.owner].cancel()
            elif stored in queue and queue[0] is not stored:  # it has not started
                queue.remove(stored)
                await self._finalize(stored, "cancelled")
                return batch
            await self.store.save_batch(stored)
        return batch

    # Running

    def _enqueue(self, stored: StoredBatch) -> None:
        queue = self._queues.setdefault(stored.owner, deque())
        queue.append(stored)
        if stored.owner not in self._tasks and not self._is_stopping:
            self._tasks[stored.owner] = asyncio.create_task(self._run_queue(stored.owner, queue))

    async def _run_queue(self, owner: str, queue: deque[StoredBatch]) -> None:
        try:
            while queue:
                await self._run(queue[0])
                queue.popleft()
        finally:
            del self._tasks[owner], self._queues[owner]

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
        if batch.output_file_id or batch.error_file_id:  # of a server without `ending`
            return "expired"
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
        batch = stored.batch
        self._processing.add(batch.id)
        try:
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
        if batch.status == "validating" and not await self._validate(stored, source):
            return "failed"
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

    async def _validate(self, stored: StoredBatch, source: Path) -> bool:
        """Count and check the lines. Returns whether one of them is valid."""
        batch = stored.batch
        counts, errors, num_valid = await asyncio.to_thread(_validate, source, batch.endpoint)
        if not counts.total:
            errors = [BatchError("empty_file", "the input file has no lines")]
        batch.request_counts = counts
        batch.errors = BatchErrors(errors) if errors else None
        if num_valid:
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await self.store.save_batch(stored)
        return num_valid > 0

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
        stored.ending = status
        paths = {kind: self.store.results(stored, kind) for kind in ("out", "err")}
        ids = {"out": batch.output_file_id, "err": batch.error_file_id}
        for kind, path in paths.items():
            if ids[kind] is None and path.is_file() and path.stat().st_size:
                ids[kind] = new_file("", 0, "batch_output", 0).id
        if status == "completed":
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
        batch.output_file_id, batch.error_file_id = ids["out"], ids["err"]
        await self.store.save_batch(stored)
        for kind, path in paths.items():
            if (file_id := ids[kind]) is not None:
                name = f"{batch.id}_{'output' if kind == 'out' else 'error'}.jsonl"
                facts = new_file(name, 0, "batch_output", stored.output_ttl_s)
                facts.id = file_id
                try:
                    await self.store.add_file(stored.owner, path, facts)
                except Exception as error:
                    if _may_end(error):
                        raise
                    self._note_failure(batch, error)
                    status = "failed"
                    setattr(batch, "output_file_id" if kind == "out" else "error_file_id", None)
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
    return counts, errors, num_valid


def _expire(store: StateDir, stored: StoredBatch) -> None:
    """Write an error for each line that has no result."""
    batch, source = stored.batch, store.content(stored.batch.input_file_id)
    text = "the completion window of the batch ended before this request was run"
    with _open_results(store, stored) as (good, bad), _open_lines(source, batch.endpoint, good.scan) as lines:
        for line in lines:
            bad.write_error(line, "batch_expired", text)
        _count(batch, good.scan)
