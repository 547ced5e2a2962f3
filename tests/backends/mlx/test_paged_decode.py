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
from quire.backends.mlx.kernel_check import (
    TOLERANCES,
    Example,
    check,
    find_error,
    gather_reference,
    make_example,
    measure_gains,
)
from quire.backends.mlx.paged_decode import (
    CUDA,
    METAL,
    TYPES,
    Attention,
    Gains,
    Language,
    PagedDecode,
    Shape,
    pays,
)
from tests.backends.mlx import gpu_on_cpu

Arrays = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]

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


def arrays_of(example: Example) -> Arrays:
    return example.queries, example.keys, example.values, example.tables, example.lengths


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
    pools = []
    for pool in (example.keys, example.values):
        array = np.array(pool)
        array[array == kernel_check.UNUSED] = np.nan
        pools.append(mx.array(array))
    kernel = on_cpu(METAL)
    keys, values = pools
    result = kernel(example.queries, keys, values, example.tables, example.lengths, scale=0.1, window=20)
    expected = gather_reference(*arrays_of(example), scale=0.1, window=20)
    assert mx.allclose(result, expected, atol=1e-5).item()


def test_a_scale_and_a_window_of_one_are_different_constants() -> None:
    example = example_of((1, 30), (2, 1), (64, 64))
    arrays = arrays_of(example)
    kernel = on_cpu(METAL)
    result = kernel(*arrays, scale=1.0, window=1)
    assert mx.allclose(result, gather_reference(*arrays, scale=1.0, window=1), atol=1e-5).item()


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
    result = np.array(gather_reference(*arrays_of(example), scale=0.2, window=window, sinks=sinks))
    queries, keys, values, tables, _ = (np.array(array) for array in arrays_of(example))
    for row, head in itertools.product(range(3), range(4)):
        positions = np.arange(max(0, lengths[row] - window) if window else 0, lengths[row])
        slots = (tables[row, positions // block_size], positions % block_size, head // 2)
        weights = np.exp(0.2 * keys[slots] @ queries[row, head])
        total = weights.sum() + (np.exp(np.array(example.sinks)[head]) if has_sinks else 0)
        np.testing.assert_allclose(result[row, head], weights @ values[slots] / total, rtol=2e-4, atol=1e-5)


class Wrong:
    """Gather + SDPA with an error."""

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        tables: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        return self.attend((queries, keys, values, tables, lengths), scale, window, sinks)

    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:
        return gather_reference(*arrays, scale=scale, window=window, sinks=sinks)


class WrongWindow(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:
        return super().attend(arrays, scale, window and window + 1, sinks)


class WithoutSinks(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:  # noqa: ARG002
        return super().attend(arrays, scale, window, None)


class OneKeyMore(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:
        return super().attend((*arrays[:4], arrays[4] + 1), scale, window, sinks)


class NotANumber(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:
        return super().attend(arrays, scale, window, sinks) * mx.nan


class AnotherType(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:
        return super().attend(arrays, scale, window, sinks).astype(mx.float16)


class DoesNotCompile(Wrong):
    def attend(self, arrays: Arrays, scale: float, window: int, sinks: mx.array | None) -> mx.array:  # noqa: ARG002
        raise RuntimeError("[metal::Device] Unable to build metal library from source")


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (WrongWindow(), "mlx.core.float32, 3 rows, window = 70, has_sinks = False: error = "),
        (WithoutSinks(), "mlx.core.float32, 3 rows, window = 0, has_sinks = True: error = "),
        (OneKeyMore(), "mlx.core.float32, 3 rows, window = 0, has_sinks = False: error = "),
        (NotANumber(), "mlx.core.float32, 3 rows, window = 0, has_sinks = False: error = nan"),
        (AnotherType(), "mlx.core.float32, 3 rows, window = 0, has_sinks = False: the kernel does not run: the result"),
        (DoesNotCompile(), "mlx.core.float32, 3 rows, window = 0, has_sinks = False: the kernel does not run: [metal"),
    ],
)
def test_the_check_describes_the_first_disagreement(kernel: Attention, problem: str) -> None:
    assert (check(kernel, SHAPE, TYPES) or "").startswith(problem)


def test_the_check_accepts_gather_itself() -> None:
    assert check(gather_reference, SHAPE, TYPES) is None
    assert check(gather_reference, Shape(6, 6, 128, 96, 16, mx.float32), TYPES) is None


def test_rows_of_an_example_share_blocks_and_name_no_other() -> None:
    example = example_of((1, 33, 300), (4, 2), (64, 64))
    assert example.tables.shape == (3, 10)
    tables: Any = example.tables.tolist()
    assert tables[0][1:] == [0] * 9  # padded with the null block
    assert tables[2][0] == tables[1][0]  # the first of two blocks
    assert tables[2][1] != tables[1][1]


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"head_size": 192, "value_size": 128}, True),
        ({"head_size": 80}, False),  # no multiple of the SIMD width
        ({"value_size": 512}, False),
        ({"num_heads": 30}, False),
        ({"block_size": 6}, False),
        ({"dtype": mx.bfloat16}, True),
        ({"dtype": mx.int8}, False),
    ],
)
def test_supported_shapes(change: dict[str, Any], is_supported: bool) -> None:
    shape = dataclasses.replace(Shape(32, 8, 128, 128, 32, mx.float16), **change)
    assert shape.is_supported is is_supported


GAINS: Gains = {1: {256: 0.8, 2048: 0.5}, 4: {256: 1.2, 2048: 1.5}, 16: {256: 2.0, 2048: 0.9}}


def test_the_smaller_gain_of_the_measured_points_around_decides() -> None:
    assert not pays(GAINS, 1, 256)
    assert not pays(GAINS, 3, 256)  # between 0.8 and 1.2
    assert pays(GAINS, 4, 100)
    assert pays(GAINS, 4, 1000)
    assert pays(GAINS, 4, 100_000)
    assert pays(GAINS, 8, 256)
    assert not pays(GAINS, 8, 300)  # 16 rows of 2048 tokens: 0.9
    assert pays(GAINS, 64, 200)
    assert not pays({}, 4, 256)


def test_the_kernel_is_used_where_it_pays_for_shapes_that_it_supports() -> None:
    kernel = on_cpu(METAL)
    queries, keys = mx.zeros((4, 8, 1, 64), mx.float16), mx.zeros((3, 32, 2, 64), mx.float16)
    assert not kernel.is_used(queries, keys, keys, 4, 1000)  # not measured
    kernel = on_cpu(METAL)
    kernel.shape, kernel.gains = Shape(8, 2, 64, 64, 32, mx.float16), GAINS
    assert kernel.is_used(queries, keys, keys, 4, 1000)
    assert not kernel.is_used(queries[:, :4], keys, keys, 4, 1000)  # another shape
    assert not kernel.is_used(queries, keys, keys, 1, 1000)
    assert not kernel.is_used(queries, keys, keys.astype(mx.float32), 4, 1000)
    assert not kernel.is_used(queries, keys, keys[..., :40], 4, 1000)


def test_gains_are_measured_for_every_point() -> None:
    found = []
    gains = measure_gains(
        gather_reference, Shape(2, 1, 32, 32, 16, mx.float32), (1, 2), (20, 64), lambda *point: found.append(point)
    )
    assert {batch: list(by_context) for batch, by_context in gains.items()} == {1: [20, 64], 2: [20, 64]}
    assert all(gain > 0 for by_context in gains.values() for gain in by_context.values())
    assert [point[:2] for point in found] == [(1, 20), (1, 64), (2, 20), (2, 64)]


def no_gpu() -> Language:
    raise RuntimeError("MLX finds no GPU here")


def test_without_a_gpu_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        PagedDecode()


def test_without_a_gpu_the_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paged_decode, "find_language", no_gpu)
    assert runpy.run_path(str(BENCHMARK))["main"]([]) == 1
    assert capsys.readouterr().err == "nothing to measure: MLX finds no GPU here\n"


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
