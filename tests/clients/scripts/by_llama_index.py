"""LlamaIndex's `OpenAILike`: chat, streams, tools and structured answers."""

from __future__ import annotations

from typing import Any

import checks
import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shapes import Capital


def model(name: str = checks.MODEL, **more: Any) -> Any:
    return OpenAILike(
        model=name,
        api_base=f"{checks.URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=64,
        max_retries=0,
        **more,
    )


def asked(content: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content)]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat() -> object:
    return checks.expect_answer(model().chat(asked(checks.QUESTION)).message.content)


def stream() -> object:
    return checks.expect_stream([piece.delta or "" for piece in model().stream_chat(asked(checks.QUESTION))])


def tool() -> object:
    one = model()
    answer = one.chat_with_tools(
        [FunctionTool.from_defaults(fn=get_weather)],
        user_msg=checks.WEATHER,
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = one.get_tool_calls_from_response(answer)
    return checks.expect_call(call.tool_name, call.tool_kwargs)


def schema() -> object:
    found = model(should_use_structured_outputs=True).structured_predict(Capital, PromptTemplate(checks.QUESTION))
    return checks.expect_capital(found.model_dump())


def error() -> object:
    return checks.expect_refusal(openai.NotFoundError, lambda: model(checks.NO_MODEL).chat(asked(checks.QUESTION)))


def usage() -> object:
    return checks.expect_cached(lambda: model().chat(asked(checks.LONG)).raw.usage.prompt_tokens_details.cached_tokens)
