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


ASKED = {"messages": HI, "ignore_eos": True}
COUNTS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {**ASKED, "model": "a"}, 9),
    (CHAT, {**ASKED, "model": "b"}, 5),
    (CHAT, {**ASKED, "max_tokens": 12}, 12),
    (CHAT, {**ASKED, "n_predict": 3}, 3),
    (CHAT, {**ASKED, "min_tokens": 11}, 11),
    (COMPLETIONS, {"prompt": "Hi", "ignore_eos": True}, 16),  # OpenAI's default
]


@pytest.mark.parametrize(("path", "body", "count"), COUNTS)
def test_a_limit_goes_before_the_default(server: Server, path: str, body: dict[str, Any], count: int) -> None:
    answer = server.post(path, body).json
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", count)


def test_a_limit_of_minus_one_is_the_whole_context(server: Server) -> None:
    assert server.post(CHAT, {**ASKED, "max_tokens": -1}).json["usage"]["total_tokens"] == 64


def test_other_protocols_end_at_the_default(server: Server) -> None:
    answer = server.post(RESPONSES, {"input": "Hi", "ignore_eos": True}).json
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["usage"]["output_tokens"], answer["max_output_tokens"]) == (9, None)
    for path, body in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "Hi", "raw": True})):
        assert server.post(path, {"model": "a", "stream": False, **body}).json["eval_count"] <= 9


@pytest.mark.parametrize("value", [0, -2, True, "x"])
def test_a_default_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"default_max_tokens = .* is not a whole number of at least 1, or -1"):
        ModelConfig(Path("m"), ("m",), "m", EngineConfig(), default_max_tokens=value)


def test_the_option_is_named_as_it_is_typed(tiny_model: Path) -> None:
    outcome = quire("serve", str(tiny_model), "--backend", "fake", "--default-max-tokens", "0", env=dict(os.environ))
    assert "--default-max-tokens = 0 is not a whole number of at least 1" in outcome.stderr
