"""Tools and tool calls, independent of any protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quire.errors import InvalidRequest
from quire.text.grammar import check_schema
from quire.text.schema_mistakes import SchemaProblem
from quire.text.tokenizer import check_text

MAX_TOOLS = 128
MAX_CALL_ID_CHARS = 256
MAX_ARGUMENTS_DEPTH = 64
MAX_TOOL_NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}")
_NAME_RULE = f"is not 1 to {MAX_TOOL_NAME_CHARS} of A-Z a-z 0-9 _ -"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema of the arguments; empty: none
    is_strict: bool = True  # refuse the tool unless every keyword of its schema can be enforced
    path: str = field(default="", compare=False)  # its location in the request, for errors
    schema_path: str = field(default="", compare=False)  # the location of its schema in the request
    is_free: bool = False  # the arguments are any JSON object: the schema could not be compiled


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON


class ToolMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ToolMode = ToolMode.AUTO
    name: str | None = None  # with REQUIRED: the only tool that may be called
    allowed: tuple[str, ...] = ()  # the tools that may be called; empty: all
    is_parallel: bool = True  # the answer may contain several calls


def check_tools(tools: Sequence[Tool]) -> None:
    """Check names and structure. Whether a schema can be enforced is checked when its grammar is built."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, more than {MAX_TOOLS}")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        path = tool.path or f"tools[{i}]"
        schema_path = tool.schema_path or f"{path}.parameters"
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(f"{path}.name = {tool.name!r:.160} {_NAME_RULE}")
        if tool.name in names:
            raise InvalidRequest(f"{path}.name = {tool.name!r} is another tool's name already")
        names.add(tool.name)
        kind = tool.parameters.get("type", "object")
        if kind != "object":
            raise InvalidRequest(f"{schema_path}.type = {kind!r:.80} is not object")
        check_text(tool.description, name=f"{path}.description")
        try:
            check_schema(tool.parameters)
        except SchemaProblem as error:
            raise InvalidRequest(f"{error.at(schema_path)} {error.what}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{schema_path}: {str(error).removeprefix('grammar').lstrip(': ')}") from None


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    for name in (choice.name, *choice.allowed):
        if name is not None and name not in names:
            raise InvalidRequest(f"tool_choice names {name!r:.80}, which is not among tools")
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise InvalidRequest("tool_choice asks for a call, and tools has no function that the client runs")


def check_call(call: ToolCall, path: str, arguments_name: str = "arguments") -> None:
    if not _NAME.fullmatch(call.name):
        raise InvalidRequest(f"{path}.name = {call.name!r:.160} {_NAME_RULE}")
    if not 1 <= len(call.call_id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(f"{path}.id is not 1 to {MAX_CALL_ID_CHARS} characters")
    try:
        (call.call_id + call.arguments).encode()
        arguments = json.loads(call.arguments, parse_constant=_no_number)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.{arguments_name} is not a JSON object")
    if not _is_shallow(arguments):
        raise InvalidRequest(f"{path}.{arguments_name} is nested more than {MAX_ARGUMENTS_DEPTH} deep")
    # An escaped lone surrogate is valid JSON, but not text that a template can render.
    check_text(json.dumps(arguments, ensure_ascii=False), name=f"{path}.{arguments_name}")


def _is_shallow(value: object) -> bool:
    """Whether the depth is within the limit. Works level by level, so that depth needs no stack."""
    level = [value]
    for _ in range(MAX_ARGUMENTS_DEPTH + 1):
        inner = [one for one in level if isinstance(one, dict | list)]
        level = [child for one in inner for child in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return True
    return False


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
