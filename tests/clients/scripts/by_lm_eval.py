"""EleutherAI's lm-eval: `local-completions` with the server's tokenizer, on tasks of four questions in a local file.

Log-likelihoods use `echo`, `logprobs` and prompts of token ids; answers end at a stop string.
"""

from __future__ import annotations

import json
from typing import Any

import checks
import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "The capital of Japan is", "choices": [" Tokyo", " Berlin", " bread"], "answer": 0},
    {"question": "Two plus two is", "choices": [" purple", " four"], "answer": 1},
    {"question": "The sun rises in the", "choices": [" spoon", " east"], "answer": 1},
    {"question": "Water is made of hydrogen and", "choices": [" oxygen", " jazz"], "answer": 0},
]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(checks.FOLDER / "rows.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOICE = COMMON | {
    "task": "quire_choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "target_delimiter": "",
}
GENERATE = COMMON | {
    "task": "quire_generate",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}

(checks.FOLDER / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
for one in (CHOICE, GENERATE):
    (checks.FOLDER / f"{one['task']}.yaml").write_text(json.dumps(one))  # JSON is valid YAML


def evaluate(task: str) -> dict[str, Any]:
    """Run a task and return its results and samples."""
    settings = {
        "model": checks.MODEL,
        "base_url": f"{checks.URL}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 2048,
    }
    manager = TaskManager(include_path=str(checks.FOLDER), include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-completions", model_args=settings, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    checks.expect(len(found["samples"][task]) == len(ROWS), found["results"])
    return found


def loglikelihood() -> object:
    accuracy = evaluate("quire_choice")["results"]["quire_choice"]["acc,none"]
    checks.expect(accuracy == 1.0, accuracy)
    return f"accuracy {accuracy} on {len(ROWS)} easy questions, by token ids, echo and logprobs"


def generate() -> object:
    samples = evaluate("quire_generate")["samples"]["quire_generate"]
    texts = [sample["resps"][0][0] for sample in samples]
    checks.expect(checks.ANSWER in texts[0], texts)
    checks.expect(not any("." in text or "\n" in text for text in texts), texts)
    return f"{len(texts)} answers, the first{texts[0]}"
