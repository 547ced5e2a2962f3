"""Tells before loading whether a model will run on this machine: `quire doctor MODEL`.

The files are checked as a load would check them; no weight is read. Memory is computed from the tensors, and the speed
is estimated from the bytes that a token reads and the measured speed of this machine's memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from quire.backends.base import DEFAULT_MAX_CHUNK, DEFAULT_MAX_SEQS, BackendOptions
from quire.backends.kv_memory import CPU_CAP, CPU_SHARE, TYPICAL_CONTEXT, KVCosts, KVMemory, KVSpec, MemoryRequest
from quire.backends.machine import choose_threads
from quire.backends.native.packing import MEMORY_SHARE
from quire.backends.support import rope_notice, skip_notice, transformers_notice
from quire.cli.fit import Fit, Memory, Weights, find_backend_problem, fit, free_disk_bytes, read_config, read_memory
from quire.core.cache.context import BLOCK_SIZE
from quire.engine.composition import EngineConfig, choose_backend
from quire.engine.model_text import make_tokenizer
from quire.errors import InvalidRequest, QuireError
from quire.sizes import memory_size
from quire.weights.checkpoint import Checkpoint
from quire.weights.hub import cache_dir
from quire.weights.opening import open_checkpoint
from quire.weights.spec import ModelSpec
from quire.weights.tensors import check_tensors, num_active_weights, num_weights

KV_ITEM_BYTES = 2
GPU_MAX_SEQS = 256  # as `CUDA_MAX_SEQS` of the torch backend, whose module imports torch
GPU_KV_SHARE = 0.9  # of the memory that the weights leave free
MEASURED_BYTES = 128 << 20  # larger than any cache
READ_SHARE = 0.6  # of the memory's speed that a whole step reaches; the rest is attention, norms and waiting


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
        "tokens_per_s": None if problem or is_mapped else _estimate_speed(spec, place),
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


def _estimate_speed(spec: ModelSpec, place: Fit) -> float | None:
    """Return tokens per second of one request on a CPU; None for a GPU, and for models of other libraries."""
    if place.device != "cpu" or spec.unsupported:
        return None
    active = num_active_weights(spec) / num_weights(spec)
    return READ_SHARE * _measure_memory() / (place.num_bytes * active)


def _measure_memory() -> float:
    """Return the bytes per second that all cores together read."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    threads = choose_threads(None)
    source = np.ones(MEASURED_BYTES // 8, np.float64)
    parts = np.array_split(source, threads)
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            started_s = time.perf_counter()
            list(pool.map(np.sum, parts))  # numpy releases the interpreter lock
            best = min(best, time.perf_counter() - started_s)
    return source.nbytes / best


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
    yield from _context_lines(report)
    if report["tokens_per_s"] is not None:
        yield f"speed       about {report['tokens_per_s']:,.0f} tokens/s for one request: an estimate from memory speed"


def _context_lines(report: dict[str, Any]) -> Iterator[str]:
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
