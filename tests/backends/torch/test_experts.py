"""Routed experts: the kernels and the plain version, compared with each other and with fp64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from quire.backends.torch.experts import Experts
from quire.backends.torch.kernels import experts as kernels
from quire.backends.torch.kernels.experts import LONG, MAX_ALONE, Tiling, max_tiles, tiling
from quire.backends.torch.kernels.routed_experts import experts_in_tiles
from quire.backends.torch.packed import Stack
from quire.weights.spec import Activation
from tests.backends.torch.kernels.device import DEVICE, unit

# T rows of the batch, N experts, K experts chosen per row, E hidden size, F width of an expert

FP32, BF16 = torch.float32, torch.bfloat16
DOT_DTYPES = [FP32, BF16] if DEVICE == "cuda" else [FP32]  # the interpreter multiplies the bits of bf16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
    pytest.mark.sweep("file"),
]


def make_experts(
    num_experts: int,
    num_chosen: int,
    size: int,
    width: int,
    dtype: torch.dtype = FP32,
    *,
    activation: Activation = Activation.SILU,
    renormalizes: bool = True,
    scale: float = 1.0,
    has_bias: bool = False,
    has_expert_scales: bool = False,
) -> Experts:
    """Make experts such that results are about 1."""
    torch.manual_seed(num_experts * size + width)
    gate_up = torch.randn(num_experts, 2 * width, size) / size**0.5
    down = torch.randn(num_experts, size, width) / width**0.5 * 2
    return Experts(
        gate_up.to(DEVICE, dtype),
        down.to(DEVICE, dtype),
        num_chosen=num_chosen,
        activation=activation,
        renormalizes=renormalizes,
        scale=scale,
        gate_up_bias=torch.randn(num_experts, 2 * width).to(DEVICE, dtype) if has_bias else None,
        down_bias=torch.randn(num_experts, size).to(DEVICE, dtype) if has_bias else None,
        expert_scales=(0.5 + torch.rand(num_experts)).to(DEVICE) if has_expert_scales else None,
    )


def dense(stack: Stack) -> Tensor:
    """Return the decoded matrices [N, O, I]."""
    return torch.stack([stack[expert] for expert in range(len(stack))])


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up in fp64."""
    one, up = gate_up.double().chunk(2, -1)
    if activation is Activation.CLAMPED_SWIGLU:
        one, up = one.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * one * torch.sigmoid(1.702 * one)
    if activation is Activation.SILU:
        return torch.nn.functional.silu(one) * up
    return torch.nn.functional.gelu(one, approximate="tanh") * up


def make_rows(experts: Experts, num_rows: int) -> tuple[Tensor, Tensor]:
    """Make rows [T, E] and logits [T, N]."""
    torch.manual_seed(num_rows)
    num_experts, size, _ = experts.down.shape
    return torch.randn(num_rows, size).to(DEVICE, experts.down.dtype), torch.randn(num_rows, num_experts).to(DEVICE)


def exact(experts: Experts, x: Tensor, logits: Tensor) -> Tensor:
    """Evaluate the equation row by row in fp64."""
    rows = []

    @functools.cache
    def matrices(n: int) -> tuple[Tensor, Tensor]:  # packed ones are decoded once
        return experts.gate_up[n].double(), experts.down[n].double()

    for row, logit in zip(x.double(), logits.double(), strict=True):
        weights = logit.softmax(0)
        ids = logit.sort(descending=True, stable=True).indices[: experts.num_chosen].tolist()
        total = sum(float(weights[n]) for n in ids) if experts.renormalizes else 1.0
        out = torch.zeros_like(row)
        for n in ids:
            biases = [0.0 if one is None else one[n].double() for one in (experts.gate_up_bias, experts.down_bias)]
            gate_up, down = matrices(n)
            hidden = gate(gate_up @ row + biases[0], experts.activation)
            factor = 1.0 if experts.expert_scales is None else float(experts.expert_scales[n])
            weight = weights[n] / total * experts.scale * factor
            out += weight * (down @ hidden + biases[1])
        rows.append(out)
    return torch.stack(rows)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    bound = 6 * unit(dtype) + 2e-5
    torch.testing.assert_close(got.double(), want.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "size", "width"),
    [(1, 4, 1, 64, 32), (1, 16, 8, 70, 33), (2, 24, 3, 33, 65), (MAX_ALONE, 32, 2, 40, 24)],
)
def test_few_rows(num_rows: int, num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype) -> None:
    experts = make_experts(num_experts, num_chosen, size, width, dtype, renormalizes=False, scale=1.5)
    x, logits = make_rows(experts, num_rows)
    want = exact(experts, x, logits)
    assert_near(experts.reference(x, logits), want, dtype)
    assert_near(experts.fused(x, logits), want, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "size", "width"),
    [
        (5, 8, 2, 64, 32),
        (33, 4, 3, 70, 33),  # nothing is a multiple of a tile
        (40, 6, 1, 33, 65),
        (70, 5, 4, 32, 40),  # several large tiles per expert
        (200, 64, 8, 32, 16),  # more slots than SHORT
    ],
)
def test_many_rows(num_rows: int, num_experts: int, num_chosen: int, size: int, width: int, dtype: torch.dtype) -> None:
    experts = make_experts(num_experts, num_chosen, size, width, dtype)
    x, logits = make_rows(experts, num_rows)
    want = experts.reference(x.float(), logits) if dtype == FP32 else exact(experts, x, logits)
    assert_near(experts.fused(x, logits), want, dtype)


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("activation", list(Activation))
def test_biases_and_factors(num_rows: int, activation: Activation) -> None:
    experts = make_experts(5, 2, 32, 20, activation=activation, has_bias=True, has_expert_scales=True)
    x, logits = make_rows(experts, num_rows)
    x *= 10  # beyond the limits of the clamped activation
    want = exact(experts, x, logits)
    bound = 1e-5 * float(want.abs().max())
    torch.testing.assert_close(experts.fused(x, logits).double(), want, rtol=1e-4, atol=bound)
    torch.testing.assert_close(experts.reference(x, logits).double(), want, rtol=1e-4, atol=bound)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 1), (7, 7), (64, 8), (33, 6)])
def test_routing(num_experts: int, num_chosen: int, dtype: torch.dtype) -> None:
    """Logits in bf16 have ties, which the first expert wins. So do logits that differ in nothing but a zero's sign."""
    experts = make_experts(num_experts, num_chosen, 2, 1, renormalizes=False)
    torch.manual_seed(num_experts)
    logits = torch.randn(6, num_experts).to(DEVICE, dtype)
    logits[1] = 0
    logits[2] = -0.0
    logits[2, ::2] = 0.0
    logits[3] = -torch.arange(num_experts)
    logits[4, 1:] = float("-inf")
    ids, weights = kernels.route(logits, num_chosen, renormalizes=False, scale=1.0)
    want_ids, want_weights = experts._route(logits)
    assert ids.tolist() == want_ids.tolist()
    assert ids[1].tolist() == ids[2].tolist() == list(range(num_chosen))
    torch.testing.assert_close(weights, want_weights)


def test_a_row_of_nan_gets_valid_experts() -> None:
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[0] = float("nan")
    logits[1, 3] = -float("nan")
    ids, weights = kernels.route(logits, 3, renormalizes=True, scale=1.0)
    assert ids.tolist() == [[0, 1, 2], [3, 0, 1], [0, 1, 2]]
    assert bool(weights[:2].isnan().all())
    assert not bool(weights[2].isnan().any())


@pytest.mark.parametrize("num_rows", [2, 20])
def test_rows_of_nan_do_not_change_other_rows(num_rows: int) -> None:
    """Padding rows of a graph have any content."""
    experts = make_experts(4, 2, 32, 16)
    x, logits = make_rows(experts, num_rows)
    want = experts.fused(x, logits)
    x[1], logits[1] = float("nan"), float("nan")
    got = experts.fused(x, logits)
    others = torch.arange(num_rows) != 1
    assert torch.equal(got[others], want[others])
    assert bool(got[1].isnan().all())


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_of_the_same_tiling(dtype: torch.dtype) -> None:
    """Its place in a tile changes, and the rows around it, and the number of tiles of its experts."""
    experts = make_experts(8, 2, 32, 16, dtype)
    x, logits = make_rows(experts, 40)
    assert tiling(40, 8, 2, dtype.itemsize) == tiling(20, 8, 2, dtype.itemsize)
    whole = experts.fused(x, logits)
    assert torch.equal(experts.fused(x[7:27].clone(), logits[7:27].clone()), whole[7:27])
    assert torch.equal(experts.fused(x.flip(0), logits.flip(0)), whole.flip(0))
    logits[1:, 3] = 10  # every other row chooses this expert
    assert torch.equal(experts.fused(x, logits)[0], whole[0])


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter's sums follow the shape")
@pytest.mark.parametrize(("num_experts", "num_chosen", "size", "width"), [(128, 8, 2048, 768), (32, 4, 2880, 2880)])
def test_bits_do_not_depend_on_the_number_of_rows(num_experts: int, num_chosen: int, size: int, width: int) -> None:
    experts = make_experts(num_experts, num_chosen, size, width, BF16, has_bias=num_experts == 32)
    x, logits = make_rows(experts, 4096)
    whole = experts.fused(x, logits)
    for count in (1, 2, 3, 4, 5, 8, 16, 64, 300, 1024, 2500):
        assert torch.equal(experts.fused(x[:count].clone(), logits[:count].clone()), whole[:count]), count
        last = experts.fused(x[-count:].clone(), logits[-count:].clone())
        assert torch.equal(last, whole[-count:]), count


def check_sorted(ids: Tensor, num_experts: int, tile_rows: int) -> None:
    """Check that tiles cover every slot once, in order, each in a tile of its expert."""
    num_rows, num_chosen = ids.shape
    slots = kernels.sort_slots(ids.to(DEVICE), num_experts, tile_rows)
    experts = ids.flatten().tolist()
    order = slots.order.tolist()
    assert order == sorted(range(len(experts)), key=lambda slot: (experts[slot], slot))
    num_tiles, *entries = slots.tiles.tolist()[: 1 + 3 * slots.max_tiles]
    assert num_tiles <= slots.max_tiles == max_tiles(num_rows, num_experts, num_chosen, tile_rows)
    covered: list[int] = []
    for tile in range(num_tiles):
        expert, first, end = entries[3 * tile : 3 * tile + 3]
        places = range(first, min(first + tile_rows, end))
        assert {experts[order[place]] for place in places} == {expert}
        covered += places
    assert covered == list(range(len(order)))


@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(1, 4, 4), (30, 5, 2), (300, 9, 4)])
def test_slots_are_sorted(num_rows: int, num_experts: int, num_chosen: int) -> None:
    torch.manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts).argsort(1)[:, :num_chosen].int()
    check_sorted(ids, num_experts, 16)
    assert num_rows * num_chosen < LONG


def test_many_slots_are_sorted_in_chunks() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (2 * LONG + 17, 1)).int()
    ids[:LONG] = 1  # the first chunk has one expert only
    check_sorted(ids, 4, 128)


SHAPES = [
    (shape, dtype)
    for dtype in (FP32, BF16)
    for shape in sorted({tiling(num_rows, 4, 2, dtype.itemsize) for num_rows in range(5, 300)})
]


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_every_tiling(shape: Tiling, dtype: torch.dtype, padding: int) -> None:
    """Test tiles for large batches on small matrices, with inputs that are whole tiles and that are not."""
    dtype = dtype if DEVICE == "cuda" else FP32
    experts = make_experts(2, 1, shape.gate_up.inputs + padding, shape.down.inputs + padding, dtype)
    x, logits = make_rows(experts, 6 if padding else 150)
    logits[:, 0] += 0.5  # full tiles, and at least one that is not half full
    routing = kernels.route(logits, 1, renormalizes=False, scale=1.0)
    experts.renormalizes = False
    got = experts_in_tiles(x, experts.gate_up, experts.down, routing, experts.activation, shape)
    assert_near(got, experts.reference(x, logits), dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 33])
def test_addresses_are_aligned(num_rows: int) -> None:
    """Triton compiles a kernel again for an address that is not a multiple of 16 bytes."""
    slots = kernels.sort_slots(torch.zeros(num_rows, 3, dtype=torch.int32, device=DEVICE), 5, 16)
    assert slots.order.data_ptr() % 16 == slots.tiles.data_ptr() % 16 == 0
