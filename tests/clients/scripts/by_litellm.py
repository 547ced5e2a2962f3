"""The checks with LiteLLM."""

from __future__ import annotations

from typing import Any

import checks
import litellm

litellm.suppress_debug_info = True


def ask(content: str, model: str = checks.MODEL, **more: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}",
        messages=[{"role": "user", "content": content}],
        api_base=f"{checks.URL}/v1",
        api_key="none",
        temperature=0,
        num_retries=0,
        **{"max_tokens": 64, **more},
    )


def models() -> object:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=f"{checks.URL}/v1", api_key="none"
    )
    return checks.expect_model(found)


def chat() -> object:
    return checks.expect_answer(str(ask(checks.QUESTION).choices[0].message.content))


def stream() -> object:
    return checks.expect_stream([chunk.choices[0].delta.content or "" for chunk in ask(checks.QUESTION, stream=True)])


def tool() -> object:
    answer = ask(checks.WEATHER, tools=[checks.TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    return checks.expect_call(call.function.name, call.function.arguments)


def schema() -> object:
    shape = {"name": "capital", "schema": checks.CAPITAL_SCHEMA, "strict": True}
    answer = ask(checks.QUESTION, response_format={"type": "json_schema", "json_schema": shape})
    return checks.expect_capital(answer.choices[0].message.content)


def error() -> object:
    return checks.expect_refusal(litellm.NotFoundError, lambda: ask(checks.QUESTION, checks.NO_MODEL))


def usage() -> object:
    return checks.expect_cached(lambda: ask(checks.LONG, max_tokens=4).usage.prompt_tokens_details.cached_tokens)
