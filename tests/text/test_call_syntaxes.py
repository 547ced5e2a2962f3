"""Tool calls that are not JSON (Qwen's XML, Gemma 4, LFM2) and harmony: parsing, grammars, earlier calls in prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.chat_template import ChatTemplate, one_call_each, python_call
from quire.text.grammar import json_schema_grammar
from quire.text.messages import (
    AnswerParser,
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from quire.text.reasoning import REASONING_FORMATS, HarmonyParser, Opening, ThoughtParser, find_opening, find_reasoning
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import TOOL_FORMATS, CallParser, Syntax, as_json, parameter_kinds
from quire.text.tool_grammars import ToolsNotHeld, answer_grammar
from tests.text.family_templates import GEMMA4, HARMONY, LFM2, LFM2_OLD, QWEN35
from tests.text.judging import Judge
from tests.text.test_tool_formats import AUTO, REQUIRED, Plain, calls, check_parsing, merged, read, say
from tests.text.vocabularies import byte_level_gguf
from tests.text.written_calls import QUOTE, START, written

FORMATS = {row.name: row for row in TOOL_FORMATS}
REASONING = {row.name: row for row in REASONING_FORMATS}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer", "minimum": 0},
        "b": {"type": "boolean"},
        "e": {"enum": ["sun", "rain"]},
        "o": {"type": "object", "properties": {"x": {"type": "string"}, "y": {"type": "array", "items": {}}}},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "day": {"type": "string", "format": "date"},
        "short": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["s"],
    "$defs": {"tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
}
GET = Tool("get", "", PARAMETERS)
NOW = Tool("now")
OPEN = Tool("open", "", {"type": "object"})
ALL = {
    "s": "", "n": 3, "b": True, "e": "rain", "o": {"x": "u", "y": [1, None]}, "either": None, "day": "2024-02-29",
    "short": "abc", "tree": {"kids": [{}, {"kids": []}]},
}  # fmt: skip


def parser_of(name: str) -> AnswerParser:
    return CallParser(FORMATS[name], (GET, Tool("set")))


# Parsing


def xml(name: str, *parameters: tuple[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


TRANSCRIPTS: list[tuple[str, str, list[Plain]]] = [
    (
        "qwen_xml",
        "I look.\n\n" + xml("get", ("s", 'a "b"\n\n  <c>\n</par\\'), ("n", "12")) + "\n" + xml("set") + "\n",
        [("words", "I look."), *calls(("get", '{"s": "a \\"b\\"\\n\\n  <c>\\n</par\\\\", "n": 12}'), ("set", "{}"))],
    ),
    ("qwen_xml", xml("get", ("s", "12"), ("n", "twelve")), calls(("get", '{"s": "12", "n": "twelve"}'))),
    ("qwen_xml", xml("get", ("b", "True"), ("b", "false")), calls(("get", '{"b": true, "b": false}'))),
    ("qwen_xml", xml("get", ("either", "null")), calls(("get", '{"either": null}'))),
    ("qwen_xml", xml("get", ("either", "nothing")), calls(("get", '{"either": "nothing"}'))),
    ("qwen_xml", xml("get", ("either", "12")), calls(("get", '{"either": "12"}'))),
    ("qwen_xml", xml("get", ("unknown", "12")), calls(("get", '{"unknown": "12"}'))),
    (
        "qwen_xml",
        xml("get", ("o", '{"x": "</parameter>\\""}'), ("s", "")),
        calls(("get", '{"o": {"x": "</parameter>\\""}, "s": ""}')),
    ),
    ("qwen_xml", xml("get", ("o", '{"x": cut')), calls(("get", '{"o": "{\\"x\\": cut"}'))),
    ("qwen_xml", "<tool_call><function=get><parameter=s>a</parameter></function></tool_call> b", [
        *calls(("get", '{"s": "a"}')), ("words", "b"),
    ]),
    ("qwen_xml", "<tool_call>\n<function=get><parameter=s>a</parameter>\n</tool_call>", calls(("get", '{"s": "a"}'))),
    ("qwen_xml", "<tool_call>\n<function=get>\noops", [*calls(("get", "{}")), ("words", "oops")]),
    ("qwen_xml", "<tool_call>\n<function=other>\n", [("words", "<tool_call>\n<function=other>\n")]),
    ("qwen_xml", "So\n<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", [
        ("words", "So"), *calls(("get", '{"n": 1}')),
    ]),
    ("qwen_xml", "a <function=other> <function", [("words", "a <function=other> <function")]),
    ("qwen_xml", 'use <tool_call> {"name"', [("words", 'use <tool_call> {"name"')]),
    ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=s>\ncut o", calls(("get", '{"s": "cut o'))),
    (
        "gemma4",
        f'Well.<|tool_call>call:get{{b:true,n:-4.5e3,s:{QUOTE}a "b" {{c}}, <|{QUOTE}}}<tool_call|>'
        "<|tool_call>call:set{}<tool_call|>",
        [("words", "Well."), *calls(("get", '{"b": true, "n": -4.5e3, "s": "a \\"b\\" {c}, <|"}'), ("set", "{}"))],
    ),
    (
        "gemma4",
        f"<|tool_call>call:get{{o:{{x:[{QUOTE}u{QUOTE},null,{{k:1}},[]],{QUOTE}y z{QUOTE}:{{}}}}}}<tool_call|>",
        calls(("get", '{"o": {"x": ["u", null, {"k": 1}, []], "y z": {}}}')),
    ),
    ("gemma4", '<|tool_call>call:get{s:"a\\n\\"",n: 1}<tool_call|>', calls(("get", '{"s": "a\\n\\"", "n": 1}'))),
    ("gemma4", "<|tool_call>call:get{s:New York (NY)}<tool_call|>", calls(("get", '{"s": "New York (NY)"}'))),
    ("gemma4", "<|tool_call>call:other{}<tool_call|>", [("words", "<|tool_call>call:other{}<tool_call|>")]),
    (
        "lfm2",
        "<|tool_call_start|>[get(s=\"it's \\\"x\\\" \\u00e9\\n\", n=3, b=True, o={'k': [1, None, [2, 3]]}), set()]"
        "<|tool_call_end|>Checking.",
        [
            *calls(
                (
                    "get",
                    '{"s": "it\'s \\"x\\" \\u00e9\\n", "n": 3, "b": true, "o": {"k": [1, null, [2, 3]]}}',
                ),
                ("set", "{}"),
            ),
            ("words", "Checking."),
        ],
    ),
    ("lfm2", "<|tool_call_start|>[get(s='a\\'b', e=sun)]", calls(("get", '{"s": "a\'b", "e": "sun"}'))),
    ("lfm2", "<|tool_call_start|>[other(s='a')]", [("words", "<|tool_call_start|>[other(s='a')]")]),
    ("lfm2", "see [get(s=1)]", [("words", "see [get(s=1)]")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), TRANSCRIPTS, ids=lambda value: str(value)[:30])
def test_a_transcript_parses_the_same_however_it_is_split(name: str, text: str, expected: list[Plain]) -> None:
    check_parsing(lambda: parser_of(name), text, expected)


def test_text_parameters_are_streamed() -> None:
    parser = parser_of("qwen_xml")
    assert parser.push("<tool_call>\n<function=get") == []
    (start, first) = parser.push(">\n")
    assert isinstance(start, CallStart)
    assert first == CallArguments(0, "{")
    assert parser.push("<parameter=s>\n") == [CallArguments(0, '"s": "')]
    assert parser.push("one\ntwo\n") == [CallArguments(0, "one\\ntwo")]
    assert parser.push("</para") == []
    assert parser.push("meter>\n</function>") == [CallArguments(0, '"}')]


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text("abc_", min_size=1, max_size=3)
    return inner | st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)


LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab \n\"'\\<>{}[](),:=é|")
JSON_VALUES = nested(nested(LEAVES))


@given(st.dictionaries(st.sampled_from(["k", "key_2", "z"]), JSON_VALUES), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=150, deadline=None)
def test_arguments_survive_every_format(arguments: dict[str, Any], name: str) -> None:
    format = FORMATS[name]
    tool = Tool("get", "", {"properties": {key: typed(value) for key, value in arguments.items()}})
    text = written(format, [("get", arguments)])

    def make() -> AnswerParser:
        return HarmonyParser(("get",)) if format.syntax is Syntax.HARMONY else CallParser(format, (tool,))

    whole = read(make, text)
    assert whole == read(make, *text)
    assert whole[0] == ("call", "0", "get")
    assert json.loads(whole[1][2]) == arguments


def typed(value: object) -> dict[str, Any]:
    return {
        "type": {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}.get(type(value), "null")
    }


XML_TAGS = ["<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>"]
SCRAPS = {
    "qwen_xml": [*XML_TAGS, "get", ">", "s"],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:", "get", "{", "}", QUOTE, "s:", ",", "["],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "get", "(", ")", "s=", '"', "'", ","],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "final", " to=functions.get", "{}"],
}


@pytest.mark.parametrize("name", SCRAPS)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_text_parses_the_same_however_it_is_split(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*SCRAPS[name], "\n", " ", "x", "<"]), max_size=20)))

    def make() -> AnswerParser:
        return HarmonyParser(("get",)) if name == "harmony" else parser_of(name)

    whole = read(make, text)
    assert read(make, *text) == whole
    if name != "harmony" and not any(piece[0] == "call" for piece in whole):
        assert "".join(piece[1] for piece in whole) == text  # nothing is lost


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"number", "null"}),
        ({"enum": ["a", 1]}, {"string", "number"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"array"}),
        ({"$ref": "#/$defs/loop"}, {"null", "boolean", "number", "string", "array", "object"}),
        ({"anyOf": [{"type": "string"}, {"allOf": [{"type": "number"}]}]}, {"string", "number"}),
        ({"properties": {}}, {"object"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        (True, {"null", "boolean", "number", "string", "array", "object"}),
    ],
)
def test_kinds_of_a_parameter(schema: object, kinds: set[str]) -> None:
    root = {"properties": {"k": schema}, "$defs": {"a/b": {"items": {}}, "loop": {"$ref": "#/$defs/loop"}}}
    assert parameter_kinds(root, "k") == kinds
    assert parameter_kinds(root, "other") == {"string"}


def test_values_as_json() -> None:
    text_or_number = frozenset(("string", "number"))
    assert [as_json(text, text_or_number) for text in ("1", "1,5", "true", '"a"')] == [
        "1",
        '"1,5"',
        '"true"',
        '"\\"a\\""',
    ]
    assert as_json(" [1,\n2] ", frozenset(("array",))) == "[1,\n2]"
    assert as_json("NaN", frozenset(("number",))) == '"NaN"'


# Harmony

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
MESSAGES: list[tuple[str, list[Plain]]] = [
    (f"{ANALYSIS}hm <|x<|end|>{START}{FINAL}Hi <b>", [("thought", "hm <|x"), ("words", "Hi <b>")]),
    (f"{ANALYSIS}a<|end|>{START}{ANALYSIS}b<|end|>{START}{FINAL}c<|return|>", [("thought", "a\n\nb"), ("words", "c")]),
    (
        f"{ANALYSIS}hm<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>{START}"
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("thought", "hm"), ("words", "I look."), *calls(("get", '{"a": 1}'))],
    ),
    (' to=functions.get<|channel|>commentary json<|message|>{"a": 1}', calls(("get", '{"a": 1}'))),
    (
        f"<|channel|>analysis to=functions.get<|message|>{{}}<|call|>{START} to=get<|channel|>commentary<|message|>",
        calls(("get", "{}"), ("get", "{}")),
    ),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", [("words", "{}")]),
    (f"<|channel|>commentary<|message|>One.<|end|>{START}{FINAL}Two.", [("words", "One.\n\nTwo.")]),
    (f"{START}{FINAL}Hi", [("words", "Hi")]),
    ("No header at all", [("words", "No header at all")]),
    (f"{ANALYSIS}cut", [("thought", "cut")]),
    ("<|channel|>analy", []),
    (f"{ANALYSIS}no end{FINAL}Hi", [("thought", "no end"), ("words", "Hi")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MESSAGES, ids=range(len(MESSAGES)))
def test_harmony_messages(text: str, expected: list[Plain]) -> None:
    check_parsing(lambda: HarmonyParser(("get",)), text, expected)


def test_a_continued_final_message() -> None:
    parser = HarmonyParser((), is_in_final=True)
    assert merged([*parser.push(" and so on"), *parser.finish()]) == [("words", " and so on")]


# Reasoning


def test_reasoning_of_the_new_templates() -> None:
    names = {
        name: find_reasoning(source) for name, source in (("q", QWEN35), ("g", GEMMA4), ("h", HARMONY), ("l", LFM2))
    }
    assert {name: row.name for name, row in names.items() if row is not None} == {
        "q": "think",
        "g": "gemma4",
        "h": "harmony",
        "l": "think",
    }
    assert find_reasoning(LFM2_OLD) is None


def test_reasoning_in_a_channel_of_gemma() -> None:
    format = REASONING["gemma4"]
    assert find_opening(format, "<|turn>model\n") is Opening.FREE
    assert find_opening(format, "<|turn>model\n<|channel>thought\n") is Opening.OPEN
    assert find_opening(format, "<|turn>model\n<|channel>thought\n<channel|>") is Opening.CLOSED

    def make() -> AnswerParser:
        return ThoughtParser(format, Opening.FREE, parser_of("gemma4"))

    for text, expected in (
        ("<|channel>thought\nhm\n<channel|>Hi", [("thought", "hm"), ("words", "Hi")]),
        ("<|channel>thought\n<channel|>Hi", [("words", "Hi")]),
        (
            "<|channel>thought\nhm<channel|><|tool_call>call:set{}<tool_call|>",
            [("thought", "hm"), *calls(("set", "{}"))],
        ),
        ("Hi", [("words", "Hi")]),
    ):
        assert read(make, text) == read(make, *text) == expected


@pytest.mark.parametrize(
    ("source", "wanted", "end"),
    [
        (QWEN35, {}, "assistant\n<think>\n"),
        (QWEN35, {"wants_thought": True}, "assistant\n<think>\n"),
        (QWEN35, {"wants_thought": False}, "assistant\n<think>\n\n</think>\n\n"),
        (QWEN35, {"template_args": {"enable_thinking": False}}, "assistant\n<think>\n\n</think>\n\n"),
        (GEMMA4, {}, "<|turn>model\n<|channel>thought\n<channel|>"),
        (GEMMA4, {"wants_thought": True}, "<|turn>model\n"),
        (GEMMA4, {"reasoning_effort": "high"}, "<|turn>model\n"),
        (GEMMA4, {"reasoning_effort": "minimal"}, "<|turn>model\n<|channel>thought\n<channel|>"),
    ],
)
def test_switches(json_tokenizer: Tokenizer, source: str, wanted: dict[str, Any], end: str) -> None:
    template = ChatTemplate(source, json_tokenizer)
    assert template.render(ChatRequest((say(Role.USER, "Hi"),), **wanted)).endswith(end)


def test_efforts_of_harmony(json_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(HARMONY, json_tokenizer)
    for wanted, effort in (
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "max"}, "high"),
        ({"wants_thought": False}, "low"),
        ({"wants_thought": False, "reasoning_effort": "none"}, "low"),
        ({"wants_thought": True}, "medium"),
    ):
        request = ChatRequest((say(Role.USER, "Hi"),), **wanted)
        assert f"Reasoning: {effort}<|end|>" in template.render(request)
    assert [template.can_think(wants) for wants in (True, False, None)] == [True, False, True]


# Earlier calls in prompts

TWO = (ToolCall("c1", "get", '{"s": "Köln", "b": true}'), ToolCall("c2", "now", "{}"))
RESULTS = (say(Role.TOOL, "21", tool_call_id="c1"), say(Role.TOOL, "22", tool_call_id="c2"))
LOOKED = (say(Role.USER, "So?"), say(Role.ASSISTANT, "I look.", thought="hm", tool_calls=TWO), *RESULTS)


def test_calls_are_split_for_templates_that_take_one() -> None:
    asked, first, result, second, other = one_call_each(LOOKED)
    assert (asked, result, other) == (LOOKED[0], *RESULTS)
    assert first == replace(LOOKED[1], tool_calls=TWO[:1])
    assert second == Message(Role.ASSISTANT, (), tool_calls=TWO[1:])
    swapped = one_call_each((*LOOKED[:2], RESULTS[1], RESULTS[0]))
    assert [message.tool_call_id for message in swapped] == [None, None, None, "c2", "c1"]
    without = one_call_each(LOOKED[:2])
    assert [message.tool_calls for message in without] == [(), TWO[:1], TWO[1:]]
    assert one_call_each(LOOKED[:1]) == [LOOKED[0]]


def test_earlier_calls_of_harmony(json_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(HARMONY, json_tokenizer)
    assert template.render(ChatRequest(LOOKED, tools=(GET,))).split("<|start|>")[3:] == [
        "user<|message|>So?<|end|>",
        "assistant<|channel|>analysis<|message|>hm\n\nI look.<|end|>",
        'assistant to=functions.get<|channel|>commentary json<|message|>{"s": "Köln", "b": true}<|call|>',
        'functions.get to=assistant<|channel|>commentary<|message|>"21"<|end|>',
        "assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        'functions.now to=assistant<|channel|>commentary<|message|>"22"<|end|>',
        "assistant",
    ]


def test_earlier_calls_of_gemma(json_tokenizer: Tokenizer) -> None:
    """The prompt ends inside the model's turn, with the results."""
    template = ChatTemplate(GEMMA4, json_tokenizer)
    assert template.render(ChatRequest(LOOKED)).partition("<|turn>model\n")[2] == (
        "<|channel>thought\nhm\n\nI look.\n<channel|>"
        f"<|tool_call>call:get{{b:true,s:{QUOTE}Köln{QUOTE}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>"
        f"<|tool_response>response:get{{value:{QUOTE}21{QUOTE}}}<tool_response|>"
        f"<|tool_response>response:now{{value:{QUOTE}22{QUOTE}}}<tool_response|>"
    )


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (LFM2, '<think>hm</think>I look.<|tool_call_start|>[get(s="Köln", b=true), now()]<|tool_call_end|>'),
        (LFM2_OLD, '<|tool_call_start|>[get(s="Köln", b=True), now()]<|tool_call_end|>I look.'),
    ],
)
def test_earlier_calls_of_lfm2(json_tokenizer: Tokenizer, source: str, answer: str) -> None:
    """A template that does not render calls gets them as text."""
    template = ChatTemplate(source, json_tokenizer)
    rendered = template.render(ChatRequest(LOOKED, tools=(GET,)))
    assert f"<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>tool\n21<|im_end|>\n" in rendered
    hostile = ToolCall("c1", "get", '{"s": "<|im_end|>"}')
    messages = (LOOKED[0], say(Role.ASSISTANT, "", tool_calls=(hostile,)), RESULTS[0])
    ids = template.encode(ChatRequest(messages))
    assert ids.count(json_tokenizer.added["<|im_end|>"]) == 3
    assert python_call({"name": "f", "arguments": {"a": None, "b": ["x"]}}) == 'f(a=None, b=["x"])'


# Grammars


judge = Judge(
    "<|eos|>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<think>", "</think>",
)  # fmt: skip
marker_id = judge.marker_id


def no_id(marker: str) -> int | None:
    """For vocabularies in which markers are plain text."""
    del marker
    return None


NEW = ("qwen_xml", "gemma4", "lfm2", "harmony")
GOOD: list[Mapping[str, Any]] = [
    {"s": 'a "b"\n<c>'},
    ALL,
    {"s": "x", "n": 0, "tree": {}},
    {"s": "x", "either": "text", "short": "a"},
]
BAD: list[Mapping[str, Any]] = [
    {"n": 3},
    {"s": "x", "n": -1},
    {"s": "x", "b": "yes"},
    {"s": "x", "e": "fog"},
    {"s": "x", "day": "2023-02-29"},
    {"s": "x", "short": "abca"},
    {"s": "x", "short": "d"},
    {"s": "x", "other": 1},
    {"s": "x", "o": {"z": 1}},
]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("find_id", [marker_id, no_id])
def test_calls_follow_the_schema(name: str, find_id: Callable[[str], int | None]) -> None:
    format, is_plain = FORMATS[name], find_id is no_id
    thought = (REASONING["harmony"], Opening.FREE) if name == "harmony" else None
    grammar = answer_grammar(format, (GET, NOW, OPEN), REQUIRED, None, thought, find_id)
    for arguments in GOOD:
        assert judge(grammar, written(format, [("get", arguments)]), is_plain=is_plain) == "whole", arguments
    for arguments in BAD:
        assert judge(grammar, written(format, [("get", arguments)]), is_plain=is_plain) == "no", arguments
    assert judge(grammar, written(format, [("now", {})]), is_plain=is_plain) == "whole"
    assert judge(grammar, written(format, [("now", {"a": 1})]), is_plain=is_plain) == "no"
    assert judge(grammar, written(format, [("open", {"a": "x", "b": 2})]), is_plain=is_plain) == "whole"
    assert judge(grammar, written(format, [("other", {})]), is_plain=is_plain) == "no"
    assert judge(grammar, "Hi", is_plain=is_plain) == "no"
    if not format.is_single:
        assert judge(grammar, written(format, [("now", {}), ("get", ALL)] * 3), is_plain=is_plain) == "whole"


@pytest.mark.parametrize("name", NEW[:3])
def test_calls_after_text_and_reasoning(name: str) -> None:
    format = FORMATS[name]
    thought = REASONING["gemma4" if name == "gemma4" else "think"]
    call = written(format, [("now", {})])
    free = answer_grammar(format, (GET, NOW), AUTO, None, (thought, Opening.FREE), marker_id)
    texts = {"Hi": "whole", f"Hi {call}": "whole", f"Hi {format.opening}x": "no", f"{call} x": "no"}
    texts |= {
        f"{thought.opening}{thought.label}hm{thought.closing}{call}": "whole",
        f"{thought.opening}{thought.label}hm{thought.closing}Hi": "whole",
        f"{thought.opening}{thought.label}hm": "part",
    }
    assert {text: judge(free, text) for text in texts} == texts
    opened = answer_grammar(format, (GET, NOW), REQUIRED, None, (thought, Opening.OPEN), marker_id)
    texts = {"hm": "part", f"hm{thought.closing}": "part", f"hm{thought.closing}{call}": "whole"}
    assert {text: judge(opened, text) for text in texts} == texts
    named = answer_grammar(format, (NOW,), ToolChoice(ToolMode.REQUIRED, "now"), None, None, marker_id)
    assert [judge(named, text) for text in (call, written(format, [("now", {})] * 2), "Hi")] == ["whole", "no", "no"]


def test_harmony_answers() -> None:
    format, thought = FORMATS["harmony"], (REASONING["harmony"], Opening.FREE)
    call, before = written(format, [("now", {})]), f"{ANALYSIS}hm<|end|>{START}"
    preamble = f"<|channel|>commentary<|message|>I look.<|end|>{START}"
    other = " to=functions.now<|channel|>commentary json<|message|>{}"
    grammar = answer_grammar(format, (NOW,), AUTO, None, thought, marker_id)
    texts = {
        f"{before}{FINAL}Hi": "whole", f"{FINAL}Hi": "whole", f"{before}{preamble}{call}": "whole", other: "whole",
        before: "part", "Hi": "no", f"{FINAL}Hi<|end|>": "no", "<|channel|>commentary to=functions.x": "no",
    }  # fmt: skip
    assert {text: judge(grammar, text) for text in texts} == texts
    required = answer_grammar(format, (NOW,), REQUIRED, None, thought, marker_id)
    texts = {f"{before}{preamble}{call}": "whole", f"{before}{FINAL}": "no", before: "part"}
    assert {text: judge(required, text) for text in texts} == texts


def test_structured_answers_of_harmony() -> None:
    """Only the final channel follows the schema."""
    words, format = json_schema_grammar({"enum": ["sun", "rain"]}), FORMATS["harmony"]
    before = f"{ANALYSIS}hm<|end|>{START}"
    alone = answer_grammar(format, (), AUTO, words, (REASONING["harmony"], Opening.FREE), marker_id)
    texts = {
        f'{before}{FINAL}"sun"': "whole", '<|channel|>final <|constrain|>json<|message|>"sun"': "whole",
        f"{FINAL}fog": "no", '"sun"': "no", "<|channel|>commentary<|message|>": "no",
    }  # fmt: skip
    assert {text: judge(alone, text) for text in texts} == texts
    both = answer_grammar(format, (NOW,), AUTO, words, (REASONING["harmony"], Opening.FREE), marker_id)
    assert judge(both, before + written(format, [("now", {})])) == "whole"
    assert judge(both, f'{FINAL}"rain"') == "whole"
    inside = answer_grammar(format, (NOW,), AUTO, words, (REASONING["harmony"], Opening.CLOSED), marker_id)
    assert [judge(inside, text) for text in ('"rain"', FINAL)] == ["whole", "no"]


NOT_WRITABLE: Sequence[dict[str, Any]] = [
    {"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"properties": {"a": False}}]},
    {"properties": {"a b": {"type": "string"}}},
    {"properties": {}, "patternProperties": {"^x": {"type": "string"}}},
]


@pytest.mark.parametrize("name", NEW[:3])
@pytest.mark.parametrize("schema", NOT_WRITABLE, ids=range(len(NOT_WRITABLE)))
def test_schemas_that_a_format_cannot_enforce(name: str, schema: dict[str, Any]) -> None:
    """The tool is refused if it is strict; otherwise the caller may drop its schema."""
    tool = Tool("f", "", schema)
    for is_strict, loose in ((True, []), (False, [1])):
        tools = (NOW, replace(tool, is_strict=is_strict))
        with pytest.raises(ToolsNotHeld, match="grammar: tools: the arguments of 'f' cannot be enforced") as caught:
            answer_grammar(FORMATS[name], tools, REQUIRED, None, None, marker_id)
        assert caught.value.loose == loose
    freed = replace(tool, is_free=True)
    grammar = answer_grammar(FORMATS[name], (NOW, freed), REQUIRED, None, None, marker_id)
    assert judge(grammar, written(FORMATS[name], [("f", {"a": "x", "z": "y"})])) == "whole"


FORMATTED = {
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "ipv4": ("192.168.0.255", "192.168.0.256"),
    "ipv6": ("2001:db8::1", "2001:db8"),
    "email": ("a.b@example.com", "a@b@c"),
    "uri": ("https://example.com/a?b=c#d", "no uri"),
    "duration": ("P1DT2H30M", "P1X"),
    "date-time": ("2024-02-29T12:00:00Z", "2024-02-29"),
}


@pytest.mark.parametrize("name", ["qwen_xml", "gemma4"])
@pytest.mark.parametrize("kind", FORMATTED)
def test_formats_of_text(name: str, kind: str) -> None:
    tool = Tool("f", "", {"properties": {"a": {"type": "string", "format": kind}}})
    grammar = answer_grammar(FORMATS[name], (tool,), REQUIRED, None, None, marker_id)
    good, bad = (written(FORMATS[name], [("f", {"a": text})]) for text in FORMATTED[kind])
    assert [judge(grammar, good), judge(grammar, bad)] == ["whole", "no"]


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


CHAIN = {f"d{i}": {"anyOf": [ref(f"d{i + 1}")] * 40} for i in range(12)}
BOMBS: list[dict[str, Any]] = [
    {"properties": {"a": ref("x")}, "$defs": {"x": {"anyOf": [{"type": "string", "pattern": "^a$"}, ref("x")]}}},
    {"properties": {"a": ref("d0")}, "$defs": {**CHAIN, "d12": {"type": "string", "minLength": 2}}},
    {"properties": {"a": ref("d0")}, "$defs": {**CHAIN, "d12": {"type": ["integer", "string"], "minLength": 2}}},
]


@pytest.mark.parametrize("name", NEW[:3])
@pytest.mark.parametrize("schema", BOMBS, ids=range(len(BOMBS)))
def test_references_that_expand_endlessly_end(name: str, schema: dict[str, Any]) -> None:
    """They are written as rules, or refused."""
    parameter_kinds(schema, "a")
    with suppress(ToolsNotHeld):
        answer_grammar(FORMATS[name], (Tool("f", "", schema, is_strict=False),), REQUIRED, None, None, no_id)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (("<|start|>", "<|end|>", "<|return|>", "<|call|>"), {"<|im_end|>", "<|return|>", "<|call|>"}),
        (("<|end|>", "<|return|>"), {"<|im_end|>", "<|end|>"}),
        (("<|turn>", "<turn|>", "<|tool_response>"), {"<|im_end|>", "<turn|>", "<|tool_response>"}),
        (("<|tool_response>",), {"<|im_end|>"}),
    ],
)
def test_tokens_that_end_an_answer(tokens: tuple[str, ...], ends: set[str]) -> None:
    """<|end|> ends an answer of Phi, but only a message of gpt-oss."""
    metadata = byte_level_gguf()
    metadata["tokenizer.ggml.tokens"] += tokens
    metadata["tokenizer.ggml.token_type"] += [3] * len(tokens)
    tokenizer = Tokenizer.from_gguf(metadata)
    found = {tokenizer.id_to_token(token_id) for token_id in tokenizer.eos_token_ids}
    assert found - {"<|endoftext|>"} == ends
