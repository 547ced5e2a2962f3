"""FP8 keys and values: the kernels and the plain path store the same codes and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.backends.torch.kernels.rope import rope_store
from quire.backends.torch.kv_store import decode, encode
from tests.backends.torch.kernels.device import DEVICE

# The interpreter computes in numpy, which warns of numbers that are masked afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

BLOCK_SIZE = 4


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(codes.shape, dtype=torch.float32)
    decode(codes.cpu(), scales.cpu(), out)
    return out


def stored(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales that the kernel stores for keys [T, D], each a token of its own."""
    num_rows, head_size = vectors.shape
    num_blocks = -(-num_rows // BLOCK_SIZE)
    layer = torch.full((num_blocks + 1, 2, 1, BLOCK_SIZE, head_size), 99, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((num_blocks + 1, 2, 1, BLOCK_SIZE), 99, dtype=torch.bfloat16, device=DEVICE)
    qkv = torch.cat((vectors, vectors, -vectors), 1).to(DEVICE)
    positions = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    tables = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=DEVICE)[None]
    rows = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    q = rope_store(qkv, positions, rows, tables, None, None, layer, 1, None, None, 0.0, scales=scales)
    assert torch.equal(q[:, 0].cpu().nan_to_num(7.0), vectors.nan_to_num(7.0))
    assert bool((layer[0] == 99).all())  # block 0 is not in the table
    assert bool((scales[0] == 99).all())
    keys, values = layer[1:, :, 0].transpose(0, 1).reshape(2, -1, head_size)[:, :num_rows].cpu()
    key_scales, value_scales = scales[1:, :, 0].transpose(0, 1).reshape(2, -1)[:, :num_rows].cpu()
    assert torch.equal(key_scales.view(torch.int16), value_scales.view(torch.int16))
    is_same = values == keys ^ 0x80  # values have the other sign
    assert bool((is_same | (keys == 0)).all())
    return keys, key_scales


def vectors(dtype: torch.dtype) -> Tensor:
    """Return vectors of all magnitudes, with large and small numbers side by side, and special ones."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(60, 32, generator=generator)
    spread = torch.exp2(torch.rand(60, 1, generator=generator) * 200 - 100)
    rows = [
        noise * spread if dtype != torch.float16 else noise,
        noise * torch.exp2(torch.rand(60, 32, generator=generator) * 24 - 20),
        torch.zeros(1, 32),
        torch.full((1, 32), 1.75),
        torch.full((1, 32), 0.9 * float(torch.finfo(dtype).max)),
        torch.full((1, 32), float(torch.finfo(dtype).smallest_normal)),
        torch.arange(-16, 16).view(1, 32) * (2.0**-9 / 2) + torch.eye(1, 32) * 300,  # ties between small codes
    ]
    return torch.cat(rows).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_paths_store_the_same_codes(dtype: torch.dtype) -> None:
    given = vectors(dtype)
    codes, scales = encode(given)
    for mine, theirs in zip(stored(given), (codes, scales), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_half_a_step_of_three_bits(dtype: torch.dtype) -> None:
    given = vectors(dtype).float()
    got = decoded(*encode(given))
    largest = given.abs().amax(-1, keepdim=True)
    bound = torch.maximum(given.abs() * 2**-4, largest * 2**-17)  # of small numbers, half the distance of small codes
    bound[largest[:, 0] < 2.0**-90] = 2.0**-90
    assert bool(((got - given).abs() <= bound).all())
    at_largest = (got - given).abs().gather(1, given.abs().argmax(-1, keepdim=True))
    assert bool((at_largest <= largest * 2**-8 + 2.0**-90).all())  # of the scale
    share = (got.double() - given.double()).norm(dim=-1) / given.double().norm(dim=-1).clamp(2.0**-90)
    assert float(share[:120].mean()) < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_marked(bad: float) -> None:
    given = torch.randn(3, 32)
    given[1, 5] = bad
    for codes, scales in (encode(given), stored(given)):
        assert scales.isnan().tolist() == [False, True, False]
        assert not codes[1].any()
        out = decoded(codes, scales)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()
