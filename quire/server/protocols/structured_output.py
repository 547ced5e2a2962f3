"""Maps errors and unenforced keywords of schemas to the request fields that hold the schemas.

Knows no protocol.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from quire.errors import InvalidRequest
from quire.server.errors import ApiError, Kind
from quire.server.inference_request import InferenceRequest
from quire.text.messages import ChatRequest
from quire.text.schema_mistakes import SchemaProblem
from quire.text.schemas import SchemaNotHeld
from quire.text.tool_grammars import ToolsNotHeld, guilty_tool, held_parameters
from quire.text.tools import Tool

T = TypeVar("T")

MAX_FREED_ALONE = 2  # retries that drop one schema; the next drops all that are not strict, since each compiles again
MAX_PATH_CHARS = 300
MAX_SCHEMA_CHARS = 512 * 1024  # of all tools with descriptions: they are processed on the event loop
# The compiler's message, without the position before it and the source excerpt after it.
_COMPILER_MESSAGE = re.compile(
    r"(?:grammar: )?(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?(?P<what>.*?)(?: \d+ \| .*)?$"
)


def with_unenforced(request: InferenceRequest, format_field: str | None) -> InferenceRequest:
    """Add the paths of all schema keywords that are not enforced.

    `format_field`: the field that constrains the answer's text. Raises ApiError for a strict tool whose schema cannot
    be enforced.
    """
    grammar = request.params.grammar
    names = [] if grammar is None else [f"{format_field}.{path}" for path in grammar.unenforced]
    tools = _callable_tools(request)
    num_chars = sum(len(str(tool.parameters)) for tool in tools)
    if num_chars > MAX_SCHEMA_CHARS:
        raise ApiError(Kind.INVALID, f"tools have schemas of {num_chars} characters, more than {MAX_SCHEMA_CHARS}")
    for tool in tools:
        names += _unenforced_of(tool)
    return replace(request, unenforced=(*request.unenforced, *names)) if names else request


def _unenforced_of(tool: Tool) -> list[str]:
    try:
        return [f"{_indexed(tool.schema_path)}.{one.path}" for one in held_parameters(tool).unenforced]
    except SchemaNotHeld as error:
        raise shape_error(tool.schema_path, error) from None


def _indexed(path: str) -> str:
    """Convert Anthropic's `tools.0.input_schema` to `tools[0].input_schema`, the form in headers."""
    return re.sub(r"^tools\.(\d+)", r"tools[\1]", path)


async def answer_in_shape(
    request: InferenceRequest, format_field: str | None, respond: Callable[[InferenceRequest], Awaitable[T]]
) -> T:
    """Call `respond`. If the schema of a tool that is not strict does not compile, retry without that schema."""
    num_tries = 0
    while True:
        try:
            return await respond(request)
        except InvalidRequest as error:
            if not str(error).startswith("grammar"):
                raise
            if isinstance(error, ToolsNotHeld):
                freed = _freed_of(request, [_callable_tools(request)[number] for number in error.loose])
                if freed is None:
                    raise ApiError(Kind.INVALID, str(error).removeprefix("grammar: "), param="tools") from None
                request = freed
                continue
            tool = _guilty_tool(request, str(error))
            is_format = tool is None and guilty_tool(str(error)) is not None
            freed = None if is_format else _freed(request, tool, is_alone=num_tries < MAX_FREED_ALONE)
            if freed is None:
                field = format_field or "tools" if tool is None else tool.schema_path
                raise shape_error(field, error) from None
            request = freed
            num_tries += 1


def shape_error(field: str, error: InvalidRequest) -> ApiError:
    if isinstance(error, SchemaProblem):
        field = error.at(field)[:MAX_PATH_CHARS]
        return ApiError(Kind.INVALID, f"{field} {error.what}", param=field)
    found = _COMPILER_MESSAGE.match(str(error))
    what = str(error) if found is None else found["what"]
    return ApiError(Kind.INVALID, f"{field}: {what}", param=field)


def _guilty_tool(request: InferenceRequest, error: str) -> Tool | None:
    """Return the tool whose schema the compiler's message names."""
    number, tools = guilty_tool(error), _callable_tools(request)
    return None if number is None or number >= len(tools) else tools[number]


def _callable_tools(request: InferenceRequest) -> Sequence[Tool]:
    chat = request.prompts[0]
    return chat.callable_tools if isinstance(chat, ChatRequest) else ()


def _freed(request: InferenceRequest, guilty: Tool | None, *, is_alone: bool) -> InferenceRequest | None:
    """Drop the schema of one tool, or of all tools that are not strict. None: there is no such tool."""
    chat = request.prompts[0]
    if not isinstance(chat, ChatRequest):
        return None
    loose = [tool for tool in chat.tools if not tool.is_strict and not tool.is_free]
    if not loose or (guilty is not None and guilty not in loose):
        return None
    return _freed_of(request, [guilty] if guilty is not None and is_alone else loose)


def _freed_of(request: InferenceRequest, freed: Sequence[Tool]) -> InferenceRequest | None:
    chat = request.prompts[0]
    if not isinstance(chat, ChatRequest) or not freed:
        return None
    tools = tuple(replace(tool, is_free=True) if tool in freed else tool for tool in chat.tools)
    names = (*request.unenforced, *(_indexed(tool.schema_path) for tool in freed))
    return replace(request, prompts=(replace(chat, tools=tools),), unenforced=names)
