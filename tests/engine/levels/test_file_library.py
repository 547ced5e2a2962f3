"""Files that the C library reads: the same as those that Python reads, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine.levels import block_file
from quire.engine.levels.block_file import (
    BlockRead,
    Fault,
    FileLibrary,
    load_library,
    read_blocks,
    write_block,
)
from tests.engine.levels.contents import PAYLOAD_BYTES, make_content, make_payload, new_buffer

SPACE = bytes(range(32))
NOW_NS = 1_700_000_000_123_456_789


@pytest.fixture(params=["C", "Python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(block_file, "load_library", lambda: None)
    else:
        assert load_library() is not None, "the C library is not built"
    return str(request.param)


def make_files(folder: Path, count: int, num_bytes: int = PAYLOAD_BYTES) -> list[BlockRead]:
    reads = []
    for number in range(count):
        content = make_content(number)
        write_block(folder / str(number), SPACE, content, make_payload(content, num_bytes))
        reads.append(BlockRead(str(folder / str(number)), content, new_buffer(num_bytes)))
    return reads


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 33, (1 << 20) + 5])
def test_payloads_of_any_length(reader: str, tmp_path: Path, num_bytes: int) -> None:
    reads = make_files(tmp_path, 2, num_bytes)
    assert read_blocks(reads, SPACE, NOW_NS) == [None, None]
    for read in reads:
        assert read.out == make_payload(read.content, num_bytes)
        assert os.stat(read.path).st_mtime_ns == NOW_NS, reader


def test_a_damaged_file_does_not_disturb_the_others(reader: str, tmp_path: Path) -> None:
    reads = make_files(tmp_path, 6)
    for number, change in ((1, -1), (3, 1)):
        data = Path(reads[number].path).read_bytes()
        Path(reads[number].path).write_bytes(data[:-1] if change < 0 else data + b"x")
    flipped = bytearray(Path(reads[4].path).read_bytes())
    flipped[-50] ^= 4
    Path(reads[4].path).write_bytes(flipped)
    os.unlink(reads[5].path)
    found = [damage and damage.fault for damage in read_blocks(reads, SPACE, NOW_NS)]
    assert found == [None, Fault.TRUNCATED, None, Fault.TOO_LONG, Fault.DIGEST, Fault.MISSING], reader
    assert all(reads[number].out == make_payload(reads[number].content) for number in (0, 2))


def test_links_pipes_and_folders_are_not_read(reader: str, tmp_path: Path) -> None:
    (good,) = make_files(tmp_path, 1)
    os.symlink(good.path, tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    reads = [good._replace(path=str(tmp_path / name)) for name in ("link", "pipe", "folder")]
    found = read_blocks(reads, SPACE, NOW_NS)
    assert {damage.fault if damage else None for damage in found} == {Fault.NOT_A_FILE}, reader


def test_a_long_header(reader: str, tmp_path: Path) -> None:
    content = make_content(1)._replace(tokens=bytes(60_000))
    write_block(tmp_path / "x", SPACE, content, make_payload(content))
    read = BlockRead(str(tmp_path / "x"), content, new_buffer())
    assert read_blocks([read], SPACE, NOW_NS) == [None], reader
    assert read.out == make_payload(content)


def test_a_file_that_cannot_be_changed_is_read(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the last use cannot be set in a read-only folder."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    (read,) = make_files(tmp_path, 1)
    monkeypatch.setattr(os, "utime", refuse)
    assert read_blocks([read], SPACE, NOW_NS) == [None], reader
    assert read.out == make_payload(read.content)


def test_the_library_accepts_only_the_expected_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    assert library is not None
    (read,) = make_files(tmp_path, 1)
    data = Path(read.path).read_bytes()
    header = data[: len(data) - PAYLOAD_BYTES - 32]
    expected = [header]
    monkeypatch.setattr(block_file, "_pack_header", lambda *_: expected[0])
    assert library.read_files([read], SPACE, NOW_NS) == [True]
    for at in range(len(header)):
        expected[0] = header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]
        assert library.read_files([read], SPACE, NOW_NS) == [False]
    expected[0] = header[:-1]
    assert library.read_files([read], SPACE, NOW_NS) == [False]
    expected[0] = header
    shorter = read._replace(out=new_buffer(PAYLOAD_BYTES - 1))
    assert library.read_files([shorter], SPACE, NOW_NS) == [False]
    assert library.read_files([], SPACE, NOW_NS) == []


def test_a_library_that_cannot_be_loaded_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / block_file._NAME
    with pytest.raises(OSError, match="quire_files"):
        FileLibrary(path)
    monkeypatch.setattr(block_file, "__file__", str(tmp_path / "file_library.py"))
    assert load_library.__wrapped__() is None  # there is none, as after an install without a compiler
    assert not caplog.records
    path.write_bytes(b"not a library")
    assert load_library.__wrapped__() is None
    assert "read in Python, which is slower" in caplog.text
