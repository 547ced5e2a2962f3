"""The digest of a model's files, and its memo."""

from __future__ import annotations

import json
import os
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from quire.engine import fingerprint as module
from quire.engine.fingerprint import weights_digest


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "config.json")]
    for number, path in enumerate(paths):
        path.write_bytes(os.urandom(3000 + number))
    return paths


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """The pieces of files that are read."""
    seen: list[tuple[Path, int]] = []
    digest = module._digest_piece

    def record(piece: tuple[Path, int]) -> bytes:
        seen.append(piece)
        return digest(piece)

    monkeypatch.setattr(module, "_digest_piece", record)
    return seen


def test_the_memo_saves_reading(files: list[Path], tmp_path: Path, pieces: list[tuple[Path, int]]) -> None:
    memo = tmp_path / "memo.json"
    first = weights_digest(files, memo)
    assert sorted(pieces) == [(file, 0) for file in files]
    assert weights_digest(files, memo) == first
    assert weights_digest([files[2], files[0], files[1]], memo) == first  # in any order
    assert len(pieces) == 3
    assert memo.stat().st_mode & 0o777 == 0o600
    assert weights_digest(files[:2], memo) != first
    assert len(pieces) == 3


def test_the_digest_depends_on_contents_alone(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    first = weights_digest(files, memo)
    renamed = files[0].rename(tmp_path / "renamed")
    assert weights_digest([renamed, *files[1:]], memo) == first
    link = tmp_path / "link"
    link.symlink_to(renamed)
    assert weights_digest([link, *files[1:]], memo) == first
    data = bytearray(renamed.read_bytes())
    data[1500] ^= 1
    renamed.write_bytes(data)
    assert weights_digest([renamed, *files[1:]], memo) != first


@pytest.mark.parametrize("change", ["content", "time", "inode"])
def test_a_changed_file_is_read_again(
    files: list[Path], tmp_path: Path, pieces: list[tuple[Path, int]], change: str
) -> None:
    memo = tmp_path / "memo.json"
    first = weights_digest(files, memo)
    found = files[0].stat()
    match change:
        case "content":
            files[0].write_bytes(bytes(3001))
        case "time":
            os.utime(files[0], ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        case _:
            data = files[0].read_bytes()
            files[0].rename(tmp_path / "old")  # keeps the inode in use
            files[0].write_bytes(data)
            os.utime(files[0], ns=(found.st_atime_ns, found.st_mtime_ns))
    pieces.clear()
    assert (weights_digest(files, memo) == first) == (change != "content")
    assert pieces == [(files[0], 0)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 1, "files": [3]}', '{"format": 9, "files": {}}', "[" * 9999],
)
def test_a_damaged_memo_is_ignored_and_replaced(files: list[Path], tmp_path: Path, text: str) -> None:
    memo = tmp_path / "memo.json"
    first = weights_digest(files, tmp_path / "another")
    memo.write_text(text)
    assert weights_digest(files, memo) == first
    assert len(json.loads(memo.read_text())["files"]) == 3


@pytest.mark.parametrize("entry", [3, [], ["x", 1, 2, "y"], [1, 2, 3, 4], [1, 2, 3, "short"], None])
def test_a_damaged_entry_is_ignored(files: list[Path], tmp_path: Path, entry: object) -> None:
    memo = tmp_path / "memo.json"
    first = weights_digest(files, memo)
    found = json.loads(memo.read_text())
    found["files"][str(files[1])] = entry
    memo.write_text(json.dumps(found))
    assert weights_digest(files, memo) == first


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = tmp_path / "memo.json"
    digest = module._digest_piece

    def change(piece: tuple[Path, int]) -> bytes:
        found = digest(piece)
        if piece[0] == files[0]:
            files[0].write_bytes(b"another model")
        return found

    monkeypatch.setattr(module, "_digest_piece", change)
    weights_digest(files, memo)
    assert str(files[0]) not in json.loads(memo.read_text())["files"]


def test_large_files_are_read_in_pieces_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "BUFFER_BYTES", 300)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    barrier, digest = threading.Barrier(3), module._digest_piece

    def meet(piece: tuple[Path, int]) -> bytes:
        barrier.wait(60)  # passes only if three threads are here at once
        return digest(piece)

    monkeypatch.setattr(module, "_digest_piece", meet)
    path, data = tmp_path / "weights", os.urandom(2500)
    path.write_bytes(data)
    pieces = b"".join(sha256(data[start : start + 1000]).digest() for start in (0, 1000, 2000))
    file_digest = sha256(b"2500\n" + pieces).hexdigest()
    assert weights_digest([path], tmp_path / "memo") == sha256(file_digest.encode()).hexdigest()
