"""Chat messages, tools, and the pieces of an answer (reasoning, text, tool calls), independent of any protocol.

`ChatRequest` is validated at construction, so every instance can be rendered.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from quire.errors import InvalidRequest
from quire.text.grammar import check_schema, depth_of, refuse_constant
from quire.text.schemas import SchemaProblem
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
        arguments = json.loads(call.arguments, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.{arguments_name} is not a JSON object")
    if depth_of(arguments) > MAX_ARGUMENTS_DEPTH:
        raise InvalidRequest(f"{path}.{arguments_name} is nested more than {MAX_ARGUMENTS_DEPTH} deep")
    # An escaped lone surrogate is valid JSON, but not text that a template can render.
    check_text(json.dumps(arguments, ensure_ascii=False), name=f"{path}.{arguments_name}")


MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_NAME_CHARS = 256
MAX_TEMPLATE_ARGS = 32
RESERVED_ARGS = frozenset(("messages", "tools", "documents", "add_generation_prompt", "chat_template"))


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Part:
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None
    thought: str = ""  # an assistant's reasoning, if it was separated from the text
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str | None = None  # tool only: the call that this message answers

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer, validated at construction."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True  # end the prompt with the start of an assistant message
    continue_last: bool = False  # instead: continue the last message, an assistant's
    template_args: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    wants_thought: bool | None = None  # whether to reason first, if the template has a switch; None: its default
    reasoning_effort: str | None = None  # for templates that use this variable

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice.mode is ToolMode.NONE:
            return ()
        names = self.tool_choice.allowed
        if self.tool_choice.name is not None:
            names = (self.tool_choice.name,)
        return tuple(tool for tool in self.tools if not names or tool.name in names)

    @property
    def num_chars(self) -> int:
        """Total length of the texts, to refuse a request that is too long before rendering."""
        tools = sum(len(tool.description) + len(str(tool.parameters)) for tool in self.tools)
        return tools + sum(
            len(message.text) + len(message.thought) + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )

    def __post_init__(self) -> None:
        check_messages(self.messages)
        for i, message in enumerate(self.messages):
            check_parts(message.parts, f"messages[{i}].content")
            _check_message(message, f"messages[{i}]")
        if self.continue_last and self.add_generation_prompt:
            raise InvalidRequest("continue_last and add_generation_prompt exclude each other")
        if self.continue_last and self.messages[-1].role != Role.ASSISTANT:
            last = len(self.messages) - 1
            raise InvalidRequest(
                f"continue_last: messages[{last}].role = {self.messages[last].role.value!r}, not assistant"
            )
        _check_args(self.template_args)
        check_tools(self.tools)
        check_choice(self.tool_choice, self.tools)


def check_messages(messages: Sequence[object]) -> None:
    """Check the number of messages, for callers that process each message before building a ChatRequest."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries, not 1 to {MAX_MESSAGES}")


def check_parts(parts: Sequence[object], path: str) -> None:
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"{path} has {len(parts)} parts, more than {MAX_PARTS}")


def _check_message(message: Message, path: str) -> None:
    for i, part in enumerate(message.parts):
        check_text(part.text, name=f"{path}.parts[{i}].text")
    if message.name is not None:
        if not isinstance(message.name, str):
            raise InvalidRequest(f"{path}.name is a {type(message.name).__name__}, not a string")
        if not 1 <= len(message.name) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"{path}.name has {len(message.name)} characters, not 1 to {MAX_NAME_CHARS}")
        check_text(message.name, name=f"{path}.name")
    check_text(message.thought, name=f"{path}.thought")
    if message.tool_call_id is not None:
        check_text(message.tool_call_id, name=f"{path}.tool_call_id")
    if len(message.tool_calls) > MAX_PARTS:
        raise InvalidRequest(f"{path}.tool_calls has {len(message.tool_calls)} entries, more than {MAX_PARTS}")
    for i, call in enumerate(message.tool_calls):
        check_call(call, f"{path}.tool_calls[{i}]")


def _check_args(args: Mapping[str, str | int | float | bool]) -> None:
    if len(args) > MAX_TEMPLATE_ARGS:
        raise InvalidRequest(f"template_args has {len(args)} entries, more than {MAX_TEMPLATE_ARGS}")
    for name, value in args.items():
        # Names such as bos_token would allow control tokens.
        if not name.isidentifier() or name in RESERVED_ARGS or name.endswith("_token"):
            raise InvalidRequest(f"template_args[{name[:40]!r}] cannot be set by a request")
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"template_args[{name!r}] is a {type(value).__name__}, not a scalar")
        if isinstance(value, str):
            check_text(value, max_chars=4096, name=f"template_args[{name!r}]")
        elif isinstance(value, float) and (value != value or abs(value) == float("inf")):
            raise InvalidRequest(f"template_args[{name!r}] = {value} is not finite")
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise InvalidRequest(f"template_args[{name!r}] is an int of more than 64 bits")


class Thought(NamedTuple):
    """The next part of the reasoning."""

    text: str


class Words(NamedTuple):
    """The next part of the answer's text, outside of reasoning and tool calls."""

    text: str


class CallStart(NamedTuple):
    number: int  # index of the call in this answer
    call_id: str
    name: str


class CallArguments(NamedTuple):
    number: int
    text: str  # the next part of the arguments' JSON


Piece = Thought | Words | CallStart | CallArguments


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the start of a marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class AnswerParser(Protocol):
    """Splits the text of one sample into pieces.

    Returned pieces are final. Text that may be the start of a marker is held back.
    """

    @property
    def is_over(self) -> bool:
        """Whether the turn has ended. Further text is ignored."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Flush at the end of the answer. Text that is not a valid call is returned as Words; this never fails.

        `is_cut`: a length limit ended the answer. The beginning of a call is then dropped: it is not text.
        """


class PlainAnswer:
    """Parser for answers without reasoning or tool calls."""

    is_over = False

    def push(self, text: str) -> list[Piece]:
        return [Words(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        del is_cut
        return []
