"""Block I/O of the MLX runner: the contract, and pools that are still written in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.backends.mlx.paged_cache import KVStore, LayerShape, MlxBlockIO
from quire.backends.mlx.runner import MlxRunner
from quire.core.step import MemoryKind, MemoryRef, StepPlan
from quire.errors import InvariantViolation
from tests.backends.block_io_contract import BlockIOContract, allocate, block_io, read, wait, write
from tests.backends.mlx.architectures import write_model
from tests.backends.mlx.test_runner import open_runner
from tests.backends.plans import piece, run

SETTINGS: dict[str, Any] = {"block_size": 8, "num_blocks": 20}
# Flat passes, windows, keys and values of different sizes in dense passes, and one pass per request.
MODELS = ("llama", "gemma3_text", "deepseek_v3", "gemma2")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m", request.param)


@pytest.fixture
def runner(folder: Path) -> Iterator[MlxRunner]:
    runner = open_runner(folder, **SETTINGS)
    yield runner
    runner.close()


class TestMlx(BlockIOContract):
    pass


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_that_numpy_does_not_have(tmp_path: Path, dtype: str) -> None:
    runner = open_runner(write_model(tmp_path / "m", "llama"), dtype=dtype, **SETTINGS)
    TestMlx().test_a_context_goes_on_elsewhere(runner)
    TestMlx().test_random_bytes(runner)
    runner.close()


def test_pools_of_layers_that_store_nothing_are_left_out() -> None:
    """mlx-lm makes a cache for some layers that use the keys of another one."""
    used = LayerShape(2, 8, 4, mx.bfloat16, 0)
    store = KVStore([used, LayerShape(1, 1, 1, mx.float32, 0, is_unused=True), used], 10, 8)
    io = MlxBlockIO(store, "", 0, lambda function, *args: function(*args))
    assert io.sizes.block == 2 * used.token_bytes * 8
    store.layers[0].pools[0][3], store.layers[2].pools[1][3] = mx.array(1.0), mx.array(2.0)
    (content,) = buffers = [io.allocate(io.sizes.block)]
    io.export([MemoryRef(MemoryKind.BLOCK, 3)], buffers)
    halves = np.frombuffer(content, np.uint16)
    assert (halves[: 8 * 2 * 8] == 0x3F80).all()
    assert (halves[-8 * 2 * 4 :] == 0x4000).all()
    assert not halves[8 * 2 * 8 : -8 * 2 * 4].any()
    io.import_([MemoryRef(MemoryKind.BLOCK, 4)], buffers)
    assert all(mx.array_equal(pool[4], pool[3]) for pool in store.arrays)


def test_pools_are_written_in_place(tmp_path: Path) -> None:
    """By imports, and by the steps after exports and imports: none of them takes the memory of one layer's pool."""
    runner = open_runner(write_model(tmp_path / "m", "llama"), block_size=32, num_blocks=4096)
    pieces = [MemoryRef(MemoryKind.BLOCK, index) for index in range(10, 20)]
    pool = runner.store.arrays[0].nbytes
    run(runner, piece())
    content = read(runner, pieces)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        write(runner, pieces, content)
        run(runner, piece())
        content = read(runner, pieces)
        run(runner, piece())
    assert 0 < mx.get_peak_memory() - before < pool
    runner.close()


def test_memory_is_copied_between_steps(runner: MlxRunner) -> None:
    io, pieces = block_io(runner), [MemoryRef(MemoryKind.BLOCK, 3)]
    buffers = allocate(io, pieces)
    runner.forward(StepPlan((piece(),), (), ()))
    with pytest.raises(InvariantViolation, match="between the forward pass of a step and its sampling"):
        io.export(pieces, buffers)
    runner.sample(None)
    runner.collect()
    wait(io.export(pieces, buffers))
    runner.close()
    with pytest.raises(InvariantViolation, match="closed"):
        io.export(pieces, buffers)


def test_a_step_that_failed_before_a_copy(runner: MlxRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error belongs to the step; the copy is made from pools that were computed again."""
    expected = run(runner, piece())
    pieces = [MemoryRef(MemoryKind.BLOCK, 3)]
    write(runner, pieces, [bytes(range(256)) * (block_io(runner).sizes.block // 256)])

    def failing(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "async_eval", failing)
        runner.forward(StepPlan((piece(),), (), ()))
        runner.sample(None)
        content = read(runner, pieces)
    assert content == [bytes(range(256)) * (len(content[0]) // 256)]
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        runner.collect()
    assert run(runner, piece()) == expected


def test_layouts(tmp_path: Path) -> None:
    folders = [write_model(tmp_path / "a", "llama"), write_model(tmp_path / "b", "llama", rope_theta=5000.0)]
    settings: list[tuple[Path, dict[str, Any]]] = [
        (folders[0], {}),
        (folders[1], {}),
        (folders[0], {"block_size": 16}),
        (folders[0], {"dtype": "bfloat16"}),
        (folders[0], {"quantize": 4}),
        (folders[0], {"quantize": 8}),
        (folders[0], {"num_blocks": 30, "max_num_seqs": 2}),
    ]
    layouts = []
    for folder, changes in settings:
        runner = open_runner(folder, **{**SETTINGS, **changes})
        layouts.append(block_io(runner).layout)
        runner.close()
    assert layouts[0] == layouts[-1]
    assert len(set(layouts)) == len(layouts) - 1
