"""Builds the grammar of a whole answer: reasoning, then text or tool calls. In llguidance's dialect of Lark.

Text is unconstrained up to the opening of a call. After it the grammar forces a valid call whose arguments follow the
tool's schema. If the request requires a call, the answer starts with one.

`CallWriter` writes the grammar of one call that is not JSON: Qwen's XML, Gemma 4's and LFM2's literals. In these
formats strings are not JSON strings, and the arguments are not one JSON object. A schema that they cannot enforce
raises NotWritable.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.text.chat_template import NO_PARAMETERS, python_value
from quire.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind, lark_json, lark_regex, lark_text, schema_text
from quire.text.messages import MAX_TOOLS, Tool, ToolChoice, ToolMode
from quire.text.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, START, Opening, ReasoningFormat
from quire.text.schemas import KINDS, HeldSchema, hold_schema
from quire.text.tool_formats import (
    END_OF_VALUE,
    FUNCTION,
    GEMMA_QUOTE,
    PARAMETER,
    Known,
    Syntax,
    ToolFormat,
    value_kinds,
)

ControlId = Callable[[str], int | None]  # the id of the control token with this text, if there is one
_FIRST_CALL_LINE = 2  # each tool's rule has its own line of the source, so that an error identifies the tool
_WHERE = re.compile(r"at (?P<line>\d+)\(\d+\): ")
_ANY_ARGUMENTS = {"type": "object"}


class ToolsNotHeld(InvalidRequest):
    """The schemas of the tools cannot be enforced together."""

    def __init__(self, message: str, loose: Sequence[int]) -> None:
        super().__init__(f"grammar: tools: {message}")
        self.loose = loose  # indexes of tools that are not strict: without their schemas the rest can be enforced


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
        rule = f"{len(source)} characters after rewriting, more than {MAX_SOURCE_CHARS}"
        loose = _largest_loose(tools, len(source) - MAX_SOURCE_CHARS)
        raise ToolsNotHeld(f"their schemas are too large in total: {rule}", loose)
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
        self._write_each_call()
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

    def _write_each_call(self) -> None:
        """Write the calls of each tool, and the choice between them. Raises ToolsNotHeld."""
        for i, tool in enumerate(self._tools):
            arguments = _ANY_ARGUMENTS if tool.is_free else held_parameters(tool).schema
            try:
                self._rules.append(f"call_{i}: {self._one_call(tool.name, arguments)}")
            except NotWritable as error:
                rule = f"the arguments of {tool.name!r} cannot be enforced in this model's format of calls: {error}"
                raise ToolsNotHeld(rule, [] if tool.is_strict else [i]) from None
        self._rules += self._call_writer.rules
        self._rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(self._tools)))}")

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
    """Writes answers that are messages with channels: see `quire/text/reasoning.py`.

    The end of the last message is not written: it is one of the tokens that end an answer.
    """

    def source(self, thought: ReasoningFormat | None, opening: Opening) -> str:
        del thought
        channel, message = self._marker(CHANNEL), self._marker(MESSAGE)
        if self._tools:
            self._write_each_call()
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


MAX_SCHEMAS = 10_000  # of one call: references may expand to many
Schema = Any  # a held schema: a boolean or a dict
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs"}
_ARRAY_KEYS = {"type", "items", "minItems", "maxItems"}
_TEXT_KEYS = {"type", "pattern", "minLength", "maxLength", "allOf", "$ref", "anyOf"}
# The only type of values to which a keyword applies.
_KIND_OF = {
    **dict.fromkeys(("pattern", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), "object"),
}
_REFERENCE = re.compile(r'"#/\$defs/([^"]+)"')
_LAST_LINE = f"\n{END_OF_VALUE}\n"
_NAME_TEXT = r"/[A-Za-z0-9_.-]+/"


class NotWritable(Exception):
    """The format cannot enforce a part of the schema."""


class CallWriter:
    """Writes calls of one format. `rules`: further rules that the returned expressions need."""

    def __init__(self, syntax: Syntax, marker: Callable[[str], str]) -> None:
        """`marker`: returns the grammar's term for a marker, which may be a special token."""
        self._syntax = syntax
        self._quote = marker(GEMMA_QUOTE)
        self._root: Mapping[str, Any] = {}
        self._defined: dict[str, str] = {}  # rules of the current schema's definitions, by name
        self._texts: dict[str, str] = {}  # rules of text, by its parts
        self._known: Known = {}
        self._num_left = 0  # schemas that the current call may still expand to
        self.rules: dict[str, None] = {}  # ordered, without duplicates
        self._num_rules = 0

    def call(self, name: str, schema: Schema) -> str:
        """The expression of a call. `schema`: of the arguments, an object. Raises NotWritable."""
        self._root, self._defined, self._known, self._num_left = schema, {}, {}, MAX_SCHEMAS
        try:
            return self._call(name, schema)
        except RecursionError:
            raise NotWritable("references that nest too deeply") from None

    def _call(self, name: str, schema: Schema) -> str:
        match self._syntax:
            case Syntax.XML:
                members = [self._xml_member(key, one, is_due) for key, one, is_due in self._members(schema)]
                others = [f"{one}*" for one in self._xml_others(schema)]
                return " ".join((lark_text(f"{FUNCTION}{name}>\n"), *members, *others, '"</function>"'))
            case Syntax.GEMMA:
                return f"{lark_text(f'call:{name}')} {self._gemma_object(schema)}"
            case _:
                pairs = [
                    (f"{lark_text(f'{key}=')} {self._python(one)}", due) for key, one, due in self._members(schema)
                ]
                others = [f'{_NAME_TEXT} "=" {self._python(other)}' for other in self._others(schema)]
                return f'{lark_text(f"{name}(")} {self._separated(pairs, others, ", ")} ")"'

    # Objects

    def _members(self, schema: Schema) -> list[tuple[str, Schema, bool]]:
        """The named properties: name, schema, and whether the property is required."""
        if not isinstance(schema, Mapping) or schema.keys() - _OBJECT_KEYS:
            raise NotWritable(f"{sorted(schema.keys() - _OBJECT_KEYS)[0] if schema else schema} of the arguments")
        required = set(schema.get("required", ()))
        properties: Mapping[str, Schema] = schema.get("properties", {})
        if missing := required - properties.keys():
            if schema.get("additionalProperties") is False:
                raise NotWritable(f"required: {sorted(missing)[0]!r} is not among the properties")
            properties = {**properties, **dict.fromkeys(sorted(missing), schema.get("additionalProperties", True))}
        for name in properties:
            if not re.fullmatch(r"[^\s<>{}\[\]():=,\"']+", name):
                raise NotWritable(f"the name {name!r:.80}")
        return [(name, one, name in required) for name, one in properties.items() if one is not False]

    def _others(self, schema: Schema) -> list[Schema]:
        """The schema of properties that are not named, if there may be any."""
        others = schema.get("additionalProperties", True)
        return [] if others is False else [others]

    def _separated(self, members: Sequence[tuple[str, bool]], others: Sequence[str], separator: str) -> str:
        """Members in this order, then any number of others. Each member: its expression, and whether it is required."""
        between = lark_text(separator)
        rest = " ".join(f"({between} {one})*" for one in others)
        first = " ".join(f"({one} ({between} {one})*)?" for one in others)
        for expression, is_due in reversed(members):
            member = self._rule(expression)
            first_here = f"{member} {rest}".rstrip()
            first = first_here if is_due or not first else f"({first_here} | {self._rule(first)})"
            if not is_due and first == first_here:
                first = f"({first_here})?"
            after = f"({between} {member})" + ("" if is_due else "?")
            rest = self._rule(f"{after} {rest}".rstrip())
        return first

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"v{self._num_rules}"
        self._num_rules += 1
        self.rules[f"{name}{attributes}: {expression}"] = None
        return name

    # Qwen's XML

    def _xml_member(self, key: str, schema: Schema, is_due: bool) -> str:
        member = f"{lark_text(f'{PARAMETER}{key}>' + chr(10))} {self._xml_value(schema)}"
        return member if is_due else f"({member})?"

    def _xml_others(self, schema: Schema) -> Iterable[str]:
        for other in self._others(schema):
            yield f'({lark_text(PARAMETER)} {_NAME_TEXT} ">\\n" {self._xml_value(other)})'

    def _xml_value(self, schema: Schema) -> str:
        """A value and its closing tag."""
        schema = self._resolved(schema)
        if _listed(schema) is not None:
            texts = [
                one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in _listed(schema) or ()
            ]
            if any(END_OF_VALUE in text for text in texts) or not texts:
                raise NotWritable("a value that contains the closing tag")
            return f"({' | '.join(lark_text(text + _LAST_LINE) for text in texts)})"
        kinds = self._kinds(schema)
        if kinds == {"boolean"}:
            return f'("true" | "false" | "True" | "False") {lark_text(_LAST_LINE)}'
        if "string" not in kinds:
            return f"{self._json(schema)} {lark_text(_LAST_LINE)}"
        if kinds == {"string"}:
            return self._xml_text(self._text_parts(schema))
        options = self._options(schema)
        if options is None or not all(
            self._text_parts(one) for one in options if "string" in self._kinds(self._resolved(one))
        ):
            return self._xml_text([])
        return f"({' | '.join(self._xml_value(one) for one in options)})"

    def _xml_text(self, parts: Sequence[str]) -> str:
        if not parts:
            self.rules[f"any_value[lazy]: TEXT {lark_text(END_OF_VALUE)}"] = None
            return r'any_value "\n"'
        self.rules[r"UNCLOSED: ~/(?s:.*)<\/parameter>(?s:.*)/"] = None
        return self._text_rule((*parts, "UNCLOSED"), lark_text(_LAST_LINE), "[lazy]")

    def _text_rule(self, parts: Sequence[str], end: str, attributes: str = "") -> str:
        """The rule of text that matches all parts, and what follows it. Equal parts share a rule."""
        key = " & ".join(parts)
        if key not in self._texts:
            name = f"VALUE_{len(self._texts)}"
            self.rules[f"{name}: {key}"] = None
            self._texts[key] = self._rule(f"{name} {end}", attributes)
        return self._texts[key]

    # Gemma 4

    def _gemma(self, schema: Schema) -> str:
        if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
            return self._defined_rule(schema["$ref"])
        if schema is True or schema == {}:
            return self._gemma_any()
        if not isinstance(schema, Mapping):
            raise NotWritable(f"the schema {schema!r:.80}")
        if (values := _listed(schema)) is not None:
            return f"({' | '.join(self._gemma_constant(value) for value in values)})"
        kinds = self._kinds(schema)
        if kinds == {"string"}:
            parts = self._text_parts(schema)
            return f"{self._quote} {self._text_rule(parts, self._quote) if parts else self._quoted_rest()}"
        if kinds == {"object"}:
            return self._gemma_object(schema)
        if kinds == {"array"}:
            return self._gemma_list(schema)
        if not kinds & {"string", "array", "object"}:
            return self._json(schema)
        options = self._options(schema)
        if options is None:
            raise NotWritable(", ".join(sorted(schema)))
        return f"({' | '.join(self._gemma(one) for one in options)})"

    def _gemma_object(self, schema: Schema) -> str:
        members = sorted(self._members(schema), key=lambda member: member[0].lower())  # as templates write them
        written = [(f"{lark_text(f'{key}:')} {self._gemma(one)}", is_due) for key, one, is_due in members]
        others = [f'{_NAME_TEXT} ":" {self._gemma(other)}' for other in self._others(schema)]
        return f'"{{" {self._separated(written, others, ",")} "}}"'

    def _gemma_list(self, schema: Schema) -> str:
        if schema.keys() - _ARRAY_KEYS:
            raise NotWritable(sorted(schema.keys() - _ARRAY_KEYS)[0])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._rule(self._gemma(schema.get("items", True)))
        more = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'

    def _quoted_rest(self) -> str:
        attribute = "" if self._quote.startswith("<[") else "[lazy]"
        self.rules[f"gemma_text{attribute}: TEXT {self._quote}"] = None
        return "gemma_text"

    def _gemma_any(self) -> str:
        text = f"{self._quote} {self._quoted_rest()}"
        scalar = self._json({"type": ["number", "boolean", "null"]})
        self.rules[f"gemma_any: {text} | {scalar} | gemma_list | gemma_object"] = None
        self.rules['gemma_list: "[" (gemma_any ("," gemma_any)*)? "]"'] = None
        self.rules['gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"'] = None
        self.rules[f'gemma_pair: {_NAME_TEXT} ":" gemma_any'] = None
        return "gemma_any"

    def _gemma_constant(self, value: object) -> str:
        match value:
            case str():
                return f"{self._quote} {lark_text(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
            case list() | dict():
                raise NotWritable("a constant list or object")
        return lark_text(json.dumps(value, ensure_ascii=False))

    def _defined_rule(self, reference: str) -> str:
        """The rule of a definition. Definitions may refer to themselves."""
        if reference not in self._defined:
            name = self._defined[reference] = f"d{self._num_rules}"
            self._num_rules += 1
            self.rules[f"{name}: {self._gemma(self._target(reference))}"] = None
        return self._defined[reference]

    # LFM2's Python

    def _python(self, schema: Schema) -> str:
        schema = self._resolved(schema)
        if (values := _listed(schema)) is not None:
            return f"({' | '.join(lark_text(python_value(value)) for value in values)})"
        kinds = self._kinds(schema)
        if kinds == {"boolean"}:
            return '("True" | "False")'
        if kinds == {"null"}:
            return '"None"'
        options = self._options(schema) if len(kinds) < len(KINDS) else None
        return self._json(schema) if options is None else f"({' | '.join(self._python(one) for one in options)})"

    # Schemas

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise NotWritable("a schema that is too large")

    def _kinds(self, schema: Schema) -> frozenset[str]:
        self._count()
        return value_kinds(schema, self._root, self._known)

    def _target(self, reference: str) -> Schema:
        return self._root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), True)

    def _resolved(self, schema: Schema) -> Schema:
        """The schema, or the target of one that is only a reference."""
        for _ in range(8):
            if not isinstance(schema, Mapping) or schema.keys() != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def _options(self, schema: Schema) -> list[Schema] | None:
        """The alternatives of a schema, each of fewer kinds; None: it is not a plain choice."""
        if not isinstance(schema, Mapping):
            return None
        if schema.keys() <= {"anyOf", "type"} and "anyOf" in schema:
            return list(schema["anyOf"])
        parts = schema.get("allOf")
        if schema.keys() <= {"allOf", "type"} and isinstance(parts, list) and len(parts) == 1:
            return [parts[0]]
        if isinstance(types := schema.get("type"), list) and len(types) > 1:
            return [
                {**{key: value for key, value in schema.items() if _KIND_OF.get(key, one) == one}, "type": one}
                for one in types
            ]
        return None

    def _text_parts(self, schema: Schema) -> list[str]:
        """The expressions that a string must all match. Empty: any text."""
        self._count()
        schema = self._resolved(schema)
        if schema is True:
            return []
        if not isinstance(schema, Mapping) or schema.keys() - _TEXT_KEYS:
            raise NotWritable(", ".join(sorted(schema)) if isinstance(schema, Mapping) else str(schema))
        parts: list[str] = []
        if "pattern" in schema:
            parts.append(lark_regex(schema["pattern"][1:-1]))
        if "minLength" in schema or "maxLength" in schema:
            parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        for part in (*schema.get("allOf", ()), *([{"$ref": schema["$ref"]}] if "$ref" in schema else ())):
            parts += self._text_parts(part)
        if "anyOf" in schema:
            options = [self._text_parts(option) for option in schema["anyOf"]]
            if any(len(option) != 1 for option in options):
                raise NotWritable("anyOf of strings")
            parts.append(f"({' | '.join(option[0] for option in options)})")
        return parts

    def _json(self, schema: Schema) -> str:
        """The term of JSON, with the definitions it needs."""
        schema = schema if isinstance(schema, Mapping) else {} if schema else {"enum": []}
        needed: dict[str, Schema] = {}
        new = [schema]
        while new:
            names = {name for one in new for name in _REFERENCE.findall(schema_text({"": one}))} - needed.keys()
            new = [self._root.get("$defs", {}).get(name, True) for name in sorted(names)]
            needed |= dict(zip(sorted(names), new, strict=True))
        return lark_json({**schema, "$defs": needed} if needed else schema)


def _listed(schema: Schema) -> list[object] | None:
    """The values of a schema that is only an enum or a const."""
    if not isinstance(schema, Mapping) or schema.keys() - {"type", "enum", "const"}:
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list) and values else None
