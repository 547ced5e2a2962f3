"""Check on the real model that a disk cache outlives a restart: `python -m tests.restart --prompts 300`.

Prompts of 20 to 400 tokens, some with common prefixes, some with a salt, are answered by one engine, and again by a
new one on the same folder. Tokens and the bits of their log probabilities must be equal, nothing that is on disk may
be computed again, and 95 % of what could come from disk must come from there.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.driver import Prompts
from quire.core.cache import CacheExplanation
from quire.core.levels import levels
from quire.core.step import TokenLogprobs
from quire.core.values import NS_PER_S, SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import Engine
from quire.engine.generation import GenerationRequest
from quire.engine.model_text import ModelText
from quire.weights.hub import resolve

MIN_TOKENS, MAX_TOKENS = 20, 400
NUM_OUTPUTS = 4
MIN_FROM_DISK = 0.95  # share of the tokens that could come from disk
SAVE_LIMIT_S = 600.0  # only ends a hang
KV_MEMORY = "512M"


class Case(NamedTuple):
    prompt: tuple[int, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]  # all bits of the most probable tokens of each position
    cache: CacheExplanation

    def is_equal(self, other: Answer) -> bool:
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


@dataclass(slots=True)
class Outcome:
    num_prompts: int = 0
    num_equal: int = 0
    num_reusable: int = 0  # prompt tokens that were computed before, without the last one of each prompt
    num_on_device: int = 0  # of them, those that another prompt had brought to the device already
    num_from_disk: int = 0
    num_recomputed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def share_from_disk(self) -> float:
        """Of the tokens that were not on the device."""
        return self.num_from_disk / max(self.num_reusable - self.num_on_device, 1)


def make_cases(text: ModelText, count: int, seed: int = 0) -> list[Case]:
    """Prompts of real text. Of every six, three have a common prefix, and two have a salt, one of them in common."""
    rng, source = random.Random(seed), Prompts(text.tokenizer, seed)
    cases: list[Case] = []
    while len(cases) < count:
        head = source.make(rng.randrange(MIN_TOKENS, 300))
        for number in range(6):
            own = source.make(rng.randrange(MIN_TOKENS, MAX_TOKENS))
            prompt = own if number in (2, 4) else [*head, *own][: rng.randrange(len(head) + 1, MAX_TOKENS + 1)]
            salt = ("", "", "", "", "tenant a", f"tenant {len(cases)}")[number]
            cases.append(Case(tuple(prompt), salt))
    return cases[:count]


@contextmanager
def patient_loads() -> Iterator[None]:
    """No load is given up because this machine is busy."""
    before, levels.MIN_TIMEOUT_NS = levels.MIN_TIMEOUT_NS, 600 * NS_PER_S
    try:
        yield
    finally:
        levels.MIN_TIMEOUT_NS = before


def open_engine(path: Path, folder: Path | None, **settings: Any) -> Engine:
    """Make an engine; with a folder, one with a disk cache.

    Loads always pay, however busy this machine is when their speed is measured.
    """
    disk = {} if folder is None else {"disk_cache": "20G", "cache_dir": str(folder)}
    config = EngineConfig(**{"backend": "native", "kv_memory": KV_MEMORY, **disk, **settings})
    engine = make_engine(path, config)
    engine.scheduler.cache.levels.ns_per_token = None
    return engine


def answer_all(engine: Engine, cases: Sequence[Case], num_outputs: int = NUM_OUTPUTS) -> list[Answer]:
    """Answer several prompts at once."""
    tokens: dict[int, list[int]] = {number: [] for number in range(len(cases))}
    logprobs: dict[int, list[str]] = {number: [] for number in range(len(cases))}
    found: dict[int, CacheExplanation] = {}
    for number, case in enumerate(cases):
        engine.add(
            number,
            GenerationRequest.of(
                case.prompt, SamplingParams(temperature=0, max_tokens=num_outputs, logprobs=5), salt=case.salt
            ),
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.tokens
            logprobs[output.request_id] += map(_bits, output.logprobs)
            if output.cache is not None:
                found[output.request_id] = output.cache
    return [Answer(tuple(tokens[n]), tuple(logprobs[n]), found[n]) for n in range(len(cases))]


def _bits(entry: TokenLogprobs) -> str:
    return " ".join(f"{token}:{logprob.hex()}" for token, logprob in ((entry.token, entry.logprob), *entry.top))


def answer_in_batches(engine: Engine, cases: Sequence[Case], *, batch_size: int = 4) -> list[Answer]:
    """Answer prompts, a few at a time, and save the cache after each batch, as a server does while it is idle."""
    answers: list[Answer] = []
    for start in range(0, len(cases), batch_size):
        answers += answer_all(engine, cases[start : start + batch_size])
        assert engine.save_cache(SAVE_LIMIT_S)
    return answers


def compare(cases: Sequence[Case], before: Sequence[Answer], after: Sequence[Answer]) -> Outcome:
    outcome = Outcome()
    for number, (case, expected, answer) in enumerate(zip(cases, before, after, strict=True)):
        found, num_reusable = answer.cache, len(case.prompt) - 1
        outcome.num_prompts += 1
        outcome.num_equal += answer.is_equal(expected)
        outcome.num_reusable += num_reusable
        outcome.num_on_device += found.num_tokens - found.num_loaded_tokens
        outcome.num_from_disk += found.num_loaded_tokens
        outcome.num_recomputed += num_reusable - found.num_tokens
        if not answer.is_equal(expected):
            outcome.problems.append(
                f"prompt {number}: {answer.tokens} for {expected.tokens}, or other log probabilities"
            )
        if found.num_tokens < num_reusable:
            outcome.problems.append(f"prompt {number} of {len(case.prompt)} tokens is computed again: {found}")
    if outcome.share_from_disk < MIN_FROM_DISK:
        outcome.problems.append(f"only {outcome.share_from_disk:.1%} of the tokens come from disk")
    return outcome


def run_restart(path: Path, folder: Path, count: int, **settings: Any) -> Outcome:
    """Answer all prompts, restart, and answer them again."""
    text = ModelText.open(path)
    cases = make_cases(text, count)
    text.close()
    engine = open_engine(path, folder, **settings)
    before = answer_in_batches(engine, cases)
    engine.close()
    engine = open_engine(path, folder, **settings)
    after = answer_again(engine, cases)
    engine.close()
    return compare(cases, before, after)


def answer_again(engine: Engine, cases: Sequence[Case]) -> list[Answer]:
    """Answer all prompts in another order and in batches of another size."""
    order = random.Random(1).sample(range(len(cases)), len(cases))
    with patient_loads():
        found = answer_in_batches(engine, [cases[at] for at in order], batch_size=3)
    return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def report(outcome: Outcome) -> str:
    return (
        f"prompts {outcome.num_prompts}, equal {outcome.num_equal}; tokens reusable {outcome.num_reusable},"
        f" on the device {outcome.num_on_device}, from disk {outcome.num_from_disk} ({outcome.share_from_disk:.1%}),"
        f" recomputed {outcome.num_recomputed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, help="compute threads (default: all cores)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-restart-") as folder:
        outcome = run_restart(resolve(options.model), Path(folder), options.prompts, threads=options.threads)
    print(report(outcome))
    for problem in outcome.problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
