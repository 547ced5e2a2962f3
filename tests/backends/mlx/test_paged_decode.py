"""The paged-decode kernel. Its source runs on the CPU here, with an emulation of Metal and CUDA."""

from __future__ import annotations

import dataclasses
import itertools
import runpy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.backends.mlx import kernel_check, paged_decode
from quire.backends.mlx.kernel_check import TOLERANCES, Example, check, find_error, gather_attention, make_example
from quire.backends.mlx.paged_decode import CUDA, METAL, TYPES, Attention, Language, PagedDecode, Shape
from tests.backends.mlx import gpu_on_cpu

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "mlx_decode.py"
SHAPE = Shape(8, 2, 64, 64, 32, mx.float16)
MANY = 10_000  # thread groups: contexts are divided as often as their length allows


def on_cpu(language: Language, num_groups: int = MANY) -> PagedDecode:
    return PagedDecode(dataclasses.replace(language, compile=gpu_on_cpu.kernel, num_groups=num_groups))


def example_of(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    block_size: int = 32,
    dtype: mx.Dtype = mx.float32,
) -> Example:
    return make_example(lengths, Shape(*heads, *sizes, block_size, dtype))


@pytest.mark.parametrize("language", [METAL, CUDA], ids=lambda language: language.name)
@pytest.mark.parametrize(
    ("lengths", "heads", "sizes", "block_size", "dtype", "num_groups"),
    [
        ((1, 33, 300), (4, 2), (64, 64), 32, mx.float32, MANY),
        ((1, 33, 300), (4, 2), (64, 64), 32, mx.float32, 1),  # not divided
        ((5, 40), (2, 1), (96, 96), 16, mx.float16, MANY),
        ((5, 300), (4, 1), (128, 128), 32, mx.bfloat16, MANY),
        ((2, 3, 7, 8, 9, 15, 16, 17, 40), (7, 1), (64, 64), 8, mx.bfloat16, 1),
        ((40, 10), (5, 1), (128, 128), 4, mx.float32, 1),  # two groups of heads, of 3 and 2
        ((40, 270), (2, 2), (192, 128), 32, mx.float16, MANY),
        ((40, 10), (3, 1), (256, 256), 32, mx.float16, 1),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
@pytest.mark.kept("(5,40)", "(2,3,7", "(40,10)-(5,1)")
def test_the_text_of_the_kernel_agrees_with_gather(
    language: Language,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    block_size: int,
    dtype: mx.Dtype,
    num_groups: int,
) -> None:
    kernel = on_cpu(language, num_groups)
    example = example_of(lengths, heads, sizes, block_size, dtype)
    for window, has_sinks in ((0, False), (0, True), (1, False), (35, True)):
        error = find_error(kernel, example, window=window, has_sinks=has_sinks)
        assert error <= TOLERANCES[dtype] / 2, f"{window = }, {has_sinks = }"


def test_the_check_passes_with_the_text_of_the_kernel() -> None:
    assert check(on_cpu(METAL), Shape(2, 1, 64, 64, 32, mx.float16)) is None


def test_unwritten_memory_is_not_used() -> None:
    example = example_of((1, 30, 150), (2, 1), (64, 64))
    keys, values = (mx.where(pool == kernel_check.UNUSED, mx.nan, pool) for pool in (example.keys, example.values))
    written = example._replace(keys=keys, values=values)
    result = on_cpu(METAL)(*written[:5], scale=0.1, window=20)
    assert mx.allclose(result, gather_attention(*example[:5], scale=0.1, window=20), atol=1e-5).item()


def test_a_scale_and_a_window_of_one_are_different_constants() -> None:
    arrays = example_of((1, 30), (2, 1), (64, 64))[:5]
    result = on_cpu(METAL)(*arrays, scale=1.0, window=1)
    assert mx.allclose(result, gather_attention(*arrays, scale=1.0, window=1), atol=1e-5).item()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base + j >= end", "base + j > end"),
        ("base + j < start ||", "base + j < start - 1 ||"),
        ("window[0], 0)", "window[0] + 1, 0)"),
        ("part == 0 && SIMDGROUP == 0", "SIMDGROUP == 0"),
        ("tables[row * num_blocks_in_row", "tables[num_blocks_in_row"),
        ("total[h] *= decay;", ""),
        ("key % BLOCK) * num_kv_heads + kv_head", "key % BLOCK) * num_kv_heads"),
        ("for (int s = 0; s < SIMDGROUPS; ++s) merged +=", "for (int s = 1; s < SIMDGROUPS; ++s) merged +="),
    ],
)
@pytest.mark.kept("base + j", "window[0]")
def test_errors_in_the_text_are_found(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paged_decode.ATTEND.count(old) == 1
    monkeypatch.setattr(paged_decode, "ATTEND", paged_decode.ATTEND.replace(old, new))
    kernel, example = on_cpu(METAL), example_of((33, 300), (4, 2), (64, 64))
    errors = [find_error(kernel, example, window=window, has_sinks=has) for window, has in ((0, True), (35, False))]
    assert not all(error <= TOLERANCES[mx.float32] for error in errors)


@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_reference_is_a_softmax(window: int, has_sinks: bool) -> None:
    lengths, block_size = (1, 7, 33), 8
    example = example_of(lengths, (4, 2), (64, 32), block_size)
    sinks = example.sinks if has_sinks else None
    result = np.array(gather_attention(*example[:5], scale=0.2, window=window, sinks=sinks))
    queries, keys, values, tables, _ = (np.array(array) for array in example[:5])
    for row, head in itertools.product(range(3), range(4)):
        positions = np.arange(max(0, lengths[row] - window) if window else 0, lengths[row])
        slots = (tables[row, positions // block_size], positions % block_size, head // 2)
        weights = np.exp(0.2 * keys[slots] @ queries[row, head])
        total = weights.sum() + (np.exp(np.array(example.sinks)[head]) if has_sinks else 0)
        np.testing.assert_allclose(result[row, head], weights @ values[slots] / total, rtol=2e-4, atol=1e-5)


def wide_window(*arrays: mx.array, window: int, **settings: Any) -> mx.array:
    return gather_attention(*arrays, window=window and window + 1, **settings)


def without_sinks(*arrays: mx.array, **settings: Any) -> mx.array:
    return gather_attention(*arrays, **{**settings, "sinks": None})


def one_key_more(
    queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, **settings: Any
) -> mx.array:
    return gather_attention(queries, keys, values, tables, lengths + 1, **settings)


def not_a_number(*arrays: mx.array, **settings: Any) -> mx.array:
    return gather_attention(*arrays, **settings) * mx.nan


def another_type(*arrays: mx.array, **settings: Any) -> mx.array:
    return gather_attention(*arrays, **settings).astype(mx.float16)


def does_not_compile(*_: mx.array, **__: Any) -> mx.array:
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (wide_window, "mlx.core.float32, 3 rows, window = 70, has_sinks = False: error = "),
        (without_sinks, "mlx.core.float32, 3 rows, window = 0, has_sinks = True: error = "),
        (one_key_more, "mlx.core.float32, 3 rows, window = 0, has_sinks = False: error = "),
        (not_a_number, "mlx.core.float32, 3 rows, window = 0, has_sinks = False: error = nan"),
        (another_type, "mlx.core.float32, 3 rows, window = 0, has_sinks = False: the kernel does not run: the result"),
        (does_not_compile, "mlx.core.float32, 3 rows, window = 0, has_sinks = False: the kernel does not run: [metal"),
    ],
)
def test_the_check_describes_the_first_disagreement(kernel: Attention, problem: str) -> None:
    assert (check(kernel, SHAPE, TYPES) or "").startswith(problem)


def test_the_check_accepts_gather_itself() -> None:
    assert check(gather_attention, SHAPE, TYPES) is None
    assert check(gather_attention, Shape(6, 6, 128, 96, 16, mx.float32), TYPES) is None


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"head_size": 192, "value_size": 128}, True),
        ({"head_size": 80}, False),  # no multiple of the SIMD width
        ({"value_size": 512}, False),
        ({"num_heads": 30}, False),
        ({"num_heads": 0}, False),  # the model computes attention itself
        ({"block_size": 6}, False),
        ({"dtype": mx.bfloat16}, True),
        ({"dtype": mx.int8}, False),
    ],
)
def test_supported_shapes(change: dict[str, Any], is_supported: bool) -> None:
    shape = dataclasses.replace(Shape(32, 8, 128, 128, 32, mx.float16), **change)
    assert shape.is_supported is is_supported


@pytest.mark.parametrize(
    ("slower", "least"),
    [([], 1), ([(1, 256)], 4), ([(1, 2048), (4, 2048)], 16), ([(4, 256)], 16), ([(16, 2048)], None)],
)
def test_the_kernel_is_used_from_where_on_it_is_faster_at_all_contexts(
    slower: list[tuple[int, int]], least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(_kernel: object, _shape: Shape, rows: int, context: int) -> tuple[float, float]:
        return 1.0, 2.0 if (rows, context) in slower else 0.5

    monkeypatch.setattr(kernel_check, "measure_times", times)
    assert kernel_check.find_least_rows(gather_attention, SHAPE) == least


def test_without_a_gpu_the_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert runpy.run_path(str(BENCHMARK))["main"]([]) == 1
    assert capsys.readouterr().err.startswith("nothing to measure: the paged-decode kernel needs a GPU")


def test_the_benchmark_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paged_decode, "find_language", lambda: dataclasses.replace(METAL, compile=gpu_on_cpu.kernel))
    monkeypatch.setattr(kernel_check, "CHECKED_LENGTHS", ((1, 33),))
    monkeypatch.setattr(kernel_check, "MEASURED_BYTES", 1)
    module = runpy.run_path(str(BENCHMARK))
    shapes = "--batches 1 2 --contexts 32 --heads 2 --kv-heads 1 --head-size 32"
    assert module["main"](shapes.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "metal: query heads 2, KV heads 1, head size 32, float16"
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "32"], ["2", "32"]]
