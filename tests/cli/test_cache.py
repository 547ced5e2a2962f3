"""`quire cache`: list, measure, check and clear the prefix cache on disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.cache import _ago
from quire.cli.main import app
from quire.core.step import MemoryKind
from quire.engine.levels.block_file import check_block, file_bytes
from quire.engine.levels.disk_store import STALE_S, DiskStore, root_secret
from tests.cli.runs import Terminal
from tests.engine.levels.contents import FACTS, PAYLOAD_BYTES, all_files, make_content, make_payload, read_back

FILE_BYTES = file_bytes(128, PAYLOAD_BYTES)
OTHER = {"weights": "1", "backend": "torch 2.11", "dtype": "bfloat16"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with content of two models."""
    root = tmp_path / "kv"
    root_secret(root)
    small, large = DiskStore(root, FACTS, 1 << 30, name="small"), DiskStore(root, OTHER, 1 << 30, name="org/large")
    for number in range(3):
        write(small, number)
    write(large, 10)
    write(large, 11, MemoryKind.WINDOW)
    write(large, 12, MemoryKind.STATE, 7)
    for file in all_files(root)[:3]:
        os.utime(file.path, ns=(file.used_ns - 10 * 86_400 * 10**9,) * 2)  # those of `small`
    return root


def write(store: DiskStore, number: int, kind: MemoryKind = MemoryKind.BLOCK, num_tokens: int = 32) -> None:
    content = make_content(number, kind, num_tokens)
    assert store.write(content, make_payload(content)).is_stored


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", *arguments])


def shown(*arguments: str) -> str:
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.output
    return str(outcome.stdout)


def refused(*arguments: str) -> str:
    outcome = run(*arguments)
    assert outcome.exit_code != 0
    return str(outcome.exception)


def damage(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-50] ^= 1
    Path(path).write_bytes(data)


# Folders


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_folders_that_are_not_a_cache(tmp_path: Path, command: str) -> None:
    assert "there is no such folder" in refused(command, "--cache-dir", str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    assert "cannot be read: Not a directory" in refused(command, "--cache-dir", str(tmp_path / "file"))
    assert f"{tmp_path} is not a cache folder of quire" in refused(command, "--cache-dir", str(tmp_path))
    assert refused(command, "--cache-dir", "") == "--cache-dir is empty: it must be the path of a folder"
    assert (tmp_path / "file").exists()


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    for _ in range(2):  # without a folder, and with an empty one
        assert shown("ls") == f"nothing is cached in {tmp_path / 'kv'}\n"
        assert shown("stats") == shown("ls")
        assert shown("verify") == "0 good, 0 damaged, 0 foreign\n"
        assert shown("clear") == f"nothing to delete in {tmp_path / 'kv'}\n"
        assert json.loads(shown("ls", "--json")) == []
        (tmp_path / "kv").mkdir(exist_ok=True)
    write(DiskStore(tmp_path / "kv", FACTS, 1 << 30, name="m"), 1)
    assert shown("ls").splitlines()[1].split()[0] == "m"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert refused("ls") == f"QUIRE_CACHE_DIR {tmp_path}/elsewhere: there is no such folder"
    assert "m " in shown("ls", "--cache-dir", str(tmp_path / "kv"))
    monkeypatch.setenv("QUIRE_CACHE_DIR", "")
    assert refused("ls") == "QUIRE_CACHE_DIR is empty: it must be the path of a folder"


# ls and stats


def test_ls(root: Path) -> None:
    lines = shown("ls", "--cache-dir", str(root)).splitlines()
    assert lines[0].split() == ["model", "backend", "dtype", "files", "size", "tokens", "last", "use"]
    assert lines[1].split()[:8] == ["org/large", "torch", "2.11", "bfloat16", "3", "0.0", "MB", "32"]
    assert lines[1].split()[-1] == "ago"
    assert lines[2].split() == ["small", "native", "float16", "3", "0.0", "MB", "96", "10", "days", "ago"]
    assert len(lines) == 3


def test_ls_as_json(root: Path) -> None:
    found = json.loads(shown("ls", "--cache-dir", str(root), "--json"))
    assert [entry["model"] for entry in found] == ["org/large", "small"]
    used_at = found[1].pop("last_used_at")
    assert used_at == max(file.used_ns for file in all_files(root) if "/small-" in file.path) // 10**9
    path = next(path for path in root.iterdir() if path.name.startswith("small-"))
    assert found[1] == {
        "model": "small",
        "path": str(path),
        "facts": FACTS,
        "num_files": 3,
        "num_bytes": 3 * FILE_BYTES,
        "num_tokens": 96,
        "served_name": None,
    }


def test_ls_of_folders_without_facts_and_without_files(root: Path) -> None:
    DiskStore(root, {"a": "b"}, 1 << 30, name="empty")
    path = next(path for path in root.iterdir() if path.name.startswith("small-"))
    (path / "facts.json").unlink()
    assert [line.split()[0] for line in shown("ls", "--cache-dir", str(root)).splitlines()[1:]] == [
        "org/large",
        path.name,
    ]
    shown("clear", "--cache-dir", str(root), "--model", path.name, "--yes")
    assert "small" not in shown("ls", "--cache-dir", str(root))


def test_control_characters_of_names_are_not_printed(tmp_path: Path) -> None:
    root_secret(tmp_path)
    write(DiskStore(tmp_path, FACTS, 1 << 30, name="evil\x1b[2J"), 1)
    assert "\x1b" not in shown("ls", "--cache-dir", str(tmp_path))


def test_stats(root: Path) -> None:
    found = json.loads(shown("stats", "--cache-dir", str(root), "--json"))
    num_bytes = sum(file.size for file in all_files(root))
    assert found.pop("last_used_at") == all_files(root)[-1].used_ns // 10**9
    assert found == {
        "path": str(root),
        "num_models": 2,
        "num_files": 6,
        "num_bytes": num_bytes,
        "num_tokens": 4 * 32,
        "kinds": {
            "block": {"num_files": 4, "num_bytes": 4 * FILE_BYTES},
            "window": {"num_files": 1, "num_bytes": FILE_BYTES},
            "state": {"num_files": 1, "num_bytes": file_bytes(28, PAYLOAD_BYTES)},
        },
        "num_temporary": 0,
        "num_foreign": 0,
    }
    folder = Path(all_files(root)[0].path).parent
    (folder / "notes").write_text("")
    (folder / ".tmp-1-2").write_text("")
    lines = shown("stats", "--cache-dir", str(root)).splitlines()
    assert lines[0].startswith(f"{root}: 2 models, 6 files, 0.0 MB, 128 tokens, last use ")
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["kind", "files"],
        ["block", "4"],
        ["window", "1"],
        ["state", "1"],
    ]
    assert lines[5:7] == ["files being written: 1", "foreign files: 1"]


# verify


def test_verify(root: Path) -> None:
    assert shown("verify", "--cache-dir", str(root)) == "6 good, 0 damaged, 0 foreign\n"
    before = all_files(root)
    damage(before[0].path)
    os.truncate(before[1].path, 20)
    shutil.copy(before[4].path, before[3].path)  # under another name
    (Path(before[0].path).parent / "notes").write_text("")
    outcome = run("verify", "--cache-dir", str(root))
    assert outcome.exit_code == 1
    assert sorted(outcome.stdout.splitlines()) == sorted(
        [
            f"{before[0].path}: the content does not match its checksum",
            f"{before[1].path}: the end of the file is missing",
            f"{before[3].path}: content of other weights, settings or tokens than the name says",
            "3 good, 3 damaged, 1 foreign",
            "Damaged files are not used; `quire cache verify --delete` deletes them.",
        ]
    )
    assert len(all_files(root)) == 6
    text = shown("verify", "--cache-dir", str(root), "--delete")
    assert text.endswith("3 good, 3 damaged, 3 of them deleted, 1 foreign\n")
    assert f"{before[0].path}: the content does not match its checksum, deleted\n" in text
    assert {file.path for file in all_files(root)} == {before[number].path for number in (2, 4, 5)}
    assert shown("verify", "--cache-dir", str(root)) == "3 good, 0 damaged, 1 foreign\n"


def test_verify_does_not_change_the_order_of_eviction(root: Path) -> None:
    before = [(file.path, file.used_ns) for file in all_files(root)]
    shown("verify", "--cache-dir", str(root))
    shown("ls", "--cache-dir", str(root))
    assert [(file.path, file.used_ns) for file in all_files(root)] == before


def test_verify_as_json(root: Path) -> None:
    before = all_files(root)
    damage(before[0].path)
    data = bytearray(Path(before[1].path).read_bytes())
    data[8] = 9
    Path(before[1].path).write_bytes(data)
    outcome = run("verify", "--cache-dir", str(root), "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout) == {
        "path": str(root),
        "num_good": 4,
        "num_damaged": 1,
        "num_foreign": 1,
        "num_unreadable": 0,
        "num_deleted": 0,
        "faults": {"digest": 1},
        "damaged": [{"path": before[0].path, "fault": "digest"}],
        "foreign": [before[1].path],
        "unreadable": [],
    }
    assert json.loads(shown("verify", "--cache-dir", str(root), "--json", "--delete"))["num_deleted"] == 1
    assert os.path.exists(before[1].path)  # of a newer version


def test_verify_never_deletes_directories(root: Path) -> None:
    first, second, *_ = all_files(root)
    os.unlink(first.path)
    os.makedirs(f"{first.path}/inside")
    os.unlink(second.path)
    os.symlink("/etc/hostname", second.path)
    outcome = run("verify", "--cache-dir", str(root), "--delete")
    assert outcome.exit_code == 1
    words = "not a file, but a folder, a link or a device"
    assert f"{first.path}: {words}\n" in outcome.stdout
    assert f"{second.path}: {words}, deleted\n" in outcome.stdout
    assert os.path.isdir(f"{first.path}/inside")
    assert os.path.exists("/etc/hostname")


def test_a_file_that_a_server_evicts_meanwhile_is_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = all_files(root)[2].path

    def evict(path: str) -> Any:
        if path == gone:
            os.unlink(path)
        return check_block(path)

    monkeypatch.setattr("quire.cli.cache.check_block", evict)
    assert shown("verify", "--cache-dir", str(root)) == "5 good, 0 damaged, 0 foreign\n"


def test_files_that_cannot_be_read_or_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, which permissions do not stop."""
    before = all_files(root)
    for file in before[:2]:
        damage(file.path)
    unlink, opened, scanned = os.unlink, os.open, os.scandir
    hidden = os.path.dirname(before[5].path)

    def refuse(function: Any, *paths: str) -> Any:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if str(path) in paths:
                raise PermissionError(13, "Permission denied", path)
            return function(path, *arguments, **named)

        return call

    monkeypatch.setattr("os.unlink", refuse(unlink, before[0].path))
    monkeypatch.setattr("os.open", refuse(opened, before[2].path))
    monkeypatch.setattr("os.scandir", refuse(scanned, hidden))
    outcome = run("verify", "--cache-dir", str(root), "--delete")
    assert outcome.exit_code == 1
    assert f"{before[0].path}: the content does not match its checksum, could not be deleted: Permission" in (
        outcome.stdout
    )
    assert f"{before[2].path}: the system refuses to read it\n" in outcome.stdout
    assert outcome.stdout.endswith("2 good, 2 damaged, 1 of them deleted, 0 foreign, 2 unreadable\n")
    outcome = run("ls", "--cache-dir", str(root))
    assert outcome.exit_code == 0
    assert len(outcome.stdout.splitlines()) == 3
    assert "1 files could not be read; their tokens are not counted" in outcome.stderr
    assert f"{hidden} could not be read; its files are not counted" in outcome.stderr
    outcome = run("clear", "--cache-dir", str(root), "--yes")
    assert outcome.exit_code == 1
    assert outcome.stdout.endswith("; 1 could not be deleted: Permission denied\n")
    monkeypatch.undo()
    assert {file.path for file in all_files(root)} == {before[0].path, before[5].path}


# clear


def test_clear_everything(root: Path) -> None:
    secret = root_secret(root)
    store = DiskStore(root, FACTS, 1 << 30)
    assert len(list(store.scan())) == 3
    size = sum(file.size for file in all_files(root))
    text = shown("clear", "--cache-dir", str(root), "--yes")
    assert text == f"deleted 6 files: {size / 1e6:.1f} MB freed\n"
    assert all_files(root) == []
    assert root_secret(root) == secret
    write(store, 1)  # a server that uses the folder goes on
    assert read_back(store, make_content(1))


def test_clear_one_model(root: Path) -> None:
    assert shown("clear", "--cache-dir", str(root), "--model", "small", "--yes").startswith("deleted 3 files: ")
    assert [line.split()[0] for line in shown("ls", "--cache-dir", str(root)).splitlines()[1:]] == ["org/large"]
    text = refused("clear", "--cache-dir", str(root), "--model", "smal", "--yes")
    assert text == f"--model 'smal': {root} has no content of such a model; it has org/large"
    assert shown("clear", "--cache-dir", str(root), "--model", "small", "--yes").startswith("nothing to delete in ")


def test_names_that_a_server_shows(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a known model, and a folder of the hub's cache, have other names."""
    pytest.importorskip("huggingface_hub")
    revision, home = "5" * 40, tmp_path / "hub"
    folder = home / "models--org--tiny"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    for number, name in enumerate(("SmolLM2-135M-Instruct.Q4_1", revision)):
        write(DiskStore(root, {"a": str(number)}, 1 << 30, name=name), 20 + number)
    text = shown("ls", "--cache-dir", str(root))
    assert "SmolLM2-135M-Instruct.Q4_1 (smollm2-135m-instruct) " in text
    assert f"{revision} (org/tiny) " in text
    assert {entry["served_name"] for entry in json.loads(shown("ls", "--cache-dir", str(root), "--json"))} == {
        *("smollm2-135m-instruct", "org/tiny", None)
    }
    text = refused("clear", "--cache-dir", str(root), "--model", "tiny", "--yes")
    assert "SmolLM2-135M-Instruct.Q4_1 (smollm2-135m-instruct)" in text
    for name in ("smollm2-135m-instruct", "org/tiny"):
        assert shown("clear", "--cache-dir", str(root), "--model", name, "--yes").startswith("deleted 1 files: ")
    assert len(all_files(root)) == 6


def test_clear_what_was_not_used_for_long(root: Path) -> None:
    assert shown("clear", "--cache-dir", str(root), "--older-than", "2w", "--yes").startswith("nothing to delete in ")
    assert shown("clear", "--cache-dir", str(root), "--older-than", "7d", "--yes").startswith("deleted 3 files: ")
    assert all("/org_large-" in file.path for file in all_files(root))
    for text in ("", "7", "d", "-1d", "1.5d", "7 months", "\u0667d"):
        assert f"--older-than {text!r} is not a time like" in refused(
            "clear", "--cache-dir", str(root), "--older-than", text
        )
    assert len(all_files(root)) == 3


def test_clear_leaves_files_of_others(root: Path) -> None:
    folder = Path(all_files(root)[0].path).parent
    stale = folder / ".tmp-1-2"
    for path in (folder / "notes", root / "photo.jpg", folder / ".tmp-9-9", stale):
        path.write_text("")
    os.utime(stale, (stale.stat().st_mtime - STALE_S - 60,) * 2)
    shown("clear", "--cache-dir", str(root), "--yes")
    assert (folder / "notes").exists()
    assert (root / "photo.jpg").exists()
    assert (folder / ".tmp-9-9").exists()  # a server may be writing it
    assert not stale.exists()


def test_clear_asks_on_a_terminal_and_refuses_elsewhere(root: Path) -> None:
    assert "deleting 6 files (0.0 MB) needs --yes: standard input is not a terminal" in refused(
        "clear", "--cache-dir", str(root)
    )
    for answer, code, left in (("n", 1, 6), ("y", 0, 0)):
        with Terminal("cache", "clear", "--cache-dir", str(root), env={"COLUMNS": "400"}) as terminal:
            terminal.wait_for("[y/N]: ")
            assert "Delete 6 files, 0.0 MB, of org/large, small from " in terminal.screen
            terminal.type(f"{answer}\n")
            assert terminal.exit_code() == code
        assert len(all_files(root)) == left


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (86_400, "1 day ago"),
        (9e5, "10 days ago"),
    ],
)
def test_ages(monkeypatch: pytest.MonkeyPatch, age_s: float, text: str) -> None:
    monkeypatch.setattr("quire.cli.cache.time.time_ns", lambda: 10**18)
    assert _ago(10**18 - int(age_s * 1e9)) == text
    assert _ago(10**18 + 10**12) == "0 s ago"  # the clock was set back
