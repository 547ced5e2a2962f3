"""Checks before a download from the hub: whether quire can run the model, and whether disk and memory are enough.

Only the list of files and config.json are fetched for it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quire.cli.backend_fit import find_backend_problem, needs_mlx
from quire.cli.machine_fit import FILE_BITS, PACKED_BITS, Fit, Memory, fit, fit_mlx, read_memory
from quire.errors import DownloadFailed, QuireError, UnsupportedModel
from quire.sizes import file_size, memory_size
from quire.weights.config import DTYPES
from quire.weights.families import FAMILIES, GGUF_ARCHITECTURES, Family
from quire.weights.fields import Fields, show
from quire.weights.hub import ELSEWHERE, HubName, failure_reason, import_hub
from quire.weights.other import read_spec
from quire.weights.quantization import read_quantization
from quire.weights.spec import ModelSpec

# Types in names of GGUF files: `Q4_K_M` is a mixture, mostly of Q4_K.
_TYPE = re.compile(r"(?<![A-Za-z0-9])([IT]Q\d_[A-Z0-9]+|Q\d(?:_[01K])?|BF16|F16|F32|FP16|MXFP4|NVFP4)", re.IGNORECASE)
_MIXTURES = {"FP16": "F16", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"}  # names that are no types
SAFETENSORS_TYPES = {dtype: name for name, dtype in DTYPES.items()}


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
        if self.name.gguf is None:
            if (packed := self._packed_type()) is not None:
                return packed
            dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")
            return SAFETENSORS_TYPES.get(dtype.removeprefix("torch."))
        found = _TYPE.search(next(iter(self.files), ""))
        return None if found is None else _MIXTURES.get(found[1].upper(), found[1].upper())

    def _packed_type(self) -> str | None:
        """The type of quantised weights; None: they are not quantised, or in a way that is not known."""
        try:
            quantization = read_quantization(Fields("config.json", self.config))
        except QuireError:
            return None
        if quantization is None or not quantization.schemes:
            return None
        scheme = quantization.schemes[0]
        return "FP8" if scheme.is_float else f"INT{scheme.bits}"

    def spec(self) -> ModelSpec:
        """The spec of a folder of safetensors. Raises QuireError."""
        return read_spec(self.config, {}, "config.json", self.type or "BF16")

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts; of a GGUF file, whether every model of its architecture is one."""
        if self.name.gguf is not None:
            return bool(self._families) and all(family.experts is not None for family in self._families)
        try:
            return self.spec().has_experts
        except QuireError:
            return False

    @property
    def has_sigmoids(self) -> bool:
        """Whether its experts are chosen by sigmoids."""
        if self.name.gguf is not None:
            return self.has_experts and any(family.experts and family.experts.bias for family in self._families)
        try:
            return self.spec().has_sigmoids
        except QuireError:
            return False

    @property
    def _families(self) -> list[Family]:
        """The families that a GGUF file may belong to."""
        return [family for family in FAMILIES if family.gguf == self.gguf.get("architecture")]

    @property
    def needs_mlx(self) -> bool:
        """Whether the model runs with mlx-lm, if at all: transformers runs weights of 16 bits on other backends."""
        try:
            spec = self.spec()
        except QuireError:
            return False
        return self.name.gguf is None and needs_mlx(spec)

    @property
    def weight_bytes(self) -> int:
        return sum(size for file, size in self.files.items() if file.endswith((".safetensors", ".gguf")))

    @property
    def weights(self) -> dict[str, int]:
        num_bytes = self.weight_bytes
        bits = FILE_BITS | PACKED_BITS
        kind = self.type if self.type in bits else "BF16" if self.name.gguf is None else "Q4_K"
        return {kind: int(num_bytes * 8 / bits[kind])}


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
    gguf = getattr(info, "gguf", None)
    others = tuple(file for file in sorted(sizes) if file not in files)
    return Download(name, files, others, config if isinstance(config, dict) else {}, gguf or {})


def find_problems(found: Download, memory: Memory, free_disk_bytes: int) -> list[str]:
    """Reasons why the model would not run here; empty if it would."""
    problems = _file_problems(found) or _family_problems(found)
    if found.num_bytes > free_disk_bytes:
        problems.append(f"it needs {file_size(found.num_bytes)}, and {file_size(free_disk_bytes)} are free on the disk")
    place = find_place(found, memory)
    if not place.device:
        total = memory.gpu_total if memory.has_metal else max(memory.cpu_total, memory.gpu_total)
        owner = "the GPU may use" if memory.has_metal else "this machine has"
        problems.append(f"its weights take {memory_size(place.num_bytes)}, and {owner} {memory_size(total)}")
    return problems


def _file_problems(found: Download) -> list[str]:
    name = found.name
    if name.gguf is not None:
        if not found.files:
            choices = [file for file in found.others if file.endswith(".gguf")]
            there = f"; there are {', '.join(choices[:12])}" if choices else ""
            return [f"no GGUF file of {name.repo} matches {name.gguf!r}{there}"]
        if found.type is not None and found.type not in FILE_BITS:
            return [f"weights of type {found.type} are not supported; these are: {', '.join(FILE_BITS)}"]
        return []
    if any(file.endswith(".safetensors") for file in found.files) and found.config:
        return []
    if any(file.endswith(".gguf") for file in found.others):
        return [f"the repository has GGUF files: name one, as in `quire pull {name.repo}:Q4_K_M`"]
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in found.others):
        return [
            "its weights are in a format that can run code when read (.bin, .pt): only safetensors and GGUF are read"
        ]
    return ["the repository has no config.json with safetensors and no GGUF file"]


def _family_problems(found: Download) -> list[str]:
    if found.name.gguf is not None:
        family = found.gguf.get("architecture")
        if family is not None and family not in GGUF_ARCHITECTURES:
            return [f"architecture {show(family)} is not supported; these run: {', '.join(GGUF_ARCHITECTURES)}"]
        return []
    try:
        spec = found.spec()
    except QuireError as error:
        return [str(error)]
    problem = find_backend_problem(spec.unsupported, found.config)
    return [problem] if problem else []


def find_place(found: Download, memory: Memory) -> Fit:
    if found.needs_mlx:
        return fit_mlx(found.weight_bytes, memory)
    return fit(found.weights, memory, has_experts=found.has_experts, has_sigmoids=found.has_sigmoids)


def find_context(found: Download) -> int | None:
    if found.name.gguf is not None:
        context = found.gguf.get("context_length")
        return context if type(context) is int else None
    try:
        return found.spec().max_model_len
    except QuireError:
        return None


def free_disk_bytes(folder: Path) -> int:
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    return shutil.disk_usage(existing).free


def check(name: HubName, *, is_forced: bool) -> str:
    """Refuse a model that would not run here, unless forced. Returns one line about the download."""
    from huggingface_hub import constants

    found = look_up(name)
    memory = read_memory()
    problems = find_problems(found, memory, free_disk_bytes(Path(constants.HF_HUB_CACHE)))
    title = f"{name.repo}{f':{name.gguf}' if name.gguf else ''}"
    if problems and (not is_forced or not found.files):
        advice = "" if not found.files else ". --force downloads it anyway"
        raise UnsupportedModel(f"{title}: {'; '.join(problems)}{advice}")
    place = find_place(found, memory)
    context = find_context(found)
    parts = [f"{title}: {file_size(found.num_bytes)}", *(["forced: " + "; ".join(problems)] if problems else [])]
    parts += [f"{context:,} tokens of context"] if context else []
    with_mlx = ", with mlx" if found.needs_mlx else ""
    parts += [f"runs on {place}{with_mlx}"] if place.device and not problems else []
    return ", ".join(parts)
