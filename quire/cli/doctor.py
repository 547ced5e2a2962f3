"""`quire doctor`: reports hardware, working backends, models, and how to install missing parts.

The report can be pasted into an issue: it has no secrets and no user names, and `~` for the home folder.

`quire doctor MODEL` tells before loading whether a model will run on this machine. The files are checked as a load
would check them; no weight is read. Memory is computed from the tensors.

Other commands that load nothing ask the same: `fit` estimates memory from the number and type of the weights;
`find_backend_problem` asks the backend that `auto` selects.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from quire.backends import machine
from quire.backends.base import DEFAULT_MAX_CHUNK, DEFAULT_MAX_SEQS, BackendOptions
from quire.backends.kv_memory import CPU_CAP, CPU_SHARE, TYPICAL_CONTEXT, KVCosts, KVMemory, KVSpec, MemoryRequest
from quire.backends.native.packing import MEMORY_SHARE
from quire.backends.support import (
    find_mlx_problem,
    find_transformers_problem,
    mlx_hint,
    rope_notice,
    skip_notice,
    transformers_hint,
    transformers_notice,
)
from quire.cli.terminal import echo
from quire.core.cache import BLOCK_SIZE
from quire.engine.composition import EngineConfig, choose_backend
from quire.engine.model_text import make_tokenizer
from quire.errors import InvalidRequest, QuireError, install_command
from quire.sizes import file_size, memory_size, reported_size
from quire.version import __version__
from quire.weights.checkpoint import BLOCKS, Checkpoint
from quire.weights.config import DTYPES
from quire.weights.fields import member, read_json
from quire.weights.hub import DEFAULT_MODEL, LocalModel, cache_dir, local_models, resolve, size_of
from quire.weights.opening import open_checkpoint
from quire.weights.spec import ModelSpec
from quire.weights.tensors import check_tensors

# Package -> its purpose, and whether generation needs it.
PACKAGES: dict[str, tuple[str, bool]] = {
    "numpy": ("reads the weights", True),
    "tokenizers": ("turns text into tokens", True),
    "jinja2": ("renders chat templates", True),
    "gguf": ("reads GGUF files, such as the default model", False),
    "safetensors": ("reads folders of safetensors", False),
    "msgspec": ("encodes messages to the process that runs a model", False),
    "huggingface-hub": ("downloads models of the hub", False),
}
VARIABLES = (
    "QUIRE_CACHE", "QUIRE_NATIVE_LIBRARY", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip
SECRETS = ("HF_TOKEN",)  # reported as set or not
FEATURES = ("asimddp", "i8mm", "bf16", "sve", "sve2", "avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
MAC_FEATURES = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}  # names of sysctl on macOS
ARM_PARTS = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}
CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
LITTLE_DISK_BYTES = 1 << 30


class Problem(NamedTuple):
    what: str
    how: str  # a command that solves it
    is_essential: bool


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Check this model only: a name, a folder or a .gguf file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check this machine: hardware, backends, packages, models, and what is missing. Exit code 1: no model can run.

    With a model: whether it will run here, with what memory and context, without loading it.
    """
    report = examine() if model is None else check_model(resolve(model))
    if as_json:
        echo(json.dumps(report, indent=2))
    else:
        for line in _lines(report) if model is None else report_lines(report):
            echo(line)
    if not report["can_generate" if model is None else "runs"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """The report as plain values, without private data."""
    native, torch, mlx = _native(), _torch(), _mlx()
    cpu, features = read_cpu()
    packages = {name: _version(name) for name in ("torch", "mlx", "mlx-lm", *PACKAGES)}
    models = [_model(model, packages) for model in local_models()]
    folder = cache_dir()
    disk = {"path": str(folder), "exists": folder.is_dir(), "free_bytes": free_disk_bytes(folder)}
    environment = {name: os.environ.get(name) for name in VARIABLES}
    environment |= {name: "set, not shown" if os.environ.get(name) else None for name in SECRETS}
    problems = [
        *_backend_problems(packages, native, torch, mlx),
        *(
            Problem(f"{name} is not installed: it {purpose}", install_command(name), is_essential)
            for name, (purpose, is_essential) in PACKAGES.items()
            if packages[name] is None
        ),
        *_gpu_problems(packages, torch),
        *_model_problems(models, disk),
    ]
    shown: dict[str, Any] = _anonymous(
        {
            "quire": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "hardware": {
                "cpu": cpu,
                "cores": machine.usable_cores(),
                "features": features,
                "memory_bytes": machine.total_bytes(),
                "available_bytes": machine.available_bytes(),
                "gpus": torch["gpus"] or mlx["gpus"],
            },
            "packages": packages,
            "backends": _backends(native, torch, mlx),
            "models": models,
            "cache": disk,
            "environment": environment,
            "problems": [one._asdict() for one in problems],
            "can_generate": not any(one.is_essential for one in problems),
        }
    )
    return shown


# Examination


def _native() -> dict[str, Any]:
    """The kernels of the native backend, or why its library cannot be loaded."""
    try:
        from quire.backends.native.library import kernels_available, kernels_in_use

        kernels = kernels_in_use()
        others = [name for name in kernels_available() if name != kernels]
    except Exception as error:
        return {"works": False, "problem": f"{type(error).__name__}: {error}", "kernels": "", "others": []}
    return {"works": True, "problem": "", "kernels": kernels, "others": others}


def _torch() -> dict[str, Any]:
    """The devices of PyTorch, or why it cannot be imported."""
    try:
        import torch
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return {"works": False, "problem": "" if is_absent else f"{type(error).__name__}: {error}", "gpus": []}
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = [
        {"name": facts.name, "memory_bytes": facts.total_memory, "sm": f"{facts.major}{facts.minor}"}
        for facts in map(torch.cuda.get_device_properties, indices)
    ]
    return {
        "works": True,
        "problem": "",
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def _mlx() -> dict[str, Any]:
    """The device of MLX, or why its packages cannot be imported."""
    try:
        import mlx.core as mx

        from quire.backends.support import import_mlx_lm

        import_mlx_lm()
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("mlx", "mlx_lm")
        return {
            "works": False,
            "problem": "" if is_absent else f"{type(error).__name__}: {error}",
            "device": "",
            "gpus": [],
        }
    api, facts = _mlx_device(mx)
    name = str(facts.get("device_name") or facts.get("architecture") or "GPU")
    limit, total = (
        facts[key] if isinstance(facts.get(key), int) else 0
        for key in ("max_recommended_working_set_size", "memory_size")
    )
    gpus = [{"name": name, "memory_bytes": total, "limit_bytes": limit}] if api == "Metal" else []
    return {"works": True, "problem": "", "device": f"{name}, {api}" if api else "CPU, for tests: slow", "gpus": gpus}


def _mlx_device(mx: Any) -> tuple[str, dict[str, Any]]:
    """The GPU interface that MLX uses, empty if it computes on the CPU, and its device information.

    The keys of the information, and the functions that return it, depend on the device and the version of MLX.
    """
    api = ""
    try:
        api = "Metal" if mx.metal.is_available() else "CUDA" if mx.is_available(mx.gpu) else ""
        return api, dict(mx.device_info())
    except Exception:
        return api, {}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_cpu() -> tuple[str, list[str]]:
    """The name of the CPU and its features that kernels use."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _mac_cpu()
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    part = facts.get("cpu part", "")
    name = facts.get("model name") or ARM_PARTS.get(part) or (f"ARM part {part}" if part else platform.machine())
    has = set((facts.get("features") or facts.get("flags") or "").split())
    return name, [feature for feature in FEATURES if feature in has]


def _mac_cpu() -> tuple[str, list[str]]:
    name = machine.read_sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    return name, [one for one, key in MAC_FEATURES.items() if machine.read_sysctl(f"hw.optional.arm.{key}") == "1"]


def _backends(native: dict[str, Any], torch: dict[str, Any], mlx: dict[str, Any]) -> list[dict[str, Any]]:
    runs = {"runs": native["works"], "kernels": native["kernels"], "other_kernels": native["others"]}
    cpu_kernels = f"plain PyTorch, CPU capability {torch['cpu_kernels']}" if torch["works"] else ""
    has_gpu = bool(torch["gpus"])
    has_triton = importlib.util.find_spec("triton") is not None
    gpu_kernels = "" if not has_gpu else "Triton" if has_triton else f"none: {install_command('triton')}"
    return [
        {"name": "native", "dtype": "4 and 8 bits", **runs},
        {"name": "torch cpu", "runs": torch["works"], "dtype": "float32", "kernels": cpu_kernels},
        {"name": "torch cuda", "runs": has_gpu and has_triton, "dtype": "bfloat16", "kernels": gpu_kernels},
        {"name": "mlx", "runs": mlx["works"], "dtype": "2 to 16 bits", "kernels": mlx["device"]},
    ]


def _model(model: LocalModel, packages: dict[str, str | None]) -> dict[str, Any]:
    has_reader = packages[model.format] is not None  # a format has the name of the package that reads it
    problem = model.problem or ("" if has_reader else f"{model.format} is not installed")
    problem = problem or find_backend_problem(model.unsupported, read_config(model.path))
    return {
        "name": model.name,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "type": model.quantization,
        "architecture": model.architecture,
        "opens": not problem,
        "problem": problem,
    }


# Problems


def _backend_problems(
    packages: dict[str, str | None], native: dict[str, Any], torch: dict[str, Any], mlx: dict[str, Any]
) -> Iterator[Problem]:
    """Problems of the backends. One working backend is enough."""
    is_essential = not (native["works"] or torch["works"] or mlx["works"])
    yield from _mlx_problems(packages, mlx, is_essential=is_essential)
    if not native["works"]:
        yield Problem(
            f"the native backend cannot be loaded: {native['problem'][:300]}",
            "make install   # in the folder of the source: builds the library with gcc or clang",
            is_essential,
        )
    if packages["torch"] is not None and not torch["works"]:
        yield Problem(
            f"torch is installed and cannot be imported: {torch['problem'][:300]}",
            install_command("--force-reinstall torch"),
            is_essential,
        )


def _mlx_problems(packages: dict[str, str | None], mlx: dict[str, Any], *, is_essential: bool) -> Iterator[Problem]:
    if mlx["problem"]:
        yield Problem(
            f"MLX is installed and cannot be imported: {mlx['problem'][:300]}",
            install_command("--force-reinstall mlx mlx-lm"),
            is_essential,
        )
    elif not mlx["works"] and machine.is_apple_silicon():
        missing = [name for name in ("mlx", "mlx-lm") if packages[name] is None]
        what = f"this is Apple silicon, and quire needs {' and '.join(missing) or 'mlx'} to use its GPU"
        yield Problem(what, install_command("mlx mlx-lm"), is_essential)
    elif not mlx["gpus"] and machine.is_apple_silicon():
        yield Problem(
            "this is Apple silicon, and MLX finds no GPU",
            "system_profiler SPDisplaysDataType   # lists the GPUs; a virtual machine may have none",
            is_essential=False,
        )


def _gpu_problems(packages: dict[str, str | None], torch: dict[str, Any]) -> Iterator[Problem]:
    if torch["gpus"] or not NVIDIA_DRIVER.exists():
        return
    if packages["torch"] is None:
        yield Problem(
            "there is an NVIDIA GPU, and PyTorch, which quire needs to use it, is not installed",
            install_command("torch"),
            is_essential=False,
        )
    elif torch["works"] and torch["cuda"] is None:
        yield Problem(
            "there is an NVIDIA GPU, and this PyTorch is built without CUDA",
            f"{install_command('--force-reinstall torch')}   # the default package has CUDA on Linux",
            is_essential=False,
        )
    elif torch["works"]:
        yield Problem(
            f"there is an NVIDIA GPU, and PyTorch (CUDA {torch['cuda']}) cannot use it",
            "nvidia-smi   # shows the state of the driver; CUDA_VISIBLE_DEVICES may hide the GPU",
            is_essential=False,
        )


def _model_problems(models: list[dict[str, Any]], disk: dict[str, Any]) -> Iterator[Problem]:
    if not any(model["opens"] for model in models):
        yield Problem("there is no model on this machine that can be opened", f"quire pull {DEFAULT_MODEL}", True)
    for model in models:
        if not model["opens"] and not model["problem"].endswith(" is not installed"):  # reported above
            name = re.sub(r":[^:]*\.gguf$", "", model["name"]) if "/" in model["name"] else model["name"]
            yield Problem(f"{model['name']} cannot be opened: {model['problem']}", f"quire pull {name}", False)
    if disk["free_bytes"] < LITTLE_DISK_BYTES:
        yield Problem(f"{file_size(disk['free_bytes'])} are free for models", f"df -h {disk['path']}", False)


# Output


def _anonymous(value: Any) -> Any:
    """The value with the home folder and the user name in paths replaced."""
    if isinstance(value, dict):
        return {key: _anonymous(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_anonymous(one) for one in value]
    if not isinstance(value, str):
        return value
    home, user = str(Path.home()), _user()
    if home != "/":
        value = re.sub(rf"{re.escape(home)}(?![^/\s:'\"])", "~", value)
    return re.sub(rf"(?<=/){re.escape(user)}(?![^/\s:'\"])", "$USER", value) if user else value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container the user id may have no name
        return ""


def _lines(report: dict[str, Any]) -> Iterator[str]:
    hardware, cache = report["hardware"], report["cache"]
    yield f"quire {report['quire']}, Python {report['python']}, {report['system']}"
    yield ""
    features = ", ".join(hardware["features"]) or "no relevant features"
    yield f"cpu       {hardware['cpu']}, {hardware['cores']} cores usable; {features}"
    yield f"memory    {reported_size(hardware['memory_bytes'])}, {reported_size(hardware['available_bytes'])} available"
    for gpu in hardware["gpus"]:
        if "sm" in gpu:
            yield f"gpu       {gpu['name']}, {reported_size(gpu['memory_bytes'])}, sm_{gpu['sm']}"
        else:
            limit = f", up to {reported_size(gpu['limit_bytes'])}" if gpu["limit_bytes"] else ""
            yield f"gpu       {gpu['name']}, uses the memory of the machine{limit}"
    if not hardware["gpus"]:
        yield "gpu       none usable by PyTorch or MLX"
    yield f"disk      {file_size(cache['free_bytes'])} free for {cache['path']}"
    yield ""
    for backend in report["backends"]:
        others = backend.get("other_kernels")
        kernels = backend["kernels"] + (f"; {', '.join(others)} also available" if others else "")
        runs = f"runs in {backend['dtype']} ({kernels})" if backend["runs"] else "does not run here"
        yield f"{backend['name']:12}{runs}"
    yield ""
    for name, version in report["packages"].items():
        yield f"{name:18}{version or 'not installed'}"
    yield ""
    for model in report["models"]:
        state = f"{model['type']} {model['architecture']}, opens" if model["opens"] else "does not open"
        yield f"model     {model['name']}, {file_size(model['size_bytes'])}, {state}"
    for name, value in report["environment"].items():
        if value is not None:
            yield f"{name}={value}"
    yield ""
    for problem in report["problems"]:
        yield f"{'MISSING' if problem['is_essential'] else 'note'}: {problem['what']}"
        yield f"    {problem['how']}"
    yield "quire can run models here." if report["can_generate"] else "quire cannot run models here yet."


KV_ITEM_BYTES = 2
GPU_MAX_SEQS = 256  # as `CUDA_MAX_SEQS` of the torch backend, whose module imports torch
GPU_KV_SHARE = 0.9  # of the memory that the weights leave free


def check_model(path: Path) -> dict[str, Any]:
    """Return the report as plain values. `problem` is empty if the model runs.

    A folder with config.json and without weights is checked as far as its config allows.
    """
    try:
        with closing(open_checkpoint(path, "auto" if _has_weights(path) else "dummy")) as checkpoint:
            return _check(checkpoint, path)
    except QuireError as error:
        return {"path": str(path), "runs": False, "problem": str(error)}


def _has_weights(path: Path) -> bool:
    """Return whether there are weights, or nothing at all: opening the path then gives the error."""
    return path.is_file() or not (path / "config.json").exists() or any(path.glob("*.safetensors*"))


def _check(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    spec = checkpoint.spec
    problem = find_backend_problem(spec.unsupported, read_config(path))
    if not problem and not spec.unsupported:
        check_tensors(checkpoint)
    has_tokenizer = path.is_file() or (path / "tokenizer.json").exists()
    if not problem and has_tokenizer:
        make_tokenizer(path, checkpoint.tokenizer_files()).close()
    backend = choose_backend(EngineConfig(), spec)
    memory = read_memory()
    if backend == "native":  # it does not use a GPU
        memory = Memory(memory.cpu_total, memory.cpu_free)
    weights = Weights.of(checkpoint, path)
    place = fit(weights, memory)
    if place.device == "cpu" and backend == "torch":  # fp32 on a CPU
        num_bytes = 4 * sum(weights.counts.values())
        place = Fit("cpu" if num_bytes <= memory.cpu_total else "", num_bytes, num_bytes <= memory.cpu_free)
    is_mapped = backend == "native" and spec.has_experts and place.num_bytes > MEMORY_SHARE * memory.cpu_free
    if is_mapped:
        place = Fit("cpu", place.num_bytes, is_free=True)
        problem = problem or _find_disk_problem(place.num_bytes)
    if not problem and not place.device:
        problem = f"its weights take {memory_size(place.num_bytes)}, more than this machine has"
    elif not problem and backend == "torch" and memory.gpu_total and place.device == "cpu":
        problem = "its weights do not fit on the GPU; --backend native or --device cpu runs it on the CPU"
    through = transformers_notice(spec.architecture) if spec.unsupported and backend == "torch" and not problem else ""
    return {
        "path": str(path),
        "runs": not problem,
        "problem": problem,
        "family": spec.family,
        "architecture": spec.architecture,
        "backend": backend,
        "notice": through or skip_notice(spec) or rope_notice(spec, spec.max_model_len),
        "device": place.device,
        "is_free": place.is_free,
        "is_mapped": is_mapped,
        "weight_bytes": place.num_bytes,
        "free_bytes": memory.gpu_free if place.device in ("cuda", "metal") else memory.cpu_free,
        "max_model_len": spec.max_model_len,
        **_cache_facts(spec, place, memory, is_fp32=backend == "torch" and place.device == "cpu"),
        "has_weights": _has_weights(path),
        "has_tokenizer": has_tokenizer,
    }


def _find_disk_problem(num_bytes: int) -> str:
    """Return why experts cannot be mapped from a file; empty: they can."""
    folder = cache_dir()
    free = free_disk_bytes(folder)
    if free >= num_bytes:
        return ""
    return (
        f"its weights take {memory_size(num_bytes)}, more than the memory that is free, and the disk of {folder} has"
        f" only {memory_size(free)} for a file of experts"
    )


def _cache_facts(spec: ModelSpec, place: Fit, memory: Memory, *, is_fp32: bool) -> dict[str, int]:
    """Return what the KV cache holds by default, once the weights are loaded. Divided as the backends divide it."""
    on_gpu = place.device in ("cuda", "metal")
    item_bytes = 2 * KV_ITEM_BYTES if is_fp32 else KV_ITEM_BYTES
    kv_spec = KVSpec.of(spec).within(spec.max_model_len)
    costs = KVCosts.of(kv_spec, BLOCK_SIZE, item_bytes)
    free = (memory.gpu_free if on_gpu else memory.cpu_free) - place.num_bytes
    budget = int(free * GPU_KV_SHARE) if on_gpu else min(int(free * CPU_SHARE), CPU_CAP)
    max_num_seqs = GPU_MAX_SEQS if on_gpu else DEFAULT_MAX_SEQS
    request = MemoryRequest(
        BackendOptions(), costs, spec.max_model_len, max_num_seqs, DEFAULT_MAX_CHUNK, has_overlap=on_gpu
    )
    try:
        pools = request.divide(free, budget)
    except InvalidRequest:  # less than one useful pool
        pools = KVMemory(1, max_num_seqs, DEFAULT_MAX_CHUNK)
    context_bytes = kv_spec.context_bytes(TYPICAL_CONTEXT, item_bytes) - costs.state
    return {
        "kv_bytes_per_token": context_bytes // TYPICAL_CONTEXT,
        "cached_tokens": (pools.num_blocks - 1) * BLOCK_SIZE,
        "state_bytes": costs.state,
        "cached_states": max(pools.num_states - 1, 0),
        "window": costs.window,
    }


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Return the report as text."""
    yield f"model       {report['path']}"
    if "family" in report:
        yield f"family      {report['family']} ({report['architecture']})"
    if not report["runs"]:
        yield f"runs here   no: {report['problem']}"
        return
    device = {"cpu": "the CPU", "cuda": "the GPU", "metal": "the GPU"}[report["device"]]
    later = "" if report["is_free"] else ", once enough memory is free"
    missing = "" if report["has_weights"] else ", once its weights are in this folder"
    yield f"runs here   yes, on {device} with the {report['backend']} backend{later}{missing}"
    if report["notice"]:
        yield f"            {report['notice']}"
    if not report["has_tokenizer"]:
        yield "            it has no tokenizer.json, which `quire serve` and `quire generate` need"
    yield f"weights     {memory_size(report['weight_bytes'])} of {memory_size(report['free_bytes'])} that are free"
    if report["is_mapped"]:
        yield "            larger than the memory: experts are mapped from a file, and steps wait for the disk"
    fits = report["cached_tokens"]
    yield (
        f"context     up to {report['max_model_len']:,} tokens; {memory_size(report['kv_bytes_per_token'])} of KV cache"
        f" per token of {TYPICAL_CONTEXT:,}, and by default room for {fits:,} tokens of all requests together"
    )
    if report["state_bytes"]:
        yield (
            f"            and for {report['cached_states']:,} recurrent states of {memory_size(report['state_bytes'])}:"
            " a prompt continues from the last stored state (docs/caching.md)"
        )
    if report["window"]:
        yield f"            layers with a window keep the last {report['window']:,} tokens only"
    if fits < report["max_model_len"]:
        yield "            less than one context: --kv-memory sets the size, --max-model-len limits the context"


# Of one weight in a file.
FILE_BITS: dict[str, float] = {kind: 8 * block.num_bytes / block.num_elements for kind, block in BLOCKS.items()}
PACKED_BITS = {"FP8": 8.125, "INT8": 8.25, "INT4": 4.5}  # of quantised safetensors: most have groups of 64 to 128
MLX_4BIT = "4 bits"  # of MLX's own checkpoints: groups of 64 weights, each with a scale and a bias of 16 bits
MLX_FILE_BITS = {MLX_4BIT: 4.5}
# In memory, native backend (docs/cpu.md).
CPU_BITS = {**dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0", "INT4"), 5.0), "MXFP4": 4.5}
OTHER_CPU_BITS = 8.5
# In the memory of an NVIDIA GPU (docs/models.md). Embeddings have 16 bits, which is not counted here.
GPU_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q4_K": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q5_K": 9.0,
    "Q6_K": 9.0,
    "Q8_0": 8.5,
    "MXFP4": 4.5,
    **PACKED_BITS,
}
EXPERT_GPU_BITS = {**GPU_BITS, "MXFP4": 4.25}  # scales of experts in MXFP4 have 8 bits
SIGMOID_GPU_BITS = {"MXFP4": 4.25}  # experts that are chosen by sigmoids are decoded
OTHER_GPU_BITS = 16.0
# On MLX, packed types of a GGUF stay packed, with a scale and a bias of 16 bits for 32 weights (docs/apple.md).
METAL_BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q5_1": 6.0,
    "Q5_0": 6.0,
    "Q5_K": 6.0,
    "Q4_1": 5.0,
    "Q4_0": 5.0,
    "Q4_K": 5.0,
    "MXFP4": 6.0,
    "TQ1_0": 3.0,
    "TQ2_0": 3.0,
    **MLX_FILE_BITS,
}
OTHER_METAL_BITS = 9.0  # the others have 8 bits
SPARE = 0.85  # the share of the memory that weights may take; the rest is for the KV cache and activations


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this machine. `gpu_*` are those of the GPU with most memory; 0: there is none.

    With `has_metal`, they are the share of the CPU's memory that the GPU of an Apple chip may use. Without `has_fp8`,
    NVIDIA GPUs have no instructions for FP8.
    """

    cpu_total: int
    cpu_free: int
    gpu_total: int = 0
    gpu_free: int = 0
    has_metal: bool = False
    has_fp8: bool = True


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a model runs: on the GPU, on the CPU, or nowhere."""

    device: str  # cuda, metal, cpu, or empty: its weights do not fit
    num_bytes: int  # bytes of the weights on that device; if they do not fit, on Metal or the CPU
    is_free: bool  # whether that much memory is free now

    def __str__(self) -> str:
        name = {"cuda": "GPU", "metal": "GPU", "cpu": "CPU"}.get(self.device)
        if name is None:
            return f"too large: {memory_size(self.num_bytes)} of weights"
        return name if self.is_free else f"{name}, once {memory_size(self.num_bytes)} are free"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, as far as they decide where it runs."""

    counts: Mapping[str, int]  # by type
    has_experts: bool = False  # most of them are those of experts
    has_sigmoids: bool = False  # which are chosen by sigmoids
    mlx_bytes: int | None = None  # of a model that runs with mlx-lm, if at all: it keeps them as they are in the files

    @classmethod
    def of(cls, checkpoint: Checkpoint, path: Path) -> Weights:
        spec = checkpoint.spec
        counts: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            counts[tensor.type.value] += math.prod(tensor.shape)
        return cls(
            counts, spec.has_experts, spec.has_sigmoids, size_of(path, "*.safetensors") if needs_mlx(spec) else None
        )


def read_memory() -> Memory:
    gpus = machine.gpu_memory() if machine.has_nvidia() or machine.has_metal() else []
    gpu_total, gpu_free = max(gpus, default=(0, 0))
    return Memory(
        machine.total_bytes(),
        machine.available_bytes(),
        gpu_total,
        gpu_free,
        machine.has_metal(),
        has_fp8=not machine.has_nvidia() or machine.has_fp8(),
    )


def free_disk_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which may not exist yet."""
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    return shutil.disk_usage(existing).free


def fit(model: Weights, memory: Memory) -> Fit:
    """Where a model runs: with Metal only on the GPU, else on an NVIDIA GPU if it fits, else on the CPU."""
    if memory.has_metal:
        decoded = _num_bytes(model.counts, METAL_BITS, OTHER_METAL_BITS)
        num_bytes = decoded if model.mlx_bytes is None else model.mlx_bytes
        return _fit_into("metal", num_bytes, memory.gpu_total, memory.gpu_free)
    if model.mlx_bytes is not None:
        return _fit_into("cpu", model.mlx_bytes, memory.cpu_total, memory.cpu_free)
    bits = SIGMOID_GPU_BITS if model.has_sigmoids else EXPERT_GPU_BITS if model.has_experts else GPU_BITS
    if not memory.has_fp8:  # they are decoded when they are loaded
        bits = {**bits, "FP8": OTHER_GPU_BITS}
    on_gpu = _fit_into("cuda", _num_bytes(model.counts, bits, OTHER_GPU_BITS), memory.gpu_total, memory.gpu_free)
    if memory.gpu_total and on_gpu.device:
        return on_gpu
    return _fit_into("cpu", _num_bytes(model.counts, CPU_BITS, OTHER_CPU_BITS), memory.cpu_total, memory.cpu_free)


def _fit_into(device: str, num_bytes: int, total: int, free: int) -> Fit:
    fits = num_bytes <= total * SPARE
    return Fit(device if fits else "", num_bytes, fits and num_bytes <= free * SPARE)


def _num_bytes(counts: Mapping[str, int], bits: Mapping[str, float], other_bits: float) -> int:
    return int(sum(count * bits.get(kind, other_bits) for kind, count in counts.items()) / 8)


# Backends


def find_backend_problem(unsupported: str, config: Mapping[str, Any] | None = None) -> str:
    """Return why `--backend auto` does not run a model; empty: it may run it.

    `unsupported` is `ModelSpec.unsupported`. `config` holds the contents of config.json, if there is one: transformers
    may run the model. Asking transformers takes seconds.
    """
    if not unsupported:
        return ""
    if choose_backend(EngineConfig()) == "mlx":
        return "" if config is None else find_mlx_problem(config.get("model_type"))
    problem = "" if config is None else find_transformers_problem(config)
    if config is not None and not problem:
        return ""
    if problem and problem in unsupported:  # layers that no backend runs
        return unsupported
    has_mlx = config is None or not find_mlx_problem(config.get("model_type"))
    hint = mlx_hint() if has_mlx else ""
    return f"{unsupported}{f'; {problem}' if problem else transformers_hint()}{hint}"


def needs_mlx(spec: ModelSpec) -> bool:
    """Return whether a model runs with mlx-lm, if at all: transformers runs weights of 16 bits on other backends."""
    return bool(spec.unsupported) and (spec.quantization not in DTYPES or choose_backend(EngineConfig()) == "mlx")


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return config.json of a model folder; None for a file, or if it cannot be read."""
    try:
        return read_json(member(path, "config.json")) if path.is_dir() else None
    except QuireError:
        return None
