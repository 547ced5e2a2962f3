"""Continues an interrupted run: checks that an output file belongs to the input and settings, and locks and reads it.

A small JSON file beside the output, `OUT.batch.json`, records the size and digest of the input, and the settings. Lines
may be appended to the input between runs: only the recorded part must be unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.batch.results import ResultFile, ResultScan, drop_failed, scan_results
from quire.errors import InvalidRequest

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies an input file by its content."""

    num_bytes: int
    sha256: str


def fingerprint(path: Path, num_bytes: int | None = None) -> Fingerprint:
    """The fingerprint of a file, or of its first `num_bytes` if it is longer."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while num_bytes is None or done < num_bytes:
            data = file.read(CHUNK_BYTES if num_bytes is None else min(CHUNK_BYTES, num_bytes - done))
            if not data:
                break
            digest.update(data)
            done += len(data)
    return Fingerprint(done, digest.hexdigest())


@dataclass(slots=True)
class Output:
    """An output file, locked for this process."""

    path: Path
    scan: ResultScan  # its contents when it was opened
    file: ResultFile
    _lock: BinaryIO

    def close(self) -> None:
        self.file.close()
        self._lock.close()


def open_output(
    path: Path,
    source: Path | None,
    settings: Mapping[str, Any],
    *,
    is_overwriting: bool = False,
    is_retrying: bool = False,
) -> Output:
    """Begin or continue an output file. Raises InvalidRequest if it belongs to another input or other settings.

    `source`: the input; None if it is a pipe, which cannot be continued. `is_retrying`: failed lines run again.
    """
    notes = path.with_name(f"{path.name}.batch.json")
    lock = _locked(notes)
    try:
        if is_overwriting:
            path.unlink(missing_ok=True)
        has_results = path.exists() and path.stat().st_size > 0
        if has_results:
            _check_same(path, notes, source, settings)
            if is_retrying:
                drop_failed(path)
        scan = scan_results(path) if has_results else ResultScan()
        _write_notes(notes, lock, source, settings)
        return Output(path, scan, ResultFile.append(path, scan.num_bytes), lock)
    except BaseException:
        lock.close()
        raise


def _locked(notes: Path) -> BinaryIO:
    """Lock the notes file. The operating system releases the lock when the process ends, even if it is killed."""
    file = os.fdopen(os.open(notes, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        out = notes.name.removesuffix(".batch.json")
        raise InvalidRequest(f"{out}: another `quire batch` is writing to it") from None
    return file


def _check_same(path: Path, notes: Path, source: Path | None, settings: Mapping[str, Any]) -> None:
    remedy = "give another output file, or --overwrite to replace it"
    try:
        found = json.loads(notes.read_bytes())
        before = Fingerprint(int(found["input_bytes"]), str(found["input_sha256"]))
        given = dict(found["settings"])
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{path} exists, and is not the output of an interrupted batch: {remedy}") from None
    if source is None:
        raise InvalidRequest(f"{path} exists, and a batch read from standard input cannot be continued: {remedy}")
    if fingerprint(source, before.num_bytes) != before:
        raise InvalidRequest(f"{path} holds results of an input other than {source}: {remedy}")
    for name, value in settings.items():
        if given.get(name) != value:
            text = f"{path} was begun with {name} = {given.get(name)!r:.80}, not {value!r:.80}"
            raise InvalidRequest(f"{text}: {remedy}")


def _write_notes(notes: Path, lock: BinaryIO, source: Path | None, settings: Mapping[str, Any]) -> None:
    """Write the notes in place, because the file is locked, and in one call, so that they are never incomplete."""
    found = Fingerprint(0, "") if source is None else fingerprint(source)
    value = {"input_bytes": found.num_bytes, "input_sha256": found.sha256, "settings": dict(settings)}
    data = json.dumps(value, indent=1).encode() + b"\n"
    if notes.read_bytes() != data:
        os.pwrite(lock.fileno(), data, 0)
        os.ftruncate(lock.fileno(), len(data))
        os.fsync(lock.fileno())
