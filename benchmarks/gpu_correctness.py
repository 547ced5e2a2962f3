"""Checks correctness before speed: distributions against `transformers`, and answers that do not depend on batching."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from gpu_machine import Machine
from gpu_workloads import GEMMA4, GPT_OSS, Workload, open_spec, random_prompt
from torch import Tensor

from quire.backends.torch.loading import DUMMY_STD
from quire.bench.driver import Track
from quire.core.values import SamplingParams
from tests.backends.torch.families import MORE_FAMILIES, STATE_FAMILIES, Reference, logprobs
from tests.backends.torch.rig import Answer as RigAnswer
from tests.backends.torch.rig import Rig

FAMILIES = ("llama", "mistral with a window", "qwen2", "qwen3", "gemma3", "phi3", *MORE_FAMILIES, *STATE_FAMILIES)
QUICK_FAMILIES = ("qwen3",)
FP32_BOUND = 1e-4  # of a log-probability, over a few layers and two libraries
# In bf16: our distance of a typical row from fp32, relative to that of `transformers`. With experts, rounding leads a
# few rows to other experts, and which ones is chance: the median of the rows is compared, otherwise the mean.
FACTOR, ROUTED_FACTOR = 1.05, 1.15
GAP_STEPS = 8  # of bf16, at the size of the best logits: largest gap between two tokens that may swap
FP32_GAP = 0.01  # the same in fp32: sums in another order, amplified by the layers
NUM_TOP = 20
LENGTHS = (1, 17, 40, 70, 130)
HEAD = 70  # two full blocks and a tail
OUT = 8


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    value: float
    bound: float
    note: str = ""

    @property
    def is_held(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        word = "ok" if self.is_held else "NOT HELD"
        return f"{self.what}: {self.value:.2g}, at most {self.bound:.2g}{self.note and f'; {self.note}'}: {word}"


# Distributions of small models, against `transformers`


def check_family(name: str, dtype: str, device: str, folder: Path) -> Check:
    """Compare alone, in a batch of all lengths in chunks, with graphs, and with the prompt's prefix from the cache."""
    reference = Reference(name, folder, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    rig = Rig(folder, device=device, dtype=dtype)
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    peer = reference.running_in(torch.bfloat16, "cuda" if is_cuda else "cpu") if dtype == "bfloat16" else None
    ours, theirs = _Distances(), _Distances()
    try:
        for prompt, answer in _answers(name, rig):
            tokens = [*prompt, *answer.tokens]
            rows = slice(len(prompt) - 1, len(tokens) - 1)
            expected = reference.logprobs(tokens)[rows]
            ours.take(torch.stack(answer.rows), expected)
            if peer is not None:
                theirs.take(logprobs(peer, tokens)[rows], expected)
    finally:
        rig.engine.close()
    what, largest = f"{name} in {dtype}, against transformers", max(ours.peaks)
    if peer is None:
        return Check(what, largest, FP32_BOUND)
    has_experts = open_spec(folder).has_experts
    typical: Any = statistics.median if has_experts else statistics.fmean
    factor = ROUTED_FACTOR if has_experts else FACTOR
    note = f"transformers {typical(theirs.means):.2g}; largest {largest:.2g}, transformers {max(theirs.peaks):.2g}"
    return Check(f"{what}, typical row", typical(ours.means), factor * typical(theirs.means), note)


def _answers(name: str, rig: Rig) -> Iterator[tuple[list[int], RigAnswer]]:
    prompt = _tokens(1, HEAD)
    rig.reset(overlap=True)
    yield prompt, rig.answer(prompt, OUT)
    again = rig.answer(prompt, OUT)
    if again.num_cached_tokens == 0:
        raise RuntimeError(f"{name}: the second run of a prompt found nothing in the cache")
    yield prompt, again
    for has_graphs in (False, True):
        while has_graphs and rig.engine.runner.prepare():
            pass
        rig.reset(overlap=True, max_chunk_tokens=16, max_num_batched_tokens=40)
        ids = {rig.start(one, OUT): one for one in _prompts()}
        answers = rig.run(*ids)
        yield from ((one, answers[request_id]) for request_id, one in ids.items())


@dataclass(frozen=True, slots=True)
class _Distances:
    """Distances of log-probabilities from those of fp32, by row."""

    means: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def take(self, rows: Tensor, expected: Tensor) -> None:
        distances = (rows - expected).abs()
        self.means.extend(distances.mean(-1).tolist())
        self.peaks.extend(distances.amax(-1).tolist())


def _prompts() -> list[list[int]]:
    return [_tokens(seed, length) for seed, length in enumerate(LENGTHS, 10)]


def _tokens(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


# Greedy answers of a real shape: alone, in a batch, with a shared prefix

# Answers of these shapes are compared in fp32. With random weights, the four chosen experts of gpt-oss, or the normed
# sum of eight of Gemma 4, are most of a layer's output, and the scores of some experts are nearly equal. In bf16,
# another order of sums then chooses another expert for some tokens in every layer, and the answer is a different one.
# In fp32 this is rare: at the real depth it still happens to some of 24 answers, with six layers to none or one.
COMPARED_IN_FP32 = (GPT_OSS, GEMMA4)
FP32_LAYERS = 6
FP32_KV_BYTES = 20 << 30


def check_batching(machine: Machine, shape: str) -> list[Check]:
    """Answers must be equal token by token, or differ first where two tokens were almost equally probable."""
    rng = Random(7)
    scale = machine.scale
    longest = 400 if not scale.is_quick else 40
    prompts = [random_prompt(rng, scale, rng.randint(1, longest)) for _ in range(scale.greedy_prompts)]
    head = random_prompt(rng, scale, scale.b_shared // 2 + 5)
    greedy = [SamplingParams(temperature=0, max_tokens=scale.greedy_out)]
    batch = Workload("batched", prompts, greedy * len(prompts))
    shared = Workload("shared", [head + prompt for prompt in prompts], batch.samplings, len(head))
    alone = [machine.run(Workload("alone", [prompt], greedy)).tracks[0] for prompt in prompts]
    with_cache, without = machine.run(shared), machine.run(shared, machine.uncached_engine())
    if with_cache.num_cached == 0 or without.num_cached:
        raise RuntimeError(f"tokens found in the cache: {with_cache.num_cached} with it, {without.num_cached} without")
    return [
        _compare(machine, f"{shape}, greedy, batched against alone", batch, alone, machine.run(batch).tracks),
        _compare(machine, f"{shape}, greedy, shared prefix against not", shared, without.tracks, with_cache.tracks),
    ]


def _compare(machine: Machine, what: str, workload: Workload, ones: list[Track], others: list[Track]) -> Check:
    gaps = []
    num_equal = 0
    for prompt, one, other in zip(workload.prompts, ones, others, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        parted = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        num_equal += len(one.tokens) if parted is None else parted
        if parted is not None:
            gaps.append(_gap(machine, [*prompt, *one.tokens[:parted]], one.tokens[parted], other.tokens[parted]))
    note = f"{num_equal} of {workload.num_out} tokens equal,"
    note += f" {len(gaps)} of {len(ones)} answers differ from a near tie on"
    return Check(f"{what}, gap at the first difference", max(gaps, default=0.0), _gap_bound(machine), note)


def _gap_bound(machine: Machine) -> float:
    """Bound for random weights: a logit sums `hidden_size` products, and the best of `vocab_size` is an extreme."""
    spec = machine.spec
    if machine.config.dtype == "float32":
        return FP32_GAP
    best = DUMMY_STD * math.sqrt(spec.hidden_size) * math.sqrt(2 * math.log(spec.vocab_size))
    return float(GAP_STEPS * 2.0 ** (math.floor(math.log2(best)) - 7))  # 8 bits of precision


def _gap(machine: Machine, context: list[int], one: int, other: int) -> float:
    """Return how much more probable one token is than the other; infinite if it is not among the best few."""
    asked = replace(SamplingParams(temperature=0), max_tokens=1, logprobs=NUM_TOP)
    (track,) = machine.run(Workload("gap", [context], [asked])).tracks
    top = dict(track.logprobs[0].top)
    return abs(top[one] - top[other]) if one in top and other in top else float("inf")
