"""Matrix products in few bits, compared with numpy in float64 on the packed weights.

Sources of error, from which the bounds follow:
- A group of 32 inputs is rounded to multiples of its peak / 127: each input moves by at most half of that. Of a refined
  step of 4 inputs, the group contains only the error of a first rounding, at most 1 / 254 of the step's peak.
- The sum over G groups is fp32: per group a product with the scale and, for Q4, one with the minimum, which are large
  if weight and minimum cancel; per refined step one more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire.backends.native.library import GROUP, Floats, choose_kernels, kernels_available
from quire.backends.native.model import Engine
from quire.weights.checkpoint import TensorType
from tests.backends.native.matrices import Doubles, Packed, coded, floats, project, same_bits, signed_nibbles

FLOAT_EPS = 2.0**-24
STEP = 4
SHARES = {"fast": 0, "balanced": 20, "exact": 256}  # of the steps that are refined, in 1/256
SMALLEST = 1e-30  # groups with a smaller peak count as zeros

# Packed matrices by kind: codes from a file, and floats rounded to 8 bits
MAKERS: dict[str, Callable[[int, int, int], Packed]] = {
    "Q4_0": lambda rows, cols, seed: coded(TensorType.Q4_0, rows, cols, seed),
    "Q4_1": lambda rows, cols, seed: coded(TensorType.Q4_1, rows, cols, seed),
    "Q8_0": lambda rows, cols, seed: coded(TensorType.Q8_0, rows, cols, seed),  # with codes of -128
    "MXFP4": lambda rows, cols, seed: coded(TensorType.MXFP4, rows, cols, seed),
    "signed nibbles": signed_nibbles,
    "F32": lambda rows, cols, seed: floats(np.random.default_rng(seed).normal(0, 0.05, (rows, cols))),
}


def inputs(rows: int, cols: int, seed: int = 0) -> Floats:
    """Make steps of very different size, as the inputs of real models are."""
    rng = np.random.default_rng(seed)
    num_steps = -(-cols // STEP)
    sizes = np.exp(rng.normal(0, 2, (rows, num_steps, 1)))
    x = (rng.normal(size=(rows, num_steps, STEP)) * sizes).reshape(rows, -1)[:, :cols]
    return x.astype(np.float32)


def by_group(values: Doubles | Floats) -> Doubles:
    rows, cols = values.shape
    padded = np.zeros((rows, -(-cols // GROUP) * GROUP))
    padded[:, :cols] = values
    return padded.reshape(rows, -1, GROUP)


def error_bound(part: Packed, x: Floats, refine: int) -> Doubles:
    """Return [M, rows]: the bounds of the module docstring."""
    peaks = np.abs(by_group(x)).reshape(len(x), -1, STEP).max(-1)  # [M, steps]
    num_refined = -(-peaks.shape[1] * refine // 256)
    largest = np.argsort(-peaks, 1, kind="stable")[:, :num_refined]
    np.put_along_axis(peaks, largest, np.take_along_axis(peaks, largest, 1) / 254, 1)
    moves = peaks.reshape(len(x), -1, GROUP // STEP).max(-1) / 127 / 2  # [M, G]
    num_groups = moves.shape[1]
    moves = np.maximum(moves * 1.0001, SMALLEST)
    rounding = moves @ np.abs(by_group(part.unpack())).sum(-1).T
    sizes = np.abs(part.unpack().astype(np.float64)) + 2 * np.abs(part.minima)
    num_sums = 2 * num_groups + num_refined + 8
    bound: Doubles = rounding + num_sums * FLOAT_EPS * (1.01 * np.abs(x.astype(np.float64)) + SMALLEST) @ sizes.T
    return bound


def exact(parts: Sequence[Packed], x: Floats, bias: Floats | None = None) -> Doubles:
    weights = np.concatenate([part.unpack() for part in parts]).astype(np.float64)
    products: Doubles = x.astype(np.float64) @ weights.T
    return products if bias is None else products + bias


def check(engine: Engine, parts: Sequence[Packed], x: Floats, refine: int, bias: Floats | None = None) -> None:
    found = project(engine, parts, x, refine, bias)
    expected = exact(parts, x, bias)
    bound = np.concatenate([error_bound(part, x, refine) for part in parts], 1)
    if bias is not None:
        bound += FLOAT_EPS * (np.abs(expected) + np.abs(bias))
    assert (np.abs(found - expected) <= bound).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", SHARES)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (7, 64), (8, 96), (9, 576), (67, 160), (40, 1536)])
def test_products(engine: Engine, kind: str, rows: int, cols: int, precision: str) -> None:
    part = MAKERS[kind](rows, cols, 1)
    for num_rows in (1, 2, 3, 4, 6, 13):
        check(engine, [part], inputs(num_rows, cols, seed=num_rows), SHARES[precision])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cols", [1, 3, 31, 33, 40, 100, 251])
def test_odd_columns(engine: Engine, cols: int) -> None:
    for refine in SHARES.values():
        check(engine, [MAKERS["F32"](5, cols, 2)], inputs(5, cols), refine)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", SHARES)
def test_the_bounds_are_close(precision: str) -> None:
    """A bound ten times too wide would hold for a wrong kernel. Each precision is also close to its bound."""
    engine = Engine(1)
    part, x = MAKERS["F32"](64, 1536, 4), inputs(20, 1536)
    error = np.abs(project(engine, [part], x, SHARES[precision]) - exact([part], x))
    engine.close()
    used = (error / error_bound(part, x, SHARES[precision])).max()
    assert 0.03 < used <= 1
    coarser = {"fast": None, "balanced": "fast", "exact": "balanced"}[precision]
    if coarser is not None:
        assert (error / error_bound(part, x, SHARES[coarser])).max() < 0.3 * used


@pytest.mark.usefixtures("kernels")
def test_parts_of_a_fused_matrix_are_independent(engine: Engine) -> None:
    """Queries, keys and values may have different kinds and sizes: each part is computed as alone, bias included."""
    sizes = {"Q4_1": 12, "Q8_0": 5, "Q4_0": 3}
    parts = [MAKERS[kind](rows, 96, rows) for kind, rows in sizes.items()]
    bias = np.random.default_rng(0).normal(size=20).astype(np.float32)
    for num_rows in (1, 2, 3, 11):
        x = inputs(num_rows, 96)
        check(engine, parts, x, 52, bias)
        whole = project(engine, parts, x, 52)
        alone = [project(engine, [part], x, 52) for part in parts]
        assert same_bits(whole, np.concatenate(alone, 1))
        assert same_bits(project(engine, parts, x, 52, bias), whole + bias)
        check(engine, parts[:2], x, 256, bias[:17].copy())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("precision", SHARES)
def test_variants_agree(kind: str, precision: str) -> None:
    """Variants round alike, so they differ only in the order and fusing of fp32 sums."""
    engine = Engine(1)
    part, refine = MAKERS[kind](67, 1536, 5), SHARES[precision]
    for num_rows in (1, 2, 7):
        x = inputs(num_rows, 1536, seed=num_rows)
        found = {}
        for name in kernels_available():
            choose_kernels(name)
            found[name] = project(engine, [part], x, refine)
        choose_kernels(kernels_available()[0])
        sizes = np.abs(part.unpack().astype(np.float64)) + 2 * np.abs(part.minima)
        bound = 2 * 150 * FLOAT_EPS * 1.01 * np.abs(x.astype(np.float64)) @ sizes.T
        for name, result in found.items():
            assert (np.abs(result - found["portable"]) <= bound).all(), name
    engine.close()


# Independence of rows


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("precision", SHARES)
def test_a_row_does_not_depend_on_the_other_rows(kind: str, precision: str) -> None:
    one, two = Engine(1), Engine(2)
    part, x, refine = MAKERS[kind](75, 352, 6), inputs(40, 352), SHARES[precision]
    whole = project(one, [part], x, refine)
    for engine in (one, two):
        for num_rows in range(1, 41):
            assert same_bits(project(engine, [part], x[:num_rows], refine), whole[:num_rows])
        for row in range(40):
            assert same_bits(project(engine, [part], x[row : row + 1], refine)[0], whole[row])
    order = np.random.default_rng(0).permutation(40)
    assert same_bits(project(two, [part], x[order], refine), whole[order])
    one.close()
    two.close()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_nan_row_does_not_affect_other_rows(engine: Engine, kind: str, wrong: float) -> None:
    part = MAKERS[kind](20, 96, 7)
    for refine in SHARES.values():
        for num_rows in (1, 2, 3, 5, 9):
            for bad in {0, num_rows // 2, num_rows - 1}:
                x = inputs(num_rows, 96)
                sound = project(engine, [part], x, refine)
                x[bad, 40] = wrong
                found = project(engine, [part], x, refine)
                others = np.arange(num_rows) != bad
                assert same_bits(found[others], sound[others])
                assert np.isnan(found[bad]).all()


@pytest.mark.usefixtures("kernels")
def test_a_nan_weight_affects_only_its_own_output(engine: Engine) -> None:
    values = np.random.default_rng(0).normal(size=(20, 96)).astype(np.float32)
    broken = values.copy()
    broken[11, 95] = np.nan
    for refine in SHARES.values():
        for num_rows in (1, 2, 5):
            x = inputs(num_rows, 96)
            found = project(engine, [floats(broken)], x, refine)
            others = np.arange(20) != 11
            assert same_bits(found[:, others], project(engine, [floats(values)], x, refine)[:, others])
            assert np.isnan(found[:, 11]).all()


# Unusual inputs


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", MAKERS)
def test_zeros_give_zeros(engine: Engine, kind: str) -> None:
    part = MAKERS[kind](9, 64, 8)
    for refine in SHARES.values():
        assert not project(engine, [part], np.zeros((5, 64), np.float32), refine).any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1e-38, 1e-31, 1e-29, 1e-10, 1e10, 1e30, 1e36])
def test_tiny_and_huge_inputs(engine: Engine, size: float) -> None:
    part = MAKERS["F32"](9, 96, 9)
    for refine in SHARES.values():
        check(
            engine, [part], np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32) * np.float32(size), refine
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFF800000])
def test_rows_without_a_number(engine: Engine, bits: int) -> None:
    """No more steps are refined than there is memory for. The results are not finite, and other rows are correct."""
    part, x = MAKERS["F32"](9, 320, 11), inputs(6, 320)
    expected = {refine: project(engine, [part], x, refine) for refine in SHARES.values()}
    x[2] = np.full(320, bits, np.uint32).view(np.float32)
    for refine, sound in expected.items():
        found = project(engine, [part], x, refine)
        assert np.isnan(found[2]).all()
        assert same_bits(np.delete(found, 2, 0), np.delete(sound, 2, 0))


@pytest.mark.usefixtures("kernels")
def test_the_largest_steps_are_refined_and_equal_ones_from_the_left() -> None:
    """As many steps as fit, none twice."""
    engine = Engine(1)
    weights = np.zeros((48, 1536), np.float32)
    for row in range(48):
        weights[row, row * 32 + 1] = 1  # output i reads an input of the first step of group i
    x = np.zeros((1, 1536), np.float32)
    x[0, ::32] = 127.0  # in the same step
    x[0, 40 * 32 :: 32] = 254
    x[0, 1::32] = 0.3  # 0 after 8 bits, 0.299... after 8 more
    found = project(engine, [floats(weights)], x, 7)[0]
    is_refined = np.zeros(48, np.bool_)
    is_refined[:3] = is_refined[40:] = True  # 11 of 384
    assert np.abs(found[is_refined] - 0.3).max() < 0.01
    assert not found[~is_refined].any()
    engine.close()
