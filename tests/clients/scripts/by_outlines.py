"""Outlines: an OpenAI model with pydantic types, and a vLLM model with a choice and a regex."""

from __future__ import annotations

from typing import Any, Literal

import checks
import openai
import outlines
from outlines.types import Regex
from shapes import Capital

CLIENT = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


def model(name: str = checks.MODEL) -> Any:
    return outlines.from_openai(CLIENT, name)


def chat() -> object:
    return checks.expect_answer(model()(checks.QUESTION, **SETTINGS))


def stream() -> object:
    return checks.expect_stream(list(model().stream(checks.QUESTION, **SETTINGS)))


def schema() -> object:
    """OpenAI's response_format, and vLLM's fields for a choice and a regex."""
    told = checks.expect_capital(model()(checks.QUESTION, Capital, **SETTINGS))
    as_vllm = outlines.from_vllm(CLIENT, checks.MODEL)
    choice = as_vllm(checks.QUESTION, Literal["Tokyo", "Berlin"], **SETTINGS)
    checks.expect(choice in ("Tokyo", "Berlin"), choice)
    year = as_vllm("In which year was the Eiffel Tower built?", Regex(r"1[0-9]{3}"), **SETTINGS)
    checks.expect(len(year) == 4 and year.isdigit(), year)
    return f"{told}; {choice}; {year}"


def error() -> object:
    return checks.expect_refusal(Exception, lambda: model(checks.NO_MODEL)(checks.QUESTION, **SETTINGS))
