"""Parses the tools of a body of /v1/responses: functions, custom tools and namespaces. Pure.

The model calls every tool as a function with a JSON object. A tool in a namespace has one name made of both names. A
custom tool takes a text, which is the argument `input`. The client sees its own names and forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.server.protocols.openai.parsing import forced_tool
from quire.server.protocols.openai.responses_types import FunctionTool, ResponsesRequest, ToolChoiceBody, ToolParam
from quire.server.protocols.support import unsupported
from quire.text.messages import MAX_TOOLS, Tool, ToolChoice, ToolMode

INPUT = "input"  # the argument that holds a custom tool's text
CUSTOM: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole text."}},
    "required": [INPUT],
}
_RUN_BY_CLIENT = ("function", "custom")


class ClientTool(NamedTuple):
    """A tool under the client's names."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseTools(NamedTuple):
    tools: tuple[Tool, ...]
    choice: ToolChoice
    ignored: tuple[str, ...]  # tools that OpenAI's server would run
    unenforced: tuple[str, ...]  # formats of custom tools


def qualified_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def parse_tools(body: ResponsesRequest) -> ResponseTools:
    rows = list(_rows(body.tools or ()))
    if len(rows) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(rows)} entries, more than {MAX_TOOLS}")
    tools = tuple(_tool(row) for row in rows if row.tool.type in _RUN_BY_CLIENT)
    ignored = tuple(f"{row.path}.{row.tool.type}" for row in rows if row.tool.type not in _RUN_BY_CLIENT)
    unenforced = tuple(f"{row.path}.format" for row in rows if row.tool.type == "custom" and _is_grammar(row.tool))
    return ResponseTools(tools, _choice(body), ignored, unenforced)


def client_tools(body: ResponsesRequest) -> dict[str, ClientTool]:
    """The client's tools by the name that the model uses."""
    return {
        qualified_name(row.namespace, row.tool.name): ClientTool(
            row.tool.name, row.namespace, row.tool.type == "custom"
        )
        for row in _rows(body.tools or ())
        if row.tool.name is not None
    }


class _Row(NamedTuple):
    tool: FunctionTool
    path: str
    namespace: str | None = None
    about: str = ""  # the namespace's description, added to its first tool


def _rows(given: Iterable[ToolParam]) -> Iterator[_Row]:
    """Yield every tool, including those in namespaces."""
    for i, tool in enumerate(given):
        if tool.type != "namespace":
            yield _Row(tool, f"tools[{i}]")
            continue
        namespace = _given(tool.name, f"tools[{i}].name")
        for j, inner in enumerate(tool.tools or ()):
            about = tool.description or "" if j == 0 else ""
            yield _Row(inner, f"tools[{i}].tools[{j}]", namespace, about)


def _tool(row: _Row) -> Tool:
    tool, path = row.tool, row.path
    name = qualified_name(row.namespace, _given(tool.name, f"{path}.name"))
    description = "\n".join(text for text in (row.about, tool.description) if text)
    parameters = CUSTOM if tool.type == "custom" else tool.parameters or {}
    return Tool(name, description, parameters, bool(tool.strict), path, f"{path}.parameters")


def _is_grammar(tool: FunctionTool) -> bool:
    return isinstance(tool.format, dict) and tool.format.get("type") != "text"


def _choice(body: ResponsesRequest) -> ToolChoice:
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case str(mode):
            return ToolChoice(_mode("tool_choice", mode, ToolMode), is_parallel=is_parallel)
        case ToolChoiceBody(type="function" | "custom", name=name, namespace=namespace):
            name = _given(name, "tool_choice.name")
            if namespace is None:
                _check_namespace(body, name)
            return ToolChoice(ToolMode.REQUIRED, qualified_name(namespace, name), is_parallel=is_parallel)
        case ToolChoiceBody(type="allowed_tools") as choice:
            mode = _mode("tool_choice.mode", choice.mode, (ToolMode.AUTO, ToolMode.REQUIRED))
            functions = [(i, tool) for i, tool in enumerate(choice.tools or ()) if tool.type in _RUN_BY_CLIENT]
            if not functions:
                raise InvalidRequest("tool_choice.tools is missing or has no tool that the client runs")
            names = tuple(
                qualified_name(tool.namespace, _given(tool.name, f"tool_choice.tools[{i}].name"))
                for i, tool in functions
            )
            return ToolChoice(mode, allowed=names, is_parallel=is_parallel)
        case ToolChoiceBody(type=kind):
            raise unsupported("tool_choice.type", forced_tool(kind), is_value=True)


def _check_namespace(body: ResponsesRequest, name: str) -> None:
    """Raises InvalidRequest if only namespaces have a tool of this name."""
    rows = [row for row in _rows(body.tools or ()) if row.tool.name == name]
    if rows and all(row.namespace is not None for row in rows):
        where = f'"namespace": "{rows[0].namespace}"'
        raise InvalidRequest(f"tool_choice.name = {name!r:.80} is in a namespace: add {where} to tool_choice")


def _mode(path: str, mode: str | None, modes: Iterable[ToolMode]) -> ToolMode:
    if mode not in list(modes):
        raise InvalidRequest(f"{path} = {mode!r:.80} is not one of {', '.join(modes)}")
    return ToolMode(mode)


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is missing")
    return value
