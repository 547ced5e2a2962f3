"""Starting on a GPU: memory, limits and the kernel's check. The GPU is simulated, and the CPU computes."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.backends.base import BackendOptions
from quire.backends.mlx import build, kernel_check, paged_decode
from quire.backends.mlx.paged_decode import METAL
from quire.backends.mlx.runner import MlxRunner
from quire.core.cache import BLOCK_SIZE
from quire.errors import InvalidRequest
from quire.weights.opening import open_checkpoint
from tests.backends.mlx import gpu_on_cpu
from tests.backends.mlx.architectures import write_model

LIMIT = 3 << 30


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m", "llama", head_dim=32)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Pretend that there is an Apple GPU. Returns the limits that are set."""
    found: dict[str, int] = {}
    info = {"device_name": "Apple M3 Max", "max_recommended_working_set_size": LIMIT, "max_buffer_length": LIMIT // 2}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_default_device", lambda _: None)
    for name in ("set_wired_limit", "set_memory_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda value, name=name: found.__setitem__(name, value))
    monkeypatch.setattr(paged_decode, "METAL", dataclasses.replace(METAL, compile=gpu_on_cpu.kernel))
    monkeypatch.setattr(kernel_check, "CHECKED_LENGTHS", ((1, 33),))
    monkeypatch.setattr(kernel_check, "MEASURED_BYTES", 1)
    monkeypatch.setattr(kernel_check, "REPEATS", 1)
    monkeypatch.setattr(build, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(kernel_check, "MEASURED_CONTEXTS", (32,))
    monkeypatch.setattr(kernel_check, "measure_times", lambda *_: (2.0, 1.0))  # the CPU is no GPU
    return found


def start(path: Path, **settings: Any) -> MlxRunner:
    checkpoint = open_checkpoint(path)
    runner = build.make_runner(checkpoint, BackendOptions(**{"dtype": "float32", **settings}))
    checkpoint.close()
    assert isinstance(runner, MlxRunner)
    return runner


def test_the_pool_takes_most_of_the_working_set(model_path: Path, limits: dict[str, int]) -> None:
    runner = start(model_path, kv_memory=64 << 20)
    assert limits["set_memory_limit"] == LIMIT
    assert 64 << 20 < limits["set_wired_limit"] < LIMIT  # the pool, and not more than this model needs
    assert limits["set_cache_limit"] >= build.MIN_CACHE
    facts, capacity = runner.facts(), runner.capacity()
    assert facts.device == "Apple M3 Max (Metal)"
    assert facts.kv_bytes <= 64 << 20
    assert capacity.has_overlap
    assert not capacity.has_costly_rows
    assert (capacity.max_mixed_tokens or 0) >= build.MIN_MIXED_TOKENS
    shapes = [layer.shape for layer in runner.store.layers]
    measured = build._Measured(num_bytes=1000, seconds=1e-3)
    num_blocks = build._num_blocks(BackendOptions(), shapes, 512, measured)
    pool_bytes = num_blocks * BLOCK_SIZE * sum(shape.token_bytes for shape in shapes)
    assert 0.65 * LIMIT < pool_bytes < LIMIT - 1000 * build.MAX_BATCHED_TOKENS
    assert build._max_mixed_tokens(measured) == 100
    runner.close()


def test_a_pool_beyond_the_limit_is_refused(model_path: Path, limits: dict[str, int]) -> None:
    assert limits == {}
    with pytest.raises(InvalidRequest, match="kv_memory"):
        start(model_path, kv_memory=LIMIT)


def test_a_pool_beyond_the_longest_buffer_is_refused_if_it_was_asked_for(
    model_path: Path, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"device_name": "Apple M1", "max_recommended_working_set_size": LIMIT, "max_buffer_length": 1 << 20}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    with pytest.raises(InvalidRequest, match="kv_memory"):
        start(model_path, kv_memory=64 << 20)
    runner = start(model_path)
    assert limits
    assert runner.store.arrays[0].nbytes <= 1 << 20
    runner.close()


def test_the_kernel_is_checked_measured_and_used(model_path: Path, limits: dict[str, int]) -> None:
    runner = start(model_path, kv_memory=64 << 20)
    assert limits
    kernel = runner.store.layers[0].kernel
    assert kernel is not None
    assert kernel.least_rows == 1


@pytest.mark.parametrize("problem", ["wrong", "compile"])
def test_a_kernel_that_fails_its_check_is_not_used(
    model_path: Path,
    limits: dict[str, int],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert limits == {}
    if problem == "wrong":
        monkeypatch.setattr(paged_decode, "ATTEND", paged_decode.ATTEND.replace("* scale[0]", "* 2 * scale[0]"))
    else:
        monkeypatch.setattr(paged_decode, "ATTEND", "this is not C++")
    with caplog.at_level(logging.WARNING):
        runner = start(model_path, kv_memory=64 << 20)
    assert runner.store.layers[0].kernel is None
    assert "the paged-decode kernel is not used" in caplog.text
    runner.close()


@pytest.mark.nightly
def test_importing_the_backend_keeps_the_limit_of_open_files() -> None:
    """mlx-lm lowers it for the whole process, also the hard limit."""
    code = (
        "import resource as r; before = r.getrlimit(r.RLIMIT_NOFILE); import quire.backends.mlx.build;"
        " assert r.getrlimit(r.RLIMIT_NOFILE) == before; import mlx_lm.utils"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
