"""The examples that a newcomer tries first: right answers, with a margin, on every kernel variant of this machine."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.engine.generation import GenerationParams
from quire.engine.llm import LLM

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The field that bounds the answer, by endpoint. Other endpoints generate nothing.
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/api/chat": "num_predict",
    "/api/generate": "num_predict",
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/first_answer.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("first_answer")


def check(benchmark: Any, llm: LLM) -> None:
    answered = benchmark.answer_examples(llm, benchmark.distinct(benchmark.examples()))
    assert answered.wrong == {}
    assert len(answered.margins) >= 5
    assert answered.least.nats >= benchmark.LEAST_MARGIN, str(answered.least)


@pytest.mark.parametrize("precision", ["exact", "balanced"])  # `portable` is slow in exact
@pytest.mark.kept("avx2", "avx512", "neon", "dot")
def test_first_examples_are_right_by_a_margin(
    benchmark: Any, default_model: Path, kernels: str, precision: str
) -> None:
    """On every variant of this machine and on `portable`."""
    with benchmark.opened(kernels, precision, str(default_model)) as llm:
        check(benchmark, llm)
        if kernels != "portable":  # which is slow
            params = [GenerationParams(max_tokens=40, seed=seed) for seed in range(4)]
            for one in benchmark.examples():
                if one.source == "the page":  # which uses the model's default sampling
                    assert benchmark.sample(llm, one.prompt, params) == [benchmark.RIGHT[one.prompt]] * len(params)


@pytest.mark.nightly
def test_first_examples_are_right_by_a_margin_in_fp32(benchmark: Any, default_model: Path) -> None:
    with benchmark.opened(benchmark.FP32, "", str(default_model)) as llm:
        check(benchmark, llm)


def test_the_readme_shows_the_first_answer(benchmark: Any) -> None:
    first = benchmark.examples()[0]
    assert first.source == "quire serve --hello"
    shown = re.findall(r"^      > (.*)\n      (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown == [(first.prompt, benchmark.RIGHT[first.prompt])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_curl_bounds_its_answer(page: Path) -> None:
    found = re.findall(
        r"^curl [^\n]*?https?://[^/\s']+(/[^\s'?]*)[^\n]*? -d '(\{.*?\})'$", page.read_text(), re.M | re.S
    )
    assert found or page.name != "README.md"
    for path, text in found:
        body = json.loads(text)
        if path in LIMITS and not body.get("structured_outputs"):  # whose answers end by themselves
            assert {**body, **body.get("options", {})}.get(LIMITS[path], 1000) <= 100, text
