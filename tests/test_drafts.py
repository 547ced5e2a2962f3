"""Drafts with the default model on the native backend: the same bits with and without them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.events import Preempted
from quire.core.policy import StepCost
from quire.engine.generation import GenerationOutput, GenerationParams
from quire.engine.llm import LLM
from quire.text.grammar import Grammar, GrammarKind

DOCUMENT = (
    "Order 4711 of 3 March 2026. Customer: Ada Lovelace, 12 Analytical Road, London. Items: two brass gears at 14.50"
    " pounds, one punched card reader at 99 pounds. The order was paid by bank transfer and shipped on 5 March."
)
PROMPT = f"Repeat this text word for word:\n\n{DOCUMENT}"
FIELDS = ["order_number", "customer_name", "customer_address", "payment_method"]
SCHEMA = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer"},
        "customer_name": {"type": "string", "maxLength": 40},
        "customer_address": {"type": "string", "maxLength": 60},
        "payment_method": {"enum": ["bank transfer", "credit card", "cash"]},
    },
    "required": FIELDS,
    "additionalProperties": False,
}
GREEDY = GenerationParams(temperature=0, max_tokens=80)
SEEDED = GenerationParams(temperature=0.8, seed=5, max_tokens=80)
JSON = replace(GREEDY, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
PlainAnswer = Callable[[GenerationParams], GenerationOutput]


@pytest.fixture(scope="module")
def llms(default_model: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model without and with drafts."""
    plain, drafting = (LLM(default_model, num_blocks=100, threads=1, enable_drafts=has) for has in (False, True))
    # As if rows cost almost nothing, so that as many drafts as possible are verified.
    drafting.engine.scheduler.policy.ledger.cost = StepCost(base_ns=1_000_000, token_ns=1_000)
    with plain, drafting:
        yield plain, drafting


def answer(llm: LLM, params: GenerationParams) -> GenerationOutput:
    llm.engine.clear_cache()
    (output,) = llm.chat(PROMPT, params)
    return output


@pytest.fixture(scope="module")
def plain_answer(llms: tuple[LLM, LLM]) -> PlainAnswer:
    """The answer without drafts, which several tests compare with."""
    found: dict[str, GenerationOutput] = {}

    def plain(params: GenerationParams) -> GenerationOutput:
        if repr(params) not in found:
            found[repr(params)] = answer(llms[0], params)
        return found[repr(params)]

    return plain


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SEEDED,
        replace(GREEDY, logprobs=2),
        replace(SEEDED, n=2),
        replace(SEEDED, n=2, logprobs=1, logit_bias={198: -2.0}),
        replace(GREEDY, stop=("Analytical Ro",)),
        replace(SEEDED, stop=("London", "er")),
        replace(GREEDY, max_tokens=29),
        replace(GREEDY, max_tokens=30),
        replace(GREEDY, max_tokens=31),
    ],
)
@pytest.mark.parametrize("is_predicted", [False, True])
@pytest.mark.kept("params0", "params4")
def test_the_same_answer(
    llms: tuple[LLM, LLM], plain_answer: PlainAnswer, params: GenerationParams, is_predicted: bool
) -> None:
    """Stop strings and the last token are in the middle of drafts, because the answer repeats the document.

    Without a prediction, the guesses come from the prompt.
    """
    plain = plain_answer(params)
    scheduler = llms[1].engine.scheduler
    before = scheduler.num_accepted
    drafting = answer(llms[1], replace(params, prediction=DOCUMENT) if is_predicted else params)
    assert drafting.completions == plain.completions
    assert drafting.usage.completion_tokens == plain.usage.completion_tokens
    assert scheduler.num_accepted > before or params.temperature


def test_preempted_with_drafts(default_model: Path, plain_answer: PlainAnswer) -> None:
    expected = plain_answer(GREEDY).completions
    events: list[Preempted] = []
    with LLM(default_model, num_blocks=16, threads=1, enable_prefix_caching=False) as small:
        scheduler = small.engine.scheduler
        scheduler.policy.ledger.cost = StepCost(base_ns=1_000_000, token_ns=1_000)
        admission = scheduler.planner.admission
        admission._observe = lambda event: events.append(event) if isinstance(event, Preempted) else None
        outputs = small.chat([PROMPT] * 4, replace(GREEDY, prediction=DOCUMENT))
        assert scheduler.num_accepted > 20
    assert events
    for output in outputs:
        assert output.completions == expected


def test_a_prediction(llms: tuple[LLM, LLM], plain_answer: PlainAnswer) -> None:
    plain = plain_answer(SEEDED)
    predicted = answer(llms[1], replace(SEEDED, prediction=plain.text))
    assert predicted.completions == plain.completions
    assert predicted.usage.accepted_prediction_tokens > plain.usage.completion_tokens // 2
    wrong = answer(llms[1], replace(SEEDED, prediction="Something else entirely. " * 10))
    assert wrong.completions == plain.completions
    assert wrong.usage.accepted_prediction_tokens <= 2
    assert wrong.usage.rejected_prediction_tokens > 0
    unused = answer(llms[0], replace(SEEDED, prediction=plain.text))
    assert unused.usage.accepted_prediction_tokens == unused.usage.rejected_prediction_tokens == 0


@pytest.mark.parametrize("params", [JSON, replace(JSON, temperature=0.7, seed=3)])
@pytest.mark.kept("params0")
def test_tokens_that_a_grammar_forces(llms: tuple[LLM, LLM], params: GenerationParams) -> None:
    scheduler = llms[1].engine.scheduler
    before = scheduler.num_accepted
    plain, drafting = (answer(llm, params) for llm in llms)
    assert drafting.completions == plain.completions
    assert set(json.loads(plain.text)) == set(FIELDS)
    assert scheduler.num_accepted - before > 10
