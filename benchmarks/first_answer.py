"""How often the default model's first answer is right, with its default sampling.

    python benchmarks/first_answer.py                          the default model, 100 answers
    python benchmarks/first_answer.py --temperature 0.2 --top-p 0.9   the sampling its makers recommend

Asks the question of the README with 100 seeds and prints the share of answers that name Paris. The bar
(docs/models.md): 95 %. Exits with 1 below it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from quire import LLM, GenerationParams

QUESTION, RIGHT = "What is the capital of France?", "Paris"
BAR = 0.95
MAX_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="the default model unless given")
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--top-p", type=float, default=None)
    given = parser.parse_args()
    params = [
        GenerationParams(seed=seed, max_tokens=MAX_TOKENS, temperature=given.temperature, top_p=given.top_p)
        for seed in range(given.answers)
    ]
    with LLM(given.model) as llm:
        texts = [answer.completions[0].text for answer in llm.chat([QUESTION] * len(params), params)]
    num_right = sum(RIGHT in text for text in texts)
    print(f"{num_right} of {len(texts)} answers name {RIGHT} ({num_right / len(texts):.0%}; the bar is {BAR:.0%})")
    for text, count in Counter(text for text in texts if RIGHT not in text).most_common(3):
        print(f"  {count} x {text[:100]!r}")
    sys.exit(0 if num_right >= BAR * len(texts) else 1)


if __name__ == "__main__":
    main()
