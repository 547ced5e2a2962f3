"""`--default-max-tokens`: what ends an answer whose request sets no limit, in every protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.composition import EngineConfig
from quire.errors import InvalidRequest
from quire.server.config import ModelConfig
from tests.cli.runs import quire
from tests.server.rig import FAKE, Server, serving
from tests.tiny import write_tiny_model

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models; the second has a limit of its own, by the file. Their context is 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        write_tiny_model(folder / name, seed=seed, max_model_len=64)
    config = folder / "quire.yaml"
    config.write_text("models:\n  - model: ./a\n  - model: ./b\n    default_max_tokens: 5\n")
    with serving("--config", str(config), *FAKE, env={"QUIRE_DEFAULT_MAX_TOKENS": "9"}) as server:
        yield server


def test_a_chat_without_a_limit_ends_at_the_default(server: Server) -> None:
    for model, count in (("a", 9), ("b", 5)):
        answer = server.post(CHAT, {"model": model, "messages": HI, "ignore_eos": True}).json
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == count


def test_a_limit_goes_before_the_default(server: Server) -> None:
    asked = {"messages": HI, "ignore_eos": True}
    for fields, count in (({"max_tokens": 12}, 12), ({"n_predict": 3}, 3), ({"min_tokens": 11}, 11)):
        assert server.post(CHAT, {**asked, **fields}).json["usage"]["completion_tokens"] == count
    usage = server.post(CHAT, {**asked, "max_tokens": -1}).json["usage"]
    assert usage["total_tokens"] == 64  # the whole context


def test_completions_keep_the_default_of_openai(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "Hi", "ignore_eos": True}).json
    assert answer["usage"]["completion_tokens"] == 16


def test_a_response_without_a_limit_is_incomplete_at_the_default(server: Server) -> None:
    body = {"input": "Hi", "ignore_eos": True}
    answer = server.post(RESPONSES, body).json
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["usage"]["output_tokens"], answer["max_output_tokens"]) == (9, None)


def test_ollama_without_num_predict_ends_at_the_default(server: Server) -> None:
    body = {"model": "a", "messages": HI, "stream": False}
    answer = server.post("/api/chat", body).json
    assert answer["eval_count"] <= 9
    body = {"model": "a", "prompt": "Hi", "raw": True, "stream": False}
    answer = server.post("/api/generate", body).json
    assert answer["eval_count"] <= 9


@pytest.mark.parametrize("value", [0, -2, True, "x"])
def test_a_default_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"default_max_tokens = .* is not a whole number of at least 1, or -1"):
        ModelConfig(Path("m"), ("m",), "m", EngineConfig(), default_max_tokens=value)


def test_the_option_is_named_as_it_is_typed(tiny_model: Path) -> None:
    outcome = quire("serve", str(tiny_model), "--backend", "fake", "--default-max-tokens", "0", env=dict(os.environ))
    assert "--default-max-tokens = 0 is not a whole number of at least 1" in outcome.stderr
