"""Tests with the official `ollama` client, with the real model, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
