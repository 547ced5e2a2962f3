"""Whether the default model answers a newcomer's first questions correctly, with every kernel variant.

    python benchmarks/first_answer.py                          all kernels of this machine, balanced and exact
    python benchmarks/first_answer.py --fp32                   also PyTorch in fp32, the reference
    python benchmarks/first_answer.py --kernels avx2 --precision balanced --top-p 0.9

For each variant and precision:
  - the first question (`quire serve --hello`) with 100 seeds and the model's default sampling: how many answers are
    right;
  - all examples of README.md and the page, greedy: how many answers are right to the letter, and the least margin. A
    margin is the difference of the log probabilities (in nats) of the chosen token and of the best other one, at each
    token of the answer and at its end. Kernels round differently: this changes answers where a margin is small.

Bars: 95 % of the sampled answers, all examples right, and a margin of 0.5 everywhere. Exits with 1 below one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from first_examples import RIGHT, Example, distinct, examples

from quire.backends.native.library import choose_kernels, kernels_available
from quire.cli.serve import QUESTION
from quire.engine.generation import Completion, GenerationOutput, GenerationParams
from quire.engine.llm import LLM, as_chat
from quire.text.grammar import regex_grammar

BAR = 0.95
LEAST_MARGIN = 0.5
MAX_TOKENS = 64
FP32 = "fp32"  # in place of the name of kernels
NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Margin:
    """By how much a token was chosen."""

    nats: float
    place: int  # in the answer; 0 is its first token
    token: str
    prompt: str

    def __str__(self) -> str:
        return f"{self.nats:.2f} nats at token {self.place} ({self.token!r}) of {self.prompt!r}"


@dataclass(slots=True)
class Answered:
    """Greedy answers to the examples."""

    margins: dict[Example, Margin] = field(default_factory=dict)  # the least of each
    wrong: dict[Example, str] = field(default_factory=dict)

    @property
    def least(self) -> Margin:
        return min(self.margins.values(), key=lambda one: one.nats)


def opened(kernels: str, precision: str, model: str | None) -> LLM:
    """Load the model for one variant of the kernels, or for PyTorch in fp32."""
    if kernels == FP32:
        return LLM(model, backend="torch", device="cpu")
    choose_kernels(kernels)
    return LLM(model, backend="native", precision=precision)


def answer_examples(llm: LLM, todo: Sequence[Example]) -> Answered:
    found = Answered()
    for example, output in zip(todo, _answers(llm, todo), strict=True):
        completion = output.completions[0]
        found.margins[example] = min(_margins(example, completion), key=lambda one: one.nats)
        if completion.text != RIGHT.get(example.prompt):
            found.wrong[example] = completion.text
    return found


def _answers(llm: LLM, todo: Sequence[Example]) -> list[GenerationOutput]:
    """Greedy answers. All are rendered as their clients do it, and run as one batch."""
    length = llm.max_model_len
    prompts = [
        llm.text.encode(one.prompt, length) if one.is_raw else llm.text.encode_chat(as_chat(one.prompt), length)
        for one in todo
    ]
    return llm.generate([list(prompt) for prompt in prompts], [_greedy(one) for one in todo])


def _greedy(example: Example) -> GenerationParams:
    grammar = regex_grammar("|".join(example.choices)) if example.choices else None
    num_shown = 20 if example.choices else 2  # most of the best tokens do not match the expression
    limit = min(example.max_tokens or MAX_TOKENS, MAX_TOKENS)
    return GenerationParams(temperature=0, max_tokens=limit, logprobs=num_shown, grammar=grammar)


def _margins(example: Example, completion: Completion) -> Iterator[Margin]:
    """The margin at each token, the end of the text included, that decides which text the answer is."""
    assert completion.logprobs is not None
    before = ""
    for place, chosen in enumerate(completion.logprobs):
        others = [one for one in chosen.top if one.token_id != chosen.token_id]
        if example.choices:
            left = [one for one in example.choices if one.startswith(before) and one != completion.text]
            if not left:
                return
            others = [one for one in others if one.text and any(text.startswith(before + one.text) for text in left)]
        best = max([one.logprob for one in others], default=chosen.top[-1].logprob)
        yield Margin(chosen.logprob - best, place, chosen.text, example.prompt)
        before += chosen.text


def sample(llm: LLM, question: str, params: Sequence[GenerationParams]) -> list[str]:
    return [answer.completions[0].text for answer in llm.chat([question] * len(params), params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="the default model unless given")
    parser.add_argument("--kernels", action="append", help="names; all that this machine runs unless given")
    parser.add_argument("--precision", action="append", help="balanced and exact unless given")
    parser.add_argument("--fp32", action="store_true", help="also the torch backend on the CPU")
    parser.add_argument("--answers", type=int, default=100, help="sampled answers to the first question")
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--top-p", type=float, default=None)
    given = parser.parse_args()
    params = [
        GenerationParams(seed=seed, max_tokens=MAX_TOKENS, temperature=given.temperature, top_p=given.top_p)
        for seed in range(given.answers)
    ]
    todo = distinct(examples())
    precisions = given.precision or ("balanced", "exact")
    runs = [(name, precision) for name in given.kernels or kernels_available() for precision in precisions]
    is_good = True
    for kernels, precision in [*runs, *([(FP32, "")] if given.fp32 else [])]:
        with opened(kernels, precision, given.model) as llm:
            texts = sample(llm, QUESTION, params)
            answered = answer_examples(llm, todo)
        is_good &= report(f"{kernels} {precision}".strip(), texts, todo, answered)
    sys.exit(not is_good)


def report(name: str, texts: Sequence[str], todo: Sequence[Example], answered: Answered) -> bool:
    """Print what one variant did. Return whether it reached the bars."""
    right = RIGHT[QUESTION]
    num_right, num_good = texts.count(right), len(todo) - len(answered.wrong)
    print(
        f"{name}: {num_right} of {len(texts)} sampled answers and {num_good} of {len(todo)} examples are right;"
        f" least margin {answered.least}",
        flush=True,
    )
    for text, count in Counter(text for text in texts if text != right).most_common(NUM_SHOWN):
        print(f"  {count} x {text[:100]!r}")
    for example, text in answered.wrong.items():
        print(f"  {example.source}: {example.prompt!r} was answered by {text[:100]!r}")
    return num_right >= BAR * len(texts) and not answered.wrong and answered.least.nats >= LEAST_MARGIN


if __name__ == "__main__":
    main()
