"""The checks with LangChain's client of OpenAI's protocol."""

from __future__ import annotations

from typing import Any

import checks
import openai
from langchain_openai import ChatOpenAI


def model(name: str = checks.MODEL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=f"{checks.URL}/v1", api_key="none", temperature=0, max_tokens=64, max_retries=0, **more
    )


def models() -> object:
    return checks.expect_model([one.id for one in model().root_client.models.list()])


def chat() -> object:
    return checks.expect_answer(str(model().invoke(checks.QUESTION).content))


def stream() -> object:
    pieces = [str(chunk.content) for chunk in model().stream(checks.QUESTION)]
    checks.expect(len(pieces) > 3 and checks.ANSWER in "".join(pieces), pieces)
    newer = model(use_responses_api=True, output_version="responses/v1").invoke(checks.QUESTION)
    checks.expect(newer.text == "".join(pieces), newer)
    return f"{len(pieces)} chunks; the same by /v1/responses"


def tool() -> object:
    bound = model().bind_tools([checks.TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke(checks.WEATHER).tool_calls
    return checks.expect_call(call["name"], call["args"])


def schema() -> object:
    shaped = model().with_structured_output(
        {"title": "capital", **checks.CAPITAL_SCHEMA}, method="json_schema", strict=True
    )
    return checks.expect_capital(shaped.invoke(checks.QUESTION))


def error() -> object:
    return checks.expect_refusal(openai.NotFoundError, lambda: model(checks.NO_MODEL).invoke(checks.QUESTION))


def usage() -> object:
    return checks.expect_cached(lambda: model().invoke(checks.LONG).usage_metadata["input_token_details"]["cache_read"])
