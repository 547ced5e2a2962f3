"""Builds the grammar of a whole answer: reasoning, then text or tool calls. In llguidance's dialect of Lark.

Text is unconstrained up to the opening of a call. After it the grammar forces a valid call whose arguments follow the
tool's schema. If the request requires a call, the answer starts with one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.text.call_grammars import CallWriter, NotWritable
from quire.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind, lark_json, lark_regex, lark_text, schema_text
from quire.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from quire.text.messages import MAX_TOOLS, Tool, ToolChoice, ToolMode
from quire.text.reasoning import Opening, ReasoningFormat
from quire.text.schemas import HeldSchema, hold_schema
from quire.text.tool_formats import Syntax, ToolFormat
from quire.text.tool_prompts import NO_PARAMETERS

ControlId = Callable[[str], int | None]  # the id of the control token with this text, if there is one
_FIRST_CALL_LINE = 2  # each tool's rule has its own line of the source, so that an error identifies the tool
_WHERE = re.compile(r"at (?P<line>\d+)\(\d+\): ")
_ANY_ARGUMENTS = {"type": "object"}


class ToolsNotHeld(InvalidRequest):
    """The schemas of the tools cannot be enforced together."""

    def __init__(self, message: str, loose: Sequence[int]) -> None:
        super().__init__(f"grammar: tools: {message}")
        self.loose = loose  # indexes of tools that are not strict: without their schemas the rest can be enforced


class ToolsTooLarge(ToolsNotHeld):
    """`loose`: the largest tools that are not strict."""

    def __init__(self, num_chars: int, loose: Sequence[int]) -> None:
        rule = f"{num_chars} characters after rewriting, more than {MAX_SOURCE_CHARS}"
        super().__init__(f"their schemas are too large in total: {rule}", loose)


def answer_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    text_grammar: Grammar | None,
    thought: tuple[ReasoningFormat, Opening] | None,
    control_id: ControlId,
) -> Grammar | None:
    """The grammar of a whole answer; None: unconstrained.

    `tools`: the callable tools. `text_grammar`: the grammar of an answer without calls; None: unconstrained.
    """
    opening = Opening.CLOSED if thought is None else thought[1]
    if not tools and (text_grammar is None or opening is Opening.CLOSED):
        return text_grammar
    has_channels = thought is not None and thought[0].has_channels
    writer = (_HarmonyWriter if has_channels else _Writer)(tool_format, tools, choice, text_grammar, control_id)
    source = writer.source(None if thought is None else thought[0], opening)
    if len(source) > MAX_SOURCE_CHARS and tools:
        raise ToolsTooLarge(len(source), _largest_loose(tools, len(source) - MAX_SOURCE_CHARS))
    return Grammar(GrammarKind.LARK, source)


def held_parameters(tool: Tool) -> HeldSchema:
    """The enforced schema of the arguments. Raises SchemaNotHeld if a strict tool has an unenforceable keyword."""
    schema = {**(tool.parameters or NO_PARAMETERS), "type": "object"}
    return _held(schema_text(schema), tool.is_strict)


@functools.lru_cache(maxsize=MAX_TOOLS)
def _held(schema: str, is_strict: bool) -> HeldSchema:
    """Rewrite a schema. Cached: one request needs it several times, for the report, the grammar and each retry."""
    return hold_schema(json.loads(schema), strict=is_strict)


def _largest_loose(tools: Sequence[Tool], excess: int) -> list[int]:
    sizes = {
        i: len(lark_json(held_parameters(tool).schema)) - len(lark_json(_ANY_ARGUMENTS))
        for i, tool in enumerate(tools)
        if not tool.is_strict and not tool.is_free
    }
    chosen: list[int] = []
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        if excess > 0 and sizes[i] > 0:
            chosen.append(i)
            excess -= sizes[i]
    return chosen


def guilty_tool(error: str) -> int | None:
    """The index of the callable tool that a grammar compiler's error message refers to."""
    found = _WHERE.search(error)
    return None if found is None or int(found["line"]) < _FIRST_CALL_LINE else int(found["line"]) - _FIRST_CALL_LINE


class _Writer:
    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[Tool],
        choice: ToolChoice,
        text_grammar: Grammar | None,
        control_id: ControlId,
    ) -> None:
        self._format = format
        self._tools = tools
        self._choice = choice
        self._text_grammar = text_grammar
        self._control_id = control_id
        self._rules: list[str] = []
        self._call_writer = CallWriter(format.syntax, self._marker)

    def source(self, thought: ReasoningFormat | None, opening: Opening) -> str:
        if self._tools:
            self._write_calls()
        if self._text_grammar is not None:
            self._rules.append(f"words: {_embedded(self._text_grammar)}")
        start = self._answer("TEXT")
        if thought is not None and opening is not Opening.CLOSED:
            closing = self._marker(thought.closing)
            self._rules += [self._until("thought", "TEXT", closing), r"GAP: /\n{0,2}/"]
            start = f"thought GAP {start}"
            if opening is Opening.FREE:
                first = f"{self._marker(thought.opening)} {_literal(thought.label)}".rstrip()
                start = f"{first} {start} | {self._answer(self._not_beginning(thought.opening))}"
        return self._joined(start)

    def _joined(self, start: str) -> str:
        rules = dict.fromkeys((*self._rules, f"start: {start}", "TEXT: /(?s:.*)/"))
        return "\n".join(("%llguidance {}", *rules))

    def _answer(self, text: str) -> str:
        """The expression of the answer after the reasoning. `text`: the terminal of unconstrained text."""
        if not self._tools:
            return "words"
        opening = self._marker(self._format.opening)
        calls = f"{opening}{'?' if self._format.may_be_bare else ''} calls"
        if self._choice.mode is ToolMode.REQUIRED:
            return f"({calls})"
        if self._text_grammar is not None:
            return f"(words | {calls})"
        if self._format.may_be_bare:
            text = self._not_beginning("{")
        name = f"until_call_{text.lower()}"
        self._rules.append(self._until(name, text, opening))
        return f"({text} | {calls} | {name} calls)"

    def _write_calls(self) -> None:
        format = self._format
        self._rules += [f"call_{i}: {one}" for i, one in enumerate(self._each_call())]
        self._rules += self._call_writer.rules
        self._rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(self._tools)))}")
        is_single = format.is_single or self._choice.name is not None or not self._choice.is_parallel
        if format.is_list:
            more = "" if is_single else ' (", " call)*'
            end = f" {self._marker(format.closing)}" if format.closing else ""
            blank = "BLANK " if format.syntax is Syntax.JSON else ""  # some templates of Mistral write a space
            self._rules += [f'calls: {blank}"[" call{more} "]"{end}', "BLANK: / ?/"]
            return
        more = "" if is_single else f" (BREAK {self._marker(format.opening)} one)*"
        ends = [_literal(format.after), self._marker(format.closing)]
        if self._control_id(format.closing) is None:
            ends = [_literal(format.after + format.closing)]
        around = [_literal(format.before), "call", *ends]
        self._rules += [f"calls: one{more}", f"one: {' '.join(part for part in around if part)}", r"BREAK: /\n?/"]

    def _each_call(self) -> list[str]:
        """The expressions of the calls of each tool. Raises ToolsNotHeld."""
        written: list[str] = []
        for i, tool in enumerate(self._tools):
            arguments = _ANY_ARGUMENTS if tool.is_free else held_parameters(tool).schema
            try:
                written.append(self._one_call(tool.name, arguments))
            except NotWritable as error:
                rule = f"the arguments of {tool.name!r} cannot be enforced in this model's format of calls: {error}"
                raise ToolsNotHeld(rule, [] if tool.is_strict else [i]) from None
        return written

    def _one_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._format.syntax is not Syntax.JSON:
            return self._call_writer.call(name, arguments)
        head = json.dumps(f'{{"name": "{name}", "{self._format.arguments}": ')
        return f'{head} {lark_json(arguments)} "}}"'

    def _not_beginning(self, marker: str) -> str:
        """The terminal of text that does not start with a marker."""
        if self._control_id(marker) is not None:
            return "TEXT"
        rest = ""  # what may follow a prefix of the marker, built from its end
        for char in reversed(marker[1:]):
            rest = rf"([^{re.escape(char)}](?s:.*)" + (f"|{re.escape(char)}{rest})?" if rest else ")?")
        first = re.escape(marker[0])
        name = f"OTHER_{ord(marker[0])}"
        self._rules.append(rf"{name}: /(\s*([^{first}\s](?s:.*)" + (f"|{first}{rest}" if rest else "") + "))?/")
        return name

    def _until(self, name: str, text: str, marker: str) -> str:
        """The rule of text up to and including the first marker."""
        return f"{name}: {text} {marker}" if marker.startswith("<[") else f"{name}[lazy]: {text} {marker}"

    def _marker(self, text: str) -> str:
        """The term of a marker. A special token never occurs in text, so it is given by its id."""
        token_id = self._control_id(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"


class _HarmonyWriter(_Writer):
    """Writes answers that are messages with channels: see `quire/text/harmony.py`.

    The end of the last message is not written: it is one of the tokens that end an answer.
    """

    def source(self, thought: ReasoningFormat | None, opening: Opening) -> str:
        del thought
        channel, message = self._marker(CHANNEL), self._marker(MESSAGE)
        if self._tools:
            self._rules += [f"call_{i}: {one}" for i, one in enumerate(self._each_call())]
            self._rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(self._tools)))}")
        form = f'(" " {self._marker(CONSTRAIN)}? "json")?'
        if self._text_grammar is not None:
            self._rules.append(f"words: {_embedded(self._text_grammar)}")
        text = "TEXT" if self._text_grammar is None else "words"
        self._rules += [
            f"form: {form}",
            self._until("body", "TEXT", self._marker(END)),
            f'next: body {self._marker(START)} "assistant"',
            f'thought: {channel} "analysis" {message} next',
            f'preamble: {channel} "commentary" {message} next',
            f'final: {channel} "final" form {message} {text}',
        ]
        is_required = bool(self._tools) and self._choice.mode is ToolMode.REQUIRED
        before = "thought*" if self._text_grammar is not None and not is_required else "(thought | preamble)*"
        last = "call" if is_required else "(final | call)" if self._tools else "final"
        if opening is not Opening.CLOSED:
            return self._joined(f"{before} {last}")
        return self._joined(f"next {before} {last}" if is_required else text)  # the prompt ends inside a final message

    def _one_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        channel, recipient = self._marker(CHANNEL), f" to=functions.{name}"
        head = f'{lark_text(recipient)} {channel} "commentary" | {channel} {lark_text(f"commentary{recipient}")}'
        return f"({head}) form {self._marker(MESSAGE)} {lark_json(arguments)}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _embedded(grammar: Grammar) -> str:
    """A grammar as an expression of Lark."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return lark_json(json.loads(grammar.source))
        case GrammarKind.REGEX:
            return lark_regex(grammar.source)
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.source}\n}}"
        case GrammarKind.TOKENS:
            raise InvalidRequest("grammar: a list of tokens applies to the whole answer and excludes tool calls")
