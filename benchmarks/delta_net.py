"""Checks and times the kernels of the gated delta net on this GPU, for the layers of Qwen3.5-0.8B and 35B-A3B.

    PYTHONPATH=. python benchmarks/delta_net.py

Errors are relative, against the recurrence in fp64 over the same bf16 inputs. Times are medians of CUDA graphs over
several layers, so that the cache does not hold the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from gpu_kernels import timed_us
from torch import Tensor

from quire.backends.torch.kernels.convolution import short_conv
from quire.backends.torch.kernels.delta_net import (
    DeltaWeights,
    delta_net,
    finish,
    pass_states,
    prepare,
    projected_size,
)
from quire.backends.torch.state_store import StateWork
from quire.core.step import SeqSlice
from quire.weights.spec import DeltaNetSpec
from tests.backends.torch.kernels.states import delta_rows, device_work, piece

SHAPES = {"0.8B": (DeltaNetSpec(16, 16, 128, 128, 4), 18), "35B-A3B": (DeltaNetSpec(16, 32, 128, 128, 4), 30)}
LAYERS, SLOTS = 6, 521
DTYPE = torch.bfloat16


class Layer:
    """Random weights and states. Decays are as in a trained model: from 1 token to some thousands."""

    def __init__(self, spec: DeltaNetSpec) -> None:
        self.spec = spec
        heads, channels = spec.num_value_heads, spec.num_channels
        self.weights = DeltaWeights(
            taps=(torch.randn(spec.num_taps, channels, device="cuda") / 2).to(DTYPE),
            decay=-torch.exp(torch.empty(heads, device="cuda").uniform_(-6, 1)),
            bias=torch.randn(heads, device="cuda"),
            norm=1 + torch.randn(spec.value_head_size, device="cuda") / 4,
            eps=1e-6,
        )
        self.conv = torch.randn(SLOTS, spec.num_taps - 1, channels, device="cuda").to(DTYPE)
        self.matrices = torch.randn(SLOTS, heads, spec.key_head_size, spec.value_head_size, device="cuda") / 8

    def run(self, projected: Tensor, work: StateWork) -> Tensor:
        return delta_net(projected, self.weights, self.spec, self.conv, self.matrices, work)


def repeat(run: Callable[[], object]) -> None:
    for _ in range(LAYERS):
        run()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def inputs(num_rows: int, spec: DeltaNetSpec) -> Tensor:
    return torch.randn(num_rows, projected_size(spec), device="cuda").to(DTYPE)


def check(name: str, spec: DeltaNetSpec) -> None:
    """Print errors against the recurrence, and whether a prompt depends on other requests or on its division."""
    layer = Layer(spec)
    x = inputs(1000, spec)
    old = layer.conv[1].double(), layer.matrices[1].double()
    wanted, _, state = delta_rows(x.double(), layer.weights, spec, *old)
    alone = layer.run(x, device_work([piece(1000, 1, 2)]))
    errors = [("prompt of 1,000", alone, wanted), ("its state", layer.matrices[2], state)]
    company = [piece(1, 3, 4), piece(1, 5, 5), piece(1000, 1, 6), piece(333, 0, 7, (100, 8))]
    other = layer.run(torch.cat((inputs(2, spec), x, inputs(333, spec))), device_work(company, 3))
    errors.append(("in a batch, against alone", other[2:1002], alone))
    errors.append(("its state", layer.matrices[6], layer.matrices[2]))
    cuts = tuple((position, 20 + place) for place, position in enumerate(range(37, 1000, 50)))
    errors.append(("with 20 snapshots, against alone", layer.run(x, device_work([piece(1000, 1, 9, *cuts)])), alone))
    errors.append(("its state", layer.matrices[9], layer.matrices[2]))
    same = x.clone()  # the worst case for the inverse: equal keys, no decay, every beta 1
    same[:, : 2 * spec.key_size] = x[0, : 2 * spec.key_size]
    same[:, -2 * spec.num_value_heads : -spec.num_value_heads] = 30
    same[:, -spec.num_value_heads :] = -30
    first, _, _ = delta_rows(same[:192].double(), layer.weights, spec, 0 * old[0], 0 * old[1])
    errors.append(("equal keys", layer.run(same[:192], device_work([piece(192, 0, 10)])), first))
    rows, source = [], 1
    for row in range(200):
        target = 11 + row % 2
        rows.append(layer.run(x[row : row + 1], device_work([piece(1, source, target)])))
        source = target
    errors.append(("200 decodes", torch.cat(rows), wanted[:200]))
    errors.append(("200 decodes, against the prompt", torch.cat(rows), alone[:200]))
    moved = [piece(1, 20 + row, 30 + row) for row in range(4)]
    x = inputs(4, spec)
    out = layer.run(x, device_work(moved))
    in_place = [piece(1, 20 + row, 20 + row) for row in range(4)]
    errors.append(("decodes in place, against moved", layer.run(x, device_work(in_place)), out))
    errors.append(("their states", layer.matrices[20:24], layer.matrices[30:34]))
    errors.append(("their inputs", layer.conv[20:24], layer.conv[30:34]))
    for what, found, right in errors:
        print(f"{name:8} {what:34} {error(found, right):.1e}")


def time_decodes(name: str, spec: DeltaNetSpec, num_layers: int, copy_rate: float) -> None:
    layers = [Layer(spec) for _ in range(LAYERS)]
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        slices = [piece(1, 1 + row, 257 + row) for row in range(count)]
        x, work = inputs(count, spec), device_work(slices)

        def step(x: Tensor = x, work: StateWork = work) -> None:
            for layer in layers:
                layer.run(x, work)

        us = timed_us(step) / LAYERS
        num_bytes = 2 * count * (layers[0].matrices[0].nbytes + layers[0].conv[0].nbytes) + x.nbytes
        print(
            f"{name:8} {count:3} decodes {us:7.1f} us a layer, {us * num_layers / 1000:6.3f} ms a step, "
            f"{num_bytes / us / 1e6:5.2f} TB/s ({num_bytes / us / 1e6 / copy_rate:.0%} of a copy)"
        )


def time_prompts(name: str, spec: DeltaNetSpec, num_layers: int) -> None:
    layers = [Layer(spec) for _ in range(3)]
    for lengths in ([6000], [1000] * 8, [100] * 64, [200]):
        slices: Sequence[SeqSlice] = [piece(length, 0, 1 + number) for number, length in enumerate(lengths)]
        x, work = inputs(sum(lengths), spec), device_work(slices)

        def step(stage: int, x: Tensor = x, work: StateWork = work) -> None:
            for layer in layers:
                chunked = prepare(x, layer.weights, spec, layer.conv, work.chunks)
                if stage > 0:
                    pass_states(x, spec, layer.conv, layer.matrices, work, chunked)
                if stage > 1:
                    out = x.new_empty(len(x), spec.num_value_heads * spec.value_head_size)
                    finish(x, layer.weights, spec, work.chunks, chunked, out)

        ends = [timed_us(partial(step, stage)) / len(layers) for stage in range(3)]
        parts = ", ".join(f"{end - begin:.0f}" for begin, end in zip([0.0, *ends], ends, strict=False))
        print(
            f"{name:8} {len(lengths):2} prompts of {lengths[0]:4}: {ends[-1]:6.0f} us a layer ({parts}), "
            f"{ends[-1] * num_layers / 1000:.2f} ms a step"
        )


def time_short_conv() -> None:
    """Print the times of LFM2's layer, of the shape of LFM2-1.2B."""
    size = 2048
    taps, conv = torch.randn(3, size, device="cuda").to(DTYPE), torch.randn(SLOTS, 2, size, device="cuda").to(DTYPE)
    for lengths in ([1], [1] * 256, [6000]):
        work = device_work([piece(length, 1 + number, 257 + number) for number, length in enumerate(lengths)])
        x = torch.randn(sum(lengths), 3 * size, device="cuda").to(DTYPE)
        run = partial(short_conv, x, taps, None, conv, work)
        us = timed_us(partial(repeat, run)) / LAYERS
        print(f"short convolution, {len(lengths):3} of {lengths[0]:4} rows: {us:.1f} us a layer")


def copy_rate() -> float:
    """Return the rate of a large elementwise operation in TB/s, bytes read and written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed_us(lambda: torch.add(source, 1, out=target)) / 1e6


def main() -> None:
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"a copy: {rate:.2f} TB/s")
    for name, (spec, num_layers) in SHAPES.items():
        check(name, spec)
        time_decodes(name, spec, num_layers, rate)
        time_prompts(name, spec, num_layers)
    time_short_conv()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
