"""Masks equal those of llguidance, the model's best allowed token is chosen, and no answer is shortened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest

from quire.core.values import FinishReason
from quire.engine import grammars as grammars_module
from quire.engine.generation import MAX_LOGPROBS, Completion, GenerationParams
from quire.engine.grammars import Grammars
from quire.engine.llm import LLM
from quire.engine.masks import Matcher
from quire.text.grammar import json_schema_grammar
from quire.text.messages import Tool, ToolChoice, ToolMode
from quire.text.reasoning import REASONING_FORMATS, Opening
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import TOOL_FORMATS, Syntax, ToolFormat
from quire.text.tool_grammars import answer_grammar
from tests.text.written_calls import START, written

STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # docs/structured.md
BOOLEANS = {"type": "array", "items": {"type": "boolean"}}
NODE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["children"],
}


class Vocabulary:
    """The default model's vocabulary, with quire's grammars and with llguidance alone."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.grammars = Grammars(lambda: (tokenizer, eos_token_ids), tokenizer.vocab_size)
        adapter = grammars_module.VocabularyAdapter(tokenizer, eos_token_ids, tokenizer.vocab_size)
        wrapper = llguidance.TokenizerWrapper(adapter)
        self._library = llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=list(eos_token_ids))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_plain(text, at_start=False)

    def of_schema(self, schema: Mapping[str, Any]) -> llguidance.LLMatcher:
        return self._matcher(llguidance.LLMatcher.grammar_from_json_schema(dict(schema), overrides=STYLE))

    def of_lark(self, source: str) -> llguidance.LLMatcher:
        return self._matcher(llguidance.LLMatcher.grammar_from_lark(source))

    def _matcher(self, source: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._library, source, log_level=0)


@pytest.fixture(scope="module")
def vocabulary(default_model: Path) -> Iterator[Vocabulary]:
    made = Vocabulary(*grammars_module.open_tokenizer(default_model, "auto"))
    yield made
    made.grammars.close()


def is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def compare(matcher: Matcher, alone: llguidance.LLMatcher, tokens: Sequence[int]) -> None:
    """Check that both allow the same tokens at every position, including the given one."""
    for place, token in enumerate(tokens):
        mask = alone.compute_bitmask()
        assert mask.startswith(matcher.mask()), f"the masks differ after {place} tokens"  # llguidance pads its own
        assert is_allowed(mask, token), f"token {place} of the text is outside the grammar"
        assert alone.consume_token(token)
        assert matcher.consume(token) == alone.is_stopped()
    if not alone.is_stopped():
        assert alone.compute_bitmask().startswith(matcher.mask())


def exactly(count: int, items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": count, "maxItems": count}


JSON: dict[str, tuple[dict[str, Any], str]] = {
    "100 booleans": (exactly(100, {"type": "boolean"}), "[" + "false, " * 99 + "false]"),
    "200 zeros": (exactly(200, {"type": "integer"}), "[" + "0, " * 199 + "0]"),
    "an open array of booleans": (BOOLEANS, "[" + "false, " * 150 + "false]"),
    "an open array of records": (
        {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
        "[" + '{"name": "the name"}, ' * 40 + "{}]",
    ),
    "base64 with padding": ({"type": "string"}, '"' + "A" * 400 + '=="'),
    "base64 by a pattern": ({"type": "string", "pattern": "^[A-Za-z0-9+/]*={0,2}$"}, '"' + "A" * 400 + '=="'),
    "a rule of dashes": ({"type": "string", "minLength": 200}, '"' + "-" * 300 + '"'),
    "escaped quotes": ({"type": "string"}, '"' + '\\"' * 150 + '"'),
    "a long integer": ({"type": "integer"}, "7" * 80),
    "a long fraction": ({"type": "number"}, "0." + "3" * 80),
    "a large exponent": ({"type": "number"}, "1.5e308"),
    "a long exponent": ({"type": "array", "items": {"type": "number"}}, "[1E-00012, 1e+4000]"),
    "nested arrays": ({"type": "array"}, "[" * 150 + "]" * 150),
    "a deep tree": (NODE, '{"children": [' * 30 + "]}" * 30),
    "any object": ({"type": "object"}, '{"a": [' + "null, " * 60 + 'null], "a": ' + "1" * 40 + "}"),
    "an e-mail address": ({"type": "string", "format": "email"}, '"' + "-12" * 21 + '@example.com"'),
    "a time": ({"type": "string", "format": "time"}, '"12:34:56.' + "1" * 30 + 'Z"'),
    "a date-time": ({"type": "string", "format": "date-time"}, '"2026-01-23T12:34:56.' + "1" * 30 + 'Z"'),
}


@pytest.mark.parametrize(("schema", "text"), JSON.values(), ids=JSON)
def test_masks_of_a_schema_are_those_of_llguidance(vocabulary: Vocabulary, schema: dict[str, Any], text: str) -> None:
    grammar = json_schema_grammar(schema)
    matcher = vocabulary.grammars.compile(grammar).matcher()
    compare(matcher, vocabulary.of_schema(json.loads(grammar.source)), vocabulary.encode(text))


SAY = Tool(
    "say",
    "",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "at": {"type": "string", "format": "time"}, "flags": BOOLEANS},
        "required": ["text"],
    },
)
CALLS = {
    "a word over and over": ('{"text": "' + "ha " * 100 + '"}', 1),
    "100 booleans": ('{"text": "", "flags": [' + "false, " * 99 + "false]}", 1),
    "a time": ('{"text": "", "at": "12:34:56.' + "1" * 30 + 'Z"}', 1),
    "the same call over and over": ('{"text": "ha"}', 40),
}
REASONING = {row.name: row for row in REASONING_FORMATS}
THOUGHT = 'Hm. I "could <tool_call> ' + "ha " * 100 + "</think>\n"


@pytest.mark.parametrize(("arguments", "count"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_masks_of_a_call_are_those_of_llguidance(
    vocabulary: Vocabulary, format: ToolFormat, mode: ToolMode, arguments: str, count: int
) -> None:
    thought, before = (REASONING_FORMATS[0], Opening.OPEN), THOUGHT
    if format.syntax is Syntax.HARMONY:
        thought = REASONING[format.name], Opening.FREE
        before = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{START}"
    grammar = answer_grammar(format, (SAY,), ToolChoice(mode), None, thought, lambda _marker: None)
    assert grammar is not None
    matcher = vocabulary.grammars.compile(grammar).matcher()
    text = before + written(format, [("say", json.loads(arguments))] * (1 if format.is_single else count))
    compare(matcher, vocabulary.of_lark(grammar.source), vocabulary.encode(text))


# The choice within a mask


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    with LLM(default_model, num_blocks=200) as llm:
        yield llm


def num_best_tokens(vocabulary: Vocabulary, schema: Mapping[str, Any], completion: Completion) -> int:
    """How often the model's best token was allowed.

    Fails if a token is not the most probable one that llguidance allows. Only the best `MAX_LOGPROBS` are known.
    """
    alone, count = vocabulary.of_schema(schema), 0
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        mask = alone.compute_bitmask()
        best = next((other for other in entry.top if is_allowed(mask, other.token_id)), None)
        if best is not None:
            problem = f"token {place} is {entry.text!r} ({entry.logprob:.2f}), not {best.text!r} ({best.logprob:.2f})"
            assert entry.token_id == best.token_id, problem
        count += entry.token_id == entry.top[0].token_id
        assert alone.consume_token(entry.token_id)
    return count


FALSE = "Write a JSON array that holds the value false one hundred times: [false, false, false, false, ...]"
ZEROS = "Write a JSON array of 200 zeros: [0, 0, 0, 0, 0, 0, ...]"
REPETITIVE: dict[str, tuple[str, dict[str, Any], list[Any] | None]] = {
    "100 booleans": (FALSE, exactly(100, {"type": "boolean"}), [False] * 100),
    "200 zeros": (ZEROS, exactly(200, {"type": "integer", "minimum": 0, "maximum": 9}), [0] * 200),
    "an open array of booleans": (FALSE, BOOLEANS, None),
}


@pytest.mark.parametrize(("question", "schema", "expected"), REPETITIVE.values(), ids=REPETITIVE)
@pytest.mark.kept("open array")
def test_the_best_allowed_token_of_the_real_model_is_chosen(
    vocabulary: Vocabulary, llm: LLM, question: str, schema: dict[str, Any], expected: list[Any] | None
) -> None:
    """`expected`: the answer the model prefers by a wide margin. None: the model does not close the array."""
    max_tokens = 800 if expected else 120
    params = GenerationParams(
        grammar=json_schema_grammar(schema), temperature=0, max_tokens=max_tokens, logprobs=MAX_LOGPROBS
    )
    (completion,) = llm.chat(question, params)[0].completions
    assert num_best_tokens(vocabulary, schema, completion) > len(completion.token_ids) // 2
    if expected is None:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == max_tokens
    else:
        assert completion.finish_reason is FinishReason.STOP
        assert json.loads(completion.text) == expected


# Endless answers

ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "an array": ({"type": "array", "items": {"const": 0}}, "0,"),
    "a string": ({"type": "string"}, "a"),
    "an integer": ({"type": "integer"}, "1"),
    "arrays in arrays": ({"type": "array"}, "["),
    "the scheme of an address": ({"type": "string", "format": "uri"}, "a"),
}
