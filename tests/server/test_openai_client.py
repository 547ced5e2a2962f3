"""Tests with the official `openai` client: every feature, with the real model, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server, serving
from tests.waiting import HANG_S

NORMAL, HIGH, ADMIN, SLOW = "normal-0000-key", "high-0000-key", "admin-0000-key", "slow-0000-key"
KEYS = f"""
keys:
  - {{name: app, key: {NORMAL}}}
  - {{name: urgent, key: {HIGH}, tier: high}}
  - {{name: keeper, key: {ADMIN}, admin: true}}
  - {{name: trial, key: {SLOW}, tier: low, requests_per_minute: 1}}
"""
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
MESSAGES = [{"role": "user", "content": QUESTION}]
BASICS: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 16}
TOO_MANY = 2000  # tokens: more than any test reads, so that the answer is cut off


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del default_model  # is here now
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    with serving("--api-keys-file", str(keys), "--num-blocks", "400", key=ADMIN) as server:
        yield server


def connect(server: Server, key: str = NORMAL) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with connect(server) as client:
        yield client


def chat(client: OpenAI, content: str = QUESTION, **options: Any) -> ChatCompletion:
    """Send a chat request: by default greedy and 16 tokens."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": content}], **BASICS, **options}
    return cast(ChatCompletion, client.chat.completions.create(**given))


def chat_chunks(client: OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    given: dict[str, Any] = {"messages": MESSAGES, **BASICS, **options}
    with client.chat.completions.create(stream=True, **given) as stream:
        return list(stream)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def tokens_of(server: Server, **prompt: Any) -> list[int]:
    found = server.post("/tokenize", prompt).json["tokens"]
    assert isinstance(found, list)
    return found


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return int(answer.usage.prompt_tokens_details.cached_tokens)


# Answers


def test_a_question_is_answered(client: OpenAI) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == DEFAULT_MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8  # seven words and the end token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_a_stream_has_the_same_text(client: OpenAI) -> None:
    chunks = chat_chunks(client)
    assert text_of(chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len(chunks) >= 8  # streamed, not all at the end


def test_token_ids_of_completions(server: Server) -> None:
    """The fields of vLLM: in a stream and in a complete answer, and only if requested."""
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    whole = server.post("/v1/completions", {**body, "return_token_ids": True}).json["choices"][0]["token_ids"]
    assert len(whole) == 5
    stream = server.post("/v1/completions", {**body, "return_token_ids": True, "stream": True}).body.decode()
    chunks = [json.loads(one.removeprefix("data: ")) for one in stream.split("\n\n") if one.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == whole
    assert "token_ids" not in server.post("/v1/completions", body).json["choices"][0]


def test_async(server: Server) -> None:
    async def run() -> tuple[str | None, list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=NORMAL, max_retries=0) as client:

            async def stream() -> str:
                text = ""
                async with await client.chat.completions.create(
                    model=DEFAULT_MODEL,
                    messages=[{"role": "user", "content": QUESTION}],
                    temperature=0,
                    max_tokens=16,
                    stream=True,
                ) as chunks:
                    async for chunk in chunks:
                        text += chunk.choices[0].delta.content or ""
                return text

            whole = client.chat.completions.create(
                model=DEFAULT_MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
            )
            answer, streams = await asyncio.gather(whole, asyncio.gather(*(stream() for _ in range(4))))
            return answer.choices[0].message.content, streams

    answer, streams = asyncio.run(run())
    assert answer == ANSWER
    assert streams == [ANSWER] * 4


def test_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=16,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == ANSWER
    assert [event.content for event in events if event.type == "content.done"] == [ANSWER]
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == 8
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == 8


# Sampling and logprobs


def test_remote_tokenizer_of_lm_evaluation_harness(server: Server) -> None:
    """The requests that lm-evaluation-harness sends with tokenizer_backend=remote."""
    info = server.ask("GET", "/tokenizer_info").json
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "<|im_start|>" in info["chat_template"]
    assert info["model_max_length"] > 0
    (end,) = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json["tokens"]
    assert server.post("/detokenize", {"tokens": [end]}).json["prompt"] == info["eos_token"]
    assert server.ask("GET", "/tokenizer_info?model=nobody").status == 404


def test_tokenize_makes_the_same_prompt_as_chat(client: OpenAI, server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}}
    answered = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    for messages, fields in (
        (MESSAGES, {"tools": [tool]}),
        (answered, {"continue_final_message": True}),
        (answered, {"continue_final_message": True, "add_generation_prompt": False}),
        (MESSAGES, {"add_generation_prompt": False}),
    ):
        tokens = tokens_of(server, messages=messages, **fields)
        usage = chat(client, messages=messages, max_tokens=1, extra_body=fields).usage
        assert usage is not None
        assert usage.prompt_tokens == len(tokens)
    plain = tokens_of(server, messages=MESSAGES)
    assert len(tokens_of(server, messages=MESSAGES, tools=[tool])) > len(plain)
    unheard = server.post("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"unheard_of": 1}})
    assert unheard.json["tokens"] == plain
    assert unheard.headers["x-quire-ignored-fields"] == "chat_template_kwargs.unheard_of"
    wrong = server.post("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}})
    assert wrong.status == 400
    assert "chat_template_kwargs" in wrong.json["error"]["message"]


# The cache


def test_cached_tokens_are_exact(client: OpenAI, server: Server) -> None:
    """Of the same prompt, all but the last token; of another, the common prefix, counted here token by token."""
    salted: dict[str, Any] = {"extra_body": {"cache_salt": "exact", "cache": True}, "max_tokens": 2}
    first = chat(client, **salted)
    assert first.usage is not None
    assert cached(first) == 0
    assert first.model_extra is not None
    assert first.model_extra["cache"]["reason"] == "not_found"
    again = chat(client, **salted)
    assert cached(again) == first.usage.prompt_tokens - 1
    assert again.model_extra is not None
    cache = again.model_extra["cache"]
    assert cache["matched_tokens"] == cached(again)
    assert cache["matched_blocks"] == cached(again) // server.stats()["block_size"]
    assert (cache["reason"], cache["stopped_at"]) == ("complete", None)
    assert cache["message"].startswith(f"{cached(again)} of {first.usage.prompt_tokens} prompt tokens come")
    other = "What is the capital of Spain, and why?"
    shared = common(
        tokens_of(server, messages=MESSAGES), tokens_of(server, messages=[{"role": "user", "content": other}])
    )
    third = chat(client, other, **salted)
    assert cached(third) == shared
    assert third.model_extra is not None
    assert (third.model_extra["cache"]["reason"], third.model_extra["cache"]["stopped_at"]) == ("diverged", shared)
    assert cached(chat(client, extra_body={"cache_salt": "another"}, max_tokens=2)) == 0


def test_explain_predicts_the_cache_hit(client: OpenAI, server: Server) -> None:
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "Name a colour, please."}]}

    def explain() -> dict[str, Any]:
        return cast(dict[str, Any], client.post("/cache/explain", body=question, cast_to=object))

    before = explain()
    answer = chat(client, **question, max_tokens=2)
    assert cached(answer) == before["matched_tokens"] < before["prompt_tokens"] - 1
    after = explain()
    assert (after["reason"], after["matched_tokens"]) == ("complete", before["prompt_tokens"] - 1)
    assert cached(chat(client, **question, max_tokens=2)) == after["matched_tokens"]
    # Another key finds nothing of it: its own requests share only the system prompt.
    hidden = server.post("/v1/cache/explain", question).json
    assert hidden["matched_tokens"] < before["prompt_tokens"] - 1


# Prompts


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (DEFAULT_MODEL, "quire")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 8192
    assert client.models.retrieve(DEFAULT_MODEL) == model
    with pytest.raises(openai.NotFoundError, match=f"this server has {DEFAULT_MODEL}"):
        client.models.retrieve("someone/else")


# Errors


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "array"}}}
TOO_LONG = [{"role": "user", "content": "word " * 9000}]


# The rules of each field are tested in test_openai_codec.py.
@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"tools": [TOOL]}, "tools[0].function.parameters.type", None),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "unsupported_parameter"),
        ({"messages": TOO_LONG}, "messages", "context_length_exceeded"),
        ({"messages": TOO_LONG, "stream": True}, "messages", "context_length_exceeded"),
        ({"temperature": "hot"}, "temperature", None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)  # fmt: skip
def test_a_bad_request_names_the_field(client: OpenAI, options: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        chat(client, **options)
    error = info.value
    assert (error.param, error.code) == (param, code)
    assert error.type == "invalid_request_error"
    assert error.response.headers["x-should-retry"] == "false"
    assert error.request_id == error.response.headers["x-request-id"]
    assert error.request_id


def test_request_ids(client: OpenAI) -> None:
    answer = chat(client, max_tokens=1)
    assert answer._request_id
    assert answer._request_id != chat(client, max_tokens=1)._request_id
    mine = chat(client, max_tokens=1, extra_headers={"x-request-id": "my-own.id"})
    assert mine._request_id == "my-own.id"
    assert client.models.list()._request_id


# Disconnects and crashes


def test_a_dead_worker_is_reported_and_replaced(server: Server) -> None:
    """Must be the last test of this file: the cache is lost with the worker."""
    with connect(server) as client:
        stream = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=TOO_MANY,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        os.kill(server.worker_pid, signal.SIGKILL)
        with stream, pytest.raises(openai.APIError, match="SIGKILL") as info:
            list(stream)
        assert info.value.code == "engine_died"
        assert chat(client).choices[0].message.content == ANSWER  # waits for the new worker
    assert server.get("/health").json["status"] == "ok"
