"""Check on the real model that greedy answers do not depend on batching: `python -m tests.equality --prompts 300`.

Each prompt is first answered alone, without a cache. Then all prompts are answered again: batched, chunked, on cached
prefixes, preempted, with a step in flight, and with drafts. Drafts come from a prediction of the answer with some wrong
tokens, so that they are accepted, cut and refused. The native backend guarantees bitwise equal results, so no token may
differ. With torch and MLX, where a token differs, the two best logits must be closer than `NEAR_TIE`: fp32 sums over a
different number of rows differ in their last bits, which may decide a tie.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.request import Request
from quire.core.values import Priority
from quire.engine.llm import as_chat
from quire.engine.model_text import ModelText
from quire.weights.hub import resolve
from tests.backends.torch.rig import Answer, Rig

NEAR_TIE = 2e-3  # difference of logits, which are 10 to 30
NEAR_TIES = {"torch": NEAR_TIE, "mlx": NEAR_TIE, "native": 0.0}
FP8_NEAR_TIE = 0.2  # a last bit may round a key to another code, which changes the keys of later layers much more
NUM_TOKENS = 24
SUBJECTS = (
    "the moon", "bread", "a bicycle", "rain", "the number seven", "honey", "a violin", "the sea", "glass", "a glacier",
    "chess", "coffee", "the alphabet", "a lighthouse", "salt", "gravity", "a whale", "paper", "the wind", "a clock",
)  # fmt: skip
QUESTIONS = (
    "What is {}?", "Write one sentence about {}.", "Why do people like {}?", "Name three facts about {}.",
    "Explain {} to a child.", "Who first described {}, and when?", "Write a short poem about {}.",
    "What is the opposite of {}?", "How would you draw {}?", "Translate '{}' into French.",
    "List five words that rhyme with {}.", "Is {} older than the Eiffel Tower?", "Tell me a joke about {}.",
    "What would the world be without {}?", "Give {} a new name and say why.",
)  # fmt: skip


def questions(count: int) -> list[str]:
    """Up to 300 different questions."""
    every = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    step = 7  # spreads over both lists; coprime to the number of questions
    return [every[i * step % len(every)] for i in range(count)]


@dataclass
class Outcome:
    name: str
    near_tie: float
    num_prompts: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    near_ties: list[float] = field(default_factory=list)  # gaps of the two best logits at tokens that differ
    differences: list[str] = field(default_factory=list)  # differences that are not near ties


@dataclass(frozen=True)
class Alone:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # between the two best logits at each token


CONDITIONS: dict[str, dict[str, Any]] = {
    "batched": {},
    "in chunks of 13": {"max_chunk_tokens": 13, "max_num_batched_tokens": 48},
    "with a step in flight": {"overlap": True},
    "preempted": {"max_num_seqs": 4},
    "with drafts": {"has_drafts": True},
    "drafts, step in flight": {"has_drafts": True, "overlap": True},
}
NUM_DRAFTING = 3  # requests at once in conditions with drafts: a full batch has none
WRONG_EACH = 8  # of these tokens of a prediction, one is wrong


def answer_alone(rig: Rig, prompts: Sequence[tuple[int, ...]], num_tokens: int = NUM_TOKENS) -> list[Alone]:
    found = []
    for prompt in prompts:
        rig.reset(enable_prefix_caching=False)
        answer = rig.answer(prompt, num_tokens, logprobs=2)
        gaps = tuple(float(row.nan_to_num(nan=-1e9).topk(2).values.diff().abs()) for row in answer.rows)
        found.append(Alone(prompt, tuple(answer.tokens), gaps))
    return found


def compare(rig: Rig, alone: Sequence[Alone], name: str) -> Outcome:
    rig.reset(**CONDITIONS[name])
    has_drafts = CONDITIONS[name].get("has_drafts", False)
    return _answer_all(rig, alone, name, is_preempted=name == "preempted", has_drafts=has_drafts)


def compare_on_hits(rig: Rig, alone: Sequence[Alone]) -> Outcome:
    """Answer every prompt twice with one cache: the second time, all but its last token is cached."""
    rig.reset()
    _answer_all(rig, alone, "first time")
    return _answer_all(rig, alone, "on cached prefixes")


def nearly(tokens: Sequence[int]) -> list[int]:
    """These tokens, with a wrong one among every `WRONG_EACH`."""
    return [max(token - 1, 0) if place % WRONG_EACH == WRONG_EACH - 2 else token for place, token in enumerate(tokens)]


def _answer_all(
    rig: Rig, alone: Sequence[Alone], name: str, *, is_preempted: bool = False, has_drafts: bool = False
) -> Outcome:
    """Answer all prompts at once; or, to preempt, half as LOW and the others as HIGH while those decode."""
    is_fp8 = rig.config.kv_cache_dtype == "fp8"
    outcome = Outcome(name, FP8_NEAR_TIE if is_fp8 else NEAR_TIES[rig.config.backend])
    ids: dict[int, Alone] = {}
    answers: dict[int, Answer] = {}
    requests: list[Request] = []

    def start(some: Sequence[Alone], priority: Priority) -> None:
        for one in some:
            prediction = nearly(one.tokens) if has_drafts else ()
            request_id = rig.start(one.prompt, len(one.tokens), priority=priority, logprobs=None, prediction=prediction)
            ids[request_id], answers[request_id] = one, Answer()
            request = rig.engine.scheduler.requests.get(request_id)
            assert request is not None
            requests.append(request)

    if is_preempted:
        for number in range(0, len(alone), 8):
            start(alone[number : number + 4], Priority.LOW)
            for _ in range(7):
                rig.step(answers)
            start(alone[number + 4 : number + 8], Priority.HIGH)
            while rig.engine.has_work:
                rig.step(answers)
    elif has_drafts:
        for number in range(0, len(alone), NUM_DRAFTING):
            start(alone[number : number + NUM_DRAFTING], Priority.NORMAL)
            while rig.engine.has_work:
                rig.step(answers)
    else:
        start(alone, Priority.NORMAL)
    while rig.engine.has_work:
        rig.step(answers)
    for request_id, answer in answers.items():
        outcome.num_prompts += 1
        outcome.num_cached_tokens += answer.num_cached_tokens
        _judge(outcome, ids[request_id], answer.tokens)
    outcome.num_preemptions = sum(request.num_preemptions for request in requests)
    outcome.num_drafted = rig.engine.scheduler.num_drafted
    outcome.num_accepted = rig.engine.scheduler.num_accepted
    if has_drafts and rig.engine.speculation.is_on and not outcome.num_accepted:  # MLX has no drafts
        outcome.differences.append(f"{name}: none of {outcome.num_drafted} drafts was right")
    return outcome


def _judge(outcome: Outcome, one: Alone, tokens: Sequence[int]) -> None:
    for position, (token, expected) in enumerate(zip(tokens, one.tokens, strict=False)):
        if token != expected:
            gap = one.gaps[position]
            if gap < outcome.near_tie:
                outcome.near_ties.append(gap)
            else:
                outcome.differences.append(f"{one.prompt[-12:]} at {position}: {token} for {expected}, gap {gap:.6f}")
            return
        outcome.num_tokens += 1
    if len(tokens) != len(one.tokens):
        outcome.differences.append(f"{one.prompt[-12:]}: {len(tokens)} tokens for {len(one.tokens)}")


def make_prompts(text: ModelText, count: int) -> list[tuple[int, ...]]:
    return [text.encode_chat(as_chat(question), text.spec.max_model_len) for question in questions(count)]


def run_all(path: Path, backend: str, count: int, num_threads: int | None) -> list[Outcome]:
    text = ModelText.open(path)
    rig = Rig(path, backend=backend, num_blocks=1500, max_num_seqs=16, max_waiting=10_000, threads=num_threads)
    try:
        alone = answer_alone(rig, make_prompts(text, count))
        return [*(compare(rig, alone, name) for name in CONDITIONS), compare_on_hits(rig, alone)]
    finally:
        rig.engine.close()
        text.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--model")
    parser.add_argument("--backend", choices=sorted(NEAR_TIES), default="native")
    parser.add_argument(
        "--threads", type=int, help="compute threads (default: all cores, fewer if other processes use them)"
    )
    options = parser.parse_args()
    start = time.monotonic()
    outcomes = run_all(resolve(options.model), options.backend, options.prompts, options.threads)
    print(
        f"{'condition':24}{'prompts':>8}{'equal':>8}{'ties':>6}{'largest':>10}{'cached':>8}{'preempted':>10}{'drafts':>16}"
    )
    for one in outcomes:
        largest = max(one.near_ties, default=0.0)
        print(
            f"{one.name:24}{one.num_prompts:8}{one.num_tokens:8}{len(one.near_ties):6}{largest:10.6f}"
            f"{one.num_cached_tokens:8}{one.num_preemptions:10}{f'{one.num_accepted} of {one.num_drafted}':>16}"
        )
    print(f"Near ties are closer than {NEAR_TIES[options.backend]}. {time.monotonic() - start:.0f} s.")
    differences = [difference for outcome in outcomes for difference in outcome.differences]
    for difference in differences:
        print(f"DIFFERENT: {difference}", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
