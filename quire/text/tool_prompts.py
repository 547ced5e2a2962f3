"""Tools, calls and results in a prompt: as template variables, or as text if the template does not support tools."""

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

_INSTRUCTIONS = """You can use these tools, each with a JSON schema of its arguments:
{tools}

To use a tool, write its name and arguments like this, once for each call:
<tool_call>
{{"name": "the name", "arguments": {{"the first argument": "its value"}}}}
</tool_call>
Results come back inside <tool_response>. If no tool is needed, answer in plain words."""


def template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as a template variable, in the format of OpenAI's protocol."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or NO_PARAMETERS}
    return {"type": "function", "function": function}


def template_call(call: ToolCall, format: ToolFormat) -> dict[str, Any]:
    """A call as a template variable, with its arguments as a mapping."""
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": fitting_id(call.call_id, format), "type": "function", "function": function}


def fitting_id(call_id: str, format: ToolFormat) -> str:
    """The call id, or a hash of it with the length that the template requires."""
    if format.id_chars is None or (len(call_id) == format.id_chars and call_id.isalnum()):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    letters = []
    for _ in range(format.id_chars):
        number, digit = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[digit])
    return "".join(letters)


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat) -> list[Message]:
    """The conversation without tool messages and calls, with the tools described in the system message."""
    written: list[Message] = []
    is_results = False  # the last message was made from tool results
    for message in messages:
        if message.role is Role.TOOL:
            result = Part(f"<tool_response>\n{message.text}\n</tool_response>")
            if is_results:
                written[-1] = replace(written[-1], parts=(*written[-1].parts, Part("\n"), result))
            else:
                written.append(Message(Role.USER, (result,)))
        elif is_results and message.role is Role.USER:  # many templates require alternating turns
            written[-1] = replace(written[-1], parts=(*written[-1].parts, Part("\n\n"), *message.parts))
        elif message.tool_calls:
            written.append(replace(message, parts=(*message.parts, Part(_calls(message, format))), tool_calls=()))
        else:
            written.append(message)
        is_results = message.role is Role.TOOL
    if not tools:
        return written
    text = Part(_INSTRUCTIONS.format(tools="\n".join(json.dumps(_short(tool), ensure_ascii=False) for tool in tools)))
    if written and written[0].role is Role.SYSTEM:
        return [replace(written[0], parts=(*written[0].parts, Part("\n\n"), text)), *written[1:]]
    return [Message(Role.SYSTEM, (text,)), *written]


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
