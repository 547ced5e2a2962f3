"""The layout of the cache folder, its permissions, and the secret."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.core.step import MemoryKind
from quire.engine.levels.block_file import write_private
from quire.engine.levels.disk_store import (
    SECRET_BYTES,
    find_spaces,
    list_files,
    open_root,
    open_space,
    root_secret,
    space_digest,
    space_folders,
)
from quire.errors import CacheFolderError, InvalidRequest
from tests.engine.levels.contents import FACTS, temporary_files


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


# The folder


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_what_quire_creates_is_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "kv"
    before = os.umask(umask)
    try:
        open_root(root)
        space = open_space(root, "m", FACTS)
        root_secret(root)
    finally:
        os.umask(before)
    assert (mode(root), mode(space.path)) == (0o700, 0o700)
    assert (mode(space.path / "facts.json"), mode(root / "secret")) == (0o600, 0o600)


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path: Path, bits: int) -> None:
    """quire does not advise to change the mode of a folder that it did not create, or of one like /tmp."""
    tmp_path.chmod(bits)
    advice = f"choose a folder for it alone, such as {tmp_path}/quire-kv"
    with pytest.raises(CacheFolderError, match=rf"every user of this machine can write to .*: {advice}$"):
        open_root(tmp_path)
    with pytest.raises(CacheFolderError, match="every user"):
        root_secret(tmp_path)
    (tmp_path / "secret").write_bytes(bytes(SECRET_BYTES))
    with pytest.raises(CacheFolderError, match=advice if bits & 0o1000 else f"run `chmod o-w {tmp_path}`$"):
        open_root(tmp_path)


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="is not a folder"):
        open_root(tmp_path / "file")
    with pytest.raises(CacheFolderError, match=r"cannot be used: (Not a directory|File exists)"):
        open_root(tmp_path / "file" / "kv")


# Spaces


def test_equal_facts_are_one_space(tmp_path: Path) -> None:
    first = open_space(tmp_path, "org/Model 1", FACTS)
    assert first.path.name == f"org_Model_1-{space_digest(FACTS).hex()[:16]}"
    assert first.digest == space_digest(dict(reversed(FACTS.items())))
    assert open_space(tmp_path, "another name", FACTS) == first
    assert open_space(tmp_path, "org/Model 1", {**FACTS, "dtype": "float32"}).digest != first.digest
    assert len(find_spaces(tmp_path)) == 2
    found = json.loads((first.path / "facts.json").read_text())
    assert found == {"format": 1, "name": "org/Model 1", "space": first.digest.hex(), "facts": FACTS}


@pytest.mark.parametrize("name", ["", "../../etc", "ü", ".", "x" * 300])
def test_every_name_makes_a_folder_in_the_root(tmp_path: Path, name: str) -> None:
    space = open_space(tmp_path, name, FACTS)
    assert space.path.parent == tmp_path
    assert find_spaces(tmp_path) == [space]


@pytest.mark.parametrize("facts", [{}, {"block_size": 32}, {3: "x"}])
def test_facts_are_texts(tmp_path: Path, facts: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="facts = "):
        open_space(tmp_path, "m", facts)


@pytest.mark.parametrize("damage", ["", "[]", "{}", "nonsense", '{"facts": 3}', '{"facts": {"a": 1}, "name": "m"}'])
def test_damaged_facts_are_written_again(tmp_path: Path, damage: str) -> None:
    space = open_space(tmp_path, "m", FACTS)
    (space.path / "facts.json").write_text(damage)
    assert find_spaces(tmp_path) == []
    assert space_folders(tmp_path) == [space.path]
    assert open_space(tmp_path, "m", FACTS) == space
    assert find_spaces(tmp_path) == [space]


def test_facts_of_another_folder_are_not_believed(tmp_path: Path) -> None:
    space = open_space(tmp_path, "m", FACTS)
    space.path.rename(tmp_path / f"m-{'0' * 16}")
    assert find_spaces(tmp_path) == []


def test_only_names_of_quire_are_listed(tmp_path: Path) -> None:
    space = open_space(tmp_path, "m", FACTS)
    key = bytes.fromhex("ab" + "00" * 15)
    path = Path(space.file(MemoryKind.STATE, key))
    assert path == space.path / "ab" / f"state-{key.hex()}.kv"
    path.parent.mkdir()
    path.write_bytes(b"12345")
    (path.parent / ".tmp-1-2").write_bytes(b"")
    foreign = [
        path.parent / "notes.txt",
        path.parent / f"state-{'cd' * 16}.kv",  # in the folder of another first byte
        path.parent / f"thing-{key.hex()}.kv",
        space.path / "readme",
    ]
    for one in foreign:
        one.write_text("")
    (space.path / "elsewhere").symlink_to(tmp_path)
    (space.path / "cd").symlink_to(path.parent)
    (tmp_path / f"link-{'0' * 16}").symlink_to(space.path)
    listing = list_files(space.path)
    assert [(file.path, file.kind, file.key, file.size) for file in listing.files] == [
        (str(path), MemoryKind.STATE, key, 5)
    ]
    assert listing.temporaries == [str(path.parent / ".tmp-1-2")]
    assert sorted(listing.foreign) == sorted(
        str(one) for one in (*foreign, space.path / "elsewhere", space.path / "cd")
    )
    assert space_folders(tmp_path) == [space.path]
    assert list_files(tmp_path / "nothing") == ([], [], [], [])


# The secret


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    first = root_secret(tmp_path / "kv")
    assert len(first) == SECRET_BYTES == 32
    assert root_secret(tmp_path / "kv") == first
    assert root_secret(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["secret"]


def test_a_secret_that_another_process_writes_first_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def be_late(source: str, target: str) -> None:
        Path(target).write_bytes(b"s" * SECRET_BYTES)
        Path(target).chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", be_late)
    assert root_secret(tmp_path) == b"s" * SECRET_BYTES
    assert not temporary_files(tmp_path)


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    root_secret(tmp_path)
    (tmp_path / "secret").chmod(bits)
    with pytest.raises(CacheFolderError, match=rf"other users may read .*secret \(mode {bits:04o}\): delete the file"):
        root_secret(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 31, 33, 5000])
def test_a_damaged_secret_is_an_error_that_says_what_to_do(tmp_path: Path, num_bytes: int) -> None:
    write_private(tmp_path / "secret", [bytes(num_bytes)])
    with pytest.raises(CacheFolderError, match=rf"secret has {num_bytes} bytes, not 32: .* delete it"):
        root_secret(tmp_path)


def test_a_secret_that_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(bytes(32))
    (tmp_path / "secret").symlink_to(tmp_path / "target")
    with pytest.raises(CacheFolderError, match="secret is a link: replace it"):
        root_secret(tmp_path)
    (tmp_path / "secret").unlink()
    (tmp_path / "secret").mkdir()
    with pytest.raises(CacheFolderError, match="secret is not a file"):
        root_secret(tmp_path)
