"""Codec of OpenAI's chat and completions without a socket, checked with the SDK's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from openai.types import Completion as SdkCompletion
from openai.types.chat import ChatCompletion as SdkChatCompletion
from openai.types.chat import ChatCompletionChunk as SdkChunk
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from quire.core.cache import CacheExplanation, StopReason
from quire.core.values import FinishReason, PackedPrompt, Priority
from quire.engine.generation import Completion, Delta, GenerationOutput, GenerationParams, TokenLogprob, Usage
from quire.errors import ContextTooLong, InvalidRequest
from quire.server.errors import ApiError, Kind, from_quire
from quire.server.models import ActiveRequest, Breakpoint, InferenceRequest
from quire.server.protocols import openai as types
from quire.server.protocols.openai import (
    OPENAI,
    ChatEncoder,
    ChunkEncoder,
    CompletionEncoder,
    echo_of,
    parse_chat,
    parse_completion,
    token_offsets,
)
from quire.server.protocols.support import protocol_field_names, view
from quire.server.request_context import RequestContext
from quire.text.grammar import (
    Grammar,
    choice_grammar,
    gbnf_to_lark,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    token_grammar,
)
from quire.text.messages import (
    AnswerParser,
    ChatRequest,
    Message,
    Part,
    PlainAnswer,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser
from quire.text.tokenizer import Excerpt, Tokenizer
from quire.text.tool_formats import PROMPTED, CallParser
from tests.text.vocabularies import byte_level_json, sentencepiece_gguf

USER = [{"role": "user", "content": "Hi"}]
GBNF = 'root ::= "yes" | "no"'
CHAT_FIELDS = frozenset(types.ChatCompletionRequest.__struct_fields__)
COMPLETION_FIELDS = frozenset(types.CompletionRequest.__struct_fields__)


def chat(**fields: Any) -> InferenceRequest:
    body = json.dumps({"messages": USER, **fields})
    return parse_chat(msgspec.json.decode(body, type=types.ChatCompletionRequest))


def completion(**fields: Any) -> InferenceRequest:
    body = json.dumps({"prompt": "Hi", **fields})
    return parse_completion(msgspec.json.decode(body, type=types.CompletionRequest))


def refusal(error: pytest.ExceptionInfo[Exception]) -> tuple[str, str | None]:
    """Return the message and the field of a parsing error as a client receives them."""
    value, fields = error.value, CHAT_FIELDS | COMPLETION_FIELDS
    api_error = value if isinstance(value, ApiError) else from_quire(cast("InvalidRequest", value), fields)
    assert api_error.kind in (Kind.INVALID, Kind.TOO_LONG)
    return api_error.message, api_error.param


# Bodies


def test_every_field_of_the_sdk_is_known() -> None:
    sdk = set(chat_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert sdk - CHAT_FIELDS == set()
    assert (set(CompletionCreateParamsBase.__annotations__) | {"stream"}) - COMPLETION_FIELDS == set()


def test_defaults() -> None:
    assert chat().params == GenerationParams()
    assert completion().params == GenerationParams(max_tokens=16)  # OpenAI's own default there


PARAMS: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0, "temperature", 0.0),
    ("temperature", 1.5, "temperature", 1.5),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", 40, "top_k", 40),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.05, "min_p", 0.05),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("frequency_penalty", -2, "frequency_penalty", -2.0),
    ("presence_penalty", 2, "presence_penalty", 2.0),
    ("logit_bias", {"50256": -100, "7": 3}, "logit_bias", {50256: -100.0, 7: 3.0}),
    ("seed", 7, "seed", 7),
    ("n", 3, "n", 3),
    ("max_tokens", 64, "max_tokens", 64),
    ("max_tokens", -1, "max_tokens", None),
    ("n_predict", 64, "max_tokens", 64),
    ("n_predict", -1, "max_tokens", None),
    ("repeat_penalty", 1.1, "repetition_penalty", 1.1),
    ("no_stop_trim", True, "include_stop", True),
    ("seed", -1, "seed", None),
    ("min_tokens", 2, "min_tokens", 2),
    ("stop", "END", "stops", ("END",)),
    ("stop", ["a", "b"], "stops", ("a", "b")),
    ("stop", [], "stops", ()),
    ("stop_token_ids", [1, 2], "stop_token_ids", [1, 2]),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("ignore_eos", True, "ignore_eos", True),
    ("skip_special_tokens", False, "skip_special", False),
]


@pytest.mark.parametrize(("field", "value", "ours", "expected"), PARAMS)
def test_sampling_fields(field: str, value: Any, ours: str, expected: Any) -> None:
    assert getattr(chat(**{field: value}).params, ours) == expected
    assert getattr(completion(**{field: value}).params, ours) == expected


def test_repeat_last_n_of_0_switches_penalties_off() -> None:
    given = {"repeat_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 1}
    off = chat(**given, repeat_last_n=0)
    assert (off.params, off.ignored) == (GenerationParams(repetition_penalty=1.0), ())
    assert chat(**given, repeat_last_n=-1) == chat(**given)  # the whole context, as always
    on = chat(**given, repeat_last_n=64)
    assert (on.params, on.ignored) == (chat(**given).params, ("repeat_last_n",))


def test_logprobs() -> None:
    for params, expected in (
        (chat(logprobs=True).params, (0, None)),
        (chat(logprobs=True, top_logprobs=5).params, (5, None)),
        (chat(logprobs=False, top_logprobs=0).params, (None, None)),
        (completion(logprobs=3).params, (3, None)),
        (completion(logprobs=3, echo=True).params, (3, 3)),
    ):
        assert (params.logprobs, params.prompt_logprobs) == expected


ASKS: list[tuple[dict[str, Any], str, Any]] = [
    ({"model": "m"}, "model", "m"),
    ({"stream": True}, "is_streaming", True),
    ({"cache": True}, "wants_cache", True),
    ({"cache_salt": "team-1"}, "cache_salt", "team-1"),
    ({"prompt_cache_key": "doc"}, "cache_key", "doc"),
    ({"prompt_cache_key": "doc", "prompt_cache_options": {"mode": "explicit"}}, "cache_key", None),
    ({}, "cache_ttl_s", 300.0),
    ({"prompt_cache_retention": "in_memory"}, "cache_ttl_s", 300.0),
    ({"prompt_cache_retention": "24h"}, "cache_ttl_s", 86_400.0),
    ({"prompt_cache_options": {"ttl": "30m"}}, "cache_ttl_s", 1800.0),
    ({"service_tier": "auto"}, "priority", None),
    ({"service_tier": "default"}, "priority", None),
    ({"service_tier": "flex"}, "priority", Priority.LOW),
    ({"service_tier": "priority"}, "priority", Priority.HIGH),
    ({"service_tier": "flex", "priority": "high"}, "priority", Priority.HIGH),
    ({"priority": "low"}, "priority", Priority.LOW),
    ({"priority": -3}, "priority", Priority.HIGH),
    ({"priority": 0}, "priority", Priority.NORMAL),
]


@pytest.mark.parametrize(("fields", "ours", "expected"), ASKS)
def test_request_fields(fields: dict[str, Any], ours: str, expected: Any) -> None:
    assert getattr(chat(**fields), ours) == expected
    assert getattr(completion(**fields), ours) == expected


def test_a_conversation() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi", "name": "Ada"},
        # As the SDK serialises an earlier answer.
        {"role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "audio": None, "tool_calls": []},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        {"role": "user", "content": ""},
    ]
    (found,) = chat(messages=messages).prompts
    assert isinstance(found, ChatRequest)
    assert list(found.messages) == [
        Message(Role.SYSTEM, (Part("Be brief."),)),
        Message(Role.SYSTEM, (Part("And "), Part("kind."))),
        Message(Role.USER, (Part("Hi"),), "Ada"),
        Message(Role.ASSISTANT, (Part("Hello"),)),
        Message(Role.ASSISTANT, ()),
        Message(Role.ASSISTANT, (Part("No."),)),
        Message(Role.ASSISTANT, (Part("Never."),)),
        Message(Role.USER, (Part(""),)),
    ]
    assert (found.add_generation_prompt, found.continue_last) == (True, False)


def test_options_of_templates_and_streams() -> None:
    answered = [*USER, {"role": "assistant", "content": "Well"}]
    (found,) = chat(messages=answered, continue_final_message=True, chat_template_kwargs={"thinking": False}).prompts
    assert isinstance(found, ChatRequest)
    assert (found.add_generation_prompt, found.continue_last) == (False, True)
    assert found.template_args == {"thinking": False}
    (found,) = chat(add_generation_prompt=False).prompts
    assert isinstance(found, ChatRequest)
    assert not found.add_generation_prompt
    guess = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert chat(prediction=guess).params.prediction == "ab"
    options = {"include_usage": True, "include_obfuscation": False}
    assert chat(stream=True, stream_options=options) == chat(stream=True)


def test_the_last_four_breakpoints_count() -> None:
    def marked(**mark: str) -> dict[str, Any]:
        return {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit", **mark}}

    plain = {"type": "text", "text": "y"}
    messages = [{"role": "user", "content": [plain, marked()]}, {"role": "user", "content": [marked(ttl="12h")]}]
    assert chat(messages=messages).breakpoints == (Breakpoint(0, 1, 300.0), Breakpoint(1, 0, 43_200.0))
    many = chat(messages=[{"role": "user", "content": [marked()]}] * 9, prompt_cache_options={"ttl": "30m"})
    assert many.breakpoints == tuple(Breakpoint(i, 0, 1800.0) for i in (5, 6, 7, 8))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ("Hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[1], "b", [2, 3]], ((1,), "b", (2, 3))),
    ],
)
def test_prompts(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == expected


# Refusals


def test_a_refused_field_has_a_code() -> None:
    with pytest.raises(ApiError) as refused:
        chat(functions=[{"name": "f"}])
    body = json.loads(OPENAI.body(refused.value, "r"))["error"]
    assert (body["type"], body["param"], body["code"]) == (
        "invalid_request_error",
        "functions",
        "unsupported_parameter",
    )


@pytest.mark.parametrize("field", types.ACCEPTED_OF_OTHERS)
def test_fields_of_other_servers_without_effect_are_named_in_the_header(field: str) -> None:
    for ask in (chat, completion):
        assert ask(**{field: 7}) == replace(ask(), ignored=(field,))
        assert ask(**{field: None}).ignored == ()


LIMITS: list[tuple[Callable[..., InferenceRequest], dict[str, Any], int | None, bool]] = [
    (chat, {}, None, False),  # the server's default
    (chat, {"max_tokens": 9, "max_completion_tokens": 9, "n_predict": 9}, 9, False),
    (chat, {"max_tokens": -1}, None, True),
    (chat, {"max_completion_tokens": -1}, None, True),
    (chat, {"n_predict": -1}, None, True),
    (completion, {}, 16, False),  # OpenAI's default
    (completion, {"max_tokens": -1}, None, True),
    (completion, {"min_tokens": 40}, 40, False),  # the default is raised
    (completion, {"max_tokens": 0, "echo": True, "logprobs": 1}, 0, False),
    (completion, {"n_predict": 0}, 0, False),
]


@pytest.mark.parametrize(("ask", "fields", "max_tokens", "is_unbounded"), LIMITS)
def test_limits(
    ask: Callable[..., InferenceRequest], fields: dict[str, Any], max_tokens: int | None, is_unbounded: bool
) -> None:
    found = ask(**fields)
    assert (found.params.max_tokens, found.is_unbounded) == (max_tokens, is_unbounded)
    assert found.params.is_empty == (max_tokens == 0)


def test_whether_to_think() -> None:
    for fields, expected in (
        ({"enable_thinking": False}, (False, None)),
        ({"enable_thinking": True}, (True, None)),
        ({"enable_thinking": True, "reasoning_effort": "none"}, (False, "none")),
        ({"reasoning_effort": "low"}, (None, "low")),
        ({}, (None, None)),
    ):
        (found,) = chat(**fields).prompts
        assert isinstance(found, ChatRequest)
        assert (found.wants_thought, found.reasoning_effort) == expected


BAD_CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": 5, "max_completion_tokens": 9}, "max_completion_tokens = 9 and max_tokens = 5 contradict", None),
    ({"max_tokens": 5, "n_predict": -1}, "max_tokens = 5 and n_predict = -1 contradict each other: send one", None),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty = 1.2 and repeat_penalty = 1.1", None),
    # In Python 1 == True: a value that enables mirostat must not equal one that disables it.
    ({"mirostat": False}, "mirostat is not supported", "mirostat"),
    ({"separate_reasoning": 1}, "separate_reasoning is not supported", "separate_reasoning"),
    ({"add_special_tokens": True}, "add_special_tokens is not supported", "add_special_tokens"),
    ({"temperature": -1}, "temperature = -1.0 is not", "temperature"),
    ({"temperature": 2.5}, "temperature = 2.5 is not from 0 to 2", "temperature"),
    ({"top_p": 0}, "top_p = 0.0 is not", "top_p"),
    ({"stream_options": {"include_usage": True}}, "stream_options is only for stream = true", "stream_options"),
    ({"top_k": -2}, "top_k = -2 is not", "top_k"),
    ({"n": 0}, "n = 0 is not", "n"),
    ({"n": 10**6}, "n = 1000000 is not", "n"),
    ({"max_tokens": 0}, "max_tokens = 0 is not", "max_tokens"),
    ({"n_predict": 0}, "n_predict = 0 is not", "n_predict"),
    ({"max_completion_tokens": 0}, "max_completion_tokens = 0 is not", "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens = 9 is more than max_tokens = 3", "min_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs = 21 is not", "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs = 2 needs logprobs = true", "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias['x'] is not a token id", "logit_bias['x']"),
    ({"logit_bias": {"-1": 1}}, "logit_bias['-1'] is not a token id", "logit_bias['-1']"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias['99999", None),
    ({"logit_bias": {"٣": 1}}, "logit_bias['٣'] is not a token id", "logit_bias['٣']"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5] = 101.0 is not", "logit_bias[5]"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 entries", "logit_bias"),
    ({"stop": ["x"] * 17}, "stop", "stop"),
    ({"stop": [""]}, "stop[0] has 0 characters", "stop[0]"),
    ({"tool_choice": "required"}, "tool_choice asks for a call, and tools has no function", "tool_choice"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] = -1 is not", "stop_token_ids[0]"),
    ({"seed": 2**64}, "seed = 18446744073709551616 is not", "seed"),
    ({"service_tier": "gold"}, "service_tier = 'gold' is not one of auto", "service_tier"),
    ({"priority": "urgent"}, "priority = 'urgent' is not", "priority"),
    ({"cache_salt": "a b"}, "cache_salt = 'a b' is not", "cache_salt"),
    ({"prompt_cache_key": ""}, "prompt_cache_key has 0", "prompt_cache_key"),
    ({"prompt_cache_retention": "1y"}, "prompt_cache_retention = '1y' is not", "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "1y"}}, "prompt_cache_options.ttl = '1y'", "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options.mode = 'x'", "prompt_cache_options.mode"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs['x'] is a list", "chat_template_kwargs['x']"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs['chat_template'] cannot be set", None),
    ({"continue_final_message": True}, "continue_final_message: messages[0].role = 'user'", "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message and add_generation_prompt",
        "continue_final_message",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "/v1/responses takes custom tools", "tools[0].type"),
    (
        {"tool_choice": {"type": "web_search"}},
        "this server runs no tools. Use function or allowed_tools",
        "tool_choice.type",
    ),
    ({"prediction": {"type": "x", "content": ""}}, "prediction.type = 'x' is not one of content", "prediction.type"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "'image_url' is not supported: images",
        "prediction.content[0].type",
    ),
    ({"messages": []}, "messages has 0 entries", "messages"),
    ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role = 'bot' is not one of", "messages[0].role"),
    ({"messages": [*USER, {"role": "user"}]}, "messages[1].content is null", "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is null or has no", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": ""}]}, "messages[0].name has 0", "messages[0].name"),
]


def content(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BAD_MESSAGES: list[tuple[list[dict[str, Any]], str, str]] = [
    (
        content({"type": "image_url", "image_url": {"url": "x"}}),
        "'image_url' is not supported: images",
        "content[1].type",
    ),
    (content({"type": "input_audio", "input_audio": {}}), "'input_audio' is not supported", "content[1].type"),
    (content({"type": "file", "file": {}}), "'file' is not supported", "content[1].type"),
    (content({"type": "video"}), "'video' is not one of text, refusal", "content[1].type"),
    (content({"type": "text"}), "content[1].text is missing", "content[1].text"),
    (content({"type": "refusal", "text": "x"}), "content[1].refusal is missing", "content[1].refusal"),
    ([{"role": "tool", "content": "x"}], "tool_call_id is missing", "tool_call_id"),
    ([{"role": "user", "content": "x", "tool_call_id": "c"}], "tool_call_id is only for a tool", "tool_call_id"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only for an assistant", "tool_calls"),
    ([{"role": "function", "content": "x", "name": "f"}], "'function' is not supported: it is the older", "role"),
    ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "function is missing", "tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}], "'custom' is not", "tool_calls[0].type"),
    (
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}]}],
        "arguments is not a JSON object",
        "tool_calls[0].function.arguments",
    ),
    (
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
            }
        ],
        "arguments has a lone surrogate U+D800",
        "tool_calls[0].function.arguments",
    ),
    ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "is not supported", "function_call"),
    ([{"role": "assistant", "content": "", "audio": {"id": "a"}}], "is not supported", "audio"),
]


BAD_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 5, "n_predict": 6}, "max_tokens = 5 and n_predict = 6 contradict", "max_tokens"),
    ({"add_special_tokens": False}, "add_special_tokens is not supported", "add_special_tokens"),
    ({"prompt": []}, "prompt has 0 entries", "prompt"),
    ({"prompt": ["x"] * 65}, "prompt has 65 entries", "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1] is a str, not a token id", "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1] is a token id among prompts", "prompt[1]"),
    ({"prompt": [3, -1]}, "prompt[1] = -1 is not a token id", "prompt[1]"),
    ({"prompt": [[3], [2**40]]}, "prompt[1][0] = 1099511627776 is not", "prompt[1][0]"),
    ({"prompt": ["x"] * 10, "n": 20}, "n = 20 for 10 prompts", "n"),
    ({"logprobs": 21}, "logprobs = 21 is not", "logprobs"),
    ({"max_tokens": -2}, "max_tokens = -2 is not", "max_tokens"),
    ({"n_predict": -2}, "n_predict = -2 is not", "n_predict"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens = 1 is more than max_tokens = 0", "min_tokens"),
    ({"best_of": 3}, "best_of is not supported: answers are not ranked", "best_of"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo with logprobs is not supported in a stream", "echo"),
]


BAD_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "'yaml' is not one of", "response_format.type"),
    ({"response_format": {"type": "regex"}}, "; structured_outputs.regex takes one", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "is missing", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "is missing",
        "response_format.json_schema.schema",
    ),
    ({"guided_json": "{"}, "neither a schema nor", "guided_json"),
    ({"guided_json": "[]"}, "neither a schema nor", "guided_json"),
    ({"guided_choice": []}, "guided_choice", "guided_choice"),
    ({"guided_regex": "x" * 10**5}, "guided_regex", "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"choice": ["b"]}}, "exclude each other", "guided_regex"),
    ({"regex": "a", "guided_regex": "b"}, "exclude each other", "regex"),
    ({"ebnf": "start: yes"}, "line 1: expected ::= ", "ebnf"),
    ({"grammar": "yes or no"}, "neither Lark, as in start: ", "grammar"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "allowed_token_ids"),
]
REFUSALS = [
    *((chat, fields, text, param) for fields, text, param in BAD_CHAT),
    *((chat, {"messages": messages}, text, f"messages[0].{param}") for messages, text, param in BAD_MESSAGES),
    *((completion, fields, text, param) for fields, text, param in BAD_COMPLETION),
    *((ask, fields, text, param) for fields, text, param in BAD_FORMATS for ask in (chat, completion)),
]


@pytest.mark.parametrize(
    ("ask", "fields", "message", "param"), REFUSALS, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_refusals_name_the_field(
    ask: Callable[..., InferenceRequest], fields: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises((ApiError, InvalidRequest)) as error:
        ask(**fields)
    text, found = refusal(error)
    assert message in text
    assert len(text) < 400
    assert param is None or found == param


def test_fields_in_errors_are_renamed_and_the_type_is_kept() -> None:
    with (
        pytest.raises(ContextTooLong, match=r"^messages of 9 characters"),
        protocol_field_names({"prompt": "messages"}),
    ):
        raise ContextTooLong("prompt of 9 characters")
    with pytest.raises(InvalidRequest, match=r"^prompt_tokens = 9"), protocol_field_names({"prompt": "messages"}):
        raise InvalidRequest("prompt_tokens = 9")


# Answers


HEAD = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": "m",
    "system_fingerprint": "fp_x",
    "service_tier": "flex",
}
TEXT_HEAD = HEAD | {"id": "cmpl-1", "object": "text_completion"}
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8)
BILL = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
EXPLANATION = CacheExplanation(8, 0, 8, StopReason.DIVERGED)
CACHE = view(EXPLANATION, 10)


def work_of(
    request: InferenceRequest, *, new_parser: Callable[[], AnswerParser] = PlainAnswer, num_thought_tokens: int = 0
) -> ActiveRequest:
    """The parts of an `ActiveRequest` that an encoder uses."""
    found = SimpleNamespace(
        request=request,
        new_parser=new_parser,
        num_thought_tokens=num_thought_tokens,
        usage=USAGE,
        cache=EXPLANATION,
        cache_text=None,
        prompt=(1,) * 10,
        request_id="1",
        created=1_700_000_000,
        model="m",
        system_fingerprint="fp_x",
        priority=Priority.LOW,
    )
    return cast("ActiveRequest", found)


def chat_encoder(*, include_usage: bool = False, more: dict[str, Any] | None = None, **work: Any) -> ChatEncoder:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": include_usage}, **(more or {})}
    asked = msgspec.convert(body, types.ChatCompletionRequest)
    return ChatEncoder(work_of(parse_chat(asked), **work), asked)


def completion_encoder(echoes: Sequence[str] | None = None, **fields: Any) -> CompletionEncoder:
    asked = msgspec.convert({"prompt": "Hi", "echo": echoes is not None, **fields}, types.CompletionRequest)
    encoder = CompletionEncoder(work_of(parse_completion(asked)), asked)
    service = SimpleNamespace(text=SimpleNamespace(tokenizer=tokenizer()))
    context = SimpleNamespace(service=service, run=partial(RequestContext.run, cast(Any, None)))
    asyncio.run(encoder.prepare(cast(Any, context)))
    return encoder


def whole_of(encoder: ChunkEncoder, *outputs: GenerationOutput) -> Any:
    encoder.outputs = list(outputs)
    return json.loads(msgspec.json.encode(encoder.whole()))


def delta(
    text: str = "",
    finish: FinishReason | None = None,
    *,
    index: int = 0,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> Delta:
    return Delta(index, text, (1,), logprobs, finish, None, "it broke" if finish is FinishReason.ERROR else None)


def read(data: bytes) -> list[Any]:
    """Parse events like a client. Every one but [DONE] is JSON on one line."""
    assert data.endswith(b"\n\n")
    found: list[Any] = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ")
        assert "\n" not in event
        rest = event.removeprefix("data: ")
        found.append(rest if rest == "[DONE]" else json.loads(rest))
    return found


def judged(data: bytes) -> list[Any]:
    """Validate every chunk with OpenAI's types."""
    found = read(data)
    for chunk in found:
        if chunk != "[DONE]":
            SdkChunk.model_validate(chunk)
    return found


def choices(chunks: list[Any]) -> list[Any]:
    return [one for chunk in chunks if chunk != "[DONE]" for one in chunk["choices"]]


def choice_of(index: int, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def test_a_chat_stream() -> None:
    encoder = chat_encoder()
    assert encoder.feed([(0, delta())]) == b""  # an incomplete character: nothing to send yet
    first = judged(encoder.feed([(0, delta("Hé"))]))
    head = HEAD
    assert first == [
        {**head, "choices": [choice_of(0, {"role": "assistant", "content": ""})]},
        {**head, "choices": [choice_of(0, {"content": "Hé"})]},
    ]
    assert choices(judged(encoder.feed([(0, delta("llo")), (0, delta(' "you"\n'))]))) == [
        choice_of(0, {"content": "llo"}),
        choice_of(0, {"content": ' "you"\n'}),
    ]
    assert choices(judged(encoder.feed([(0, delta("!", FinishReason.STOP))]))) == [choice_of(0, {"content": "!"})]
    assert judged(encoder.finish()) == [{**head, "choices": [choice_of(0, {}, "stop")]}, "[DONE]"]


def test_a_stream_with_usage() -> None:
    encoder = chat_encoder(include_usage=True, more={"cache": True})
    data = encoder.feed([(0, delta("Hi", FinishReason.LENGTH))]) + encoder.finish()
    *chunks, final, done = judged(data)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert not any("cache" in chunk for chunk in chunks)
    assert choices(chunks)[-1] == choice_of(0, {}, "length")
    assert (final["choices"], final["usage"], done) == ([], BILL, "[DONE]")
    assert final["cache"] == msgspec.to_builtins(CACHE)


def test_without_usage_the_cache_is_in_the_chunk_that_ends_the_last_choice() -> None:
    encoder = chat_encoder(more={"n": 2, "cache": True})
    ends = [(0, delta("", FinishReason.STOP, index=1)), (0, delta("", FinishReason.LENGTH))]
    *earlier, last, done = judged(encoder.feed(ends) + encoder.finish())
    assert not any("cache" in chunk or "usage" in chunk for chunk in earlier)
    assert last["choices"] == [choice_of(0, {}, "length")]
    assert last["cache"]["reason"] == "diverged"
    assert "usage" not in last
    assert done == "[DONE]"


def test_choices_are_numbered_by_prompt_then_sample_and_each_begins_once() -> None:
    encoder = completion_encoder(["P", "Q"], prompt=["P", "Q"], n=2)
    batch = [(1, delta("d", index=1)), (0, delta("a")), (1, delta("D", index=1)), (0, delta("b", index=1))]
    found = [(one["index"], one["text"]) for one in choices(read(encoder.feed(batch)))]
    assert found == [(3, "Q"), (3, "d"), (0, "P"), (0, "a"), (3, "D"), (1, "P"), (1, "b")]
    ends = [(prompt, delta("", FinishReason.STOP, index=index)) for prompt in (0, 1) for index in (0, 1)]
    last = choices(read(encoder.feed(ends) + encoder.finish()))
    # A choice without text begins too.
    assert [(one["index"], one["text"]) for one in last] == [(0, ""), (1, ""), (2, "Q"), (2, ""), (3, "")]
    assert [one["finish_reason"] for one in last] == ["stop", "stop", None, "stop", "stop"]


def test_a_stream_cut_short_still_ends() -> None:
    encoder = chat_encoder(include_usage=True, more={"n": 2})
    encoder.feed([(0, delta("x", FinishReason.STOP))])
    final, done = judged(encoder.finish())
    assert (final["choices"], final["usage"], done) == ([], BILL, "[DONE]")


def test_a_failed_sample_is_an_error() -> None:
    encoder = chat_encoder()
    with pytest.raises(ApiError, match="it broke") as error:
        encoder.feed([(0, delta("", FinishReason.ERROR))])
    assert error.value.kind is Kind.FAILED


SMILE = "🙂".encode()


def logprob(text: str | bytes, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    data = text.encode() if isinstance(text, str) else text
    return TokenLogprob(5, data.decode("utf-8", "replace"), data, value, 0, top)


HI = logprob("Hi", -0.5, (logprob("Hi", -0.5), logprob("Ho", -1.5)))
HALF = logprob(SMILE[:2], -1.0, (logprob(SMILE[:2], -1.0), logprob(SMILE[:3], float("-inf"))))


def test_chat_logprobs_in_a_stream() -> None:
    encoder = chat_encoder(more={"logprobs": True, "top_logprobs": 2})
    # Every token is reported once, even if its text is held back.
    found = choices(judged(encoder.feed([(0, delta("", logprobs=(HI, HALF)))])))
    assert [one["delta"] for one in found] == [{"role": "assistant", "content": ""}, {"content": ""}]
    assert found[1]["logprobs"] == {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.5,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                    {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]},
                ],
            },
            {
                "token": "bytes:\\xf0\\x9f",
                "logprob": -1.0,
                "bytes": [240, 159],
                "top_logprobs": [
                    {"token": "bytes:\\xf0\\x9f", "logprob": -1.0, "bytes": [240, 159]},
                    {"token": "bytes:\\xf0\\x9f\\x99", "logprob": -9999.0, "bytes": [240, 159, 153]},
                ],
            },
        ],
        "refusal": None,
    }


def output(
    *texts: str,
    logprobs: tuple[TokenLogprob, ...] | None = None,
    prompt: tuple[int, ...] = (5,),
    scores: tuple[TokenLogprob | None, ...] | None = None,
) -> GenerationOutput:
    reasons = (FinishReason.STOP, FinishReason.LENGTH)
    completions = tuple(
        Completion(index, text, (1, 2), reasons[index % 2], logprobs=logprobs) for index, text in enumerate(texts)
    )
    return GenerationOutput(PackedPrompt.of(prompt), completions, USAGE, None, scores)


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get", "description": "d", "parameters": WEATHER}}


def test_tools_and_choices() -> None:
    def tools_of(**fields: Any) -> ChatRequest:
        (found,) = chat(
            tools=[TOOL, {"type": "function", "function": {"name": "now", "strict": True}}], **fields
        ).prompts
        assert isinstance(found, ChatRequest)
        return found

    assert tools_of().tools == (Tool("get", "d", WEATHER, is_strict=False), Tool("now"))
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    for given, expected in (
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(ToolMode.NONE)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        (named, ToolChoice(ToolMode.REQUIRED, "now")),
        (allowed, ToolChoice(allowed=("now",))),
    ):
        assert tools_of(tool_choice=given).tool_choice == expected
        one = tools_of(tool_choice=given, parallel_tool_calls=False).tool_choice
        assert one == replace(expected, is_parallel=False)
    assert chat(tools=[{"type": "web_search"}, TOOL]).ignored == ("tools[0].web_search",)
    assert [tool.name for tool in tools_of(tool_choice=allowed).callable_tools] == ["now"]
    assert tools_of(tool_choice="none").callable_tools == ()


def test_calls_and_results_in_a_conversation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
    ]
    (found,) = chat(messages=messages).prompts
    assert isinstance(found, ChatRequest)
    assert found.messages[1] == Message(
        Role.ASSISTANT, (), thought="hm", tool_calls=(ToolCall("c1", "get", '{"city": "Oslo"}'),)
    )
    assert found.messages[2] == Message(Role.TOOL, (Part("4"),), tool_call_id="c1")


SHAPES: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_object_grammar()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER, "strict": True}}},
        json_schema_grammar(WEATHER),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}},
        json_schema_grammar(WEATHER, strict=False),
    ),
    ({"structured_outputs": {"json": WEATHER}}, json_schema_grammar(WEATHER, strict=False)),
    ({"structured_outputs": {"json_object": True}}, json_object_grammar()),
    ({"guided_json": json.dumps(WEATHER)}, json_schema_grammar(WEATHER, strict=False)),
    ({"guided_choice": ["a", "b.c"]}, choice_grammar(["a", "b.c"])),
    ({"guided_regex": "[a-z]+"}, regex_grammar("[a-z]+")),
    ({"guided_regex": "[a-z]+", "structured_outputs": {"regex": "[a-z]+"}}, regex_grammar("[a-z]+")),  # the same twice
    ({"structured_outputs": {"grammar": "start: /x/"}}, lark_grammar("start: /x/")),
    ({"structured_outputs": {"grammar": GBNF}}, lark_grammar(gbnf_to_lark(GBNF))),
    ({"guided_grammar": GBNF}, lark_grammar(gbnf_to_lark(GBNF))),
    ({"grammar": GBNF}, lark_grammar(gbnf_to_lark(GBNF))),
    ({"grammar": "start: /x/"}, lark_grammar("start: /x/")),
    ({"grammar": ""}, None),
    ({"ebnf": GBNF}, lark_grammar(gbnf_to_lark(GBNF))),
    ({"regex": "[a-z]+"}, regex_grammar("[a-z]+")),
    ({"json_schema": json.dumps(WEATHER)}, json_schema_grammar(WEATHER, strict=False)),
    ({"json_schema": WEATHER}, json_schema_grammar(WEATHER, strict=False)),
    ({"response_format": {"type": "json_object", "schema": WEATHER}}, json_schema_grammar(WEATHER, strict=False)),
    ({"response_format": {"type": "json_schema", "schema": WEATHER}}, json_schema_grammar(WEATHER, strict=False)),
    ({"allowed_token_ids": [9, 5, 5]}, token_grammar([5, 9])),
]


@pytest.mark.parametrize(("fields", "grammar"), SHAPES)
def test_answer_formats(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert chat(**fields).params.grammar == grammar
    assert completion(**fields).params.grammar == grammar


def reading() -> AnswerParser:
    return ThoughtParser(REASONING_FORMATS[0], Opening.FREE, CallParser(PROMPTED, (Tool("get"), Tool("now"))))


PROMPT_FIELDS = ("<think>hm", "</think>\n\nI look.\n<tool", '_call>\n{"name": "get", "arguments"', ': {"city": "Os')
ENDS = ('lo"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', FinishReason.STOP)


def test_reasoning_text_and_calls_in_a_stream() -> None:
    encoder = chat_encoder(include_usage=True, new_parser=reading, num_thought_tokens=2)
    data = b"".join(encoder.feed([(0, delta(text))]) for text in PROMPT_FIELDS)
    data += encoder.feed([(0, delta(*ENDS))]) + encoder.finish()
    chunks = [SdkChunk.model_validate_json(line[6:]) for line in data.split(b"\n\n")[:-2]]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join((one.model_extra or {}).get("reasoning_content", "") for one in deltas) == "hm"
    assert "".join(one.content or "" for one in deltas) == "I look."
    calls = [call for one in deltas for call in one.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.id and call.function] == [(0, "get"), (1, "now")]
    arguments = ["".join(c.function.arguments or "" for c in calls if c.index == i and c.function) for i in (0, 1)]
    assert arguments == ['{"city": "Oslo"}', "{}"]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize(("reason", "finish"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")])
def test_reasoning_text_and_calls_of_a_whole_answer(reason: FinishReason, finish: str) -> None:
    one = Completion(0, "".join(PROMPT_FIELDS) + ENDS[0], (1, 2), reason)
    made = whole_of(chat_encoder(new_parser=reading), GenerationOutput(PackedPrompt.of((1,)), (one,), USAGE, None))
    found = SdkChatCompletion.model_validate(made)
    message = found.choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("I look.", "hm")
    assert message.tool_calls is not None
    assert [(call.type, call.id[:5]) for call in message.tool_calls] == [("function", "call_")] * 2
    assert [call.to_dict()["function"] for call in message.tool_calls] == [
        {"name": "get", "arguments": '{"city": "Oslo"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert found.choices[0].finish_reason == finish


def test_a_call_cut_by_a_stop_string_has_finish_reason_stop() -> None:
    """Clients parse the arguments as JSON if the finish reason is `tool_calls`."""
    one = Completion(0, "".join(PROMPT_FIELDS), (1, 2), FinishReason.STOP, stop="lo")
    made = whole_of(chat_encoder(new_parser=reading), GenerationOutput(PackedPrompt.of((1,)), (one,), USAGE, None))
    assert made["choices"][0]["finish_reason"] == "stop"
    encoder = chat_encoder(new_parser=reading)
    for text in PROMPT_FIELDS:
        encoder.feed([(0, delta(text))])
    encoder.feed([(0, delta("", FinishReason.STOP))])
    assert b'"finish_reason":"stop"' in encoder.finish()


def test_logprobs_of_tokens_without_text_are_sent() -> None:
    entry = TokenLogprob(7, "<tool", b"<tool", -0.5, 0)
    encoder = chat_encoder(new_parser=reading)
    data = encoder.feed([(0, Delta(0, "x <tool", (7,), (entry,), None, None))])
    data += encoder.feed([(0, Delta(0, "_", (7,), (entry,), None, None))])
    chunks = [SdkChunk.model_validate_json(line[6:]) for line in data.split(b"\n\n")[:-1]]
    assert sum(len(one.choices[0].logprobs.content or ()) for one in chunks if one.choices[0].logprobs) == 2


def test_a_whole_chat() -> None:
    found = whole_of(chat_encoder(more={"n": 2, "cache": True}), output("one", "two"))
    answer = SdkChatCompletion.model_validate(found)
    assert [(one.index, one.message.content, one.finish_reason) for one in answer.choices] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    assert found["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert found["usage"] == BILL
    assert found["cache"]["message"] == CACHE.message
    assert (found["object"], found["service_tier"], found["system_fingerprint"]) == (
        "chat.completion",
        "flex",
        "fp_x",
    )
    found = whole_of(chat_encoder(), output("one", logprobs=(HI,)))
    assert "cache" not in found
    assert found["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["token"] == "Ho"
    SdkChatCompletion.model_validate(found)


def test_a_completion_stream() -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    encoder = completion_encoder(["ab", "cd"], prompt=["ab", "cd"], **usage)
    found = read(encoder.feed([(1, delta("x")), (0, delta("y")), (1, delta("z", FinishReason.STOP))]))
    head = TEXT_HEAD
    plain = {"logprobs": None, "finish_reason": None}
    assert found[0] == {**head, "choices": [{"index": 1, "text": "cd", **plain}], "usage": None}
    assert [(one["index"], one["text"], one["finish_reason"]) for one in choices(found)] == [
        (1, "cd", None),
        (1, "x", None),
        (0, "ab", None),
        (0, "y", None),
        (1, "z", None),
        (1, "", "stop"),
    ]
    assert encoder.feed([(0, delta("", FinishReason.LENGTH))]) == b""
    end, final, done = read(encoder.finish())
    SdkCompletion.model_validate(end)
    SdkCompletion.model_validate(final)
    assert (end["choices"][0]["finish_reason"], final["usage"], done) == ("length", BILL, "[DONE]")
    for chunk in (*found, end, final):
        msgspec.convert(chunk, types.Completion)


def test_old_logprobs_in_a_stream_count_characters() -> None:
    encoder = completion_encoder(["abc"], prompt="abc", logprobs=2)
    tail = replace(logprob(SMILE[2:], -0.25, (logprob("a", -0.1), logprob("b", -0.2))), offset=2)
    half, end = replace(HALF, offset=2), replace(logprob("!", -2.0), offset=3)
    _, first, second = choices(
        read(encoder.feed([(0, delta("Hi", logprobs=(HI, half))), (0, delta("🙂", logprobs=(tail, end)))]))
    )
    assert first["logprobs"] == {
        "tokens": ["Hi", "bytes:\\xf0\\x9f"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [
            {"Hi": -0.5, "Ho": -1.5},
            {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0\\x9f\\x99": -9999.0},
        ],
        "text_offset": [3, 5],  # after the prompt
    }
    assert second["logprobs"]["text_offset"] == [5, 6]  # both tokens of a character have its position
    # The chosen token is listed even if it is not among the best.
    assert second["logprobs"]["top_logprobs"][0] == {"a": -0.1, "b": -0.2, "bytes:\\x99\\x82": -0.25}


def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {})


def test_a_whole_completion() -> None:
    outputs = [output("one", "two", logprobs=(HI,)), output("three", "four", logprobs=(HI,))]
    found = whole_of(completion_encoder(["P", "QQ"], prompt=["P", "QQ"], n=2), *outputs)
    judge = SdkCompletion.model_validate(found)
    assert [(one.index, one.text, one.finish_reason) for one in judge.choices] == [
        (0, "Pone", "stop"),
        (1, "Ptwo", "length"),
        (2, "QQthree", "stop"),
        (3, "QQfour", "length"),
    ]
    assert found["choices"][3]["logprobs"]["text_offset"] == [2]
    assert found["usage"] == BILL
    (alone,) = whole_of(completion_encoder(), output("x", logprobs=(logprob("x", -1.0),)))["choices"]
    assert alone["logprobs"]["top_logprobs"] == [{"x": -1.0}]  # logprobs = 0: the chosen token alone


def test_echo_with_logprobs_scores_the_prompt() -> None:
    words = tokenizer()
    prompt = tuple(words.encode("Hello there", add_special=False))
    assert len(prompt) >= 2
    assert echo_of(prompt, words, completion()).text == "Hello there"
    assert echo_of("Hello there", words, completion()).text == "Hello there"
    scores = (None, *(logprob(words.token_bytes(token), -1.0, (logprob("z", -0.5),)) for token in prompt[1:]))
    one = output("Hi", logprobs=(HI,), prompt=prompt, scores=scores)
    (choice,) = whole_of(completion_encoder(["Hello there"], prompt="Hello there"), one)["choices"]
    assert choice["text"] == "Hello thereHi"
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == "Hello thereHi"
    assert found["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1), -0.5]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] is not None
    assert (found["text_offset"][0], found["text_offset"][-1]) == (0, len("Hello there"))


def test_echo_and_offsets_agree_where_there_are_control_tokens() -> None:
    words = tokenizer()
    text = "<|im_start|>The lazy 🎉 dog<|im_end|>"
    ids = tuple(words.encode(text))
    for prompt, fields, expected in (
        (text, {}, text),
        (ids, {}, "The lazy 🎉 dog"),
        (ids, {"skip_special_tokens": False}, text),
    ):
        echo = echo_of(prompt, words, completion(**fields))
        assert echo.text == expected
        offsets = token_offsets(echo, ids, words)
        for token, offset, end in zip(ids, offsets, (*offsets[1:], len(expected)), strict=True):
            piece = words.token_bytes(token).decode("utf-8", "replace")
            if "\ufffd" not in piece:
                assert expected[offset:end] == ("" if token in echo.hidden else piece)
        assert offsets == sorted(offsets)
        assert max(offsets) <= len(expected)


def test_offsets_ignore_tokens_that_the_tokenizer_adds() -> None:
    words = Tokenizer.from_gguf(sentencepiece_gguf())
    ids = words.encode("the cat")
    assert ids[0] == words.bos_token_id
    offsets = token_offsets(echo_of("the cat", words, completion()), ids, words)
    assert offsets[:2] == [0, 0]  # BOS, and the space that this model's tokenizer adds before the first word
    assert offsets[-1] == len("the cat") - len(words.token_bytes(ids[-1]))


# Cache explanations


@pytest.mark.parametrize(
    ("reason", "num_tokens", "message"),
    [
        (StopReason.COMPLETE, 1059, "1,059 of 1,060 prompt tokens come from the cache. The last token is"),
        (
            StopReason.DIVERGED,
            1024,
            "1,024 of 1,060 prompt tokens come from the cache. At token 1,024 the prompt differs",
        ),
        (StopReason.EVICTED, 32, "32 of 1,060 prompt tokens come from the cache. The rest, from token 32 on, was"),
        (
            StopReason.TOO_SHORT,
            1056,
            "1,056 of 1,060 prompt tokens come from the cache. The rest, from token 1,056 on,",
        ),
        (
            StopReason.IN_FLIGHT,
            0,
            "None of 1,060 prompt tokens come from the cache. The rest, from token 0 on, is being",
        ),
        (StopReason.NOT_FOUND, 0, "None of 1,060 prompt tokens come from the cache. No cached prompt continues"),
        (StopReason.OFF, 0, "None of 1,060 prompt tokens come from the cache. Caching is off, or"),
    ],
)
def test_cache_explanations(reason: StopReason, num_tokens: int, message: str) -> None:
    found = view(CacheExplanation(num_tokens, num_tokens // 32, num_tokens, reason), 1060)
    assert found.message.startswith(message)
    assert found.message.endswith(".")
    assert (found.matched_tokens, found.matched_blocks, found.prompt_tokens) == (num_tokens, num_tokens // 32, 1060)
    assert found.stopped_at == (None if reason is StopReason.COMPLETE else num_tokens)
    assert found.reason == reason.value


def test_a_prompt_that_diverged_is_quoted() -> None:
    text = Excerpt("…Name three", " rivers.")
    found = view(CacheExplanation(26, 0, 26, StopReason.DIVERGED), 34, text)
    assert found.message.endswith(
        'At token 26 the prompt differs from the cached ones, between "…Name three" and " rivers.".'
    )
    assert found.stopped_text is not None
    assert (found.stopped_text.before, found.stopped_text.after) == ("…Name three", " rivers.")
    other = view(CacheExplanation(26, 0, 26, StopReason.EVICTED), 34, text)
    assert "rivers" not in other.message
    assert other.stopped_text == found.stopped_text


def test_every_stop_reason_has_a_message() -> None:
    for reason in StopReason:
        assert "{" not in view(CacheExplanation(0, 0, 0, reason), 1).message


# Errors


STATUSES = {
    Kind.INVALID: (400, "invalid_request_error", None),
    Kind.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    Kind.AUTHENTICATION: (401, "invalid_request_error", "invalid_api_key"),
    Kind.PERMISSION: (403, "permission_error", "permission_denied"),
    Kind.NOT_FOUND: (404, "invalid_request_error", "unknown_url"),
    Kind.NO_MODEL: (404, "invalid_request_error", "model_not_found"),
    Kind.METHOD: (405, "invalid_request_error", "method_not_supported"),
    Kind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Kind.TIMEOUT: (408, "invalid_request_error", "request_timeout"),
    Kind.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Kind.OVERLOADED: (429, "rate_limit_error", "server_overloaded"),
    Kind.UNAVAILABLE: (503, "server_error", "service_unavailable"),
    Kind.FAILED: (500, "server_error", None),
    Kind.DIED: (500, "server_error", "engine_died"),
    Kind.CANCELLED: (499, "request_cancelled", "request_cancelled"),
}


@pytest.mark.parametrize("kind", Kind)
def test_errors_in_openais_format(kind: Kind) -> None:
    status, error_type, code = STATUSES[kind]
    error = ApiError(kind, 'n = "x"\nis none', param="n")
    assert OPENAI.status(error) == status
    assert OPENAI.status(ApiError(Kind.DIED, "x", may_retry=True)) == 503  # before the start
    body = OPENAI.body(error, "req_1")
    expected = {"error": {"message": 'n = "x"\nis none', "type": error_type, "param": "n", "code": code}}
    assert json.loads(body) == expected
    assert read(OPENAI.event(error, "req_1")) == [expected]
