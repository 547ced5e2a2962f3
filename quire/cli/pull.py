"""`quire pull`: download a model and print its path. Checks first whether quire can run the model here.

For a model of the hub, only the list of files and config.json are fetched before that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.fit import (
    FILE_BITS,
    PACKED_BITS,
    Memory,
    Weights,
    find_backend_problem,
    fit,
    free_disk_bytes,
    needs_mlx,
    read_memory,
)
from quire.cli.terminal import download_bar, echo
from quire.errors import DownloadFailed, QuireError, UnsupportedModel
from quire.sizes import file_size, memory_size
from quire.weights.config import DTYPES
from quire.weights.families import FAMILIES, GGUF_ARCHITECTURES
from quire.weights.fields import Fields, show
from quire.weights.hub import (
    DEFAULT_MODEL,
    ELSEWHERE,
    HubName,
    cache_dir,
    failure_reason,
    find_cached,
    find_known,
    import_hub,
    is_path,
    models_dir,
)
from quire.weights.hub import pull as pull_model
from quire.weights.other import read_spec
from quire.weights.quantization import read_quantization
from quire.weights.spec import ModelSpec

# Types in names of GGUF files: `Q4_K_M` is a mixture, mostly of Q4_K.
_TYPE = re.compile(r"(?<![A-Za-z0-9])([IT]Q\d_[A-Z0-9]+|Q\d(?:_[01K])?|BF16|F16|F32|FP16|MXFP4|NVFP4)", re.IGNORECASE)
_MIXTURES = {"FP16": "F16", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"}  # names that are no types
SAFETENSORS_TYPES = {dtype: name for name, dtype in DTYPES.items()}


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name from `quire models`, or org/name of the Hugging Face hub; org/name:Q4_K_M for a GGUF file.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download a model even if it will not run here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the bare path.")] = False,
) -> None:
    """Download a model; without a name, the default one. Checks first whether the model runs on this machine."""
    wanted = name or DEFAULT_MODEL
    check_download(wanted, is_forced=force)
    with download_bar(wanted) as progress:
        path = pull_model(wanted, progress)
    echo(json.dumps({"name": wanted, "path": str(path)}) if as_json else str(path))


def check_download(name: str, *, is_forced: bool) -> None:
    """Refuse a model that would not run here, before it is downloaded. Models on this machine are not checked."""
    known, hub_name = find_known(name), None if is_path(name) else HubName.parse(name)
    if known is not None:
        free = free_disk_bytes(cache_dir())
        if free < known.size_bytes and not is_forced and not (models_dir() / known.file_name).is_file():
            size, there = file_size(known.size_bytes), file_size(free)
            raise DownloadFailed(f"{known.name} needs {size}, and {there} are free in {cache_dir()}")
    elif hub_name is not None and find_cached(hub_name) is None and not import_hub().constants.HF_HUB_OFFLINE:
        echo(_check(hub_name, is_forced=is_forced), err=True)


# Models of the hub


@dataclass(frozen=True, slots=True)
class Download:
    """The files that `quire pull` would download, and their metadata."""

    name: HubName
    files: Mapping[str, int]  # files to download: name -> bytes
    others: tuple[str, ...]  # the other files in the top folder of the repository
    config: Mapping[str, Any]  # config.json; empty if there is none
    gguf: Mapping[str, Any]  # the hub's metadata of the GGUF files: architecture, context_length

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def type(self) -> str | None:
        """The type of most weights; None: not known."""
        if self.name.gguf is not None:
            found = _TYPE.search(next(iter(self.files), ""))
            return None if found is None else _MIXTURES.get(found[1].upper(), found[1].upper())
        with suppress(QuireError):  # weights that are quantised in a way that is not known
            quantization = read_quantization(Fields("config.json", self.config))
            if quantization is not None and quantization.schemes:
                scheme = quantization.schemes[0]
                return "FP8" if scheme.is_float else f"INT{scheme.bits}"
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")
        return SAFETENSORS_TYPES.get(dtype.removeprefix("torch."))

    @property
    def spec(self) -> ModelSpec | str:
        """The spec of a folder of safetensors, or why it cannot be read."""
        try:
            return read_spec(self.config, {}, "config.json", self.type or "BF16")
        except QuireError as error:
            return str(error)

    @property
    def weights(self) -> Weights:
        num_bytes = sum(size for file, size in self.files.items() if file.endswith((".safetensors", ".gguf")))
        bits = FILE_BITS | PACKED_BITS
        kind = self.type if self.type in bits else "BF16" if self.name.gguf is None else "Q4_K"
        counts = {kind: int(num_bytes * 8 / bits[kind])}
        if self.name.gguf is None:
            if isinstance(spec := self.spec, str):
                return Weights(counts)
            return Weights(counts, spec.has_experts, spec.has_sigmoids, num_bytes if needs_mlx(spec) else None)
        # The families that a GGUF file may belong to: it has experts if all of them have.
        experts = [family.experts for family in FAMILIES if family.gguf == self.gguf.get("architecture")]
        if not experts or None in experts:
            return Weights(counts)
        return Weights(counts, True, any(one is not None and one.bias for one in experts))

    @property
    def max_model_len(self) -> int | None:
        if self.name.gguf is None:
            return None if isinstance(spec := self.spec, str) else spec.max_model_len
        context = self.gguf.get("context_length")
        return context if type(context) is int else None


def look_up(name: HubName) -> Download:
    """Query the hub for the files of a model. Raises DownloadFailed."""
    hub = import_hub()
    try:
        info = hub.HfApi().model_info(name.repo, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or () if "/" not in one.rfilename}
        config: Any = {}
        if "config.json" in sizes:
            config = json.loads(Path(hub.hf_hub_download(name.repo, "config.json")).read_text("utf-8"))
    except Exception as error:  # network failures raise exceptions of many classes
        raise DownloadFailed(f"{name.repo}: {failure_reason(hub, error)}") from None
    files = {
        file: size
        for file, size in sorted(sizes.items())
        if any(fnmatch(file, pattern) for pattern in name.patterns)
        and not any(fnmatch(file, pattern) for pattern in ELSEWHERE)
        and not (name.gguf is not None and file.startswith("mmproj"))
    }
    others = tuple(file for file in sorted(sizes) if file not in files)
    gguf = getattr(info, "gguf", None) or {}
    return Download(name, files, others, config if isinstance(config, dict) else {}, gguf)


def find_problems(found: Download, memory: Memory, num_free_bytes: int) -> list[str]:
    """Reasons why the model would not run here; empty if it would."""
    problem = _file_problem(found) or _family_problem(found)
    problems = [problem] if problem else []
    if found.num_bytes > num_free_bytes:
        problems.append(f"it needs {file_size(found.num_bytes)}, and {file_size(num_free_bytes)} are free on the disk")
    place = fit(found.weights, memory)
    if not place.device:
        total = memory.gpu_total if memory.has_metal else max(memory.cpu_total, memory.gpu_total)
        owner = "the GPU may use" if memory.has_metal else "this machine has"
        problems.append(f"its weights take {memory_size(place.num_bytes)}, and {owner} {memory_size(total)}")
    return problems


def _file_problem(found: Download) -> str:
    name = found.name
    if name.gguf is not None:
        if not found.files:
            choices = [file for file in found.others if file.endswith(".gguf")]
            there = f"; there are {', '.join(choices[:12])}" if choices else ""
            return f"no GGUF file of {name.repo} matches {name.gguf!r}{there}"
        if found.type is not None and found.type not in FILE_BITS:
            return f"weights of type {found.type} are not supported; these are: {', '.join(FILE_BITS)}"
        return ""
    if any(file.endswith(".safetensors") for file in found.files) and found.config:
        return ""
    if any(file.endswith(".gguf") for file in found.others):
        return f"the repository has GGUF files: name one, as in `quire pull {name.repo}:Q4_K_M`"
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in found.others):
        return "its weights are in a format that can run code when read (.bin, .pt): only safetensors and GGUF are read"
    return "the repository has no config.json with safetensors and no GGUF file"


def _family_problem(found: Download) -> str:
    if found.name.gguf is not None:
        family = found.gguf.get("architecture")
        if family is None or family in GGUF_ARCHITECTURES:
            return ""
        return f"architecture {show(family)} is not supported; these run: {', '.join(GGUF_ARCHITECTURES)}"
    spec = found.spec
    return spec if isinstance(spec, str) else find_backend_problem(spec.unsupported, found.config)


def _check(name: HubName, *, is_forced: bool) -> str:
    """Refuse a model that would not run here, unless forced. Returns one line about the download."""
    found, memory = look_up(name), read_memory()
    problems = find_problems(found, memory, free_disk_bytes(Path(import_hub().constants.HF_HUB_CACHE)))
    title = f"{name.repo}{f':{name.gguf}' if name.gguf else ''}"
    if problems and (not is_forced or not found.files):
        advice = "" if not found.files else ". --force downloads it anyway"
        raise UnsupportedModel(f"{title}: {'; '.join(problems)}{advice}")
    place = fit(found.weights, memory)
    parts = [f"{title}: {file_size(found.num_bytes)}", *(["forced: " + "; ".join(problems)] if problems else [])]
    if context := found.max_model_len:
        parts.append(f"{context:,} tokens of context")
    if place.device and not problems:
        parts.append(f"runs on {place}{'' if found.weights.mlx_bytes is None else ', with mlx'}")
    return ", ".join(parts)
