"""Conversations adapted to strict templates: no text is lost and none is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.server.protocols.anthropic import MessagesRequest, conversation
from quire.server.protocols.responses import ResponsesRequest, parse_responses
from quire.text.chat_template import STRICTEST, ChatTemplate, TurnRules, is_plain, merge_turns, template_tool
from quire.text.messages import ChatRequest, Message, Part, Role, Tool, ToolCall, ToolChoice, ToolMode
from quire.text.template_worker import environment
from quire.text.tokenizer import Tokenizer
from tests.text.test_chat_template import STYLES
from tests.text.tool_templates import TEMPLATES

_ALTERNATE = """{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
{%- endfor %}"""
# The requirements of several model families.
STRICT = {
    # Gemma 2: no system turn at all.
    "no system": "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system role') }}{%- endif %}"
    "{%- set turns = messages %}" + _ALTERNATE + "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}",
    # Gemma 3, Llama 2: one system turn at the start, then user and assistant alternate.
    "alternating": "{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    + _ALTERNATE
    + "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{- '<|im_end|>' }}{%- endfor %}",
    # Mistral: calls and results come between the turns; the system text is part of the last user turn.
    "mistral": "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{%- set ns = namespace(index=0) %}{%- for message in rest %}"
    "{%- if message['role'] == 'user' or (message['role'] == 'assistant' and message.tool_calls is not defined) %}"
    "{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{- raise_exception('After the optional system message, conversation roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{%- for message in rest %}{%- if message['role'] == 'user' %}"
    "{%- if tools is not none %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message['content'] + '[/INST]' }}"
    "{%- elif message.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{{- call.function | tojson }}{%- endfor %}{{- ']' }}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
    "{%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS] ' + message['content'] + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported') }}{%- endif %}{%- endfor %}",
    # Phi 3 and others: a system turn is silently omitted.
    "silent": STYLES["phi3"],
    # Qwen 3.5, DeepSeek: a late system turn is refused or omitted.
    "first system only": "{%- for message in messages %}{%- if message['role'] == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}",
}
RULES = {
    "no system": TurnRules(False, True, False, False, True),
    "alternating": TurnRules(True, True, False, False, True),
    "mistral": TurnRules(True, False, False, False, False, True),
    "silent": TurnRules(False, True, False, True, True),
    "first system only": TurnRules(True, True, False, True, True),
}
GOLDEN = sorted((Path(__file__).parents[1] / "server" / "golden").glob("*.json"))


def say(role: str, text: str = "", *calls: ToolCall, of: str | None = None) -> Message:
    return Message(Role(role), (Part(text),) if text else (), None, "", calls, of)


def call(call_id: str) -> ToolCall:
    return ToolCall(call_id, "look", '{"at": "it"}')


SYSTEM, FIRST, ANSWER, LAST = say("system", "s1"), say("user", "u1"), say("assistant", "a1"), say("user", "u2")
CALLED = [FIRST, say("assistant", "", call("c1")), say("tool", "r1", of="c1")]
TALKS = {
    "two questions": [FIRST, LAST],
    "two answers": [FIRST, ANSWER, say("assistant", "a2"), LAST],
    "two systems": [SYSTEM, say("system", "s2"), FIRST],
    "a late system": [SYSTEM, FIRST, ANSWER, LAST, say("system", "s2")],
    "a system in between": [FIRST, say("system", "s1"), ANSWER, LAST],
    "only a late one": [FIRST, say("system", "s1")],
    "a result": [SYSTEM, *CALLED],
    "a question after a result": [SYSTEM, *CALLED, LAST],
    "a system after a result": [*CALLED, SYSTEM],
    "two rounds": [SYSTEM, *CALLED, say("assistant", "", call("c2")), say("tool", "r2", of="c2"), LAST, ANSWER, LAST],
}


SOURCES = {
    **{f"strict {name}": text for name, text in STRICT.items()},
    **{f"tools {name}": text for name, text in TEMPLATES.items()},
    **{f"style {name}": text for name, text in STYLES.items()},
}


@pytest.fixture(scope="module", params=sorted(SOURCES))
def template(request: pytest.FixtureRequest, gguf_tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    made = ChatTemplate(SOURCES[request.param], gguf_tokenizer)
    yield made
    made.close()


@pytest.mark.parametrize("name", STRICT)
def test_the_rules_of_a_template_are_found(name: str, gguf_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STRICT[name], gguf_tokenizer)
    template.render(ChatRequest([SYSTEM, FIRST]))
    assert template._turn_rules == RULES[name]


def test_a_permissive_template_gets_conversations_unchanged(gguf_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STYLES["chatml"], gguf_tokenizer)
    for talk in (TALKS["two questions"], TALKS["two answers"], TALKS["two systems"], TALKS["a late system"]):
        expected = "".join(f"<|im_start|>{one.role.value}\n{one.text}<|im_end|>\n" for one in talk)
        assert template.render(ChatRequest(talk, add_generation_prompt=False)) == expected


SECOND = [LAST, say("assistant", "", call("c2"), call("c3")), say("tool", "r2", of="c2"), say("tool", "r3", of="c3")]
THIRD = [say("user", "u3"), say("assistant", "", call("c4")), say("tool", "r4", of="c4")]
# With the number of the last user turn, which gets the system text.
ROUNDS = {
    "a question": ([FIRST], 0),
    "a result": (CALLED, 0),
    "an answer to a result": ([*CALLED, ANSWER], 0),
    "a question after one round": ([*CALLED, ANSWER, LAST], 4),
    "two rounds": ([*CALLED, ANSWER, *SECOND], 4),
    "a round after a plain answer": ([FIRST, ANSWER, *THIRD], 2),
    "two calls in a row": ([*CALLED, say("assistant", "", call("c5")), say("tool", "r5", of="c5")], 0),
    "three rounds": ([*CALLED, ANSWER, *SECOND, ANSWER, *THIRD, ANSWER, LAST], 13),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_system_text_is_where_the_template_puts_it(name: str, gguf_tokenizer: Tokenizer) -> None:
    turns, last_user = ROUNDS[name]
    template = ChatTemplate(STRICT["mistral"], gguf_tokenizer)
    tools = (Tool("look"),)
    rendered = template.render(ChatRequest([SYSTEM, *turns], tools=tools))
    start = directly(gguf_tokenizer, [SYSTEM, *turns[: last_user + 1]], tools)
    assert "[INST] s1\n\nu" in start
    assert rendered.startswith(start)  # a round of calls continues the prompt of its question
    placed = [*turns[:last_user], say("user", f"s1\n\n{turns[last_user].text}"), *turns[last_user + 1 :]]
    assert rendered == directly(gguf_tokenizer, placed, tools)
    if turns[-1].role is Role.USER:
        assert rendered == directly(gguf_tokenizer, [SYSTEM, *turns], tools)


def directly(gguf_tokenizer: Tokenizer, turns: list[Message], tools: tuple[Tool, ...]) -> str:
    """The turns as Jinja renders them with the template, without quire."""
    entries: list[dict[str, Any]] = []
    for turn in turns:
        entries.append({"role": turn.role.value, "content": turn.text})
        if turn.tool_calls:
            functions = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in turn.tool_calls]
            entries[-1]["tool_calls"] = [{"function": function} for function in functions]
    shown = [template_tool(tool) for tool in tools]
    made = environment().from_string(STRICT["mistral"])
    return made.render(messages=entries, tools=shown, **gguf_tokenizer.special_tokens)


@pytest.mark.parametrize("name", TALKS)
def test_nothing_is_refused_and_nothing_is_lost(name: str, template: ChatTemplate) -> None:
    tools = (Tool("look"),) if any(message.tool_calls for message in TALKS[name]) else ()
    rendered = template.render(ChatRequest(TALKS[name], tools=tools))
    at = 0
    for message in TALKS[name]:
        if message.role is not Role.SYSTEM and message.text:
            at = rendered.index(message.text, at)  # in the original order
        assert message.text in rendered
    assert all(tool.name in rendered for tool in tools)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_recorded_agent_requests_are_rendered(path: Path, template: ChatTemplate) -> None:
    chat = chat_of(json.loads(path.read_text()))
    rendered = template.render(chat)
    missing = [part.text for message in chat.messages for part in message.parts if _plain(part.text) not in rendered]
    assert not [text for text in missing if json.dumps(_plain(text))[1:-1] not in rendered]  # or as JSON
    assert all(tool.name in rendered for tool in chat.tools)


def _plain(text: str) -> str:
    return text.strip()


def chat_of(recorded: dict[str, Any]) -> ChatRequest:
    body = json.dumps(recorded["body"])
    if recorded["path"].startswith("/v1/messages"):
        return conversation(msgspec.json.decode(body, type=MessagesRequest)).chat
    (chat,) = parse_responses(msgspec.json.decode(body, type=ResponsesRequest)).prompts
    assert isinstance(chat, ChatRequest)
    return chat


def test_tools_are_described_in_the_first_user_turn_without_system_turns(gguf_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STRICT["no system"], gguf_tokenizer)
    rendered = template.render(ChatRequest([FIRST], tools=(Tool("look", "Looks."),)))
    assert rendered.startswith("<|im_start|>user\nYou can use these tools")
    assert '"name": "look"' in rendered
    assert rendered.endswith("\n\nu1<|im_end|>\n<|im_start|>model\n")
    hidden = ChatRequest([FIRST], tools=(Tool("look"),), tool_choice=ToolChoice(ToolMode.NONE))
    assert template.render(hidden) == "<|im_start|>user\nu1<|im_end|>\n<|im_start|>model\n"


def test_a_refused_reasoning_effort_is_dropped(gguf_tokenizer: Tokenizer) -> None:
    source = (
        "{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
        "{{- raise_exception('reasoning_effort error') }}{%- endif %}"
        "{{- '<' + (reasoning_effort or 'none') + '>' }}"
        "{%- for message in messages %}{{- message.content }}{%- endfor %}"
    )
    template = ChatTemplate(source, gguf_tokenizer)
    assert template.render(ChatRequest([FIRST], reasoning_effort="low")) == "<low>u1"
    assert template.render(ChatRequest([FIRST], reasoning_effort="medium")) == "<none>u1"


def test_merge_turns() -> None:
    late = say("system", "s2")
    assert merge_turns([SYSTEM, late, FIRST], TurnRules(takes_late_system=False)) == [
        Message(Role.SYSTEM, (Part("s1"), Part("\n\n"), Part("s2"))),
        FIRST,
    ]
    assert merge_turns([FIRST, late, LAST], TurnRules(takes_late_system=False)) == [
        Message(Role.USER, (Part("u1"), Part("\n\n"), Part("s2"), Part("\n\n"), Part("u2")))
    ]
    joined = merge_turns([SYSTEM, *CALLED, LAST], STRICTEST)
    assert [message.role.value for message in joined] == ["user", "assistant", "tool"]
    assert joined[-1].text == "r1\n\nu2"
    answers = [FIRST, say("assistant", "a1"), say("assistant", "a2", call("c1"))]
    assert [message.text for message in merge_turns(answers, STRICTEST)] == ["u1", "a1a2"]
    assert merge_turns(TALKS["two rounds"], TurnRules()) == TALKS["two rounds"]
    assert is_plain([FIRST, ANSWER, LAST])
    assert not any(is_plain(talk) for talk in TALKS.values())
