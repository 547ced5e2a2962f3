"""Compare a backend's distributions with fp32 of the same weights: `python -m tests.precision --backend native`.

Compares every position of `tests/data/text.txt`, in windows of 512 tokens and two longer ones, and of 50 chats: the
rendered prompt and the reference's greedy answer of 32 tokens. The reference is the torch backend in fp32. Measures,
over the whole vocabulary: KL divergence (of the backend from the reference, in nats), agreement of the most probable
token, and perplexity of the given text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.base import PRECISIONS
from quire.backends.torch.attention import ReferencePass
from quire.backends.torch.batch import build_batch
from quire.backends.torch.runner import TorchRunner
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine, make_runner
from quire.engine.generation import GenerationRequest
from quire.engine.llm import as_chat
from quire.engine.model_text import ModelText
from quire.weights.hub import resolve
from quire.weights.opening import open_checkpoint
from tests.backends.native.matrices import logits_of

# T tokens of a sequence, V vocabulary size

DATA = Path(__file__).parent / "data"
WINDOWS = (512, 512, 512, 512, 1024)  # tokens of the text; the rest is one more window
ANSWER_TOKENS = 32
ROWS = 64  # compared at a time: 25 MB per array in float64
WHOLE = "all"

MOST_KL = 0.003  # mean
LEAST_AGREEMENT = 0.985
MOST_PERPLEXITY = 0.01  # relative difference from the reference

Logits = NDArray[np.float32]  # [T, V]


class Model(Protocol):
    def logits(self, tokens: list[int]) -> Logits:
        """Logits at every position of a single sequence."""


# Passages to compare


@dataclass(frozen=True, slots=True)
class Passage:
    """A sequence and its positions to compare, by name. A shared head is compared once."""

    tokens: tuple[int, ...]
    parts: tuple[tuple[str, int, int], ...]  # (name, first, last), without last


def text_passages(text: ModelText, windows: Sequence[int] = WINDOWS, *, has_rest: bool = True) -> Iterator[Passage]:
    tokens = text.encode((DATA / "text.txt").read_text(encoding="ascii"), text.spec.max_model_len)
    first = 0
    for length in (*windows, len(tokens) - sum(windows)) if has_rest else windows:
        name = "text, windows of 512" if length <= min(windows) else "text, longer windows"
        yield Passage(tokens[first : first + length], ((name, 0, length),))
        first += length


def chat_prompts(text: ModelText) -> list[tuple[int, ...]]:
    lines = (DATA / "prompts.txt").read_text(encoding="ascii").splitlines()
    return [text.encode_chat(as_chat(line), text.spec.max_model_len) for line in lines]


def chat_passages(prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]]) -> Iterator[Passage]:
    num_shared = 0
    while len({prompt[num_shared] for prompt in prompts}) == 1:  # the part of the template before the message
        num_shared += 1
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = (*prompt, *answer)
        first = num_shared if number else 0
        turn = len(prompt) - 1  # the position that predicts the first token of the answer
        yield Passage(tokens, (("chat, prompts", first, turn), ("chat, answers", turn, len(tokens))))


# The reference


class Reference:
    """The torch backend in fp32, which returns the logits of every position."""

    def __init__(self, path: Path, num_threads: int | None = None, kv_cache_dtype: str = "auto") -> None:
        # No cache: `logits` writes into blocks without the scheduler, between two answers.
        config = EngineConfig(
            backend="torch",
            device="cpu",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            threads=num_threads,
            num_blocks=160,
            max_num_seqs=16,
            enable_prefix_caching=False,
        )
        self.engine = make_engine(path, config)
        runner = self.engine.runner
        assert isinstance(runner, TorchRunner)
        self._model, self._store = runner.model, runner.store

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Logits:
        num_blocks = -(-len(tokens) // self._store.block_size)
        piece = SeqSlice(
            request_id=0,
            epoch=0,
            batch_index=0,
            tokens=tokens,
            start=0,
            length=len(tokens),
            block_table=range(1, num_blocks + 1),
            history=tokens,
            wants_token=True,
            sampling=SamplingParams(),
            num_prompt_tokens=len(tokens),
        )
        no_samples = torch.zeros(1, dtype=torch.int64)
        step = ReferencePass(build_batch([piece], self._store, self._model.spec.windows, no_samples), self._store)
        logits: Logits = self._model.logits(self._model.forward(step)).numpy()
        return logits

    def answer(self, prompts: Sequence[Sequence[int]], eos_token_ids: tuple[int, ...]) -> list[list[int]]:
        """Greedy answers to all prompts, each up to its end or ANSWER_TOKENS."""
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, stop_token_ids=eos_token_ids)
        for number, prompt in enumerate(prompts):
            self.engine.add(number, GenerationRequest.of(list(prompt), sampling))
        answers: list[list[int]] = [[] for _ in prompts]
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                answers[output.request_id] += output.tokens
        return answers

    def close(self) -> None:
        self.engine.close()


# The backend under test


class Native:
    """The native backend with the given precision, or its default."""

    def __init__(self, path: Path, precision: str | None = None, num_threads: int | None = None) -> None:
        settings: dict[str, Any] = {} if precision is None else {"precision": precision}
        checkpoint = open_checkpoint(path)
        try:
            config = EngineConfig(backend="native", threads=num_threads, max_num_seqs=1, **settings)
            self._runner: Any = make_runner(checkpoint, config)
        finally:
            checkpoint.close()

    def logits(self, tokens: list[int]) -> Logits:
        return logits_of(self._runner.model, tokens)

    def close(self) -> None:
        self._runner.close()


# Comparison


class Positions(NamedTuple):
    """Results at each compared position."""

    kl: NDArray[np.float64]
    is_same: NDArray[np.bool_]  # the most probable token is the same
    surprise: NDArray[np.float64]  # of the next token, in nats; NaN at the last position
    reference_surprise: NDArray[np.float64]

    def part(self, first: int, last: int) -> Positions:
        parts: list[Any] = [values[first:last] for values in self]
        return Positions(*parts)

    @classmethod
    def join(cls, many: Sequence[Positions]) -> Positions:
        return cls(*(np.concatenate(values) for values in zip(*many, strict=True)))


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    num_positions: int
    mean_kl: float
    max_kl: float
    agreement: float  # share of positions with the same most probable token
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.reference_perplexity

    @property
    def misses(self) -> list[str]:
        """Messages for the limits that are exceeded. A NaN exceeds all limits."""
        bars = {
            f"mean KL {self.mean_kl:.5f} is above {MOST_KL}": self.mean_kl <= MOST_KL,
            f"top-1 agreement {self.agreement:.2%} is under {LEAST_AGREEMENT:.1%}": self.agreement >= LEAST_AGREEMENT,
            f"perplexity is {self.perplexity_ratio:.4f} times the reference's": abs(self.perplexity_ratio - 1)
            <= MOST_PERPLEXITY,
        }
        return [f"{self.name}: {what}" for what, is_held in bars.items() if not is_held]


def compare(reference: Logits, logits: Logits, tokens: Sequence[int]) -> Positions:
    """Compare logits [T, V] of the same tokens [T]."""
    assert logits.shape == reference.shape, f"{logits.shape = }, not {reference.shape}"
    following = np.asarray([*tokens[1:], -1])
    found = [
        _compare_rows(reference[first : first + ROWS], logits[first : first + ROWS], following[first : first + ROWS])
        for first in range(0, len(tokens), ROWS)
    ]
    return Positions.join(found)


def _compare_rows(reference: Logits, logits: Logits, following: NDArray[np.int64]) -> Positions:
    expected, actual = _log_softmax(reference), _log_softmax(logits)
    rows = np.arange(len(following))
    has_next = following >= 0
    return Positions(
        kl=(np.exp(expected) * (expected - actual)).sum(-1),
        is_same=reference.argmax(-1) == logits.argmax(-1),
        surprise=np.where(has_next, -actual[rows, following], np.nan),
        reference_surprise=np.where(has_next, -expected[rows, following], np.nan),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def judge(name: str, positions: Positions) -> Verdict:
    has_next = ~np.isnan(positions.reference_surprise)
    return Verdict(
        name=name,
        num_positions=len(positions.kl),
        mean_kl=float(positions.kl.mean()),
        max_kl=float(positions.kl.max()),
        agreement=float(positions.is_same.mean()),
        perplexity=math.exp(positions.surprise[has_next].mean()),
        reference_perplexity=math.exp(positions.reference_surprise[has_next].mean()),
    )


def judge_all(passages: Iterable[Passage], reference: Model, model: Model) -> list[Verdict]:
    """One verdict for each name of positions, and a last one for all positions."""
    found: dict[str, list[Positions]] = {}
    for passage in passages:
        tokens = list(passage.tokens)
        positions = compare(reference.logits(tokens), model.logits(tokens), tokens)
        for name, first, last in passage.parts:
            found.setdefault(name, []).append(positions.part(first, last))
    everything = Positions.join([positions for many in found.values() for positions in many])
    return [*(judge(name, Positions.join(many)) for name, many in found.items()), judge(WHOLE, everything)]


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        f"{'':22}{'positions':>10}{'mean KL':>10}{'max KL':>9}{'top-1':>9}{'perplexity':>12}{'fp32':>9}{'ratio':>9}"
    ]
    lines += [
        f"{one.name:22}{one.num_positions:10,}{one.mean_kl:10.6f}{one.max_kl:9.4f}{one.agreement:9.2%}"
        f"{one.perplexity:12.4f}{one.reference_perplexity:9.4f}{one.perplexity_ratio:9.5f}"
        for one in verdicts
    ]
    return "\n".join(lines)


# Command line


def open_model(backend: str, path: Path, precision: str | None, num_threads: int | None) -> Native | Reference:
    if backend == "native":
        return Native(path, precision, num_threads)
    return Reference(path, num_threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    parser.add_argument("--precision", choices=PRECISIONS, help="precision of the native backend")
    parser.add_argument("--model", help="name or path (default: the default model)")
    parser.add_argument(
        "--threads", type=int, help="compute threads (default: all cores, fewer if other processes use them)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.precision and options.backend != "native":
        parser.error("--precision applies only to --backend native")
    started_s = time.monotonic()
    path = resolve(options.model)
    text = ModelText.open(path)
    reference = Reference(path, options.threads)
    model = open_model(options.backend, path, options.precision, options.threads)
    prompts = chat_prompts(text)
    passages = [*text_passages(text), *chat_passages(prompts, reference.answer(prompts, text.eos_token_ids))]
    verdicts = judge_all(passages, reference, model)
    for one in (model, reference, text):
        one.close()
    if options.json:
        print(json.dumps([{name: getattr(one, name) for name in one.__slots__} for one in verdicts], indent=2))
    else:
        print(f"{table(verdicts)}\n{options.backend} compared with torch in fp32, {time.monotonic() - started_s:.0f} s")
    for miss in verdicts[-1].misses:
        print(f"MISSED: {miss}", file=sys.stderr)
    return 1 if verdicts[-1].misses else 0


if __name__ == "__main__":
    sys.exit(main())
