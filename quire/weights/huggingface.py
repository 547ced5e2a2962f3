"""Models of the Hugging Face hub, in the cache of its library, whose environment variables apply. Copies nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import DownloadFailed, MissingExtra, ModelNotFound
from quire.weights.fields import read_json
from quire.weights.folder import member
from quire.weights.gguf import is_later_part
from quire.weights.safetensors import INDEX, MAX_INDEX_BYTES, SINGLE

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
        found = _NAME.fullmatch(name)
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
    if first and not _has_all_parts(first[0]):
        return None
    return first[0] if first else None


def _has_all_parts(path: Path) -> bool:
    split = re.fullmatch(r"(.+)-00001-of-(\d{5})", path.stem, re.ASCII)
    if not split:
        return True
    count = int(split[2])
    return all(path.with_name(f"{split[1]}-{i:05}-of-{split[2]}.gguf").exists() for i in range(1, count + 1))


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
