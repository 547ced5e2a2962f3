"""Files of cached content: round trips, atomic writes, and the fault that each kind of damage is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.step import Content, MemoryKind
from quire.engine.levels.block_file import (
    MAX_TOKEN_BYTES,
    DamagedBlock,
    Fault,
    check_block,
    file_bytes,
    read_block,
    read_header,
    write_block,
)
from tests.engine.levels.contents import PAYLOAD_BYTES, make_content, make_payload, new_buffer, temporary_files

SPACE = bytes(range(32))
VERSION_AT, KIND_AT, SPACE_AT, TOKENS_AT = 8, 10, 24, 88


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    write_block(path, SPACE, make_content(7), make_payload(make_content(7)))
    return path


def fault_of(path: Path, content: Content | None = None, num_bytes: int = PAYLOAD_BYTES) -> Fault:
    with pytest.raises(DamagedBlock) as caught:
        read_block(path, SPACE, content or make_content(7), new_buffer(num_bytes))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: {caught.value.fault}")
    return caught.value.fault


def edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize(("num_tokens", "num_bytes"), [(0, 1), (1, 33), (32, 1000), (1024, 3 << 20), (7, 0)])
def test_a_round_trip(tmp_path: Path, kind: MemoryKind, num_tokens: int, num_bytes: int) -> None:
    content = make_content(3, kind, num_tokens)
    payload, out = make_payload(content, num_bytes), new_buffer(num_bytes)
    write_block(tmp_path / "x", SPACE, content, payload)
    assert (tmp_path / "x").stat().st_size == file_bytes(4 * num_tokens, num_bytes)
    read_block(tmp_path / "x", SPACE, content, out)
    assert out == payload
    for header in (read_header(tmp_path / "x"), check_block(tmp_path / "x")):
        assert header == (SPACE, content, num_bytes)


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, [buffers[0][:100]]))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, [buffers[0][:77]]))
    content = make_content(1)
    write_block(tmp_path / "x", SPACE, content, make_payload(content))
    out = new_buffer()
    read_block(tmp_path / "x", SPACE, content, out)
    assert out == make_payload(content)


@pytest.mark.parametrize("call", ["writev", "fsync", "utime", "fchmod", "replace"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    content = make_content(1)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_block(tmp_path / "x", SPACE, content, make_payload(content))
    assert not any(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(os, "writev", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        write_block(path, SPACE, make_content(8), make_payload(make_content(8)))
    assert path.read_bytes() == before
    assert not temporary_files(path.parent)


def test_the_data_is_synced_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        calls.append(f"sync {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def record_rename(source: str, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    content = make_content(1)
    write_block(tmp_path / "x", SPACE, content, make_payload(content))
    assert calls == [f"sync {(tmp_path / 'x').stat().st_size}", "rename"]


# Faults


def test_missing_files_and_things_that_are_not_files(path: Path, tmp_path: Path) -> None:
    assert fault_of(tmp_path / "nothing") is Fault.MISSING
    assert fault_of(path / "below a file") is Fault.MISSING
    (tmp_path / "folder").mkdir()
    assert fault_of(tmp_path / "folder") is Fault.NOT_A_FILE
    (tmp_path / "link").symlink_to(path)
    assert fault_of(tmp_path / "link") is Fault.NOT_A_FILE
    os.mkfifo(tmp_path / "pipe")
    assert fault_of(tmp_path / "pipe") is Fault.NOT_A_FILE


def test_errors_of_the_system_are_faults(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for call in ("open", "pread", "readv", "fstat"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            assert fault_of(path) is Fault.UNREADABLE


def test_sizes(path: Path) -> None:
    size = path.stat().st_size
    for length in (size - 1, 200, 87, 0):
        os.truncate(path, length)
        assert fault_of(path) is Fault.TRUNCATED
        with pytest.raises(DamagedBlock):
            read_header(path)
    write_block(path, SPACE, make_content(7), make_payload(make_content(7)))
    os.truncate(path, size + 1)
    assert fault_of(path) is Fault.TOO_LONG


def test_a_file_that_shrinks_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readv", lambda *_: 0)
    assert fault_of(path) is Fault.TRUNCATED


@pytest.mark.parametrize(
    ("position", "value", "fault"),
    [
        (0, 0, Fault.MAGIC),
        (VERSION_AT, 0, Fault.OLDER_VERSION),
        (VERSION_AT, 2, Fault.NEWER_VERSION),
        (VERSION_AT + 1, 1, Fault.NEWER_VERSION),
        (KIND_AT, 1, Fault.HEADER),
        (12, 0, Fault.TOO_LONG),  # number of token bytes
        (15, 255, Fault.TRUNCATED),
        (23, 255, Fault.TRUNCATED),  # length of the payload
        (SPACE_AT, 99, Fault.HEADER),
        (TOKENS_AT, 99, Fault.HEADER),
        (TOKENS_AT + 128, 0, Fault.HEADER),  # digest of the header
        (TOKENS_AT + 128 + 32, 0, Fault.DIGEST),
        (-33, 0, Fault.DIGEST),
        (-1, 0, Fault.DIGEST),
    ],
)
def test_a_changed_byte(path: Path, position: int, value: int, fault: Fault) -> None:
    assert path.read_bytes()[position] != value
    edit(path, lambda data: data.__setitem__(position, value))
    assert fault_of(path) is fault
    with pytest.raises(DamagedBlock) as caught:
        check_block(path)
    assert caught.value.fault is fault


def test_a_forged_kind_with_a_valid_digest(tmp_path: Path) -> None:
    unknown: Any = 9
    forged = make_content(7)._replace(kind=unknown)
    write_block(tmp_path / "x", SPACE, forged, make_payload(forged))
    assert fault_of(tmp_path / "x") is Fault.HEADER


def test_an_intact_file_of_something_else(path: Path) -> None:
    wanted = make_content(7)
    for content in (
        wanted._replace(kind=MemoryKind.STATE),
        wanted._replace(key=bytes(16)),
        wanted._replace(parent_key=bytes(16)),
        wanted._replace(tokens=wanted.tokens[:-4]),
    ):
        assert fault_of(path, content) is Fault.OTHER
    assert fault_of(path, wanted, PAYLOAD_BYTES - 1) is Fault.OTHER
    write_block(path, bytes(32), wanted, make_payload(wanted))
    assert fault_of(path) is Fault.OTHER


def test_a_header_with_too_many_tokens_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.levels.block_file.MAX_TOKEN_BYTES", 1 << 20)
    content = make_content(1, num_tokens=(MAX_TOKEN_BYTES + 4) // 4)
    write_block(tmp_path / "x", SPACE, content, make_payload(content))
    monkeypatch.undo()
    with pytest.raises(DamagedBlock) as caught:
        read_header(tmp_path / "x")
    assert caught.value.fault is Fault.HEADER
