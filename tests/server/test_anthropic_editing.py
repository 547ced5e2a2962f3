"""`context_management` of /v1/messages: what is cleared, when, and how the response reports it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from quire.server.errors import ApiError
from quire.server.protocols.anthropic import CLEARED, Edited, MessagesRequest, apply, conversation, ignored_edits
from quire.text.messages import ChatRequest
from tests.server.rig import Server

KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
THOUGHTS = "clear_thinking_20251015"
TOOLS = "clear_tool_uses_20250919"


def talk(num_calls: int = 5) -> list[dict[str, Any]]:
    """A conversation with reasoning before every call and ten words of result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for i in range(num_calls):
        thinking = {"type": "thinking", "thinking": f"thought {i}", "signature": ""}
        use = {"type": "tool_use", "id": f"t{i}", "name": "read" if i else "look", "input": {"path": str(i)}}
        messages.append({"role": "assistant", "content": [thinking, use]})
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"result {i} " * 10}
        messages.append({"role": "user", "content": [result]})
    return messages


def body_of(*edits: Any, messages: list[dict[str, Any]] | None = None) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 4, "messages": messages or talk(), "context_management": {"edits": edits}}
    return msgspec.json.decode(json.dumps(body), type=MessagesRequest)


def edit(*edits: Any, messages: list[dict[str, Any]] | None = None) -> Edited:
    body = body_of(*edits, messages=messages)

    async def count(chat: ChatRequest) -> int:
        return sum(len((message.text + message.thought).split()) for message in chat.messages)

    return asyncio.run(apply(body.context_management, conversation(body).chat, count))


def results(done: Edited) -> list[str]:
    return [message.text for message in done.chat.messages if message.role == "tool"]


def thoughts(done: Edited) -> list[str]:
    return [message.thought for message in done.chat.messages if message.thought]


def test_keeping_all_changes_nothing() -> None:
    done = edit(KEEP_ALL)
    assert done == Edited(conversation(body_of()).chat)


def test_old_reasoning_is_cleared() -> None:
    done = edit({"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 2}})
    assert thoughts(done) == ["thought 3", "thought 4"]
    assert msgspec.to_builtins(done.applied) == (
        {"type": THOUGHTS, "cleared_thinking_turns": 3, "cleared_input_tokens": 6},
    )
    assert thoughts(edit({"type": THOUGHTS})) == ["thought 4"]  # default: keep the last


def test_old_tool_results_are_cleared_when_there_are_many() -> None:
    few = {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 4}}
    done = edit(few)
    assert results(done)[:2] == [CLEARED, CLEARED]
    assert [text.startswith("result") for text in results(done)[2:]] == [True] * 3
    assert done.num_original_tokens == 1 + 5 * 22
    (applied,) = msgspec.to_builtins(done.applied)
    assert (applied["cleared_tool_uses"], applied["cleared_input_tokens"]) == (2, 2 * (20 - len(CLEARED.split())))
    assert json.loads(done.chat.messages[1].tool_calls[0].arguments) == {"path": "0"}
    inputs = edit({**few, "clear_tool_inputs": True}).chat.messages
    assert [json.loads(inputs[i].tool_calls[0].arguments) for i in (1, 5)] == [{}, {"path": "2"}]
    some = edit({**few, "clear_tool_inputs": ["read"]}).chat.messages
    assert [json.loads(some[i].tool_calls[0].arguments) for i in (1, 3)] == [{"path": "0"}, {}]
    assert results(edit({**few, "exclude_tools": ["look"]}))[0].startswith("result 0")
    assert results(edit({**few, "keep": {"type": "tool_uses", "value": 0}})) == [CLEARED] * 5


@pytest.mark.parametrize(
    "unmet",
    [
        {},  # 100,000 tokens
        {"trigger": {"type": "tool_uses", "value": 5}},
        {"trigger": {"type": "input_tokens", "value": 111}},
        {"trigger": {"type": "tool_uses", "value": 1}, "clear_at_least": {"type": "input_tokens", "value": 1000}},
    ],
    ids=str,
)
def test_tool_results_are_kept_below_the_trigger(unmet: dict[str, Any]) -> None:
    done = edit({"type": TOOLS, **unmet})
    assert (done.applied, CLEARED in results(done)) == ((), False)
    assert CLEARED in results(edit({"type": TOOLS, "trigger": {"type": "input_tokens", "value": 110}}))


def test_both_edits_in_one_request_are_stable() -> None:
    both = ({"type": THOUGHTS}, {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 1}})
    done = edit(*both)
    assert (len(thoughts(done)), results(done).count(CLEARED), len(done.applied)) == (1, 2, 2)
    messages = talk()
    messages[2]["content"][0]["content"] = CLEARED  # by the client, earlier
    assert results(edit(both[1], messages=messages)).count(CLEARED) == 2


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"type": THOUGHTS, "keep": "some"}, "keep"),
        ({"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 0}}, "keep.value"),
        ({"type": THOUGHTS, "keep": {"type": "tool_uses", "value": 1}}, "keep.type"),
        ({"type": TOOLS, "keep": "all"}, "keep"),
        ({"type": TOOLS, "trigger": {"type": "days", "value": 1}}, "trigger.type"),
        ({"type": TOOLS, "keep": {"type": "tool_uses", "value": -1}}, "keep.value"),
        (KEEP_ALL, "type"),  # each edit tokenises the conversation, so only one of a type is allowed
    ],
    ids=str,
)
def test_a_wrong_edit_is_refused_by_name(wrong: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as refused:
        edit(KEEP_ALL, wrong)
    assert refused.value.param == f"context_management.edits[1].{path}"


def test_an_unknown_edit_is_ignored_and_named() -> None:
    body = body_of({"type": "compact_20260112"}, KEEP_ALL)
    assert ignored_edits(body) == ("context_management.edits[0].compact_20260112",)
    assert edit({"type": "compact_20260112"}).applied == ()


def test_over_http(plain_server: Server) -> None:
    edits = [{"type": "compact_20260112"}, {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 4}}]
    body = {"model": "claude-some", "max_tokens": 4, "messages": talk(), "context_management": {"edits": edits}}
    whole = plain_server.post("/v1/messages", body)
    assert whole.status == 200, whole
    (applied,) = whole.json["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 2
    assert "compact_20260112" in whole.headers["x-quire-ignored-fields"]
    assert whole.json["model"] != "claude-some"  # the default model answered and is named
    assert whole.headers["x-quire-ignored-fields"].startswith("model, ")
    events = [
        json.loads(line[6:])
        for line in plain_server.post("/v1/messages", {**body, "stream": True}).body.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-2]["context_management"]["applied_edits"] == [applied]
    counted = plain_server.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"}).json
    assert counted["context_management"]["original_input_tokens"] == (
        counted["input_tokens"] + applied["cleared_input_tokens"]
    )
    plain = plain_server.post("/v1/messages", {**body, "context_management": None})
    assert "context_management" not in plain.json
    assert plain_server.post("/v1/messages", {**body, "model": "gpt-5"}).status == 404
