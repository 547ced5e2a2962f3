"""guidance's remote models: `OpenAI` with response_format, and `VLLMModel` with llguidance grammars."""

from __future__ import annotations

from typing import Any

import checks
import guidance
from guidance import assistant, gen, select, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel


def model(kind: Any = OpenAI, name: str = checks.MODEL) -> Any:
    return kind(name, base_url=f"{checks.URL}/v1", api_key="none", echo=False)


def asked(one: Any, content: str, answer: Any) -> Any:
    with user():
        one += content
    with assistant():
        one += answer
    return one


def chat() -> object:
    """It always streams, and omits a temperature of 0."""
    return checks.expect_answer(asked(model(), checks.QUESTION, gen("text", temperature=0.01, max_tokens=64))["text"])


def schema() -> object:
    shape = guidance.json("found", schema=checks.CAPITAL_SCHEMA, temperature=0)
    return checks.expect_capital(asked(model(), checks.QUESTION, shape)["found"])


def grammar() -> object:
    """A grammar with captures, as sent to vLLM."""
    answer = "The capital is " + select(["Paris", "Berlin"], name="city") + gen("rest", regex=r", in [A-Z][a-z]{3,9}\.")
    found = asked(model(VLLMModel), checks.QUESTION, answer)
    checks.expect(found["city"] in ("Paris", "Berlin") and found["rest"].startswith(", in "), str(found))
    return f"{found['city']}{found['rest']}"


def error() -> object:
    return checks.expect_refusal(
        Exception, lambda: asked(model(name=checks.NO_MODEL), checks.QUESTION, gen("text", max_tokens=4))
    )
