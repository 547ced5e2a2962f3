"""Recorded requests of Claude Code and Codex, with their texts replaced.

Recorded by tests/clients/scripts/forcing.py, or a server with fixed answers. tests/clients/trim.py replaces the texts;
structure, fields and tools are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.rig import FAKE, Answer, Reply, Server, serving
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S

GOLDEN = Path(__file__).parent / "golden"
CLAUDE_CODE = sorted(path.stem for path in GOLDEN.glob("claude_code_*.json"))
CODEX = sorted(path.stem for path in GOLDEN.glob("codex_*.json"))
MODEL = "tiny"
MAX_BYTES = 100_000
SHORT = 64  # tokens: a fake model would fill the context


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL, max_model_len=32_768)
    options = (*FAKE[:2], "--num-blocks", "2000", "--served-model-name", MODEL)
    with serving(str(folder), *options) as server:
        yield server


def golden(name: str) -> dict[str, Any]:
    row = json.loads((GOLDEN / f"{name}.json").read_text())
    assert isinstance(row, dict)
    return row


def send(server: Server, name: str, **changes: Any) -> Answer:
    """Send a recorded request with its own headers to the served model."""
    row = golden(name)
    body = {**row["body"], "model": MODEL, **changes}
    return server.post(row["path"], body, headers=row["headers"], timeout_s=HANG_S)


def events_of(answer: Answer) -> list[tuple[str | None, Any]]:
    reply = Reply(answer.status, answer.headers, answer.body, True)
    assert answer.status == 200, answer.body[:500]
    assert reply.ending == "done", answer.body[-500:]
    return reply.events


def messages_stream(answer: Answer) -> list[Any]:
    """Return the events of the stream, checked against Anthropic's types and order."""
    found = events_of(answer)
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    rows = [data for name, data in found if name != "ping"]
    for row in rows:
        known.validate_python(row)
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    assert (rows[0]["type"], rows[-2]["type"], rows[-1]["type"]) == ("message_start", "message_delta", "message_stop")
    starts = [row["index"] for row in rows if row["type"] == "content_block_start"]
    stops = [row["index"] for row in rows if row["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(starts)))
    assert rows[-2]["usage"]["output_tokens"] > 0
    return rows


def responses_stream(answer: Answer) -> list[Any]:
    """Return the events of the stream, checked against OpenAI's types and numbered."""
    found = events_of(answer)
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    rows = [data for _, data in found]
    for row in rows:
        known.validate_python(row)
    assert [name for name, _ in found] == [row["type"] for row in rows]
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
    assert rows[0]["type"] == "response.created"
    assert rows[-1]["response"]["usage"]["output_tokens"] > 0
    return rows


@pytest.mark.parametrize("name", [*CLAUDE_CODE, *CODEX])
def test_no_original_text_is_kept(name: str) -> None:
    data = (GOLDEN / f"{name}.json").read_text()
    assert len(data) < MAX_BYTES
    texts = [text for key, text in _strings(golden(name)["body"]) if key in ("text", "description", "definition")]
    assert texts
    assert max(map(len, texts)) < 100


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _strings(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one, key)
    elif isinstance(value, str):
        yield key, value


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_is_answered(server: Server, name: str) -> None:
    assert golden(name)["body"]["max_tokens"] >= 32_000, "more than the context holds: it is cut to fit"
    bound = {} if name == "claude_code_all_tools" else {"max_tokens": SHORT}
    messages_stream(send(server, name, temperature=0, **bound))


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_counts_tokens(server: Server, name: str) -> None:
    body = golden(name)["body"]
    kept = {key: body[key] for key in ("messages", "system", "tools", "thinking")}
    answer = server.post("/v1/messages/count_tokens?beta=true", kept | {"model": MODEL})
    assert answer.status == 200, answer.body[:500]
    assert answer.json["input_tokens"] > 100


def test_claude_code_gets_the_call_it_asked_for(server: Server) -> None:
    tools = [tool for tool in golden("claude_code_chat")["body"]["tools"] if tool["name"] == "Bash"]
    tools[0]["input_schema"]["properties"] = {"command": {"type": "string", "enum": ["echo hello"]}}
    choice = {"type": "tool", "name": "Bash"}
    rows = messages_stream(send(server, "claude_code_chat", tools=tools, tool_choice=choice, thinking=None))
    blocks = [row["content_block"] for row in rows if row["type"] == "content_block_start"]
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == ["Bash"]
    pieces = [row["delta"].get("partial_json", "") for row in rows if row["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"command": "echo hello"}
    assert rows[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_placeholder_of_deferred_tools_is_not_shown(server: Server) -> None:
    """A tool with defer_loading is not part of the prompt until a result refers to it."""
    body = golden("claude_code_chat")["body"]
    shown = [tool for tool in body["tools"] if not tool.get("defer_loading")]
    assert len(shown) == len(body["tools"]) - 1
    counts = []
    for tools in (body["tools"], shown):
        asked = {"model": MODEL, "messages": body["messages"], "system": body["system"], "tools": tools}
        counts.append(server.post("/v1/messages/count_tokens", asked).json["input_tokens"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", CODEX)
def test_codex_is_answered(server: Server, name: str) -> None:
    answer = send(server, name, temperature=0, max_output_tokens=SHORT)
    responses_stream(answer)
    assert "web_search" in answer.headers["x-quire-ignored-fields"]


def test_codex_gets_a_call_with_its_namespace(server: Server) -> None:
    (tools,) = [tool for tool in golden("codex_chat")["body"]["tools"] if tool["type"] == "namespace"]
    tools["tools"] = [tool for tool in tools["tools"] if tool["name"] == "close_agent"]
    tools["tools"][0]["parameters"]["properties"] = {"target": {"type": "string", "enum": ["one"]}}
    rows = responses_stream(
        send(server, "codex_chat", tools=[tools], tool_choice="required", parallel_tool_calls=False)
    )
    (item,) = [row["item"] for row in rows if row["type"] == "response.output_item.done"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "close_agent", "multi_agent_v1")
    assert json.loads(item["arguments"]) == {"target": "one"}
    (added,) = [row["item"] for row in rows if row["type"] == "response.output_item.added"]
    assert (added["name"], added["namespace"]) == ("close_agent", "multi_agent_v1")


def test_codex_gets_an_answer_by_its_schema(server: Server) -> None:
    body = golden("codex_schema")["body"]
    text = body["text"]
    text["format"]["schema"]["properties"]["city"] = {"type": "string", "enum": ["Paris"]}
    rows = responses_stream(send(server, "codex_schema", text=text, tools=[]))
    (item,) = [row["item"] for row in rows if row["type"] == "response.output_item.done"]
    assert json.loads(item["content"][0]["text"]) == {"city": "Paris"}
