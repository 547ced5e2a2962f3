from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels.rope import rope_store
from tests.backends.torch.kernels.device import DEVICE, unit

# T rows, H query heads, K kv heads, D head size, R rotated dimensions

NUM_SLOTS, MAX_BLOCKS, NUM_BLOCKS = 4, 6, 30
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # H, K, D, R, block size
    (16, 8, 128, 128, 32),  # Qwen 3
    (32, 8, 128, 128, 16),  # Llama 3
    (9, 3, 64, 64, 32),  # SmolLM2: queries, keys and values in one program
    (4, 1, 256, 256, 32),  # Gemma 3
    (6, 6, 96, 96, 32),  # Phi 3
    (6, 2, 128, 96, 32),  # Phi 4 mini: a part is not rotated
    (3, 1, 80, 32, 5),
    (1, 1, 16, 2, 1),
]


@dataclass
class Case:
    qkv: Tensor  # [T, (H + 2K) * D]
    positions: Tensor
    batch_indices: Tensor
    tables: Tensor
    cosines: Tensor
    sines: Tensor
    layer: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def run(self, num_heads: int, *, rounds_first: bool = False, query_factors: Tensor | None = None) -> Tensor:
        return rope_store(
            self.qkv, self.positions, self.batch_indices, self.tables, self.cosines, self.sines, self.layer, num_heads,
            self.q_norm, self.k_norm, EPS, rounds_first=rounds_first, query_factors=query_factors,
        )  # fmt: skip


def random_case(shape: tuple[int, ...], dtype: torch.dtype, has_norms: bool) -> Case:
    num_heads, num_kv_heads, head_size, rotary_size, block_size = shape
    torch.manual_seed(sum(shape))
    max_model_len = MAX_BLOCKS * block_size
    tables = torch.randperm(NUM_BLOCKS)[: NUM_SLOTS * MAX_BLOCKS].view(NUM_SLOTS, MAX_BLOCKS)
    # Rows of all batch indices mixed, no place twice, the last position included; then padding rows with any positions.
    places = torch.cat(
        (torch.randperm(NUM_SLOTS * max_model_len - 1)[:3], torch.tensor([NUM_SLOTS * max_model_len - 1]))
    )
    batch_indices = torch.cat((places // max_model_len, torch.tensor([-1, -1])))
    positions = torch.cat((places % max_model_len, torch.tensor([0, 2**30])))
    angles = torch.rand(max_model_len, rotary_size // 2) * 7
    q_norm, k_norm = torch.randn(2, head_size).to(DEVICE)
    return Case(
        qkv=(torch.randn(len(batch_indices), (num_heads + 2 * num_kv_heads) * head_size) * 2).to(DEVICE, dtype),
        positions=positions.to(DEVICE, torch.int32),
        batch_indices=batch_indices.to(DEVICE, torch.int32),
        tables=tables.to(DEVICE, torch.int32),
        cosines=(angles.cos() * 1.2).to(DEVICE),  # as with an attention factor
        sines=(angles.sin() * 1.2).to(DEVICE),
        layer=torch.randn(NUM_BLOCKS, 2, num_kv_heads, block_size, head_size).to(DEVICE, dtype),
        q_norm=q_norm if has_norms else None,
        k_norm=k_norm if has_norms else None,
    )


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    """Heads [T, H, D] in fp64."""
    if weight is None:
        return x.double()
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads [T, H, D] in fp64: pairs as complex numbers, turned by a product."""
    half = cosines.shape[1]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = pairs * torch.complex(cosines.double(), sines.double())[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Assert equality up to three roundings, relative to the inputs of the rotation: the sum of two may be small."""
    bound = 3 * unit(got.dtype) * exact.abs().amax(-1, keepdim=True) + 1e-6
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(("has_norms", "rounds_first"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rope_store(shape: tuple[int, ...], dtype: torch.dtype, has_norms: bool, rounds_first: bool) -> None:
    num_heads, num_kv_heads, head_size, _, block_size = shape
    case = random_case(shape, dtype, has_norms)
    before, layer_before = case.qkv.clone(), case.layer.clone()
    q = case.run(num_heads, rounds_first=rounds_first)
    assert torch.equal(case.qkv, before)
    assert q.shape == (6, num_heads, head_size)
    assert q.dtype == dtype

    is_real = case.batch_indices >= 0
    positions, batch_indices = case.positions[is_real].long(), case.batch_indices[is_real].long()
    heads = case.qkv[is_real].view(len(batch_indices), -1, head_size)
    queries, keys, values = heads.tensor_split((num_heads, num_heads + num_kv_heads), 1)
    cosines, sines = case.cosines[positions], case.sines[positions]
    assert_near(q[is_real], rotated(normed(queries, case.q_norm), cosines, sines))
    blocks, offsets = case.tables[batch_indices, positions // block_size].long(), positions % block_size
    assert_near(case.layer[blocks, 0, :, offsets], rotated(normed(keys, case.k_norm), cosines, sines))
    assert torch.equal(case.layer[blocks, 1, :, offsets], values)
    # Nothing else was written, neither by these rows nor by the padding.
    case.layer[blocks, :, :, offsets] = layer_before[blocks, :, :, offsets]
    assert torch.equal(case.layer, layer_before)


def unrotated(weight: float, *, rounds_first: bool) -> tuple[Tensor, Tensor]:
    """Return queries in bf16 with that norm weight, and the same in fp64."""
    num_heads, num_kv_heads, head_size = 16, 8, 128
    case = random_case((num_heads, num_kv_heads, head_size, head_size, 32), torch.bfloat16, True)
    case.cosines.fill_(1.0)
    case.sines.fill_(0.0)
    case.q_norm = case.k_norm = torch.full((head_size,), weight, device=DEVICE)
    rows = case.batch_indices >= 0
    queries = case.qkv[rows].view(int(rows.sum()), -1, head_size)[:, :num_heads]
    return case.run(num_heads, rounds_first=rounds_first)[rows], normed(queries, case.q_norm)


def test_weights_are_not_rounded_to_the_type_of_the_model() -> None:
    """1.0038 is 1 in bf16. The results are rounded alike with both weights, so their sums show the difference."""
    one, more = (unrotated(weight, rounds_first=False)[0].double().abs().sum() for weight in (1.0, 1.0038))
    assert float(more / one) == pytest.approx(1.0038, abs=1e-3)


@pytest.mark.parametrize(("rounds_first", "num_roundings"), [(False, 1), (True, 2)])
def test_a_norm_is_rounded_as_its_family_does(rounds_first: bool, num_roundings: int) -> None:
    got, exact = unrotated(1.3, rounds_first=rounds_first)
    error = float(((got.double() - exact) / exact).abs().max()) / unit(torch.bfloat16)
    assert num_roundings - 0.9 < error < 1.01 * num_roundings


def test_rows_may_be_parts_of_longer_rows() -> None:
    """Of gated attention, the gates follow the values."""
    case, other = (random_case(SHAPES[0], torch.float32, has_norms=True) for _ in range(2))
    other.qkv = torch.cat((other.qkv, torch.full_like(other.qkv, torch.nan)), 1)[:, : other.qkv.shape[1]]
    assert torch.equal(case.run(16), other.run(16))
    assert torch.equal(case.layer, other.layer)


def test_queries_are_multiplied_by_the_factor_of_their_position() -> None:
    """Keys and values are not."""
    shape = SHAPES[-2]  # with a part that is not rotated
    plain, case = (random_case(shape, torch.float32, False) for _ in range(2))
    expected = plain.run(shape[0])
    factors = torch.rand(MAX_BLOCKS * shape[-1], device=DEVICE) + 1
    q = case.run(shape[0], query_factors=factors)
    real = case.batch_indices >= 0
    torch.testing.assert_close(q[real], expected[real] * factors[case.positions[real].long()][:, None, None])
    assert torch.equal(case.layer, plain.layer)


def test_blocks_beyond_32_bits() -> None:
    """Only the pages that are used take memory."""
    num_kv_heads, block_size, head_size = 8, 32, 128
    num_blocks = 2**15 + 2
    layer = torch.empty(num_blocks, 2, num_kv_heads, block_size, head_size, dtype=torch.bfloat16, device=DEVICE)
    case = random_case((8, num_kv_heads, head_size, head_size, block_size), torch.bfloat16, False)
    case.layer = layer
    case.tables.fill_(num_blocks - 1)
    case.batch_indices, case.positions, case.qkv = case.batch_indices[:1], case.positions[:1], case.qkv[:1]
    case.run(8)
    stored = layer[num_blocks - 1, 1, :, int(case.positions[0]) % block_size]
    assert torch.equal(stored, case.qkv.view(-1, head_size)[-num_kv_heads:])
