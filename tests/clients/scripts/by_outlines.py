"""Outlines: an OpenAI model with pydantic types, and a vLLM model with a choice and a regex."""

from __future__ import annotations

from typing import Any, Literal

import checks
import openai
import outlines
from outlines.types import Regex
from pydantic import BaseModel, Field

CLIENT = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


class Capital(BaseModel):
    capital: str = Field(max_length=24)
    population: int = Field(ge=0, le=99999999)


def model(name: str = checks.MODEL) -> Any:
    return outlines.from_openai(CLIENT, name)


def chat() -> object:
    text = model()(checks.QUESTION, **SETTINGS)
    checks.expect(checks.ANSWER in text, text)
    return text


def stream() -> object:
    pieces = list(model().stream(checks.QUESTION, **SETTINGS))
    checks.expect(len(pieces) > 3 and checks.ANSWER in "".join(pieces), pieces)
    return f"{len(pieces)} chunks"


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
    try:
        model(checks.NO_MODEL)(checks.QUESTION, **SETTINGS)
    except Exception as problem:  # may wrap the client's exception
        return checks.expect_no_model(str(problem))
    raise AssertionError("no error")


if __name__ == "__main__":
    checks.run("outlines", {check.__name__: check for check in (chat, stream, schema, error)})
