"""Finds the format of a model's tool calls: its template renders a call, and the format's parser must read it back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.text.answers import AnswerParser, CallArguments, CallStart
from quire.text.harmony import CHANNEL, HarmonyParser
from quire.text.messages import Tool
from quire.text.rendering import TemplateFailure
from quire.text.tool_formats import PROMPTED, TOOL_FORMATS, CallParser, Syntax, ToolFormat
from quire.text.tool_prompts import template_tool

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
    return has_markers and names == [_TOOL.name] and _decoded(arguments) == _ARGUMENTS


def _decoded(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None
