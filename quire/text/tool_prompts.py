"""How tools, calls and results stand in a conversation: as variables of a template, or in words where it has none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.text.messages import Message, Part, Role
from quire.text.tool_formats import ToolFormat
from quire.text.tools import Tool, ToolCall

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

_IN_WORDS = """You can use these tools, each with a JSON schema of its arguments:
{tools}

To use a tool, write its name and arguments like this, once for each call:
<tool_call>
{{"name": "the name", "arguments": {{"the first argument": "its value"}}}}
</tool_call>
Results come back inside <tool_response>. If no tool is needed, answer in plain words."""


def described(tool: Tool) -> dict[str, Any]:
    """As templates know tools, which is as OpenAI's protocol writes them."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or NO_PARAMETERS}
    return {"type": "function", "function": function}


def made_call(call: ToolCall, format: ToolFormat) -> dict[str, Any]:
    """As templates know calls: the arguments are a mapping."""
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": fitting_id(call.call_id, format), "type": "function", "function": function}


def fitting_id(call_id: str, format: ToolFormat) -> str:
    """A template that insists on a length gets an id of that length, the same for the same id."""
    if format.id_chars is None or (len(call_id) == format.id_chars and call_id.isalnum()):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    letters = []
    for _ in range(format.id_chars):
        number, digit = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[digit])
    return "".join(letters)


def in_words(messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat) -> list[Message]:
    """The same conversation of system, user and assistant alone."""
    told: list[Message] = []
    is_told_results = False  # the last message is one we made of results
    for message in messages:
        if message.role is Role.TOOL:
            result = Part(f"<tool_response>\n{message.text}\n</tool_response>")
            if is_told_results:
                told[-1] = replace(told[-1], parts=(*told[-1].parts, Part("\n"), result))
            else:
                told.append(Message(Role.USER, (result,)))
        elif is_told_results and message.role is Role.USER:  # many templates want turns to alternate
            told[-1] = replace(told[-1], parts=(*told[-1].parts, Part("\n\n"), *message.parts))
        elif message.tool_calls:
            told.append(replace(message, parts=(*message.parts, Part(_calls(message, format))), tool_calls=()))
        else:
            told.append(message)
        is_told_results = message.role is Role.TOOL
    if not tools:
        return told
    text = Part(_IN_WORDS.format(tools="\n".join(json.dumps(_short(tool), ensure_ascii=False) for tool in tools)))
    if told and told[0].role is Role.SYSTEM:
        return [replace(told[0], parts=(*told[0].parts, Part("\n\n"), text)), *told[1:]]
    return [Message(Role.SYSTEM, (text,)), *told]


def _short(tool: Tool) -> dict[str, Any]:
    about = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **about, "parameters": tool.parameters or NO_PARAMETERS}


def _calls(message: Message, format: ToolFormat) -> str:
    calls = [
        format.opening
        + format.before
        + json.dumps({"name": call.name, format.arguments: json.loads(call.arguments)}, ensure_ascii=False)
        + format.after
        + format.closing
        for call in message.tool_calls
    ]
    return ("\n" if message.text else "") + "\n".join(calls)
