"""`quire doctor`: reports hardware, working backends, models, and how to install missing parts.

The report can be pasted into an issue: it has no secrets and no user names, and `~` for the home folder.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from quire.backends import machine
from quire.cli.fit import find_backend_problem, free_disk_bytes, read_config
from quire.cli.model_check import check_model, report_lines
from quire.cli.terminal import echo
from quire.errors import install_command
from quire.sizes import file_size, reported_size
from quire.version import __version__
from quire.weights.hub import DEFAULT_MODEL, LocalModel, cache_dir, local_models, resolve

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

    With a model: whether it will run here, with what memory, context and speed, without loading it.
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
            "hardware": _hardware(torch, mlx),
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
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            gpus.append({"name": facts.name, "memory_bytes": facts.total_memory, "sm": f"{facts.major}{facts.minor}"})
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
    try:
        api = "Metal" if mx.metal.is_available() else "CUDA" if mx.is_available(mx.gpu) else ""
    except Exception:
        return "", {}
    try:
        return api, dict(mx.device_info())
    except Exception:
        return api, {}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware(torch: dict[str, Any], mlx: dict[str, Any]) -> dict[str, Any]:
    cpu, features = read_cpu()
    return {
        "cpu": cpu,
        "cores": machine.usable_cores(),
        "features": features,
        "memory_bytes": machine.total_bytes(),
        "available_bytes": machine.available_bytes(),
        "gpus": torch["gpus"] or mlx["gpus"],
    }


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
    gpu_kernels = "Triton" if has_triton else f"plain PyTorch, many times slower: {install_command('triton')}"
    return [
        {"name": "native", "dtype": "4 and 8 bits", **runs},
        {"name": "torch cpu", "runs": torch["works"], "dtype": "float32", "kernels": cpu_kernels},
        {"name": "torch cuda", "runs": has_gpu, "dtype": "bfloat16", "kernels": gpu_kernels if has_gpu else ""},
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
        how = "make install   # in the folder of the source: builds the library with gcc or clang"
        yield Problem(f"the native backend cannot be loaded: {native['problem'][:300]}", how, is_essential)
    if packages["torch"] is not None and not torch["works"]:
        how = install_command("--force-reinstall torch")
        what = f"torch is installed and cannot be imported: {torch['problem'][:300]}"
        yield Problem(what, how, is_essential)


def _mlx_problems(packages: dict[str, str | None], mlx: dict[str, Any], *, is_essential: bool) -> Iterator[Problem]:
    if mlx["problem"]:
        how = install_command("--force-reinstall mlx mlx-lm")
        yield Problem(f"MLX is installed and cannot be imported: {mlx['problem'][:300]}", how, is_essential)
    elif not mlx["works"] and machine.is_apple_silicon():
        missing = [name for name in ("mlx", "mlx-lm") if packages[name] is None]
        what = f"this is Apple silicon, and quire needs {' and '.join(missing) or 'mlx'} to use its GPU"
        yield Problem(what, install_command("mlx mlx-lm"), is_essential)
    elif not mlx["gpus"] and machine.is_apple_silicon():
        how = "system_profiler SPDisplaysDataType   # lists the GPUs; a virtual machine may have none"
        yield Problem("this is Apple silicon, and MLX finds no GPU", how, False)


def _gpu_problems(packages: dict[str, str | None], torch: dict[str, Any]) -> Iterator[Problem]:
    if torch["gpus"] or not NVIDIA_DRIVER.exists():
        return
    if packages["torch"] is None:
        what = "there is an NVIDIA GPU, and PyTorch, which quire needs to use it, is not installed"
        yield Problem(what, install_command("torch"), False)
    elif torch["works"] and torch["cuda"] is None:
        how = f"{install_command('--force-reinstall torch')}   # the default package has CUDA on Linux"
        yield Problem("there is an NVIDIA GPU, and this PyTorch is built without CUDA", how, False)
    elif torch["works"]:
        how = "nvidia-smi   # shows the state of the driver; CUDA_VISIBLE_DEVICES may hide the GPU"
        yield Problem(f"there is an NVIDIA GPU, and PyTorch (CUDA {torch['cuda']}) cannot use it", how, False)


def _model_problems(models: list[dict[str, Any]], disk: dict[str, Any]) -> Iterator[Problem]:
    works = any(model["opens"] for model in models)
    if not works:
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
