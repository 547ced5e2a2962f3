"""Instructor: pydantic models as answers, with tools, schemas and partial streams, over both protocols."""

from __future__ import annotations

from typing import Any

import anthropic
import checks
import instructor
import openai
from shapes import Capital, Weather

OPENAI = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=checks.URL, api_key="none", max_retries=0)
BY_SCHEMA = instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA)
BY_TOOLS = instructor.from_openai(OPENAI, mode=instructor.Mode.TOOLS)


def given(content: str, model: str = checks.MODEL) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 128, "max_retries": 0}


def tool() -> object:
    found = BY_TOOLS.chat.completions.create(response_model=Weather, **given(checks.WEATHER))
    options = given(checks.WEATHER)
    del options["temperature"]  # no longer supported by the client
    client = instructor.from_anthropic(ANTHROPIC, mode=instructor.Mode.TOOLS)
    other = client.messages.create(response_model=Weather, **options)
    return f"{checks.expect_city(found.model_dump())}; by /v1/messages {checks.expect_city(other.model_dump())}"


def schema() -> object:
    found = BY_SCHEMA.chat.completions.create(response_model=Capital, **given(checks.QUESTION))
    return checks.expect_capital(found.model_dump())


def stream() -> object:
    pieces = list(BY_SCHEMA.chat.completions.create_partial(response_model=Capital, **given(checks.QUESTION)))
    checks.expect(len(pieces) > 3, pieces)
    return f"{len(pieces)} partial objects, the last {checks.expect_capital(pieces[-1].model_dump())}"


def error() -> object:
    return checks.expect_refusal(
        Exception,
        lambda: BY_SCHEMA.chat.completions.create(response_model=Capital, **given(checks.QUESTION, checks.NO_MODEL)),
    )


def usage() -> object:
    ask = BY_SCHEMA.chat.completions.create_with_completion
    return checks.expect_cached(
        lambda: ask(response_model=Capital, **given(checks.LONG))[1].usage.prompt_tokens_details.cached_tokens
    )
