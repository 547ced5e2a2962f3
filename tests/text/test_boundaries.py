"""Message boundaries: the tokens that start messages, and their positions in a prompt."""

from __future__ import annotations

import json

import pytest

from quire.text.chat_template import MAX_BOUNDARIES, ChatTemplate, find_boundaries
from quire.text.messages import ChatRequest, Role
from quire.text.tokenizer import Tokenizer
from tests.text.family_templates import GEMMA4, HARMONY, LFM2, QWEN35
from tests.text.test_tool_formats import say
from tests.text.tool_templates import HERMES, MISTRAL, PLAIN
from tests.text.vocabularies import byte_level_json

SPECIAL = (
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
        {"id": first + i, "content": content, "special": True, **flags} for i, content in enumerate(SPECIAL)
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
    template.close()


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
    template.close()


def test_boundaries_are_capped() -> None:
    tokens = [7, 1] * 100
    assert find_boundaries(tokens, (7,))[:5] == (2, 4, 6, 8, 80)
    assert find_boundaries(tokens, (7,))[-1] == 198
    assert len(find_boundaries(tuple(tokens), (7,))) == MAX_BOUNDARIES
    assert find_boundaries(tokens[: 2 * 65], (7,)) == tuple(range(2, 130, 2))
    assert find_boundaries([7, 7, 1, 7, 8, 2], (8, 7)) == (3, 4)  # ascending, whatever the order of the starters
    assert find_boundaries([7, 7, 1], ()) == find_boundaries([], (7,)) == find_boundaries([1, 2], (7,)) == ()
