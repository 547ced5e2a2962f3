"""Tool calls, reasoning and formats of Qwen3.5, Gemma 4, gpt-oss and LFM2 over HTTP: random weights, real grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from quire.engine.model_text import ModelText
from tests.server.rig import Server, events, serving
from tests.text.family_templates import GEMMA4, HARMONY, LFM2, QWEN35
from tests.tiny import write_tiny_model

FAMILIES = {
    "qwen": (QWEN35, ()),
    "gemma": (
        GEMMA4,
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    ),
    "oss": (HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")),
    "lfm": (LFM2, ("<|tool_call_start|>", "<|tool_call_end|>")),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "sure": {"type": "boolean"},
        "place": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]},
    },
    "required": ["color", "count", "sure", "place"],
}
ASKED = {"role": "user", "content": "Pick one."}
TOOL = {"name": "pick", "description": "Pick a color", "parameters": SCHEMA}


class Family:
    def __init__(self, server: Server, name: str, folder: Path) -> None:
        self.server, self.name = server, name
        self.text = ModelText.open(folder)

    def first(self, text: str) -> str:
        """The id of the first token of a text, to prefer it where the model has a choice."""
        return str(self.text.tokenizer.encode_plain(text, at_start=False)[0])

    def chat(self, **fields: Any) -> Any:
        answer = self.server.post("/v1/chat/completions", self._body(fields))
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]

    def chunks(self, **fields: Any) -> list[Any]:
        answer = self.server.post("/v1/chat/completions", self._body({**fields, "stream": True}))
        return [json.loads(data)["choices"][0] for _, data in events(answer.body) if data != "[DONE]"]

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.name, "messages": [ASKED], "temperature": 0, "max_tokens": 200, **fields}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Family]]:
    root = tmp_path_factory.mktemp("families")
    folders = {
        name: write_tiny_model(root / name, template=template, special=special)
        for name, (template, special) in FAMILIES.items()
    }
    rows = "\n".join(f"  - {{model: {folder}, name: {name}, kv_memory: 8M}}" for name, folder in folders.items())
    (root / "config.yaml").write_text(f"threads: 1\nmodels:\n{rows}\n")
    with serving("--config", str(root / "config.yaml")) as server:
        made = {name: Family(server, name, folder) for name, folder in folders.items()}
        yield made
        for family in made.values():
            family.text.close()


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]


def required(family: Family) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "reasoning_effort": "none"}
    if family.name in ("oss", "lfm"):  # they may reason first, and random weights would never end
        start = " to=functions" if family.name == "oss" else "<|tool_call_start|>"
        token = family.first(start) if family.name == "oss" else str(family.text.tokenizer.added[start])
        fields["logit_bias"] = {token: 100}
    return fields


def test_a_required_call_follows_the_schema(family: Family) -> None:
    fields = required(family)
    whole = family.chat(**fields)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema_rs.validate(SCHEMA, arguments)
    chunks = family.chunks(**fields)
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "pick"
    assert json.loads("".join(part["function"].get("arguments", "") for part in parts)) == arguments
    assert len(parts) > 2  # streamed
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    later = family.chat(messages=[ASKED, whole["message"], result], tools=fields["tools"], max_tokens=2)
    assert later["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["qwen", "oss"])
def test_the_second_turn_finds_the_first_in_the_cache(families: dict[str, Family], name: str) -> None:
    """The tokens that the model generated equal those that the template renders from the conversation."""
    family = families[name]
    fields = {"model": name, "messages": [ASKED], "temperature": 0, "max_tokens": 200, **required(family)}
    first = family.server.post("/v1/chat/completions", fields).json
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"}
    later = {**fields, "messages": [ASKED, message, result], "tool_choice": "auto", "max_tokens": 1}
    second = family.server.post("/v1/chat/completions", later).json
    both = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= both - 8


def test_a_schema_that_the_format_cannot_enforce(families: dict[str, Family]) -> None:
    family = families["qwen"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": {"type": "null"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"model": "qwen", "messages": [ASKED], "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    answer = family.server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert "the arguments of 'f' cannot be enforced in this model's format" in answer.json["error"]["message"]
    tool["function"]["strict"] = False
    answer = family.server.post("/v1/chat/completions", body)
    assert answer.status == 200
    assert answer.headers["x-quire-unenforced"] == "tools[0].function.parameters"


def test_images_are_refused(family: Family) -> None:
    """Also where the model's template knows them."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = {"model": family.name, "messages": [{"role": "user", "content": [image]}]}
    answer = family.server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert "images" in answer.json["error"]["message"]


def test_structured_output_of_gpt_oss(families: dict[str, Family]) -> None:
    family = families["oss"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sun", "rain"]}, "strict": True}}
    bias = {family.first("final"): 100, str(family.text.tokenizer.added["<|message|>"]): 100}
    answer = family.chat(response_format=schema, logit_bias=bias)
    assert json.loads(answer["message"]["content"]) in ("sun", "rain")
    assert answer["finish_reason"] == "stop"
