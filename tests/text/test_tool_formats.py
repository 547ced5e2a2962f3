"""Tool call formats: detection, rendering, parsing and grammars. Transcripts are split at every position."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest, TemplateError
from quire.text.chat_template import ChatTemplate, fitting_id
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar, regex_grammar
from quire.text.messages import (
    AnswerParser,
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Piece,
    Role,
    Thought,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Words,
)
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser, find_opening, find_reasoning
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import PROMPTED, TOOL_FORMATS, CallParser, named_tool_format
from quire.text.tool_grammars import ToolsNotHeld, answer_grammar, guilty_tool, held_parameters
from tests.text.family_templates import LFM2_OLD
from tests.text.judging import Judge
from tests.text.tool_templates import FOREIGN, HERMES, PLAIN, TEMPLATES, THINKING, UNCLOSED
from tests.text.vocabularies import SPECIAL, TOOLS, byte_level_gguf, byte_level_json

FORMATS = {row.name: row for row in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
WEATHER = Tool("get_weather", "Of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
NOW = Tool("now")


# Detection


def detected(source: str | None) -> str:
    return ChatTemplate(source, Tokenizer.from_gguf(byte_level_gguf())).tool_format.name


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    assert detected(TEMPLATES[name]) == name


@pytest.mark.parametrize("name", FOREIGN)
def test_calls_that_no_parser_reads_are_prompted(name: str) -> None:
    template = ChatTemplate(FOREIGN[name], Tokenizer.from_gguf(byte_level_gguf()))
    assert template.tool_format is PROMPTED
    rendered = template.render(ChatRequest(CONVERSATIONS[1], tools=(WEATHER,)))
    assert rendered.count('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"') == 1
    assert '{"name": "get_weather", "description": "Of a city"' in rendered
    assert "<tool_response>\n21\n</tool_response>" in rendered


def test_unknown_formats_are_prompted() -> None:
    assert detected(None) == "words"
    assert detected("{{ 'tools: <tool_call>' }}" + PLAIN) == "words"  # the template never reads the variable
    assert detected("{% if tools %}{{ tools }}{% endif %}" + PLAIN) == "words"
    assert detected(UNCLOSED) == "words"
    assert detected(HERMES.replace("</tools>", "</tools> <function=")) == "hermes"  # the call decides, not the source
    # Only the beginning of a very long answer is read.
    long = HERMES.replace("{{- '<tool_call>\\n{", "{{- '<tool_call>' * 300000 }}{{- '<tool_call>\\n{")
    assert "300000" in long
    assert detected(long) == "words"
    # A template that never writes calls has no format, except LFM2: quire writes its calls.
    assert detected("{% if tools %}{{ '<tool_call>' }}{% endif %}" + PLAIN) == "words"
    assert detected(LFM2_OLD) == "lfm2"
    assert (
        ChatTemplate(PLAIN, Tokenizer.from_gguf(byte_level_gguf()), tool_format="hermes").tool_format.name == "hermes"
    )
    names = "qwen_xml, gemma4, harmony, lfm2, hermes, mistral, llama3, words"
    with pytest.raises(InvalidRequest, match=f"tool_format = 'xml' is not one of {names}"):
        named_tool_format("xml")


def test_a_format_is_not_detected_for_chats_without_tools(json_tokenizer: Tokenizer) -> None:
    endless = "{%- if tools %}{%- for i in range(99999) %}{%- for j in range(99999) %}{%- endfor %}{%- endfor %}"
    template = ChatTemplate(HERMES.replace("{%- if tools %}", endless, 1), json_tokenizer)
    assert "Weather?" in template.render(ChatRequest((ASKED,)))
    with pytest.raises(TemplateError, match="did not finish within 1 s"):
        template.render(ChatRequest((ASKED,), tools=(WEATHER,)))


# Rendering


def say(role: Role, text: str = "", **more: Any) -> Message:
    return Message(role, (Part(text),), **more)


CALL = ToolCall("call_1", "get_weather", '{"city": "Köln", "days": [1, 2.5, null]}')
ASKED = say(Role.USER, "Weather?")
CONVERSATIONS = (
    (ASKED,),
    (ASKED, say(Role.ASSISTANT, tool_calls=(CALL,)), say(Role.TOOL, "21", tool_call_id="call_1")),
    (
        ASKED,
        say(Role.ASSISTANT, "I look.", tool_calls=(CALL,)),
        say(Role.TOOL, '{"t": 21}', tool_call_id="call_1"),
        say(Role.ASSISTANT, "Warm."),
        say(Role.USER, "And now?"),
    ),
)


def as_transformers(message: Message, id_chars: int | None) -> dict[str, Any]:
    reference: dict[str, Any] = {"role": message.role.value, "content": message.text}
    call_id = fitting_id("call_1", FORMATS["mistral"]) if id_chars else "call_1"
    if message.tool_calls:
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
        reference["tool_calls"] = [{"type": "function", "id": call_id, "function": function} for function in functions]
    if message.tool_call_id is not None:
        reference |= {"tool_call_id": call_id, "name": "get_weather"}
    return reference


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen_xml", "harmony", "lfm2"])
def test_prompts_with_tools_are_those_of_transformers(name: str, json_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(byte_level_json())),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    template = ChatTemplate(TEMPLATES[name], json_tokenizer)
    template.check()
    shown = {"name": "get_weather", "description": "Of a city", "parameters": dict(WEATHER.parameters)}
    for messages in CONVERSATIONS:
        for tools in ((), (WEATHER,)):
            options: dict[str, Any] = {"chat_template": TEMPLATES[name], "add_generation_prompt": True}
            options["tools"] = [{"type": "function", "function": shown}] if tools else None
            plain = [as_transformers(message, FORMATS[name].id_chars) for message in messages]
            request = ChatRequest(messages, tools=tools)
            assert template.render(request) == reference.apply_chat_template(plain, tokenize=False, **options)
            assert template.encode(request) == reference.apply_chat_template(plain, return_dict=False, **options)


def test_tools_as_text(json_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(PLAIN, json_tokenizer)
    results = (say(Role.TOOL, "21", tool_call_id="call_1"), say(Role.TOOL, "22", tool_call_id="call_2"))
    calls = (CALL, ToolCall("call_2", "now", "{}"))
    messages = (say(Role.SYSTEM, "Be brief."), ASKED, say(Role.ASSISTANT, "I look.", tool_calls=calls), *results)
    text = template.render(ChatRequest((*messages, say(Role.USER, "So?")), tools=(WEATHER, NOW)))
    system, asked, called, results_turn, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can use these tools")
    assert '\n{"name": "now", "parameters": {"type": "object", "properties": {}}}\n' in system
    assert asked == "<|im_start|>user\nWeather?"
    assert called == (
        "<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5, null]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    response = "<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>"
    assert results_turn == f"<|im_start|>user\n{response}\n\nSo?"  # turns alternate
    none = ChatRequest((ASKED,), tools=(WEATHER,), tool_choice=ToolChoice(ToolMode.NONE))
    assert template.render(none) == template.render(ChatRequest((ASKED,)))


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen_xml", "gemma4", "harmony", "lfm2", "words"])
@pytest.mark.parametrize("token", [*SPECIAL, *TOOLS])
def test_no_part_of_a_tool_can_write_a_control_token(name: str, token: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    template = ChatTemplate(TEMPLATES[name], tokenizer)

    def control_ids(text: str) -> list[int]:
        schema = {"type": "object", "properties": {text: {"type": "string", "enum": [text], "description": text}}}
        call = ToolCall(text, "f", json.dumps({text: [text, {"a": text}]}))
        messages = (ASKED, say(Role.ASSISTANT, tool_calls=(call,)), say(Role.TOOL, text, tool_call_id=text, name=text))
        ids = template.encode(ChatRequest(messages, tools=(Tool("f", text, schema),)))
        return [token_id for token_id in ids if token_id in tokenizer.control_ids]

    # In the prompted format a call is assistant text, where only special tokens are marked.
    if name != "words" or token in SPECIAL:
        for text in (token, f"a{token}b", f"{token[:-1]}{token}"):
            assert control_ids(text) == control_ids("harmless")


def test_call_ids_of_a_required_length() -> None:
    mistral = FORMATS["mistral"]
    assert fitting_id("abcDEF123", mistral) == "abcDEF123"
    made = fitting_id("call_123456", mistral)
    assert (len(made), made.isalnum()) == (9, True)
    assert made == fitting_id("call_123456", mistral) != fitting_id("call_123457", mistral)
    assert fitting_id("call_123456", FORMATS["hermes"]) == "call_123456"


# Parsing

Plain = tuple[str, ...]  # a piece without the id of its call


def merged(pieces: Sequence[Piece]) -> list[Plain]:
    found: list[list[str]] = []
    for piece in pieces:
        match piece:
            case CallStart(number, call_id, name):
                assert call_id.startswith("call_")
                found.append(["call", str(number), name])
            case CallArguments(number, text):
                key = ["arguments", str(number)]
                found.append([*key, text]) if found[-1][:2] != key else found[-1].__setitem__(2, found[-1][2] + text)
            case Thought(text) | Words(text):
                kind = type(piece).__name__.lower()
                found.append([kind, text]) if not found or found[-1][0] != kind else found[-1].__setitem__(
                    1, found[-1][1] + text
                )
    return [tuple(piece) for piece in found]


def read(make: Callable[[], AnswerParser], *texts: str) -> list[Plain]:
    parser = make()
    pieces = [piece for text in texts for piece in parser.push(text)]
    return merged([*pieces, *parser.finish()])


def check_parsing(make: Callable[[], AnswerParser], text: str, expected: list[Plain]) -> None:
    """A text parses the same however it is split."""
    assert read(make, text) == read(make, *text) == expected
    for at in range(len(text)):
        assert read(make, text[:at], text[at:]) == expected


def calls(*made: tuple[str, str]) -> list[Plain]:
    found: list[Plain] = []
    for number, (name, arguments) in enumerate(made):
        found += [("call", str(number), name), ("arguments", str(number), arguments)]
    return found


HERMES_CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}\n</tool_call>'
TRANSCRIPTS: list[tuple[str, str, list[Plain]]] = [
    ("hermes", " Just words.\n", [("words", " Just words.\n")]),
    (
        "hermes",
        f"Let me see.\n{HERMES_CALL}\n"
        '<tool_call>\n{"name": "set", "arguments": {"x": 1}, "id": ["}"]}\n</tool_call>\n',
        [("words", "Let me see."), *calls(("get", '{"a": "}\\"{", "b": [1, {"c": null}]}'), ("set", '{"x": 1}'))],
    ),
    (
        "hermes",
        '<tool_call>{"name":"get","arguments":{}}</tool_call> done ',
        [*calls(("get", "{}")), ("words", "done ")],
    ),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"a": "cut off', calls(("get", '{"a": "cut off'))),
    ("hermes", '<tool_call>\n{"name": "ge', [("words", '<tool_call>\n{"name": "ge')]),
    ("hermes", 'a <tool_call> b <tool_call>{"name": "x"} c', [("words", 'a <tool_call> b <tool_call>{"name": "x"} c')]),
    (
        "hermes",
        '<tool_call><tool_call>{"name": "set", "arguments": {}}',
        [("words", "<tool_call>"), *calls(("set", "{}"))],
    ),
    ("hermes", '<tool_call>{"name": "get", "arguments": 1}', [("words", '<tool_call>{"name": "get", "arguments": 1}')]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {}}</tool_call><tool_call>{"na', calls(("get", "{}"))),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}, {"name": "set", "arguments": {}, "id": "123456789"}]',
        calls(("get", '{"a": 1}'), ("set", "{}")),
    ),
    ("mistral", 'Well. [TOOL_CALLS][{"name":"set","arguments":{}}]', [("words", "Well."), *calls(("set", "{}"))]),
    ("mistral", '[TOOL_CALLS]{"name": "get"}', [("words", '[TOOL_CALLS]{"name": "get"}')]),
    ("mistral", "[TOOL_CALL", [("words", "[TOOL_CALL")]),
    ("llama3", ' {"name": "get", "parameters": {"a": 1}}', calls(("get", '{"a": 1}'))),
    ("llama3", '<|python_tag|>{"name": "get", "parameters": {"a": 1.5}}', calls(("get", '{"a": 1.5}'))),
    ("llama3", '{"city": "Oslo"}', [("words", '{"city": "Oslo"}')]),
    ("llama3", '  See { "name": 1', [("words", '  See { "name": 1')]),
    ("llama3", "<|python_tag|>search.call(1)", [("words", "<|python_tag|>search.call(1)")]),
    ("words", f"{HERMES_CALL}", calls(("get", '{"a": "}\\"{", "b": [1, {"c": null}]}'))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), TRANSCRIPTS, ids=lambda value: str(value)[:30])
def test_a_transcript_parses_the_same_however_it_is_split(name: str, text: str, expected: list[Plain]) -> None:
    check_parsing(lambda: CallParser(FORMATS[name], (Tool("get"), Tool("set"))), text, expected)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", " ", '{"name": "', "get", '"', "}", ",", "x"])))
@settings(max_examples=200, deadline=None)
def test_any_text_parses_the_same_however_it_is_split(parts: list[str]) -> None:
    def make() -> AnswerParser:
        return CallParser(FORMATS["hermes"], (Tool("get"),))

    text = "".join(parts)
    whole = read(make, text)
    assert read(make, *text) == whole
    if not any(piece[0] == "call" for piece in whole):
        assert "".join(piece[1] for piece in whole) == text  # nothing is lost


def test_arguments_are_streamed() -> None:
    parser = CallParser(PROMPTED, (Tool("get"),))
    assert parser.push('<tool_call>\n{"name": "get", "arguments"') == []
    (start, first) = parser.push(': {"a')
    assert isinstance(start, CallStart)
    assert first == CallArguments(0, '{"a')
    assert parser.push('": 1') == [CallArguments(0, '": 1')]
    assert parser.push("}}\n</tool") == [CallArguments(0, "}")]
    assert parser.push("_call>\n") == parser.finish() == []


CUT: list[tuple[str, str, list[Plain]]] = [
    ("hermes", "<tool", []),
    ("hermes", "I look.\n<tool_call>\n{", [("words", "I look.\n")]),
    ("hermes", '<tool_call>\n{"na', []),
    ("hermes", "1 < 2 and <", [("words", "1 < 2 and ")]),
    ("hermes", "a <b", [("words", "a <b")]),
    ("hermes", '<tool_call>\n{"name": "get", "argu', []),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"a', [("call", "0", "get"), ("arguments", "0", '{"a')]),
]


@pytest.mark.parametrize(("format", "text", "pieces"), CUT)
def test_half_of_a_marker_at_a_length_cut_is_not_text(format: str, text: str, pieces: list[Plain]) -> None:
    for texts in ((text,), tuple(text)):
        parser = CallParser(FORMATS[format], (Tool("get"),))
        found = [piece for part in texts for piece in parser.push(part)]
        assert merged([*found, *parser.finish(is_cut=True)]) == pieces


def test_json_without_a_marker_is_kept_at_a_length_cut() -> None:
    bare = next(one for one in FORMATS.values() if one.may_be_bare)
    parser = CallParser(bare, (Tool("get"),))
    assert merged([*parser.push('{"city": "Os'), *parser.finish(is_cut=True)]) == [("words", '{"city": "Os')]


def called(arguments: str, name: str = "get") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


REPEATS: list[tuple[str, list[Plain], bool]] = [
    (called('{"a": 1}') * 4, calls(("get", '{"a": 1}')), True),
    (called('{"a": 1}') + called('{"a": 12}'), calls(("get", '{"a": 1}'), ("get", '{"a": 12}')), False),
    (called('{"a": 12}') + called('{"a": 1}'), calls(("get", '{"a": 12}'), ("get", '{"a": 1}')), False),
    (
        called("{}") + called("{}", "set") + called("{}"),  # repeated later, not directly
        calls(("get", "{}"), ("set", "{}"), ("get", "{}")),
        False,
    ),
    (
        called("{}") + "Again:\n" + called("{}"),
        [*calls(("get", "{}")), ("words", "Again:"), ("call", "1", "get"), ("arguments", "1", "{}")],
        False,
    ),
    (called('{"a": 1}') + called('{"a": 1}')[:40], calls(("get", '{"a": 1}')), False),  # cut off: dropped
    (called("{}") + "<tool", calls(("get", "{}")), False),  # cut off within the opening
    (called("{}") + "<to be>", [*calls(("get", "{}")), ("words", "<to be>")], False),
]


@pytest.mark.parametrize(("text", "expected", "is_over"), REPEATS, ids=range(len(REPEATS)))
def test_a_call_that_repeats_the_one_before_ends_the_turn(text: str, expected: list[Plain], is_over: bool) -> None:
    def make() -> AnswerParser:
        return CallParser(FORMATS["hermes"], (Tool("get"), Tool("set")))

    assert read(make, text) == expected
    assert read(make, *text) == expected
    parser = ThoughtParser(REASONING_FORMATS[0], Opening.FREE, make())
    parser.push(text)
    assert parser.is_over == is_over


def test_a_second_call_of_the_same_tool_is_held_back_until_it_differs() -> None:
    parser = CallParser(PROMPTED, (Tool("get"),))
    parser.push(called('{"a": "x", "b": 1}'))
    assert parser.push('<tool_call>\n{"name": "get", "arguments": {"a": "') == []
    assert merged(parser.push("y")) == [("call", "1", "get"), ("arguments", "1", '{"a": "y')]
    assert parser.push('"}') == [CallArguments(1, '"}')]


def test_an_endless_head_is_text() -> None:
    text = '<tool_call>{"x": "' + "<tool_call>" * 2000
    assert read(lambda: CallParser(PROMPTED, (Tool("get"),)), text) == [("words", text)]


# Reasoning

THOUGHTS: list[tuple[Opening, str, list[Plain]]] = [
    (Opening.FREE, "<think>\nhm </thin so\n\n</think>\n\nHi. ", [("thought", "hm </thin so"), ("words", "Hi. ")]),
    (Opening.FREE, " Hi <think>", [("words", " Hi <think>")]),
    (Opening.FREE, "<thi", [("words", "<thi")]),
    (Opening.FREE, "<think>\n\n</think>\n\nHi", [("words", "Hi")]),
    (Opening.OPEN, "\nhm</think>\n\nHi", [("thought", "hm"), ("words", "Hi")]),
    (Opening.OPEN, "cut off ", [("thought", "cut off")]),
    (Opening.CLOSED, "\n\nHi </think>", [("words", "Hi </think>")]),
    (Opening.OPEN, f"call <tool_call>?</think>\n{HERMES_CALL}", [
        ("thought", "call <tool_call>?"), *calls(("get", '{"a": "}\\"{", "b": [1, {"c": null}]}')),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("opening", "text", "expected"), THOUGHTS)
def test_reasoning_is_split_off(opening: Opening, text: str, expected: list[Plain]) -> None:
    check_parsing(lambda: ThoughtParser(THINK, opening, CallParser(PROMPTED, (Tool("get"),))), text, expected)


def test_reasoning_formats_are_detected() -> None:
    assert find_reasoning(HERMES) is THINK
    assert find_reasoning(THINKING) is THINK
    assert find_reasoning(PLAIN) is find_reasoning(None) is None
    assert find_opening(THINK, "<|im_start|>assistant\n<think>\n") is Opening.OPEN
    assert find_opening(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is Opening.CLOSED
    assert find_opening(THINK, "<think> </think> <|im_start|>assistant\n") is Opening.FREE


def test_reasoning_switches_of_templates(json_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(HERMES, json_tokenizer)
    assert template.render(ChatRequest((ASKED,), wants_thought=False)).endswith("<think>\n\n</think>\n\n")
    assert template.render(ChatRequest((ASKED,), wants_thought=True)).endswith("assistant\n")
    own = ChatRequest((ASKED,), wants_thought=True, template_args={"enable_thinking": False})
    assert template.render(own).endswith("</think>\n\n")  # an explicit variable has precedence
    past = (ASKED, say(Role.ASSISTANT, "Warm.", thought="hm"), ASKED)
    assert "assistant\n<think>\nhm\n</think>\n\nWarm.<|im_end|>" in template.render(ChatRequest(past))
    plain = ChatTemplate(PLAIN, json_tokenizer)
    assert plain.render(ChatRequest((ASKED,), wants_thought=False, reasoning_effort="low")).endswith("assistant\n")


# Grammars


follows = Judge("<|end|>", "<|python_tag|>", "[TOOL_CALLS]")
control_id = follows.marker_id
WHOLE_NUMBER = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}
GET = Tool("get", "", WHOLE_NUMBER)
JSON_WORDS = json_schema_grammar({"enum": ["sun", "rain"]})
HERMES_GET = '<tool_call>\n{"name": "get", "arguments": {"a": 3}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA_NOW = '{"name": "now", "parameters": {}}'
MISTRAL_NOW = '{"name": "now", "arguments": {}}'
AUTO, REQUIRED = ToolChoice(), ToolChoice(ToolMode.REQUIRED)
FORCED: list[tuple[str, ToolChoice, Grammar | None, Opening | None, dict[str, str]]] = [
    ("hermes", AUTO, None, None, {
        "": "whole", "Hi": "whole", "Hi <tool": "whole", "Hi <tool_call>": "part", "Hi <tool_call>x": "no",
        HERMES_GET: "whole", f"Hi\n{HERMES_GET}\n{HERMES_NOW}": "whole", f"{HERMES_NOW} x": "no",
        '<tool_call>\n{"name": "other"': "no", '<tool_call>\n{"name": "get", "arguments": {"b"': "no",
        "\n".join([HERMES_GET] * 100): "whole",
    }),
    ("hermes", ToolChoice(is_parallel=False), None, None, {HERMES_GET: "whole", f"{HERMES_GET}\n<": "no"}),
    ("hermes", REQUIRED, None, None, {
        "": "part", "Hi": "no", HERMES_GET: "whole", f"{HERMES_NOW}{HERMES_GET}": "whole",
    }),
    ("hermes", ToolChoice(ToolMode.REQUIRED, "get"), None, None, {HERMES_GET: "whole", f"{HERMES_GET}\n<": "no"}),
    ("hermes", AUTO, JSON_WORDS, None, {'"sun"': "whole", '"fog"': "no", "Hi": "no", HERMES_GET: "whole"}),
    ("hermes", REQUIRED, JSON_WORDS, None, {'"sun"': "no", HERMES_GET: "whole"}),
    ("hermes", AUTO, None, Opening.OPEN, {
        "hm": "part", f"hm {HERMES_GET}": "part", f"hm</think>\n\n{HERMES_GET}": "whole", "hm</think>\n\nHi": "whole",
    }),
    ("hermes", AUTO, None, Opening.FREE, {
        "Hi": "whole", "<think>hm": "part", f"<think>{HERMES_GET}": "part",
        f"<think>hm</think>\n\n{HERMES_GET}": "whole", HERMES_GET: "whole", f"Hi {HERMES_GET}": "whole",
        "Hi <tool_call>x": "no", "<tool_call>x": "no", "<table>": "whole", "<thinker": "whole", "<thi": "whole",
    }),
    ("hermes", REQUIRED, None, Opening.FREE, {
        HERMES_GET: "whole", f"<think>x</think>{HERMES_GET}": "whole", "x": "no",
    }),
    ("words", REQUIRED, None, None, {"": "part", "\n".join([HERMES_NOW, HERMES_GET] * 50): "whole"}),
    ("hermes", AUTO, None, Opening.CLOSED, {"Hi": "whole", "Hi <tool_call>x": "no"}),
    ("mistral", AUTO, None, None, {
        "Hi": "whole", "[TOOL_CALLS]": "part", f"[TOOL_CALLS][{MISTRAL_NOW}]": "whole",
        f"Hi[TOOL_CALLS] [{MISTRAL_NOW}, {MISTRAL_NOW}]": "whole", "[TOOL_CALLS]x": "no",
        f"[TOOL_CALLS][{', '.join([MISTRAL_NOW] * 100)}]": "whole",
    }),
    ("mistral", REQUIRED, None, None, {"H": "no", f"[TOOL_CALLS][{MISTRAL_NOW}]": "whole"}),
    ("llama3", AUTO, None, None, {
        "Hi": "whole", " {": "no", LLAMA_NOW: "whole", f"<|python_tag|>{LLAMA_NOW}": "whole", '{"x"': "no",
        f"Hi <|python_tag|>{LLAMA_NOW}": "whole", f"{LLAMA_NOW}{LLAMA_NOW}": "no",
    }),
    ("llama3", REQUIRED, None, None, {"Hi": "no", LLAMA_NOW: "whole", f"<|python_tag|>{LLAMA_NOW}": "whole"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "choice", "words", "opening", "judged"), FORCED)
def test_answer_grammars(
    name: str,
    choice: ToolChoice,
    words: Grammar | None,
    opening: Opening | None,
    judged: dict[str, str],
) -> None:
    tools = (GET, NOW) if choice.name is None else (GET,)
    thought = None if opening is None else (THINK, opening)
    grammar = answer_grammar(FORMATS[name], tools, choice, words, thought, control_id)
    assert {text: follows(grammar, text) for text in judged} == judged


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        (JSON_WORDS, '"rain"', "rain"),
        (regex_grammar("a/b|[/]{2}"), "//", "/"),
        (Grammar(GrammarKind.LARK, 'start: "x" D\nD: /[0-9]{2}/'), "x12", "x1y"),
    ],
)
def test_a_grammar_after_reasoning(words: Grammar, good: str, bad: str) -> None:
    for opening, before in ((Opening.OPEN, "hm</think>"), (Opening.FREE, "<think>hm</think>\n\n"), (Opening.FREE, "")):
        grammar = answer_grammar(PROMPTED, (), AUTO, words, (THINK, opening), control_id)
        assert follows(grammar, before + good) == "whole"
        assert follows(grammar, before + bad) in ("no", "part")
    assert answer_grammar(PROMPTED, (), AUTO, words, (THINK, Opening.CLOSED), control_id) is words
    assert answer_grammar(PROMPTED, (), AUTO, None, (THINK, Opening.OPEN), control_id) is None


def test_errors_identify_the_tool() -> None:
    tools = [Tool(f"tool_{i}") for i in range(128)]
    grammar = answer_grammar(PROMPTED, tools, AUTO, None, None, control_id)
    assert grammar is not None
    for line, text in enumerate(grammar.source.split("\n"), 1):
        if text.startswith("call_"):
            number = guilty_tool(f"grammar: at {line}(9): failed to compile")
            assert number is not None
            assert f'\\"{tools[number].name}\\"' in text
    assert guilty_tool("grammar: at 1(1): x") is guilty_tool("grammar: no place") is None


def wide(name: str, num_properties: int, *, is_strict: bool = True) -> Tool:
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    return Tool(name, "", {"type": "object", "properties": properties}, is_strict=is_strict)


def test_tools_that_are_too_large_in_total_list_the_largest() -> None:
    tools = [wide("a", 200, is_strict=False), wide("b", 1200), wide("c", 900, is_strict=False), wide("d", 700)]
    rule = r"^grammar: tools: their schemas are too large in total: \d+ characters after rewriting, more than 65536$"
    with pytest.raises(ToolsNotHeld, match=rule) as caught:
        answer_grammar(PROMPTED, tools, AUTO, None, None, control_id)
    assert caught.value.loose == [2]
    tools[2] = replace(tools[2], is_free=True)
    assert answer_grammar(PROMPTED, tools, AUTO, None, None, control_id) is not None


def test_the_schema_of_a_tool_is_rewritten_once() -> None:
    tool = wide("f", 3)
    assert held_parameters(tool) is held_parameters(replace(wide("g", 3)))
    assert held_parameters(tool) is not held_parameters(replace(tool, is_strict=False))


def test_annotations_are_removed_and_objects_are_closed() -> None:
    inner = {"type": "object", "properties": {"title": {"type": "string", "title": "T"}}}
    given = {
        "title": "X",
        "description": "d",
        "properties": {"description": {"$ref": "#/$defs/d"}, "list": {"type": "array", "items": inner}},
        "$defs": {"d": {"const": {"title": 1}, "default": 2}},
    }
    closed = {"type": "object", "properties": {"title": {"type": "string"}}, "additionalProperties": False}
    assert held_parameters(Tool("f", "", given, is_strict=False)).schema == {
        "type": "object",
        "properties": {"description": {"$ref": "#/$defs/d0"}, "list": {"type": "array", "items": closed}},
        "$defs": {"d0": {"const": {"title": 1}}},
        "additionalProperties": False,
    }
    assert held_parameters(Tool("f")).schema == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([Tool("a b")], AUTO, r"tools\[0\]\.name = 'a b' is not"),
        ([NOW, NOW], AUTO, r"tools\[1\]\.name = 'now' is another tool's"),
        ([NOW] * 129, AUTO, "tools has 129 entries, more than 128"),
        ([Tool("f", "", {"type": "string"})], AUTO, r"tools\[0\]\.parameters\.type = 'string' is not object"),
        ([Tool("f", "\ud800")], AUTO, r"tools\[0\]\.description has a lone surrogate"),
        ([Tool("f", "", {"a": float("nan")})], AUTO, r"tools\[0\]\.parameters: "),
        ([], REQUIRED, "tool_choice asks for a call, and tools has no"),
        ([NOW], ToolChoice(ToolMode.REQUIRED, "then"), "tool_choice names 'then', which is not among tools"),
        ([NOW], ToolChoice(allowed=("then",)), "tool_choice names 'then'"),
    ],
)
def test_invalid_tools_are_refused(tools: list[Tool], choice: ToolChoice, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatRequest((ASKED,), tools=tuple(tools), tool_choice=choice)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("", "f", "{}"), r"messages\[0\]\.tool_calls\[0\]\.id is not 1 to 256"),
        (ToolCall("c", "f g", "{}"), r"tool_calls\[0\]\.name = 'f g'"),
        (ToolCall("c", "f", "[]"), r"tool_calls\[0\]\.arguments is not a JSON object"),
        (ToolCall("c", "f", '{"a": NaN}'), r"arguments is not a JSON object"),
        (ToolCall("c", "f", '{"a": "\ud800"}'), r"arguments is not a JSON object"),
        (ToolCall("c", "f", "[" * 10**5), r"arguments is not a JSON object"),
        (ToolCall("c", "f", '{"a":' * 65 + "1" + "}" * 65), r"arguments is nested more than 64 deep"),
    ],
)
def test_invalid_calls_are_refused(call: ToolCall, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatRequest((say(Role.ASSISTANT, tool_calls=(call,)),))
