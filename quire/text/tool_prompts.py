"""Tools, calls and results in a prompt: as template variables, or as text if the template does not support tools.

The format of a model's tool calls is found by a trial: its template renders a call, and the format's parser must read
it back.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.errors import TemplateFailure
from quire.text.harmony import CHANNEL, HarmonyParser
from quire.text.messages import Message, Part, Role, Tool, ToolCall
from quire.text.stream import AnswerParser, CallArguments, CallStart
from quire.text.tool_formats import PROMPTED, TOOL_FORMATS, CallParser, Syntax, ToolFormat, decoded_json

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


def python_call(function: Mapping[str, Any]) -> str:
    """A call as LFM2 writes it, for templates that do not render earlier calls. `function`: name and arguments."""
    arguments = [f"{name}={_python(value)}" for name, value in function["arguments"].items()]
    return f"{function['name']}({', '.join(arguments)})"


def _python(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The conversation with at most one call in a message, each followed by its result: some templates need this."""
    split: list[Message] = []
    waiting: list[Message] = []  # the other calls of the last message with calls
    for message in messages:
        if message.role is Role.TOOL:
            at = next((i for i, one in enumerate(waiting) if _answers(message, one)), None)
            if at is not None:
                split.append(waiting.pop(at))
        else:
            split += waiting
            waiting = []
        if len(message.tool_calls) > 1:
            first, *others = message.tool_calls
            split.append(replace(message, tool_calls=(first,)))
            waiting = [Message(Role.ASSISTANT, (), tool_calls=(call,)) for call in others]
        else:
            split.append(message)
    return [*split, *waiting]


def _answers(result: Message, call: Message) -> bool:
    return result.tool_call_id == call.tool_calls[0].call_id


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


RenderTrial = Callable[[Mapping[str, Any]], str]  # template variables to text; raises TemplateFailure

MAX_ANSWER_CHARS = 16_384  # of a trial: a template may write megabytes, which every parser would read
_USES_TOOLS = re.compile(r"\{%[^%]*\btools\b")  # only in statements: in literal text it may be an ordinary word
_ARGUMENTS = {"trial_text": "trial value", "trial_number": 3}
_PROPERTIES = {
    "trial_text": {"type": "string", "description": "A text."},
    "trial_number": {"type": "integer", "description": "A number."},
}
_TOOL = Tool("trial_tool", "Trial.", {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)})
_QUESTION = "trial question"
_ID = "trialcall"  # of nine characters, which the templates of Mistral require
_ASKED = {"role": "user", "content": _QUESTION}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _TOOL.name, "arguments": _ARGUMENTS}}],
}
_RESULT = {"role": "tool", "content": "trial result", "tool_call_id": _ID, "name": _TOOL.name}


def detect_tool_format(source: str | None, render: RenderTrial) -> ToolFormat:
    """The format whose parser reads a call as the template writes it; `PROMPTED` if there is none.

    A template that does not write earlier calls shows no format. Such a template of LFM2 is known by its source,
    because quire can write the calls of this format itself.

    Raises TemplateError if the trial is inconclusive because the rendering process ended or took too long.
    """
    if source is None or not _USES_TOOLS.search(source):
        return PROMPTED
    if "tool_calls" not in source:
        return next((row for row in TOOL_FORMATS if any(sign in source for sign in row.signs)), PROMPTED)
    answer = _rendered_call(render)
    return next((row for row in TOOL_FORMATS if row.is_in_template and _reads(row, answer)), PROMPTED)


def _rendered_call(render: RenderTrial) -> str:
    """A call as the template writes it, with the text around it in that turn. Empty: it refuses or omits calls."""
    tools = [template_tool(_TOOL)]

    def rendered(*messages: Mapping[str, Any], is_open: bool = False) -> str:
        try:
            return render({"messages": list(messages), "tools": tools, "add_generation_prompt": is_open})
        except TemplateFailure:
            return ""

    prompt = rendered(_ASKED, is_open=True)
    text = rendered(_ASKED, _CALLED) or rendered(_ASKED, _CALLED, _RESULT)
    is_continued = bool(prompt) and text.startswith(prompt)
    answer = text.removeprefix(prompt) if is_continued else text.rpartition(_QUESTION)[2]
    return answer[:MAX_ANSWER_CHARS]


def _reads(format: ToolFormat, answer: str) -> bool:
    """Whether the format's parser finds exactly the trial call, between the format's own markers."""
    parser: AnswerParser = CallParser(format, (_TOOL,))
    markers = [format.closing] if format.may_be_bare else [format.opening, format.closing]
    if format.syntax is Syntax.HARMONY:
        parser, markers = HarmonyParser((_TOOL.name,)), [CHANNEL]
    pieces = [*parser.push(answer), *parser.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    has_markers = all(marker in answer for marker in markers)
    return has_markers and names == [_TOOL.name] and decoded_json(arguments) == _ARGUMENTS
