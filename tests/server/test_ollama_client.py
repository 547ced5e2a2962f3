"""Tests with the official `ollama` client, with the real model, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from ollama import Client, ResponseError

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server, serving
from tests.waiting import HANG_S

KEY, ADMIN = "app-0000-key", "admin-0000-key"
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
ASKED = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    del default_model  # is here now
    with serving("--api-key", KEY, "--admin-api-key", ADMIN, "--num-blocks", "400", key=ADMIN) as server:
        yield server


def connect(server: Server, key: str = KEY) -> Client:
    return Client(host=server.url, headers={"authorization": f"Bearer {key}"}, timeout=HANG_S)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: Server) -> Iterator[Client]:
    with connect(server, ADMIN) as client:
        yield client


# Answers


@pytest.mark.parametrize("model", [DEFAULT_MODEL, f"{DEFAULT_MODEL}:latest"])
def test_a_whole_chat(client: Client, model: str) -> None:
    answer = client.chat(model, ASKED, options=GREEDY)
    assert answer.message.content == ANSWER
    assert (answer.model, answer.message.role, answer.done, answer.done_reason) == (model, "assistant", True, "stop")
    assert answer.eval_count == 8
    assert answer.prompt_eval_count == 37
    spent = [answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]
    assert all(part is not None and part > 0 for part in spent)
    assert (answer.total_duration or 0) >= sum(part or 0 for part in spent)


def test_a_chat_in_a_stream(client: Client) -> None:
    parts = list(client.chat(DEFAULT_MODEL, ASKED, stream=True, options=GREEDY))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 8)


def test_generate(client: Client) -> None:
    whole = client.generate(DEFAULT_MODEL, QUESTION, options=GREEDY)
    assert (whole.response, whole.done_reason) == (ANSWER, "stop")
    parts = list(client.generate(DEFAULT_MODEL, QUESTION, stream=True, options=GREEDY))
    assert "".join(part.response or "" for part in parts) == ANSWER
    assert parts[-1].context == whole.context
    assert whole.context is not None
    assert len(whole.context) == (whole.prompt_eval_count or 0) + (whole.eval_count or 0)
    again = client.generate(DEFAULT_MODEL, "Really?", context=whole.context, options=GREEDY | {"num_predict": 4})
    assert (again.prompt_eval_count or 0) > len(whole.context)
    system = client.generate(DEFAULT_MODEL, QUESTION, system="Be brief.", options=GREEDY | {"num_predict": 4})
    assert system.prompt_eval_count != whole.prompt_eval_count
    raw = client.generate(DEFAULT_MODEL, "The capital of Japan is", raw=True, options=GREEDY | {"num_predict": 1})
    assert (raw.response, raw.prompt_eval_count, raw.context) == (" Tokyo", 5, None)


def test_an_answer_by_a_schema(client: Client) -> None:
    options = GREEDY | {"num_predict": 60}
    answer = client.chat(DEFAULT_MODEL, ASKED, format=CITY, options=options)
    found = json.loads(answer.message.content or "")
    assert set(found) == {"city", "people"}
    assert isinstance(found["people"], int)
    parts = client.generate(DEFAULT_MODEL, QUESTION, format=CITY, stream=True, options=options)
    assert set(json.loads("".join(part.response or "" for part in parts))) == {"city", "people"}
    loose = client.chat(DEFAULT_MODEL, [{"role": "user", "content": "Answer in JSON."}], format="json", options=options)
    if loose.done_reason == "stop":
        assert isinstance(json.loads(loose.message.content or ""), dict)


def weather(city: str) -> str:
    """Look up the weather.

    Args:
      city: The city to look it up for
    """
    return f"21 degrees in {city}"


def test_tools_and_their_results(client: Client) -> None:
    """The protocol cannot require a call, so the model may not call. A call must be complete."""
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Vienna? Use the tool."}]
    options = GREEDY | {"num_predict": 60}
    answer = client.chat(DEFAULT_MODEL, asked, tools=[weather], options=options)
    for call in answer.message.tool_calls or ():
        assert call.function.name == "weather"
        assert isinstance(call.function.arguments["city"], str)
    parts = list(client.chat(DEFAULT_MODEL, asked, tools=[weather], stream=True, options=options))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == list(answer.message.tool_calls or ())
    made = {"function": {"name": "weather", "arguments": {"city": "Vienna"}}}
    messages = [
        *asked,
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_name": "weather", "content": weather("Vienna")},
    ]
    final = client.chat(DEFAULT_MODEL, messages, options=options)
    assert final.message.content
    assert (final.prompt_eval_count or 0) > (answer.prompt_eval_count or 0) - 200


# Models


def test_list_show_and_ps(client: Client) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.size) == (DEFAULT_MODEL, 98_362_432)
    assert listed.details is not None
    assert (listed.details.family, listed.details.quantization_level) == ("llama", "Q4_1")
    assert listed.details.parameter_size == "134.52M"
    shown = client.show(f"{DEFAULT_MODEL}:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.template is not None
    assert "<|im_start|>" in shown.template
    assert shown.parameters is not None
    assert shown.parameters.split() == ["temperature", "0.2", "top_p", "0.5"]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == (DEFAULT_MODEL, 8192)
    assert (running.size or 0) > (listed.size or 0) / 2


def test_load_and_unload(client: Client, admin: Client) -> None:
    assert client.generate(DEFAULT_MODEL).done_reason == "load"
    with pytest.raises(ResponseError, match="not an admin key") as info:
        client.generate(DEFAULT_MODEL, keep_alive=0)
    assert info.value.status_code == 403
    assert admin.generate(DEFAULT_MODEL, keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.chat(DEFAULT_MODEL, [], keep_alive="10m").done_reason == "load"
    assert len(client.ps().models) == 1


def test_pull(client: Client, admin: Client) -> None:
    assert admin.pull(DEFAULT_MODEL).status == "success"
    parts = [part.status for part in admin.pull("smollm2", stream=True)]  # a known name, already downloaded
    assert (parts[0], parts[-1]) == ("pulling manifest", "success")
    with pytest.raises(ResponseError, match="neither a known model name") as info:
        admin.pull("llama3.2")
    assert info.value.status_code == 404
    with pytest.raises(ResponseError) as info:
        client.pull(DEFAULT_MODEL)
    assert info.value.status_code == 403


# Errors


def test_a_bad_request_names_the_field(client: Client) -> None:
    with pytest.raises(ResponseError, match=r"messages\[0\].images is not supported") as info:
        client.chat(DEFAULT_MODEL, [{"role": "user", "content": "Hi", "images": ["aGk="]}])
    assert info.value.status_code == 400
    with pytest.raises(ResponseError, match=r"options\.mirostat = 2 is not supported"):
        client.chat(DEFAULT_MODEL, ASKED, options={"mirostat": 2})
    with pytest.raises(ResponseError, match="suffix is not supported"):
        client.generate(DEFAULT_MODEL, "def f(", suffix="return")
    with pytest.raises(ResponseError, match="maximum context length is 8192 tokens"):
        list(client.generate(DEFAULT_MODEL, "word " * 9000, stream=True))


def test_the_key_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", server.url)
    monkeypatch.setenv("OLLAMA_API_KEY", KEY)
    with Client(timeout=HANG_S) as client:
        assert client.chat(DEFAULT_MODEL, ASKED, options=GREEDY).message.content == ANSWER
    assert ollama.__name__ == "ollama"
