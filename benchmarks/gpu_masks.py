"""Measures the cost of masks on a GPU, and checks that no forbidden token is chosen. Needs no grammar library.

    python benchmarks/gpu_masks.py            # an H200: two minutes
    python benchmarks/gpu_masks.py --quick    # a CPU

Steps of constrained rows alternate with steps of plain ones in one run. A synthetic matcher takes as long for a mask as
llguidance does for JSON (about 40 us, without the interpreter lock), and raises if a token is forbidden by its mask.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

from gpu_driving import Machine, Settings
from gpu_workloads import FULL, QUICK, random_prompt

from quire.core.values import SamplingParams

NUM_MASKS = 64
HASHED_BYTES = 60_000  # about 40 us
WARM_UP_STEPS = 8


class MadeUp:
    """Allows a few thousand tokens, different ones at every position."""

    def __init__(self, masks: list[bytes], start: int) -> None:
        self._masks = masks
        self._position = start
        self.family = self

    def mask(self) -> bytes:
        hashlib.sha256(_NOISE).digest()
        return self._masks[self._position % NUM_MASKS]

    def consume(self, token: int) -> bool:
        mask = self._masks[self._position % NUM_MASKS]
        if not mask[token // 8] >> token % 8 & 1:
            raise RuntimeError(f"token {token} is forbidden at position {self._position}")
        self._position += 1
        return False


_NOISE = Random(0).randbytes(HASHED_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    rows, steps, rounds = ((2, 4), 6, 1) if args.quick else ((1, 16, 64, 256), args.steps, args.rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        Machine(args.shape, scale, Settings(device="cpu" if args.quick else "auto"), Path(folder)) as machine,
    ):
        machine.prepare()
        vocab_size = machine.engine.capacity.vocab_size
        rng = Random(1)
        masks = [_random_mask(rng, vocab_size) for _ in range(NUM_MASKS)]
        print("| rows | plain ms | constrained ms | change | half of them constrained ms |\n|---|---|---|---|---|")
        for num_rows in rows:
            times: dict[float, list[float]] = {0.0: [], 1.0: [], 0.5: []}
            for _ in range(rounds):
                for share, found in times.items():
                    found += time_steps(machine, masks, num_rows, share, steps)
            plain, all_of_them, half = (statistics.median(found) * 1000 for found in times.values())
            print(f"| {num_rows} | {plain:.3f} | {all_of_them:.3f} | {all_of_them / plain - 1:+.1%} | {half:.3f} |")


def time_steps(machine: Machine, masks: list[bytes], num_rows: int, share: float, num_steps: int) -> list[float]:
    engine, rng = machine.engine, Random(2)
    engine.clear_cache()
    for row in range(num_rows):
        sampling = SamplingParams(temperature=0.6, seed=row, max_tokens=num_steps + 40)
        prompt = random_prompt(rng, machine.scale, 8)
        engine.add(row, prompt, sampling, matcher=MadeUp(masks, row) if row < share * num_rows else None)
    times: list[float] = []
    while engine.has_work:
        start_s = time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
        times.append(time.perf_counter() - start_s)
    return times[WARM_UP_STEPS : WARM_UP_STEPS + num_steps]


def _random_mask(rng: Random, vocab_size: int) -> bytes:
    """Allow about one token in thirty."""
    bits = bytearray(-(-vocab_size // 8))
    for token in rng.sample(range(vocab_size), max(vocab_size // 30, 3)):
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


if __name__ == "__main__":
    main()
