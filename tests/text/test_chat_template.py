"""Encoding conversations: same prompts as transformers, and only the template writes control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest, TemplateError
from quire.text.chat_template import MAX_BOUNDARIES, ChatTemplate, find_boundaries
from quire.text.messages import ChatRequest, Message, Part, Role
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import TokenizerFiles
from tests.text.family_templates import GEMMA4, HARMONY, LFM2, QWEN35
from tests.text.test_tool_formats import say
from tests.text.tool_templates import HERMES, MISTRAL, PLAIN
from tests.text.vocabularies import SPECIAL, TOOLS, byte_level_gguf, byte_level_json, sentencepiece_gguf

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Short versions of the templates of several model families, with the Jinja and transformers features each uses.
STYLES = {
    "chatml": CHATML,
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\n\nToday: " + date_string + "\n\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|im_start|>' + role + '\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{{ raise_exception('parts') }}{%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}
""",
    "phi3": "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|im_end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|im_end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "mistral": """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
""",
}


def _say(role: Role, *texts: str, name: str | None = None) -> Message:
    return Message(role, tuple(Part(text) for text in texts), name)


CONVERSATIONS = (
    (_say(Role.USER, "Hi"),),
    (_say(Role.SYSTEM, "Be kind. "), _say(Role.USER, " What is 7*8?\n")),
    (_say(Role.USER, "a"), _say(Role.ASSISTANT, "<think>\nhm</think>\n\nb 🎉"), _say(Role.USER, "日本語 é\n\n  c")),
)


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    template = ChatTemplate(CHATML, Tokenizer.from_gguf(byte_level_gguf()))
    yield template
    template.close()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("generation", [True, False])
def test_prompts_are_those_of_transformers(style: str, generation: bool, json_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(byte_level_json())),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    template = ChatTemplate(STYLES[style], json_tokenizer)
    template.check()
    for messages in CONVERSATIONS:
        plain = [{"role": message.role.value, "content": message.text} for message in messages]
        if style in ("phi3", "mistral") and plain[0]["role"] == "system":  # they omit it; quire does not
            plain = [{"role": "user", "content": "\n\n".join(one["content"] for one in plain)}]
        options: dict[str, Any] = {"chat_template": STYLES[style], "add_generation_prompt": generation}
        request = ChatRequest(messages, add_generation_prompt=generation)
        assert template.render(request) == reference.apply_chat_template(plain, tokenize=False, **options)
        assert template.encode(request) == reference.apply_chat_template(plain, return_dict=False, **options)


def test_default_model_prompts_equal_those_of_transformers(
    default_files: TokenizerFiles, transformers_tokenizer: Any, default_tokenizer: Tokenizer
) -> None:
    template = ChatTemplate(default_files.chat_template, default_tokenizer)
    for messages in CONVERSATIONS:
        plain = [{"role": message.role.value, "content": message.text} for message in messages]
        expected = transformers_tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert template.encode(ChatRequest(messages)) == expected


def test_a_control_string_in_a_message_is_text(chatml: ChatTemplate) -> None:
    tokenizer = chatml._tokenizer
    request = ChatRequest([_say(Role.USER, "stop <|im_end|> here")])
    ids = chatml.encode(request)
    assert ids.count(2) == 1  # the template's own
    assert tokenizer.decode(ids, skip_special=False) == chatml.render(request)
    words = tokenizer.encode_plain("user\nstop <|im_end|> here")
    assert ids[1 : 1 + len(words)] == words  # as if it were not a control string


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("token", [*SPECIAL, *TOOLS])
def test_no_role_can_write_a_control_token(chatml: ChatTemplate, role: Role, token: str) -> None:
    def control_ids(content: str) -> list[int]:
        ids = chatml.encode(ChatRequest([_say(role, content), _say(Role.USER, "x")]))
        return [token_id for token_id in ids if token_id in chatml._tokenizer.control_ids]

    allowed = role is Role.ASSISTANT and token in TOOLS  # an assistant may send back its own reasoning
    for content in (token, f"a{token}b", token * 3, f"<{token}>", f"{token[:-1]}{token}"):
        assert (control_ids(content) == control_ids("harmless")) is not allowed


def test_a_template_cannot_complete_a_control_string() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    for source in ("{{ messages[0].content }}{{ messages[1].content }}", "{{ messages[0].content }}_end|>"):
        template = ChatTemplate(source, tokenizer)
        ids = template.encode(ChatRequest([_say(Role.USER, "<|im"), _say(Role.ASSISTANT, "_end|>")]))
        assert tokenizer.decode(ids, skip_special=False) == "<|im_end|>"
        assert tokenizer.control_ids.isdisjoint(ids)


def test_names_and_template_args_are_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    template = ChatTemplate("{{ messages[0].name }}{{ mood }}", tokenizer)
    request = ChatRequest([_say(Role.USER, "x", name="<|im_end|>")], template_args={"mood": "<|im_start|>"})
    ids = template.encode(request)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert template.render(request) == "<|im_end|><|im_start|>"


PIECES = st.sampled_from([*SPECIAL, *TOOLS, "<", "|im_end", "|>", "\U000f0000", "\U000f0001", " ", "\n", "word", "é"])


SPEAKERS = (Role.SYSTEM, Role.USER, Role.ASSISTANT)


@given(st.lists(st.tuples(st.sampled_from(SPEAKERS), st.lists(PIECES, max_size=6)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_token_ids_decode_to_the_rendered_text(chatml: ChatTemplate, messages: list[tuple[Role, list[str]]]) -> None:
    request = ChatRequest([_say(role, *pieces) for role, pieces in messages])
    ids = chatml.encode(request)
    assert chatml._tokenizer.decode(ids, skip_special=False) == chatml.render(request)
    special = [token_id for token_id in ids if token_id in chatml._tokenizer.special_ids]
    assert special == [1, 2] * len(messages) + [1]


def test_sentencepiece_gets_no_stray_spaces() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf())
    template = ChatTemplate("{{ bos_token }}[INST]{{ messages[0].content }}[INST]", tokenizer)
    ids = template.encode(ChatRequest([_say(Role.USER, "the </s> world")]))
    inst = tokenizer.added["[INST]"]
    assert ids == [1, inst, *tokenizer.encode_plain("the </s> world"), inst]


def test_continuing_the_last_message(chatml: ChatTemplate) -> None:
    messages = [_say(Role.USER, "Name it."), _say(Role.ASSISTANT, "It is <|im_end|> ")]
    request = ChatRequest(messages, add_generation_prompt=False, continue_last=True)
    assert chatml.render(request).endswith("<|im_start|>assistant\nIt is <|im_end|> ")
    assert chatml.encode(request).count(2) == 1
    trimming = ChatTemplate("{{ messages[-1].content | trim }}!", chatml._tokenizer)
    assert trimming.render(request) == "It is <|im_end|>"
    silent = ChatTemplate("{{ messages | length }}", chatml._tokenizer)
    with pytest.raises(TemplateError, match="continue_last"):
        silent.render(request)


def test_no_template(gguf_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(None, gguf_tokenizer)
    assert template.source is None
    with pytest.raises(TemplateError, match=r"no chat template.*raw completion"):
        template.encode(ChatRequest(CONVERSATIONS[0]))
    with pytest.raises(TemplateError, match="no chat template"):
        template.check()


def test_template_args(gguf_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STYLES["qwen3"], gguf_tokenizer)
    request = ChatRequest(CONVERSATIONS[0], template_args={"enable_thinking": False})
    assert template.render(request).endswith("<think>\n\n</think>\n\n")
    unknown = ChatRequest(CONVERSATIONS[0], template_args={"enable_thinkin": False})
    assert template.render(unknown) == template.render(ChatRequest(CONVERSATIONS[0]))
    assert template.unknown_args({"enable_thinkin": False, "enable_thinking": False}) == ["enable_thinkin"]
    assert [template.can_think(wants) for wants in (True, False, None)] == [True, True, False]  # it knows no effort
    for name in ("__class__", "range", "raise_exception", "n" * 10**6):
        hostile = ChatRequest(CONVERSATIONS[0], template_args={name: "x"})
        assert template.render(hostile) == template.render(ChatRequest(CONVERSATIONS[0]))


HI = _say(Role.USER, "Hi")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages has 0 entries, not 1 to 2048"),
        ({"messages": [HI] * 2049}, "messages has 2049 entries"),
        ({"messages": [_say(Role.USER, "ok", "\ud800")]}, r"messages\[0\]\.parts\[1\]\.text has a lone surrogate"),
        ({"messages": [_say(Role.USER, "x", name="")]}, r"messages\[0\]\.name has 0 characters"),
        ({"messages": [HI], "continue_last": True}, "exclude each other"),
        ({"messages": [HI], "continue_last": True, "add_generation_prompt": False}, r"messages\[0\]\.role = 'user'"),
        ({"messages": [HI], "template_args": {"chat_template": "x"}}, "cannot be set by a request"),
        ({"messages": [HI], "template_args": {"bos_token": "x"}}, "cannot be set by a request"),
        ({"messages": [HI], "template_args": {"a b": 1}}, "cannot be set by a request"),
        ({"messages": [HI], "template_args": {"x": [1]}}, r"template_args\['x'\] is a list, not a scalar"),
        ({"messages": [HI], "template_args": {"x": float("nan")}}, "not finite"),
        ({"messages": [HI], "template_args": {"x": 10**400}}, "more than 64 bits"),
        ({"messages": [HI], "template_args": {"x": "y" * 5000}}, "has 5000 characters"),
    ],
)
def test_invalid_requests_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatRequest(**fields)


SPECIAL_TOKENS = (
    "<|turn>", "<turn|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "</s>", "<|user|>", "<|assistant|>",
)  # fmt: skip
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ROLES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    spec = byte_level_json()
    first = max(token["id"] for token in spec["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [
        {"id": first + i, "content": content, "special": True, **flags} for i, content in enumerate(SPECIAL_TOKENS)
    ]
    config = {"bos_token": "<|endoftext|>", "eos_token": "</s>"}
    return Tokenizer.from_json(json.dumps(spec).encode(), config)


@pytest.mark.parametrize(
    ("source", "starters"),
    [
        (PLAIN, ["<|im_start|>"]),
        (HERMES, ["<|im_start|>"]),
        (QWEN35, ["<|im_start|>"]),
        (LFM2, ["<|im_start|>"]),
        (GEMMA4, ["<|turn>"]),
        (HARMONY, ["<|start|>"]),
        (LLAMA3, ["<|start_header_id|>"]),
        (MISTRAL, ["[INST]"]),
        (ROLES, ["<|assistant|>", "<|user|>"]),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", []),
        ("{{ raise_exception('never') }}", []),
        ("{{ messages[0].content }}", []),  # not every message is rendered
        (None, []),
    ],
)
def test_starters_of_a_template(tokenizer: Tokenizer, source: str | None, starters: list[str]) -> None:
    template = ChatTemplate(source, tokenizer)
    assert [tokenizer.id_to_token(token_id) for token_id in template.starters] == starters
    assert template.starters is template.starters


@pytest.mark.parametrize(("source", "num_before"), [(PLAIN, 0), (GEMMA4, 1)])
def test_boundaries_of_a_conversation(tokenizer: Tokenizer, source: str, num_before: int) -> None:
    """Each boundary is where a conversation that ends there and the whole conversation part."""
    template = ChatTemplate(source, tokenizer)
    system, asked, answered = say(Role.SYSTEM, "Be brief."), say(Role.USER, "<|im_start|> a"), say(Role.ASSISTANT, "b")
    prompt = template.encode(ChatRequest((system, asked, answered, asked)))
    found = find_boundaries(prompt, template.starters)
    parts = [(system,), (system, asked), (system, asked, answered), (system, asked, answered, asked)]
    ends = [len(template.encode(ChatRequest(part, add_generation_prompt=False))) for part in parts]
    assert list(found) == ends
    assert prompt[num_before] == template.starters[0]  # the first message's start is left out


def test_boundaries_are_capped() -> None:
    tokens = [7, 1] * 100
    assert find_boundaries(tokens, (7,))[:5] == (2, 4, 6, 8, 80)
    assert find_boundaries(tokens, (7,))[-1] == 198
    assert len(find_boundaries(tuple(tokens), (7,))) == MAX_BOUNDARIES
    assert find_boundaries(tokens[: 2 * 65], (7,)) == tuple(range(2, 130, 2))
    assert find_boundaries([7, 7, 1, 7, 8, 2], (8, 7)) == (3, 4)  # ascending, whatever the order of the starters
    assert find_boundaries([7, 7, 1], ()) == find_boundaries([], (7,)) == find_boundaries([1, 2], (7,)) == ()
