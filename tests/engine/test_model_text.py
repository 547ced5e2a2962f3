"""ModelText: parser, grammar and reasoning tokens of an answer, depending on the template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.generation import EngineOutput, Generation, GenerationParams
from quire.engine.model_text import ModelText
from quire.text.chat_template import ChatTemplate, find_boundaries
from quire.text.grammar import json_object_grammar
from quire.text.messages import (
    CallStart,
    ChatRequest,
    Message,
    Part,
    PlainAnswer,
    Role,
    Thought,
    Tool,
    ToolChoice,
    ToolMode,
    Words,
)
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import CallParser
from quire.weights.config import spec_from_config
from quire.weights.spec import GenerationDefaults, ShortConvSpec
from tests.text.family_templates import GEMMA4, HARMONY, QWEN35
from tests.text.tool_templates import HERMES, MISTRAL, PLAIN
from tests.text.vocabularies import byte_level_json

HI = (Message(Role.USER, (Part("Hi"),)),)
TOOLS = (Tool("now"),)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2,
}  # fmt: skip


class Made:
    """Creates models with a given template."""

    def __init__(self) -> None:
        self.texts: list[ModelText] = []

    def __call__(self, template: str, *special: str) -> ModelText:
        spec = byte_level_json()
        first = max(token["id"] for token in spec["added_tokens"]) + 1
        spec["added_tokens"] += [added(first + i, content) for i, content in enumerate(special)]
        tokenizer = Tokenizer.from_json(json.dumps(spec).encode(), {"eos_token": "<|im_end|>"})
        facts = spec_from_config(CONFIG, {}, "tiny", "F32")
        made = ModelText("tiny", facts, GenerationDefaults(), tokenizer, ChatTemplate(template, tokenizer))
        self.texts.append(made)
        return made


def added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


@pytest.fixture
def make() -> Iterator[Made]:
    made = Made()
    yield made
    for text in made.texts:
        text.close()


def prompt_of(text: ModelText, chat: ChatRequest) -> tuple[int, ...]:
    return text.encode_chat(chat, 512)


def pieces_of(text: ModelText, chat: ChatRequest, answer: Sequence[int]) -> list[object]:
    """Parse an answer token by token, as a server does."""
    request = text.request(prompt_of(text, chat), GenerationParams(), chat=chat)
    generation = Generation(request, text.tokenizer)
    parser = text.new_parser(chat, request.prompt.tokens)
    pieces: list[object] = []
    for token in answer:
        pieces += parser.push(generation.push(0, EngineOutput(0, (token,), None, 0, None, (), None, None)).text)
    return [*pieces, *parser.finish()]


def test_a_plain_model_has_plain_answers(make: Made) -> None:
    text = make(PLAIN)
    chat = ChatRequest(HI)
    prompt = prompt_of(text, chat)
    assert isinstance(text.new_parser(chat, prompt), PlainAnswer)
    assert isinstance(text.new_parser(None, prompt), PlainAnswer)
    assert text.num_thought_tokens(chat, prompt, (1, 2, 3)) == 0
    assert text.request(prompt, GenerationParams(), chat=chat).grammar is None
    shaped = GenerationParams(grammar=json_object_grammar())
    assert text.request(prompt, shaped, chat=chat).grammar == shaped.grammar
    none = ChatRequest(HI, tools=TOOLS, tool_choice=ToolChoice(ToolMode.NONE))
    assert isinstance(text.new_parser(none, prompt_of(text, none)), PlainAnswer)
    assert text.request(prompt, GenerationParams(), chat=none).grammar is None


def test_tools_add_a_parser_and_a_grammar(make: Made) -> None:
    text = make(PLAIN)
    chat = ChatRequest(HI, tools=TOOLS)
    request = text.request(prompt_of(text, chat), GenerationParams(), chat=chat)
    assert isinstance(text.new_parser(chat, request.prompt.tokens), CallParser)
    assert request.grammar is not None
    assert "<[" in request.grammar.source  # <tool_call> is a token of this vocabulary, so its id is used
    assert f"<[{text.tokenizer.added['<tool_call>']}]>" in request.grammar.source


def test_a_marker_that_is_a_special_token_reaches_the_parser(make: Made) -> None:
    text = make(MISTRAL, "[TOOL_CALLS]")
    marker = text.tokenizer.added["[TOOL_CALLS]"]
    assert marker in text.tokenizer.special_ids
    chat = ChatRequest(HI, tools=TOOLS)
    answer = [
        *text.tokenizer.encode_plain("Well."),
        marker,
        *text.tokenizer.encode_plain('[{"name": "now", "arguments": {}}]'),
    ]
    found = pieces_of(text, chat, answer)
    assert [piece.name for piece in found if isinstance(piece, CallStart)] == ["now"]
    assert "".join(piece.text for piece in found if isinstance(piece, Words)) == "Well."
    assert text.request(prompt_of(text, chat), GenerationParams()).shown_special == frozenset()


SEED = HERMES.replace("think>", "seed:think>")


@pytest.mark.parametrize(("template", "special"), [(HERMES, ()), (SEED, ("<seed:think>", "</seed:think>"))])
def test_reasoning_tokens_are_counted(make: Made, template: str, special: tuple[str, ...]) -> None:
    """With markers that are special tokens, and with ordinary added tokens."""
    text = make(template, *special)
    format = text.template.reasoning
    assert format is not None
    opening, closing = text.tokenizer.added[format.opening], text.tokenizer.added[format.closing]
    assert (opening in text.tokenizer.special_ids) is bool(special)
    chat = ChatRequest(HI)
    prompt = prompt_of(text, chat)
    thought, words = text.tokenizer.encode_plain("\nlet me see\n"), text.tokenizer.encode_plain("\n\nHello there")
    answer = [opening, *thought, closing, *words]
    assert text.num_thought_tokens(chat, prompt, answer) == len(thought) + 2
    assert text.num_thought_tokens(chat, prompt, answer[:3]) == 3  # cut off
    assert text.num_thought_tokens(chat, prompt, words) == 0
    found = pieces_of(text, chat, answer)
    assert "".join(piece.text for piece in found if isinstance(piece, Thought)) == "let me see"
    assert "".join(piece.text for piece in found if isinstance(piece, Words)) == "Hello there"


def test_continued_messages_inside_and_after_reasoning(make: Made) -> None:
    text = make(HERMES)
    for prefix, is_thought in (
        ("<think>\nI am", True),
        ("<think>\nso\n</think>\n\nIt is", False),
        ("It is", False),
    ):
        messages = (*HI, Message(Role.ASSISTANT, (Part(prefix),)))
        chat = ChatRequest(messages, add_generation_prompt=False, continue_last=True)
        (piece, *_) = pieces_of(text, chat, text.tokenizer.encode_plain("sure"))
        assert isinstance(piece, Thought) is is_thought


# Qwen3.5, Gemma 4, gpt-oss

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")


def ids_of(text: ModelText, answer: str) -> list[int]:
    """The tokens of an answer as a model writes it, with control tokens."""
    return list(text.tokenizer.encode(answer, add_special=False))


def shown(pieces: Sequence[object]) -> list[tuple[str, str]]:
    """The pieces, joined by kind."""
    found: list[tuple[str, str]] = []
    for piece in pieces:
        kind = type(piece).__name__
        value = piece.name if isinstance(piece, CallStart) else str(getattr(piece, "text", ""))
        if found and found[-1][0] == kind:
            value = found.pop()[1] + value
        found.append((kind, value))
    return found


def test_channels_of_gpt_oss(make: Made) -> None:
    """All of its markers are special tokens, which are hidden from text unless the parser needs them."""
    text = make(HARMONY, *HARMONY_TOKENS)
    assert text.eos_token_ids[1:] == tuple(text.tokenizer.added[name] for name in ("<|return|>", "<|call|>"))
    chat = ChatRequest(HI)
    thought = "<|channel|>analysis<|message|>let me see<|end|><|start|>assistant"
    answer = ids_of(text, f"{thought}<|channel|>final<|message|>Hello")
    assert shown(pieces_of(text, chat, answer)) == [("Thought", "let me see"), ("Words", "Hello")]
    num_thought = len(ids_of(text, thought.removesuffix("<|end|><|start|>assistant")))
    assert text.num_thought_tokens(chat, prompt_of(text, chat), answer) == num_thought
    assert text.num_thought_tokens(chat, prompt_of(text, chat), ids_of(text, "<|channel|>final<|message|>Hi")) == 0
    tools = ChatRequest(HI, tools=TOOLS)
    call = ids_of(text, f"{thought}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>")
    found = shown(pieces_of(text, tools, call))
    assert found == [("Thought", "let me see"), ("CallStart", "now"), ("CallArguments", "{}")]
    grammar = text.request(prompt_of(text, tools), GenerationParams(), chat=tools).grammar
    assert grammar is not None
    assert "functions.now" in grammar.source
    shaped = text.request(prompt_of(text, chat), GenerationParams(grammar=json_object_grammar()), chat=chat).grammar
    assert shaped is not None
    assert "start: thought* final" in shaped.source
    assert text.request(prompt_of(text, chat), GenerationParams(), chat=chat).grammar is None
    messages = (*HI, Message(Role.ASSISTANT, (Part("It is"),)))
    continued = ChatRequest(messages, add_generation_prompt=False, continue_last=True)
    assert text.template.render(continued).endswith("<|channel|>final<|message|>It is")
    assert shown(pieces_of(text, continued, ids_of(text, " warm"))) == [("Words", " warm")]


def test_calls_of_gemma(make: Made) -> None:
    special = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
    text = make(GEMMA4, *special, "<|tool_response>")
    assert {text.tokenizer.added[name] for name in ("<turn|>", "<|tool_response>")} <= set(text.eos_token_ids)
    tool = Tool("get", "", {"properties": {"city": {"type": "string"}}})
    for chat, before, expected in (
        (ChatRequest(HI, tools=(tool,)), "", []),
        (
            ChatRequest(HI, tools=(tool,), wants_thought=True),
            "<|channel>thought\nhm<channel|>",
            [("Thought", "hm")],
        ),
    ):
        answer = ids_of(text, before + '<|tool_call>call:get{city:<|"|>Oslo<|"|>}<tool_call|>')
        found = shown(pieces_of(text, chat, answer))
        assert found == [*expected, ("CallStart", "get"), ("CallArguments", '{"city": "Oslo"}')]
        assert find_boundaries(prompt_of(text, chat), text.template.starters) != ()


def test_thinking_of_qwen35(make: Made) -> None:
    text = make(QWEN35)
    tool = Tool("get", "", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    call = "<tool_call>\n<function=get>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    call += "</function>\n</tool_call>"
    arguments = [("CallStart", "get"), ("CallArguments", '{"city": "Oslo", "days": 3}')]
    on, off = (ChatRequest(HI, tools=(tool,), wants_thought=wants) for wants in (None, False))
    assert shown(pieces_of(text, on, ids_of(text, f"hm\n</think>\n\n{call}"))) == [("Thought", "hm"), *arguments]
    assert shown(pieces_of(text, off, ids_of(text, call))) == arguments
    assert text.num_thought_tokens(on, prompt_of(text, on), ids_of(text, "hm\n</think>\n\nHi")) > 0
    assert text.num_thought_tokens(off, prompt_of(text, off), ids_of(text, "Hi")) == 0
    prompt = prompt_of(text, on)
    (asked, answer) = find_boundaries(prompt, text.template.starters)
    assert text.request(prompt, GenerationParams(), chat=on).boundaries == ()  # not needed without states or windows
    short_conv = replace(text.spec.layers[0], mixer=ShortConvSpec(3))
    spec = replace(text.spec, layers=(short_conv, *text.spec.layers[1:]))
    hybrid = ModelText("tiny", spec, GenerationDefaults(), text.tokenizer, text.template)
    assert hybrid.request(prompt, GenerationParams(), chat=on).boundaries == (asked, answer)
    assert hybrid.request(prompt, GenerationParams()).boundaries == ()
    assert text.tokenizer.decode(prompt[answer:], skip_special=False) == "<|im_start|>assistant\n<think>\n"
    assert text.tokenizer.decode(prompt[asked:answer], skip_special=False) == "<|im_start|>user\nHi<|im_end|>\n"
