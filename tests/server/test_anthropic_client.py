"""Tests with the official `anthropic` client: every feature, with the real model, over a real socket.

The client no longer has `temperature`, so greedy answers are requested in `extra_body`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, TextBlock, Usage

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server, serving
from tests.waiting import HANG_S

KEY, ADMIN = "app-0000-key", "admin-0000-key"
KEYS = f"""
keys:
  - {{name: app, key: {KEY}}}
  - {{name: keeper, key: {ADMIN}, admin: true}}
"""
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
ASKED = {"role": "user", "content": QUESTION}
FACTS = "You know these facts. " + " ".join(f"Fact {i}: after {i} comes {i + 1}." for i in range(10))


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    del default_model  # is here now
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    with serving("--api-keys-file", str(keys), "--num-blocks", "400", key=ADMIN) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with connect(server) as client:
        yield client


def connect(server: Server, key: str = KEY) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=HANG_S)


def given(**options: Any) -> dict[str, Any]:
    """Arguments of a request: by default greedy and 16 tokens."""
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    return {"model": DEFAULT_MODEL, "max_tokens": 16, "messages": [ASKED], "extra_body": extra, **options}


def ask(client: Anthropic, **options: Any) -> Message:
    return cast(Message, client.messages.create(**given(**options)))


def count(client: Anthropic, **options: Any) -> int:
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [ASKED], **options}
    return int(client.messages.count_tokens(**asked).input_tokens)


def text_of(message: Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return str(block.text)


def prompt_tokens(usage: Usage) -> int:
    return sum((usage.input_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0))


def marked(text: str, ttl: str | None = None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}]


def common(server: Server, one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """Number of leading tokens that two conversations share."""
    a, b = (server.post("/tokenize", {"messages": messages}).json["tokens"] for messages in (one, other))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# Answers


def test_a_question_is_answered(client: Anthropic) -> None:
    message = ask(client)
    assert text_of(message) == ANSWER
    assert (message.type, message.role, message.model) == ("message", "assistant", DEFAULT_MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 8  # seven words and the end token
    assert prompt_tokens(message.usage) == count(client)
    assert message._request_id
    assert message.id == f"msg_{message._request_id}"


def test_events_come_in_order(client: Anthropic) -> None:
    with client.messages.create(stream=True, **given()) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds[2:-3]) == 7  # streamed, not all at the end
    start, delta = events[0], events[-2]
    assert start.type == "message_start"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert prompt_tokens(start.message.usage) == count(client)  # the prompt's tokens are known from the start
    assert delta.type == "message_delta"
    assert delta.delta.stop_reason == "end_turn"
    assert delta.usage.output_tokens == 8
    assert delta.usage.cache_read_input_tokens == start.message.usage.cache_read_input_tokens
    with client.messages.stream(**given()) as helper:
        seen = [event.type for event in helper]
    assert [kind for kind in seen if kind != "text"] == kinds


# The cache


def test_cache_control_keeps_a_system_prompt(client: Anthropic, server: Server) -> None:
    block_size = server.stats()["block_size"]
    system = marked(FACTS)
    try:
        first = ask(client, system=system, max_tokens=2)
        total = count(client, system=system)
        head = [{"role": "system", "content": FACTS}]
        kept = common(server, [*head, ASKED], [*head, {"role": "user", "content": "\u2060"}])  # all but the question
        kept_blocks = kept // block_size
        assert kept_blocks >= 3
        read = first.usage.cache_read_input_tokens
        assert read is not None
        assert read < block_size  # the beginning that all conversations share
        assert first.usage.cache_creation_input_tokens == kept_blocks * block_size - read > 0
        assert first.usage.cache_creation is not None
        assert first.usage.cache_creation.ephemeral_5m_input_tokens == first.usage.cache_creation_input_tokens
        assert first.usage.cache_creation.ephemeral_1h_input_tokens == 0
        assert prompt_tokens(first.usage) == total
        stats = server.stats()
        assert (stats["num_pins"], stats["num_pinned"]) == (1, kept_blocks)

        second = ask(client, system=system, max_tokens=2)
        assert second.usage.cache_creation_input_tokens == 0
        assert second.usage.cache_read_input_tokens == total - 1  # the last token is always computed
        assert prompt_tokens(second.usage) == total

        other = [{"role": "user", "content": "Name a river."}]
        third = ask(client, system=system, messages=other, max_tokens=2)
        assert third.usage.cache_creation_input_tokens == 0
        assert third.usage.cache_read_input_tokens == common(server, [*head, ASKED], [*head, *other])
        assert prompt_tokens(third.usage) == count(client, system=system, messages=other)
        assert server.stats()["num_pins"] == 1
    finally:
        server.post("/v1/cache/clear")


# Errors


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


# The rules of each field are tested in test_anthropic_codec.py.
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type = 'image' is not supported"),
        ({"extra_body": {"temperature": -1}}, "temperature = -1.0"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "prompt is too long: .*9031 tokens"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_bad_request_names_the_field(client: Anthropic, options: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as info:
        ask(client, **options)
    error = info.value
    assert error_of(error)["type"] == "invalid_request_error"
    assert error.response.headers["x-should-retry"] == "false"
    assert error.request_id
    assert cast(dict[str, Any], error.body)["request_id"] == error.request_id


def error_of(error: anthropic.APIStatusError) -> dict[str, Any]:
    body = cast(dict[str, Any], error.body)
    assert body["type"] == "error"
    return cast(dict[str, Any], body["error"])


def test_a_bad_stream_is_refused_before_it_begins(client: Anthropic) -> None:
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
        client.messages.stream(**given(messages=[{"role": "user", "content": "word " * 9000}])) as stream,
    ):
        stream.get_final_message()
